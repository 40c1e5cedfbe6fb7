"""Registering adapters on replicas: one load at a time a replica, one load an adapter there, everyone who waits shares it.

Each load stalls the engine's step, so loads of one replica are sent one after the other. A load that fails for a passing reason
parks the adapter there with a back-off that doubles; one that fails for good (rank, missing files, unsupported weights) parks it
until the adapter is declared anew. Waiters are handed back to the caller, who routes them again.
"""

from __future__ import annotations

from loraledger.events import Evict, Load, engine_name
from loraledger.kernel.cost import load_time, tier_of
from loraledger.kernel.dispatch import note, use
from loraledger.kernel.observed import keep
from loraledger.kernel.residency import Registration, Trigger
from loraledger.kernel.settings import SECOND
from loraledger.kernel.state import AdapterState, ReplicaState
from loraledger.kernel.turn import Turn

FOREVER = 1 << 62
"""A time that never comes: parked until something is declared anew."""


def step(
    turn: Turn,
    replica: ReplicaState,
    name: str,
    registration: Registration,
    trigger: Trigger,
    cause: str,
    took: int | None = None,
) -> None:
    """Walk the residency table and note the change."""
    before = registration.step(trigger, turn.now)
    if before != registration.state:
        adapter = turn.state.adapters.get(name)
        if adapter is not None and registration.state in ("parked", "evicting"):
            adapter.barred = True
        tier = tier_of(replica, registration)
        note(turn, replica, name, registration, before, tier, tier, cause, took)


def want(turn: Turn, replica: ReplicaState, name: str, waiter: str | None, cause: str) -> None:
    """Have ``name`` registered on ``replica``; a load wanted or under way there is joined."""
    registration = replica.registrations.get(name)
    if registration is None:
        registration = replica.registrations[name] = Registration(waiters={})
    if registration.state not in ("wanted", "loading"):
        if _name_taken(replica, registration):
            registration.generation += 1
        step(turn, replica, name, registration, "want", cause)
        adapter = turn.state.adapters[name]
        registration.expected = load_time(replica, adapter.spec.bytes) + replica.spec.activation
        replica.wanted[name] = None
        _count_placement(replica, turn.now)
        start_next(turn, replica)
    if waiter is not None:
        registration.waiters[waiter] = None
    replica.standing = None


def start_next(turn: Turn, replica: ReplicaState) -> None:
    """Send the oldest wanted load, if none is under way and the replica is up."""
    if replica.loading is not None or not replica.wanted or not replica.up:
        return
    name = next(iter(replica.wanted))
    del replica.wanted[name]
    registration = replica.registrations[name]
    spec = turn.state.adapters[name].spec
    registration.engine_name = engine_name(name, spec.digest, registration.generation)
    registration.started = turn.now
    registration.command = turn.command_id(replica.spec.name, name)
    step(turn, replica, name, registration, "start", "load")
    replica.loading = name
    turn.count("loads")
    turn.commands.append(Load(registration.command, replica.spec.name, name, registration.engine_name))


def loaded(turn: Turn, replica: ReplicaState, name: str, took: int) -> list[str]:
    """The load in hand succeeded; returns the requests that waited for it."""
    registration = replica.registrations[name]
    adapter = turn.state.adapters.get(name)
    if adapter is not None:
        spec = replica.spec
        prior = spec.load_overhead + adapter.spec.bytes * SECOND // spec.load_bytes_per_s
        replica.load_ratio.observe(took / prior, turn.now)
        turn.state.least_load_ratio = min(turn.state.least_load_ratio, replica.load_ratio.value(turn.now))
        adapter.placed[spec.name] = turn.now
    keep(replica.activity.calls, turn.now, took)
    step(turn, replica, name, registration, "done", "load", took)
    registration.failures, registration.retry_at, registration.permanent = 0, 0, False
    registration.reason = None
    registration.verified = turn.now
    registration.known = True
    use(turn, replica, name, registration, "load")
    return _end_load(turn, replica, registration)


def superseded(turn: Turn, name: str, registration: Registration) -> bool:
    """Whether the load in hand is of files that are no longer served."""
    adapter = turn.state.adapters.get(name)
    return adapter is None or registration.engine_name != engine_name(
        name, adapter.spec.digest, registration.generation
    )


def abandon(turn: Turn, replica: ReplicaState, name: str, done: bool) -> list[str]:
    """A superseded load ended: if it was ``done``, the replica forgets the name. Returns the requests that waited for it."""
    registration = replica.registrations[name]
    if done:
        step(turn, replica, name, registration, "done", "superseded")
        use(turn, replica, name, registration, "load")
        forget(turn, replica, name)
    else:
        step(turn, replica, name, registration, "fail", "superseded")
    del replica.registrations[name]
    return _end_load(turn, replica, registration)


def load_failed(turn: Turn, replica: ReplicaState, name: str, reason: str, permanent: bool) -> list[str]:
    """The load in hand failed; returns the requests that waited for it."""
    registration = replica.registrations[name]
    registration.reason = reason
    registration.permanent = permanent
    registration.failures += 1
    limits = turn.settings.limits
    pause = min(limits.load_backoff << min(registration.failures - 1, 30), limits.load_backoff_max)
    registration.retry_at = FOREVER if permanent else turn.now + pause
    step(turn, replica, name, registration, "fail", reason)
    turn.count("loads_failed")
    adapter = turn.state.adapters.get(name)
    if adapter is not None:
        adapter.placed.pop(replica.spec.name, None)
        if permanent and adapter.suspect_since and not _proven(turn, adapter):
            park(turn, adapter, reason, permanent)
        elif permanent:
            # What one engine refuses for good would end another one that only needs to read it again.
            adapter.suspect_since = turn.now
    return _end_load(turn, replica, registration)


def park(turn: Turn, adapter: AdapterState, reason: str, permanent: bool) -> None:
    """Take an adapter out of service on all replicas."""
    adapter.parked_until = FOREVER if permanent else turn.now + turn.settings.limits.park
    adapter.parked_reason = reason
    turn.count("adapters_parked")


def _proven(turn: Turn, adapter: AdapterState) -> bool:
    """Whether a replica loaded it since it is suspect: then one that refuses it may be at fault itself (a missing mount)."""
    found = [replica.registrations.get(adapter.spec.name) for replica in turn.state.replicas.values()]
    return any(r is not None and r.state == "registered" and r.verified > adapter.suspect_since for r in found)


def may_load(registration: Registration | None, now: int) -> bool:
    """Whether the adapter may be used or loaded here now: not while parked, nor while its name is being forgotten."""
    if registration is None or registration.state not in ("parked", "evicting"):
        return True
    return registration.state == "parked" and registration.retry_at <= now


def forget(turn: Turn, replica: ReplicaState, name: str) -> None:
    """Make the replica forget an adapter's name. Its bytes stay until the engine's own lists drop them."""
    registration = replica.registrations.get(name)
    if registration is None or registration.state != "registered":
        return
    step(turn, replica, name, registration, "forget", "asked")
    registration.command = turn.command_id(replica.spec.name, name)
    adapter = turn.state.adapters.get(name)
    if adapter is not None:
        adapter.placed.pop(replica.spec.name, None)
    turn.commands.append(Evict(registration.command, replica.spec.name, name, registration.engine_name))


def lose(turn: Turn, replica: ReplicaState, cause: str) -> list[str]:
    """The replica cannot be asked any more: its registrations become unknown. Returns requests that waited for loads."""
    waiters: list[str] = []
    for name, registration in list(replica.registrations.items()):
        if registration.state == "loading":
            registration.generation += 1  # it may still be carried out, unheard, under the old name
        step(turn, replica, name, registration, "lost", cause)
        waiters.extend(registration.waiters)
        registration.waiters = {}
        if name not in turn.state.adapters:
            set_aside(replica, replica.registrations.pop(name))
    replica.loading = None
    replica.wanted.clear()
    return waiters


def set_aside(replica: ReplicaState, registration: Registration) -> None:
    """A version is no longer served: should the replica list its name, it is to forget it."""
    if registration.engine_name and registration.state != "absent":
        replica.stale[registration.engine_name] = None


def _name_taken(replica: ReplicaState, registration: Registration) -> bool:
    """Whether the engine knows, may know, or still holds bytes under this generation's name: loading it would prove nothing."""
    return (
        registration.generation == 0
        or registration.state in ("registered", "unknown")
        or registration.engine_name in replica.tiers.host
    )


def _end_load(turn: Turn, replica: ReplicaState, registration: Registration) -> list[str]:
    replica.loading = replica.standing = None
    waiters = list(registration.waiters)
    registration.waiters = {}
    start_next(turn, replica)
    return waiters


def _count_placement(replica: ReplicaState, now: int) -> None:
    if now - replica.placements_since >= 60 * SECOND:
        replica.placements_since, replica.placements = now, 0
    replica.placements += 1
