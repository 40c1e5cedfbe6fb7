"""How near replay comes to a real vLLM.

Run: python -m benchmarks.accuracy [--minutes 5] [--work DIR] [--reuse] [--only NAME ...] [--markdown]

One real vLLM (CPU build, tiny model, 12 adapters on 4 slots and 8 host entries) on one core, gateway and client on the other. It
serves three orders of adapters (``workload``), each saturated (a closed loop) and below saturation (an open one), each twice; then
two servers share an open loop. Every run is recorded by the real gateway and replayed from its record with the calibrated profile
(``compare``). The open loops' rate is a share of what the engine served when it was saturated.

A virtual machine's core is slower and faster by turns of ten seconds to minutes: the same step was seen to take from 0.8 to 1.4
times its mean. A calibration at one moment would carry that moment's speed into all predictions. So a piece of it, one round of
all probes on the idle engine, comes before each run, and the points of all pieces are fitted together. The two servers share one
core, and one that waits for work does not leave it to the other: a profile of their own is measured on one while the other serves.

With 5 minutes a run it takes an hour and a half. What was done lies in the work folder: with ``--reuse`` only the rest is done, so
a run can be cut anywhere and gone on with, or be done in pieces with ``--only``; without anything left to do it takes seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from benchmarks.accuracy import compare, stand
from benchmarks.accuracy.client import Player
from benchmarks.accuracy.workload import KINDS, Kind, calls, in_order
from benchmarks.processes import ROOT
from benchmarks.reproduce.table import Line, cells, markdown, summary
from loraledger.adapters import read_folder
from loraledger.engines.calibrate.asking import Asker
from loraledger.engines.calibrate.facts import Given
from loraledger.engines.calibrate.measure import Folder
from loraledger.engines.calibrate.plan import SHORT, STEPS
from loraledger.engines.calibrate.run import Request, Result, calibrate
from loraledger.engines.protocol import ReplicaTarget
from loraledger.twin.calibrated import Calibrated
from loraledger.twin.fit_points import Points

WORK = ROOT / ".cache/accuracy"
CLIENTS = 12
"""Of a closed loop: half as many again as the engine runs at once."""
LOAD = 0.6
"""Of what the engine can serve, in an open loop."""
RUNS = 2
CALIBRATE_S = 80
"""Of each piece."""
PAIR_SHARE = 0.5
"""Of the minutes, for each run of the pair."""
PAIR_SLOWER = 2
"""Times as long that one of two engines on one core takes for a round."""
PLAN, DONE = "plan.json", "done.json"
Runs = Sequence[compare.Figures]
CALIBRATED_WITH = ("a00", "a02", "a07")
"""Small, middle and large."""


def main() -> None:
    """Measure what is missing, then print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="of each run")
    parser.add_argument("--work", type=Path, default=WORK, help="where records and calibration are kept")
    parser.add_argument("--reuse", action="store_true", help="keep what the work folder has")
    parser.add_argument("--only", nargs="*", help="only these: calibration, KIND-MODE, pair (see --list)")
    parser.add_argument("--list", action="store_true", help="print the names of all parts and end")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the lines there")
    given = parser.parse_args()
    if given.list:
        print("calibration", *(f"{kind}-{mode}" for kind, mode in parts()), "pair")
        return
    if not given.reuse and given.only is None:
        clear(given.work)
    given.work.mkdir(parents=True, exist_ok=True)
    Stand(given.work, given.minutes * 60, given.only).measure()
    found = table(given.work)
    below = summary(found)
    if given.json is not None:
        given.json.write_text(json.dumps([cells(line) for line in found]), encoding="utf-8")
    if given.markdown:
        print(markdown(found, below, "measured"))
    else:
        for line in found:
            print("  ".join(cells(line)))
        print("\n".join(below))


def parts() -> Iterator[tuple[Kind, str]]:
    """Every workload: saturated first, because the open loops' rate comes from one of them."""
    for mode in ("saturated", "open"):
        for kind in KINDS:
            yield kind, mode


class Stand:
    """Does what has not been done. ``only``: names of the parts to do; ``None``: all."""

    def __init__(self, work: Path, seconds: float, only: list[str] | None) -> None:
        self.work = work
        self.seconds = seconds
        self._only = only

    def measure(self) -> None:
        """Calibration, runs on one engine, runs on two."""
        wanted = [f"{kind}-{mode}" for kind, mode in parts()]
        todo = [f"{name}-{number}" for name in wanted for number in range(1, RUNS + 1) if self._asked(name)]
        missing = [name for name in todo if not (self.work / name / DONE).exists()]
        before = list(missing) if self._asked("calibration") else []
        if self._asked("calibration") and not before and not compare.pieces(self.work):
            before = ["alone"]
        if missing or before:
            with stand.engines(self._fresh("engines"), 1) as (model, running):
                for name in missing or before:
                    if name in before:
                        self._calibrate(model, running, name)
                    if name in missing:
                        self._run(name, model, running, self.seconds)
        pair = [f"{compare.PAIR}-{number}" for number in range(1, RUNS + 1)]
        missing = [name for name in pair if self._asked(compare.PAIR) and not (self.work / name / DONE).exists()]
        if missing:
            with stand.engines(self._fresh("engines"), 2) as (model, running):
                for name in missing:
                    self._calibrate(model, running, name)
                    self._run(name, model, running, self.seconds * PAIR_SHARE)

    def _asked(self, name: str) -> bool:
        return self._only is None or name in self._only

    def _fresh(self, name: str) -> Path:
        shutil.rmtree(self.work / name, ignore_errors=True)
        return self.work / name

    def _calibrate(self, model: stand.Model, running: list[stand.Engine], name: str) -> None:
        """What ``loraledger calibrate`` does, from this core: the piece before run ``name``. Other engines are kept busy."""
        piece = self.work / compare.PIECE.format(name)
        if piece.exists():
            return
        say(f"calibration before {name}")
        folders = [read_folder(name, model.adapters[name]) for name in CALIBRATED_WITH]
        request = Request(
            target=ReplicaTarget("engine", running[0].url, probe_key=stand.PROBE_KEY),
            model=None,
            given=Given(max_seqs=stand.MAX_SEQS, token_budget=stand.TOKEN_BUDGET),
            folders=tuple(Folder(one.path, one.bytes_disk, one.rank) for one in folders),
            budget_s=CALIBRATE_S * (PAIR_SLOWER if len(running) > 1 else 1),
            quick=False,
            name="accuracy",
            device="one CPU core",
            date=datetime.now(UTC).date().isoformat(),
            source="python -m benchmarks.accuracy",
        )
        result = asyncio.run(measured(request, [engine.url for engine in running[1:]]))
        compare.save_points(piece, result.calibrated, result.points)

    def _run(self, name: str, model: stand.Model, running: list[stand.Engine], seconds: float) -> None:
        """One run through a gateway of its own."""
        kind, mode, _ = ("zipf", "pair", "") if name.startswith("pair") else name.split("-")
        rate = None if mode == "saturated" else self._rate() * (1.0 if mode == "open" else 0.8)
        say(f"{name}: {seconds:.0f} s" + ("" if rate is None else f" at {rate:.2f} requests/s"))
        work = calls(kind_of(kind), sorted(model.adapters), seed=1, rate=rate)
        with stand.gateway(self._fresh(name), model, running) as gateway:
            player = Player(gateway.port, stand.key())
            if rate is None:
                asyncio.run(player.closed_loop(work, CLIENTS, seconds))
            else:
                asyncio.run(player.open_loop(in_order(work, seconds)))
        if set(player.ended) - {"ok"}:
            raise RuntimeError(f"{name}: not all calls were answered: {dict(player.ended)}")
        (self.work / name / DONE).write_text(json.dumps({"seconds": seconds, "rate": rate, "ended": player.ended}))

    def _rate(self) -> float:
        """Of the open loops: decided once, from what a saturated engine served."""
        plan = self.work / PLAN
        if not plan.exists():
            most = compare.served_per_s(self.work / "zipf-saturated-1/record")
            plan.write_text(json.dumps({"requests_per_s": LOAD * most, "of": most}))
        found: float = json.loads(plan.read_text())["requests_per_s"]
        return found


async def measured(request: Request, busy: list[str]) -> Result:
    """A calibration while each engine at ``busy`` serves a stream without an end."""
    askers = [Asker(ReplicaTarget("busy", url)) for url in busy]
    streams = [asyncio.create_task(without_end(asker)) for asker in askers]
    try:
        result = await calibrate(request, lambda _: None)
        for stream in streams:
            if stream.done():
                stream.result()  # whoever should have been busy was not: this is no calibration of a pair
        return result
    finally:
        for stream, asker in zip(streams, askers, strict=True):
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
            await asker.close()


async def without_end(asker: Asker) -> None:
    """One stream after another, of the base model."""
    while True:
        await asker.ask("base", SHORT, STEPS)


def clear(work: Path) -> None:
    """Remove what this program leaves in ``work``, and nothing else."""
    for name in (compare.PAIR, *(f"{kind}-{mode}" for kind, mode in parts())):
        for number in range(1, RUNS + 1):
            shutil.rmtree(work / f"{name}-{number}", ignore_errors=True)
    shutil.rmtree(work / "engines", ignore_errors=True)
    for path in (*compare.pieces(work), *compare.pieces(work, pair=True), work / PLAN):
        path.unlink(missing_ok=True)


def kind_of(name: str) -> Kind:
    """``name`` as a kind of workload."""
    (found,) = [kind for kind in KINDS if kind == name]
    return found


def table(work: Path) -> list[Line]:
    """Every line that the work folder has the runs for, and any piece of a calibration.

    Runs with a miss are replayed once more, with all times longer by as much as the engine's tokens came more slowly than ours:
    whether the line passes then tells step times that are off from a twin that does the wrong thing.
    """
    found: list[Line] = []
    if compare.pieces(work):
        calibrated, points = compare.load_points(work)
        for kind, mode in parts():
            name, saturated = f"{kind}-{mode}", mode == "saturated"
            judged = partial(compare.lines, name, saturated=saturated)
            clients = CLIENTS if saturated else None
            measured, ours, lines = held_against(work, name, calibrated, points, clients, judged)
            if measured:
                found += lines
                found.append(compare.naive_line(name, points, measured, ours, saturated=saturated))
    if compare.pieces(work, pair=True):
        calibrated, points = compare.load_points(work, pair=True)
        judged = partial(compare.hit_lines, "two replicas, zipf-open")
        found += held_against(work, compare.PAIR, calibrated, points, None, judged)[2]
    return found


def held_against(
    work: Path,
    name: str,
    calibrated: Calibrated,
    points: Points,
    clients: int | None,
    judged: Callable[[Runs, Runs], list[Line]],
) -> tuple[Runs, Runs, list[Line]]:
    """Each finished run of ``name`` as measured and as replayed, and what ``judged`` says of them."""
    done = [f"{name}-{number}" for number in range(1, RUNS + 1) if (work / f"{name}-{number}" / DONE).exists()]
    measured = [compare.figures(work / run / "record") for run in done]
    if not measured:
        return [], [], []

    def replayed(profile: Calibrated, folder: str) -> list[compare.Figures]:
        return [compare.replayed(work / run / "record", profile, work / run / folder, clients) for run in done]

    ours = replayed(calibrated, "replay")
    lines = judged(measured, ours)
    if not all(line.passed for line in lines):
        factor = compare.slowness(measured, ours)
        slower = replayed(compare.fitted(calibrated, compare.slowed(points, factor)), "replay-slowed")
        lines = compare.with_cause(lines, judged(measured, slower), factor)
    return measured, ours, lines


def say(text: str) -> None:
    """What is done now, for whoever waits."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
