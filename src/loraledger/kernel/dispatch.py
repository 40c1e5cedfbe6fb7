"""Sending a request and giving back what it held: every count that goes up here comes down here, exactly once.

A leak would show only when a replica restarts with an honest zero and then draws all traffic, so the pair lives in one file:
``send`` takes seat, tokens, KV and adapter count on a replica; ``release`` returns them, whatever ended the attempt.
"""

from __future__ import annotations

from collections.abc import Callable

from loraledger.events import Decision, Dispatch, HitClass, ResidencyChange
from loraledger.kernel import fairness
from loraledger.kernel.cost import load_time, tier_of
from loraledger.kernel.residency import Registration
from loraledger.kernel.state import AdapterState, ReplicaState, RequestState
from loraledger.kernel.turn import Turn
from loraledger.tiers import Movement


def send(
    turn: Turn, request: RequestState, replica: ReplicaState, adapter: AdapterState | None, decision: Decision
) -> None:
    """Dispatch ``request`` to ``replica``, where its adapter is registered (or it needs none)."""
    request.phase = "sent"
    request.replica = replica.spec.name
    request.attempt += 1
    request.dispatched = turn.now
    request.lone = replica.prefill_out == 0
    request.decision = decision
    replica.in_flight[request.id] = None
    replica.prefill_out += request.prompt
    replica.decode_out += request.expect
    replica.kv_own += request.prompt + request.expect
    replica.reckon()
    model = turn.settings.base
    if adapter is not None:
        name = adapter.spec.name
        registration = replica.registrations[name]
        model = registration.engine_name
        in_flight = replica.adapters.get(name, 0)
        replica.adapters[name] = in_flight + 1
        adapter.placed[replica.spec.name] = turn.now
        tier = tier_of(replica, registration)
        if (
            tier != "gpu" and not in_flight
        ):  # what is in flight already brings it in, and the engine batches the rest behind
            load = load_time(replica, adapter.spec.bytes) if tier != "host" else 0
            request.stall = load + replica.spec.activation
            replica.stall_out += request.stall
        use(turn, replica, name, registration, "request")
    fairness.take(replica, request, turn.now)
    turn.commands.append(Dispatch(request.id, request.attempt, replica.spec.name, model, decision))


def first_token(turn: Turn, request: RequestState) -> None:
    """Its prefill is done: what was outstanding of it no longer delays others."""
    if request.phase != "sent" or request.replica is None:
        return
    request.phase = "streaming"
    replica = turn.state.replicas[request.replica]
    fairness.begun(replica, request)
    replica.standing = None
    replica.prefill_out -= request.prompt
    replica.stall_out -= request.stall
    if request.adapter in replica.blocked:
        _unblock(turn, replica, request.adapter)


def release(turn: Turn, request: RequestState) -> ReplicaState | None:
    """The attempt is over: give back what it held. Returns its replica, ``None`` if it held nothing."""
    if request.phase not in ("sent", "streaming") or request.replica is None:
        return None
    replica = turn.state.replicas[request.replica]
    del replica.in_flight[request.id]
    fairness.give(replica, request, turn.now)
    if request.phase == "sent":
        replica.prefill_out -= request.prompt
        replica.stall_out -= request.stall
    replica.decode_out -= request.expect
    replica.kv_own -= request.prompt + request.expect
    replica.reckon()
    if request.adapter is not None:
        _release_adapter(turn, replica, request.adapter)
    request.phase = "held"
    request.replica = None
    request.stall = 0
    return replica


def _release_adapter(turn: Turn, replica: ReplicaState, name: str) -> None:
    """One request less for it: the last one frees its slot for those who wait."""
    left = replica.adapters[name] - 1
    if left:
        replica.adapters[name] = left
        return
    del replica.adapters[name]
    replica.blocked.pop(name, None)
    if name in replica.registrations:
        replica.tiers.touch((replica.registrations[name].engine_name,))  # it ran until now
    for waiting in list(replica.blocked):
        if len(_running(replica)) >= replica.tiers.slots:
            break
        _unblock(turn, replica, waiting)


def _running(replica: ReplicaState) -> list[str]:
    """Engine-side names in slots that requests in flight hold."""
    in_flight = replica.adapters
    return [name for name in replica.tiers.active if name.rpartition("@")[0] in in_flight]


def _unblock(turn: Turn, replica: ReplicaState, name: str) -> None:
    """An adapter that waited for a slot has one."""
    del replica.blocked[name]
    registration = replica.registrations.get(name)
    if registration is not None:
        replica.tiers.arrange(_running(replica))
        _move(turn, replica, name, registration, replica.tiers.use, "request")


def use(turn: Turn, replica: ReplicaState, name: str, registration: Registration, cause: str) -> None:
    """Advance the believed tiers by one use of a registered adapter, and note what that moved.

    While other requests in flight hold all slots a request waits in the engine and a load call ends on the host. A pin gives way to
    a request, not to a load call.
    """
    tiers = replica.tiers
    if registration.engine_name in tiers.active:
        _move(turn, replica, name, registration, tiers.use, cause)
        return
    running = _running(replica)
    tiers.arrange(running)  # each step did, but only now does it matter
    held = len(running)
    if tiers.pinned and cause == "load":
        held += sum(pinned not in running for pinned in tiers.pinned)
    if held < tiers.slots:
        _move(turn, replica, name, registration, tiers.use, cause)
    elif cause == "load":
        _move(turn, replica, name, registration, tiers.fetch, cause)
    else:
        replica.blocked[name] = None


def _move(
    turn: Turn,
    replica: ReplicaState,
    name: str,
    registration: Registration,
    bring: Callable[[str], Movement],
    cause: str,
) -> None:
    engine_name = registration.engine_name
    before: HitClass = replica.tiers.tier(engine_name) if registration.known else "unknown"
    moved = bring(engine_name)
    registration.known = True
    if replica.observed is not None:
        return  # the engine itself will say what moved
    if moved.loaded:
        replica.activity.load_rate.add(1, turn.now)
    if moved.activated:
        replica.activity.activation_rate.add(1, turn.now)
    after = replica.tiers.tier(engine_name)
    if before != after:
        note(turn, replica, name, registration, registration.state, before, after, cause)
    # A host eviction empties the slot too; a slot eviction alone leaves the host copy.
    if moved.evicted_host is not None:
        tier: HitClass = "gpu" if moved.evicted_slot == moved.evicted_host else "host"
        _note_eviction(turn, replica, moved.evicted_host, tier, "disk", engine_name)
    if moved.evicted_slot is not None and moved.evicted_slot != moved.evicted_host:
        _note_eviction(turn, replica, moved.evicted_slot, "gpu", "host", engine_name)


def note(
    turn: Turn,
    replica: ReplicaState,
    name: str,
    registration: Registration,
    from_state: str,
    before: HitClass,
    after: HitClass,
    cause: str,
    took: int | None = None,
) -> None:
    """Record a change of state, or a believed change of tier."""
    where, engine_name, to_state = replica.spec.name, registration.engine_name, registration.state
    turn.changes.append(
        ResidencyChange(where, name, engine_name, from_state, to_state, before, after, cause, "believed", took)
    )


def _note_eviction(
    turn: Turn, replica: ReplicaState, engine_name: str, before: HitClass, after: HitClass, by: str
) -> None:
    name = engine_name.rpartition("@")[0]
    registration = replica.registrations.get(name)
    state = registration.state if registration is not None else "absent"
    turn.changes.append(
        ResidencyChange(
            replica.spec.name, name, engine_name, state, state, before, after, f"evicted by {by}", "believed"
        )
    )
