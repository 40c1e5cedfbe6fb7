"""A measured run beside its replay: the same figures of both, from the same tables, by the same code.

A replay gets the requests of the record (arrivals, adapters, tokens as the engine counted them), the kernel's settings out of the
journal, and the calibrated profile; nothing of how the run went. Open loops are replayed at their recorded arrivals. Closed loops
are replayed as closed loops: the requests in their recorded order, the next one when one ends, because their arrivals are an
outcome of the engine's speed and would give the answer away.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec

from benchmarks.reproduce.table import Line
from loraledger.conductor.reading import Segment, open_record
from loraledger.engines.calibrate.measure import Point
from loraledger.engines.calibrate.run import middle, times_of
from loraledger.kernel.settings import MS
from loraledger.record.frames import segments
from loraledger.record.lines import BadRows
from loraledger.record.tables import Row
from loraledger.replay.fleet.observation import Observation
from loraledger.replay.fleet.outcome import RECORD_FOLDER
from loraledger.replay.fleet.run import run
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.scenarios.building import way_in
from loraledger.replay.traces.recorded import Recorded
from loraledger.twin.calibrated import Calibrated
from loraledger.twin.fit import fit
from loraledger.twin.fit_points import DecodePoint, MixedPoint, MovePoint, Points, PrefillPoint

TARGETS: Final = {
    "throughput": 0.05,
    "mean TTFT": 0.12,
    "mean ITL": 0.12,
    "p90 TTFT": 0.20,
    "p90 ITL": 0.20,
    "loads": 0.02,
}
HIT_TARGET: Final = 1.0
"""Percentage points."""
PIECE: Final = "calibration-{}.json"
PAIR: Final = "pair"
CONTEXT: Final = 64
"""Tokens of context within which two batches count as the same probe's."""
UNITS: Final = {"throughput": "tokens/s", "loads": "loads"}
NAIVE: Final = ("throughput", "mean TTFT", "mean ITL")
AT_DECISION: Final = " at the decision"


@dataclass(frozen=True)
class Figures:
    """Of one run. Times in ms; ``hits`` are shares of requests in percent.

    By the tier in which the engine found the adapter when it took the request up, as its probe told; and by the tier that the
    kernel knew of when it decided. The second hangs on which of two events a few milliseconds apart is heard of first.
    """

    requests: int
    values: dict[str, float]
    hits: dict[str, float]


def figures(record: Path) -> Figures:
    """The figures of a record, live or replayed."""
    with open_record(record) as reader:
        rows = [row for row in reader.rows("requests") if row["status"] == "ok"]
        moves = reader.rows("residency")
    ttft = [_span(row, "arrived_ns", "first_token_ns") for row in rows]
    itl = [_number(row["itl_mean_ns"]) / MS for row in rows if row["itl_mean_ns"] is not None]
    values = {
        "throughput": sum(_number(row["generated_tokens"]) for row in rows) / _seconds(rows),
        "mean TTFT": fmean(ttft),
        "mean ITL": fmean(itl),
        "p90 TTFT": _p90(ttft),
        "p90 ITL": _p90(itl),
        "loads": float(sum(_is_load(move) for move in moves)),
    }
    hits: dict[str, float] = {}
    for field, when in (("engine_access", ""), ("hit_class", AT_DECISION)):
        classes = Counter(str(row[field] or "unknown") for row in rows)
        hits |= {f"{name}{when}": 100 * count / len(rows) for name, count in classes.items()}
    return Figures(len(rows), values, hits)


def replayed(record: Path, calibrated: Calibrated, out: Path, clients: int | None) -> Figures:
    """The figures of the replay of a record; ``out`` gets its run folder."""
    settings = Segment(segments(record)[0]).settings
    observation = way_in(Observation(probe=True), calibrated)
    scenario = Scenario(
        label=out.name,
        settings=settings,
        profiles={spec.name: calibrated.profile for spec in settings.replicas},
        observation=observation,
    )
    with open_record(record) as reader:
        requests = [request for _, request in Recorded(reader, BadRows(record), "drop")]
    run(scenario, requests, out, trace_digest="", clients=clients)
    return figures(out / RECORD_FOLDER)


def served_per_s(record: Path) -> float:
    """Requests a second that a saturated engine answered."""
    with open_record(record) as reader:
        rows = [row for row in reader.rows("requests") if row["status"] == "ok"]
    return len(rows) / _seconds(rows)


def lines(what: str, measured: Sequence[Figures], ours: Sequence[Figures], *, saturated: bool) -> list[Line]:
    """One line a figure: means over the runs, the error over the larger of target and twice the run-to-run noise.

    Throughput is judged where the engine is saturated: below that it is what arrived.
    """
    found = []
    for name, target in TARGETS.items():
        if name == "throughput" and not saturated:
            continue
        seen, said = [m.values[name] for m in measured], [o.values[name] for o in ours]
        error = fmean(relative(o, m, symmetric=name == "throughput") for o, m in zip(said, seen, strict=True))
        noise = spread(seen)
        tolerance = max(target, 2 * noise)
        found.append(
            Line(
                what,
                name,
                UNITS.get(name, "ms"),
                fmean(seen),
                fmean(said),
                f"{100 * error:+.1f} %",
                f"{100 * tolerance:.1f} %",
                abs(error) <= tolerance,
                "" if abs(error) <= tolerance else f"two runs differ by {100 * noise:.1f} %",
            )
        )
    return found + hit_lines(what, measured, ours)


def hit_lines(what: str, measured: Sequence[Figures], ours: Sequence[Figures]) -> list[Line]:
    """A line for each hit class that occurred."""
    found = []
    for name in sorted({name for run_ in (*measured, *ours) for name in run_.hits}):
        seen, said = [m.hits.get(name, 0.0) for m in measured], [o.hits.get(name, 0.0) for o in ours]
        error = fmean(said) - fmean(seen)
        noise = max(seen) - min(seen)
        tolerance = max(HIT_TARGET, 2 * noise)
        found.append(
            Line(
                what,
                f"hit rate, {name}",
                "%",
                fmean(seen),
                fmean(said),
                f"{error:+.2f} points",
                f"{tolerance:.1f} points",
                abs(error) <= tolerance,
                "" if abs(error) <= tolerance else f"two runs differ by {noise:.1f} points",
            )
        )
    return found


def slowness(measured: Sequence[Figures], ours: Sequence[Figures]) -> float:
    """The mean time between tokens as measured, over ours."""
    seen, said = (fmean(run_.values["mean ITL"] for run_ in runs) for runs in (measured, ours))
    return seen / said


def slowed(points: Points, factor: float) -> Points:
    """What an engine that takes ``factor`` times as long for everything would have shown."""
    made: dict[str, Any] = {}
    for field in Points.__struct_fields__:
        made[field] = tuple(
            msgspec.structs.replace(point, **{name: factor * getattr(point, name) for name in times_of(point)})
            for point in getattr(points, field)
        )
    return Points(**made)


def with_cause(found: Sequence[Line], again: Sequence[Line], factor: float) -> list[Line]:
    """The misses of ``found`` say what became of them in ``again``, the same runs replayed ``factor`` times as slow."""
    others = {(line.target, line.what): line for line in again}
    told = []
    for line in found:
        other = others.get((line.target, line.what))
        if line.passed or other is None:
            told.append(line)
            continue
        verdict = "passes: step times alone" if other.passed else "misses still: not step times alone"
        told.append(replace(line, reason=f"{factor:.2f} times as slow: {other.error}, {verdict}; {line.reason}"))
    return told


def naive(points: Points) -> dict[str, float]:
    """What a predictor answers that knows the calibration's means and nothing else."""
    served = [point for point in points.decodes if point.adapters] or list(points.decodes)
    waits = [point.seconds for point in points.prefills] + [point.ttft for point in points.mixed]
    return {
        "throughput": fmean(point.sequences / point.seconds for point in served),
        "mean TTFT": 1e3 * fmean(waits),
        "mean ITL": 1e3 * fmean(point.seconds for point in served),
    }


def naive_line(
    what: str, points: Points, measured: Sequence[Figures], ours: Sequence[Figures], *, saturated: bool
) -> Line:
    """Whether the mean error over TTFT, ITL and, where it is judged, throughput is below that of the calibration's means."""
    guess, judged = naive(points), NAIVE if saturated else NAIVE[1:]
    errors = {"ours": 0.0, "naive": 0.0}
    for seen, said in zip(measured, ours, strict=True):
        errors["ours"] += fmean(abs(relative(said.values[name], seen.values[name])) for name in judged)
        errors["naive"] += fmean(abs(relative(guess[name], seen.values[name])) for name in judged)
    mine, theirs = (100 * errors[name] / len(measured) for name in ("ours", "naive"))
    return Line(
        what,
        "mean error against that of the calibration's means",
        "%",
        theirs,
        mine,
        f"{mine - theirs:+.1f} points",
        "below 0",
        mine < theirs,
        "" if mine < theirs else _nearer(guess, measured, ours, judged),
    )


def _nearer(
    guess: dict[str, float], measured: Sequence[Figures], ours: Sequence[Figures], judged: Sequence[str]
) -> str:
    """Each judged figure as measured, ours, and the calibration's mean."""
    told = []
    for name in judged:
        seen, said = (fmean(run_.values[name] for run_ in runs) for runs in (measured, ours))
        told.append(f"{name} {seen:.3g}, ours {said:.3g}, the mean {guess[name]:.3g}")
    return "; ".join(told)


def relative(ours: float, theirs: float, *, symmetric: bool = False) -> float:
    """``ours`` over ``theirs``, less one; ``symmetric``: over the mean of both, as SMAPE has it."""
    scale = (abs(ours) + abs(theirs)) / 2 if symmetric else abs(theirs)
    return (ours - theirs) / scale if scale else 0.0


def spread(values: Sequence[float]) -> float:
    """How far runs of the same are apart, over their mean."""
    mean = fmean(values)
    return (max(values) - min(values)) / mean if mean else 0.0


def pieces(work: Path, *, pair: bool = False) -> list[Path]:
    """The pieces of the calibration that a work folder has: of an engine alone, or of one of a ``pair``."""
    of_pair = PIECE.format(f"{PAIR}-*")
    return [path for path in sorted(work.glob(PIECE.format("*"))) if path.match(of_pair) is pair]


def load_points(work: Path, *, pair: bool = False) -> tuple[Calibrated, Points]:
    """What the pieces of a calibration come to, together, and their points pooled."""
    parts = [
        msgspec.json.decode(piece.read_bytes(), type=tuple[Calibrated, Points]) for piece in pieces(work, pair=pair)
    ]
    first, points = parts[0][0], pooled([points for _, points in parts])
    return fitted(first, points), points


def fitted(calibrated: Calibrated, points: Points) -> Calibrated:
    """``calibrated`` with the times of ``points``."""
    return fit(points, calibrated.profile).into(calibrated)


def pooled(parts: Sequence[Points]) -> Points:
    """One point for those of the same probe."""
    made: dict[str, Any] = {}
    for field in Points.__struct_fields__:
        alike: dict[tuple[int, ...], list[Point]] = defaultdict(list)
        for part in parts:
            for point in getattr(part, field):
                alike[_probe_of(point)].append(point)
        made[field] = tuple(middle(points) for points in alike.values())
    return Points(**made)


def _probe_of(point: Point) -> tuple[int, ...]:
    """What tells the points of one probe from those of others: how many tokens were held differs a little by luck."""
    match point:
        case DecodePoint():
            return point.sequences, point.adapters, round(point.kv_tokens / point.sequences / CONTEXT)
        case MixedPoint():
            return point.sequences, point.adapters, point.tokens
        case PrefillPoint():
            return point.adapters, point.tokens
        case MovePoint():
            return point.bytes, point.rank


def save_points(path: Path, calibrated: Calibrated, points: Points) -> None:
    """Keep a piece of a calibration with what was measured."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode((calibrated, points)), indent=1))


def _is_load(move: Row) -> bool:
    """Bytes that reached the host cache, as the engine's probe told."""
    return move["cause"] == "load" and move["tier_before"] == "disk" and move["tier_after"] == "host"


def _seconds(rows: Sequence[Row]) -> float:
    """From the first arrival to the last end."""
    last, first = max(_number(row["finished_ns"]) for row in rows), min(_number(row["arrived_ns"]) for row in rows)
    return (last - first) / 1e9


def _span(row: Row, start: str, end: str) -> float:
    return (_number(row[end]) - _number(row[start])) / MS


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))]
