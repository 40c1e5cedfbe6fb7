"""Figures and names as the review writes them. Unknown is ``None`` here and ``-`` on the page.

Names come from anybody: what a terminal or a reader would take for something else is escaped (``plain``) before the page escapes
what it would take for markup.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from loraledger.signals.figures import Version, Window
from loraledger.units import NS_PER_S, format_bytes

Unit = Literal["share", "s", "ms", "count", "bytes", "tokens"]
UNKNOWN: Final = "-"
_LEAST_POINTS: Final = 0.0005
_LEAST_CHANGE: Final = 0.005


class Pair(msgspec.Struct, frozen=True):
    """A figure of the window, and of the window before it; in one unit."""

    now: float | None
    before: float | None


def spell(value: float | None, unit: Unit) -> str:
    """``value`` with its unit, where the unit is not in the heading: shares, bytes."""
    if value is None:
        return UNKNOWN
    if unit == "share":
        return _share(value)
    if unit == "bytes":
        return format_bytes(round(value))
    if unit == "s":
        return f"{value:.3f}" if value < 100 else f"{value:,.0f}"
    if unit == "ms":
        return f"{value * 1000:.1f}"
    return _count(value)


def unit_of(unit: Unit) -> str:
    """What a heading says of it."""
    return {"s": "s", "ms": "ms", "tokens": "tokens"}.get(unit, "")


def change(pair: Pair, unit: Unit) -> str | None:
    """``+12%``, ``x 3.1``, of shares ``-4.0 pt``; ``None`` where one is unknown, or where it rounds to nothing."""
    now, before = pair.now, pair.before
    if now is None or before is None or now == before:
        return None
    if unit == "share":
        return f"{(now - before) * 100:+.1f} pt" if abs(now - before) >= _LEAST_POINTS else None
    if before == 0:
        return "from 0"
    ratio = now / before
    if ratio >= 2:
        return f"x {ratio:,.1f}"
    return f"{ratio - 1:+.0%}" if abs(ratio - 1) >= _LEAST_CHANGE else None


def plain(text: str) -> str:
    """``text`` with signs that do not print escaped: line ends, terminal codes, signs that turn the direction of reading."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def moment(ns: int | None, form: str = "%Y-%m-%d %H:%M") -> str:
    """In UTC."""
    return UNKNOWN if ns is None else datetime.fromtimestamp(ns // NS_PER_S, UTC).strftime(form)


def iso(ns: int) -> str:
    """For a command: ``2026-09-21T12:00:00Z``, with its fraction where it has one."""
    at = datetime.fromtimestamp(ns // NS_PER_S, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    micros = ns % NS_PER_S // 1000
    return f"{at}.{micros:06d}Z" if micros else f"{at}Z"


def span(window: Window) -> str:
    """``2026-09-14 12:00 to 2026-09-21 12:00``."""
    return f"{moment(window.since_ns)} to {moment(window.until_ns)}"


def version(found: Version) -> str:
    """``engine 0.32.0, base base-8b, settings 1a2b3c4d``; what is not known is left out."""
    digest = found.config_digest
    parts = (
        f"engine {found.engine_version}" if found.engine_version else "",
        f"base {found.base}" if found.base else "",
        f"settings {digest.rpartition(':')[2][:8]}" if digest else "",
        f"gateway {found.gateway_version}" if found.gateway_version else "",
    )
    return ", ".join(part for part in parts if part) or "versions unknown"


def _share(value: float) -> str:
    if 0 < value < _LEAST_POINTS or 1 - _LEAST_POINTS < value < 1:
        return "<0.1%" if value < _LEAST_POINTS else ">99.9%"
    return f"{value:.1%}"


def _count(value: float) -> str:
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"
