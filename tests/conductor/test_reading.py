from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from loraledger import events as ev
from loraledger.conductor.compact import compact
from loraledger.conductor.conductor import Conductor
from loraledger.conductor.fold import FoldState, RowFold, encode_fold
from loraledger.conductor.reading import Segment, fold_segment, last_state, open_record, verify
from loraledger.errors import InputFileError
from loraledger.kernel.settings import SECOND
from loraledger.record.frames import HEADER, Kind, read_segment, segments
from loraledger.record.journal import Journal
from loraledger.record.reader import RecordReader
from loraledger.record.tables import Row, TableName
from loraledger.replay.fleet.virtual import VirtualFleet
from replay.fleets import adapters, settings_for, virtual, zipf_trace

from .desk import T0, Desk, settings_of

SEGMENT = 80 * 1024
"""The conductor turns to the next segment when half of one is full."""
REQUESTS = 500
TABLES: tuple[TableName, ...] = ("requests", "decisions", "residency", "samples")
CHECKS: list[ev.Command] = [ev.Check("r1")]
CHECK = ev.encode(CHECKS)
"""An answer that no kernel gives to what these tests ask."""


class Recorded(NamedTuple):
    """A run whose journal is kept: the directory is copied by each test that changes it."""

    directory: Path
    fleet: VirtualFleet


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    directory = tmp_path_factory.mktemp("journal")
    fleet = virtual(settings_for(3, adapters(16)), start=T0)
    with Journal.open(directory, SEGMENT, fleet.conductor.head) as journal:
        fleet.conductor.journal = journal
        fleet.run(zipf_trace(REQUESTS, 16, 100, seed=2, base_share=0.1), until=T0 + 4 * SECOND)
    assert len(segments(directory)) >= 4
    assert fleet.conductor.fleet.state.requests, "some requests are open at the end"
    return Recorded(directory, fleet)


@pytest.fixture
def copy(recorded: Recorded, tmp_path: Path) -> Path:
    """A directory with the recorded journal that a test may change."""
    for path in segments(recorded.directory):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def requests_of(rows: list[tuple[TableName, Row]]) -> list[str]:
    return [str(row["id"]) for table, row in rows if table == "requests"]


def arrived_in(directory: Path) -> list[str]:
    """The requests whose arrival is whole in the journal."""
    events = [
        ev.decode_event(frame.payload)
        for path in segments(directory)
        for frame in read_segment(path)
        if frame.kind == Kind.EVENT
    ]
    return [event.request for event in events if isinstance(event, ev.RequestArrived)]


# --- verify -----------------------------------------------------------------------------------------------------------


def test_another_process_with_another_hash_seed_answers_every_journalled_event_alike(recorded: Recorded) -> None:
    program = (
        "import sys; from pathlib import Path; from loraledger.conductor.reading import verify\n"
        "seen = verify(Path(sys.argv[1])); print(seen.segments, seen.steps, seen.commands, seen.unanswered, seen.difference)"
    )
    here = verify(recorded.directory)
    assert here.difference is None
    assert here.unanswered == 0
    assert here.segments == len(segments(recorded.directory))
    assert here.commands > 300
    for hash_seed in ("0", "4242"):
        there = subprocess.run(
            [sys.executable, "-c", program, str(recorded.directory)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert there.stdout.split() == [
            *map(str, (here.segments, here.steps, here.commands, here.unanswered)),
            "None",
        ]


def test_an_answer_that_is_not_the_kernels_is_found_and_shown(tmp_path: Path) -> None:
    desk = Desk(settings_of(2))
    event = ev.RequestArrived(T0, "q1", "acme", None, 10, 10, True, "/v1")
    with Journal.open(tmp_path, 1 << 20, desk.conductor.head) as journal:
        journal.append(Kind.EVENT, ev.encode(event))
        journal.append(Kind.COMMANDS, CHECK)
        journal.append(Kind.EVENT, ev.encode(ev.Wake(T0)))
    found = verify(tmp_path).difference
    assert found is not None
    assert found.segment == segments(tmp_path)[0].name
    frame = next(frame for frame in read_segment(segments(tmp_path)[0]) if frame.kind == Kind.EVENT)
    assert (found.offset, found.event) == (frame.offset, repr(event))
    assert "Check" in found.journalled
    assert "Dispatch" in found.replayed


def test_an_answer_that_a_crash_cut_off_is_no_difference(tmp_path: Path) -> None:
    desk = Desk(settings_of(2))
    with Journal.open(tmp_path, 1 << 20, desk.conductor.head) as journal:
        journal.append(Kind.EVENT, ev.encode(ev.RequestArrived(T0, "q1", "acme", None, 10, 10, True, "/v1")))
    seen = verify(tmp_path)
    assert (seen.steps, seen.unanswered, seen.difference) == (1, 1, None)


def test_an_answer_where_the_kernel_gives_none_is_a_difference(tmp_path: Path) -> None:
    desk = Desk(settings_of(2))
    with Journal.open(tmp_path, 1 << 20, desk.conductor.head) as journal:
        journal.append(Kind.EVENT, ev.encode(ev.Wake(T0)))
        journal.append(Kind.COMMANDS, CHECK)
    assert verify(tmp_path).difference is not None


# --- continuing -------------------------------------------------------------------------------------------------------


def test_the_last_state_is_the_state_of_the_process_that_stopped(recorded: Recorded) -> None:
    restored = last_state(recorded.directory)
    assert restored is not None
    kernel, fold = restored
    conductor = recorded.fleet.conductor
    assert kernel.snapshot() == conductor.fleet.snapshot()
    assert encode_fold(fold) == encode_fold(conductor.fold.state)


def test_every_segment_begins_where_the_one_before_ended(recorded: Recorded) -> None:
    paths = segments(recorded.directory)
    for before, after in pairwise(paths):
        segment = Segment(before)
        fleet = segment.fleet()
        for step in segment.steps():
            fleet.step(ev.decode_event(step.event))
        _, fold = fold_segment(Segment(before))
        assert fleet.snapshot() == Segment(after).head.kernel
        assert encode_fold(fold.state) == Segment(after).head.fold


def test_an_empty_directory_has_no_last_state(tmp_path: Path) -> None:
    assert last_state(tmp_path) is None
    assert last_state(tmp_path / "missing") is None


def test_a_segment_that_was_only_just_begun_leaves_the_state_to_the_one_before(copy: Path) -> None:
    before = last_state(copy)
    assert before is not None
    (copy / "journal-00000099.log").write_bytes(bytes(4096))
    after = last_state(copy)
    assert after is not None
    assert after[0].snapshot() == before[0].snapshot()


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal-00000001.log"
    path.write_bytes(b"not a journal")
    with pytest.raises(InputFileError, match="head is missing or damaged"):
        Segment(path)
    payload = b"\x01garbage"
    with Journal.open(tmp_path / "b", 1 << 16, lambda: (payload, payload)):
        pass
    with pytest.raises(InputFileError, match="not a journal of this version"):
        Segment(segments(tmp_path / "b")[0])


def take_over(directory: Path) -> list[tuple[TableName, Row]]:
    """A new gateway process continues from the journal; the rows that it emits at its start."""
    restored = last_state(directory)
    assert restored is not None
    kernel, fold = restored
    rows: list[tuple[TableName, Row]] = []

    class Nobody:
        def perform(self, command: ev.Command) -> None:
            raise AssertionError(f"nothing is to be done at the start: {command}")

    now = kernel.state.now + 1
    conductor = Conductor(kernel, RowFold(fold), Nobody(), lambda: now, rows.extend, lambda at: None)
    with Journal.open(directory, SEGMENT, conductor.head) as journal:
        conductor.journal = journal
        conductor.feed(ev.GatewayStarted(now, "10.0", "c2"))
    return rows


def test_a_journal_cut_anywhere_still_has_a_row_for_every_request_that_arrived(
    recorded: Recorded, tmp_path: Path
) -> None:
    rng = random.Random(11)
    *whole, last = segments(recorded.directory)
    content = last.read_bytes()
    earlier = {name for path in whole for name in requests_of(fold_segment(Segment(path))[0])}
    head = sum(HEADER.size + len(frame.payload) for frame, _ in zip(read_segment(last), range(2), strict=False))
    for number, cut in enumerate(
        [head, head + 1, len(content) - 1, *(rng.randrange(head, len(content)) for _ in range(21))]
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        for path in whole:
            (directory / path.name).hardlink_to(path)
        garbage = rng.randbytes(40) if number % 3 == 0 else bytes(number)
        (directory / last.name).write_bytes(content[:cut] + garbage)
        rows, fold = fold_segment(Segment(directory / last.name))
        closed = requests_of(rows)
        crashed = requests_of(take_over(directory))
        assert sorted(crashed) == sorted(fold.state.open)
        assert Counter([*earlier, *closed, *crashed]) == Counter(arrived_in(directory))
        assert verify(directory).difference is None


# --- compaction -------------------------------------------------------------------------------------------------------


def test_compaction_gives_one_row_for_each_request_and_makes_room(copy: Path) -> None:
    everything = arrived_in(copy)
    take_over(copy)
    *closed, newest = segments(copy)
    assert compact(copy) == closed
    assert segments(copy) == [newest]
    tail: dict[TableName, list[Row]] = {}
    rows, fold = fold_segment(Segment(newest))
    for table, row in [*rows, *fold.open_rows()]:
        tail.setdefault(table, []).append(row)
    with RecordReader(copy, tail, [newest.stem]) as reader:
        ids = [str(row["id"]) for row in reader.rows("requests")]
        assert Counter(ids) == Counter(everything)
        statuses = Counter(str(row["status"]) for row in reader.rows("requests"))
        assert set(statuses) == {"ok", "gateway_crashed"}
        assert statuses["gateway_crashed"] > 0
        answered = reader.query("SELECT count(*) AS n FROM requests r JOIN decisions d USING (decision_id)")
        assert answered[0]["n"] == len([row for row in reader.rows("requests") if row["decision_id"] is not None])


def test_the_rows_are_those_that_the_process_itself_wrote(recorded: Recorded, copy: Path) -> None:
    take_over(copy)
    compact(copy)
    with RecordReader(copy) as reader:
        for table in TABLES:
            known = reader.rows(table)
            live = recorded.fleet.rows[table]
            shown = [{name: row.get(name) for name in known[0]} for row in live]
            # What the process did before its journal was attached is not in it.
            extra = [row for row in shown if row not in known]
            assert len(known) + len(extra) == len(shown)
            assert all(int(str(row.get("at_ns") or row.get("arrived_ns"))) == T0 for row in extra)


def test_a_compaction_that_is_done_again_gives_no_row_twice(copy: Path) -> None:
    take_over(copy)
    kept = {path.name: path.read_bytes() for path in segments(copy)}
    compact(copy)
    with RecordReader(copy) as reader:
        first = {name: reader.rows(name) for name in TABLES}
    for name, content in kept.items():  # it was killed before it could delete them
        (copy / name).write_bytes(content)
    compact(copy)
    with RecordReader(copy) as reader:
        for name, rows in first.items():
            again = reader.rows(name)
            assert sorted(map(repr, again)) == sorted(map(repr, rows))


def test_a_segment_without_a_head_is_set_aside(copy: Path) -> None:
    damaged = segments(copy)[0]
    damaged.write_bytes(bytes(4096))
    done = compact(copy)
    assert damaged not in done
    assert [path.name for path in copy.iterdir() if path.name.startswith(damaged.name)] == [f"{damaged.name}.damaged"]


def test_a_segment_that_is_damaged_in_the_middle_is_told_and_kept(copy: Path) -> None:
    whole = len(requests_of(fold_segment(Segment(segments(copy)[1]))[0]))
    path = segments(copy)[1]
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 0xFF
    path.write_bytes(data)
    found = verify(copy)
    assert (found.difference, found.torn) == (None, 1)
    some = len(requests_of(fold_segment(Segment(path))[0]))
    assert 0 < some < whole
    compact(copy)
    assert not path.exists()
    assert path.with_name(f"{path.name}.damaged").read_bytes() == data, (
        "what lies behind the damage may be saved by hand"
    )


def test_an_event_of_another_version_is_refused_with_its_place(copy: Path) -> None:
    head = list(read_segment(segments(copy)[-1]))[:2]
    with Journal.open(copy, SEGMENT, lambda: (head[0].payload, head[1].payload)) as journal:
        journal.append(Kind.EVENT, b"\x92\xa7Martian\x05")
    for read in (last_state, verify, open_record):
        with pytest.raises(InputFileError, match="an event of another version"):
            read(copy)


def test_compaction_runs_as_a_process_of_its_own(copy: Path) -> None:
    take_over(copy)
    newest = segments(copy)[-1]
    subprocess.run([sys.executable, "-m", "loraledger.conductor.compact", str(copy)], check=True)
    assert segments(copy) == [newest]
    with RecordReader(copy) as reader:
        before = len(reader.rows("requests"))
    assert before > REQUESTS / 2
    subprocess.run([sys.executable, "-m", "loraledger.conductor.compact", str(copy), "--keep-ns", "1"], check=True)
    with RecordReader(copy) as reader:
        assert reader.rows("requests") == []


def test_the_whole_record_is_what_was_compacted_and_what_the_journal_holds_beyond(copy: Path) -> None:
    everything = arrived_in(copy)
    with open_record(copy) as record:
        before = Counter(str(row["id"]) for row in record.rows("requests"))
        assert {row["status"] for row in record.rows("requests")} == {"ok", "gateway_crashed"}
    take_over(copy)
    compact(copy)
    with open_record(copy) as record:
        after = Counter(str(row["id"]) for row in record.rows("requests"))
    assert before == after == Counter(everything)
    with pytest.raises(InputFileError, match="there is no record"):
        open_record(copy / "missing")


def test_a_request_is_open_and_not_crashed_while_a_process_still_writes(tmp_path: Path) -> None:
    desk = Desk(settings_of(1))
    with Journal.open(tmp_path, SEGMENT, desk.conductor.head) as journal:
        desk.conductor.journal = journal
        desk.arrive("q1")
        with open_record(tmp_path) as record:
            assert [row["status"] for row in record.rows("requests")] == [None]
        desk.conductor.journal = None
    with open_record(tmp_path) as record:
        assert [row["status"] for row in record.rows("requests")] == ["gateway_crashed"]


def test_folding_a_segment_needs_no_kernel_and_no_other_segment(recorded: Recorded, tmp_path: Path) -> None:
    paths = segments(recorded.directory)
    alone = tmp_path / paths[2].name
    alone.write_bytes(paths[2].read_bytes())
    assert fold_segment(Segment(alone))[0] == fold_segment(Segment(paths[2]))[0]
    assert isinstance(fold_segment(Segment(alone))[1].state, FoldState)


def test_a_step_that_raises_is_not_met_again_by_the_next_process(tmp_path: Path) -> None:
    desk = Desk(settings_of(1, 1))
    with Journal.open(tmp_path, SEGMENT, desk.conductor.head) as journal:
        desk.conductor.journal = journal
        desk.arrive("q1")
        with pytest.raises(KeyError):
            desk.feed(ev.RequestArrived(desk.now, "q9", "nobody", None, 1, 1, False, "/v1"))
        desk.arrive("q2")
        desk.conductor.journal = None
    found = last_state(tmp_path)
    assert found is not None
    assert {"q1", "q2"} <= set(found[0].state.requests)
    assert set(found[1].open) == {"q1", "q9", "q2"}, "the request whose step failed is still owed a row"
