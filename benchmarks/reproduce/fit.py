"""Least squares for a model that can only be run: Levenberg and Marquardt's method with differences for derivatives.

Theory of operation. Each constant is ``prior * exp(theta)``: it stays positive, and a step means the same for all. Beside what the
model misses stands one residual for each constant, ``theta / width``: where the data do not say, a constant stays at its prior, so
four measured points can carry eight constants. ``width`` is how far off the prior may well be (0.3: by a third). Nothing is
random: the same data give the same constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Residuals = Callable[[list[float]], list[float]]
"""What the model misses at these constants, in units of what is expected to be missed."""


def fit(
    residuals: Residuals,
    priors: Sequence[float],
    widths: Sequence[float],
    *,
    rounds: int = 10,
    step: float = 0.04,
) -> list[float]:
    """The constants that make the sum of squares least, starting from ``priors`` (all above 0).

    ``step``: relative change for a derivative; larger than the jumps that a discrete simulation makes. Costs about
    ``rounds * (len(priors) + 2)`` runs of the model.
    """

    def missed(theta: list[float]) -> list[float]:
        found = residuals([prior * math.exp(move) for prior, move in zip(priors, theta, strict=True)])
        return [*found, *(move / width for move, width in zip(theta, widths, strict=True))]

    theta = [0.0] * len(priors)
    now, damping = missed(theta), 1e-2
    for _ in range(rounds):
        columns = []
        for index in range(len(theta)):
            moved = list(theta)
            moved[index] += step
            columns.append([(after - before) / step for after, before in zip(missed(moved), now, strict=True)])
        before = _squares(now)
        for _ in range(5):
            moves = _solve(columns, now, damping)
            trial = [at - max(-0.7, min(0.7, move)) for at, move in zip(theta, moves, strict=True)]
            found = missed(trial)
            if _squares(found) < before:
                theta, now, damping = trial, found, max(damping / 4, 1e-6)
                break
            damping *= 6
        if before - _squares(now) < 1e-4 * before:
            break
    return [prior * math.exp(move) for prior, move in zip(priors, theta, strict=True)]


def _squares(values: Sequence[float]) -> float:
    return math.fsum(value * value for value in values)


def _solve(columns: list[list[float]], missed: list[float], damping: float) -> list[float]:
    """(J'J + damping diag J'J) x = J'r, by elimination with the largest pivot."""
    size = len(columns)
    rows = [[math.fsum(a * b for a, b in zip(one, other, strict=True)) for other in columns] for one in columns]
    for index in range(size):
        rows[index][index] *= 1 + damping
        rows[index].append(math.fsum(a * b for a, b in zip(columns[index], missed, strict=True)))
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(column + 1, size):
            factor = rows[row][column] / rows[column][column]
            for at in range(column, size + 1):
                rows[row][at] -= factor * rows[column][at]
    found = [0.0] * size
    for row in reversed(range(size)):
        rest = math.fsum(rows[row][at] * found[at] for at in range(row + 1, size))
        found[row] = (rows[row][size] - rest) / rows[row][row]
    return found
