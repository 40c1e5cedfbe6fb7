"""Offers: what can be had, from a file that somebody wrote or exported, with a date on each.

Theory of operation. CSV with a header, or JSON: a list of objects, or an object with the list under ``offers``. The fields are the
same in both::

    name            of the offer; each once
    provider        or market
    gpu             name or alias of a GPU of the catalogue
    count           devices; default 1
    memory          of one device, such as 80GB; may be left out
    host_link       one way, such as 25GB/s; may be left out
    price_per_hour  of the whole offer
    currency        three capital letters
    term            on-demand, spot, 1 year ...
    region          may be left out
    as_of           ISO date: prices age faster than anything else here

A plan is only worth as much as its prices, so nothing is filled in or passed over: all that is wrong is said at once, each with
file, row, field and remedy. A GPU that the catalogue does not have is *named* in ``unknown`` and its offer set aside: no memory or
speed is guessed for it.

*Memory.* Markets write 80 GB for what a device reports as 81,559 MiB. Within ``TOLERANCE`` the catalogue's count is used; it covers
GB written for GiB (7.4 %). Beyond it the offer's own count is used (a part of a device, another edition) and a note says so.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Final

from loraledger.config.checks import nearest
from loraledger.errors import InputFileError
from loraledger.plan.hardware import Catalogue, Gpu
from loraledger.units import format_bytes, parse_bytes, parse_rate

FIELDS: Final = (
    "name",
    "provider",
    "gpu",
    "count",
    "memory",
    "host_link",
    "price_per_hour",
    "currency",
    "term",
    "region",
    "as_of",
)
NEEDED: Final = ("name", "provider", "gpu", "price_per_hour", "currency", "term", "as_of")
TOLERANCE: Final = 0.08
"""Relative difference of the memory offered and that of the catalogue up to which they are the same device."""

MAX_BYTES: Final = 4 << 20
MAX_OFFERS: Final = 10_000
MAX_TEXT: Final = 200
"""Characters of a field."""
MAX_COUNT: Final = 1024
"""Devices of an offer."""
MAX_PRICE: Final = 1_000_000
_SHOWN: Final = 50

_CURRENCY: Final = re.compile(r"[A-Z]{3}")


@dataclass(frozen=True, slots=True)
class Offer:
    """Devices that can be had together at a price."""

    name: str
    provider: str
    gpu: Gpu
    count: int
    memory_bytes: int
    """Of one device."""
    host_link: int | None
    """Bytes a second, one way; ``None``: not stated."""
    price_per_hour: float
    """Of all its devices."""
    currency: str
    term: str
    region: str | None
    as_of: str

    @property
    def headline_bytes(self) -> int:
        """Memory of all devices: what is advertised."""
        return self.count * self.memory_bytes


@dataclass(frozen=True, slots=True)
class UnknownGpu:
    """An offer that was set aside because of its GPU."""

    name: str
    gpu: str
    hint: str


@dataclass(frozen=True, slots=True)
class Offers:
    """What a file offers. ``notes``: what its reader should know; ``digest``: SHA-256 of the file."""

    offers: tuple[Offer, ...]
    unknown: tuple[UnknownGpu, ...]
    notes: tuple[str, ...]
    digest: str

    @property
    def currencies(self) -> tuple[str, ...]:
        """Those that occur: prices in two of them cannot be compared."""
        return tuple(sorted({offer.currency for offer in self.offers}))


def read_offers(path: Path, gpus: Catalogue) -> Offers:
    """The offers in ``path``: JSON if it is called ``.json``, else CSV. Raises :class:`InputFileError` with all that is wrong."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise InputFileError(f"{path}: over {MAX_BYTES >> 20} MiB: keep only the offers that are meant")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    rows = _of_json(text, path.name) if path.suffix.lower() == ".json" else _of_csv(text, path.name)
    found = _Reading(path.name, gpus)
    for number, (place, cells) in enumerate(rows):
        if number >= MAX_OFFERS:
            raise InputFileError(f"{path.name}: over {MAX_OFFERS:,} offers: keep only those that are meant")
        found.row(place, cells)
    return found.finished(sha256(data).hexdigest())


@dataclass(slots=True)
class _Reading:
    """Rows into offers, and all that is wrong with them."""

    file: str
    gpus: Catalogue
    offers: list[Offer] = field(default_factory=list)
    unknown: list[UnknownGpu] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def finished(self, digest: str) -> Offers:
        if not self.problems and not self.names:
            self.problems.append(f"{self.file}: holds no offer: write one a row, with {', '.join(NEEDED)}")
        if self.problems:
            more = len(self.problems) - _SHOWN
            shown = [*self.problems[:_SHOWN], *([f"and {more:,} more"] if more > 0 else [])]
            raise InputFileError("\n".join(shown))
        return Offers(tuple(self.offers), tuple(self.unknown), tuple(self.notes), digest)

    def row(self, place: str, cells: Mapping[str, object]) -> None:
        before = len(self.problems)
        row = _Row(f"{self.file} {place}", cells, self.problems)
        name, gpu_name = row.text("name"), row.text("gpu")
        first = self.names.setdefault(name, place) if name else place
        if first != place:
            row.wrong("name", f"{name!r} is that of {first} too: give each offer its own")
        provider, term, region = row.text("provider"), row.text("term"), row.text("region")
        count, price = row.count(), row.price()
        memory, link = row.size("memory", parse_bytes, "80GB"), row.size("host_link", parse_rate, "25GB/s")
        currency, as_of = row.currency(), row.date()
        if len(self.problems) > before:
            return
        gpu = self.gpus.find(gpu_name)
        if gpu is None:
            self.unknown.append(UnknownGpu(name, gpu_name, self.gpus.hint(gpu_name).removeprefix("; ")))
            return
        self._note(name, gpu_name, gpu, memory)
        own = memory is not None and not _alike(memory, gpu.memory.value)
        self.offers.append(
            Offer(
                name=name,
                provider=provider,
                gpu=gpu,
                count=count,
                memory_bytes=memory if own and memory is not None else gpu.memory.value,
                host_link=link,
                price_per_hour=price,
                currency=currency,
                term=term,
                region=region or None,
                as_of=as_of,
            )
        )

    def _note(self, name: str, gpu_name: str, gpu: Gpu, memory: int | None) -> None:
        others = [other for other in self.gpus.begun(gpu_name) if other != gpu.name]
        if others:
            self.notes.append(f"{name}: {gpu_name!r} is taken for {gpu.name}; it may be {' or '.join(others)}: ask")
        if memory is not None and not _alike(memory, gpu.memory.value):
            self.notes.append(
                f"{name}: {format_bytes(memory)} a device is offered and {gpu.name} has {format_bytes(gpu.memory.value)}: "
                "the offer's figure is used; is it a part of a device?"
            )


@dataclass(slots=True)
class _Row:
    """The cells of one row, each checked when it is asked for."""

    place: str
    cells: Mapping[str, object]
    problems: list[str]

    def wrong(self, column: str, message: str) -> None:
        self.problems.append(f"{self.place}, {column}: {message}")

    def text(self, column: str) -> str:
        value = self.cells.get(column)
        if value is None or value == "":
            if column in NEEDED:
                self.wrong(column, "is missing: every offer has one")
            return ""
        if not isinstance(value, str):
            self.wrong(column, f"{value!r} is not text: put it in quotes")
            return ""
        clean = value.strip()
        if not clean or len(clean) > MAX_TEXT or not clean.isprintable():
            self.wrong(column, f"must be 1 to {MAX_TEXT} printable characters on one line")
            return ""
        return clean

    def count(self) -> int:
        value = self.cells.get("count")
        if value in (None, ""):
            return 1
        text = str(value).strip()
        if isinstance(value, bool | float) or not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= MAX_COUNT:
            self.wrong("count", f"{_short(value)} is not a number of devices: write 1 to {MAX_COUNT:,}")
            return 1
        return int(text)

    def price(self) -> float:
        value = self.cells.get("price_per_hour")
        if value in (None, ""):
            self.wrong("price_per_hour", "is missing: write what the whole offer costs an hour, 0 for what is owned")
            return 0.0
        number = _number(value)
        if number is None or not 0 <= number <= MAX_PRICE:
            self.wrong("price_per_hour", f"{_short(value)} is not a price: write a number of 0 or more, like 2.49")
            return 0.0
        return number

    def size(self, column: str, parse: Callable[[object], int], like: str) -> int | None:
        value = self.cells.get(column)
        if value in (None, ""):
            return None
        try:
            found = parse(value)
            if not 1 <= found < 2**53:
                raise ValueError(f"{_short(value)} is out of range")
        except ValueError as error:
            self.wrong(column, f"{error} (such as {like})")
            return None
        return found

    def currency(self) -> str:
        text = self.text("currency")
        if text and not _CURRENCY.fullmatch(text):
            self.wrong("currency", f"{_short(text)} is no currency: write its three letters, like USD")
        return text

    def date(self) -> str:
        text = self.text("as_of")
        try:
            if text and date.fromisoformat(text).isoformat() != text:
                raise ValueError(text)  # a week or an ordinal date: nobody means that in a list of prices
            return text
        except ValueError:
            self.wrong("as_of", f"{_short(text)} is no date: write the day that the price is of, like 2026-11-30")
            return ""


def _alike(offered: int, known: int) -> bool:
    return abs(offered - known) <= TOLERANCE * known


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not re.fullmatch(r"\s*[0-9]{1,12}(\.[0-9]{1,12})?\s*", value):
        return None
    number = float(value) if not isinstance(value, int) or abs(value) < 2**53 else float("inf")
    return number if isfinite(number) else None


def _short(value: object) -> str:
    return repr(value)[:80]


def _of_csv(text: str, file: str) -> Iterator[tuple[str, dict[str, object]]]:
    """The rows by their line. Raises :class:`InputFileError` for a header that cannot be used."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [cell.strip() for cell in next(reader, [])]
        _check_columns(header, file)
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            place = f"line {reader.line_num}"
            if len(row) != len(header):
                raise InputFileError(
                    f"{file} {place}: {len(row)} cells under {len(header)} columns: quote a cell that holds a comma"
                )
            yield place, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise InputFileError(f"{file} line {reader.line_num}: is not CSV: {error}") from error


def _check_columns(header: list[str], file: str) -> None:
    twice = [name for name in header if header.count(name) > 1]
    if twice:
        raise InputFileError(f"{file} line 1: column {_short(twice[0])} is there twice: keep one")
    for name in header:
        if name not in FIELDS:
            raise InputFileError(f"{file} line 1: column {_short(name)} is not known{nearest(name, FIELDS)}")
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise InputFileError(f"{file} line 1: lacks {', '.join(missing)}: the first line names the columns")


def _of_json(text: str, file: str) -> Iterator[tuple[str, dict[str, object]]]:
    """The objects by their number. Raises :class:`InputFileError`."""
    try:
        document = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{file}: is not JSON: {error}") from error
    rows = document.get("offers") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise InputFileError(f"{file}: must be a list of offers, or an object with one under offers")
    for number, row in enumerate(rows, 1):
        place = f"offer {number}"
        if not isinstance(row, dict):
            raise InputFileError(f"{file} {place}: must be an object with {', '.join(NEEDED)}")
        for name in row:
            if name not in FIELDS:
                raise InputFileError(f"{file} {place}: field {_short(name)} is not known{nearest(name, FIELDS)}")
        yield place, row


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is given twice in one object: keep one")
    return found
