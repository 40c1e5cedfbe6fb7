"""The least that any cache of so many places could have brought in, given when its contents were in use.

Theory of operation. Given are moments: for each request with an adapter, when its first and its last token came.
Whatever is kept where, and wherever requests are sent, the same requests at the same moments need at least ``Timeline.least``
of loads. The idea is PFOO's (Berger, Beckmann, Harchol-Balter: Practical Bounds on Optimal Caching with Variable Object Sizes,
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

Tokens are seen at the first nanosecond that is not before them: an interval covers the nanosecond that begins at t if it held at t
itself, so rounding adds no overlap. What it is not: a bound on waiting (a prefetch hides a load, and still does it), nor on what
other moments would have allowed.

Cost: n log n in requests; some 100 bytes for each stretch.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Final

LEVELS: Final = 6
"""Distinct costs that are told apart: each takes one pass."""
_FIRST: Final = -1
_LAST: Final = -2
"""Edges that belong to no gap: the beginning of an adapter's first stretch, the end of its last one."""


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


def _levels(costs: set[int]) -> list[tuple[int, int]]:
    """(cost counted, least cost that counts as so much), rising; at most ``LEVELS``."""
    distinct = sorted(costs, reverse=True)
    stride = -(-len(distinct) // LEVELS) or 1
    groups = [distinct[at : at + stride] for at in range(0, len(distinct), stride)]
    return [(group[0], group[-1]) for group in reversed(groups)]
