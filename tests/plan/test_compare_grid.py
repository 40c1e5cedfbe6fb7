"""A table of policy x hardware is taken apart into what each does alone and what only both do."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger.plan.grid import Grid, grid

P, H = ("p", "q"), ("a", "b", "c")
FIGURES = st.floats(0.001, 100)


def table(values: list[list[float | None]]) -> Grid:
    return grid("x", P, H, {(P[i], H[j]): values[i][j] for i, j in product(range(2), range(3))})


@given(st.lists(FIGURES, min_size=3, max_size=3))
def test_a_policy_without_effect_has_effect_0_and_leaves_nothing_to_the_two_together(row: list[float]) -> None:
    found = table([list(row), list(row)])
    assert found.policy_effects == (0.0, 0.0)
    assert found.interactions == ((0.0,) * 3,) * 2
    assert found.shares is None or found.shares == (0.0, 1.0, 0.0)


@given(st.lists(st.lists(FIGURES, min_size=3, max_size=3), min_size=2, max_size=2))
def test_the_parts_add_up_to_every_figure(rows: list[list[float]]) -> None:
    found = table([list(row) for row in rows])
    assert found.mean is not None
    assert found.policy_effects
    assert found.offer_effects
    assert found.interactions
    for i, j in product(range(2), range(3)):
        effect, both = found.offer_effects[j], found.interactions[i][j]
        assert effect is not None
        assert both is not None
        assert found.mean + found.policy_effects[i] + effect + both == pytest.approx(rows[i][j])
    assert found.shares is None or sum(found.shares) == pytest.approx(1)


def test_what_only_the_two_together_do_is_told_apart() -> None:
    found = grid("x", P, ("a", "b"), {("p", "a"): 1.0, ("p", "b"): 3.0, ("q", "a"): 3.0, ("q", "b"): 1.0})
    assert (found.policy_effects, found.offer_effects) == ((0.0, 0.0), (0.0, 0.0))
    assert found.interactions == ((-1.0, 1.0), (1.0, -1.0))
    assert found.shares == (0.0, 0.0, 1.0)


def test_a_column_that_lacks_a_figure_is_left_out_of_the_effects_and_shown() -> None:
    found = table([[1.0, None, 3.0], [2.0, 9.0, 4.0]])
    assert found.left_out == ("b",)
    assert found.mean == 2.5
    assert found.policy_effects == (-0.5, 0.5)
    assert found.offer_effects == (-1.0, None, 1.0)
    assert found.values == ((1.0, None, 3.0), (2.0, 9.0, 4.0))


def test_without_a_whole_column_there_are_no_effects() -> None:
    found = table([[None, 1.0, None], [1.0, None, None]])
    assert (found.mean, found.policy_effects, found.offer_effects, found.shares) == (None, None, None, None)
    assert found.left_out == H
