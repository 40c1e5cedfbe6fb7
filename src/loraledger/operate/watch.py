"""Whether a rollout goes on, is accepted, or is taken back: pure, from the blocks so far.

Theory of operation. The target and each guardrail is one sequential test (``sequential``) on the blocks' differences, held against
those of the same parts before the rollout: the parts are never alike. Looked at after every block:

- a guardrail that is surely worse than it may be: **roll back**, however good the target is;
- the target surely better by more than it has to be, and every guardrail surely within its bound: **accept**;
- the stated time is over: accept if the target is surely better and no guardrail worse, else roll back.

At the stated time a guardrail that is still undecided is looked at once more by a plain t-test, which sees smaller harm than a test
that may be looked at at any time; for half of the guardrails' ``ALPHA``. So a change without an effect is accepted with a chance of
``ALPHA`` at most, and one that is better and harms nothing is taken back for a guardrail's sake with a chance of ``ALPHA`` at most:
it is shared by the guardrails. A guardrail that nobody measured is not within its bound: a change is not accepted on it, neither
early nor at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from loraledger.operate.blocks import Block
from loraledger.operate.change import BETTER, Change, Metric
from loraledger.operate.sequential import FEWEST, Bounds, Sequential, Sums

ALPHA: Final = 0.05
Action = Literal["keep", "accept", "roll_back"]
TEST: Final = "anytime-valid t-test against the time before (Bayes factor with the right Haar prior)"


class Reading(msgspec.Struct, frozen=True):
    """One test: by how much the metric got better (target) or worse (guardrail), against ``limit``; all in its unit."""

    metric: Metric
    role: Literal["target", "guardrail"]
    limit: float
    bounds: Bounds
    called: Literal["above", "below", "undecided", "unknown"]
    """``unknown``: no block told both parts, of now or of before."""
    treated: float | None
    """Mean over the blocks that count."""
    control: float | None
    before: tuple[float, float] | None = None
    """The same two before the rollout; ``None`` where nobody knows."""


class Verdict(msgspec.Struct, frozen=True):
    """What to do, why in one sentence, and on what."""

    action: Action
    reason: str
    readings: tuple[Reading, ...]
    blocks: int


def judge(change: Change, blocks: Sequence[Block], now_ns: int, before: Sequence[Block] | None = None) -> Verdict:
    """The verdict on ``change``, which is rolling out, after ``blocks``.

    ``before``: blocks of the same members, as long, from before the rollout. ``None``: both parts are taken to be alike.
    """
    over = change.began_ns is not None and now_ns - change.began_ns >= change.window_ns
    share = ALPHA / 2 / max(1, len(change.guardrails))
    guardrails = [
        _read(blocks, before, rail.metric, "guardrail", rail.worse_by, share, last=share if over else None)
        for rail in change.guardrails
    ]
    target = _read(blocks, before, change.target.metric, "target", change.target.least, ALPHA)
    readings = (target, *guardrails)
    action, reason = _decide(target, guardrails, over)
    return Verdict(action, reason, readings, len(blocks))


def _decide(target: Reading, guardrails: list[Reading], over: bool) -> tuple[Action, str]:
    for rail in guardrails:
        if rail.called == "above":
            return "roll_back", f"guardrail {_worse(rail)}; {_state(target)}"
    unknown = [rail.metric for rail in guardrails if rail.called == "unknown"]
    if target.called == "above" and not unknown:
        if all(_within(rail) for rail in guardrails):
            return "accept", f"target {_better(target)}; every guardrail is within its bound"
        if over:
            return "accept", f"target {_better(target)}; no guardrail is worse by the stated time"
    if not over:
        return "keep", f"{_state(target)}; it has until the stated time"
    if target.called == "above":
        return "roll_back", f"guardrail {', '.join(unknown)} could not be measured by the stated time; {_state(target)}"
    return "roll_back", f"by the stated time {_state(target)}"


def _read(
    blocks: Sequence[Block],
    before: Sequence[Block] | None,
    metric: Metric,
    role: Literal["target", "guardrail"],
    limit: float,
    alpha: float,
    last: float | None = None,
) -> Reading:
    """Target: differences count when better is positive; guardrail: when worse is. ``last``: the level of one more look."""
    sign = 1 if (BETTER[metric] == "up") == (role == "target") else -1
    pairs, earlier = _pairs(blocks, metric), _pairs(before or (), metric)
    test = Sequential(alpha, before=None if before is None else Sums())
    for treated, control in pairs:
        test.add(sign * (treated - control))
    for treated, control in earlier:
        test.add_before(sign * (treated - control))
    bounds = test.bounds()
    known = bool(pairs) and (before is None or bool(earlier))
    called = bounds.called(limit) if known else "unknown"
    if called == "undecided" and last is not None and test.last(limit, last):
        called = "above"
    mine, rest = _means(pairs) or (None, None)
    return Reading(metric, role, limit, bounds, called, mine, rest, _means(earlier))


def _pairs(blocks: Sequence[Block], metric: Metric) -> list[tuple[float, float]]:
    """Treated and control of the blocks in which both are known."""
    pairs = ((block.treated[metric], block.control[metric]) for block in blocks)
    return [(treated, control) for treated, control in pairs if treated is not None and control is not None]


def _means(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    n = len(pairs)
    return (sum(treated for treated, _ in pairs) / n, sum(control for _, control in pairs) / n) if n else None


def _within(rail: Reading) -> bool:
    """Surely within its bound: by its interval, or because both parts were the same in block after block."""
    same = rail.bounds.low is None and rail.bounds.blocks >= 2 * FEWEST and rail.bounds.mean == 0
    return rail.called == "below" or same


def _better(target: Reading) -> str:
    return f"{target.metric} is better by {_amount(target)}: {_pair(target)}"


def _worse(rail: Reading) -> str:
    return f"{rail.metric} is worse by {_amount(rail)}, more than {rail.limit:g}: {_pair(rail)}"


def _state(target: Reading) -> str:
    if target.called == "unknown":
        return f"target {target.metric} could not be measured"
    word = {"above": "is better", "below": "is not better", "undecided": "is not surely better"}[target.called]
    than = f" by more than {target.limit:g}" if target.limit else ""
    return f"target {target.metric} {word}{than} ({_pair(target)})"


def _amount(reading: Reading) -> str:
    bounds = reading.bounds
    ends = "" if bounds.low is None or bounds.high is None else f" ({bounds.low:.4g} to {bounds.high:.4g})"
    return f"{bounds.mean:.4g}{ends}"


def _pair(reading: Reading) -> str:
    if reading.treated is None or reading.control is None:
        return "not measured"
    then = "" if reading.before is None else f"; {reading.before[0]:.4g} and {reading.before[1]:.4g} before"
    return f"{reading.treated:.4g} with the change, {reading.control:.4g} without, {reading.bounds.blocks} blocks{then}"
