"""What is known of one replica at one moment: the ledger's only input, whoever gathered it.

Plain frozen data, to be filled from the live kernel, from the probe, from a twin or by hand. Each number is a
:class:`~loraledger.ledger.figures.Figure`, so that it says itself where it comes from; whatever is left out is unknown.
Device figures are of one rank process, the one that holds most: all of them have the same slots and the fullest one decides.
Host figures are of all rank processes of the replica together, since they share the host's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from loraledger.events import Source, Tier
from loraledger.ledger.figures import Figure, configured, unknown

LayoutName = Literal["slots", "unified"]

_BYTES: Final = unknown("bytes")
_TOKENS: Final = unknown("tokens")
_BLOCKS: Final = unknown("blocks")
_SLOTS: Final = unknown("slots")
_ADAPTERS: Final = unknown("adapters")
_REQUESTS: Final = unknown("requests")
_PER_MINUTE: Final = unknown("per minute")
_PER_SECOND: Final = unknown("per second")
_BLOCK: Final = unknown("tokens/block")
_NONE: Final = configured(0, "bytes")


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """One adapter as one replica has it. A ghost is an entry of its own beside the adapter of that name."""

    name: str
    rank: int | None = None
    modules: int | None = None
    """How many."""
    dtype: str | None = None
    disk: Figure = _BYTES
    """Bytes of its files in the store."""
    host: Figure = _BYTES
    """Bytes that it takes, or would take, in the host caches of all rank processes, at its own rank."""
    device: Figure = _BYTES
    """Bytes that it fills, or would fill, on the device, at its own rank and cut over the ranks: without padding."""
    tier: Tier | None = None
    """``None``: not known."""
    tier_source: Source = "believed"
    tier_age: int | None = None
    """Nanoseconds."""
    last_use: int | None = None
    """On the clock of ``ReplicaFacts.now``."""
    rate: Figure = _PER_SECOND
    """Requests."""
    registered: bool | None = None
    ghost: bool = False
    """Its name was forgotten and its bytes are still there."""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Latencies:
    """Durations of one kind of move, all of one source."""

    samples: tuple[tuple[int, int], ...] = ()
    """Each (duration in ns, when it ended on the clock of ``ReplicaFacts.now``)."""
    source: Source = "observed"


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One replica. ``now`` is given so that nothing here asks a clock."""

    name: str
    now: int
    """Nanoseconds since the Unix epoch."""
    layout: LayoutName = "slots"

    device_bytes: Figure = _BYTES
    device_used: Figure = _BYTES
    """As the device's driver sees it, whoever uses it."""
    safety: Figure = _NONE
    """Headroom that the operator wants to keep."""

    weights: Figure = _BYTES
    """Of the base alone. vLLM takes the slots while it loads the model, so what it logs as the model's holds both."""
    overhead: Mapping[str, Figure] = field(default_factory=dict)
    """What the engine takes beside weights, slots and KV, by name: activation peak, graphs, runtime. Empty: not known."""

    slot_bytes: Figure = _BYTES
    """One slot."""
    slot_pool: Figure = _BYTES
    """All slots, where that was observed; else it is worked out from ``slots`` and ``slot_bytes``."""
    slots: Figure = _SLOTS
    slots_used: Figure = _SLOTS
    """Ghosts counted."""
    slots_pinned: Figure = _SLOTS
    max_lora_rank: int | None = None
    needed_max_rank: int | None = None
    """The smallest ``max_lora_rank`` that takes every adapter of this replica."""

    host_entries: Figure = _ADAPTERS
    host_limit: Figure = _ADAPTERS
    host_bytes: Figure = _BYTES
    store_bytes: Figure = _BYTES
    store_limit: Figure = _BYTES

    kv_bytes: Figure = _BYTES
    """Room for KV. Layout ``unified``: the one pool, adapters in it included."""
    kv_tokens: Figure = _TOKENS
    """The same in tokens, where the engine says it; else it is worked out from the blocks."""
    block_tokens: Figure = _BLOCK
    blocks_total: Figure = _BLOCKS
    blocks_free: Figure = _BLOCKS
    """Cached blocks that no request refers to are free."""

    active_requests: Figure = _REQUESTS
    waiting_requests: Figure = _REQUESTS
    """In the engine queue."""
    waiting_tokens: Figure = _TOKENS
    """KV that the request which is next in the engine queue needs before it can start."""
    blocked_requests: Figure = _REQUESTS
    """Of those waiting, the ones kept back because other adapters of the step hold all slots."""
    preemptions: Figure = _PER_MINUTE
    recomputed_tokens: Figure = _PER_MINUTE
    rejections: Mapping[str, Figure] = field(default_factory=dict)
    """By reason, a minute."""

    loads: Figure = _PER_MINUTE
    """Disk to host."""
    activations: Figure = _PER_MINUTE
    """Host to slot."""
    working_set: Figure = _ADAPTERS
    """Distinct adapters used in the window that the rates are of."""
    latencies: Mapping[Tier, Latencies] = field(default_factory=dict)
    """By the tier that an adapter came *from*: ``host`` is an activation, ``disk`` a load and the activation after it."""
    adapters: tuple[AdapterFacts, ...] = ()
