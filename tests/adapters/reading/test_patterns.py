"""Patterns of names: PEFT's rule, in a language that no matcher can be held with."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loraledger.adapters.reading.header import MAX_NAME, MAX_PARTS
from loraledger.adapters.reading.patterns import MAX_KEY, MAX_REGEXES, NamePatterns, check_cost
from loraledger.errors import InputFileError

PART = st.sampled_from(["q_proj", "k_proj", "proj", "layers", "0", "1", "10", "mlp"])
NAME = st.lists(PART, min_size=1, max_size=5).map(".".join)
REGEXES = [
    r".*\.mlp\.proj",
    r"^layers\.0\..*",
    r"(q|k)_proj",
    r"layers\.(0|1)\.q_proj",
    r"layers\.(0|1|10)\.q_proj",
    r"layers.*[0-9]+\.q_proj$",
    r"\d+.q_proj",
    r"^q_proj",
    r".*",
]
ATOM = st.sampled_from(
    ["a", "b", "1", "_", "-", "é", r"\.", ".", ".*", r"\d", r"\d+", "[0-9]", "[0-9]+", "(a|b)", "(?:ab|1)", r"(1|11)\."]
)
KEY = st.builds(
    lambda start, atoms, end: start + "".join(atoms) + end,
    st.sampled_from(["", "^"]),
    st.lists(ATOM, min_size=1, max_size=8),
    st.sampled_from(["", "$", "(a|ab)", "(?:1|11)$"]),
)

WORST = [
    (r".*(a|1).*(a|aa|aaa|aaaa|aaaaa|aaaaaaa)\.\.(aa|ab|ba)....(aa|ab)....b1b(a|b)", "a" * (MAX_NAME - 2) + "1b"),
    (".*" + "(a|1)(a|b)(aa|ab|ba)" * 8 + ".(a|aa|aaa|aaaaaaaa)\\.", "a" * (MAX_NAME - 2) + "1b"),
    (".*a.*ab", ".".join(["aaaaaaa"] * MAX_PARTS)),
    (r".*\..*\.ab", ("." * (MAX_PARTS - 1)).rjust(MAX_NAME, "a")),
    (r"\d+\d+q", "1" * MAX_NAME),
    (".*" + "a" * 100 + ".*" + "a" * 100 + "b", "a" * MAX_NAME),
    (".*.*.........(a|aa|aaa)\\.", "." * (MAX_PARTS - 4) + "a" * 200 + ".ab1"),
]
"""The dearest keys that a search found, each with its name; of the first vLLM's matcher takes 0.8 ms."""

EVIL = [
    r"([a-z]|.)([a-z]|.)*([a-z._]|.)*([a-z._]|.)*[!-+]",
    "(?:.{0,999}){9}q",
    "(((((.*)*)*)*)*)*b",
    "(a|a)(a|a)(a|a)b",
    "(a|aa)(a|aa)b",
    "(a|aa).*b",
    "(a+)+b",
    "(.*a){12}",
    r"(?!x)q_proj",
    r"(q)\1",
    r"\w{1000}{1000}",
    r"\pL",
    "q_proj|k_proj",
    "q_proj$x",
    "x^q_proj",
    "(q_proj",
    "q_proj)",
    "(q_proj|)",
    "()",
    "(",
    "*",
    "a*",
    r"\.*",
    "q proj",
    "(?i)q",
    "(?:(q))",
    r"\n",
    "",
    "^",
    "$",
    "(?#x)q",
    "a\n(b)",
    "(" * 250,
]


def by_peft(keys: list[str], name: str) -> str | None:
    """``get_pattern_key`` of ``peft/utils/other.py``, but ``None`` where nothing matches."""
    return next((key for key in keys if re.match(rf"(.*\.)?({key})$", name)), None)


def refused(*keys: str) -> str:
    with pytest.raises(InputFileError) as caught:
        NamePatterns("rank_pattern", keys)
    assert caught.value.message.startswith("rank_pattern")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300
    return caught.value.message


def cost_refused(keys: list[str], names: list[str], alphas: tuple[str, ...] = ()) -> bool:
    try:
        check_cost((NamePatterns("x", keys), NamePatterns("y", alphas)), names)
    except InputFileError:
        return True
    return False


@settings(max_examples=500, deadline=None)
@given(st.lists(NAME | st.sampled_from(REGEXES), max_size=6, unique=True), NAME)
def test_the_first_key_that_matches_wins_as_in_peft(keys: list[str], name: str) -> None:
    # A dot in a plain name is any character to PEFT: the one known difference.
    assume(all(by_peft([key], name) == by_peft([re.escape(key)], name) or key in REGEXES for key in keys))
    expected = by_peft(keys, name)
    assert NamePatterns("x", keys).find(name) == expected


@settings(max_examples=1000, deadline=None)
@given(KEY, st.text("ab1.٣_-é", max_size=12))
def test_a_key_that_is_accepted_matches_what_it_matches_in_peft(key: str, name: str) -> None:
    assume(not (re.fullmatch(r"[\w.\-]+", key) and "." in key))
    try:
        patterns = NamePatterns("x", [key])
    except InputFileError:
        assume(False)
    assert (patterns.find(name) is None) == (by_peft([key], name) is None)


@settings(max_examples=1000, deadline=None)
@given(st.text(r"ab1\.*+?()|[]{}^$-,", max_size=10), st.text("ab1.", max_size=12))
def test_whatever_is_accepted_is_a_regex_to_peft_too(key: str, name: str) -> None:
    assume(not (re.fullmatch(r"[\w.\-]+", key) and "." in key))
    try:
        patterns = NamePatterns("x", [key])
    except InputFileError:
        return
    assert (patterns.find(name) is None) == (by_peft([key], name) is None)


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


@pytest.mark.parametrize("key", EVIL)
def test_a_key_outside_the_language_is_refused_with_its_field(key: str) -> None:
    refused(key)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("(q", "'(q' is not accepted as a key: write plain names, or letters"),
        (r".*\d+.*", "has 3 of .* and \\d+: 2 at most"),
        ("(a|ab)c", "alternatives that begin others"),
        ("a|" * MAX_KEY, f"a key of {2 * MAX_KEY} characters"),
        ("a" * (MAX_KEY + 1), f"a key of {MAX_KEY + 1} characters"),
    ],
)
def test_the_message_says_what_is_wrong(key: str, message: str) -> None:
    assert message in refused(key)


@pytest.mark.parametrize(("key", "name"), WORST)
def test_the_worst_keys_that_are_accepted_are_cheap_where_a_matcher_goes_back(key: str, name: str) -> None:
    assert len(name) <= MAX_NAME
    assert name.count(".") < MAX_PARTS
    assert NamePatterns("x", [key]).find(name) is None
    times = []
    for _ in range(3):
        begin = time.process_time()
        assert by_peft([key], name) is None
        times.append(time.process_time() - begin)
    assert min(times) < 0.2


def test_refusing_a_hostile_key_is_cheap() -> None:
    begin = time.process_time()
    for key in ("(a" * 128, "(a|" * 85, "(a|b)" * 51 + "(", r"\d+" * 85, "." * 255 + "("):
        refused(key)
    assert time.process_time() - begin < 0.5


def test_many_plain_keys_are_fine_and_many_regexes_are_not() -> None:
    keys = [f"model.layers.{i}.q_proj" for i in range(10_000)]
    assert NamePatterns("x", keys).find("model.layers.9999.q_proj") == keys[-1]
    with pytest.raises(InputFileError, match=f"over {MAX_REGEXES} regexes"):
        NamePatterns("x", [f"({i})" for i in range(MAX_REGEXES + 1)])


def test_a_key_for_each_module_is_fine_while_the_engine_keeps_it_compiled() -> None:
    names = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(64) for part in "qkvogud"]
    assert not cost_refused(names, names, tuple(names))
    more = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(80) for part in "qkvogud"]
    assert cost_refused(more, more)
    assert not cost_refused(more, more[:50])


def test_all_matches_together_are_bounded_in_either_field() -> None:
    experts = [f"model.layers.{i}.mlp.experts.{j}.down_proj" for i in range(61) for j in range(256)]
    assert not cost_refused([r".*\.experts\.\d+\.down_proj", "q_proj"], experts)
    assert not cost_refused(["down_proj"] * 60, experts)
    assert cost_refused([f".*a{i}.*b" for i in range(64)], experts)
    assert cost_refused([], experts, tuple(f".*a{i}.*b" for i in range(64)))
    assert cost_refused([".*a.*b"], ["a" * MAX_NAME] * 20_000)
    assert not cost_refused([".*a.*b"], [])
