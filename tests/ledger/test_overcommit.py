from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.ledger.overcommit import BlockCount, overcommit

SLOT, BLOCK = 335_544_320, 2 * 2**20


def test_blocks_that_do_not_move_with_slots_mean_that_memory_was_promised_twice() -> None:
    found = overcommit([BlockCount(1, 21_540), BlockCount(16, 21_540)], SLOT, BLOCK)
    assert (found.verdict, found.bytes) == ("overcommitted", 16 * SLOT)
    assert "free" not in found.statement


def test_blocks_that_move_by_the_slots_mean_that_they_were_counted() -> None:
    found = overcommit([BlockCount(16, 21_540 - 15 * 160), BlockCount(1, 21_540)], SLOT, BLOCK)
    assert (found.verdict, found.bytes) == ("counted", 0)


def test_blocks_that_move_otherwise_are_not_explained() -> None:
    found = overcommit([BlockCount(16, 21_540 - 1000), BlockCount(1, 21_540)], SLOT, BLOCK)
    assert (found.verdict, found.bytes) == ("unknown", None)


def test_one_count_says_nothing_by_itself() -> None:
    assert overcommit([BlockCount(16, 21_540)], SLOT, BLOCK).verdict == "unknown"
    assert overcommit([BlockCount(16, 21_540), BlockCount(16, 21_540)], SLOT, BLOCK).verdict == "unknown"


def test_slots_of_two_blocks_cannot_be_told_from_rounding() -> None:
    for slot, verdict in ((2 * BLOCK, "unknown"), (2 * BLOCK + 1, "overcommitted")):
        assert overcommit([BlockCount(1, 900), BlockCount(2, 900)], slot, BLOCK).verdict == verdict


@pytest.mark.parametrize(("taken", "verdict"), [(0, "overcommitted"), (16 * 160, "counted"), (1300, "unknown")])
def test_one_count_says_it_where_the_device_is_known(taken: int, verdict: str) -> None:
    count = BlockCount(16, 21_540 - taken, before_lora=21_540 * BLOCK + 17)
    assert overcommit([count], SLOT, BLOCK).verdict == verdict


@settings(deadline=None)
@given(
    room=st.integers(0, 2**40),
    slot=st.integers(1, 2**32),
    block=st.integers(1, 2**24),
    few=st.integers(0, 4),
    more=st.integers(1, 64),
    counted=st.booleans(),
    with_device=st.booleans(),
)
def test_an_engine_of_either_kind_is_told_or_called_unknown_but_never_mistaken(
    room: int, slot: int, block: int, few: int, more: int, counted: bool, with_device: bool
) -> None:
    room += (few + more) * slot

    def start(slots: int) -> BlockCount:
        left = room - slots * slot if counted else room
        return BlockCount(slots, left // block, room if with_device else None)

    many = start(few + more)
    found = overcommit([many] if with_device else [start(few), many], slot, block)
    expected = "counted" if counted else "overcommitted"
    seen = (few + more if with_device else more) * slot
    assert found.verdict == (expected if seen > 2 * block else "unknown")
    if found.verdict == "overcommitted":
        assert found.bytes == (few + more) * slot
