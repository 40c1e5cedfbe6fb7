"""Sending a request and giving back what it held: every count that goes up here comes down here, exactly once.

A leak would show only when a replica restarts with an honest zero and then draws all traffic, so the pair lives in one file:
``send`` takes seat, tokens, KV and adapter count on a replica; ``release`` returns them, whatever ended the attempt.
"""

from __future__ import annotations

from loraledger.events import Decision, Dispatch, HitClass, ResidencyChange
from loraledger.kernel.cost import load_time, tier_of
from loraledger.kernel.residency import Registration
from loraledger.kernel.state import AdapterState, ReplicaState, RequestState, Turn


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
    turn.commands.append(Dispatch(request.id, request.attempt, replica.spec.name, model, decision))


def first_token(turn: Turn, request: RequestState) -> None:
    """Its prefill is done: what was outstanding of it no longer delays others."""
    if request.phase != "sent" or request.replica is None:
        return
    request.phase = "streaming"
    replica = turn.state.replicas[request.replica]
    replica.prefill_out -= request.prompt
    replica.stall_out -= request.stall


def release(turn: Turn, request: RequestState) -> ReplicaState | None:
    """The attempt is over: give back what it held. Returns its replica, ``None`` if it held nothing."""
    if request.phase not in ("sent", "streaming") or request.replica is None:
        return None
    replica = turn.state.replicas[request.replica]
    del replica.in_flight[request.id]
    if request.phase == "sent":
        replica.prefill_out -= request.prompt
        replica.stall_out -= request.stall
    replica.decode_out -= request.expect
    replica.kv_own -= request.prompt + request.expect
    if request.adapter is not None:
        left = replica.adapters[request.adapter] - 1
        if left:
            replica.adapters[request.adapter] = left
        else:
            del replica.adapters[request.adapter]
    request.phase = "held"
    request.replica = None
    request.stall = 0
    return replica


def use(turn: Turn, replica: ReplicaState, name: str, registration: Registration, cause: str) -> None:
    """Advance the believed tiers by one use of a registered adapter, and note what that moved."""
    tiers, engine_name = replica.tiers, registration.engine_name
    before: HitClass = tiers.tier(engine_name) if registration.known else "unknown"
    moved = tiers.use(engine_name)
    registration.known = True
    if replica.observed is not None:
        return  # the engine itself will say what moved
    if before != "gpu":
        note(turn, replica, name, registration, registration.state, before, "gpu", cause)
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
