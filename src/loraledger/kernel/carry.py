"""Carrying what was learnt into a kernel with other settings.

A restart with a changed file must not forget what the changed lines do not touch: a replica of the same name keeps its estimates,
and, if its slots and host entries are the same, its believed tiers and registrations; an adapter of the same name and digest
keeps its rates, its placement set, and what is held against it. Rollouts go on, with those of their members that are left.
"""

from __future__ import annotations

from loraledger.kernel import rollout
from loraledger.kernel.fresh import fresh_state
from loraledger.kernel.loads import FOREVER, set_aside
from loraledger.kernel.settings import FleetSettings
from loraledger.kernel.state import FleetState, ReplicaState


def carry_over(old: FleetState, settings: FleetSettings) -> FleetState:
    """A state for ``settings`` with everything of ``old`` that still holds."""
    new = fresh_state(settings)
    new.now, new.next_decision, new.next_command = old.now, old.next_decision, old.next_command
    new.output, new.retries, new.counters = old.output, min(old.retries, new.retries), old.counters
    new.round_robin, new.least_load_ratio, new.shares = old.round_robin, old.least_load_ratio, old.shares
    for name, replica in new.replicas.items():
        before = old.replicas.get(name)
        if before is not None:
            _carry_replica(before, replica, old.now)
    for name, adapter in new.adapters.items():
        known = old.adapters.get(name)
        if known is None or known.spec.digest != adapter.spec.digest:
            continue
        known.spec = adapter.spec
        known.placed = {r: at for r, at in known.placed.items() if r in new.replicas}
        known.preferred = []  # positions in the old fleet
        if known.parked_until == FOREVER:  # what was mended meanwhile is tried again, by a load that verifies it
            known.parked_until, known.parked_reason = 0, None
        new.adapters[name] = known
    for replica in new.replicas.values():
        for name in [n for n in replica.registrations if not _is_served(old, new, n)]:
            set_aside(replica, replica.registrations.pop(name))
        for registration in replica.registrations.values():
            if registration.permanent:
                registration.permanent, registration.retry_at = False, 0
    rollout.carry(old, new, settings)
    return new


def _carry_replica(before: ReplicaState, replica: ReplicaState, now: int) -> None:
    for figure in ("itl", "prefill_rate", "load_ratio"):
        learnt, prior = getattr(before, figure), getattr(replica, figure).prior
        learnt.prior = prior
        learnt.refresh(now)
        setattr(replica, figure, learnt)
    replica.drift, replica.draining = before.drift, before.draining
    for name, pin in before.pins.items():
        if pin.engine_name:  # what the ranking no longer names is unpinned
            pin.ranked = name in replica.pins
            replica.pins[name] = pin
    same = (before.spec.slots, before.spec.host_entries) == (replica.spec.slots, replica.spec.host_entries)
    if same:
        replica.tiers, replica.registrations, replica.stale = before.tiers, before.registrations, before.stale
        replica.process_start, replica.engine_version = before.process_start, before.engine_version
        replica.kv_tokens = replica.spec.kv_tokens if replica.spec.kv_tokens is not None else before.kv_tokens


def _is_served(old: FleetState, new: FleetState, name: str) -> bool:
    """Whether the adapter is still there, with the files that it had."""
    before, after = old.adapters.get(name), new.adapters.get(name)
    return before is not None and after is not None and before.spec.digest == after.spec.digest
