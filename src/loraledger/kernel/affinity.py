"""Bounded affinity: stay with the replicas that hold the adapter until leaving is cheaper, counting what leaving costs others.

Each adapter has a *placement set*, the replicas it was lately routed to. A request goes to the cheapest member, unless the
cheapest outsider beats it by more than the near-tie margin with everything that a placement costs there: the load, its stall of
every running stream, the expected reload of the adapter it pushes out. Then the set grows by that outsider, and the
decision says by how much. That is the bound: a warm replica wins only while its delay stays below the cold-load penalty
elsewhere (the locality argument of Balanced-PANDAS, arXiv 1702.07802, with measured times for its three levels). What a copy
costs others is paid once and serves many: it is shared by the requests that the adapter's rate promises each copy within
``amortise_s``.

A member not used for ``placement_age`` seconds leaves the set. Each replica takes at most ``loads_per_minute`` new placements a
minute, so that a burst cannot turn into an eviction storm. Near ties fall to rendezvous hashing, so that two gateways, or one
gateway before and after a restart, break them alike.

Most requests find their adapter in a slot of a member that nobody waits for. Outsiders are then not even scored: whatever they
cost, it includes a load, and the cheapest load that was ever measured costs more. In a fleet above ``ALL`` replicas outsiders
are sampled: ``PREFERRED`` that belong to the adapter, so that its placements stay together, and ``SPREAD`` that change with each
decision; best-of-d already gives nearly all of the gain of looking at every one (Mitzenmacher, the power of two choices).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import ClassVar

from loraledger.events import Candidate
from loraledger.kernel.cost import arrival_rate, candidates, load_floor
from loraledger.kernel.policy import Choice, Stability, check_params
from loraledger.kernel.rendezvous import weight
from loraledger.kernel.settings import MS, SECOND, FleetSettings
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState, RequestState

ALL, PREFERRED, SPREAD = 32, 12, 4
_COST = attrgetter("cost")


class BoundedAffinity:
    """The default policy. Parameters: ``defaults`` below, all floats, set under ``policy.params``."""

    name: ClassVar[str] = "bounded-affinity"
    stability: ClassVar[Stability] = "beta"
    counts_tries: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset(
        {"outstanding", "residency", "load_time", "prefill_rate", "itl", "rate"}
    )
    defaults: ClassVar[Mapping[str, float]] = {
        "externality": 1.0,  # weight of the delay done to others
        "tie_ms": 5.0,
        "tie_share": 0.02,
        "growth_share": 0.5,  # an outsider must be this much cheaper: a copy takes a slot for longer than this request
        "placement_age_s": 600.0,
        "amortise_s": 10.0,  # what a copy costs others is shared by the requests that it is there for in so long
    }

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "externality": (0.0, 1_000.0),
        "tie_ms": (0.0, 60_000.0),
        "tie_share": (0.0, 1.0),
        "growth_share": (0.0, 1.0),
        "placement_age_s": (1.0, 1e6),
        "amortise_s": (0.0, 1e6),
    }

    def __init__(self, settings: FleetSettings) -> None:
        check_params(self.name, settings.params, self.defaults, self.bounds)
        merged = {**self.defaults, **settings.params}
        self._externality = merged["externality"]
        self._tie = int(merged["tie_ms"] * MS)
        self._tie_share = merged["tie_share"]
        self._growth_share = merged["growth_share"]
        self._age = int(merged["placement_age_s"] * SECOND)
        self._amortise = merged["amortise_s"]
        self._budget = settings.limits.loads_per_minute

    def pool(self, state: FleetState, adapter: AdapterState | None) -> Iterable[ReplicaState]:
        """All replicas of a small fleet; of a large one the placement set and a sample."""
        if len(state.replicas) <= ALL:
            return state.replicas.values()
        everyone, decision = list(state.replicas.values()), state.next_decision
        spread = [weight(decision, k) % len(everyone) for k in range(SPREAD if adapter is not None else ALL // 2)]
        if adapter is None:
            return [everyone[i] for i in dict.fromkeys(spread)]
        if not adapter.preferred:
            adapter.preferred = [weight(adapter.seed, k) % len(everyone) for k in range(PREFERRED)]
        found = {name: state.replicas[name] for name in adapter.placed}
        for i in (*adapter.preferred, *spread):
            found[everyone[i].spec.name] = everyone[i]
        return found.values()

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """Cheapest member of the placement set, or the outsider that beats it; see the module's theory."""
        if adapter is None:
            return self._choose_for_base(state, request, feasible)
        now, placed, factor = state.now, adapter.placed, self._externality
        oldest = now - self._age
        fresh = [name for name, last in placed.items() if last > oldest]
        members = [replica for replica in feasible if replica.spec.name in fresh] if fresh else []
        inside = candidates(state, members, request, adapter, factor)
        best_in = min(inside, key=_COST) if inside else None
        outside: list[Candidate] = []
        if best_in is None or self._bound(best_in) > load_floor(state, feasible[0], adapter):
            outsiders = self._growable(feasible, fresh, now)
            if best_in is None and not outsiders:  # every churn budget is spent: better a load than no answer
                outsiders = feasible
            if fresh:
                # One adapter with half of all requests stayed on one replica for 3/8 of a run and waited up to 3 s while the
                # first request after it would have paid for the copy alone (loads of 100 ms).
                factor /= max(1.0, arrival_rate(adapter, now) * self._amortise / (len(fresh) + 1))
            outside = candidates(state, outsiders, request, adapter, factor)
        return self._pick(state, adapter, best_in, inside, outside, len(feasible))

    def _pick(
        self,
        state: FleetState,
        adapter: AdapterState,
        best_in: Candidate | None,
        inside: list[Candidate],
        outside: list[Candidate],
        considered: int,
    ) -> Choice:
        if best_in is None:
            first = self._nearest(state, adapter, outside, min(outside, key=_COST))
            return _choice(first, outside, "first placement", considered)
        if outside:
            best_out = min(outside, key=_COST)
            if best_out.cost < self._bound(best_in):
                chosen = self._nearest(state, adapter, outside, best_out)
                reason = (
                    f"set grows: {best_in.replica} would cost {best_in.cost / SECOND:.3f} s, "
                    f"{chosen.replica} {chosen.cost / SECOND:.3f} s with its load"
                )
                return _choice(chosen, [*inside, *outside], reason, considered)
        chosen = self._nearest(state, adapter, inside, best_in)
        return _choice(chosen, [*inside, *outside], f"affinity: {chosen.tier}", considered)

    def _bound(self, best_in: Candidate) -> int:
        """What an outsider must cost less than, with its load, to join the placement set."""
        return best_in.cost - max(self._tie, int(best_in.cost * self._growth_share))

    def _margin(self, cost: int) -> int:
        return max(self._tie, int(cost * self._tie_share))

    def _nearest(self, state: FleetState, adapter: AdapterState, scored: list[Candidate], best: Candidate) -> Candidate:
        """The cheapest (``best``); among near ties the one with the highest rendezvous weight."""
        if len(scored) == 1:
            return best
        limit = best.cost + self._margin(best.cost)
        near = [c for c in scored if c.cost <= limit]
        if len(near) == 1:
            return best
        seed, replicas = adapter.seed, state.replicas
        return max(near, key=lambda c: weight(seed, replicas[c.replica].seed))

    def _growable(self, feasible: list[ReplicaState], members: list[str], now: int) -> list[ReplicaState]:
        """The others whose churn budget allows a placement."""
        since, budget = now - 60 * SECOND, self._budget
        return [
            replica
            for replica in feasible
            if (replica.placements < budget or replica.placements_since <= since) and replica.spec.name not in members
        ]

    def _choose_for_base(self, state: FleetState, request: RequestState, feasible: list[ReplicaState]) -> Choice:
        scored = candidates(state, feasible, request, None, 0.0)
        limit = min(scored, key=_COST).cost + self._tie
        near = [c for c in scored if c.cost <= limit]
        chosen = near[state.round_robin % len(near)]
        return _choice(chosen, scored, "least cost for the base model", len(feasible))


def _choice(chosen: Candidate, scored: list[Candidate], reason: str, considered: int) -> Choice:
    others = [c for c in scored if c is not chosen]
    if len(others) > 1:
        others.sort(key=_COST)
    return Choice((chosen, *others[:2]), reason, considered)
