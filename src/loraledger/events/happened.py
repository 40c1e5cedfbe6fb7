"""Events: what happened. Each carries its own time ``at``, ns since the Unix epoch."""

from __future__ import annotations

from typing import Literal

import msgspec

from loraledger.events.words import AdapterSpec, HitClass, Measured, MoveVerb, Status, Tier


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
    bytes: int | None = None


class ActivationObserved(_Event, frozen=True):
    """The engine itself reported an adapter copied into a slot."""

    replica: str
    engine_name: str
    took: int | None


class EvictionObserved(_Event, frozen=True):
    """The engine itself reported an adapter leaving a tier. ``cause``: ``lru``, ``remove``, ``host_evict``, ..."""

    replica: str
    engine_name: str
    tier: Tier
    cause: str = "lru"


class TiersObserved(_Event, frozen=True):
    """The engine's own lists as they were at ``as_of``, least recently used first: true on every rank process."""

    replica: str
    as_of: int
    host: tuple[str, ...]
    active: tuple[str, ...]
    pinned: tuple[str, ...] = ()
    host_bytes: tuple[int | None, ...] = ()
    """Bytes of each of ``host``, in its order."""


class FloorObserved(_Event, frozen=True):
    """What the engine's memory was divided into when it started, bytes of one rank process; ``None``: it does not say."""

    replica: str
    weights: int | None = None
    activations: int | None = None
    """Peak of what a step needs, as profiled."""
    slot_pool: int | None = None
    kv_bytes: int | None = None
    unattributed: int | None = None
    requested: int | None = None
    """What the engine may use: its share of the device."""
    device: int | None = None
    slots: int | None = None
    slot_bytes: int | None = None
    host_entries: int | None = None
    max_rank: int | None = None
    kv_blocks: int | None = None
    block_tokens: int | None = None


class StepsObserved(_Event, frozen=True):
    """What the engine's steps since the last such event were: sums, and where it says so the figure now."""

    replica: str
    steps: int
    tokens: int
    took: int
    preempted: int
    recomputed: int
    """Tokens computed again after a preemption."""
    blocked: dict[str, int]
    """Requests that waited for a slot, the most in one step, by engine-side name."""
    adapters: int
    """Distinct adapters in the batch now."""
    kv_free: int | None = None
    """Free KV blocks now."""


class EngineFinished(_Event, frozen=True):
    """How one request went inside its engine; durations in ns. ``access``: the tier in which its adapter was found."""

    replica: str
    request: str
    queue: int | None = None
    prefill: int | None = None
    """With what loads and activations held it up (``stall``)."""
    decode: int | None = None
    access: HitClass | None = None
    load: int | None = None
    activation: int | None = None
    stall: int | None = None
    """All loads and activations of the step in which it was first computed."""
    cached_tokens: int | None = None
    preemptions: int | None = None


class ProbeLost(_Event, frozen=True):
    """The probe of a replica does not answer (any more): what is known of its tiers is belief from now on."""

    replica: str
    reason: str


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
    block_tokens: int | None = None
    preemptions: int | None = None
    """Since the engine's process began."""


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


class MoveAsked(_Event, frozen=True):
    """An operator wants an adapter moved between the tiers of a replica, which takes its probe."""

    adapter: str
    replica: str
    verb: MoveVerb


class GatewayStarted(_Event, frozen=True):
    """A new gateway process took over this state: what was open in the old one is lost, what was learnt is kept."""

    version: str
    config_digest: str


class Wake(_Event, frozen=True):
    """The time that the kernel asked to be stepped at has come."""


class RolloutSet(_Event, frozen=True):
    """A change begins to be tried on ``members`` (tenants or replicas) alone; or, with ``members`` ``None``, it holds for all.

    ``variable``: ``policy``, ``policy.PARAM`` or ``tenant.concurrency`` of tenants, ``pins`` of replicas. ``value``: what it is to
    be, JSON. Set again with the same content, nothing changes.
    """

    change: str
    variable: str
    value: str
    unit: Literal["tenant", "replica"]
    members: tuple[str, ...] | None


class RolloutEnded(_Event, frozen=True):
    """A change is tried no more: everybody has again what the settings say."""

    change: str


# fmt: off
Event = (
    RequestArrived | RequestDispatched | RequestFirstToken | RequestFinished | RequestCancelled | AttemptFailed
    | CommandDone | CommandFailed | LoadObserved | ActivationObserved | EvictionObserved
    | TiersObserved | FloorObserved | StepsObserved | EngineFinished | ProbeLost
    | ScrapeStarted | ReplicaSampled | ReplicaUp | ReplicaDown
    | AdapterDeclared | AdapterRetired | DrainAsked | LoadAsked | UnloadAsked | MoveAsked | GatewayStarted | Wake
    | RolloutSet | RolloutEnded
)
# fmt: on
