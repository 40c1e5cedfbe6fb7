from __future__ import annotations

from math import ceil

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger.kernel.shares import Shares, proportional


def test_copies_are_the_share_of_the_load_times_the_slots_rounded_up() -> None:
    assert proportional({"a": 50, "b": 30, "c": 20}, slots=4, replicas=8) == {"a": 2, "b": 1, "c": 1}
    assert proportional({"a": 50, "b": 30, "c": 20}, slots=5, replicas=8) == {"a": 2, "b": 2, "c": 1}  # 3, 2, 1 is 6
    assert proportional({"a": 90, "b": 10}, slots=12, replicas=4) == {"a": 4, "b": 2}


def test_what_rounding_leaves_goes_to_the_largest_remainders() -> None:
    # asked: 4, 3, 2 of 8: scaled 3.56, 2.67, 1.78; floors 3, 2, 1; two left for c (.78) and b (.67)
    assert proportional({"a": 40, "b": 30, "c": 20}, slots=8, replicas=8) == {"a": 3, "b": 3, "c": 2}


def test_one_copy_each_may_leave_the_sum_above_the_slots() -> None:
    assert proportional({"a": 3, "b": 1, "c": 1, "d": 1, "e": 1}, slots=5, replicas=3)["a"] == 2


def test_adapters_beyond_the_slots_have_one_copy_each() -> None:
    assert proportional({f"a{n}": 1 + n for n in range(10)}, slots=4, replicas=4) == {f"a{n}": 1 for n in range(10)}


def test_an_adapter_without_a_load_has_no_share() -> None:
    assert proportional({"a": 0, "b": 3}, slots=8, replicas=2) == {"b": 2}
    assert proportional({}, slots=8, replicas=2) == {}


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=20), st.integers(1, 64), st.integers(1, 16))
def test_copies_are_at_least_one_and_at_most_the_replicas_and_never_more_than_the_share(
    loads: dict[str, int], slots: int, replicas: int
) -> None:
    copies = proportional(loads, slots, replicas)
    assert copies.keys() == {name for name, load in loads.items() if load}
    assert all(1 <= count <= replicas for count in copies.values())
    total = sum(loads.values())
    assert all(count <= max(1, ceil(loads[name] * slots / total)) for name, count in copies.items())


def test_loads_are_smoothed_by_tick_and_forgotten_when_they_are_nothing() -> None:
    shares = Shares()
    shares.advance(10, {"a": 100.0}, 0.3)
    assert shares.load == {"a": 100.0}  # the first count is taken as it is
    shares.advance(11, {"a": 50.0, "b": 10.0}, 0.3)
    assert shares.load == pytest.approx({"a": 85.0, "b": 10.0})
    shares.advance(13, {"b": 10.0}, 0.3)  # two ticks
    assert shares.load == pytest.approx({"a": 85.0 * 0.49, "b": 10.0})
    shares.advance(60, {"b": 10.0}, 0.3)
    assert shares.load.keys() == {"b"}


def test_copies_grow_at_once_and_shrink_only_after_the_cooldown() -> None:
    shares = Shares()

    def at(tick: int, load: float) -> int:
        shares.tick, shares.load = tick, {"a": load, "b": 50.0}
        shares.allot(slots=8, replicas=4, cooldown=3)
        return shares.copies["a"]

    assert at(1, 10.0) == 2
    assert at(2, 50.0) == 4
    assert [at(tick, 10.0) for tick in (3, 4, 5)] == [4, 4, 4]
    assert at(6, 10.0) == 2
    assert at(7, 50.0) == 4
    assert at(8, 10.0) == 4
    assert at(9, 50.0) == 4  # back in time: the count begins anew
    assert [at(tick, 10.0) for tick in (10, 11, 12, 13)] == [4, 4, 4, 2]


def test_an_idle_adapter_loses_its_copies_at_once() -> None:
    shares = Shares(load={"a": 0.4, "b": 5.0}, copies={"a": 3, "b": 4}, shrinking={"a": 0})
    shares.allot(slots=8, replicas=4, cooldown=3)
    assert shares.copies == {"b": 4}
    assert shares.shrinking == {}


def test_a_clock_that_was_set_back_does_not_hold_copies_for_ever() -> None:
    shares = Shares(tick=1000, load={"a": 10.0}, copies={"a": 4}, shrinking={"a": 999})
    shares.advance(500, {"a": 10.0}, 0.3)
    assert (shares.tick, shares.shrinking) == (500, {})


def test_shares_survive_their_own_bytes() -> None:
    shares = Shares(7, {"a": 0.1}, {"a": 2}, {"a": 5})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(shares), type=Shares) == shares
