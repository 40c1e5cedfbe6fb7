"""The busiest hour, and the tokens in flight through it, against a plain count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loraledger.plan.peak import HOUR_NS, ActiveTokens, active_tokens, between_rows, busiest, read_peak
from loraledger.record.tables import Row
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Window
from signals.records import MINUTE, NOON, SECOND, record, request, sample

DAY = Window(NOON - 12 * HOUR_NS, NOON + 12 * HOUR_NS)
TEN = Window(NOON, NOON + 10 * SECOND)


def held(at: int, lasts: int, prompt: int | None, generated: int | None = 0, **more: object) -> Row:
    """A request that is in flight for ``lasts`` ns from ``at`` on."""
    ends = at + lasts
    times = {
        "first_byte_ns": at,
        "first_token_ns": at,
        "first_answer_ns": at,
        "last_token_ns": ends,
        "finished_ns": ends,
    }
    return request(
        **{
            "arrived_ns": at,
            "dispatched_ns": at,
            **times,
            "prompt_tokens": prompt,
            "generated_tokens": generated,
            **more,
        }
    )


def test_the_busiest_hour_is_a_clock_hour_within_the_window(tmp_path: Path) -> None:
    rows = [request(arrived_ns=NOON + n * SECOND) for n in range(3)]
    rows += [request(arrived_ns=NOON + 2 * HOUR_NS + n * SECOND) for n in range(4)]
    with record(tmp_path, rows) as reader:
        assert busiest(reader, DAY) == Window(NOON + 2 * HOUR_NS, NOON + 3 * HOUR_NS)
        cut = Window(NOON + 30 * MINUTE, NOON + 2 * HOUR_NS + 10 * MINUTE)
        assert busiest(reader, cut) == Window(NOON + 2 * HOUR_NS, cut.until_ns)
        empty = Window(NOON - 2 * MINUTE, NOON - MINUTE)
        assert busiest(reader, empty) == empty


def test_of_two_hours_alike_the_first_is_the_peak(tmp_path: Path) -> None:
    with record(tmp_path, [request(arrived_ns=NOON + n * HOUR_NS) for n in (3, 1)]) as reader:
        assert busiest(reader, DAY).since_ns == NOON + HOUR_NS


def test_tokens_in_flight_are_prompt_and_answer_from_dispatch_to_end(tmp_path: Path) -> None:
    rows = [held(NOON + SECOND, 2 * SECOND, 100, 50), held(NOON + 2 * SECOND, 2 * SECOND, 1000)]
    with record(tmp_path, rows) as reader:
        # 150 for a second, 1,150 for one, 1,000 for one, none for seven: 99 % of the time is covered by the most.
        assert active_tokens(reader, TEN) == ActiveTokens(high=1150, most=1150, requests=2)


def test_a_level_held_for_less_than_a_hundredth_is_not_the_p99(tmp_path: Path) -> None:
    rows = [held(NOON, 10 * SECOND, 10), held(NOON + SECOND, SECOND // 20, 500), held(NOON + 5 * SECOND, 1, 9_000)]
    with record(tmp_path, rows) as reader:
        assert active_tokens(reader, TEN) == ActiveTokens(high=10, most=9010, requests=3)


def test_requests_that_follow_each_other_are_never_counted_together(tmp_path: Path) -> None:
    with record(tmp_path, [held(NOON + n * SECOND, SECOND, 7) for n in range(10)]) as reader:
        assert active_tokens(reader, TEN) == ActiveTokens(high=7, most=7, requests=10)


def test_an_open_request_is_in_flight_to_the_end_and_one_without_counts_or_a_fault_of_the_client_is_not(
    tmp_path: Path,
) -> None:
    rows = [
        held(NOON + 9 * SECOND, SECOND, 30, None, finished_ns=None, last_token_ns=None, status=None),
        held(NOON, 9 * SECOND, None, None),
        held(NOON, 9 * SECOND, 5000, status="client_error"),
        held(NOON - SECOND, 5 * SECOND, 800),
    ]
    with record(tmp_path, rows) as reader:
        assert active_tokens(reader, TEN) == ActiveTokens(high=30, most=30, requests=1)


def test_nobody_told_is_unknown(tmp_path: Path) -> None:
    with record(tmp_path, [held(NOON, SECOND, None, None)]) as reader:
        assert active_tokens(reader, TEN) is None
        assert active_tokens(reader, Window(NOON + MINUTE, NOON + 2 * MINUTE)) is None


@pytest.mark.parametrize("seed", range(4))
def test_against_a_plain_count_of_every_tenth_of_a_second(tmp_path: Path, seed: int) -> None:
    chance = np.random.default_rng(seed)
    step, steps = SECOND // 10, 1000
    level = np.zeros(steps, dtype=np.int64)
    rows = []
    for _ in range(120):
        begin, lasts = int(chance.integers(0, steps)), int(chance.integers(1, 200))
        prompt, generated = int(chance.integers(0, 900)), int(chance.integers(0, 300))
        level[begin : begin + lasts] += prompt + generated
        rows.append(held(NOON + begin * step, lasts * step, prompt, generated))
    found_in = Window(NOON, NOON + steps * step)
    with record(tmp_path, rows) as reader:
        found = active_tokens(reader, found_in)
    high = int(np.sort(level)[steps * 99 // 100 - 1])
    assert found == ActiveTokens(high=high, most=int(level.max()), requests=120)


def test_the_peak_is_measured_as_an_hour_of_its_own(tmp_path: Path) -> None:
    rows = [request(arrived_ns=NOON - HOUR_NS, adapter="early")]
    rows += [request(arrived_ns=NOON + n * SECOND, adapter=f"a{n % 3}") for n in range(9)]
    with record(tmp_path, rows) as reader:
        peak = read_peak(reader, DAY, Facts())
    assert peak.period == DAY
    assert peak.signals.window == Window(NOON, NOON + HOUR_NS)
    assert peak.signals.total is not None
    assert (peak.signals.total.requests, peak.signals.total.distinct_adapters) == (9, 3)
    assert peak.active is not None
    assert peak.active.requests == 9
    assert peak.covered.since_ns == NOON - HOUR_NS
    assert peak.seen.since_ns == NOON, "an hour before it is on record"
    assert peak.seen.until_ns == peak.covered.until_ns


def test_what_a_record_covers_is_what_lies_between_its_rows(tmp_path: Path) -> None:
    hour = Window(NOON, NOON + HOUR_NS)
    rows = [held(NOON + 10 * MINUTE, SECOND, 7), held(NOON + 20 * MINUTE, SECOND, 7)]
    last = NOON + 20 * MINUTE + SECOND
    with record(tmp_path / "a", rows) as reader:
        assert between_rows(reader, hour) == Window(NOON + 10 * MINUTE, last + 1), "to the end of the last request"
        inner = Window(NOON + 15 * MINUTE, NOON + 16 * MINUTE)
        assert between_rows(reader, inner) == inner
        later = Window(NOON + 30 * MINUTE, NOON + 40 * MINUTE)
        assert between_rows(reader, later) == later, "nothing is there, so nothing is cut"
    with record(tmp_path / "b", rows, samples=[sample(at_ns=NOON + 50 * MINUTE)]) as reader:
        assert between_rows(reader, hour).until_ns == NOON + 50 * MINUTE + 1, "a gateway without traffic still samples"
    with record(tmp_path / "c", [held(hour.until_ns - 1, 0, 7, finished_ns=None)]) as reader:
        assert between_rows(reader, hour) == Window(hour.until_ns - SECOND, hour.until_ns), "a second at least"
    with record(tmp_path / "d", []) as reader:
        assert between_rows(reader, hour) == hour


def test_the_p99_is_over_the_part_of_the_hour_that_is_on_record(tmp_path: Path) -> None:
    with record(tmp_path, [held(NOON + 50 * MINUTE, 30 * SECOND, 500)]) as reader:
        peak = read_peak(reader, DAY, Facts())
    assert peak.seen == Window(NOON + 50 * MINUTE, NOON + 50 * MINUTE + 30 * SECOND + 1)
    assert peak.active is not None
    assert peak.active.high == 500, "of the whole hour it would be 0: the level of more than 99 % of it"


def test_a_short_record_near_the_beginning_of_time_has_a_peak(tmp_path: Path) -> None:
    with record(tmp_path, [held(10**6 + n * SECOND // 8, SECOND // 8, 7, id=f"q{n}") for n in range(4)]) as reader:
        peak = read_peak(reader, Window(0, 24 * HOUR_NS), Facts())
    assert peak.active is not None
    assert peak.active.most > 0
