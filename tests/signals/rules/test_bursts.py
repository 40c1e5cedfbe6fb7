from __future__ import annotations

import math
import random
from collections.abc import Iterator
from statistics import NormalDist

import pytest

from loraledger.signals.figures import Window
from loraledger.signals.rules.advice import Targets
from loraledger.signals.rules.bursts import Stay, concurrency, find_bursts, held_by, max_in_flight, variation
from loraledger.signals.rules.sample import MINUTE_NS, Sample, Seen
from signals.records import NOON

SECOND = 10**9
HOUR = Window(NOON, NOON + 60 * MINUTE_NS)


def seen(tenant: str | None, at_s: float, took_s: float | None = 2.0) -> Seen:
    at = NOON + int(at_s * SECOND)
    row: dict[str, object] = dict.fromkeys(Seen.__struct_fields__) | {
        "hit_class": "base",
        "access": "undecided",
        "queue": 0,
    }
    ended = None if took_s is None else at + int(took_s * SECOND)
    return Seen(**(row | {"tenant": tenant, "arrived_ns": at, "dispatched_ns": at, "finished_ns": ended}))  # type: ignore[arg-type]


def sample(*parts: Iterator[Seen] | list[Seen], window: Window = HOUR) -> Sample:
    rows = sorted((one for part in parts for one in part), key=lambda one: one.arrived_ns)
    return Sample(window, False, rows, {})


def steady(tenant: str, rate_s: float, seed: int = 1) -> Iterator[Seen]:
    rng, at = random.Random(seed), 0.0
    while (at := at + rng.expovariate(rate_s)) < 3600:
        yield seen(tenant, at)


def burst(tenant: str, n: int = 300, at_s: float = 600.0) -> list[Seen]:
    """``n`` requests a tenth of a second apart, of 2 s each, and silence around them."""
    return [seen(tenant, at_s + k / 10) for k in range(n)]


def test_a_burst_is_found_and_steady_traffic_is_not() -> None:
    found = find_bursts(sample(burst("bursty"), steady("steady", 0.5), steady("rare", 0.02)), Targets())
    assert [one.tenant for one in found] == ["bursty"]
    one = found[0]
    assert one.requests == 300
    assert one.peak_to_mean == 60.0  # all of it in one of sixty minutes
    assert one.mean_in_flight == pytest.approx(300 * 2 / 3600)  # Little
    assert one.max_in_flight == 20
    # Poisson about twice the mean, 1/3: P(0..2) = 0.9952, P(0..1) = 0.9554
    assert one.limit == 2
    # two places, two requests each 2 s: the first two go at once, of the others the last waits 299 s - 29.9 s
    assert one.held == 298
    assert "2 in flight" in one.words


def test_the_times_between_arrivals_show_a_burst_that_repeats() -> None:
    rows = [seen("bursty", group * 300 + k / 10) for group in range(12) for k in range(20)]
    (one,) = find_bursts(sample(rows), Targets())
    gaps = [0.1] * 19
    every = [*gaps, 300 - 1.9] * 11 + gaps
    mean = sum(every) / len(every)
    assert one.cv == pytest.approx(math.sqrt(sum((gap - mean) ** 2 for gap in every) / len(every)) / mean)
    counts = [20, 0, 0, 0, 0] * 12
    assert one.dispersion == pytest.approx(sum((count - 4) ** 2 for count in counts) / 60 / 4)


@pytest.mark.parametrize("targets", [Targets(peak_to_mean=61.0), Targets(cv=40.0), Targets(burst_headroom=1e4)])
def test_it_takes_peak_and_variation_and_more_in_flight_than_the_limit(targets: Targets) -> None:
    assert find_bursts(sample(burst("bursty")), Targets())
    assert find_bursts(sample(burst("bursty")), targets) == ()


def test_nothing_is_said_of_a_few_requests_of_a_short_sample_or_of_nobody() -> None:
    assert find_bursts(sample(burst("few", 29)), Targets()) == ()
    short = sample(burst("short", at_s=10.0), window=Window(NOON, NOON + 4 * MINUTE_NS))
    assert find_bursts(short, Targets()) == ()
    assert find_bursts(sample([seen(None, k / 10) for k in range(300)]), Targets()) == ()
    assert find_bursts(sample([seen("open", k / 10, None) for k in range(300)]), Targets()) == ()
    assert find_bursts(sample([]), Targets()) == ()


def test_those_held_most_come_first() -> None:
    found = find_bursts(sample(burst("a", 100), burst("b", 200)), Targets())
    assert [one.tenant for one in found] == ["b", "a"]


@pytest.mark.parametrize(("mean", "limit"), [(0.0, 1), (0.005, 1), (0.1, 1), (0.2, 2), (1.0, 4), (10.0, 18)])
def test_the_limit_is_the_99th_percentile_of_poisson(mean: float, limit: int) -> None:
    assert concurrency(mean) == limit
    weights = [math.exp(-mean) * mean**k / math.factorial(k) for k in range(limit + 1)]
    assert sum(weights) >= 0.99
    assert limit == 1 or sum(weights[:-1]) < 0.99


def test_large_means_join_small_ones_without_a_step() -> None:
    assert abs(concurrency(100.0) - concurrency(100.001)) <= 2
    assert concurrency(10_000.0) == math.ceil(NormalDist(10_000, 100).inv_cdf(0.99))


def test_variation_needs_two_gaps_and_time() -> None:
    assert variation([]) is None
    assert variation([1, 2]) is None
    assert variation([5, 5, 5]) is None
    assert variation([0, 10, 20, 30]) == 0.0
    assert variation([0, 10, 40]) == pytest.approx(0.5)


def test_places_are_taken_in_order_and_kept_for_the_recorded_time() -> None:
    stays = [Stay(0, 10), Stay(1, 10), Stay(2, 10), Stay(25, 1)]
    assert max_in_flight(stays) == 3
    assert held_by(stays, 3) == (0, 0)
    assert held_by(stays, 2) == (1, 8)
    assert held_by(stays, 1) == (3, 9 + 18 + 5)
