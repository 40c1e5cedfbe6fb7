"""Admission and residency rules over rolling windows: ``advise``.

Theory of operation. Advice is about weeks, so it must not be led by an hour: whether slots are too few is judged over three weeks,
what to keep in them by the last one. Two passes over the requests, one for each, count what that needs. Only what depends on the
order of single requests (what pins would have saved, bursts, oddities) is worked out on the last week's busiest hour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loraledger.record.reader import RecordReader
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Version, Window
from loraledger.signals.rules.advice import WEEKS, Advice, Ranking, Targets
from loraledger.signals.rules.bursts import LEAST_MINUTES, find_bursts
from loraledger.signals.rules.oddities import harmless_misses, slow_hits
from loraledger.signals.rules.ranking import rank
from loraledger.signals.rules.sample import Sample, read_sample
from loraledger.signals.rules.slots import judge_slots
from loraledger.signals.rules.weeks import HOUR_NS, WEEK_NS, Hour, read_hours, read_versions, span, weeks_of

__all__ = ["Advice", "Targets", "advise"]


def advise(
    reader: RecordReader, until_ns: int, facts: Facts, targets: Targets, *, pool_versions: bool = False
) -> Advice:
    """What the three weeks before ``until_ns`` advise. Rows of the version with most requests count, or all when pooled."""
    versions = read_versions(reader, span(until_ns))
    version = None if pool_versions or not versions else versions[0]
    hours = read_hours(reader, until_ns, version)
    slots = judge_slots(weeks_of(hours, until_ns), targets)
    last = Window(until_ns - WEEK_NS, until_ns)
    peak = _busiest(
        hours, last, min((one.first_ns for one in (versions if version is None else (version,))), default=0)
    )
    sample = None if peak is None else read_sample(reader, peak, version)
    ranking = rank(reader, last, version, facts, targets, sample)
    return Advice(
        until_ns=until_ns,
        targets=targets,
        version=version,
        versions=versions,
        slots=slots,
        ranking=ranking,
        sample=None if sample is None else sample.window,
        bursts=() if sample is None else find_bursts(sample, targets),
        slow_hits=() if sample is None else slow_hits(sample, facts, targets),
        harmless_misses=() if sample is None else harmless_misses(sample),
        notes=tuple(_notes(hours, version, versions, ranking, sample, facts)),
    )


def _busiest(hours: Sequence[Hour], week: Window, began_ns: int) -> Window | None:
    """The clock hour of the last week with most adapter-bearing arrivals, or with most requests where none bears one.

    What of it lies before ``began_ns``, the first request, was not silence: nobody looked.
    """
    mine = [one for one in hours if one.week == WEEKS - 1]
    if not mine:
        return None
    busiest = min(mine, key=lambda one: (-one.bearing, -one.requests, one.hour))
    since, until = max(busiest.hour, week.since_ns), min(busiest.hour + HOUR_NS, week.until_ns)
    return Window(max(since, min(began_ns, until - 1)), until)


def _notes(
    hours: Sequence[Hour],
    version: Version | None,
    versions: Sequence[Version],
    ranking: Ranking | None,
    sample: Sample | None,
    facts: Facts,
) -> Iterator[str]:
    """What was left out, and what would supply it."""
    if not hours:
        yield "no request arrived in the three weeks"
        return
    if version is not None and len(versions) > 1:
        left = sum(other.requests for other in versions[1:])
        others, verb = (
            (f"{len(versions) - 1} other versions", "are") if len(versions) > 2 else ("1 other version", "is")
        )
        yield f"{others} with {left:,} requests {verb} left out: pool them to count them in"
    yield "ids are not compared over three weeks: a row that is there twice counts twice in the weekly figures"
    if sample is None:
        yield "no request arrived in the last week: nothing can be said of bursts, slow hits and harmless misses"
    elif sample.cut:
        yield f"of the busiest hour the first {len(sample.seen):,} requests were read ({sample.window.minutes:.1f} minutes)"
    if sample is not None and sample.window.minutes <= LEAST_MINUTES - 1:
        yield f"bursts need a sample of {LEAST_MINUTES} minutes; this one has {sample.window.minutes:.1f}"
    if ranking is None:
        yield "no request with an adapter went to a replica in the last week: there is nothing to rank"
        return
    names = {worth.replica for worth in ranking.worths}
    if unknown := sorted(name for name in names if facts.replica(name).slots is None):
        yield f"the slots of {', '.join(unknown)} are not known ({facts.source}): no gain is worked out there"
    if any(worth.bytes is None for worth in ranking.worths):
        yield f"the bytes of some adapters are not known ({facts.source}): their worth is given per slot only"
    if all(worth.penalty is None for worth in ranking.worths):
        yield "nobody told what a miss waits for: adapters are ranked by their requests; install the engine's probe"
