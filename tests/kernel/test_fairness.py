from __future__ import annotations

from loraledger import events as ev
from loraledger.kernel import fairness
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.settings import MS, ReplicaSpec, TenantSpec

from .bench import T0, Bench, adapter, fleet_of, replica

TENANTS = [TenantSpec("acme"), TenantSpec("duff")]


def bench_of(*replicas: ReplicaSpec, tenants: list[TenantSpec] = TENANTS) -> Bench:
    return Bench(fleet_of(replicas, [adapter("a"), adapter("b")], tenants))


def sent(bench: Bench) -> list[str]:
    return [command.replica for command in bench.all(ev.Dispatch)]


def flood(bench: Bench, count: int, model: str | None = None, prompt: int = 10) -> int:
    """``count`` requests of acme; how many were sent at once."""
    return sum(bool(bench.arrive(model, prompt=prompt) and sent(bench)) for _ in range(count))


def stream(bench: Bench, request: str, prompt: int = 10, took: int = 30 * MS) -> None:
    """A streamed request of duff, from its arrival to its end; its first token came after ``took`` ns."""
    bench.arrive(tenant="duff", prompt=prompt, id=request)
    bench.tick(took)
    bench.first_token(request)
    bench.finish(request, generated=50, itl=10 * MS)
    bench._count -= 1


def test_a_flood_leaves_seats_that_another_tenant_finds_free() -> None:
    bench = bench_of(replica("r1", max_seqs=18))
    assert flood(bench, 40) == 16
    for _ in range(2):
        bench.arrive(tenant="duff")
        assert sent(bench) == ["r1"]
    assert len(bench.replica("r1").in_flight) == 18
    bench.finish("q1")
    assert bench.all(ev.Dispatch) == []  # fewer are free than when the flood was alone


def test_two_floods_share_the_seats_and_each_has_its_first_at_once() -> None:
    bench = bench_of(replica("r1", max_seqs=17))
    for _ in range(20):
        bench.arrive()
        bench.arrive(tenant="duff")
    held = bench.replica("r1").holdings
    assert (held["acme"].seats, held["duff"].seats) == (8, 8)


def test_a_single_tenant_may_fill_the_engine_and_its_queue() -> None:
    bench = bench_of(replica("r1", max_seqs=8, max_in_flight=16), tenants=[TenantSpec("acme")])
    assert flood(bench, 20, prompt=5_000) == 16


def test_a_tenant_that_may_not_wait_is_not_held_back() -> None:
    bench = bench_of(replica("r1"), tenants=[TenantSpec("acme", queue=0), TenantSpec("duff")])
    assert flood(bench, 5, prompt=2_000) == 5


def test_prompts_beyond_a_step_wait_here_until_a_first_token_comes() -> None:
    bench = bench_of(replica("r1"))
    assert flood(bench, 5, prompt=400) == 3
    bench.arrive(tenant="duff", prompt=10)
    assert sent(bench) == ["r1"]
    bench.first_token("q1")
    assert [command.request for command in bench.all(ev.Dispatch)] == ["q4"]
    bench.finish("q2")
    assert [command.request for command in bench.all(ev.Dispatch)] == ["q5"]


def test_prompts_of_whole_answers_are_reckoned_to_go_through_at_the_prefill_rate() -> None:
    bench = bench_of(replica("r1", prefill_tokens_per_s=1_000))
    stream(bench, "s1")
    for _ in range(5):
        bench.arrive(prompt=400, stream=False)
    assert list(bench.replica("r1").in_flight) == ["q1", "q2", "q3"]
    bench.arrive(tenant="duff", prompt=400, stream=False)
    assert sent(bench) == ["r1"]
    assert bench.wake_at is not None
    assert 170 * MS < bench.wake_at - bench.now < 180 * MS  # 1,200 tokens are through up to 1,024
    for expected in ("q4", "q5"):
        bench.wake()
        assert [command.request for command in bench.all(ev.Dispatch)] == [expected]


def test_who_waits_for_whole_answers_is_asked_again_by_whatever_comes_first() -> None:
    bench = bench_of(replica("r1", prefill_tokens_per_s=1_000))
    stream(bench, "s1")
    for _ in range(4):
        bench.arrive(prompt=400, stream=False)
    assert bench.wake_at is not None
    bench.now = bench.wake_at + MS  # late, and then something else happens
    bench.arrive(tenant="duff", prompt=10)
    assert {command.request for command in bench.all(ev.Dispatch)} == {"q4", "q5"}


def test_who_waits_for_whole_answers_that_take_the_share_to_the_token_is_asked_again() -> None:
    bench = bench_of(replica("r1", prefill_tokens_per_s=fairness.WINDOW))
    stream(bench, "s1")
    for _ in range(2):
        bench.arrive(prompt=fairness.WINDOW, stream=False)
    assert list(bench.replica("r1").in_flight) == ["q1"]
    assert bench.wake_at == bench.now + 1
    bench.wake()
    assert bench.only(ev.Dispatch).request == "q2"


def test_whole_answers_are_not_held_back_for_their_prompts_where_no_stream_was_seen() -> None:
    bench = bench_of(replica("r1", prefill_tokens_per_s=1_000))
    for _ in range(5):
        bench.arrive(prompt=2_000, stream=False)
    assert len(bench.replica("r1").in_flight) == 5


def test_what_was_sent_while_nobody_streamed_is_not_held_against_a_tenant_later() -> None:
    bench = bench_of(replica("r1", prefill_tokens_per_s=1_000))
    for _ in range(5):
        bench.arrive(prompt=2_000, stream=False)
    stream(bench, "s1")
    bench.arrive(prompt=2_000, stream=False)
    assert sent(bench) == ["r1"]
    bench.arrive(prompt=2_000, stream=False)
    assert sent(bench) == []


def test_a_tenant_that_streamed_long_ago_holds_back_nobody() -> None:
    bench = bench_of(replica("r1", prefill_tokens_per_s=1_000))
    stream(bench, "s1")
    bench.tick(fairness.LATELY)
    for _ in range(5):
        bench.arrive(prompt=2_000, stream=False)
    assert len(bench.replica("r1").in_flight) == 5


def test_ones_own_streams_and_those_of_a_third_tenant_are_told_apart() -> None:
    bench = bench_of(replica("r1", prefill_tokens_per_s=1_000), tenants=[*TENANTS, TenantSpec("iris")])
    stream(bench, "s1")
    for tenant in ("iris", "acme", "acme"):
        bench.arrive(tenant=tenant, prompt=10)
    assert list(bench.replica("r1").streamers) == ["iris", "acme"]
    assert [fairness.beside(bench.replica("r1"), name, bench.now) for name in ("iris", "acme", "duff")] == [True] * 3
    bench.finish("q1")
    bench.tick(fairness.LATELY)
    assert [fairness.beside(bench.replica("r1"), name, bench.now) for name in ("iris", "acme")] == [True, False]


def test_a_stream_counts_as_long_as_it_lasts() -> None:
    bench = bench_of(replica("r1", prefill_tokens_per_s=1_000))
    bench.arrive(tenant="duff", id="s1")
    bench.tick(3 * fairness.LATELY)
    for _ in range(3):
        bench.arrive(prompt=2_000, stream=False)
    assert bench.replica("r1").holdings["acme"].seats == 1
    bench.finish("s1")
    bench.tick(fairness.LATELY)
    bench.arrive(prompt=2_000, stream=False)
    assert bench.replica("r1").holdings["acme"].seats > 1


def test_who_waits_is_asked_again_when_others_streams_are_long_ago() -> None:
    bench = bench_of(replica("r1", prefill_tokens_per_s=1_000))
    stream(bench, "s1")
    bench.arrive(prompt=200_000, stream=False)
    bench.arrive(prompt=10, stream=False)
    assert bench.all(ev.Dispatch) == []
    while bench.wake_at is not None and bench.now < T0 + 2 * fairness.LATELY and not bench.all(ev.Dispatch):
        bench.wake()
    assert bench.only(ev.Dispatch).request == "q2"


def test_a_whole_answer_that_came_is_reckoned_no_more() -> None:
    bench = bench_of(replica("r1", prefill_tokens_per_s=1_000))
    stream(bench, "s1")
    bench.arrive(prompt=10, stream=False)
    bench.arrive(prompt=5_000, stream=False)
    bench.arrive(prompt=5_000, stream=False)
    assert list(bench.replica("r1").in_flight) == ["q1", "q2"]
    bench.tick(MS)
    bench.finish("q2")
    assert [command.request for command in bench.all(ev.Dispatch)] == ["q3"]


def test_where_seats_are_few_a_flood_leaves_more_of_them_once_another_tenant_streams() -> None:
    bench = bench_of(replica("r1", max_seqs=16))
    assert flood(bench, 40) == 15
    alone = bench.replica("r1").holdings["acme"].seats
    bench.arrive(tenant="duff", id="s1")
    assert sent(bench) == ["r1"]
    for number in range(1, 6):
        bench.finish(f"q{number}")
    held = bench.replica("r1").holdings
    assert (alone, held["acme"].seats, held["duff"].seats) == (15, 11, 1)
    for _ in range(4):
        bench.arrive(tenant="duff")
        assert sent(bench) == ["r1"]


def test_where_seats_are_what_is_short_nobody_is_woken_for_prompts() -> None:
    bench = bench_of(replica("r1", max_seqs=9, prefill_tokens_per_s=1_000))
    for _ in range(12):
        bench.arrive(prompt=10, stream=False)
    assert len(bench.replica("r1").in_flight) == 8
    deadline = TENANTS[0].queue_deadline
    assert bench.wake_at is None or bench.wake_at >= bench.now + deadline


def test_a_prompt_larger_than_a_step_is_sent_alone() -> None:
    bench = bench_of(replica("r1"))
    assert flood(bench, 2, prompt=50_000) == 1


def test_a_flood_leaves_kv_that_another_tenant_finds_free() -> None:
    bench = bench_of(replica("r1", kv_tokens=9_000))
    for n in range(1, 30):
        bench.arrive(prompt=300, max_tokens=100)
        if sent(bench):
            bench.first_token(f"q{n}")
    assert bench.replica("r1").holdings["acme"].kv == 8_000
    bench.arrive(tenant="duff", prompt=300, max_tokens=100)
    assert sent(bench) == ["r1"]


def test_who_is_held_back_goes_where_the_adapter_is_in_a_slot() -> None:
    bench = bench_of(replica("r1"), replica("r2"))
    bench.hold("a", "r1")
    assert flood(bench, 2, "a", prompt=2_000) == 1
    bench.hold("a", "r2")
    assert [(command.request, command.replica) for command in bench.all(ev.Dispatch)] == [("q2", "r2")]


def test_a_load_elsewhere_is_paid_only_by_who_was_held_back_for_long() -> None:
    bench = bench_of(replica("r1"), replica("r2"))
    bench.hold("a", "r1")
    assert flood(bench, 2, "a", prompt=2_000) == 1
    assert bench.all(ev.Load) == []
    bench.tick(fairness.PATIENCE)
    bench.scrape("r2")
    assert [command.replica for command in bench.all(ev.Load)] == ["r2"]


def test_nothing_is_held_back_where_the_adapters_in_flight_take_all_slots() -> None:
    bench = bench_of(replica("r1", slots=2))
    bench.hold("a", "r1")
    bench.hold("b", "r1")
    bench.arrive("b", tenant="duff")
    assert flood(bench, 4, "a", prompt=2_000) == 4


def test_a_snapshot_from_before_shares_were_counted_is_counted_anew() -> None:
    bench = bench_of(replica("r1"))
    bench.hold("a", "r1")
    flood(bench, 3, "a", prompt=300)
    bench.first_token("q1")
    counted = bench.replica("r1").holdings
    state = Fleet.restore(bench.settings, bench.fleet.snapshot()).state
    state.replicas["r1"].holdings = {}
    for request in state.requests.values():
        request.ahead = False
    assert Fleet(bench.settings, state).state.replicas["r1"].holdings == counted
