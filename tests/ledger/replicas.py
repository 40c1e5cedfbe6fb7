"""Replicas made of round figures, for the tests of the ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loraledger.events import Tier
from loraledger.ledger.facts import AdapterFacts, ReplicaFacts
from loraledger.ledger.figures import Figure, Unit, configured, observed

GIB = 2**30
MIB = 2**20
NOW = 1_000_000_000_000


def seen(value: float | None, unit: Unit) -> Figure:
    """Observed a second ago."""
    return observed(value, unit, 10**9)


def adapter(name: str, tier: Tier | None, size: int | None = 40 * MIB, **more: Any) -> AdapterFacts:
    """An adapter in ``tier`` that fills ``size`` bytes on the device and on the host."""
    bytes_ = configured(size, "bytes")
    return replace(
        AdapterFacts(name, tier=tier, tier_source="observed", tier_age=10**9, device=bytes_, host=bytes_), **more
    )


def replica(**changes: Any) -> ReplicaFacts:
    """80 GiB: weights 15, overhead 1, four slots of 1 GiB with two adapters, KV 50 GiB in 3,200 blocks, 10 GiB headroom."""
    facts = ReplicaFacts(
        name="r1",
        now=NOW,
        device_bytes=configured(80 * GIB, "bytes"),
        safety=configured(4 * GIB, "bytes"),
        weights=seen(15 * GIB, "bytes"),
        overhead={"peak": seen(GIB // 2, "bytes"), "graphs": seen(GIB // 2, "bytes")},
        slot_bytes=configured(GIB, "bytes"),
        slots=configured(4, "slots"),
        slots_used=seen(2, "slots"),
        max_lora_rank=64,
        host_limit=configured(8, "adapters"),
        kv_bytes=seen(50 * GIB, "bytes"),
        block_tokens=configured(16, "tokens/block"),
        blocks_total=seen(3200, "blocks"),
        blocks_free=seen(1600, "blocks"),
        active_requests=seen(3, "requests"),
        waiting_requests=seen(0, "requests"),
        blocked_requests=seen(0, "requests"),
        preemptions=seen(0, "per minute"),
        recomputed_tokens=seen(0, "per minute"),
        loads=seen(0, "per minute"),
        activations=seen(0, "per minute"),
        working_set=seen(2, "adapters"),
        adapters=(adapter("a", "gpu"), adapter("b", "gpu"), adapter("c", "host")),
    )
    return replace(facts, **changes)
