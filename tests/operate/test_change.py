from __future__ import annotations

import pytest

from loraledger.operate.change import (
    OPEN,
    TABLE,
    Guardrail,
    Population,
    Target,
    check,
    check_variable,
    conflict,
    is_live,
)

from .changes import change


def test_a_change_goes_from_proposal_to_acceptance_and_says_when_and_why() -> None:
    began = change().step("replay", 10, "played").step("roll_out", 20, "half of the tenants")
    assert (began.state, began.began_ns, began.ended_ns, began.open) == ("rolling_out", 20, None, True)
    ended = began.step("accept", 30, "better")
    assert (ended.state, ended.began_ns, ended.ended_ns, ended.reason, ended.open) == (
        "accepted",
        20,
        30,
        "better",
        False,
    )


def test_nothing_goes_live_that_was_not_replayed() -> None:
    with pytest.raises(ValueError, match="c1 is proposed: it cannot roll_out; it can replay, withdraw"):
        change().step("roll_out", 1, "")


def test_what_has_ended_stays_so() -> None:
    ended = change().step("withdraw", 1, "no longer wanted")
    for trigger in ("replay", "roll_out", "accept", "roll_back", "withdraw"):
        with pytest.raises(ValueError, match="do nothing more"):
            ended.step(trigger, 2, "")


def test_every_state_but_the_ended_ones_has_a_way_on() -> None:
    assert {state for state, _ in TABLE} == OPEN
    assert set(TABLE.values()) - OPEN == {"accepted", "rolled_back", "withdrawn"}


def test_variables_are_live_or_need_a_restart_and_others_are_refused() -> None:
    assert is_live("policy")
    assert is_live("policy.epsilon")
    assert is_live("pins")
    assert is_live("tenant.concurrency")
    assert not is_live("slots")
    check_variable("replicas")
    with pytest.raises(ValueError, match=r"use policy, pins, tenant\.concurrency, policy\.PARAM, slots"):
        check_variable("temperature")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"after": "least-loaded"}, "nothing to change"),
        ({"why": "  "}, "why is empty"),
        ({"target": Target("hit_rate", -0.1)}, "target: -0.1 is negative"),
        ({"guardrails": (Guardrail("preemptions", -1),)}, "guardrail preemptions: -1 is negative"),
        ({"guardrails": (Guardrail("hit_rate", 1),)}, "is the target and a guardrail"),
        ({"population": Population("tenant", 1.0, "s")}, "share is 1: must be above 0 and below 1"),
        ({"population": Population("tenant", 0.0, "s")}, "share is 0"),
        ({"block_ns": 0}, "block must be longer than 0"),
        ({"window_ns": 1}, "no longer than the window"),
        ({"variable": "weather"}, "cannot be changed here"),
    ],
)
def test_a_change_that_cannot_be_is_refused_by_field(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(change(**fields))


def test_one_variable_and_one_population_are_changed_once_at_a_time() -> None:
    first = change(id="c1")
    assert conflict(change(id="c2"), [first]) == (
        "policy is being changed already, by c1 (proposed): end that one first"
    )
    other = change(id="c2", variable="tenant.concurrency", before=8, after=16)
    assert "part of the tenants already" in str(conflict(other, [first]))
    elsewhere = change(
        id="c2", variable="pins", before=[], after=[["r1", "a"]], population=Population("replica", 0.5, "c2")
    )
    assert conflict(elsewhere, [first]) is None
    ended = first.step("withdraw", 1, "")
    assert conflict(change(id="c2"), [ended]) is None
