"""The registered policies: bounded affinity and the baselines that it is measured against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from loraledger.errors import ConfigError
from loraledger.kernel.affinity import BoundedAffinity, check_params
from loraledger.kernel.cost import candidate
from loraledger.kernel.policy import Choice, Policy, Stability
from loraledger.kernel.rendezvous import weight
from loraledger.kernel.settings import FleetSettings
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState, RequestState


class _WholeFleet:
    """A policy that looks at every replica."""

    def pool(self, state: FleetState, adapter: AdapterState | None) -> Iterable[ReplicaState]:
        """All replicas, in configured order."""
        return state.replicas.values()


class RoundRobin(_WholeFleet):
    """Each request to the next replica, whatever it holds: what a plain load balancer does."""

    name: ClassVar[str] = "round-robin"
    stability: ClassVar[Stability] = "stable"
    reads: ClassVar[frozenset[str]] = frozenset()
    defaults: ClassVar[Mapping[str, float]] = {}

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """The next of the feasible replicas in configured order."""
        replica = feasible[state.round_robin % len(feasible)]
        return Choice((candidate(state, replica, request, adapter, 0.0),), "next in turn", len(feasible))


class LeastLoaded(_WholeFleet):
    """To the replica with the least outstanding work (tokens sent and not finished, and foreign requests)."""

    name: ClassVar[str] = "least-loaded"
    stability: ClassVar[Stability] = "stable"
    reads: ClassVar[frozenset[str]] = frozenset({"outstanding"})
    defaults: ClassVar[Mapping[str, float]] = {}

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """Least prefill and decode tokens outstanding; ties in turn."""
        mean = state.output.value(state.now)
        loads = [r.prefill_out + r.decode_out + r.foreign * mean for r in feasible]
        least = min(loads)
        ties = [r for r, load in zip(feasible, loads, strict=True) if load == least]
        replica = ties[state.round_robin % len(ties)]
        return Choice((candidate(state, replica, request, adapter, 0.0),), "least outstanding work", len(feasible))


class StrictAffinity(_WholeFleet):
    """Each adapter to its one rendezvous home, however long the queue there; the base model in turn."""

    name: ClassVar[str] = "strict-affinity"
    stability: ClassVar[Stability] = "stable"
    reads: ClassVar[frozenset[str]] = frozenset()
    defaults: ClassVar[Mapping[str, float]] = {}

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """The feasible replica of highest rendezvous weight."""
        if adapter is None:
            replica = feasible[state.round_robin % len(feasible)]
        else:
            seed = adapter.seed
            replica = max(feasible, key=lambda r: weight(seed, r.seed))
        return Choice((candidate(state, replica, request, adapter, 0.0),), "rendezvous home", len(feasible))


def policy_names() -> tuple[str, ...]:
    """Names of the registered policies, default first."""
    return (BoundedAffinity.name, RoundRobin.name, LeastLoaded.name, StrictAffinity.name)


def make_policy(settings: FleetSettings) -> Policy:
    """The policy that ``settings`` names. Raises ``ConfigError`` on an unknown name or parameter, naming the known ones."""
    if settings.policy == BoundedAffinity.name:
        check_params(settings.policy, settings.params, BoundedAffinity.defaults)
        return BoundedAffinity(settings.params, settings.limits.loads_per_minute)
    for baseline in (RoundRobin, LeastLoaded, StrictAffinity):
        if settings.policy == baseline.name:
            check_params(settings.policy, settings.params, baseline.defaults)
            return baseline()
    raise ConfigError(
        f"policy.name: unknown policy {settings.policy!r}; known: {', '.join(policy_names())}", param="policy.name"
    )
