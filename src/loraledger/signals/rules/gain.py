"""What pins would have saved: a sample's uses played through the slots by LRU, with pins, and against the least possible.

Theory of operation. A use is the first token of a request with an adapter: the adapter has to be in a slot then, and stays in use
to the last token. ``EngineTiers`` is the engine's own LRU, and its order of pins: idle ones leave first, then pinned idle ones,
then those in use. A pin that had to leave is pinned again when it comes back. ``Timeline`` gives the least that any choice could
have brought in, for the same uses on the same replica.

All three begin with empty slots and know no load calls, so they compare choices of what to keep and nothing else. What differs
from the record: requests would have come at other moments had they waited less. A preempted request is in use for sure only at its
first token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from loraledger.signals.rules.advice import Gain
from loraledger.signals.rules.sample import Seen
from loraledger.signals.timeline import Timeline
from loraledger.tiers import EngineTiers
from loraledger.units import NS_PER_S

ALL: Final = "all"
"""The name of the sum over replicas."""


class Use(NamedTuple):
    """An adapter in use: from its first token to its last, in ns."""

    adapter: str
    first: int
    last: int


def uses_of(seen: Iterable[Seen]) -> dict[str, list[Use]]:
    """By replica, in order of first tokens."""
    found: dict[str, list[Use]] = {}
    for one in seen:
        if one.adapter is None or one.replica is None or one.first_token_ns is None or one.first_token_ns <= 0:
            continue
        first, last = one.first_token_ns, one.last_token_ns
        sure = last is not None and last > first and not one.preemptions
        found.setdefault(one.replica, []).append(Use(one.adapter, first, last if sure and last is not None else first))
    for uses in found.values():
        uses.sort(key=lambda use: use.first)
    return found


def misses_of(uses: Sequence[Use], slots: int, pins: Collection[str] = ()) -> dict[str, int]:
    """How often each adapter had to be brought into one of ``slots``. Adapters that never were are left out."""
    tiers = EngineTiers(slots, host_entries=len(uses) + slots)
    running: dict[str, int] = {}
    ends: list[tuple[int, str]] = []
    misses: dict[str, int] = {}
    for adapter, first, last in uses:
        while ends and ends[0][0] < first:
            _, left = heappop(ends)
            tiers.touch((left,))
            running[left] -= 1
            if not running[left]:
                del running[left]
        if adapter not in tiers.active:
            misses[adapter] = misses.get(adapter, 0) + 1
            tiers.arrange(running)
        tiers.use(adapter)
        if adapter in pins:
            tiers.pinned[adapter] = None
        running[adapter] = running.get(adapter, 0) + 1
        heappush(ends, (last, adapter))
    return misses


def gain(
    replica: str, uses: Sequence[Use], slots: int, pins: Collection[str], penalties: Mapping[str, float | None]
) -> tuple[Gain, dict[str, int]]:
    """The three outcomes on one replica, and what plain LRU brought in how often. ``penalties``: of a miss, in s."""
    timeline = Timeline()
    for use in uses:
        timeline.add(*use)
    lru, pinned = misses_of(uses, slots), misses_of(uses, slots, pins)
    costs = {name: _ns(penalties.get(name)) for name in timeline.uses}
    known = {name: cost for name, cost in costs.items() if cost is not None}
    least_s = timeline.least(known, slots) / NS_PER_S if len(known) == len(costs) else None
    made = Gain(
        replica=replica,
        slots=slots,
        pins=len(pins),
        uses=len(uses),
        lru=sum(lru.values()),
        pinned=sum(pinned.values()),
        least=timeline.least(dict.fromkeys(timeline.uses, 1), slots),
        lru_s=_seconds(lru, costs),
        pinned_s=_seconds(pinned, costs),
        least_s=least_s,
    )
    return made, lru


def total(gains: Sequence[Gain]) -> Gain | None:
    """Over replicas; ``None`` without any."""
    if not gains:
        return None
    return Gain(
        replica=ALL,
        slots=sum(one.slots for one in gains),
        pins=sum(one.pins for one in gains),
        uses=sum(one.uses for one in gains),
        lru=sum(one.lru for one in gains),
        pinned=sum(one.pinned for one in gains),
        least=sum(one.least for one in gains),
        lru_s=_sum(one.lru_s for one in gains),
        pinned_s=_sum(one.pinned_s for one in gains),
        least_s=_sum(one.least_s for one in gains),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * NS_PER_S)


def _seconds(misses: Mapping[str, int], costs: Mapping[str, int | None]) -> float | None:
    total_ns = 0
    for name, count in misses.items():
        cost = costs[name]
        if cost is None:
            return None
        total_ns += cost * count
    return total_ns / NS_PER_S
