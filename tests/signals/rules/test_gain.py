from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.signals.rules.gain import Use, gain, misses_of, total, uses_of
from loraledger.signals.rules.sample import Seen

MS = 1_000_000


def points(names: str) -> list[Use]:
    """Uses of one token each, a millisecond apart."""
    return [Use(name, n * MS, n * MS) for n, name in enumerate(names, 1)]


def plain_lru(names: str, slots: int) -> int:
    """Misses, by a list."""
    held: list[str] = []
    misses = 0
    for name in names:
        if name in held:
            held.remove(name)
        else:
            misses += 1
            held = held[-(slots - 1) :] if slots > 1 else []
        held.append(name)
    return misses


@given(st.text("abcdef", max_size=60), st.integers(1, 5))
def test_without_pins_it_is_lru(names: str, slots: int) -> None:
    assert sum(misses_of(points(names), slots).values()) == plain_lru(names, slots)


@pytest.mark.parametrize(
    ("names", "slots", "pins", "misses"),
    [
        ("abcabcabc", 2, "", 9),
        ("abcabcabc", 2, "a", 7),  # a once; b and c push each other out
        ("abcabcabc", 2, "ab", 7),  # each c pushes out the older pin, which pushes it out in turn: a, b, c, a, c, b, c
        ("aaaa", 1, "a", 1),
        ("abab", 1, "a", 4),  # nothing else can leave
        ("abcd", 4, "abcd", 4),
        ("", 2, "a", 0),
    ],
)
def test_pins_worked_out_by_hand(names: str, slots: int, pins: str, misses: int) -> None:
    assert sum(misses_of(points(names), slots, set(pins)).values()) == misses


def test_an_adapter_in_use_keeps_its_slot_although_others_were_used_later() -> None:
    uses = [Use("long", 1, 100), Use("a", 2, 2), Use("b", 3, 3), Use("c", 4, 4), Use("long", 50, 60)]
    assert misses_of(uses, 2) == {"long": 1, "a": 1, "b": 1, "c": 1}


def test_an_adapter_that_was_in_use_is_as_young_as_its_last_token() -> None:
    uses = [Use("long", 1, 100), Use("a", 2, 2), Use("b", 101, 101), Use("long", 102, 102)]
    assert misses_of(uses, 2)["long"] == 1


def test_a_pinned_idle_adapter_leaves_before_one_in_use() -> None:
    uses = [
        Use("pinned", 1, 1),
        Use("running", 2, 100),
        Use("new", 3, 3),
        Use("running", 50, 50),
        Use("pinned", 60, 60),
    ]
    assert misses_of(uses, 2, {"pinned"}) == {"pinned": 2, "running": 1, "new": 1}


def crowd(seed: int, slots: int) -> list[Use]:
    """Uses of which never more adapters run at once than there are slots, as in an engine."""
    rng, uses, at = random.Random(seed), list[Use](), 1
    for _ in range(rng.randrange(80)):
        at += rng.randrange(4)
        name = rng.choice("aaabbcdefg")
        running = {use.adapter for use in uses if use.last >= at - 1} - {name}
        while len(running) >= slots:
            at += 1
            running = {use.adapter for use in uses if use.last >= at - 1} - {name}
        uses.append(Use(name, at, at + rng.choice((0, 0, 1, 5, 20))))
    return uses


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sets(st.sampled_from("abcdefg"), max_size=4))
def test_no_choice_beats_the_least_in_count_or_in_seconds(seed: int, slots: int, pins: set[str]) -> None:
    uses = crowd(seed, slots)
    made, lru = gain("r1", uses, slots, pins, {name: ord(name) / 100 for name in "abcdefg"})
    assert made.uses == len(uses)
    assert made.lru == sum(lru.values())
    assert made.least <= min(made.lru, made.pinned) <= max(made.lru, made.pinned) <= len(uses)
    assert made.lru_s is not None
    assert made.pinned_s is not None
    assert made.least_s is not None
    assert made.least_s <= min(made.lru_s, made.pinned_s) + 1e-9
    assert made.lru_s == pytest.approx(sum(count * ord(name) / 100 for name, count in lru.items()))


def test_an_unknown_penalty_makes_seconds_unknown_and_leaves_counts() -> None:
    made, _ = gain("r1", points("abab"), 1, (), {"a": 1.0, "b": None})
    assert (made.lru, made.least) == (4, 4)
    assert (made.lru_s, made.pinned_s, made.least_s) == (None, None, None)


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    known, _ = gain("r1", points("ab"), 1, (), {"a": 1.0, "b": 2.0})
    unknown, _ = gain("r2", points("ab"), 1, (), {})
    both = total([known, unknown])
    assert both is not None
    assert (both.lru, both.lru_s) == (4, None)
    alone = total([known, known])
    assert alone is not None
    assert alone.lru_s == 6.0
    assert total([]) is None


def seen(**columns: object) -> Seen:
    row: dict[str, object] = dict.fromkeys(Seen.__struct_fields__) | {"hit_class": "gpu", "access": "gpu", "queue": 0}
    return Seen(**(row | {"adapter": "a", "replica": "r1", "arrived_ns": 1} | columns))  # type: ignore[arg-type]


def test_uses_are_by_replica_in_order_of_first_tokens_and_need_one() -> None:
    rows: Sequence[Seen] = [
        seen(first_token_ns=9, last_token_ns=12),
        seen(first_token_ns=5, last_token_ns=3),
        seen(first_token_ns=7, last_token_ns=11, preemptions=2),
        seen(first_token_ns=8, last_token_ns=None, replica="r2"),
        seen(first_token_ns=None),
        seen(adapter=None, first_token_ns=4),
        seen(replica=None, first_token_ns=4),
    ]
    assert uses_of(rows) == {"r1": [Use("a", 5, 5), Use("a", 7, 7), Use("a", 9, 12)], "r2": [Use("a", 8, 8)]}
