"""Which adapters to keep in slots, by the waiting that this avoids; and what that would bring.

Theory of operation. The last week's requests are counted by replica and adapter in one query. What a miss of an adapter waits for
is the mean preparation in its misses' time to the first token (of the whole fleet: it is the adapter that is large or small), drawn
toward adapters of its size class and these toward all (``value.shrunk``). Where no miss tells its preparation, the duration of its
loads stands for it. The rest is ``value``: per slot, which ranks, and per MiB, which is shown beside it.

Pins come from the whole week, their gain from its busiest hour, which is part of that week: what follows may differ, so a ranking
is replayed before it is used, and made again each week. An adapter that comes into slots often and is worth less than every pin
is named for eviction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from loraledger.record.reader import RecordReader
from loraledger.signals.durations import parted
from loraledger.signals.facts import Facts, size_class
from loraledger.signals.figures import Version, Window
from loraledger.signals.rules import gain
from loraledger.signals.rules.advice import Eviction, Gain, PenaltySource, Pin, Ranking, Targets, Worth
from loraledger.signals.rules.sample import Sample
from loraledger.signals.rules.value import avoided, per_mib, shrunk
from loraledger.signals.scope import Scope, bounds, whole, with_
from loraledger.units import NS_PER_S

FOLLOWERS: Final = 5
"""Adapters of each replica that are shown below the pins."""
EVICTIONS: Final = 5
"""Of each replica."""

_PAIRS: Final = """
SELECT replica, adapter, COUNT(*) AS requests, SUM(CASE WHEN miss THEN 1 ELSE 0 END) AS misses,
    SUM(CASE WHEN miss AND prepared = 1 AND ttft IS NOT NULL THEN 1 ELSE 0 END) AS told,
    COALESCE(SUM(CASE WHEN miss AND prepared = 1 THEN cut_2 - cut_1 + cut_4 - cut_3 END), 0) AS waited_ns
FROM used GROUP BY replica, adapter
"""
_USED: Final = """
SELECT *, class IN ('host', 'disk', 'remote') AS miss FROM parted
WHERE ours = 1 AND replica IS NOT NULL AND adapter IS NOT NULL
"""
_LOADS: Final = """
SELECT adapter, COUNT(*) AS told, SUM(took_ns) AS waited_ns FROM residency
WHERE at_ns >= $since AND at_ns < $until AND took_ns >= 0 AND adapter IS NOT NULL AND tier_after IN ('host', 'gpu')
GROUP BY adapter
"""


class Pair(msgspec.Struct, frozen=True):
    """An adapter on a replica, over the week. ``waited_ns``: preparation of the ``told`` among its misses."""

    replica: str
    adapter: str
    requests: int
    misses: int
    told: int
    waited_ns: int


class Told(NamedTuple):
    """How many waits of an adapter are known, and their sum in ns."""

    n: int
    ns: int


class Penalty(NamedTuple):
    """What a miss waits for, in s, and what that was measured on."""

    seconds: float | None
    source: PenaltySource | None


def rank(
    reader: RecordReader, window: Window, version: Version | None, facts: Facts, targets: Targets, sample: Sample | None
) -> Ranking | None:
    """The ranking by the requests in ``window``; ``None`` when none with an adapter went to a replica."""
    scope = Scope(window, version=version)
    rows = reader.query(with_([*parted(scope), ("used", _USED)], _PAIRS), scope.parameters())
    pairs: dict[str, list[Pair]] = {}
    for row in rows:
        pair = msgspec.convert(row, Pair)
        pairs.setdefault(pair.replica, []).append(pair)
    if not pairs:
        return None
    penalties = _penalties(pairs.values(), reader, window, facts)
    shown: list[Worth] = []
    pins: dict[str, list[Worth]] = {}
    for replica, members in sorted(pairs.items()):
        budget = _budget(replica, facts, targets)
        worths = _worths(members, penalties, window, facts, budget)
        pins[replica] = [worth for worth in worths if worth.pin]
        shown += worths[: budget + FOLLOWERS]
    gains, evictions = _play(sample, facts, pins, pairs, penalties, window)
    whole = gain.total(gains)
    return Ranking(
        window=window,
        worths=tuple(shown),
        left_out=len(rows) - len(shown),
        pins=tuple(Pin(worth.replica, worth.adapter) for members in pins.values() for worth in members),
        evictions=evictions,
        sample=sample.window if sample is not None and gains else None,
        gains=gains,
        total=whole,
        words=_words(whole),
    )


def _budget(replica: str, facts: Facts, targets: Targets) -> int:
    """Pins that the replica may have; 0 where its slots are unknown and nobody asked for a number."""
    slots = facts.replica(replica).slots
    if targets.budget is None:
        return 0 if slots is None else max(0, slots - 1)
    return targets.budget if slots is None else min(targets.budget, slots)


def _penalties(
    pairs: Iterable[Sequence[Pair]], reader: RecordReader, window: Window, facts: Facts
) -> dict[str, Penalty]:
    """What a miss of each adapter waits for."""
    waits: dict[str, Told] = {}
    for members in pairs:
        for pair in members:
            n, ns = waits.get(pair.adapter, (0, 0))
            waits[pair.adapter] = Told(n + pair.told, ns + pair.waited_ns)
    if any(told.n for told in waits.values()):
        return _drawn(waits, facts, "its own misses", "the fleet")
    rows = reader.query(_LOADS, bounds(window))
    loads = {row["adapter"]: Told(whole(row["told"]), whole(row["waited_ns"])) for row in rows}
    return _drawn({name: loads.get(name, Told(0, 0)) for name in waits}, facts, "its own loads", "the fleet's loads")


def _drawn(waits: Mapping[str, Told], facts: Facts, own: PenaltySource, fleet: PenaltySource) -> dict[str, Penalty]:
    """Each mean drawn toward its size class, and each class toward the fleet."""
    whole = Told(sum(told.n for told in waits.values()), sum(told.ns for told in waits.values()))
    classes: dict[str, Told] = {}
    for name, told in waits.items():
        size = size_class(facts.adapter_bytes.get(name))
        n, ns = classes.get(size, (0, 0))
        classes[size] = Told(n + told.n, ns + told.ns)
    of_fleet = shrunk(None, whole.ns / NS_PER_S, whole.n)
    found = {}
    for name, told in waits.items():
        like = classes[size_class(facts.adapter_bytes.get(name))]
        seconds = shrunk(shrunk(of_fleet, like.ns / NS_PER_S, like.n), told.ns / NS_PER_S, told.n)
        source = own if told.n else "its size class" if like.n else fleet
        found[name] = Penalty(seconds, None if seconds is None else source)
    return found


def _worths(
    members: Sequence[Pair], penalties: Mapping[str, Penalty], window: Window, facts: Facts, budget: int
) -> list[Worth]:
    """A replica's adapters, best first. Where no penalty is known, it is taken to be the same for all."""
    made = []
    for pair in members:
        penalty, size = penalties[pair.adapter], facts.adapter_bytes.get(pair.adapter)
        per_hour = pair.requests * 3600 / window.seconds
        value = avoided(per_hour, penalty.seconds)
        made.append((value, per_hour, penalty, size, pair))
    made.sort(key=lambda one: (-(one[0] or 0.0), -one[1], one[4].adapter))
    return [
        Worth(
            replica=pair.replica,
            adapter=pair.adapter,
            rank=number,
            requests=pair.requests,
            misses=pair.misses,
            per_hour=per_hour,
            penalty=penalty.seconds,
            penalty_from=penalty.source,
            bytes=size,
            per_slot=value,
            per_mib=per_mib(value, size),
            pin=number <= budget,
        )
        for number, (value, per_hour, penalty, size, pair) in enumerate(made, 1)
    ]


def _play(
    sample: Sample | None,
    facts: Facts,
    pins: Mapping[str, Sequence[Worth]],
    pairs: Mapping[str, Sequence[Pair]],
    penalties: Mapping[str, Penalty],
    window: Window,
) -> tuple[tuple[Gain, ...], tuple[Eviction, ...]]:
    """The sample on each replica of known slots, and who came in often there without being worth it."""
    gains, evictions = [], []
    seconds = {name: penalty.seconds for name, penalty in penalties.items()}
    for replica, uses in sorted(gain.uses_of(sample.seen).items() if sample is not None else ()):
        slots = facts.replica(replica).slots
        if slots is None or slots < 1 or replica not in pairs:
            continue
        kept = [worth.adapter for worth in pins[replica]]
        made, moved = gain.gain(replica, uses, slots, kept, seconds)
        gains.append(made)
        asked = {pair.adapter: pair.requests for pair in pairs[replica]}
        counted: dict[str, int] = {}
        for use in uses:
            counted[use.adapter] = counted.get(use.adapter, 0) + 1
        least = pins[replica][-1] if kept else None
        often = sorted((-count, name) for name, count in moved.items() if count > 1 and name not in kept)
        for count, name in often[:EVICTIONS] if least is not None else ():
            value = avoided(asked[name] * 3600 / window.seconds, seconds[name])
            evictions.append(_eviction(replica, name, -count, counted[name], value, least))
    return tuple(gains), tuple(evictions)


def _eviction(
    replica: str, adapter: str, moved_in: int, requests: int, value: float | None, least: Worth | None
) -> Eviction:
    words = f"moved in {moved_in} times for {requests} requests"
    if value is not None and least is not None and least.per_slot is not None:
        words += f"; its slot avoids {value:.3g} s an hour, the least pin's {least.per_slot:.3g} s"
    return Eviction(replica=replica, adapter=adapter, moved_in=moved_in, requests=requests, per_slot=value, words=words)


def _words(whole: Gain | None) -> str:
    if whole is None:
        return "what pins would save is not known: the slots of no replica are"
    if not whole.pins:
        return "no pins were asked for"
    said = f"in the sample LRU brings adapters in {whole.lru:,} times, with these pins {whole.pinned:,} times"
    said += f"; no choice could have done with fewer than {whole.least:,}"
    if whole.pinned >= whole.lru:
        return f"{said}: the pins save nothing there, so leave the slots to LRU"
    share = (whole.lru - whole.pinned) / (whole.lru - whole.least)
    return f"{said}: the pins get {share:.0%} of what could be saved; replay them first".replace("%", " %", 1)
