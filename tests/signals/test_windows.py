from __future__ import annotations

import pytest

from loraledger.signals.figures import Window
from loraledger.signals.windows import before, parse_moment, resolve

from .records import MINUTE, NOON, SECOND


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-09-21T12:00:00Z", NOON),
        ("2026-09-21T12:00:00", NOON),
        ("2026-09-21 12:00", NOON),
        ("2026-09-21T14:00:00+02:00", NOON),
        ("2026-09-21", NOON - 12 * 60 * MINUTE),
        ("2026-09-21T12:00:00.000001Z", NOON + 1000),
        ("1970-01-01T00:00:00Z", 0),
        ("now", NOON + 7),
        (" now ", NOON + 7),
        ("-10m", NOON + 7 - 10 * MINUTE),
        ("-1.5s", NOON + 7 - 1_500_000_000),
    ],
)
def test_a_moment_is_absolute_or_before_now(text: str, moment: int) -> None:
    assert parse_moment(text, NOON + 7) == moment


@pytest.mark.parametrize("text", ["", "yesterday", "10m", "-", "-10", "--10m", "2026-13-01", "12:00"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (moment|duration)|has no unit"):
        parse_moment(text, NOON)


@pytest.mark.parametrize(
    ("last", "since", "until", "window"),
    [
        (None, None, None, (NOON - 10 * MINUTE, NOON)),
        (MINUTE, None, None, (NOON - MINUTE, NOON)),
        (MINUTE, None, NOON - SECOND, (NOON - SECOND - MINUTE, NOON - SECOND)),
        (None, NOON - 5, None, (NOON - 5, NOON)),
        (None, None, NOON - MINUTE, (NOON - 11 * MINUTE, NOON - MINUTE)),
        (None, NOON - MINUTE, NOON + MINUTE, (NOON - MINUTE, NOON + MINUTE)),
    ],
)
def test_a_window_is_what_was_said_and_else_the_last_ten_minutes(
    last: int | None, since: int | None, until: int | None, window: tuple[int, int]
) -> None:
    assert resolve(NOON, last, since, until) == Window(*window)


@pytest.mark.parametrize(
    ("last", "since", "until", "problem"),
    [
        (MINUTE, NOON - MINUTE, None, "--last and --from"),
        (0, None, None, "longer than 0"),
        (-1, None, None, "longer than 0"),
        (None, NOON, NOON, "begins at its end"),
        (None, NOON, None, "begins at its end"),
        (None, NOON, NOON - 60 * SECOND, r"begins 1 m after its end \(2026-09-21T11:59:00Z\)"),
    ],
)
def test_what_is_no_window_is_refused(last: int | None, since: int | None, until: int | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        resolve(NOON, last, since, until)


def test_the_window_before_has_the_same_length_and_ends_where_this_one_begins() -> None:
    window = Window(NOON, NOON + 7 * SECOND)
    assert before(window) == Window(NOON - 7 * SECOND, NOON)
    assert before(window).seconds == window.seconds == 7
