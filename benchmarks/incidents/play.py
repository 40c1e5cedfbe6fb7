"""Records one incident: draws a plan, plays it on virtual replicas, and keeps the record if it is what was meant.

Theory of operation. The live kernel runs in front of twins (``VirtualFleet``), probe on, and writes the record that a live
gateway would. After a warm-up come the baseline and the incident, of the same length on the same fleet; the record ends ``TAIL_S``
after the incident's window, as one that is read while the gateway serves: who still waits is open.

A draw whose baseline was not calm, or whose incident had no effect (``truth``), is drawn again, at most ``REDRAWS`` times. The
count stays with the incident (``parameters["redraws"]``), and each reason with it.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from benchmarks.incidents.draws import UnfitError, draw
from benchmarks.incidents.kinds import POOLS, Incident, Kind
from benchmarks.incidents.plan import Plan, Restart, trace
from benchmarks.incidents.site import Disk
from benchmarks.incidents.truth import Counts, Truth, Watch, not_calm, not_effective, truth_of
from loraledger import events as ev
from loraledger.conductor.fold import Emitted
from loraledger.kernel.baselines import Baseline, choice
from loraledger.kernel.policy import Choice
from loraledger.kernel.settings import SECOND
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState, RequestState
from loraledger.replay.fleet.observation import Observation
from loraledger.replay.fleet.restart import restart
from loraledger.replay.fleet.rowsink import RowSink
from loraledger.replay.fleet.run import EPOCH
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.signals.figures import Window

MINUTES: Final = 4.0
REDRAWS: Final = 20
TAIL_S: Final = 2.0


class Weighted(Baseline):
    """A balancer that was given shares of the replicas, and looks at neither load nor adapter."""

    name: ClassVar[str] = "weighted"

    def __init__(self, weights: tuple[float, ...]) -> None:
        self._weights = weights
        self._given = [0.0] * len(weights)

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """Whoever is furthest behind its share (smooth weighted round robin)."""
        places = {name: number for number, name in enumerate(state.replicas)}
        may = [places[replica.spec.name] for replica in feasible]
        for place in may:
            self._given[place] += self._weights[place]
        best = max(may, key=self._given.__getitem__)
        self._given[best] -= sum(self._weights[place] for place in may)
        return choice(state, feasible[may.index(best)], request, adapter, "by weight", len(feasible))


class Played(msgspec.Struct, frozen=True):
    """A plan that was played: the windows, what truly happened in them, and the rows."""

    baseline: Window
    window: Window
    calm: Truth
    truth: Truth
    rows: Emitted


def play(kind: Kind, seed: int, directory: Path, minutes: float = MINUTES) -> Incident:
    """Record an incident of ``kind`` into ``directory``, which is emptied: the same for the same kind, seed and minutes.

    Raises ``RuntimeError`` when no draw is what it should be.
    """
    reasons: list[str] = []
    for redraw in range(REDRAWS + 1):
        try:
            plan = draw(kind, seed, redraw, minutes * 60)
        except UnfitError as unfit:
            reasons.append(str(unfit))
            continue
        played = play_plan(plan, minutes * 60, f"incident/{kind}/{seed}/{redraw}/traffic")
        fault = not_calm(played.calm, plan.may_miss)
        fault = fault or not_effective(kind, played.calm, played.truth, plan.may_miss)
        if fault is None:
            break
        reasons.append(fault)
    else:
        raise RuntimeError(f"{kind}, seed {seed}: none of {REDRAWS + 1} draws will do: {'; '.join(reasons)}")
    shutil.rmtree(directory, ignore_errors=True)
    with RowSink(directory) as sink:
        sink.take(played.rows)
    return Incident(
        kind=kind,
        seed=seed,
        directory=directory,
        baseline=played.baseline,
        window=played.window,
        facts=plan.site.facts(),
        pool=POOLS[kind],
        parameters=_parameters(plan, played, reasons),
    )


def play_plan(plan: Plan, period_s: float, seed: str) -> Played:
    """Play ``plan`` once."""
    rows: Emitted = []
    disk = Disk()
    profile = plan.site.profile(disk)
    fleet = VirtualFleet(
        plan.site.settings(),
        dict.fromkeys(plan.site.names, profile),
        Observation(probe=True),
        EPOCH,
        sink=rows.extend,
        config_digest="incident",
    )
    watch = Watch(fleet)
    calm = EPOCH + round(plan.warm_s * SECOND)
    over = calm + round(period_s * SECOND)
    begins = over + round(plan.gap_s * SECOND)
    ends = begins + round(period_s * SECOND)
    marks: dict[int, Counts] = {}
    for moment in (calm, over, begins, ends):
        fleet.at(moment, partial(_mark, marks, moment, watch))
    fleet.at(over, partial(_strike, plan, fleet, disk))
    for each in plan.restarts:
        _restart_later(fleet, each, over, plan, disk)
    fleet.run(trace(plan, period_s, seed), ends + round(TAIL_S * SECOND))
    rows.extend(fleet.conductor.fold.open_rows())
    requests = [row for table, row in rows if table == "requests"]
    return Played(
        Window(calm, over),
        Window(begins, ends),
        truth_of(requests, watch.looks, marks[calm], marks[over], calm, over, profile.max_seqs),
        truth_of(requests, watch.looks, marks[begins], marks[ends], begins, ends, profile.max_seqs),
        rows,
    )


def _mark(marks: dict[int, Counts], moment: int, watch: Watch) -> None:
    marks[moment] = watch.counts()


def _strike(plan: Plan, fleet: VirtualFleet, disk: Disk) -> None:
    """What changes at once when the incident begins."""
    disk.slow = plan.slow
    if plan.weights:
        fleet.conductor.fleet.policy = Weighted(plan.weights)


def _restart_later(fleet: VirtualFleet, each: Restart, over: int, plan: Plan, disk: Disk) -> None:
    at, down = over + round(each.at_s * SECOND), round(each.down_s * SECOND)
    profile = None if plan.after is None else plan.after.profile(disk)
    fleet.at(at, partial(restart, fleet, each.replica, down, profile))
    if each.drained:
        for on, moment in ((True, at - round(each.drained * SECOND)), (False, at + down + 1)):
            fleet.at(moment, partial(_drain, fleet, each.replica, on))


def _drain(fleet: VirtualFleet, replica: str, on: bool) -> None:
    fleet.conductor.feed(ev.DrainAsked(fleet.now, replica, on))


def _parameters(plan: Plan, played: Played, reasons: list[str]) -> dict[str, Any]:
    return {
        "strength": plan.strength,
        "site": msgspec.to_builtins(plan.site),
        "baseline": msgspec.to_builtins(played.calm),
        "incident": msgspec.to_builtins(played.truth),
        "redraws": len(reasons),
        "reasons": reasons,
    }
