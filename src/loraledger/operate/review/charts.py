"""Lines over time as inline SVG: this window over the one before, on the same axes.

Theory of operation. A chart is text: no script draws it. Colours are those of the page (``currentColor`` and CSS variables), so it
follows light and dark and prints. Where a piece has too little to tell, the line breaks. Each piece has a title of its own, which a
browser shows under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Final

import msgspec

from loraledger.operate.review.series import Point, Series
from loraledger.operate.review.spelled import Unit, moment, spell
from loraledger.signals.figures import Window
from loraledger.units import NS_PER_S

WIDTH: Final = 560
HEIGHT: Final = 190
LEFT: Final = 44
RIGHT: Final = 6
TOP: Final = 10
BOTTOM: Final = 24
_DAY_NS: Final = 86_400 * NS_PER_S
_TICKS_NS: Final = tuple(seconds * NS_PER_S for seconds in (10, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 12 * 3600))
_MOST_TICKS: Final = 8


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """What is drawn. ``top``: of the axis; ``None``: as high as the figures are."""

    name: str
    unit: Unit
    window: Window
    series: Series
    take: Callable[[Point], float | None]
    top: float | None = None


def line_chart(plot: Plot) -> str:
    """The SVG, or nothing where no piece has a figure."""
    values = [value for point in (*plot.series.now, *plot.series.before) if (value := plot.take(point)) is not None]
    if not values:
        return ""
    step, top = _axis(max(values)) if plot.top is None else (plot.top / 4, plot.top)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_told(plot))}">',
        *_grid(plot.unit, step, top),
        *_days(plot.window),
        *(f'<path class="was" d="{path}"/>' for path in _paths(plot, plot.series.before, top)),
        *(f'<path class="now" d="{path}"/>' for path in _paths(plot, plot.series.now, top)),
        *_titles(plot),
        "</svg>",
    ]
    return "\n".join(parts)


def extremes(plot: Plot) -> str:
    """The lowest and the highest piece of the window, in words."""
    found = [(value, point.number) for point in plot.series.now if (value := plot.take(point)) is not None]
    if not found:
        return "too little to tell"
    low, high = min(found), max(found)
    return f"lowest {_at(plot, *low)}, highest {_at(plot, *high)}"


def _at(plot: Plot, value: float, number: int) -> str:
    unit = " s" if plot.unit == "s" else ""
    return f"{spell(value, plot.unit)}{unit} ({_when(plot, number)})"


def _when(plot: Plot, number: int) -> str:
    return moment(plot.window.since_ns + number * plot.series.piece_ns, "%a %d %b %H:%M")


def _told(plot: Plot) -> str:
    return f"{plot.name}: {extremes(plot)}"


def _axis(most: float) -> tuple[float, float]:
    """Three to five steps of 1, 2 or 5 times a power of ten, and the end of the axis."""
    if most <= 0:
        return 0.25, 1.0
    power = 10.0 ** math.floor(math.log10(most / 3))
    step = next(factor * power for factor in (1, 2, 5, 10) if most / (factor * power) <= 5)
    return step, step * math.ceil(most / step - 1e-9)


def _grid(unit: Unit, step: float, top: float) -> Iterator[str]:
    for number in range(round(top / step) + 1):
        y = _y(number * step, top)
        text = f"{number * step:.0%}" if unit == "share" else f"{number * step:g}"
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'


def _days(window: Window) -> Iterator[str]:
    """Ticks at whole moments of UTC."""
    length = window.until_ns - window.since_ns
    days = -(-length // (_DAY_NS * _MOST_TICKS)) * _DAY_NS
    tick = next((tick for tick in _TICKS_NS if tick * _MOST_TICKS >= length), days)
    form = "%a %d" if tick >= _DAY_NS else "%H:%M" if tick >= 60 * NS_PER_S else "%H:%M:%S"
    at = -(-window.since_ns // tick) * tick
    while at < window.until_ns:
        x = LEFT + (at - window.since_ns) / length * (WIDTH - LEFT - RIGHT)
        yield f'<path class="grid" d="M{x:.1f} {HEIGHT - BOTTOM}v4"/>'
        if x < WIDTH - RIGHT - 30:
            yield f'<text x="{x:.1f}" y="{HEIGHT - 6}">{moment(at, form)}</text>'
        at += tick


def _paths(plot: Plot, points: Sequence[Point], top: float) -> Iterator[str]:
    """A path for each run of pieces that are known; a piece alone is a short dash."""
    run: list[tuple[int, float]] = []
    for point in (*points, Point(-1, None, None)):
        value = plot.take(point)
        if run and (value is None or point.number != run[-1][0] + 1):
            yield _path(plot, run, top)
            run = []
        if value is not None:
            run.append((point.number, value))


def _path(plot: Plot, run: list[tuple[int, float]], top: float) -> str:
    if len(run) == 1:
        number, value = run[0]
        return f"M{_x(plot, number + 0.2):.1f} {_y(value, top):.1f}H{_x(plot, number + 0.8):.1f}"
    return "M" + "L".join(f"{_x(plot, number + 0.5):.1f} {_y(value, top):.1f}" for number, value in run)


def _titles(plot: Plot) -> Iterator[str]:
    """A piece of the chart that says what it is."""
    was = {point.number: plot.take(point) for point in plot.series.before}
    for point in plot.series.now:
        x, width = _x(plot, point.number), _x(plot, 1) - _x(plot, 0)
        said = f"{_when(plot, point.number)}: {spell(plot.take(point), plot.unit)}"
        said += f", before {spell(was.get(point.number), plot.unit)}"
        yield (
            f'<rect class="hover" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}">'
            f"<title>{escape(said)}</title></rect>"
        )


def _x(plot: Plot, number: float) -> float:
    length = plot.window.until_ns - plot.window.since_ns
    return LEFT + number * plot.series.piece_ns / length * (WIDTH - LEFT - RIGHT)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - min(1.0, value / top) * (HEIGHT - TOP - BOTTOM)


def bar(value: float | None, most: float) -> str:
    """A bar as long as ``value`` is to ``most``; nothing for what is unknown or none."""
    if not value or not most:
        return ""
    return (
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{100 * value / most:.1f}" height="8"/></svg>'
    )
