"""How verbs print: tables for people, plain columns in a pipe, one JSON document with ``--json``; and a bar for long work."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

T = TypeVar("T")

SCHEMA_VERSION = 1
UNLIMITED = 100_000
"""Columns of a table in a pipe: nothing is cut for a program that reads it."""
MANY = 100_000
"""Rows from which on a bar is shown: fewer take less than a second."""
_STEP = 10_000
_LINES: Final = 8
"""Lines that a folded cell takes at most: in more it is a tower of single words."""
_TRAILING: Final = re.compile(r" +((?:\x1b\[0m)?)$", re.MULTILINE)


def print_json(kind: str, items: object) -> None:
    """One document: ``{"schema_version", "kind", "items"}``."""
    document = {"schema_version": SCHEMA_VERSION, "kind": kind, "items": items}
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> None:
    """A table with upper-case headings; columns named in ``right`` are aligned right. Unknown shows as ``-``.

    No cell is ever cut. On a terminal that is too narrow, columns stand closer and the last one is folded if it is aligned left.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.upper(), justify="right" if column in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    terminal = sys.stdout.isatty()
    # Names are data: `[red]` or `:x:` in one must not be taken for a style or an emoji.
    console = Console(width=None if terminal else UNLIMITED, highlight=False, markup=False, emoji=False)
    if terminal and not _fit(console, table):
        # The terminal wraps it: blanks at the end of a line would become empty lines.
        with console.capture() as kept:
            console.print(table)
        sys.stdout.write(_TRAILING.sub(r"\1", kept.get()))
        return
    console.print(table)


def _fit(console: Console, table: Table) -> bool:
    """Whether the table is made to fit the terminal; if it cannot be, ``console`` is made as wide as the table."""
    from rich.measure import measure_renderables

    if not table.columns:
        return True
    wide, last = console.options.update(max_width=UNLIMITED), table.columns[-1]
    cells = measure_renderables(console, wide, [last.header, *last.cells])
    saved = cells.maximum - max(cells.minimum, -(-cells.maximum // _LINES))
    for folded, closer in product((False, True) if last.justify == "left" else (False,), (False, True)):
        table.collapse_padding, last.no_wrap = closer, not folded
        if console.measure(table, options=wide).maximum - saved * folded <= console.width:
            return True
    table.collapse_padding, last.no_wrap = False, True
    console.size = (console.measure(table, options=wide).maximum, console.height)
    return False


def seconds(nanoseconds: object) -> str | None:
    """A duration for a table: ``0.412`` seconds; ``None`` stays unknown."""
    return f"{nanoseconds / 1e9:.3f}" if isinstance(nanoseconds, int | float) else None


def between(row: dict[str, object], start: str, end: str) -> int | None:
    """The duration between two time columns of a row, ns; ``None`` if either is unknown."""
    a, b = row.get(start), row.get(end)
    return b - a if isinstance(a, int) and isinstance(b, int) else None


def watched(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """``items``, with a bar on stderr once there were many, if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, visible=False)
        for number, item in enumerate(items, 1):
            if number % _STEP == 0 and number >= MANY:
                bar.update(task, completed=number, visible=True)
            yield item


def printable(text: str) -> str:
    """``text`` with what a terminal would obey escaped: names in a trace come from anybody."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
