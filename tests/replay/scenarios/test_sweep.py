from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from loraledger.errors import InputFileError
from loraledger.record.reader import RecordReader
from loraledger.replay.fleet.outcome import RUN_FILE, Outcome
from loraledger.replay.fleet.run import Progress
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.scenarios import sweep as sweeping
from loraledger.replay.scenarios.sweep import Job, identity, play, sweep
from loraledger.replay.scenarios.unfit import Unfit
from loraledger.replay.traces.trace import MAX_TOKENS, Adapter, Header, Request, write_trace
from replay.fleets import PROFILE, adapters, settings_for, zipf_trace


class Seen:
    """What a watcher is told."""

    def __init__(self) -> None:
        self.progress: dict[int, Progress] = {}
        self.outcomes: dict[int, Outcome] = {}

    def moved(self, index: int, progress: Progress) -> None:
        self.progress[index] = progress

    def ended(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome


def trace_file(tmp_path: Path, requests: list[Request], number: int = 6) -> Path:
    header = Header(
        name="t", source="a test", licence="", adapters=tuple(Adapter(f"a{n}", 16, 20 << 20) for n in range(number))
    )
    write_trace(tmp_path / "t.jsonl", header, enumerate(requests, 2))
    return tmp_path / "t.jsonl"


def job(tmp_path: Path, label: str, trace: Path, policy: str = "bounded-affinity", **fields: object) -> Job:
    settings = settings_for(2, adapters(6), policy)
    scenario = Scenario(label=label, settings=settings, profiles={spec.name: PROFILE for spec in settings.replicas})
    plain = Job(
        scenario=scenario,
        trace=trace,
        directory=tmp_path / label,
        identity="sha256:1",
        requests=200,
        max_tokens=MAX_TOKENS,
    )
    return msgspec.structs.replace(plain, **fields)


def faster(one: Job, speed: tuple[int, int]) -> Job:
    return msgspec.structs.replace(one, scenario=msgspec.structs.replace(one.scenario, speed=speed))


def comparable(outcome: Outcome) -> Outcome:
    return msgspec.structs.replace(outcome, wall_s=None)


def record_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.parquet"))}


def test_runs_are_the_same_in_this_process_and_in_several(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, zipf_trace(200, 6, 20))
    names = ("round-robin", "bounded-affinity", "least-loaded")
    alone, pooled = ([job(tmp_path / where, name, trace, name) for name in names] for where in ("alone", "pooled"))
    for where in ("alone", "pooled"):
        (tmp_path / where).mkdir()
    seen = Seen()
    first, second = sweep(alone, 1, seen), sweep(pooled, 2, Seen())
    assert [outcome.label for outcome in first] == list(names)
    assert list(map(comparable, first)) == list(map(comparable, second))
    assert list(seen.outcomes.values()) == first
    for ours, theirs in zip(alone, pooled, strict=True):
        assert record_bytes(ours.directory) == record_bytes(theirs.directory) != {}
    assert {path.name for path in (tmp_path / "pooled").iterdir()} == set(names)
    assert multiprocessing.active_children() == []


def test_a_pool_tells_how_runs_get_on(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, zipf_trace(20_000, 6, 20))  # seconds long: the board is read five times in each
    seen = Seen()
    sweep([job(tmp_path, name, trace, requests=20_000) for name in ("one", "two")], 2, seen)
    assert set(seen.outcomes) == {0, 1}
    assert set(seen.progress) == {0, 1}
    for progress in seen.progress.values():
        assert (
            0 <= progress.requests <= progress.arrived <= 20_000
        )  # the last that was seen may be the first that was told
        assert progress.total == 20_000
        assert progress.simulated_ns > 0


def test_a_board_place_holds_a_progress(tmp_path: Path) -> None:
    for progress in (Progress(5, 4, 3, None, 2.5, None), Progress(5, 4, 3, 9, 2.5, 0.0, writing=True)):
        total = -1 if progress.total is None else progress.total
        left = -1 if progress.left_s is None else progress.left_s
        packed = sweeping._PLACE.pack(5, 4, 3, total, 2.5, left, 1 + progress.writing)
        assert sweeping._progress(*sweeping._PLACE.unpack(packed)) == progress
    assert sweeping._progress(*sweeping._PLACE.unpack(bytes(sweeping._PLACE.size))) is None


def test_speed_divides_arrival_times_exactly(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, [Request(at, "acme", None, 10, 1) for at in (0, 300, 3_000_000_001)])
    one = faster(job(tmp_path, "fast", trace), (3, 2))
    play(one, lambda _: None)
    with RecordReader(one.directory / "record") as reader:
        rows = reader.query("FROM requests SELECT arrived_ns - min(arrived_ns) OVER () AS at ORDER BY arrived_ns")
    assert [row["at"] for row in rows] == [0, 200, 2_000_000_000]


def test_what_is_unfit_is_left_out_and_counted_beside_bad_rows(tmp_path: Path) -> None:
    requests = [
        Request(n, "acme", name, tokens, 1)
        for n, (name, tokens) in enumerate([("a0", 9), ("a1", 9), (None, 99), (None, 9)])
    ]
    trace = trace_file(tmp_path, requests)
    with trace.open("ab") as file:
        file.write(b"no request\n")
    one = job(tmp_path, "some", trace, unfit=Unfit(frozenset({"a1"}), 50), skip_bad=True)
    outcome = play(one, lambda _: None)
    assert outcome.requests == 2
    assert outcome.dropped == {"adapter larger than a slot": 1, "larger than all KV": 1, "not a request": 1}


def test_a_trace_that_is_not_played_as_it_is_has_another_name() -> None:
    assert identity("sha256:1", (1, 1), Unfit()) == "sha256:1"
    names = {
        identity("sha256:1", speed, unfit)
        for speed in ((1, 1), (2, 1), (4, 3))
        for unfit in (Unfit(), Unfit(frozenset({"a"})), Unfit(frozenset({"a", "b"}), 7), Unfit(frozenset(), 8))
    }
    assert len(names) == 12
    assert identity("sha256:1", (2, 1), Unfit(frozenset({"b", "a"}), 7)) == "sha256:1 speed=2/1 tokens<=7 without=a,b"


def test_a_run_replaces_an_earlier_one_of_its_name_and_nothing_else(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, zipf_trace(20, 6, 20))
    one = job(tmp_path, "one", trace)
    play(one, lambda _: None)
    before = (one.directory / RUN_FILE).stat().st_ino
    play(one, lambda _: None)
    assert (one.directory / RUN_FILE).stat().st_ino != before
    assert {path.name for path in one.directory.iterdir()} == {"record", RUN_FILE}
    (one.directory / "notes.txt").write_text("mine")
    with pytest.raises(InputFileError, match=r"notes\.txt is no part of a run and would be lost"):
        play(one, lambda _: None)
    assert (one.directory / "notes.txt").read_text() == "mine"
    (tmp_path / "link").symlink_to(one.directory)
    with pytest.raises(InputFileError, match="link is there and is no run"):
        play(job(tmp_path, "link", trace), lambda _: None)
    other = job(tmp_path, "thesis", trace)
    other.directory.mkdir()
    (other.directory / "thesis.tex").write_text("years")
    with pytest.raises(InputFileError, match="is there and is no run"):
        play(other, lambda _: None)
    assert (other.directory / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_error_of_one_run_ends_all_and_leaves_nothing_half_done(tmp_path: Path, at_once: int) -> None:
    trace = trace_file(tmp_path, [*zipf_trace(20, 6, 20), Request(10**12, "stranger", None, 1, 1)])
    earlier = job(tmp_path, "two", trace_file(tmp_path / "..", zipf_trace(5, 6, 20)))
    play(earlier, lambda _: None)
    with pytest.raises(InputFileError, match="tenant 'stranger'"):
        sweep([job(tmp_path, name, trace) for name in ("one", "two", "three")], at_once, Seen())
    assert {path.name for path in tmp_path.iterdir()} == {"t.jsonl", "two"}
    assert multiprocessing.active_children() == []


def test_an_interrupt_ends_the_processes_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, zipf_trace(20_000, 6, 20))
    names = ("one", "two")
    timer = threading.Thread(target=_interrupt_once_begun, args=(tmp_path, names))
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs inherit that it is ignored
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            sweep([job(tmp_path, name, trace) for name in names], 2, Seen())
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]
    assert multiprocessing.active_children() == []


def _wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _interrupt_once_begun(folder: Path, names: tuple[str, ...]) -> None:
    _wait_for(lambda: all((folder / f".{name}.partial").exists() for name in names))
    os.kill(os.getpid(), signal.SIGINT)


def test_a_process_that_dies_is_reported(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, zipf_trace(20_000, 6, 20))

    class Killer(Seen):
        def moved(self, index: int, progress: Progress) -> None:
            for child in multiprocessing.active_children():
                child.kill()

    with pytest.raises(InputFileError, match=r"its process was ended from outside.*--jobs"):
        sweep([job(tmp_path, name, trace) for name in ("one", "two")], 2, Killer())
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_the_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    trace_file(tmp_path, zipf_trace(20_000, 6, 20))
    program = (
        "from pathlib import Path; from replay.scenarios import test_sweep as t\n"
        "if __name__ == '__main__':\n"
        " folder = Path.cwd(); jobs = [t.job(folder, name, folder / 't.jsonl') for name in ('one', 'two')]\n"
        " t.sweep(jobs, 2, t.Seen())\n"
    )
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, env=environment, start_new_session=True)
    _wait_for(lambda: all((tmp_path / f".{name}.partial").exists() for name in ("one", "two")))
    parent.kill()
    parent.wait()
    _wait_for(lambda: not _running(parent.pid))


def _running(session: int) -> list[str]:
    """Processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, owner = path.read_text().rpartition(") ")[2].split()[:4]
            if int(owner) == session and state != "Z":
                found.append(path.parent.name)
    return found
