"""Rows of a run, streamed into Parquet files that lie and read as a live record's do.

Theory of operation. Rows are gathered a batch at a time, written down as lines of JSON, one scratch file for each table and hour,
and a table's lines become Parquet when there are ``CHUNK`` of them. So neither memory nor scratch space grows with the run; files
are labelled ``replay-0000``, ``replay-0001`` ... as a live record's are by journal segment. A run that fails leaves what it
had finished, and no ``run.json`` beside it; nothing is synced to the disk, since it can be made again.

The files depend on the rows alone: batches and chunks are counted in rows, DuckDB runs one thread, and neither time nor host goes
into what it writes.

Live rows are each held against their table before they are kept (``record.tables.check``, 1 to 2 us). Here they come from the
same fold, so one row of each batch is.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from loraledger.conductor.fold import Emitted
from loraledger.record.duck import BATCH_ROWS, append_lines, connect
from loraledger.record.parquet import HOUR_NS, MEMORY_LIMIT, pack, partition_path
from loraledger.record.tables import TABLES, Row, TableName, check

LABEL: Final = "replay"
SCRATCH: Final = ".scratch"
CHUNK: Final = 131_072
"""Rows of one table in one round of Parquet files: some 100 MiB of JSON at most."""


class RowSink:
    """Takes rows until it is closed. ``directory``: where the tables' folders lie; made if it is not there.

    Raises ``OSError`` when the disk refuses, ``InternalError`` for a row that its table cannot hold.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._scratch = directory / SCRATCH
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        self._connection = connect(self._scratch, threads=1, memory_limit=MEMORY_LIMIT)
        self._rows: dict[TableName, list[Row]] = {name: [] for name in TABLES}
        self._lines: dict[TableName, dict[int, Path]] = {name: {} for name in TABLES}
        self._spooled: dict[TableName, int] = dict.fromkeys(TABLES, 0)
        self._chunks: dict[TableName, int] = dict.fromkeys(TABLES, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is left, unless something went wrong; then clear up."""
        try:
            if kind is None:
                for name in TABLES:
                    self._spool(name)
                    self._convert(name)
        finally:
            self._connection.close()
            shutil.rmtree(self._scratch, ignore_errors=True)

    def take(self, rows: Emitted) -> None:
        """Some rows, in the order in which the fold gave them."""
        for name, row in rows:
            waiting = self._rows[name]
            waiting.append(row)
            if len(waiting) >= BATCH_ROWS:
                self._spool(name)
                if self._spooled[name] >= CHUNK:
                    self._convert(name)

    def _spool(self, name: TableName) -> None:
        rows, time = self._rows[name], TABLES[name].time
        if not rows:
            return
        check(TABLES[name], rows[0])
        hours: dict[int, list[Row]] = {}
        for row in rows:
            hours.setdefault(row[time] // HOUR_NS, []).append(row)  # type: ignore[operator]
        for hour, part in hours.items():
            path = self._lines[name].setdefault(hour, self._scratch / f"{name}-{hour}.ndjson")
            append_lines(path, part)
        self._spooled[name] += len(rows)
        self._rows[name] = []

    def _convert(self, name: TableName) -> None:
        """The lines of one table become files of its partitions."""
        for hour, lines in sorted(self._lines[name].items()):
            final = partition_path(self._directory, name, hour, f"{LABEL}-{self._chunks[name]:04d}")
            final.parent.mkdir(parents=True, exist_ok=True)
            temporary = lines.with_suffix(".parquet")
            pack(self._connection, TABLES[name], lines, temporary)
            temporary.replace(final)
            lines.unlink()
        self._lines[name] = {}
        self._chunks[name] += bool(self._spooled[name])
        self._spooled[name] = 0
