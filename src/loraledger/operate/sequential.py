"""A t-test that may be looked at as often as one likes: is the treated part better than the rest, or worse?

Theory of operation. A rollout is looked at after every block of time, and stops when something shows. A test with a fixed sample
size, looked at over and over, finds a difference in the end where there is none. This one does not: the chance that it *ever* calls
a difference that is not there is at most ``alpha``, however often it is looked at and whenever one stops.

Each block gives one number, treated minus control: load, time of day and bursts hit both parts and cancel. What does not cancel is
who is in them: tenants differ, so the two parts differ before anything was changed. So the differences since are held against
those of the same parts in blocks from before. Of n differences since and n0 before, with means m and m0 and the standard deviation
s around the two, the statistic is the Bayes factor of the t-test with a normal prior of variance ``g`` on the effect in units of
s, and the right Haar prior on what is unknown of place and scale (Jeffreys 1961; Rouder et al. 2009)::

    S = n * n0 / (n + n0),  v = n + n0 - 2,  a = 1 + S * g,  t = (m - m0) * sqrt(S) / s
    B = a ** -0.5 * ((1 + t**2 / v) / (1 + t**2 / (v * a))) ** ((v + 1) / 2)

Without blocks from before, the parts are taken to be alike: the one-sample test, S = n and v = n - 1 with m0 = 0. With that prior B
is a nonnegative martingale in n where there is no effect, whatever place and scale (Hendriksen, de Heide and Grunwald 2021,
section 4; Wang and Ramdas 2023, section 4), so by Ville's inequality it exceeds 1 / alpha at any time with probability alpha at
most. All effects d for which the test of ``effect - d`` has not exceeded it form a *confidence sequence*: at all times together it
holds the true effect with probability 1 - alpha. Solved for the half width h, with Q the squared distances from both means::

    k = (sqrt(a) / alpha) ** (2 / (v + 1)),  h = sqrt(Q / S * (k - 1) / (1 - k / a))      infinite while k >= a

It is exact for normal, independent differences. Blocks are means or percentiles over many requests and long against the time that
a queue remembers, which makes them nearly that; ``benchmarks/sequential.py`` measures what is left of the error on replayed runs.
What it cannot know is that one part changes by itself while the other does not: a tenant that begins to send other requests.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final, Literal

import msgspec

ALPHA: Final = 0.05
EFFECT_VARIANCE: Final = 1.0
"""``g``: effects of the size of one block's standard deviation are looked for first."""
FEWEST: Final = 5
"""Blocks before anything is called: of fewer nobody would believe a standard deviation."""

Called = Literal["above", "below", "undecided"]


class Bounds(msgspec.Struct, frozen=True):
    """The confidence sequence after ``blocks`` blocks; ``mean`` is the effect so far. ``None``: no bound yet."""

    blocks: int
    mean: float | None
    low: float | None
    high: float | None

    def called(self, limit: float) -> Called:
        """Whether the effect is surely above ``limit``, surely below it, or may be either."""
        if self.low is not None and self.low > limit:
            return "above"
        if self.high is not None and self.high < limit:
            return "below"
        return "undecided"


class Sums(msgspec.Struct):
    """Of some differences: Welford's recurrence, so that nothing cancels."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def add(self, difference: float) -> None:
        """One more. Raises ValueError for one that is no number."""
        if not math.isfinite(difference):
            raise ValueError(f"a block's difference is {difference}: leave out blocks of which a part is not known")
        self.n += 1
        off = difference - self.mean
        self.mean += off / self.n
        self.squares += off * (difference - self.mean)


class Sequential(msgspec.Struct):
    """The differences so far. ``alpha`` is for both sides together. ``before``: those from before; ``None``: parts are alike."""

    alpha: float = ALPHA
    effect_variance: float = EFFECT_VARIANCE
    since: Sums = msgspec.field(default_factory=Sums)
    before: Sums | None = None

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha:g}: must be above 0 and below 1")
        if not 0 < self.effect_variance < math.inf:
            raise ValueError(f"effect_variance is {self.effect_variance:g}: must be above 0")

    def add(self, difference: float) -> None:
        """One more block. Raises ValueError for a difference that is no number."""
        self.since.add(difference)

    def add_before(self, difference: float) -> None:
        """One more block from before. Raises ValueError for a difference that is no number."""
        if self.before is None:
            self.before = Sums()
        self.before.add(difference)

    def bounds(self) -> Bounds:
        """The confidence sequence now. Where all differences are equal there is no spread to judge by: no bound."""
        mean, spread = self._mean, self._spread()
        if spread is None:
            return Bounds(self.since.n, mean, None, None)
        squares, weight, v = spread
        a = 1 + weight * self.effect_variance
        k = (math.sqrt(a) / self.alpha) ** (2 / (v + 1))
        if mean is None or k >= a:
            return Bounds(self.since.n, mean, None, None)
        half = math.sqrt(squares / weight * (k - 1) / (1 - k / a))
        return Bounds(self.since.n, mean, mean - half, mean + half)

    def last(self, limit: float, alpha: float) -> bool:
        """Whether the effect is above ``limit`` by a plain t-test, one-sided: for one look, at a time that was fixed beforehand.

        It sees what is half as large as what the sequence has to see. Student's t as a normal by Wallace's formula (1959).
        """
        mean, spread = self._mean, self._spread()
        if mean is None or spread is None:
            return False
        squares, weight, v = spread
        z = (8 * v + 1) / (8 * v + 3) * math.sqrt(v * math.log1p((mean - limit) ** 2 * weight / squares))
        return mean > limit and z > NormalDist().inv_cdf(1 - alpha)

    @property
    def _mean(self) -> float | None:
        if not self.since.n or (self.before is not None and not self.before.n):
            return None
        return self.since.mean - (0.0 if self.before is None else self.before.mean)

    def _spread(self) -> tuple[float, float, int] | None:
        """Q, S and v as above; ``None`` where there is nothing to judge by."""
        n, squares, weight, v = self.since.n, self.since.squares, float(self.since.n), self.since.n - 1
        few, largest = n < FEWEST, abs(self.since.mean)
        if self.before is not None and not few:
            n0 = self.before.n
            squares, weight, v = squares + self.before.squares, n * n0 / (n + n0), n + n0 - 2
            few, largest = n0 < FEWEST, max(largest, abs(self.before.mean))
        # Squares of rounding errors are no spread.
        return None if few or squares <= (1e-12 * largest) ** 2 * (v + 2) else (squares, weight, v)
