"""The fits as profile files: S-LoRA on a GPU, ready for ``loraledger replay``.

A profile has one rank mix: the twin prices ranks by the distinct adapters in a step, what S-LoRA's kernels add by the rank of
each sequence is worked into the cost of a sequence. It is that of the setting with the most ranks that was fitted, and adapters
in use at random; the notes say which.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.reproduce.slora_files import Run
from benchmarks.reproduce.slora_fit import Fitted
from benchmarks.reproduce.slora_model import profile_of
from benchmarks.reproduce.slora_setup import model_of
from loraledger.twin.calibrated import Calibrated, encode

DATE: Final = "2024-01-04"
"""Of the commit that holds the results."""
SOURCE: Final = (
    "fitted by `make reproduce` to {runs} of the results in S-LoRA/S-LoRA (benchmarks/paper, commit c1ddf488):"
    " Sheng et al., S-LoRA: Serving Thousands of Concurrent LoRA Adapters, MLSys 2024"
)


def write_profiles(fits: Sequence[Fitted], folder: Path) -> list[Path]:
    """One file a fit, ``slora-MODEL-GPU.json``; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for fit in fits:
        profile = calibrated(fit)
        path = folder / f"{profile.name}.json"
        path.write_bytes(encode(profile))
        written.append(path)
    return written


def calibrated(fit: Fitted) -> Calibrated:
    """The profile of one fit."""
    run = _typical(fit.points)
    model = model_of(run.setting)
    mean_rank = sum(model.ranks) / len(model.ranks)
    notes = [
        f"setting {run.setting}: ranks {', '.join(map(str, model.ranks))} in equal parts, on q, k, v, o",
        f"{fit.constants.count} constants; pool size as the authors launched the server",
        "adapters are in host memory from the start: loading from disk costs nothing",
    ]
    if fit.constants.bare_decode is not None:
        bare = fit.constants.bare_decode * 1e3
        notes.append(
            f"with no adapters at all a decode step's base is {bare:.1f} ms instead of {fit.constants.decode * 1e3:.1f}"
        )
    return Calibrated(
        name=f"slora-{fit.model}-{fit.gpu}",
        engine="S-LoRA",
        engine_version=None,
        model=fit.model,
        device=fit.gpu,
        date=DATE,
        source=SOURCE.format(runs=len(fit.points) + (fit.bare is not None)),
        licence="Apache-2.0",
        profile=profile_of(fit.constants, run, mean_rank),
        block_bytes=model.cell,
        terms=fit.terms,
        notes=tuple(notes),
    )


def _typical(points: Sequence[Run]) -> Run:
    """A fitted run of the setting with the most ranks, with the most adapters of it."""
    return max(points, key=lambda run: (len(model_of(run.setting).ranks), run.config.num_adapters or 0))
