from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraledger import events as ev
from loraledger.kernel.cost import tier_of
from loraledger.kernel.loads import FOREVER
from loraledger.kernel.settings import MS, SECOND

from .bench import T0, Bench, adapter, digest, fleet_of, replica

CASES = Path(__file__).parent.parent / "cases"


def given(case: str, name: str) -> Any:
    text = (CASES / case / name).read_text()
    return json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]


def at(bench: Bench, seconds: float) -> None:
    bench.now = T0 + round(seconds * SECOND)


def listed(names: list[str], version: str = "aa11") -> list[str]:
    """A list of models in the engine's words: without the base model, each name with its version."""
    return [ev.engine_name(name, digest(version)) for name in names if "/" not in name]


def tier(bench: Bench, name: str, where: str = "r1") -> str:
    return tier_of(bench.replica(where), bench.replica(where).registrations.get(name))


@pytest.mark.parametrize("used", [True, False])
def test_restart_loses_adapters(used: bool) -> None:
    case = "restart-loses-adapters"
    expect, observations = given(case, "expect.json"), given(case, "observations.jsonl")
    replicas = {"all": -1}
    adapters = [
        adapter(a["name"], bytes=400_000_000, replicas=replicas.get(a["replicas"], a["replicas"]))
        for a in given(case, "desired.json")["adapters"]
    ]
    bench = Bench(fleet_of(3, adapters), up=False)
    for seen in observations:
        at(bench, seen["t"])
        if used and seen["t"] == 60:
            bench.feed(ev.DrainAsked(bench.now, "r2", True))
            bench.arrive("a")
            assert bench.only(ev.Dispatch).replica == "r1"
            bench.first_token("q1")
            bench.finish("q1")
            bench.feed(ev.DrainAsked(bench.now, "r2", False))
        match seen:
            case {"process_start": start, "v1_models": models, "replica": where}:
                bench.up(where, listed(models), start)
            case {"scrape": _, "replica": where}:
                bench.down(where)
                assert expect["t60"] == "r2 down: its residency entries become unknown"
                assert {r.state for r in bench.replica(where).registrations.values()} == {"unknown"}
                assert tier(bench, "a", where) == "unknown"
        if seen["t"] == 150:
            assert bench.replica("r2").tiers.host == {}
            assert [command.adapter for command in bench.all(ev.Load)] == ["a"]
            assert list(bench.replica("r2").wanted) == ["b"]
            assert bench.replica("r2").up
            assert bench.registration("a", "r2").state != "registered"
        if seen["t"] == 151:
            model = seen["request"]["model"]
            bench.arrive(None if "/" in model else model)
            if model == "a" and used:
                assert expect["t151"]["a"] == f"{bench.only(ev.Dispatch).replica} only"
            elif model == "a":  # nobody saw it used on r1, so that waiting for r2's load may be as good
                assert {f"{command.replica} only" for command in bench.all(ev.Dispatch)} <= {expect["t151"]["a"]}
            else:
                assert bench.only(ev.Dispatch).replica in expect["t151"]["base"].split(" or ")
        if seen["t"] == 170:
            assert [(command.replica, command.adapter) for command in bench.all(ev.Load)] == [("r3", "a")]
    for _ in range(4):  # r2 and r3 are up, and get no traffic for a before they have it
        bench.arrive("a")
        assert {command.replica for command in bench.all(ev.Dispatch)} <= {"r1"}
    bench.done("r3")
    assert bench.registration("a", "r3").state == "registered"


def test_one_replica_only() -> None:
    case = "one-replica-only"
    expect, desired, observed = (given(case, f"{name}.json") for name in ("expect", "desired", "observed"))
    name = desired["adapter"]
    bench = Bench(fleet_of(2, [adapter(name, replicas=desired["replicas"], bytes=400_000_000)]), up=False)
    for where in ("r1", "r2"):
        bench.up(where, listed(observed[where]["v1_models"]))
    states = {where: bench.registration(name, where).state for where in ("r1", "r2")}
    ready = [where for where, state in states.items() if state == "registered"]
    assert f"{len(ready)}/{desired['replicas']}" == expect["ready"]
    assert (bench.only(ev.Load).replica, bench.only(ev.Load).adapter) == ("r2", name)  # at its own address
    for _ in range(6):
        bench.arrive(name)
        assert [bench.only(ev.Dispatch).replica] == expect["route_to"]


def test_bad_adapter_blocks() -> None:
    case = "bad-adapter-blocks"
    expect, desired = given(case, "expect.json"), given(case, "desired.json")
    replies = {reply["adapter"]: reply for reply in given(case, "engine_replies.jsonl")}
    engine = desired["engine"]
    adapters = [adapter(a["name"], rank=a["r"], replicas=-1) for a in desired["adapters"]]
    # The engine's limit is not known here, so that it is the engine that refuses.
    bench = Bench(fleet_of([replica("r1", engine["max_loras"], 8, max_rank=128)], adapters))
    asked = []
    while bench.replica("r1").loading is not None:
        name = bench.replica("r1").loading
        assert name is not None
        asked.append(name)
        if replies[name]["status"] == 200:
            bench.done("r1")
        else:
            bench.failed("r1", replies[name]["body"]["message"], permanent=True)
    assert asked == ["bad", "good8", "good16"]
    states = {name: registration.state for name, registration in bench.replica("r1").registrations.items()}
    assert [name for name, state in states.items() if state == "registered"] == expect["loaded"]
    assert [name for name, state in states.items() if state == "parked"] == list(expect["failed"])
    assert bench.registration("bad", "r1").retry_at == FOREVER
    assert bench.wake_at is None
    for _ in range(50):  # nothing that happens has it tried again
        bench.tick(600 * SECOND)
        bench.scrape(
            "r1", [r.engine_name for r in bench.replica("r1").registrations.values() if r.state == "registered"]
        )
        assert not bench.all(ev.Load)
    assert expect["retry_bad"] == "not until its files or the engine's settings change"
    bench.declare(adapter("bad", "bb22", rank=16, replicas=-1))
    assert bench.only(ev.Load).adapter == "bad"


def test_bad_adapter_is_not_even_tried_where_its_rank_is_known_not_to_fit() -> None:
    case = "bad-adapter-blocks"
    expect, desired = given(case, "expect.json"), given(case, "desired.json")
    adapters = [adapter(a["name"], rank=a["r"], replicas=-1) for a in desired["adapters"]]
    bench = Bench(fleet_of([replica("r1", 4, 8, max_rank=desired["engine"]["max_lora_rank"])], adapters))
    for name in expect["loaded"]:
        assert bench.replica("r1").loading == name
        bench.done("r1")
    bench.arrive("bad")
    assert expect["failed"]["bad"] in bench.only(ev.Reject).message
    bench.arrive("good8")
    bench.only(ev.Dispatch)


def test_same_name_reload() -> None:
    case = "same-name-reload"
    expect, steps = given(case, "expect.json"), given(case, "steps.jsonl")
    bench = Bench(fleet_of())
    models: dict[str, str] = {}
    for step in steps:
        at(bench, step["t"])
        match step:
            case {"call": _, "name": name, "sha256": sha, "r": rank}:
                bench.declare(adapter(name, sha, rank=rank))
                if bench.all(ev.Evict):
                    assert bench.only(ev.Evict).engine_name == models["q1"]
                bench.hold(name, "r1")
            case {"call": _, "name": name, "sha256": sha}:
                before = bench.fleet.snapshot()
                assert expect["t50"] == "no-op: same digest"
                assert bench.declare(adapter(name, sha)) == []
                bench.feed(ev.LoadAsked(bench.now, name, "r1"))
                assert bench.commands == []
                assert len(bench.fleet.snapshot()) == len(before)
            case {"request": request, "model": name}:
                bench.arrive(name, id=request)
                models[request] = bench.only(ev.Dispatch).model
                if request == "q1":
                    bench.first_token(request)
    # q1 runs on under the name that it was sent with, and q2 cannot share its prefix cache: engines key it by that name.
    assert models["q1"] == ev.engine_name("support", digest("aa11"))
    assert models["q2"] == ev.engine_name("support", digest("bb22"))
    assert bench.fleet.state.requests["q1"].phase == "streaming"


def test_concurrent_load() -> None:
    case = "concurrent-load"
    expect, burst = given(case, "expect.json"), given(case, "burst.jsonl")
    bench = Bench(fleet_of(1, [adapter("cold-1"), adapter("cold-2")]))
    loads: dict[str, int] = {}
    answered: list[str] = []
    refused: list[ev.Reject] = []
    for step in burst:
        at(bench, step["t"])
        match step:
            case {"req": number, "model": name}:
                bench.arrive(name, id=f"q{number}")
            case {"load_reply": {"status": 200, "took_s": took}}:
                bench.done("r1", round(took * SECOND))
                answered = [command.request for command in bench.all(ev.Dispatch)]
                assert len({command.model for command in bench.all(ev.Dispatch)}) == 1
            case {"load_reply": {"status": status}}:
                bench.failed("r1", f"http_{status}")
                refused = bench.all(ev.Reject)
        for load in bench.all(ev.Load):
            loads[load.adapter] = loads.get(load.adapter, 0) + 1
    assert loads == expect["load_calls"]
    assert answered == [f"q{n}" for n in range(20)]
    assert expect["cold-1"] == f"{len(answered)} answered"
    assert [command.request for command in refused] == [f"q{n}" for n in range(100, 120)]
    assert len({(command.code, command.message, command.retry_after) for command in refused}) == 1
    assert "http_500" in refused[0].message
    pause = refused[0].retry_after
    assert pause is not None
    bench.tick(pause - 1)
    bench.arrive("cold-2")
    bench.only(ev.Reject)
    bench.tick(1)
    bench.arrive("cold-2")
    assert bench.only(ev.Load).adapter == "cold-2"


def test_inflight_leak() -> None:
    case = "inflight-leak"
    expect, events = given(case, "expect.json"), given(case, "events.jsonl")
    bench = Bench(fleet_of(2))
    for event in events:
        at(bench, event["t"])
        request = f"q{event.get('req')}"
        match event.get("event", "question"):
            case "sent":
                other = {"r1": "r2", "r2": "r1"}[event["replica"]]
                bench.scrape(event["replica"])  # it broke off a stream, and is found well
                bench.feed(ev.DrainAsked(bench.now, other, True))
                bench.arrive(id=request)
                assert bench.only(ev.Dispatch).replica == event["replica"]
                bench.feed(ev.DrainAsked(bench.now, other, False))
            case "done":
                bench.first_token(request)
                bench.finish(request)
            case "client_gone_before_headers":
                bench.cancel(request)
            case "client_gone_mid_stream":
                bench.first_token(request)
                bench.cancel(request)
            case "upstream_reset_mid_stream":
                bench.first_token(request)
                bench.finish(request, "upstream_reset")
            case "timeout_before_headers":
                bench.fail_attempt(request, "no_first_byte", "upstream_timeout")
                assert bench.only(ev.Reject).http_status == 504
            case "restarted":
                bench.up(event["replica"], start=2)
            case "question":
                counts = {name: len(r.in_flight) for name, r in bench.fleet.state.replicas.items()}
                assert counts == expect["in_flight"]
    for r in bench.fleet.state.replicas.values():
        assert (r.prefill_out, r.decode_out, r.kv_own, r.adapters) == (0, 0, 0, {})
    assert bench.fleet.state.tenants["acme"].active == 0
    sent = []
    for _ in range(10):
        bench.arrive()
        sent.append(bench.only(ev.Dispatch).replica)
    assert sent.count("r1") == sent.count("r2") == 5  # a replica that restarted draws no more than its share


def test_idle_adapter_vanishes() -> None:
    case = "idle-adapter-vanishes"
    expect, timeline = given(case, "expect.json"), given(case, "timeline.jsonl")
    for host_entries, left_to in ((8, "host"), (4, "disk")):
        slots = timeline[0]["max_lora"]
        bench = Bench(fleet_of([replica("r1", slots, host_entries)], [adapter(name) for name in "abcdefg"]), up=False)
        at(bench, -1)
        bench.up("r1", listed(["a", "b", "c"]))
        for step in timeline:
            at(bench, step["t"])
            match step:
                case {"scrape_active": active}:
                    bench.feed(ev.ScrapeStarted(bench.now, "r1"))
                    bench.feed(
                        ev.ReplicaSampled(bench.now, "r1", bench.now, len(active), 0, 0.1, None, tuple(listed(active)))
                    )
                case {"done": {"adapter": name, "first_token_s": seconds}}:
                    at(bench, step["t"] - seconds)
                    request = bench.arrive(name)
                    if bench.replica("r1").loading is not None:
                        bench.done("r1", MS)
                    at(bench, step["t"])
                    bench.first_token(request)
                    bench.finish(request)
                case {"t": 30}:
                    assert expect["t30"]["a"].startswith("resident")
                    assert tier(bench, "a") == "gpu"
                    assert expect["t30"]["b"] == "registered, residency unknown"
                    assert bench.registration("b", "r1").state == "registered"
                    assert tier(bench, "b") == "unknown"
                case {"t": 64}:
                    assert expect["t64"]["a"].startswith("likely evicted")
                    assert tier(bench, "a") == left_to
        assert bench.replica("r1").drift == {}
        assert [tier(bench, name) for name in "defg"] == ["gpu"] * 4


def test_unloaded_still_resident() -> None:
    case = "unloaded-still-resident"
    expect, steps = given(case, "expect.json"), given(case, "steps.jsonl")
    seen = steps[4]
    bench = Bench(
        fleet_of(
            [replica("r1", seen["max_loras"], seen["max_cpu_loras"])], [adapter(n) for n in ("alice", "bob", "carol")]
        )
    )
    alice, bob, carol = (ev.engine_name(n, digest("aa11")) for n in ("alice", "bob", "carol"))
    bob2 = ev.engine_name("bob", digest("bb22"))
    words = {"alice": alice, "bob": bob, "carol": carol, "bob#2": bob2}
    tiers = bench.replica("r1").tiers
    for step in steps:
        match step:
            case {"observe": {"gpu": gpu, "host": host}}:
                assert set(tiers.active) == {words[name] for name in gpu}
                assert set(tiers.host) == {words[name] for name in host}
            case {"step": 6}:
                bench.declare(adapter("bob", "bb22"))
                assert bench.commands == []  # its old name is forgotten already
                assert bench.hold("bob", "r1") == bob2
            case {"call": call}:
                verb, name = call.split()
                if verb == "load":
                    bench.hold(name, "r1")
                else:
                    bench.feed(ev.UnloadAsked(bench.now, name, "r1"))
                    bench.feed(ev.CommandDone(bench.now, bench.only(ev.Evict).id, MS))
                    bench.tick(1)
                    bench.scrape("r1", [words[name] for name in step["v1_models"] if name != "base"])
        if step["step"] == 5:
            assert expect["after_step5"]["bob"].startswith("not addressable, still occupying a GPU slot")
            assert bench.registration("bob", "r1").state == "absent"
            assert tier(bench, "bob") == "disk"
            assert tiers.tier(bob) == "gpu"
            assert tiers.slots - len(tiers.active) == expect["free_gpu_slots"]
    assert expect["after_step7"] == "two copies of bob held, alice gone from host"
    assert {bob, bob2} <= set(tiers.host)
    assert bench.registration("alice", "r1").state == "registered"
    assert tier(bench, "alice") == "disk"
