"""What a scenario pins: the settings' ranking, or that of ``--set residency=`` and ``--set pins=FILE``.

A ranking is of replicas by name. So clones have none, and what it says of a replica that the settings have and the scenario does
not is passed over, like adapters that nobody asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from loraledger.config.pins import Ranking, faults, read_ranking
from loraledger.config.schema import Settings
from loraledger.errors import ConfigError
from loraledger.kernel.settings import ReplicaSpec
from loraledger.replay.scenarios.axes import Changes


class Residency(NamedTuple):
    """What the kernel is told."""

    residency: str
    pins: Ranking


def residency_of(settings: Settings, changes: Changes, replicas: Sequence[ReplicaSpec]) -> Residency:
    """What ``changes`` make of the settings' residency. Raises ``ConfigError`` without a ranking, or for one that does not fit."""
    residency = changes.text("residency") or settings.policy.residency
    if residency != "ranked":
        return Residency(residency, ())
    named = changes.text("pins")
    if named is None and settings.ranking:
        return Residency(residency, settings.ranking)
    path = settings.policy.pins if named is None else Path(named)
    if path is None:
        raise ConfigError(
            f"{changes.label}: residency=ranked takes a ranking: give --set pins=FILE, or set policy.pins"
        )
    try:
        ranking = read_ranking(path)
    except ValueError as error:
        raise ConfigError(f"{changes.label}: {error}") from error
    known = {replica.name for replica in settings.replicas} | {spec.name for spec in replicas}
    for fault in faults(path, ranking, known, None):
        raise ConfigError(f"{changes.label}: {fault}")
    return Residency(residency, ranking)


def doubts(found: Residency, replicas: Sequence[ReplicaSpec], probed: bool) -> list[str]:
    """Where a ranking will come to nothing."""
    if found.residency != "ranked":
        return []
    if not probed:
        return ["residency=ranked pins nothing where no probe is seen: give --probe to replay it"]
    ranked = {replica for replica, _ in found.pins}
    bare = [spec.name for spec in replicas if spec.name not in ranked]
    return [f"the ranking says nothing of {', '.join(bare)}: LRU stays there"] if bare else []
