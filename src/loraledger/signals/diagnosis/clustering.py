"""Step 4: are misses and waiting clustered on replicas (routing), or spread over them (capacity)?

Theory of operation. Three things must come together before routing is to blame: one replica gets far more of the requests than the
others, and than before; those who wait are there; and another one has room. Requests are counted, not tokens in flight: on a
replica that is slow for another reason tokens pile up too, although nobody sends more to it.

Whether lateness and misses depend on the replica is tested by Pearson's chi-squared, and how strongly by Cramer's V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from loraledger.signals.diagnosis import thresholds as at
from loraledger.signals.diagnosis.statistics import Clustering, clustering
from loraledger.signals.diagnosis.verdict import Finding, Verdict
from loraledger.signals.diagnosis.view import Sheet, View, at_least, quotient
from loraledger.signals.diagnosis.waiting import judged, late
from loraledger.signals.figures import Group, Signals

QUESTION: Final = "Are misses and waiting clustered on replicas?"
BUSIEST: Final = "busiest replica"
SHARE: Final = "its share of the requests"
IMBALANCE: Final = "its requests to the mean of replicas"
ACTIVE: Final = "its tokens in flight to the mean of replicas"
ITS_WAIT: Final = "TTFT on it, mean"
OTHER_WAIT: Final = "TTFT on the others, mean"
LEAST: Final = "replica that waits least"
LEAST_WAIT: Final = "TTFT there, mean"
TOP_ADAPTER: Final = "adapter with most of its tokens"
TOP_SHARE: Final = "share of its tokens for that adapter"
COPIES: Final = "replicas an adapter was served by, mean"
LATE_V: Final = "Cramer's V of late requests by replica"
LATE_P: Final = "p of chi-squared of late requests by replica"
MISS_V: Final = "Cramer's V of misses by replica"
MISS_P: Final = "p of chi-squared of misses by replica"


class Clustered(msgspec.Struct, frozen=True):
    """What the step found. ``routing``: one replica is overloaded while another has room."""

    finding: Finding
    routing: bool
    busiest: str | None
    top_adapter: str | None
    top_share: float | None
    grew: bool
    """The busiest one's share grew."""


def clustered(view: View) -> Clustered:
    """Take the step."""
    sheet = Sheet()
    busiest = max(view.names, key=lambda name: (_requests(view.now, name), name), default=None)
    if busiest is None or len(view.names) < 2:
        sentence = "There is one replica: nothing can be clustered." if busiest else "No request names its replica."
        finding = Finding(4, QUESTION, sheet.evidence, "not seen" if busiest else "unknown", sentence)
        return Clustered(finding, False, busiest, None, None, False)
    group = view.now.replicas.get(busiest)
    imbalance = view.signals(lambda signals: _imbalance(view, signals, busiest))
    its = view.signals(lambda signals: _wait(signals, busiest, True))
    others = view.signals(lambda signals: _wait(signals, busiest, False))
    sheet.put_one(BUSIEST, busiest)
    sheet.put(SHARE, view.signals(lambda signals: _share(signals, busiest)), "share")
    sheet.put(IMBALANCE, imbalance, "times")
    sheet.put(ACTIVE, view.signals(lambda signals: _active(view, signals, busiest)), "times")
    sheet.put(ITS_WAIT, its, "s")
    sheet.put(OTHER_WAIT, others, "s")
    top, top_share = (None, None) if group is None else (group.top_adapter, group.top_adapter_share)
    sheet.put_one(TOP_ADAPTER, top)
    sheet.put_one(TOP_SHARE, top_share, "share")
    sheet.put(COPIES, view.signals(_copies), "replicas")
    late_test = _test(sheet, view, (LATE_V, LATE_P), lambda each: _table(late(each), judged(each)))
    miss_test = _test(
        sheet, view, (MISS_V, MISS_P), lambda each: _table(view.hits(each).misses, view.hits(each).adapter_bearing)
    )
    uneven = at_least(imbalance[0], at.IMBALANCE_ALONE if view.base is None else at.IMBALANCE)
    grew = at_least(quotient(*imbalance), at.IMBALANCE)
    room = _with_room(view, busiest)
    sheet.put_one(LEAST, room)
    sheet.put_one(LEAST_WAIT, None if room is None else _wait(view.now, room, True), "s")
    waits = at_least(quotient(its[0], others[0]), at.CLUSTERED) or _late_there(view, busiest, late_test)
    routing = uneven and (grew or view.base is None) and waits and room is not None
    verdict, sentence = _verdict(routing, late_test, miss_test, its[0] is not None)
    return Clustered(Finding(4, QUESTION, sheet.evidence, verdict, sentence), routing, busiest, top, top_share, grew)


def _verdict(
    routing: bool, late_test: Clustering | None, miss_test: Clustering | None, timed: bool
) -> tuple[Verdict, str]:
    if routing:
        return (
            "seen",
            "One replica is overloaded and the requests that wait are there, while another has room: routing.",
        )
    tests = {"late requests": late_test, "misses": miss_test}
    found = [what for what, test in tests.items() if test is not None and _strong(test)]
    if found:
        return (
            "not seen",
            f"More {' and '.join(found)} on some replicas, and no replica is overloaded while another has room.",
        )
    if not timed and late_test is None and miss_test is None:
        return "unknown", "Too little is known of single replicas."
    return "not seen", "Spread over the replicas: what is short is short everywhere."


def _strong(test: Clustering) -> bool:
    return test.v >= at.CRAMERS_V and test.p < at.P_VALUE


def _test(
    sheet: Sheet, view: View, names: tuple[str, str], read: Callable[[Group], tuple[int, int] | None]
) -> Clustering | None:
    """Rows of the test of what ``read`` counts on each replica, now and before."""
    found = _of_replicas(view.now, read)
    before = None if view.base is None else _of_replicas(view.base, read)
    sheet.put(names[0], (None if found is None else found.v, None if before is None else before.v))
    sheet.put(names[1], (None if found is None else found.p, None if before is None else before.p))
    return found


def _of_replicas(signals: Signals, read: Callable[[Group], tuple[int, int] | None]) -> Clustering | None:
    counted = {name: counts for name, group in signals.replicas.items() if (counts := read(group)) is not None}
    return clustering(counted)


def _table(with_: int | None, of: int) -> tuple[int, int] | None:
    return None if with_ is None else (with_, max(0, of - with_))


def _late_there(view: View, busiest: str, test: Clustering | None) -> bool:
    """Whether late requests are clustered, and on ``busiest`` more than on any other."""
    if test is None or not _strong(test):
        return False
    shares = {name: group.attainment for name, group in view.now.replicas.items() if group.attainment is not None}
    return busiest in shares and shares[busiest] == min(shares.values())


def _with_room(view: View, busiest: str) -> str | None:
    """Of the other replicas that could take more, the one that waits least: one that waits little, or hardly longer than before."""
    waits = {name: _wait(view.now, name, True) for name in view.names if name != busiest}
    fit = [name for name, wait in waits.items() if _has_room(view, name, wait)]
    return min(fit, key=lambda name: (waits[name] or 0.0, name), default=None)


def _has_room(view: View, name: str, wait: float | None) -> bool:
    if wait is None:
        return not _requests(view.now, name)
    before = None if view.base is None else _wait(view.base, name, True)
    if before is None:
        return wait < at.ROOM * view.now.slo_s
    return wait < at.MEAN_RATIO * before or wait - before < at.MEAN_AMOUNT * view.now.slo_s


def _requests(signals: Signals, name: str) -> int:
    group = signals.replicas.get(name)
    return 0 if group is None else group.requests


def _share(signals: Signals, name: str) -> float | None:
    return quotient(_requests(signals, name), sum(group.requests for group in signals.replicas.values()))


def _imbalance(view: View, signals: Signals, name: str) -> float | None:
    share = _share(signals, name)
    return None if share is None else share * len(view.names)


def _active(view: View, signals: Signals, name: str) -> float | None:
    tokens = {each: group.active_tokens for each, group in signals.replicas.items() if group.active_tokens is not None}
    share = quotient(tokens.get(name), sum(tokens.values()))
    return None if share is None else share * len(view.names)


def _wait(signals: Signals, name: str, inside: bool) -> float | None:
    """Mean time to first token on ``name``, or on all others."""
    spreads = [group.ttft for each, group in signals.replicas.items() if (each == name) is inside]
    known = [spread for spread in spreads if spread is not None]
    return quotient(sum(spread.n * spread.mean for spread in known), sum(spread.n for spread in known))


def _copies(signals: Signals) -> float | None:
    counts = [group.replicas for group in signals.adapters.values() if group.replicas]
    return sum(counts) / len(counts) if counts else None
