from __future__ import annotations

import math
import random

import pytest

from loraledger.operate.sequential import FEWEST, Sequential, Sums


def after(differences: list[float], effect_variance: float = 1.0) -> Sequential:
    test = Sequential(effect_variance=effect_variance)
    for difference in differences:
        test.add(difference)
    return test


def bayes_factor(differences: list[float], effect: float, g: float) -> float:
    """The statistic as the docstring has it, for the hypothesis that the effect is ``effect``."""
    n = len(differences)
    moved = [difference - effect for difference in differences]
    mean = sum(moved) / n
    spread = math.sqrt(sum((value - mean) ** 2 for value in moved) / (n - 1))
    t2, v, a = (mean * math.sqrt(n) / spread) ** 2, n - 1, 1 + n * g
    return float(a**-0.5 * ((1 + t2 / v) / (1 + t2 / (v * a))) ** (n / 2))


@pytest.mark.parametrize(("n", "g"), [(6, 5.0), (12, 1.0), (40, 0.2), (40, 1.0), (300, 0.2), (300, 5.0)])
def test_at_its_ends_the_interval_has_a_bayes_factor_of_one_over_alpha(n: int, g: float) -> None:
    chance = random.Random(n)
    differences = [chance.gauss(3, 2) for _ in range(n)]
    bounds = after(differences, effect_variance=g).bounds()
    assert bounds.low is not None
    assert bounds.high is not None
    for end in (bounds.low, bounds.high):
        assert bayes_factor(differences, end, g) == pytest.approx(20, rel=1e-6)
    assert bayes_factor(differences, (bounds.low + bounds.high) / 2, g) < 20


def against(before: list[float], since: list[float], effect_variance: float = 1.0) -> Sequential:
    test = after(since, effect_variance)
    for difference in before:
        test.add_before(difference)
    return test


def two_sample_factor(before: list[float], since: list[float], effect: float, g: float) -> float:
    """The same against the time before."""
    n0, n = len(before), len(since)
    m0, m = sum(before) / n0, sum(since) / n - effect
    q = sum((value - m0) ** 2 for value in before) + sum((value - effect - m) ** 2 for value in since)
    v, weight = n + n0 - 2, n * n0 / (n + n0)
    t2, a = (m - m0) ** 2 * weight / (q / v), 1 + weight * g
    return float(a**-0.5 * ((1 + t2 / v) / (1 + t2 / (v * a))) ** ((v + 1) / 2))


@pytest.mark.parametrize(("n0", "n", "g"), [(12, 12, 1.0), (40, 12, 0.2), (12, 200, 1.0), (120, 120, 5.0)])
def test_against_the_time_before_its_ends_have_that_factor_too(n0: int, n: int, g: float) -> None:
    chance = random.Random(n0 + n)
    before, since = [chance.gauss(5, 2) for _ in range(n0)], [chance.gauss(8, 2) for _ in range(n)]
    bounds = against(before, since, g).bounds()
    assert bounds.low is not None
    assert bounds.high is not None
    assert bounds.mean is not None
    assert bounds.mean == pytest.approx(sum(since) / n - sum(before) / n0)
    for end in (bounds.low, bounds.high):
        assert two_sample_factor(before, since, end, g) == pytest.approx(20, rel=1e-6)
    assert two_sample_factor(before, since, bounds.mean, g) < 20


@pytest.mark.parametrize("known", [5, 40])
def test_parts_that_were_never_alike_are_not_called(known: int) -> None:
    called = 0
    for seed in range(1000):
        chance = random.Random(seed)
        apart = chance.gauss(0, 20)
        test = against([chance.gauss(apart, 3) for _ in range(known)], [])
        for _ in range(100):
            test.add(chance.gauss(apart, 3))
            if test.bounds().called(0) != "undecided":
                called += 1
                break
    # Taken to be alike, nearly all of them are called.
    assert called <= 50


def test_an_effect_beside_a_difference_from_before_is_called() -> None:
    chance = random.Random(3)
    test = against([chance.gauss(-5, 1) for _ in range(60)], [chance.gauss(-3, 1) for _ in range(60)])
    assert test.bounds().called(0) == "above"
    assert test.bounds().called(3) == "below"


def test_few_blocks_from_before_call_nothing() -> None:
    chance = random.Random(4)
    since = [chance.gauss(9, 1) for _ in range(60)]
    for known in range(1, FEWEST):
        found = against([chance.gauss(0, 1) for _ in range(known)], since).bounds()
        assert (found.low, found.called(0)) == (None, "undecided")
        assert found.mean is not None
    nothing = Sequential(before=Sums())
    for difference in since:
        nothing.add(difference)
    assert nothing.bounds().mean is None


def test_an_effect_is_called_and_on_the_side_where_it_is() -> None:
    chance = random.Random(1)
    better = after([chance.gauss(1, 1) for _ in range(60)]).bounds()
    assert better.called(0) == "above"
    assert better.called(5) == "below"
    assert better.called(1) == "undecided"


def test_looked_at_after_every_block_it_seldom_calls_what_is_not_there() -> None:
    called = 0
    for seed in range(1000):
        chance, test = random.Random(seed), Sequential(alpha=0.05)
        for _ in range(100):
            test.add(chance.gauss(0, 3))
            if test.bounds().called(0) != "undecided":
                called += 1
                break
    # 5 % of 1,000 is 50; a fixed-size t-test looked at a hundred times calls some 380 of them.
    assert called <= 50


@pytest.mark.parametrize(("known", "n"), [(0, 6), (0, 40), (6, 6), (40, 40)])
def test_one_last_look_errs_as_often_as_it_says(known: int, n: int) -> None:
    called = {0.05: 0, 0.01: 0}
    for seed in range(4000):
        chance = random.Random(seed)
        test = against([chance.gauss(7, 2) for _ in range(known)], [chance.gauss(7, 2) for _ in range(n)])
        for alpha in called:
            called[alpha] += test.last(0.0 if known else 7.0, alpha)
    # So many of 4,000, with a spread of 14 and of 6.
    assert 155 <= called[0.05] <= 245
    assert 20 <= called[0.01] <= 60


def test_one_last_look_sees_less_than_the_sequence_has_to() -> None:
    test = against([-1.0, 1.0] * 20, [-0.4, 1.6] * 20)
    assert test.bounds().called(0) == "undecided"
    assert test.last(0, 0.05)
    assert not test.last(1, 0.05)
    assert not after([1.0] * 9).last(0, 0.05)
    assert not Sequential().last(-1, 0.05)


def test_few_blocks_and_blocks_without_spread_call_nothing() -> None:
    assert after([1.0] * (FEWEST - 1)).bounds().called(0) == "undecided"
    constant = after([0.1] * 50).bounds()
    assert (constant.low, constant.high, constant.called(0)) == (None, None, "undecided")
    assert constant.mean == pytest.approx(0.1)
    nothing = Sequential().bounds()
    assert (nothing.blocks, nothing.mean, nothing.low) == (0, None, None)


def test_shift_and_scale_move_the_interval_and_nothing_else() -> None:
    chance = random.Random(7)
    differences = [chance.gauss(0, 1) for _ in range(30)]
    plain = after(differences).bounds()
    moved = after([1e6 + 1000 * difference for difference in differences]).bounds()
    assert plain.low is not None
    assert plain.high is not None
    assert moved.low == pytest.approx(1e6 + 1000 * plain.low, rel=1e-9)
    assert moved.high == pytest.approx(1e6 + 1000 * plain.high, rel=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="leave out blocks"):
        Sequential().add(bad)
    with pytest.raises(ValueError, match="leave out blocks"):
        Sequential().add_before(bad)


@pytest.mark.parametrize("alpha", [0.0, 1.0, math.nan])
def test_an_alpha_that_cannot_be_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        Sequential(alpha)


@pytest.mark.parametrize("variance", [0.0, math.inf])
def test_a_prior_that_cannot_be_is_refused(variance: float) -> None:
    with pytest.raises(ValueError, match="effect_variance"):
        Sequential(effect_variance=variance)
