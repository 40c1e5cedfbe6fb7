from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from loraledger import events as ev
from loraledger.kernel.settings import MS, SECOND
from loraledger.replay.fleet.observation import GAP, RETELL, Observation, Probe
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.traces.trace import Request
from loraledger.twin.events import (
    Activated,
    Evicted,
    LoadDone,
    Loaded,
    Preempted,
    TokenOut,
    TwinEvent,
    TwinRequest,
)
from loraledger.twin.profile import PS_PER_MS, TwinProfile
from replay.fleets import PROFILE, adapters, settings_for, zipf_trace

from .test_virtual import Tap

S = 10**12
PROBED = Observation(probe=True)


def probed(requests: int = 300, slots: int = 3, **changes: Any) -> tuple[VirtualFleet, Tap]:
    profile = TwinProfile(slots=slots, host_entries=6)
    observation = msgspec.structs.replace(PROBED, **changes)
    fleet = VirtualFleet(
        settings_for(2, adapters(14), profile=profile), dict.fromkeys(("r1", "r2"), profile), observation
    )
    tap = Tap(fleet)
    fleet.run(zipf_trace(requests, 14, 30, seed=4, base_share=0.1))
    return fleet, tap


def of(tap: Tap, kind: type) -> list[Any]:
    return [event for event in tap.events if type(event) is kind]


# --- through a fleet --------------------------------------------------------------------------------------------------


def test_without_the_probe_nothing_of_the_engines_inside_is_told() -> None:
    fleet, tap = probed(probe=False)
    inside = (ev.TiersObserved, ev.LoadObserved, ev.ActivationObserved, ev.EvictionObserved, ev.FloorObserved)
    assert not [event for event in tap.events if isinstance(event, (*inside, ev.StepsObserved, ev.EngineFinished))]
    assert {row["source"] for row in fleet.rows["residency"]} == {"believed"}
    assert {row["engine_access"] for row in fleet.rows["requests"] if "engine_access" in row} <= {None}


def test_with_the_probe_every_move_and_every_request_is_told_once() -> None:
    fleet, tap = probed()
    counts = [replica.counts() for replica in fleet.replicas.values()]
    assert len(of(tap, ev.ActivationObserved)) == sum(c.activations for c in counts) > 40
    assert len(of(tap, ev.LoadObserved)) == sum(c.loads for c in counts) > 20
    told = Counter(event.tier for event in of(tap, ev.EvictionObserved))
    assert told["host"] == sum(c.evictions_host for c in counts) > 10
    both = sum(c.evictions_slot for c in counts)
    assert told["host"] >= both - told["gpu"] >= 0
    finished = [event.request for event in of(tap, ev.EngineFinished)]
    assert sorted(finished) == sorted(f"q{n + 1}" for n in range(300))
    took = [event.took for event in of(tap, ev.LoadObserved)]
    assert 0 <= sum(c.load_ps for c in counts) - 1000 * sum(took) < 1000 * len(took)
    assert {row["source"] for row in fleet.rows["residency"] if row["took_ns"] and row["cause"] != "load"} == {
        "observed"
    }


def test_every_row_waits_for_what_the_probe_tells_of_it() -> None:
    fleet, _ = probed()
    rows = fleet.rows["requests"]
    assert len(rows) == 300
    assert Counter(row["engine_access"] for row in rows).keys() >= {"gpu", "host", "base"}
    for row in rows:
        assert row["engine_decode_ns"] == pytest.approx(
            int(str(row["last_token_ns"])) - int(str(row["first_token_ns"])), abs=1
        )
        assert row["engine_queue_ns"] is None
        assert row["unattributed_ns"] is None


def test_what_is_told_happened_the_delay_ago_and_readings_are_apart() -> None:
    _, tap = probed(probe_delay=70 * MS)
    readings: dict[str, list[int]] = {}
    for event in of(tap, ev.TiersObserved)[2:]:
        assert event.as_of == event.at - 70 * MS
        readings.setdefault(event.replica, []).append(event.at)
    for times in readings.values():
        assert all(later - earlier >= GAP for earlier, later in pairwise(times))
    loads = of(tap, ev.CommandDone)
    activations = {(event.replica, event.engine_name): event.at for event in reversed(of(tap, ev.ActivationObserved))}
    first = next(c for c in of(tap, ev.RequestDispatched))
    assert min(activations.values()) >= loads[0].at + 70 * MS
    assert first.at == loads[0].at


def test_the_lists_that_are_told_are_what_the_twin_holds() -> None:
    profile = TwinProfile(slots=3, host_entries=6)
    fleet = VirtualFleet(settings_for(1, adapters(14), profile=profile), {"r1": profile}, PROBED)
    tap = Tap(fleet)
    checked = 0
    for part in range(12):
        fleet.run(zipf_trace(20, 14, 40, seed=part))
        fleet.run([], until=fleet.now)
        quiet = fleet.now + SECOND
        fleet.run([Request(SECOND, "acme", None, 1, 1)])
        last = [event for event in of(tap, ev.TiersObserved) if event.at <= quiet][-1]
        twin = fleet.replicas["r1"].twin
        names = [r.engine_name for r in fleet.conductor.fleet.state.replicas["r1"].registrations.values()]
        tiers = {name: twin.tier(name) for name in names}
        assert {name for name, tier in tiers.items() if tier == "gpu"} == set(last.active)
        assert {name for name, tier in tiers.items() if tier in ("gpu", "host")} == set(last.host)
        checked += len(last.active)
    assert checked > 24


def test_the_kernel_counts_no_drift_against_a_probe_that_tells_the_truth() -> None:
    fleet, _ = probed(600)
    assert fleet.conductor.fleet.state.counters.get("drift:residency", 0) <= 6  # of 600: an order that was guessed


def test_the_lists_are_told_again_though_nothing_moved() -> None:
    fleet = VirtualFleet(settings_for(1, ()), {"r1": PROFILE}, PROBED)
    tap = Tap(fleet)
    fleet.run([Request(n * SECOND, "acme", None, 10, 1) for n in range(32)])
    times = [event.at for event in of(tap, ev.TiersObserved)]
    assert len(times) == pytest.approx(31 * SECOND // RETELL, abs=1)
    assert all(RETELL <= b - a <= RETELL + SECOND for a, b in pairwise(times))


def test_two_probed_runs_are_the_same() -> None:
    assert probed()[1].digest() == probed()[1].digest()


def test_scrapes_carry_what_the_engine_itself_publishes() -> None:
    profile = TwinProfile(slots=1, host_entries=1, kv_blocks=30)
    fleet = VirtualFleet(settings_for(1, (), profile=profile), {"r1": profile})
    tap = Tap(fleet)
    fleet.run([Request(n * 5 * MS, "acme", None, 100, 200) for n in range(30)])
    last = of(tap, ev.ReplicaSampled)[-1]
    assert (last.block_tokens, last.kv_tokens) == (16, 480)
    assert 0 < last.preemptions <= fleet.replicas["r1"].counts().preemptions
    assert 0 < fleet.replicas["r1"].counts().kv_used_max <= 30


def test_moves_fail_where_no_probe_is_seen() -> None:
    fleet = VirtualFleet(settings_for(1, adapters(1)), {"r1": PROFILE})
    tap = Tap(fleet)
    fleet.run([Request(0, "acme", "a0", 10, 2)])
    fleet.conductor.feed(ev.MoveAsked(fleet.now, "a0", "r1", "pin"))
    assert [event.reason for event in of(tap, ev.CommandFailed)] == ["no_probe"]


@pytest.mark.parametrize(
    ("field", "value"), [("scrape_interval", 0), ("scrape_delay", -1), ("probe_delay", -1), ("boundary", -5)]
)
def test_an_observation_that_cannot_be_names_its_field(field: str, value: int) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({field: value}, Observation)


def test_the_way_in_costs_what_the_observation_says() -> None:
    free, late = (
        VirtualFleet(settings_for(1, adapters(1)), {"r1": PROFILE}, observation)
        for observation in (Observation(), Observation(boundary=20 * MS, boundary_per_seq=3 * MS, load_call=50 * MS))
    )
    for fleet in (free, late):
        fleet.run([Request(0, "acme", "a0", 100, 20), Request(10 * SECOND, "acme", None, 100, 20)])
    first, second = zip(free.rows["requests"], late.rows["requests"], strict=True)
    for (before, after), more in ((first, 70 * MS), (second, 20 * MS)):
        assert after["first_token_ns"] == int(str(before["first_token_ns"])) + more
        assert after["itl_mean_ns"] == before["itl_mean_ns"]


def test_the_way_in_is_longer_for_each_request_that_is_in_flight_there() -> None:
    steps = TwinProfile(
        step_base_ps=PS_PER_MS, step_per_seq_ps=0, step_per_kv_token_ps=0, prefill_per_token_ps=0, prefill_floor_ps=0,
        prefill_offset_ps=0,
    )  # fmt: skip
    trace = [Request(at * SECOND, "acme", None, 1, 5000 if at < 2 else 1) for at in range(3)]
    firsts = []
    for more in (0, 3 * MS):
        fleet = VirtualFleet(settings_for(1, (), profile=steps), {"r1": steps}, Observation(boundary_per_seq=more))
        tap = Tap(fleet)
        fleet.run(trace)
        firsts.append({row["id"]: int(str(row["first_token_ns"])) for row in fleet.rows["requests"]})
        assert [event.at for event in of(tap, ev.RequestDispatched)] == [0, SECOND, 2 * SECOND]
    assert [firsts[1][key] - firsts[0][key] for key in ("q1", "q2", "q3")] == [0, 3 * MS, 6 * MS]


# --- one probe, told by hand ------------------------------------------------------------------------------------------


def follow(*happened: TwinEvent, sent: tuple[TwinRequest, ...] = (), delay: int = 0) -> list[ev.Event]:
    """What one reading tells after all of ``happened``; requests were sent at 0."""
    probe = Probe("r1", TwinProfile(), delay, {"x@1": 77})
    for request in sent:
        probe.sent(0, request)
    probe.happened(happened)
    return probe.read(100 * SECOND)


def asks(*names: str | None) -> tuple[TwinRequest, ...]:
    return tuple(TwinRequest(f"q{n}", name, 10, 5) for n, name in enumerate(names))


def test_a_request_whose_step_read_its_adapter_found_it_on_disk() -> None:
    told = follow(
        Loaded(2 * S, "x@1", S),
        Activated(3 * S, "x@1", S // 2),
        TokenOut(4 * S, "q0", 1, True, False),
        TokenOut(4 * S, "q1", 1, True, False),
        TokenOut(5 * S, "q2", 1, True, False),
        TokenOut(8 * S, "q0", 5, False, True),
        TokenOut(8 * S, "q1", 5, False, True),
        TokenOut(9 * S, "q2", 5, False, True),
        sent=asks("x@1", "x@1", "x@1"),
    )
    finished = {event.request: event for event in told if isinstance(event, ev.EngineFinished)}
    assert [finished[f"q{n}"].access for n in range(3)] == ["disk", "disk", "gpu"]
    assert (finished["q0"].load, finished["q0"].activation, finished["q0"].decode) == (SECOND, SECOND // 2, 4 * SECOND)
    assert (finished["q2"].load, finished["q2"].activation, finished["q2"].queue) == (None, None, None)
    assert told[0] == ev.LoadObserved(100 * SECOND, "r1", "x@1", SECOND, 77)
    assert told[1] == ev.ActivationObserved(100 * SECOND, "r1", "x@1", SECOND // 2)


def test_an_activation_alone_is_a_find_on_the_host_and_a_load_call_is_a_find_in_a_slot() -> None:
    told = follow(
        Activated(1 * S, "x@1", S // 2),
        TokenOut(2 * S, "q0", 1, True, True),
        Loaded(3 * S, "y@1", S),
        Activated(3 * S, "y@1", S),
        LoadDone(3 * S, "y@1", 2 * S),
        TokenOut(5 * S, "q1", 1, True, True),
        TokenOut(5 * S, "q2", 1, True, True),
        sent=asks("x@1", "y@1", None),
    )
    assert [event.access for event in told if isinstance(event, ev.EngineFinished)] == ["host", "gpu", "base"]


def test_a_move_that_was_made_before_a_request_was_sent_is_not_its() -> None:
    probe = Probe("r1", TwinProfile(), 0, {})
    probe.sent(2 * S, TwinRequest("q0", "x@1", 10, 1))
    probe.happened([Activated(S, "x@1", S // 2), TokenOut(3 * S, "q0", 1, True, True)])  # for one that was preempted
    assert [event.access for event in probe.read(9 * SECOND) if isinstance(event, ev.EngineFinished)] == ["gpu"]


@pytest.mark.parametrize(("sent", "access"), [(S, "host"), (S + 1, "gpu"), (2 * S + 1, "gpu")])
def test_a_step_brings_a_running_adapter_back_for_those_that_came_before_it_began(sent: int, access: str) -> None:
    probe = Probe("r1", TwinProfile(), 0, {})
    probe.sent(0, TwinRequest("old", "x@1", 10, 9))
    probe.sent(sent, TwinRequest("new", "x@1", 10, 1))
    probe.happened(
        [
            TokenOut(S // 2, "old", 1, True, False),
            Loaded(3 * S // 2, "y@1", S // 2),
            Activated(2 * S, "y@1", S // 2),
            Activated(3 * S, "x@1", S),
            TokenOut(4 * S, "new", 1, True, True),
        ]
    )
    assert [event.access for event in probe.read(9 * SECOND) if isinstance(event, ev.EngineFinished)] == [access]


def test_a_load_call_is_no_part_of_the_step_after_it() -> None:
    probe = Probe("r1", TwinProfile(), 0, {})
    probe.sent(S // 2, TwinRequest("q0", "x@1", 10, 1))
    probe.happened(
        [
            Activated(S, "y@1", S),
            LoadDone(S, "y@1", S),
            Activated(2 * S, "x@1", S),
            TokenOut(3 * S, "q0", 1, True, True),
        ]
    )
    assert [event.access for event in probe.read(9 * SECOND) if isinstance(event, ev.EngineFinished)] == ["host"]


def test_leaving_the_host_is_told_once_though_it_empties_the_slot_too() -> None:
    told = follow(
        Evicted(S, "x@1", "gpu"), Evicted(S, "x@1", "host"), Evicted(S, "y@1", "gpu"), Evicted(2 * S, "y@1", "host")
    )
    assert [(e.engine_name, e.tier) for e in told if isinstance(e, ev.EvictionObserved)] == [
        ("x@1", "host"),
        ("y@1", "gpu"),
        ("y@1", "host"),
    ]


def test_the_lists_are_in_the_order_of_last_use() -> None:
    moves = [event for n, name in enumerate("abc", 1) for event in (Loaded(n, name, 1), Activated(n, name, 1))]
    told = follow(
        *moves,
        TokenOut(S, "q0", 1, True, False),
        TokenOut(S, "q1", 1, True, True),
        sent=asks("b", "a"),
    )
    lists = told[-1]
    assert isinstance(lists, ev.TiersObserved)
    assert lists.host == lists.active == ("c", "a", "b")


def test_a_copy_of_an_older_registration_leaves_the_newer_one_where_it_is() -> None:
    told = follow(
        Loaded(1, "x@1", 1),
        Activated(1, "x@1", 1),
        Loaded(2, "x@1", 1),
        Activated(2, "x@1", 1),
        Evicted(3, "x@1", "gpu"),
    )
    lists = told[-1]
    assert isinstance(lists, ev.TiersObserved)
    assert lists.active == ("x@1",)


def test_preemptions_of_a_request_are_told_with_its_end() -> None:
    told = follow(
        TokenOut(S, "q0", 1, True, False), Preempted(2 * S, "q0"), Preempted(3 * S, "q0"), TokenOut(9 * S, "q0", 5, False, True),
        sent=asks(None),
    )  # fmt: skip
    assert [event.preemptions for event in told if isinstance(event, ev.EngineFinished)] == [2]


def test_what_is_younger_than_the_delay_waits_for_the_next_reading() -> None:
    probe = Probe("r1", TwinProfile(), 10 * SECOND, {})
    probe.happened([Evicted(89 * S, "x@1", "host"), Evicted(95 * S, "y@1", "host")])
    assert [e.engine_name for e in probe.read(100 * SECOND) if isinstance(e, ev.EvictionObserved)] == ["x@1"]
    assert probe.due(100 * SECOND) == 105 * SECOND
    assert [e.engine_name for e in probe.read(105 * SECOND) if isinstance(e, ev.EvictionObserved)] == ["y@1"]


def test_the_first_look_shows_the_floor_and_empty_lists() -> None:
    profile = TwinProfile(slots=3, host_entries=7, max_rank=32, kv_blocks=99, block_size=16, slot_bytes=5)
    floor, lists = Probe("r1", profile, 0, {}).start(5)
    assert floor == ev.FloorObserved(
        5, "r1", slots=3, slot_bytes=5, host_entries=7, max_rank=32, kv_blocks=99, block_tokens=16
    )
    assert lists == ev.TiersObserved(5, "r1", 5, (), ())
