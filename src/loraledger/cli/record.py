"""``loraledger record import``: a log of requests that somebody else wrote, as a record that every reading verb takes."""

from __future__ import annotations

import errno
import hashlib
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraledger.cli.options import JsonOption, usage
from loraledger.cli.output import print_json, print_table, printable, watched
from loraledger.cli.signals.shown import fold
from loraledger.errors import InputFileError
from loraledger.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loraledger.record.importing import Mapped

_LACKING: Final = {
    "id": "rows that are there twice",
    "tenant": "figures by tenant",
    "adapter": "everything about adapters",
    "replica": "routing, working sets against slots",
    "hit_class": "hit rates",
    "dispatched": "what was in flight",
    "first_token": "waiting",
    "finished": "what was in flight",
    "prompt_tokens": "load in tokens",
    "generated_tokens": "load in tokens",
    "status": "how requests ended",
}
"""Columns, and what cannot be said without them."""

app = typer.Typer(help="Make a record of a log that no gateway wrote.", no_args_is_help=True)


@app.callback()
def _room() -> None:
    pass


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="CSV with a heading, or JSON lines; plain or .gz.", show_default=False)],
    map_: Annotated[
        list[str],
        typer.Option(
            "--map",
            metavar="COLUMN=NAME[:UNIT]",
            help="What their column is of ours; give one for each. Times: ISO 8601, or a UNIT: s, ms, us, ns, +ms (after arrival).",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the record; made when it is missing.")],
    base: Annotated[
        str | None, typer.Option("--base", metavar="NAME", help="Its name for the base model, in the adapter's place.")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Drop bad rows and count them, instead of refusing the file.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read a log of requests into a record. What is not mapped is null: nothing is made up.

    The same file again replaces what it gave before; other files are added. Exit code 3: a row is bad, or a name is not there.
    """
    from loraledger.record.importing import base_name, parse_map, rows_of
    from loraledger.record.lines import BadRows
    from loraledger.record.parquet import write_parquet

    with usage():
        mapped = parse_map(map_)
        base = None if base is None else base_name(base)
    _check_out(out)
    bad = BadRows(printable(str(file)), skip=skip_bad)
    label = _label(file)
    rows = watched(rows_of(file, mapped, bad, base), "importing")
    try:
        files = write_parquet({"requests": rows}, out, label)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise InputFileError(f"{out}: cannot be written: {error.strerror or error}") from error
    for reason, count in sorted(bad.dropped.items()):
        print(f"loraledger: {count:,} rows dropped: {reason}", file=sys.stderr)
    _show(out, label, files, mapped, sum(bad.dropped.values()), as_json)


def _check_out(out: Path) -> None:
    """Raises ``InputFileError`` for the record of a gateway: rows of two sources would be told apart by nothing."""
    from loraledger.record.journal import LOCK_NAME

    if (out / LOCK_NAME).exists():
        raise InputFileError(f"--out {out} is the record of a gateway: name a folder of its own for what is imported")


def _label(file: Path) -> str:
    """Names the rows of this file, and of no other, in the record: its name, and a digest of where it lies."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", file.name)[:40].strip("-") or "log"
    return f"import-{stem}-{hashlib.sha256(str(file.resolve()).encode(errors='surrogateescape')).hexdigest()[:8]}"


def _show(out: Path, label: str, files: Sequence[Path], mapped: Sequence[Mapped], dropped: int, as_json: bool) -> None:
    from loraledger.record.reader import RecordReader

    columns = [one.column for one in mapped]
    counts = ", ".join(f"count({column}) AS {column}" for column in columns)
    with RecordReader(out, tail_labels=_others(out, label)) as reader:
        (row,) = reader.query(
            f"FROM requests SELECT {counts}, count(*) AS n, min(arrived_ns) AS first, max(arrived_ns) AS last, count(DISTINCT "
            "adapter) AS adapters, count(DISTINCT tenant) AS tenants, count(DISTINCT replica) AS replicas"
        )
    if as_json:
        told = {column: row[column] for column in columns}
        keys = ("first", "last", "adapters", "tenants", "replicas")
        items = {"requests": row["n"], "dropped": dropped, **{key: row[key] for key in keys}, "filled": told}
        print_json("import", {**items, "files": len(files), "record": str(out)})
        return
    print(
        f"{row['n']:,} requests from {_at(row['first'])} to {_at(row['last'])} UTC: {row['tenants']:,} tenants, "
        f"{row['adapters']:,} adapters, {row['replicas']:,} replicas\n"
    )
    lines = [
        [one.column, printable(one.name), f"{row[one.column]:,}", _share(row[one.column], row["n"])] for one in mapped
    ]
    print_table(["column", "from", "filled", "share"], lines, right=["filled", "share"])
    if lacking := [f"{key} ({figures})" for key, figures in _LACKING.items() if not _has(key, columns)]:
        print("\n" + fold(f"not mapped, so not known: {', '.join(lacking)}"))
    print(f"\nnow: loraledger signals --record {out} --from {_at(row['first'], 'T')} --to {_at(row['last'], 'T', 1)}")
    sys.stdout.flush()


def _has(key: str, columns: Sequence[str]) -> bool:
    return key in columns or f"{key}_ns" in columns


def _others(out: Path, label: str) -> set[str]:
    from loraledger.record.parquet import partitions

    return {path.stem for path in partitions(out, "requests")} - {label}


def _share(part: object, whole: object) -> str | None:
    return f"{part / whole:.1%}" if isinstance(part, int) and isinstance(whole, int) and whole else None


def _at(ns: object, between: str = " ", more: int = 0) -> str:
    assert isinstance(ns, int)
    return f"{datetime.fromtimestamp(ns // NS_PER_S + more, UTC):%Y-%m-%d{between}%H:%M:%S}"
