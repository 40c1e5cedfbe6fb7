"""What must hold of a kernel's state after every step, whatever happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from loraledger.kernel.arms import arms
from loraledger.kernel.cost import stand
from loraledger.kernel.failures import ATTEMPTS
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.holding import Holding
from loraledger.kernel.state import FleetState, ReplicaState, RequestState

SEATED = ("sent", "streaming")


def check(fleet: Fleet, wake_at: int | None, before: Mapping[str, int] | None = None) -> None:
    """``before``: what each tenant had in flight, as a limit that was lowered takes nothing away; without it none was."""
    state = fleet.state
    assert wake_at is None or wake_at >= state.now, "the kernel asks to be woken in the past"
    assert 0 <= state.retries <= fleet.settings.limits.retry_burst
    for replica in state.replicas.values():
        _pins(state, replica)
        _replica_counts(state, replica)
        _replica_loads(state, replica)
    _tenants(state, before or {})
    _rollouts(fleet)
    _waiting(state)
    _moments(state)
    assert all(state.adapters[name].spec.replicas for name in state.desired)


def keep_all(state: FleetState) -> None:
    """Have everything kept that may be, so that whatever happens next must forget what does not hold any more."""
    for replica in state.replicas.values():
        stand(state, replica)


def _replica_counts(state: FleetState, replica: ReplicaState) -> None:
    here = [r for r in state.requests.values() if r.replica == replica.spec.name]
    assert all(r.phase in SEATED for r in here)
    assert replica.in_flight.keys() == {r.id for r in here}
    assert replica.adapters == Counter(r.adapter for r in here if r.adapter is not None)
    unanswered = [r for r in here if r.phase == "sent"]
    assert replica.prefill_out == sum(r.prompt for r in unanswered)
    assert replica.stall_out == sum(r.stall for r in unanswered)
    assert replica.decode_out == sum(r.expect for r in here)
    assert replica.kv_own == sum(r.prompt + r.expect for r in here)
    assert len(replica.in_flight) <= replica.spec.max_in_flight
    for tenant in state.tenants:
        mine = [r for r in here if r.tenant == tenant]
        prompts = sum(r.prompt for r in mine if r.ahead)
        held = replica.holdings.get(tenant, Holding())
        assert (held.seats, held.prompt, held.kv) == (len(mine), prompts, sum(r.prompt + r.expect for r in mine))
        assert (held.streams, held.whole) == (sum(not r.whole for r in mine), sum(r.reckoned for r in mine))
    assert replica.streams == sum(not r.whole for r in here)
    assert len(replica.streamers) <= 2
    assert all(held.seats for held in replica.holdings.values())
    assert not any(r.ahead for r in state.requests.values() if r.phase != "sent")
    room, standing = replica.room, replica.standing
    assert standing is None or standing == stand(state, replica)
    replica.reckon()
    assert room == replica.room
    replica.standing = standing
    assert replica.foreign >= 0
    assert replica.foreign_kv >= 0
    assert set(replica.tiers.active) <= set(replica.tiers.host)
    assert len(replica.tiers.active) <= replica.tiers.slots
    assert len(replica.tiers.host) <= replica.tiers.host_entries


def _pins(state: FleetState, replica: ReplicaState) -> None:
    sent_for = [pin for pin in replica.pins.values() if pin.engine_name]
    assert len(sent_for) <= max(0, replica.spec.slots - 1), "no slot is left for the others"
    assert sum(bool(pin.command) and not pin.leaving for pin in replica.pins.values()) <= 1
    for name, pin in replica.pins.items():
        assert not pin.leaving or pin.command
        assert not pin.command or state.commands[pin.command] == (replica.spec.name, name)
        assert pin.engine_name or not pin.command
    tiers = replica.tiers
    assert set(tiers.pinned) <= set(tiers.active)


def _replica_loads(state: FleetState, replica: ReplicaState) -> None:
    by_state = {name: registration.state for name, registration in replica.registrations.items()}
    loading = [name for name, where in by_state.items() if where == "loading"]
    assert loading == ([] if replica.loading is None else [replica.loading])
    assert list(replica.wanted) == [name for name in replica.wanted if by_state[name] == "wanted"]
    assert len(replica.wanted) == sum(where == "wanted" for where in by_state.values())
    assert replica.up or replica.loading is None
    assert replica.loading is not None or not replica.wanted or not replica.up, "a wanted load is never sent"
    for name, registration in replica.registrations.items():
        if registration.state in ("loading", "evicting"):
            assert state.commands[registration.command] == (replica.spec.name, name)
        if registration.waiters:
            assert registration.state in ("wanted", "loading"), "requests wait for a load that will not come"
        if registration.state in ("parked", "evicting") and name in state.adapters:
            assert state.adapters[name].barred
        if name not in state.adapters:
            assert registration.state == "loading", "a replica keeps an adapter that left the catalog"


def active(fleet: Fleet) -> dict[str, int]:
    """Requests of each tenant that count against its concurrency."""
    return {name: tenant.active for name, tenant in fleet.state.tenants.items()}


def _rollouts(fleet: Fleet) -> None:
    settings, state = fleet.settings, fleet.state
    made = arms(settings, state)
    assert [(t, arm.policy.name, arm.books) for t, arm in fleet.arms.items()] == [
        (t, arm.policy.name, arm.books) for t, arm in made.items()
    ]
    assert state.books.keys() == {arm.books for arm in made.values()}
    for rollout in state.rollouts.values():
        known = state.replicas if rollout.variable == "pins" else state.tenants
        assert rollout.members is None or set(rollout.members) <= known.keys()
    if all(rollout.variable != "tenant.concurrency" for rollout in state.rollouts.values()):
        assert {t.name: t for t in settings.tenants} == {name: tenant.spec for name, tenant in state.tenants.items()}


def _tenants(state: FleetState, before: Mapping[str, int]) -> None:
    for tenant in state.tenants.values():
        mine = [r for r in state.requests.values() if r.tenant == tenant.spec.name]
        queued = [r.id for r in mine if r.phase == "queued"]
        assert tenant.active == len(mine) - len(queued)
        assert tenant.active <= max(tenant.spec.concurrency, before.get(tenant.spec.name, 0))
        assert tenant.queue.keys() == set(queued)
        assert len(tenant.queue) <= tenant.spec.queue
    assert state.queued == sum(len(tenant.queue) for tenant in state.tenants.values())
    assert state.waiting_tenants.keys() == {name for name, tenant in state.tenants.items() if tenant.queue}


def _waiting(state: FleetState) -> None:
    timers = set(state.timers)
    assert sorted(state.wakes) == sorted(at for at, key in state.timers if not key)
    for request in state.requests.values():
        assert request.attempt <= ATTEMPTS
        if request.phase in SEATED:
            assert request.replica is not None
            continue
        assert request.deadline > state.now
        assert (request.deadline, request.id) in timers, "a request waits without an armed deadline"
        if request.phase == "loading":
            _loading(state, request)
    assert state.held.keys() == {r.id for r in state.requests.values() if r.phase == "held"}


def _moments(state: FleetState) -> None:
    past = [state.output.at]
    for adapter in state.adapters.values():
        past += [adapter.output.at, adapter.rate_at, adapter.suspect_since, *adapter.placed.values()]
    for replica in state.replicas.values():
        past += [figure.at for figure in (replica.itl, replica.prefill_rate, replica.load_ratio)]
        past += [replica.mark, replica.sampled or 0, replica.placements_since, replica.exited_at, replica.broken_at]
        past += replica.streamers.values()
        for registration in replica.registrations.values():
            past += [registration.since, registration.started, registration.verified]
        past += [pin.since for pin in replica.pins.values()]
    assert max(past) <= state.now, "what is remembered has yet to come"


def _loading(state: FleetState, request: RequestState) -> None:
    assert request.adapter is not None
    waits_at = [
        replica
        for replica in state.replicas.values()
        if request.adapter in replica.registrations and request.id in replica.registrations[request.adapter].waiters
    ]
    assert len(waits_at) == 1, "a request waits for no load, or for two"
    assert waits_at[0].up
