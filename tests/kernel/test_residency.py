from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from loraledger.kernel.residency import TABLE, Registration, State, Trigger

PAIRS: list[tuple[State, Trigger]] = list(product(get_args(State), get_args(Trigger)))
OWN = ("want", "start", "done", "fail", "forget")


@pytest.mark.parametrize(("state", "trigger"), [pair for pair in PAIRS if pair in TABLE])
def test_a_legal_step_walks_the_table_and_dates_the_change(state: State, trigger: Trigger) -> None:
    registration = Registration(state=state, since=1)
    assert registration.step(trigger, 9) == state
    assert registration.state == TABLE[state, trigger]
    assert registration.since == (1 if registration.state == state else 9)


@pytest.mark.parametrize(("state", "trigger"), [pair for pair in PAIRS if pair not in TABLE])
def test_an_illegal_step_raises_and_changes_nothing(state: State, trigger: Trigger) -> None:
    registration = Registration(state=state, since=1)
    with pytest.raises(ValueError, match=f"'{state}' cannot take '{trigger}'"):
        registration.step(trigger, 9)
    assert (registration.state, registration.since) == (state, 1)


def test_what_is_observed_is_legal_in_every_state() -> None:
    for state, trigger in PAIRS:
        assert trigger in OWN or (state, trigger) in TABLE


def test_every_own_step_but_the_intended_ones_is_illegal() -> None:
    assert {pair for pair in TABLE if pair[1] in OWN} == {
        ("absent", "want"),
        ("unknown", "want"),
        ("parked", "want"),
        ("registered", "want"),
        ("wanted", "start"),
        ("loading", "done"),
        ("loading", "fail"),
        ("registered", "forget"),
        ("evicting", "done"),
        ("evicting", "fail"),
    }


def test_a_replica_that_cannot_be_asked_keeps_only_what_was_learnt_of_failures() -> None:
    assert {after for (_, trigger), after in TABLE.items() if trigger == "lost"} == {"unknown", "parked"}
    assert TABLE["parked", "lost"] == "parked"
