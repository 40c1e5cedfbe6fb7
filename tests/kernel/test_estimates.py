from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.kernel.estimates import CLIP, HALF_LIFE, MAX_WEIGHT, PRIOR_WEIGHT, Estimate

POSITIVE = st.floats(1e-3, 1e9, allow_nan=False)


def test_without_observations_the_prior_holds_for_ever() -> None:
    assert Estimate(7.0).value(0) == Estimate(7.0).value(1 << 60) == 7.0


def test_observations_pull_the_value_from_the_prior_by_their_number() -> None:
    estimate = Estimate(100.0)
    for n in range(1, 20):
        estimate.observe(200.0, n)
        assert estimate.value(n) == pytest.approx((100 * PRIOR_WEIGHT + 200 * n) / (PRIOR_WEIGHT + n))
    assert estimate.n == 19


def test_the_value_decays_back_to_the_prior_with_age() -> None:
    estimate = Estimate(100.0)
    for n in range(40):
        estimate.observe(200.0, n)
    fresh = estimate.value(40)
    ages = [estimate.value(40 + halves * HALF_LIFE) for halves in range(1, 12)]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] == pytest.approx((100 * PRIOR_WEIGHT + 200 * 20) / (PRIOR_WEIGHT + 20), rel=1e-6)
    assert fresh > 190
    assert 100 < ages[-1] < 101


def test_old_observations_weigh_less_in_the_mean() -> None:
    estimate = Estimate(100.0)
    for n in range(8):
        estimate.observe(100.0, n)
    for n in range(4):
        estimate.observe(150.0, 8 * HALF_LIFE + n)
    assert estimate.mean == pytest.approx(150.0, rel=0.01)


@given(POSITIVE, st.floats(0, 1e18, allow_nan=False))
@settings(deadline=None)
def test_one_bad_sample_moves_the_value_within_a_bound(prior: float, sample: float) -> None:
    estimate = Estimate(prior)
    estimate.observe(sample, 1)
    highest = (PRIOR_WEIGHT + CLIP) / (PRIOR_WEIGHT + 1)
    lowest = (PRIOR_WEIGHT + 1 / CLIP) / (PRIOR_WEIGHT + 1)
    assert prior * lowest * 0.999 <= estimate.value(1) <= prior * highest * 1.001


def test_one_bad_sample_among_many_good_ones_is_outlived() -> None:
    estimate = Estimate(100.0)
    for n in range(30):
        estimate.observe(100.0, n)
    estimate.observe(1e12, 30)
    assert estimate.value(30) < 112
    for n in range(31, 60):
        estimate.observe(100.0, n)
    assert estimate.value(60) < 106


@given(POSITIVE, st.lists(st.tuples(POSITIVE, st.integers(0, 4 * HALF_LIFE)), max_size=60))
@settings(deadline=None)
def test_the_value_stays_between_the_least_and_the_greatest_that_was_seen(
    prior: float, steps: list[tuple[float, int]]
) -> None:
    estimate, now = Estimate(prior), 0
    for value, gap in steps:
        now += gap
        estimate.observe(value, now)
    seen = [prior, *(value for value, _ in steps)]
    assert min(seen) * 0.999 <= estimate.value(now) <= max(seen) * 1.001
    assert estimate.weight <= MAX_WEIGHT
