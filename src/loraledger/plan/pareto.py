"""Puts what was tried in order, and finds what nothing else beats.

Theory of operation. *The order.* Who meets the objectives comes first. Among them the cheaper one is better; of two that cost the
same, the one with more memory after the floors: both do what was asked, and room is what is left for growth. Then the shorter
wait of the slowest hundredth, and last the name and the order of the policies, so that no two are ever alike. Among those that
miss the objectives, the one that misses by least comes first. What a policy does therefore never moves one piece of hardware past
another unless it changes a figure.

*The Pareto set* looks at all trials, also at those that miss: a point is in it if no other one costs no more, meets as many
requests and is as quick for the slowest hundredth, and is better in one of these. Saturated trials are no points: their waits
tell how long the trace is. Money is in whole millionths, for sums of cents must compare equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

MICRO: Final = 1_000_000


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate at work, as it is ranked."""

    offer: str
    policy: str
    units: int
    slots: int
    cost_micro: int
    """Millionths of the currency an hour, of all units."""
    usable_bytes: int
    """After the floors, of all units."""
    meets: bool
    met: float | None
    ttft_p99: float | None
    saturated: bool | None


def ranking(points: Iterable[Point], policies: Sequence[str]) -> list[Point]:
    """Best first."""

    def key(point: Point) -> tuple[object, ...]:
        place = policies.index(point.policy) if point.policy in policies else len(policies)
        last = (_worst(point.ttft_p99), point.offer, place, point.policy, point.units, point.slots)
        if point.meets:
            return (0, point.cost_micro, -point.usable_bytes, *last)
        return (1, -(point.met or 0.0), point.cost_micro, *last)

    return sorted(points, key=key)


def hardware_order(points: Iterable[Point], policies: Sequence[str]) -> list[str]:
    """The offers, by the best of each."""
    return list(dict.fromkeys(point.offer for point in ranking(points, policies)))


def pareto(points: Iterable[Point], policies: Sequence[str]) -> list[Point]:
    """Those that no other one beats, cheapest first; of several with equal figures the first in order."""
    found: list[Point] = []
    kept: dict[tuple[float, ...], Point] = {}
    for point in ranking(points, policies):
        if not point.saturated and point.met is not None:
            kept.setdefault(_figures(point), point)
    for figures, point in kept.items():
        if not any(_beats(other, figures) for other in kept):
            found.append(point)
    return sorted(found, key=lambda point: (point.cost_micro, -(point.met or 0.0), _worst(point.ttft_p99)))


def _figures(point: Point) -> tuple[float, ...]:
    """The smaller the better."""
    return (point.cost_micro, -(point.met or 0.0), _worst(point.ttft_p99))


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))


def _worst(value: float | None) -> float:
    return float("inf") if value is None else value
