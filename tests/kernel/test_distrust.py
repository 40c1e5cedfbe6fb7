"""Replicas that look well and break what they are sent: how little they get of the traffic, and who else is believed."""

from __future__ import annotations

import itertools

import pytest

from loraledger import events as ev
from loraledger.kernel.failures import DISTRUST, DOUBT
from loraledger.kernel.settings import SECOND

from .bench import Bench, adapter, fleet_of
from .breaking import FAULTS, BreakingFleet, Fault

ANSWERED = ("answers 500", "closes")


@pytest.mark.parametrize("per_second", [0.5, 2, 10, 50])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_replica_that_breaks_everything_does_not_draw_the_traffic(fault: Fault, per_second: float) -> None:
    requests = 1000
    world = BreakingFleet(fault, ("r1",))
    world.play(requests, per_second)
    assert world.sent["r1"] < 0.13 * requests
    assert world.ends["ok"] > 0.93 * requests


@pytest.mark.parametrize("fault", ANSWERED)
def test_a_request_that_fails_everywhere_accuses_no_replica(fault: Fault) -> None:
    world = BreakingFleet(fault)
    world.play(1000, 10, poison_per_second=3)
    assert all(not replica.broken for replica in world.fleet.state.replicas.values())
    assert world.ends == {"ok": 1000}


def test_the_last_replica_in_routing_is_used_however_often_it_breaks() -> None:
    world = BreakingFleet("cuts streams", ("r1", "r2", "r3"))
    world.play(600, 10)
    assert world.ends == {"cut": 600}


def test_a_replica_that_is_mended_is_used_again_within_the_longest_distrust() -> None:
    world = BreakingFleet("closes", ("r1",), replicas=2)
    world.play(200, 2)
    assert world.fleet.state.replicas["r1"].broken > 3
    world.broken.clear()
    before = world.sent["r1"]
    world.play(200, 2)
    assert world.sent["r1"] - before > 60
    assert world.fleet.state.replicas["r1"].broken == 0


def broken(bench: Bench, name: str) -> None:
    """A request fails on ``name`` and is answered elsewhere."""
    while True:
        request = bench.arrive()
        if bench.only(ev.Dispatch).replica == name:
            break
        bench.finish(request)
    bench.tick(1)
    bench.fail_attempt(request)
    bench.tick(DOUBT)
    bench.scrape(name)
    assert bench.only(ev.Dispatch).replica != name
    bench.tick(1)
    bench.finish(request)


def looks_until_used(bench: Bench, name: str) -> int:
    """Time from when ``name`` was last found broken until a look puts it back in routing."""
    began = bench.replica(name).broken_at
    while bench.replica(name).shunned:
        bench.tick(SECOND // 10)
        bench.scrape(name)
    return bench.now - began


def test_each_time_in_a_row_it_stays_out_twice_as_long_up_to_a_limit() -> None:
    bench = Bench(fleet_of(2, policy="round-robin"))
    waits = []
    for _ in range(9):
        broken(bench, "r1")
        waits.append(looks_until_used(bench, "r1"))
    for wait, longer in itertools.pairwise(waits):
        assert longer == pytest.approx(min(2 * wait, DISTRUST), abs=SECOND // 5)
    assert waits[0] == pytest.approx(2 * DOUBT, abs=SECOND // 5)


def test_a_whole_answer_ends_distrust() -> None:
    bench = Bench(fleet_of(2, policy="round-robin"))
    for _ in range(3):
        broken(bench, "r1")
        looks_until_used(bench, "r1")
    assert bench.replica("r1").broken == 3
    for _ in range(2):
        bench.finish(bench.arrive())
    assert bench.replica("r1").broken == 0


def test_requests_that_were_under_way_together_count_once() -> None:
    bench = Bench(fleet_of(2, policy="round-robin"))
    requests = [bench.arrive() for _ in range(8)]
    there = [r for r in requests if bench.fleet.state.requests[r].replica == "r1"]
    for request in there:
        bench.tick(1)
        bench.first_token(request)
        bench.finish(request, "upstream_reset")
    assert len(there) == 4
    assert bench.replica("r1").broken == 1


@pytest.mark.parametrize(("name", "times"), [("a", 0), (None, 1)])
def test_who_forgot_an_adapter_is_not_distrusted_but_who_does_not_know_the_base_is(
    name: str | None, times: int
) -> None:
    bench = Bench(fleet_of(2, [adapter("a")], policy="round-robin"))
    for where in ("r1", "r2"):
        bench.hold("a", where)
    bench.tick(1)
    request = bench.arrive(name)
    first = bench.only(ev.Dispatch).replica
    bench.tick(1)
    bench.fail_attempt(request, "not_registered", "engine_error")
    assert bench.only(ev.Dispatch).replica != first
    bench.tick(1)
    bench.finish(request)
    assert (bench.replica(first).broken, bench.replica(first).shunned) == (times, times > 0)


def test_a_new_process_is_trusted() -> None:
    bench = Bench(fleet_of(2, policy="round-robin"))
    broken(bench, "r1")
    bench.down("r1")
    bench.up("r1", start=2)
    assert (bench.replica("r1").broken, bench.replica("r1").shunned) == (0, False)


def test_what_failed_before_a_new_process_says_nothing_of_it() -> None:
    bench = Bench(fleet_of(2, policy="round-robin"))
    request = bench.arrive()
    name = bench.only(ev.Dispatch).replica
    bench.tick(1)
    bench.fail_attempt(request)
    bench.tick(1)
    bench.up(name, start=2)
    assert bench.only(ev.Dispatch).replica != name
    bench.tick(1)
    bench.finish(request)
    assert (bench.replica(name).broken, bench.replica(name).shunned) == (0, False)


def test_without_another_replica_in_routing_a_look_is_enough() -> None:
    bench = Bench(fleet_of(2, policy="round-robin"))
    for _ in range(5):
        broken(bench, "r1")
        looks_until_used(bench, "r1")
    broken(bench, "r1")
    bench.down("r2")
    assert looks_until_used(bench, "r1") <= 2 * DOUBT
