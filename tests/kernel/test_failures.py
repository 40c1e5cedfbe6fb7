from __future__ import annotations

import pytest

from loraledger import events as ev
from loraledger.kernel.failures import DOUBT
from loraledger.kernel.settings import SECOND, Limits, TenantSpec

from .bench import Bench, adapter, digest, fleet_of

NAME = ev.engine_name("a", digest("aa11"))
PARK = Limits().park


def other(name: str) -> str:
    return {"r1": "r2", "r2": "r1"}[name]


def poisoned() -> tuple[Bench, str]:
    """``a`` is registered on both replicas, and one engine has just died of request ``q1``; its name is returned."""
    bench = Bench(fleet_of(2, [adapter("a")]))
    bench.hold("a", "r1")
    bench.hold("a", "r2")
    bench.tick(SECOND)
    bench.arrive("a")
    killed = bench.only(ev.Dispatch).replica
    bench.fail_attempt("q1")
    assert bench.only(ev.Check).replica == killed
    assert bench.only(ev.Queue).reason == "replica_check"
    bench.tick(SECOND // 4)
    bench.down(killed)
    return bench, killed


# --- one attempt more -------------------------------------------------------------------------------------------------


def test_a_refused_connection_is_retried_at_once_elsewhere() -> None:
    bench = Bench(fleet_of(2, policy="round-robin"))
    bench.arrive()
    first = bench.only(ev.Dispatch).replica
    bench.fail_attempt("q1", "connect_refused")
    again = bench.only(ev.Dispatch)
    assert (again.attempt, again.replica) == (2, other(first))
    assert bench.only(ev.Check).replica == first


@pytest.mark.parametrize("up", [True, False])
def test_there_is_never_a_third_attempt(up: bool) -> None:
    bench = Bench(fleet_of(3))
    bench.arrive()
    bench.fail_attempt("q1", "connect_refused")
    second = bench.only(ev.Dispatch)
    assert second.attempt == 2
    if not up:
        bench.down(second.replica)
    bench.fail_attempt("q1", "connect_refused")
    refused = bench.only(ev.Reject)
    assert (refused.http_status, refused.code, refused.status) == (502, "upstream_failed", "upstream_failed")
    assert "connect_refused" in refused.message
    assert not bench.all(ev.Dispatch)


def test_an_attempt_that_timed_out_is_not_retried() -> None:
    bench = Bench(fleet_of(2))
    bench.arrive()
    bench.fail_attempt("q1", "no_first_byte", "upstream_timeout")
    refused = bench.only(ev.Reject)
    assert (refused.http_status, refused.code, refused.status) == (504, "upstream_timeout", "upstream_timeout")


def test_a_report_on_a_former_attempt_means_nothing() -> None:
    bench = Bench(fleet_of(2))
    bench.arrive()
    bench.fail_attempt("q1", "connect_refused")
    assert bench.feed(ev.AttemptFailed(bench.now, "q1", 1, "upstream_failed", None, "connect_refused")) == []
    assert bench.fleet.state.requests["q1"].attempt == 2


def test_the_retry_budget_holds_when_every_request_fails() -> None:
    limits = Limits(retry_ratio=0.1, retry_burst=5)
    bench = Bench(fleet_of(2, tenants=[TenantSpec("acme", 1000)], limits=limits))
    requests = 200
    outcomes = []
    for n in range(requests):
        for name in ("r1", "r2"):
            bench.up(name)
        bench.arrive(id=f"q{n}")
        bench.fail_attempt(f"q{n}", "connect_refused")
        if bench.all(ev.Dispatch):
            outcomes.append("retried")
            bench.fail_attempt(f"q{n}", "connect_refused")
        outcomes.append(bench.only(ev.Reject).code)
    retried = outcomes.count("retried")
    assert limits.retry_burst + limits.retry_ratio * requests - 1 <= retried
    assert retried <= limits.retry_burst + limits.retry_ratio * requests
    assert outcomes.count("retry_budget_spent") == requests - retried
    assert outcomes.count("upstream_failed") == retried


def test_the_retry_budget_is_saved_up_to_a_limit() -> None:
    bench = Bench(fleet_of(1, limits=Limits(retry_ratio=1.0, retry_burst=3)))
    for n in range(10):
        bench.arrive(id=f"q{n}")
        bench.finish(f"q{n}")
    assert bench.fleet.state.retries == 3.0


def test_a_request_that_failed_late_gets_a_second_wait() -> None:
    bench = Bench(fleet_of(2, tenants=[TenantSpec("acme", queue_deadline=10 * SECOND)]))
    bench.arrive()
    bench.tick(60 * SECOND)
    bench.fail_attempt("q1")
    assert bench.only(ev.Queue).until == bench.now + 10 * SECOND
    bench.tick(SECOND)
    bench.scrape(str(bench.fleet.state.requests["q1"].failed_on))
    assert bench.only(ev.Dispatch).attempt == 2


def test_an_engine_that_forgot_a_name_is_believed_and_the_request_is_retried() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.hold("a", "r1")
    bench.tick(1)
    bench.arrive("a")
    bench.tick(1)
    bench.fail_attempt("q1", "not_registered", "client_error")
    assert bench.counter("drift:registration_lost") == 1
    assert bench.only(ev.Load).engine_name == f"{NAME}~2"
    bench.done("r1")
    assert bench.only(ev.Dispatch).attempt == 2


def test_a_name_that_was_replaced_on_the_way_is_not_drift() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.hold("a", "r1")
    bench.arrive("a")
    bench.declare(adapter("a", "bb22"))
    bench.tick(1)
    bench.hold("a", "r1")
    bench.fail_attempt("q1", "not_registered", "client_error")
    assert bench.only(ev.Dispatch).model == ev.engine_name("a", digest("bb22"))
    assert bench.counter("drift:registration_lost") == 0


# --- held until the engine was looked at ------------------------------------------------------------------------------


def test_a_held_request_is_released_only_by_a_look_that_began_late_enough() -> None:
    bench = Bench(fleet_of(1))
    bench.arrive()
    bench.fail_attempt("q1")
    assert bench.only(ev.Queue).reason == "replica_check"
    failed_at = bench.now
    bench.now = failed_at + DOUBT - 1
    bench.scrape("r1")
    assert bench.commands == []
    bench.now = failed_at + DOUBT
    bench.scrape("r1")
    assert (bench.only(ev.Dispatch).replica, bench.only(ev.Dispatch).attempt) == ("r1", 2)
    assert bench.counter("adapters_suspected") == 0


def test_a_look_that_began_before_the_failure_clears_nothing_however_late_it_ends() -> None:
    bench = Bench(fleet_of(1))
    bench.arrive()
    began = bench.now
    bench.feed(ev.ScrapeStarted(began, "r1"))
    bench.tick(1)
    bench.fail_attempt("q1")
    bench.tick(10 * DOUBT)
    assert bench.feed(ev.ReplicaSampled(bench.now, "r1", began, 0, 0, 0.0, None)) == []
    assert bench.replica("r1").doubted > 0


def test_attempts_that_go_on_failing_do_not_keep_a_held_request_waiting() -> None:
    bench = Bench(fleet_of(1))
    for _ in range(4):
        request = bench.arrive()
        bench.feed(ev.AttemptFailed(bench.now, request, 1, "engine_error", 500, "cannot serve this"))
        bench.tick(DOUBT // 2)
    bench.scrape("r1")
    phases = [request.phase for request in bench.fleet.state.requests.values()]
    assert phases == ["sent", "sent", "sent", "held"], "the last one failed less than the doubt ago"


def test_a_second_attempt_avoids_the_replica_of_the_first_even_if_that_is_the_cheaper_one() -> None:
    bench = Bench(fleet_of(2))
    bench.arrive()
    first = bench.only(ev.Dispatch).replica
    bench.fail_attempt("q1")
    for _ in range(5):
        bench.arrive(prompt=5_000)
        assert bench.only(ev.Dispatch).replica == other(first)
    bench.tick(DOUBT)
    bench.scrape(first)
    assert bench.only(ev.Dispatch).replica == other(first)


def test_a_doubted_replica_gets_no_request_and_one_check() -> None:
    bench = Bench(fleet_of(2, policy="round-robin"))
    for _ in range(4):
        bench.arrive()
    bench.fail_attempt("q1")
    bench.only(ev.Check)
    doubted = bench.fleet.state.requests["q1"].failed_on
    same = next(r for r in ("q2", "q3", "q4") if bench.fleet.state.requests[r].replica == doubted)
    bench.fail_attempt(same)
    assert not bench.all(ev.Check)
    for _ in range(4):
        bench.arrive()
        assert bench.only(ev.Dispatch).replica != doubted


def test_a_held_request_is_refused_at_its_deadline() -> None:
    bench = Bench(fleet_of(1))
    bench.arrive()
    bench.fail_attempt("q1")
    bench.wake()
    assert bench.only(ev.Reject).code == "replica_check_deadline"
    assert bench.fleet.state.held == {}


# --- poison -----------------------------------------------------------------------------------------------------------


def test_a_suspect_adapter_is_verified_under_a_new_name_before_it_is_used_again() -> None:
    bench, killed = poisoned()
    load = bench.only(ev.Load)
    assert (load.replica, load.engine_name) == (other(killed), f"{NAME}~2")
    assert not bench.all(ev.Dispatch)
    bench.tick(1)
    bench.done(other(killed))
    sent = bench.only(ev.Dispatch)
    assert (sent.request, sent.attempt, sent.model) == ("q1", 2, f"{NAME}~2")
    bench.arrive("a")
    assert bench.only(ev.Dispatch).model == f"{NAME}~2"


def test_an_adapter_that_fails_its_verification_for_good_is_parked_on_all_replicas() -> None:
    bench, killed = poisoned()
    bench.tick(1)
    bench.failed(other(killed), "files are missing", permanent=True)
    refused = bench.only(ev.Reject)
    assert (refused.code, refused.http_status) == ("adapter_parked", 503)
    assert "files are missing" in refused.message
    assert refused.retry_after is None
    bench.up(killed, start=2)
    bench.arrive("a")
    assert bench.only(ev.Reject).code == "adapter_parked"
    bench.declare(adapter("a"))
    bench.arrive("a")
    bench.only(ev.Load)


def test_an_adapter_that_a_replica_has_just_loaded_is_verified_again_but_not_parked_when_another_refuses_it() -> None:
    bench = Bench(fleet_of(3, [adapter("a")]))
    bench.hold("a", "r1")
    for bad in ("r2", "r3"):
        bench.tick(SECOND)
        bench.feed(ev.LoadAsked(bench.now, "a", bad))
        bench.failed(bad, "adapter_files_missing", permanent=True)
        assert bench.adapter("a").parked_until == 0
        bench.tick(SECOND)
        request = bench.arrive("a")
        assert bench.only(ev.Load).replica == "r1"
        bench.tick(1)
        bench.done("r1")
        assert bench.only(ev.Dispatch).request == request
        bench.finish(request)
    bench.tick(SECOND)
    bench.feed(ev.LoadAsked(bench.now, "a", "r2"))
    bench.failed("r2", "adapter_files_missing", permanent=True)
    bench.arrive("a")
    bench.failed("r1", "adapter_files_missing", permanent=True)
    assert bench.only(ev.Reject).code == "adapter_parked"


def test_a_verification_that_fails_for_a_passing_reason_parks_nobody() -> None:
    bench, killed = poisoned()
    bench.tick(1)
    bench.failed(other(killed), "timeout")
    assert bench.only(ev.Reject).code == "adapter_load_failed"
    assert bench.adapter("a").parked_until == 0
    bench.up(killed, start=2)
    bench.arrive("a")
    assert bench.only(ev.Load).replica == killed


def test_an_engine_that_answers_with_an_error_is_still_routed_to() -> None:
    bench = Bench(fleet_of(1))
    bench.arrive()
    bench.feed(ev.AttemptFailed(bench.now, "q1", 1, "engine_error", 500, "cannot serve this"))
    assert bench.fleet.state.requests["q1"].phase == "held"
    bench.arrive()
    assert bench.only(ev.Dispatch).request == "q2"


@pytest.mark.parametrize("name", [None, "a"])
def test_an_engine_that_answers_with_errors_does_not_draw_the_traffic(name: str | None) -> None:
    bench = Bench(fleet_of(2, [adapter("a")]))
    for replica in ("r1", "r2"):
        bench.hold("a", replica)
    request = bench.arrive(name)
    broken = bench.only(ev.Dispatch).replica
    bench.feed(ev.AttemptFailed(bench.now, request, 1, "engine_error", 500, "cannot serve this"))
    for _ in range(8):
        bench.arrive(name)
        assert bench.only(ev.Dispatch).replica == other(broken)
    bench.tick(DOUBT)
    bench.scrape(broken)
    bench.arrive(name)
    assert bench.only(ev.Dispatch).replica == broken, "it is idle, and was found well"


def test_a_second_exit_in_the_parking_time_parks_the_adapter() -> None:
    bench, killed = poisoned()
    bench.tick(1)
    bench.done(other(killed))
    bench.tick(PARK // 2)
    bench.down(other(killed))
    assert "2 engine exits" in str(bench.adapter("a").parked_reason)
    bench.fail_attempt("q1")
    assert bench.only(ev.Reject).code == "upstream_failed"
    bench.up(killed, start=2)
    bench.arrive("a")
    assert bench.only(ev.Reject).code == "adapter_parked"
    assert bench.counter("engine_exits") == 2


def test_a_replica_that_was_only_not_heard_for_a_while_makes_nobody_suspect() -> None:
    bench = Bench(fleet_of(2, [adapter("a")]))
    names = [bench.hold("a", name) for name in ("r1", "r2")]
    for _ in range(3):
        bench.tick(SECOND)
        bench.arrive("a")
        silent = bench.only(ev.Dispatch).replica
        bench.down(silent)
        assert bench.adapter("a").suspect_since == bench.now
        bench.tick(SECOND)
        bench.up(silent, names)
        assert (bench.adapter("a").suspect_since, bench.adapter("a").strikes) == (0, 0)
        bench.finish(next(iter(bench.fleet.state.requests)))


def test_an_outage_of_all_replicas_parks_only_until_they_are_heard_again() -> None:
    bench, killed = poisoned()
    since = bench.adapter("a").suspect_since
    bench.tick(1)
    bench.done(other(killed))
    bench.tick(SECOND)
    bench.down(other(killed))
    assert bench.adapter("a").parked_until > bench.now
    bench.tick(SECOND)
    bench.up(other(killed), [f"{NAME}~2"])
    assert (bench.adapter("a").parked_until, bench.adapter("a").strikes) == (0, 1)
    assert bench.adapter("a").suspect_since == since, "the first replica did exit"


def test_two_exits_far_apart_do_not_park() -> None:
    bench, killed = poisoned()
    bench.tick(1)
    bench.done(other(killed))
    bench.tick(PARK)
    bench.down(other(killed))
    assert bench.adapter("a").parked_until == 0
    assert bench.adapter("a").strikes == 1


def test_requests_that_wait_for_a_parked_adapter_are_refused_when_its_load_ends_well() -> None:
    bench = Bench(fleet_of(3, [adapter("a")], policy="round-robin"))
    for name in ("r1", "r2"):
        bench.hold("a", name)
    bench.tick(1)
    while len(bench.fleet.state.requests) < 3:
        bench.arrive("a")
    assert bench.only(ev.Load).replica == "r3"
    for name in ("r1", "r2"):
        bench.tick(SECOND)
        bench.down(name)
    assert bench.adapter("a").parked_until > bench.now
    bench.done("r3")
    assert bench.only(ev.Reject).code == "adapter_parked"
    assert not bench.all(ev.Dispatch)


def test_a_load_that_the_engine_does_not_survive_makes_its_adapter_suspect() -> None:
    bench = Bench(fleet_of(2, [adapter("a"), adapter("b")]))
    bench.arrive("a")
    killed = bench.only(ev.Load).replica
    bench.feed(ev.LoadAsked(bench.now, "b", killed))  # waits behind it
    bench.down(killed)
    assert bench.adapter("a").suspect_since == bench.now
    assert bench.adapter("b").suspect_since == 0
    assert bench.only(ev.Load).replica == other(killed)


def test_a_restart_between_two_looks_is_an_exit_too() -> None:
    bench = Bench(fleet_of(2, [adapter("a")]))
    bench.hold("a", "r1")
    bench.hold("a", "r2")
    bench.arrive("a")
    killed = bench.only(ev.Dispatch).replica
    bench.tick(1)
    bench.up(killed, start=2)
    assert bench.adapter("a").suspect_since == bench.now
    assert bench.counter("engine_restarts") == 1


def test_an_adapter_that_had_its_first_token_is_not_suspect() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.hold("a", "r1")
    bench.arrive("a")
    bench.first_token("q1")
    bench.down("r1")
    assert bench.adapter("a").suspect_since == 0


def test_killing_a_replica_loses_no_request_and_costs_innocent_adapters_one_load_each() -> None:
    names = ("a", "b", "c")
    bench = Bench(fleet_of(2, [adapter(name) for name in names], [TenantSpec("acme", 100)]))
    for name in names:
        bench.hold(name, "r1")
        bench.hold(name, "r2")
    bench.tick(SECOND)
    for n in range(30):
        bench.arrive(names[n % 3], id=f"q{n}")
    lost = [r.id for r in bench.fleet.state.requests.values() if r.replica == "r1"]
    assert len(lost) > 5
    for request in lost[::2]:  # half of the connections break before the exit is seen, half after
        bench.fail_attempt(request)
    bench.tick(SECOND // 2)
    bench.down("r1")
    for request in lost[1::2]:
        bench.fail_attempt(request)
    while bench.replica("r2").loading is not None:
        bench.tick(SECOND // 10)
        bench.done("r2")
    assert bench.counter("loads") <= 6 + len(names)
    assert {r.phase for r in bench.fleet.state.requests.values()} == {"sent"}
    assert {r.replica for r in bench.fleet.state.requests.values()} == {"r2"}
    assert len(bench.fleet.state.requests) == 30
    assert bench.counter("adapters_parked") == 0
    for n in range(30):
        bench.finish(f"q{n}")
    assert bench.counter("retries") == len(lost)


def test_new_files_clear_what_was_held_against_the_old_ones() -> None:
    bench, killed = poisoned()
    bench.tick(1)
    bench.failed(other(killed), "unreadable")
    bench.declare(adapter("a", "bb22"))
    bench.arrive("a")
    bench.only(ev.Load)
    bench.done(other(killed))
    assert bench.only(ev.Dispatch).model == ev.engine_name("a", digest("bb22"))


def test_an_operator_who_vouches_for_an_adapter_unparks_it_but_it_is_verified() -> None:
    bench, killed = poisoned()
    bench.tick(1)
    bench.failed(other(killed), "unreadable")
    bench.tick(2 * SECOND)
    bench.declare(adapter("a"))
    bench.arrive("a")
    assert bench.only(ev.Load).engine_name == f"{NAME}~2"
