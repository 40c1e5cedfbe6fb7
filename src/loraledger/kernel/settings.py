"""What a kernel is told once: the fleet, the tenants, the limits and the policy. Frozen, and the first frame of each journal.

Priors are what is believed of a replica before it was seen working; estimates (``estimates.py``) move away from them.
Durations are integer nanoseconds, rates tokens or bytes a second.
"""

from __future__ import annotations

import msgspec

from loraledger.events import AdapterSpec

MS = 1_000_000
SECOND = 1_000_000_000


class ReplicaSpec(msgspec.Struct, frozen=True, array_like=True):
    """One engine core behind one URL, as configured."""

    name: str
    slots: int
    host_entries: int
    max_rank: int = 64
    max_seqs: int = 256
    max_in_flight: int = 512
    kv_tokens: int | None = None
    load_bytes_per_s: int = 200_000_000
    load_overhead: int = 30 * MS
    activation: int = 10 * MS
    prefill_tokens_per_s: int = 5_000
    itl: int = 30 * MS


class TenantSpec(msgspec.Struct, frozen=True, array_like=True):
    """How much one tenant may have in flight and in the gateway queue."""

    name: str
    concurrency: int = 64
    queue: int = 256
    queue_deadline: int = 30 * SECOND


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """Limits of this gateway as a whole."""

    queue_total: int = 4096
    retry_ratio: float = 0.1
    """Retries earned by each arriving request."""
    retry_burst: int = 64
    """Retries that may be saved up, and what a fresh kernel starts with."""
    load_backoff: int = SECOND
    """First pause after a load that failed for a passing reason; doubles up to ``load_backoff_max``."""
    load_backoff_max: int = 300 * SECOND
    park: int = 600 * SECOND
    """How long a poisonous adapter stays parked before it may be verified again."""
    loads_per_minute: int = 120
    """Churn budget of one replica: placements that a policy may add in a minute."""


class FleetSettings(msgspec.Struct, frozen=True, array_like=True):
    """Everything a fresh ``Fleet`` needs."""

    replicas: tuple[ReplicaSpec, ...]
    adapters: tuple[AdapterSpec, ...] = ()
    tenants: tuple[TenantSpec, ...] = ()
    base: str = "base"
    """The engine-side name of the base model."""
    policy: str = "bounded-affinity"
    params: dict[str, float] = {}
    limits: Limits = Limits()
    residency: str = "lru"
    """``ranked``: the best of ``pins`` are kept in slots where a probe answers. Else the engine's LRU alone decides."""
    pins: tuple[tuple[str, str], ...] = ()
    """The residency ranking: replica and adapter, for each replica the best first."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(FleetSettings)


def encode_settings(settings: FleetSettings) -> bytes:
    """Canonical bytes of ``settings``."""
    return _ENCODER.encode(settings)


def decode_settings(data: bytes) -> FleetSettings:
    """The settings in ``data``. Raises ``msgspec.DecodeError`` when the bytes are not such settings."""
    return _DECODER.decode(data)
