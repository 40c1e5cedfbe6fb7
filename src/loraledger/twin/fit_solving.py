"""Small least squares with coefficients that cannot be negative, exact for the few terms that a step time has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Final

DISTURBED: Final = 0.5
"""Relative miss below which a point is never left out."""
MANY_MEDIANS: Final = 6.0
FEWEST: Final = 5
"""Points below which none is left out: too few to tell who is wrong."""

Vector = tuple[float, ...]


def least_squares(rows: Sequence[Vector], wanted: Sequence[float], *, relative: bool = True) -> Vector:
    """Coefficients, none negative, whose products with ``rows`` come nearest to ``wanted``; ``relative``: nearest in ratio.

    The best over all sets of terms that may be positive: the optimum has one of them, with the others at zero. Terms that the
    rows cannot tell apart are left at zero, the last ones first.
    """
    width = len(rows[0])
    weights = [1 / y if relative and y > 0 else 1.0 for y in wanted]
    scaled = [tuple(x * w for x in row) for row, w in zip(rows, weights, strict=True)]
    goal = [y * w for y, w in zip(wanted, weights, strict=True)]
    best: tuple[float, Vector] | None = None
    for size in range(width + 1):
        for chosen in combinations(range(width), size):
            found = _solve(scaled, goal, chosen)
            if found is None or min(found, default=0.0) < 0:
                continue
            full = [0.0] * width
            for at, value in zip(chosen, found, strict=True):
                full[at] = value
            error = sum(
                (y - sum(a * b for a, b in zip(row, full, strict=True))) ** 2
                for row, y in zip(scaled, goal, strict=True)
            )
            # A larger set must be better by more than rounding, or a term without effect would come and go.
            if best is None or error < best[0] * (1 - 1e-9) - 1e-18:
                best = error, tuple(full)
    assert best is not None  # the empty set always has a solution
    return best[1]


def _solve(rows: Sequence[Vector], goal: Sequence[float], chosen: Sequence[int]) -> list[float] | None:
    """Normal equations over ``chosen``, by Gauss with pivots, columns scaled to length 1; ``None`` when they are dependent."""
    lengths = [sum(row[i] ** 2 for row in rows) ** 0.5 for i in chosen]
    if any(length == 0 for length in lengths):
        return None
    columns = [[row[i] / length for row in rows] for i, length in zip(chosen, lengths, strict=True)]
    matrix = [
        [sum(a * b for a, b in zip(left, right, strict=True)) for right in columns]
        + [sum(a * y for a, y in zip(left, goal, strict=True))]
        for left in columns
    ]
    size = len(matrix)
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(matrix[row][at]))
        if abs(matrix[pivot][at]) < 1e-10:
            return None
        matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        for row in range(size):
            if row != at:
                factor = matrix[row][at] / matrix[at][at]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[at], strict=True)]
    return [matrix[i][size] / matrix[i][i] / lengths[i] for i in range(size)]


def without_outliers(rows: Sequence[Vector], wanted: Sequence[float]) -> tuple[list[int], int]:
    """(the points to keep, how many to leave out): see the module on when a point counts as disturbed."""
    everyone = list(range(len(rows)))
    if len(rows) < FEWEST:
        return everyone, 0
    kept = everyone
    while True:
        found = least_squares([rows[i] for i in kept], [wanted[i] for i in kept])
        misses = {
            i: abs(sum(a * b for a, b in zip(rows[i], found, strict=True)) / wanted[i] - 1) if wanted[i] > 0 else 1.0
            for i in kept
        }
        limit = max(DISTURBED, MANY_MEDIANS * median(misses.values()))
        worst = max(misses, key=lambda i: misses[i])
        if misses[worst] <= limit or len(kept) <= max(FEWEST, 3 * len(rows) // 4):
            return kept, len(everyone) - len(kept)
        kept = [i for i in kept if i != worst]


def isotonic(values: Sequence[float]) -> list[float]:
    """The sequence that never falls and is nearest to ``values`` (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, few), (high, many) = pools[-2:]
            pools[-2:] = [((low * few + high * many) / (few + many), few + many)]
    return [value for value, count in pools for _ in range(count)]
