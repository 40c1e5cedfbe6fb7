"""What would help and what would not, by mechanism, each held against the row that says so.

Theory of operation. What people reach for first is named with the reason why it would not help: more slots against a surge, more
host memory against slots that are short, more replicas against a skew. The reason is always a figure of this very window; where
that is unknown the claim is not made. The last draft of each rests on the rows of the ruling itself, so that one is always there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from loraledger.signals.diagnosis import clustering as c
from loraledger.signals.diagnosis import demand as d
from loraledger.signals.diagnosis import misses as m
from loraledger.signals.diagnosis import pressure as k
from loraledger.signals.diagnosis import waiting as w
from loraledger.signals.diagnosis.details import slot_remedies
from loraledger.signals.diagnosis.rules import Ruling, Signs
from loraledger.signals.diagnosis.verdict import Cause, Claim
from loraledger.signals.diagnosis.words import Draft, Words

CAUSES: Final[dict[Cause, str]] = {
    "arrivals": "more requests arrive than are served in time",
    "longer prompts": "prompts got longer",
    "longer answers": "answers got longer",
    "cold adapters": "adapters are asked for that are not at hand",
    "slow loads": "loads of adapters take longer",
    "slots": "more adapters are in use than there are slots",
    "restarts": "engines started again and lost what they held",
    "hot adapter": "one adapter overloads one replica",
    "skew": "one replica gets more than its share",
    "kv": "requests in flight fill the KV cache",
    "floor": "KV lost memory to something else",
    "none": "nothing got worse",
}
"""The mechanism as a person says it."""

_HELPS: Final[dict[Cause, tuple[str, ...]]] = {
    "arrivals": ("another replica", "limits of tenants, so that the surge waits and not everybody"),
    "longer prompts": ("another replica", "tighter token limits for tenants with long prompts"),
    "longer answers": ("another replica", "a lower max_tokens for tenants with long answers"),
    "cold adapters": (
        "a lower limit of loads a minute, so that they stall the others less",
        "prewarming those that come back",
    ),
    "slow loads": (
        "a faster disk, or the store on a local one",
        "more host entries, which spare reads; they take host memory",
    ),
    "restarts": ("finding what ends the engines: their logs around these moments", "prewarming after a start"),
    "hot adapter": ("the adapter on a second replica", "a policy that leaves a busy replica"),
    "skew": ("a policy that leaves a busy replica", "a look at pins, placements and drained replicas"),
    "kv": (
        "a lower max_tokens, or fewer requests at once for tenants with long answers",
        "slots that are not needed, as KV",
    ),
    "floor": ("a look at what took the memory: weights, slots, rank, another process (`loraledger ledger`)",),
}


def remedies(signs: Signs, ruling: Ruling, words: Words) -> tuple[Claim, ...]:
    """What would help, by the rows of ``ruling``."""
    if ruling.cause == "slots" and (found := words.claims(slot_remedies(signs, words))):
        return found
    rows = words.known(ruling.rows)[:2]
    helps = _HELPS.get(ruling.cause, ("another slot, or the adapters split over replicas",))
    return words.claims((text, rows) for text in helps)


def not_helping(signs: Signs, ruling: Ruling, words: Words) -> tuple[Claim, ...]:
    """What would not help and why, the most tempting first."""
    claims = words.claims(_NOT[ruling.cause](signs, words))
    return claims or words.claims(((_LAST[ruling.pool], words.known(ruling.rows)[:1]),))


_LAST: Final = {
    "demand": "another split of the same memory: as much work stays to be done",
    "adapters": "more KV: it holds no adapter",
    "routing": "more slots or KV everywhere: the others have room already",
    "kv": "more slots: they take memory from KV",
    "floor": "more slots: they take still more from KV",
    "nothing": "any change: nothing got worse",
}


def _arrivals(signs: Signs, words: Words) -> Iterator[Draft]:
    if not signs.misses.grew:
        yield f"more slots: the GPU hit rate did not fall ({words.text(m.HIT_RATE)})", (m.HIT_RATE,)
    if not signs.clustered.routing:
        yield "another routing policy: no replica waits alone", (c.IMBALANCE,)


def _cold(signs: Signs, words: Words) -> Iterator[Draft]:
    if signs.misses.capacity is False:
        yield "more slots or host entries: most misses are first uses", (m.MISSED, m.FIRST)
    if not signs.kv.full:
        yield f"more KV: it has room ({words.text(k.USAGE)} in use)", (k.USAGE,)


def _slow(signs: Signs, words: Words) -> Iterator[Draft]:
    if not signs.misses.grew:
        yield (
            f"more slots: as many requests miss as before, each waits longer ({words.text(m.LOAD_P50)})",
            (
                m.HIT_RATE,
                m.LOAD_P50,
            ),
        )
    else:
        yield "another eviction rule: what is loaded at all takes longer", (m.LOAD_P50,)


def _slots(signs: Signs, words: Words) -> Iterator[Draft]:
    if signs.misses.thrashes:
        yield "more host memory: a host entry is no slot, and each use needs one", (m.WORKING, m.SLOTS)
        yield "another eviction rule: with cyclic use LRU and FIFO alike hit nothing", (m.HIT_RATE, m.WORKING, m.SLOTS)
    elif signs.misses.short_of_slots:
        yield "more host memory: what is in flight waits for a slot, not for a read", (m.SLOTS,)
    if not signs.kv.full:
        yield f"more KV: it has room ({words.text(k.USAGE)} in use)", (k.USAGE,)


def _restarts(signs: Signs, words: Words) -> Iterator[Draft]:
    yield "more slots: a start empties them, however many there are", (k.RESTARTS,)
    yield "more slots: an engine that is down holds none", (k.DOWN,)


def _routing(signs: Signs, words: Words) -> Iterator[Draft]:
    least = words.text(c.LEAST)
    yield f"more slots or replicas: {least} has room (it waits {words.text(c.LEAST_WAIT)})", (c.LEAST, c.LEAST_WAIT)
    yield f"more slots or replicas: {least} gets hardly a request", (c.LEAST, c.SHARE)


def _kv(signs: Signs, words: Words) -> Iterator[Draft]:
    if not signs.misses.grew:
        yield (
            f"more slots: they take memory from KV, and the hit rate is no worse ({words.text(m.HIT_RATE)})",
            (m.HIT_RATE,),
        )
    yield "another routing policy: no replica waits alone", (c.IMBALANCE,)


def _floor(signs: Signs, words: Words) -> Iterator[Draft]:
    if not signs.demand.grew:
        yield "limits of tenants: no more is asked for than before", (d.USUAL,)
    yield "more slots: they take still more from KV", (k.SHRUNK_TO,)


def _none(signs: Signs, words: Words) -> Iterator[Draft]:
    if signs.limits:
        for name in (*signs.waiting.worse, *signs.waiting.bad):
            yield "a change by guess: no step shows what is short", (name,)
    else:
        yield "any change: nothing waits that could be spared", (w.MEAN,)


_NOT: Final[dict[Cause, Callable[[Signs, Words], Iterator[Draft]]]] = {
    "arrivals": _arrivals,
    "longer prompts": _arrivals,
    "longer answers": _arrivals,
    "cold adapters": _cold,
    "slow loads": _slow,
    "slots": _slots,
    "restarts": _restarts,
    "hot adapter": _routing,
    "skew": _routing,
    "kv": _kv,
    "floor": _floor,
    "none": _none,
}
