"""The review as one page: everything in it, nothing fetched, nothing run.

Theory of operation. Markup is put together here alone, and every text goes through ``escape`` on its way: names of adapters,
tenants and settings come from anybody. As a second line the page forbids itself scripts and everything from elsewhere. One accent
colour is this window; what was before is grey. Colours are CSS variables, so the same page is light, dark and printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from string import Template
from typing import Final

from loraledger.operate.review import tables, words
from loraledger.operate.review.charts import Plot, bar, extremes, line_chart
from loraledger.operate.review.gather import Review
from loraledger.operate.review.proposals import Proposal
from loraledger.operate.review.spelled import UNKNOWN, Pair, change, plain, spell, unit_of
from loraledger.operate.review.style import STYLE
from loraledger.operate.review.tables import Cell, Column, Line, Table

_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")

FEW: Final = 8
"""Columns of a table that would be pulled apart by the whole width."""


def page(review: Review) -> str:
    """The whole file."""
    name = f"{words.title(review)}: {words.measured(review)[0]}"
    return _PAGE.substitute(title=escape(name), style=STYLE, body="\n".join(_body(review)))


def _body(review: Review) -> Iterator[str]:
    yield f"<header><h1>{words.title(review)}</h1>"
    yield from (f"<p>{escape(line)}</p>" for line in words.measured(review))
    yield f"<p class=key>Small and grey: {words.earlier(review)}. {UNKNOWN} is not known. Times are UTC.</p></header>"
    if review.now.total is not None or review.before.total is not None:
        yield _tiles(review)
        yield _charts(review)
    yield from _section("Worst hour", _worst(review))
    yield from _section("What to try next", _proposals(review))
    yield from _section("What changed", _changed(review))
    if review.now.total is not None or review.before.total is not None:
        yield from _section("All replicas", _summary(review))
        for title, found in tables.tables(review).items():
            yield from _section(title, map(_table, found))
    yield from _section("What is missing", _missing(review))


def _section(title: str, parts: Iterable[str]) -> Iterator[str]:
    yield f"<section><h2>{escape(title)}</h2>"
    yield from parts
    yield "</section>"


def _tiles(review: Review) -> str:
    chosen = (line for line in tables.lines(review.now.slo_s) if line.first)
    tiles = "".join(_tile(review, line) for line in chosen)
    return f"<dl class=tiles>{tiles}</dl>"


def _tile(review: Review, line: Line) -> str:
    found = tables.pair(review, line.take)
    name = line.name.removesuffix(", s")
    unit = f" <i>{unit}</i>" if (unit := unit_of(line.unit)) and found.now is not None else ""
    difference = change(found, line.unit)
    said = f" {escape(difference)}" if difference else ""
    was = escape(spell(found.before, line.unit))
    return (
        f"<div><dt>{escape(name)}</dt><dd>{escape(spell(found.now, line.unit))}{unit}"
        f"<small>{was}<b>{said}</b></small></dd></div>"
    )


def _charts(review: Review) -> str:
    return f"<div class=charts>{''.join(_figure(review, plot) for plot in words.plots(review))}</div>"


def _figure(review: Review, plot: Plot) -> str:
    drawn = line_chart(plot)
    if not drawn:
        return ""
    legend = f'<span class="line"></span>{words.current(review)} <span class="line was"></span>{words.earlier(review)}'
    said = f"<b>{escape(plot.name)}</b>, in pieces of {words.pieces(review)}: {escape(extremes(plot))}."
    return f"<figure><figcaption>{said} <span class=legend>{legend}</span></figcaption>{drawn}</figure>"


def _worst(review: Review) -> Iterator[str]:
    yield f"<p>{escape(words.worst(review))}</p>"
    if review.worst is not None:
        yield f"<blockquote>{escape(words.limits(review.worst))}</blockquote>"
        yield from map(_code, words.looks(review.worst))


def _proposals(review: Review) -> Iterator[str]:
    if said := words.open_changes(review):
        yield f"<p>{escape(said)}</p>"
    if not review.proposals:
        yield f"<p>{escape(words.nothing_to_try(review))}</p>"
        return
    yield "<ol>"
    yield from map(_proposal, review.proposals)
    yield "</ol>"


def _proposal(proposal: Proposal) -> str:
    said = f"{escape(words.moved(proposal))}: {escape(plain(proposal.why))}."
    return f"<li><b>{escape(proposal.variable)}</b> {said}{_code(proposal.command)}</li>"


def _changed(review: Review) -> Iterator[str]:
    if review.fresh:
        yield f"<ul>{''.join(f'<li>new: {escape(words.news(one))}</li>' for one in review.fresh)}</ul>"
    if review.changes:
        yield _table(tables.changes(review))
    elif not review.fresh:
        yield "<p>Nothing: no new version, no new adapter, no change in the journal.</p>"


def _summary(review: Review) -> Iterator[str]:
    """Two tables side by side, of half the figures each."""
    lines = tables.lines(review.now.slo_s)
    half = -(-len(lines) // 2)
    yield "<div class=halves>"
    for number, some in enumerate((lines[:half], lines[half:])):
        caption = "<caption>Figures of the fleet</caption>" if not number else "<caption>&nbsp;</caption>"
        rows = "".join(_line(review, line) for line in some)
        heads = "<th></th><th class=n>now</th><th class=n>before</th><th class=n>change</th>"
        yield f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    yield "</div>"


def _line(review: Review, line: Line) -> str:
    found = tables.pair(review, line.take)
    cells = (spell(found.now, line.unit), spell(found.before, line.unit), change(found, line.unit) or "")
    kinds = ("n", "n was", "n was")
    shown = "".join(f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr><th scope=row>{escape(line.name)}</th>{shown}</tr>"


def _table(table: Table) -> str:
    note = f"<p class=note>{escape(table.note)}</p>"
    if not table.rows:
        return f"<h3>{escape(table.caption)}</h3><p class=note>{escape(table.note)} Nothing to show.</p>"
    heads = "".join(_head(column) for column in table.columns)
    rows = "".join(_row(table, row) for row in table.rows)
    more = f"<p class=note>And {table.more:,} more: <code>--json</code> has all.</p>" if table.more else ""
    kind = " class=narrow" if len(table.columns) <= FEW else ""
    caption = f"<caption>{escape(table.caption)}</caption>"
    body = f"<table{kind}>{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<div class=scroll>{body}</div>{note}{more}"


def _head(column: Column) -> str:
    of = f" <i>{unit}</i>" if (unit := column.shown_unit) else ""
    return f"<th scope=col{_kind(column)}>{escape(column.name)}{of}</th>"


def _kind(column: Column) -> str:
    """How its cells stand."""
    return " class=n" if column.unit is not None else " class=word" if column.word else ""


def _row(table: Table, row: tuple[Cell, ...]) -> str:
    cells = []
    for number, (cell, column) in enumerate(zip(row, table.columns, strict=True)):
        if isinstance(cell, Pair):
            cells.append(_pair(cell, column, _most(table, number)))
        elif number == 0:
            cells.append(f"<th scope=row{_kind(column)}>{escape(cell)}</th>")
        else:
            cells.append(f"<td{_kind(column)}>{escape(cell)}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _pair(cell: Pair, column: Column, most: float) -> str:
    unit = column.unit or "count"
    drawn = bar(cell.now, most) if column.bar else ""
    now, was = escape(spell(cell.now, unit)), escape(spell(cell.before, unit))
    return f'<td class="n{" barred" if column.bar else ""}">{drawn}{now}<small>{was}</small></td>'


def _most(table: Table, number: int) -> float:
    """The largest figure of a column that is drawn."""
    if not table.columns[number].bar:
        return 0.0
    cells = (row[number] for row in table.rows)
    return max((cell.now or 0.0 for cell in cells if isinstance(cell, Pair)), default=0.0)


def _missing(review: Review) -> Iterator[str]:
    if not review.missing:
        yield "<p>Nothing.</p>"
        return
    yield f"<ul>{''.join(f'<li>{escape(plain(said))}</li>' for said in review.missing)}</ul>"


def _code(command: str) -> str:
    return f"<pre><code>{escape(plain(command))}</code></pre>"
