"""Step 3: is more waited for a first token, and in which part of the way?

Theory of operation. Whether anything *limits* is decided here: what was waited got worse than the baseline (ratio and amount, see
``thresholds``), or it is bad however it was before. Every other step only says why.

The parts of ``Split`` are means a request. Growth is shared over the parts that grew. Where no probe tells, the time inside the
engine is one part, and ``preparation`` is a lower bound.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loraledger.signals.diagnosis import thresholds as at
from loraledger.signals.diagnosis.statistics import share_z
from loraledger.signals.diagnosis.verdict import Finding, Verdict
from loraledger.signals.diagnosis.view import Both, Sheet, View, at_least, quotient, ratio, rise
from loraledger.signals.figures import Group, Split, Spread

QUESTION: Final = "Is more waited for the first token, and where?"
MEAN: Final = "TTFT, mean"
P50: Final = "TTFT, median"
P90: Final = "TTFT, 90th percentile"
P99: Final = "TTFT, 99th percentile"
ATTAINMENT: Final = "attainment"
UNSERVED: Final = "requests without an answer"
OLDEST: Final = "oldest wait"
WARM: Final = "TTFT of hits, median"
COLD: Final = "TTFT of misses, 99th percentile"
ITL: Final = "time between tokens, mean"
PART: Final = "part that grew most"
PART_SHARE: Final = "its share of the growth"
LARGEST_PART: Final = "largest part"
LARGEST_SHARE: Final = "its share of TTFT"
PREPARATION: Final = "preparation in TTFT"
PARTS: Final = {
    "gateway queue": "gateway_queue",
    "preparation": "preparation",
    "engine queue": "engine_queue",
    "prefill": "prefill",
    "unattributed": "unattributed",
    "engine, undivided": "engine",
}
_INSIDE: Final = ("engine_queue", "prefill", "unattributed")
_SPREADS: Final = {MEAN: "mean", P50: "p50", P90: "p90", P99: "p99"}
_SERVED: Final = ("ok", "client_gone", "client_error", "open")


class Waiting(msgspec.Struct, frozen=True):
    """``worse``: names of the rows that got worse; ``bad``: of those that are bad in themselves."""

    finding: Finding
    worse: tuple[str, ...]
    bad: tuple[str, ...]
    part: str | None
    """The part of the way that grew most; without a baseline the largest."""
    preparation: Both
    """Its share of the time to first token."""
    warm: Both
    """Median time to first token of those that found their adapter in a slot, or need none."""
    itl: float | None
    """Ratio of mean times between tokens."""

    @property
    def limits(self) -> bool:
        """Whether there is anything to explain."""
        return bool(self.worse or self.bad)


def waiting(view: View, starved: bool) -> Waiting:
    """Take the step. ``starved``: an adapter is kept out of the slots."""
    sheet = Sheet()
    for name, which in _SPREADS.items():
        sheet.put(name, _both(view, which), "s")
    sheet.put(ATTAINMENT, view.both(lambda group: group.attainment), "share")
    sheet.put(UNSERVED, view.both(_unserved_share), "share")
    sheet.put(OLDEST, view.both(lambda group: group.oldest_wait), "s")
    warm = view.both(_warm)
    sheet.put(WARM, warm, "s")
    sheet.put(COLD, view.both(lambda group: group.cold_ttft_p99), "s")
    itl = view.both(lambda group: group.itl_mean if group.itl is None else group.itl.mean)
    sheet.put(ITL, itl, "s")
    part = _put_parts(sheet, view)
    preparation = view.both(lambda group: None if group.split is None else group.split.preparation_share)
    sheet.put(PREPARATION, preparation, "share")
    worse, bad = _worse(view), _bad(view, starved)
    verdict, sentence = _verdict(view, worse, bad, part)
    return Waiting(
        finding=Finding(3, QUESTION, sheet.evidence, verdict, sentence),
        worse=worse,
        bad=bad,
        part=part,
        preparation=preparation,
        warm=warm,
        itl=ratio(itl),
    )


def _verdict(view: View, worse: tuple[str, ...], bad: tuple[str, ...], part: str | None) -> tuple[Verdict, str]:
    if worse:
        return "seen", f"More is waited than before ({', '.join(worse)})" + (
            f", most of it in: {part}." if part else "."
        )
    if bad:
        return "seen", f"What is waited is bad in itself ({', '.join(bad)})."
    if view.total.ttft is None and view.total.attainment is None:
        return "unknown", "No request got a first token that could be timed."
    if view.before is None:
        return "not seen", "What is waited is not bad in itself; without a baseline nothing says whether it is more."
    return "not seen", "No more is waited than before."


def _figure(spread: Spread | None, which: str) -> float | None:
    return None if spread is None or not spread.n else float(getattr(spread, which))


def _both(view: View, which: str) -> Both:
    return view.both(lambda group: _figure(group.ttft, which))


def judged(group: Group) -> int:
    """Requests that the client did not get wrong."""
    return max(0, group.requests - group.by_status.get("client_error", 0))


def late(group: Group) -> int | None:
    """Of these, those without a first token within the objective."""
    return None if group.attainment is None else round((1 - group.attainment) * judged(group))


def _unserved(group: Group) -> int:
    return sum(count for status, count in group.by_status.items() if status not in _SERVED)


def _unserved_share(group: Group) -> float | None:
    return quotient(_unserved(group), judged(group))


def _warm(group: Group) -> float | None:
    spreads = [group.ttft_by_class[name] for name in ("gpu", "base") if name in group.ttft_by_class]
    return _figure(max(spreads, key=lambda spread: spread.n), "p50") if spreads else None


def _put_parts(sheet: Sheet, view: View) -> str | None:
    """Rows of the parts; returns the one that grew most."""
    parts = {name: _part(view, field) for name, field in PARTS.items()}
    for name, pair in parts.items():
        sheet.put(f"TTFT in {name}", pair, "s")
    compared = view.before is not None and view.before.split is not None
    grew = {name: rise(pair) if compared else pair[0] for name, pair in parts.items()}
    known = {name: value for name, value in grew.items() if value is not None and value > 0}
    if not known:
        return None
    part = max(known, key=lambda name: known[name])
    sheet.put_one(PART if compared else LARGEST_PART, part)
    sheet.put_one(PART_SHARE if compared else LARGEST_SHARE, known[part] / sum(known.values()), "share")
    return part


def _part(view: View, field: str) -> Both:
    return view.both(lambda group: _each(group.split, field))


def _each(split: Split | None, field: str) -> float | None:
    """Mean seconds a request. Where no probe told anything, what is inside the engine is known as a whole only."""
    if split is None or (field in _INSIDE and split.engine > 0 and not any(getattr(split, each) for each in _INSIDE)):
        return None
    return quotient(float(getattr(split, field)), split.n)


def _worse(view: View) -> tuple[str, ...]:
    now, before, slo = view.total, view.before, view.now.slo_s
    if before is None:
        return ()
    found = _worse_spread(now.ttft, before.ttft, slo) if now.ttft is not None and before.ttft is not None else []
    missed, missed_before = late(now), late(before)
    if missed is not None and missed_before is not None:
        shares = (quotient(missed, judged(now)), quotient(missed_before, judged(before)))
        if at_least(rise(shares), at.LATE) and share_z(missed, judged(now), missed_before, judged(before)) >= at.SIGMA:
            found.append(ATTAINMENT)
    lost, lost_before = _unserved(now), _unserved(before)
    more = at_least(rise(view.both(_unserved_share)), at.LOST)
    if more and share_z(lost, judged(now), lost_before, judged(before)) >= at.SIGMA:
        found.append(UNSERVED)
    return tuple(found)


def _worse_spread(now: Spread, before: Spread, slo: float) -> list[str]:
    if now.n < at.FEW or before.n < at.FEW:
        return []

    def grew(which: str, times: float, amount: float) -> bool:
        one, other = float(getattr(now, which)), float(getattr(before, which))
        return one >= times * other and one - other >= amount * slo

    found = []
    if grew("mean", at.MEAN_RATIO, at.MEAN_AMOUNT) or grew("mean", at.DOUBLED, at.DOUBLED_AMOUNT):
        found.append(MEAN)
    if grew("p50", at.MEAN_RATIO, at.MEAN_AMOUNT):
        found.append(P50)
    if grew("p90", at.DOUBLED, at.TENTH_AMOUNT) and grew("mean", at.TENTH_MEAN, 0):
        found.append(P90)
    if min(now.n, before.n) >= at.MANY and grew("p99", at.TAIL_RATIO, at.TAIL_AMOUNT):
        found.append(P99)
    return found


def _bad(view: View, starved: bool) -> tuple[str, ...]:
    """Rows that are bad however it was before. A baseline that fares alike says that this is how the fleet is run."""
    least = at.ATTAINMENT if view.before is None else at.ATTAINMENT_CHRONIC
    found = []
    if view.total.attainment is not None and view.total.attainment < least:
        found.append(ATTAINMENT)
    if at_least(_unserved_share(view.total), at.UNSERVED) and (
        view.before is None or at_least(_unserved_share(view.total), 1 - at.ATTAINMENT_CHRONIC)
    ):
        found.append(UNSERVED)
    if starved and view.before is None:
        found.append(OLDEST)
    return tuple(found)
