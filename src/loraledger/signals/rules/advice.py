"""What the rules advise: whether to change the number of slots, what to keep in them, whom to bound, what to look at.

Theory of operation. Structs only; ``advise`` fills them. A rule says what it saw, what its limit was and what that means; where
something is not known it holds back and names what is missing. Unknown is ``None``, never 0 and never NaN. Durations are
seconds (float), moments ns since the epoch, sizes bytes.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from loraledger.signals.figures import Version, Window

WEEKS: Final = 3
"""Windows that the rule for slots looks at."""

ConditionName = Literal["hit_rate", "preparation", "preemptions"]
Verdict = Literal["fires", "holds back"]
PenaltySource = Literal["its own misses", "its size class", "the fleet", "its own loads", "the fleet's loads"]


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that the rules hold figures against. Raises ValueError for one out of its range."""

    hit_rate: float = 0.97
    """A peak hour at or above it is good enough."""
    preparation_share: float = 0.10
    """Of the time to first tokens. More slots save preparation and nothing else: below a tenth the best that they can do is lost
    in the spread of the other nine."""
    preemptions_per_1000: float = 10.0
    """KV preemptions for 1,000 requests, as the guardrail of a replay: slots are paid for in KV blocks."""
    budget: int | None = None
    """Pins for each replica; ``None``: its slots less one, which is left to all others."""
    peak_to_mean: float = 4.0
    """Arrivals of a tenant's busiest minute over those of its mean minute."""
    cv: float = 1.45
    """Coefficient of variation of the times between arrivals; 1 is Poisson. The default is the median of 162 clients of ServeGen's
    m-large trace."""
    burst_headroom: float = 2.0
    """A tenant's limit lets it run at so many times its mean rate."""
    slow: float = 3.0
    """A hit is slow from so many times the median of hits on."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}: must be from {low:g} to {high:g}")
        if self.budget is not None and self.budget < 0:
            raise ValueError(f"budget is {self.budget}: must be a count of slots, 0 or more")


_RANGES: Final = (
    ("hit_rate", 0.0, 1.0),
    ("preparation_share", 0.0, 1.0),
    ("preemptions_per_1000", 0.0, 1e6),
    ("peak_to_mean", 1.0, 1e6),
    ("cv", 0.0, 1e6),
    ("burst_headroom", 1.0, 1e6),
    ("slow", 1.0, 1e6),
)


class Week(msgspec.Struct, frozen=True, kw_only=True):
    """Seven days. ``hit_rate`` is that of its peak hour; ``None`` where no class is known."""

    window: Window
    requests: int
    peak_hour_ns: int | None
    """Beginning of the clock hour (UTC) with most adapter-bearing arrivals, the first of equals; ``None`` without any."""
    peak_arrivals: int = 0
    """Adapter-bearing requests that arrived in it."""
    peak_known: int = 0
    """Of these, those whose hit class is known: the denominator of ``hit_rate``."""
    peak_hits: int = 0
    answered: int = 0
    """Requests of the week with a time to the first token."""
    ttft_ns: int = 0
    """Their times to the first token, summed."""
    preparation_ns: int = 0
    """What of it is known to be preparation."""
    untold_ns: int = 0
    """Of requests whose preparation nobody told: the rest of their times to the first token, which may be preparation or not."""
    told: int = 0
    """Of ``answered``, those whose preparation is known."""
    preemptions_told: int = 0
    """Requests that say how often they were preempted."""
    preemptions: int = 0
    """What these say."""

    @property
    def hit_rate(self) -> float | None:
        """Share of ``peak_known`` that found its adapter in a slot."""
        return self.peak_hits / self.peak_known if self.peak_known else None

    @property
    def preemptions_per_1000(self) -> float | None:
        """KV preemptions for 1,000 requests, of those that say so."""
        return self.preemptions * 1000 / self.preemptions_told if self.preemptions_told else None


class Condition(msgspec.Struct, frozen=True):
    """One of the three. ``holds``: it speaks for more slots; ``None``: not known. ``value``, ``limit``: in the target's unit."""

    name: ConditionName
    holds: bool | None
    value: float | None
    limit: float
    words: str


class SlotRule(msgspec.Struct, frozen=True):
    """Whether to expand the slots, or to split them anew: only when all three conditions hold."""

    verdict: Verdict
    weeks: tuple[Week, ...]
    """Oldest first; the last one ends when the advice was asked for."""
    conditions: tuple[Condition, ...]
    means: str
    """What the outcome means: what to do, and what would not help."""
    missing: tuple[str, ...] = ()
    """What has to be recorded before the rule can judge."""


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """What a slot on a replica saves if it is kept for an adapter, by the week's traffic there. ``rank``: from 1 on, by replica."""

    replica: str
    adapter: str
    rank: int
    requests: int
    misses: int
    per_hour: float
    """Its requests there."""
    penalty: float | None
    """What a miss of it waits for, in s; ``None``: nothing was measured anywhere."""
    penalty_from: PenaltySource | None
    bytes: int | None
    per_slot: float | None
    """Waiting avoided, in s an hour, by a slot kept for it."""
    per_mib: float | None
    """The same over its MiB."""
    pin: bool
    """Among the budget's best."""


class Pin(msgspec.Struct, frozen=True):
    """Keep this adapter in a slot of this replica."""

    replica: str
    adapter: str


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that came into slots often and is worth less there than every pin: let it go first."""

    replica: str
    adapter: str
    moved_in: int
    """How often, in the sample, by LRU."""
    requests: int
    """In the sample."""
    per_slot: float | None
    words: str


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's uses of a sample window played through its slots three ways. Misses; and s of waiting, ``None`` if unknown.

    Each begins with empty slots. ``least``: what nobody could have avoided with as many slots and the requests where they went.
    """

    replica: str
    slots: int
    pins: int
    uses: int
    lru: int
    pinned: int
    least: int
    lru_s: float | None
    pinned_s: float | None
    least_s: float | None


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """What to keep where. ``pins`` in order: by replica, the best first."""

    window: Window
    """Of rates and penalties."""
    worths: tuple[Worth, ...]
    """By replica, best first; the pins and some that follow."""
    left_out: int
    """Pairs of replica and adapter that ``worths`` does not show."""
    pins: tuple[Pin, ...]
    evictions: tuple[Eviction, ...]
    sample: Window | None
    """Of ``gains``; ``None``: nothing could be played."""
    gains: tuple[Gain, ...]
    total: Gain | None
    """Over the replicas of ``gains``; its ``replica`` is ``all``."""
    words: str
    """What to expect of the pins, in one sentence."""


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant whose arrivals call for a concurrency limit, by the busiest hour of the last week."""

    tenant: str
    requests: int
    peak_to_mean: float
    """Arrivals of its busiest minute over those of its mean minute in that hour."""
    cv: float | None
    """Of the times between its arrivals; ``None`` with fewer than 3 of them."""
    dispersion: float
    """Variance over mean of its arrivals a minute: 1 is Poisson; its root is comparable with ``cv``."""
    mean_in_flight: float
    """Little's law: its rate times its mean time in the engine."""
    max_in_flight: int
    """Had nothing held it."""
    limit: int
    held: int
    """Requests of that hour that the limit would have held back."""
    held_s: float
    """How long they would have waited at the mean."""
    words: str


class Oddity(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that answers otherwise than its hit class lets expect. Times in s; ``causes``: likely ones, never certain."""

    adapter: str
    kind: Literal["slow hits", "harmless misses"]
    n: int
    """Slow hits, or misses."""
    of: int
    """Its hits, or its requests whose class is known."""
    ttft_p50: float
    """Of ``n``."""
    other_p50: float
    """What it is held against: the median of all hits, or of the adapter's own hits where it has some."""
    causes: tuple[str, ...]
    """Each with the figures that it was concluded from, the likeliest first; empty: the record shows none."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What the record of the last three weeks advises."""

    until_ns: int
    targets: Targets
    version: Version | None
    """What is judged; ``None``: versions were pooled, or there is no request."""
    versions: tuple[Version, ...]
    """All that the three weeks have, most requests first."""
    slots: SlotRule
    ranking: Ranking | None
    """``None`` when no request with an adapter went to a replica in the last week."""
    sample: Window | None
    """The peak hour, or as much of it as was read: of gains, bursts and oddities."""
    bursts: tuple[Burst, ...]
    slow_hits: tuple[Oddity, ...]
    harmless_misses: tuple[Oddity, ...]
    notes: tuple[str, ...]
    """Sentences for a person: what was left out, and what would supply it."""
