from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger import events as ev

EVENTS = get_args(ev.Event)
COMMANDS = get_args(ev.Command)
DIGEST = "3fa9c1d20b7e" + "0" * 52
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def any_of(kinds: tuple[type[msgspec.Struct], ...]) -> st.SearchStrategy[Any]:
    """Any value of these kinds whose numbers fit the wire: 64 bits, and no NaN."""
    return st.one_of([st.from_type(kind) for kind in kinds]).filter(lambda value: value == value and _fits(value))


def _fits(value: msgspec.Struct) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return False
    return True


@given(any_of(EVENTS))
@settings(max_examples=200, deadline=None)
def test_every_event_survives_its_wire_form(event: ev.Event) -> None:
    assert ev.decode_event(ev.encode(event)) == event
    assert ev.encode(ev.decode_event(ev.encode(event))) == ev.encode(event)


@given(st.lists(any_of(COMMANDS), max_size=3))
@settings(max_examples=40, deadline=None)
def test_commands_survive_their_wire_form(commands: list[ev.Command]) -> None:
    assert ev.decode_commands(ev.encode(commands)) == commands


@given(st.lists(any_of((ev.ResidencyChange,)), max_size=3))
@settings(max_examples=40, deadline=None)
def test_changes_survive_their_wire_form(changes: list[ev.ResidencyChange]) -> None:
    assert ev.decode_changes(ev.encode(changes)) == changes


def test_unknown_is_not_zero_on_the_wire() -> None:
    nothing, zero = (ev.ReplicaSampled(1, "r1", 1, known, None, None, None) for known in (None, 0))
    assert ev.decode_event(ev.encode(nothing)) != ev.decode_event(ev.encode(zero))


@pytest.mark.parametrize("kind", [*EVENTS, *COMMANDS], ids=lambda kind: str(kind.__name__))
def test_words_are_frozen_arrays_with_their_name_first(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.array_like
    assert kind.__struct_config__.tag == kind.__name__
    assert kind in COMMANDS or kind.__struct_fields__[0] == "at"


def test_an_old_journal_without_an_appended_field_is_read_with_its_default() -> None:
    event = ev.RequestArrived(1, "q", "t", None, 10, None, True, "/v1", "client", 5)
    words = msgspec.msgpack.decode(ev.encode(event))
    assert ev.decode_event(msgspec.msgpack.encode(words[:-2])) == msgspec.structs.replace(
        event, client_id=None, received=None
    )


@pytest.mark.parametrize("data", [b"", b"\x90", b"\x92\xa4Wake\xa1x", b"\x92\xa7Unknown\x01", b"\xff" * 9])
def test_bytes_that_are_no_event_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        ev.decode_event(data)


def test_an_event_is_not_a_command() -> None:
    with pytest.raises(msgspec.DecodeError):
        ev.decode_commands(b"\x91" + ev.encode(ev.Wake(1)))


# --- engine-side names ------------------------------------------------------------------------------------------------


def test_an_engine_name_shows_the_version_and_from_the_second_registration_on_its_number() -> None:
    assert ev.engine_name("support", DIGEST) == "support@3fa9c1d20b7e"
    assert ev.engine_name("support", DIGEST, 2) == "support@3fa9c1d20b7e~2"


@given(TEXT.filter(bool), st.text("0123456789abcdef", min_size=12, max_size=64), st.integers(1, 10**6))
@settings(deadline=None)
def test_an_engine_name_can_be_read_back(adapter: str, digest: str, generation: int) -> None:
    assert ev.parse_engine_name(ev.engine_name(adapter, digest, generation)) == (adapter, digest[:12], generation)


@pytest.mark.parametrize(
    "name",
    [
        "support",
        "acme/base-8b-instruct",
        "@3fa9c1d20b7e",
        "support@",
        "support@3fa9",
        "support@3fa9c1d20b7ef",
        "support@3FA9C1D20B7E",
        "support@3fa9c1d20b7e~",
        "support@3fa9c1d20b7e~x",
        "support@3fa9c1d20b7e~1",
        "support@3fa9c1d20b7e~02",
        "support@3fa9c1d20b7e~-2",
        "support@3fa9c1d20b7e~²",
        "user@example.org",
    ],
)
def test_a_name_that_is_not_ours_is_told_apart(name: str) -> None:
    assert ev.parse_engine_name(name) is None


def test_an_adapter_may_have_signs_of_ours_in_its_own_name() -> None:
    assert ev.parse_engine_name("a@b~3@3fa9c1d20b7e~2") == ("a@b~3", "3fa9c1d20b7e", 2)
