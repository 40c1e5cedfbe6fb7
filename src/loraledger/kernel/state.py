"""The kernel's whole state, as plain data: what a snapshot holds and what a fresh process continues from.

Everything is a msgspec struct of numbers, strings, lists and insertion-ordered dicts. No set is ever iterated and no hash order
is ever visible, so the same events give the same commands in any process. Times are ns since the epoch, durations ns.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loraledger.events import AdapterSpec, Decision, FloorObserved
from loraledger.kernel.estimates import Estimate
from loraledger.kernel.holding import Holding
from loraledger.kernel.observed import Activity, Observed
from loraledger.kernel.pin import Pin
from loraledger.kernel.residency import Registration
from loraledger.kernel.rollout_state import Books, Rollout
from loraledger.kernel.settings import ReplicaSpec, TenantSpec
from loraledger.kernel.shares import Shares
from loraledger.tiers import EngineTiers

Phase = Literal["queued", "loading", "sent", "streaming", "held"]
NO_SEAT = -(1 << 62)
UNLIMITED = 1 << 62


class RequestState(msgspec.Struct):
    """One accepted request. ``expect`` is the output that is expected of it, in tokens."""

    id: str
    tenant: str
    adapter: str | None
    prompt: int
    expect: int
    arrived: int
    deadline: int
    phase: Phase = "queued"
    replica: str | None = None
    attempt: int = 0
    dispatched: int = 0
    stall: int = 0
    """What bringing its adapter into a slot is expected to hold the engine for, ns."""
    lone: bool = False
    """Its prefill had the replica to itself, so its first token measures the prefill rate."""
    whole: bool = False
    """Its answer comes whole: its first token is not told."""
    reckoned: int = 0
    """What its whole answer's prompt is reckoned to take at its replica, ns; 0: it is not reckoned."""
    ahead: bool = False
    """Its prompt is among those that its tenant has outstanding at its replica."""
    decision: Decision | None = None
    moves: int = 0
    """How often a failed load sent it to another replica."""
    failed_on: str | None = None
    failed_at: int = 0
    failure: tuple[str, int | None, str] | None = None
    """Status, HTTP status and reason of the attempt that failed."""


Standing = tuple[int, int, int, "AdapterState | None", int]
"""What every request finds at one replica until something happens there, durations in ns: the engine's queue; the wait for a slot
of an adapter that is not in flight there; how many requests a load delays; whose slot goes next (``None`` where one is free or only
a load under way will fill it); what bringing that one back takes (0 where a slot is free). See ``cost.stand``."""


class ReplicaState(msgspec.Struct):
    """One replica as this gateway knows it: what was sent, what was sampled, what is believed."""

    spec: ReplicaSpec
    tiers: EngineTiers
    itl: Estimate
    prefill_rate: Estimate
    load_ratio: Estimate
    """Measured over predicted duration of explicit loads."""
    seed: int = 0
    up: bool = False
    draining: bool = False
    shunned: bool = False
    """Not routed to while in doubt: an attempt broke there without an answer, or it is distrusted (see ``failures``)."""
    doubted: int = 0
    """When an attempt broke there; 0 once a later look has shown that the engine lives, and distrust has passed."""
    broken: int = 0
    """Times in a row that it was found to break requests, without a whole answer in between."""
    broken_at: int = 0
    """When it last was, or when its process was new."""
    reason: str | None = "not contacted yet"
    process_start: int | None = None
    engine_version: str | None = None
    registrations: dict[str, Registration] = {}
    stale: dict[str, None] = {}
    """Engine-side names of versions that are no longer served and may still be registered there."""
    in_flight: dict[str, None] = {}
    adapters: dict[str, int] = {}
    """Requests in flight by adapter."""
    blocked: dict[str, None] = {}
    """Of these, adapters that wait in the engine, as believed, for a slot that no running request holds."""
    holdings: dict[str, Holding] = {}
    """By tenant, what its requests in flight hold."""
    streams: int = 0
    """Of the requests in flight, those whose answer is streamed."""
    streamers: dict[str, int] = {}
    """The two tenants whose streams were sent there or ended last, and when."""
    prefill_out: int = 0
    """Prompt tokens sent whose first token has not come."""
    decode_out: int = 0
    """Output tokens expected of the requests in flight."""
    stall_out: int = 0
    """Expected time that the engine will be held by loads and activations of requests that were sent, ns."""
    kv_own: int = 0
    """KV tokens that the requests in flight may come to hold."""
    room: int = NO_SEAT
    """KV tokens that one more request may come to hold; ``NO_SEAT`` if none may come. Kept, because it changes on one replica
    at a time and is asked of all of them for each request: 16 replicas cost 8 of the kernel's 40 us when it was worked out."""
    own_at_mark: int = 0
    kv_at_mark: int = 0
    mark: int = 0
    foreign: int = 0
    foreign_kv: int = 0
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    kv_tokens: int | None = None
    block_tokens: int | None = None
    sampled: int | None = None
    loading: str | None = None
    wanted: dict[str, None] = {}
    placements_since: int = 0
    placements: int = 0
    exit_suspects: dict[str, None] = {}
    """Adapters whose attempt broke there while the engine's fate is unknown."""
    exited_at: int = 0
    accused: dict[str, tuple[int, int]] = {}
    """What was held against the adapters that the outage under way made suspect, before it: ``suspect_since`` and ``strikes``."""
    drift: dict[str, int] = {}
    observed: Observed | None = None
    """``None``: it has no probe, or none that answers; then its tiers are belief."""
    floor: FloorObserved | None = None
    """What its memory was divided into, by the probe."""
    pins: dict[str, Pin] = {}
    """By adapter, what its residency ranking would have pinned, best first; empty without one."""
    activity: Activity = msgspec.field(default_factory=Activity)
    standing: Standing | None = None
    """Kept as long as nothing happens there that it rests on."""

    def reckon(self) -> None:
        """Work ``room`` out again: after each change of routing, seats or KV."""
        self.standing = None
        seats = len(self.in_flight) + self.foreign
        if not self.up or self.draining or self.shunned or seats >= self.spec.max_in_flight:
            self.room = NO_SEAT
        elif self.kv_tokens is None or not seats:
            self.room = UNLIMITED
        else:
            self.room = self.kv_tokens - self.kv_own - self.foreign_kv


class AdapterState(msgspec.Struct):
    """One adapter fleet-wide. ``placed``: replicas it is routed to without a new load, and when it last was."""

    spec: AdapterSpec
    output: Estimate
    seed: int = 0
    placed: dict[str, int] = {}
    rate: float = 0.0
    rate_at: int = 0
    preferred: list[int] = []
    """Positions of the replicas of a large fleet that are looked at first for it."""
    suspect_since: int = 0
    """Its use coincided with an engine exit at this time: each replica must verify it by an explicit load first."""
    strikes: int = 0
    parked_until: int = 0
    parked_reason: str | None = None
    barred: bool = True
    """A replica may have parked it or be forgetting its name: only then are their registrations looked at."""


class TenantState(msgspec.Struct):
    """One tenant's use of the gateway. ``spec``: with the concurrency that a rollout gave it."""

    spec: TenantSpec
    active: int = 0
    queue: dict[str, None] = {}


class FleetState(msgspec.Struct):
    """Everything that a kernel knows."""

    replicas: dict[str, ReplicaState]
    adapters: dict[str, AdapterState]
    tenants: dict[str, TenantState]
    output: Estimate
    requests: dict[str, RequestState] = {}
    desired: dict[str, None] = {}
    """Adapters that should be held by some replicas at all times."""
    timers: list[tuple[int, str]] = []
    """Heap of (when, request or empty): deadlines of queued requests, ends of pauses."""
    wakes: dict[int, None] = {}
    """The ends of pauses in ``timers``: each is asked for again and again while it lasts."""
    held: dict[str, None] = {}
    now: int = 0
    queued: int = 0
    waiting_tenants: dict[str, None] = {}
    """Tenants with queued requests, the one to be served next first."""
    next_decision: int = 1
    next_command: int = 1
    commands: dict[int, tuple[str, str]] = {}
    """Commands under way: id to (replica, adapter)."""
    retries: float = 0.0
    round_robin: int = 0
    least_load_ratio: float = 0.5
    rank_everywhere: int = 0
    """The largest rank that every replica takes."""
    counters: dict[str, int] = {}
    shares: Shares | None = None
    """Copies by share of the load: of the one policy that keeps some."""
    rollouts: dict[str, Rollout] = {}
    """By change, the first that was set first: where two bear on one variable, the later one holds."""
    books: dict[str, Books] = {}
    """Of the policies of rollouts, by the changes that they decide under."""
