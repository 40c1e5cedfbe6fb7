"""The residency ranking that ``policy.pins`` names: which adapters a replica should keep in its slots, the best first.

``loraledger advise --pins FILE`` writes such a file; one by hand is as good::

    {"schema_version": 1, "kind": "pins", "pins": [{"replica": "r1", "adapter": "sql"}, ...]}

Further fields are passed over, so that the file may say why. It is read once, when the settings are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from loraledger.config.checks import nearest
from loraledger.config.origin import Problem

if TYPE_CHECKING:
    from loraledger.config.schema import Settings

Ranking: TypeAlias = tuple[tuple[str, str], ...]
"""Replica and adapter; of each replica the best first."""
VERSION: Final = 1
MOST_BYTES: Final = 16 * 2**20


class _Entry(msgspec.Struct):
    replica: str
    adapter: str


class _File(msgspec.Struct):
    schema_version: int
    kind: str
    pins: list[_Entry]


def read_ranking(path: Path) -> Ranking:
    """What is in the file. Raises ``ValueError`` saying what is wrong with it."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path} is over {MOST_BYTES:,} bytes: rank no more adapters than there are slots")
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): write it with loraledger advise --pins") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no ranking ({error}): write it with loraledger advise --pins") from error
    if (found.kind, found.schema_version) != ("pins", VERSION):
        told = f"kind {found.kind!r}, schema_version {found.schema_version}"
        raise ValueError(f"{path} is of {told}: a ranking is of kind 'pins', schema_version {VERSION}")
    ranking = tuple((entry.replica, entry.adapter) for entry in found.pins)
    if not ranking:
        raise ValueError(f"{path} names no adapter: leave policy.residency at lru")
    return ranking


def ranking_of(settings: Settings) -> tuple[Ranking, list[Problem]]:
    """What ``settings`` would have pinned, or why that cannot be.

    Adapters in a folder are known only when it is read, so with one any name may be ranked.
    """
    policy, where = settings.policy, ("policy", "pins")
    if policy.residency != "ranked":
        return (), []
    if policy.pins is None:
        return (), [Problem(where, "is missing: residency ranked takes a ranking (loraledger advise --pins FILE)")]
    try:
        ranking = read_ranking(policy.pins)
    except ValueError as error:
        return (), [Problem(where, str(error))]
    replicas = {replica.name for replica in settings.replicas}
    adapters = None if settings.adapters.folder is not None else {adapter.name for adapter in settings.adapters.list}
    return ranking, [Problem(where, fault) for fault in faults(policy.pins, ranking, replicas, adapters)]


def faults(path: Path, ranking: Ranking, replicas: Collection[str], adapters: Collection[str] | None) -> Iterator[str]:
    """What a ranking says that these do not know, and what it says twice. ``adapters``: ``None`` where they are not known yet."""
    for index, pair in enumerate(ranking):
        replica, adapter = pair
        at = f"{path}: pins[{index}]"
        if replica not in replicas:
            yield f"{at}: {replica!r} is no replica{nearest(replica, replicas)}"
        elif adapters is not None and adapter not in adapters:
            yield f"{at}: {adapter!r} is no adapter{nearest(adapter, adapters)}"
    yield from _twice(path, ranking)


def _twice(path: Path, ranking: Sequence[tuple[str, str]]) -> Iterator[str]:
    first: dict[tuple[str, str], int] = {}
    for index, pair in enumerate(ranking):
        if first.setdefault(pair, index) != index:
            yield f"{path}: pins[{index}]: {pair[1]!r} on {pair[0]!r} is a duplicate of pins[{first[pair]}]"
