from __future__ import annotations

import msgspec
import pytest

from loraledger import events as ev
from loraledger.kernel.carry import carry_over
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.loads import FOREVER
from loraledger.kernel.settings import (
    MS,
    SECOND,
    FleetSettings,
    ReplicaSpec,
    TenantSpec,
    decode_settings,
    encode_settings,
)

from .bench import Bench, adapter, digest, fleet_of, replica
from .invariants import check

NAME = ev.engine_name("a", digest("aa11"))
ADAPTERS = (adapter("a"), adapter("b"), adapter("c"))


def busy() -> Bench:
    """One of everything: requests in flight, streaming, queued, waiting for a load; loads, an unload; a held request."""
    bench = Bench(fleet_of([replica("r1", 2, 3), replica("r2", 2, 3)], ADAPTERS, [TenantSpec("acme", 6)]))
    bench.hold("a", "r1")
    bench.hold("b", "r1")
    bench.hold("a", "r2")
    bench.tick(SECOND)
    bench.scrape("r1", running=1)
    for _ in range(3):
        bench.arrive("a")
    bench.first_token("q1")
    bench.arrive("c")
    bench.arrive()
    bench.fail_attempt("q5")
    bench.arrive()
    bench.arrive("b")
    bench.feed(ev.UnloadAsked(bench.now, "b", "r1"))
    bench.finish("q2", generated=90, itl=12 * MS)
    phases = {r.phase for r in bench.fleet.state.requests.values()}
    assert phases == {"sent", "streaming", "loading", "held", "queued"} or phases >= {"sent", "loading", "held"}
    return bench


def estimates(bench: Bench) -> list[object]:
    state = bench.fleet.state
    of_replicas = [(r.itl, r.prefill_rate, r.load_ratio) for r in state.replicas.values()]
    return [state.output, of_replicas, [(a.output, a.rate, a.rate_at, a.placed) for a in state.adapters.values()]]


def test_a_new_gateway_process_keeps_what_was_learnt_and_forgets_what_was_open() -> None:
    bench = busy()
    learnt = msgspec.msgpack.encode(estimates(bench))
    host = {name: list(bench.replica(name).tiers.host) for name in ("r1", "r2")}
    bench.feed(ev.GatewayStarted(bench.now, "2", "c"))
    state = bench.fleet.state
    assert msgspec.msgpack.encode(estimates(bench)) == learnt
    assert {name: list(bench.replica(name).tiers.host) for name in ("r1", "r2")} == host
    assert (state.requests, state.held, state.commands, state.timers, state.queued) == ({}, {}, {}, [], 0)
    assert state.tenants["acme"].active == 0
    for r in state.replicas.values():
        assert (r.in_flight, r.adapters, r.prefill_out, r.decode_out, r.stall_out, r.kv_own) == ({}, {}, 0, 0, 0, 0)
        assert (r.foreign, r.foreign_kv, r.loading, r.wanted, r.up) == (0, 0, None, {}, False)
    assert bench.wake_at is None


def test_after_a_gateway_restart_the_old_requests_are_unknown_and_the_engines_listing_brings_the_adapters_back() -> (
    None
):
    bench = busy()
    bench.feed(ev.GatewayStarted(bench.now, "2", "c"))
    assert bench.finish("q1") == []
    bench.arrive("a", id="n1")
    assert bench.only(ev.Queue).reason == "no_replica"
    bench.tick(1)
    bench.up("r1", [NAME, ev.engine_name("b", digest("aa11"))])
    sent = bench.only(ev.Dispatch)
    assert (sent.request, sent.model, sent.decision.hit_class) == ("n1", NAME, "gpu")
    assert bench.replica("r1").drift == {}


def test_a_draining_replica_still_drains_after_a_gateway_restart() -> None:
    bench = Bench(fleet_of(1))
    bench.feed(ev.DrainAsked(bench.now, "r1", True))
    bench.feed(ev.GatewayStarted(bench.now, "2", "c"))
    bench.up("r1")
    bench.arrive()
    bench.only(ev.Queue)


def test_a_snapshot_keeps_the_order_of_queues_and_of_lru_lists() -> None:
    names = ("z", "m", "a")
    bench = Bench(fleet_of([replica("r1", 3, 5, max_in_flight=1)], [adapter(name) for name in names]))
    for name in names:
        bench.hold(name, "r1")
    for request in ("q9", "q1", "q5"):
        bench.arrive(id=request)
    restored = Fleet.restore(bench.settings, bench.fleet.snapshot()).state
    assert [name[0] for name in restored.replicas["r1"].tiers.active] == ["z", "m", "a"]
    assert list(restored.tenants["acme"].queue) == ["q1", "q5"]
    assert list(restored.requests) == ["q9", "q1", "q5"]


def test_a_snapshot_of_something_else_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        Fleet.restore(fleet_of(), b"\x93\x01\x02\x03")


# --- other settings ---------------------------------------------------------------------------------------------------


def continued(bench: Bench, settings: FleetSettings) -> Fleet:
    """The kernel of a new gateway process with other settings."""
    old = Fleet.restore(bench.settings, bench.fleet.snapshot()).state
    fleet = Fleet(settings, carry_over(old, settings))
    _, wake_at = fleet.step(ev.GatewayStarted(bench.now, "2", "c"))
    check(fleet, wake_at)
    return fleet


def test_with_the_same_settings_the_new_process_decides_as_the_old_one_would() -> None:
    bench = busy()
    fleet = continued(bench, bench.settings)
    bench.feed(ev.GatewayStarted(bench.now, "2", "c"))
    later: list[ev.Event] = [
        ev.ReplicaUp(bench.now + 1, "r1", 1, (NAME,)),
        ev.ReplicaUp(bench.now + 2, "r2", 1, (NAME,)),
        *(
            ev.RequestArrived(bench.now + 3 + n, f"n{n}", "acme", (*"abc", None)[n % 4], 100 * n + 1, None, True, "/v1")
            for n in range(12)
        ),
    ]
    answers = [bench.feed(event) for event in later]
    assert answers == [fleet.step(event)[0] for event in later]
    assert {type(command) for answer in answers for command in answer} == {ev.Dispatch, ev.Queue, ev.Load}


def test_a_replica_of_another_shape_keeps_its_estimates_but_not_its_adapters() -> None:
    bench = busy()
    itl = bench.replica("r1").itl
    specs = (ReplicaSpec("r1", 4, 8, itl=5 * MS), bench.settings.replicas[1])
    fleet = continued(bench, msgspec.structs.replace(bench.settings, replicas=specs))
    first, second = fleet.state.replicas["r1"], fleet.state.replicas["r2"]
    assert (first.itl.mean, first.itl.n, first.itl.prior) == (itl.mean, itl.n, 5 * MS)
    assert (first.tiers.slots, first.tiers.host, first.registrations, first.process_start) == (4, {}, {}, None)
    assert list(second.tiers.host) == [NAME, ev.engine_name("c", digest("aa11"))][: len(second.tiers.host)]
    assert second.process_start == 1


def test_a_replica_that_left_is_gone_from_every_placement_set() -> None:
    bench = busy()
    fleet = continued(bench, msgspec.structs.replace(bench.settings, replicas=bench.settings.replicas[1:]))
    assert list(fleet.state.replicas) == ["r2"]
    assert all(set(a.placed) <= {"r2"} for a in fleet.state.adapters.values())


def test_a_large_fleet_may_shrink() -> None:
    bench = Bench(fleet_of(60, ADAPTERS), up=False)
    for name in ("r1", "r2"):
        bench.up(name)
    bench.arrive("a")
    bench.arrive("b")
    fleet = continued(bench, fleet_of(40, ADAPTERS))
    for n in range(1, 41):
        fleet.step(ev.ReplicaUp(bench.now, f"r{n}", 1, ()))
    for n, name in enumerate("abcabc"):
        fleet.step(ev.RequestArrived(bench.now + n, f"n{n}", "acme", name, 10, 10, True, "/v1"))
    assert len(fleet.state.requests) == 6


def test_an_adapter_keeps_its_figures_unless_its_files_changed() -> None:
    bench = busy()
    changed = (adapter("a", replicas=-1), adapter("b", "bb22"))
    fleet = continued(bench, msgspec.structs.replace(bench.settings, adapters=changed))
    old = bench.fleet.state.adapters
    assert fleet.state.adapters["a"].rate == old["a"].rate > 0
    assert fleet.state.adapters["a"].spec.replicas == -1
    assert list(fleet.state.desired) == ["a"]
    assert fleet.state.adapters["b"].rate == 0
    assert list(fleet.state.adapters) == ["a", "b"]
    assert all(set(r.registrations) <= {"a"} for r in fleet.state.replicas.values())
    commands, _ = fleet.step(ev.ReplicaUp(bench.now + 1, "r1", 1, (NAME,)))
    assert commands == []
    assert fleet.state.replicas["r1"].registrations["a"].state == "registered"


def test_what_is_held_against_an_adapter_is_carried_over() -> None:
    bench = Bench(fleet_of(2, ADAPTERS))
    bench.hold("a", "r1")
    bench.tick(1)
    bench.arrive("a")
    bench.down(bench.only(ev.Dispatch).replica)
    fleet = continued(bench, fleet_of(3, ADAPTERS))
    assert fleet.state.adapters["a"].suspect_since == bench.now


def test_command_and_decision_numbers_go_on_rising() -> None:
    bench = busy()
    fleet = continued(bench, fleet_of(1, ADAPTERS))
    assert fleet.state.next_command == bench.fleet.state.next_command
    assert fleet.state.next_decision == bench.fleet.state.next_decision


def test_a_smaller_retry_budget_takes_effect() -> None:
    bench = busy()
    limits = msgspec.structs.replace(bench.settings.limits, retry_burst=2)
    fleet = continued(bench, msgspec.structs.replace(bench.settings, limits=limits))
    assert fleet.state.retries == 2.0


def test_settings_survive_their_wire_form() -> None:
    settings = busy().settings
    assert decode_settings(encode_settings(settings)) == settings
    with pytest.raises(msgspec.DecodeError):
        decode_settings(b"nonsense")


def test_a_restart_tries_again_what_was_refused_for_good() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.arrive("a")
    bench.failed("r1", "files are missing", permanent=True)
    bench.adapter("a").parked_until, bench.adapter("a").parked_reason = FOREVER, "files are missing"
    carried = carry_over(bench.fleet.state, bench.fleet.settings)
    assert carried.adapters["a"].parked_until == 0
    assert carried.adapters["a"].suspect_since > 0, "it is verified by a load before it is used"
    registration = carried.replicas["r1"].registrations["a"]
    assert (registration.permanent, registration.retry_at) == (False, 0)


def test_a_clock_that_was_set_back_between_two_processes_does_not_stop_kernel_time() -> None:
    bench = Bench(fleet_of(1))
    earlier = bench.now - 3600 * SECOND
    fleet = Fleet(bench.fleet.settings, bench.fleet.state)
    fleet.step(ev.GatewayStarted(earlier, "0", "0"))
    assert fleet.state.now == earlier
    fleet.step(ev.RequestArrived(earlier, "late", "acme", None, 1, 1, False, "/v1"))
    assert fleet.state.requests["late"].deadline < bench.now


def test_how_many_copies_each_adapter_has_by_its_share_is_carried_over() -> None:
    bench = Bench(fleet_of(3, ADAPTERS, policy="dynamo-lora"))
    for _ in range(5):
        bench.arrive("a")
        bench.tick(10 * SECOND)
    before = bench.fleet.state.shares
    assert before is not None
    assert before.load
    assert carry_over(bench.fleet.state, fleet_of(4, ADAPTERS, policy="dynamo-lora")).shares == before
