"""What a review says: the figures of a window and of the one before, what is advised, what changed, what to try next.

Theory of operation. Everything here was found by ``measure``, ``advise`` and ``diagnose``; this puts it together and adds what
needs two of them: pins against the ranking, the diagnosis of the worst hour, adapters that nobody asks for, proposals. The reader
has to have three weeks open: advice is about these.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Final

import msgspec

from loraledger.operate.change import Change
from loraledger.operate.review.pins import Pinned, judge_pins
from loraledger.operate.review.proposals import Ground, Proposal, proposals
from loraledger.operate.review.series import Series, last_asked, read_series, worst_hour
from loraledger.operate.review.spelled import iso
from loraledger.operate.review.standing import Standing
from loraledger.operate.review.triggers import Fresh, fresh
from loraledger.record.reader import RecordReader
from loraledger.signals.diagnosis import Diagnosis, diagnose
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Signals, Window
from loraledger.signals.measure import measure
from loraledger.signals.rules import Advice, Targets, advise
from loraledger.signals.rules.weeks import span
from loraledger.signals.windows import before

EXTREMES: Final = 10
"""Adapters that are shown at each end."""


class Names(msgspec.Struct, frozen=True):
    """What commands name: the record's folder, and the settings of the fleet (``None``: there are none)."""

    record: str
    settings: str | None = None


class Asked(msgspec.Struct, frozen=True):
    """An adapter by how often it was asked for. ``last_ns``: when last, in the three weeks; ``None``: not in these."""

    adapter: str
    requests: int
    requests_before: int
    bytes: int | None
    last_ns: int | None


class Worst(msgspec.Struct, frozen=True, kw_only=True):
    """The hour with most requests that were late, or with most requests where none was, and what limited it."""

    window: Window
    requests: int
    late: int
    diagnosis: Diagnosis
    command: str
    """Shows the diagnosis with its figures."""


class Changed(msgspec.Struct, frozen=True):
    """A change of the journal. ``when``: the last step that is dated, ns since the epoch."""

    change: Change
    when_ns: int


class Review(msgspec.Struct, frozen=True, kw_only=True):
    """The whole review."""

    window: Window
    baseline: Window
    source: str
    """Where places of replicas and bytes of adapters come from."""
    now: Signals
    before: Signals
    advice: Advice
    worst: Worst | None
    series: Series
    hottest: tuple[Asked, ...]
    coldest: tuple[Asked, ...]
    """Of all that are known, least asked for first; none of ``hottest``."""
    adapters: int
    """Known ones: of the settings, or asked for in one of the windows."""
    adapter_bytes: int | None
    """Of all of these; ``None``: of some they are not known."""
    pins: tuple[Pinned, ...]
    fresh: tuple[Fresh, ...]
    changes: tuple[Changed, ...]
    proposals: tuple[Proposal, ...]
    missing: tuple[str, ...]
    """Sentences: what is missing, and what would supply it."""


def review(
    reader: RecordReader,
    window: Window,
    facts: Facts,
    standing: Standing,
    changes: list[Change],
    names: Names,
    *,
    slo_s: float = 1.0,
    pool_versions: bool = False,
) -> Review:
    """The review of ``window``. ``reader`` has ``reach(window)`` open."""
    baseline = before(window)
    now = measure(reader, window, facts, slo_s=slo_s, pool_versions=pool_versions)
    was = measure(reader, baseline, facts, slo_s=slo_s, like=now.version, pool_versions=pool_versions)
    advice = advise(reader, window.until_ns, facts, Targets(), pool_versions=pool_versions)
    worst = _worst(reader, now, facts, names, pool_versions)
    hottest, coldest = _extremes(now, was, facts, last_asked(reader, window.until_ns))
    known = {*facts.adapter_bytes, *now.adapters, *was.adapters}
    sizes = [facts.adapter_bytes.get(name) for name in known]
    return Review(
        window=window,
        baseline=baseline,
        source=facts.source,
        now=now,
        before=was,
        advice=advice,
        worst=worst,
        series=read_series(reader, now, was),
        hottest=hottest,
        coldest=coldest,
        adapters=len(known),
        adapter_bytes=None if None in sizes or not sizes else sum(size for size in sizes if size is not None),
        pins=judge_pins(standing, advice.ranking, now, facts),
        fresh=fresh(reader, Window(reach(window).since_ns, window.since_ns), window.until_ns),
        changes=_changes(changes, window),
        proposals=_proposals(now, advice, worst, standing, changes),
        missing=tuple(dict.fromkeys(_missing(now, was, advice))),
    )


def reach(window: Window) -> Window:
    """The moments that a review of ``window`` looks at."""
    return Window(max(0, min(before(window).since_ns, span(window.until_ns).since_ns)), window.until_ns)


def _worst(reader: RecordReader, now: Signals, facts: Facts, names: Names, pool: bool) -> Worst | None:
    """Held against the hour before it, as ``loraledger diagnose`` does."""
    hour = worst_hour(reader, now)
    if hour is None:
        return None
    there = measure(reader, hour.window, facts, slo_s=now.slo_s, like=now.version, pool_versions=pool)
    earlier = measure(reader, before(hour.window), facts, slo_s=now.slo_s, like=now.version, pool_versions=pool)
    words = ["loraledger", "diagnose", "--record", names.record]
    if names.settings is not None:
        words += ["--config", names.settings]
    words += ["--from", iso(hour.window.since_ns), "--to", iso(hour.window.until_ns)]
    found = diagnose(there, earlier, facts, record=names.record, settings=names.settings or "loraledger.yaml")
    return Worst(window=hour.window, requests=hour.requests, late=hour.late, diagnosis=found, command=shlex.join(words))


def _extremes(
    now: Signals, was: Signals, facts: Facts, last: dict[str, int]
) -> tuple[tuple[Asked, ...], tuple[Asked, ...]]:
    """The adapters that are asked for most and least."""
    asked = []
    for name in {*facts.adapter_bytes, *now.adapters, *was.adapters}:
        mine, earlier = now.adapters.get(name), was.adapters.get(name)
        requests, before_ = (0 if group is None else group.requests for group in (mine, earlier))
        asked.append(Asked(name, requests, before_, facts.adapter_bytes.get(name), last.get(name)))
    asked.sort(key=lambda one: (-one.requests, -one.requests_before, one.adapter))
    hottest = [one for one in asked[:EXTREMES] if one.requests]
    cold = sorted(asked[len(hottest) :], key=lambda one: (one.requests, one.last_ns or 0, one.adapter))
    return tuple(hottest), tuple(cold[:EXTREMES])


def _changes(changes: list[Change], window: Window) -> tuple[Changed, ...]:
    """Those that were open in the window, the latest first."""
    found = [
        Changed(change, change.ended_ns or change.began_ns or change.proposed_ns)
        for change in changes
        if change.proposed_ns < window.until_ns and (change.open or (change.ended_ns or 0) >= window.since_ns)
    ]
    return tuple(sorted(found, key=lambda one: (-one.when_ns, one.change.id)))


def _proposals(
    now: Signals, advice: Advice, worst: Worst | None, standing: Standing, changes: list[Change]
) -> tuple[Proposal, ...]:
    if now.total is None:
        return ()
    ground = Ground(
        standing=standing,
        advice=advice,
        worst=None if worst is None else worst.diagnosis,
        total=now.total,
        minutes=now.window.minutes,
        preemptions_per_1000=advice.targets.preemptions_per_1000,
    )
    return proposals(ground, changes)


def _missing(now: Signals, was: Signals, advice: Advice) -> Iterator[str]:
    yield from now.quality.notes
    if was.total is None:
        yield "No request arrived in the window before: nothing is compared."
    yield from (_sentence(text) for text in (*advice.slots.missing, *advice.notes))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")
