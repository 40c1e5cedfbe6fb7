"""The words that kernel, record and conductor share: what happened (events) and what to do about it (commands).

Theory of operation. An event carries its own time ``at`` and nothing else does; the kernel answers it with commands. Both are
frozen msgspec structs in array form: a field may be appended with a default, never moved, so that an old journal stays readable.
``encode`` gives the one canonical byte form, which is what "the same commands, byte for byte" compares.
Times are integer ns since the Unix epoch, durations integer ns, tokens and bytes plain integers. ``None`` is "unknown", never
zero. ``adapter`` is the public name, ``None`` the base model; ``engine_name`` the versioned name under which a replica knows it.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Tier = Literal["gpu", "host", "disk", "remote"]
HitClass = Literal["gpu", "host", "disk", "remote", "base", "unknown"]
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


# --- events -----------------------------------------------------------------------------------------------------------


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    at: int


class RequestArrived(_Event, frozen=True):
    """A request passed the edge: authenticated, its model granted. ``prompt_tokens`` is the edge's estimate."""

    request: str
    tenant: str
    adapter: str | None
    prompt_tokens: int
    max_tokens: int | None
    stream: bool
    path: str
    client_id: str | None = None
    received: int | None = None
    """When its first byte came; the body takes time to arrive. ``None``: the same as ``at``."""


class RequestDispatched(_Event, frozen=True):
    """The request's bytes were handed to a connection of its replica."""

    request: str
    attempt: int


class RequestFirstToken(_Event, frozen=True):
    """First generated content on any channel (text, reasoning, tool call) reached the boundary."""

    request: str


class RequestFinished(_Event, frozen=True):
    """The answer ended, well or not; bytes may have reached the client. Nothing more will come of this request."""

    request: str
    status: Status
    http_status: int | None
    reason: str | None
    measured: Measured


class RequestCancelled(_Event, frozen=True):
    """The client went away, wherever the request was."""

    request: str
    measured: Measured


class AttemptFailed(_Event, frozen=True):
    """One attempt failed before any byte reached the client, so the kernel may choose again."""

    request: str
    attempt: int
    status: Status
    http_status: int | None
    reason: str


class CommandDone(_Event, frozen=True):
    """A command that has an ``id`` was carried out. ``took`` is its own duration."""

    command: int
    took: int


class CommandFailed(_Event, frozen=True):
    """A command was refused or broke. ``permanent``: only new files or new engine settings can mend it."""

    command: int
    reason: str
    permanent: bool


class LoadObserved(_Event, frozen=True):
    """The engine itself reported bytes moving from disk to its host cache."""

    replica: str
    engine_name: str
    took: int | None


class ActivationObserved(_Event, frozen=True):
    """The engine itself reported an adapter copied into a slot."""

    replica: str
    engine_name: str
    took: int | None


class EvictionObserved(_Event, frozen=True):
    """The engine itself reported an adapter leaving a tier."""

    replica: str
    engine_name: str
    tier: Tier


class ScrapeStarted(_Event, frozen=True):
    """A scrape of this replica begins: what is sent after this is not in its answer."""

    replica: str


class ReplicaSampled(_Event, frozen=True):
    """One scrape's figures, true at ``scrape_start``. ``kv_usage`` is a share of blocks, 0 to 1."""

    replica: str
    scrape_start: int
    running: int | None
    waiting: int | None
    kv_usage: float | None
    kv_tokens: int | None
    active: tuple[str, ...] | None = None
    registered: tuple[str, ...] | None = None


class ReplicaUp(_Event, frozen=True):
    """The engine answers. Another ``process_start`` than before means that it restarted and forgot its adapters."""

    replica: str
    process_start: int | None
    registered: tuple[str, ...]
    engine_version: str | None = None


class ReplicaDown(_Event, frozen=True):
    """The engine does not answer, or says that it is dead."""

    replica: str
    reason: str


class AdapterDeclared(_Event, frozen=True):
    """An adapter is new in the catalog, or has new files (another digest)."""

    adapter: AdapterSpec


class AdapterRetired(_Event, frozen=True):
    """An adapter left the catalog."""

    name: str


class DrainAsked(_Event, frozen=True):
    """An operator takes a replica out of (``on``) or back into routing."""

    replica: str
    on: bool


class LoadAsked(_Event, frozen=True):
    """An operator wants an adapter registered on a replica now."""

    adapter: str
    replica: str


class UnloadAsked(_Event, frozen=True):
    """An operator wants a replica to forget an adapter."""

    adapter: str
    replica: str


class GatewayStarted(_Event, frozen=True):
    """A new gateway process took over this state: what was open in the old one is lost, what was learnt is kept."""

    version: str
    config_digest: str


class Wake(_Event, frozen=True):
    """The time that the kernel asked to be stepped at has come."""


# fmt: off
Event = (
    RequestArrived | RequestDispatched | RequestFirstToken | RequestFinished | RequestCancelled | AttemptFailed
    | CommandDone | CommandFailed | LoadObserved | ActivationObserved | EvictionObserved
    | ScrapeStarted | ReplicaSampled | ReplicaUp | ReplicaDown
    | AdapterDeclared | AdapterRetired | DrainAsked | LoadAsked | UnloadAsked | GatewayStarted | Wake
)
# fmt: on

# --- changes ----------------------------------------------------------------------------------------------------------


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


# --- commands ---------------------------------------------------------------------------------------------------------


class _Command(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all commands."""


class Dispatch(_Command, frozen=True):
    """Send the request to this replica, asking for ``model`` (the engine-side name)."""

    request: str
    attempt: int
    replica: str
    model: str
    decision: Decision


class Queue(_Command, frozen=True):
    """Hold the request in the gateway queue. Later either a ``Dispatch`` or a ``Reject`` follows, at ``until`` at the latest."""

    request: str
    reason: str
    until: int
    decision: Decision | None = None


class Reject(_Command, frozen=True):
    """Answer the request with an error now. ``status`` is what its row will say, ``code`` what the client reads."""

    request: str
    status: Status
    http_status: int
    code: str
    message: str
    retry_after: int | None = None
    decision: Decision | None = None


class Load(_Command, frozen=True):
    """Register an adapter on a replica under a versioned name: disk to host to slot in one call."""

    id: int
    replica: str
    adapter: str
    engine_name: str


class Evict(_Command, frozen=True):
    """Make a replica forget a name. On stock vLLM its bytes stay until its own LRU drops them."""

    id: int
    replica: str
    adapter: str
    engine_name: str


class Check(_Command, frozen=True):
    """Look at a replica now, not at the next scrape: something just went wrong there."""

    replica: str


Command = Dispatch | Queue | Reject | Load | Evict | Check

_ENGINE_NAME = re.compile(r"(.+)@([0-9a-f]{12})(?:~([2-9]|[1-9][0-9]{1,8}))?", re.DOTALL)
_ENCODER = msgspec.msgpack.Encoder()
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_CHANGES: msgspec.msgpack.Decoder[list[ResidencyChange]] = msgspec.msgpack.Decoder(list[ResidencyChange])
_COMMANDS: msgspec.msgpack.Decoder[list[Command]] = msgspec.msgpack.Decoder(list[Command])


def encode(words: Event | list[Command] | list[ResidencyChange]) -> bytes:
    """The canonical bytes of one event, or of the commands or changes that one step returned."""
    return _ENCODER.encode(words)


def decode_event(data: bytes) -> Event:
    """The event in ``data``. Raises ``msgspec.DecodeError`` when the bytes are not one."""
    return _EVENTS.decode(data)


def decode_commands(data: bytes) -> list[Command]:
    """The commands in ``data``. Raises ``msgspec.DecodeError`` when the bytes are not a list of them."""
    return _COMMANDS.decode(data)


def decode_changes(data: bytes) -> list[ResidencyChange]:
    """The residency changes in ``data``. Raises ``msgspec.DecodeError`` when the bytes are not a list of them."""
    return _CHANGES.decode(data)


def engine_name(adapter: str, digest: str, generation: int = 1) -> str:
    """The name under which a replica knows this version of an adapter: ``support@3fa9c1d20b7e``, then ``...~2``.

    A new version or a re-verified registration gets a new name: engines keep prefix cache and old weights under the old one.
    """
    suffix = "" if generation == 1 else f"~{generation}"
    return f"{adapter}@{digest[:12]}{suffix}"


def parse_engine_name(name: str) -> tuple[str, str, int] | None:
    """``(adapter, first twelve digits of its digest, generation)`` of an engine-side name; ``None`` if it is not ours.

    The last ``@`` with twelve hex digits ends the public name, so the way back is plain even for ``org/adapter@main``.
    """
    match = _ENGINE_NAME.fullmatch(name)
    return None if match is None else (match[1], match[2], int(match[3] or 1))
