"""Step 5: is the KV cache full, does it preempt, did its capacity shrink, did an engine start again?

Theory of operation. The gateway sends a request only where its prompt and its expected answer have room, so a full KV cache shows
in three ways: samples that find it full, preemptions where answers were longer than expected, and as many tokens in flight as
there is capacity while the requests wait in the gateway. Then the blocks in use look fewer, but half of them at least are taken,
since what runs holds its prompt and on average half its answer; where less is in use, those in flight wait for something else.
Figures are those of the replica where they are worst, as one that is full helps nobody by the others' room.

A capacity that fell while demand did not is the floor's: something else took the memory. It is held against the baseline and
against what is configured, replica by replica. Where nobody told it, use in relation to tokens in flight gives it away, coarsely.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loraledger.signals.diagnosis import thresholds as at
from loraledger.signals.diagnosis.verdict import Finding, Verdict
from loraledger.signals.diagnosis.view import Both, Sheet, View, at_least, largest, pressures, quotient, ratio, rise
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Group, Signals

QUESTION: Final = "Is the KV cache short: full, preempting, or smaller than it was?"
USAGE: Final = "KV usage, mean"
FULL: Final = "share of samples with a full KV"
ASKED: Final = "tokens in flight to KV capacity"
PREEMPTED: Final = "preemptions for 1,000 requests"
RECOMPUTED: Final = "tokens computed again"
CAPACITY: Final = "KV capacity"
CONFIGURED: Final = "KV capacity, configured"
SHRUNK_ON: Final = "replica whose KV shrank most"
SHRUNK_TO: Final = "KV left of what that replica had or should have"
IMPLIED: Final = "KV capacity by use and tokens in flight"
RESTARTS: Final = "restarts"
DOWN: Final = "samples that found an engine down"
QUEUED: Final = "waiting in the engine, mean"
BUSY: Final = "share of time in steps"


class KvState(msgspec.Struct, frozen=True):
    """What the step found. ``shrunk``: KV capacity to what it was or should be, where it fell most; ``None``: it did not."""

    finding: Finding
    signs: tuple[str, ...]
    """Rows by which it is full, preempting or asked for beyond its capacity."""
    more: bool
    """More so than before; without a baseline the same as ``full``."""
    chronic: bool
    usage: Both
    shrunk: float | None
    inferred: bool
    restarts: int
    """More than in the baseline."""
    down: int

    @property
    def full(self) -> bool:
        """Whether KV is short by any sign."""
        return bool(self.signs)


def kv_state(view: View) -> KvState:
    """Take the step."""
    sheet = Sheet()
    usage, full, asked = (view.signals(read) for read in (_usage, _full, lambda signals: _asked(signals, view.facts)))
    preempted = view.signals(_preempted)
    sheet.put(USAGE, usage, "share")
    sheet.put(FULL, full, "share")
    sheet.put(ASKED, asked, "share")
    sheet.put(PREEMPTED, preempted)
    sheet.put(RECOMPUTED, view.both(_recomputed), "tokens")
    sheet.put(CAPACITY, view.both(lambda group: None if group.pressure is None else group.pressure.kv_tokens), "tokens")
    shrunk, inferred = _put_shrunk(sheet, view, usage)
    restarts, down = view.signals(_restarts), view.signals(_down)
    sheet.put(RESTARTS, restarts)
    sheet.put(DOWN, down, "samples")
    sheet.put(QUEUED, view.signals(_queued), "requests")
    sheet.put(BUSY, view.both(lambda group: None if group.pressure is None else group.pressure.busy), "share")
    limits = ((FULL, full, at.KV_FULL), (PREEMPTED, preempted, at.PREEMPTIONS), (ASKED, asked, at.KV_ASKED))
    signs = tuple(name for name, (value, _), limit in limits if at_least(value, limit))
    if not at_least(usage[0], at.HALF):
        signs = tuple(name for name in signs if name != ASKED)
    found = KvState(
        finding=Finding(5, QUESTION, sheet.evidence, "unknown", ""),
        signs=signs,
        more=bool(signs) and (view.before is None or _more(full, asked, preempted)),
        chronic=_chronic(view, full, preempted),
        usage=usage,
        shrunk=shrunk,
        inferred=inferred,
        restarts=max(0, int((restarts[0] or 0) - (restarts[1] or 0))),
        down=max(0, int((down[0] or 0) - (down[1] or 0))),
    )
    known = any(pair[0] is not None for pair in (usage, full, asked, preempted))
    verdict, sentence = _verdict(found, known)
    return msgspec.structs.replace(found, finding=Finding(5, QUESTION, sheet.evidence, verdict, sentence))


def _verdict(found: KvState, known: bool) -> tuple[Verdict, str]:
    said = [
        text
        for is_so, text in (
            (found.shrunk is not None, "its capacity fell"),
            (found.full and found.more, "it is full or preempts, more than before"),
            (found.full and not found.more, "it is full or preempts, as before"),
            (found.restarts > 0, "engines started again, which empties KV and slots"),
        )
        if is_so
    ]
    if said:
        return "seen", f"KV: {', '.join(said)}."
    return ("not seen", "KV has room.") if known else ("unknown", "No sample told the use of KV.")


def _more(full: Both, asked: Both, preempted: Both) -> bool:
    """A tenth of the time more, a third more asked for, or twice the preemptions."""
    grew = at_least(rise(full), at.HELD) or at_least(ratio(asked), at.DEMAND)
    return grew or at_least(preempted[0], max(at.PREEMPTIONS, at.DOUBLED * (preempted[1] or 0)))


def _chronic(view: View, full: Both, preempted: Both) -> bool:
    """Bad in itself: preemptions, or full for half of the time while requests wait."""
    if at_least(preempted[0], at.PREEMPTIONS if view.before is None else at.PREEMPTIONS_CHRONIC):
        return True
    return view.before is None and at_least(full[0], 1 - at.ATTAINMENT_CHRONIC) and at_least(_queued(view.now), 1)


def _put_shrunk(sheet: Sheet, view: View, usage: Both) -> tuple[float | None, bool]:
    """The least share of its capacity that a replica kept, if it lost a tenth or more, and whether that is inferred only."""
    kept = {name: share for name in view.names if (share := _kept(view, name)) is not None}
    configured = [view.facts.replica(name).kv_tokens for name in view.names]
    if configured and None not in configured:
        sheet.put_one(CONFIGURED, sum(count for count in configured if count is not None), "tokens")
    if kept:
        name = min(kept, key=lambda each: (kept[each], each))
        if kept[name] <= at.SHRUNK:
            sheet.put_one(SHRUNK_ON, name)
            sheet.put_one(SHRUNK_TO, kept[name], "share")
            return kept[name], False
        return None, False
    implied = _implied(view, usage)
    sheet.put_one(IMPLIED, implied, "times")
    return (implied, True) if implied is not None and implied <= at.IMPLIED else (None, True)


def _kept(view: View, name: str) -> float | None:
    capacity = _capacity(view.now, name)
    if capacity is None:
        return None
    before = None if view.base is None else _capacity(view.base, name)
    shares = [quotient(capacity, other) for other in (before, view.facts.replica(name).kv_tokens)]
    return min((share for share in shares if share is not None), default=None)


def _capacity(signals: Signals, name: str) -> int | None:
    group = signals.replicas.get(name)
    return None if group is None or group.pressure is None else group.pressure.kv_tokens


def _implied(view: View, usage: Both) -> float | None:
    tokens = ratio(view.both(lambda group: group.active_tokens))
    return quotient(tokens, ratio(usage))


def _usage(signals: Signals) -> float | None:
    return largest(each.kv_usage_mean for each in pressures(signals))


def _full(signals: Signals) -> float | None:
    return largest(each.kv_full for each in pressures(signals))


def _queued(signals: Signals) -> float | None:
    return largest(each.waiting_mean for each in pressures(signals))


def _restarts(signals: Signals) -> float | None:
    found = [each.restarts for each in pressures(signals) if each.samples]
    return sum(found) if found else None


def _down(signals: Signals) -> float | None:
    found = [each.down for each in pressures(signals) if each.samples]
    return sum(found) if found else None


def _asked(signals: Signals, facts: Facts) -> float | None:
    shares = []
    for name, group in signals.replicas.items():
        capacity = _capacity(signals, name)
        shares.append(quotient(group.active_tokens, facts.replica(name).kv_tokens if capacity is None else capacity))
    return largest(shares)


def _preempted(signals: Signals) -> float | None:
    total = signals.total
    if total is None or not total.requests:
        return None
    count = None if total.pressure is None else total.pressure.preemptions
    if count is None:
        known = [each.preemptions for each in pressures(signals) if each.preemptions is not None]
        count = sum(known) if known else None
    return None if count is None else 1000 * count / total.requests


def _recomputed(group: Group) -> float | None:
    return None if group.pressure is None else group.pressure.recomputed_tokens
