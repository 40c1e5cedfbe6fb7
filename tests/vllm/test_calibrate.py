"""A real vLLM is calibrated over its own API, and what it does then is what the profile says."""

from __future__ import annotations

import asyncio
import time
from statistics import median

import pytest

from loraledger.adapters import read_folder
from loraledger.engines.calibrate.asking import Asker
from loraledger.engines.calibrate.facts import Given, Reader
from loraledger.engines.calibrate.measure import PREFIX, Bench, Folder
from loraledger.engines.calibrate.plan import DecodeProbe
from loraledger.engines.calibrate.run import Request, Result, calibrate
from loraledger.engines.protocol import ReplicaTarget
from loraledger.engines.vllm_api import VllmApi
from loraledger.twin.calibrated import decode, encode
from loraledger.twin.fit_points import DecodePoint
from loraledger.twin.profile import PS_PER_S

from .engine import Engine, Model

GIVEN = Given(host_entries=4, max_rank=64, max_seqs=16, token_budget=128)
HELD_OUT = DecodeProbe(sequences=6, prompt=24, adapters=1)
"""A batch and a context that --quick does not measure: it has 1, 4, 8 and 16 streams of 16 tokens."""
BESIDE = DecodeProbe(sequences=8, prompt=16, adapters=1)
"""One that it does measure. This machine's speed changes by a third within a minute, so the two take turns."""
TURNS = 5
LIMIT_S = 90.0


def folders(model: Model) -> tuple[Folder, ...]:
    read = [read_folder(name, model.adapters[name]) for name in ("a00", "a07")]
    return tuple(Folder(one.path, one.bytes_disk, one.rank) for one in read)


async def quick(target: ReplicaTarget, model: Model) -> Result:
    request = Request(
        target=target,
        model=None,
        given=GIVEN,
        folders=folders(model),
        budget_s=LIMIT_S - 10,
        quick=True,
        name="tiny",
        device="CPU",
        date="2026-11-29",
        source="a test",
    )
    return await calibrate(request, lambda _: None)


async def left_behind(target: ReplicaTarget) -> list[str]:
    """Names of a calibration that the engine still knows."""
    api = VllmApi(target)
    try:
        return [name for name in (await api.models()).adapters if name.startswith(PREFIX)]
    finally:
        await api.close()


async def turns(target: ReplicaTarget, model: Model) -> list[tuple[DecodePoint, DecodePoint]]:
    """The step that was never measured and the one beside it, in turns."""
    reader, asker, api = Reader(target), Asker(target, seed=9), VllmApi(target)
    bench = Bench(asker, api, None, await reader.read(None, GIVEN), folders(model))
    try:
        await bench.prepare(lambda: reader.read(None, GIVEN))
        seen = [[point for probe in (HELD_OUT, BESIDE) for point in await bench.measure(probe)] for _ in range(TURNS)]
    finally:
        await bench.cleanup()
        for closing in (reader.close(), asker.close(), api.close()):
            await closing
    found = []
    for points in seen:
        held_out, beside = (point for point in points if isinstance(point, DecodePoint))
        found.append((held_out, beside))
    return found


def test_quick_calibration_tells_a_step_that_it_never_measured(engine: Engine, model: Model) -> None:
    target = ReplicaTarget("engine", engine.url)
    began = time.monotonic()
    result = asyncio.run(quick(target, model))
    took = time.monotonic() - began
    assert took < LIMIT_S + 30  # the budget ends what is measured; the rest takes as long as the machine lets it
    assert asyncio.run(left_behind(target)) == []
    found = result.calibrated
    assert decode(encode(found)) == found
    assert found.engine_version == "0.32.0"
    assert (found.profile.slots, found.profile.block_size) == (2, 128)
    assert found.profile.kv_tokens == 262_144
    assert found.block_bytes == 2**30 // found.profile.kv_blocks
    assert {term.name for term in found.terms if term.points} >= {"decode", "prefill", "mixed", "load", "adapter"}

    def predicted(point: DecodePoint) -> float:
        return found.profile.step_ps(point.sequences, point.kv_tokens, 0, 1) / PS_PER_S

    seen = asyncio.run(turns(target, model))
    assert all((held_out.sequences, beside.sequences) == (6, 8) for held_out, beside in seen)
    held_out, beside = seen[0]
    ratio = median(held_out.seconds / beside.seconds for held_out, beside in seen)
    assert predicted(held_out) / predicted(beside) == pytest.approx(ratio, rel=0.15)
    assert 0.5 < median(predicted(held_out) / held_out.seconds for held_out, _ in seen) < 2.0
