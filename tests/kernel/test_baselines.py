from __future__ import annotations

from collections import Counter
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from conductor.desk import T0 as START
from loraledger import events as ev
from loraledger.conductor.reading import verify
from loraledger.errors import ConfigError
from loraledger.kernel.cost import load_waiters
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.policies import make_policy, policy_names
from loraledger.kernel.rendezvous import seed_of, weight
from loraledger.kernel.settings import MS, SECOND, TenantSpec
from loraledger.kernel.state import RequestState
from loraledger.record.journal import Journal
from replay.fleets import adapters, settings_for, virtual, zipf_trace

from .bench import Bench, adapter, fleet_of, replica

MANY = [TenantSpec("acme", 10_000)]
NAMES = [f"adapter-{n}" for n in range(24)]


def order(name: str, replicas: int) -> list[str]:
    """All replicas, the one of highest rendezvous weight first."""
    return sorted((f"r{n + 1}" for n in range(replicas)), key=lambda r: -weight(seed_of(name), seed_of(r)))


def decided(bench: Bench, request: str) -> ev.Decision:
    decision = bench.fleet.state.requests[request].decision
    assert decision is not None
    return decision


def send(bench: Bench, name: str | None, prompt: int = 100, max_tokens: int | None = 50) -> str:
    """One request, its load carried out at once; the replica."""
    request = bench.arrive(name, prompt=prompt, max_tokens=max_tokens)
    where = decided(bench, request).replica
    if bench.replica(where).loading is not None:
        bench.done(where)
    return where


def pick(bench: Bench, name: str | None, among: list[str] | None = None) -> str:
    """What the policy would say now, without sending anything."""
    state = bench.fleet.state
    request = RequestState("probe", "acme", name, 100, 50, bench.now, bench.now + SECOND)
    feasible = [state.replicas[r] for r in among or state.replicas]
    chosen = bench.fleet.policy.choose(state, request, None if name is None else state.adapters[name], feasible)
    return chosen.candidates[0].replica


# --- all policies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", policy_names())
@given(data=st.data())
@examples(max_examples=12, deadline=None)
def test_every_policy_takes_one_of_the_feasible_and_the_same_after_a_restart(policy: str, data: st.DataObject) -> None:
    bench = Bench(fleet_of(4, [adapter(name) for name in NAMES[:6]], MANY, policy))
    for _ in range(data.draw(st.integers(0, 12))):
        bench.tick(data.draw(st.sampled_from([0, 50 * MS, 4 * SECOND])))
        send(bench, data.draw(st.sampled_from([*NAMES[:6], None])))
    state = bench.fleet.state
    names = data.draw(st.lists(st.sampled_from(list(state.replicas)), min_size=1, unique=True))
    name = data.draw(st.sampled_from([*NAMES[:6], None]))
    chosen = pick(bench, name, names)
    assert chosen in names
    bench.fleet = Fleet.restore(bench.settings, bench.fleet.snapshot())
    assert pick(bench, name, names) == chosen


@pytest.mark.parametrize("policy", policy_names())
def test_a_journal_of_every_policy_is_replayed_to_the_same_commands(policy: str, tmp_path: Path) -> None:
    fleet = virtual(settings_for(3, adapters(12), policy), start=START)
    with Journal.open(tmp_path, 80 * 1024, fleet.conductor.head) as journal:
        fleet.conductor.journal = journal
        fleet.run(zipf_trace(150, 12, 40, seed=3, base_share=0.1))
    seen = verify(tmp_path)
    assert seen.difference is None
    assert seen.commands >= 150
    assert seen.segments > 1  # the state went through a snapshot


@pytest.mark.parametrize(
    ("policy", "params", "words"),
    [
        ("bounded-hash", {"factor": 0.9}, "policy.params.factor: 0.9 must be from 1 to 100"),
        ("bounded-hash", {"virtual_nodes": 0.0}, "policy.params.virtual_nodes: 0 must be from 1 to 10000"),
        ("llm-d-lora", {"kv_weight": -1.0}, "policy.params.kv_weight: -1 must be from 0 to 1000"),
        ("bounded-hash", {"factor": 101.0}, "policy.params.factor: 101 must be from 1 to 100"),
        ("dynamo-lora", {"tick_s": 0.0}, "policy.params.tick_s: 0 must be from 0.1 to 3600"),
        ("dynamo-lora", {"ema_alpha": float("nan")}, "policy.params.ema_alpha: nan must be from 0.01 to 1"),
    ],
)
def test_a_parameter_out_of_bounds_is_refused_with_the_bounds(
    policy: str, params: dict[str, float], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_policy(fleet_of(policy=policy, params=params))
    assert words in caught.value.message
    assert caught.value.param == f"policy.params.{next(iter(params))}"


@pytest.mark.parametrize("policy", policy_names())
def test_the_defaults_are_within_their_bounds(policy: str) -> None:
    known = make_policy(fleet_of(policy=policy))
    make_policy(fleet_of(policy=policy, params=dict(known.defaults)))
    assert getattr(known, "bounds", known.defaults).keys() == known.defaults.keys()


# --- consistent hash with bounded loads -------------------------------------------------------------------------------


def hashed(replicas: int = 4, **params: float) -> Bench:
    return Bench(fleet_of(replicas, [adapter(name) for name in NAMES], MANY, "bounded-hash", params=params))


def test_an_idle_fleet_gives_each_adapter_its_home_on_the_ring() -> None:
    homes = {name: pick(hashed(), name) for name in NAMES}
    assert len(set(homes.values())) == 4
    bench = hashed()
    for name in NAMES[:8]:
        request = bench.arrive(name)
        assert decided(bench, request).replica == homes[name]
        assert decided(bench, request).reason == "ring home"
        bench.done(homes[name])
        bench.finish(request)


def test_no_replica_takes_more_than_the_bound_and_the_next_on_the_ring_takes_the_rest() -> None:
    bench, used = hashed(), Counter[str]()
    for sent in range(40):
        used[send(bench, "adapter-0")] += 1
        assert max(used.values()) <= ceil(1.25 * (sent + 1) / 4)
    assert len(used) == 4
    assert decided(bench, "q40").reason.endswith("passed on the ring: at the bound of 13 requests")


def test_a_wide_bound_is_plain_consistent_hashing() -> None:
    bench = hashed(factor=100.0)
    assert {send(bench, "adapter-0") for _ in range(30)} == {pick(hashed(), "adapter-0")}


def test_requests_that_wait_for_a_load_count_against_the_bound() -> None:
    bench = hashed(2)
    first = decided(bench, bench.arrive("adapter-0")).replica
    assert load_waiters(bench.replica(first)) == 1
    assert not bench.replica(first).in_flight
    # 1 of 2 is within ceil(1.25 * 2 / 2) = 2, a third would not be: ceil(1.25 * 3 / 2) = 2
    assert decided(bench, bench.arrive("adapter-0")).replica == first
    assert decided(bench, bench.arrive("adapter-0")).replica != first


def test_a_replica_that_leaves_moves_only_its_own_adapters_and_one_that_comes_takes_from_all() -> None:
    four, five = hashed(4), hashed(5)
    before = {name: pick(four, name) for name in NAMES}
    three = ["r1", "r2", "r4"]
    for name in NAMES:
        after = pick(four, name, three)
        assert after in three
        assert after == before[name] or before[name] == "r3"
        assert pick(five, name) in (before[name], "r5")


def test_virtual_nodes_even_the_ring_out() -> None:
    many = [adapter(f"x{n}") for n in range(400)]
    uneven = []
    for nodes in (1.0, 256.0):
        bench = Bench(fleet_of(4, many, MANY, "bounded-hash", params={"virtual_nodes": nodes}))
        homes = Counter(pick(bench, spec.name) for spec in many)
        uneven.append(max(homes.values()) / 100)
    assert uneven[1] < 1.35 < uneven[0]


def test_the_base_model_goes_in_turn_to_those_below_the_bound() -> None:
    bench = hashed(2)
    for _ in range(5):
        at(bench, None, "r1")
    assert [send(bench, None) for _ in range(3)] == ["r2"] * 3  # 5 of 6 are at the bound of 4, 5 and 5 requests
    bench = hashed(2)
    assert {send(bench, None), send(bench, None)} == {"r1", "r2"}


# --- llm-d's scorers --------------------------------------------------------------------------------------------------


def scored(replicas: int = 3, slots: int = 2, **params: float) -> Bench:
    specs = [replica(f"r{n + 1}", slots, 2 * slots, kv_tokens=100_000, max_seqs=4) for n in range(replicas)]
    return Bench(fleet_of(specs, [adapter(name) for name in NAMES], MANY, "llm-d-lora", params=params))


def at(bench: Bench, name: str | None, where: str) -> str:
    """Send a request to this replica, whatever the policy would say."""
    others = [r for r in bench.fleet.state.replicas if r != where]
    for other in others:
        bench.feed(ev.DrainAsked(bench.now, other, True))
    assert send(bench, name) == where
    for other in others:
        bench.feed(ev.DrainAsked(bench.now, other, False))
    return f"q{bench._count}"


def test_an_adapter_that_runs_somewhere_draws_its_requests_there() -> None:
    bench = scored()
    at(bench, "adapter-0", "r2")
    assert pick(bench, "adapter-0") == "r2"
    assert pick(bench, "adapter-1") != "r2"  # a free slot is a free slot, and more KV is free elsewhere


def test_an_adapter_that_is_loaded_and_idle_looks_absent_by_activity_and_not_by_residency() -> None:
    for residency, where in ((0.0, {"r1", "r3"}), (1.0, {"r2"})):
        bench = scored(residency=residency)
        request = at(bench, "adapter-0", "r2")
        bench.finish(request)
        at(bench, None, "r2")  # its KV makes r2 the last choice by load
        assert {pick(bench, "adapter-0")} <= where


def test_a_replica_where_it_waits_is_preferred_to_one_that_is_full() -> None:
    bench = scored(2)
    for name, where in (("adapter-1", "r1"), ("adapter-2", "r1"), ("adapter-3", "r2"), ("adapter-4", "r2")):
        at(bench, name, where)
    assert {pick(bench, "adapter-0")} <= {"r1", "r2"}
    at(bench, "adapter-0", "r2")
    assert list(bench.replica("r2").blocked) == ["adapter-0"]
    # .6 x 4 + 0 for the longer queue is more than 0 x 4 + 2 for the shorter; KV decides nothing
    assert pick(bench, "adapter-0") == "r2"


def test_a_free_slot_is_preferred_to_a_replica_where_it_waits() -> None:
    bench = scored(2, queue_weight=0.0, kv_weight=0.0)
    for name in NAMES[:3]:
        at(bench, name, "r1")
    assert list(bench.replica("r1").blocked) == ["adapter-2"]
    at(bench, "adapter-3", "r2")
    assert [pick(bench, name) for name in ("adapter-0", "adapter-2", "adapter-9")] == ["r1", "r2", "r2"]


def test_requests_that_wait_for_a_slot_are_a_queue() -> None:
    bench = scored(2, lora_weight=0.0, kv_weight=0.0)
    for name in NAMES[:3]:
        at(bench, name, "r1")
    at(bench, None, "r2")
    at(bench, None, "r2")
    at(bench, None, "r2")  # three in flight on four seats each; one of r1 waits
    assert {pick(bench, None), pick(bench, "adapter-0")} == {"r2"}


@pytest.mark.parametrize(("queue_weight", "where"), [(2.0, "r2"), (0.5, "r1")])
def test_the_longest_queue_outweighs_a_running_adapter_by_the_weights(queue_weight: float, where: str) -> None:
    bench = scored(2, queue_weight=queue_weight)
    at(bench, "adapter-0", "r1")
    for _ in range(6):  # seven on four seats
        at(bench, None, "r1")
    assert pick(bench, "adapter-0") == where  # 4 + 0 against 3.2 + the weight, and KV is nearly all free


def test_the_tiers_of_residency() -> None:
    bench = scored(4, residency=1.0, queue_weight=0.0, kv_weight=0.0)
    for request in [at(bench, "adapter-0", "r1"), at(bench, "adapter-0", "r2")]:
        bench.finish(request)
    for name in ("adapter-1", "adapter-2"):  # two slots, four host entries: adapter-0 stays on the host of r2
        bench.finish(at(bench, name, "r2"))
    assert pick(bench, "adapter-0") == "r1"
    assert pick(bench, "adapter-0", ["r2", "r3"]) == "r2"  # .7 on the host, .6 (+ .03 at home) for a free slot
    for name in ("adapter-3", "adapter-4"):
        bench.finish(at(bench, name, "r3"))
        at(bench, name, "r4")
    assert pick(bench, "adapter-0", ["r3", "r4"]) == "r3"  # .3 where the holders are idle, 0 where they run
    home = order("adapter-9", 4)[0]
    idle = scored(4, residency=1.0, queue_weight=0.0, kv_weight=0.0)
    assert pick(idle, "adapter-9") == home


def test_kv_in_use_decides_between_equals_and_says_nothing_where_it_is_unknown() -> None:
    bench = scored(2)
    bench.arrive(None, prompt=50_000)
    full = next(name for name, r in bench.fleet.state.replicas.items() if r.in_flight)
    assert pick(bench, None) != full
    assert decided(bench, "q1").reason == "score 4.00"
    blind = Bench(fleet_of(2, [], MANY, "llm-d-lora"))
    blind.arrive(None, prompt=50_000)
    assert decided(blind, "q1").reason == "score 2.00"


# --- Dynamo's copies by load share ------------------------------------------------------------------------------------


def shared(replicas: int = 4, slots: int = 4) -> Bench:
    specs = [replica(f"r{n + 1}", slots, 2 * slots) for n in range(replicas)]
    return Bench(fleet_of(specs, [adapter(name) for name in NAMES], MANY, "dynamo-lora"))


def test_an_adapter_that_was_never_asked_for_has_one_home() -> None:
    bench = shared()
    for name in NAMES[:8]:
        bench.arrive(name)
        assert decided(bench, f"q{bench._count}").replica == order(name, 4)[0]
        assert decided(bench, f"q{bench._count}").considered == 1


def test_a_hot_adapter_has_more_copies_after_the_next_tick_and_they_share_its_requests() -> None:
    bench = shared()
    for _ in range(20):
        assert send(bench, "adapter-0") == order("adapter-0", 4)[0]
        send(bench, "adapter-1")
    bench.tick(3 * SECOND)
    for _ in range(60):
        send(bench, "adapter-0")
    # Half of the load of sixteen slots is eight copies; there are four replicas, and 100 requests in hand.
    assert [len(r.in_flight) for r in bench.fleet.state.replicas.values()] == [25] * 4


def test_copies_follow_the_share_in_rendezvous_order() -> None:
    bench = shared(4, 1)
    for name, times in zip(
        NAMES[:3], (8, 4, 4), strict=True
    ):  # four slots: half of the load has two copies, a quarter one
        for _ in range(times):
            send(bench, name)
    bench.tick(3 * SECOND)
    used = {name: {send(bench, name) for _ in range(30)} for name in NAMES[:3]}
    assert used["adapter-0"] == set(order("adapter-0", 4)[:2])
    assert all(used[name] == {order(name, 4)[0]} for name in NAMES[1:3])


def test_an_adapter_goes_back_to_one_copy_when_its_requests_end() -> None:
    bench = shared()
    for _ in range(20):
        send(bench, "adapter-0")
    bench.tick(3 * SECOND)
    send(bench, "adapter-0")
    state = bench.fleet.state
    assert state.shares is not None
    assert state.shares.copies["adapter-0"] == 4
    bench.tick(900 * SECOND)
    bench.arrive("adapter-1")
    assert "adapter-0" not in state.shares.copies


def test_no_share_is_worked_out_while_nothing_is_up() -> None:
    bench = Bench(fleet_of(2, [adapter("a")], MANY, "dynamo-lora"), up=False)
    bench.arrive("a")
    bench.tick(3 * SECOND)
    bench.arrive("a")
    assert bench.fleet.state.shares is not None
    assert bench.fleet.state.shares.copies == {}
    bench.up("r2")
    assert bench.only(ev.Load).replica == "r2"


# --- Balanced-PANDAS --------------------------------------------------------------------------------------------------


def pandas(replicas: int = 3, size: int = 20_000_000) -> Bench:
    return Bench(fleet_of(replicas, [adapter(name, bytes=size) for name in NAMES], MANY, "balanced-pandas"))


def test_an_idle_fleet_goes_by_locality() -> None:
    bench = pandas(3)
    bench.hold("adapter-0", "r2")
    assert {pick(bench, "adapter-0")} == {"r2"}
    for n in range(1, 5):  # four slots: adapter-0 goes to the host
        bench.hold(f"adapter-{n}", "r2")
    assert bench.replica("r2").tiers.tier(bench.registration("adapter-0", "r2").engine_name) == "host"
    assert pick(bench, "adapter-0") == "r2"  # an activation is less than a load


def test_work_is_divided_by_the_rate_of_its_locality() -> None:
    bench = pandas(2)
    bench.hold("adapter-0", "r1")
    # s = 100/5000 s + 50 * 30 ms / 256 = 25.9 ms; a load is 30 ms + 20 MB / 200 MB/s + 10 ms activation = 140 ms
    rate = 25.9 / (25.9 + 140)
    bench.arrive(None, prompt=1000, max_tokens=1)  # 0.2 s of prefill on one of them, in turn on r1
    assert decided(bench, "q1").replica == "r1"
    assert pick(bench, "adapter-0") == "r2"  # nothing over any rate is nothing
    bench.arrive("adapter-1", prompt=100, max_tokens=1)
    assert decided(bench, "q2").replica == "r2"
    bench.done("r2")
    work = {name: r.prefill_out / 5000 + r.stall_out / SECOND for name, r in bench.fleet.state.replicas.items()}
    assert work["r1"] == pytest.approx(0.2)
    assert work["r2"] == pytest.approx(0.02)
    assert work["r2"] / rate < work["r1"]
    assert pick(bench, "adapter-0") == "r2"
    bench.arrive(None, prompt=100, max_tokens=1)
    assert decided(bench, "q3").replica == "r2"  # the base model has one rate everywhere
    assert 0.04 / rate > work["r1"]
    assert pick(bench, "adapter-0") == "r1"  # 0.256 s at the slower rate, 0.2 s at the faster


def test_a_load_on_its_way_counts_as_work_and_draws_its_own_adapter() -> None:
    bench = pandas(2)
    first = decided(bench, bench.arrive("adapter-0")).replica
    assert bench.replica(first).loading == "adapter-0"
    assert pick(bench, "adapter-1") != first
    other = next(r for r in ("r1", "r2") if r != first)
    bench.arrive("adapter-3")
    assert decided(bench, "q2").replica == other
    assert pick(bench, "adapter-0") == first


def test_loads_and_those_who_wait_for_them_are_work() -> None:
    bench = pandas(2)
    bench.feed(ev.LoadAsked(bench.now, "adapter-0", "r1"))
    assert {pick(bench, None), pick(bench, "adapter-1")} == {"r2"}
    bench.feed(ev.LoadAsked(bench.now, "adapter-0", "r2"))
    bench.feed(ev.DrainAsked(bench.now, "r1", True))
    bench.arrive("adapter-0")
    bench.feed(ev.DrainAsked(bench.now, "r1", False))
    assert pick(bench, None) == "r1"


def test_an_activation_on_its_way_is_work() -> None:
    bench = pandas(2)
    for n in range(5):
        bench.hold(f"adapter-{n}", "r1")
        bench.hold(f"adapter-{n}", "r2")
    at(bench, "adapter-0", "r1")  # from the host
    at(bench, "adapter-4", "r2")  # in a slot
    assert bench.replica("r1").stall_out == 10 * MS
    assert [pick(bench, None) for _ in range(2)] == ["r2", "r2"]
