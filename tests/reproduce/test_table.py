"""The table counts what was held out, keeps misses, and folds only what passes."""

from __future__ import annotations

import math

import pytest
from benchmarks.reproduce.fit import fit
from benchmarks.reproduce.table import (
    FLOOR,
    Counted,
    LeftOut,
    Line,
    cells,
    folded,
    markdown,
    number,
    share,
    summary,
)


def line(target: str, error: str, passed: bool, group: str = "g", fitted: bool = False) -> Line:
    return Line(target, f"run {error}", "s", 1.0, 2.0, error, "5 %", passed, "" if passed else "why", fitted, group)


LINES = [
    line("speed", "+1.0 %", True),
    line("speed", "-3.0 %", True),
    line("speed", "+9.0 %", False),
    line("speed", "+0.1 %", True, fitted=True),
    line("cost", "x1.20", True, group=""),
]


def test_fitted_lines_are_shown_and_not_counted() -> None:
    assert share(LINES) == (3, 4)
    assert [cells(one)[7] for one in LINES] == ["yes", "yes", "MISS", "fitted", "yes"]


def test_only_passing_lines_of_one_group_are_folded_and_the_worst_is_named() -> None:
    found = folded(LINES)
    assert [(one.what, one.error) for one in found] == [
        ("g (2 runs)", "worst -3.0 %"),
        ("run +9.0 %", "+9.0 %"),
        ("run +0.1 %", "+0.1 %"),
        ("run x1.20", "x1.20"),
    ]
    assert found[0].published == "1"


def test_factors_are_folded_by_their_distance_from_one() -> None:
    found = folded([line("speed", "x1.01", True), line("speed", "x0.80", True)])
    assert found[0].error == "worst x0.80"


def test_of_a_floor_the_nearest_is_named_and_a_reason_that_all_give_is_kept() -> None:
    runs = [
        Line("theory", "run", "s", 1.0, value, f"{100 * (value - 1):+.1f} %", FLOOR, True, "a bound", group="g")
        for value in (2.0, 1.2, 3.0)
    ]
    assert [(one.error, one.reason) for one in folded(runs)] == [("nearest +20.0 %", "a bound")]
    other = Line("theory", "run", "s", 1.0, 1.1, "+10.0 %", "5 %", True, "another", group="g")
    assert [(one.error, one.tolerance, one.reason) for one in folded([*runs, other])] == [
        ("worst +200.0 %", "as each", "")
    ]


def test_summary_names_targets_as_they_come_constants_and_what_was_left_out() -> None:
    said = summary(LINES, [Counted("a gpu", 9, 8, "sizes")], [LeftOut("some runs", "another system")])
    assert said == [
        "3 of 4 lines pass (75 %); speed: 2 of 3, cost: 1 of 1",
        "a gpu: 9 constants, 8 runs; tables: sizes",
        "not predicted: some runs: another system",
    ]


def test_markdown_has_one_row_a_line_and_no_stray_bars() -> None:
    odd = Line("speed", "a|b", "", "x", "y", "0", "exact", True)
    rows = markdown([odd], ["below"]).splitlines()
    assert rows[2] == "| speed | a/b | x | y |  | 0 | exact | yes |  |"
    assert rows[-1] == "- below"


def test_numbers_have_four_figures() -> None:
    assert [number(value) for value in (0.123456, 12_345.6, 3, "text")] == ["0.1235", "12,346", "3", "text"]


def test_fit_finds_what_data_say_and_stays_at_the_prior_where_they_say_nothing() -> None:
    def missed(values: list[float]) -> list[float]:
        return [(values[0] * x + values[1] - (3.0 * x + 5.0)) / 1e-4 for x in (1.0, 2.0, 4.0)]

    found = fit(missed, [2.0, 6.0, 7.0], [0.5, 0.5, 0.5], rounds=20, step=1e-3)
    assert found == pytest.approx([3.0, 5.0, 7.0], rel=1e-3)


def test_prior_wins_by_its_width_over_loose_data() -> None:
    found = fit(lambda values: [math.log(values[0] / 2.0)], [1.0], [1.0], step=1e-3)
    assert found[0] == pytest.approx(math.sqrt(2.0), rel=1e-3)
