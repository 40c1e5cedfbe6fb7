from __future__ import annotations

from collections import Counter

import pytest

from loraledger import events as ev
from loraledger.errors import ConfigError
from loraledger.kernel.policies import make_policy, policy_names
from loraledger.kernel.rendezvous import seed_of, weight
from loraledger.kernel.settings import MS, SECOND, Limits, TenantSpec

from .bench import Bench, adapter, fleet_of, replica

MANY = [TenantSpec("acme", 10_000)]
NAMES = [f"adapter-{n}" for n in range(24)]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("externality", 1e300),
        ("externality", -1.0),
        ("growth_share", -5.0),
        ("tie_ms", float("nan")),
        ("amortise_s", -1.0),
    ],
)
def test_a_parameter_out_of_its_bounds_is_refused_with_the_bounds(param: str, value: float) -> None:
    with pytest.raises(ConfigError, match=r"must be from [\d.]+ to") as caught:
        make_policy(fleet_of(params={param: value}))
    assert caught.value.param == f"policy.params.{param}"


def home(name: str, replicas: list[str]) -> str:
    return max(replicas, key=lambda r: weight(seed_of(name), seed_of(r)))


@pytest.mark.parametrize("policy", policy_names())
def test_each_policy_is_pure_and_gives_its_choice_first(policy: str) -> None:
    bench = Bench(fleet_of(4, [adapter(name) for name in NAMES], MANY, policy))
    for name in NAMES[:6]:
        bench.arrive(name)
    state = bench.fleet.state
    before = bench.fleet.snapshot()
    for request in state.requests.values():
        live = list(state.replicas.values())
        choice = bench.fleet.policy.choose(state, request, state.adapters[str(request.adapter)], live)
        assert choice == bench.fleet.policy.choose(state, request, state.adapters[str(request.adapter)], live)
        assert 1 <= len(choice.candidates) <= 3
        assert choice.considered == 4
        assert choice.reason
        for candidate in choice.candidates:
            terms = (
                candidate.queue + candidate.slot_wait + candidate.prepare + candidate.prefill + candidate.externality
            )
            assert candidate.cost == terms
            assert min(candidate.queue, candidate.slot_wait, candidate.prepare, candidate.externality) >= 0
    assert bench.fleet.snapshot() == before


def test_an_unknown_policy_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(ConfigError) as caught:
        make_policy(fleet_of(policy="bounded-afinity"))
    assert caught.value.param == "policy.name"
    assert "'bounded-afinity'" in caught.value.message
    assert all(name in caught.value.message for name in policy_names())


@pytest.mark.parametrize("policy", policy_names())
def test_an_unknown_parameter_is_refused_with_the_names_of_the_known(policy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_policy(fleet_of(policy=policy, params={"tie": 1.0}))
    assert caught.value.param == "policy.params.tie"
    known = make_policy(fleet_of(policy=policy)).defaults
    assert all(name in caught.value.message for name in known)
    assert known or "none" in caught.value.message


def test_every_policy_says_what_it_reads_and_how_stable_it_is() -> None:
    for name in policy_names():
        policy = make_policy(fleet_of(policy=name))
        assert policy.name == name
        assert policy.stability in ("alpha", "beta", "stable")
    assert make_policy(fleet_of(policy="round-robin")).reads == frozenset()


# --- baselines --------------------------------------------------------------------------------------------------------


def test_round_robin_takes_each_replica_in_turn() -> None:
    bench = Bench(fleet_of(3, policy="round-robin"))
    sent = []
    for _ in range(6):
        bench.arrive()
        sent.append(bench.only(ev.Dispatch).replica)
    assert sent == ["r1", "r2", "r3"] * 2


def test_least_loaded_goes_by_outstanding_tokens_not_by_requests() -> None:
    bench = Bench(fleet_of(2, policy="least-loaded"))
    bench.arrive(prompt=4_000)
    big = bench.only(ev.Dispatch).replica
    for _ in range(5):
        bench.arrive(prompt=100)
        assert bench.only(ev.Dispatch).replica != big


def test_strict_affinity_keeps_each_adapter_at_its_home_however_long_the_queue() -> None:
    bench = Bench(fleet_of(3, [adapter(name) for name in NAMES], MANY, "strict-affinity"))
    for _ in range(3):
        for name in NAMES:
            bench.arrive(name)
    for request in bench.fleet.state.requests.values():
        assert request.decision is not None
        assert request.decision.replica == home(str(request.adapter), ["r1", "r2", "r3"])


def test_strict_affinity_moves_only_the_adapters_of_a_replica_that_is_away() -> None:
    bench = Bench(fleet_of(3, [adapter(name) for name in NAMES], MANY, "strict-affinity"))
    bench.down("r2")
    for name in NAMES:
        bench.arrive(name)
        decision = bench.only(ev.Queue).decision
        assert decision is not None
        before = home(name, ["r1", "r2", "r3"])
        assert decision.replica == (home(name, ["r1", "r3"]) if before == "r2" else before)


# --- bounded affinity -------------------------------------------------------------------------------------------------


def test_near_ties_fall_to_rendezvous() -> None:
    for name in NAMES:
        bench = Bench(fleet_of(5, [adapter(name)], MANY))
        bench.arrive(name)
        assert bench.only(ev.Load).replica == home(name, [f"r{n}" for n in range(1, 6)])


def test_near_ties_among_members_fall_to_rendezvous_and_not_to_the_order_of_the_set() -> None:
    for order in (("r1", "r2", "r3"), ("r3", "r1", "r2")):
        bench = Bench(fleet_of(3, [adapter("a")]))
        for name in order:
            bench.hold("a", name)
        bench.arrive("a")
        assert bench.only(ev.Dispatch).replica == home("a", ["r1", "r2", "r3"])


def test_a_warm_replica_wins_while_its_queue_is_shorter_than_a_load() -> None:
    bench = Bench(fleet_of(2, [adapter("a", bytes=200_000_000)], MANY))
    bench.hold("a", "r1")
    for _ in range(5):  # 5 x 100 tokens / 5,000 a second = 0.1 s, against a load of about a second
        bench.arrive("a")
        decision = bench.only(ev.Dispatch).decision
        assert (decision.replica, decision.reason, decision.considered) == ("r1", "affinity: gpu", 2)
    assert list(bench.adapter("a").placed) == ["r1"]


def test_the_set_grows_only_when_leaving_is_cheaper_and_says_by_how_much() -> None:
    bench = Bench(fleet_of(2, [adapter("a", bytes=200_000_000)], MANY))
    bench.hold("a", "r1")
    for n in range(200):
        bench.arrive("a", id=f"q{n}")
        if bench.all(ev.Load):
            break
    decision = bench.only(ev.Queue).decision
    assert decision is not None
    assert decision.replica == "r2"
    chosen, left = decision.candidates
    assert chosen.cost < left.cost
    assert left.queue > chosen.prepare > 0
    assert decision.reason.startswith(
        f"set grows: r1 would cost {left.cost / SECOND:.3f} s, r2 {chosen.cost / SECOND:.3f} s"
    )
    assert n > 20
    assert set(bench.adapter("a").placed) == {"r1", "r2"}


def grows_after(amortise_s: float, pause: int) -> int:
    """Arrivals of an adapter, one each ``pause``, until it gets a copy where ten streams of another one run."""
    fleet = fleet_of(2, [adapter("a", bytes=200_000_000), adapter("b")], MANY, params={"amortise_s": amortise_s})
    bench = Bench(fleet)
    bench.hold("a", "r1")
    bench.hold("b", "r2")
    for _ in range(10):
        bench.arrive("b")
    for n in range(1000):
        bench.tick(pause)
        bench.arrive("a", id=f"a{n}")
        if bench.all(ev.Load):
            return n
    raise AssertionError("never")


def test_a_hot_adapter_gets_its_copy_sooner_because_many_requests_share_what_it_costs_others() -> None:
    assert grows_after(10.0, 20 * MS) < grows_after(0.0, 20 * MS) * 0.75
    assert grows_after(10.0, 20 * MS) < grows_after(1.0, 20 * MS)


def test_a_set_never_grows_by_a_replica_that_costs_more() -> None:
    bench = Bench(fleet_of(3, [adapter("a", bytes=100_000_000)], MANY))
    bench.hold("a", "r1")
    grown = 0
    for n in range(150):
        members = set(bench.adapter("a").placed)
        bench.arrive("a", id=f"q{n}")
        decision = bench.fleet.state.requests[f"q{n}"].decision
        assert decision is not None
        chosen, *others = decision.candidates
        if chosen.replica not in members:
            grown += 1
            assert decision.reason.startswith("set grows")
            assert chosen.cost < min(c.cost for c in others if c.replica in members)
        for name in ("r2", "r3"):
            if bench.replica(name).loading:
                bench.tick(600 * MS)
                bench.done(name, 600 * MS)
    assert grown == 2
    used = Counter(r.replica for r in bench.fleet.state.requests.values())
    assert min(used.values()) > 20


def test_a_member_that_was_not_used_for_long_leaves_the_set() -> None:
    bench = Bench(fleet_of(2, [adapter("a")], MANY, params={"placement_age_s": 60.0}))
    where = home("a", ["r1", "r2"])
    elsewhere = {"r1": "r2", "r2": "r1"}[where]
    bench.hold("a", elsewhere)
    bench.tick(30 * SECOND)
    bench.arrive("a")
    assert bench.only(ev.Dispatch).decision.reason.startswith("affinity")
    bench.tick(61 * SECOND)
    bench.arrive("a")
    assert bench.fleet.state.requests["q2"].decision is not None
    assert not bench.fleet.state.requests["q2"].decision.reason.startswith("affinity")


def test_a_replica_takes_no_more_placements_a_minute_than_its_churn_budget() -> None:
    budget = 3
    bench = Bench(
        fleet_of(
            [replica("r1", 40, 40), replica("r2", 40, 40)],
            [adapter(name) for name in NAMES],
            MANY,
            limits=Limits(loads_per_minute=budget),
        )
    )
    for name in NAMES[:12]:
        bench.hold(name, "r1")  # an operator's loads count too, but are not refused
    assert bench.replica("r1").placements == 12
    placed = Counter[str]()
    for name in NAMES[12:]:
        bench.arrive(name)
        decision = bench.fleet.state.requests[f"q{len(bench.fleet.state.requests)}"].decision
        assert decision is not None
        placed[decision.replica] += 1
        if sum(placed.values()) == budget:
            break
    assert placed == {"r2": budget}


def test_a_warm_replica_keeps_its_requests_when_every_budget_is_spent() -> None:
    bench = Bench(fleet_of(2, [adapter("a")], MANY, limits=Limits(loads_per_minute=1)))
    bench.hold("a", "r1")
    bench.replica("r2").placements, bench.replica("r2").placements_since = 1, bench.now
    for n in range(60):
        bench.arrive("a", id=f"q{n}", prompt=2_000)
        assert bench.only(ev.Dispatch).replica == "r1"
    bench.tick(60 * SECOND)
    bench.arrive("a", prompt=2_000)
    assert bench.only(ev.Load).replica == "r2"


def test_a_request_is_not_refused_for_want_of_a_churn_budget() -> None:
    bench = Bench(fleet_of(1, [adapter("a"), adapter("b")], limits=Limits(loads_per_minute=1)))
    bench.hold("a", "r1")
    bench.arrive("b")
    assert bench.only(ev.Load).adapter == "b"


def test_of_a_large_fleet_the_members_and_a_sample_are_looked_at() -> None:
    names = [adapter(name) for name in NAMES]
    bench = Bench(fleet_of(80, names, MANY), up=False)
    for spec in bench.settings.replicas:
        bench.fleet.step(ev.ReplicaUp(bench.now, spec.name, 1, ()))
    used = Counter[str]()
    for name in NAMES:
        bench.arrive(name)
        decision = bench.fleet.state.requests[f"q{len(bench.fleet.state.requests)}"].decision
        assert decision is not None
        assert 1 < decision.considered <= 20
        used[decision.replica] += 1
    assert len(used) > len(NAMES) / 2
    for name in NAMES[:8]:
        where = next(iter(bench.adapter(name).placed))
        bench.done(where)
        bench.arrive(name)
        assert bench.only(ev.Dispatch).replica == where


def test_a_replica_outside_of_the_sample_is_found_when_nobody_else_may() -> None:
    bench = Bench(fleet_of(80, [adapter("a")], MANY), up=False)
    for n in (7, 41, 66):
        bench.up(f"r{n}")
        bench.arrive("a")
        bench.done(f"r{n}")
        assert bench.only(ev.Dispatch).replica == f"r{n}"
        bench.arrive()
        assert bench.only(ev.Dispatch).replica == f"r{n}"
        bench.down(f"r{n}")


def test_the_base_model_goes_where_it_is_cheapest_and_in_turn_among_equals() -> None:
    bench = Bench(fleet_of(3))
    sent = []
    for _ in range(6):
        bench.arrive(prompt=1)
        sent.append(bench.only(ev.Dispatch).replica)
    assert Counter(sent) == {"r1": 2, "r2": 2, "r3": 2}
    bench.arrive(prompt=50_000)
    loaded = bench.only(ev.Dispatch).replica
    for _ in range(6):
        bench.arrive(prompt=1)
        assert bench.only(ev.Dispatch).replica != loaded


def test_the_hit_class_is_the_tier_when_the_kernel_decided() -> None:
    bench = Bench(fleet_of([replica("r1", 1, 2)], [adapter(name) for name in "abc"]))
    classes = []
    for name in ("a", "a", "b", "a", "c", "b"):
        request = bench.arrive(name)
        if bench.replica("r1").loading:
            bench.done("r1")
        decision = bench.only(ev.Dispatch).decision
        classes.append((decision.hit_class, decision.hit_source))
        bench.first_token(request)
        bench.finish(request)
    # c pushed b, the oldest of two host entries, to disk
    assert [tier for tier, _ in classes] == ["disk", "gpu", "disk", "host", "disk", "disk"]
    assert {source for _, source in classes} == {"believed"}
    bench.arrive()
    assert bench.only(ev.Dispatch).decision.hit_class == "base"
