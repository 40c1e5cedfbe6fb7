"""Moments and windows as people write them.

Theory of operation. A moment is absolute (ISO 8601; without a zone it is UTC), ``now``, or so long before now (``-10m``); a window
is [since, until). Nothing here reads a clock: whoever asks says what time it is. Fractions are kept to the microsecond.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from loraledger.signals.figures import Window
from loraledger.units import NS_PER_S, format_duration, parse_duration

DEFAULT_NS: Final = 600 * NS_PER_S
"""What is looked at when nothing is said: the last ten minutes."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def parse_moment(text: str, now_ns: int) -> int:
    """ns since the epoch of ``2026-09-21T12:00:00Z`` (or with another zone, or without: UTC), ``now`` or ``-10m``.

    Raises ValueError, with what would be accepted.
    """
    word = text.strip()
    if word == "now":
        return now_ns
    if word.startswith("-"):
        return now_ns - parse_duration(word[1:])
    try:
        moment = datetime.fromisoformat(word)
    except ValueError as error:
        raise ValueError(
            f"{text!r} is not a moment: write ISO 8601 such as 2026-09-21T12:00:00Z, now, or so long before now: -10m"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // _MICROSECOND * 1000


def resolve(now_ns: int, last_ns: int | None, since_ns: int | None, until_ns: int | None) -> Window:
    """The window that was asked for: ``last_ns`` up to ``until_ns``, or from ``since_ns``; what is not said is the last 10 m.

    Raises ValueError when that is no window: too much was said, or nothing lies in it.
    """
    if last_ns is not None and since_ns is not None:
        raise ValueError("a window is said by its length or by its beginning: give one of --last and --from")
    if last_ns is not None and last_ns <= 0:
        raise ValueError(f"the last {last_ns} ns hold nothing: a window is longer than 0")
    until = now_ns if until_ns is None else until_ns
    since = until - (DEFAULT_NS if last_ns is None else last_ns) if since_ns is None else since_ns
    if since >= until:
        off = f"{format_duration(since - until)} after" if since > until else "at"
        raise ValueError(f"the window is empty: it begins {off} its end ({_iso(until)})")
    return Window(since, until)


def before(window: Window) -> Window:
    """The window of the same length that ends where this one begins."""
    return Window(2 * window.since_ns - window.until_ns, window.since_ns)


def _iso(at_ns: int) -> str:
    return f"{_EPOCH + timedelta(microseconds=at_ns // 1000):%Y-%m-%dT%H:%M:%SZ}"
