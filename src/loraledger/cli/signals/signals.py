"""``loraledger signals``: the figures of a window beside those of a baseline.

Theory of operation. A header that says what was measured, the figures that decide something, where the time to the first token
went, then one row for each replica (tenant, adapter, hit class), and last what is missing. Tables are narrow: what clients waited
and what adapters and KV cost are two of them. ``--json`` has every figure.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from loraledger.cli.options import ConfigOption, JsonOption, RecordOption, usage
from loraledger.cli.output import print_json, print_table, printable
from loraledger.cli.signals import shown
from loraledger.cli.signals.document import document
from loraledger.cli.signals.options import (
    Asked,
    BaselineOption,
    FromOption,
    HostOption,
    LastOption,
    PoolVersionsOption,
    SloOption,
    SlotsOption,
    ToOption,
    facts,
    ground,
    opened,
)
from loraledger.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from loraledger.cli.signals.options import Opened
    from loraledger.signals.facts import Facts
    from loraledger.signals.figures import Dimension, Group, Moves, Pressure, Signals, Split, WorkingSet

_SLO_NS: Final = NS_PER_S
_BY: Final = ("replica", "tenant", "adapter", "class")
_PARTS: Final = ("gateway_queue", "preparation", "engine_queue", "prefill", "unattributed", "engine")
_PART_NAMES: Final = {"engine": "engine, not told"}


def signals(
    last: LastOption = None,
    since: FromOption = None,
    until: ToOption = None,
    baseline: BaselineOption = "before",
    by: Annotated[str, typer.Option("--by", help="A row for each replica, tenant, adapter or class.")] = "replica",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Rows of that table; --json has all.")] = 20,
    slo: SloOption = None,
    pool_versions: PoolVersionsOption = False,
    slots: SlotsOption = None,
    host_entries: HostOption = None,
    record: RecordOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """The figures of a window beside a baseline: hits, waiting and its parts, adapters moved, working set, KV.

    Without a moment the last ten minutes, beside the ten before. Unknown shows as -, never as 0.
    """
    if by not in _BY:
        with usage():
            raise ValueError(f"--by {by!r} is not one of {', '.join(_BY)}")
    place = ground(record, config)
    with opened(place.directory, Asked(last, since, until, baseline)) as found:
        known = facts(place, found.reader, slots, host_entries)
        now, before = measured(found, known, slo, pool_versions)
    if as_json:
        print_json("signals", {"now": document(now), "baseline": document(before), "facts": document(known)})
        return
    print_header(now, before)
    if now.total is not None:
        _print_total(now, before)
        _print_groups(by, now, before, limit)
    shown.bullets("what is missing", notes(now, before))
    sys.stdout.flush()


def measured(
    found: Opened, known: Facts, slo: int | None, pool_versions: bool, itl_by: tuple[Dimension, ...] | None = None
) -> tuple[Signals, Signals | None]:
    """The window's figures, and the baseline's: of the same version, where it has rows of it. ``itl_by``: as ``measure`` has it."""
    from loraledger.signals.figures import DIMENSIONS
    from loraledger.signals.measure import measure

    measured = partial(
        measure,
        facts=known,
        slo_s=(slo or _SLO_NS) / NS_PER_S,
        pool_versions=pool_versions,
        itl_by=DIMENSIONS if itl_by is None else itl_by,
    )
    now = measured(found.reader, found.window)
    return now, None if found.baseline is None else measured(found.reader, found.baseline, like=now.version)


def print_header(now: Signals, before: Signals | None) -> None:
    """What was measured, in a line or two."""
    requests = "no request" if now.total is None else f"{now.total.requests:,} requests"
    of = "all versions together" if now.version is None else shown.version(now.version)
    print(shown.fold(f"{shown.span(now.window)} UTC: {requests}" + (f"; {of}" if now.total is not None else "")))
    if before is not None:
        other = "no request" if before.total is None else f"{before.total.requests:,} requests"
        print(shown.fold(f"beside {shown.span(before.window)} UTC: {other}"))
    if now.measure_again is not None:
        print(shown.fold(now.measure_again))


def notes(now: Signals, before: Signals | None) -> list[str]:
    """What is missing, and what would supply it."""
    said = list(now.quality.notes)
    if before is not None and before.total is None:
        said.insert(
            0, "No request arrived in the baseline: nothing is compared. Name another one with --baseline FROM/TO."
        )
    return said


class _Line(NamedTuple):
    """One figure of the summary: how it is taken from a group, and how it is shown."""

    name: str
    take: Callable[[Group, float], float | None]
    show: Callable[[float | None], str | None]
    points: bool = False


def _lines(slo_s: float) -> tuple[_Line, ...]:
    return (
        _Line("requests a minute", lambda g, _: g.per_minute, shown.count),
        _Line("  rejected", lambda g, _: _part(sum(g.rejections.values()), g.requests), shown.share, True),
        _Line("  not ended well", _unwell, shown.share, True),
        _Line("tokens in flight, mean", lambda g, _: g.active_tokens, shown.count),
        _Line("GPU hit rate, of requests with an adapter", lambda g, _: g.hits.gpu_rate, shown.share, True),
        _Line("  misses found in the host cache", lambda g, _: g.hits.host_rate, shown.share, True),
        _Line(
            "  hit class not known",
            lambda g, _: _part(g.hits.unknown + g.hits.undecided, g.requests),
            shown.share,
            True,
        ),
        _Line("loads a minute", lambda g, m: _rate(g.moves, "loads", m), shown.count),
        _Line("evictions from slots a minute", lambda g, m: _rate(g.moves, "slot_evictions", m), shown.count),
        _Line("distinct adapters", lambda g, _: g.distinct_adapters, shown.count),
        _Line("time to first token p50, s", lambda g, _: _of(g, "ttft", "p50"), shown.seconds),
        _Line("  p99", lambda g, _: _of(g, "ttft", "p99"), shown.seconds),
        _Line("  p99 of misses", lambda g, _: g.cold_ttft_p99, shown.seconds),
        _Line(f"  within {_time(slo_s)}", lambda g, _: g.attainment, shown.share, True),
        _Line("time between tokens p50, ms", _itl, shown.milliseconds),
        _Line(
            "preparation, share of all waiting", lambda g, _: _of(g, "split", "preparation_share"), shown.share, True
        ),
        _Line("  told of, share of requests", lambda g, _: _told(g), shown.share, True),
        _Line("KV in use, mean", lambda g, _: _of(g, "pressure", "kv_usage_mean"), shown.share, True),
        _Line("  most", lambda g, _: _of(g, "pressure", "kv_usage_max"), shown.share, True),
        _Line("preemptions a minute", lambda g, m: _per(_of(g, "pressure", "preemptions"), m), shown.count),
        _Line("replicas down, share of samples", lambda g, _: _down(g), shown.share, True),
        _Line("engine restarts", lambda g, _: _of(g, "pressure", "restarts"), shown.count),
    )


def _print_total(now: Signals, before: Signals | None) -> None:
    other = before.total if before is not None else None
    rows = []
    for line in _lines(now.slo_s):
        this = line.take(now.total, now.window.minutes) if now.total is not None else None
        that = line.take(other, before.window.minutes) if other is not None and before is not None else None
        if this is not None or that is not None:
            rows.append([line.name, line.show(this), line.show(that), shown.change(this, that, points=line.points)])
    print()
    columns = ["now", "before", "change"] if before is not None else ["now"]
    print_table(["all replicas", *columns], [row[: len(columns) + 1] for row in rows], right=columns)
    _print_split(None if now.total is None else now.total.split, None if other is None else other.split)


def _print_split(now: Split | None, before: Split | None) -> None:
    """Mean seconds of each part of the time to the first token."""
    if now is None or not now.n:
        return
    print(f"\nwhere the time to the first token went, mean of {now.n:,} requests")
    rows = []
    for part in _PARTS:
        this = getattr(now, part)
        was = getattr(before, part) / before.n if before is not None and before.n else None
        if this or was:
            name = _PART_NAMES.get(part, part.replace("_", " "))
            rows.append([name, shown.seconds(this / now.n), shown.share(_part(this, now.ttft)), shown.seconds(was)])
    columns = ["s", "share"] if before is None else ["s", "share", "before s"]
    print_table(["part", *columns], [row[: len(columns) + 1] for row in rows], right=columns)


def _print_groups(by: str, now: Signals, before: Signals | None, limit: int) -> None:
    groups: dict[str, Group] = {
        "replica": now.replicas,
        "tenant": now.tenants,
        "adapter": now.adapters,
        "class": now.classes,
    }[by]
    if not groups:
        return
    names = list(groups) if by in ("replica", "class") else sorted(groups, key=lambda name: -groups[name].requests)
    chosen = {name: groups[name] for name in names[:limit]}
    minutes = now.window.minutes
    print(
        "\n"
        + shown.fold(f"by {by}: requests a minute, hits, s to the first token (cold: p99 of misses), in time, longest")
    )
    print_table([by, *_WAITING], [[_named(name), *_waiting(group)] for name, group in chosen.items()], right=_WAITING)
    if by == "replica":
        print(
            "\n"
            + shown.fold(
                "by replica: adapters moved a minute, asked for (set), in flight at once, and their places; KV"
            )
        )
        print_table([by, *_COSTS], [[_named(n), *_costs(group, minutes)] for n, group in chosen.items()], right=_COSTS)
    if len(names) > limit:
        print(f"and {len(names) - limit:,} more: --limit shows more, --json has all")


_WAITING: Final = ("a min", "ok", "gpu", "host", "p50", "p99", "cold", "met", "longest")
_COSTS: Final = ("loads", "evict", "set", "at once", "slots", "over", "host", "kv", "kv max", "preempt")


def _waiting(group: Group) -> list[object]:
    ttft, hits = group.ttft, group.hits
    return [
        shown.count(group.per_minute),
        shown.share(_part(group.by_status.get("ok", 0), group.requests)),
        shown.share(hits.gpu_rate),
        shown.share(hits.host_rate),
        *(shown.seconds(None if ttft is None else getattr(ttft, name)) for name in ("p50", "p99")),
        shown.seconds(group.cold_ttft_p99),
        shown.share(group.attainment),
        shown.seconds(group.oldest_wait),
    ]


def _costs(group: Group, minutes: float) -> list[object]:
    moves, places, pressure = group.moves, group.working_set, group.pressure
    return [
        *(shown.count(_rate(moves, name, minutes)) for name in ("loads", "slot_evictions")),
        *(_places(places)),
        *_kv(pressure, minutes),
    ]


def _places(places: WorkingSet | None) -> list[object]:
    if places is None:
        return [None] * 5
    return [
        places.adapters,
        places.in_flight_max,
        places.slots,
        shown.share(places.over_slots),
        places.host_entries,
    ]


def _kv(pressure: Pressure | None, minutes: float) -> list[object]:
    if pressure is None:
        return [None] * 3
    return [
        shown.share(pressure.kv_usage_mean),
        shown.share(pressure.kv_usage_max),
        shown.count(_per(pressure.preemptions, minutes)),
    ]


def _named(name: str) -> str:
    return printable(name)[:40]


def _of(group: Group, part: str, name: str) -> float | None:
    """One figure of a part of the group that may not be known."""
    found = getattr(group, part)
    figure: float | None = None if found is None else getattr(found, name)
    return figure


def _part(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _per(number: float | None, minutes: float) -> float | None:
    return None if number is None or not minutes else number / minutes


def _rate(moves: Moves | None, name: str, minutes: float) -> float | None:
    return None if moves is None else _per(getattr(moves, name), minutes)


def _unwell(group: Group, _: float) -> float | None:
    well = group.by_status.get("ok", 0) + group.by_status.get("open", 0) + group.by_status.get("rejected", 0)
    return _part(group.requests - well, group.requests)


def _told(group: Group) -> float | None:
    return None if group.split is None else _part(group.split.told, group.split.n)


def _down(group: Group) -> float | None:
    return None if group.pressure is None else _part(group.pressure.down, group.pressure.samples)


def _itl(group: Group, _: float) -> float | None:
    return group.itl_mean if group.itl is None else group.itl.p50


def _time(slo_s: float) -> str:
    return format_duration(round(slo_s * NS_PER_S))
