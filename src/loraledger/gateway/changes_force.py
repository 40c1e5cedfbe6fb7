"""What is in force of each variable, what an engine shows of it, and the flags with which it has to be started.

Theory of operation. The settings file says what is in force, until a change was accepted: then the gateway holds the new value for
everybody, and goes on doing so after a restart, as long as the file still says what was in force before. Once the file says
something else, the file is what counts, whether it caught up with the change or went another way; that is journalled, so that a
file that goes back to the old value later means it.

A variable of which replicas or tenants have different values has no value in force: it cannot be changed as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from loraledger.config import Replica, Settings
from loraledger.kernel.policies import make_policy
from loraledger.kernel.settings import FleetSettings
from loraledger.kernel.state import ReplicaState
from loraledger.operate.change import Value

_FIELDS: Final = ("slots", "host_entries")


class Engine(msgspec.Struct, frozen=True):
    """What one engine shows of a setting that it reads when it starts. ``shows``: ``None`` until it restarted and told."""

    restarted: bool
    shows: int | None


def spelled(value: Value) -> str:
    """A value as the journal and the messages have it."""
    return msgspec.json.encode(value).decode()


def unit_of(variable: str) -> Literal["tenant", "replica"]:
    """Whose share gets a change of ``variable`` first."""
    return "tenant" if variable.startswith("policy") or variable == "tenant.concurrency" else "replica"


def names_of(settings: Settings, unit: Literal["tenant", "replica"]) -> list[str]:
    """The tenants or replicas of the settings."""
    return [entry.name for entry in (settings.tenants if unit == "tenant" else settings.replicas)]


def configured(settings: Settings, variable: str, policy: str) -> Value:
    """What the settings file says of ``variable``; ``policy`` is the one in force, whose parameter may be asked for.

    Raises ValueError where it says different things of different tenants or replicas, or the policy has no such parameter.
    """
    if variable == "policy":
        return settings.policy.name
    if variable == "pins":
        return [list(pair) for pair in settings.ranking]
    if variable == "replicas":
        return len(settings.replicas)
    if variable == "tenant.concurrency":
        return _one(variable, {tenant.name: tenant.limits.concurrency for tenant in settings.tenants})
    if variable in _FIELDS:
        return _one(variable, {replica.name: getattr(replica, variable) for replica in settings.replicas})
    return _parameter(settings, variable.partition(".")[2], policy)


def _one(variable: str, values: dict[str, int]) -> int:
    different = set(values.values())
    if len(different) != 1:
        listed = ", ".join(f"{name} {value}" for name, value in values.items())
        raise ValueError(f"{variable} is not one value for all ({listed}): make the settings alike first")
    return different.pop()


def _parameter(settings: Settings, name: str, policy: str) -> float:
    defaults = make_policy(FleetSettings((), policy=policy)).defaults
    if name not in defaults:
        raise ValueError(f"{policy} has no parameter {name!r}; it has {', '.join(defaults) or 'none'}")
    given = settings.policy.params if settings.policy.name == policy else {}
    return given.get(name, defaults[name])


def check_restart(settings: Settings, variable: str, value: Value) -> None:
    """Raises ValueError when no engine would start with ``value``, or nothing could be learnt from it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"after is {spelled(value)}: {variable} is a number from 1 on")
    if variable == "replicas" and value < len(settings.replicas):
        raise ValueError(
            "after is fewer replicas than there are: with none of them left to compare, replay it and change the settings"
        )
    for replica in settings.replicas:
        slots = value if variable == "slots" else replica.slots
        host = value if variable == "host_entries" else replica.host_entries
        if variable in _FIELDS and host < slots:
            raise ValueError(
                f"after is {value}: {replica.name} would have {slots} slots and {host} host entries, and an engine wants at"
                " least as many host entries as slots"
            )


def engine_flags(replicas: Iterable[Replica], variable: str, value: Value) -> dict[str, list[str]]:
    """By replica, the flags of vLLM with which ``variable`` is ``value``; empty for what no flag sets."""
    found = {}
    for replica in replicas:
        if variable in _FIELDS:
            slots = value if variable == "slots" else replica.slots
            host = value if variable == "host_entries" else replica.host_entries
            found[replica.name] = ["--max-loras", str(slots), "--max-cpu-loras", str(host)]
    return found


def shown(replica: ReplicaState, variable: str, probed: bool, process_start: int | None, since_ns: int) -> Engine:
    """What this engine shows of ``variable`` since ``since_ns``, when its process was the one of ``process_start``.

    A probe tells the engine's own figures. Without one the settings do, once the engine is another process: what they say of it
    cannot be checked.
    """
    restarted = replica.up and replica.process_start is not None and replica.process_start != process_start
    if not restarted:
        return Engine(False, None)
    if not probed:
        return Engine(True, getattr(replica.spec, variable))
    floor = replica.floor
    fresh = floor is not None and floor.at > since_ns
    return Engine(True, getattr(floor, variable) if fresh else None)
