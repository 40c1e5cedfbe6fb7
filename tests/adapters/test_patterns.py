"""Patterns of names: PEFT's rule, at a bounded price."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loraledger.adapters.reading.patterns import MAX_REGEX_LENGTH, MAX_REGEXES, NamePatterns
from loraledger.errors import InputFileError

PART = st.sampled_from(["q_proj", "k_proj", "proj", "layers", "0", "1", "10", "mlp"])
NAME = st.lists(PART, min_size=1, max_size=5).map(".".join)
REGEXES = [
    r".*\.mlp\.proj",
    r"^layers\.0\..*",
    r"(q|k)_proj",
    r"layers\.(0|1)\.q_proj",
    r".*[02]\..*proj$",
    r"\d+.q_proj",
    r"^q_proj",
]


def by_peft(keys: list[str], name: str) -> str | None:
    """``get_pattern_key`` of ``peft/utils/other.py``, but ``None`` where nothing matches."""
    return next((key for key in keys if re.match(rf"(.*\.)?({key})$", name)), None)


@settings(max_examples=500, deadline=None)
@given(st.lists(NAME | st.sampled_from(REGEXES), max_size=6, unique=True), NAME)
def test_the_first_key_that_matches_wins_as_in_peft(keys: list[str], name: str) -> None:
    # A dot in a plain name is any character to PEFT: the one known difference.
    assume(all(by_peft([key], name) == by_peft([re.escape(key)], name) or key in REGEXES for key in keys))
    expected = by_peft(keys, name)
    assert NamePatterns("x", keys).find(name) == expected


def test_a_plain_key_is_a_suffix_that_starts_at_a_dot() -> None:
    patterns = NamePatterns("x", ["proj", "self_attn.q_proj"])
    assert patterns.find("model.self_attn.q_proj") == "self_attn.q_proj"
    assert patterns.find("model.q_proj") is None
    assert patterns.find("model.proj") == "proj"
    assert patterns.find("proj") == "proj"


@pytest.mark.parametrize(
    "keys", [["self_attn.q_proj", "q_proj"], ["q_proj", "self_attn.q_proj"], ["(q|k)_proj", "q_proj"]]
)
def test_of_two_keys_that_match_the_first_wins_however_long(keys: list[str]) -> None:
    assert NamePatterns("x", keys).find("model.self_attn.q_proj") == keys[0]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("(", "is no regex of bounded cost"),
        ("*", "is no regex of bounded cost"),
        ("(?!x)q_proj", "no look-around"),
        (r"(q)\1", "no backreference"),
        (r"\w{1000}{1000}", "is no regex of bounded cost"),
        ("(" * 400, "is no regex of bounded cost"),
        ("a|" * MAX_REGEX_LENGTH, f"a key of {2 * MAX_REGEX_LENGTH:,} characters"),
    ],
)
def test_a_key_that_cannot_be_matched_is_refused_with_its_field(key: str, message: str) -> None:
    with pytest.raises(InputFileError) as caught:
        NamePatterns("rank_pattern", [key])
    assert caught.value.message.startswith("rank_pattern")
    assert message in caught.value.message
    assert len(caught.value.message) < 300


def test_many_plain_keys_are_fine_and_many_regexes_are_not() -> None:
    keys = [f"model.layers.{i}.q_proj" for i in range(10_000)]
    assert NamePatterns("x", keys).find("model.layers.9999.q_proj") == keys[-1]
    with pytest.raises(InputFileError, match=f"over {MAX_REGEXES} regexes"):
        NamePatterns("x", [f"({i})" for i in range(MAX_REGEXES + 1)])


def test_a_key_that_backtracks_for_ever_elsewhere_is_matched_at_once() -> None:
    patterns = NamePatterns("x", ["(((((.*)*)*)*)*)*b"] * 8)
    begin = time.process_time()
    for _ in range(100):
        assert patterns.find("a" * 1000) is None
    assert time.process_time() - begin < 1.0
