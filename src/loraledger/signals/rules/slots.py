"""Whether to expand the adapter slots, or to split them anew: a rule over three weeks.

Theory of operation. Slots are paid for in KV blocks by everybody, for good, so the rule asks for all of three things:

- **hit_rate**: in each of three weeks the peak hour's hit rate was below target. One bad week is an event, three are a want.
- **preparation**: over the three weeks together, preparation is more than its share of all time to first tokens. Hits save nothing
  else. The share is taken over all weeks, since it weighs what would be gained against what people waited at all.
- **preemptions**: in no week were there as many KV preemptions for 1,000 requests as the limit. Each week counts for itself:
  the worst one would bear the smaller cache.

A figure that stands exactly at its target does not speak for a change. Where preparation was not told of some requests, the rest
of their time to the first token may be preparation or not: so the share has a lower and an upper end, and is unknown only where
the limit lies between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from loraledger.signals.rules.advice import Condition, ConditionName, SlotRule, Targets, Week
from loraledger.units import NS_PER_S

_MEANS: Final[dict[ConditionName, str]] = {
    "hit_rate": "the slots suffice at the peak, so more of them would cost KV blocks for nothing",
    "preparation": "loads are not what the first token waits for, so more slots would not be felt:"
    " look for what it does wait for (loraledger diagnose)",
    "preemptions": "KV is short already and more slots would take more of it:"
    " add a replica, or tighten token limits, and leave the slots",
}
_NOTHING: Final = "nothing is to be done about slots"


def judge_slots(weeks: Sequence[Week], targets: Targets) -> SlotRule:
    """The rule on ``weeks``, oldest first."""
    conditions = (_hit_rate(weeks, targets), _preparation(weeks, targets), _preemptions(weeks, targets))
    missing = tuple(_missing(weeks, conditions))
    fires = all(condition.holds for condition in conditions)
    return SlotRule("fires" if fires else "holds back", tuple(weeks), conditions, _means(conditions), missing)


def _means(conditions: Sequence[Condition]) -> str:
    failed = [condition.name for condition in conditions if condition.holds is False]
    unknown = [condition.name for condition in conditions if condition.holds is None]
    if not failed and not unknown:
        return "expand the slots, or split them anew between replicas; replay it first: slots take KV blocks"
    if not failed:
        return f"{' and '.join(unknown)} cannot be judged yet: record what is missing before the slots are changed"
    reasons = "; ".join(_MEANS[name] for name in failed)
    return f"{_NOTHING}: {reasons}" if failed == ["hit_rate"] else reasons


def _hit_rate(weeks: Sequence[Week], targets: Targets) -> Condition:
    rates = [week.hit_rate for week in weeks]
    known = [rate for rate in rates if rate is not None]
    holds: bool | None = None
    if any(rate >= targets.hit_rate for rate in known):
        holds = False
    elif len(known) == len(rates):
        holds = True
    said = ", ".join("unknown" if rate is None else _percent(rate, targets.hit_rate) for rate in rates)
    words = f"peak-hour hit rates {said}; below {_percent(targets.hit_rate)} in all {len(weeks)} weeks is asked for"
    return Condition("hit_rate", holds, max(known, default=None), targets.hit_rate, words)


def _preparation(weeks: Sequence[Week], targets: Targets) -> Condition:
    waited, limit = sum(week.ttft_ns for week in weeks), targets.preparation_share
    if waited <= 0:
        return Condition(
            "preparation", None, None, limit, "no request of the three weeks has a time to its first token"
        )
    known, rest = sum(week.preparation_ns for week in weeks), sum(week.untold_ns for week in weeks)
    least, most = known / waited, (known + rest) / waited
    holds = True if least > limit else False if most <= limit else None
    said = f"{_percent(least, limit)} of the time to first tokens was preparation"
    if rest:
        said = f"{_percent(least, limit)} to {_percent(most, limit)} of the time to first tokens was preparation, as far as told"
    return Condition("preparation", holds, least, limit, f"{said}; more than {_percent(limit)} is asked for")


def _preemptions(weeks: Sequence[Week], targets: Targets) -> Condition:
    rates, limit = [week.preemptions_per_1000 for week in weeks], targets.preemptions_per_1000
    known = [rate for rate in rates if rate is not None]
    holds: bool | None = None
    if any(rate >= limit for rate in known):
        holds = False
    elif len(known) == len(rates):
        holds = True
    said = ", ".join("unknown" if rate is None else f"{rate:.1f}" for rate in rates)
    words = f"KV preemptions for 1,000 requests {said}; fewer than {limit:g} in each week are asked for"
    return Condition("preemptions", holds, max(known, default=None), limit, words)


def _missing(weeks: Sequence[Week], conditions: Sequence[Condition]) -> Iterator[str]:
    """What would make the unknown conditions known."""
    unknown = {condition.name for condition in conditions if condition.holds is None}
    for week in weeks:
        name = f"the week that ends {_day(week.window.until_ns)}"
        if not week.requests:
            yield f"{name} has no requests"
        elif "hit_rate" in unknown and not week.peak_known:
            yield f"{name} has no adapter-bearing request of known hit class in its peak hour"
        if week.requests and "preemptions" in unknown and not week.preemptions_told:
            yield f"{name} says nothing of KV preemptions: install the engine's probe"
    if "preparation" in unknown and (untold := sum(week.answered - week.told for week in weeks)):
        answered = sum(week.answered for week in weeks)
        yield f"preparation was not told of {untold:,} of {answered:,} answered requests: install the engine's probe"


def _percent(share: float, target: float | None = None) -> str:
    """With as many digits as it takes to be told from ``target``."""
    digits = 1
    while target is not None and share != target and digits < 4 and f"{share:.{digits}%}" == f"{target:.{digits}%}":
        digits += 1
    return f"{share:.{digits}%}".replace("%", " %")


def _day(ns: int) -> str:
    return f"{datetime.fromtimestamp(ns // NS_PER_S, UTC):%Y-%m-%d %H:%M} UTC"
