"""The search finds what looking at everything would, asks for nothing twice, and is driven side by side as alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger.plan.search import Found, Judged, Try, drive, search

Answer = Callable[[Try], Judged]
LADDER = (4, 8, 16, 32, 64)


def looked(ladder: tuple[int, ...], most: int, answer: Answer, least: int = 1) -> tuple[Found, list[Try]]:
    asked: list[Try] = []

    def ask(wanted: list[tuple[int, Try]]) -> list[Judged]:
        asked.extend(one for _, one in wanted)
        return [answer(one) for _, one in wanted]

    (found,) = drive([search(ladder, most, least)], ask)
    return found, asked


def hill(peak: int, wanted: int) -> Answer:
    """More units are better, and so are slots nearer to the ``peak``-th step: a step away costs a unit's worth."""

    def answer(one: Try) -> Judged:
        worth = one.units - abs(LADDER.index(one.slots) - peak)
        return Judged(worth >= wanted, (worth,))

    return answer


@given(st.integers(0, 4), st.integers(1, 14), st.integers(1, 12))
def test_on_a_hill_it_finds_the_fewest_units_and_the_best_slots(peak: int, wanted: int, most: int) -> None:
    found, asked = looked(LADDER, most, hill(peak, wanted))
    assert found == Found(Try(min(wanted, most), LADDER[peak]), wanted <= most, tuple(asked))
    assert len(set(asked)) == len(asked)


@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_whatever_the_answers_it_ends_inside_its_bounds(most: int, steps: int, data: st.DataObject) -> None:
    known: dict[Try, Judged] = {}

    def answer(one: Try) -> Judged:
        assert one not in known
        known[one] = Judged(data.draw(st.booleans()), (data.draw(st.integers(0, 3)),))
        return known[one]

    found, asked = looked(LADDER[:steps], most, answer)
    assert all(1 <= one.units <= most and one.slots in LADDER[:steps] for one in asked)
    assert found.best in known
    assert found.meets == known[found.best].meets
    if not found.meets:
        assert found.best.units == most


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=5))
def test_side_by_side_each_is_as_it_is_alone(hills: list[tuple[int, int]]) -> None:
    answers = [hill(*one) for one in hills]
    together = drive(
        [search(LADDER, 8) for _ in answers], lambda wanted: [answers[number](one) for number, one in wanted]
    )
    assert together == [looked(LADDER, 8, answer)[0] for answer in answers]


def test_it_begins_at_the_least_units_and_never_goes_below() -> None:
    found, asked = looked(LADDER, 8, hill(2, 1), least=3)
    assert found.best == Try(3, 16)
    assert min(one.units for one in asked) == 3


def test_with_too_few_units_for_the_arrivals_other_slots_are_not_tried() -> None:
    def answer(one: Try) -> Judged:
        return Judged(one.units > 2, (one.units - (one.slots != 16),), overrun=one.units < 3)

    found, asked = looked(LADDER, 8, answer)
    assert found.best == Try(3, 16)
    assert {one.slots for one in asked if one.units < 3} == {16}


def test_with_fewer_units_other_slots_may_keep_the_objectives() -> None:
    def answer(one: Try) -> Judged:
        best = 32 if one.units == 2 else 16
        return Judged(one.units > 2 or one.slots == best, (-abs(one.slots - best),))

    found, _ = looked(LADDER, 8, lambda one: Judged(False, (0,)) if one.units == 1 else answer(one))
    assert found.best == Try(2, 32)


@pytest.mark.parametrize(("ladder", "most", "least"), [((), 4, 1), ((8, 4), 4, 1), ((4, 4), 4, 1), ((4,), 2, 3)])
def test_nothing_to_look_through_is_refused(ladder: tuple[int, ...], most: int, least: int) -> None:
    with pytest.raises(ValueError, match="a search needs"):
        next(search(ladder, most, least))
