"""What to try next: changes of one variable each, ready to be proposed.

Theory of operation. A finding that names a remedy becomes a command, in the order of what they rest on: three weeks (the rule for
slots), the window (the policy), one week (pins), an hour (the diagnosis of the worst one, bursts). Nothing is guessed: where the
value in force is not known, or the same variable is being changed already, there is no proposal. Nor is there one that could not be
tried: of pins or by preemptions without a probe in every engine, for a part of one tenant or of one replica. None of them is a
promise: a proposed change is replayed before it goes anywhere, and taken back by itself if its target is not met or a guardrail
broken.

Targets and guardrails are in their metric's unit: of times a tenth of what the week had. A rollout is given the time in which its
share sees ``SEEN`` requests at the week's rate.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from typing import Final

import msgspec

from loraledger.kernel.affinity import BoundedAffinity
from loraledger.operate.change import Change, Guardrail, Metric, Target, Value
from loraledger.operate.review.standing import Standing
from loraledger.signals.diagnosis import Diagnosis
from loraledger.signals.figures import Group
from loraledger.signals.rules.advice import Advice
from loraledger.units import NS_PER_S, spell_duration

MOST: Final = 3
SHARE: Final = 0.1
SEEN: Final = 1000
"""Requests of the treated share in the time that a rollout gets."""
_HOUR_NS: Final = 3600 * NS_PER_S
_LONGEST_HOURS: Final = 7 * 24
_LEAST_HITS: Final = 0.02
_PART: Final = 0.1
_MOST_HELD: Final = 0.25
_PARTS: Final = 2


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """One change: ``least`` of the target and guardrails' limits in their metric's unit."""

    variable: str
    before: Value
    after: Value
    target: Target
    guardrails: tuple[Guardrail, ...]
    share: float
    window_ns: int
    why: str

    @property
    def command(self) -> str:
        """Ready to paste."""
        words = [
            "loraledger", "change", "propose", self.variable,
            "--from", _spelled(self.before), "--to", _spelled(self.after),
            "--target", f"{self.target.metric}:{self.target.least:g}",
        ]  # fmt: skip
        for guardrail in self.guardrails:
            words += ["--guard", f"{guardrail.metric}:{guardrail.worse_by:g}"]
        words += ["--share", f"{self.share * 100:g}%", "--within", spell_duration(self.window_ns), "--why", self.why]
        return shlex.join(words)


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """What proposals are made of. ``worst``: the diagnosis of the worst hour. ``total``: the window's figures."""

    standing: Standing
    advice: Advice
    worst: Diagnosis | None
    total: Group
    minutes: float
    preemptions_per_1000: float


def proposals(ground: Ground, changes: list[Change]) -> tuple[Proposal, ...]:
    """At most ``MOST``, the best founded first; none of a variable that is being changed, or of which no part could be tried."""
    taken = {change.variable for change in changes if change.open} | _whole(ground.standing)
    found: list[Proposal] = []
    for proposal in (*_slots(ground), *_policy(ground), *_pins(ground), *_diagnosed(ground), *_bursts(ground)):
        if proposal.variable not in taken and proposal.before != proposal.after:
            taken.add(proposal.variable)
            found.append(proposal)
    return tuple(found[:MOST])


def _whole(now: Standing) -> set[str]:
    """Variables that all would have at once: of one tenant, or one replica, there is no part."""
    found: set[str] = set()
    if now.tenants is not None and now.tenants < _PARTS:
        found |= {"policy", "policy.growth_share", "tenant.concurrency"}
    if now.replicas is not None and now.replicas < _PARTS:
        found |= {"pins", "slots", "host_entries"}
    return found


def _slots(ground: Ground) -> Iterator[Proposal]:
    """The rule of three weeks; or the worst hour, where the rule has nothing against it."""
    rule, slots, worst = ground.advice.slots, ground.standing.slots, ground.worst
    if slots is None:
        return
    if rule.verdict == "fires":
        said = "; ".join(condition.words for condition in rule.conditions)
        yield _proposal(ground, "slots", slots, 2 * slots, _hits(), ("preemptions", "ttft_p99"), said)
    elif worst is not None and worst.cause == "slots" and all(one.holds is not False for one in rule.conditions):
        why = (
            "more adapters in use than slots in the worst hour; the three-week rule lacks figures and is not against it"
        )
        yield _proposal(ground, "slots", slots, 2 * slots, _hits(), ("preemptions", "ttft_p99"), why)


def _pins(ground: Ground) -> Iterator[Proposal]:
    """Where they would have saved a part of the busiest hour's loads. Half of that is asked for."""
    ranking = ground.advice.ranking
    if ranking is None or ranking.total is None or not ranking.pins or not ground.standing.probed:
        return
    total = ranking.total
    gain = (total.lru - total.pinned) / total.uses if total.uses else 0.0
    if gain < _LEAST_HITS:
        return
    before: Value = [list(pair) for pair in ground.standing.ranking]
    after: Value = [[pin.replica, pin.adapter] for pin in ranking.pins]
    why = f"in the busiest hour LRU brought adapters in {total.lru:,} times, with these pins {total.pinned:,} times"
    target = Target("hit_rate", _digits(gain / 2))
    yield _proposal(ground, "pins", before, after, target, ("preemptions", "ttft_p99"), why)


def _diagnosed(ground: Ground) -> Iterator[Proposal]:
    """By the mechanism of the worst hour."""
    worst, now = ground.worst, ground.standing
    if worst is None or worst.pool == "nothing":
        return
    why = f"the worst hour was limited by {worst.pool} ({worst.cause}, {worst.confidence} confidence)"
    faster = _faster(ground)
    if worst.cause in ("hot adapter", "skew"):
        if now.policy == BoundedAffinity.name:
            share = now.params["growth_share"]
            yield _proposal(ground, "policy.growth_share", share, share / 2, faster, ("hit_rate", "preemptions"), why)
    elif worst.cause == "slow loads" and now.host_entries is not None:
        entries = now.host_entries
        yield _proposal(ground, "host_entries", entries, 2 * entries, faster, ("preemptions", "hit_rate"), why)
    elif worst.pool in ("kv", "floor"):
        yield from _for_kv(ground, why)
    if worst.pool in ("kv", "floor", "demand") and now.replicas is not None:
        count = now.replicas
        yield _proposal(ground, "replicas", count, count + 1, faster, ("hit_rate", "refused"), why)


def _for_kv(ground: Ground, why: str) -> Iterator[Proposal]:
    """Slots that were never in use at once are worth more as KV blocks."""
    slots, places = ground.standing.slots, ground.total.working_set
    most = None if places is None else places.in_flight_max
    if slots is not None and most is not None and 0 < most < slots:
        why = f"{why}; at most {most} adapters were in flight at once"
        fewer = Target("preemptions", _digits(ground.preemptions_per_1000 * _PART))
        target = fewer if ground.standing.probed else _faster(ground)
        yield _proposal(ground, "slots", slots, most, target, ("hit_rate", "ttft_p99"), why)


def _bursts(ground: Ground) -> Iterator[Proposal]:
    """One limit for all tenants: what the largest of the bursting ones needs; none that holds more than bursts."""
    bursts, limit, worst = ground.advice.bursts, ground.standing.concurrency, ground.worst
    if not bursts or limit is None or worst is None or worst.pool == "nothing":  # nobody waits for anybody then
        return
    wanted = max(burst.limit for burst in bursts)
    held = sum(burst.held for burst in bursts)
    if wanted >= limit or not 0 < held <= _MOST_HELD * sum(burst.requests for burst in bursts):
        return
    why = f"{len(bursts)} tenants come in bursts; in the busiest hour this limit would have held {held:,} requests"
    faster = _faster(ground)
    yield _proposal(ground, "tenant.concurrency", limit, wanted, faster, ("refused", "hit_rate"), why)


def _policy(ground: Ground) -> Iterator[Proposal]:
    """Another policy than the default one, with hits below target."""
    policy, rate = ground.standing.policy, ground.total.hits.gpu_rate
    if policy is None or policy == BoundedAffinity.name or rate is None or rate >= ground.advice.targets.hit_rate:
        return
    why = f"{rate:.1%} of requests found their adapter in a slot under {policy}"
    yield _proposal(ground, "policy", policy, BoundedAffinity.name, _hits(), ("ttft_p99", "preemptions"), why)


def _proposal(
    ground: Ground,
    variable: str,
    before: Value,
    after: Value,
    target: Target,
    guards: tuple[Metric, ...],
    why: str,
) -> Proposal:
    told = [metric for metric in guards if metric != "preemptions" or ground.standing.probed]
    limits = {metric: _limit(ground, metric) for metric in told if metric != target.metric}
    return Proposal(
        variable=variable,
        before=before,
        after=after,
        target=target,
        guardrails=tuple(Guardrail(metric, limit) for metric, limit in limits.items()),
        share=SHARE,
        window_ns=_within(ground),
        why=why,
    )


def _limit(ground: Ground, metric: Metric) -> float:
    """How much worse it may get."""
    if metric == "preemptions":
        return ground.preemptions_per_1000
    if metric == "ttft_p99":
        return _digits((ground.total.ttft.p99 if ground.total.ttft is not None else 1.0) * _PART)
    return 0.01


def _hits() -> Target:
    return Target("hit_rate", _LEAST_HITS)


def _faster(ground: Ground) -> Target:
    return Target("ttft_p99", _limit(ground, "ttft_p99"))


def _within(ground: Ground) -> int:
    """Whole hours, an hour at least and a week at most."""
    rate = ground.total.requests / ground.minutes * 60 * SHARE
    return min(_LONGEST_HOURS, max(1, math.ceil(SEEN / rate))) * _HOUR_NS


def _digits(value: float) -> float:
    """Two of them: a limit of 0.2907 s pretends to more than a week can tell."""
    return float(f"{value:.2g}")


def _spelled(value: Value) -> str:
    """Text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
