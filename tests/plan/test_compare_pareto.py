"""Hardware is ranked by what it does, whatever the policies are called; the Pareto set is what looking at all pairs gives."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from loraledger.plan.pareto import Point, hardware_order, pareto, ranking

OFFERS = ("a", "b", "c", "d")
POLICIES = ("p", "q", "r")
SHARES = st.sampled_from((0.5, 0.9, 0.99, 1.0))


def points(offers: tuple[str, ...] = OFFERS) -> st.SearchStrategy[list[Point]]:
    """One for each offer; figures that often tie."""
    return st.tuples(*(point(offer) for offer in offers)).map(list)


def point(offer: str) -> st.SearchStrategy[Point]:
    return st.builds(
        Point,
        offer=st.just(offer),
        policy=st.just("p"),
        units=st.integers(1, 3),
        slots=st.sampled_from((4, 8)),
        cost_micro=st.integers(1, 4),
        usable_bytes=st.integers(1, 3),
        meets=st.booleans(),
        met=SHARES,
        ttft_p99=st.one_of(st.none(), st.sampled_from((0.1, 0.2))),
        saturated=st.sampled_from((True, False, None)),
    )


def under(found: list[Point], policy: str) -> list[Point]:
    return [msgspec.structs.replace(one, policy=policy) for one in found]


@given(points(), st.permutations(POLICIES))
def test_a_policy_without_effect_does_not_reorder_hardware(found: list[Point], order: list[str]) -> None:
    alone = [hardware_order(under(found, policy), POLICIES) for policy in POLICIES]
    together = [one for policy in order for one in under(found, policy)]
    assert alone == [alone[0]] * len(POLICIES)
    assert hardware_order(together, order) == alone[0]
    assert hardware_order(together[::-1], POLICIES) == alone[0]
    assert ranking(together, order)[0].policy == order[0]


@given(points(), points())
def test_the_order_depends_on_nothing_but_the_points(found: list[Point], others: list[Point]) -> None:
    all_ = [*found, *under(others, "q")]
    assert ranking(all_, POLICIES) == ranking(all_[::-1], POLICIES)
    met = [one.meets for one in ranking(all_, POLICIES)]
    assert met == sorted(met, reverse=True)


def test_of_two_that_cost_the_same_the_one_with_more_memory_after_the_floors_is_first() -> None:
    common: dict[str, Any] = {"policy": "p", "units": 1, "slots": 8, "cost_micro": 5, "meets": True, "saturated": False}
    roomy = Point(offer="z", usable_bytes=30, met=0.99, ttft_p99=0.9, **common)
    tight = Point(offer="a", usable_bytes=14, met=1.0, ttft_p99=0.1, **common)
    assert ranking([tight, roomy], POLICIES) == [roomy, tight]
    cheaper = msgspec.structs.replace(tight, cost_micro=4)
    assert ranking([cheaper, roomy], POLICIES) == [cheaper, roomy]


def test_who_misses_comes_after_who_meets_and_by_how_much_is_missed() -> None:
    common: dict[str, Any] = {
        "policy": "p",
        "units": 1,
        "slots": 8,
        "usable_bytes": 1,
        "ttft_p99": 1.0,
        "saturated": False,
    }
    dear = Point(offer="dear", cost_micro=900, meets=True, met=0.99, **common)
    near = Point(offer="near", cost_micro=800, meets=False, met=0.98, **common)
    far = Point(offer="far", cost_micro=1, meets=False, met=0.10, **common)
    assert ranking([far, near, dear], POLICIES) == [dear, near, far]


@given(points(), points(("e", "f", "g")))
def test_the_pareto_set_is_what_no_other_beats(found: list[Point], others: list[Point]) -> None:
    all_ = [one for one in (*found, *others) if not one.saturated]
    kept = pareto([*found, *others], POLICIES)

    def figures(one: Point) -> tuple[float, float, float]:
        return one.cost_micro, -(one.met or 0.0), float("inf") if one.ttft_p99 is None else one.ttft_p99

    def beats(one: Point, other: Point) -> bool:
        pairs = list(zip(figures(one), figures(other), strict=True))
        return all(mine <= theirs for mine, theirs in pairs) and any(mine < theirs for mine, theirs in pairs)

    unbeaten = {figures(one) for one in all_ if not any(beats(other, one) for other in all_)}
    assert {figures(one) for one in kept} == unbeaten
    assert len(kept) == len(unbeaten)
    assert [one.cost_micro for one in kept] == sorted(one.cost_micro for one in kept)
    assert not any(beats(one, other) for one, other in product(kept, kept))
