from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loraledger.errors import ConfigError, InputFileError
from loraledger.operate.journal import FILE, ChangeJournal, lasting, read_entries

from .changes import change


def test_what_was_written_is_there_for_the_next_process(tmp_path: Path) -> None:
    with ChangeJournal(tmp_path / "changes") as journal:
        journal.append(1, "propose", "ann", "hits", change())
        journal.append(
            2, "replay", "ann", "played", change().step("replay", 2, "played"), {"run": "x", "hit_rate": [0.5, 0.7]}
        )
    with ChangeJournal(tmp_path / "changes") as journal:
        assert [entry.kind for entry in journal.entries] == ["propose", "replay"]
        assert journal.entries[1].evidence == {"run": "x", "hit_rate": [0.5, 0.7]}
        assert journal.changes["c1"].state == "replayed"
        assert journal.append(3, "withdraw", "bob", "no", change()).n == 3


def test_what_lasts_was_accepted_is_live_and_not_settled_by_the_file(tmp_path: Path) -> None:
    ended = [
        change(id="c1", state="accepted", ended_ns=5),
        change(id="c2", state="accepted", ended_ns=4),
        change(id="c3", state="rolled_back", ended_ns=3),
        change(id="c4", state="accepted", ended_ns=2, variable="slots", before=2, after=4),
        change(id="c5", state="accepted", ended_ns=1),
    ]
    with ChangeJournal(tmp_path) as journal:
        for one in ended:
            journal.append(one.ended_ns or 0, "accept", "gateway", "better", one)
        journal.append(
            6, "accept", "gateway", "the settings say so too", ended[-1], {"settled": "the settings say so too"}
        )
        found = lasting(journal.entries)
    assert {variable: [one.id for one in changes] for variable, changes in found.items()} == {"policy": ["c2", "c1"]}


def test_a_journal_that_does_not_exist_has_no_entries(tmp_path: Path) -> None:
    assert read_entries(tmp_path) == []


def test_one_process_writes(tmp_path: Path) -> None:
    with ChangeJournal(tmp_path), pytest.raises(ConfigError, match="another process writes"):
        ChangeJournal(tmp_path)
    ChangeJournal(tmp_path).close()


def test_a_last_line_that_was_being_written_is_passed_over_and_cut_off(tmp_path: Path) -> None:
    with ChangeJournal(tmp_path) as journal:
        journal.append(1, "propose", "ann", "hits", change())
    path = tmp_path / FILE
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        assert len(read_entries(tmp_path)) == 1
    with ChangeJournal(tmp_path) as journal:
        journal.append(2, "withdraw", "ann", "no", change())
    assert [entry.kind for entry in read_entries(tmp_path)] == ["propose", "withdraw"]


def test_damage_before_the_last_line_is_an_error_and_never_skipped(tmp_path: Path) -> None:
    with ChangeJournal(tmp_path) as journal:
        for at in range(3):
            journal.append(at, "propose", "ann", "hits", change(id=f"c{at}"))
    path = tmp_path / FILE
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    flipped = lines[0].replace(b'"why":"hits"', b'"why":"hitz"')
    assert flipped != lines[0]
    for damaged in (flipped + b"".join(lines[1:]), lines[0] + b"junk\n" + lines[2], b"\n" + whole):
        path.write_bytes(damaged)
        with pytest.raises(InputFileError, match=r"line \d is damaged"):
            read_entries(tmp_path)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(InputFileError, match="entries are missing"):
        read_entries(tmp_path)


def test_a_full_disk_leaves_nothing_of_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChangeJournal(tmp_path) as journal:
        journal.append(1, "propose", "ann", "hits", change())
        before = (tmp_path / FILE).read_bytes()
        real = os.write
        monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[: len(data) // 2]))
        with pytest.raises(OSError, match="a part of an entry"):
            journal.append(2, "withdraw", "ann", "no", change())
        monkeypatch.undo()
        assert (tmp_path / FILE).read_bytes() == before
        assert len(journal.entries) == 1
        assert journal.append(2, "withdraw", "ann", "no", change()).n == 2


def test_an_entry_is_on_the_disk_before_its_writer_goes_on(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.operate.changes import change
from loraledger.operate.journal import ChangeJournal
journal = ChangeJournal(Path({str(tmp_path)!r}))
for n in range(20):
    journal.append(n, "propose", "ann", "hits", change(id=f"c{{n}}"))
    print(n, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(read_entries(tmp_path)) == len(done.stdout.split()) == 20
