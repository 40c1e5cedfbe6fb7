"""Step 2: do requests miss their adapters, what do loads cost, and are there places for those that are used at once?

Theory of operation. Misses of the *first* use on a replica cannot be spared by any number of places; only those that come again can
(Hill's compulsory and capacity misses). At most one first use a replica and adapter is counted, so ``first`` is an upper bound.
What moves cost everybody is the share of time that loads and activations hold an engine: each stalls the whole step. More adapters
in flight than slots wait in the engine without a miss to be seen anywhere, hence ``over_slots``.

Load times are compared at equal size (``facts.size_class``): larger adapters are no slower disk. Nor is a busy engine: a load waits
for the step in hand, so what it takes must have grown by several times what the time between tokens did.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from loraledger.signals.diagnosis.statistics import share_z
from loraledger.signals.diagnosis.thresholds import (
    AGAIN,
    HELD,
    LOAD_STEPS,
    LOAD_TIME,
    LOADS_TIMED,
    MISSES,
    OVER_SLOTS,
    SIGMA,
    STARVED,
    THRASH,
)
from loraledger.signals.diagnosis.verdict import Finding, Verdict
from loraledger.signals.diagnosis.view import Both, Sheet, View, at_least, largest, plain, quotient, rise
from loraledger.signals.figures import Group, Hits, Moves, Signals, Spread, WorkingSet

QUESTION: Final = "Do requests miss their adapters, and what do loads and full slots cost?"
HIT_RATE: Final = "GPU hit rate"
HOST_RATE: Final = "host hit rate of the misses"
MISSED: Final = "misses"
FIRST: Final = "first uses among the misses, at most"
DISTINCT: Final = "distinct adapters"
UNDECIDED: Final = "requests of unknown class"
LOADS: Final = "loads a minute"
ACTIVATIONS: Final = "activations a minute"
EVICTIONS: Final = "slot evictions a minute"
LOAD_P50: Final = "load time, median"
LOAD_P90: Final = "load time, 90th percentile"
LOAD_RATIO: Final = "load time at equal size"
HELD_SHARE: Final = "share of time held by moves"
WORKING: Final = "working set"
SLOTS: Final = "slots"
HOST_ENTRIES: Final = "host entries"
MOST_IN_FLIGHT: Final = "distinct adapters in flight, most"
LARGEST: Final = "bytes of the largest adapter asked for"
OVER: Final = "time with more in flight than slots"
BLOCKED: Final = "requests blocked for a slot, most"
STARVED_ADAPTER: Final = "adapter kept waiting longest"
STARVED_WAIT: Final = "its oldest wait"
USUAL_WAIT: Final = "oldest wait of the median adapter"
STARVED_REQUESTS: Final = "its requests"
NANOSECOND: Final = 1e-9
"""The least duration that a record holds, in s."""
LISTED: Final = 4
"""Adapters whose oldest wait is shown: those that waited longest."""


def wait_of(adapter: str) -> str:
    """The name of the row of an adapter's oldest wait."""
    return f"oldest wait of {plain(adapter)}"


class Misses(msgspec.Struct, frozen=True):
    """What the step found. ``fewest``: the working set and places of the replica that lacks most places."""

    finding: Finding
    hits: Hits
    grew: bool
    """The share of misses grew."""
    slow: float | None
    """Ratio of load times at equal size."""
    held: Both
    capacity: bool | None
    """More than half of the misses were no first use."""
    working: WorkingSet | None
    over: Both
    starved: str | None
    load_time: float | None
    """Median, in s."""
    step_growth: float
    """Growth of the median load time over that of the time between tokens; infinite where that did not grow."""

    @property
    def lacks_slots(self) -> bool:
        """Whether a replica was asked for more adapters than it has slots."""
        places = self.working
        return places is not None and places.slots is not None and places.adapters > places.slots

    @property
    def thrashes(self) -> bool:
        """Whether what does not fit is used again and again, and no use finds it: use in turn."""
        rate = self.hits.gpu_rate
        if self.working is None or not self.lacks_slots or rate is None or rate > THRASH:
            return False
        return self.hits.adapter_bearing >= AGAIN * self.working.adapters

    @property
    def slow_loads(self) -> bool:
        """Whether loads take longer, and not only because steps do."""
        return at_least(self.slow, LOAD_TIME) and self.step_growth >= LOAD_STEPS

    @property
    def held_more(self) -> bool:
        """Whether moves hold engines for a larger share of the time."""
        return at_least(rise(self.held), HELD)

    @property
    def short_of_slots(self) -> bool:
        """Whether more adapters are in flight than slots for a good part of the time."""
        return at_least(self.over[0], OVER_SLOTS) or self.starved is not None


def misses(view: View) -> Misses:
    """Take the step."""
    sheet, hits = Sheet(), view.hits(view.total)
    first = _first(view)
    _put_hits(sheet, view, first)
    slow = _slow(view)
    held = view.signals(_held)
    _put_moves(sheet, view, slow, held)
    working, over = _tightest(view.now), view.signals(_over)
    _put_places(sheet, view, working, over)
    starved = _starved(sheet, view, over[0])
    grew = view.before is not None and _grew(hits, view.hits(view.before))
    found = Misses(
        finding=Finding(2, QUESTION, sheet.evidence, "unknown", ""),
        hits=hits,
        grew=grew,
        slow=slow,
        held=held,
        capacity=None if not hits.misses or first is None else 2 * first < hits.misses,
        working=working,
        over=over,
        starved=starved,
        load_time=_took(view.total.moves, "p50"),
        step_growth=_step_growth(view),
    )
    verdict, sentence = _verdict(view, found)
    return msgspec.structs.replace(found, finding=Finding(2, QUESTION, sheet.evidence, verdict, sentence))


def _verdict(view: View, found: Misses) -> tuple[Verdict, str]:
    alone = view.before is None
    said = [
        text
        for is_so, text in (
            (found.grew, "more requests miss their adapter"),
            (found.slow_loads, "loads take longer"),
            (found.held_more, "loads and activations hold the engines longer"),
            (alone and at_least(found.held[0], HELD), "loads and activations hold the engines"),
            (found.short_of_slots, "more adapters are in flight than there are slots"),
        )
        if is_so
    ]
    if said:
        return "seen", f"Adapters cost more than they should: {', '.join(said)}."
    if found.hits.gpu_rate is None and found.held[0] is None:
        return "unknown", "No request's adapter was found in a known tier, and no move was timed."
    if alone and found.hits.misses:
        return "unknown", "There are misses; without a baseline nothing says whether more than usual."
    return "not seen", "Adapters are found in their slots as before."


def _put_hits(sheet: Sheet, view: View, first: int | None) -> None:
    sheet.put(HIT_RATE, view.both(lambda group: view.hits(group).gpu_rate), "share")
    sheet.put(HOST_RATE, view.both(lambda group: view.hits(group).host_rate), "share")
    sheet.put(MISSED, view.both(lambda group: view.hits(group).misses), "requests")
    sheet.put_one(FIRST, first, "requests")
    sheet.put(DISTINCT, view.both(lambda group: group.distinct_adapters), "adapters")
    sheet.put(UNDECIDED, view.both(lambda group: view.hits(group).unknown + view.hits(group).undecided), "requests")


def _put_moves(sheet: Sheet, view: View, slow: float | None, held: Both) -> None:
    def rate(read: str) -> Both:
        def of(signals: Signals) -> float | None:
            moves = None if signals.total is None else signals.total.moves
            return None if moves is None else quotient(getattr(moves, read), signals.window.minutes)

        return view.signals(of)

    sheet.put(LOADS, rate("loads"), "a minute")
    sheet.put(ACTIVATIONS, rate("activations"), "a minute")
    sheet.put(EVICTIONS, rate("slot_evictions"), "a minute")
    sheet.put(LOAD_P50, view.both(lambda group: _took(group.moves, "p50")), "s")
    sheet.put(LOAD_P90, view.both(lambda group: _took(group.moves, "p90")), "s")
    sheet.put_one(LOAD_RATIO, slow, "times")
    sheet.put(HELD_SHARE, held, "share")


def _put_places(sheet: Sheet, view: View, working: WorkingSet | None, over: Both) -> None:
    before = None if view.base is None else _tightest(view.base)
    sheet.put(WORKING, (_of(working, "adapters"), _of(before, "adapters")), "adapters")
    sheet.put(SLOTS, (_of(working, "slots"), _of(before, "slots")), "slots")
    sheet.put(HOST_ENTRIES, (_of(working, "host_entries"), _of(before, "host_entries")), "adapters")
    sheet.put(MOST_IN_FLIGHT, view.signals(_in_flight), "adapters")
    sheet.put(OVER, over, "share")
    sizes = [view.facts.adapter_bytes.get(name) for name in view.now.adapters]
    sheet.put_one(LARGEST, largest(sizes), "bytes")
    sheet.put(BLOCKED, view.signals(_blocked), "requests")


def _took(moves: Moves | None, which: str) -> float | None:
    spread = None if moves is None else moves.took.get("load")
    return None if spread is None or not spread.n else float(getattr(spread, which))


def _of(working: WorkingSet | None, which: str) -> int | None:
    value = None if working is None else getattr(working, which)
    return value if isinstance(value, int) else None


def _grew(now: Hits, before: Hits) -> bool:
    share, share_before = quotient(now.misses, now.adapter_bearing), quotient(before.misses, before.adapter_bearing)
    z = share_z(now.misses, now.adapter_bearing, before.misses, before.adapter_bearing)
    return z >= SIGMA and at_least(rise((share, share_before)), MISSES)


def _first(view: View) -> int | None:
    """First uses among the misses: of each adapter as many as replicas served it, and no more than it missed."""
    if not view.now.adapters:
        return None
    return sum(min(view.hits(group).misses, group.replicas) for group in view.now.adapters.values())


def _slow(view: View) -> float | None:
    """Ratio of median load times: the geometric mean over size classes that both windows have, by loads."""
    if view.before is None or view.total.moves is None or view.before.moves is None:
        return None
    now, before = view.total.moves, view.before.moves
    pairs = [(spread, before.took_by_size.get(size)) for size, spread in now.took_by_size.items()]
    logs = [_log_ratio(*pair) for pair in pairs]
    known = [each for each in logs if each is not None] or [
        each for each in (_log_ratio(now.took.get("load"), before.took.get("load")),) if each is not None
    ]
    weight = sum(count for _, count in known)
    return math.exp(sum(log * count for log, count in known) / weight) if weight else None


def _step_growth(view: View) -> float:
    load = rise(view.both(lambda group: _took(group.moves, "p50")))
    step = rise(view.both(lambda group: group.itl_mean if group.itl is None else group.itl.mean))
    return math.inf if load is None or step is None or step < NANOSECOND else load / step


def _log_ratio(now: Spread | None, before: Spread | None) -> tuple[float, int] | None:
    if now is None or before is None or min(now.n, before.n) < LOADS_TIMED or min(now.p50, before.p50) < NANOSECOND:
        return None
    return math.log(now.p50 / before.p50), now.n


def _held(signals: Signals) -> float | None:
    """Share of time that moves held the engine, of the replica where it is largest; of the fleet their mean."""
    seconds = signals.window.seconds
    by_replica = [_moved(group, seconds) for group in signals.replicas.values()]
    if (most := largest(by_replica)) is not None:
        return most
    fleet = None if signals.total is None else _moved(signals.total, seconds)
    return quotient(fleet, max(1, len(signals.replicas)))


def _moved(group: Group, seconds: float) -> float | None:
    """Moves times the median of those that were timed: many are not, and the mean has waits of loads for each other in it."""
    moves = group.moves
    if moves is None or not moves.took:
        return None
    counts = {"load": moves.loads, "activation": moves.activations}
    return quotient(sum(counts.get(name, spread.n) * spread.p50 for name, spread in moves.took.items()), seconds)


def _sets(signals: Signals) -> list[WorkingSet]:
    found = [group.working_set for group in signals.replicas.values() if group.working_set is not None]
    if found or signals.total is None or signals.total.working_set is None:
        return found
    return [signals.total.working_set]


def _tightest(signals: Signals) -> WorkingSet | None:
    """The working set that exceeds its slots by most; where slots are not known, the largest."""
    return max(_sets(signals), key=lambda each: (each.adapters - (each.slots or 0), each.adapters), default=None)


def _over(signals: Signals) -> float | None:
    return largest(each.over_slots for each in _sets(signals))


def _in_flight(signals: Signals) -> float | None:
    return largest(each.in_flight_max for each in _sets(signals))


def _blocked(signals: Signals) -> float | None:
    found = [group.pressure for group in signals.replicas.values()]
    found += [] if signals.total is None else [signals.total.pressure]
    return largest(pressure.blocked_max for pressure in found if pressure is not None)


def _starved(sheet: Sheet, view: View, over: float | None) -> str | None:
    """The adapter that waited far longer than the others while adapters in flight exceeded the slots."""
    waits = {name: group.oldest_wait for name, group in view.now.adapters.items()}
    known = sorted((wait, name) for name, wait in waits.items() if wait is not None)
    if len(known) < 3:  # one of two is the longest by chance
        return None
    wait, name = known[-1]
    usual = known[(len(known) - 1) // 2][0]
    sheet.put_one(STARVED_ADAPTER, name)
    sheet.put_one(STARVED_WAIT, wait, "s")
    sheet.put_one(USUAL_WAIT, usual, "s")
    for each, other in known[-LISTED:]:
        sheet.put_one(wait_of(other), each, "s")
    sheet.put_one(STARVED_REQUESTS, view.now.adapters[name].requests, "requests")
    blocked = at_least(_blocked(view.now), 1) or at_least(over, OVER_SLOTS)
    starved = blocked and wait > view.now.slo_s and wait >= STARVED * usual
    return name if starved else None
