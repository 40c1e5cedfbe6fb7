"""What goes into a replica's twin and what comes out of it.

Every word carries its own time in integer picoseconds, on whatever scale the caller uses; the twin only compares and adds. Names
of adapters are the engine-side ones. ``took`` is how long the engine itself was busy with that one thing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loraledger.events import MoveVerb


class TwinRequest(msgspec.Struct, frozen=True, gc=False):
    """One request: generates exactly ``output_tokens`` (at least 1) after ``prompt_tokens`` (at least 1).

    ``prefix`` names what the prompt begins with, one number for each ``prefix_block_tokens`` of the profile, each standing for
    its block and all before it: equal numbers are equal prefixes. Only a profile with ``prefix_caching`` looks at it.
    """

    id: str
    adapter: str | None
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()


class TokenOut(msgspec.Struct, frozen=True, gc=False):
    """Request ``id`` has generated its ``n_generated``-th token; with ``finished`` that was the last one."""

    at: int
    id: str
    n_generated: int
    first: bool
    finished: bool


class Rejected(msgspec.Struct, frozen=True, gc=False):
    """The request ended before it began. ``aborted``: it waited too long for its first token to be in time (early abort)."""

    at: int
    id: str
    reason: Literal["too_long", "unknown_adapter", "engine_dead", "aborted"]


class Preempted(msgspec.Struct, frozen=True, gc=False):
    """The request lost its KV blocks and waits, first in line, to compute them again. Tokens already out stay out."""

    at: int
    id: str


class LoadDone(msgspec.Struct, frozen=True, gc=False):
    """A ``register`` call was carried out: the name can be asked for from now on."""

    at: int
    name: str
    took: int


class LoadFailed(msgspec.Struct, frozen=True, gc=False):
    """A ``register`` call was refused; nothing moved."""

    at: int
    name: str
    reason: Literal["unreadable", "rank_too_high", "too_large", "already_registered", "engine_dead"]


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """Bytes reached the host cache, by a ``register`` call or because a step needed them."""

    at: int
    name: str
    took: int


class Activated(msgspec.Struct, frozen=True, gc=False):
    """An adapter was copied to the device. A prefetch of the unified layout is reported when it is begun."""

    at: int
    name: str
    took: int


class Evicted(msgspec.Struct, frozen=True, gc=False):
    """An adapter left ``tier``. Leaving the host also empties its slot: then both are reported, slot first.

    ``cause``: room for another (``lru``), or a ``move`` (``remove``).
    """

    at: int
    name: str
    tier: Literal["gpu", "host"]
    cause: Literal["lru", "remove"] = "lru"


class MoveDone(msgspec.Struct, frozen=True, gc=False):
    """A ``move`` was carried out; what it moved is told before it."""

    at: int
    name: str
    verb: MoveVerb
    took: int


class MoveFailed(msgspec.Struct, frozen=True, gc=False):
    """A ``move`` was refused and changed nothing. ``reason``: the probe's code; ``not_modelled`` where there are no slots."""

    at: int
    name: str
    verb: MoveVerb
    reason: str


class PinLost(msgspec.Struct, frozen=True, gc=False):
    """A batch needed every slot: the pin of this adapter gives way, and it leaves its slot next."""

    at: int
    name: str


class Died(msgspec.Struct, frozen=True, gc=False):
    """A step needed an adapter whose files are gone, which ends the engine. ``lost``: requests that were still open."""

    at: int
    adapter: str
    lost: tuple[str, ...]


# fmt: off
TwinEvent = (
    TokenOut | Rejected | Preempted | LoadDone | LoadFailed | Loaded | Activated | Evicted
    | MoveDone | MoveFailed | PinLost | Died
)
# fmt: on


class TwinSample(msgspec.Struct, frozen=True, gc=False):
    """What an engine's own metrics would say: its scheduler's state after the last step that began.

    ``active``: adapters with running or waiting requests, in the order in which they got their first one. Requests that arrived
    during the running step are not in it yet. ``preemptions`` counts since the start.
    """

    running: int
    waiting: int
    kv_used_blocks: int
    kv_blocks: int
    active: tuple[str, ...]
    preemptions: int
