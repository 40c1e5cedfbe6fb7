"""The figures of a window, from its rows.

Theory of operation. What is measured is chosen first (``versions``). Then one query each for counts (``totals``), times to the
first token (``waits``), times between tokens (``gaps``), adapters in flight (``flights``), reasons of refusals, moves and samples:
each reads a handful of columns once, and returns a row for each group. Here they are put together.

Everything of one request belongs to the window in which it arrived, however long it took. So a window that ends now lacks what its
youngest requests will tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from loraledger.record.reader import RecordReader
from loraledger.record.tables import Row
from loraledger.signals.facts import Facts
from loraledger.signals.figures import (
    DIMENSIONS,
    Dimension,
    Group,
    Hits,
    Moves,
    Pressure,
    Signals,
    Version,
    Window,
    WorkingSet,
)
from loraledger.signals.flights import Flight, flights
from loraledger.signals.gaps import Gaps, gaps
from loraledger.signals.moves import moves
from loraledger.signals.pressure import fleet, pressures, with_requests
from loraledger.signals.quality import Seen, quality
from loraledger.signals.scope import (
    FINEST,
    TOTAL,
    Key,
    Kind,
    Scope,
    key_of,
    kind_of,
    maybe_float,
    maybe_whole,
    select,
    share,
    whole,
    with_,
)
from loraledger.signals.totals import ENDS, hits, totals
from loraledger.signals.versions import choose
from loraledger.signals.waits import Waits, waits
from loraledger.units import NS_PER_S

JUDGED_FROM: Final = 5
"""Requests that an adapter needs to be judged alone."""

_REFUSED: Final = """
SELECT replica, tenant, adapter, COALESCE(hit_class, 'undecided') AS class, COALESCE(reason, 'unknown') AS reason
FROM picked WHERE status = 'rejected'
"""


class _Found(msgspec.Struct, frozen=True):
    """What the queries gave."""

    window: Window
    facts: Facts
    sums: dict[Key, Row]
    waits: dict[Key, Waits]
    gaps: dict[Key, Gaps]
    refused: dict[Key, dict[str, int]]
    flights: dict[str, Flight]
    moves: dict[Key, Moves]
    pressures: dict[str, Pressure]


def measure(
    reader: RecordReader,
    window: Window,
    facts: Facts,
    *,
    slo_s: float = 1.0,
    like: Version | None = None,
    pool_versions: bool = False,
    itl_by: Collection[Dimension] = DIMENSIONS,
) -> Signals:
    """The signals of ``window``: of the version with most requests, of ``like`` if it has any, or of all with ``pool_versions``.

    ``itl_by``: groups whose ``itl`` is wanted beside that of all and of each hit class; it takes long for many (``gaps``).
    Raises ValueError for a window that holds no moment, and what ``reader`` raises.
    """
    if window.until_ns <= window.since_ns:
        raise ValueError("the window is empty: it has to end after it begins")
    choice = choose(reader, window, like, pool_versions)
    sums = totals(reader, choice.scope, facts, slo_s)
    of_all = sums.get(TOTAL, {})
    found = _Found(
        window,
        facts,
        sums,
        waits(reader, choice.scope),
        gaps(reader, choice.scope, itl_by) if of_all.get("sketches") else {},
        _refusals(reader, choice.scope) if of_all.get("status_rejected") else {},
        flights(reader, choice.scope, facts),
        moves(reader, window, facts),
        pressures(reader, window),
    )
    groups = {key: _group(found, key, row) for key, row in sums.items()}
    replicas = {name: _replica(found, name, group) for name, group in _all_replicas(found, groups, choice.elsewhere)}
    total = _fleet(found, groups[TOTAL], replicas) if TOTAL in groups else None
    adapters = _named(groups, "adapter")
    seen = Seen(sums.get(TOTAL), found.waits.get(TOTAL), total, replicas, adapters)
    return Signals(
        window=window,
        slo_s=slo_s,
        version=choice.version,
        versions=choice.versions,
        measure_again=choice.measure_again,
        quality=quality(choice, facts, seen),
        total=total,
        replicas=replicas,
        tenants=_named(groups, "tenant"),
        adapters=adapters,
        classes=_named(groups, "class"),
        worst_adapter=_worst(adapters),
    )


def _refusals(reader: RecordReader, scope: Scope) -> dict[Key, dict[str, int]]:
    """Rejected requests by group and reason, the most frequent first."""
    by = "GROUPING SETS ((reason), (reason, replica), (reason, tenant), (reason, adapter), (reason, class))"
    tables = [
        ("picked", scope.picked),
        ("refused", _REFUSED),
        ("grouped", select([kind_of(FINEST), "reason", "COUNT(*) AS requests"], "refused", by)),
    ]
    rows = reader.query(with_(tables, "SELECT * FROM grouped ORDER BY requests DESC, reason"), scope.parameters())
    refused: dict[Key, dict[str, int]] = {}
    for row in rows:
        if (key := key_of(row)) is not None:
            refused.setdefault(key, {})[str(row["reason"])] = whole(row["requests"])
    return refused


def _group(found: _Found, key: Key, row: Row) -> Group:
    """One group, without what only replicas have."""
    requests, all_requests = whole(row["requests"]), whole(found.sums[TOTAL]["requests"])
    told, between = found.waits.get(key), found.gaps.get(key)
    engine = hits(row, "access")
    window, wait = found.window, maybe_float(row["wait"])
    count, gaps_ns = whole(row["gaps"]), maybe_float(row["gaps_ns"])
    active, top_active = maybe_float(row["active"]), maybe_float(row["top_active"])
    top = row["top"]
    own = key[1] if key[0] == "adapter" else None
    if own is not None:
        top, top_active = (own, active) if active else (None, None)
    return Group(
        requests=requests,
        share=share(requests, all_requests),
        per_minute=requests / window.minutes,
        by_status={status: number for status in ENDS if (number := whole(row[f"status_{status}"]))},
        rejections=found.refused.get(key, {}),
        prompt_tokens=maybe_whole(row["prompt"]),
        generated_tokens=maybe_whole(row["generated"]),
        cached_tokens=maybe_whole(row["cached"]),
        active_tokens=None if active is None else active / (window.until_ns - window.since_ns),
        hits=hits(row),
        engine_hits=engine if engine.undecided < whole(row["ours"]) else None,
        ttft=told.ttft if told is not None else None,
        ttft_by_class=told.ttft_by_class if told is not None else {},
        itl=between.itl if between is not None else None,
        itl_by_class=between.by_class if between is not None else {},
        itl_mean=gaps_ns / count / NS_PER_S if count and gaps_ns is not None else None,
        split=told.split if told is not None else None,
        split_by_class=told.split_by_class if told is not None else {},
        attainment=share(whole(row["attained"]), whole(row["judged"])),
        cold_ttft_p99=told.cold if told is not None else None,
        oldest_wait=None if wait is None else wait / NS_PER_S,
        distinct_adapters=whole(row["adapters"]) if own is None else int(whole(row["ours"]) > 0),
        replicas=whole(row["replicas"]),
        top_adapter=top if isinstance(top, str) else None,
        top_adapter_share=share(top_active, active) if top_active and active else None,
        bytes=found.facts.adapter_bytes.get(own) if own is not None else _all_bytes(row),
    )


def _all_bytes(row: Row) -> int | None:
    """Of a group's adapters; unknown while that of one is."""
    return whole(row["bytes"]) if whole(row["adapters"]) == whole(row["sized"]) else None


def _all_replicas(found: _Found, groups: Mapping[Key, Group], elsewhere: frozenset[str]) -> Iterable[tuple[str, Group]]:
    """Those that were sent requests, and those that only have samples or moves, by name."""
    sent = _named(groups, "replica")
    moved = {name for kind, name in found.moves if kind == "replica"}
    idle = (found.pressures.keys() | moved) - sent.keys() - elsewhere
    return sorted((sent | {name: _idle(TOTAL in groups) for name in idle}).items())


def _idle(others: bool) -> Group:
    """A replica to which nothing was sent."""
    return Group(
        requests=0,
        share=0.0 if others else None,
        per_minute=0.0,
        by_status={},
        rejections={},
        prompt_tokens=None,
        generated_tokens=None,
        cached_tokens=None,
        active_tokens=0.0,
        hits=Hits(),
        engine_hits=None,
        ttft=None,
        ttft_by_class={},
        itl=None,
        itl_by_class={},
        split=None,
        split_by_class={},
        attainment=None,
        cold_ttft_p99=None,
        oldest_wait=None,
        distinct_adapters=0,
        bytes=0,
    )


def _replica(found: _Found, name: str, group: Group) -> Group:
    """With its moves, places and samples."""
    key: Key = ("replica", name)
    places, flight = found.facts.replica(name), found.flights.get(name)
    if flight is None and not group.distinct_adapters:
        flight = Flight(0, 0 if places.slots is not None else None)
    preempted = maybe_whole(found.sums[key]["preempted"]) if key in found.sums else None
    return msgspec.structs.replace(
        group,
        moves=found.moves.get(key, Moves()),
        working_set=WorkingSet(
            group.distinct_adapters,
            group.bytes,
            places.slots,
            places.host_entries,
            flight.most if flight is not None else None,
            None if flight is None or flight.over is None else flight.over / NS_PER_S / found.window.seconds,
        ),
        pressure=with_requests(found.pressures.get(name), preempted),
    )


def _fleet(found: _Found, group: Group, replicas: Mapping[str, Group]) -> Group:
    """All requests, with what their replicas come to."""
    sets = [each.working_set for each in replicas.values() if each.working_set is not None]
    return msgspec.structs.replace(
        group,
        moves=found.moves[TOTAL],
        working_set=WorkingSet(
            group.distinct_adapters,
            group.bytes,
            _all([each.slots for each in sets]),
            _all([each.host_entries for each in sets]),
            max((each.in_flight_max for each in sets if each.in_flight_max is not None), default=None),
            max((each.over_slots for each in sets if each.over_slots is not None), default=None),
        ),
        pressure=fleet([each.pressure for each in replicas.values() if each.pressure is not None]),
    )


def _all(values: list[int | None]) -> int | None:
    """Their sum; unknown while one is, or without any."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _named(groups: Mapping[Key, Group], kind: Kind) -> dict[str, Group]:
    """The groups of one kind, most requests first."""
    found = [(name, group) for (of, name), group in groups.items() if of == kind]
    return dict(sorted(found, key=lambda item: (-item[1].requests, item[0])))


def _worst(adapters: Mapping[str, Group]) -> str | None:
    """The adapter least well served; of those alike the slowest."""
    judged = [
        (group.attainment, -(group.ttft.p99 if group.ttft is not None else float("inf")), name)
        for name, group in adapters.items()
        if group.requests >= JUDGED_FROM and group.attainment is not None
    ]
    return min(judged)[2] if judged else None
