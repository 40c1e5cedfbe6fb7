from __future__ import annotations

import pytest

from loraledger.gateway.ratio import PRIOR, TokenRatio


def test_it_begins_with_the_prior_and_never_says_no_tokens() -> None:
    ratio = TokenRatio()
    assert (ratio.estimate("/a", 400), ratio.estimate("/a", 0), ratio.bytes_per_token("/a")) == (100, 1, PRIOR)
    assert ratio.relative_error("/a") is None


def test_it_learns_each_path_on_its_own() -> None:
    ratio = TokenRatio()
    for _ in range(200):
        ratio.learn("/a", 600, 100)
    assert ratio.bytes_per_token("/a") == pytest.approx(6.0, rel=1e-3)
    assert ratio.estimate("/a", 600) == 100
    assert ratio.estimate("/b", 600) == 150


def test_its_error_is_that_of_the_estimate_before_learning() -> None:
    ratio = TokenRatio()
    ratio.learn("/a", 400, 50)
    assert ratio.relative_error("/a") == pytest.approx(1.0)
    for _ in range(300):
        ratio.learn("/a", 400, 50)
    error = ratio.relative_error("/a")
    assert error is not None
    assert error < 0.01


@pytest.mark.parametrize(("size", "tokens"), [(0, 5), (5, 0), (-1, 5), (5, -1)])
def test_nothing_is_learnt_from_nothing(size: int, tokens: int) -> None:
    ratio = TokenRatio()
    ratio.learn("/a", size, tokens)
    assert ratio.relative_error("/a") is None
