"""What must hold after all of it, and how quickly things were well again.

1. An answer is its own adapter's: whole if it ended, a beginning if it did not, and under its name. The record says which replica
   gave it.
2. Every request has one row, with a status from the closed list; none has two. Left out are those that met no gateway (no head of
   an answer came, and its process ended or was not there meanwhile), those that it refused at the edge because it was stopping, and
   those that were open while the journal was off on a full disk: what was not written cannot be read, and is counted instead.
3. A row says *ok* of each request that was answered well; a gateway that died at that moment may say that it crashed.
4. Each journal replays to the same commands.
5. From the limit after the last fault on, every request is answered, and there are some.
6. Every fault could be undone: what was killed came back, and the gateway says so of each replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.chaos.faults import Chaos, Fault
from benchmarks.chaos.stand import Stand
from benchmarks.chaos.traffic import Call
from loraledger.record.tables import STATUSES, Row

_SHOWN = 5
_PROCESS_ENDS = ("gateway: kill -9", "gateway: restart")


@dataclass
class Verdict:
    """``broken``: promises that did not hold, in words. ``wrong``: answers of another adapter, ``compared``: of so many.

    ``recovered_s``: from the last fault's end to the last failure's.
    """

    broken: list[str] = field(default_factory=list)
    compared: int = 0
    wrong: int = 0
    unwritten: int = 0
    recovered_s: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)

    def fail(self, what: str, cases: Iterable[object]) -> None:
        """Note a promise that does not hold for ``cases``, if there are any."""
        found = list(cases)
        if found:
            shown = "; ".join(map(str, found[:_SHOWN]))
            self.broken.append(f"{len(found)} {what}: {shown}")


def judge(stand: Stand, chaos: Chaos, calls: list[Call], rows: list[Row], over: float, limit_s: float) -> Verdict:
    """Hold ``calls`` and ``rows`` against the promises. ``over``: when the last fault had ended."""
    verdict = Verdict(statuses=Counter(str(row["status"]) for row in rows))
    by_key = _by_key(verdict, rows)
    verdict.fail("rows with a status that is none", [row for row in rows if row["status"] not in STATUSES])
    away = [(fault.began, fault.ended) for fault in chaos.faults if fault.kind in _PROCESS_ENDS]
    missing = [call for call in calls if call.key not in by_key and _owes_a_row(call, away)]
    unwritten = {call.key for call in missing if any(a <= call.ended and call.began <= b for a, b in chaos.off)}
    verdict.unwritten = len(unwritten)
    verdict.fail("requests without a row", [call for call in missing if call.key not in unwritten])
    _check_words(verdict, stand, calls, by_key)
    verdict.fail("faults that could not be undone", [fault for fault in chaos.faults if fault.failed is not None])
    disagree = [
        (call, by_key[call.key]["status"])
        for call in calls
        if call.well and call.key in by_key and by_key[call.key]["status"] not in ("ok", "gateway_crashed")
    ]
    verdict.fail("answers that were whole, and rows that deny it", disagree)
    verdict.fail(
        "journals that replay to something else", [words for words in chaos.verified if "identical" not in words]
    )
    if not any(call.began > over + limit_s for call in calls):
        verdict.broken.append(f"nobody asked for anything later than {limit_s:g} s after the last fault")
    failed = [call for call in calls if call.error is not None and call.began >= over]
    verdict.recovered_s = max((call.ended - over for call in failed), default=0.0)
    verdict.fail(
        f"failures later than {limit_s:g} s after the last fault", [c for c in failed if c.began > over + limit_s]
    )
    after = {(call.model, call.tenant) for call in calls if call.well and call.began >= over}
    wanted = {(model, tenant) for model in stand.models[:4] for tenant in {call.tenant for call in calls}}
    verdict.fail("pairs of model and tenant that nobody was answered for after the last fault", wanted - after)
    return verdict


def _owes_a_row(call: Call, away: Iterable[tuple[float, float]]) -> bool:
    """Whether the gateway had taken it for sure, or was there all the while. ``away``: from when to when its process was not."""
    if call.status is not None:
        return call.heard
    return not any(began <= call.ended and call.began <= ended for began, ended in away)


def _by_key(verdict: Verdict, rows: list[Row]) -> dict[str, Row]:
    by_key: dict[str, Row] = {}
    twice = []
    for row in rows:
        key = str(row["client_id"])
        if key in by_key:
            twice.append(key)
        by_key[key] = row
    verdict.fail("requests with two rows", twice)
    return by_key


def _check_words(verdict: Verdict, stand: Stand, calls: list[Call], by_key: Mapping[str, Row]) -> None:
    wrong: list[object] = [(call, call.wrong) for call in calls if call.wrong is not None]
    for call in calls:
        row = by_key.get(call.key)
        places = [replica.name for replica in stand.replicas] if row is None else [str(row["replica"])]
        if not call.text:
            continue
        words = [stand.words(place, call.model, call.prompt, call.tokens) for place in places]
        if None in words or not any(words):  # nothing of it is certain
            continue
        verdict.compared += 1
        if not any(
            _agrees(call, said, place in stand.real)
            for place, said in zip(places, words, strict=True)
            if said is not None
        ):
            wrong.append((call, places, words))
    if not verdict.compared:
        verdict.broken.append("no answer was compared with its adapter's own")
    verdict.wrong = len(wrong)
    verdict.fail("answers of another adapter", wrong)


def _agrees(call: Call, said: str, certain_only: bool) -> bool:
    """``certain_only``: ``said`` is only as much of the answer as another batch cannot change."""
    shared = min(len(said), len(call.text))
    whole = certain_only or not call.well or len(call.text) == len(said)
    return call.text[:shared] == said[:shared] and (certain_only or len(call.text) <= len(said)) and whole


def table(chaos: Chaos, calls: list[Call], start: float) -> str:
    """The faults in order, with the requests that began between each and the next."""
    faults = sorted(chaos.faults, key=lambda fault: fault.began)
    lines = [
        f"{'at s':>6} {'fault':<18} {'of':<12} {'lasted s':>8} {'requests':>8} {'failed':>6} {'last failure s':>14}  note"
    ]
    for fault, following in zip(faults, [*faults[1:], None], strict=True):
        until = float("inf") if following is None else following.began
        begun = [call for call in calls if fault.began <= call.began < until]
        lines.append(_line(fault, begun, start))
    return "\n".join(lines)


def _line(fault: Fault, begun: list[Call], start: float) -> str:
    failed = [call for call in begun if call.error is not None]
    last = f"{max(call.ended for call in failed) - fault.began:.1f}" if failed else "-"
    return (
        f"{fault.began - start:6.1f} {fault.kind:<18} {fault.target:<12} {fault.ended - fault.began:8.1f} {len(begun):8} "
        f"{len(failed):6} {last:>14}  {fault.failed or fault.note}"
    )
