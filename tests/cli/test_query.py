"""``query``: one SELECT over the record, printed three ways, and never more than that."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest

from loraledger.record.parquet import write_parquet
from signals.records import MINUTE, NOON, request

from .conftest import Cli, on_a_terminal

HOUR = 60 * MINUTE


@pytest.fixture
def record(tmp_path: Path) -> Path:
    rows = [request(id=f"q{n}", arrived_ns=NOON + n * HOUR, adapter=None if n % 2 else "a,1") for n in range(4)]
    write_parquet({"requests": rows}, tmp_path / "record", "made")
    return tmp_path / "record"


def test_a_table_shows_figures_on_the_right_and_unknown_as_a_dash(cli: Cli, record: Path) -> None:
    sql = (
        "SELECT adapter, count(*) AS n, sum(prompt_tokens) / 3 AS third FROM requests GROUP BY adapter ORDER BY adapter"
    )
    done = cli("query", sql, "--record", record)
    assert done.out.splitlines() == ["ADAPTER  N        THIRD", "a,1      2  66.66666667", "-        2  66.66666667"]


def test_csv_and_json_hold_the_same_values(cli: Cli, record: Path) -> None:
    sql = "SELECT id, adapter, prompt_tokens, 1.5 AS half, sum(arrived_ns) OVER () * 1000 AS large FROM requests ORDER BY id"
    rows = list(csv.DictReader(io.StringIO(cli("query", sql, "--record", record, "--csv").out)))
    items = cli("query", sql, "--record", record, "--json").items("query")
    assert rows[0] == {"id": "q0", "adapter": "a,1", "prompt_tokens": "100", "half": "1.5", "large": items[0]["large"]}
    assert items[1] | {"large": ""} == {"id": "q1", "adapter": None, "prompt_tokens": 100, "half": 1.5, "large": ""}
    assert rows[1]["adapter"] == ""
    assert int(items[0]["large"]) == sum(NOON + n * HOUR for n in range(4)) * 1000, "over 64 bits: as text"


def test_a_query_without_rows_still_has_its_columns(cli: Cli, record: Path) -> None:
    sql = "WITH none AS (SELECT id, adapter FROM requests WHERE false) SELECT * FROM none;"
    assert cli("query", sql, "--record", record, "--csv").out == "id,adapter\n"
    assert cli("query", sql, "--record", record).out.split() == ["ID", "ADAPTER"]
    assert cli("query", sql, "--record", record, "--json").items("query") == []


def test_rows_beyond_the_limit_are_cut_in_order_and_that_is_said(cli: Cli, record: Path) -> None:
    done = cli("query", "SELECT id FROM requests ORDER BY id DESC", "--record", record, "-n", "2", "--csv")
    assert done.out.splitlines() == ["id", "q3", "q2"]
    assert "the first 2 rows are printed: --limit has more printed" in done.err
    assert cli("query", "SELECT id FROM requests", "--record", record, "-n", "4").err == ""


def test_only_files_of_the_hours_that_are_meant_are_opened(cli: Cli, record: Path) -> None:
    def ids(*words: str) -> list[str]:
        return cli("query", "SELECT id FROM requests ORDER BY id", "--csv", *words, "--record", record).out.split()[1:]

    assert ids() == ["q0", "q1", "q2", "q3"]
    assert ids("--from", "2026-09-21T13:30:00", "--to", "2026-09-21T14:10:00") == ["q1", "q2"]
    assert ids("--from", "2026-09-21T14:00:00") == ["q2", "q3"]
    assert ids("--to", "2026-09-21T13:00:00") == ["q0"]
    assert ids("--last", "1h", "--to", "2026-09-21T16:00:00") == ["q3"]
    assert cli("query", "SELECT 1 AS x", "--last", "1h", "--from", "now", "--record", record).code == 2


def test_sql_may_come_from_a_pipe(cli: Cli, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("SELECT count(*) AS n\nFROM requests;\n"))
    assert cli("query", "-", "--record", record, "--csv").out == "n\n4\n"


@pytest.mark.parametrize(
    ("sql", "complaint"),
    [
        ("SELEC 1", "syntax error"),
        ("SELECT nope FROM requests", "nope"),
        ("SELECT 1 AS a, 2 AS a", "two columns are named a"),
        ("DELETE FROM requests", "one SELECT statement"),
        ("SELECT 1 AS a; SELECT 2 AS b", "one SELECT statement"),
        ("", "one SELECT statement"),
        ("COPY requests TO 'x.csv'", "one SELECT statement"),
        ("SELECT * FROM read_csv('/etc/passwd')", "the query cannot run"),
        ("SELECT '\x1b[2J' + requests", "the query cannot run"),
    ],
)
def test_sql_that_cannot_run_is_a_usage_error(cli: Cli, record: Path, sql: str, complaint: str) -> None:
    done = cli("query", sql, "--record", record)
    assert done.code == 2
    assert done.out == ""
    assert complaint in done.err
    assert "\x1b" not in done.err


def test_names_cannot_steer_a_terminal(cli: Cli, record: Path) -> None:
    assert "\x1b" not in cli("query", "SELECT chr(27) || '[2J' AS name", "--record", record).out


def test_one_way_to_print_is_chosen(cli: Cli, record: Path) -> None:
    assert cli("query", "SELECT 1 AS x", "--csv", "--json", "--record", record).code == 2


def test_a_pipe_gets_whole_rows(record: Path, tmp_path: Path) -> None:
    out, _ = on_a_terminal(tmp_path, 40, "query", "SELECT repeat('long ', 50) AS name", "--record", str(record))
    assert "long " * 49 in out.decode()


def test_a_name_that_a_query_gives_a_column_is_printed_without_what_a_terminal_obeys(cli: Cli, record: Path) -> None:
    done = cli("query", 'SELECT 7 AS "\x1b[31mred"', "--record", record)
    assert "\x1b" not in done.out
    assert done.out.split()[-1] == "7"


def test_a_query_that_is_not_utf_8_is_refused(cli: Cli, record: Path) -> None:
    done = cli("query", "SELECT '\udcff'", "--record", record)
    assert (done.code, "not UTF-8" in done.err) == (2, True)


def test_a_value_that_cannot_be_shown_is_refused(cli: Cli, record: Path) -> None:
    done = cli("query", "SELECT interval '178000000 years' AS long", "--record", record)
    assert (done.code, "have it cast to VARCHAR" in done.err) == (2, True)
    cast = cli("query", "SELECT (interval '178000000 years')::VARCHAR AS long", "--record", record, "--csv")
    assert cast.out.splitlines()[1] == "178000000 years"
