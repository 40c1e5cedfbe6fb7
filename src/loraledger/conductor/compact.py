"""Compaction: finished journal segments become hourly Parquet files, and then make room.

It runs in a process of its own (``python -m loraledger.conductor.compact DIR``), because folding a 64 MiB segment takes seconds
of interpreter time that the data plane does not have. Only segments that no process appends to any more are taken; each is
written under its own label, so a compaction that was cut short is simply done again, and a segment goes only after its files are
durable. The newest segment is always kept: it holds the state that the next process continues from.
"""

from __future__ import annotations

import sys
from pathlib import Path

from loraledger.conductor.reading import fold_segment
from loraledger.errors import InputFileError
from loraledger.record.frames import segments
from loraledger.record.parquet import write_parquet
from loraledger.record.tables import TABLES, Row, TableName

DONE = ".compacted"


def compact(directory: Path, keep: bool = False) -> list[Path]:
    """Fold every segment but the newest into Parquet; returns the segments that were compacted.

    ``keep`` leaves each segment beside its files, renamed with the suffix ``.compacted``; otherwise it is deleted. A segment
    whose head is damaged held no step and is set aside under the same suffix.
    """
    done = []
    for path in segments(directory)[:-1]:
        try:
            rows, _ = fold_segment(path)
        except InputFileError:
            path.rename(path.with_name(path.name + DONE))
            continue
        tables: dict[TableName, list[Row]] = {name: [] for name in TABLES}
        for table, row in rows:
            tables[table].append(row)
        write_parquet(tables, directory, path.stem)
        if keep:
            path.rename(path.with_name(path.name + DONE))
        else:
            path.unlink()
        done.append(path)
    return done


if __name__ == "__main__":
    compact(Path(sys.argv[1]), keep="--keep" in sys.argv[2:])
