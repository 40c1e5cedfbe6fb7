"""What events and commands are made of: tiers and sources, what is known of an adapter, what was measured, why a replica."""

from __future__ import annotations

from typing import Literal

import msgspec

Tier = Literal["gpu", "host", "disk", "remote"]
HitClass = Literal["gpu", "host", "disk", "remote", "base", "unknown"]
MoveVerb = Literal["activate", "evict", "pin", "unpin"]
Source = Literal["configured", "observed", "believed"]
Status = Literal[
    "ok",  # answered by the engine with 2xx, to its end
    "client_gone",  # the client left first
    "rejected",  # the gateway refused it
    "client_error",  # the engine answered 4xx
    "engine_error",  # the engine answered 5xx
    "upstream_failed",  # no answer began (connection refused, closed or broken before a byte)
    "upstream_reset",  # the answer broke off
    "upstream_timeout",  # the answer did not begin, or stalled
    "gateway_crashed",  # open when this gateway process ended
]


class AdapterSpec(msgspec.Struct, frozen=True, array_like=True):
    """What the kernel must know of one adapter. ``replicas``: how many should hold it at all times (-1 all, 0 on demand)."""

    name: str
    digest: str
    rank: int
    bytes: int
    tenants: tuple[str, ...] = ()
    replicas: int = 0


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """What the request boundary saw of one answer. Times are absolute; ``itl_sketch`` maps log buckets to counts."""

    first_byte: int | None = None
    first_token: int | None = None
    last_token: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    cached_tokens: int | None = None
    itl_mean: int | None = None
    itl_max: int | None = None
    itl_sketch: dict[int, int] | None = None
    tokens_seen: int = 0  # content frames counted at the boundary: a lower bound when the engine reported no usage
    first_answer: int | None = None


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """One replica as a decision saw it: every term of its cost, in nanoseconds, and the adapter's tier there."""

    replica: str
    tier: HitClass
    cost: int
    queue: int = 0
    slot_wait: int = 0
    prepare: int = 0
    prefill: int = 0
    externality: int = 0


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """Why a request goes where it goes: the best three candidates of ``considered``, chosen one first."""

    id: int
    policy: str
    replica: str
    reason: str
    hit_class: HitClass
    hit_source: Source
    considered: int
    candidates: tuple[Candidate, ...]


class ResidencyChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step changed in the account of one adapter on one replica: its state, or the tier of its bytes."""

    replica: str
    adapter: str
    engine_name: str
    from_state: str
    to_state: str
    tier_before: HitClass
    tier_after: HitClass
    cause: str
    source: Source
    took: int | None = None
