from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraledger.errors import InternalError
from loraledger.record.duck import BATCH_ROWS
from loraledger.record.parquet import partitions, write_parquet
from loraledger.record.reader import RecordReader
from loraledger.record.tables import Row

from .rows import HOUR, NOON, decision, request


def ids(directory: Path) -> list[object]:
    with RecordReader(directory) as reader:
        return [row["id"] for row in reader.query("SELECT id FROM requests ORDER BY arrived_ns, id")]


def everything(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_rows_go_to_the_hour_of_their_own_time(tmp_path: Path) -> None:
    rows = [request(1, NOON), request(3, NOON + HOUR), request(2, NOON + HOUR - 1), request(4, NOON + 12 * HOUR)]
    written = write_parquet({"requests": rows, "decisions": [decision(1, "req-1")]}, tmp_path, "journal-00000001")
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [
        "requests/date=2026-09-21/hour=12/journal-00000001.parquet",
        "requests/date=2026-09-21/hour=13/journal-00000001.parquet",
        "requests/date=2026-09-22/hour=00/journal-00000001.parquet",
        "decisions/date=2026-09-21/hour=12/journal-00000001.parquet",
    ]
    assert ids(tmp_path) == ["req-1", "req-2", "req-3", "req-4"]


def test_nothing_but_partitions_is_left_behind(tmp_path: Path) -> None:
    written = write_parquet({"requests": [request(1)], "samples": []}, tmp_path, "a")
    assert list(everything(tmp_path)) == written


def test_writing_a_label_again_replaces_its_files_and_leaves_those_of_others(tmp_path: Path) -> None:
    rows = [request(number, NOON + number * HOUR) for number in range(3)]
    write_parquet({"requests": rows}, tmp_path, "a")
    write_parquet({"requests": [request(9, NOON)]}, tmp_path, "b")
    before = everything(tmp_path)
    write_parquet({"requests": rows}, tmp_path, "a")
    assert everything(tmp_path) == before
    write_parquet({"requests": [request(1, NOON + HOUR)]}, tmp_path, "a")
    assert ids(tmp_path) == ["req-9", "req-1"]
    assert len(partitions(tmp_path, "requests")) == 2


@pytest.mark.parametrize("crash_at", range(4))
def test_a_compaction_that_died_at_any_rename_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    rows = {
        "requests": [request(number, NOON + number * HOUR) for number in range(2)],
        "decisions": [decision(number, f"req-{number}", NOON + number * HOUR) for number in range(2)],
    }
    really = Path.replace
    renamed: list[Path] = []

    def dying(path: Path, target: Path) -> Path:
        if len(renamed) == crash_at:
            raise KeyboardInterrupt
        renamed.append(target)
        return really(path, target)

    with monkeypatch.context() as crash:
        crash.setattr(Path, "replace", dying)
        crash.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            write_parquet(rows, tmp_path, "a")  # type: ignore[arg-type]  # the literal is not narrowed
    assert len(ids(tmp_path)) <= 2
    write_parquet(rows, tmp_path, "a")  # type: ignore[arg-type]  # the literal is not narrowed
    assert ids(tmp_path) == ["req-0", "req-1"]
    with RecordReader(tmp_path) as reader:
        assert reader.query("SELECT count(*) AS n FROM decisions") == [{"n": 2}]
    assert not list(tmp_path.glob(".scratch/*"))


def test_rows_that_a_killed_compaction_had_spread_are_not_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying() -> Iterator[Row]:
        for number in range(BATCH_ROWS + 1):
            yield request(number)
        raise KeyboardInterrupt

    with monkeypatch.context() as crash:
        crash.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            write_parquet({"requests": dying()}, tmp_path, "a")
    assert list(tmp_path.glob(".scratch/a/*.ndjson"))
    write_parquet({"requests": [request(1)]}, tmp_path, "a")
    assert ids(tmp_path) == ["req-1"]


def test_a_bad_row_changes_nothing(tmp_path: Path) -> None:
    write_parquet({"requests": [request(1)]}, tmp_path, "a")
    before = everything(tmp_path)
    with pytest.raises(InternalError, match="requests has no column colour"):
        write_parquet({"requests": [request(2), request(3, colour="red")]}, tmp_path, "a")
    with pytest.raises(InternalError, match="rows of requests do not fit its columns"):
        write_parquet({"requests": [request(2), request(3, prompt_tokens="many")]}, tmp_path, "a")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("label", ["", "../a", "a/b", ".hidden", "a b"])
def test_a_label_that_is_no_file_name_is_refused(tmp_path: Path, label: str) -> None:
    with pytest.raises(InternalError, match="cannot be a file name"):
        write_parquet({}, tmp_path, label)


def test_values_come_back_as_they_went_in(tmp_path: Path) -> None:
    row = request(
        1,
        NOON + 123_456_789,
        adapter='Ünï "quoted"\n, \\ 日本',
        prompt_tokens=2**63 - 1,
        itl_sketch='{"700":12}',
        stream=False,
        queued_ns=None,
    )
    sample: Row = {"at_ns": NOON, "replica": "r1", "up": True, "kv_usage": 0.1}
    write_parquet({"requests": [row], "samples": [sample]}, tmp_path, "a")
    with RecordReader(tmp_path) as reader:
        found = reader.request("req-1")
        assert found is not None
        assert {name: value for name, value in found.items() if value is not None} == {
            name: value for name, value in row.items() if value is not None
        }
        assert reader.query("SELECT kv_usage, up, running FROM samples") == [
            {"kv_usage": 0.1, "up": True, "running": None}
        ]


def test_rows_are_taken_from_an_iterator_batch_by_batch_and_hours_may_alternate(tmp_path: Path) -> None:
    count = 2 * BATCH_ROWS + 1

    def rows() -> Iterator[Row]:
        for number in range(count):
            yield request(number, NOON + (number % 3) * HOUR + number)

    assert len(write_parquet({"requests": rows()}, tmp_path, "a")) == 3
    with RecordReader(tmp_path) as reader:
        assert reader.query("SELECT count(*) AS n, count(DISTINCT id) AS d FROM requests") == [{"n": count, "d": count}]


def test_files_are_durable_before_they_get_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, int]] = []
    really_sync, really_replace = os.fsync, Path.replace

    def sync(handle: int) -> None:
        steps.append(("sync", os.fstat(handle).st_ino))
        really_sync(handle)

    def replace(path: Path, target: Path) -> Path:
        steps.append(("name", path.stat().st_ino))
        return really_replace(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    (written,) = write_parquet({"requests": [request(1)]}, tmp_path, "a")
    above = [("sync", path.stat().st_ino) for path in written.parents if path.is_relative_to(tmp_path)]
    inode = written.stat().st_ino
    assert steps == [("sync", inode), ("name", inode), *above]


def test_partitions_are_chosen_by_hour(tmp_path: Path) -> None:
    write_parquet({"requests": [request(number, NOON + number * HOUR) for number in range(3)]}, tmp_path, "a")

    def hours(since: int | None, until: int | None) -> list[str]:
        return [path.parent.name for path in partitions(tmp_path, "requests", since_ns=since, until_ns=until)]

    assert hours(None, None) == ["hour=12", "hour=13", "hour=14"]
    assert hours(NOON + HOUR, None) == ["hour=13", "hour=14"]
    assert hours(NOON + HOUR - 1, None) == ["hour=12", "hour=13", "hour=14"]
    assert hours(None, NOON + HOUR) == ["hour=12"]
    assert hours(None, NOON + HOUR + 1) == ["hour=12", "hour=13"]
    assert hours(NOON + HOUR, NOON + HOUR) == []
