"""A run's folder, read back: what it came to, and SQL over its record files.

Theory of operation. Each run's requests and residency are views over its Parquet files with all columns of the live schema, so
a query need not ask which files exist. One connection may hold several runs, which is how two are paired without either passing
through Python. Rows can be streamed: what is read one row at a time takes no memory, and DuckDB sorts and groups within
``MEMORY_LIMIT`` and spills beyond it.

Whoever opens a run compares its record with the digest in ``run.json``: rows that were edited, or record files of another run,
would give figures that nobody played.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import duckdb
import msgspec

from loraledger.errors import InputFileError
from loraledger.record.duck import connect, quote, run
from loraledger.record.parquet import partitions, record_digest
from loraledger.record.tables import TABLES, Table
from loraledger.replay.fleet.outcome import RECORD_FOLDER, RUN_FILE, Outcome

MEMORY_LIMIT: Final = "256MB"
_BATCH: Final = 8_192
_TABLES: Final = ("requests", "residency")


class RunTables:
    """SQL over the runs that ``open_runs`` was given: ``<name>.requests`` and ``<name>.residency``."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def stream(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """The rows of one SELECT of ours. Read them to the end before the next one. Raises InputFileError for a damaged file."""
        try:
            cursor = self._connection.execute(sql)
            while rows := cursor.fetchmany(_BATCH):
                yield from rows
        except duckdb.Error as error:
            raise InputFileError(f"the run's record cannot be read: {_first_line(error)}; replay it again") from error

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """All of them at once: for a SELECT that gives few."""
        return list(self.stream(sql))


@contextmanager
def open_runs(**runs: Path) -> Iterator[RunTables]:
    """The tables of each run folder, in a schema of its name.

    Raises InputFileError for a folder without record files, and for one whose record is not the run's.
    """
    with (
        tempfile.TemporaryDirectory(prefix="loraledger-") as scratch,
        connect(Path(scratch), threads=1, memory_limit=MEMORY_LIMIT) as connection,
    ):
        for name, directory in runs.items():
            run(connection, f"CREATE SCHEMA {name}")
            for table in _TABLES:
                _create_view(connection, name, TABLES[table], directory)
            _check_digest(directory)
        yield RunTables(connection)


def check_record(tables: RunTables, directory: Path, outcome: Outcome) -> None:
    """Raises InputFileError when the record of ``run`` has not the requests that the run had."""
    ((found,),) = tables.rows("FROM run.requests SELECT count(*)")
    if found != outcome.requests:
        raise InputFileError(
            f"{directory}: its record has {found:,} requests, the run had {outcome.requests:,}; replay it again"
        )


def read_outcome(directory: Path) -> Outcome:
    """``run.json`` of a run folder. Raises InputFileError when it is not there or not one."""
    path = directory / RUN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Outcome)
    except FileNotFoundError as error:
        raise InputFileError(f"{directory}: not the folder of a run: it has no {RUN_FILE}") from error
    except OSError as error:
        raise InputFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputFileError(f"{path}: not the outcome of a run: {error}; replay it again") from error


def _check_digest(directory: Path) -> None:
    recorded = read_outcome(directory).record_digest
    if recorded is None:
        return
    try:
        found = record_digest(directory / RECORD_FOLDER)
    except OSError as error:
        raise InputFileError(f"{error.filename}: cannot be read: {error.strerror}; replay it again") from error
    if recorded != found:
        raise InputFileError(f"{directory}: its record is not the one that the run wrote; replay it again")


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, table: Table, directory: Path) -> None:
    files = partitions((directory / RECORD_FOLDER).absolute(), table.name)
    if not files and table.name == "requests":
        raise InputFileError(f"{directory}: not the folder of a run: {RECORD_FOLDER} holds no requests")
    typed = ", ".join(f"{column.name} {column.type}" for column in table.columns)
    run(connection, f"CREATE TABLE {name}.no_{table.name} ({typed})")
    source = f"FROM {name}.no_{table.name}"
    if files:
        listed = ", ".join(map(quote, files))
        source += f" UNION ALL BY NAME FROM read_parquet([{listed}], union_by_name = true, hive_partitioning = false)"
    columns = ", ".join(column.name for column in table.columns)
    try:
        run(connection, f"CREATE VIEW {name}.{table.name} AS FROM ({source}) SELECT {columns}")
    except duckdb.Error as error:
        raise InputFileError(
            f"{directory}: its record cannot be read: {_first_line(error)}; replay it again"
        ) from error


def _first_line(error: duckdb.Error) -> str:
    """What went wrong, without the statement that DuckDB adds."""
    return str(error).partition("\n")[0]
