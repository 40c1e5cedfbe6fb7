from __future__ import annotations

import re
import warnings
from pathlib import Path

import duckdb
import pytest

from loraledger.errors import BadRequestError, InputFileError, InternalError
from loraledger.record.parquet import partitions, write_parquet
from loraledger.record.reader import RecordReader
from loraledger.record.tables import TABLES

from .rows import HOUR, NOON, decision, request


def test_an_empty_record_has_every_table_with_every_column(tmp_path: Path) -> None:
    with RecordReader(tmp_path / "missing") as reader:
        for table in TABLES.values():
            shape = reader.query(f"DESCRIBE {table.name}")
            assert [(row["column_name"], row["column_type"]) for row in shape] == [
                (column.name, column.type) for column in table.columns
            ]
            assert reader.query(f"SELECT * FROM {table.name}") == []
        assert reader.request("req-1") is None
        assert reader.decision(1) is None
        assert reader.decisions_of("req-1") == []


def test_tail_and_partitions_are_one_table(tmp_path: Path) -> None:
    write_parquet({"requests": [request(1, prompt_tokens=10)]}, tmp_path, "a")
    with RecordReader(tmp_path, {"requests": [request(2, NOON + HOUR, prompt_tokens=32)]}) as reader:
        assert reader.query("SELECT sum(prompt_tokens)::BIGINT AS tokens FROM requests") == [{"tokens": 42}]
        assert [row["id"] for row in reader.requests()] == ["req-2", "req-1"]


def test_a_segment_that_is_being_compacted_is_not_counted_twice(tmp_path: Path) -> None:
    write_parquet({"requests": [request(0)]}, tmp_path, "journal-00000001")
    write_parquet({"requests": [request(1)]}, tmp_path, "journal-00000002")
    tail = [request(1), request(2, NOON + HOUR)]
    with RecordReader(tmp_path, {"requests": tail}, ["journal-00000002", "journal-00000003"]) as reader:
        assert sorted(str(row["id"]) for row in reader.requests()) == ["req-0", "req-1", "req-2"]


def test_requests_are_found_by_what_they_are(tmp_path: Path) -> None:
    rows = [request(number, NOON + number, adapter=None if number % 2 else "support") for number in range(10)]
    with RecordReader(tmp_path, {"requests": rows}) as reader:
        assert [row["id"] for row in reader.requests({"adapter": None}, limit=2)] == ["req-9", "req-7"]
        assert [row["id"] for row in reader.requests({"adapter": "support", "tenant": "acme"}, since_ns=NOON + 6)] == [
            "req-8",
            "req-6",
        ]
        assert [row["id"] for row in reader.requests(since_ns=NOON + 3, until_ns=NOON + 5)] == ["req-4", "req-3"]
        assert reader.requests({"tenant": "acme' OR true --"}) == []
        with pytest.raises(BadRequestError, match="requests has no column 'tenants'; it has adapter, arrived_ns"):
            reader.requests({"tenants": "acme"})


def test_the_decisions_of_a_request_come_in_their_order(tmp_path: Path) -> None:
    decisions = [decision(3, "req-2", NOON + 9), decision(2, "req-1", NOON + 5), decision(1, "req-1", NOON)]
    with RecordReader(tmp_path, {"decisions": decisions}) as reader:
        assert [row["decision_id"] for row in reader.decisions_of("req-1")] == [1, 2]
        found = reader.decision(3)
        assert found is not None
        assert found["request_id"] == "req-2"


def test_partitions_that_lack_a_newer_column_read_as_null(tmp_path: Path) -> None:
    old = tmp_path / "requests" / "date=2026-09-21" / "hour=12" / "old.parquet"
    old.parent.mkdir(parents=True)
    with duckdb.connect(":memory:") as connection:
        connection.execute(
            f"COPY (SELECT 'req-0' AS id, {NOON}::BIGINT AS arrived_ns, 7::INTEGER AS retries, 'x' AS dropped_column) "
            f"TO '{old}' (FORMAT parquet)"
        ).fetchall()
    write_parquet({"requests": [request(1, NOON + 1, retries=1)]}, tmp_path, "new")
    with RecordReader(tmp_path) as reader:
        assert reader.query("SELECT id, retries, tenant FROM requests ORDER BY id") == [
            {"id": "req-0", "retries": 7, "tenant": None},
            {"id": "req-1", "retries": 1, "tenant": "acme"},
        ]
        assert list(reader.requests()[0]) == [column.name for column in TABLES["requests"].columns]


def test_only_partitions_of_the_hours_asked_for_are_opened(tmp_path: Path) -> None:
    write_parquet({"requests": [request(number, NOON + number * HOUR) for number in range(3)]}, tmp_path, "a")
    partitions(tmp_path, "requests")[0].write_bytes(b"damaged")
    with RecordReader(tmp_path, since_ns=NOON + HOUR, until_ns=NOON + 2 * HOUR) as reader:
        assert [row["id"] for row in reader.requests()] == ["req-1"]


def test_a_damaged_file_and_one_that_went_away_are_named(tmp_path: Path) -> None:
    write_parquet({"requests": [request(1)]}, tmp_path, "a")
    (path,) = partitions(tmp_path, "requests")
    with RecordReader(tmp_path) as reader:
        path.unlink()
        with pytest.raises(InputFileError, match=r"the record cannot be read: .*a\.parquet went away"):
            reader.requests()
    path.write_bytes(b"damaged")
    with pytest.raises(InputFileError, match=r"the record cannot be read: .*a\.parquet"):
        RecordReader(tmp_path)


def test_a_directory_may_have_any_name(tmp_path: Path) -> None:
    directory = tmp_path / "it's [a] *record* {x}"
    write_parquet({"requests": [request(1)]}, directory, "a")
    with RecordReader(directory) as reader:
        assert len(reader.requests()) == 1


def test_a_query_takes_parameters_by_position_or_name(tmp_path: Path) -> None:
    with RecordReader(tmp_path, {"requests": [request(1), request(2)]}) as reader:
        assert reader.query("SELECT id FROM requests WHERE id = ?", ["req-2"]) == [{"id": "req-2"}]
        assert reader.query("FROM requests SELECT id WHERE id = $id", {"id": "req-1"}) == [{"id": "req-1"}]
        assert reader.query("WITH t AS (SELECT 1 AS one) SELECT one FROM t;") == [{"one": 1}]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELEC 1", "cannot run"),
        ("SELECT nothing FROM requests", "cannot run"),
        ("SELECT id FROM requests WHERE id = ?", "cannot run"),
        ("SELECT 'a'::INTEGER", "cannot run"),
        ("SELECT id, id FROM requests", "two columns are named id: rename one with AS"),
        ("", "one SELECT"),
        ("SELECT 1; SELECT 2", "one SELECT"),
        ("CREATE TABLE mine (a INTEGER)", "one SELECT"),
        ("DELETE FROM tail.requests", "one SELECT"),
        ("COPY (SELECT 1) TO 'mine.csv'", "one SELECT"),
        ("EXPLAIN ANALYZE COPY (SELECT 1) TO 'mine.csv'", "one SELECT"),
        ("SET enable_external_access = true", "one SELECT"),
        ("INSTALL httpfs", "one SELECT"),
        ("ATTACH 'mine.duckdb'", "one SELECT"),
        ("SELECT * FROM read_csv('/etc/hosts')", "disabled by configuration"),
        ("SELECT * FROM glob('/etc/*')", "disabled by configuration"),
    ],
)
def test_a_query_that_is_wrong_or_goes_beyond_reading_the_record_is_refused(
    tmp_path: Path, sql: str, message: str
) -> None:
    write_parquet({"requests": [request(1)]}, tmp_path, "a")
    with RecordReader(tmp_path) as reader:
        with pytest.raises(BadRequestError, match=message) as refused:
            reader.query(sql)
        assert refused.value.param == "sql"
        assert len(reader.requests()) == 1


def test_a_bad_row_of_the_tail_is_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InternalError, match="requests has no column colour"):
            RecordReader(tmp_path, {"requests": [request(1, colour="red")]})


def test_closing_removes_the_scratch_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    reader = RecordReader(tmp_path / "record", {"requests": [request(1)]})
    assert len(list(tmp_path.iterdir())) == 1
    reader.close()
    reader.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("1.5::DOUBLE AS arrived_ns", "arrived_ns as DOUBLE, requests has it as BIGINT"),
        ("1::BIGINT AS arrived_ns, 'a'::BLOB AS adapter", "adapter as BLOB, requests has it as VARCHAR"),
        ("1::UBIGINT AS arrived_ns", "arrived_ns as UBIGINT, requests has it as BIGINT"),
        ("1::BIGINT AS arrived_ns, 1 AS stream", "stream as INTEGER, requests has it as BOOLEAN"),
    ],
)
def test_a_column_of_another_type_is_named_with_its_file(tmp_path: Path, values: str, said: str) -> None:
    path = tmp_path / "requests" / "date=2026-01-01" / "hour=00" / "a.parquet"
    path.parent.mkdir(parents=True)
    duckdb.sql(f"COPY (SELECT {values}) TO '{path}' (FORMAT parquet)")
    with pytest.raises(InputFileError, match=f"{re.escape(str(path))} has {said}"):
        RecordReader(tmp_path)


def test_a_narrower_number_reads_as_ours_and_columns_of_others_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "requests" / "date=2026-01-01" / "hour=00" / "a.parquet"
    path.parent.mkdir(parents=True)
    columns = "7::INTEGER AS arrived_ns, 'x' AS id, [1, 2] AS somebody_elses"
    duckdb.sql(f"COPY (SELECT {columns}) TO '{path}' (FORMAT parquet)")
    with RecordReader(tmp_path) as reader:
        (row,) = reader.requests()
    assert (row["arrived_ns"], row["id"], row["adapter"]) == (7, "x", None)
