"""What is said of a trace is what a second, slower count says."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from statistics import fmean, stdev

import pytest

from loraledger.replay.traces.describe import Arrivals, Tally, describe, spread
from loraledger.replay.traces.trace import Request

S = 10**9
MINUTE = 60 * S


def test_figures_agree_with_a_plain_count() -> None:
    rng = random.Random(3)
    times = sorted(rng.randrange(20 * MINUTE) for _ in range(3000))
    requests = [
        Request(
            at, f"t{rng.randrange(4)}", rng.choice(["a", "a", "b", "c", None]), rng.randint(1, 99), rng.randint(1, 9)
        )
        for at in times
    ]
    found = describe(requests, 9)
    assert (found.requests, found.tenants, found.adapters_named, found.adapters_used) == (3000, 4, 9, 3)
    assert found.duration_ns == times[-1] - times[0]
    assert found.rate == pytest.approx(2999 / ((times[-1] - times[0]) / S))
    gaps = [b - a for a, b in pairwise(times)]
    assert found.longest_gap_ns == max(gaps)
    assert found.gap_cv == pytest.approx(stdev(gaps) / fmean(gaps))
    prompts = sorted(request.prompt_tokens for request in requests)
    assert (found.prompt.p50, found.prompt.p90, found.prompt.p99) == (prompts[1499], prompts[2699], prompts[2969])
    assert found.prompt.mean == pytest.approx(fmean(prompts))
    minutes = [[r for r in requests if m * MINUTE <= r.at < (m + 1) * MINUTE] for m in range(20)]
    sets = [len({r.adapter for r in minute} - {None}) for minute in minutes]
    assert found.working_set.mean == pytest.approx(fmean(sets))
    seconds = Counter(at // S for at in times)
    assert found.peak_minute_rate == max(sum(seconds[s + n] for n in range(60)) for s in range(20 * 60)) / 60
    named = Counter(r.adapter for r in requests)
    base = named.pop(None)
    assert found.base_share == base / 3000
    assert found.top[0] == ("a", named["a"] / named.total())
    assert found.concentration is not None
    assert found.concentration.top1 == pytest.approx(named["a"] / named.total())
    assert sum(found.bins) == 3000


def test_silent_minutes_have_an_empty_working_set() -> None:
    found = describe([Request(0, "t", "a", 1, 1), Request(10 * MINUTE, "t", "b", 1, 1)], 2)
    assert found.working_set.mean == pytest.approx(2 / 11)
    assert found.working_set.p50 == 0
    assert found.working_set.max == 1


def test_one_request_has_neither_rate_nor_skewness_of_gaps() -> None:
    found = describe([Request(5, "t", None, 1, 1)], 0)
    assert (found.rate, found.gap_cv, found.concentration, found.duration_ns, found.base_share) == (
        None,
        None,
        None,
        0,
        1,
    )
    with pytest.raises(ValueError, match="no request"):
        describe([], 0)


@pytest.mark.parametrize("last", [0, 59, 60, 61, 119, 120, 12345, 10**7])
def test_bins_grow_with_the_trace_and_lose_nothing(last: int) -> None:
    arrivals = Arrivals(60)
    times = sorted({0, last, last // 2, last // 3})
    for at in times:
        arrivals.add(at * S)
    width, bins = arrivals.merged(last * S)
    assert len(bins) <= 60
    assert [n for at in range(len(bins)) for n in [bins[at]]] == [
        sum(1 for time in times if place * width <= time * S < (place + 1) * width) for place in range(len(bins))
    ]


def test_percentiles_are_nearest_rank() -> None:
    assert spread(Counter(range(1, 101)))[:3] == (50, 90, 99)
    assert spread(Counter({7: 1}))[:3] == (7, 7, 7)
    assert spread(Counter({1: 99, 5: 1}))[:3] == (1, 1, 1)
    assert spread(Counter({1: 98, 5: 2})).p99 == 5


def test_a_tally_is_bounded_and_stays_within_its_promise() -> None:
    tally, values = Tally(), sorted(random.Random(1).randrange(1, 10_000_000) for _ in range(200_000))
    for value in values:
        tally.add(value)
    found = tally.spread()
    assert found.p50 == pytest.approx(values[99_999], rel=1 / 4096)
    assert found.p99 == pytest.approx(values[197_999], rel=1 / 4096)
    assert (found.mean, found.max) == (sum(values) / 200_000, values[-1])
    assert len(tally._counts) < 100_000


def test_the_busiest_minute_need_not_begin_with_one() -> None:
    burst = [Request((30 + n) * S, "t", None, 1, 1) for n in range(60)]
    assert describe([Request(0, "t", None, 1, 1), *burst], 0).peak_minute_rate == 1.0
    late = [Request(3600 * S + n, "t", None, 1, 1) for n in range(90)]
    assert describe([*burst, *late], 0).peak_minute_rate == 1.5


def test_bins_are_merged_only_when_there_are_more_than_may_be_shown() -> None:
    arrivals = Arrivals(bins=4)
    for second in (0, 0, 3):
        arrivals.add(second * S)
    assert arrivals.merged(3 * S) == (S, (2, 0, 0, 1))
    arrivals.add(4 * S)
    assert arrivals.merged(4 * S) == (2 * S, (2, 1, 1))
