"""The least load work that any cache could have done in a run, and so the most that could have been saved.

Theory of operation. Given are the run's own moments: for each request with an adapter, when its first and its last token came.
Whatever is kept where, and wherever requests are sent, the same requests at the same moments need at least ``least`` seconds of
loads. The idea is PFOO's (Berger, Beckmann, Harchol-Balter: Practical Bounds on Optimal Caching with Variable Object Sizes,
2018): what is kept between two uses holds a place for that long, and there are only so many places.

*Uses.* A request is certainly *in use* from 1 ns before its first token (each step takes that long) to its last one: it is in the
batch of every step in between. If it was preempted, that is only sure of the step of its first token. An adapter is in use while
a request of it is, anywhere. These *stretches* are parted by *gaps*.

*A stretch after a gap that was not held costs a load.* Take the first token that opens a stretch, on some replica. Either it is
the first use of the copy in its slot there, and each copy was brought in once: one activation. Or that copy served an earlier
use, and so it lay in its slot during the whole gap: the gap is *held*. Hence activations >= stretches - held gaps. Two copies of
one adapter at a time, and loads for nothing, only add to what is spent.

*Places.* Look at any moment, and on each replica at the step in hand or, between steps, at the next one. An adapter that is in use
is in the batch of one of these steps, and one whose gap is held on a replica is in a slot in the step there, since that copy
serves a later use. So they all lie in slots at once, also while load calls push running adapters out for a moment, and

    gaps held at t <= slots of all replicas - adapters in use at t      for every t.

*The most that can be held* under that rule: with equal costs, go through time and, whenever too many gaps are open, give up the
one that ends last (Belady's choice); by exchange no other set has more gaps, so the figure is exact for the rule. With unequal
costs, a sum over cost levels: sum of v_i = integral over x of the number of held gaps with v_i >= x, and each of these numbers is
at most its own optimum. With more than ``LEVELS`` distinct costs they are rounded up to so many first. Both err to the safe side.

*As routed.* The same on each replica alone, for the requests that went there, bounds every cache under the routing as it was. So
``spent`` falls into three parts: ``least``, what the routing added to it at least, and what another choice of what to keep could
at most have avoided.

*Tiers.* What is in a slot is in the host cache, so the same holds for reads from disk with the places of the host cache. Each
tier is bounded for itself; a sum of bounds is a bound. Tokens are seen at the first nanosecond that is not before them: an
interval covers the nanosecond that begins at t if it held at t itself, so rounding adds no overlap.

What it is not: a bound on waiting (a prefetch hides a load, and still does it), nor on what other moments would have allowed.

Cost: n log n in requests; some 100 bytes for each stretch.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Final, Literal

import msgspec

from loraledger.errors import InputFileError
from loraledger.replay.fleet.outcome import Outcome
from loraledger.replay.results.folder import RunTables
from loraledger.twin.profile import PS_PER_S

LEVELS: Final = 6
"""Distinct costs that are told apart: each takes one pass."""
_LAST_MOMENT: Final = 2**62
"""2116, in ns since the epoch: moments are kept in 64 bits."""
_FIRST: Final = -1
_LAST: Final = -2
"""Edges that belong to no gap: the beginning of an adapter's first stretch, the end of its last one."""

_USES: Final = """
SELECT adapter, replica, first_token_ns, coalesce(last_token_ns, first_token_ns), preemptions
FROM run.requests WHERE adapter IS NOT NULL AND replica IS NOT NULL AND first_token_ns IS NOT NULL ORDER BY first_token_ns
"""


class TierWork(msgspec.Struct, frozen=True):
    """Load work into one tier, in s of engine time. ``gpu``: activations; ``host``: reads from disk.

    ``each``: had every request brought its own adapter. ``spent``: what the run did. ``least``: what nobody could have avoided.
    ``least_as_routed``: the same with each request on the replica where it went.
    """

    tier: Literal["gpu", "host"]
    each: float
    spent: float
    least: float
    least_as_routed: float


class LoadWork(msgspec.Struct, frozen=True):
    """Over both tiers, in s: spent >= least_as_routed >= least, and so saved <= bound_as_routed <= bound."""

    uses: int
    """Requests with an adapter that got a first token."""
    each: float
    spent: float
    least: float
    saved: float
    """each - spent."""
    bound: float
    """The most that could have been saved: each - least."""
    bound_as_routed: float
    share: float | None
    """saved / bound; ``None`` when there was nothing to save."""
    tiers: tuple[TierWork, ...]


class Timeline:
    """When the adapters of one pool of places were in use and when they were not."""

    def __init__(self) -> None:
        self.uses: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._busy: list[int] = []  # until when, by adapter
        self._owner = array("i")  # of each gap, in order of ends
        self._when, self._edge = array("q"), array("q")  # ends and beginnings of stretches: gap << 1 | begins
        self._sorted = False

    def add(self, adapter: str, first: int, last: int) -> None:
        """A request whose first and last token came then, in ns; in order of first tokens. ``last`` = ``first`` if preempted."""
        self.uses[adapter] = self.uses.get(adapter, 0) + 1
        begin, number = first - 1, self._numbers.get(adapter)
        if number is None:
            self._numbers[adapter] = len(self._busy)
            self._busy.append(last)
            self._when.append(begin)
            self._edge.append(_FIRST)
            return
        busy = self._busy[number]
        if begin > busy:
            gap = len(self._owner)
            self._owner.append(number)
            self._when.extend((busy, begin))
            self._edge.extend((gap << 1, gap << 1 | 1))
        if last > busy:
            self._busy[number] = last

    def each(self, costs: Mapping[str, int]) -> int:
        """What it costs if each use brings its own adapter."""
        return sum(costs[adapter] * count for adapter, count in self.uses.items())

    def least(self, costs: Mapping[str, int], places: int | None) -> int:
        """What no cache of ``places`` places (``None``: any number) avoids, in the unit of ``costs`` (of bringing one in).

        Call it when all uses are in.
        """
        mine = [costs[name] for name in self._numbers]
        if places is None:
            return sum(mine)
        self._sort()
        gaps = sum(mine[number] for number in self._owner)
        held = below = 0
        for level, floor in _levels({mine[number] for number in self._owner}):
            held += (level - below) * self._held([cost >= floor for cost in mine], places)
            below = level
        return sum(mine) + gaps - min(held, gaps)

    def _sort(self) -> None:
        if self._sorted:
            return
        self._when.extend(self._busy)
        self._edge.extend([_LAST] * len(self._busy))
        order = sorted(range(len(self._when)), key=self._when.__getitem__)
        self._when = array("q", map(self._when.__getitem__, order))
        self._edge = array("q", map(self._edge.__getitem__, order))
        self._sorted = True

    def _held(self, counts: list[bool], places: int) -> int:
        """The most gaps that can be held at once, of the adapters that count."""
        wanted = bytearray(counts[number] for number in self._owner)
        heap: list[int] = []  # open gaps, the one that ends last first: minus its number, which is in order of ends
        held = active = now = 0
        room = places
        for when, edge in zip(self._when, self._edge, strict=True):
            if when != now:
                while active > room and active:
                    wanted[-heappop(heap)] = False
                    active -= 1
                now = when
            gap = edge >> 1
            if edge & 1:
                room -= 1
                if edge != _FIRST and wanted[gap]:
                    held += 1
                    active -= 1
                    if len(heap) > 2 * active + 1024:
                        heap = [entry for entry in heap if -entry > gap]
                        heapify(heap)
            else:
                room += 1
                if edge != _LAST and wanted[gap]:
                    active += 1
                    heappush(heap, -gap)
        return held


def load_work(tables: RunTables, outcome: Outcome) -> LoadWork | None:
    """Of the run that is open as ``run``; ``None`` when the outcome does not say what a load of each adapter used takes.

    Its costs have to be the least that they are on any replica; 0 slots or host entries stand for no fixed number. Raises
    InputFileError when rows and outcome cannot be of one run.
    """
    whole, there = Timeline(), {replica.replica: Timeline() for replica in outcome.replicas}
    _read(tables, outcome, whole, there)
    loads, activations = outcome.load_costs_ps, outcome.activation_costs_ps
    if whole.uses.keys() - loads.keys() or whole.uses.keys() - activations.keys():
        return None
    places = [(r.slots, r.host_entries, r.activation_ps, r.load_ps) for r in outcome.replicas]
    slots, entries, spent_gpu, spent_host = ([row[n] for row in places] for n in range(4))
    parts = [*there.values()]
    tiers = (
        _tier("gpu", whole, parts, activations, slots, sum(spent_gpu)),
        _tier("host", whole, parts, loads, entries, sum(spent_host)),
    )
    each, spent = sum(tier.each for tier in tiers), sum(tier.spent for tier in tiers)
    least = sum(tier.least for tier in tiers)
    bound = each - least
    as_routed = each - sum(tier.least_as_routed for tier in tiers)
    saved = each - spent
    share = saved / bound if bound > 0 else None
    return LoadWork(sum(whole.uses.values()), each, spent, least, saved, bound, as_routed, share, tiers)


def _read(tables: RunTables, outcome: Outcome, whole: Timeline, there: dict[str, Timeline]) -> None:
    """Every use of the record, into the fleet's timeline and its replica's."""
    calm = {replica.replica for replica in outcome.replicas if not replica.preemptions}
    for adapter, replica, first, last, preemptions in tables.stream(_USES):
        sure = replica in calm or preemptions == 0
        last = max(first, last) if sure else first
        if not 0 < first <= last < _LAST_MOMENT:
            raise InputFileError(f"the run's record has tokens at {first} and {last} ns; replay it again")
        if replica not in there:
            raise InputFileError(f"the run's record names replica {replica!r}, which the run did not have")
        whole.add(adapter, first, last)
        there[replica].add(adapter, first, last)


def _tier(
    tier: Literal["gpu", "host"],
    whole: Timeline,
    parts: list[Timeline],
    costs: Mapping[str, int],
    places: list[int],
    spent_ps: int,
) -> TierWork:
    """``places`` by replica; 0: no fixed number, adapters share its memory with KV."""
    least = whole.least(costs, sum(places) if all(places) else None)
    routed = sum(part.least(costs, own or None) for part, own in zip(parts, places, strict=True))
    each = whole.each(costs)
    return TierWork(tier, each / PS_PER_S, spent_ps / PS_PER_S, least / PS_PER_S, max(least, routed) / PS_PER_S)


def _levels(costs: set[int]) -> list[tuple[int, int]]:
    """(cost counted, least cost that counts as so much), rising; at most ``LEVELS``."""
    distinct = sorted(costs, reverse=True)
    stride = -(-len(distinct) // LEVELS) or 1
    groups = [distinct[at : at + stride] for at in range(0, len(distinct), stride)]
    return [(group[0], group[-1]) for group in reversed(groups)]
