"""YAML as it is read: with lines, without silent losses."""

from __future__ import annotations

import datetime

import pytest

from loraledger.config.yamltree import read_value, read_yaml
from loraledger.errors import ConfigError


def test_values_keep_the_line_of_their_key() -> None:
    tree, problems = read_yaml("a:\n  b:\n    - x\n    - {c: 1}\n\nd: 2\n", "f.yaml")
    assert problems == []
    assert tree.data == {"a": {"b": ["x", {"c": 1}]}, "d": 2}
    lines = {where: origin.line for where, origin in tree.origins.items() if where}
    assert lines == {("a",): 1, ("a", "b"): 2, ("a", "b", 0): 3, ("a", "b", 1): 4, ("a", "b", 1, "c"): 4, ("d",): 6}
    assert str(tree.origins["a", "b", 1, "c"]) == "f.yaml:4"


def test_an_empty_document_is_no_settings() -> None:
    assert read_yaml("# nothing\n", "f")[0].data == {}


def test_a_key_given_twice_is_refused_with_both_lines() -> None:
    tree, problems = read_yaml("a: {x: 1}\nb:\n  y: 1\n  y: 2\na: 3\n", "f")
    assert [(p.where, p.message, str(p.origin)) for p in problems] == [
        (("b", "y"), "is given twice, first at f:3: keep one", "f:4"),
        (("a",), "is given twice, first at f:1: keep one", "f:5"),
    ]
    assert tree.data == {"a": {"x": 1}, "b": {"y": 1}}


def test_merge_keys_and_keys_that_are_not_text_are_refused() -> None:
    _, problems = read_yaml("a: &a {x: 1}\nb: {<<: *a}\nc: {1: 2}\nd: {yes: 1}\ne: {[1]: 2}\n", "f")
    assert [(p.where, str(p.origin)) for p in problems] == [
        (("b",), "f:2"),
        (("c",), "f:3"),
        (("d",), "f:4"),
        (("e",), "f:5"),
    ]
    assert "merge keys" in problems[0].message
    assert all("put it in quotes" in problem.message for problem in problems[1:])


def test_aliases_are_followed() -> None:
    assert read_yaml("a: &x {b: 1}\nc: [*x, *x]\n", "f")[0].data == {"a": {"b": 1}, "c": [{"b": 1}, {"b": 1}]}


def test_a_document_that_contains_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"f:1: a\[0\]: refers to itself"):
        read_yaml("a: &a [*a]\n", "f")


def test_aliases_that_expand_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraledger.config.yamltree.MAX_NODES", 5_000)
    layers = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 30))
    with pytest.raises(ConfigError, match=r"expands to more than 5,000 values"):
        read_yaml("l0: &l0 [1]\n" + layers, "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", r"f:2: is not valid YAML"),
        ("a: 1\n---\nb: 2\n", r"f:2: is not valid YAML"),
        ("a: *missing\n", r"f:1: is not valid YAML"),
        ("[" * 100_000, "is not valid YAML"),
        ("a: \x01", "is not valid YAML"),
        ("- a\n", r"f: must be a mapping of sections"),
        ("just text\n", r"f: must be a mapping of sections"),
    ],
)
def test_what_is_no_settings_document_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_yaml(text, "f")


def test_a_tag_that_would_run_code_is_refused() -> None:
    tree, problems = read_yaml("a: !!python/name:os.system ''\n", "f")
    assert tree.data == {"a": None}
    assert "cannot be read" in problems[0].message


def test_a_value_that_cannot_be_built_is_named_with_its_line() -> None:
    _, problems = read_yaml("a: 1\nb: 2024-99-99\n", "f")
    assert [(p.where, str(p.origin)) for p in problems] == [(("b",), "f:2")]
    assert problems[0].message.endswith("put it in quotes")


def test_single_values_are_read_in_yaml_notation() -> None:
    assert read_value("8") == 8
    assert read_value("[a, {b: 1}]") == ["a", {"b": 1}]
    assert read_value("- a\n- b\n") == ["a", "b"]
    assert read_value("") is None
    assert read_value("2024-01-02") == datetime.date(2024, 1, 2)
    for text in ("[a", "{a: 1, a: 2}", "a: b: c"):
        with pytest.raises(ConfigError):
            read_value(text)
