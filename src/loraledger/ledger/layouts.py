"""How an engine divides device memory between adapters and KV: the one question that engines answer differently.

``slots`` (vLLM, SGLang): room for ``max_loras`` adapters is taken when the engine starts, before KV is sized, padded to the
largest rank. It is paid once; who is resident changes nothing for KV. ``unified`` (S-LoRA, arXiv 2311.03285, section 5.1): one
pool of cells, a cell being K and V of one token; an adapter takes cells while it is resident, and KV has the others.

Bytes are of one rank process. ``resident`` holds what each resident adapter fills, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from loraledger.ledger.facts import LayoutName, ReplicaFacts
from loraledger.ledger.figures import Figure, Number, combine, first_known, product, rest, total


class Layout(Protocol):
    """Device memory of one replica as its engine divides it."""

    @property
    def name(self) -> LayoutName:
        """What it is called."""

    def adapter_bytes(self, resident: Sequence[Figure]) -> Figure:
        """Device bytes that adapters take with these resident."""

    def kv_bytes(self, resident: Sequence[Figure]) -> Figure:
        """Device bytes that KV then has."""

    def kv_tokens(self, resident: Sequence[Figure]) -> Figure:
        """Tokens that KV then has room for."""

    def capacity(self, adapter: Figure) -> Figure:
        """How many adapters that each fill ``adapter`` bytes the device can hold at most."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Room of equal size, set aside at start."""

    slots: Figure
    pool: Figure
    """Bytes of all slots."""
    kv: Figure
    """Bytes."""
    tokens: Figure

    @property
    def name(self) -> LayoutName:
        """``slots``."""
        return "slots"

    def adapter_bytes(self, resident: Sequence[Figure]) -> Figure:
        """The whole pool, whoever is in it."""
        return self.pool

    def kv_bytes(self, resident: Sequence[Figure]) -> Figure:
        """What was left when the engine started."""
        return self.kv

    def kv_tokens(self, resident: Sequence[Figure]) -> Figure:
        """The same in tokens."""
        return self.tokens

    def capacity(self, adapter: Figure) -> Figure:
        """The slots: an adapter of any size that the engine accepts takes one."""
        return combine("adapters", (self.slots,), lambda count: count)


@dataclass(frozen=True, slots=True)
class Unified:
    """One pool of cells for adapters and KV."""

    pool: Figure
    """Bytes."""
    tokens: Figure
    """Cells of the pool: the tokens that it holds without any adapter."""

    @property
    def name(self) -> LayoutName:
        """``unified``."""
        return "unified"

    def cells(self, adapter: Figure) -> Figure:
        """KV tokens that one adapter displaces: its bytes over those of a cell, rounded up (plain adapters: 4 x rank)."""
        return combine("tokens", (adapter, self.pool, self.tokens), _cells)

    def adapter_bytes(self, resident: Sequence[Figure]) -> Figure:
        """Whole cells of those resident."""
        taken = total((self.cells(adapter) for adapter in resident), "tokens")
        return combine(
            "bytes", (taken, self.pool, self.tokens), lambda cells, pool, tokens: cells * _cell(pool, tokens)
        )

    def kv_bytes(self, resident: Sequence[Figure]) -> Figure:
        """The rest of the pool."""
        return rest(self.pool, self.adapter_bytes(resident))

    def kv_tokens(self, resident: Sequence[Figure]) -> Figure:
        """The cells that no adapter has."""
        return rest(self.tokens, *(self.cells(adapter) for adapter in resident))

    def capacity(self, adapter: Figure) -> Figure:
        """As many as fill all cells, with none left for KV."""
        cells = self.cells(adapter)
        return combine("adapters", (self.tokens, cells), lambda all_, one: all_ // one if one else None)


def layout_of(facts: ReplicaFacts) -> Layout:
    """The layout that ``facts`` name, with the figures that they give."""
    tokens = kv_capacity(facts)
    if facts.layout == "unified":
        return Unified(facts.kv_bytes, tokens)
    pool = first_known(facts.slot_pool, product("bytes", facts.slots, facts.slot_bytes))
    return Slots(facts.slots, pool, facts.kv_bytes, tokens)


def kv_capacity(facts: ReplicaFacts) -> Figure:
    """Tokens in all blocks: as the engine says, else blocks x tokens of one."""
    return first_known(facts.kv_tokens, product("tokens", facts.blocks_total, facts.block_tokens))


def _cell(pool: Number, tokens: Number) -> Number:
    """Bytes of one cell: those of the pool that make whole ones."""
    return pool // tokens if tokens else 0


def _cells(adapter: Number, pool: Number, tokens: Number) -> Number | None:
    cell = _cell(pool, tokens)
    return -(-adapter // cell) if cell else None
