"""One variable changed for a part of the tenants or replicas: what follows, for whom, and that its end leaves nothing of it."""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec
import pytest

from loraledger import events as ev
from loraledger.kernel.carry import carry_over
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.rollout import problem
from loraledger.kernel.settings import SECOND, FleetSettings, TenantSpec

from .bench import Bench, adapter, fleet_of, replica
from .test_pins import PinBench, settings_of

TWO = (TenantSpec("acme"), TenantSpec("duff"))
ADAPTERS = (adapter("a"), adapter("b"), adapter("c"))


def two_tenants(policy: str = "least-loaded", replicas: int = 2, **params: float) -> Bench:
    return Bench(fleet_of(replicas, ADAPTERS, TWO, policy, params=params))


def rolled_out(
    variable: str, value: object, members: Iterable[str] | None, change: str = "c1", at: int = 0
) -> ev.Event:
    unit = "replica" if variable == "pins" else "tenant"
    of = None if members is None else tuple(members)
    return ev.RolloutSet(at, change, variable, json.dumps(value), unit, of)  # type: ignore[arg-type]


def roll_out(bench: Bench, variable: str, value: object, members: Iterable[str] | None, change: str = "c1") -> None:
    bench.feed(rolled_out(variable, value, members, change, bench.now))


def end(bench: Bench, change: str = "c1") -> None:
    bench.feed(ev.RolloutEnded(bench.now, change))


def decision(bench: Bench, tenant: str, name: str | None = None) -> ev.Decision:
    """A request of ``tenant``, begun and done: what was decided."""
    request = bench.arrive(name, tenant)
    found = [command.decision for command in bench.commands if isinstance(command, ev.Dispatch | ev.Queue)]
    bench.cancel(request)
    assert len(found) == 1
    assert found[0] is not None
    return found[0]


def policies(bench: Bench) -> tuple[str, str]:
    return decision(bench, "acme").policy, decision(bench, "duff").policy


def again(bench: Bench, settings: FleetSettings) -> Bench:
    """Another process with other settings takes over."""
    after = Bench(settings, up=False)
    after.fleet, after.now = Fleet(settings, carry_over(bench.fleet.state, settings)), bench.now
    after.feed(ev.GatewayStarted(after.now, "2", "c"))
    for spec in settings.replicas:
        after.up(spec.name)
    return after


# --- policy -----------------------------------------------------------------------------------------------------------


def test_the_members_are_decided_for_by_the_other_policy_and_the_others_as_before() -> None:
    bench = two_tenants()
    roll_out(bench, "policy", "round-robin", ["duff"])
    assert policies(bench) == ("least-loaded", "round-robin")
    end(bench)
    assert policies(bench) == ("least-loaded", "least-loaded")


def test_what_was_accepted_holds_for_everybody() -> None:
    bench = two_tenants()
    roll_out(bench, "policy", "round-robin", ["duff"])
    roll_out(bench, "policy", "round-robin", None)
    assert policies(bench) == ("round-robin", "round-robin")


def test_a_parameter_is_changed_for_the_members_alone_and_the_settings_others_stay() -> None:
    # With so wide a margin r2 is a near tie of r1 however much is outstanding there, and ties of the base model go in turn.
    bench = two_tenants("bounded-affinity", tie_share=0.5)
    roll_out(bench, "policy.tie_ms", 60_000, ["duff"])
    for tenant in ("acme", "duff"):
        bench.arrive(None, tenant, prompt=3_000)
    arm = bench.fleet.arms["duff"].policy
    assert (arm._tie, arm._tie_share) == (60 * SECOND, 0.5)  # type: ignore[attr-defined]
    assert list(bench.fleet.arms) == ["duff"]
    assert bench.fleet.policy._tie == 5_000_000  # type: ignore[attr-defined]


def test_parameters_belong_to_their_policy() -> None:
    bench = two_tenants("bounded-affinity", tie_ms=7.0)
    roll_out(bench, "policy", "round-robin", ["duff"])
    roll_out(bench, "policy", "bounded-affinity", ["acme"], "c2")
    assert bench.fleet.arms["acme"].policy._tie == 7_000_000  # type: ignore[attr-defined]
    assert problem(bench.settings, bench.fleet.state, "policy.tie_ms", 9, ["acme"]) is None
    assert "round-robin has no parameter 'tie_ms'" in str(
        problem(bench.settings, bench.fleet.state, "policy.tie_ms", 9, ["duff"])
    )


def test_a_policy_and_its_parameter_hold_together_whichever_was_set_first() -> None:
    bench = two_tenants()
    roll_out(bench, "policy", "bounded-affinity", None, "c1")
    roll_out(bench, "policy.tie_ms", 9, ["duff"], "c2")
    assert policies(bench) == ("bounded-affinity", "bounded-affinity")
    assert [bench.fleet.arms[tenant].policy._tie for tenant in ("acme", "duff")] == [5_000_000, 9_000_000]  # type: ignore[attr-defined]
    end(bench, "c1")  # the settings' policy has no such parameter
    assert policies(bench) == ("least-loaded", "least-loaded")
    roll_out(bench, "policy", "bounded-affinity", ["duff"], "c1")
    assert policies(bench) == ("least-loaded", "bounded-affinity")
    assert bench.fleet.arms["duff"].policy._tie == 9_000_000  # type: ignore[attr-defined]


def test_requests_that_wait_are_decided_by_the_policy_of_their_tenant_too() -> None:
    bench = Bench(fleet_of([replica("r1", max_in_flight=1)], ADAPTERS, TWO))
    first = bench.arrive(None, "acme")
    bench.arrive(None, "duff")
    roll_out(bench, "policy", "least-loaded", ["duff"])
    bench.finish(first)
    assert bench.only(ev.Dispatch).decision.policy == "least-loaded"


def test_a_request_whose_attempt_failed_is_decided_anew_by_the_policy_of_its_tenant() -> None:
    bench = two_tenants()
    request = bench.arrive(None, "duff")
    roll_out(bench, "policy", "round-robin", ["duff"])
    bench.fail_attempt(request, "connect_refused")
    bench.scrape("r1")
    assert bench.fleet.state.requests[request].decision.policy == "round-robin"  # type: ignore[union-attr]


def test_each_part_takes_its_own_turns() -> None:
    bench = two_tenants("round-robin")
    roll_out(bench, "policy", "round-robin", ["duff"])
    seen = [(decision(bench, "acme").replica, decision(bench, "duff").replica) for _ in range(4)]
    assert seen == [("r1", "r1"), ("r2", "r2"), ("r1", "r1"), ("r2", "r2")]


def test_each_part_keeps_its_own_shares_of_the_load() -> None:
    bench = two_tenants("dynamo-lora", tick_s=1.0)
    roll_out(bench, "policy.tick_s", 10, ["duff"])
    for _ in range(30):
        bench.tick(SECOND)
        decision(bench, "acme", "a")
        decision(bench, "duff", "a")
    state = bench.fleet.state
    (books,) = state.books.values()
    assert state.shares is not None
    assert books.shares is not None
    assert state.shares.tick == bench.now // SECOND
    assert books.shares.tick == bench.now // (10 * SECOND)
    end(bench)
    assert state.books == {}


def test_books_survive_a_restart_and_acceptance() -> None:
    bench = two_tenants("round-robin", 3)
    roll_out(bench, "policy", "round-robin", ["duff"])
    assert decision(bench, "duff").replica == "r1"
    roll_out(bench, "policy", "round-robin", None)
    assert decision(bench, "acme").replica == "r2"
    assert decision(again(bench, bench.settings), "duff").replica == "r3"


def test_tenants_under_the_same_changes_share_one_policy_that_is_made_once() -> None:
    bench = two_tenants()
    roll_out(bench, "policy", "round-robin", ["duff", "acme"])
    arms = dict(bench.fleet.arms)
    assert arms["acme"] is arms["duff"]
    policies(bench)
    assert bench.fleet.arms["acme"] is arms["acme"]
    restored = Fleet.restore(bench.settings, bench.fleet.snapshot())
    assert restored.arms["acme"] is restored.arms["duff"]


# --- tenant.concurrency -----------------------------------------------------------------------------------------------


def in_flight(bench: Bench, tenant: str) -> int:
    return bench.fleet.state.tenants[tenant].active


def test_a_lower_limit_keeps_new_ones_waiting_and_leaves_what_is_in_flight() -> None:
    bench = Bench(fleet_of(1, ADAPTERS, [TenantSpec("acme", 4), TenantSpec("duff", 4)]))
    sent = [bench.arrive(None, "acme") for _ in range(3)]
    roll_out(bench, "tenant.concurrency", 2, ["acme"])
    assert bench.commands == []
    assert in_flight(bench, "acme") == 3
    bench.arrive(None, "acme")
    assert bench.only(ev.Queue).reason == "tenant_concurrency"
    assert bench.finish(sent[0]) == []
    assert len(bench.finish(sent[1])) == 1
    assert in_flight(bench, "acme") == 2
    for _ in range(4):
        bench.arrive(None, "duff")
    assert in_flight(bench, "duff") == 4


def test_a_higher_limit_sends_who_waits_at_once_and_its_end_takes_nothing_back() -> None:
    bench = Bench(fleet_of(1, ADAPTERS, [TenantSpec("acme", 1), TenantSpec("duff", 1)]))
    for tenant in ("acme", "acme", "acme", "duff", "duff"):
        bench.arrive(None, tenant)
    roll_out(bench, "tenant.concurrency", 3, ["acme"])
    assert [command.request for command in bench.all(ev.Dispatch)] == ["q2", "q3"]
    end(bench)
    assert (in_flight(bench, "acme"), in_flight(bench, "duff")) == (3, 1)
    bench.arrive(None, "acme")
    assert bench.only(ev.Queue).reason == "tenant_concurrency"


def test_of_two_limits_the_later_one_holds() -> None:
    bench = Bench(fleet_of(1, ADAPTERS, TWO))
    roll_out(bench, "tenant.concurrency", 3, None, "c1")
    roll_out(bench, "tenant.concurrency", 5, ["duff"], "c2")
    limits = {name: tenant.spec.concurrency for name, tenant in bench.fleet.state.tenants.items()}
    assert limits == {"acme": 3, "duff": 5}
    end(bench, "c2")
    assert bench.fleet.state.tenants["duff"].spec.concurrency == 3


# --- pins -------------------------------------------------------------------------------------------------------------


def test_the_members_pin_by_the_other_ranking_and_go_back_to_the_settings() -> None:
    bench = PinBench(settings_of("ab", slots=3))
    bench.settle()
    roll_out(bench, "pins", [["r1", "c"], ["r1", "b"]], ["r1"])
    assert bench.commands == []
    assert bench.settle() == ["unpin a", "load c", "pin c"]
    end(bench)
    assert bench.settle() == ["unpin c", "pin a"]
    assert list(bench.replica("r1").pins) == ["a", "b"]


def test_without_a_ranking_in_the_settings_the_members_are_pinned_and_unpinned() -> None:
    bench = PinBench(fleet_of([replica("r1", 3, 8), replica("r2", 3, 8)], ADAPTERS))
    roll_out(bench, "pins", [["r1", "a"], ["r2", "b"]], ["r1"])
    assert bench.settle() == ["load a", "pin a"]
    assert bench.replica("r2").pins == {}
    roll_out(bench, "pins", [["r1", "a"], ["r2", "b"]], None)
    assert list(bench.replica("r2").pins) == ["b"]
    end(bench)
    assert bench.settle() == ["unpin a"]
    bench.tell()
    assert [bench.replica(name).pins for name in ("r1", "r2")] == [{}, {}]


def test_a_member_that_the_ranking_does_not_name_pins_nothing() -> None:
    bench = PinBench(settings_of("ab", slots=3))
    bench.settle()
    roll_out(bench, "pins", [], ["r1"])
    assert bench.settle() == ["unpin a", "unpin b"]


def test_a_pause_of_a_pin_goes_on_when_both_rankings_name_it() -> None:
    bench = PinBench(settings_of("ab", slots=3))
    bench.settle()
    bench.held.clear()
    bench.tell()
    pause = bench.pin("a").retry_at
    roll_out(bench, "pins", [["r1", "a"]], ["r1"])
    assert (pause, list(bench.replica("r1").pins)) == (bench.pin("a").retry_at, ["a"])
    assert pause > bench.now


def test_pins_whose_adapter_was_withdrawn_meanwhile_can_still_be_accepted() -> None:
    bench = PinBench(fleet_of([replica("r1", 3, 8), replica("r2", 3, 8)], ADAPTERS))
    roll_out(bench, "pins", [["r1", "a"], ["r1", "b"]], ["r1"])
    bench.feed(ev.AdapterRetired(bench.now, "a"))
    roll_out(bench, "pins", [["r1", "a"], ["r1", "b"]], None)
    assert bench.settle() == ["load b", "pin b"]


# --- setting it -------------------------------------------------------------------------------------------------------


BAD = [
    ("policy", "rounded-robin", "unknown policy 'rounded-robin'; known: bounded-affinity,"),
    ("policy", 3, "unknown policy 3"),
    ("policy.tie_ms", -1, "-1 must be from 0 to 60000"),
    ("policy.tie_ms", True, "policy.tie_ms must be a number"),
    ("policy.tie_ms", "5", "policy.tie_ms must be a number"),
    ("policy.tie_ms", None, "policy.tie_ms must be a number"),
    ("policy.tie_ms", 10**400, "policy.tie_ms must be a number"),
    ("policy.tye_ms", 5, "bounded-affinity has no parameter 'tye_ms'"),
    ("tenant.concurrency", 0, "must be a whole number from 1"),
    ("tenant.concurrency", 2.5, "must be a whole number from 1"),
    ("tenant.concurrency", True, "must be a whole number from 1"),
    ("tenant.concurrency", 2**70, "must be a whole number from 1"),
    ("pins", "a", r"must be a list of \[replica, adapter\]"),
    ("pins", [["r1"]], r"\['r1'\] must be \[replica, adapter\]"),
    ("pins", [["r1", 3]], r"must be \[replica, adapter\]"),
    ("pins", [["r1", "a"], ["r9", "a"]], "no replica 'r9'"),
    ("pins", [["r1", "z"]], "no adapter 'z'"),
    ("slots", 4, "slots cannot be set while the fleet runs"),
]


@pytest.mark.parametrize(("variable", "value", "why"), BAD)
def test_a_bad_value_is_told_and_is_an_error_when_it_is_fed(variable: str, value: object, why: str) -> None:
    bench = two_tenants("bounded-affinity")
    before = bench.fleet.snapshot()
    told = problem(bench.settings, bench.fleet.state, variable, value)
    assert told is not None
    with pytest.raises(ValueError, match=why):
        raise ValueError(told)
    members = ["r1" if variable == "pins" else "acme"]
    if value == 10**400:
        return  # no JSON number that could be fed
    with pytest.raises(ValueError, match=why):
        bench.fleet.step(rolled_out(variable, value, members, at=bench.now))
    assert bench.fleet.snapshot() == before


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("policy", "dynamo-lora"),
        ("policy.tie_ms", 60_000),
        ("policy.tie_ms", 0.5),
        ("tenant.concurrency", 1),
        ("pins", []),
        ("pins", [["r2", "a"]]),
    ],
)
def test_a_good_value_is_no_problem(variable: str, value: object) -> None:
    bench = two_tenants("bounded-affinity")
    assert problem(bench.settings, bench.fleet.state, variable, value) is None
    roll_out(bench, variable, value, None)


def test_a_value_is_judged_for_everybody_whom_it_would_hold_for() -> None:
    bench = two_tenants("bounded-affinity")
    roll_out(bench, "policy", "round-robin", ["duff"])
    assert problem(bench.settings, bench.fleet.state, "policy.tie_ms", 9) is not None
    assert problem(bench.settings, bench.fleet.state, "policy.tie_ms", 9, ["acme"]) is None
    assert problem(fleet_of(1, tenants=()), Bench(fleet_of(1, tenants=())).fleet.state, "policy", "x") is not None


def test_another_unit_or_another_variable_under_the_same_name_is_an_error() -> None:
    bench = two_tenants()
    event = ev.RolloutSet(bench.now, "c1", "policy", '"round-robin"', "replica", ("r1",))
    with pytest.raises(ValueError, match="policy is set for each tenant"):
        bench.fleet.step(event)
    roll_out(bench, "policy", "round-robin", ["duff"])
    with pytest.raises(ValueError, match="change c1 is of policy already"):
        bench.fleet.step(rolled_out("tenant.concurrency", 3, ["duff"], at=bench.now))


def test_set_again_with_the_same_content_changes_nothing() -> None:
    bench = two_tenants()
    roll_out(bench, "policy", "round-robin", ["duff", "gone"])
    decision(bench, "duff")
    arm, before = bench.fleet.arms["duff"], bench.fleet.snapshot()
    roll_out(bench, "policy", "round-robin", ["duff", "gone"])
    assert bench.fleet.arms["duff"] is arm
    assert bench.fleet.snapshot() == before


def test_what_was_never_set_can_end() -> None:
    bench = two_tenants()
    before = bench.fleet.snapshot()
    end(bench)
    assert bench.fleet.snapshot() == before


def test_who_is_no_tenant_is_left_out_and_a_change_without_members_holds_for_nobody() -> None:
    bench = two_tenants()
    roll_out(bench, "policy", "round-robin", ["gone"])
    assert bench.fleet.state.rollouts["c1"].members == ()
    assert policies(bench) == ("least-loaded", "least-loaded")


def test_nothing_is_left_after_its_end() -> None:
    bench = PinBench(settings_of("ab", slots=3))
    before = msgspec.to_builtins(bench.fleet.state)
    for number, (variable, value) in enumerate(
        [("policy", "dynamo-lora"), ("tenant.concurrency", 1), ("pins", [["r1", "c"]])]
    ):
        roll_out(bench, variable, value, None, f"c{number}")
    assert msgspec.to_builtins(bench.fleet.state) != before
    for number in range(3):
        end(bench, f"c{number}")
    assert msgspec.to_builtins(bench.fleet.state) == before
    assert bench.fleet.arms == {}


# --- the next process -------------------------------------------------------------------------------------------------


def test_a_new_process_goes_on_with_it() -> None:
    bench = two_tenants()
    roll_out(bench, "policy", "round-robin", ["duff"], "c1")
    roll_out(bench, "tenant.concurrency", 7, ["acme"], "c2")
    after = again(bench, bench.settings)
    assert policies(after) == ("least-loaded", "round-robin")
    assert [tenant.spec.concurrency for tenant in after.fleet.state.tenants.values()] == [7, 64]
    after.feed(ev.GatewayStarted(after.now, "3", "c"))
    assert after.fleet.state.rollouts.keys() == {"c1", "c2"}
    for change in ("c1", "c2"):
        end(after, change)
    assert [tenant.spec.concurrency for tenant in after.fleet.state.tenants.values()] == [64, 64]


def test_members_that_are_gone_are_dropped_and_who_is_new_is_no_member() -> None:
    bench = two_tenants("least-loaded", 3)
    roll_out(bench, "policy", "round-robin", ["duff", "acme"], "c1")
    roll_out(bench, "pins", [["r3", "a"], ["r1", "b"]], ["r1", "r3"], "c2")
    settings = fleet_of(
        [replica("r1"), replica("r4")], ADAPTERS, [TenantSpec("duff"), TenantSpec("new")], "least-loaded"
    )
    after = again(bench, settings)
    assert after.fleet.state.rollouts["c1"].members == ("duff",)
    assert after.fleet.state.rollouts["c2"].members == ("r1",)
    assert (decision(after, "duff").policy, decision(after, "new").policy) == ("round-robin", "least-loaded")
    assert [list(after.replica(name).pins) for name in ("r1", "r4")] == [["b"], []]
    assert problem(settings, after.fleet.state, "policy", "round-robin") is None


def test_pins_of_a_rollout_are_given_up_by_the_next_process_when_it_ends() -> None:
    bench = PinBench(settings_of("ab", slots=3))
    roll_out(bench, "pins", [["r1", "c"]], ["r1"])
    bench.settle()
    after = PinBench(bench.settings)
    after.fleet, after.held, after.now = (
        Fleet(bench.settings, carry_over(bench.fleet.state, bench.settings)),
        bench.held,
        bench.now,
    )
    after.up("r1", after.held)
    assert after.settle() == []
    end(after)
    assert after.settle() == ["unpin c", "load a", "pin a", "load b", "pin b"]


def test_a_changed_policy_in_the_settings_leaves_a_parameter_of_the_old_one_without_effect() -> None:
    bench = two_tenants("bounded-affinity")
    roll_out(bench, "policy.tie_ms", 9, ["duff"])
    after = again(bench, fleet_of(2, ADAPTERS, TWO, "round-robin"))
    assert policies(after) == ("round-robin", "round-robin")
    back = again(after, bench.settings)
    assert back.fleet.arms["duff"].policy._tie == 9_000_000  # type: ignore[attr-defined]


def test_what_was_accepted_is_kept_for_who_is_new_too() -> None:
    bench = two_tenants()
    roll_out(bench, "policy", "round-robin", None, "c1")
    roll_out(bench, "tenant.concurrency", 7, None, "c2")
    after = again(bench, fleet_of(2, ADAPTERS, [TenantSpec("new", 9)], "least-loaded"))
    assert decision(after, "new").policy == "round-robin"
    assert after.fleet.state.tenants["new"].spec.concurrency == 7
    end(after, "c2")
    assert after.fleet.state.tenants["new"].spec.concurrency == 9


def test_a_snapshot_of_a_version_without_rollouts_is_read() -> None:
    bench = two_tenants()
    old = msgspec.msgpack.decode(bench.fleet.snapshot())
    del old["rollouts"], old["books"]
    restored = Fleet.restore(bench.settings, msgspec.msgpack.encode(old))
    assert (restored.state.rollouts, restored.arms) == ({}, {})
