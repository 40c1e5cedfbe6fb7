"""A published grid of vLLM runs: throughput over slots for hundreds of adapters, predicted from runs without any swap.

Theory of operation. More slots let more adapters run at once and leave less KV: somewhere in between lies an optimum. For each
rank in the files constants are fitted to the runs in which every adapter has its slot (``grid_model``), and the curves of the
largest number of adapters are predicted: every run with fewer slots than adapters, at each rate of each file. Judged are
throughput (each run within 10 %, mean 6 %), where a curve has its top (within one step of the grid), and what the most slots lose
against the top (within 10 %). No run with a swap is fitted to.

Each run is simulated in its full length with one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.reproduce.grid_files import Run, read_runs
from benchmarks.reproduce.grid_model import Predicted, fitted, measured_step_s, predict, step_s
from benchmarks.reproduce.ledger_row import slot_tokens
from benchmarks.reproduce.table import Line

TARGET: Final = "vLLM grid"
FOLDER: Final = "bsc-vllm-lora-grid"
MODEL: Final = "llama-2-7b"
_EACH, _MEAN, _LOSS = 0.10, 0.06, 0.10
_CONSTANTS: Final = 7
_FOLLOWS: Final = "follows from its runs, above"
_NOTABLE: Final = 0.03
"""Shares of a run that are said as reasons."""


def lines(data: Path, say: Callable[[str], None]) -> list[Line]:
    """Lines of each rank. Raises ``InputFileError``."""
    runs = read_runs(data / FOLDER)
    found: list[Line] = []
    for rank in sorted({run.rank for run in runs}):
        found += _of_rank(rank, [run for run in runs if run.rank == rank], say)
    return found


def _of_rank(rank: int, runs: Sequence[Run], say: Callable[[str], None]) -> list[Line]:
    slot = slot_tokens(MODEL, rank)
    say(f"{TARGET}: fitting rank {rank}")
    constants, used = fitted(runs, slot)
    errors = [step_s(run, constants) / measured_step_s(run) - 1 for run in used]
    found = [
        Line(
            TARGET,
            f"rank {rank}: mean step of {len(used)} runs with a slot for each adapter, {_CONSTANTS} constants",
            "ms",
            1e3 * fmean(map(measured_step_s, used)),
            1e3 * fmean(step_s(run, constants) for run in used),
            f"mean {_percent(fmean(map(abs, errors)))}, worst {_percent(max(errors, key=abs))}",
            "-",
            True,
            fitted=True,
        )
    ]
    most = max((run.adapters for run in runs if run.slots < run.adapters), default=0)
    curves: dict[tuple[str, float], list[Run]] = {}
    for run in runs:
        if run.adapters == most and run.slots < most:
            curves.setdefault(run.series, []).append(run)
    for series in sorted(curves):
        curve = sorted(curves[series], key=lambda run: run.slots)
        say(f"{TARGET}: {series[0]} at {series[1]:g}/s, {len(curve)} runs")
        found += _of_curve(curve, [predict(run, constants, slot) for run in curve])
    return found


def _of_curve(curve: Sequence[Run], predicted: Sequence[Predicted]) -> list[Line]:
    (stem, rate), adapters = curve[0].series, curve[0].adapters
    each = curve[0].rate / adapters
    what = f"{adapters} adapters, {curve[0].rate:.3g} requests/s ({stem.removeprefix('metrics_data_')} {rate:g})"
    found, errors = [], []
    for run, ours in zip(curve, predicted, strict=True):
        error = ours.throughput / run.throughput - 1
        errors.append(error)
        passed = abs(error) <= _EACH
        found.append(
            Line(
                TARGET,
                f"{what}, {run.slots} slots",
                "tokens/s",
                run.throughput,
                ours.throughput,
                f"{100 * error:+.1f} %",
                "10 %",
                passed,
                "" if passed else _reason(run, ours),
                group=f"{adapters} adapters at {each:.2g}/s each, {stem.removeprefix('metrics_data_')}",
            )
        )
    mean = fmean(map(abs, errors))
    found.append(
        Line(
            TARGET,
            f"{what}: mean error",
            "%",
            "-",
            100 * mean,
            f"{100 * mean:.1f} %",
            "6 %",
            mean <= _MEAN,
            "" if mean <= _MEAN else _FOLLOWS,
        )
    )
    return [*found, *_shape(what, curve, predicted)]


def _shape(what: str, curve: Sequence[Run], predicted: Sequence[Predicted]) -> list[Line]:
    """Where the top is, and what the most slots lose against it."""
    if len(curve) < 3:
        return []
    theirs, ours = [run.throughput for run in curve], [one.throughput for one in predicted]
    top, at = theirs.index(max(theirs)), ours.index(max(ours))
    loss, lost = max(theirs) / theirs[-1], max(ours) / ours[-1]
    off = lost / loss - 1
    return [
        Line(
            TARGET,
            f"{what}: best slots",
            "slots",
            curve[top].slots,
            curve[at].slots,
            f"{at - top:+d} grid steps",
            "1 step",
            abs(at - top) <= 1,
        ),
        Line(
            TARGET,
            f"{what}: best over {curve[-1].slots} slots",
            "ratio",
            loss,
            lost,
            f"{100 * off:+.1f} %",
            "10 %",
            abs(off) <= _LOSS,
            "" if abs(off) <= _LOSS else _FOLLOWS,
        ),
    ]


def _reason(run: Run, ours: Predicted) -> str:
    """What the run spent on things that the twin does otherwise, as far as its columns say."""
    said = []
    if run.scheduling > _NOTABLE * run.seconds:
        said.append(f"{100 * run.scheduling / run.seconds:.0f} % of it was spent on looking through the waiting line")
    if run.loads > 1.5 * ours.loads:
        share = run.loading * run.loads / (run.loads + run.adapters) / run.seconds
        said.append(
            f"{run.loads:,.0f} loads ({100 * share:.0f} % of it) where the twin has {ours.loads:,}: vLLM's LRU may evict "
            "an adapter of the step in hand and then brings it back"
        )
    return "; ".join(said) or "the linear form of a step (how far it is off: first line of this target)"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
