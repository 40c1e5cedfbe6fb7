"""Rows into DuckDB, without pyarrow: lines of JSON in a scratch file, read back with the table's own types.

Theory of operation. msgspec writes a batch of rows as lines in one call, and DuckDB's JSON reader, told the columns,
needs no sniffing. Only calls that mean the same in DuckDB 1.5 and 2.0 are used (``execute(q).fetchall()`` and
``sql(q, params=)``): in 2.0 a statement owns its connection until it is fetched to the end, so every one is. Extensions
are never installed or loaded from outside: JSON and Parquet are part of the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import duckdb
import msgspec

from loraledger.record.tables import Row, Table

BATCH_ROWS: Final = 4096
"""Rows held at once while they are written down: some MiB."""

_ENCODER: Final = msgspec.json.Encoder()


def connect(scratch: Path, *, threads: int, memory_limit: str) -> duckdb.DuckDBPyConnection:
    """An empty in-memory database that spills to ``scratch``. ``memory_limit`` as DuckDB writes it: ``256MB``."""
    connection = duckdb.connect(":memory:")
    for setting in (
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        f"threads = {threads}",
        f"memory_limit = {quote(memory_limit)}",
        f"temp_directory = {quote(scratch / 'spill')}",
    ):
        run(connection, f"SET {setting}")
    return connection


def run(connection: duckdb.DuckDBPyConnection, statement: str) -> None:
    """Carry out a statement of ours to its end."""
    connection.execute(statement).fetchall()


def quote(text: str | Path) -> str:
    """``text`` as an SQL string."""
    return "'" + str(text).replace("'", "''") + "'"


def batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """``rows`` in lists of at most ``BATCH_ROWS``."""
    source = iter(rows)
    while batch := list(islice(source, BATCH_ROWS)):
        yield batch


def append_lines(path: Path, rows: list[Row]) -> None:
    """Add ``rows`` to a file of JSON lines."""
    with path.open("ab") as file:
        file.write(_ENCODER.encode_lines(rows))


def lines_as(table: Table, path: Path) -> str:
    """SQL for the rows in a file of JSON lines, with the columns of ``table``."""
    columns = ", ".join(f"{quote(column.name)}: {quote(column.type)}" for column in table.columns)
    return f"read_json({quote(path)}, format = 'newline_delimited', columns = {{{columns}}})"
