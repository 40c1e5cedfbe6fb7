"""Policy x hardware: what each does alone, and what only the two together do.

Theory of operation. A table of one figure, a row for each policy and a column for each offer, is taken apart as a two-way
analysis of variance without repeats does it (Fisher 1925) ::

    figure = mean + effect of the policy + effect of the hardware + interaction

where an effect is the mean of a row (column) less the mean of all. So a policy that does nothing has effect 0 and no interaction,
and whatever hardware does cannot hide in it. ``shares`` are sums of squares. A column that lacks a figure is left out whole:
means over different columns would mix hardware into the policies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

_EPSILON = 1e-12
"""Of the mean: what is below it is the rounding of the sums."""


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """A figure by policy and offer, in its own unit. ``mean`` and effects are ``None`` when no column is complete."""

    figure: str
    policies: tuple[str, ...]
    offers: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    """A row for each policy."""
    left_out: tuple[str, ...]
    """Offers that lack a figure; effects are over the others."""
    mean: float | None
    policy_effects: tuple[float, ...] | None
    offer_effects: tuple[float | None, ...] | None
    """``None`` for an offer that is left out."""
    interactions: tuple[tuple[float | None, ...], ...] | None
    shares: tuple[float, float, float] | None
    """Of what varies: by policy alone, by hardware alone, by the two together; ``None`` when nothing varies."""


def grid(
    figure: str, policies: Sequence[str], offers: Sequence[str], values: Mapping[tuple[str, str], float | None]
) -> Grid:
    """The table of ``values`` (by policy and offer), taken apart."""
    rows = tuple(tuple(values.get((policy, offer)) for offer in offers) for policy in policies)
    whole = [n for n in range(len(offers)) if all(row[n] is not None for row in rows)] if rows else []
    full = [[row[n] or 0.0 for n in whole] for row in rows]
    left_out = tuple(offer for n, offer in enumerate(offers) if n not in whole)
    if not whole:
        return Grid(
            figure=figure,
            policies=tuple(policies),
            offers=tuple(offers),
            values=rows,
            left_out=left_out,
            mean=None,
            policy_effects=None,
            offer_effects=None,
            interactions=None,
            shares=None,
        )
    mean = _mean([value for row in full for value in row])
    by_policy = [_calm(_mean(row) - mean, mean) for row in full]
    by_offer = [_calm(_mean(column) - mean, mean) for column in zip(*full, strict=True)]
    between = [
        [_calm(value - mean - by_policy[i] - by_offer[j], mean) for j, value in enumerate(row)]
        for i, row in enumerate(full)
    ]
    return Grid(
        figure=figure,
        policies=tuple(policies),
        offers=tuple(offers),
        values=rows,
        left_out=left_out,
        mean=mean,
        policy_effects=tuple(by_policy),
        offer_effects=_spread(by_offer, whole, len(offers)),
        interactions=tuple(_spread(row, whole, len(offers)) for row in between),
        shares=_shares(by_policy, by_offer, between),
    )


def _shares(
    by_policy: Sequence[float], by_offer: Sequence[float], between: Sequence[Sequence[float]]
) -> tuple[float, float, float] | None:
    policy = len(by_offer) * sum(value * value for value in by_policy)
    offer = len(by_policy) * sum(value * value for value in by_offer)
    both = sum(value * value for row in between for value in row)
    whole = policy + offer + both
    return (policy / whole, offer / whole, both / whole) if whole else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _calm(value: float, mean: float) -> float:
    return 0.0 if abs(value) <= _EPSILON * abs(mean) else value


def _spread(values: Sequence[float], places: Sequence[int], width: int) -> tuple[float | None, ...]:
    found: list[float | None] = [None] * width
    for place, value in zip(places, values, strict=True):
        found[place] = value
    return tuple(found)
