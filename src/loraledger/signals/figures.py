"""The figures of a window: what each one counts, its unit, and what is not known of it.

Theory of operation. Structs only; ``measure`` fills them from the record. A share or a percentile of nothing is ``None``, never 0
and never NaN; what was not seen has a count of its own beside what was. Durations are seconds (float), moments ns since the epoch.

A request's figures belong to the window in which it *arrived*; a move, a sample and a decision to the window in which it was made.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from loraledger.units import NS_PER_S

Dimension = Literal["replica", "tenant", "adapter", "class"]
DIMENSIONS: Final[tuple[Dimension, ...]] = ("replica", "tenant", "adapter", "class")


class Window(msgspec.Struct, frozen=True, order=True):
    """The moments in [since_ns, until_ns), ns since the epoch."""

    since_ns: int
    until_ns: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.until_ns - self.since_ns) / NS_PER_S

    @property
    def minutes(self) -> float:
        """Its length."""
        return self.seconds / 60


class Spread(msgspec.Struct, frozen=True):
    """Of ``n`` durations, in s. ``exact``: linear between neighbours; otherwise from sketches, within 1.1 % of a value seen."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    exact: bool = True


class Hits(msgspec.Struct, frozen=True):
    """Requests by where their adapter was when the kernel decided. ``undecided``: no decision was taken of them."""

    gpu: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    base: int = 0
    unknown: int = 0
    undecided: int = 0

    @property
    def adapter_bearing(self) -> int:
        """Requests with an adapter whose class is known: the denominator of ``gpu_rate``."""
        return self.gpu + self.host + self.disk + self.remote

    @property
    def misses(self) -> int:
        """Of these, those whose adapter was in no slot."""
        return self.host + self.disk + self.remote

    @property
    def gpu_rate(self) -> float | None:
        """Share of ``adapter_bearing`` that found it in a slot. Base requests are beside it and never in it."""
        return self.gpu / self.adapter_bearing if self.adapter_bearing else None

    @property
    def host_rate(self) -> float | None:
        """Share of the misses that found it in the host cache."""
        return self.host / self.misses if self.misses else None


class Split(msgspec.Struct, frozen=True):
    """Where the time to the first token went: sums in s over ``n`` requests that got one. The parts add up to ``ttft``.

    ``engine``: from dispatch to first token of requests of which no probe told more; nobody knows what it was.
    ``preparation``: loads waited for at the gateway, and what loads and activations held it up for inside the engine.
    ``told``: how many of ``n`` have their preparation told: by a probe, or because they needed none (base, or believed in a slot).
    """

    n: int
    ttft: float
    gateway_queue: float
    preparation: float
    engine_queue: float
    prefill: float
    unattributed: float
    engine: float
    told: int

    @property
    def preparation_share(self) -> float | None:
        """sum(preparation) / sum(TTFT) over all ``n``: at least so much. ``None`` when nothing was waited."""
        return self.preparation / self.ttft if self.ttft > 0 else None


class Moves(msgspec.Struct, frozen=True):
    """Adapters moved between tiers, counts of the window. Loads: disk or remote to host or slot; activations: into a slot.

    ``took``: by ``load`` and ``activation``, of those that were timed.
    ``took_by_size``: the same for loads, by size class (``facts.size_class``).
    """

    loads: int = 0
    activations: int = 0
    slot_evictions: int = 0
    host_evictions: int = 0
    took: dict[str, Spread] = {}
    took_by_size: dict[str, Spread] = {}


class WorkingSet(msgspec.Struct, frozen=True):
    """Distinct adapters asked for in the window, against the places that there are. ``None``: not known.

    ``in_flight_max``: most distinct adapters that were in flight at one moment on the replica (of the fleet: the largest of these).
    ``over_slots``: share of the window's time during which more distinct adapters were in flight than the replica has slots.
    """

    adapters: int
    bytes: int | None
    slots: int | None
    host_entries: int | None
    in_flight_max: int | None = None
    over_slots: float | None = None


class Pressure(msgspec.Struct, frozen=True):
    """KV and the engine's batch, from samples of replicas; of the fleet: sums and maxima over replicas. ``None``: not known."""

    samples: int = 0
    down: int = 0
    """Samples that found the engine down."""
    restarts: int = 0
    """Other process starts than before."""
    kv_usage_mean: float | None = None
    kv_usage_max: float | None = None
    kv_full: float | None = None
    """Share of samples with 90 % of the KV blocks or more in use."""
    kv_tokens: int | None = None
    """Capacity; the least that was seen of a replica, summed over replicas."""
    running_mean: float | None = None
    waiting_mean: float | None = None
    preemptions: int | None = None
    """By the probe's steps, else by requests that say so; ``None``: nobody said."""
    recomputed_tokens: int | None = None
    tokens_per_step: float | None = None
    adapters_per_step: float | None = None
    blocked_max: int | None = None
    """Most requests that waited for a slot in one step, by the probe."""
    busy: float | None = None
    """Share of the window that the engine spent in steps, by the probe; of the fleet: the mean over replicas."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one replica, tenant, adapter or hit class, or all of them. ``moves`` and ``pressure``: of replicas and all.

    Requests that the client got wrong (4xx of the engine) count in ``requests`` and ``by_status`` and in nothing else.
    """

    requests: int
    share: float | None
    """Of all requests of the window."""
    per_minute: float
    by_status: dict[str, int]
    """``open`` for those that had not ended."""
    rejections: dict[str, int]
    """Rejected ones, by reason."""
    prompt_tokens: int | None
    """``None``: no request told. Estimated ones are not mixed in."""
    generated_tokens: int | None
    cached_tokens: int | None
    active_tokens: float | None
    """Mean prompt and generated tokens in flight: sum over requests of tokens x time in the engine, over the window."""
    hits: Hits
    engine_hits: Hits | None
    """By what engines found (``engine_access``); ``None`` without a probe."""
    ttft: Spread | None
    ttft_by_class: dict[str, Spread]
    itl: Spread | None
    """Times between tokens, from the requests' sketches, merged."""
    itl_by_class: dict[str, Spread]
    itl_mean: float | None = None
    """Mean time between tokens over requests that say so, each weighed by its gaps: also where no sketch was kept, in s."""
    split: Split | None
    split_by_class: dict[str, Split]
    attainment: float | None
    """Share of the judged requests with a first token within ``Signals.slo_s``."""
    cold_ttft_p99: float | None
    """Of requests whose adapter was in no slot, in s."""
    oldest_wait: float | None
    """Longest time to a first token, or still without one when the window ended, in s."""
    distinct_adapters: int
    replicas: int = 0
    """Distinct replicas that they were sent to."""
    top_adapter: str | None = None
    """The adapter with the most active tokens among them; ``None`` without any."""
    top_adapter_share: float | None = None
    """Its share of their active tokens."""
    bytes: int | None = None
    """Of one adapter; of others the bytes of their working set."""
    moves: Moves | None = None
    working_set: WorkingSet | None = None
    pressure: Pressure | None = None


class Version(msgspec.Struct, frozen=True):
    """One combination that rows came from. Rows of different ones are never pooled unless asked."""

    engine_version: str | None
    base: str | None
    config_digest: str | None
    gateway_version: str | None
    requests: int
    first_ns: int
    last_ns: int


class Quality(msgspec.Struct, frozen=True):
    """What of the record could not be used, or not fully. Counts of requests in the window."""

    duplicates: int = 0
    """Rows with an id that another row had: the one that ended last counts."""
    backwards: int = 0
    """A clock went back: a duration of theirs is negative and counts as unknown."""
    no_tokens: int = 0
    """Ended well and told no token counts."""
    notes: tuple[str, ...] = ()
    """Sentences for a person: what is missing, and what would supply it."""


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one window. ``total`` is ``None`` when no request arrived in it."""

    window: Window
    slo_s: float
    version: Version | None
    """What is measured; ``None``: versions were pooled, or there is no request."""
    versions: tuple[Version, ...]
    """All that the window has, most requests first."""
    measure_again: str | None
    """A sentence when the version changed within the window or since the baseline: figures before it are of another system."""
    quality: Quality
    total: Group | None
    replicas: dict[str, Group]
    tenants: dict[str, Group]
    adapters: dict[str, Group]
    classes: dict[str, Group]
    worst_adapter: str | None = None
    """Of those with 5 requests or more, the one with the least attainment."""
