"""The baselines that need no more than a count: what load balancers do that know nothing of adapters, or only their names.

``round-robin`` and ``least-loaded`` do not look at the adapter. ``strict-affinity`` looks at nothing else. ``bounded-hash`` stands
between: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, arXiv 1608.01350, as in HAProxy's
``hash-balance-factor`` and KubeAI's ``PrefixHash``). Each replica has ``virtual_nodes`` places on a ring; a request starts at its
adapter's place and walks on until a replica has room, that is until one more request leaves it within

    cap = ceil(factor x (requests in hand + 1) / replicas)

of the feasible replicas. As factor >= 1 one always has. KubeAI's loads are requests in flight; here those that wait in the
gateway for a load count too, because they are bound to their replica already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from math import ceil
from typing import ClassVar

from loraledger.kernel.cost import candidate, load_waiters
from loraledger.kernel.policy import Choice, Stability, check_params
from loraledger.kernel.rendezvous import seed_of, weight
from loraledger.kernel.settings import FleetSettings
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState, RequestState


class Baseline:
    """A policy that looks at every replica. ``bounds``: least and greatest allowed value of each parameter.

    Raises ``ConfigError`` on a parameter that is unknown or out of bounds.
    """

    name: ClassVar[str]
    stability: ClassVar[Stability] = "stable"
    reads: ClassVar[frozenset[str]] = frozenset()
    defaults: ClassVar[Mapping[str, float]] = {}
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}
    counts_tries: ClassVar[bool] = False

    def __init__(self, settings: FleetSettings) -> None:
        check_params(self.name, settings.params, self.defaults, self.bounds)
        self._params = {**self.defaults, **settings.params}

    def pool(self, state: FleetState, adapter: AdapterState | None) -> Iterable[ReplicaState]:
        """All replicas, in configured order."""
        return state.replicas.values()


def choice(
    state: FleetState,
    replica: ReplicaState,
    request: RequestState,
    adapter: AdapterState | None,
    reason: str,
    considered: int,
) -> Choice:
    """One replica, with what our own cost model says of it: a baseline does not rank the others by cost."""
    return Choice((candidate(state, replica, request, adapter, 0.0),), reason, considered)


def in_turn(state: FleetState, equals: list[ReplicaState]) -> ReplicaState:
    """The next of ``equals``: it changes with each decision."""
    return equals[state.round_robin % len(equals)]


def in_hand(replica: ReplicaState) -> int:
    """Requests bound to ``replica``: in flight there, or waiting in the gateway for one of its loads."""
    return len(replica.in_flight) + load_waiters(replica)


class RoundRobin(Baseline):
    """Each request to the next replica, whatever it holds: what a plain load balancer does."""

    name: ClassVar[str] = "round-robin"

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """The next of the feasible replicas in configured order."""
        return choice(state, in_turn(state, feasible), request, adapter, "next in turn", len(feasible))


class LeastLoaded(Baseline):
    """To the replica with the least outstanding work (tokens sent and not finished, and foreign requests)."""

    name: ClassVar[str] = "least-loaded"
    reads: ClassVar[frozenset[str]] = frozenset({"outstanding"})

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """Least prefill and decode tokens outstanding; ties in turn."""
        mean = state.output.value(state.now)
        loads = [r.prefill_out + r.decode_out + r.foreign * mean for r in feasible]
        least = min(loads)
        ties = [r for r, load in zip(feasible, loads, strict=True) if load == least]
        return choice(state, in_turn(state, ties), request, adapter, "least outstanding work", len(feasible))


class StrictAffinity(Baseline):
    """Each adapter to its one rendezvous home, however long the queue there; the base model in turn."""

    name: ClassVar[str] = "strict-affinity"

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """The feasible replica of highest rendezvous weight."""
        if adapter is None:
            replica = in_turn(state, feasible)
        else:
            seed = adapter.seed
            replica = max(feasible, key=lambda r: weight(seed, r.seed))
        return choice(state, replica, request, adapter, "rendezvous home", len(feasible))


class BoundedHash(Baseline):
    """Each adapter to its place on a ring, or to the next replica that is below its share of the load."""

    name: ClassVar[str] = "bounded-hash"
    stability: ClassVar[Stability] = "beta"
    reads: ClassVar[frozenset[str]] = frozenset({"outstanding"})
    defaults: ClassVar[Mapping[str, float]] = {
        "factor": 1.25,  # KubeAI: meanLoadPercentage 125
        "virtual_nodes": 100.0,  # KubeAI 256, HAProxy 16 a unit of weight
    }
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"factor": (1.0, 100.0), "virtual_nodes": (1.0, 10_000.0)}

    def __init__(self, settings: FleetSettings) -> None:
        super().__init__(settings)
        self._names = [spec.name for spec in settings.replicas]
        self._ring: list[tuple[int, str]] = []

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """First on the ring, from the adapter's place, that has room; the base model in turn among those that have."""
        loads = {replica.spec.name: in_hand(replica) for replica in feasible}
        cap = ceil(self._params["factor"] * (sum(loads.values()) + 1) / len(feasible))
        if adapter is None:
            replica = in_turn(state, [r for r in feasible if loads[r.spec.name] < cap])
            return choice(state, replica, request, None, "next in turn below the bound", len(feasible))
        passed: dict[str, None] = {}
        for name in self._walk(adapter.seed):
            if loads.get(name, cap) < cap:  # the least loaded is at most at the mean, below any bound
                break
            passed[name] = None
        full = sum(name in loads for name in passed)
        reason = f"{full} passed on the ring: at the bound of {cap} requests" if full else "ring home"
        return choice(state, state.replicas[name], request, adapter, reason, len(feasible))

    def _walk(self, seed: int) -> Iterable[str]:
        """Replicas in the order of the ring, from the place of an adapter; each comes up many times."""
        if not self._ring:
            places = range(1, int(self._params["virtual_nodes"]) + 1)
            self._ring = sorted((weight(seed_of(name), place), name) for name in self._names for place in places)
        ring = self._ring
        first = bisect_left(ring, (weight(seed, 0), ""))
        return (ring[index % len(ring)][1] for index in range(first, first + len(ring)))
