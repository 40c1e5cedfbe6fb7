"""Logs of others as rows of table ``requests``: a CSV or JSON-lines file, and a map of its columns onto ours.

Theory of operation. A team has a log long before it has a gateway. An entry of the map, ``column=their_name[:unit]``, says which
of our columns one of theirs is; a column that nothing is mapped to, and a cell that is empty, are null. Nothing is worked out, with
two exceptions that are definitions: a request without an adapter is one to the base model (hit class ``base``), and an HTTP code
that is mapped to ``status`` is read as the status that a gateway records for it.

Our names lose their ``_ns``, since a unit is said: ``arrived=ts`` reads ISO 8601 (UTC where no zone is given), ``arrived=ts:ms`` a
number of ms since the Unix epoch, ``last_token=t:+ms`` ms after the arrival. ``ttft`` and ``duration`` are ``first_token`` and
``finished`` as times after the arrival. A moment outside the years 2000 to 2099 is a wrong unit more often than a true time, and is
refused. Numbers are read as decimals, never through floats: 2^53 ns is 104 days.

A row that cannot be read is refused with its line and its column, or dropped and counted (``lines.BadRows``). A file that was cut
ends in such a row; one that was put together from several has their headings in its midst, and those are such rows too.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Final

from loraledger.errors import InputFileError
from loraledger.record.lines import BadRows, csv_rows, lines
from loraledger.record.tables import TABLES, Column, Row
from loraledger.units import NS_PER_S

MAX_TEXT: Final = 1024
"""Characters of a cell."""
MAX_LINE: Final = 1 << 20
"""Bytes of a line of JSON."""

_ALIASES: Final = {"ttft": "first_token", "duration": "finished"}
"""Names for moments that a log gives as times after the arrival."""
_OURS: Final = ("decision_id", "itl_sketch")
"""Columns that only a gateway can fill: they point into, or are, something of its own."""
_UNITS: Final = {"s": NS_PER_S, "ms": 10**6, "us": 10**3, "ns": 1}
_EARLIEST, _LATEST = 946_684_800 * NS_PER_S, 4_102_444_800 * NS_PER_S
_LONGEST: Final = 366 * 86_400 * NS_PER_S
_LARGEST: Final = 2**60
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,2})?")
_WHOLE: Final = re.compile(r"-?[0-9]{1,18}(?:\.0*)?")
_MOMENT: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,9})\d*)? ?(Z|UTC|[+-]\d\d:?\d\d)?", re.ASCII
)
_STATUS: Final = {
    429: "rejected",
    499: "client_gone",
    502: "upstream_failed",
    503: "rejected",
    504: "upstream_timeout",
}
_ABSENT: Final = object()
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}

Cells = Mapping[str, str]
Value = int | bool | str


@dataclass(frozen=True)
class Mapped:
    """One entry of the map: our column, their name, and how a cell of theirs is read. ``after``: it counts from the arrival."""

    column: str
    key: str
    """Our name as the map has it."""
    name: str
    read: Callable[[str], Value]
    after: bool = False


def parse_map(entries: Sequence[str]) -> tuple[Mapped, ...]:
    """The map that ``column=their_name[:unit]`` entries spell. Raises ``ValueError`` saying which one is wrong."""
    mapped = tuple(_mapped(entry) for entry in entries)
    columns = [one.column for one in mapped]
    if twice := next((one.key for one in mapped if columns.count(one.column) > 1), None):
        raise ValueError(f"{twice}: its column is mapped twice: leave one entry out")
    if "arrived_ns" not in columns:
        raise ValueError("no entry says when a request arrived: add arrived=NAME, or arrived=NAME:ms for a number")
    return mapped


def base_name(text: str) -> str:
    """The base model's name as a row may hold it. Raises ``ValueError``."""
    if not text.strip():
        raise ValueError("--base is empty: name the base model, or leave it out")
    return _name(text.strip())


def keys() -> list[str]:
    """Our names that may be mapped, those of table ``requests`` without ``_ns`` first."""
    return [*_columns(), *_ALIASES]


def rows_of(path: Path, mapped: Sequence[Mapped], bad: BadRows, base: str | None = None) -> Iterator[Row]:
    """The rows of ``path``; bad ones go to ``bad``. Adapters named ``base``, and empty ones, are the base model.

    Raises ``InputFileError`` for a bad row, for a name that the file does not have, and at its end when it held no row.
    """
    found = False
    for number, cells in _cells(path, mapped, bad):
        try:
            row = _row(mapped, cells, base)
        except ValueError as error:
            bad.bad(number, "not a request", str(error))
            continue
        found = True
        yield row
    if not found:
        dropped = sum(bad.dropped.values())
        raise InputFileError(f"{path}: no request in it" + (f": all {dropped:,} rows were bad" if dropped else ""))


def _columns() -> dict[str, Column]:
    """Our names, without ``_ns``, of the columns that may be mapped."""
    return {c.name.removesuffix("_ns"): c for c in TABLES["requests"].columns if c.name not in _OURS}


def _mapped(entry: str) -> Mapped:
    key, equals, theirs = (part.strip() for part in entry.partition("="))
    if not equals or not key or not theirs:
        raise ValueError(f"{entry!r} is no entry of a map: write COLUMN=THEIR_NAME or COLUMN=THEIR_NAME:UNIT")
    known = _columns()
    column = known.get(_ALIASES.get(key, key).removesuffix("_ns"))
    if column is None:
        near = difflib.get_close_matches(key, keys(), 1)
        raise ValueError(
            f"{key!r} is no column of table requests" + (f": is {near[0]} meant?" if near else f": {', '.join(keys())}")
        )
    name, colon, unit = theirs.rpartition(":")
    if not colon or unit.removeprefix("+") not in _UNITS:
        name, unit = theirs, ""
    if not column.name.endswith("_ns"):
        if unit:
            raise ValueError(f"{entry!r}: {key} has no unit")
        return Mapped(column.name, key, name, _plain(column))
    return _time(column, key, name, unit)


def _time(column: Column, key: str, name: str, unit: str) -> Mapped:
    moment, after = column.doc.startswith("When"), key in _ALIASES or unit.startswith("+")
    scale = _UNITS.get(unit.removeprefix("+"))
    if scale is None:
        if not moment or after:
            raise ValueError(f"{key} is a duration: say its unit, as in {key}={name}:ms (s, ms, us or ns)")
        return Mapped(column.name, key, name, _iso)
    if after and (not moment or column.name == "arrived_ns"):
        raise ValueError(f"{key} cannot count from the arrival: leave the + out")
    if after or not moment:
        return Mapped(column.name, key, name, lambda text: _duration(text, scale), after=after)
    return Mapped(column.name, key, name, lambda text: _since_epoch(text, scale))


def _plain(column: Column) -> Callable[[str], Value]:
    if column.name == "status":
        return lambda text: _status(column, text)
    if column.values:
        return lambda text: _one_of(column, text)
    readers: dict[str, Callable[[str], Value]] = {"BIGINT": _count, "BOOLEAN": _flag, "VARCHAR": _name}
    return readers[column.type]


def _row(mapped: Sequence[Mapped], cells: Cells, base: str | None) -> Row:
    """Raises ``ValueError`` naming the column."""
    row: Row = {}
    for one in mapped:
        text = cells.get(one.name, "").strip()
        try:
            row[one.column] = one.read(text) if text else None
        except ValueError as error:
            raise ValueError(f"{one.key} ({one.name}): {error}") from error
    arrived = row["arrived_ns"]
    if not isinstance(arrived, int):
        raise ValueError("arrived is empty: a request needs a time")
    for one in mapped:
        if one.after and isinstance(value := row[one.column], int):
            row[one.column] = arrived + value
    if base is not None:
        row["base"] = base
    if any(one.column == "adapter" for one in mapped):
        _settle_base(row, base)
    return row


def _settle_base(row: Row, base: str | None) -> None:
    if row["adapter"] == base:
        row["adapter"] = None
    if row["adapter"] is None:
        row["hit_class"] = "base"
    elif row.get("hit_class") == "base":
        raise ValueError(f"hit_class is base, and the adapter is {str(row['adapter'])[:40]!r}")


def _cells(path: Path, mapped: Sequence[Mapped], bad: BadRows) -> Iterator[tuple[int, Cells]]:
    first = next((line.lstrip(b"\xef\xbb\xbf").strip() for line in lines(path, MAX_LINE) if line.strip()), b"")
    return _objects(path, mapped, bad) if first.startswith(b"{") else _table(path, mapped, bad)


def _table(path: Path, mapped: Sequence[Mapped], bad: BadRows) -> Iterator[tuple[int, Cells]]:
    heading: list[str] | None = None
    for number, row in csv_rows(path, bad):
        if heading is None:
            heading = [cell.strip() for cell in row]
            _check_heading(path, heading, mapped)
        elif [cell.strip() for cell in row] == heading:
            bad.bad(number, "a heading", "the same as the first: the file was put together from several")
        elif len(row) != len(heading):
            bad.bad(number, "a hole", f"{len(row)} cells, the heading has {len(heading)}")
        else:
            yield number, dict(zip(heading, row, strict=True))


def _check_heading(path: Path, heading: list[str], mapped: Sequence[Mapped]) -> None:
    for one in mapped:
        count = heading.count(one.name)
        if count > 1:
            raise InputFileError(f"{path}: row 1: {count} columns are named {one.name!r}: rename all but one")
        if not count:
            raise _no_name(path, one, heading)


def _objects(path: Path, mapped: Sequence[Mapped], bad: BadRows) -> Iterator[tuple[int, Cells]]:
    unseen = {one.name for one in mapped}
    some: list[str] = []
    for number, line in enumerate(lines(path, MAX_LINE), 1):
        try:
            found = _DECODER.decode(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            if not isinstance(found, dict):
                raise ValueError("it is no object")
            reached = {one.name: _reached(found, one.name) for one in mapped}
            cells = {name: _text(value) for name, value in reached.items() if value is not _ABSENT}
        except (ValueError, RecursionError) as error:
            bad.bad(number, "not a JSON object" if line.strip() else "a hole", str(error) if line.strip() else "")
            continue
        if unseen:
            unseen -= cells.keys()
            some = some or sorted(found)
        yield number, cells
    if missing := next((one for one in mapped if one.name in unseen), None):
        raise _no_name(path, missing, some)


def _no_name(path: Path, one: Mapped, known: Sequence[str]) -> InputFileError:
    shown = ", ".join(repr(name[:40]) for name in known[:20]) + (", ..." if len(known) > 20 else "")
    return InputFileError(f"{path}: nothing in it is named {one.name!r} (mapped to {one.key}); it has {shown}")


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it names a key twice")
    return found


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_float=str, parse_int=str, parse_constant=_no_constant
)


def _reached(found: dict[str, object], name: str) -> object:
    """What ``name`` is in an object: a key, else a path of keys with dots between them; ``_ABSENT`` when it is not there."""
    if name in found:
        return found[name]
    inner: object = found
    for step in name.split("."):
        inner = inner.get(step, _ABSENT) if isinstance(inner, dict) else _ABSENT
    return inner


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    raise ValueError(
        "a list or an object stands where one value belongs: name what is in it, as in usage.prompt_tokens"
    )


def _shown(text: str) -> str:
    return repr(text[:40])


def _number(text: str, scale: int) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not a number")
    return int((Decimal(text) * scale).to_integral_value())


def _duration(text: str, scale: int) -> int:
    value = _number(text, scale)
    if not 0 <= value <= _LONGEST:
        raise ValueError(f"{_shown(text)} is {'negative' if value < 0 else 'over a year'}: not a duration of a request")
    return value


def _since_epoch(text: str, scale: int) -> int:
    return _plausible(text, _number(text, scale))


def _iso(text: str) -> int:
    match = _MOMENT.fullmatch(text)
    if match is None:
        hint = ": it is a number, so say its unit (s, ms, us or ns)" if _NUMBER.fullmatch(text) else ""
        raise ValueError(f"{_shown(text)} is not a time such as 2026-09-21T12:00:00.250Z{hint}")
    zone = "+0000" if match[4] in (None, "Z", "UTC") else match[4].replace(":", "")
    return _plausible(text, _epoch_s(f"{match[1]}T{match[2]}{zone}") * NS_PER_S + int((match[3] or "").ljust(9, "0")))


def _plausible(text: str, ns: int) -> int:
    if not _EARLIEST <= ns < _LATEST:
        raise ValueError(f"{_shown(text)} is not between the years 2000 and 2099: is its unit right?")
    return ns


@lru_cache(maxsize=64)
def _epoch_s(text: str) -> int:
    return int(datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp())


def _count(text: str) -> int:
    if not _WHOLE.fullmatch(text) or not 0 <= (value := int(text.partition(".")[0])) <= _LARGEST:
        raise ValueError(f"{_shown(text)} is not a whole number of 0 or more")
    return value


def _flag(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"{_shown(text)} is neither true nor false")
    return _BOOLEANS[text.lower()]


def _name(text: str) -> str:
    if len(text) > MAX_TEXT or not text.isprintable():
        raise ValueError(f"{_shown(text)} is over {MAX_TEXT} characters, or has some that cannot be printed")
    return text


def _one_of(column: Column, text: str) -> str:
    if text not in column.values:
        raise ValueError(f"{_shown(text)} is not one of {', '.join(column.values)}")
    return text


def _status(column: Column, text: str) -> str:
    """A status of ours, or what a gateway records for an HTTP code."""
    if not (len(text) == 3 and text.isascii() and text.isdigit()):
        return _one_of(column, text)
    code = int(text)
    if 200 <= code < 300:
        return "ok"
    if code in _STATUS:
        return _STATUS[code]
    if 400 <= code < 600:
        return "client_error" if code < 500 else "engine_error"
    raise ValueError(f"{_shown(text)} is no HTTP status of an answer")
