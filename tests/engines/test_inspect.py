from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from engines.scripted import ScriptedEngine
from loraledger.engines.inspect import ReplicaReport, inspect_replica
from loraledger.engines.protocol import ReplicaTarget

A = "alpha@3fa9c1d20b7e"
SEEN = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.7e+09'


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(registered={A: "/store/alpha"}, lora_lines=[SEEN])
    await engine.start()
    yield engine
    await engine.kill()


def target(engine: ScriptedEngine, api_key: str | None = None) -> ReplicaTarget:
    return ReplicaTarget("gpu-0", engine.url, api_key=api_key, probe_timeout=500_000_000)


def problems(report: ReplicaReport) -> list[str]:
    return [found.code for found in report.problems]


def warnings(report: ReplicaReport) -> list[str]:
    return [found.code for found in report.warnings]


async def test_good_replica_is_described_without_a_complaint(engine: ScriptedEngine) -> None:
    engine.api_key = "s3cret"
    report = await inspect_replica(target(engine, "s3cret"), expected_slots=4, expected_base="acme/base")
    assert (problems(report), warnings(report)) == ([], [])
    assert (report.reachable, report.version) == (True, "0.32.0")
    assert (report.base_models, report.adapters) == (("acme/base",), (A,))
    assert (report.max_lora, report.kv_tokens, report.engines) == (4, 16_000, 1)
    assert (report.runtime_updates, report.load_route_open) == (True, False)


async def test_looking_changes_nothing(engine: ScriptedEngine) -> None:
    await inspect_replica(target(engine))
    posted = [(path, body) for path, body, _ in engine.calls if body is not None]
    assert posted == [("/v1/load_lora_adapter", {})]
    assert engine.registered == {A: "/store/alpha"}


async def test_load_route_open_to_anyone_is_a_warning(engine: ScriptedEngine) -> None:
    report = await inspect_replica(target(engine))
    assert (report.load_route_open, report.runtime_updates) == (True, True)
    assert warnings(report) == ["load_route_open"]


async def test_key_that_the_engine_does_not_check_leaves_the_route_open(engine: ScriptedEngine) -> None:
    report = await inspect_replica(target(engine, "a-key-of-ours"))
    assert report.load_route_open is True
    assert [keyed for path, _, keyed in engine.calls if path == "/v1/load_lora_adapter"] == [False, True]


async def test_runtime_updates_off_behind_a_key_is_told_from_the_missing_key(engine: ScriptedEngine) -> None:
    engine.api_key, engine.runtime_updates = "s3cret", False
    with_key = await inspect_replica(target(engine, "s3cret"))
    assert problems(with_key) == ["runtime_update_off"]
    assert (with_key.runtime_updates, with_key.load_route_open) == (False, False)
    without = await inspect_replica(target(engine))
    assert problems(without) == ["engine_wants_api_key"]
    assert (without.runtime_updates, without.load_route_open) == (None, False)


async def test_nobody_there_is_one_problem(engine: ScriptedEngine) -> None:
    await engine.kill()
    report = await inspect_replica(target(engine), expected_slots=4)
    assert (report.reachable, problems(report)) == (False, ["connect_failed"])
    await engine.start()


async def test_dead_engine_is_named_and_the_rest_still_read(engine: ScriptedEngine) -> None:
    engine.answers["/health"] = (503, "")
    report = await inspect_replica(target(engine))
    assert (report.reachable, problems(report), report.version) == (True, ["engine_dead"], "0.32.0")


async def test_one_reading_that_hangs_does_not_hide_the_others(engine: ScriptedEngine) -> None:
    engine.delays["/v1/models"] = 5.0
    report = await inspect_replica(target(engine), expected_slots=8)
    assert problems(report) == ["timeout", "slots_differ"]
    assert report.base_models == ()


async def test_settings_that_disagree_are_problems_with_a_remedy(engine: ScriptedEngine) -> None:
    report = await inspect_replica(target(engine), expected_slots=8, expected_base="acme/other")
    found = {problem.code: problem.message for problem in report.problems}
    assert set(found) == {"base_not_served", "slots_differ"}
    assert "4 slots" in found["slots_differ"]
    assert "--max-loras" in found["slots_differ"]
    assert "acme/base" in found["base_not_served"]


async def test_data_parallel_engines_are_a_problem(engine: ScriptedEngine) -> None:
    engine.engines = 2
    report = await inspect_replica(target(engine))
    assert (problems(report), report.engines) == (["data_parallel"], 2)


async def test_engine_without_lora_is_a_problem(engine: ScriptedEngine) -> None:
    engine.lora_lines = ['vllm:lora_requests_info{max_lora="0",running_lora_adapters=""} 1.0']
    assert problems(await inspect_replica(target(engine), expected_slots=4)) == ["lora_off"]


async def test_what_an_engine_does_not_show_is_none_and_a_warning(engine: ScriptedEngine) -> None:
    engine.answers["/metrics"] = (200, "vllm:num_requests_running 0\n")
    report = await inspect_replica(target(engine), expected_slots=4)
    assert (report.max_lora, report.kv_tokens, problems(report)) == (None, None, [])
    assert set(warnings(report)) == {"kv_unknown", "restart_unseen", "load_route_open"}


async def test_foreign_adapters_are_named(engine: ScriptedEngine) -> None:
    engine.registered |= {f"hand-loaded-{number}": "/x" for number in range(7)}
    report = await inspect_replica(target(engine))
    found = [warning.message for warning in report.warnings if warning.code == "foreign_adapters"]
    assert len(found) == 1
    assert "hand-loaded-0" in found[0]
    assert "hand-loaded-6" not in found[0]
    assert A not in found[0]


async def test_odd_answer_of_the_load_route_is_unclear_not_open(engine: ScriptedEngine) -> None:
    engine.answers["/v1/load_lora_adapter"] = (405, {"detail": "Method Not Allowed"})
    report = await inspect_replica(target(engine))
    assert (report.load_route_open, report.runtime_updates) == (None, None)
    assert "load_route_unclear" in warnings(report)


async def test_list_of_models_in_another_shape_is_a_problem(engine: ScriptedEngine) -> None:
    engine.answers["/v1/models"] = (200, {"models": ["x"]})
    assert problems(await inspect_replica(target(engine))) == ["bad_reply"]


async def test_an_engine_without_the_probe_that_the_settings_name_is_a_problem_with_the_line_to_set(
    engine: ScriptedEngine,
) -> None:
    report = await inspect_replica(replace(target(engine), probe_key="k"))
    (found,) = [found for found in report.problems if found.code == "no_probe"]
    assert "VLLM_PLUGINS=loraledger" in found.message
    assert report.probe is None


async def test_what_a_probe_lacks_and_how_many_ranks_it_shows_is_compared(engine: ScriptedEngine) -> None:
    hooks = {
        "tested": False,
        "vllm": "9.9",
        "missing": [{"hook": "Scheduler.schedule", "why": "not there", "loses": "steps"}],
    }
    engine.answers["/loraledger/residency"] = (200, {"probe": "0.1.0", "workers": [{}, {}], "hooks": [hooks]})
    report = await inspect_replica(replace(target(engine), probe_key="k"))
    assert report.probe == "0.1.0"
    assert "ranks_differ" in problems(report)
    assert {"probe_hook_missing", "probe_untested"} <= set(warnings(report))
    report = await inspect_replica(replace(target(engine), probe_key="k", tensor_parallel=2))
    assert "ranks_differ" not in problems(report)
