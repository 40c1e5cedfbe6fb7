"""Parquet partitions: one file per table, hour and label, written whole or not at all.

Theory of operation. A label names where rows come from (a journal segment), and its files hold all of its rows and
nothing else. So writing a label again, after a crash half way or with better folding code, replaces its files and can
never double a row. Files are first complete and durable in a scratch folder; only when all of a label's files are, are
they renamed into place, and files that the label no longer fills are removed. A crash between two renames leaves old
beside new for one label, until the label is written again. Readers pass over a label that they fold themselves (``reader``).

Rows are spread over one scratch file per hour, a batch at a time, so memory does not grow with the label. Measured on
two shared cores: 100,000 requests take 1.0 s, most of it JSON on both sides.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import duckdb

from loraledger.errors import InternalError
from loraledger.record.duck import append_lines, batches, connect, lines_as, quote, run
from loraledger.record.tables import TABLES, Row, Table, TableName, check

HOUR_NS: Final = 3_600_000_000_000
THREADS: Final = 1
MEMORY_LIMIT: Final = "256MB"

_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PARTITION: Final = re.compile(r"date=(\d{4}-\d\d-\d\d)/hour=(\d\d)")


def write_parquet(rows: Mapping[TableName, Iterable[Row]], directory: Path, label: str) -> list[Path]:
    """Make ``rows`` all that ``directory`` holds under ``label``; the files that now hold them, by table and hour.

    Call it for one label at a time. Raises InternalError for a bad label or row (before anything is replaced), OSError
    when the disk refuses.
    """
    if not _LABEL.fullmatch(label):
        raise InternalError(f"{label!r} cannot be a file name of partitions: use letters, digits, '.', '_' and '-'")
    scratch = directory / ".scratch" / label
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    before = {path for name in TABLES for path in (directory / name).glob(f"date=*/hour=*/{label}.parquet")}
    try:
        staged = _stage(rows, directory, label, scratch)
        for temporary, final in staged:
            final.parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(final)
    finally:
        shutil.rmtree(scratch)
    written = [final for _, final in staged]
    for path in before.difference(written):
        path.unlink()
    _sync_directories(directory, before.union(written))
    return written


def partitions(
    directory: Path, table: TableName, *, since_ns: int | None = None, until_ns: int | None = None
) -> list[Path]:
    """The files of ``table``, oldest hour first, whose hour has a moment in [since_ns, until_ns); None is open."""
    found = []
    for path in (directory / table).glob("date=*/hour=*/*.parquet"):
        match = _PARTITION.fullmatch(path.parent.relative_to(directory / table).as_posix())
        if match is None:
            continue
        begin = int(datetime.fromisoformat(f"{match[1]}T{match[2]}:00:00+00:00").timestamp()) * 10**9
        if (until_ns is None or begin < until_ns) and (since_ns is None or begin + HOUR_NS > since_ns):
            found.append(path)
    return sorted(found)


def record_digest(directory: Path) -> str:
    """``sha256:`` over name and SHA-256 of every file of a record, by name. Raises OSError.

    The same as ``find * -name '*.parquet' | LC_ALL=C sort | xargs sha256sum | sha256sum`` there.
    """
    paths = {path.relative_to(directory).as_posix(): path for table in TABLES for path in partitions(directory, table)}
    listed = hashlib.sha256()
    for name, path in sorted(paths.items()):
        with path.open("rb") as file:
            listed.update(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n".encode())
    return f"sha256:{listed.hexdigest()}"


def partition_path(directory: Path, table: TableName, hour: int, label: str) -> Path:
    """Where rows of that hour go, counted in hours since the Unix epoch."""
    at = datetime.fromtimestamp(hour * 3600, UTC)
    return directory / table / f"date={at:%Y-%m-%d}" / f"hour={at:%H}" / f"{label}.parquet"


def _stage(
    rows: Mapping[TableName, Iterable[Row]], directory: Path, label: str, scratch: Path
) -> list[tuple[Path, Path]]:
    """Write every file in ``scratch`` and make it durable; (where it is, where it goes) of each."""
    staged = []
    with connect(scratch, threads=THREADS, memory_limit=MEMORY_LIMIT) as connection:
        for name, table_rows in rows.items():
            for hour, lines in sorted(_spread(TABLES[name], table_rows, scratch).items()):
                temporary = lines.with_suffix(".parquet")
                pack(connection, TABLES[name], lines, temporary)
                lines.unlink()
                _sync(temporary, os.O_RDWR)
                staged.append((temporary, partition_path(directory, name, hour, label)))
    return staged


def pack(connection: duckdb.DuckDBPyConnection, table: Table, lines: Path, parquet: Path) -> None:
    """Turn rows of ``table`` that lie in ``lines`` (JSON) into the Parquet file ``parquet``.

    Raises OSError when the disk refuses, InternalError when a row does not fit its columns.
    """
    try:
        run(connection, f"COPY (FROM {lines_as(table, lines)}) TO {quote(parquet)} (FORMAT parquet, COMPRESSION zstd)")
    except duckdb.IOException as error:
        raise OSError(f"rows of {table.name} cannot be written: {error}") from error
    except duckdb.Error as error:
        raise InternalError(f"rows of {table.name} do not fit its columns: {error}") from error


def _spread(table: Table, rows: Iterable[Row], scratch: Path) -> dict[int, Path]:
    """Write ``rows`` to one file of lines an hour."""
    files: dict[int, Path] = {}
    for batch in batches(rows):
        hours: dict[int, list[Row]] = {}
        for row in batch:
            hours.setdefault(check(table, row) // HOUR_NS, []).append(row)
        for hour, part in hours.items():
            files[hour] = scratch / f"{table.name}-{hour}.ndjson"
            append_lines(files[hour], part)
    return files


def _sync_directories(directory: Path, files: set[Path]) -> None:
    """Make the names of ``files`` durable, up to ``directory``."""
    above = {parent for path in files for parent in path.parents if parent.is_relative_to(directory)}
    for folder in sorted(above, key=lambda path: len(path.parts), reverse=True):
        _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
