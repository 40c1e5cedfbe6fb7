from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.events import Source
from loraledger.ledger.figures import (
    Figure,
    believed,
    configured,
    first_known,
    observed,
    product,
    ratio,
    rest,
    total,
    unknown,
)

SOURCES: tuple[Source, ...] = get_args(Source)
FIGURES = st.builds(
    Figure,
    st.none() | st.integers(-(2**60), 2**60),
    st.just("bytes"),
    st.sampled_from(SOURCES),
    st.none() | st.integers(0, 10**18),
)
STRENGTH = {"believed": 0, "configured": 1, "observed": 2}


@settings(deadline=None)
@given(st.lists(FIGURES, max_size=6))
def test_a_sum_is_unknown_exactly_when_a_part_is(parts: list[Figure]) -> None:
    found = total(parts, "bytes")
    values = [part.value for part in parts]
    assert found.value == (None if None in values else sum(value for value in values if value is not None))


@settings(deadline=None)
@given(st.lists(FIGURES, min_size=1, max_size=6))
def test_a_sum_is_no_surer_than_its_weakest_part(parts: list[Figure]) -> None:
    found = total(parts, "bytes")
    assert STRENGTH[found.source] == min(STRENGTH[part.source] for part in parts)


@settings(deadline=None)
@given(st.lists(FIGURES, min_size=1, max_size=6))
def test_a_sum_is_as_old_as_its_oldest_part(parts: list[Figure]) -> None:
    found = total(parts, "bytes")
    undated = any(part.age is None and part.source != "configured" for part in parts)
    dated = [part.age for part in parts if part.age is not None]
    assert found.age == (max(dated) if dated and not undated else None)


@settings(deadline=None)
@given(FIGURES, st.lists(FIGURES, max_size=4))
def test_rest_and_parts_make_the_whole(whole: Figure, parts: list[Figure]) -> None:
    left = rest(whole, *parts)
    if left.value is not None:
        assert total((left, *parts), "bytes").value == whole.value
    else:
        assert any(figure.value is None for figure in (whole, *parts))


def test_settings_do_not_make_an_observation_older_and_do_not_pass_for_one() -> None:
    found = product("bytes", configured(4, "slots"), observed(10, "bytes", 5))
    assert found == Figure(40, "bytes", "configured", 5)


def test_an_observation_beside_a_belief_is_a_belief() -> None:
    assert total((observed(1, "bytes", 2), believed(1, "bytes", 9)), "bytes") == Figure(2, "bytes", "believed", 9)


def test_nothing_sums_to_a_configured_zero() -> None:
    assert total((), "blocks") == configured(0, "blocks")


def test_a_share_of_nothing_is_unknown() -> None:
    assert ratio(configured(1, "bytes"), configured(0, "bytes")).value is None
    assert ratio(configured(1, "bytes"), configured(4, "bytes")) == configured(0.25, "share")


@pytest.mark.parametrize("combine", [lambda a, b: total((a, b), "bytes"), rest, ratio])
def test_units_that_differ_are_refused(combine: object) -> None:
    assert callable(combine)
    with pytest.raises(
        ValueError, match=r"blocks cannot be part of one in bytes|bytes cannot be part of one in blocks"
    ):
        combine(configured(1, "bytes"), configured(1, "blocks"))


def test_the_first_known_figure_is_taken_whatever_its_source() -> None:
    weak = believed(3, "slots", 1)
    assert first_known(unknown("slots"), weak, observed(4, "slots", 1)) is weak
    last = unknown("slots")
    assert first_known(unknown("slots"), last) is last
