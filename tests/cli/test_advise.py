"""``advise``: the verdict on slots with its weeks, the ranking and its pins, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraledger.config.pins import read_ranking
from loraledger.record.parquet import write_parquet
from loraledger.record.tables import Row
from loraledger.signals.rules.advice import Targets
from signals.records import NOON, SECOND, request

from .conftest import Cli, write
from .judged import SETTINGS

HOUR = 3600 * SECOND
WEEK = 168 * HOUR
TO = ("--to", "2026-09-21T12:00:00Z")


def weeks(hits: int, of: int = 10, **columns: object) -> list[Row]:
    """In each of the three weeks to noon one busy hour with ``hits`` of ``of`` in a slot; a miss waits 3 s and says why."""
    rows: list[Row] = []
    for week in (1, 2, 3):
        for number in range(of):
            at = NOON - week * WEEK + 50 * HOUR + number * 30 * SECOND
            miss: Row = {
                "hit_class": "disk",
                "first_token_ns": at + 3 * SECOND,
                "last_token_ns": at + 4 * SECOND,
                "finished_ns": at + 4 * SECOND,
                "engine_stall_ns": 5 * SECOND // 2,
            }
            row = request(arrived_ns=at, adapter=f"a{number % 4}", preemptions=0, engine_stall_ns=0)
            rows.append(row | (miss if number >= hits else {}) | columns)
    return rows


@pytest.fixture
def record(tmp_path: Path) -> Path:
    write(tmp_path / "loraledger.yaml", SETTINGS)
    write_parquet({"requests": weeks(5)}, tmp_path / "record", "made")
    return tmp_path / "record"


def advice(cli: Cli, *words: str) -> Any:
    return cli("advise", *TO, *words, "--json").items("advice")


def test_the_verdict_stands_first_with_a_row_for_each_week(cli: Cli, record: Path) -> None:
    done = cli("advise", *TO)
    assert done.code == 0, done.err
    head, verdict, table, *_ = done.out.split("\n\n")
    assert head.startswith("three weeks to 2026-09-21 12:00:00 UTC: engine 0.11.0")
    assert verdict.startswith("slots: the rule fires. expand the slots")
    rows = [line.split() for line in table.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["2026-09-07", "10"], ["2026-09-14", "10"], ["2026-09-21", "10"]]
    assert {row[4] for row in rows} == {"50.0%"}


@pytest.mark.parametrize(
    ("rows", "failed", "means"),
    [
        (weeks(10, engine_stall_ns=SECOND // 10), "hit_rate", "nothing is to be done about slots"),
        (weeks(5, preemptions=1), "preemptions", "add a replica"),
        (weeks(5, engine_stall_ns=0), "preparation", "loads are not what the first token waits for"),
    ],
)
def test_the_condition_that_failed_is_named_and_what_it_means(
    cli: Cli, record: Path, rows: list[Row], failed: str, means: str
) -> None:
    write_parquet({"requests": rows}, record, "made")
    out = " ".join(cli("advise", *TO).out.split())
    assert "slots: the rule holds back." in out
    assert means in out
    assert f"- {failed} speaks against it: " in out


def test_pins_are_written_as_the_document_has_them(cli: Cli, record: Path, tmp_path: Path) -> None:
    done = cli("advise", *TO, "--pins", "pins.json")
    assert done.code == 0
    written = json.loads((tmp_path / "pins.json").read_bytes())
    assert (written["schema_version"], written["kind"]) == (1, "pins")
    assert written["pins"] == advice(cli)["ranking"]["pins"] != []
    assert {pin["replica"] for pin in written["pins"]} == {"r1"}
    assert read_ranking(tmp_path / "pins.json") == tuple((pin["replica"], pin["adapter"]) for pin in written["pins"])
    assert cli("advise", *TO, "--pins", "nowhere/pins.json").code == 3


def test_nothing_to_rank_writes_no_pins(cli: Cli, tmp_path: Path) -> None:
    write_parquet({"requests": [request(arrived_ns=NOON, adapter=None, hit_class="base")]}, tmp_path / "base", "made")
    done = cli("advise", "--record", "base", "--pins", "pins.json")
    assert done.code == 3
    assert "there is nothing to pin" in done.err
    assert not (tmp_path / "pins.json").exists()


def test_targets_move_the_limits(cli: Cli, record: Path) -> None:
    assert advice(cli)["slots"]["verdict"] == "fires"
    found = advice(cli, "--target", "hit_rate=0.4", "--target", "budget=0")
    assert found["slots"]["verdict"] == "holds back"
    assert (found["targets"]["hit_rate"], found["targets"]["budget"]) == (0.4, 0)
    assert found["ranking"]["pins"] == []
    done = cli("advise", *TO, "--target", "budget=0", "--pins", "none.json")
    assert (done.code, "there is nothing to pin" in done.err) == (3, True)
    assert not Path("none.json").exists()


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("hit_rate", "write NAME=VALUE with one of hit_rate"),
        ("hits=1", "write NAME=VALUE with one of hit_rate"),
        ("hit_rate=high", "'high' is not a number"),
        ("hit_rate=97", "hit_rate is 97.0: must be from 0 to 1"),
        ("hit_rate=nan", "hit_rate is nan"),
        ("budget=1.5", "'1.5' is not a number"),
    ],
)
def test_a_target_that_cannot_be_is_a_usage_error(cli: Cli, record: Path, target: str, complaint: str) -> None:
    done = cli("advise", "--target", target)
    assert done.code == 2
    assert complaint in done.err


def test_the_help_leaves_no_target_out_of_reach(cli: Cli, record: Path) -> None:
    complaint = cli("advise", "--target", "x=1").err
    for name in Targets.__struct_fields__:
        assert name in complaint


def test_the_weeks_end_at_the_newest_row_unless_a_moment_is_given(cli: Cli, record: Path) -> None:
    done = cli("advise")
    assert "three weeks to 2026-09-16 14:04:" in done.out
    assert "the newest row is of 2026-09-16 14:04:30 UTC: the weeks count back from there, not from now" in done.err
    assert cli("advise", *TO).err == ""
    assert cli("advise", "--to", "soon").code == 2


def test_the_best_of_every_replica_stands_in_the_first_rows(cli: Cli, record: Path) -> None:
    rows = [row | {"replica": "r1" if n % 3 else "r2"} for n, row in enumerate(weeks(5, 12))]
    write_parquet({"requests": rows}, record, "made")
    out = cli("advise", *TO, "--limit", "2").out
    shown = [line.split()[0] for line in out[out.index("REPLICA") :].splitlines()[1:3]]
    assert sorted(shown) == ["r1", "r2"]


def test_an_empty_record_is_told(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = cli("advise", "--record", "empty")
    assert done.code == 0
    assert "UTC: no request" in done.out
    assert "no request arrived in the three weeks" in done.out
