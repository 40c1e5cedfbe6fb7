"""Calibration against an engine whose constants are known: the emulator, a twin, here on a clock that holds no time but its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from engines.emulated import adapter, client, complete
from loraledger.engines.calibrate.facts import Facts, Given, Reader
from loraledger.engines.calibrate.measure import PREFIX, Bench, Folder, steady
from loraledger.engines.calibrate.plan import (
    MOST_STREAMS,
    DecodeProbe,
    MixedProbe,
    MoveProbe,
    PrefillProbe,
    Probe,
    plan,
)
from loraledger.engines.calibrate.run import Progress, Request, Result, calibrate
from loraledger.engines.emulator import EmulatorServer, EmulatorSettings
from loraledger.engines.protocol import ReplicaTarget
from loraledger.engines.vllm_api import LoadVerdict, VllmApi
from loraledger.errors import ConfigError, TargetError
from loraledger.twin.fit_points import MovePoint
from loraledger.twin.profile import PS_PER_MS, PS_PER_S, TwinProfile

from .virtual_clock import Clock, on_virtual_clock

TRUE = TwinProfile(
    slots=2,
    host_entries=3,
    max_seqs=8,
    token_budget=256,
    kv_blocks=4096,
    step_base_ps=12 * PS_PER_MS,
    step_per_seq_ps=1 * PS_PER_MS,
    step_per_kv_token_ps=2_000_000,
    adapter_step_ps=4 * PS_PER_MS,
    prefill_floor_ps=10 * PS_PER_MS,
    prefill_offset_ps=0,
    prefill_per_token_ps=300_000_000,
    load_overhead_ps=30 * PS_PER_MS,
    load_bytes_per_s=60_000_000,
    activation_ps=20 * PS_PER_MS,
)
PROBES: tuple[Probe, ...] = (
    DecodeProbe(sequences=1, prompt=16, adapters=0),
    DecodeProbe(sequences=1, prompt=16, adapters=1),
    DecodeProbe(sequences=8, prompt=16, adapters=1),
    DecodeProbe(sequences=8, prompt=16, adapters=2),
    DecodeProbe(sequences=4, prompt=400, adapters=1),
    PrefillProbe(tokens=8),
    PrefillProbe(tokens=128),
    MoveProbe(kind="activation", folder=0),
    MoveProbe(kind="load", folder=0),
    MoveProbe(kind="load", folder=1),
    MixedProbe(sequences=2, tokens=128),
)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Folder, ...]:
    sizes = {"small": (8, 500_000), "large": (64, 3_000_000)}
    return tuple(
        Folder(Path(adapter(tmp_path, name, rank=rank, size=size)), size, rank) for name, (rank, size) in sizes.items()
    )


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each load was asked for."""
    called: list[float] = []
    load = VllmApi.load

    async def noted(self: VllmApi, name: str, path: str) -> LoadVerdict:
        called.append(Clock().perf_counter())
        return await load(self, name, path)

    monkeypatch.setattr(VllmApi, "load", noted)
    return called


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[EmulatorServer]:
    async with EmulatorServer(EmulatorSettings(**{"profile": TRUE, "max_model_len": 512, **changes})) as server:
        yield server


async def calibrated(
    server: EmulatorServer,
    folders: tuple[Folder, ...] = (),
    *,
    budget_s: float = 60.0,
    show: Callable[[Progress], None] = lambda _: None,
    **changes: Any,
) -> Result:
    given = Given(slots=2, host_entries=3, max_seqs=8, token_budget=256, max_rank=64)
    request: dict[str, Any] = {"target": ReplicaTarget("engine", server.url), "model": None, "given": given}
    request |= {"folders": folders, "budget_s": budget_s, "quick": True, "name": "n", "device": "d"}
    return await calibrate(Request(**{**request, "date": "2026-11-29", "source": "a test", **changes}), show)


@on_virtual_clock
async def test_the_emulators_own_constants_are_recovered(
    folders: tuple[Folder, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraledger.engines.calibrate.run.plan", lambda *_, **__: list(PROBES))
    seen: list[Progress] = []
    async with running() as server:
        result = await calibrated(server, folders, show=seen.append)
        assert not server.engine.adapters
    found = result.calibrated.profile
    for n, kv, k in ((1, 40, 1), (8, 300, 1), (8, 300, 2), (4, 1700, 1)):
        assert found.step_ps(n, kv, 0, k) == pytest.approx(TRUE.step_ps(n, kv, 0, k), rel=0.01)
    assert found.adapter_step_ps == pytest.approx(TRUE.adapter_step_ps, rel=0.01)
    assert found.activation_ps == pytest.approx(TRUE.activation_ps, rel=0.01)
    for folder in folders:
        assert found.load_ps(folder.bytes) == pytest.approx(TRUE.load_ps(folder.bytes), rel=0.01)
    ttft = found.step_ps(0, 0, 128, 1) + result.calibrated.boundary_ps
    assert ttft == pytest.approx(TRUE.step_ps(0, 0, 128, 1), rel=0.01)
    # What is left is how far six arrivals within a step are from their mean.
    assert result.calibrated.boundary_ps < PS_PER_MS
    assert result.calibrated.boundary_per_seq_ps < PS_PER_MS
    assert (found.slots, found.host_entries, found.kv_blocks, found.block_size) == (2, 3, 4096, 16)
    assert [progress.done for progress in seen] == list(range(len(PROBES) + 1))


@on_virtual_clock
async def test_a_load_call_is_the_stall_of_a_stream_beside_it(
    folders: tuple[Folder, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = [*PROBES[:2], PROBES[5], MoveProbe(kind="call", folder=1)]
    monkeypatch.setattr("loraledger.engines.calibrate.run.plan", lambda *_, **__: probes)
    async with running() as server:
        (call,) = (await calibrated(server, folders)).points.calls
    assert isinstance(call, MovePoint)
    assert call.seconds == pytest.approx((TRUE.load_ps(3_000_000) + TRUE.activate_ps(64)) / PS_PER_S, rel=0.01)


@on_virtual_clock
@pytest.mark.parametrize(("told", "ms"), [(0.1, 100), (0.001, 20)])
async def test_an_activation_takes_no_less_than_the_probe_says(
    told: float, ms: int, folders: tuple[Folder, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def seen(*_: object) -> list[float]:
        return [told]

    monkeypatch.setattr(Bench, "_told", seen)
    monkeypatch.setattr("loraledger.engines.calibrate.run.plan", lambda *_, **__: [*PROBES[:2], PROBES[5], PROBES[7]])
    async with running() as server:
        (activation,) = (await calibrated(server, folders)).points.activations
    assert activation.seconds == pytest.approx(ms / 1e3, rel=0.01)


@on_virtual_clock
async def test_a_busy_engine_is_refused_before_anything_is_sent() -> None:
    async with (
        running() as server,
        client(server) as http,
        http.stream(
            "POST", "/v1/completions", json={"model": "base", "prompt": "x", "max_tokens": 200, "stream": True}
        ) as reply,
    ):
        await anext(reply.aiter_raw())
        with pytest.raises(TargetError, match="1 requests in hand") as caught:
            await calibrated(server)
    assert caught.value.code == "engine_busy"


@on_virtual_clock
async def test_adapters_are_unloaded_when_a_calibration_fails(folders: tuple[Folder, ...], tmp_path: Path) -> None:
    gone = Folder(tmp_path / "gone", 10, 8)
    async with running() as server:
        with pytest.raises(TargetError, match="refused to load"):
            await calibrated(server, (folders[0], gone))
        assert not server.engine.adapters


@on_virtual_clock
async def test_leftovers_of_a_killed_calibration_are_unloaded_and_foreign_adapters_are_not(
    folders: tuple[Folder, ...],
) -> None:
    async with running(profile=TRUE) as server, client(server) as http:
        for name in (f"{PREFIX}7", "theirs"):
            body = {"lora_name": name, "lora_path": str(folders[0].path)}
            (await http.post("/v1/load_lora_adapter", json=body)).raise_for_status()
        with pytest.raises(TargetError):
            await calibrated(server, budget_s=0.001)
        assert list(server.engine.adapters) == ["theirs"]


@on_virtual_clock
async def test_a_budget_that_is_too_short_for_a_profile_says_so() -> None:
    async with running() as server:
        with pytest.raises(TargetError, match="longer --budget") as caught:
            await calibrated(server, budget_s=0.001)
    assert caught.value.code == "budget_too_short"


@on_virtual_clock
async def test_nothing_is_registered_after_the_budget(folders: tuple[Folder, ...], loads: list[float]) -> None:
    async with running(profile=msgspec.structs.replace(TRUE, slots=50, host_entries=60)) as server:
        end = Clock().perf_counter() + 2.0
        with pytest.raises(TargetError, match="adapters registered: give a longer --budget") as caught:
            await calibrated(server, folders, budget_s=2.0, given=Given(max_seqs=8, token_budget=256))
        assert not server.engine.adapters
    assert caught.value.code == "budget_too_short"
    assert 1 < len(loads) < 50
    assert max(loads) < end


@on_virtual_clock
@pytest.mark.parametrize(("entries", "foreseen"), [(400, True), (400, False), (60, False), (45, False)])
async def test_a_cycle_that_the_budget_has_no_time_for_is_skipped_or_given_up(
    entries: int, foreseen: bool, folders: tuple[Folder, ...], loads: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraledger.engines.calibrate.run.plan", lambda *_, **__: [*PROBES[:2], PROBES[5], PROBES[8]])
    if not foreseen:
        monkeypatch.setattr(Bench, "least", lambda *_: 0.0)
    async with running() as server:
        end = Clock().perf_counter() + 10.0
        given = Given(slots=2, host_entries=entries, max_seqs=8, token_budget=256)
        result = await calibrated(server, folders, budget_s=10.0, given=given)
        assert not server.engine.adapters
        assert Clock().perf_counter() < end + 0.5
    assert result.points.loads == ()
    assert "1 probes did not fit the budget of 10 s" in result.calibrated.notes
    assert len(loads) == 2 if foreseen else min(entries, 100) < len(loads) < 150


@on_virtual_clock
async def test_no_more_adapters_stay_registered_than_run_at_once(
    folders: tuple[Folder, ...], loads: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraledger.engines.calibrate.run.plan", lambda *_, **__: [PROBES[0], PROBES[5]])
    async with running(profile=msgspec.structs.replace(TRUE, slots=100, host_entries=100)) as server:
        await calibrated(server, folders, given=Given(max_seqs=8, token_budget=256))
    assert len(loads) == MOST_STREAMS


@on_virtual_clock
async def test_more_host_entries_than_adapters_may_be_registered_leave_loads_out_of_the_profile_and_say_so(
    folders: tuple[Folder, ...], loads: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(facts: Facts, sizes: list[tuple[int, int]], *, quick: bool) -> list[Probe]:
        moves = [probe for probe in plan(facts, sizes, quick=quick) if isinstance(probe, MoveProbe)]
        return [*PROBES[:2], PROBES[5], *moves]

    monkeypatch.setattr("loraledger.engines.calibrate.run.plan", short)
    async with running() as server:
        given = Given(slots=2, host_entries=10_000, max_seqs=8, token_budget=256)
        result = await calibrated(server, folders, given=given)
    assert any("no load was measured: 10000 host entries" in note for note in result.calibrated.notes)
    assert result.points.activations
    assert not result.points.loads
    assert len(loads) < 100


@on_virtual_clock
@pytest.mark.parametrize(
    ("flags", "said", "registered"),
    [
        ({"slots": 1_000_000}, "--slots 1000000 is above the 2 that the engine shows", 1),
        ({"token_budget": 7}, "--token-budget 7 is below --max-seqs 8:", 0),
        ({"max_seqs": None}, r"--token-budget 255 is below --max-seqs 256 \(vLLM's default\)", 0),
        ({"host_entries": 1}, "--host-entries 1 is below --slots 2:", 0),
    ],
)
async def test_flags_that_cannot_be_the_engines_are_refused_by_name(
    flags: dict[str, int | None], said: str, registered: int, folders: tuple[Folder, ...], loads: list[float]
) -> None:
    async with running() as server:
        given = Given(**{"slots": 2, "host_entries": 10**6, "max_seqs": 8, "token_budget": 255, **flags})
        with pytest.raises(ConfigError, match=said):
            await calibrated(server, folders, given=given)
        assert not server.engine.adapters
    assert len(loads) == registered


@on_virtual_clock
async def test_a_profile_that_no_replay_would_believe_is_refused_with_the_flag_to_correct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "loraledger.engines.calibrate.run.plan",
        lambda *_, **__: [PROBES[0], PrefillProbe(tokens=8), PrefillProbe(tokens=128)],
    )
    async with running() as server:
        with pytest.raises(ConfigError, match=r"profile\.prefill_per_token_ps is .*--token-budget the engine's own"):
            await calibrated(server, (), given=Given(max_seqs=8, token_budget=10**12))


@on_virtual_clock
@pytest.mark.parametrize(("known", "ranks", "limit"), [(None, 2, 64), (None, 1, 16), (128, 2, 128)])
async def test_a_guessed_rank_limit_allows_what_the_engine_has_loaded(
    known: int | None, ranks: int, limit: int, folders: tuple[Folder, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraledger.engines.calibrate.run.plan", lambda *_, **__: [*PROBES[:2], PROBES[5]])
    async with running() as server:
        given = Given(slots=2, host_entries=3, max_seqs=8, token_budget=256, max_rank=known)
        result = await calibrated(server, folders[:ranks], given=given)
    assert result.calibrated.profile.max_rank == limit
    said = " ".join(result.calibrated.notes)
    assert ("max_rank" in said) == (known is None)
    assert ("as it loaded an adapter of that rank" in said) == (limit == 64)


@on_virtual_clock
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("wait_s", [0.01, 0.07])
async def test_a_calibration_that_is_cancelled_leaves_no_name_behind(
    wait_s: float, times: int, folders: tuple[Folder, ...], loads: list[float]
) -> None:
    async with running() as server:
        task = asyncio.create_task(calibrated(server, folders))
        while len(loads) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(wait_s)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.002)
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(1.0)
        assert not server.engine.adapters


@on_virtual_clock
async def test_what_does_not_answer_as_an_engine_does_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    get = Reader._get

    async def a_page(self: Reader, path: str) -> httpx2.Response:
        return httpx2.Response(200, text="<html>") if path == "/v1/models" else await get(self, path)

    monkeypatch.setattr(Reader, "_get", a_page)
    async with running() as server:
        with pytest.raises(TargetError, match="/v1/models did not answer with JSON"):
            await calibrated(server)


@on_virtual_clock
async def test_requests_of_others_meanwhile_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraledger.engines.calibrate.run.plan", lambda *_, **__: [PROBES[0], PROBES[5]])
    async with running() as server, client(server) as http:
        others: list[asyncio.Task[Any]] = []
        alone = await calibrated(server)
        shared = await calibrated(server, show=lambda _: others.append(asyncio.create_task(complete(http))))
        await asyncio.gather(*others)
    assert alone.calibrated.notes == ()
    assert any("requests of others" in note for note in shared.calibrated.notes)


@on_virtual_clock
async def test_the_wrong_base_model_is_refused_by_name() -> None:
    async with running() as server:
        with pytest.raises(TargetError, match="serves base, not llama"):
            await calibrated(server, model="llama")


def test_a_hiccup_of_over_ten_steps_is_no_step_and_bursts_are() -> None:
    assert steady([0.01] * 30 + [0.5]) == pytest.approx(0.01)
    assert steady([0.0, 0.0, 0.0, 0.04] * 8) == pytest.approx(0.01)
