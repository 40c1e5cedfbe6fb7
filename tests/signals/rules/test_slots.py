from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from loraledger.record.tables import Row
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Window
from loraledger.signals.rules import Targets, advise
from loraledger.signals.rules.advice import SlotRule, Week
from loraledger.signals.rules.slots import judge_slots
from loraledger.signals.rules.weeks import HOUR_NS, WEEK_NS
from signals.records import MINUTE, NOON, base_request, record, request

MS = 1_000_000
UNTIL = NOON + 30 * MINUTE  # not at an hour's edge
WEEKS_AGO = (2, 1, 0)


def weeks(low_rate: bool, prepared: bool, calm: bool, ago: Sequence[int] = WEEKS_AGO) -> Iterator[Row]:
    """A busy hour and a quiet one in each week: what is wanted of it, and base requests, which must not matter to the hit rate."""
    for week in ago:
        peak = UNTIL - week * WEEK_NS - 26 * HOUR_NS - 30 * MINUTE
        misses = 7 if low_rate else 1
        for number in range(100):
            missed = number < misses
            # a first token after 200 ms: of 100 requests 20 s, so 10 % is 2 s
            stall = (2_100 if prepared else 1_900) // misses if missed else 0
            yield request(
                arrived_ns=peak + number * MS,
                hit_class="disk" if missed else "gpu",
                first_token_ns=peak + number * MS + (200 + stall) * MS,
                last_token_ns=peak + number * MS + (400 + stall) * MS,
                finished_ns=peak + number * MS + (401 + stall) * MS,
                engine_stall_ns=stall * MS,
                preemptions=2 if number == 0 and not calm else 0,
            )
        yield base_request(arrived_ns=peak, preemptions=0)
        # few, and all of them missed: another hour than the peak must not decide
        for number in range(3):
            yield request(arrived_ns=peak + 2 * HOUR_NS + number, hit_class="disk", engine_stall_ns=0, preemptions=0)


def rule(tmp_path: Path, rows: Sequence[Row], targets: Targets | None = None) -> SlotRule:
    with record(tmp_path, rows) as reader:
        return advise(reader, UNTIL, Facts(), targets or Targets(preparation_share=0.09)).slots


def held(found: SlotRule) -> dict[str, bool | None]:
    return {condition.name: condition.holds for condition in found.conditions}


@pytest.mark.parametrize(("low_rate", "prepared", "calm"), list(product((True, False), repeat=3)))
def test_it_fires_only_when_all_three_hold(tmp_path: Path, low_rate: bool, prepared: bool, calm: bool) -> None:
    # preparation: 2.1 s of 22.1 + 3 x 0.2 + 0.2 s a week is 9.2 %, 1.9 s of 22.7 s is 8.4 %
    found = rule(tmp_path, list(weeks(low_rate, prepared, calm)))
    assert held(found) == {"hit_rate": low_rate, "preparation": prepared, "preemptions": calm}
    assert (found.verdict == "fires") == (low_rate and prepared and calm)
    assert found.missing == ()
    assert ("replica" in found.means) == (not calm or found.verdict == "fires")
    assert ("nothing is to be done" in found.means) == (
        held(found) == {**dict.fromkeys(held(found), True), "hit_rate": False}
    )


def test_the_weeks_end_when_it_is_asked_and_the_oldest_is_first(tmp_path: Path) -> None:
    found = rule(tmp_path, list(weeks(True, True, True)))
    assert [week.window.until_ns for week in found.weeks] == [UNTIL - 2 * WEEK_NS, UNTIL - WEEK_NS, UNTIL]
    assert {week.window.seconds for week in found.weeks} == {7 * 24 * 3600}
    for week, ago in zip(found.weeks, WEEKS_AGO, strict=True):
        assert week.peak_hour_ns == UNTIL - ago * WEEK_NS - 26 * HOUR_NS - 30 * MINUTE
        assert (week.requests, week.peak_arrivals, week.peak_known, week.peak_hits) == (104, 100, 100, 93)
        assert week.preparation_ns == 7 * 300 * MS
        assert week.ttft_ns == 104 * 200 * MS + 7 * 300 * MS


def test_one_good_week_of_three_holds_it_back(tmp_path: Path) -> None:
    for good in WEEKS_AGO:
        rows = [row for ago in WEEKS_AGO for row in weeks(ago != good, True, True, [ago])]
        found = rule(tmp_path, rows)
        assert found.verdict == "holds back"
        assert held(found)["hit_rate"] is False


def test_of_equal_hours_the_first_is_the_peak(tmp_path: Path) -> None:
    first = UNTIL - 5 * HOUR_NS
    rows = [request(arrived_ns=first, hit_class="disk"), request(arrived_ns=first + HOUR_NS)]
    week = rule(tmp_path, rows).weeks[-1]
    assert week.peak_hour_ns == first - first % HOUR_NS
    assert week.hit_rate == 0.0


def test_requests_of_unknown_class_make_the_peak_and_not_its_rate(tmp_path: Path) -> None:
    at = UNTIL - 5 * HOUR_NS
    rows = [request(arrived_ns=at + n, hit_class=None if n < 4 else "unknown") for n in range(8)]
    rows += [request(arrived_ns=at), request(arrived_ns=at, hit_class="host")]
    rows += [request(arrived_ns=at + 2 * HOUR_NS + n) for n in range(9)]
    week = rule(tmp_path, rows).weeks[-1]
    assert (week.peak_arrivals, week.peak_known, week.hit_rate) == (10, 2, 0.5)


def test_what_the_client_got_wrong_counts_nowhere(tmp_path: Path) -> None:
    at = UNTIL - 5 * HOUR_NS
    rows = [request(arrived_ns=at), request(arrived_ns=at, hit_class="disk", status="client_error", http_status=400)]
    week = rule(tmp_path, rows).weeks[-1]
    assert (week.requests, week.peak_arrivals, week.hit_rate) == (1, 1, 1.0)


# --- unknown ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacking", WEEKS_AGO)
def test_a_week_without_rows_is_not_a_bad_week(tmp_path: Path, lacking: int) -> None:
    found = rule(tmp_path, list(weeks(True, True, True, [ago for ago in WEEKS_AGO if ago != lacking])))
    assert found.verdict == "holds back"
    assert held(found) == {"hit_rate": None, "preparation": True, "preemptions": None}
    assert [said for said in found.missing if "has no requests" in said]
    assert "cannot be judged yet" in found.means


def test_preparation_that_nobody_told_is_neither_little_nor_much(tmp_path: Path) -> None:
    rows = [row | {"engine_stall_ns": None} for row in weeks(True, True, True)]
    found = rule(tmp_path, rows)
    assert held(found) == {"hit_rate": True, "preparation": None, "preemptions": True}
    assert found.verdict == "holds back"
    assert any("preparation was not told of 30 of 312" in said for said in found.missing)  # 7 + 3 misses a week


def test_untold_preparation_that_cannot_matter_is_no_excuse(tmp_path: Path) -> None:
    rows = [row | {"engine_stall_ns": None} for row in weeks(True, True, True)]
    assert held(rule(tmp_path, rows, Targets(preparation_share=0.5)))["preparation"] is False


def test_a_load_waited_for_at_the_gateway_is_preparation_without_a_probe(tmp_path: Path) -> None:
    rows = []
    for row in weeks(True, False, True):
        at = row["arrived_ns"]
        assert isinstance(at, int)
        loaded = {"load_start_ns": at - 50 * MS, "load_end_ns": at + 150 * MS, "dispatched_ns": at + 150 * MS}
        rows.append(row | {"engine_stall_ns": None} | (loaded if row["hit_class"] == "disk" else {}))
    found = rule(tmp_path, rows, Targets(preparation_share=0.05))
    assert held(found)["preparation"] is True
    assert found.weeks[0].preparation_ns == 10 * 150 * MS


def test_preemptions_that_nobody_told_are_not_none(tmp_path: Path) -> None:
    found = rule(tmp_path, [row | {"preemptions": None} for row in weeks(True, True, True)])
    assert held(found) == {"hit_rate": True, "preparation": True, "preemptions": None}
    assert found.verdict == "holds back"
    assert sum("says nothing of KV preemptions" in said for said in found.missing) == 3


def test_an_empty_record_says_what_is_missing(tmp_path: Path) -> None:
    found = rule(tmp_path, [])
    assert found.verdict == "holds back"
    assert set(held(found).values()) == {None}
    assert len(found.missing) == 3


# --- limits -----------------------------------------------------------------------------------------------------------


def week(hits: int = 93, known: int = 100, preparation: int = 20, preemptions: int = 0) -> Week:
    """Of ``known`` requests, each with a time to first token of 1 ns."""
    return Week(
        window=Window(0, WEEK_NS),
        requests=known,
        peak_hour_ns=0,
        peak_arrivals=known,
        peak_known=known,
        peak_hits=hits,
        answered=known,
        ttft_ns=known,
        preparation_ns=preparation,
        told=known,
        preemptions_told=known,
        preemptions=preemptions,
    )


@pytest.mark.parametrize(
    ("one", "limits", "name"),
    [
        (week(hits=97), Targets(), "hit_rate"),
        (week(preparation=10), Targets(), "preparation"),
        (week(preemptions=1), Targets(), "preemptions"),
    ],
)
def test_exactly_at_a_target_is_no_reason_to_change(one: Week, limits: Targets, name: str) -> None:
    found = judge_slots([one] * 3, limits)
    assert {key for key, holds in held(found).items() if not holds} == {name}
    assert found.verdict == "holds back"


def test_93_percent_against_97_fails() -> None:
    found = judge_slots([week(hits=46_500, known=50_000, preparation=6_000)] * 3, Targets())
    assert [one.hit_rate for one in found.weeks] == [0.93] * 3
    assert "93.0 %, 93.0 %, 93.0 %; below 97.0 %" in found.conditions[0].words
    assert found.verdict == "fires"


def test_a_rate_just_below_target_is_shown_as_below_it() -> None:
    words = judge_slots([week(hits=96_999, known=100_000)] * 3, Targets()).conditions[0].words
    assert "96.999 %" in words


@pytest.mark.parametrize(
    ("name", "value"),
    [("hit_rate", 1.1), ("hit_rate", float("nan")), ("preparation_share", -0.1), ("budget", -1), ("cv", float("inf"))],
)
def test_a_target_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Targets(**{name: value})  # type: ignore[arg-type]
