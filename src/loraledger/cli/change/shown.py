"""A change as people read it: what it is, where it stands, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from loraledger.cli.change.options import spelled, unit_of
from loraledger.cli.output import print_table, printable
from loraledger.cli.signals.shown import fold
from loraledger.errors import TargetError
from loraledger.operate.change import BETTER, Change, Metric
from loraledger.units import NS_PER_S, spell_duration

if TYPE_CHECKING:
    from loraledger.operate.journal import Entry
    from loraledger.operate.trial import Trial
    from loraledger.operate.watch import Reading, Verdict
    from loraledger.replay.results.report import Report

FILE: Final = "loraledger.yaml"
_SHARES: Final = ("hit_rate", "attainment", "refused")
_FIGURES: Final = ("figure", "before", "after", "moved", "limit", "verdict")
_RIGHT: Final = ("before", "after", "moved", "limit", "with it", "without", "apart", "low", "high", "blocks")
_RESTART: Final = {
    "waiting_restart": "nothing was applied: engines read this when they start. Start again, with these flags:",
    "accepted": "the others read this when they start. Start again, with these flags:",
    "rolled_back": "where an engine was started with the new value, start it again with these flags:",
}
_CALLED: Final = {
    ("target", "above"): "better",
    ("target", "below"): "not better",
    ("guardrail", "above"): "WORSE",
    ("guardrail", "below"): "within",
}


def change_of(answer: Mapping[str, Any]) -> Change:
    """The change in what a gateway answered. Raises ``TargetError`` when there is none."""
    try:
        return msgspec.convert(answer.get("change"), Change)
    except msgspec.ValidationError as error:
        raise TargetError(f"the gateway answered something else than a change: {error}") from error


def changes_of(answer: Mapping[str, Any]) -> list[Change]:
    """The changes in what a gateway answered. Raises ``TargetError`` when there are none."""
    try:
        return msgspec.convert(answer.get("changes"), list[Change])
    except msgspec.ValidationError as error:
        raise TargetError(f"the gateway answered something else than changes: {error}") from error


def entries_of(answer: Mapping[str, Any]) -> list[Entry]:
    """The journal of a change, as the answer has it."""
    from loraledger.operate.journal import Entry

    return msgspec.convert(answer.get("entries") or [], list[Entry])


def replay_of(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the newest replay of a change showed; ``None`` before there was one."""
    found = [entry.evidence for entry in entries_of(answer) if entry.kind == "replay"]
    return found[-1] if found else None


def verdict_of(answer: Mapping[str, Any]) -> Verdict | None:
    """What a rollout has shown so far, or what it ended on; ``None`` before it began."""
    from loraledger.operate.watch import Verdict

    found = answer.get("verdict")
    if found is None:
        ends = [entry.evidence for entry in entries_of(answer) if entry.kind in ("accept", "roll_back")]
        found = next((evidence.get("verdict") for evidence in reversed(ends) if "verdict" in evidence), None)
    return None if found is None else msgspec.convert(found, Verdict)


def headline(change: Change) -> str:
    """``c3: policy least-loaded -> bounded-affinity, rolling_out``."""
    return f"{change.id}: {change.variable} {spelled(change.before)} -> {spelled(change.after)}, {change.state}"


def aims(change: Change) -> list[str]:
    """Target and guardrails, a sentence each."""
    target = change.target
    than = f" by more than {target.least:g}{unit_of(target.metric)}" if target.least else ""
    way = "higher" if BETTER[target.metric] == "up" else "lower"
    rails = [
        f"{rail.metric} {'lower' if BETTER[rail.metric] == 'up' else 'higher'} by more than "
        f"{rail.worse_by:g}{unit_of(rail.metric)}"
        for rail in change.guardrails
    ]
    guarded = f"taken back when {' or '.join(rails)}" if rails else "without guardrails"
    share, unit = change.population.share, change.population.unit
    return [
        f"target: {target.metric} {way}{than}, within {spell_duration(change.window_ns)}",
        f"guardrails: {guarded}",
        f"tried on {share:.3g} of the {unit}s by hash, in blocks of {spell_duration(change.block_ns)}".replace(
            f"{share:.3g}", f"{share * 100:g} %"
        ),
    ]


def trial_table(trial: Trial, reports: Sequence[Report]) -> None:
    """The two runs side by side, and what the change is held against."""
    checks = {check.metric: check for check in trial.checks}
    rows: list[list[object]] = []
    for metric in BETTER:
        before, after, check = trial.before[metric], trial.after[metric], checks.get(metric)
        cells = [figure(metric, before), figure(metric, after), moved(metric, before, after)]
        judged = (None, None) if check is None else (bound(check.role, metric, check.limit), check.verdict)
        rows.append([metric, *cells, *judged])
    for name in ("loads", "activations"):
        old, new = (getattr(report, name) for report in reports)
        rows.append([name, f"{old:,}", f"{new:,}", f"{new - old:+,}", None, None])
    print_table(_FIGURES, rows, right=_RIGHT)


def evidence_table(evidence: Mapping[str, Any]) -> None:
    """The same from what a change keeps of its replay."""
    checks = {check["metric"]: check for check in evidence["guardrails"]}
    old, new = evidence["figures"]["before"], evidence["figures"]["after"]
    rows: list[list[object]] = []
    for metric in BETTER:
        check = checks.get(metric)
        judged = (None, None) if check is None else (bound(check["role"], metric, check["limit"]), check["verdict"])
        before, after = old.get(metric), new.get(metric)
        rows.append([metric, figure(metric, before), figure(metric, after), moved(metric, before, after), *judged])
    print_table(_FIGURES, rows, right=_RIGHT)


def readings_table(verdict: Verdict) -> None:
    """Each test of a rollout: both parts, by how much the one with the change was higher before, by how much it went up, bounds."""
    rows: list[list[object]] = []
    for reading in verdict.readings:
        metric, bounds = reading.metric, reading.bounds
        cells = [figure(metric, reading.treated), figure(metric, reading.control)]
        apart = None if reading.before is None else moved(metric, reading.before[1], reading.before[0])
        effect = [bounds.mean, bounds.low, bounds.high]
        if (BETTER[metric] == "up") != (reading.role == "target"):  # a test counts what is better, or worse, as above 0
            effect = [None if end is None else 0.0 - end for end in (bounds.mean, bounds.high, bounds.low)]
        ends = [signed(metric, end) for end in effect]
        limit = bound(reading.role, metric, reading.limit)
        rows.append([reading.role, metric, *cells, apart, *ends, limit, _called(reading), bounds.blocks])
    columns = ("role", "metric", "with it", "without", "apart", "moved", "low", "high", "limit", "so far", "blocks")
    print_table(columns, rows, right=_RIGHT)


def timeline(entries: Iterable[Entry]) -> None:
    """The journal of one change, a line an entry."""
    rows = [
        [entry.n, moment(entry.at_ns), entry.kind, entry.change.state, printable(entry.who), printable(entry.why)]
        for entry in entries
    ]
    print_table(("n", "at", "step", "state", "who", "why"), rows, right=("n",))


def _tested(verdict: Verdict) -> str:
    """What the table of its tests is of; and why it tells of fewer blocks than there were, if it does."""
    fewer = any(reading.bounds.blocks != verdict.blocks for reading in verdict.readings)
    which = ", in the blocks that measured both" if fewer else ""
    return f"rollout, {verdict.blocks} blocks: with the change beside without it{which}"


def _called(reading: Reading) -> str:
    if reading.called == "undecided" and reading.bounds.low is None and reading.bounds.mean == 0:
        return "equal"
    return _CALLED.get((reading.role, reading.called), reading.called)


def whole(answer: Mapping[str, Any]) -> None:
    """Everything of one change."""
    change, evidence, verdict = change_of(answer), replay_of(answer), verdict_of(answer)
    print(printable(headline(change)))
    sentences([f"proposed by {change.who} at {moment(change.proposed_ns)} UTC: {change.why}", *aims(change)])
    if change.reason:
        sentences([f"{change.state}: {change.reason}"])
    if members := answer.get("members"):
        when = "has it now" if change.state == "rolling_out" else "was tried on"
        sentences([f"{when}: {', '.join(map(str, members))}"])
    if answer.get("held"):
        sentences([f"everybody has it now, until {FILE} says it too: `loraledger change diff {change.id}`"])
    if note := answer.get("note"):
        sentences([str(note)])
    by_hand(answer)
    if evidence is not None and not {"figures", "guardrails"} <= evidence.keys():  # older gateways took anything
        print()
        sentences(["replay: the journal does not have what it measured"])
    elif evidence is not None:
        profile = evidence.get("profile") or {}
        print(
            f"\nreplay of {evidence.get('requests', 0):,} requests, profile {profile.get('name')}, {evidence.get('trace')}"
        )
        evidence_table(evidence)
        sentences(f"against it: {reason}" for reason in evidence.get("reasons") or ())
    if verdict is not None:
        print()
        sentences([_tested(verdict)])
        readings_table(verdict)
    print("\njournal")
    timeline(entries_of(answer))


def by_hand(answer: Mapping[str, Any]) -> None:
    """What has to be set by hand because engines read it when they start; nothing where nothing is to be."""
    change = change_of(answer)
    if change.variable == "replicas" and change.state == "waiting_restart":
        sentences(
            [
                f"nothing was applied: add replicas to the settings until there are {spelled(change.after)}, and start again"
            ]
        )
    for number, entry in enumerate(answer.get("restart") or ()):
        if not number:
            sentences([_RESTART.get(change.state, _RESTART["waiting_restart"])])
        print(printable(f"  {entry.get('replica')}: {' '.join(map(str, entry.get('flags') or ()))}"))


def changes_table(changes: Iterable[Change]) -> None:
    """A line a change."""
    rows = [
        [
            change.id,
            change.state,
            change.variable,
            printable(spelled(change.before)),
            printable(spelled(change.after)),
            change.target.metric,
            f"{change.population.share * 100:g}% of {change.population.unit}s",
            moment(change.proposed_ns),
            printable(change.who),
            printable(change.reason or change.why),
        ]
        for change in changes
    ]
    print_table(("id", "state", "variable", "from", "to", "target", "tried on", "proposed", "who", "why"), rows)


def sentences(texts: Iterable[str]) -> None:
    """Each folded to the terminal."""
    for text in texts:
        print(fold(text))


def moment(ns: int) -> str:
    """``2026-11-30 12:00:00``, UTC."""
    return f"{datetime.fromtimestamp(ns // NS_PER_S, UTC):%Y-%m-%d %H:%M:%S}"


def figure(metric: Metric, value: float | None) -> str | None:
    """``64.5%``, ``0.412 s``, ``12.3``."""
    if value is None:
        return None
    if metric in _SHARES:
        return f"{value:.1%}"
    return f"{value:.1f}" if metric == "preemptions" else f"{value:.4f} s" if metric == "itl_mean" else f"{value:.3f} s"


def signed(metric: Metric, value: float | None) -> str | None:
    """The same with its sign; of a share in points."""
    if value is None:
        return None
    if metric in _SHARES:
        return f"{value * 100:+.1f} pt"
    return (
        f"{value:+.1f}" if metric == "preemptions" else f"{value:+.4f} s" if metric == "itl_mean" else f"{value:+.3f} s"
    )


def moved(metric: Metric, before: float | None, after: float | None) -> str | None:
    """By how much it went up."""
    return None if before is None or after is None else signed(metric, after - before)


def bound(role: str, metric: Metric, limit: float) -> str:
    """What the figure has to move by (target), and may move by at most (guardrail)."""
    up = BETTER[metric] == "up"
    if role == "target":
        return f"{'>' if up else '<'} {signed(metric, limit if up else 0.0 - limit)}"
    return f"{'>=' if up else '<='} {signed(metric, 0.0 - limit if up else limit)}"
