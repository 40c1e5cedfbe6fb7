"""S-LoRA's published runs (Sheng et al., MLSys 2024; results in its repository), predicted.

Theory of operation. Everything below ``DATA/slora-results`` is read (``slora_files``), constants are fitted by GPU and model to
few of the runs (``slora_fit``), and all others are predicted on the twin (``slora_model``). ``study`` does that;
``slora_lines`` holds the predictions against the measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.reproduce.slora_files import Run, read_runs
from benchmarks.reproduce.slora_fit import Fitted, fit_group, groups
from benchmarks.reproduce.slora_lines import Seen, all_lines
from benchmarks.reproduce.slora_model import Predictor
from benchmarks.reproduce.slora_setup import comparable, gpu_of, model_of
from benchmarks.reproduce.table import Counted, LeftOut, Line

FOLDER: Final = "slora-results"
_OTHER_SYSTEM: Final = {
    "vllm": "another system: one vLLM process an adapter, side by side",
    "peft": "another system: Hugging Face PEFT, one adapter at a time",
    "merge": "another mode: adapters are merged into the model, one at a time",
    "cluster": "S-LoRA with at most c adapters a batch, an order that the twin does not have",
}


@dataclass(frozen=True)
class Study:
    """The lines of S-LoRA's targets, the fits that they rest on, and what was left out."""

    lines: list[Line]
    fits: list[Fitted]
    left_out: list[LeftOut]

    def counted(self) -> list[Counted]:
        """How many constants each fit took."""
        return [
            Counted(
                f"{fit.gpu} {fit.model}",
                fit.constants.count,
                len(fit.points) + (fit.bare is not None),
                "pools as launched, weights and ranks of the model, bandwidth of the GPU, 60 us a copy, 20 us a call (bmm)",
            )
            for fit in self.fits
        ]


def study(data: Path, say: Callable[[str], None]) -> Study:
    """Fit and predict all that is below ``data``. Raises ``InputFileError`` for a bad file or none at all."""
    runs, unread = read_runs(data / FOLDER)
    say(f"{len(runs)} S-LoRA runs in {len({run.file for run in runs})} files")
    left_out = [LeftOut(file, reason) for file, reason in unread]
    predictor, fits, seen = Predictor(), [], []
    for (gpu, model), group in groups(runs).items():
        left_out += _other_systems(gpu, group)
        ours = [run for run in group if comparable(run.kind)]
        if not ours:
            continue
        try:
            fitted = fit_group(gpu, model, ours, predictor, say)
        except ValueError as error:
            left_out.append(LeftOut(f"{gpu} {model}: {len(ours)} runs", str(error)))
            continue
        fits.append(fitted)
        say(f"{gpu} {model}: predicting {len(ours)} runs")
        seen += [_seen(run, fitted, predictor) for run in ours]
    return Study(all_lines(runs, seen), fits, left_out)


def _seen(run: Run, fitted: Fitted, predictor: Predictor) -> Seen:
    guesses = []
    if not gpu_of(run.gpu).known:
        guesses.append(f"GPU {run.gpu} is not in our table")
    if not model_of(run.setting).known:
        guesses.append(f"setting {run.setting} is not published: taken for a 7B with rank 32")
    return Seen(
        run,
        predictor.predict(run, fitted.constants),
        run in fitted.points or run is fitted.bare,
        fitted.repeats(run),
        "; ".join(guesses),
    )


def _other_systems(gpu: str, runs: list[Run]) -> list[LeftOut]:
    found = []
    for kind, reason in _OTHER_SYSTEM.items():
        places = sorted({run.setting for run in runs if run.kind == kind})
        count = sum(run.kind == kind for run in runs)
        if count:
            found.append(LeftOut(f"{gpu} {' '.join(places)} {kind}: {count} runs", reason))
    return found
