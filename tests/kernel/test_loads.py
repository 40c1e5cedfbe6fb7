from __future__ import annotations

import pytest

from loraledger import events as ev
from loraledger.kernel.loads import FOREVER
from loraledger.kernel.settings import MS, SECOND, Limits

from .bench import Bench, adapter, digest, fleet_of, replica


def test_requests_for_one_adapter_share_its_load() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.arrive("a")
    load = bench.only(ev.Load)
    assert (load.adapter, load.engine_name) == ("a", ev.engine_name("a", digest("aa11")))
    for _ in range(4):
        bench.arrive("a")
        assert [type(command) for command in bench.commands] == [ev.Queue]
    bench.done("r1")
    assert [command.request for command in bench.all(ev.Dispatch)] == ["q1", "q2", "q3", "q4", "q5"]
    assert {command.model for command in bench.all(ev.Dispatch)} == {load.engine_name}
    assert {command.decision.hit_class for command in bench.all(ev.Dispatch)} == {"disk"}
    bench.arrive("a")
    assert bench.only(ev.Dispatch).decision.hit_class == "gpu"


def test_a_replica_loads_one_adapter_at_a_time_in_the_order_wanted() -> None:
    bench = Bench(fleet_of(1, [adapter(name) for name in "abc"]))
    for name in "abc":
        bench.arrive(name)
    assert bench.replica("r1").loading == "a"
    assert list(bench.replica("r1").wanted) == ["b", "c"]
    bench.done("r1")
    assert bench.only(ev.Load).adapter == "b"
    assert bench.only(ev.Dispatch).request == "q1"
    bench.failed("r1")
    assert bench.only(ev.Load).adapter == "c"


def test_replicas_load_at_the_same_time() -> None:
    bench = Bench(fleet_of(2, [adapter("a", replicas=-1)]))
    assert {bench.replica(name).loading for name in ("r1", "r2")} == {"a"}


def test_a_passing_failure_backs_off_twice_as_long_each_time_up_to_a_limit() -> None:
    limits = Limits(load_backoff=SECOND, load_backoff_max=5 * SECOND)
    bench = Bench(fleet_of(1, [adapter("a")], limits=limits))
    for pause in (1, 2, 4, 5, 5):
        bench.arrive("a")
        bench.failed("r1", "engine busy")
        refused = bench.only(ev.Reject)
        assert (refused.code, refused.http_status, refused.retry_after) == ("adapter_load_failed", 503, pause * SECOND)
        assert "engine busy" in refused.message
        bench.tick(pause * SECOND - 1)
        bench.arrive("a")
        assert bench.only(ev.Reject).retry_after == 1
        bench.tick(1)
    bench.arrive("a")
    bench.done("r1")
    bench.feed(ev.UnloadAsked(bench.now, "a", "r1"))
    bench.feed(ev.CommandDone(bench.now, bench.registration("a", "r1").command, 1))
    bench.arrive("a")
    bench.failed("r1")
    assert bench.only(ev.Reject).retry_after == SECOND  # a success forgets the failures before it


def test_a_permanent_failure_is_not_tried_again_until_the_files_change() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.arrive("a")
    bench.failed("r1", "rank 64 > 16", permanent=True)
    assert bench.only(ev.Reject).retry_after is None
    assert bench.registration("a", "r1").retry_at == FOREVER
    bench.tick(1_000_000 * SECOND)
    bench.arrive("a")
    assert bench.only(ev.Reject).message == "no replica can load the adapter: rank 64 > 16"
    bench.declare(adapter("a"))
    bench.arrive("a")
    bench.only(ev.Reject)
    bench.declare(adapter("a", "bb22"))
    bench.arrive("a")
    assert bench.only(ev.Load).engine_name == ev.engine_name("a", digest("bb22"))


def test_a_permanent_failure_is_tried_again_by_another_engine_process() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.arrive("a")
    bench.failed("r1", permanent=True)
    bench.up("r1", start=2)
    bench.arrive("a")
    bench.only(ev.Load)


def test_a_failed_load_moves_its_waiters_to_another_replica_once() -> None:
    bench = Bench(fleet_of(3, [adapter("a")], policy="strict-affinity"))
    bench.arrive("a")
    first = bench.only(ev.Load).replica
    bench.arrive("a")
    bench.failed(first)
    second = bench.only(ev.Load).replica
    assert second != first
    assert len(bench.all(ev.Queue)) == 2
    bench.failed(second, "disk full")
    refused = bench.all(ev.Reject)
    assert [command.request for command in refused] == ["q1", "q2"]
    assert {command.code for command in refused} == {"adapter_load_failed"}
    assert all("disk full" in command.message for command in refused)
    assert not bench.all(ev.Load)


def test_an_adapter_whose_rank_fits_no_replica_is_refused_without_a_load() -> None:
    bench = Bench(fleet_of([replica("r1", max_rank=16), replica("r2", max_rank=32)], [adapter("a", rank=64)]))
    bench.arrive("a")
    refused = bench.only(ev.Reject)
    assert refused.message == "no replica can load the adapter: rank 64 > 16; rank 64 > 32"


def test_an_adapter_goes_only_where_its_rank_fits() -> None:
    bench = Bench(fleet_of([replica("r1", max_rank=16), replica("r2")], [adapter("a", rank=32)], policy="round-robin"))
    for _ in range(4):
        bench.arrive("a")
    assert bench.replica("r1").loading is None
    assert bench.replica("r2").loading == "a"


def test_a_name_is_never_used_twice_while_its_bytes_may_linger() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    first = bench.hold("a", "r1")
    bench.feed(ev.UnloadAsked(bench.now, "a", "r1"))
    unload = bench.only(ev.Evict)
    assert unload.engine_name == first
    bench.feed(ev.CommandDone(bench.now, unload.id, MS))
    second = bench.hold("a", "r1")
    assert second == f"{first}~2"
    assert list(bench.replica("r1").tiers.active) == [first, second]  # the engine keeps both copies


def test_a_load_whose_waiters_do_not_fit_any_more_places_them_anew() -> None:
    bench = Bench(fleet_of([replica("r1", max_in_flight=2)], [adapter("a")]))
    for _ in range(3):
        bench.arrive("a")
    bench.done("r1")
    assert [command.request for command in bench.all(ev.Dispatch)] == ["q1", "q2"]
    assert bench.only(ev.Queue).reason == "no_capacity"
    bench.finish("q1")
    assert bench.only(ev.Dispatch).request == "q3"


def test_a_load_that_ends_after_its_replica_began_to_drain_is_not_used() -> None:
    bench = Bench(fleet_of(2, [adapter("a")]))
    bench.arrive("a")
    where = bench.only(ev.Load).replica
    bench.feed(ev.DrainAsked(bench.now, where, True))
    bench.done(where)
    assert bench.only(ev.Load).replica != where
    assert not bench.all(ev.Dispatch)


def test_a_request_waits_for_its_load_until_its_deadline_at_most() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.arrive("a")
    bench.wake()
    assert bench.only(ev.Reject).code == "load_deadline"
    bench.arrive("a")  # joins the same load
    assert not bench.all(ev.Load)
    bench.done("r1")
    assert [command.request for command in bench.all(ev.Dispatch)] == ["q2"]


def test_an_answer_to_a_command_of_a_former_process_means_nothing() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.arrive("a")
    old = bench.only(ev.Load).id
    bench.up("r1", start=2)
    new = bench.only(ev.Load).id
    assert bench.feed(ev.CommandDone(bench.now, old, 1)) == []
    assert bench.feed(ev.CommandFailed(bench.now, old, "gone", True)) == []
    bench.feed(ev.CommandDone(bench.now, new, 1))
    bench.only(ev.Dispatch)


def test_new_files_during_a_load_are_what_its_waiters_get() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.arrive("a")
    old = bench.only(ev.Load)
    bench.declare(adapter("a", "bb22"))
    assert bench.commands == []
    bench.arrive("a")
    bench.feed(ev.CommandDone(bench.now, old.id, 1))
    assert bench.only(ev.Evict).engine_name == old.engine_name
    assert bench.only(ev.Load).engine_name == ev.engine_name("a", digest("bb22"))
    bench.done("r1")
    assert {command.model for command in bench.all(ev.Dispatch)} == {ev.engine_name("a", digest("bb22"))}
    assert len(bench.all(ev.Dispatch)) == 2


def test_what_the_old_files_did_is_not_held_against_the_new_ones() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.arrive("a")
    old = bench.only(ev.Load).id
    bench.declare(adapter("a", "bb22"))
    bench.feed(ev.CommandFailed(bench.now, old, "bad weights", True))
    assert bench.only(ev.Load).engine_name == ev.engine_name("a", digest("bb22"))
    bench.done("r1")
    bench.only(ev.Dispatch)


def test_new_files_take_over_a_load_that_was_not_sent_yet() -> None:
    bench = Bench(fleet_of(1, [adapter("a"), adapter("b")]))
    bench.arrive("a")
    bench.arrive("b")
    bench.declare(adapter("b", "bb22"))
    bench.done("r1")
    assert bench.only(ev.Load).engine_name == ev.engine_name("b", digest("bb22"))
    bench.done("r1")
    assert bench.only(ev.Dispatch).request == "q2"


@pytest.mark.parametrize("sent", [True, False])
def test_who_waits_for_an_adapter_that_is_withdrawn_is_refused(sent: bool) -> None:
    bench = Bench(fleet_of(1, [adapter("a"), adapter("b")]))
    if not sent:
        bench.arrive("b")
    waiting = bench.arrive("a")
    bench.feed(ev.AdapterRetired(bench.now, "a"))
    if sent:
        bench.done("r1")
        assert bench.only(ev.Evict).adapter == "a"
    refused = bench.only(ev.Reject)
    assert (refused.request, refused.http_status, refused.code) == (waiting, 404, "model_not_found")
    bench.scrape("r1", [ev.engine_name("a", digest("aa11"))])
    assert "a" not in bench.replica("r1").registrations


def test_an_operator_may_have_a_parked_adapter_tried_again() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.arrive("a")
    bench.failed("r1", permanent=True)
    bench.feed(ev.LoadAsked(bench.now, "a", "r1"))
    bench.only(ev.Load)
    bench.done("r1")
    assert bench.registration("a", "r1").reason is None
    bench.feed(ev.LoadAsked(bench.now, "a", "r1"))
    assert bench.commands == []  # it is there


def test_an_unload_that_fails_leaves_the_adapter_registered() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]))
    bench.hold("a", "r1")
    bench.feed(ev.UnloadAsked(bench.now, "a", "r1"))
    bench.arrive("a")
    assert bench.only(ev.Queue).reason == "no_capacity"
    bench.feed(ev.CommandFailed(bench.now, bench.registration("a", "r1").command, "busy", False))
    assert bench.only(ev.Dispatch).request == "q1"


def test_measured_loads_correct_the_expected_duration() -> None:
    bench = Bench(fleet_of(1, [adapter(name, bytes=10_000_000) for name in "abcdefgh"]))
    spec = bench.replica("r1").spec
    prior = spec.load_overhead + 10_000_000 * SECOND // spec.load_bytes_per_s
    for name in "abcdefg":
        bench.feed(ev.LoadAsked(bench.now, name, "r1"))
        bench.done("r1", took=2 * prior)
    bench.feed(ev.LoadAsked(bench.now, "h", "r1"))
    assert 1.6 * prior < bench.loading("r1").expected - spec.activation < 1.8 * prior
