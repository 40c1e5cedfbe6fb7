"""GPUs: memory, memory bandwidth, dense bf16 arithmetic, host link; and the ladder that an adapter climbs to a device.

Theory of operation. The catalogue is a small YAML file of the package (``hardware.yaml``), read strictly; each value has its source
and the day on which it was entered, and says when it has not been checked against that source yet (``recalled``). Units are those
of AIConfigurator: bytes, bytes a second, FLOP a second, the host link one way. Speeds are peaks of data sheets. Nobody reaches
them; they are only ever used as ratios between two GPUs (``scaling``), for which what all GPUs fail to reach cancels out.

A name is found whatever its case and punctuation (``NVIDIA H100 80GB HBM3``), by itself or an alias. One that fits two GPUs, such
as ``A100``, is none of them: it is not guessed, and the nearest names are said. A second file of the same form adds GPUs and
replaces those of the same name.

The *ladder* of a node: device, host RAM, local disk, remote. A rung's rate and latency are those of the way up from it to the next
rung: the host's those of an activation, the disk's those of a load, the remote's those of staging.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from loraledger.config.checks import nearest
from loraledger.config.yamltree import read_yaml
from loraledger.errors import ConfigError, InputFileError
from loraledger.units import parse_bytes, parse_duration, parse_rate

RungName = Literal["device", "host", "disk", "remote"]
RUNGS: Final[tuple[RungName, ...]] = ("device", "host", "disk", "remote")
MAX_BYTES: Final = 1 << 20
"""Of a file of GPUs."""
SHIPPED: Final = "hardware.yaml"

_FLOPS: Final[Mapping[str, int]] = {"GFLOP/s": 10**9, "TFLOP/s": 10**12, "PFLOP/s": 10**15}
_QUANTITY: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([A-Za-z/]+)")
_SIGNS: Final = re.compile(r"[^a-z0-9]+")
_Words = Annotated[str, msgspec.Meta(min_length=1, max_length=400)]


@dataclass(frozen=True, slots=True)
class Sourced:
    """A figure, where it comes from, and the day on which it was entered (ISO). ``recalled``: not yet checked against it."""

    value: int
    source: str
    as_of: str
    recalled: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device."""

    name: str
    aliases: tuple[str, ...]
    memory: Sourced
    """Bytes that the device reports."""
    memory_bandwidth: Sourced
    """Bytes a second, peak."""
    bf16: Sourced
    """FLOP a second, peak, dense."""
    host_link: Sourced
    """Bytes a second to the device, one way."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One tier of a node. ``bytes``: its size, ``None`` where it is not known; rate and latency: of the way up from it."""

    name: RungName
    bytes: int | None
    bytes_per_s: int
    latency_ns: int
    source: str

    def takes_ns(self, size: int) -> int:
        """What ``size`` bytes take to the next rung up, if nothing else is on the way."""
        return self.latency_ns + size * 10**9 // self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Ladder:
    """The tiers of a node, from the device down."""

    rungs: tuple[Rung, ...]

    def rung(self, name: RungName) -> Rung:
        """The one of that name."""
        return self.rungs[RUNGS.index(name)]

    def with_rung(
        self,
        name: RungName,
        source: str,
        *,
        size: int | None = None,
        bytes_per_s: int | None = None,
        latency_ns: int | None = None,
    ) -> Ladder:
        """This ladder with what is known better of one rung, and who knows it. ``ValueError``: no rate, or a negative latency."""
        old = self.rung(name)
        new = Rung(
            name,
            old.bytes if size is None else size,
            old.bytes_per_s if bytes_per_s is None else bytes_per_s,
            old.latency_ns if latency_ns is None else latency_ns,
            source,
        )
        if new.bytes_per_s < 1 or new.latency_ns < 0:
            raise ValueError(f"{name}: a rate is 1 byte a second or more, a latency 0 or more")
        return Ladder(tuple(new if rung.name == name else rung for rung in self.rungs))


class Way(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The way up from a rung on a node of which nothing is known. Of the host's the rate is that of the GPU's link."""

    name: Literal["host", "disk", "remote"]
    latency: str
    source: _Words
    bytes_per_s: str | int | None = None

    def __post_init__(self) -> None:
        if (self.name == "host") != (self.bytes_per_s is None):
            raise ValueError("bytes_per_s: disk and remote have one, the host's is the link of the GPU")
        if self.bytes_per_s is not None and parse_rate(self.bytes_per_s) < 1:
            raise ValueError("bytes_per_s: must be 1 byte a second or more")
        parse_duration(self.latency)

    def rung(self, bytes_per_s: int | None = None, source: str = "") -> Rung:
        """The rung that it leads up from, by default at its own rate."""
        rate = parse_rate(self.bytes_per_s) if bytes_per_s is None else bytes_per_s
        return Rung(self.name, None, rate, parse_duration(self.latency), source or self.source)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """GPUs by name, and the ways up on a node of which nothing is known."""

    gpus: Mapping[str, Gpu]
    ways: Mapping[str, Way]
    spellings: Mapping[str, str]
    """From the plain form of each name and alias to the name."""

    def find(self, name: str) -> Gpu | None:
        """The GPU of that name or alias, whatever its case and punctuation."""
        found = self.spellings.get(_plain(name))
        return None if found is None else self.gpus[found]

    def begun(self, name: str) -> list[str]:
        """The GPUs one of whose names goes on from ``name``: what a short name may mean beside what it is taken for."""
        plain = _plain(name)
        return sorted({gpu for spelled, gpu in self.spellings.items() if plain and spelled.startswith(f"{plain}-")})

    def hint(self, name: str) -> str:
        """To append to "no such GPU": those that ``name`` may begin, else the nearest, else all."""
        begun = self.begun(name)
        if begun:
            return f"; that could be {' or '.join(begun)}"
        close = nearest(_plain(name), self.spellings)
        return close if "did you mean" in close else f"; known: {', '.join(sorted(self.gpus))}"

    def ladder(self, gpu: Gpu, host_link: int | None = None) -> Ladder:
        """The ladder of a node with ``gpu``; ``host_link``: bytes a second of its own link, where an offer states it."""
        host = self.ways["host"]
        rate = gpu.host_link.value if host_link is None else host_link
        link = f"link: {gpu.host_link.source if host_link is None else 'as offered'}; latency: {host.source}"
        device = Rung("device", gpu.memory.value, gpu.memory_bandwidth.value, 0, gpu.memory_bandwidth.source)
        return Ladder((device, host.rung(rate, link), self.ways["disk"].rung(), self.ways["remote"].rung()))


def catalogue(more: Path | None = None) -> Catalogue:
    """The shipped GPUs, and those of the file ``more``, which win. Raises :class:`InputFileError` naming what is wrong in it."""
    text = files("loraledger.plan").joinpath(SHIPPED).read_text(encoding="utf-8")
    read, name = _parse(text, SHIPPED, {}), SHIPPED
    if more is not None:
        own, name = _parse(_text(more), more.name, read.sources), more.name
        read = _Read({**read.gpus, **own.gpus}, {**read.ways, **own.ways}, own.sources)
    return Catalogue(read.gpus, read.ways, _spellings(read.gpus.values(), name))


def flops(text: str) -> int:
    """FLOP a second from text such as ``989TFLOP/s``. Raises ``ValueError``."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in _FLOPS:
        raise ValueError(f"{text!r} is no rate of arithmetic: write it with {', '.join(_FLOPS)}, like 989TFLOP/s")
    exact = Fraction(match[1]) * _FLOPS[match[2]]
    return exact.numerator // exact.denominator


class _Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: _Words
    as_of: date


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: int | str
    source: str
    note: str = ""
    recalled: bool = False


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
    memory: _Value
    memory_bandwidth: _Value
    bf16: _Value
    host_link: _Value
    aliases: tuple[str, ...] = ()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sources: dict[str, _Source] = {}
    gpus: Annotated[tuple[_Entry, ...], msgspec.Meta(max_length=1000)] = ()
    rungs: tuple[Way, ...] = ()


class _Read(NamedTuple):
    gpus: Mapping[str, Gpu]
    ways: Mapping[str, Way]
    sources: Mapping[str, _Source]


def _parse(text: str, name: str, sources: Mapping[str, _Source]) -> _Read:
    """The file's content; ``sources`` of another file may be named too. Raises :class:`InputFileError`."""
    try:
        tree, problems = read_yaml(text, name)
        if problems:
            raise InputFileError(f"{problems[0].origin or name}: {problems[0].message}")
        found = msgspec.convert(tree.data, _File)
        known = {**sources, **found.sources}
        gpus: dict[str, Gpu] = {}
        for entry in found.gpus:
            if entry.name in gpus:
                raise ValueError(f"{entry.name} is there twice: keep one")
            gpus[entry.name] = _gpu(entry, known)
        return _Read(gpus, {way.name: way for way in found.rungs}, known)
    except ConfigError as error:
        raise InputFileError(error.message) from error
    except ValueError as error:  # msgspec's ValidationError is one
        raise InputFileError(f"{name}: {error}") from error


def _gpu(entry: _Entry, sources: Mapping[str, _Source]) -> Gpu:
    def sourced(field: str, parse: Callable[[int | str], int]) -> Sourced:
        written: _Value = getattr(entry, field)
        try:
            value = parse(written.value)
            if value < 1:
                raise ValueError(f"{written.value!r}: must be more than 0")
            if written.source not in sources:
                raise ValueError(f"source {written.source[:60]!r} is not listed{nearest(written.source, sources)}")
        except ValueError as error:
            raise ValueError(f"{entry.name}.{field}: {error}") from error
        known = sources[written.source]
        title = f"{known.title}; {written.note}" if written.note else known.title
        return Sourced(value, title, known.as_of.isoformat(), written.recalled)

    return Gpu(
        name=entry.name,
        aliases=entry.aliases,
        memory=sourced("memory", parse_bytes),
        memory_bandwidth=sourced("memory_bandwidth", parse_rate),
        bf16=sourced("bf16", lambda value: flops(str(value))),
        host_link=sourced("host_link", parse_rate),
    )


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise InputFileError(f"{path}: over {MAX_BYTES >> 20} MiB: no list of GPUs is that large")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error


def _plain(name: str) -> str:
    return _SIGNS.sub("-", name.lower()).strip("-")


def _spellings(gpus: Iterable[Gpu], file: str) -> dict[str, str]:
    """From each plain name and alias to its GPU. Raises :class:`InputFileError` when one stands for two."""
    found: dict[str, str] = {}
    for gpu in gpus:
        for spelled in (gpu.name, *gpu.aliases):
            owner = found.setdefault(_plain(spelled), gpu.name)
            if owner != gpu.name:
                raise InputFileError(f"{file}: {spelled!r} is {owner} and {gpu.name}: an alias names one GPU")
    return found
