"""Many adapters side by side: what each is, what it costs on one engine and how it fares there, and what all come to.

Folders are read one after another and only a row of each is kept: an inventory of tensors takes some hundred KiB, a row
about one, so that a thousand folders are looked through in little memory. A folder that cannot be read is a row too.

Two kinds of figures must not be mixed. *Adapter* figures (disk, host, what it fills of a slot) depend on the adapter.
*Slot* figures depend on the engine's settings and the base alone: slots are taken when the engine starts, at full size,
whatever they will hold, and are paid in KV tokens. Device figures are those of one rank process and need the base
model; without it they are ``None``, unknown, never zero.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from loraledger.adapters.reading.files import CONFIG_NAME, WEIGHTS_NAME
from loraledger.adapters.reading.folder import AdapterFolder, FolderReader
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.sizing.footprint import (
    HostBytes,
    SlotBytes,
    adapter_device_bytes,
    host_bytes,
    kv_tokens,
    served_dtype,
    slot_bytes,
)
from loraledger.adapters.verdict.judge import Outcome, Verdict, judge
from loraledger.config.names import bad_name
from loraledger.errors import InputFileError

RANK_RULE: Final = "rank_over_max"
"""The one refusal that another ``max_lora_rank`` lifts."""

SLOTTED: Final = ("vllm", "sglang")
"""Engines with slots of ``max_lora_rank``; the others give each adapter what it needs."""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder that should hold an adapter."""

    name: str
    path: Path
    root: Path | None
    """Its files must lie in here after links are followed: the folder that it was found in; ``None`` when named itself."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A path that holds no adapter, or one that cannot be read."""

    name: str
    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One adapter on one engine."""

    name: str
    path: Path
    rank: int
    modules: int
    suffixes: tuple[str, ...]
    """Last parts of its modules' names, in the file's order."""
    parameters: int
    dtypes: tuple[str, ...]
    base_claim: str | None
    peft_type: str | None
    layout_id: str
    disk: int
    """Bytes of the weights file, or of all shards."""
    lora: int
    """Bytes of the pairs A and B, as stored; the next three are what lies beside them."""
    whole: int
    magnitude: int
    other: int
    host: HostBytes | None
    """In the host cache of one rank process."""
    device: int | None
    """Bytes that it fills on one rank process, without padding."""
    verdict: Verdict
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Slots:
    """All slots of one rank process at one ``max_lora_rank``."""

    max_lora_rank: int
    one: SlotBytes
    count: int
    kv_tokens_one: int
    kv_tokens: int
    """KV tokens that fit in the room of all slots."""

    @property
    def total(self) -> int:
        """Bytes of all slots."""
        return self.one.total * self.count


@dataclass(frozen=True, slots=True)
class Fit:
    """What ``max_lora_rank`` would have to be."""

    smallest: int | None
    """The smallest that takes all adapters which nothing but their rank keeps out; ``None``: no such value, or no such setting."""
    too_big: tuple[str, ...]
    """Adapters that no value takes."""
    without_too_big: int | None
    """The smallest for the others; ``None`` when there are none."""
    aside: int
    """Adapters refused for another reason, which no rank would help."""


@dataclass(frozen=True, slots=True)
class Totals:
    """All readable adapters together, whatever their verdict."""

    outcomes: Counter[Outcome]
    unreadable: int
    parameters: int
    disk: int
    host: HostBytes | None
    """All of them at once, in one rank process; ``None`` where the engine has no host cache."""
    host_fullest: int | None
    """Exact bytes of as many of the largest as the host cache holds, in one rank process."""
    device: int | None
    """All of them at once, unpadded, on one rank process."""
    fit: Fit


def find(paths: Iterable[Path]) -> tuple[list[Place], list[Unreadable]]:
    """The adapter folders that ``paths`` name: each a folder of an adapter, or one whose sub-folders are adapters.

    One level down, without hidden ones, by name; a folder that is met twice is taken once. The second list holds the
    paths that lead to no adapter.
    """
    places: dict[str, Place] = {}
    problems: list[Unreadable] = []
    for path in paths:
        try:
            found = _places(path)
        except OSError as error:
            problems.append(Unreadable(path.name, path, f"cannot be listed: {error.strerror}"))
        except InputFileError as error:
            problems.append(Unreadable(path.name, path, error.message))
        else:
            for place in found:
                places.setdefault(os.path.realpath(place.path), place)
    return list(places.values()), problems


def _places(path: Path) -> list[Place]:
    if not os.path.lexists(path):
        raise InputFileError("does not exist: correct the path")
    if not path.is_dir():
        raise InputFileError("is not a folder: name the folder that holds the adapter's files")
    if _looks_like_adapter(path):
        # abspath keeps the name of a link and makes one of "." and "..".
        return [Place(Path(os.path.abspath(path)).name, path, None)]  # noqa: PTH100
    children = sorted(child for child in path.iterdir() if not child.name.startswith("."))
    found = [Place(child.name, child, path) for child in children if _looks_like_adapter(child)]
    if not found:
        raise InputFileError(f"holds no adapter: neither it nor any of its sub-folders has an {CONFIG_NAME}")
    return found


def _looks_like_adapter(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in (CONFIG_NAME, WEIGHTS_NAME))


def survey(places: Iterable[Place], base: BaseModel | None, engine: EngineSettings) -> Iterator[Row | Unreadable]:
    """A row for each of ``places``, read when asked for. Only headers are read."""
    reader = FolderReader()
    for place in places:
        try:
            yield row_of(reader.read(place.name, place.path, root=place.root), base, engine)
        except InputFileError as error:
            yield Unreadable(place.name, place.path, error.message)


def row_of(adapter: AdapterFolder, base: BaseModel | None, engine: EngineSettings) -> Row:
    """What ``adapter`` is, costs and meets on ``engine``."""
    inventory = adapter.inventory
    refused_name = bad_name(adapter.name)
    notes = [*adapter.warnings, *(f"{name} is left alone: engines read {WEIGHTS_NAME}" for name in adapter.ignored)]
    if refused_name is not None:
        notes.append(f"the gateway would not serve it under its folder's name, which {refused_name}")
    return Row(
        name=adapter.name,
        path=adapter.path,
        rank=adapter.rank,
        modules=len(inventory.modules),
        suffixes=tuple(dict.fromkeys(module.suffix for module in inventory.modules.values())),
        parameters=adapter.parameters,
        dtypes=adapter.dtypes,
        base_claim=adapter.base_claim,
        peft_type=adapter.config.peft_type,
        layout_id=adapter.layout_id,
        disk=adapter.bytes_disk,
        lora=sum(module.nbytes for module in inventory.modules.values()),
        whole=inventory.whole.nbytes,
        magnitude=inventory.magnitude.nbytes,
        other=inventory.other.nbytes,
        host=host_bytes(adapter, engine, base),
        device=_device(adapter, base, engine),
        verdict=judge(adapter, base, engine),
        notes=tuple(notes),
    )


def _device(adapter: AdapterFolder, base: BaseModel | None, engine: EngineSettings) -> int | None:
    if base is None or not base.shaped:
        return None
    try:
        return adapter_device_bytes(adapter, base, engine)
    except InputFileError:  # it does not fit this base, which the verdict says
        return None


def slots_of(base: BaseModel | None, engine: EngineSettings, max_lora_rank: int | None = None) -> Slots | None:
    """The slots of ``engine``, or what they would be with another ``max_lora_rank``.

    ``None`` when the shapes of the base are not known, or the engine has no slots. Raises :class:`InputFileError` when the
    base cannot be cut over so many rank processes.
    """
    if base is None or not base.shaped:
        return None
    if max_lora_rank is not None:
        engine = replace(engine, max_lora_rank=max_lora_rank)
    one = slot_bytes(base, engine)
    if one is None:
        return None
    return Slots(
        max_lora_rank=engine.max_lora_rank,
        one=one,
        count=engine.max_loras,
        kv_tokens_one=kv_tokens(one.total, base, engine),
        kv_tokens=kv_tokens(one.total * engine.max_loras, base, engine),
    )


def kv_bytes_of(base: BaseModel, engine: EngineSettings) -> int:
    """Bytes of K and V of one token on one rank process, in the type that ``engine`` keeps them in."""
    cache = served_dtype(base, engine) if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    return base.kv_bytes_per_token(cache, engine.tensor_parallel)


def sum_up(rows: Sequence[Row | Unreadable], engine: EngineSettings) -> Totals:
    """The totals of ``rows``."""
    read = [row for row in rows if isinstance(row, Row)]
    hosts = [row.host for row in read if row.host is not None]
    devices = [row.device for row in read if row.device is not None]
    in_host = len(hosts) == len(read) > 0
    return Totals(
        outcomes=Counter(row.verdict.outcome for row in read),
        unreadable=len(rows) - len(read),
        parameters=sum(row.parameters for row in read),
        disk=sum(row.disk for row in read),
        host=HostBytes(sum(host.exact for host in hosts), sum(host.pinned for host in hosts)) if in_host else None,
        host_fullest=sum(heapq.nlargest(engine.host_entries, (host.exact for host in hosts))) if in_host else None,
        device=sum(devices) if len(devices) == len(read) > 0 else None,
        fit=_fit(read, engine),
    )


def _fit(rows: Sequence[Row], engine: EngineSettings) -> Fit:
    judged = [row for row in rows if not refused_beyond_rank(row.verdict)]
    if engine.engine not in SLOTTED:
        return Fit(smallest=None, too_big=(), without_too_big=None, aside=len(rows) - len(judged))
    ranks = [rank for row in judged if (rank := row.verdict.max_lora_rank) is not None]
    too_big = tuple(row.name for row in judged if row.verdict.max_lora_rank is None)
    without = max(ranks, default=None)
    return Fit(
        smallest=None if too_big else without,
        too_big=too_big,
        without_too_big=without,
        aside=len(rows) - len(judged),
    )


def refused_beyond_rank(verdict: Verdict) -> bool:
    """Whether something other than the adapter's rank keeps it out."""
    return any(finding.effect == "refuse" and finding.rule != RANK_RULE for finding in verdict.findings)
