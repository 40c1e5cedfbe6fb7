"""Names: the alphabet, and adapters that would capture base traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraledger.config import settings_from
from loraledger.config.names import MAX_NAME, bad_name, refused_adapters
from loraledger.errors import ConfigError

CASE = Path(__file__).parent.parent / "cases" / "base-name-collision"


def test_adapters_under_a_base_name_or_a_variant_of_it_are_refused() -> None:
    case = json.loads((CASE / "registry.json").read_text())
    expected = json.loads((CASE / "expect.json").read_text())
    names = case["new_adapters"]
    refused = refused_adapters(names, case["served_base_names"])
    assert [name for i, name in enumerate(names) if i not in refused] == expected["accepted"]
    labels = {i: f"{name} (2nd)" if name in names[:i] else name for i, name in enumerate(names)}
    assert {labels[i] for i in refused} == set(expected["refused"])
    for i, reason in refused.items():
        assert expected["refused"][labels[i]] in reason


def test_settings_refuse_the_same_names(minimal: dict[str, Any]) -> None:
    case = json.loads((CASE / "registry.json").read_text())
    minimal["base"]["names"] = case["served_base_names"]
    minimal["adapters"]["list"] = [{"name": name, "path": "x"} for name in case["new_adapters"]]
    with pytest.raises(ConfigError) as caught:
        settings_from(minimal)
    lines = caught.value.message.splitlines()
    assert len(lines) == 6
    assert [line.strip().split(":")[0] for line in lines[1:]] == [f"adapters.list[{i}].name" for i in (0, 1, 2, 3, 5)]


def test_case_and_space_together_are_named() -> None:
    assert "differs by case and space only" in refused_adapters(["B ase"], ["base"])[0]


@pytest.mark.parametrize(
    "name", ["sql-v1", "org/adapter@main", "base:alpaca", "a", "A_1+b", "...", "a..b", "x" * MAX_NAME]
)
def test_common_names_are_accepted(name: str) -> None:
    assert bad_name(name) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../../etc", "segment"),
        ("/abs/path", "segment"),
        ("a/../../b", "segment"),
        ("a//b", "segment"),
        ("a/", "segment"),
        (".", "segment"),
        ("..", "segment"),
        ("C:\\models\\x", r"'\\\\'"),
        ("a,b", "','"),
        ("tenant a", "' '"),
        ("naïve-é", "xe9"),
        ("a\nb", r"'\\n'"),
        ('a"b', "'\"'"),
        ("a\0b", "x00"),
        ("a~2", "'~'"),
        ("a*", r"'\*'"),
        ("a\u202eb", "u202e"),
        ("..%2f..%2fetc", "'%'"),
        ("", "empty"),
        ("x" * 300, "300 characters"),
    ],
)
def test_names_that_break_labels_paths_or_eyes_are_refused(name: str, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(bad_name(name))
