from __future__ import annotations

from typing import get_args

import pytest

from loraledger.errors import InternalError
from loraledger.record.tables import TABLES, Table, TableName, check

from .rows import NOON, request

TABLE_CASES = pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)


def test_every_table_is_listed_under_its_name() -> None:
    assert list(TABLES) == list(get_args(TableName))
    assert all(table.name == name for name, table in TABLES.items())


@TABLE_CASES
def test_every_column_says_what_it_means_and_is_named_once(table: Table) -> None:
    names = [column.name for column in table.columns]
    assert len(set(names)) == len(names)
    for column in table.columns:
        assert len(column.doc.split()) >= 1, column.name
        assert column.doc.endswith("."), column.name
        assert column.doc[0].isupper(), column.name


@TABLE_CASES
def test_moments_and_durations_are_integer_nanoseconds_and_durations_say_so(table: Table) -> None:
    for column in table.columns:
        if column.name.endswith("_ns"):
            assert column.type == "BIGINT", column.name
            moment = column.doc.startswith("When")
            assert moment != ("in ns" in column.doc), column.name


@TABLE_CASES
def test_the_column_of_the_partition_is_a_moment(table: Table) -> None:
    assert table.time in table.names
    assert table.time.endswith("_ns")


def test_a_good_row_gives_its_time() -> None:
    assert check(TABLES["requests"], request(1, hit_class="unknown", adapter=None)) == NOON


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrived_ns": None}, "a row of requests needs arrived_ns, an integer in ns; it has None"),
        ({"arrived_ns": 1.5}, "a row of requests needs arrived_ns, an integer in ns; it has 1.5"),
        ({"tenants": "acme"}, "requests has no column tenants"),
        ({"status": "fine"}, "requests.status cannot be 'fine'; it is one of ok, client_gone"),
        ({"hit_class": "warm"}, "requests.hit_class cannot be 'warm'; it is one of gpu, host"),
    ],
)
def test_a_row_that_would_lose_something_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InternalError) as refused:
        check(TABLES["requests"], {**request(1), **change})
    assert refused.value.message.startswith(message)
