"""Hits that are slow all the same, and misses that did no harm: where the hit class does not tell how long a request waits.

Theory of operation. A *slow hit* found its adapter in a slot, and its first token still took ``slow`` times the median of all hits
or more. The causes that are tried: adapters of high rank (its own, or one beside it: a batch pays for its largest), many distinct
adapters or many requests in flight on its replica, KV blocks that ran short, loads of others, a long prompt. For each, the mean
over the slow hits is held against that over all other hits; those that differ by ``RATIO`` or more are listed, the most different
first.

*Harmless misses* waited for their adapter, and at the median their first token came no later than that of hits. Tried are: the
engine had it in a slot after all, a copy from the host cache, queues in which they waited anyway, short prompts.

All this is coincidence in one hour: causes are likely, never certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from statistics import fmean, median
from typing import Final, NamedTuple

from loraledger.signals.facts import Facts
from loraledger.signals.rules.advice import Oddity, Targets
from loraledger.signals.rules.sample import MINUTE_NS, Sample, Seen
from loraledger.units import NS_PER_S, format_bytes

LEAST: Final = 5
"""Slow hits, or misses, of an adapter below which nothing is said of it."""
SHARE: Final = 0.1
"""Of its hits that have to be slow: a few are of any adapter."""
RATIO: Final = 1.5
"""A mean differs from another from this ratio on."""
FULL: Final = 0.9
"""KV in use from which blocks are short, as a share."""
SHOWN: Final = 20
"""Adapters of each kind, those first that stand out most."""


class Beside(NamedTuple):
    """What was in flight on a replica when a request was sent there, itself included."""

    requests: int
    adapters: int
    largest: int | None
    """Bytes of the largest adapter; ``None``: of one the bytes are not known."""


class Hit(NamedTuple):
    """A hit with a time to its first token, and what was beside it (``None``: not known)."""

    seen: Seen
    ttft: float
    beside: Beside | None
    kv_short: float | None
    """1 if it was preempted or KV blocks were short in its minute, else 0; ``None``: nobody said."""
    size: int | None


class Usual(NamedTuple):
    """Of hits that misses are held against: the median time to the first token in s, and the mean prompt."""

    p50: float
    prompt_tokens: float | None


class Trait(NamedTuple):
    """Something that can make hits slow. ``words``: with the means of slow hits and of others."""

    value: Callable[[Hit], float | None]
    words: Callable[[float, float], str]


_TRAITS: Final[tuple[Trait, ...]] = (
    Trait(
        lambda hit: hit.size,
        lambda slow, other: (
            f"its rank: it has {format_bytes(round(slow))}, adapters of other hits {format_bytes(round(other))}"
        ),
    ),
    Trait(
        lambda hit: None if hit.beside is None else hit.beside.largest,
        lambda slow, other: (
            f"mixed ranks: the largest adapter in flight with it had {format_bytes(round(slow))}, "
            f"with other hits {format_bytes(round(other))}"
        ),
    ),
    Trait(
        lambda hit: None if hit.beside is None else float(hit.beside.adapters),
        lambda slow, other: (
            f"diversity: {slow:.1f} distinct adapters in flight on its replica, {other:.1f} at other hits"
        ),
    ),
    Trait(
        lambda hit: None if hit.beside is None else float(hit.beside.requests),
        lambda slow, other: f"crowding: {slow:.1f} requests in flight on its replica, {other:.1f} at other hits",
    ),
    Trait(
        lambda hit: hit.kv_short,
        lambda slow, other: (
            f"KV pressure: preempted, or {FULL:.0%} of KV in use, for {slow:.0%} of them, {other:.0%} of other hits"
        ),
    ),
    Trait(
        lambda hit: None if hit.seen.preparation is None else hit.seen.preparation / NS_PER_S,
        lambda slow, other: f"loads of others: held up for {slow:.3g} s, other hits for {other:.3g} s",
    ),
    Trait(
        lambda hit: hit.seen.prompt_tokens,
        lambda slow, other: f"long prompts: {slow:,.0f} tokens, other hits {other:,.0f}",
    ),
)


def slow_hits(sample: Sample, facts: Facts, targets: Targets) -> tuple[Oddity, ...]:
    """Adapters with slow hits, those first whose hits are slowest by all they lost."""
    hits = list(_hits(sample, facts))
    if not hits:
        return ()
    usual = median(hit.ttft for hit in hits)
    slow: dict[str, list[Hit]] = {}
    counted: dict[str, int] = {}
    others = []
    for hit in hits:
        name = hit.seen.adapter or ""
        counted[name] = counted.get(name, 0) + 1
        if hit.ttft > 0 and hit.ttft >= targets.slow * usual:
            slow.setdefault(name, []).append(hit)
        else:
            others.append(hit)
    means = [_mean(map(trait.value, others)) for trait in _TRAITS]
    found = [
        (
            sum(hit.ttft - usual for hit in mine),
            Oddity(
                adapter=name,
                kind="slow hits",
                n=len(mine),
                of=counted[name],
                ttft_p50=median(hit.ttft for hit in mine),
                other_p50=usual,
                causes=_causes(mine, means),
            ),
        )
        for name, mine in slow.items()
        if len(mine) >= LEAST and len(mine) >= SHARE * counted[name]
    ]
    found.sort(key=lambda one: (-one[0], one[1].adapter))
    return tuple(oddity for _, oddity in found[:SHOWN])


def _hits(sample: Sample, facts: Facts) -> Iterator[Hit]:
    beside = _beside(sample.seen, facts)
    for number, one in enumerate(sample.seen):
        if one.hit and one.ttft is not None:
            size = facts.adapter_bytes.get(one.adapter or "")
            yield Hit(one, one.ttft / NS_PER_S, beside.get(number), _kv_short(one, sample), size)


def _beside(seen: Sequence[Seen], facts: Facts) -> dict[int, Beside]:
    """By number in ``seen``: what was in flight when it was sent."""
    sent = [
        (one.dispatched_ns, number) for number, one in enumerate(seen) if one.dispatched_ns is not None and one.replica
    ]
    ends: dict[str, list[tuple[int, str]]] = {}
    running: dict[str, dict[str, int]] = {}
    found = {}
    for at, number in sorted(sent):
        one = seen[number]
        waiting, adapters = ends.setdefault(one.replica or "", []), running.setdefault(one.replica or "", {})
        while waiting and waiting[0][0] <= at:
            left = heappop(waiting)[1]
            adapters[left] -= 1
            if not adapters[left]:
                del adapters[left]
        name = one.adapter or ""
        adapters[name] = adapters.get(name, 0) + 1
        if one.ended_ns is not None:
            heappush(waiting, (max(at, one.ended_ns), name))
        found[number] = _view(adapters, facts)
    return found


def _view(adapters: dict[str, int], facts: Facts) -> Beside:
    sizes = [facts.adapter_bytes.get(name) for name in adapters if name]
    known = [size for size in sizes if size is not None]
    largest = max(known, default=None) if len(known) == len(sizes) else None
    return Beside(sum(adapters.values()), len(sizes), largest)


def _kv_short(one: Seen, sample: Sample) -> float | None:
    if one.preemptions:
        return 1.0
    moment = one.first_token_ns or 0
    usage = sample.kv.get((one.replica or "", moment - moment % MINUTE_NS))
    if usage is not None:
        return float(usage >= FULL)
    return None if one.preemptions is None else 0.0


def _causes(slow: Sequence[Hit], others: Sequence[float | None]) -> tuple[str, ...]:
    """What is different about them, the most different first. ``others``: the mean of each trait over all other hits."""
    found = []
    for trait, theirs in zip(_TRAITS, others, strict=True):
        mine = _mean(map(trait.value, slow))
        if mine is None or theirs is None or mine <= 0 or mine < RATIO * theirs:
            continue
        found.append((theirs / mine, f"likely {trait.words(mine, theirs)}"))
    return tuple(words for _, words in sorted(found))


def harmless_misses(sample: Sample) -> tuple[Oddity, ...]:
    """Adapters whose misses are no slower than hits, those with most misses first."""
    hits: dict[str, list[Seen]] = {}
    misses: dict[str, list[Seen]] = {}
    for one in sample.seen:
        if one.ttft is not None and (one.hit or one.miss):
            (hits if one.hit else misses).setdefault(one.adapter or "", []).append(one)
    everyone = [one for members in hits.values() for one in members]
    if not everyone:
        return ()
    fleet = _usual(everyone)
    found = []
    for name, missed in misses.items():
        own = hits.get(name, [])
        if len(missed) < LEAST:
            continue
        usual, mine = _usual(own) if len(own) >= LEAST else fleet, _p50(missed)
        if mine > usual.p50:
            continue
        found.append(
            Oddity(
                adapter=name,
                kind="harmless misses",
                n=len(missed),
                of=len(own) + len(missed),
                ttft_p50=mine,
                other_p50=usual.p50,
                causes=tuple(_excuses(missed, usual)),
            )
        )
    return tuple(sorted(found, key=lambda oddity: (-oddity.n, oddity.adapter))[:SHOWN])


def _usual(hits: Sequence[Seen]) -> Usual:
    return Usual(_p50(hits), _mean(one.prompt_tokens for one in hits))


def _excuses(missed: Sequence[Seen], hits: Usual) -> Iterator[str]:
    n = len(missed)
    found = sum(one.access == "gpu" for one in missed)
    if 2 * found >= n:
        yield f"likely a wrong belief: the engine found it in a slot in {found} of {n}"
    queue, preparation = (_mean(getattr(one, name) for one in missed) for name in ("queue", "preparation"))
    if queue is not None and preparation is not None and queue >= preparation:
        yield (
            f"likely hidden: they waited {queue / NS_PER_S:.3g} s in queues anyway,"
            f" and for {preparation / NS_PER_S:.3g} s of preparation"
        )
    copied = sum(one.hit_class == "host" for one in missed)
    if 2 * copied >= n:
        yield f"likely cheap: {copied} of {n} needed only a copy from the host cache"
    mine, theirs = _mean(one.prompt_tokens for one in missed), hits.prompt_tokens
    if mine is not None and theirs is not None and theirs >= RATIO * mine:
        yield f"likely short prompts: {mine:,.0f} tokens, the hits' {theirs:,.0f}"


def _p50(seen: Iterable[Seen]) -> float:
    return median(one.ttft for one in seen if one.ttft is not None) / NS_PER_S


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
