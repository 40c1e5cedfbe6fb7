"""Lines that break where nothing is known, and axes that hold what they show."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from loraledger.operate.review.charts import HEIGHT, WIDTH, Plot, _axis, bar, extremes, line_chart
from loraledger.operate.review.series import Point, Series

from .made import DAY, WINDOW


def plot(now: list[float | None], before: list[float | None] | None = None) -> Plot:
    def points(values: list[float | None]) -> tuple[Point, ...]:
        return tuple(Point(number, None, value) for number, value in enumerate(values))

    series = Series(DAY, 7, points(now), points(before or []))
    return Plot(name="p99 of <b>", unit="s", window=WINDOW, series=series, take=lambda point: point.p99)


def paths(drawn: str, kind: str) -> list[str]:
    return re.findall(rf'<path class="{kind}" d="([^"]*)"', drawn)


def test_a_chart_is_xml_with_a_line_for_each_run_that_is_known() -> None:
    drawn = line_chart(plot([1.0, 2.0, None, 3.0, None, 1.0, 1.0], [4.0, 4.0]))
    ElementTree.fromstring(drawn)
    assert [path.count("L") for path in paths(drawn, "now")] == [1, 0, 1]
    assert "H" in paths(drawn, "now")[1], "a piece alone is a dash"
    assert len(paths(drawn, "was")) == 1
    assert drawn.count("<title>") == 7


def test_a_piece_that_is_missing_breaks_the_line_too() -> None:
    series = Series(DAY, 7, (Point(0, None, 1.0), Point(2, None, 1.0)), ())
    drawn = line_chart(Plot(name="p", unit="s", window=WINDOW, series=series, take=lambda point: point.p99))
    assert len(paths(drawn, "now")) == 2


def test_every_point_lies_on_the_chart() -> None:
    drawn = line_chart(plot([0.0, 7.3, 1e-9, 5.0, 2.0, 0.1, 7.0]))
    for x, y in re.findall(r"[ML]([0-9.]+) ([0-9.]+)", " ".join(paths(drawn, "now"))):
        assert 0 <= float(x) <= WIDTH
        assert 0 <= float(y) <= HEIGHT


def test_nothing_known_draws_nothing() -> None:
    assert line_chart(plot([None, None])) == ""
    assert extremes(plot([None])) == "too little to tell"


def test_the_lowest_and_the_highest_piece_are_named() -> None:
    assert extremes(plot([0.5, 0.25, 2.0])) == "lowest 0.250 s (Tue 15 Sep 12:00), highest 2.000 s (Wed 16 Sep 12:00)"


@pytest.mark.parametrize("most", [1e-9, 0.034, 0.1, 0.99, 1.0, 3.0, 4.43, 5.0, 17.0, 123456.0])
def test_an_axis_has_a_few_round_steps_and_holds_the_most(most: float) -> None:
    step, top = _axis(most)
    assert top >= most * (1 - 1e-9)
    assert 2 <= round(top / step) <= 6
    assert f"{step:e}"[0] in "125"


def test_an_axis_of_nothing_is_one() -> None:
    assert _axis(0.0) == (0.25, 1.0)


def test_a_bar_is_as_long_as_its_figure() -> None:
    lengths = [float(re.findall(r'rect width="([0-9.]+)"', bar(value, 8.0))[0]) for value in (2.0, 4.0, 8.0)]
    assert lengths == [25.0, 50.0, 100.0]
    assert all(one < other for one, other in pairwise(lengths))
    assert bar(None, 8.0) == bar(0.0, 8.0) == bar(1.0, 0.0) == ""
