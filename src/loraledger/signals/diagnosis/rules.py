"""Which mechanism explains the waiting: rules in order, what changed from outside before what followed inside.

Theory of operation. Everything that goes wrong raises misses, KV use and queues, so none of these tells causes apart. What does is
what came from *outside* the loop of cause and effect: a KV capacity, a process start, who is sent where, how long a load of equal
size takes, which adapters are asked for, how often, and how long prompts and answers are. These are held against the baseline
first. Their order is that of how little else could bring them about: nothing raises a process start or shrinks KV by itself; a
surge, in contrast, changes what clustering and load times look like. Only when nothing came from outside (or there is nothing to
compare with) do the figures from *inside* decide, and less surely.

An arrival surge also raises misses; it is the cause while the usual adapters are asked for more often, which a scan of rare
adapters or one hot adapter does not make them be. Longer prompts also fill KV: they are the cause when the engine is short of
compute, which slows the time between tokens, and KV is when that stayed as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from loraledger.signals.diagnosis import clustering as c
from loraledger.signals.diagnosis import demand as d
from loraledger.signals.diagnosis import misses as m
from loraledger.signals.diagnosis import pressure as k
from loraledger.signals.diagnosis import thresholds as at
from loraledger.signals.diagnosis import waiting as w
from loraledger.signals.diagnosis.verdict import Cause, Finding, Pool
from loraledger.signals.diagnosis.view import View, at_least, ratio, rise


class Signs(msgspec.Struct, frozen=True):
    """What the five steps found."""

    view: View
    demand: d.Demand
    misses: m.Misses
    waiting: w.Waiting
    clustered: c.Clustered
    kv: k.KvState

    @property
    def findings(self) -> tuple[Finding, ...]:
        """In order."""
        steps = (self.demand, self.misses, self.waiting, self.clustered, self.kv)
        return tuple(step.finding for step in steps)

    @property
    def limits(self) -> bool:
        """Whether there is anything to explain."""
        return self.waiting.limits or self.kv.chronic


class Ruling(msgspec.Struct, frozen=True):
    """A mechanism, and the rows that it rests on, the most telling first. ``outside``: something that came from outside says so."""

    pool: Pool
    cause: Cause
    rows: tuple[str, ...]
    outside: bool = True


_SLOW: Final = (m.LOAD_RATIO, m.LOAD_P50, m.HELD_SHARE, m.HIT_RATE)


def rulings(signs: Signs) -> list[Ruling]:
    """All mechanisms that the figures show, the one to name first; none when nothing got worse or is bad."""
    if not signs.limits:
        return []
    found = list(_outside(signs)) if signs.waiting.worse or signs.view.before is None else []
    return found or list(_inside(signs))[:1]


def _outside(signs: Signs) -> Iterator[Ruling]:
    for rule in (_floor, _restarts, _routing, _slow_loads, _mix, _arrivals, _hot, _lengths):
        if (ruling := rule(signs)) is not None:
            yield ruling


def _floor(signs: Signs) -> Ruling | None:
    kv, demand = signs.kv, signs.demand
    if kv.shrunk is None:
        return None
    pressed = kv.full or at_least(ratio(kv.usage), at.DEMAND)
    lengths = (demand.longer_prompts, demand.longer_answers)
    if kv.inferred and (demand.grew or any(lengths)):
        return None
    outgrown = demand.grew and at_least(demand.usual, 1 / max(kv.shrunk, 1e-9))
    if not pressed or outgrown:
        return None
    return Ruling("floor", "floor", (k.SHRUNK_TO, k.IMPLIED, *kv.signs, k.USAGE), not kv.inferred)


def _restarts(signs: Signs) -> Ruling | None:
    if not signs.kv.restarts and not signs.kv.down:
        return None
    return Ruling("adapters", "restarts", (k.RESTARTS, k.DOWN, m.HIT_RATE, m.LOADS))


def _routing(signs: Signs) -> Ruling | None:
    found, hottest = signs.clustered, signs.demand.popularity.hottest
    if not found.routing:
        return None
    hot = at_least(found.top_share, at.HALF) and found.top_adapter is not None
    if signs.view.before is not None:
        hot = hot and hottest == found.top_adapter
    rows = (c.BUSIEST, c.SHARE, c.ITS_WAIT, c.LEAST_WAIT)
    return Ruling("routing", "hot adapter", (c.TOP_ADAPTER, *rows)) if hot else Ruling("routing", "skew", rows)


def _slow_loads(signs: Signs) -> Ruling | None:
    misses, waiting = signs.misses, signs.waiting
    felt = misses.held_more or waiting.part == "preparation" or _hits_fare_well(signs)
    if not misses.slow_loads or not felt:
        return None
    return Ruling("adapters", "slow loads", _SLOW)


def _hits_fare_well(signs: Signs) -> bool:
    """Whether those whose adapter is in a slot wait about as before: then it is not compute, and not KV, that is short."""
    times = ratio(signs.waiting.warm)
    return times is not None and times < at.MEAN_RATIO


def _mix(signs: Signs) -> Ruling | None:
    """Other adapters are asked for than before, or more of them alike, and it shows in misses or slots."""
    found = signs.demand.popularity
    changed = at_least(found.rare, at.HOT) or at_least(ratio(found.diversity), at.DIVERSITY)
    if not changed or not (signs.misses.grew or _more_over(signs)):
        return None
    return _adapters(signs, outside=True)


def _more_over(signs: Signs) -> bool:
    return at_least(rise(signs.misses.over), at.OVER_SLOTS)


def _adapters(signs: Signs, outside: bool) -> Ruling:
    """Rare adapters that come and go cost loads however many places there are; others lack places, or are only not at hand."""
    found, rare = signs.misses, at_least(signs.demand.popularity.rare, at.HOT)
    short = found.short_of_slots or (found.lacks_slots and found.capacity is not False)
    if found.thrashes or (short and not rare):
        rows: tuple[str, ...] = (m.STARVED_ADAPTER, m.STARVED_WAIT) if found.starved is not None else ()
        rows += (m.WORKING, m.SLOTS) if found.lacks_slots else (m.OVER, m.MOST_IN_FLIGHT)
        return Ruling("adapters", "slots", (*rows, m.HIT_RATE, m.BLOCKED), outside)
    cold = (m.HIT_RATE, m.LOADS, m.DISTINCT, w.PREPARATION, m.HELD_SHARE)
    return Ruling("adapters", "cold adapters", (d.RARE_SHARE, *cold) if rare else cold, outside)


def _arrivals(signs: Signs) -> Ruling | None:
    demand = signs.demand
    if not demand.grew or demand.usual is None:
        return None
    longer = [times for times in (demand.prompt, demand.answer) if times is not None]
    if signs.kv.full and longer and max(longer) > demand.usual:
        return None
    return Ruling("demand", "arrivals", (d.ARRIVALS, d.USUAL, d.IN_FLIGHT))


def _lengths(signs: Signs) -> Ruling | None:
    demand, kv = signs.demand, signs.kv
    if not demand.longer_prompts and not demand.longer_answers:
        return None
    mostly_prompts = demand.longer_prompts and (demand.prompt or 0) >= (demand.answer or 0)
    short_of_compute = mostly_prompts and at_least(signs.waiting.itl, at.COMPUTE_BOUND)
    if kv.full and kv.more and not short_of_compute:
        lengths = (d.PROMPT, d.ANSWER) if mostly_prompts else (d.ANSWER, d.PROMPT)
        return Ruling("kv", "kv", (kv.signs[0], *lengths, *kv.signs[1:]))
    if demand.longer_prompts:
        return Ruling("demand", "longer prompts", (d.PROMPT, d.PROMPTS, d.ARRIVALS))
    if _more_over(signs) or (signs.misses.short_of_slots and _hits_fare_well(signs)):
        return Ruling("adapters", "slots", (m.OVER, m.MOST_IN_FLIGHT, m.SLOTS, d.ANSWER))
    return Ruling("demand", "longer answers", (d.ANSWER, d.IN_FLIGHT, d.ARRIVALS))


def _hot(signs: Signs) -> Ruling | None:
    """One adapter grew, and with it all arrivals, and it is spread: more is asked for, whoever asks."""
    if signs.demand.popularity.hottest is None or not signs.demand.more or signs.clustered.routing:
        return None
    return Ruling("demand", "arrivals", (d.HOTTEST, d.HOT_SHARE, d.ARRIVALS))


def _inside(signs: Signs) -> Iterator[Ruling]:
    """What is short, when nothing says why it became so."""
    misses, waiting, kv = signs.misses, signs.waiting, signs.kv
    alone = signs.view.before is None
    if kv.chronic or (kv.full and kv.more):
        yield Ruling("kv", "kv", (*kv.signs, k.USAGE, k.FULL), outside=False)
    again = misses.capacity is True and misses.hits.gpu_rate is not None and misses.hits.gpu_rate <= at.HALF
    if misses.grew or misses.short_of_slots or again:
        yield _adapters(signs, outside=False)
    if misses.slow_loads and waiting.worse:
        yield Ruling("adapters", "slow loads", _SLOW, outside=False)
    if at_least(misses.load_time, signs.view.now.slo_s) and misses.hits.misses and _hits_fare_well(signs):
        yield Ruling("adapters", "slow loads", (m.LOAD_P50, m.LOADS, m.HIT_RATE), outside=False)
    prepared, prepared_before = waiting.preparation
    more_prepared = alone or waiting.part == "preparation" or at_least(rise((prepared, prepared_before)), at.HELD)
    held = at_least(misses.held[0], at.HELD) and (alone or misses.held_more)
    if (at_least(prepared, at.PREPARATION) and more_prepared) or held:
        yield _adapters(signs, outside=False)
    if signs.demand.grew_slightly:
        yield Ruling("demand", "arrivals", (d.USUAL, d.ARRIVALS), outside=False)
    queues = waiting.part in ("gateway queue", "engine queue", "prefill", "engine, undivided")
    if waiting.bad and not waiting.worse and queues:
        yield Ruling(
            "demand", "arrivals", (w.LARGEST_PART, w.LARGEST_SHARE, w.PART, w.PART_SHARE, d.ARRIVALS), outside=False
        )
