"""Figures that start from a prior, shrink toward what is observed, and decay back with age.

Theory of operation. An ``Estimate`` is a weighted mean of its prior (weight ``PRIOR_WEIGHT`` observations) and what was seen.
The weight of what was seen halves every ``HALF_LIFE``, so a replica that was slow an hour ago is given the benefit of the doubt
again: the decay is the exploration, and it is bounded by the prior. One observation moves the mean by at most ``CLIP`` times the
present value, so one bad sample never bans a replica.

This is the posterior mean of a normal model with known prior weight (shrinkage); the half-life makes it a forgetting filter.
"""

from __future__ import annotations

import msgspec

PRIOR_WEIGHT = 3.0
HALF_LIFE = 600 * 1_000_000_000
FRESH = HALF_LIFE // 64
"""What was seen has its full weight for this long: the power is not worth its time."""
CLIP = 4.0
MAX_WEIGHT = 50.0


class Estimate(msgspec.Struct, array_like=True):
    """One learnt figure. ``mean`` and ``weight`` describe what was observed up to ``at`` (ns); ``n`` counts observations."""

    prior: float
    mean: float = 0.0
    weight: float = 0.0
    at: int = 0
    n: int = 0
    current: float = 0.0
    """The figure as of the last observation or ``refresh``: what decisions use, because decaying it for each replica of each
    decision cost a third of their time."""

    def __post_init__(self) -> None:
        if self.current == 0.0:
            self.current = self.prior

    def refresh(self, now: int) -> None:
        """Let ``current`` decay to ``now``."""
        self.current = self.value(now)

    def value(self, now: int) -> float:
        """The figure to use at ``now``."""
        weight, age = self.weight, now - self.at
        if weight == 0.0:
            return self.prior
        if age >= FRESH:
            weight *= 0.5 ** (age / HALF_LIFE)
        return (self.prior * PRIOR_WEIGHT + self.mean * weight) / (PRIOR_WEIGHT + weight)

    def observe(self, value: float, now: int) -> None:
        """Take in one observation, clipped to within ``CLIP`` times the present value."""
        prior, mean, weight, age = self.prior, self.mean, self.weight, now - self.at
        current = prior
        if weight:
            if age >= FRESH:
                weight *= 0.5 ** (age / HALF_LIFE)
            current = (prior * PRIOR_WEIGHT + mean * weight) / (PRIOR_WEIGHT + weight)
        if value < current / CLIP:
            value = current / CLIP
        elif value > current * CLIP:
            value = current * CLIP
        self.mean = mean = (mean * weight + value) / (weight + 1.0)
        self.weight = weight = weight + 1.0 if weight + 1.0 < MAX_WEIGHT else MAX_WEIGHT
        self.at = now
        self.n += 1
        self.current = (prior * PRIOR_WEIGHT + mean * weight) / (PRIOR_WEIGHT + weight)
