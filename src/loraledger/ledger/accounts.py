"""The ledger of one replica: three accounts that together explain every byte of its device.

**Floor + adapters + KV + headroom = device bytes.** The floor is what the base costs before anybody's adapter or request:
weights, what the engine takes beside them, and what is in use but explained by nothing (``unattributed``). The adapters' part
is the slot pool, or with a unified pool what adapters take of it. Headroom is the rest. It can be below 0, where memory was
promised twice, and is then shown so. While a part is unknown, so is headroom.

``unattributed`` can be told only where the device's use was observed. Where it was not, it is unknown and headroom still holds
it. It is never below 0: an activation peak that the engine set aside is not in use all the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loraledger.ledger.facts import LayoutName, ReplicaFacts
from loraledger.ledger.figures import Figure, combine, ratio, rest, total, unknown
from loraledger.ledger.layouts import Layout, kv_capacity, layout_of
from loraledger.ledger.residency import AdapterAccount, adapter_account, resident


@dataclass(frozen=True, slots=True)
class FloorAccount:
    """Device bytes of one rank process that the base costs."""

    weights: Figure
    overhead: Mapping[str, Figure]
    """By name: activation peak, graphs, runtime."""
    engine: Figure
    """Sum of ``overhead``."""
    unattributed: Figure
    """In use, and no part of anything known; unknown while the device's use is."""
    total: Figure
    """All of them; without ``unattributed`` while that is unknown."""


@dataclass(frozen=True, slots=True)
class KvAccount:
    """KV cache of one rank process."""

    bytes: Figure
    tokens: Figure
    """Room for so many."""
    free_tokens: Figure
    blocks_total: Figure
    blocks_used: Figure
    blocks_free: Figure
    usage: Figure
    """Share of the blocks that requests hold."""
    active_requests: Figure
    waiting_requests: Figure
    waiting_tokens: Figure
    """KV that the request which is next in the engine queue needs before it can start."""
    preemptions: Figure
    recomputed_tokens: Figure
    rejections: Mapping[str, Figure]
    """By reason, a minute."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """One replica at one moment."""

    replica: str
    at: int
    """Nanoseconds since the Unix epoch."""
    layout: LayoutName
    device: Figure
    """Bytes."""
    floor: FloorAccount
    adapters: AdapterAccount
    kv: KvAccount
    headroom: Figure
    safety: Figure
    """Headroom that the operator wants to keep."""

    @property
    def promised_twice(self) -> bool:
        """Whether the parts are known to be more than the device."""
        return self.headroom.value is not None and self.headroom.value < 0


def ledger_of(facts: ReplicaFacts) -> Ledger:
    """The three accounts of ``facts``."""
    layout = layout_of(facts)
    adapters, kv = adapter_account(facts, layout), kv_account(facts, layout)
    floor = _floor(facts, (adapters.pool, kv.bytes))
    return Ledger(
        replica=facts.name,
        at=facts.now,
        layout=layout.name,
        device=facts.device_bytes,
        floor=floor,
        adapters=adapters,
        kv=kv,
        headroom=rest(facts.device_bytes, floor.total, adapters.pool, kv.bytes),
        safety=facts.safety,
    )


def kv_account(facts: ReplicaFacts, layout: Layout) -> KvAccount:
    """The third account. With a unified pool its room is what adapters leave; blocks are as the engine counts them."""
    there, pooled = resident(facts), layout.name == "unified"
    hidden = pooled and any(adapter.tier is None for adapter in facts.adapters)
    used = rest(facts.blocks_total, facts.blocks_free)
    return KvAccount(
        bytes=unknown("bytes") if hidden else layout.kv_bytes(there),
        tokens=unknown("tokens") if hidden else layout.kv_tokens(there),
        free_tokens=_free_tokens(facts),
        blocks_total=facts.blocks_total,
        blocks_used=used,
        blocks_free=facts.blocks_free,
        usage=ratio(used, facts.blocks_total),
        active_requests=facts.active_requests,
        waiting_requests=facts.waiting_requests,
        waiting_tokens=facts.waiting_tokens,
        preemptions=facts.preemptions,
        recomputed_tokens=facts.recomputed_tokens,
        rejections=dict(facts.rejections),
    )


def _free_tokens(facts: ReplicaFacts) -> Figure:
    """Tokens that fit in the free blocks; where the tokens of one are not known, by the share that is free."""
    if facts.block_tokens.known:
        return combine("tokens", (facts.blocks_free, facts.block_tokens), lambda blocks, each: blocks * each)
    parts = (kv_capacity(facts), facts.blocks_free, facts.blocks_total)
    return combine("tokens", parts, lambda tokens, free, blocks: tokens * free // blocks if blocks else None)


def _floor(facts: ReplicaFacts, others: tuple[Figure, ...]) -> FloorAccount:
    overhead = total(facts.overhead.values(), "bytes") if facts.overhead else unknown("bytes")
    known = (facts.weights, overhead, *others)
    unattributed = combine("bytes", (facts.device_used, *known), lambda used, *parts: max(0, used - sum(parts)))
    parts = (facts.weights, overhead, *((unattributed,) if unattributed.known else ()))
    return FloorAccount(facts.weights, dict(facts.overhead), overhead, unattributed, total(parts, "bytes"))
