from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger.errors import InputFileError, InternalError
from loraledger.record.sketch import PER_DOUBLING, RELATIVE_ERROR, ZERO, Sketch, bucket_of, value_of

DURATIONS = st.one_of(st.integers(0, 10**15), st.floats(1, 1e15), st.integers(0, 60).map(lambda power: 2**power))


def sketch_of(values: list[float]) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


@given(st.lists(DURATIONS, min_size=1, max_size=200), st.floats(0, 1))
def test_each_quantile_is_within_the_bound_of_the_value_that_holds_its_rank(values: list[float], q: float) -> None:
    exact = sorted(values)[math.floor(q * (len(values) - 1))]
    found = sketch_of(values).quantile(q)
    assert found is not None
    if exact < 1:
        assert found == 0
    else:
        assert abs(found - exact) <= RELATIVE_ERROR * exact * (1 + 1e-9)


@given(st.floats(1, 1e15))
def test_a_bucket_spans_one_factor_of_growth(value: float) -> None:
    bucket = bucket_of(value)
    assert 2 ** (bucket / PER_DOUBLING) <= value * (1 + 1e-12)
    assert value < 2 ** ((bucket + 1) / PER_DOUBLING) * (1 + 1e-12)


def test_the_error_is_what_the_documentation_says() -> None:
    assert pytest.approx(0.01083, abs=1e-5) == RELATIVE_ERROR
    worst = max(abs(value_of(bucket_of(value)) - value) / value for value in range(1, 200_000))
    assert 0.0105 < worst <= RELATIVE_ERROR


@given(st.lists(DURATIONS, max_size=50), st.lists(DURATIONS, max_size=50), st.lists(DURATIONS, max_size=50))
def test_merging_is_counting_everything_in_any_order(a: list[float], b: list[float], c: list[float]) -> None:
    whole = sketch_of(a + b + c)
    one, other = sketch_of(a), sketch_of(c)
    one.merge(sketch_of(b))
    one.merge(other)
    other.merge(sketch_of(b))
    other.merge(sketch_of(a))
    assert one == other == whole
    assert len(whole) == len(a) + len(b) + len(c)


@given(st.lists(DURATIONS, max_size=50))
def test_json_reads_back_and_has_one_form(values: list[float]) -> None:
    text = sketch_of(values).to_json()
    assert Sketch.from_json(text) == sketch_of(values)
    assert sketch_of(values[::-1]).to_json() == text


def test_nothing_counted_has_no_quantile() -> None:
    assert Sketch().quantile(0.5) is None
    assert Sketch().to_json() == "{}"


def test_zeros_have_a_bucket_of_their_own_and_read_as_zero() -> None:
    sketch = sketch_of([0, 0, 1000])
    assert sketch.counts == {ZERO: 2, bucket_of(1000): 1}
    assert sketch.quantile(0.5) == 0
    assert sketch.to_json() == '{"-1":2,"318":1}'


def test_a_sketch_does_not_share_the_counts_it_was_made_from() -> None:
    counts = {5: 1}
    sketch = Sketch(counts)
    sketch.add(value_of(5), times=3)
    assert (counts, sketch.counts) == ({5: 1}, {5: 4})


@pytest.mark.parametrize("value", [-1, -0.5, math.inf, math.nan])
def test_what_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(InternalError, match="cannot be counted"):
        Sketch().add(value)


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_what_is_no_quantile_is_refused(q: float) -> None:
    with pytest.raises(InternalError, match="not within 0 and 1"):
        sketch_of([1]).quantile(q)


@pytest.mark.parametrize("text", ["", "[]", '{"a":1}', '{"1":"many"}', '{"-2":1}', '{"3":0}', '{"3":-1}', '{"3":1.5}'])
def test_text_that_is_no_sketch_is_refused(text: str) -> None:
    with pytest.raises(InputFileError, match="not a sketch"):
        Sketch.from_json(text)
