"""The probe inside a real vLLM: what it says equals what the engine's own objects and log say, and what it does harms nobody.

One engine serves the module: 2 slots, 4 host entries, 12 adapters. Every failure here is one that vLLM has; each test asks that
bystanders are still answered when the commands go through the probe.
"""

from __future__ import annotations

import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .engine import Model
from .probe_client import KEY, Json, ProbeClient, probed_engine, rebuilt, shown, too_wide_inputs

REQUESTS, SNAPSHOTS, AT_ONCE = 300, 30, 4


@pytest.fixture(scope="module")
def server(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProbeClient]:
    with probed_engine(model, tmp_path_factory.mktemp("probe")) as engine:
        client = ProbeClient(engine, model)
        yield client
        client.close()


@pytest.fixture
def probe(server: ProbeClient) -> ProbeClient:
    """The engine without a registered or resident adapter."""
    server.clear()
    return server


def kinds(events: list[Json], kind: str) -> list[Json]:
    return [event for event in events if event["kind"] == kind]


def slot_names(probe: ProbeClient) -> set[str]:
    return {slot["name"] for slot in probe.residency()["slots"] if slot["name"]}


def host_names(probe: ProbeClient) -> list[str]:
    return [entry["name"] for entry in probe.residency()["host"]]


def access_of(probe: ProbeClient, key: str) -> Json:
    """How the request with this id found its adapter."""
    (found,) = [event for event in kinds(probe.fetch(), "access") if key in event["requests"]]
    return found


def log_lines(probe: ProbeClient) -> Counter[str]:
    """How often vLLM's own log tells of a load, an activation, a removal from a cache."""
    text = probe.engine.log.read_text(errors="replace")
    return Counter(re.findall(r"Adding lora\. Model id|Activating LoRA\. int id|Removing adapter int id", text))


def test_slot_map_and_orders_rebuilt_from_events_equal_the_engines_own_at_each_of_30_snapshots(
    probe: ProbeClient,
) -> None:
    names = list(probe.model.adapters)
    for name in names:
        probe.load(name).raise_for_status()
    rng = random.Random(4)
    stream = rng.choices(names, weights=[1 / (i + 1) for i in range(len(names))], k=REQUESTS)
    snapshots: list[Json] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = [pool.submit(probe.ask, name, rng.randint(1, 6), f"z{i}") for i, name in enumerate(stream)]
        for i in range(SNAPSHOTS):
            jobs[(i + 1) * REQUESTS // SNAPSHOTS - 1].result()
            snapshots.append(probe.residency())  # while others run
    assert {job.result().status_code for job in jobs} == {200}
    probe.fetch()
    for snapshot in snapshots:
        assert rebuilt(probe.events, snapshot) == shown(snapshot)
    early, late = snapshots[9], snapshots[-1]
    assert rebuilt([event for event in probe.events if event["seq"] > early["seq"]], late, start=early) == shown(late)
    assert len({str(shown(snapshot)) for snapshot in snapshots}) > SNAPSHOTS // 2, "the state hardly ever changed"
    counts = Counter(event["kind"] for event in probe.events)
    logged = log_lines(probe)
    assert counts["load_end"] == logged["Adding lora. Model id"] > 50
    assert counts["activation_start"] == logged["Activating LoRA. int id"] > 100
    assert counts["activation_start"] == counts["activation_end"] + counts["activation_error"]
    assert counts["slot_evict"] + counts["host_evict"] == logged["Removing adapter int id"] > 150
    assert not kinds(probe.events, "hook_fault")
    finished = {event["request"]: event for event in kinds(probe.events, "request_finished")}
    states = Counter(finished[f"z{i}"]["access"] for i in range(REQUESTS))
    assert set(states) == {"slot", "host", "miss"}
    for i in range(REQUESTS):
        done = finished[f"z{i}"]
        assert (done["load_ns"] > 0) == (done["access"] == "miss")
        assert (done["activation_ns"] > 0) == (done["access"] != "slot")
        assert done["load_ns"] + done["activation_ns"] <= done["stall_ns"] <= done["prefill_ns"]


def test_activate_makes_the_next_request_find_its_slot_without_a_dummy_request(probe: ProbeClient) -> None:
    for name in ("a00", "a01", "a02", "a03", "a05", "a06"):
        probe.load(name).raise_for_status()
    assert "a00" not in host_names(probe)
    probe.fetch()
    assert probe.done("a00", "activate")["activated"] > 0
    assert "a00" in slot_names(probe)
    assert [event["cause"] for event in kinds(probe.fetch(), "load_end")] == ["rpc"]
    probe.ask("a00", key="after-activate").raise_for_status()
    found = access_of(probe, "after-activate")
    assert (found["state"], found["load_ns"], found["activation_ns"], found["stall_ns"]) == ("slot", 0, 0, 0)
    assert probe.refused("nobody", "activate") == "unknown_adapter"


def test_evict_frees_slot_and_host_entry_and_a_later_request_reads_the_disk(probe: ProbeClient) -> None:
    probe.load("a00").raise_for_status()
    ids = probe.done("a00", "evict")["evicted"]
    assert len(ids) == 1
    state = probe.residency()
    assert [slot["id"] for slot in state["slots"]] == [None, None]
    assert state["host"] == []
    assert probe.done("a00", "evict")["evicted"] == []
    probe.ask("a00", key="after-evict").raise_for_status()
    assert access_of(probe, "after-evict")["state"] == "miss"


def test_a_pin_survives_a_scan_of_all_adapters(probe: ProbeClient) -> None:
    names = list(probe.model.adapters)
    for name in names:
        probe.load(name).raise_for_status()
    pinned = probe.done("a04", "pin")["pinned"]
    probe.fetch()
    for name in names:
        probe.ask(name).raise_for_status()
        state = probe.residency()
        assert [slot["id"] for slot in state["slots"] if slot["pinned"]] == pinned
    assert {event["id"] for event in kinds(probe.fetch(), "slot_evict")}.isdisjoint(pinned)
    assert state["host"][-1]["name"] == names[-1]
    assert [entry["pinned"] for entry in state["host"]].count(True) == 1
    assert rebuilt(probe.events, state) == shown(state)
    assert probe.done("a04", "unpin")["was_pinned"]


def test_pins_never_take_the_last_slot_and_give_way_to_a_batch_that_needs_all(probe: ProbeClient) -> None:
    for name in ("a00", "a01", "a02", "a03"):
        probe.load(name).raise_for_status()
    probe.done("a00", "pin")
    assert probe.refused("a01", "pin") == "too_many_pins"
    assert probe.refused("a00", "evict") == "pinned"
    probe.fetch()
    with ThreadPoolExecutor(2) as pool:  # vLLM's own pin of an idle adapter ends the engine here
        both = [pool.submit(probe.ask, name, 60, f"pair-{name}") for name in ("a02", "a03")]
        assert [job.result().status_code for job in both] == [200, 200]
    (lost,) = kinds(probe.fetch(), "pin_lost")
    assert (lost["name"], lost["cause"]) == ("a00", "lru")
    state = probe.residency()
    assert not any(slot["pinned"] for slot in state["slots"])
    assert rebuilt(probe.events, state) == shown(state)
    assert probe.answers("a01")


def test_what_would_take_a_slot_from_a_running_request_is_refused(probe: ProbeClient) -> None:
    for name in ("a00", "a01", "a02"):
        probe.load(name).raise_for_status()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(probe.ask, name, 150) for name in ("a01", "a02")]
        wait_until_running(probe, 2)
        assert probe.refused("a00", "activate") == "slots_busy"
        assert probe.refused("a00", "pin") == "slots_busy"
        assert probe.refused("a01", "evict") == "in_use"
        assert [job.result().status_code for job in both] == [200, 200]
    assert probe.done("a00", "activate")


def wait_until_running(probe: ProbeClient, adapters: int) -> None:
    deadline = time.monotonic() + 30.0
    while len(probe.residency()["workers"][0]["running"]) < adapters:
        assert time.monotonic() < deadline, "the requests never ran together"


def test_blocked_requests_are_counted_by_adapter(probe: ProbeClient) -> None:
    for name in ("a00", "a01", "a02"):
        probe.load(name).raise_for_status()
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(probe.ask, name, 120) for name in ("a01", "a02")]
        wait_until_running(probe, 2)
        blocked = pool.submit(probe.ask, "a00", 2, "blocked")
        assert {job.result().status_code for job in (*running, blocked)} == {200}
    steps = kinds(probe.fetch(), "step")
    assert max(step["blocked"].get("a00", 0) for step in steps) == 1
    assert sum(step["blocked_steps"] for step in steps) > 10
    assert {name for step in steps for name in step["blocked"]} == {"a00"}


def test_unloading_under_running_requests_leaves_a_ghost_that_evict_frees_later(probe: ProbeClient) -> None:
    for name in ("a00", "a01"):
        probe.load(name).raise_for_status()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(probe.ask, "a00", 150)
        wait_until_running(probe, 1)
        probe.unload("a00")
        assert {slot["name"]: slot["ghost"] for slot in probe.residency()["slots"]} == {"a00": True, "a01": False}
        assert probe.refused("a00", "evict") == "in_use"
        assert probe.answers("a01")
        assert running.result().status_code == 200
    assert len(probe.done("a00", "evict")["evicted"]) == 1
    probe.load("a00").raise_for_status()
    probe.unload("a00")
    probe.load("a00").raise_for_status()
    assert host_names(probe).count("a00") == 2, "vLLM keeps two copies"
    assert len(probe.done("a00", "evict")["evicted"]) == 2
    assert probe.answers("a01")


def test_load_inplace_shows_as_a_load_in_every_step_and_activate_does_not_repeat_it(probe: ProbeClient) -> None:
    probe.load("a00", load_inplace=True).raise_for_status()
    probe.load("a01").raise_for_status()
    probe.fetch()
    probe.ask("a00", 8).raise_for_status()
    loads = kinds(probe.fetch(), "load_start")
    assert len(loads) == 8
    assert all(load["inplace"] and load["cause"] == "step" for load in loads)
    probe.done("a00", "activate")
    assert kinds(probe.fetch(), "load_start") == []
    assert probe.answers("a01")


def test_vanished_files_are_an_answer_to_activate_and_not_the_engines_end(probe: ProbeClient, tmp_path: Path) -> None:
    doomed = tmp_path / "doomed"
    shutil.copytree(probe.model.adapters["a00"], doomed)
    probe.load("doomed", doomed).raise_for_status()
    for name in ("a01", "a02", "a03", "a05"):
        probe.load(name).raise_for_status()
    assert "doomed" not in host_names(probe)
    shutil.rmtree(doomed)
    with ThreadPoolExecutor(1) as pool:
        bystander = pool.submit(probe.ask, "a01", 60)
        before = probe.residency()["host"]
        assert probe.refused("doomed", "activate") == "load_failed"
        assert probe.refused("doomed", "pin") == "load_failed"
        assert bystander.result().status_code == 200
    assert {entry["id"] for entry in probe.residency()["host"]} == {entry["id"] for entry in before}
    errors = kinds(probe.fetch(), "load_error")
    assert [(error["name"], error["phase"], error["cause"]) for error in errors] == [("doomed", "read", "rpc")] * 2
    probe.unload("doomed")
    assert probe.ask("doomed").status_code == 404
    assert probe.answers("a02")


def test_a_load_that_fails_halfway_is_seen_as_the_engine_keeps_it_and_evict_cleans_up(
    probe: ProbeClient, tmp_path: Path
) -> None:
    wrong = too_wide_inputs(probe.model.adapters["a00"], tmp_path / "wrong")
    for name in ("a01", "a02"):
        probe.load(name).raise_for_status()
    probe.fetch()
    assert probe.load("wrong", wrong).status_code == 500
    state = probe.residency()
    fresh = probe.fetch()
    assert [event["name"] for event in kinds(fresh, "activation_error")] == ["wrong"]
    assert [slot["name"] for slot in state["slots"] if slot["ghost"]] == ["wrong"]
    assert rebuilt(probe.events, state) == shown(state)
    assert probe.answers("a02")
    assert len(probe.done("wrong", "evict")["evicted"]) == 1
    assert "wrong" not in host_names(probe)
    assert probe.answers("a01")
    assert probe.load("too-wide", probe.model.too_wide).status_code == 500
    assert kinds(probe.fetch(), "load_error")[-1]["phase"] == "read"
    assert probe.answers("a01")


def test_activating_an_adapter_that_is_not_in_host_memory_takes_one_slot_and_leaks_none(probe: ProbeClient) -> None:
    for name in ("a00", "a01", "a02", "a03", "a05", "a06"):
        probe.load(name).raise_for_status()
    for name in ("a00", "a01", "a00", "a02"):
        probe.done(name, "activate")
    state = probe.residency()
    assert sorted(state["slot_order"]) == sorted(slot["id"] for slot in state["slots"])
    assert slot_names(probe) == {"a00", "a02"}
    assert probe.answers("a03")


def test_memory_of_the_rank_is_told_part_by_part_and_what_a_cpu_cannot_tell_is_null(probe: ProbeClient) -> None:
    state = probe.residency()
    allocated, (floor,) = state["allocated"], state["floor"]
    assert (allocated["slots"], allocated["host_entries"], allocated["max_lora_rank"]) == (2, 4, 64)
    assert floor["slot_pool_bytes"] == 2 * allocated["bytes_per_slot"]
    assert floor["kv_bytes"] == 1 << 30
    assert floor["kv_blocks"] == state["kv"]["kv_total"] > state["kv"]["kv_free"] - 1 > 0
    for unknown in ("weights_bytes", "peak_activation_bytes", "unattributed_bytes", "requested_bytes", "device_bytes"):
        assert floor[unknown] is None
    probe.load("a00").raise_for_status()
    (entry,) = probe.residency()["host"]
    assert (entry["rank"], entry["bytes"]) == (8, 4 * 4 * 8 * (256 + 256 + 256 + 128))
    assert all(not hooks["missing"] and hooks["tested"] for hooks in state["hooks"])
    assert {hooks["role"] for hooks in state["hooks"]} == {"api", "core", "worker"}


def test_the_endpoints_want_their_own_key_and_bounded_parameters(probe: ProbeClient) -> None:
    for path in ("/loraledger/residency", "/loraledger/events"):
        assert probe.get(path, key=None).status_code == 401
        assert probe.get(path, key=KEY[:-1]).status_code == 401
    assert probe.http.post("/loraledger/adapters/a00/evict").status_code == 401
    assert probe.refused("a00", "explode") == "unknown_verb"
    for bad in ("after=-1", "after=x", "limit=0", "limit=10001", "wait_s=11", "wait_s=nan", "after=" + "9" * 30):
        reply = probe.get(f"/loraledger/events?{bad}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "bad_parameter"), bad


def test_events_go_on_after_a_number_and_wait_for_the_next(probe: ProbeClient) -> None:
    last = probe.get("/loraledger/events?limit=10000").json()["next_seq"]
    empty = probe.get(f"/loraledger/events?after={last}&wait_s=0.3").json()
    assert (empty["events"], empty["next_seq"], empty["lost"]) == ([], last, 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(probe.get, f"/loraledger/events?after={last}&wait_s=10&boot={empty['boot']}")
        time.sleep(0.2)
        probe.load("a00").raise_for_status()
        page = waiting.result().json()
    assert page["events"][0]["seq"] == last + 1
    assert page["events"][0]["kind"] == "load_start"
    for wrong in (f"after={last}&boot=another", f"after={last + 10_000}"):
        reply = probe.get(f"/loraledger/events?{wrong}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "boot_changed")
        assert reply.json()["boot"] == empty["boot"]
