"""Tables of the benchmarks: aligned columns for a terminal, Markdown for docs/, the same cells in both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def show(rows: Sequence[Sequence[str]], markdown: bool) -> None:
    """Print ``rows``, the first of which are the headings, and an empty line."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    edge, between = ("| ", " | ") if markdown else ("", "  ")
    for number, row in enumerate(rows):
        line = between.join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        print(f"{edge}{line}{edge[::-1]}".rstrip())
        if markdown and number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print()


def ranged(values: Sequence[float], digits: str = ",.0f") -> str:
    """Median, and in brackets the lowest and the highest."""
    return f"{statistics.median(values):{digits}} [{min(values):{digits}} to {max(values):{digits}}]"


def judged(value: float, aim: float, *, least: bool = False) -> str:
    """``aim`` and by what factor ``value`` misses it; ``least``: more is better."""
    off = aim / value if least else value / aim
    return f"{aim:,.0f}: " + ("met" if off <= 1 else f"missed by {off:.1f} x")
