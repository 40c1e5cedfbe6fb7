from __future__ import annotations

import pytest

from loraledger import events as ev
from loraledger.kernel import routing
from loraledger.kernel.policy import Policy
from loraledger.kernel.queues import LOOK_AHEAD
from loraledger.kernel.requests import HOPELESS
from loraledger.kernel.settings import SECOND, Limits, TenantSpec
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState, RequestState

from .bench import Bench, adapter, fleet_of, replica

SMALL = TenantSpec("acme", concurrency=2, queue=3, queue_deadline=10 * SECOND)


def one_seat(*tenants: str) -> Bench:
    """One replica with one seat, taken by ``acme``'s request ``q1``."""
    bench = Bench(fleet_of([replica("r1", max_in_flight=1)], tenants=[TenantSpec(name) for name in ("acme", *tenants)]))
    bench.arrive()
    return bench


def test_a_tenant_has_no_more_in_flight_than_its_concurrency() -> None:
    bench = Bench(fleet_of(tenants=[SMALL, TenantSpec("duff")]))
    for _ in range(2):
        bench.arrive()
        bench.only(ev.Dispatch)
    third = bench.arrive()
    waits = bench.only(ev.Queue)
    assert (waits.request, waits.reason, waits.until) == (third, "tenant_concurrency", bench.now + 10 * SECOND)
    bench.arrive(tenant="duff")
    bench.only(ev.Dispatch)
    bench.finish("q1")
    assert bench.only(ev.Dispatch).request == third


def test_a_tenants_queue_is_bounded_and_says_when_to_come_back() -> None:
    bench = Bench(fleet_of(tenants=[SMALL]))
    for _ in range(5):
        bench.arrive()
    bench.arrive()
    refused = bench.only(ev.Reject)
    assert (refused.http_status, refused.code, refused.retry_after) == (429, "tenant_queue_full", SECOND)
    assert refused.status == "rejected"
    assert "acme" in refused.message


def test_the_gateways_queue_is_bounded_over_all_tenants() -> None:
    tenants = [TenantSpec("acme", 1), TenantSpec("duff", 1)]
    bench = Bench(fleet_of(tenants=tenants, limits=Limits(queue_total=2)))
    for tenant in ("acme", "duff"):
        bench.arrive(tenant=tenant)
        bench.arrive(tenant=tenant)
    bench.arrive(tenant="duff")
    refused = bench.only(ev.Reject)
    assert (refused.http_status, refused.code) == (503, "gateway_queue_full")
    bench.cancel("q2")
    bench.arrive(tenant="duff")
    bench.only(ev.Queue)


def test_a_queued_request_is_refused_at_its_deadline_and_not_before() -> None:
    bench = Bench(fleet_of(tenants=[SMALL]))
    for _ in range(3):
        bench.arrive()
    deadline = bench.now + 10 * SECOND
    assert bench.wake_at == deadline
    bench.tick(10 * SECOND - 1)
    assert bench.feed(ev.Wake(bench.now)) == []
    bench.wake()
    refused = bench.only(ev.Reject)
    assert (refused.request, refused.code, refused.http_status) == ("q3", "queue_deadline", 503)
    assert bench.now == deadline


def test_a_place_that_an_expired_request_gives_up_is_given_to_the_next() -> None:
    tenants = [TenantSpec("acme", concurrency=1, queue_deadline=SECOND)]
    bench = Bench(fleet_of(1, [adapter("a")], tenants))
    bench.arrive("a")  # waits for its load
    bench.tick(SECOND // 2)
    bench.arrive()
    assert bench.only(ev.Queue).reason == "tenant_concurrency"
    bench.tick(SECOND // 2)
    bench.feed(ev.ScrapeStarted(bench.now, "r1"))  # whatever comes first when the deadline has passed
    assert [command.request for command in bench.all(ev.Reject)] == ["q1"]
    assert bench.only(ev.Dispatch).request == "q2"


def test_a_request_that_waited_twice_is_refused_once() -> None:
    bench = Bench(fleet_of(1, [adapter("a")], [SMALL]))
    bench.arrive()
    bench.arrive()
    bench.arrive("a")  # for its tenant's seat
    bench.finish("q1")  # and now for its load
    assert bench.only(ev.Queue).reason == "loading"
    bench.wake()
    assert [command.code for command in bench.all(ev.Reject)] == ["load_deadline"]


def test_one_tenants_queue_is_first_in_first_out() -> None:
    bench = one_seat()
    for _ in range(12):
        bench.arrive()
    served = []
    for n in range(1, 12):
        bench.finish(f"q{n}")
        served.append(bench.only(ev.Dispatch).request)
    assert served == [f"q{n}" for n in range(2, 13)]


def test_tenants_are_served_in_turn_however_long_one_queue_is() -> None:
    bench = one_seat("duff", "moe")
    for tenant, number in (("acme", 6), ("duff", 3), ("moe", 1)):
        for n in range(number):
            bench.arrive(tenant=tenant, id=f"{tenant}{n}")
    served = []
    last = "q1"
    while bench.finish(last):
        last = bench.only(ev.Dispatch).request
        served.append(last)
    assert served == [
        *("acme0", "duff0", "moe0"),
        *("acme1", "duff1"),
        *("acme2", "duff2"),
        *("acme3", "acme4", "acme5"),
    ]


def test_a_blocked_adapter_does_not_block_its_tenants_other_requests() -> None:
    bench = Bench(
        fleet_of(
            [replica("r1", max_in_flight=1), replica("r2", max_rank=8)],
            [adapter("wide", rank=16)],
            policy="round-robin",
        )
    )
    bench.hold("wide", "r1")
    bench.arrive("wide")
    for _ in range(5):
        bench.arrive("wide")
        assert bench.only(ev.Queue).reason == "no_capacity"
    bench.feed(ev.DrainAsked(bench.now, "r2", True))
    behind = bench.arrive()
    bench.only(ev.Queue)
    bench.feed(ev.DrainAsked(bench.now, "r2", False))
    sent = bench.only(ev.Dispatch)
    assert (sent.request, sent.replica) == (behind, "r2")


def test_look_ahead_is_bounded() -> None:
    bench = Bench(
        fleet_of(
            [replica("r1", max_in_flight=1), replica("r2", max_rank=8)],
            [adapter("wide", rank=16)],
            policy="round-robin",
        )
    )
    bench.hold("wide", "r1")
    bench.arrive("wide")
    for _ in range(LOOK_AHEAD):
        bench.arrive("wide")
    bench.feed(ev.DrainAsked(bench.now, "r2", True))
    bench.arrive()
    assert bench.feed(ev.DrainAsked(bench.now, "r2", False)) == []


def test_in_a_full_fleet_a_seat_costs_one_try_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = [f"t{number}" for number in range(20)]
    bench = one_seat(*tenants)
    for _ in range(LOOK_AHEAD):
        for tenant in tenants:
            bench.arrive(tenant=tenant)
    tried: list[str] = []
    feasible_for = routing.feasible_for

    def counted(
        state: FleetState, policy: Policy, request: RequestState, adapter: AdapterState | None
    ) -> list[ReplicaState]:
        tried.append(request.id)
        return feasible_for(state, policy, request, adapter)

    monkeypatch.setattr(routing, "feasible_for", counted)
    bench.finish("q1")
    sent = bench.only(ev.Dispatch).request
    assert set(tried) == {sent}
    tried.clear()
    bench.scrape("r1")
    assert tried == []


def test_a_request_waits_for_a_replica_when_none_is_up() -> None:
    bench = Bench(fleet_of(), up=False)
    bench.arrive()
    assert bench.only(ev.Queue).reason == "no_replica"
    bench.up("r1")
    assert bench.only(ev.Dispatch).replica == "r1"


def test_a_request_waits_for_kv_headroom_unless_the_replica_is_empty() -> None:
    bench = Bench(fleet_of([replica("r1", kv_tokens=1_000)]))
    bench.arrive(prompt=5_000)
    bench.only(ev.Dispatch)
    bench.arrive(prompt=10)
    assert bench.only(ev.Queue).reason == "no_capacity"
    bench.finish("q1")
    assert bench.only(ev.Dispatch).request == "q2"


def test_what_others_hold_on_a_replica_counts_as_taken() -> None:
    bench = Bench(fleet_of([replica("r1", max_in_flight=4, kv_tokens=1_000)]))
    bench.scrape("r1", running=3, waiting=1)
    bench.arrive()
    assert bench.only(ev.Queue).reason == "no_capacity"
    bench.scrape("r1", running=2, kv=0.9)
    assert bench.commands == []  # seats, but no KV
    bench.scrape("r1", running=2, kv=0.1)
    assert bench.only(ev.Dispatch).request == "q1"


def test_cancelling_takes_a_request_out_wherever_it_is() -> None:
    bench = Bench(fleet_of(1, [adapter("a")], [TenantSpec("acme", concurrency=3)]))
    for _ in range(2):
        bench.arrive()
    bench.first_token("q1")
    bench.arrive("a")
    queued = bench.arrive()
    for request in (queued, "q3", "q2", "q1"):
        bench.cancel(request)
        assert request not in bench.fleet.state.requests
    assert bench.replica("r1").in_flight == {}
    assert bench.done("r1") == []


def test_a_prompt_that_no_replica_can_hold_is_refused_and_never_sent() -> None:
    bench = Bench(fleet_of([replica("r1", kv_tokens=1_000), replica("r2", kv_tokens=500)]))
    bench.arrive(prompt=HOPELESS * 1_000 + 1)
    refused = bench.only(ev.Reject)
    assert (refused.http_status, refused.code, refused.retry_after) == (413, "prompt_too_large", None)
    assert "1000" in refused.message
    assert bench.fleet.state.tenants["acme"].active == 0


def test_an_estimate_that_may_be_wrong_or_a_cache_that_is_not_known_refuse_nothing() -> None:
    bench = Bench(fleet_of([replica("r1", kv_tokens=1_000)]))
    bench.arrive(prompt=HOPELESS * 1_000)
    bench.only(ev.Dispatch)
    bench = Bench(fleet_of([replica("r1", kv_tokens=1_000), replica("r2")]))
    bench.arrive(prompt=10**9)
    bench.only(ev.Dispatch)


def test_who_has_no_room_is_refused_all_the_same_once_its_adapter_is_parked() -> None:
    bench = Bench(fleet_of([replica("r1", kv_tokens=1_000)], [adapter("a")]))
    bench.hold("a", "r1")
    bench.arrive("a", prompt=800)
    waiting = bench.arrive("a", prompt=800)
    assert bench.only(ev.Queue).reason == "no_capacity"
    parked = bench.adapter("a")
    parked.parked_until, parked.parked_reason = bench.now + 5 * SECOND, "its use coincided with 2 engine exits"
    bench.feed(ev.Wake(bench.now))
    refused = bench.only(ev.Reject)
    assert (refused.request, refused.code) == (waiting, "adapter_parked")


def test_a_policy_that_counts_tries_is_asked_also_for_who_has_no_room() -> None:
    bench = Bench(fleet_of([replica("r1", kv_tokens=1_000)], [adapter("a")], policy="dynamo-lora"))
    bench.hold("a", "r1")
    bench.arrive("a", prompt=800)
    bench.arrive("a", prompt=800)
    shares = bench.fleet.state.shares
    assert shares is not None
    tick = shares.tick
    bench.tick(3 * SECOND)
    bench.feed(ev.Wake(bench.now))
    shares = bench.fleet.state.shares
    assert shares is not None
    assert shares.tick == tick + 1
