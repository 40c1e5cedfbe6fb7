"""Figures as people read them: units, changes and sentences. Unknown is ``None`` here, and ``-`` in a table."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from loraledger.cli.output import printable
from loraledger.cli.signals.options import moment

if TYPE_CHECKING:
    from loraledger.signals.figures import Version, Window

WIDTH: Final = 100
"""Columns that a sentence takes at most, and in a pipe."""
_DAY_S: Final = 86_400
_LEAST_POINTS: Final = 0.0005
_LEAST_CHANGE: Final = 0.005


def share(value: float | None) -> str | None:
    """``93.0%``; ``<0.1%`` and ``>99.9%`` for what would else read as none and all."""
    if value is None:
        return None
    if 0 < value < _LEAST_POINTS or 1 - _LEAST_POINTS < value < 1:
        return "<0.1%" if value < _LEAST_POINTS else ">99.9%"
    return f"{value:.1%}"


def seconds(value: float | None) -> str | None:
    """``0.412``."""
    return None if value is None else f"{value:.3f}"


def milliseconds(value: float | None) -> str | None:
    """Of seconds: ``20.1``."""
    return None if value is None else f"{value * 1000:.1f}"


def count(value: float | None) -> str | None:
    """``12,300``; small ones that are not whole keep a digit or two."""
    if value is None:
        return None
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def change(now: float | None, before: float | None, *, points: bool = False) -> str | None:
    """``+12 %``, ``x 3.1``, of shares ``-4.0 pt``; ``None`` where one of both is unknown, or where it rounds to nothing."""
    if now is None or before is None or now == before:
        return None
    if points:
        return f"{(now - before) * 100:+.1f} pt" if abs(now - before) >= _LEAST_POINTS else None
    if before == 0:
        return "from 0"
    ratio = now / before
    if ratio >= 2:
        return f"x {ratio:,.1f}"
    return f"{ratio - 1:+.0%}" if abs(ratio - 1) >= _LEAST_CHANGE else None


def span(window: Window) -> str:
    """``2026-09-21 12:00:00 to 12:10:00``; the second day too where it is another one, or the window is long."""
    whole = window.seconds > _DAY_S or moment(window.since_ns)[:10] != moment(window.until_ns)[:10]
    return f"{moment(window.since_ns)} to {moment(window.until_ns, day=whole)}"


def version(found: Version) -> str:
    """``engine 0.32.0, base base-8b, settings 1a2b3c4d``; what is not known is left out."""
    digest = found.config_digest
    parts = [
        f"engine {found.engine_version}" if found.engine_version else "",
        f"base {found.base}" if found.base else "",
        f"settings {digest.rpartition(':')[2][:8]}" if digest else "",
        f"gateway {found.gateway_version}" if found.gateway_version else "",
    ]
    return printable(", ".join(part for part in parts if part)) or "versions unknown"


def width() -> int:
    """Columns for sentences: the terminal's, at most ``WIDTH``."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else WIDTH


def fold(text: str, indent: str = "", hanging: str = "  ") -> str:
    """``text`` over lines as wide as the terminal, never cutting a word: names and commands are copied."""
    return textwrap.fill(
        printable(text),
        width(),
        initial_indent=indent,
        subsequent_indent=" " * len(indent) + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def bullets(title: str, texts: Iterable[str]) -> None:
    """A title and sentences below it; nothing when there are none."""
    for number, text in enumerate(texts):
        if not number:
            print(f"\n{title}")
        print(fold(text, indent="- ", hanging=""))
