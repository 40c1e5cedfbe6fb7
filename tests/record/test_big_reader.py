from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from loraledger.errors import InputFileError
from loraledger.record.parquet import partition_path, partitions, write_parquet
from loraledger.record.reader import RecordReader

from .rows import HOUR, NOON, request

HOURS = 12
SHAPES = (
    "'req-' || {n} AS id, {at}::BIGINT AS arrived_ns, {n}::INTEGER AS retries",
    "{n}::BIGINT AS retries, {at}::BIGINT AS arrived_ns, 'req-' || {n} AS id",
    "{at}::BIGINT AS arrived_ns, 'req-' || {n} AS id, 'acme' AS tenant, {n} AS dropped_column",
)
"""Columns of one table as versions of the writer left them: a narrower type, another order, more and fewer of them."""


def write_old(directory: Path) -> None:
    """An hour of each shape in turn."""
    with duckdb.connect(":memory:") as connection:
        for n in range(HOURS):
            path = partition_path(directory, "requests", NOON // HOUR + n, "old")
            path.parent.mkdir(parents=True, exist_ok=True)
            select = SHAPES[n % len(SHAPES)].format(n=n, at=NOON + n * HOUR)
            connection.execute(f"COPY (SELECT {select}) TO '{path}' (FORMAT parquet)").fetchall()


def lists(reader: RecordReader) -> int:
    """How many lists of files the view of requests reads."""
    (view,) = reader.query("SELECT sql FROM duckdb_views() WHERE view_name = 'requests'")
    return str(view["sql"]).count("read_parquet(")


def test_hours_whose_columns_differ_in_turn_are_one_table(tmp_path: Path) -> None:
    write_old(tmp_path)
    write_parquet({"requests": [request(HOURS, NOON + HOURS * HOUR, retries=HOURS)]}, tmp_path, "new")
    with RecordReader(tmp_path, {"requests": [request(HOURS + 1, NOON + (HOURS + 1) * HOUR)]}) as reader:
        assert reader.query("SELECT id, arrived_ns, retries, tenant FROM requests ORDER BY arrived_ns") == [
            {
                "id": f"req-{n}",
                "arrived_ns": NOON + n * HOUR,
                "retries": n if n == HOURS or (n < HOURS and n % 3 != 2) else None,
                "tenant": "acme" if n >= HOURS or n % 3 == 2 else None,
            }
            for n in range(HOURS + 2)
        ]


def test_hours_with_the_same_columns_are_read_as_one_list(tmp_path: Path) -> None:
    write_parquet({"requests": [request(n, NOON + n * HOUR) for n in range(HOURS)]}, tmp_path, "a")
    with RecordReader(tmp_path) as reader:
        assert lists(reader) == 1
    write_parquet({"requests": [request(n, NOON + n * HOUR, retries=1) for n in range(HOURS)]}, tmp_path, "b")
    write_old(tmp_path)
    with RecordReader(tmp_path) as reader:
        assert lists(reader) == 1 + len(SHAPES)
        assert reader.query("SELECT count(*) AS n, sum(retries)::BIGINT AS retries FROM requests") == [
            {"n": 3 * HOURS, "retries": HOURS + sum(n for n in range(HOURS) if n % 3 != 2)}
        ]


def test_one_damaged_file_among_many_is_named_when_the_reader_is_opened(tmp_path: Path) -> None:
    write_parquet({"requests": [request(n, NOON + n * HOUR) for n in range(HOURS)]}, tmp_path, "a")
    half = partitions(tmp_path, "requests")[7]
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    with pytest.raises(InputFileError, match=r"the record cannot be read: .*hour=19/a\.parquet"):
        RecordReader(tmp_path)


def test_a_file_that_was_written_anew_is_read_as_it_is_now(tmp_path: Path) -> None:
    write_parquet({"requests": [request(1, retries=1)]}, tmp_path, "a")
    with RecordReader(tmp_path) as reader:
        assert reader.query("SELECT id, retries FROM requests") == [{"id": "req-1", "retries": 1}]
        write_parquet({"requests": [request(n, retries=n) for n in range(2, 2000)]}, tmp_path, "a")
        assert reader.query("SELECT count(*) AS n, min(retries) AS least FROM requests") == [{"n": 1998, "least": 2}]
