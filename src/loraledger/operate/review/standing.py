"""What the settings have in force of what a change could change. ``None``: not known, or not the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from loraledger.config import Settings
from loraledger.config.pins import Ranking
from loraledger.kernel.affinity import BoundedAffinity
from loraledger.signals.facts import Facts

T = TypeVar("T")


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """``slots``, ``host_entries``: of each replica. ``concurrency``: of each tenant. ``ranking``: pins of slots, best first."""

    policy: str | None = None
    params: dict[str, float] = {}
    ranking: Ranking = ()
    registered: tuple[str, ...] = ()
    """Adapters that are kept registered at all times (``pin``)."""
    concurrency: int | None = None
    slots: int | None = None
    host_entries: int | None = None
    replicas: int | None = None


def standing(settings: Settings | None, facts: Facts) -> Standing:
    """Of ``settings``, and of ``facts`` where these say more: options of the command line are in them."""
    slots = _same(replica.slots for replica in facts.replicas.values())
    entries = _same(replica.host_entries for replica in facts.replicas.values())
    count = len(facts.replicas) or None
    if settings is None:
        return Standing(slots=slots, host_entries=entries, replicas=count)
    defaults = BoundedAffinity.defaults if settings.policy.name == BoundedAffinity.name else {}
    return Standing(
        policy=settings.policy.name,
        params={**defaults, **settings.policy.params},
        ranking=settings.ranking,
        registered=tuple(adapter.name for adapter in settings.adapters.list if adapter.pin),
        concurrency=_same(tenant.limits.concurrency for tenant in settings.tenants),
        slots=slots,
        host_entries=entries,
        replicas=count,
    )


def _same(values: Iterable[T | None]) -> T | None:
    """The one value that all have."""
    found = set(values)
    return found.pop() if len(found) == 1 else None
