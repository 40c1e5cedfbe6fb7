"""Two pictures that deserve more words than a row: a working set that thrashes the slots, and an adapter that gets none.

Theory of operation. *Thrash*: more adapters than slots, used again and again, and no hits. Under LRU each use then comes after as
many others as there are slots, which is what use in turn does; first-in-first-out fares no better there. A host entry is not a
slot, so host memory spares reads and no activation.

*Starvation*: vLLM runs at most as many distinct adapters in a step as there are slots. A request beyond is passed over by later
ones of adapters that have a slot, without a limit (the twin does the same), so adapters that keep coming keep others out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from loraledger.signals.diagnosis import misses as m
from loraledger.signals.diagnosis import pressure as k
from loraledger.signals.diagnosis.rules import Signs
from loraledger.signals.diagnosis.words import Draft, Words
from loraledger.units import format_bytes


def details(signs: Signs, words: Words) -> Iterator[Draft]:
    """What else is to be said."""
    if signs.misses.thrashes:
        yield (
            f"working set {words.text(m.WORKING)} > {words.text(m.SLOTS)}: hit rate {words.text(m.HIT_RATE)}, under LRU and "
            "FIFO alike with cyclic use, as each adapter comes again only after the slots went to others",
            (m.WORKING, m.SLOTS, m.HIT_RATE),
        )
        yield (
            f"{words.text(m.MISSED)} missed, of which {words.value(m.FIRST)} at most were first uses",
            (m.MISSED, m.FIRST),
        )
    if signs.misses.starved is not None:
        yield from _starvation(signs, words)


def _starvation(signs: Signs, words: Words) -> Iterator[Draft]:
    name, count = words.value(m.STARVED_ADAPTER), words.value(m.BLOCKED)
    asked = words.value(m.STARVED_REQUESTS)
    many = f"{count if count is not None else asked} requests wait for a slot, {asked} of them for {name}"
    if count == asked or count is None:
        many = f"{asked} requests for {name} wait for a slot"
    free = f"the others wait {words.text(m.USUAL_WAIT)}, KV usage is {words.text(k.USAGE)}"
    rows: tuple[str, ...] = (m.STARVED_ADAPTER, m.STARVED_REQUESTS, m.USUAL_WAIT)
    if not signs.kv.full:
        yield f"{many} though GPU and KV are free: {free}", (*rows, k.USAGE)
    if signs.kv.full or words.value(k.USAGE) is None:
        yield f"{many}: the others wait {words.text(m.USUAL_WAIT)}", rows
    waits = words.known(m.wait_of(each) for each in signs.view.now.adapters)
    yield "; ".join(f"{each} {words.text(each)}" for each in waits), waits
    yield (
        f"starvation: {name} gets no slot while adapters that hold one keep being asked for; the engine knows no fairness",
        (m.STARVED_ADAPTER, m.STARVED_WAIT, m.USUAL_WAIT),
    )


def slot_remedies(signs: Signs, words: Words) -> Iterator[Draft]:
    """What helps where slots are short, with what it costs in KV."""
    places, slots = signs.misses.working, words.number(m.SLOTS)
    if slots and signs.misses.starved is not None:
        yield from _for_the_starved(signs, words, int(slots))
    elif slots and places is not None and places.adapters > slots:
        lacking, replicas = places.adapters - int(slots), math.ceil(places.adapters / slots)
        yield (
            f"{places.adapters} slots or more, which hold the working set; KV cost: {_cost(words, lacking)}",
            (m.WORKING, m.SLOTS),
        )
        yield (
            f"split the adapters over {replicas} replicas, so that each holds its own: {places.adapters} loads in all; KV cost: "
            "none on a replica that is there already",
            (m.WORKING, m.SLOTS),
        )
    else:
        yield f"more slots; KV cost of one: {_cost(words, 1)}", (m.OVER,)


def _for_the_starved(signs: Signs, words: Words, slots: int) -> Iterator[Draft]:
    places, name = signs.misses.working, words.value(m.STARVED_ADAPTER)
    most = slots + 1 if places is None else max(slots + 1, places.in_flight_max or 0)
    more = "another slot" if most == slots + 1 else f"{most - slots} more slots"
    yield f"{more}, {most} in all; KV cost: {_cost(words, most - slots)}", (m.SLOTS, m.STARVED_ADAPTER)
    yield (
        f"{name} elsewhere: on a replica with a free slot; KV cost: none where that is there already",
        (m.STARVED_ADAPTER,),
    )
    yield (
        f"draining: hold back new requests of the other adapters until {name} has run; KV cost: none",
        (m.STARVED_ADAPTER, m.STARVED_WAIT),
    )


def _cost(words: Words, slots: int) -> str:
    size = words.number(m.LARGEST)
    if size is None:
        return "not known here, `loraledger budget` works it out"
    least = format_bytes(int(size) * slots)
    return f"{least} at least, by the largest adapter; slots are padded, `loraledger budget` works it out"
