"""The review as Markdown: for a message, a ticket, or a terminal.

Theory of operation. The same tables as the page, a pair as ``now (before)``. Names come from anybody: what Markdown or HTML would
take for more than text is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from loraledger.operate.review import tables, words
from loraledger.operate.review.charts import extremes
from loraledger.operate.review.gather import Review
from loraledger.operate.review.spelled import UNKNOWN, Pair, change, plain, spell
from loraledger.operate.review.tables import Cell, Column, Table

_SPECIAL: Final = re.compile(r"([\\`*_\[\]|~#])")


def text(review: Review) -> str:
    """The whole document, ended by a line end."""
    return "\n".join(_lines(review)) + "\n"


def _lines(review: Review) -> Iterator[str]:
    yield f"# {words.title(review)}"
    yield ""
    yield from (f"{_escaped(line)}  " for line in words.measured(review))
    yield f"In brackets: {words.earlier(review)}. {UNKNOWN}: not known."
    yield from _section("Worst hour")
    yield _escaped(words.worst(review))
    if review.worst is not None:
        yield ""
        yield f"> {_escaped(words.limits(review.worst))}"
        yield from _code(words.looks(review.worst))
    yield from _section("What to try next")
    yield from _proposals(review)
    yield from _section("What changed")
    yield from _changed(review)
    yield from _section("Figures")
    yield from _summary(review)
    for name, found in tables.tables(review).items():
        yield from _section(name)
        for number, table in enumerate(found):
            if number:
                yield ""
            yield from _table(table)
    yield from _section("What is missing")
    yield from ([f"- {_escaped(plain(said))}" for said in review.missing] or ["Nothing."])


def _section(name: str) -> list[str]:
    return ["", f"## {name}", ""]


def _code(commands: list[str]) -> list[str]:
    """A block that no command can leave: it is fenced longer than any run of backticks in it."""
    body = [plain(command) for command in commands]
    longest = max((len(run) for line in body for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return ["", f"{fence}sh", *body, fence]


def _proposals(review: Review) -> Iterator[str]:
    if said := words.open_changes(review):
        yield _escaped(said)
        yield ""
    if not review.proposals:
        yield words.nothing_to_try(review)
        return
    for number, proposal in enumerate(review.proposals, 1):
        yield f"{number}. **{_escaped(proposal.variable)}** {_escaped(words.moved(proposal))}: {_escaped(plain(proposal.why))}."
    yield from _code([proposal.command for proposal in review.proposals])


def _changed(review: Review) -> Iterator[str]:
    yield from (f"- new: {_escaped(words.news(one))}" for one in review.fresh)
    if review.changes:
        yield ""
        yield from _table(tables.changes(review))
    elif not review.fresh:
        yield "Nothing: no new version, no new adapter, no change in the journal."


def _summary(review: Review) -> Iterator[str]:
    heads = ("all replicas", "now", "before", "change")
    yield from _head(heads, ("", "r", "r", "r"))
    for line in tables.lines(review.now.slo_s):
        found = tables.pair(review, line.take)
        cells = (line.name, spell(found.now, line.unit), spell(found.before, line.unit), change(found, line.unit) or "")
        yield _row(map(_escaped, cells))
    yield ""
    for plot in words.plots(review):
        yield f"- {plot.name}, in pieces of {words.pieces(review)}: {extremes(plot)}"


def _table(table: Table) -> Iterator[str]:
    yield f"**{table.caption}.** {_escaped(table.note)}"
    if not table.rows:
        yield ""
        yield "Nothing to show."
        return
    yield ""
    names = [_escaped(column.name + (f", {unit}" if (unit := column.shown_unit) else "")) for column in table.columns]
    yield from _head(names, ["r" if column.unit else "" for column in table.columns])
    for row in table.rows:
        yield _row(_cell(cell, column) for cell, column in zip(row, table.columns, strict=True))
    if table.more:
        yield ""
        yield f"And {table.more:,} more: --json has all."


def _head(names: object, sides: object) -> Iterator[str]:
    yield _row(names)  # type: ignore[arg-type]
    yield _row("---:" if side else "---" for side in sides)  # type: ignore[attr-defined]


def _row(cells: Iterator[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell, column: Column) -> str:
    if isinstance(cell, Pair):
        unit = column.unit or "count"
        return f"{_escaped(spell(cell.now, unit))} ({_escaped(spell(cell.before, unit))})"
    return _escaped(cell)


def _escaped(text: str) -> str:
    """As text and nothing else, on one line."""
    shown = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", shown)
