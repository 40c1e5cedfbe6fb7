"""One calibration: look at the engine, measure it within a budget of time, fit, and clean up.

Theory of operation. A plan's round is carried out again and again until the rounds or the time are over. A probe that lately took
longer than what is left is skipped, and one that the end of the time overtakes is given up; of each point the inner mean over its
rounds counts. An engine that works for others would be measured wrongly and disturbed, so a busy one is refused before anything is
sent, and what it finished beside our own requests is counted and said.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from statistics import median
from typing import Final

import msgspec

from loraledger.engines.calibrate.asking import Asker
from loraledger.engines.calibrate.facts import Facts, Given, Reader, with_loaded_rank
from loraledger.engines.calibrate.measure import PREFIX, TOO_SHORT, Bench, Folder, Point, inner
from loraledger.engines.calibrate.plan import ROUNDS, DecodeProbe, MoveProbe, Probe, left_out, plan
from loraledger.engines.probe_api import ProbeApi
from loraledger.engines.protocol import ReplicaTarget
from loraledger.engines.scrape import EngineSample
from loraledger.engines.vllm_api import VllmApi
from loraledger.errors import ConfigError, TargetError
from loraledger.twin.calibrated import Calibrated
from loraledger.twin.fit import Fit, fit
from loraledger.twin.fit_points import DecodePoint, MixedPoint, MovePoint, Points, PrefillPoint
from loraledger.twin.profile import PS_PER_S, TwinProfile

GROWTH: Final = 3.0
"""How much longer than its lesser neighbour a probe is expected to take at most: sizes grow by factors of 2 and 4."""


class Progress(msgspec.Struct, frozen=True):
    """Where a calibration is: probes ``done`` of ``total`` (all rounds), and what comes next. Times in s."""

    done: int
    total: int
    elapsed: float
    budget: float
    what: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be calibrated. ``source``: how the profile says it was made; ``date``: ISO."""

    target: ReplicaTarget
    model: str | None
    given: Given
    folders: tuple[Folder, ...]
    budget_s: float
    quick: bool
    name: str
    device: str
    date: str
    source: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The profile, and the points that it rests on."""

    calibrated: Calibrated
    points: Points
    facts: Facts
    fit: Fit


async def calibrate(request: Request, progress: Callable[[Progress], None]) -> Result:
    """Measure the engine of ``request``.

    Raises ``TargetError``: it does not answer, works for others (``engine_busy``), refuses an adapter, or the budget was too
    short for a profile (``budget_too_short``); ``ConfigError``: flags that cannot be this engine's. Adapters that were registered
    are unloaded on every way out.
    """
    target = request.target
    reader, asker, api = Reader(target), Asker(target), VllmApi(target)
    probe = None if target.probe_key is None else ProbeApi(target)
    began = time.perf_counter()
    try:
        await _refuse_busy(reader)
        facts = await reader.read(request.model, request.given)
        await _unload_leftovers(api)
        before = await reader.sample()
        bench = Bench(asker, api, probe, facts, request.folders, deadline=began + request.budget_s)
        try:
            await bench.prepare(lambda: reader.read(request.model, request.given))
            points, skipped = await _measure(bench, bench.facts, request, began, progress)
        finally:
            await _through(bench.cleanup())
        facts = with_loaded_rank(bench.facts, bench.largest_rank)
        foreign = _finished(await reader.sample()) - _finished(before) - asker.answered
        return _result(request, facts, points, skipped, foreign)
    finally:
        for closing in (reader.close(), asker.close(), api.close()):
            await closing
        if probe is not None:
            await probe.close()


async def _through(work: Coroutine[None, None, None]) -> None:
    """``work`` to its end, also when whoever waits for it is cancelled: no name of ours may stay on somebody's engine."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


async def _refuse_busy(reader: Reader) -> None:
    sample = await reader.sample()
    busy = (sample.running or 0) + (sample.waiting or 0)
    if busy:
        raise TargetError(
            f"the engine has {busy} requests in hand: calibrate one that nobody uses, or drain it first",
            code="engine_busy",
        )


async def _unload_leftovers(api: VllmApi) -> None:
    """Names of a calibration that was killed."""
    for name in (await api.models()).adapters:
        if name.startswith(PREFIX):
            await api.unload(name)


def _finished(sample: EngineSample) -> int:
    return sum(count for reason, count in sample.finished.items() if reason != "abort")


async def _measure(
    bench: Bench, facts: Facts, request: Request, began: float, progress: Callable[[Progress], None]
) -> tuple[dict[Probe, list[Point]], int]:
    """All points by probe, and how many probes were never carried out."""
    round_ = plan(facts, [(folder.bytes, folder.rank) for folder in request.folders], quick=request.quick)
    rounds = 1 if request.quick else ROUNDS
    found: dict[Probe, list[Point]] = defaultdict(list)
    took: dict[Probe, float] = {}
    latest: dict[tuple[type, str], float] = {}
    done = 0
    for _ in range(rounds):
        for probe in round_:
            now = time.perf_counter()
            progress(Progress(done, rounds * len(round_), now - began, request.budget_s, describe(probe)))
            done += 1
            kind = type(probe), probe.kind if isinstance(probe, MoveProbe) else ""
            expected = took.get(probe, max(GROWTH * latest.get(kind, 0.0), bench.least(probe)))
            if now + expected > began + request.budget_s:
                continue
            try:
                found[probe] += await bench.measure(probe)
            except TargetError as error:
                if error.code != TOO_SHORT:
                    raise
                continue
            took[probe] = latest[kind] = time.perf_counter() - now
    progress(Progress(done, done, time.perf_counter() - began, request.budget_s, "fitting"))
    return found, sum(not found.get(probe) for probe in round_)


def describe(probe: Probe) -> str:
    """A few words for a progress bar."""
    match probe:
        case DecodeProbe():
            return f"decode: {probe.sequences} streams, {probe.adapters} adapters, {probe.prompt} prompt tokens"
        case MoveProbe():
            return f"{probe.kind} of adapter {probe.folder + 1}"
        case _:
            beside = getattr(probe, "sequences", 0)
            return f"prefill: {probe.tokens} tokens" + (f" beside {beside} streams" if beside else "")


def _result(request: Request, facts: Facts, found: dict[Probe, list[Point]], skipped: int, foreign: int) -> Result:
    points = _points(found)
    if not points.decodes or not points.prefills:
        raise TargetError(
            f"{request.budget_s:g} s were too short for this engine: give a longer --budget", code=TOO_SHORT
        )
    try:
        known = _known(request, facts)
        fitted = fit(points, known.profile)
        calibrated = fitted.into(known)
    except ValueError as error:
        raise ConfigError(
            f"no profile comes of this: {error}; are --max-seqs and --token-budget the engine's own?"
        ) from error
    notes = left_out(facts) if request.folders else []
    if facts.guessed:
        notes.append(f"not told by the engine, vLLM's defaults where nothing else is said: {', '.join(facts.guessed)}")
    if skipped:
        notes.append(f"{skipped} probes did not fit the budget of {request.budget_s:g} s")
    if foreign > 0:
        notes.append(f"the engine finished {foreign} requests of others meanwhile: calibrate again when it is idle")
    if fitted.adapter_ps is not None:
        notes.append(adapter_cost(points, fitted))
    calibrated = msgspec.structs.replace(calibrated, notes=tuple(notes))
    return Result(calibrated=calibrated, points=points, facts=facts, fit=fitted)


def _known(request: Request, facts: Facts) -> Calibrated:
    """What is known before anything is fitted: the engine's sizes; its times are the twin's defaults."""
    profile = TwinProfile(
        slots=facts.slots,
        host_entries=facts.host_entries,
        max_rank=facts.max_rank,
        max_seqs=facts.max_seqs,
        token_budget=facts.token_budget,
        kv_blocks=facts.kv_blocks,
        block_size=facts.block_size,
    )
    return Calibrated(
        name=request.name,
        engine="vllm",
        engine_version=facts.version,
        model=facts.model,
        device=request.device,
        date=request.date,
        source=request.source,
        profile=profile,
        block_bytes=facts.block_bytes,
        slot_bytes=facts.slot_bytes,
    )


def adapter_cost(points: Points, fitted: Fit) -> str:
    """What one more distinct adapter in a step costs, in time between tokens and in tokens a second."""
    assert fitted.adapter_ps is not None
    batch = max(p.sequences for p in points.decodes if p.adapters > 1)
    step = median(p.seconds for p in points.decodes if p.sequences == batch and p.adapters == 1)
    more = fitted.adapter_ps / PS_PER_S
    lost = batch / step - batch / (step + more)
    return (
        f"one more distinct adapter in a step of {batch} streams: {more * 1e3:+.3f} ms between tokens "
        f"({more / step:+.1%}), {-lost:+.1f} tokens/s of {batch / step:.0f}"
    )


def _points(found: dict[Probe, list[Point]]) -> Points:
    """One point of each probe, for its rounds."""
    decodes: list[DecodePoint] = []
    prefills: list[PrefillPoint] = []
    mixed: list[MixedPoint] = []
    moves: dict[str, list[MovePoint]] = defaultdict(list)
    for probe, points in found.items():
        if not points:
            continue
        match middle(points):
            case DecodePoint() as point:
                decodes.append(point)
            case PrefillPoint() as point:
                prefills.append(point)
            case MixedPoint() as point:
                mixed.append(point)
            case MovePoint() as point:
                assert isinstance(probe, MoveProbe)
                moves[probe.kind].append(point)
    return Points(
        decodes=tuple(decodes),
        prefills=tuple(prefills),
        mixed=tuple(mixed),
        loads=tuple(moves["load"]),
        activations=tuple(moves["activation"]),
        calls=tuple(moves["call"]),
    )


def middle(points: Sequence[Point]) -> Point:
    """One point for several of the same probe: the inner mean of what was measured."""
    first = points[0]
    return msgspec.structs.replace(
        first, **{field: inner([getattr(point, field) for point in points]) for field in times_of(first)}
    )


def times_of(point: Point) -> tuple[str, ...]:
    """The fields of ``point`` that were measured, in s."""
    return ("delay", "ttft") if isinstance(point, MixedPoint) else ("seconds",)
