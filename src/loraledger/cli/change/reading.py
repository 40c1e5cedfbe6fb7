"""``loraledger change list|show|diff``: from the gateway, or from its journal where none answers; stderr says from which."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from loraledger.cli.change.asking import ask_changes, path_of
from loraledger.cli.change.options import IdArgument
from loraledger.cli.options import ConfigOption, JsonOption, RecordOption, load_settings, record_directory
from loraledger.cli.output import print_json, printable
from loraledger.errors import TargetError

if TYPE_CHECKING:
    from loraledger.operate.journal import Entry

JOURNAL = "changes"
"""The journal's folder in a record."""
_Open = Annotated[bool, typer.Option("--open", help="Only those that have not ended.")]


def list_(
    open_: _Open = False, record: RecordOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """All changes, oldest first."""
    from loraledger.cli.change.shown import changes_of, changes_table
    from loraledger.operate.journal import changes_of as folded

    answer = None if record is not None else _from_gateway("", config)
    changes = folded(_entries(record, config)).values() if answer is None else changes_of(answer)
    wanted = [change for change in changes if change.open or not open_]
    if as_json:
        print_json("changes", msgspec.to_builtins(wanted))
        return
    changes_table(wanted)


def show(
    id_: IdArgument, record: RecordOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """One change: what, who, why, where it stands, on what evidence, and its journal."""
    from loraledger.cli.change.shown import whole

    answer = _one(id_, record, config)
    if as_json:
        print_json("change", answer)
        return
    whole(answer)
    sys.stdout.flush()


def diff(
    id_: IdArgument, record: RecordOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """What the change makes of the settings, as a diff: how an accepted one is put into the file."""
    from loraledger.cli.change.difference import difference
    from loraledger.cli.change.shown import change_of
    from loraledger.errors import LedgerError

    change = change_of(_one(id_, record, config))
    try:
        loaded = load_settings(config)
    except LedgerError:
        loaded = None  # then it is told without the names of replicas and tenants
    found = difference(change, loaded)
    if as_json:
        print_json("diff", {"change": change.id, "state": change.state, "diff": found.text, "notes": found.notes})
        return
    print(found.text, end="")
    for note in found.notes:
        print(f"loraledger: {printable(note)}", file=sys.stderr)


def _one(id_: str, record: Path | None, config: Path | None) -> Mapping[str, Any]:
    """The change, as a gateway would answer it."""
    answer = None if record is not None else _from_gateway(path_of(id_), config)
    if answer is not None:
        return answer
    entries = [entry for entry in _entries(record, config) if entry.change.id == id_]
    if not entries:
        print(f"loraledger: there is no change {printable(id_)!r}: see `loraledger change list`", file=sys.stderr)
        raise typer.Exit(2)
    found: dict[str, Any] = msgspec.to_builtins({"change": entries[-1].change, "entries": entries})
    return found


def _from_gateway(path: str, config: Path | None) -> dict[str, Any] | None:
    """Its answer; ``None`` where none answers, which is said."""
    try:
        answer = ask_changes("GET", path, config)
    except TargetError as error:
        print(f"loraledger: {printable(error.message)}; read from its journal instead", file=sys.stderr)
        return None
    print("loraledger: read from the gateway", file=sys.stderr)
    return answer


def _entries(record: Path | None, config: Path | None) -> list[Entry]:
    from loraledger.operate.journal import FILE, read_entries

    folder = record_directory(record, config) / JOURNAL
    print(f"loraledger: read from {printable(str(folder / FILE))}", file=sys.stderr)
    return read_entries(folder)
