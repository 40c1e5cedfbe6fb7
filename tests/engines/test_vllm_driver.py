import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from engines.scripted import ScriptedEngine, error
from loraledger.engines.protocol import EngineDriver, ReplicaTarget
from loraledger.engines.vllm import VllmDriver, map_path
from loraledger.engines.vllm_api import VllmApi, diagnose_load, diagnose_unload
from loraledger.errors import InputFileError
from loraledger.events import (
    Check,
    CommandDone,
    CommandFailed,
    Event,
    Evict,
    Load,
    ReplicaDown,
    ReplicaSampled,
    ReplicaUp,
    ScrapeStarted,
)

CASES = Path(__file__).parents[1] / "cases"
A, B = "alpha@3fa9c1d20b7e", "beta@000000000001"
MS = 1_000_000
WORKER = "Call to add_lora method failed: Worker failed with error"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
E = TypeVar("E")


class Watched:
    """A running driver and all that it fed."""

    def __init__(self, target: ReplicaTarget, paths: Callable[[str], str]) -> None:
        self.events: list[Event] = []
        self.driver: EngineDriver = VllmDriver(target, self._feed, time.time_ns, paths)
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def _feed(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()

    def start(self) -> None:
        self.task = asyncio.create_task(self.driver.run())

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    async def nth(self, kind: type[E], number: int = 1, within: float = 20.0) -> E:
        async with asyncio.timeout(within):
            while len(self.all(kind)) < number:
                self._news.clear()
                await self._news.wait()
        return self.all(kind)[number - 1]


Watch = Callable[..., Awaitable[Watched]]


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()
    await engine.start()
    yield engine
    await engine.kill()


@pytest.fixture
async def watch(engine: ScriptedEngine) -> AsyncIterator[Watch]:
    started: list[Watched] = []

    def in_store(engine_name: str) -> str:
        return f"/store/{engine_name.partition('@')[0]}"

    async def begin(paths: Callable[[str], str] = in_store, **settings: object) -> Watched:
        target = ReplicaTarget("gpu-0", engine.url, scrape_interval=30 * MS, probe_timeout=1000 * MS)
        watched = Watched(replace(target, **settings), paths)  # type: ignore[arg-type]
        started.append(watched)
        watched.start()
        return watched

    yield begin
    for watched in started:
        assert watched.task is not None
        watched.task.cancel()
        await asyncio.gather(watched.task, return_exceptions=True)


# --- what replies mean --------------------------------------------------------------------------------------------------


def test_five_replies_get_five_diagnoses() -> None:
    replies = json.loads((CASES / "runtime-update-off" / "replies.json").read_text())
    wanted = json.loads((CASES / "runtime-update-off" / "expect.json").read_text())["diagnoses"]
    verdicts = [diagnose_load(reply["status"], reply.get("body")) for reply in replies]
    reasons = [verdict.reason for verdict in verdicts]
    assert reasons == [
        "runtime_update_off",
        "loaded",
        "adapter_not_registered",
        "already_loaded",
        "engine_wants_api_key",
    ]
    assert len(set(reasons)) == len(wanted)
    assert [verdict.done for verdict in verdicts] == [False, True, False, True, False]
    assert not verdicts[0].permanent  # the engine's setting is at fault, not the adapter
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in verdicts[0].message
    assert "router" in verdicts[0].message
    assert "key of this replica" in verdicts[4].message


@pytest.mark.parametrize(
    ("status", "body", "reason", "permanent"),
    [
        (404, "<html>no such page</html>", "runtime_update_off", False),
        (404, None, "runtime_update_off", False),
        (
            404,
            error("Loading lora a failed: No adapter found for /s/a", "NotFoundError", 404),
            "adapter_files_missing",
            True,
        ),
        (403, {"error": "Forbidden"}, "engine_wants_api_key", False),
        (
            400,
            error("LoRA rank 128 is greater than max_lora_rank 64.", "BadRequestError", 400),
            "adapter_refused",
            True,
        ),
        (422, {"detail": [{"loc": ["body", "lora_path"]}]}, "adapter_refused", True),
        (429, {"error": "slow down"}, "engine_busy", False),
        (500, error(DEAD, "InternalServerError", 500), "engine_error", False),
        (500, "Internal Server Error", "engine_error", False),
        (502, "", "engine_error", False),
        (503, None, "engine_error", False),
    ],
)
def test_reply_to_a_load(status: int, body: object, reason: str, permanent: bool) -> None:
    verdict = diagnose_load(status, body)
    assert (verdict.done, verdict.reason, verdict.permanent) == (False, reason, permanent)


@pytest.mark.parametrize(
    "why",
    [
        "LoRA rank 128 is greater than max_lora_rank 64.",
        "/store/alpha doesn't contain tensors",
        "Error while deserializing header: invalid header length",
    ],
)
def test_an_adapter_that_the_engine_cannot_take_is_refused_for_good_though_it_says_500(why: str) -> None:
    said = f"{WORKER} '{why}', please check the stack trace above for the root cause"
    verdict = diagnose_load(500, error(said, "InternalServerError", 500))
    assert (verdict.reason, verdict.permanent, verdict.message) == ("adapter_refused", True, said)


@pytest.mark.parametrize("trouble", ["CUDA out of memory. Tried to", "[Errno 5] Input/output error", "RPC timed out"])
def test_trouble_of_the_machine_during_a_load_may_pass(trouble: str) -> None:
    verdict = diagnose_load(500, error(f"{WORKER} '{trouble}'", "InternalServerError", 500))
    assert (verdict.reason, verdict.permanent) == ("engine_error", False)


def test_unloading_what_is_not_there_is_done() -> None:
    gone = diagnose_unload(404, error("The lora adapter 'a' cannot be found.", "NotFoundError", 404))
    assert (gone.done, gone.reason) == (True, "unloaded")
    assert diagnose_unload(404, {"detail": "Not Found"}).reason == "runtime_update_off"


def test_an_engines_long_words_are_cut_and_kept_on_one_line() -> None:
    message = diagnose_load(400, error("line\nline\t" * 200, "BadRequestError", 400)).message
    assert len(message) == 400
    assert "\n" not in message


def test_path_map_matches_whole_components_and_the_first_rule() -> None:
    rules = (("/srv/store/", "/mnt/adapters"), ("/srv", "/other/"))
    assert map_path("/srv/store/ab/cd", rules) == "/mnt/adapters/ab/cd"
    assert map_path("/srv/store", rules) == "/mnt/adapters"
    assert map_path("/srv/storehouse/x", rules) == "/other/storehouse/x"
    assert map_path("/srvx/y", rules) == "/srvx/y"


# --- watching -----------------------------------------------------------------------------------------------------------


async def test_first_contact_tells_who_is_there_and_then_its_figures(engine: ScriptedEngine, watch: Watch) -> None:
    engine.registered = {A: "/store/alpha", "someone-elses": "/x"}
    engine.running = 3
    engine.lora_lines = [f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{A}"}} 1.7e+09']
    watched = await watch()
    sampled = await watched.nth(ReplicaSampled)
    scrape, up = watched.events[:2]
    assert isinstance(scrape, ScrapeStarted)
    assert isinstance(up, ReplicaUp)
    assert up == ReplicaUp(up.at, "gpu-0", 1_792_700_010_250_000_000, (A, "someone-elses"), "0.32.0")
    assert sampled == ReplicaSampled(
        sampled.at,
        "gpu-0",
        scrape.at,
        3,
        1,
        0.25,
        16_000,
        active=(A,),
        registered=(A, "someone-elses"),
        block_tokens=16,
    )
    assert scrape.at <= up.at <= sampled.at


async def test_models_are_listed_only_when_due(engine: ScriptedEngine, watch: Watch) -> None:
    watched = await watch(models_every=3)
    await watched.nth(ReplicaSampled, 7)
    told = [sampled.registered is not None for sampled in watched.all(ReplicaSampled)[:7]]
    assert told == [True, False, False, True, False, False, True]
    assert len(watched.all(ReplicaUp)) == 1
    assert engine.count("/version") == 1


async def test_restart_between_two_scrapes_is_seen_though_it_was_never_down(
    engine: ScriptedEngine, watch: Watch
) -> None:
    engine.registered = {A: "/store/alpha"}
    watched = await watch()
    await watched.nth(ReplicaSampled)
    engine.process_start, engine.registered = 1_792_700_999.0, {}
    again = await watched.nth(ReplicaUp, 2)
    assert (again.process_start, again.registered) == (1_792_700_999_000_000_000, ())
    assert watched.all(ReplicaDown) == []


async def test_killed_engine_is_down_soon_and_up_again_after_its_restart(engine: ScriptedEngine, watch: Watch) -> None:
    watched = await watch()
    await watched.nth(ReplicaSampled)
    killed = time.time_ns()
    await engine.kill()
    down = await watched.nth(ReplicaDown)
    assert down.reason.startswith(("connect_failed: ", "connection_broken: "))
    assert down.at - killed < 5000 * MS
    await asyncio.sleep(0.3)
    assert len(watched.all(ReplicaDown)) == 1
    begun = time.time_ns()
    engine.process_start = 1_792_800_000.0
    await engine.start()
    up = await watched.nth(ReplicaUp, 2)
    assert up.at - begun < 5000 * MS
    assert up.process_start == 1_792_800_000_000_000_000


async def test_port_that_refuses_counts_as_down_at_once(
    engine: ScriptedEngine, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    health = VllmApi.health

    async def counted(api: VllmApi) -> int:
        nonlocal looks
        looks += 1
        return await health(api)

    monkeypatch.setattr(VllmApi, "health", counted)
    await engine.kill()
    watched = await watch()
    down = await watched.nth(ReplicaDown)
    assert down.reason.startswith("connect_failed: ")
    assert looks == 1
    await engine.start()


async def test_dead_engine_behind_a_living_api_is_down_at_once(engine: ScriptedEngine, watch: Watch) -> None:
    watched = await watch()
    await watched.nth(ReplicaSampled)
    engine.answers["/health"] = (503, "")
    scrapes = engine.count("/metrics")
    down = await watched.nth(ReplicaDown)
    assert down.reason.startswith("engine_dead: ")
    await asyncio.sleep(0.3)
    assert engine.count("/metrics") <= scrapes + 1
    del engine.answers["/health"]
    await watched.nth(ReplicaUp, 2)


async def test_one_slow_answer_is_borne_and_two_are_not(engine: ScriptedEngine, watch: Watch) -> None:
    watched = await watch(probe_timeout=800 * MS)
    await watched.nth(ReplicaSampled)
    engine.delays["/metrics"] = 5.0
    seen, scrapes = len(watched.all(ReplicaSampled)), engine.count("/metrics")
    await engine.called("/metrics", scrapes + 1)
    engine.delays.clear()
    await watched.nth(ReplicaSampled, seen + 3)
    assert watched.all(ReplicaDown) == []
    engine.delays["/metrics"] = 5.0
    down = await watched.nth(ReplicaDown)
    assert down.reason == "timeout: /metrics: no whole answer within 0.8 s"


async def test_several_engines_behind_one_url_are_refused(engine: ScriptedEngine, watch: Watch) -> None:
    engine.engines = 2
    watched = await watch()
    down = await watched.nth(ReplicaDown)
    assert down.reason.startswith("data_parallel: 2 engines")
    assert watched.all(ReplicaUp) == []
    engine.engines = 1
    await watched.nth(ReplicaUp)


async def test_engine_that_wants_a_key_is_down_and_with_the_key_up(engine: ScriptedEngine, watch: Watch) -> None:
    engine.api_key = "s3cret"
    keyless = await watch()
    down = await keyless.nth(ReplicaDown)
    assert down.reason.startswith("engine_wants_api_key: ")
    keyed = await watch(api_key="s3cret")
    await keyed.nth(ReplicaUp)
    assert "s3cret" not in repr(ReplicaTarget("gpu-0", engine.url, api_key="s3cret"))


async def test_check_looks_out_of_turn_and_many_checks_are_one_look(engine: ScriptedEngine, watch: Watch) -> None:
    watched = await watch(scrape_interval=60_000 * MS)
    await watched.nth(ReplicaSampled)
    for _ in range(50):
        watched.driver.perform(Check("gpu-0"))
    await watched.nth(ReplicaSampled, 2)
    await asyncio.sleep(0.2)
    assert len(watched.all(ReplicaSampled)) == 2
    assert engine.count("/health") == 2


async def test_storm_of_checks_does_not_become_a_storm_of_looks(engine: ScriptedEngine, watch: Watch) -> None:
    watched = await watch(scrape_interval=60_000 * MS)
    await watched.nth(ReplicaSampled)
    began = time.monotonic()
    while (passed := time.monotonic() - began) < 0.5 or engine.count("/health") < 3:
        assert passed < 20
        watched.driver.perform(Check("gpu-0"))
        await asyncio.sleep(0.002)
    assert engine.count("/health") <= 2 + (time.monotonic() - began) / 0.05


async def test_down_replica_is_polled_fast_at_first(engine: ScriptedEngine, watch: Watch) -> None:
    engine.answers["/health"] = (503, "")
    began = time.monotonic()
    await watch(scrape_interval=60_000 * MS)
    await engine.called("/health", 5)
    assert time.monotonic() - began > 0.7


async def test_fault_of_the_driver_itself_is_told_and_survived(
    engine: ScriptedEngine, watch: Watch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr("loraledger.engines.vllm_api.PageReader", None)
        watched = await watch()
        down = await watched.nth(ReplicaDown)
    assert down.reason.startswith("driver_error: TypeError")
    assert "gpu-0" in caplog.text
    await watched.nth(ReplicaUp)


async def test_stopping_closes_every_connection(engine: ScriptedEngine, watch: Watch) -> None:
    watched = await watch()
    await watched.nth(ReplicaSampled)
    assert watched.task is not None
    watched.task.cancel()
    await asyncio.gather(watched.task, return_exceptions=True)
    async with asyncio.timeout(20):
        while engine._writers:
            await asyncio.sleep(0.01)
    await watched.driver.close()


# --- working ------------------------------------------------------------------------------------------------------------


async def test_load_sends_the_versioned_name_and_the_engines_path(engine: ScriptedEngine, watch: Watch) -> None:
    watched = await watch(path_map=(("/store", "/mnt/models"),))
    watched.driver.perform(Load(7, "gpu-0", "alpha", A))
    done = await watched.nth(CommandDone)
    assert done.command == 7
    assert 0 < done.took < 30_000 * MS
    assert engine.bodies("/v1/load_lora_adapter") == [{"lora_name": A, "lora_path": "/mnt/models/alpha"}]


async def test_took_is_the_loads_own_time_not_its_wait_in_line(engine: ScriptedEngine, watch: Watch) -> None:
    engine.delays["/v1/load_lora_adapter"] = 0.15
    watched = await watch()
    began = time.time_ns()
    for number in range(3):
        watched.driver.perform(Load(number, "gpu-0", "alpha", f"{A}~{number + 2}"))
    last = await watched.nth(CommandDone, 3)
    took = [done.took for done in watched.all(CommandDone)]
    assert min(took) >= 150 * MS
    assert sum(took) <= last.at - began


async def test_commands_are_carried_out_one_at_a_time_in_order(engine: ScriptedEngine, watch: Watch) -> None:
    engine.delays["/v1/load_lora_adapter"] = 0.1
    watched = await watch()
    watched.driver.perform(Load(1, "gpu-0", "alpha", A))
    watched.driver.perform(Evict(2, "gpu-0", "alpha", A))
    watched.driver.perform(Load(3, "gpu-0", "beta", B))
    await watched.nth(CommandDone, 3)
    posts = [path for path, _, _ in engine.calls if path.endswith("_adapter")]
    assert posts == ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/load_lora_adapter"]
    assert list(engine.registered) == [B]


async def test_slow_load_does_not_hold_up_watching(engine: ScriptedEngine, watch: Watch) -> None:
    engine.delays["/v1/load_lora_adapter"] = 60.0
    watched = await watch()
    await watched.nth(ReplicaSampled)
    watched.driver.perform(Load(1, "gpu-0", "alpha", A))
    await engine.called("/v1/load_lora_adapter", 1)
    await watched.nth(ReplicaSampled, len(watched.all(ReplicaSampled)) + 4)
    assert watched.all(CommandDone) == []
    assert watched.all(CommandFailed) == []


async def test_adapter_already_there_counts_as_loaded(engine: ScriptedEngine, watch: Watch) -> None:
    engine.registered = {A: "/store/alpha"}
    watched = await watch()
    watched.driver.perform(Load(1, "gpu-0", "alpha", A))
    await watched.nth(CommandDone)
    assert watched.all(CommandFailed) == []


async def test_evicting_an_unknown_adapter_is_done(engine: ScriptedEngine, watch: Watch) -> None:
    watched = await watch()
    watched.driver.perform(Evict(1, "gpu-0", "alpha", A))
    assert (await watched.nth(CommandDone)).command == 1


async def test_refused_load_is_permanent_in_the_engines_words_and_the_list_is_read_again(
    engine: ScriptedEngine, watch: Watch
) -> None:
    watched = await watch(scrape_interval=60_000 * MS)
    await watched.nth(ReplicaSampled)
    said = f"{WORKER} 'LoRA rank 128 is greater than max_lora_rank 64.'"
    engine.answers["/v1/load_lora_adapter"] = (500, error(said, "InternalServerError", 500))
    engine.registered = {B: "/store/beta"}
    watched.driver.perform(Load(1, "gpu-0", "alpha", A))
    failed = await watched.nth(CommandFailed)
    assert failed == CommandFailed(failed.at, 1, f"adapter_refused: {said}", permanent=True)
    assert (await watched.nth(ReplicaSampled, 2)).registered == (B,)


async def test_load_on_an_engine_without_runtime_updates_names_the_setting(
    engine: ScriptedEngine, watch: Watch
) -> None:
    engine.runtime_updates = False
    watched = await watch()
    watched.driver.perform(Load(1, "gpu-0", "alpha", A))
    failed = await watched.nth(CommandFailed)
    assert not failed.permanent
    assert failed.reason.startswith("runtime_update_off: ")


async def test_engine_killed_during_a_load_may_be_tried_again(engine: ScriptedEngine, watch: Watch) -> None:
    engine.delays["/v1/load_lora_adapter"] = 5.0
    watched = await watch()
    await watched.nth(ReplicaSampled)
    watched.driver.perform(Load(1, "gpu-0", "alpha", A))
    await engine.called("/v1/load_lora_adapter", 1)
    await engine.restart(1_792_800_000.0)
    failed = await watched.nth(CommandFailed)
    assert not failed.permanent
    assert failed.reason.startswith("connection_broken: ")
    engine.delays.clear()
    watched.driver.perform(Load(2, "gpu-0", "alpha", A))
    assert (await watched.nth(CommandDone)).command == 2


async def test_load_that_never_answers_times_out_and_the_next_one_gets_its_turn(
    engine: ScriptedEngine, watch: Watch
) -> None:
    engine.delays["/v1/load_lora_adapter"] = 5.0
    watched = await watch(load_timeout=1000 * MS)
    watched.driver.perform(Load(1, "gpu-0", "alpha", A))
    failed = await watched.nth(CommandFailed)
    assert (failed.permanent, failed.reason.partition(":")[0]) == (False, "timeout")
    engine.delays.clear()
    watched.driver.perform(Load(2, "gpu-0", "alpha", A))
    assert (await watched.nth(CommandDone)).command == 2


async def test_load_on_a_down_replica_fails_at_once(engine: ScriptedEngine, watch: Watch) -> None:
    await engine.kill()
    watched = await watch()
    watched.driver.perform(Load(1, "gpu-0", "alpha", A))
    failed = await watched.nth(CommandFailed)
    assert (failed.permanent, failed.reason.partition(":")[0]) == (False, "connect_failed")
    await engine.start()


async def test_adapter_without_files_fails_for_good_and_a_broken_catalog_does_not_stop_the_driver(
    engine: ScriptedEngine, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    def paths(engine_name: str) -> str:
        if engine_name == A:
            raise InputFileError("alpha has no weights", code="adapter_unusable")
        return {B: "/store/beta"}[engine_name]

    watched = await watch(paths=paths)
    watched.driver.perform(Load(1, "gpu-0", "alpha", A))
    assert (await watched.nth(CommandFailed)).permanent
    assert watched.all(CommandFailed)[0].reason == "adapter_unusable: alpha has no weights"
    watched.driver.perform(Load(2, "gpu-0", "gamma", "gamma@000000000002"))
    broken = await watched.nth(CommandFailed, 2)
    assert (broken.permanent, broken.reason) == (False, "driver_error: KeyError('gamma@000000000002')")
    assert "command 2" in caplog.text
    watched.driver.perform(Load(3, "gpu-0", "beta", B))
    assert (await watched.nth(CommandDone)).command == 3


async def test_list_of_adapters_is_never_older_than_an_outcome_told_before(
    engine: ScriptedEngine, watch: Watch
) -> None:
    watched = await watch(models_every=1, scrape_interval=1 * MS)
    await watched.nth(ReplicaSampled)
    engine.lags["/v1/models"] = 0.02
    names = [f"a{number}@{number:012x}" for number in range(20)]
    for number, name in enumerate(names):
        engine.delays["/v1/load_lora_adapter"] = 0.003 * (number % 5)
        watched.driver.perform(Load(number, "gpu-0", name.partition("@")[0], name))
    await watched.nth(CommandDone, 20)
    await watched.nth(ReplicaSampled, len(watched.all(ReplicaSampled)) + 1)
    loaded: set[str] = set()
    told = 0
    for event in watched.events:
        if isinstance(event, CommandDone):
            loaded.add(names[event.command])
        elif isinstance(event, ReplicaSampled) and event.registered is not None:
            told += 1
            assert loaded <= set(event.registered)
    assert told >= 3
