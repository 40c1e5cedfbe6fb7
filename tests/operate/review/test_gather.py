"""The review says what measure, advise and diagnose found, and adds nothing that they do not know."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from loraledger.operate.review import Names, Standing, review
from loraledger.operate.review.gather import reach
from loraledger.record.reader import RecordReader
from loraledger.signals.diagnosis import diagnose
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Window
from loraledger.signals.measure import measure
from loraledger.signals.rules import Targets, advise
from operate.changes import change
from signals.records import NOON, SECOND

from .made import DAY, FACTS, HOUR, NAMES, ODD, SCRIPT, WEEK, WINDOW, reviewed, weeks

LATE_HOUR = Window(NOON - 2 * DAY, NOON - 2 * DAY + HOUR)


def test_its_figures_are_those_of_measure_and_advise(tmp_path: Path) -> None:
    with weeks(tmp_path) as reader:
        found = reviewed(reader)
        now = measure(reader, WINDOW, FACTS)
        assert found.now == now
        assert found.before == measure(reader, Window(NOON - 2 * WEEK, NOON - WEEK), FACTS, like=now.version)
        assert found.advice == advise(reader, NOON, FACTS, Targets())
    assert now.total is not None
    assert now.total.requests == 120


def test_the_objective_is_the_one_that_was_given(tmp_path: Path) -> None:
    with weeks(tmp_path) as reader:
        found = reviewed(reader, slo_s=5.0)
    assert found.now.total is not None
    assert found.before.total is not None
    assert (found.now.total.attainment, found.before.total.attainment) == (1.0, 1.0)
    assert found.worst is not None
    assert found.worst.late == 0


def test_the_worst_hour_is_the_one_with_most_late_requests_and_is_diagnosed(tmp_path: Path) -> None:
    with weeks(tmp_path) as reader:
        found = reviewed(reader).worst
        now = measure(reader, LATE_HOUR, FACTS)
        hour_before = measure(reader, Window(LATE_HOUR.since_ns - HOUR, LATE_HOUR.since_ns), FACTS, like=now.version)
    assert found is not None
    assert (found.window, found.requests, found.late) == (LATE_HOUR, 40, 8)
    assert found.diagnosis == diagnose(now, hour_before, FACTS, record="record", settings="loraledger.yaml")
    assert shlex.split(found.command) == [
        "loraledger", "diagnose", "--record", "record", "--config", "loraledger.yaml",
        "--from", "2026-09-19T12:00:00Z", "--to", "2026-09-19T13:00:00Z",
    ]  # fmt: skip


def test_late_is_also_who_never_got_a_token(tmp_path: Path) -> None:
    from loraledger.record.parquet import write_parquet
    from signals.records import request

    nothing = {"first_token_ns": None, "last_token_ns": None, "first_byte_ns": None, "first_answer_ns": None}
    rows = [request(arrived_ns=NOON - DAY, status="rejected", replica=None, **nothing)]
    rows += [request(arrived_ns=NOON - DAY + SECOND, status="client_gone", **nothing), request(arrived_ns=NOON - DAY)]
    write_parquet({"requests": rows}, tmp_path, "made")
    with RecordReader(tmp_path) as reader:
        worst = reviewed(reader).worst
    assert worst is not None
    assert (worst.requests, worst.late) == (3, 1)


def test_the_hottest_come_by_requests_and_the_coldest_from_those_that_nobody_asks_for(tmp_path: Path) -> None:
    with weeks(tmp_path) as reader:
        found = reviewed(reader)
    assert [(one.adapter, one.requests, one.requests_before) for one in found.hottest] == [
        ("a0", 60, 30),
        (SCRIPT, 30, 15),
        (ODD, 30, 15),
    ]
    assert [(one.adapter, one.requests, one.last_ns) for one in found.coldest] == [("never", 0, None)]
    assert found.hottest[0].last_ns == NOON - 2 * DAY + 37 * 20 * SECOND
    assert found.adapters == 4
    assert found.adapter_bytes is None, "of one adapter nobody knows the bytes"


def test_the_bytes_of_all_adapters_add_up_when_all_are_known(tmp_path: Path) -> None:
    with weeks(tmp_path) as reader:
        found = reviewed(
            reader, facts=msgspec.structs.replace(FACTS, adapter_bytes={"a0": 5, SCRIPT: 3, ODD: 1, "b": 1})
        )
    assert found.adapter_bytes == 10


def test_changes_are_shown_while_they_are_open_and_in_the_window_in_which_they_ended(tmp_path: Path) -> None:
    made = {"proposed_ns": NOON - 2 * WEEK}
    changes = [
        change(id="open", **made),
        change(id="ended", state="accepted", ended_ns=NOON - DAY, **made),
        change(id="old", state="rolled_back", ended_ns=NOON - WEEK - 1, **made),
        change(id="later", proposed_ns=NOON),
    ]
    with weeks(tmp_path) as reader:
        found = reviewed(reader, changes)
    assert [(one.change.id, one.when_ns) for one in found.changes] == [("ended", NOON - DAY), ("open", NOON - 2 * WEEK)]


def test_an_empty_record_says_what_is_missing(tmp_path: Path) -> None:
    with RecordReader(tmp_path) as reader:
        found = reviewed(reader, facts=Facts(), standing=Standing(registered=("a0",)))
    assert (found.now.total, found.worst, found.proposals, found.hottest, found.coldest) == (None, None, (), (), ())
    assert found.missing[0].startswith("No request arrived in the window: ")
    assert "No request arrived in the window before: nothing is compared." in found.missing
    assert all(said.endswith(".") and said[0].isupper() for said in found.missing)


def test_three_weeks_are_needed_of_a_week_and_more_of_a_longer_window() -> None:
    assert reach(WINDOW) == Window(NOON - 3 * WEEK, NOON)
    assert reach(Window(NOON - 2 * WEEK, NOON)) == Window(NOON - 4 * WEEK, NOON)
    assert reach(Window(0, NOON)).since_ns == 0


def test_without_settings_the_command_names_none(tmp_path: Path) -> None:
    with weeks(tmp_path) as reader:
        found = review(reader, WINDOW, FACTS, Standing(), [], Names("a record"))
    assert found.worst is not None
    assert "--config" not in found.worst.command
    assert "'a record'" in found.worst.command


@pytest.mark.parametrize("pool", [False, True])
def test_versions_are_pooled_only_when_asked(tmp_path: Path, pool: bool) -> None:
    from loraledger.record.parquet import write_parquet

    from .made import week

    rows = week(NOON, 20, 0) + week(NOON, 10, 5, engine_version="0.12.0")
    write_parquet({"requests": rows}, tmp_path, "made")
    with RecordReader(tmp_path) as reader:
        found = review(reader, WINDOW, FACTS, Standing(), [], NAMES, pool_versions=pool)
    assert found.now.total is not None
    assert found.now.total.requests == (90 if pool else 60)
    assert found.worst is not None
    assert found.worst.late == (5 if pool else 0)
