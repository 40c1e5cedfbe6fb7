"""Which runs are needed to find how many of an offer, with how many slots, keep the objectives.

Theory of operation. Two numbers are looked for: the *units*, how often the offer is taken, and the slots of a replica, which are
paid for in KV. Each pair costs a replay, so few are tried:

1. *Units*, with the middle of the ladder of slots: doubled until the objectives are met, then bisected.
2. *Slots*, at those units: uphill from the middle, a step of the ladder at a time, as long as it gets better. Few slots wait for
   adapters, many leave too little KV: between them lies one best number, of which noise may hide a neighbour.
3. One unit less, uphill again from there: fewer replicas want other slots. As long as the objectives are still met. Where arrivals
   outrun service with the best slots, others are not tried.

This is pure: a search is a generator that yields what it wants tried and is sent how that went. So many of them are driven side
by side (``drive``), and the same answers lead to the same tries. It is no exhaustive search; what was tried is part of the
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeAlias


class Try(NamedTuple):
    """What is to be replayed."""

    units: int
    slots: int


class Judged(NamedTuple):
    """How a try went. ``merit``: the larger one of two is better. ``overrun``: arrivals outran service."""

    meets: bool
    merit: tuple[float, ...]
    overrun: bool = False


class Found(NamedTuple):
    """The end of a search: the fewest units that meet with their best slots, else the best of the most units."""

    best: Try
    meets: bool
    tried: tuple[Try, ...]
    """In order."""


Search: TypeAlias = Generator[Try, Judged, Found]


def search(ladder: Sequence[int], most: int, least: int = 1) -> Search:
    """Look through ``ladder`` (slots, rising) and ``least`` to ``most`` units. ``ValueError``: there is nothing to look through."""
    if not ladder or list(ladder) != sorted(set(ladder)) or not 1 <= least <= most:
        raise ValueError("a search needs slots that rise, and at least one unit")
    looking = _Looking(ladder)
    middle = len(ladder) // 2
    units = yield from looking.units(middle, least, most)
    place = yield from looking.uphill(middle, units)
    while units > least:
        beside = yield from looking.at(units - 1, place)
        fewer = place if beside.overrun else (yield from looking.uphill(place, units - 1))
        if not (yield from looking.at(units - 1, fewer)).meets:
            break
        units, place = units - 1, fewer
    best = Try(units, ladder[place])
    return Found(best, looking.known[best].meets, tuple(looking.known))


def drive(searches: Sequence[Search], ask: Callable[[list[tuple[int, Try]]], list[Judged]]) -> list[Found]:
    """Carry all ``searches`` on in rounds: ``ask`` is given one try of each that goes on, with its number."""
    found: dict[int, Found] = {}
    waiting: dict[int, Try] = {number: next(one) for number, one in enumerate(searches)}
    while waiting:
        asked = list(waiting.items())
        waiting = {}
        for (number, _), judged in zip(asked, ask(asked), strict=True):
            try:
                waiting[number] = searches[number].send(judged)
            except StopIteration as ended:
                found[number] = ended.value
    return [found[number] for number in range(len(searches))]


class _Looking:
    """One search. ``known``: each try once."""

    def __init__(self, ladder: Sequence[int]) -> None:
        self.ladder = ladder
        self.known: dict[Try, Judged] = {}

    def at(self, units: int, place: int) -> Generator[Try, Judged, Judged]:
        """How the try went; asked for only once."""
        one = Try(units, self.ladder[place])
        if one not in self.known:
            self.known[one] = yield one
        return self.known[one]

    def units(self, place: int, least: int, most: int) -> Generator[Try, Judged, int]:
        """The fewest that meet with these slots, if more never do worse; ``most`` where none does."""
        low, high = least - 1, least
        while not (yield from self.at(high, place)).meets:
            if high == most:
                return most
            low, high = high, min(2 * high, most)
        while high - low > 1:
            half = (low + high) // 2
            if (yield from self.at(half, place)).meets:
                high = half
            else:
                low = half
        return high

    def uphill(self, place: int, units: int) -> Generator[Try, Judged, int]:
        """The place on the ladder beside which nothing is better, going from ``place``."""
        for step in (1, -1):
            best = place
            while 0 <= best + step < len(self.ladder):
                here = yield from self.at(units, best)
                there = yield from self.at(units, best + step)
                if there[:2] <= here[:2]:
                    break
                best += step
            if best != place:
                return best
        return place
