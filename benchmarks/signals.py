"""How long the answers take beside reading what they are made of: ``diagnose --last 10m`` and 21-day ``advise``, big record.

    python -m benchmarks.signals [--quick] [--rows 100m] [--record DIR] [--rounds 5] [--markdown] [--profile]

The record is that of ``benchmarks.bigrecord``, made into .cache once (``--quick``: 1,000,000 requests instead of 100,000,000), or
the one in DIR. Its last ten minutes are at the daily peak, and the ten before them are the baseline.

A verb is the command's own function with ``--json``: it opens the record, measures, draws up the answer and writes it.
The scan that it is held against is plain DuckDB, with as many threads and as much memory, over the same files: ``max`` of each
column that DuckDB's plan of a query of the verb reads, over the time that the query asks for. Which these are is noted while the
verb runs once, uncounted. So a column that a verb reads twice counts once, and one that it reads for an hour counts for an hour.

Each figure is a fresh process (imports do not count, opening does); its peak memory is that process's. Rounds are interleaved
(scan, verb, scan, verb), the files are in the page cache as far as it holds them, and ratios are taken within a round. ``--quick``
says whether it works: over so few rows what is read per file, and not per row, makes up the ratios.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import duckdb
import msgspec

from benchmarks.bigrecord import HOST_ENTRIES, SLOTS, Made, count, make
from benchmarks.printed import judged, ranged, show
from loraledger.cli.signals import advise, diagnose
from loraledger.conductor.reading import open_record
from loraledger.record.duck import quote, run
from loraledger.record.parquet import partitions
from loraledger.record.reader import Parameters, RecordReader
from loraledger.record.tables import TABLES, Row, TableName
from loraledger.signals.figures import Window
from loraledger.units import NS_PER_S

LAST_NS: Final = 600 * NS_PER_S
ADVISED_NS: Final = 21 * 86_400 * NS_PER_S
RATIO, PEAK_MIB = 3.0, 4096.0
THREADS, MEMORY_LIMIT = 1, "512MB"
"""A reader's own."""
VERBS: Final = ("diagnose", "advise")
EARLIEST_NS: Final = 10**18
"""A number in a query that is as large is a moment."""
_COLUMNS: Final = frozenset().union(*(table.names for table in TABLES.values()))
Figures = dict[str, float]


class Need(msgspec.Struct):
    """A table's columns that a query names, and the time that it asks for."""

    table: TableName
    columns: set[str]
    window: Window


# --- one measurement, in a process of its own -----------------------------------------------------------------------------


def span(verb: str, made: Made) -> Window:
    """What ``verb`` reads."""
    return Window(made.until_ns - (2 * LAST_NS if verb == "diagnose" else ADVISED_NS), made.until_ns)


def answer(verb: str, record: Path, made: Made) -> None:
    """What the command does. It is told the moments: by the clock the record ended long ago, or has yet to begin."""
    until, since = (
        datetime.fromtimestamp(ns / NS_PER_S, UTC).isoformat() for ns in (made.until_ns, made.until_ns - LAST_NS)
    )
    with redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        if verb == "advise":
            advise(until=until, record=record, slots=SLOTS, host_entries=HOST_ENTRIES, as_json=True)
        else:
            diagnose(since=since, until=until, record=record, slots=SLOTS, host_entries=HOST_ENTRIES, as_json=True)


@contextmanager
def watched(
    see: Callable[[RecordReader, str, Parameters | None, Callable[[], list[Row]]], list[Row]],
) -> Iterator[None]:
    """Have ``see`` carry out every query."""
    query = RecordReader.query

    def seen(
        reader: RecordReader, sql: str, parameters: Parameters | None = None, *, most: int | None = None
    ) -> list[Row]:
        return see(reader, sql, parameters, lambda: query(reader, sql, parameters, most=most))

    with patch.object(RecordReader, "query", seen):
        yield


def needs(verb: str, record: Path) -> list[Need]:
    """What the queries of ``verb`` read."""
    made = Made.of(record)
    found: list[Need] = []

    def note(
        reader: RecordReader, sql: str, parameters: Parameters | None, carry_out: Callable[[], list[Row]]
    ) -> list[Row]:
        explained = reader._connection.execute(f"EXPLAIN (FORMAT json) {sql}", parameters).fetchall()
        given = parameters.values() if isinstance(parameters, dict) else parameters or []
        moments = [item for item in given if isinstance(item, int) and item >= EARLIEST_NS]
        window = Window(min(moments), max(moments)) if moments else span(verb, made)
        tables = [name for name in TABLES if re.search(rf"\b{name}\b", sql)]
        for columns in scanned(json.loads(explained[0][1])):
            fitting = [name for name in tables if columns <= TABLES[name].names]
            found.append(Need(fitting[0], columns, window))
        return carry_out()

    with watched(note):
        answer(verb, record, made)
    return merged(found)


def scanned(nodes: list[dict[str, Any]]) -> Iterator[set[str]]:
    """The columns that each reading of Parquet in a plan takes out of the files, those of its filters included."""
    for node in nodes:
        yield from scanned(node["children"])
        if node["name"].strip() == "READ_PARQUET":
            told, filters = node["extra_info"].get("Projections", []), str(node["extra_info"].get("Filters", ""))
            columns = {told} if isinstance(told, str) else set(told)
            yield columns | {word for word in re.findall(r"\w+", filters) if word in _COLUMNS}


def merged(found: list[Need]) -> list[Need]:
    """Each column of a table once, over all the time that it is asked for; columns with the same time together."""
    windows: dict[tuple[TableName, str], Window] = {}
    for need in found:
        for column in need.columns | {TABLES[need.table].time}:
            old = windows.get((need.table, column), need.window)
            since, until = min(old.since_ns, need.window.since_ns), max(old.until_ns, need.window.until_ns)
            windows[need.table, column] = Window(since, until)
    together: dict[tuple[TableName, Window], set[str]] = {}
    for (table, column), window in windows.items():
        together.setdefault((table, window), set()).add(column)
    return [Need(table, columns, window) for (table, window), columns in together.items()]


def scan(record: Path, wanted: list[Need]) -> Figures:
    """The plain read. Its list of files is made on the way, as the reader makes its own."""
    began = [time.perf_counter(), time.process_time()]
    with duckdb.connect(":memory:") as connection:
        run(connection, f"SET threads = {THREADS}")
        run(connection, f"SET memory_limit = {quote(MEMORY_LIMIT)}")
        for need in wanted:
            since, until, at = need.window.since_ns, need.window.until_ns, TABLES[need.table].time
            files = ", ".join(map(quote, partitions(record, need.table, since_ns=since, until_ns=until)))
            if files:
                columns = ", ".join(f"max({column})" for column in sorted(need.columns))
                run(
                    connection,
                    f"SELECT {columns} FROM read_parquet([{files}]) WHERE {at} >= {since} AND {at} < {until}",
                )
    return _figures(began)


def verb_alone(verb: str, record: Path) -> Figures:
    """The command, and then what opening the record takes of it."""
    made = Made.of(record)
    began = [time.perf_counter(), time.process_time()]
    answer(verb, record, made)
    figures = _figures(began)
    began[0] = time.perf_counter()
    with open_record(record, since_ns=span(verb, made).since_ns, until_ns=made.until_ns):
        return figures | {"open_s": time.perf_counter() - began[0]}


def _figures(began: list[float]) -> Figures:
    wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    return {"wall_s": wall, "cpu_s": cpu, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def profiled(verb: str, record: Path) -> None:
    """Where the CPU time of ``verb`` goes: each query by itself, and Python by function (the profiler slows that)."""
    spent: list[tuple[float, int, str]] = []

    def timed(_: RecordReader, sql: str, __: Parameters | None, carry_out: Callable[[], list[Row]]) -> list[Row]:
        began = time.process_time()
        rows = carry_out()
        spent.append((time.process_time() - began, len(rows), " ".join(sql.split())[-100:]))
        return rows

    made = Made.of(record)
    began = time.process_time()
    with watched(timed):
        answer(verb, record, made)
    whole, queries = time.process_time() - began, sum(seconds for seconds, _, _ in spent)
    print(f"{verb}: {whole:.2f} s of CPU, {queries:.2f} s of it in queries\n")
    for seconds, rows, sql in spent:
        print(f"{seconds:8.3f} s {rows:9,} rows  {sql}")
    profile = cProfile.Profile()
    profile.runcall(answer, verb, record, made)
    pstats.Stats(profile).sort_stats("tottime").print_stats(15)


# --- the parent -----------------------------------------------------------------------------------------------------------


def child(what: str, verb: str, record: Path, stdin: bytes = b"") -> bytes:
    """The result that a process of this module says. Raises ``RuntimeError`` with the last line said when it fails."""
    command = [sys.executable, "-m", "benchmarks.signals", "--record", str(record), "--child", what, verb]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"exit {done.returncode}"
        raise RuntimeError(f"{what} {verb}: {said.splitlines()[-1]}")
    return done.stdout


def rounds(record: Path, repeats: int) -> tuple[dict[str, list[Figures]], dict[str, list[Need]]]:
    """By ``scan VERB`` and ``VERB`` a figure a round; by verb what it needs."""
    wanted = {verb: child("needs", verb, record) for verb in VERBS}
    figures: dict[str, list[Figures]] = {}
    for number in range(repeats + 1):
        for verb in VERBS:
            said = {f"scan {verb}": child("scan", verb, record, wanted[verb]), verb: child("verb", verb, record)}
            for name, result in said.items():
                if number:  # the first round fills the page cache
                    figures.setdefault(name, []).append(json.loads(result))
    return figures, {verb: msgspec.json.decode(result, type=list[Need]) for verb, result in wanted.items()}


def table(figures: dict[str, list[Figures]]) -> list[list[str]]:
    rows = [
        [
            "verb",
            "scan, s",
            "verb, s",
            "verb / scan",
            "the same of CPU time",
            "opening, s",
            "peak MiB",
            "scan's peak MiB",
            "aims",
        ]
    ]
    for verb in VERBS:
        ours, plain = figures[verb], figures[f"scan {verb}"]
        ratios = {
            key: [mine[key] / other[key] for mine, other in zip(ours, plain, strict=True)]
            for key in ("wall_s", "cpu_s")
        }
        peak = max(f["peak_mib"] for f in ours)
        rows.append(
            [
                f"`{verb}`",
                ranged([f["wall_s"] for f in plain], ".2f"),
                ranged([f["wall_s"] for f in ours], ".2f"),
                ranged(ratios["wall_s"], ".2f"),
                ranged(ratios["cpu_s"], ".2f"),
                ranged([f["open_s"] for f in ours], ".2f"),
                f"{peak:,.0f}",
                f"{max(f['peak_mib'] for f in plain):,.0f}",
                f"ratio {judged(statistics.median(ratios['wall_s']), RATIO)}; MiB {judged(peak, PEAK_MIB)}",
            ]
        )
    return rows


def told(verb: str, wanted: list[Need], until_ns: int) -> str:
    """What the scan of ``verb`` reads, in words."""
    parts = []
    for need in sorted(wanted, key=lambda need: (need.table, need.window)):
        begin, end = (
            (until_ns - moment) / (3600 * NS_PER_S) for moment in (need.window.since_ns, need.window.until_ns)
        )
        names = ", ".join(f"`{name}`" for name in sorted(need.columns))
        parts.append(f"{need.table} from {begin:.4g} to {end:.4g} h before the end: {names}")
    return f"Scan of `{verb}`: {'; '.join(parts)}.\n"


def ready(rows: int, quick: bool) -> Path:
    """The record of so many requests, made if it is not there."""
    record = Path(f".cache/bigrecord-{rows}")
    if not (record / "made.json").exists():
        jobs = min(4, len(os.sched_getaffinity(0)))
        make(Made(rows, sample_s=60) if quick else Made(rows), record, jobs)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=count, default=100_000_000)
    parser.add_argument("--record", type=Path, help="one that benchmarks.bigrecord made")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a million requests, two rounds, samples each minute")
    parser.add_argument("--profile", action="store_true", help="only where the verbs' time goes")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "VERB"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    record = given.record or ready(1_000_000 if given.quick else given.rows, given.quick)
    if given.child:
        what, verb = given.child
        print(msgspec.json.encode(inside(what, verb, record)).decode())
    elif given.profile:
        for verb in VERBS:
            profiled(verb, record)
    else:
        report(record, 2 if given.quick else given.rounds, given.markdown)


def inside(what: str, verb: str, record: Path) -> Figures | list[Need]:
    """What a child is asked for."""
    if what == "needs":
        return needs(verb, record)
    if what == "scan":
        return scan(record, msgspec.json.decode(sys.stdin.buffer.read(), type=list[Need]))
    return verb_alone(verb, record)


def report(record: Path, repeats: int, markdown: bool) -> None:
    made = Made.of(record)
    figures, wanted = rounds(record, repeats)
    size = sum(path.stat().st_size for name in TABLES for path in partitions(record, name))
    print(
        f"{made.rows:,} requests, {made.days} days, {made.adapters:,} adapters, {made.replicas} replicas; "
        f"{size / 2**30:.2f} GiB of Parquet. Median and range of {repeats} rounds, {THREADS} thread, DuckDB {duckdb.__version__}.\n"
    )
    show(table(figures), markdown)
    for verb in VERBS:
        print(told(verb, wanted[verb], made.until_ns))


if __name__ == "__main__":
    main()
