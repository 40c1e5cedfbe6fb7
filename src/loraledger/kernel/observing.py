"""Taking in what the probe inside an engine reports.

The lists that it sends replace what was believed. They were true a moment ago: what was sent to the replica since then is
replayed on top, as without a probe, so that a burst of requests for one adapter does not look like a burst of loads. Single
moves are told too; where lists are told they change nothing, because the belief may be ahead of them.

A difference between the belief and the lists is drift: counted once for each telling, never an error. What was merely under way is
none: an adapter that is in flight or was sent for within ``SETTLE`` before the lists were true may have been read or not, and what
it pushes out may be there or not.
"""

from __future__ import annotations

from collections.abc import Iterable

from loraledger.events import (
    ActivationObserved,
    EvictionObserved,
    FloorObserved,
    HitClass,
    LoadObserved,
    Move,
    MoveAsked,
    ProbeLost,
    ResidencyChange,
    StepsObserved,
    TiersObserved,
)
from loraledger.kernel import pins
from loraledger.kernel.observed import Observed, keep
from loraledger.kernel.policy import Policy
from loraledger.kernel.settings import SECOND
from loraledger.kernel.state import ReplicaState
from loraledger.kernel.turn import Turn
from loraledger.tiers import EngineTiers

MOVING = 10 * SECOND
"""How long a move that an operator asked for may be seen to change the lists."""
SETTLE = SECOND
"""What an engine was sent this long ago it has read, unless it waits for a slot, and then it is in flight."""


def tiers(turn: Turn, policy: Policy, event: TiersObserved) -> None:
    """The engine's own lists."""
    replica = turn.state.replicas[event.replica]
    if not replica.up:
        return
    lists = _lists(replica, event)
    known = replica.observed
    if known is not None and event.as_of > known.moved + MOVING and _contradict(turn, replica, lists, event.as_of):
        turn.drift(replica, "residency")
    if lists.pinned:
        lists.arrange([name for name in lists.active if name.rpartition("@")[0] in replica.adapters])
    for engine_name in _sent_since(turn, replica, replica.tiers.host, event.as_of):
        if replica.tiers.tier(engine_name) == "gpu":  # else it waits for a slot, or was pushed out of it again
            lists.use(engine_name)
    replica.tiers, replica.standing = lists, None
    for name in list(replica.blocked):
        registration = replica.registrations.get(name)
        if registration is not None and registration.engine_name in lists.active:
            del replica.blocked[name]
    if replica.observed is None:
        replica.observed = Observed(event.as_of)
    replica.observed.as_of = event.as_of
    replica.observed.pinned = event.pinned
    replica.observed.host_bytes = dict(zip(event.host, event.host_bytes, strict=False))
    for registration in replica.registrations.values():
        registration.known = True
    if replica.pins:
        pins.told(turn, replica)


def loaded(turn: Turn, policy: Policy, event: LoadObserved) -> None:
    """Bytes moved from disk to the host cache."""
    replica = turn.state.replicas[event.replica]
    keep(replica.activity.loads, turn.now, event.took)
    replica.activity.load_rate.add(1, turn.now)
    _note(turn, replica, event.engine_name, "disk", "host", "load", event.took)


def activated(turn: Turn, policy: Policy, event: ActivationObserved) -> None:
    """Bytes were copied from the host cache into a slot."""
    replica = turn.state.replicas[event.replica]
    if replica.observed is None and replica.tiers.tier(event.engine_name) != "gpu":
        turn.drift(replica, "residency")
        replica.tiers.use(event.engine_name)
        replica.standing = None
    keep(replica.activity.activations, turn.now, event.took)
    replica.activity.activation_rate.add(1, turn.now)
    _note(turn, replica, event.engine_name, "host", "gpu", "activation", event.took)


def evicted(turn: Turn, policy: Policy, event: EvictionObserved) -> None:
    """An adapter left a tier."""
    replica = turn.state.replicas[event.replica]
    if replica.observed is None:
        believed = replica.tiers.host if event.tier == "host" else replica.tiers.active
        if event.engine_name in believed:
            turn.drift(replica, "residency")
        replica.tiers.drop(event.engine_name, event.tier)
        replica.standing = None
    replica.activity.eviction_rate.add(1, turn.now)
    after: HitClass = "disk" if event.tier == "host" else "host"
    _note(turn, replica, event.engine_name, event.tier, after, f"evicted: {event.cause}", None)


def floor(turn: Turn, policy: Policy, event: FloorObserved) -> None:
    """What the engine's memory was divided into."""
    turn.state.replicas[event.replica].floor = event


def steps(turn: Turn, policy: Policy, event: StepsObserved) -> None:
    """What the engine's steps were."""
    observed = turn.state.replicas[event.replica].observed
    if observed is None:
        return
    observed.blocked, observed.adapters, observed.kv_free = event.blocked, event.adapters, event.kv_free
    observed.steps_at = turn.now
    observed.preempted.add(event.preempted, turn.now)
    observed.recomputed.add(event.recomputed, turn.now)


def lost(turn: Turn, policy: Policy, event: ProbeLost) -> None:
    """The probe is silent: the lists it left behind are a belief that ages."""
    turn.state.replicas[event.replica].observed = None


def move_asked(turn: Turn, policy: Policy, event: MoveAsked) -> None:
    """An operator moves an adapter between tiers; what came of it is seen in the lists."""
    registration = turn.state.replicas[event.replica].registrations.get(event.adapter)
    if registration is not None and registration.state == "registered":
        known = turn.state.replicas[event.replica].observed
        if known is not None:
            known.moved = turn.now
        number = turn.command_id(event.replica, event.adapter)
        turn.commands.append(Move(number, event.replica, event.adapter, registration.engine_name, event.verb))


def _lists(replica: ReplicaState, event: TiersObserved) -> EngineTiers:
    """The lists as an engine's, of the size that it says it has, or was configured with."""
    said, spec = replica.floor, replica.spec
    slots = said.slots if said is not None and said.slots else spec.slots
    entries = said.host_entries if said is not None and said.host_entries else spec.host_entries
    lists = EngineTiers(max(slots, len(event.active)), max(entries, slots, len(event.host)))
    lists.host.update(dict.fromkeys(event.host))
    lists.active.update((name, None) for name in event.active if name in lists.host)
    lists.pinned.update((name, None) for name in event.pinned if name in lists.active)
    return lists


def _sent_since(turn: Turn, replica: ReplicaState, names: Iterable[str], since: int) -> list[str]:
    """Of these engine-side names, in their order, those that something was sent for after ``since``."""
    adapters, where = turn.state.adapters, replica.spec.name
    known = [(name, adapters.get(name.rpartition("@")[0])) for name in names]
    return [name for name, adapter in known if adapter is not None and adapter.placed.get(where, 0) > since]


def _contradict(turn: Turn, replica: ReplicaState, lists: EngineTiers, as_of: int) -> bool:
    """Whether lists differ from the belief in what cannot be under way."""
    believed = replica.tiers
    moving = dict.fromkeys(_sent_since(turn, replica, [*believed.host, *lists.host], as_of - SETTLE))
    for adapter in replica.adapters:
        if adapter in replica.registrations:
            moving[replica.registrations[adapter].engine_name] = None
    for ours, theirs in ((believed.host, lists.host), (believed.active, lists.active)):
        gone = sum(name not in theirs and name not in moving for name in ours)
        come = [name in moving for name in theirs if name not in ours]
        if gone > sum(come) or (come and not moving):
            return True
    return False


def _note(
    turn: Turn, replica: ReplicaState, engine_name: str, before: HitClass, after: HitClass, cause: str, took: int | None
) -> None:
    name = engine_name.rpartition("@")[0] or engine_name
    registration = replica.registrations.get(name)
    state = registration.state if registration is not None else "absent"
    turn.changes.append(
        ResidencyChange(replica.spec.name, name, engine_name, state, state, before, after, cause, "observed", took)
    )
