from __future__ import annotations

from collections import Counter

import pytest

from loraledger import events as ev
from loraledger.kernel.settings import SECOND, Limits

from .bench import Bench, adapter, digest, fleet_of, replica

NAME = ev.engine_name("a", digest("aa11"))


def loads(bench: Bench) -> list[tuple[str, str]]:
    return [(command.replica, command.adapter) for command in bench.all(ev.Load)]


# --- what a listing shows against what is believed --------------------------------------------------------------------


def test_what_an_engine_lists_at_first_contact_is_taken_over_without_drift() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]), up=False)
    bench.up("r1", [NAME, "somebody-else", "b@000000000000", ev.engine_name("a", digest("bb22"))])
    assert bench.registration("a", "r1").state == "registered"
    assert list(bench.replica("r1").registrations) == ["a"]
    assert bench.replica("r1").drift == {}
    bench.arrive("a")
    sent = bench.only(ev.Dispatch)
    assert (sent.model, sent.decision.hit_class) == (NAME, "unknown")


def test_the_newest_listed_name_of_an_adapter_is_used() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]), up=False)
    bench.up("r1", [f"{NAME}~2", NAME, f"{NAME}~10"])
    bench.arrive("a")
    assert bench.only(ev.Dispatch).model == f"{NAME}~10"


def test_a_name_that_was_never_loaded_here_and_is_listed_is_drift() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.tick(1)
    bench.scrape("r1", [NAME])
    assert bench.replica("r1").drift == {"registration_found": 1}
    bench.tick(1)
    bench.scrape("r1", [NAME])
    assert bench.replica("r1").drift == {"registration_found": 1}
    bench.arrive("a")
    assert bench.only(ev.Dispatch).model == NAME


def test_a_name_that_was_loaded_and_is_not_listed_is_drift_and_is_loaded_again() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.hold("a", "r1")
    bench.tick(1)
    bench.scrape("r1", [])
    assert bench.replica("r1").drift == {"registration_lost": 1}
    assert bench.counter("drift:registration_lost") == 1
    assert bench.registration("a", "r1").state == "absent"
    bench.arrive("a")
    bench.only(ev.Load)


def test_a_listing_that_began_before_a_load_ended_does_not_deny_it() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.feed(ev.LoadAsked(bench.now, "a", "r1"))
    began = bench.now
    bench.feed(ev.ScrapeStarted(began, "r1"))
    bench.tick(1)
    bench.done("r1")
    bench.tick(1)
    bench.feed(ev.ReplicaSampled(bench.now, "r1", began, 0, 0, 0.0, None, (), ()))
    assert bench.registration("a", "r1").state == "registered"
    assert bench.replica("r1").drift == {}


def test_requests_that_wait_for_a_load_which_turns_out_unneeded_are_sent() -> None:
    bench = Bench(fleet_of(1, [adapter("a"), adapter("b")]))
    bench.arrive("b")
    waiting = bench.arrive("a")  # wanted behind the load of b
    bench.tick(1)
    bench.scrape("r1", [NAME])
    sent = bench.only(ev.Dispatch)
    assert (sent.request, sent.model) == (waiting, NAME)
    assert list(bench.replica("r1").wanted) == []


def test_an_old_name_does_not_end_the_wish_for_a_verified_one() -> None:
    bench = Bench(fleet_of(2, [adapter("a"), adapter("b")]))
    for name in ("r1", "r2"):
        bench.hold("a", name)
    bench.arrive("a")
    killed = bench.only(ev.Dispatch).replica
    alive = {"r1": "r2", "r2": "r1"}[killed]
    bench.feed(ev.LoadAsked(bench.now, "b", alive))
    bench.tick(1)
    bench.down(killed)
    bench.fail_attempt("q1")
    assert list(bench.replica(alive).wanted) == ["a"]
    bench.tick(1)
    bench.scrape(alive, [NAME])
    assert not bench.all(ev.Dispatch)
    bench.done(alive)
    assert bench.only(ev.Load).engine_name == f"{NAME}~2"


@pytest.mark.parametrize(
    ("event", "counted"),
    [
        (ev.LoadObserved(0, "r1", NAME, 1), 0),
        (ev.ActivationObserved(0, "r1", "b@000000000000", 1), 1),
        (ev.EvictionObserved(0, "r1", NAME, "gpu"), 1),
        (ev.EvictionObserved(0, "r1", NAME, "host"), 1),
        (ev.EvictionObserved(0, "r1", "b@000000000000", "host"), 0),
    ],
)
def test_what_the_engine_reports_of_its_tiers_is_drift_only_if_it_contradicts(event: ev.Event, counted: int) -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.hold("a", "r1")
    bench.feed(event)
    assert bench.counter("drift:residency") == counted


def test_an_eviction_that_the_engine_reports_is_believed() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.hold("a", "r1")
    bench.feed(ev.EvictionObserved(bench.now, "r1", NAME, "gpu"))
    bench.arrive("a")
    assert bench.only(ev.Dispatch).decision.hit_class == "host"
    bench.feed(ev.EvictionObserved(bench.now, "r1", NAME, "host"))
    bench.arrive("a")
    assert bench.only(ev.Dispatch).decision.hit_class == "disk"


# --- coming, going, restarting ----------------------------------------------------------------------------------------


def test_a_blip_loses_no_belief_and_is_no_drift() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.hold("a", "r1")
    bench.down("r1")
    assert bench.registration("a", "r1").state == "unknown"
    bench.tick(1)
    bench.up("r1", [NAME])
    assert bench.registration("a", "r1").state == "registered"
    assert bench.replica("r1").drift == {}
    bench.arrive("a")
    assert bench.only(ev.Dispatch).decision.hit_class == "gpu"


def test_a_restart_empties_the_account_of_the_replica_at_once() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.hold("a", "r1")
    bench.up("r1", start=2)
    assert bench.registration("a", "r1").state == "absent"
    assert bench.replica("r1").tiers.host == {}
    assert bench.counter("engine_restarts") == 1
    bench.arrive("a")
    assert bench.only(ev.Load).engine_name == NAME  # a new process knows no names: nothing to avoid


def test_without_a_process_start_an_outage_counts_as_a_restart() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]), up=False)
    bench.up("r1", start=None)
    bench.hold("a", "r1")
    bench.down("r1")
    bench.up("r1", [], start=None)
    assert bench.replica("r1").tiers.host == {}


def test_requests_that_wait_for_a_load_move_when_its_replica_goes() -> None:
    bench = Bench(fleet_of(2, [adapter("a")]))
    bench.arrive("a")
    where = bench.only(ev.Load).replica
    bench.tick(1)
    bench.down(where)
    assert bench.only(ev.Load).replica != where
    assert bench.only(ev.Queue).request == "q1"


def test_a_sample_of_a_replica_that_is_down_is_ignored() -> None:
    bench = Bench(fleet_of(1))
    bench.down("r1")
    bench.scrape("r1", running=5)
    assert bench.replica("r1").running is None
    assert bench.replica("r1").foreign == 0


def test_only_what_exceeds_our_own_work_at_the_scrapes_start_is_foreign() -> None:
    bench = Bench(fleet_of(1))
    for _ in range(3):
        bench.arrive()
    bench.feed(ev.ScrapeStarted(bench.now, "r1"))
    mark = bench.now
    for _ in range(2):
        bench.arrive()  # sent after the scrape began: not in its answer
    bench.finish("q1")
    bench.tick(5)
    bench.feed(ev.ReplicaSampled(bench.now, "r1", mark, 4, 1, 0.5, 10_000))
    assert bench.replica("r1").foreign == 2
    assert bench.replica("r1").kv_tokens == 10_000
    own = sum(r.prompt + r.expect for r in bench.fleet.state.requests.values()) * 3 // 4
    assert bench.replica("r1").foreign_kv == 5_000 - own


# --- adapters that should be held at all times ------------------------------------------------------------------------


def test_desired_adapters_are_loaded_where_they_should_be_held_and_nowhere_else() -> None:
    bench = Bench(fleet_of(4, [adapter("all", replicas=-1), adapter("two", replicas=2), adapter("none")]))
    for _ in range(4):
        for name in bench.fleet.state.replicas:
            if bench.replica(name).loading is not None:
                bench.done(name)
    held = Counter(
        name
        for state in bench.fleet.state.replicas.values()
        for name, registration in state.registrations.items()
        if registration.state == "registered"
    )
    assert held == {"all": 4, "two": 2}


def test_a_desired_adapter_is_loaded_again_after_a_restart() -> None:
    bench = Bench(fleet_of(2, [adapter("a", replicas=-1)]))
    for name in ("r1", "r2"):
        bench.done(name)
    bench.down("r2")
    assert loads(bench) == []
    bench.up("r2", start=2)
    assert loads(bench) == [("r2", "a")]
    bench.arrive("a")
    assert bench.only(ev.Dispatch).replica == "r1"


def test_a_desired_adapter_moves_to_another_replica_while_its_own_is_away() -> None:
    bench = Bench(fleet_of(3, [adapter("a", replicas=1)]), up=False)
    for name in ("r1", "r2", "r3"):
        bench.up(name)
    where = next(name for name in ("r1", "r2", "r3") if bench.replica(name).loading)
    bench.done(where)
    bench.tick(1)
    bench.down(where)
    ((second, _),) = loads(bench)
    assert second != where
    bench.done(second)
    bench.feed(ev.DrainAsked(bench.now, second, True))
    ((third, _),) = loads(bench)
    assert third not in (where, second)


def test_a_desired_adapter_that_vanished_from_a_listing_is_loaded_again() -> None:
    bench = Bench(fleet_of(1, [adapter("a", replicas=1)]))
    bench.done("r1")
    bench.tick(1)
    bench.scrape("r1", [])
    assert loads(bench) == [("r1", "a")]


def test_a_desired_load_that_failed_is_tried_again_when_its_pause_is_over() -> None:
    bench = Bench(fleet_of(1, [adapter("a", replicas=1)]))
    bench.failed("r1")
    assert bench.wake_at == bench.now + Limits().load_backoff
    assert bench.feed(ev.Wake(bench.now)) == []
    bench.wake()
    assert loads(bench) == [("r1", "a")]


def test_a_desired_adapter_that_was_parked_comes_back_by_itself() -> None:
    bench = Bench(fleet_of(2, [adapter("a", replicas=-1)]))
    for name in ("r1", "r2"):
        bench.done(name)
    bench.tick(1)
    bench.arrive("a")
    killed = bench.only(ev.Dispatch).replica
    bench.down(killed)
    bench.fail_attempt("q1")
    bench.tick(1)
    bench.down(
        next(name for name in ("r1", "r2") if name != killed)
    )  # while it loads the adapter anew: the second exit
    parked_until = bench.adapter("a").parked_until
    assert bench.only(ev.Reject).code == "adapter_parked"
    bench.up(killed, start=2)
    for _ in range(4):
        assert bench.wake_at is not None
        if bench.wake():
            break
    assert bench.now == parked_until
    assert len(loads(bench)) == 1


def test_an_operator_may_unload_a_desired_adapter_and_the_kernel_waits_quietly_for_that() -> None:
    bench = Bench(fleet_of(1, [adapter("a", replicas=1)]))
    bench.done("r1")
    bench.feed(ev.UnloadAsked(bench.now, "a", "r1"))
    unload = bench.only(ev.Evict)
    assert bench.feed(ev.Wake(bench.now)) == []
    assert bench.wake_at is None  # asking to be woken at once, again and again, would keep a processor busy
    bench.feed(ev.CommandDone(bench.now, unload.id, 1))
    assert bench.only(ev.Load).engine_name == f"{NAME}~2"  # it should be held at all times


@pytest.mark.parametrize("replicas", [1, -1])
def test_pinning_an_adapter_whose_files_stay_the_same_loads_it(replicas: int) -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.declare(adapter("a", replicas=replicas))
    assert loads(bench) == [("r1", "a")]
    bench.declare(adapter("a"))
    assert bench.fleet.state.desired == {}


def test_a_desired_adapter_with_new_files_is_replaced_even_in_the_middle_of_a_load() -> None:
    bench = Bench(fleet_of(1, [adapter("a", replicas=1)]))
    bench.declare(adapter("a", "bb22", replicas=1))
    bench.done("r1")
    assert bench.only(ev.Evict).engine_name == NAME
    assert bench.only(ev.Load).engine_name == ev.engine_name("a", digest("bb22"))


def test_a_desired_adapter_is_not_loaded_where_its_rank_does_not_fit() -> None:
    bench = Bench(fleet_of([replica("r1", max_rank=8), replica("r2")], [adapter("a", replicas=-1)]))
    assert bench.replica("r1").loading is None
    assert bench.replica("r2").loading == "a"


# --- draining ---------------------------------------------------------------------------------------------------------


def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has() -> None:
    bench = Bench(fleet_of(2, policy="round-robin"))
    bench.arrive()
    bench.arrive()
    bench.feed(ev.DrainAsked(bench.now, "r1", True))
    mine = next(iter(bench.replica("r1").in_flight))
    for _ in range(3):
        bench.arrive()
        assert bench.only(ev.Dispatch).replica == "r2"
    bench.first_token(mine)
    bench.finish(mine)
    assert bench.replica("r1").in_flight == {}


def test_queued_requests_go_to_a_replica_that_comes_back_from_draining() -> None:
    bench = Bench(fleet_of(1))
    bench.feed(ev.DrainAsked(bench.now, "r1", True))
    bench.arrive()
    assert bench.only(ev.Queue).reason == "no_replica"
    bench.tick(SECOND)
    bench.feed(ev.DrainAsked(bench.now, "r1", False))
    assert bench.only(ev.Dispatch).request == "q1"


def test_what_was_declared_while_a_replica_drained_is_loaded_when_it_comes_back() -> None:
    bench = Bench(fleet_of(1))
    bench.feed(ev.DrainAsked(bench.now, "r1", True))
    bench.declare(adapter("a", replicas=-1))
    assert loads(bench) == []
    bench.feed(ev.DrainAsked(bench.now, "r1", False))
    assert loads(bench) == [("r1", "a")]
