"""Strict JSON: what is refused, in which words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.adapters.reading.jsonfile import read_object
from loraledger.errors import InputFileError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "x.json is not JSON: "),
        (b'{"a": 1', "x.json is not JSON: "),
        (b'{"a": 1} 2', "x.json is not JSON: "),
        (b"[1]", "x.json is not a JSON object"),
        (b"null", "x.json is not a JSON object"),
        (b'{"a": 1, "b": 2, "a": 1}', "it has the key 'a' twice"),
        (b'{"x": [{"a": 1, "\\u0061": 1}]}', "it has the key 'a' twice"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": [-Infinity]}', "-Infinity is no JSON number"),
        (b'{"a": 1e999}', "'1e999' is too large a number"),
        (b'{"a": -1e999}', "'-1e999' is too large a number"),
        (b'{"a": -0}', "-0 is no whole number"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "a number in it is too long"),
        (b'{"a":' * 100_000, "it is nested too deeply"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"\xef\xbb\xbf{}", "it starts with a byte-order mark"),
        ('{"a": 1}'.encode("utf-16"), "it is not UTF-8 text"),
        (b'{"a": "\xff"}', "it is not UTF-8 text"),
        (b'{"a": "\\ud800"}', "it is not UTF-8 text"),
        (b'{"\\udc00": 1}', "it is not UTF-8 text"),
    ],
)
def test_what_is_no_plain_object_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(InputFileError) as caught:
        read_object("x.json", raw)
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 200


def test_a_long_key_does_not_fill_the_message() -> None:
    key = '"' + "k" * 100_000 + '"'
    with pytest.raises(InputFileError) as caught:
        read_object("x.json", f"{{{key}: 1, {key}: 1}}".encode())
    assert len(caught.value.message) < 200


def test_whole_surrogate_pairs_are_text() -> None:
    assert read_object("x.json", b'{"a": "\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans())
def test_every_object_that_was_written_reads_as_it_was(value: dict[str, object], ascii_only: bool) -> None:
    assert read_object("x.json", json.dumps(value, ensure_ascii=ascii_only).encode()) == value
