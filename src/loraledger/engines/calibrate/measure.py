"""Carries out probes of a plan on one engine and turns them into points.

Theory of operation. Every duration is read off streams that run while something happens to them.

- A batch decodes while all of its streams have their first token and none its last: the mean time between tokens in that window is
  its step. A gap of over ten times the mean is somebody else's and left out.
- A prompt that is injected delays the streams that run: the gaps that it touches, less what as many undisturbed ones take.
- An activation or a load is the longer time to the first token of requests that go round one more adapter than there are places,
  over that of the same adapter right after. With a probe in the engine, loads are its own figures, and activations no less.
- A load call is the delay of a stream that runs beside it.

Adapters are registered under names of our own; one folder can be registered many times, and the engine moves each as one of its
own. ``cleanup`` unloads every one of them. Their bytes stay in the engine's tiers until traffic pushes them out, as vLLM's do.
An engine goes on with a load whose caller has gone, so a load that is under way is waited for before its name is unloaded.

Nothing is registered and no cycle goes on after the deadline: an engine may have many more places than the budget has time for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

import msgspec

from loraledger.engines.calibrate.asking import Answered, Asker
from loraledger.engines.calibrate.facts import Facts
from loraledger.engines.calibrate.plan import (
    SHORT,
    STEPS,
    DecodeProbe,
    MixedProbe,
    MoveProbe,
    PrefillProbe,
    Probe,
    places,
    pool_size,
)
from loraledger.engines.probe_api import ProbeApi
from loraledger.engines.vllm_api import LoadVerdict, VllmApi
from loraledger.errors import TargetError
from loraledger.twin.fit_points import DecodePoint, MixedPoint, MovePoint, PrefillPoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PREFIX: Final = "loraledger-calibrate-"
TINY: Final = 8
"""Prompt tokens of a request of which only the moves of its adapter matter."""
REPEATS: Final = 6
INJECTIONS: Final = 6
DISTURBED: Final = 10.0
"""Times the mean gap beyond which a gap is not the engine's step."""
TOO_SHORT: Final = "budget_too_short"
"""Code of the error for a deadline that has passed."""

Point = DecodePoint | PrefillPoint | MixedPoint | MovePoint


class Folder(msgspec.Struct, frozen=True):
    """A given adapter: its folder as the engine sees it, bytes of its files, rank."""

    path: Path
    bytes: int
    rank: int


class Bench:
    """The engine under measurement.

    Raises ``TargetError`` when it does not do what it is asked, and with the code ``TOO_SHORT`` past ``deadline``, in seconds of
    ``perf_counter``.
    """

    def __init__(
        self,
        asker: Asker,
        api: VllmApi,
        probe: ProbeApi | None,
        facts: Facts,
        folders: Sequence[Folder],
        *,
        deadline: float = math.inf,
    ) -> None:
        self._asker = asker
        self._api = api
        self._probe = probe
        self.facts = facts
        self._folders = folders
        self._random = Random(2)  # noqa: S311 - pauses
        self._deadline = deadline
        self._names: dict[str, None] = {}  # registered by us
        self._loading: asyncio.Task[LoadVerdict] | None = None
        self._quickest = math.inf
        self.largest_rank = 0
        """Of the adapters that the engine has loaded here."""
        self._number = 0
        self._pool: list[str] = []
        self._activations: dict[int, float] = {}

    async def prepare(self, read: Callable[[], Awaitable[Facts]]) -> None:
        """Register the adapters that stay, ``pool_size`` of them, and let the engine do everything once.

        ``read`` reads the facts again: an engine shows its slots only after the first adapter request.
        """
        await self._asker.ask(self.facts.model, SHORT, STEPS)
        if not self._folders:
            return
        self._pool.append(await self._register(self._folders[0]))
        await self._warm(1)
        self.facts = await read()
        for number in range(1, pool_size(self.facts)):
            self._pool.append(await self._register(self._folders[number % len(self._folders)]))
        await self._warm(len(self._pool))

    async def cleanup(self) -> None:
        """Unload every name that was registered here."""
        if self._loading is not None:
            with suppress(TargetError):  # whoever asked for it was told
                await self._loading
        for name in list(self._names):
            try:
                await self._api.unload(name)
            except TargetError as error:  # an engine that is gone has forgotten them
                if error.code == "timeout":
                    break  # one that hangs would take as long for each
        self._names.clear()

    def least(self, probe: Probe) -> float:
        """Seconds that ``probe`` takes at least, going by the loads so far; 0 where they tell nothing."""
        if not isinstance(probe, MoveProbe) or probe.kind == "call" or self._quickest == math.inf:
            return 0.0
        loads = 3 if probe.kind == "load" else 1  # the registration, and one in each time round
        return loads * self._quickest * (places(self.facts, probe.kind) + 1)

    async def measure(self, probe: Probe) -> list[Point]:
        """Carry out one probe."""
        match probe:
            case DecodeProbe():
                return [await self._decode(probe)]
            case PrefillProbe():
                return [await self._prefill(probe)]
            case MixedProbe():
                return list(await self._mixed(probe))
            case MoveProbe(kind="call"):
                return await self._calls(self._folders[probe.folder])
            case MoveProbe():
                return await self._cycle(probe)

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _decode(self, probe: DecodeProbe) -> DecodePoint:
        models = await self._warm(probe.adapters)
        asked = [
            self._asker.ask(models[number % len(models)], probe.prompt, STEPS + 8) for number in range(probe.sequences)
        ]
        answers = await asyncio.gather(*asked)
        start, end = max(answer.times[0] for answer in answers), min(answer.end for answer in answers)
        gaps, held = [], 0.0
        for answer in answers:
            seen = [time for time in answer.times if start <= time <= end]
            gaps += _gaps(seen)
            held += probe.prompt + sum(time < start for time in answer.times) + len(seen) / 2
        if len(gaps) < probe.sequences:
            raise TargetError(f"{probe.sequences} streams never ran at once: is --max-seqs the engine's own?")
        return DecodePoint(
            sequences=probe.sequences, kv_tokens=round(held), adapters=probe.adapters, seconds=steady(gaps)
        )

    async def _prefill(self, probe: PrefillProbe) -> PrefillPoint:
        adapters = 1 if self._pool else 0
        (model,) = await self._warm(adapters)
        times = [(await self._asker.ask(model, probe.tokens, 1)).ttft for _ in range(REPEATS)]
        return PrefillPoint(tokens=probe.tokens, adapters=adapters, seconds=inner(times))

    async def _mixed(self, probe: MixedProbe) -> list[MixedPoint]:
        adapters = 1 if self._pool else 0
        (model,) = await self._warm(adapters)
        injected: list[Answered] = []
        async with self._running(model, probe.sequences) as streams:
            for _ in range(INJECTIONS):
                pause = steady(_gaps(streams[0].times))
                await asyncio.sleep(pause * self._random.uniform(3, 5))
                injected.append(await self._asker.ask(model, probe.tokens, 1))
            await asyncio.sleep(pause * 4)
        spans = [(one.sent, one.end + pause) for one in injected]
        rows = [_delays(stream.times, spans) for stream in streams]
        delays, waits, held = [], [], []
        for one, row in zip(injected, zip(*rows, strict=True), strict=True):
            known = [delay for delay in row if delay is not None]
            if len(known) == len(streams):
                delays.append(fmean(known))
                # Less the wait for the step in hand to end, which is luck: its mean, half a step, is put back below.
                waits.append(one.ttft - min(time for time in streams[0].times if time > one.sent) + one.sent)
                held.append(sum(stream.prompt_tokens + sum(t < one.sent for t in stream.times) for stream in streams))
        if not delays:
            return []
        return [
            MixedPoint(
                sequences=probe.sequences,
                kv_tokens=round(median(held)),
                tokens=probe.tokens,
                adapters=adapters,
                delay=max(0.0, inner(delays)),
                # The mean: a request that just misses a step waits for one more, and that is no disturbance.
                ttft=fmean(waits) + calm_step(streams[0].times, spans) / 2,
            )
        ]

    # --- moves --------------------------------------------------------------------------------------------------------

    async def _cycle(self, probe: MoveProbe) -> list[Point]:
        """Requests round one more adapter than there are places: each finds its own one gone."""
        folder, facts = self._folders[probe.folder], self.facts
        names = [await self._register(folder) for _ in range(places(facts, probe.kind) + 1)]
        mark = await self._mark()
        await self._touch(names)  # whatever the registrations left behind, from here on the order is the cycle's
        longer = []
        for name in names:  # moved, then there: what the machine does at that moment is in both
            self._in_time()
            moved = (await self._asker.ask(name, TINY, 1)).ttft
            longer.append(moved - (await self._asker.ask(name, TINY, 1)).ttft)
        told = await self._told(mark, set(names), probe.kind)
        await self._forget(names)
        more = median(longer)
        if probe.kind == "activation":
            # On a device the copy goes on when the host is done with it: what the probe saw is only the least.
            more = max(more, median(told or [more]))
            self._activations[probe.folder] = more
        elif told:
            more = median(told)
        elif facts.host_entries > facts.slots:
            more -= self._activations.get(probe.folder) or median(self._activations.values() or [0.0])
        return [MovePoint(bytes=folder.bytes, rank=folder.rank, seconds=more)]

    async def _calls(self, folder: Folder) -> list[Point]:
        spans = []
        async with self._running(self.facts.model, 1) as (stream,):
            for _ in range(REPEATS):
                pause = steady(_gaps(stream.times))
                await asyncio.sleep(pause * 6)
                began = time.perf_counter()
                name = await self._register(folder)
                spans.append((began, time.perf_counter() + pause))
                await self._forget([name])
            await asyncio.sleep(pause * 6)
        delays = [delay for delay in _delays(stream.times, spans) if delay is not None]
        if not delays:
            return []
        return [MovePoint(bytes=folder.bytes, rank=folder.rank, seconds=max(0.0, median(delays)))]

    async def _mark(self) -> tuple[int, str] | None:
        if self._probe is None:
            return None
        snapshot = await self._probe.residency()
        return snapshot["seq"], snapshot["boot"]

    async def _told(self, mark: tuple[int, str] | None, names: set[str], kind: str) -> list[float]:
        """How long the probe says that loads or activations of ``names`` took in steps since ``mark``, in s."""
        if self._probe is None or mark is None:
            return []
        await asyncio.sleep(0.2)  # its readings are merged 20 times a second
        page = await self._probe.events(*mark, wait_s=1.0)
        return [
            event["dur_ns"] / 1e9
            for event in page.get("events", ())
            if event.get("kind") == f"{kind}_end"
            and event.get("name") in names
            and event.get("cause", "step") == "step"
        ]

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _in_time(self) -> None:
        if time.perf_counter() >= self._deadline:
            held = len(self._names)
            raise TargetError(
                f"the budget ended with {held} adapters registered: give a longer --budget", code=TOO_SHORT
            )

    async def _register(self, folder: Folder) -> str:
        self._in_time()
        self._number += 1
        name = f"{PREFIX}{self._number}"
        self._names[name] = None
        began = time.perf_counter()
        self._loading = asyncio.create_task(self._api.load(name, str(folder.path)))
        verdict = await asyncio.shield(self._loading)
        if not verdict.done:
            raise TargetError(f"the engine refused to load {folder.path}: {verdict.text}", code=verdict.reason)
        self._quickest = min(self._quickest, time.perf_counter() - began)
        self.largest_rank = max(self.largest_rank, folder.rank)
        return name

    async def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            await self._api.unload(name)
            self._names.pop(name, None)

    async def _warm(self, adapters: int) -> list[str]:
        """The names of so many adapters (0: the base model), all in slots now."""
        names = self._pool[:adapters] or [self.facts.model]
        await self._touch(names)
        return names

    async def _touch(self, names: Sequence[str]) -> None:
        for name in names:
            self._in_time()
            await self._asker.ask(name, TINY, 1)

    @asynccontextmanager
    async def _running(self, model: str, count: int) -> AsyncIterator[list[Answered]]:
        """``count`` streams that decode until the block ends. Raises ``TargetError`` when one ended before."""
        streams = [Answered(model, SHORT, 0.0) for _ in range(count)]
        most = self.facts.max_model_len - SHORT - 1
        tasks = [asyncio.create_task(self._asker.ask(model, SHORT, most, stream)) for stream in streams]
        try:
            while min(len(stream.times) for stream in streams) < TINY:
                await asyncio.sleep(0.005)
                _raise_of(tasks)
            yield streams
            _raise_of(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _raise_of(tasks: Sequence[asyncio.Task[Answered]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def inner(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest, of fewer than 5 the median: what a replay adds up are means, hiccups aside."""
    return fmean(sorted(values)[1:-1]) if len(values) > 4 else median(values)


def steady(gaps: Sequence[float]) -> float:
    """The mean of ``gaps`` without those over ten times the mean: tokens that came in one piece have no median gap."""
    mean = fmean(gaps)
    return fmean(gap for gap in gaps if gap <= DISTURBED * mean)


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def calm_step(times: Sequence[float], spans: Sequence[tuple[float, float]]) -> float:
    """The mean time between tokens outside of ``spans``; 0 where there is none."""
    calm = [b - a for a, b in pairwise(times) if not any(b >= began and a <= ended for began, ended in spans)]
    return steady(calm) if calm else 0.0


def _delays(times: Sequence[float], spans: Sequence[tuple[float, float]]) -> list[float | None]:
    """By how much each span of time delayed a stream with tokens at ``times``; ``None``: it did not run all through it."""
    step = calm_step(times, spans)
    found: list[float | None] = []
    for began, ended in spans:
        touched = [b - a for a, b in pairwise(times) if b >= began and a <= ended]
        covered = step > 0 and times[0] <= began and times[-1] >= ended
        found.append(sum(touched) - len(touched) * step if covered else None)
    return found
