"""Whether an engine counted its slots before it sized KV, told from the number of blocks that it logged.

vLLM's engine V0 profiled the model without LoRA, made as many KV blocks as were left, and only then took the slots: memory was
promised twice, and the engine ran until both were really used. Its block count does not move with ``max_loras``, which reads as
if slots were free. They are not. Later engines take the slots first, and the count moves by their bytes.

Two counts of one engine with different slots tell the two apart without knowing the device. One count does when device, weights
and peak are known. A count that agrees with neither is left unexplained: something else differed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loraledger.units import format_bytes


@dataclass(frozen=True, slots=True)
class BlockCount:
    """One start of the engine, as its log tells it."""

    slots: int
    blocks: int
    before_lora: int | None = None
    """Bytes that the profile left for slots and KV: usable device bytes - weights - peak; ``None``: not known."""


@dataclass(frozen=True, slots=True)
class Overcommit:
    """The finding."""

    verdict: Literal["overcommitted", "counted", "unknown"]
    bytes: int | None
    """Promised twice, with the slots of the count that has most; 0 when the slots were counted, ``None`` when unknown."""
    statement: str


def overcommit(counts: Sequence[BlockCount], slot_bytes: int, block_bytes: int) -> Overcommit:
    """What ``counts`` (one or more) of one engine say; ``slot_bytes`` and ``block_bytes`` are of one rank process.

    The count with most slots is compared with the one that has fewest; where their slots are the same, or there is only one,
    with what its own ``before_lora`` would hold. Slots that are worth no more than two blocks cannot be told from rounding.
    """
    most = max(counts, key=lambda count: count.slots)
    fewest = min(counts, key=lambda count: count.slots)
    pool = most.slots * slot_bytes
    if most.slots > fewest.slots:
        expected, without = pool - fewest.slots * slot_bytes, fewest.blocks
        seen = f"{most.slots} slots left {most.blocks:,} KV blocks, {fewest.slots} left {without:,}"
    elif most.before_lora is not None:
        expected, without = pool, most.before_lora // block_bytes
        seen = f"{most.slots} slots left {most.blocks:,} KV blocks, and {without:,} fit without any"
    else:
        return Overcommit("unknown", None, "one block count says nothing without device bytes, weights and peak")
    moved = (without - most.blocks) * block_bytes
    if expected <= 2 * block_bytes:
        return Overcommit("unknown", None, f"{seen}: these slots are too small to be seen in blocks")
    if abs(moved - expected) <= block_bytes:
        return Overcommit("counted", 0, f"{seen}: the slots are taken from KV")
    if abs(moved) <= block_bytes:
        return Overcommit("overcommitted", pool, f"{seen}: {_left_out(pool)}")
    return Overcommit(
        "unknown", None, f"{seen}: slots of {format_bytes(expected)} do not explain that; compare other flags"
    )


def _left_out(pool: int) -> str:
    return (
        f"the slots were left out of the profile, so {format_bytes(pool)} are over-committed on top of KV. This is an old engine"
        " that may run out of memory when adapters load: update it, or lower gpu_memory_utilization by as much"
    )
