"""The baselines that look at residency: llm-d's LoRA scorers, Dynamo's copies by load share, Balanced-PANDAS.

All three see the kernel's own books where their originals see scraped metrics, llm-d's 50 ms old. That is kinder to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nlargest
from typing import ClassVar

from loraledger.events import HitClass
from loraledger.kernel.baselines import Baseline, choice, in_hand, in_turn
from loraledger.kernel.cost import (
    arrival_rate,
    load_left,
    load_waiters,
    needs_verifying,
    preparation,
    tier_of,
    wanted_ahead,
)
from loraledger.kernel.policy import Choice, Stability
from loraledger.kernel.rendezvous import weight
from loraledger.kernel.settings import SECOND
from loraledger.kernel.shares import Shares
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState, RequestState


class LlmdLora(Baseline):
    """llm-d-router's weighted scorers; the highest sum takes the request, ties in turn (there at random).

    - adapter, ``residency`` 0 (``lora-affinity-scorer``): 1.0 where requests of it run, 0.8 where fewer adapters run or wait than
      there are slots, 0.6 where it waits, else 0. It reads activity: an adapter that is loaded and idle looks absent.
    - adapter, ``residency`` 1 (``lora-load-state-scorer``, its fixed tiers and placement bonus): 1.0 in a slot, 0.7 on the host,
      0.6 where a slot is free, 0.3 where an idle adapter would be pushed out, 0 where all are busy; +0.03 for the rendezvous home.
    - queue (``queue-scorer``): 1 for the shortest queue, 0 for the longest, linear between.
    - KV (``kv-cache-utilization-scorer``): 1 less the share of KV in use; nothing where the capacity is unknown.

    Weights: queue and KV as llm-d's default profile, adapter as KServe sets it; there is no prefix scorer here.
    """

    name: ClassVar[str] = "llm-d-lora"
    stability: ClassVar[Stability] = "alpha"
    reads: ClassVar[frozenset[str]] = frozenset({"outstanding", "residency", "kv"})
    defaults: ClassVar[Mapping[str, float]] = {
        "lora_weight": 4.0,
        "queue_weight": 2.0,
        "kv_weight": 2.0,
        "residency": 0.0,
    }
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "lora_weight": (0.0, 1000.0),
        "queue_weight": (0.0, 1000.0),
        "kv_weight": (0.0, 1000.0),
        "residency": (0.0, 1.0),
    }

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """The highest weighted sum."""
        queues = [_engine_queue(replica) for replica in feasible]
        shortest, spread = min(queues), max(queues) - min(queues)
        home = None if adapter is None else _nearest(adapter, feasible, 1)[0]
        params, scores = self._params, []
        for replica, queue in zip(feasible, queues, strict=True):
            score = params["queue_weight"] * (1.0 - (queue - shortest) / spread if spread else 1.0)
            if replica.kv_tokens:
                used = (replica.kv_own + replica.foreign_kv) / replica.kv_tokens
                score += params["kv_weight"] * (1.0 - min(1.0, used))
            if adapter is not None:
                score += params["lora_weight"] * self._adapter_score(replica, adapter, replica is home)
            scores.append(score)
        best = max(scores)
        ties = [r for r, score in zip(feasible, scores, strict=True) if score == best]
        return choice(state, in_turn(state, ties), request, adapter, f"score {best:.2f}", len(feasible))

    def _adapter_score(self, replica: ReplicaState, adapter: AdapterState, home: bool) -> float:
        name = adapter.spec.name
        if self._params["residency"] >= 0.5:
            tier = tier_of(replica, replica.registrations.get(name))
            return _residency_score(replica, tier) + (0.03 if home and tier != "gpu" else 0.0)
        waiting = {**replica.blocked, **replica.wanted}
        if replica.loading is not None:
            waiting[replica.loading] = None
        running = [held for held in replica.adapters if held not in replica.blocked]
        if name in running:
            return 1.0
        if len(running) + len(waiting) < replica.spec.slots:
            return 0.8
        return 0.6 if name in waiting else 0.0


def _residency_score(replica: ReplicaState, tier: HitClass) -> float:
    if tier == "gpu":
        return 1.0
    if tier == "host":
        return 0.7
    if len(replica.tiers.active) < replica.spec.slots:
        return 0.6
    return 0.3 if len(replica.adapters) < replica.spec.slots else 0.0


def _engine_queue(replica: ReplicaState) -> int:
    """Requests that wait: beyond the engine's seats, for a slot, or for a load."""
    blocked = sum(replica.adapters[name] for name in replica.blocked)
    return max(blocked, len(replica.in_flight) + replica.foreign - replica.spec.max_seqs) + load_waiters(replica)


def _nearest(adapter: AdapterState, replicas: Iterable[ReplicaState], count: int) -> list[ReplicaState]:
    """The ``count`` replicas of highest rendezvous weight, best first."""
    seed = adapter.seed
    return nlargest(count, replicas, key=lambda r: weight(seed, r.seed))


class DynamoLora(Baseline):
    """As many copies of an adapter as its share of the load (``shares.py``), in rendezvous order, the least busy of them next.

    Dynamo's default allocator (``hrw``), whose preference for workers with a free slot is left out: where an engine evicts
    by itself, every worker is full after a while, and Dynamo then falls back to the plain order too.
    """

    name: ClassVar[str] = "dynamo-lora"
    stability: ClassVar[Stability] = "alpha"
    reads: ClassVar[frozenset[str]] = frozenset({"outstanding", "rate"})
    counts_tries: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, float]] = {
        "tick_s": 3.0,
        "window_s": 90.0,
        "ema_alpha": 0.3,
        "cooldown_ticks": 3.0,
    }
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "tick_s": (0.1, 3600.0),
        "window_s": (1.0, 86400.0),
        "ema_alpha": (0.01, 1.0),
        "cooldown_ticks": (0.0, 1000.0),
    }

    def pool(self, state: FleetState, adapter: AdapterState | None) -> Iterable[ReplicaState]:
        """The adapter's copies among the replicas in routing. Takes the tick that is due: shares are state, a choice is not."""
        live = [replica for replica in state.replicas.values() if replica.up and not replica.draining]
        tick = state.now // int(self._params["tick_s"] * SECOND)
        if state.shares is None:
            state.shares = Shares(tick)
        if live and tick != state.shares.tick:
            self._take_tick(state, state.shares, tick, live)
        return live if adapter is None else _nearest(adapter, live, state.shares.copies.get(adapter.spec.name, 1))

    def _take_tick(self, state: FleetState, shares: Shares, tick: int, live: list[ReplicaState]) -> None:
        window, now = self._params["window_s"], state.now
        arrivals = {name: arrival_rate(a, now) * window for name, a in state.adapters.items() if a.rate > 0.0}
        shares.advance(tick, arrivals, self._params["ema_alpha"])
        slots = sum(replica.spec.slots for replica in live)
        shares.allot(slots, len(live), int(self._params["cooldown_ticks"]))

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """The copy with the fewest requests in hand; the base model likewise among all."""
        copies = feasible
        if adapter is not None:
            wanted = 1 if state.shares is None else state.shares.copies.get(adapter.spec.name, 1)
            copies = _nearest(adapter, feasible, wanted)
        fewest = min(in_hand(replica) for replica in copies)
        ties = [replica for replica in copies if in_hand(replica) == fewest]
        reason = f"least busy of {len(copies)} by load share"
        return choice(state, in_turn(state, ties), request, adapter, reason, len(feasible))


class BalancedPandas(Baseline):
    """To the replica with the least weighted work over the rate at which it serves this adapter (arXiv 1702.07802).

    Weighted work W is the time that what a replica has in hand takes it, each request at the rate of its own locality. The rate
    here is s / (s + p), for s the engine time of this request and p that of bringing its adapter into a slot: nothing
    for one that is there or on its way, an activation from the host, a load from disk. So three levels, gpu, host and disk, as
    the three of the paper. Replicas with equal W / rate (idle ones: W = 0) go by p, then in turn; in the paper at random.
    """

    name: ClassVar[str] = "balanced-pandas"
    stability: ClassVar[Stability] = "alpha"
    reads: ClassVar[frozenset[str]] = frozenset({"outstanding", "residency", "load_time", "prefill_rate", "itl"})

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """Least weighted work over rate."""
        scores = []
        for replica in feasible:
            service = _engine_time(replica, request.prompt, request.expect)
            bring = 0 if adapter is None else _bring(replica, adapter, state.now)
            work = _weighted_work(replica, service, state.now)
            scores.append((work * (service + bring) / service, bring))
        best = min(scores)
        ties = [r for r, score in zip(feasible, scores, strict=True) if score == best]
        reason = f"least work over rate: {best[0] / SECOND:.3f} s"
        return choice(state, in_turn(state, ties), request, adapter, reason, len(feasible))


def _engine_time(replica: ReplicaState, prompt: int, output: int) -> float:
    """What so many tokens take of a busy engine, ns: a decode step serves ``max_seqs`` requests at once."""
    prefill = prompt * SECOND / replica.prefill_rate.current
    return max(1.0, prefill + output * replica.itl.current / replica.spec.max_seqs)


def _bring(replica: ReplicaState, adapter: AdapterState, now: int) -> int:
    """What this request adds to the work of ``replica`` to have its adapter in a slot, ns."""
    registration = replica.registrations.get(adapter.spec.name)
    tier = tier_of(replica, registration)
    if tier == "gpu" and not needs_verifying(adapter, registration):
        return 0
    return preparation(replica, registration, adapter, tier, 0)[1]


def _weighted_work(replica: ReplicaState, service: float, now: int) -> float:
    """Engine time of all that is in hand, ns: sent, waiting for loads (each as long as this request), and the loads."""
    sent = _engine_time(replica, replica.prefill_out, replica.decode_out) if replica.in_flight else 0.0
    loads = load_left(replica, now) + wanted_ahead(replica, None)
    return sent + replica.stall_out + loads + load_waiters(replica) * service
