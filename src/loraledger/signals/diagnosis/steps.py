"""From the figures of a window to the answer: five steps, a ruling, and one sentence.

Theory of operation. Pure: figures in, answer out. Whether something limits is the third step's question; the rules then look for
the mechanism, and what they name is said with the rows that they went by. Where waiting got worse and no rule holds, the pool is
``nothing`` with low confidence and the sentence says that no step shows why: nobody is accused without a row.
"""

from __future__ import annotations

from typing import Final

from loraledger.signals.diagnosis import answers, confidence
from loraledger.signals.diagnosis import waiting as w
from loraledger.signals.diagnosis.clustering import QUESTION as CLUSTERING
from loraledger.signals.diagnosis.clustering import clustered
from loraledger.signals.diagnosis.demand import QUESTION as DEMAND
from loraledger.signals.diagnosis.demand import demand
from loraledger.signals.diagnosis.details import details
from loraledger.signals.diagnosis.experiment import experiment
from loraledger.signals.diagnosis.misses import QUESTION as MISSES
from loraledger.signals.diagnosis.misses import misses
from loraledger.signals.diagnosis.pressure import QUESTION as PRESSURE
from loraledger.signals.diagnosis.pressure import kv_state
from loraledger.signals.diagnosis.rules import Ruling, Signs, rulings
from loraledger.signals.diagnosis.verdict import Claim, Confidence, Diagnosis, Experiment, Finding, Pool
from loraledger.signals.diagnosis.view import View
from loraledger.signals.diagnosis.waiting import waiting
from loraledger.signals.diagnosis.words import Words
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Group, Signals

NOT_OBSERVABLE: Final = ("kernel choice", "tensor-parallel communication")
UNPROBED: Final = "what engines do inside, without a probe: their queue, prefill and loads are one"
SHOWN: Final = 2
"""Rows in the sentence."""


def diagnose(
    now: Signals,
    baseline: Signals | None,
    facts: Facts,
    *,
    record: str = "record",
    settings: str = "loraledger.yaml",
) -> Diagnosis:
    """Which pool limits in ``now``, held against ``baseline``, and what to try next.

    ``record`` and ``settings`` are what the commands of the experiment name: the record's folder, the settings of the fleet.
    """
    if now.total is None:
        return _empty(now, baseline, facts, record, settings)
    signs = _signs(now, baseline, facts, now.total)
    words = Words(signs.findings)
    found = rulings(signs)
    ruling = found[0] if found else Ruling("nothing", "none", _rows(signs))
    doubts = list(confidence.doubts(signs, baseline, found))
    sure = confidence.confidence(doubts)
    claims = words.claims((words.row(name), (name,)) for name in words.known(ruling.rows)[:SHOWN])
    useless = answers.not_helping(signs, ruling, words)
    next_ = experiment(signs, found[0] if found else None, facts, record, settings)
    unseen = NOT_OBSERVABLE if signs.view.probed else (*NOT_OBSERVABLE, UNPROBED)
    return Diagnosis(
        window=now.window,
        baseline=None if baseline is None else baseline.window,
        requests=now.total.requests,
        findings=signs.findings,
        pool=ruling.pool,
        cause=ruling.cause,
        confidence=sure,
        doubts=tuple(text for _, text in doubts),
        claims=claims,
        details=words.claims(details(signs, words)),
        remedies=answers.remedies(signs, ruling, words) if found else (),
        not_helping=useless,
        not_observable=unseen,
        experiment=next_,
        sentence=_sentence(_headline(signs, ruling, sure), claims, useless, next_),
        measure_again=now.measure_again,
    )


def _signs(now: Signals, baseline: Signals | None, facts: Facts, total: Group) -> Signs:
    view = View(now, baseline, facts, total)
    found = misses(view)
    return Signs(
        view=view,
        demand=demand(view),
        misses=found,
        waiting=waiting(view, found.starved is not None),
        clustered=clustered(view),
        kv=kv_state(view),
    )


def _rows(signs: Signs) -> tuple[str, ...]:
    """What the answer ``nothing`` rests on; where something is waited for, what."""
    return (*signs.waiting.worse, *signs.waiting.bad, w.P50, w.P90, w.ATTAINMENT, w.OLDEST)


def _headline(signs: Signs, ruling: Ruling, sure: Confidence) -> str:
    if ruling.pool != "nothing":
        return f"{_LIMITS[ruling.pool]}: {answers.CAUSES[ruling.cause]} ({sure} confidence)"
    if signs.limits:
        return f"No pool is shown to limit ({sure} confidence), although more is waited than there should be"
    if signs.waiting.finding.verdict == "unknown":
        return f"Nothing is shown to limit ({sure} confidence): no wait is known"
    worse = "nothing got worse" if signs.view.before is not None else "nothing is bad in itself"
    return f"Nothing limits: {worse} ({sure} confidence)"


_LIMITS: Final[dict[Pool, str]] = {
    "floor": "The floor limits",
    "adapters": "Adapters limit",
    "kv": "The KV cache limits",
    "routing": "Routing limits",
    "demand": "Demand limits",
}


def _sentence(headline: str, claims: tuple[Claim, ...], useless: tuple[Claim, ...], next_: Experiment) -> str:
    rows = ", ".join(claim.text for claim in claims)
    parts = [
        f"{headline}: {rows}" if rows else headline,
        *(f"would not help: {claim.text}" for claim in useless[:1]),
        f"not observable: {', '.join(NOT_OBSERVABLE)}",
        f"next: {next_.command}",
    ]
    return "; ".join(parts)


def _empty(now: Signals, baseline: Signals | None, facts: Facts, record: str, settings: str) -> Diagnosis:
    """No request arrived: there is nothing to judge."""
    questions = (DEMAND, MISSES, w.QUESTION, CLUSTERING, PRESSURE)
    sentence = "No request arrived in the window."
    next_ = experiment(None, None, facts, record, settings)
    return Diagnosis(
        window=now.window,
        baseline=None if baseline is None else baseline.window,
        requests=0,
        findings=tuple(Finding(number, each, (), "unknown", sentence) for number, each in enumerate(questions, 1)),
        pool="nothing",
        cause="none",
        confidence="low",
        doubts=("no request arrived in the window: give another one, or look whether the gateway is reached",),
        claims=(),
        details=(),
        remedies=(),
        not_helping=(),
        not_observable=(*NOT_OBSERVABLE, UNPROBED),
        experiment=next_,
        sentence=_sentence("Nothing is shown to limit (low confidence): no request arrived", (), (), next_),
        measure_again=now.measure_again,
    )
