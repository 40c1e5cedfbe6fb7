"""Which published S-LoRA runs the constants are fitted to, and the fit itself.

The rule, for each GPU and model (S1 and S2 are one model, hence share constants): the S-LoRA file of a setting in which the
request rate alone varies is fitted whole; a setting without one is fitted on the two runs with 5 and 100 adapters, or those
nearest to that, of one file in which only the number of adapters varies. The constant for no adapters at all is then fitted
alone, to the first run without adapters. Every other run is predicted; one that repeats a fitted configuration is told apart.

What a fit minimises are relative errors in units of what two measurements of the same thing differ by: 1 % in throughput, 0.1 s
and 10 % in time to first token, 0.03 in attainment, 2 % in latency; and the distance from the priors, in units of a third.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import msgspec

from benchmarks.reproduce.fit import fit
from benchmarks.reproduce.slora_files import Result, Run
from benchmarks.reproduce.slora_model import Constants, Predicted, Predictor, priors
from benchmarks.reproduce.slora_setup import model_of
from loraledger.twin.calibrated import Term

WIDTH: Final = 0.3
"""On the A100, which has four points, 0.5 leaves a valley: where it ends then hangs on the optimiser's steps."""
NAMED: Final = (5, 100)
_FITTED: Final = Constants.__struct_fields__[:-1]


@dataclass(frozen=True)
class Fitted:
    """Constants of one GPU and model with the runs that they rest on; ``bare``: the run without adapters among them."""

    gpu: str
    model: str
    constants: Constants
    points: tuple[Run, ...]
    bare: Run | None
    terms: tuple[Term, ...]

    def repeats(self, run: Run) -> bool:
        """Whether ``run`` asks for what was fitted: the same workload in the same order of service."""
        if run.kind in ("abort", "lifo", "no_mem", "bmm") and run.config.num_adapters != 0:
            return False
        if run.config.num_adapters == 0:
            return self.bare is not None and run.config == self.bare.config
        return not run.real and any(
            run.setting == point.setting and run.config == point.config for point in self.points
        )


def groups(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """By (GPU, model)."""
    found: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        found[run.gpu, model_of(run.setting).name].append(run)
    return dict(sorted(found.items()))


def fit_points(runs: Sequence[Run]) -> list[Run]:
    """The runs of one GPU and model to fit to, by the rule above; none: there is nothing to fit to."""
    found = []
    for setting in sorted({run.setting for run in runs}):
        files: dict[str, list[Run]] = defaultdict(list)
        for run in runs:
            if run.setting == setting and run.kind == "slora" and not run.real and run.config.num_adapters:
                files[run.file].append(run)
        order = sorted(files.values(), key=lambda rows: (len(rows[0].file), rows[0].file))
        sweeps = [rows for rows in order if _varies(rows, "req_rate")]
        found += sweeps[0] if sweeps else _named_points(order)
    return found


def _named_points(files: Sequence[Sequence[Run]]) -> list[Run]:
    """The pair nearest to ``NAMED``, of the file that comes nearest; the first of equals."""
    best: tuple[float, list[Run]] | None = None
    for rows in files:
        if not _varies(rows, "num_adapters"):
            continue
        pair = [min(rows, key=lambda run, wanted=wanted: _apart(run, wanted)) for wanted in NAMED]  # type: ignore[misc]
        apart = sum(_apart(run, wanted) for run, wanted in zip(pair, NAMED, strict=True))
        if pair[0] != pair[1] and (best is None or apart < best[0]):
            best = apart, pair
    return [] if best is None else best[1]


def _apart(run: Run, adapters: int) -> float:
    return abs(math.log((run.config.num_adapters or 0.01) / adapters))


def _varies(rows: Sequence[Run], field: str) -> bool:
    """Whether ``field`` is all that tells the workloads of ``rows`` apart."""
    seen = {getattr(run.config, field) for run in rows}
    rest = {msgspec.structs.replace(run.config, **{field: 1}) for run in rows}
    return len(seen) > 1 and len(rest) == 1


def sweeps_of(run: Run, rows: Sequence[Run], field: str) -> bool:
    """Whether ``run`` belongs to a file in which ``field`` alone varies."""
    return _varies([other for other in rows if other.file == run.file and other.config.num_adapters], field)


def fit_group(gpu: str, model: str, runs: Sequence[Run], predictor: Predictor, say: Callable[[str], None]) -> Fitted:
    """Fit one GPU and model. Raises ``ValueError`` without runs to fit to."""
    points = fit_points(runs)
    if not points:
        raise ValueError("neither a file of request rates nor one of numbers of adapters")
    say(f"{gpu} {model}: fitting {len(_FITTED)} constants to {len(points)} runs")
    start = priors(gpu, model_of(points[0].setting))

    def missed(values: list[float]) -> list[float]:
        constants = Constants(**dict(zip(_FITTED, values, strict=True)))
        return [term for run in points for term in _missed(run.result, predictor.predict(run, constants))]

    found = fit(missed, [getattr(start, name) for name in _FITTED], [WIDTH] * len(_FITTED))
    constants = Constants(**dict(zip(_FITTED, found, strict=True)))
    bare = _bare_point(runs)
    if bare is not None:
        constants = _fit_bare(constants, bare, predictor)
    terms = _terms([(run.result, predictor.predict(run, constants)) for run in points])
    return Fitted(gpu, model, constants, tuple(points), bare, terms)


def _bare_point(runs: Sequence[Run]) -> Run | None:
    bare = [run for run in runs if run.config.num_adapters == 0 and run.kind in ("slora", "pets")]
    return min(bare, key=lambda run: (run.kind != "slora", len(run.file), run.file, run.row), default=None)


def _fit_bare(constants: Constants, run: Run, predictor: Predictor) -> Constants:
    def missed(values: list[float]) -> list[float]:
        return _missed(run.result, predictor.predict(run, msgspec.structs.replace(constants, bare_decode=values[0])))

    (found,) = fit(missed, [constants.decode], [WIDTH])
    return msgspec.structs.replace(constants, bare_decode=found)


def _missed(measured: Result, predicted: Predicted) -> list[float]:
    terms = [math.log(max(predicted.throughput, 1e-9) / max(measured.throughput, 1e-9)) / 0.01]
    terms.append((predicted.attainment - measured.avg_attainment) / 0.03)
    first, ours = measured.avg_first_token_latency, predicted.first_token
    if first is not None:
        terms.append(((ours or 0.0) - first) / (0.1 + 0.1 * first))
    if measured.avg_latency:
        terms.append(math.log((predicted.latency or 1e-3) / measured.avg_latency) / 0.02)
    return terms


def _terms(pairs: Sequence[tuple[Result, Predicted]]) -> tuple[Term, ...]:
    """How far the fit is from the runs that it was made on."""
    figures: dict[str, list[tuple[float, float | None]]] = {
        "throughput": [(ours.throughput, theirs.throughput) for theirs, ours in pairs],
        "first token": [(ours.first_token or 0.0, theirs.avg_first_token_latency) for theirs, ours in pairs],
        "latency": [(ours.latency or 0.0, theirs.avg_latency) for theirs, ours in pairs],
    }
    found = []
    for name, values in figures.items():
        errors = [abs(ours / theirs - 1) for ours, theirs in values if theirs]
        if errors:
            found.append(Term(name=name, points=len(errors), error_mean=fmean(errors), error_worst=max(errors)))
    return tuple(found)
