"""``loraledger query``: one SELECT over the record, as a table, as CSV or as a document."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraledger.cli.options import ConfigOption, JsonOption, RecordOption, record_directory, usage
from loraledger.cli.output import print_json, print_table, printable
from loraledger.cli.signals.options import Asked, FromOption, LastOption, ToOption, moment_of, say
from loraledger.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loraledger.record.reader import RecordReader
    from loraledger.record.tables import Row

_INT64: Final = 2**63


def query(
    sql: Annotated[
        str, typer.Argument(help="One SELECT over requests, decisions, residency and samples; - for stdin.")
    ],
    last: LastOption = None,
    since: FromOption = None,
    until: ToOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Rows that are printed at most.")] = 1000,
    record: RecordOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a heading; null is an empty cell.")] = False,
) -> None:
    """Ask the record in SQL (DuckDB's). It can read the four tables and nothing else, and change nothing.

    With --last, --from or --to only files of these hours are opened, whose rows are not cut: name moments in the query as well.
    Exit code 2: it is not one SELECT, or it cannot run.
    """
    from loraledger.conductor.reading import open_record

    if as_json and as_csv:
        raise typer.BadParameter("--json or --csv, not both")
    text = _text(sql)
    directory = record_directory(record, config)
    first, end = _hours(last, since, until)
    with open_record(directory, since_ns=first, until_ns=end) as reader, _told():
        rows = reader.query(text, most=limit + 1)
        names = list(rows[0]) if rows else _names(reader, text)
    if len(rows) > limit:
        say(f"the first {limit:,} rows are printed: --limit has more printed, LIMIT in the query fewer read")
    if as_json:
        print_json("query", [{name: _plain(value) for name, value in row.items()} for row in rows[:limit]])
    elif as_csv:
        _print_csv(names, rows[:limit])
    else:
        right = [
            printable(name)
            for name in names
            if all(isinstance(row[name], int | float | Decimal | None) for row in rows)
        ]
        print_table(
            [printable(name) for name in names],
            [[_cell(value) for value in row.values()] for row in rows[:limit]],
            right=right,
        )


def _text(sql: str) -> str:
    with usage():
        try:
            text = sys.stdin.read() if sql == "-" else sql
            text.encode()
        except UnicodeError as error:
            raise ValueError(f"the query is not UTF-8: {error}") from error
    return text


@contextmanager
def _told() -> Iterator[None]:
    """SQL that cannot run is a usage error. What DuckDB says of it points at the place, over several lines."""
    try:
        yield
    except BadRequestError as error:
        print("loraledger: " + "\n".join(map(printable, error.message.splitlines())), file=sys.stderr)
        raise typer.Exit(2) from error
    except OverflowError as error:
        print(f"loraledger: a value is too large to be shown ({error}): have it cast to VARCHAR", file=sys.stderr)
        raise typer.Exit(2) from error


def _hours(last: int | None, since: str | None, until: str | None) -> tuple[int | None, int | None]:
    """Between which moments files are opened; ``None``: no end on that side."""
    if last is None and since is None and until is None:
        return None, None
    now_ns = time.time_ns()
    with usage():
        if last is None:
            first, end = (None if text is None else moment_of(text, now_ns) for text in (since, until))
            return first, end
        window = Asked(last=last, since=since, until=until).window(now_ns)
    return window.since_ns, window.until_ns


def _names(reader: RecordReader, sql: str) -> list[str]:
    """The columns of a query without rows."""
    return [str(row["column_name"]) for row in reader.query(f"DESCRIBE {sql}")]


def _print_csv(names: Sequence[str], rows: Sequence[Row]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(row.values() for row in rows)


def _plain(value: object) -> object:
    """A value that JSON has: decimals as numbers, integers of over 64 bits as text."""
    if isinstance(value, Decimal):
        return float(value)
    return str(value) if isinstance(value, int) and abs(value) >= _INT64 else value


def _cell(value: object) -> object:
    """One cell of a table: ten digits of a figure, and names as they may be shown."""
    if isinstance(value, float):
        return f"{value:.10g}"
    return printable(value) if isinstance(value, str) else value
