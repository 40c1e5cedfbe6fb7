"""What is new in the record: a model, an adapter, an engine, settings or a gateway that was not there before.

Theory of operation. A review is made each week, and when the system under it is another one than the last review looked at. The
moment of the last review lies beside the record (``reviews/last.json``); what is new follows from the rows. A version is new when
rows of it arrived since then and none in the time that the last review looked at: so going back to an old one counts too. An
adapter is new when nobody ever asked for it before, or for these files: rarely used ones are no news.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

import msgspec

from loraledger.errors import InputFileError
from loraledger.record.reader import RecordReader
from loraledger.signals.figures import Window
from loraledger.signals.scope import whole

FOLDER: Final = "reviews"
FILE: Final = "last.json"
SCHEMA_VERSION: Final = 1

Kind = Literal["model", "adapter", "adapter files", "engine", "settings", "gateway"]
_VERSIONS: Final[dict[Kind, str]] = {
    "engine": "engine_version",
    "model": "base",
    "settings": "config_digest",
    "gateway": "gateway_version",
}
_FIRST: Final = """
SELECT {column} AS name, MIN(CASE WHEN arrived_ns >= $until THEN arrived_ns END) AS first,
    COUNT(CASE WHEN arrived_ns < $until THEN 1 END) AS known
FROM requests WHERE arrived_ns >= $since AND arrived_ns < $end AND {column} IS NOT NULL GROUP BY {column}
"""
_ADAPTERS: Final = """
SELECT adapter AS name, digest, MIN(arrived_ns) AS first FROM requests
WHERE arrived_ns < $end AND adapter IS NOT NULL GROUP BY adapter, digest
"""


class Last(msgspec.Struct, frozen=True, kw_only=True):
    """The last review: of [since_ns, until_ns), made at ``at_ns``."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["last_review"] = "last_review"
    since_ns: int
    until_ns: int
    at_ns: int


class Fresh(msgspec.Struct, frozen=True, order=True):
    """Something new: of an adapter's files the name is the adapter's. ``first_ns``: its first request."""

    first_ns: int
    kind: Kind
    name: str


def fresh(reader: RecordReader, known: Window, until_ns: int) -> tuple[Fresh, ...]:
    """What came after ``known`` and before ``until_ns``, oldest first; none where ``known`` has no request.

    Adapters are compared with all rows that ``reader`` has open.
    """
    found: list[Fresh] = []
    bounds = {"since": known.since_ns, "until": known.until_ns, "end": until_ns}
    anything = False
    for kind, column in _VERSIONS.items():
        rows = reader.query(_FIRST.format(column=column), dict(bounds))
        anything = anything or any(whole(row["known"]) for row in rows)
        found += [
            Fresh(whole(row["first"]), kind, str(row["name"]))
            for row in rows
            if row["first"] is not None and not whole(row["known"])
        ]
    adapters, before = _adapters(reader, known.until_ns, until_ns)
    return tuple(sorted([*found, *adapters])) if anything or before else ()


def last_review(record: Path) -> Last | None:
    """The last review of the record in ``record``. Raises InputFileError when its note is damaged."""
    path = record / FOLDER / FILE
    try:
        last = msgspec.json.decode(path.read_bytes(), type=Last)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise InputFileError(
            f"{path} is no note of a review ({error}): delete it, and everything counts as new"
        ) from error
    if last.schema_version != SCHEMA_VERSION:
        raise InputFileError(f"{path} is of schema_version {last.schema_version}, not {SCHEMA_VERSION}: delete it")
    return last


def remember(record: Path, window: Window, at_ns: int) -> None:
    """Note that ``window`` was reviewed, unless a later one was. Raises OSError, and leaves the note as it was."""
    last = last_review(record)
    if last is not None and last.until_ns > window.until_ns:
        return
    folder = record / FOLDER
    folder.mkdir(exist_ok=True)
    new = folder / f"{FILE}.{os.getpid()}"
    try:
        new.write_bytes(
            msgspec.json.encode(Last(since_ns=window.since_ns, until_ns=window.until_ns, at_ns=at_ns)) + b"\n"
        )
        new.replace(folder / FILE)
    finally:
        new.unlink(missing_ok=True)


def _adapters(reader: RecordReader, known_until_ns: int, until_ns: int) -> tuple[list[Fresh], bool]:
    """New ones and new files of old ones; and whether there were any before."""
    rows = reader.query(_ADAPTERS, {"end": until_ns})
    old = {row["name"] for row in rows if whole(row["first"]) < known_until_ns}
    new: dict[tuple[Kind, str], int] = {}
    for row in rows:
        first = whole(row["first"])
        if first < known_until_ns:
            continue
        kind: Kind = "adapter files" if row["name"] in old else "adapter"
        key = (kind, str(row["name"]))
        new[key] = min(first, new.get(key, first))
    return [Fresh(first, kind, name) for (kind, name), first in new.items()], bool(old)
