"""The tests that say whether a difference is more than chance, and how large it is.

Theory of operation. Pearson's chi-squared on a table of replicas by two outcomes says whether outcomes depend on the replica.
With many requests any difference is significant, so Cramer's V, which does not grow with their number, says how strongly. A
replica without five expected counts of each outcome is left out (Cochran, Biometrics 10, 1954). The tail of chi-squared is by
Wilson and Hilferty (PNAS 17, 1931). Shares are compared by the pooled two-proportion test, counts by their log-ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

EXPECTED: Final = 5.0
"""Least expected count of a cell."""


class Clustering(msgspec.Struct, frozen=True):
    """Pearson's chi-squared of outcomes by replica: statistic, degrees of freedom, p-value, and Cramer's V from 0 to 1."""

    chi2: float
    freedom: int
    p: float
    v: float


def clustering(table: Mapping[str, tuple[int, int]]) -> Clustering | None:
    """Of ``name: (with the outcome, without)``. ``None`` when fewer than two replicas have counts to be judged by."""
    rows = [row for row in table.values() if min(row) >= 0]
    while True:
        with_, without = (sum(row[side] for row in rows) for side in (0, 1))
        total = with_ + without
        kept = [row for row in rows if total and sum(row) * min(with_, without) / total >= EXPECTED]
        if len(kept) < 2:
            return None
        if len(kept) == len(rows):
            break
        rows = kept
    chi2 = 0.0
    for row in rows:
        for count, of in zip(row, (with_, without), strict=True):
            expected = sum(row) * of / total
            chi2 += (count - expected) ** 2 / expected
    freedom = len(rows) - 1
    return Clustering(chi2, freedom, _tail(chi2, freedom), min(1.0, math.sqrt(chi2 / total)))


def _tail(chi2: float, freedom: int) -> float:
    spread = 2 / (9 * freedom)
    z = ((chi2 / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2


def share_z(count: float, of: float, before: float, of_before: float) -> float:
    """Standard errors by which the share ``count / of`` is above ``before / of_before``; 0 when there is nothing to compare."""
    if of <= 0 or of_before <= 0:
        return 0.0
    pooled = (count + before) / (of + of_before)
    variance = pooled * (1 - pooled) * (1 / of + 1 / of_before)
    return (count / of - before / of_before) / math.sqrt(variance) if variance > 0 else 0.0


def ratio_z(ratio: float | None, count: float, before: float) -> float:
    """Standard errors by which the log of a ratio of two Poisson counts is above 0; 0 when there is nothing to compare."""
    if not ratio or ratio <= 0 or count <= 0 or before <= 0:
        return 0.0
    return math.log(ratio) / math.sqrt(1 / count + 1 / before)
