"""What a kernel begins with: the state of one that has seen nothing yet, and adapters as they enter its catalog."""

from __future__ import annotations

from loraledger.events import AdapterSpec
from loraledger.kernel.estimates import Estimate
from loraledger.kernel.pin import Pin
from loraledger.kernel.rendezvous import seed_of
from loraledger.kernel.settings import FleetSettings
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState, TenantState
from loraledger.tiers import EngineTiers


def fresh_state(settings: FleetSettings) -> FleetState:
    """The state of a kernel that has seen nothing yet."""
    state = FleetState(
        replicas={
            spec.name: ReplicaState(
                spec=spec,
                tiers=EngineTiers(spec.slots, max(spec.host_entries, spec.slots)),
                itl=Estimate(float(spec.itl)),
                prefill_rate=Estimate(float(spec.prefill_tokens_per_s)),
                load_ratio=Estimate(1.0),
                seed=seed_of(spec.name),
                kv_tokens=spec.kv_tokens,
                pins=_ranking(settings, spec.name),
            )
            for spec in settings.replicas
        },
        adapters={},
        tenants={spec.name: TenantState(spec) for spec in settings.tenants},
        output=Estimate(128.0),
        retries=float(settings.limits.retry_burst),
        rank_everywhere=min((spec.max_rank for spec in settings.replicas), default=0),
    )
    for spec in settings.adapters:
        declare(state, spec)
    return state


def _ranking(settings: FleetSettings, replica: str) -> dict[str, Pin]:
    if settings.residency != "ranked":
        return {}
    return {adapter: Pin() for where, adapter in settings.pins if where == replica}


def declare(state: FleetState, spec: AdapterSpec) -> AdapterState:
    """Put an adapter into the catalog, or give it its new files; a new digest clears what was held against the old one."""
    adapter = AdapterState(spec, Estimate(state.output.value(state.now)), seed_of(spec.name))
    adapter.barred = spec.name in state.adapters and any(spec.name in r.registrations for r in state.replicas.values())
    state.adapters[spec.name] = adapter
    desire(state, spec)
    return adapter


def desire(state: FleetState, spec: AdapterSpec) -> None:
    """Note whether some replicas should hold this adapter at all times."""
    if spec.replicas:
        state.desired[spec.name] = None
    else:
        state.desired.pop(spec.name, None)
