"""What is in force of what a change could change: by the settings, or by a change that was accepted since.

``None``: not known, or not the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from loraledger.config import Settings
from loraledger.config.pins import Ranking
from loraledger.kernel.policies import make_policy
from loraledger.kernel.settings import FleetSettings
from loraledger.operate.change import Change, Value, held
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
    tenants: int | None = None
    probed: bool = False
    """Whether every engine has a probe: only that tells what was preempted of a request, and takes pins."""


def standing(
    settings: Settings | None, facts: Facts, accepted: Mapping[str, Sequence[Change]] | None = None
) -> Standing:
    """Of ``settings``, and of ``facts`` where these say more: options of the command line are in them.

    ``accepted``: changes by variable, oldest first; the gateway holds the last of them as long as the settings are as they were.
    """
    slots = _same(replica.slots for replica in facts.replicas.values())
    entries = _same(replica.host_entries for replica in facts.replicas.values())
    count = len(facts.replicas) or None
    if settings is None:
        return Standing(slots=slots, host_entries=entries, replicas=count)
    found = Standing(
        policy=settings.policy.name,
        params={**_defaults(settings.policy.name), **settings.policy.params},
        ranking=settings.ranking,
        registered=tuple(adapter.name for adapter in settings.adapters.list if adapter.pin),
        concurrency=_same(tenant.limits.concurrency for tenant in settings.tenants),
        slots=slots,
        host_entries=entries,
        replicas=len(settings.replicas),
        tenants=len(settings.tenants),
        probed=all(replica.probe is not None for replica in settings.replicas),
    )
    # A parameter is one of a policy: which one is in force comes first.
    for variable, changes in sorted((accepted or {}).items(), key=lambda item: item[0] != "policy"):
        last, _ = held(_says(found, variable), changes)
        if last is not None:
            found = _with(found, variable, last.after)
    return found


def _says(now: Standing, variable: str) -> Value:
    if variable == "policy":
        return now.policy
    if variable == "pins":
        return [list(pair) for pair in now.ranking]
    return now.concurrency if variable == "tenant.concurrency" else now.params.get(variable.partition(".")[2])


def _with(now: Standing, variable: str, value: Value) -> Standing:
    if variable == "policy" and isinstance(value, str):
        return msgspec.structs.replace(now, policy=value, params=dict(_defaults(value)))
    if variable == "pins" and isinstance(value, list):
        return msgspec.structs.replace(now, ranking=tuple((replica, adapter) for replica, adapter in value))
    if variable == "tenant.concurrency" and isinstance(value, int):
        return msgspec.structs.replace(now, concurrency=value)
    if isinstance(value, int | float):
        return msgspec.structs.replace(now, params={**now.params, variable.partition(".")[2]: value})
    raise TypeError(f"{variable}: {value!r} was checked when it was proposed")


def _defaults(policy: str) -> Mapping[str, float]:
    return make_policy(FleetSettings((), policy=policy)).defaults


def _same(values: Iterable[T | None]) -> T | None:
    """The one value that all have."""
    found = set(values)
    return found.pop() if len(found) == 1 else None
