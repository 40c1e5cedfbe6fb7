"""Which figures of a review stand where: its tables, as both the page and the Markdown show them.

Theory of operation. A cell is text, or a pair of figures in its column's unit: of the window and of the one before. Where a figure
comes from is said once, in the note of its table. Rows are groups of ``signals``; nothing is worked out here but shares of counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from loraledger.operate.review.gather import Asked, Review
from loraledger.operate.review.spelled import UNKNOWN, Pair, Unit, moment, plain, spell, unit_of
from loraledger.signals.facts import SIZE_EDGES, size_class
from loraledger.signals.figures import Group, Moves, Spread

MOST_ROWS: Final = 20
"""Replicas and tenants that are shown; ``--json`` has all."""
_SIZES: Final = (*(edge - 1 for edge in SIZE_EDGES), SIZE_EDGES[-1], None)
"""A size in each size class, unknown last."""

Cell = str | Pair
Take = Callable[[Group], float | None]


class Column(msgspec.Struct, frozen=True):
    """``unit``: ``None`` for text. ``bar``: drawn as long as its figure of the window is large. ``word``: kept on one line."""

    name: str
    unit: Unit | None = None
    bar: bool = False
    word: bool = False

    @property
    def shown_unit(self) -> str:
        """The unit, where neither the name nor the figures say it."""
        unit = "" if self.unit is None else unit_of(self.unit)
        return "" if unit in self.name.split() else unit


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """``note``: what is counted, and where it comes from. ``more``: rows that are not shown."""

    caption: str
    note: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    more: int = 0


class Line(msgspec.Struct, frozen=True):
    """One figure of all replicas together. ``first``: it stands above all others on the page."""

    name: str
    unit: Unit
    take: Take
    first: bool = False


def lines(slo_s: float) -> tuple[Line, ...]:
    """The figures of the whole fleet."""
    return (
        Line("Requests", "count", lambda g: g.requests, first=True),
        Line("Rejected", "share", lambda g: part(sum(g.rejections.values()), g.requests)),
        Line(f"First token within {slo_s:g} s", "share", lambda g: g.attainment, first=True),
        Line("Time to first token p50, s", "s", lambda g: of(g.ttft, "p50")),
        Line("Time to first token p99, s", "s", lambda g: of(g.ttft, "p99"), first=True),
        Line("Time to first token p99 of misses, s", "s", lambda g: g.cold_ttft_p99),
        Line("Time between tokens p50, ms", "ms", itl),
        Line("GPU hit rate", "share", lambda g: g.hits.gpu_rate, first=True),
        Line("Host hit rate of the misses", "share", lambda g: g.hits.host_rate),
        Line("Hit class not known", "share", lambda g: part(g.hits.unknown + g.hits.undecided, g.requests)),
        Line("Preparation, share of all waiting", "share", lambda g: of(g.split, "preparation_share")),
        Line("Loads", "count", lambda g: of(g.moves, "loads"), first=True),
        Line("Activations", "count", lambda g: of(g.moves, "activations")),
        Line("Evictions from slots", "count", lambda g: of(g.moves, "slot_evictions")),
        Line("Evictions from host caches", "count", lambda g: of(g.moves, "host_evictions")),
        Line("Distinct adapters", "count", lambda g: g.distinct_adapters),
        Line("Their bytes", "bytes", lambda g: of(g.working_set, "bytes")),
        Line("Most in flight at once on a replica", "count", lambda g: of(g.working_set, "in_flight_max")),
        Line("Active tokens, mean", "tokens", lambda g: g.active_tokens),
        Line("KV in use, mean", "share", lambda g: of(g.pressure, "kv_usage_mean")),
        Line("KV in use, most", "share", lambda g: of(g.pressure, "kv_usage_max")),
        Line("Preemptions", "count", lambda g: of(g.pressure, "preemptions"), first=True),
        Line("Tokens computed again", "tokens", lambda g: of(g.pressure, "recomputed_tokens")),
        Line("Engine restarts", "count", lambda g: of(g.pressure, "restarts")),
    )


def tables(review: Review) -> dict[str, tuple[Table, ...]]:
    """By section, in their order."""
    return {
        "Where adapters are": (_residency(review), _loads(review)),
        "What requests cost": (_work(review), _classes(review)),
        "Who waits": (_tenants(review),),
        "Hottest and coldest adapters": (_hottest(review), _coldest(review)),
        "Pins": (_pins(review),),
        "Rules": (_rules(review),),
    }


def pair(review: Review, take: Take) -> Pair:
    """A figure of all replicas."""
    return _pair(review.now.total, review.before.total, take)


def of(found: object, name: str) -> float | None:
    """One figure of a part that may not be known."""
    value: float | None = None if found is None else getattr(found, name)
    return value


def part(some: float, whole: float) -> float | None:
    """``some / whole``; of nothing there is none."""
    return some / whole if whole else None


def itl(group: Group) -> float | None:
    """Where no sketch was kept, the mean stands for the median."""
    return group.itl_mean if group.itl is None else group.itl.p50


def changes(review: Review) -> Table:
    """Changes of the journal that were open in the window."""
    names = ("change", "state", "variable", "from", "to", "target", "since", "by", "why")
    whole = ("state", "variable", "since")
    rows = tuple(
        tuple(
            plain(text)
            for text in (
                one.change.id,
                one.change.state.replace("_", " "),
                one.change.variable,
                value(one.change.before),
                value(one.change.after),
                f"{one.change.target.metric} by {one.change.target.least:g}",
                moment(one.when_ns),
                one.change.who,
                one.change.reason or one.change.why,
            )
        )
        for one in review.changes
    )
    columns = tuple(Column(name, word=name in whole) for name in names)
    return Table(caption="Changes", note="From the journal of changes.", columns=columns, rows=rows)


def value(given: object) -> str:
    """A value of a change, short: of pins how many there are."""
    if isinstance(given, list):
        return f"{len(given)} pins" if given else "no pins"
    return UNKNOWN if given is None else str(given)


def _pair(now: Group | None, before: Group | None, take: Take) -> Pair:
    return Pair(*(None if group is None else take(group) for group in (now, before)))


def _grouped(
    caption: str,
    note: str,
    heads: tuple[tuple[Column, Take], ...],
    first: str,
    groups: Iterable[tuple[str, Group | None, Group | None]],
    most: int = MOST_ROWS,
) -> Table:
    """A row for each group, its name first."""
    found = list(groups)
    rows: list[tuple[Cell, ...]] = [
        (plain(name), *(_pair(now, before, take) for _, take in heads)) for name, now, before in found[:most]
    ]
    columns = (Column(first), *(column for column, _ in heads))
    return Table(caption=caption, note=note, columns=columns, rows=tuple(rows), more=max(0, len(found) - most))


def _by_name(now: Mapping[str, Group], before: Mapping[str, Group]) -> list[tuple[str, Group | None, Group | None]]:
    """In order of requests; those of the window before that are gone come last."""
    names = sorted(now, key=lambda name: (-now[name].requests, name)) + sorted(set(before) - set(now))
    return [(name, now.get(name), before.get(name)) for name in names]


def _replicas(review: Review) -> list[tuple[str, Group | None, Group | None]]:
    names = sorted({*review.now.replicas, *review.before.replicas})
    each = [(name, review.now.replicas.get(name), review.before.replicas.get(name)) for name in names]
    return [("all", review.now.total, review.before.total), *each]


def _residency(review: Review) -> Table:
    heads: tuple[tuple[Column, Take], ...] = (
        (Column("GPU hits", "share"), lambda g: g.hits.gpu_rate),
        (Column("host hits", "share"), lambda g: g.hits.host_rate),
        (Column("loads", "count"), lambda g: of(g.moves, "loads")),
        (Column("activations", "count"), lambda g: of(g.moves, "activations")),
        (Column("out of slots", "count"), lambda g: of(g.moves, "slot_evictions")),
        (Column("out of host", "count"), lambda g: of(g.moves, "host_evictions")),
        (Column("adapters", "count"), lambda g: of(g.working_set, "adapters")),
        (Column("their size", "bytes"), lambda g: of(g.working_set, "bytes")),
        (Column("slots", "count"), lambda g: of(g.working_set, "slots")),
        (Column("host places", "count"), lambda g: of(g.working_set, "host_entries")),
        (Column("at once", "count"), lambda g: of(g.working_set, "in_flight_max")),
        (Column("over slots", "share"), lambda g: of(g.working_set, "over_slots")),
    )
    note = (
        "Adapters asked for and their places; at once: most in flight at a moment; over slots: share of the time with more "
        f"in flight than slots. Hits from requests, moves from residency events; places and sizes: {plain(review.source)}."
    )
    return _grouped("Residency by replica", note, heads, "replica", _replicas(review))


def _loads(review: Review) -> Table:
    """Durations of loads, by size class, and of activations."""
    mine, earlier = (None if s.total is None else s.total.moves for s in (review.now, review.before))
    rows: list[tuple[Cell, ...]] = []
    for name, key in (("disk to host or slot", "load"), ("host to slot", "activation")):
        rows.append((name, "all", *_spreads(_took(mine, key), _took(earlier, key))))
        if key == "load":
            for size in map(size_class, _SIZES):
                spreads = [None if moves is None else moves.took_by_size.get(size) for moves in (mine, earlier)]
                if any(spread is not None for spread in spreads):
                    rows.append(("", size, *_spreads(*spreads)))
    columns = (Column("move"), Column("adapter size"), Column("timed", "count"), *(
        Column(name, "s") for name in ("mean", "p50", "p90", "p99")
    ))  # fmt: skip
    note = "Durations of moves that were timed, by the probe or by the gateway's own load calls; from residency events."
    return Table(caption="Loads by tier and size", note=note, columns=columns, rows=tuple(rows))


def _took(moves: Moves | None, key: str) -> Spread | None:
    return None if moves is None else moves.took.get(key)


def _spreads(now: Spread | None, before: Spread | None) -> tuple[Cell, ...]:
    return tuple(Pair(of(now, name), of(before, name)) for name in ("n", "mean", "p50", "p90", "p99"))


def _work(review: Review) -> Table:
    heads: tuple[tuple[Column, Take], ...] = (
        (Column("requests", "count"), lambda g: g.requests),
        (Column("active tokens", "tokens"), lambda g: g.active_tokens),
        (Column("running", "count"), lambda g: of(g.pressure, "running_mean")),
        (Column("waiting", "count"), lambda g: of(g.pressure, "waiting_mean")),
        (Column("KV mean", "share"), lambda g: of(g.pressure, "kv_usage_mean")),
        (Column("KV most", "share"), lambda g: of(g.pressure, "kv_usage_max")),
        (Column("KV capacity", "tokens"), lambda g: of(g.pressure, "kv_tokens")),
        (Column("preemptions", "count"), lambda g: of(g.pressure, "preemptions")),
        (Column("recomputed", "tokens"), lambda g: of(g.pressure, "recomputed_tokens")),
        (Column("restarts", "count"), lambda g: of(g.pressure, "restarts")),
        (Column("first token p50", "s"), lambda g: of(g.ttft, "p50")),
        (Column("p99", "s"), lambda g: of(g.ttft, "p99")),
    )
    note = (
        "Active tokens: mean prompt and generated tokens in flight; running and waiting: in the engine, mean; recomputed: "
        "after a preemption. KV and engines from samples, times to the first token from requests."
    )
    return _grouped("Work and KV by replica", note, heads, "replica", _replicas(review))


def _classes(review: Review) -> Table:
    heads: tuple[tuple[Column, Take], ...] = (
        (Column("requests", "count"), lambda g: g.requests),
        (Column("share", "share"), lambda g: g.share),
        (Column("first token p50", "s"), lambda g: of(g.ttft, "p50")),
        (Column("p90", "s"), lambda g: of(g.ttft, "p90")),
        (Column("p99", "s"), lambda g: of(g.ttft, "p99")),
        (Column("in time", "share"), lambda g: g.attainment),
        (Column("between tokens p50", "ms"), itl),
    )
    order = ("gpu", "host", "disk", "remote", "base", "unknown", "undecided")
    now, before = review.now.classes, review.before.classes
    groups = [(name, now.get(name), before.get(name)) for name in order if name in now or name in before]
    note = (
        f"By where the adapter was when the request was placed; in time: a first token within {review.now.slo_s:g} s."
    )
    return _grouped("Hit classes", note, heads, "adapter was in", groups)


def _tenants(review: Review) -> Table:
    heads: tuple[tuple[Column, Take], ...] = (
        (Column("requests", "count"), lambda g: g.requests),
        (Column("rejected", "share"), lambda g: part(sum(g.rejections.values()), g.requests)),
        (Column("first token p50", "s"), lambda g: of(g.ttft, "p50")),
        (Column("p99", "s"), lambda g: of(g.ttft, "p99")),
        (Column("in time", "share"), lambda g: g.attainment),
        (Column("longest", "s"), lambda g: g.oldest_wait),
        (Column("GPU hits", "share"), lambda g: g.hits.gpu_rate),
        (Column("adapters", "count"), lambda g: g.distinct_adapters),
        (Column("active tokens", "tokens"), lambda g: g.active_tokens),
    )
    note = "Most requests first; longest: the longest wait for a first token, also of those that never got one."
    groups = _by_name(review.now.tenants, review.before.tenants)
    return _grouped("Latency by tenant", note, heads, "tenant", groups)


def _hottest(review: Review) -> Table:
    now, before = review.now.adapters, review.before.adapters
    takes: tuple[tuple[Column, Take], ...] = (
        (Column("share", "share"), lambda g: g.share),
        (Column("GPU hits", "share"), lambda g: g.hits.gpu_rate),
        (Column("first token p99", "s"), lambda g: of(g.ttft, "p99")),
        (Column("in time", "share"), lambda g: g.attainment),
        (Column("replicas", "count"), lambda g: g.replicas),
    )
    rows = tuple(
        (
            *_asked(one),
            *(_pair(now.get(one.adapter), before.get(one.adapter), take) for _, take in takes),
        )
        for one in review.hottest
    )
    columns = (Column("adapter"), Column("requests", "count", bar=True), *(column for column, _ in takes))
    note = "Most requests first; replicas: that answered for it."
    return Table(caption="Hottest adapters", note=note, columns=columns, rows=rows)


def _coldest(review: Review) -> Table:
    rows = tuple(
        (*_asked(one), UNKNOWN if one.bytes is None else Pair(one.bytes, one.bytes), moment(one.last_ns))
        for one in review.coldest
    )
    columns = (
        Column("adapter"),
        Column("requests", "count"),
        Column("size", "bytes"),
        Column("last asked for", word=True),
    )
    size = (
        "not all of known size" if review.adapter_bytes is None else f"{spell(review.adapter_bytes, 'bytes')} together"
    )
    note = (
        f"Fewest requests first, of {review.adapters:,} adapters that are configured or were asked for, {size}; last: "
        "within three weeks, UTC."
    )
    return Table(caption="Coldest adapters", note=note, columns=columns, rows=rows)


def _asked(one: Asked) -> tuple[Cell, ...]:
    return plain(one.adapter), Pair(one.requests, one.requests_before)


def _pins(review: Review) -> Table:
    """Those that do not pay, or of which it cannot be told."""
    said = {True: "pays", False: "does not pay", None: "not known"}
    rows = tuple(
        (
            plain(pin.adapter),
            "all" if pin.replica is None else plain(pin.replica),
            "kept in a slot" if pin.kind == "slot" else "kept registered",
            said[pin.pays],
            plain(pin.words),
        )
        for pin in review.pins
        if not pin.pays
    )
    columns = tuple(Column(name, word=name in ("pin", "it")) for name in ("adapter", "replica", "pin", "it", "why"))
    paying = sum(pin.pays is True for pin in review.pins)
    note = f"Pins in the settings: {len(review.pins)}; paying, by the ranking of the last seven days: {paying}."
    return Table(
        caption="Pins that do not pay",
        note=note if review.pins else "The settings pin nothing, or there are none.",
        columns=columns,
        rows=rows,
    )


def _rules(review: Review) -> Table:
    advice = review.advice
    spoken = {True: "speaks for it", False: "speaks against it", None: "not known"}
    rows: list[tuple[Cell, ...]] = [("more slots", advice.slots.verdict, plain(advice.slots.means))]
    rows += [
        (f"  {one.name.replace('_', ' ')}", spoken[one.holds], plain(one.words)) for one in advice.slots.conditions
    ]
    if advice.ranking is not None:
        saves = advice.ranking.total is not None and advice.ranking.total.pinned < advice.ranking.total.lru
        rows.append(("keep in slots", "fires" if saves else "holds back", plain(advice.ranking.words)))
        rows += [
            ("let go first", "fires", plain(f"{out.adapter} on {out.replica}: {out.words}"))
            for out in advice.ranking.evictions[:3]
        ]
    rows += [("burst", "fires", plain(f"{burst.tenant}: {burst.words}")) for burst in advice.bursts[:MOST_ROWS]]
    for oddity in (*advice.slow_hits, *advice.harmless_misses):
        causes = "; ".join(oddity.causes) or "the record shows no cause"
        rows.append((oddity.kind, "fires", plain(f"{oddity.adapter}: {causes}")))
    columns = (Column("rule", word=True), Column("state", word=True), Column("because"))
    note = (
        "Slots by three weeks to the end of the window, what to keep by the last seven days, bursts and oddities by their "
        "busiest hour."
    )
    return Table(caption="Which rules fire", note=note, columns=columns, rows=tuple(rows))
