"""From what the kernel knows of a replica to the facts that its ledger is made of.

Theory of operation. Each figure comes from one place, the best there is: the engine's probe, else its metrics, else the settings
and the base model's shapes, else what follows from what was sent. Nothing is filled in: what no place says stays unknown, and the
ledger says which accounts that leaves open. What an adapter costs is a matter of its files and the engine's settings, so it is
worked out once per version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loraledger.adapters import Catalog, CatalogEntry
from loraledger.adapters.catalog import engine_settings
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings, smallest_max_rank
from loraledger.adapters.sizing.footprint import adapter_device_bytes, host_bytes, slot_bytes
from loraledger.config import Replica
from loraledger.events import FloorObserved, Tier
from loraledger.gateway.views import slots_used, tier_source
from loraledger.kernel.cost import arrival_rate, tier_of
from loraledger.kernel.observed import TAU
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState
from loraledger.ledger import AdapterFacts, Figure, Latencies, ReplicaFacts, believed, configured, observed, unknown
from loraledger.ledger.budget import rank_weights
from loraledger.ledger.figures import Unit
from loraledger.record.tables import Row

Figures = dict[str, Any]
"""Fields of :class:`~loraledger.ledger.ReplicaFacts` by name."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One version of an adapter on one engine: bytes on all rank processes' host, and on the device of one."""

    modules: int
    dtype: str
    host: int | None
    device: int | None


class Accountant:
    """Makes the facts of each replica. ``base`` is the base model, where the settings say what it is."""

    def __init__(self, replicas: Iterable[Replica], base: BaseModel | None) -> None:
        self._settings = {replica.name: replica for replica in replicas}
        self._engines = {name: engine_settings(replica) for name, replica in self._settings.items()}
        self._base = base
        self._costs: dict[tuple[str, EngineSettings], Cost] = {}

    def facts(
        self,
        state: FleetState,
        catalog: Catalog,
        store: tuple[int, int | None],
        recent: Iterable[Row],
        now: int,
        *,
        replica: str | None = None,
        on_disk: bool = True,
    ) -> Iterator[ReplicaFacts]:
        """What is known of each replica, or of one. ``store``: its bytes and limit; ``recent``: rows of ended requests.

        Without ``on_disk``, adapters that are registered and not resident are left out: they may be thousands.
        """
        entries = {entry.name: entry for entry in catalog.entries}
        needed = smallest_max_rank(max((entry.folder.rank for entry in catalog.entries), default=1))
        rejections, working = _rejections(recent, now), _working_sets(state, now)
        for name in state.replicas if replica is None else [replica]:
            known, engine = state.replicas[name], self._engines[name]
            moment = _Moment(known, self._settings[name], engine, self._base, now)
            yield ReplicaFacts(
                name=name,
                now=now,
                **moment.memory(),
                **moment.places(),
                **moment.kv(),
                **moment.traffic(),
                needed_max_rank=needed,
                host_bytes=self._host(known, entries, engine, moment.tier_age),
                store_bytes=observed(store[0], "bytes", 0),
                store_limit=configured(store[1], "bytes"),
                waiting_tokens=_next_need(state, known),
                rejections=rejections,
                working_set=observed(working.get(name, 0), "adapters", 0),
                latencies=_latencies(known),
                adapters=tuple(self._adapters(state, known, entries, engine, now, on_disk=on_disk)),
            )

    def _adapters(
        self,
        state: FleetState,
        replica: ReplicaState,
        entries: Mapping[str, CatalogEntry],
        engine: EngineSettings,
        now: int,
        *,
        on_disk: bool,
    ) -> Iterable[AdapterFacts]:
        named = set()
        for name, registration in replica.registrations.items():
            adapter, entry = state.adapters.get(name), entries.get(name)
            if adapter is None or entry is None or registration.state == "absent":
                continue
            named.add(registration.engine_name)
            tier = tier_of(replica, registration)
            if tier == "disk" and not on_disk:
                continue
            yield self._facts(
                adapter, entry, replica, engine, registration.engine_name, None if tier == "unknown" else tier, now
            )
        for engine_name in replica.tiers.host:
            if engine_name not in named:
                yield AdapterFacts(
                    engine_name,
                    host=_seen_bytes(replica, engine_name, engine, now),
                    tier=replica.tiers.tier(engine_name),
                    tier_source=tier_source(replica),
                    registered=False,
                    ghost=True,
                )

    def _facts(
        self,
        adapter: AdapterState,
        entry: CatalogEntry,
        replica: ReplicaState,
        engine: EngineSettings,
        engine_name: str,
        tier: object,
        now: int,
    ) -> AdapterFacts:
        cost, name = self._cost(entry, engine), replica.spec.name
        placed = adapter.placed.get(name)
        known = replica.observed
        age = None if placed is None else now - placed
        return AdapterFacts(
            name=adapter.spec.name,
            rank=adapter.spec.rank,
            modules=cost.modules,
            dtype=cost.dtype,
            disk=observed(adapter.spec.bytes, "bytes", None),
            host=_first(_seen_bytes(replica, engine_name, engine, now), configured(cost.host, "bytes")),
            device=configured(cost.device, "bytes"),
            tier=_tier(tier),
            tier_source=tier_source(replica),
            tier_age=age if known is None else now - known.as_of,
            last_use=placed,
            rate=observed(arrival_rate(adapter, now), "per second", now - adapter.rate_at if adapter.rate_at else None),
            registered=replica.registrations[adapter.spec.name].state == "registered",
            pinned=known is not None and engine_name in known.pinned,
        )

    def _cost(self, entry: CatalogEntry, engine: EngineSettings) -> Cost:
        found = self._costs.get((entry.digest, engine))
        if found is None:
            host = host_bytes(entry.folder, engine, self._base)
            device = None if self._base is None else adapter_device_bytes(entry.folder, self._base, engine)
            found = Cost(
                len(entry.folder.inventory.modules),
                "+".join(entry.folder.dtypes),
                None if host is None else host.exact * engine.tensor_parallel,
                device,
            )
            self._costs[entry.digest, engine] = found
        return found

    def _host(
        self, replica: ReplicaState, entries: Mapping[str, CatalogEntry], engine: EngineSettings, age: int | None
    ) -> Figure:
        """Bytes in the host caches of all rank processes."""
        if not replica.up:
            return unknown("bytes")
        if replica.observed is not None:
            each = [replica.observed.host_bytes.get(name) for name in replica.tiers.host]
            known = [count for count in each if count is not None]
            total = sum(known) * engine.tensor_parallel if len(known) == len(each) else None
            return observed(total, "bytes", age)
        names = [name.rpartition("@")[0] for name in replica.tiers.host]
        costs = [self._cost(entries[name], engine).host if name in entries else None for name in names]
        sure = [cost for cost in costs if cost is not None]
        return believed(sum(sure) if len(sure) == len(costs) else None, "bytes", None)


class _Moment:
    """One replica at one moment: each figure from the best place that has it."""

    def __init__(
        self, replica: ReplicaState, settings: Replica, engine: EngineSettings, base: BaseModel | None, now: int
    ) -> None:
        self._replica, self._settings, self._engine, self._base, self._now = replica, settings, engine, base, now
        self._floor = replica.floor or FloorObserved(now, replica.spec.name)
        self._floor_age = now - self._floor.at
        self._seen = None if replica.sampled is None or not replica.up else now - replica.sampled
        self.tier_age = None if replica.observed is None else now - replica.observed.as_of

    def memory(self) -> Figures:
        """Device memory: what there is, the floor, the slots."""
        floor, base, engine = self._floor, self._base, self._engine
        slot = None if base is None else slot_bytes(base, engine)
        weights = None if base is None else rank_weights(base, engine)
        return {
            "device_bytes": self._told(floor.device, self._settings.device_bytes, "bytes"),
            "safety": configured(self._settings.headroom, "bytes"),
            "weights": self._told(floor.weights, weights, "bytes"),
            "overhead": _overhead(floor, self._floor_age, self._settings),
            "slot_bytes": self._told(floor.slot_bytes, None if slot is None else slot.total, "bytes"),
            "slot_pool": observed(floor.slot_pool, "bytes", self._floor_age),
        }

    def places(self) -> Figures:
        """Slots and host entries."""
        replica, source = self._replica, tier_source(self._replica)
        known = replica.observed
        return {
            "slots": self._told(self._floor.slots, replica.spec.slots, "slots"),
            "slots_used": Figure(slots_used(replica), "slots", source, self.tier_age),
            "slots_pinned": unknown("slots") if known is None else observed(len(known.pinned), "slots", self.tier_age),
            "max_lora_rank": replica.spec.max_rank,
            "host_entries": Figure(len(replica.tiers.host) if replica.up else None, "adapters", source, self.tier_age),
            "host_limit": self._told(self._floor.host_entries, replica.spec.host_entries, "adapters"),
        }

    def kv(self) -> Figures:
        """The KV cache in bytes, tokens and blocks."""
        replica, floor, known = self._replica, self._floor, self._replica.observed
        tokens, size, total = replica.kv_tokens, replica.block_tokens or floor.block_tokens, floor.kv_blocks
        if total is None and size is not None and tokens is not None:
            total = tokens // size
        free = None if known is None else known.kv_free
        if free is None and total is not None and replica.kv_usage is not None and replica.up:
            free = round(total * (1 - replica.kv_usage))
        by_shapes = _times_kv(self._base, self._engine, tokens, self._seen)
        was_told = tokens != replica.spec.kv_tokens
        return {
            "kv_bytes": _first(observed(floor.kv_bytes, "bytes", self._floor_age), by_shapes),
            "kv_tokens": observed(tokens, "tokens", self._seen) if was_told else configured(tokens, "tokens"),
            "block_tokens": observed(size, "tokens/block", self._seen),
            "blocks_total": observed(total, "blocks", self._seen),
            "blocks_free": observed(free, "blocks", self._seen),
        }

    def traffic(self) -> Figures:
        """Requests in the engine, and what goes on there a minute."""
        replica, activity, now = self._replica, self._replica.activity, self._now
        known = replica.observed
        age = None if known is None or not known.steps_at else now - known.steps_at
        blocked = sum(known.blocked.values()) if known is not None and known.steps_at else None
        counted = activity.preemptions is not None
        return {
            "active_requests": observed(replica.running if replica.up else None, "requests", self._seen),
            "waiting_requests": observed(replica.waiting if replica.up else None, "requests", self._seen),
            "blocked_requests": observed(blocked, "requests", age),
            "preemptions": observed(activity.preemption_rate.value(now) if counted else None, "per minute", self._seen),
            "recomputed_tokens": observed(None if known is None else known.recomputed.value(now), "per minute", age),
            "loads": _rate(replica, activity.load_rate.value(now), self.tier_age),
            "activations": _rate(replica, activity.activation_rate.value(now), self.tier_age),
        }

    def _told(self, seen: int | None, settled: int | None, unit: Unit) -> Figure:
        """What the probe saw when the engine started, else what the settings or the base's shapes say."""
        return _first(observed(seen, unit, self._floor_age), configured(settled, unit))


def _overhead(floor: FloorObserved, age: int, settings: Replica) -> dict[str, Figure]:
    if floor.activations is not None:
        return {"activations": observed(floor.activations, "bytes", age)}
    if settings.overhead is not None:
        return {"configured": configured(settings.overhead, "bytes")}
    return {}


def _first(*figures: Figure) -> Figure:
    """The first that is known, else the last."""
    return next((figure for figure in figures if figure.known), figures[-1])


def _tier(tier: object) -> Tier | None:
    return tier if tier in ("gpu", "host", "disk", "remote") else None


def _seen_bytes(replica: ReplicaState, engine_name: str, engine: EngineSettings, now: int) -> Figure:
    known = replica.observed
    each = None if known is None else known.host_bytes.get(engine_name)
    if known is None or each is None:
        return unknown("bytes")
    return observed(each * engine.tensor_parallel, "bytes", now - known.as_of)


def _times_kv(base: BaseModel | None, engine: EngineSettings, tokens: int | None, age: int | None) -> Figure:
    """Bytes of ``tokens`` KV tokens on one rank process."""
    if base is None or tokens is None:
        return unknown("bytes")
    return believed(tokens * base.kv_bytes_per_token(engine.kv_cache_dtype, engine.tensor_parallel), "bytes", age)


def _next_need(state: FleetState, replica: ReplicaState) -> Figure:
    """Prompt of the request that was sent first of those whose answer has not begun, while the engine says that some wait."""
    if not replica.waiting:
        return unknown("tokens")
    sent = [state.requests[request] for request in replica.in_flight if state.requests[request].phase == "sent"]
    first = min(sent, key=lambda request: request.dispatched, default=None)
    return unknown("tokens") if first is None else believed(first.prompt, "tokens", None)


def _rate(replica: ReplicaState, value: float, age: int | None) -> Figure:
    return Figure(value if replica.up else None, "per minute", tier_source(replica), age)


def _working_sets(state: FleetState, now: int) -> Counter[str]:
    """Distinct adapters that were sent to each replica within ``TAU``."""
    return Counter(r for adapter in state.adapters.values() for r, at in adapter.placed.items() if now - at <= TAU)


def _rejections(recent: Iterable[Row], now: int) -> dict[str, Figure]:
    """Requests that the gateway refused in the last minute, whichever replica they would have gone to."""
    found: dict[str, int] = {}
    for row in recent:
        at, reason = row.get("finished_ns"), row.get("reason")
        if row.get("status") == "rejected" and isinstance(at, int) and now - at <= TAU and isinstance(reason, str):
            found[reason] = found.get(reason, 0) + 1
    return {reason: observed(count, "per minute", 0) for reason, count in sorted(found.items())}


def _latencies(replica: ReplicaState) -> dict[Tier, Latencies]:
    activity = replica.activity
    found: dict[Tier, Latencies] = {}
    if activity.calls:
        found["disk"] = Latencies(tuple((took, at) for at, took in activity.calls))
    if activity.activations:
        found["host"] = Latencies(tuple((took, at) for at, took in activity.activations))
    return found
