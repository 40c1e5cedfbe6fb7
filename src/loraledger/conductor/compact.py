"""Compaction: finished journal segments become hourly Parquet files, and then make room.

It runs in a process of its own (``python -m loraledger.conductor.compact DIR``), because folding a 64 MiB segment takes seconds
of interpreter time that the data plane does not have. Only segments that no process appends to any more are taken; each is
written under its own label, so a compaction that was cut short is simply done again, and a segment goes only after its files are
durable. The newest segment is always kept: it holds the state that the next process continues from.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from loraledger.conductor.reading import Segment, fold_segment
from loraledger.errors import InputFileError
from loraledger.record.frames import segments
from loraledger.record.parquet import partitions, write_parquet
from loraledger.record.tables import TABLES, Row, TableName

DAMAGED = ".damaged"


def compact(directory: Path) -> list[Path]:
    """Fold every segment but the newest into Parquet and delete it; returns those segments.

    What cannot be read is set aside under the suffix ``.damaged``: a segment without a head, which held no step; and one with bytes
    behind its last frame, once the rows before those are written. A crash within an append leaves such bytes too.
    """
    done = []
    for path in segments(directory)[:-1]:
        try:
            segment = Segment(path)
            rows, _ = fold_segment(segment)
        except InputFileError:
            path.rename(path.with_name(path.name + DAMAGED))
            continue
        tables: dict[TableName, list[Row]] = {name: [] for name in TABLES}
        for table, row in rows:
            tables[table].append(row)
        write_parquet(tables, directory, path.stem)
        if segment.torn:
            path.rename(path.with_name(path.name + DAMAGED))
        else:
            path.unlink()
        done.append(path)
    return done


def expire(directory: Path, before_ns: int) -> int:
    """Delete partitions that lie wholly before ``before_ns``; returns how many files went."""
    gone = 0
    for table in TABLES:
        kept = set(partitions(directory, table, since_ns=before_ns))
        for path in partitions(directory, table):
            if path not in kept:
                path.unlink()
                gone += 1
    return gone


def main() -> None:
    """Compact one directory, then delete what is older than ``--keep-ns``."""
    parser = argparse.ArgumentParser(prog="python -m loraledger.conductor.compact")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--keep-ns", type=int, help="delete partitions older than this, ns")
    arguments = parser.parse_args()
    try:
        compact(arguments.directory)
        if arguments.keep_ns is not None:
            expire(arguments.directory, time.time_ns() - arguments.keep_ns)
    except OSError as error:
        sys.exit(f"the disk refused, so the segments stay: {error}")


if __name__ == "__main__":
    main()
