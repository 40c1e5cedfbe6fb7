"""The residency ranking that the settings name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraledger.config import Settings, settings_from, warnings
from loraledger.errors import ConfigError

RANKING = [{"replica": "r0", "adapter": "chat"}, {"replica": "r0", "adapter": "sql"}]


@pytest.fixture
def ranked(minimal: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A valid configuration with a ranking of two adapters, and a probe."""
    minimal["adapters"]["list"].append({"name": "chat", "path": "adapters/chat"})
    minimal["replicas"][0]["probe"] = {"env": "PROBE_KEY"}
    minimal["policy"] = {"residency": "ranked", "pins": "pins.json"}
    write(tmp_path, pins=RANKING)
    return minimal


def write(root: Path, text: str | None = None, **changes: Any) -> None:
    document = {"schema_version": 1, "kind": "pins", "pins": RANKING, **changes}
    (root / "pins.json").write_text(json.dumps(document) if text is None else text, encoding="utf-8")


def refused(data: dict[str, Any], root: Path) -> str:
    with pytest.raises(ConfigError) as error:
        settings_from(data, root)
    return error.value.message


def test_a_ranking_is_read_in_its_order_from_beside_the_settings(ranked: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_from(ranked, tmp_path)
    assert settings.ranking == (("r0", "chat"), ("r0", "sql"))
    assert settings.policy.pins == tmp_path / "pins.json"
    assert warnings(settings) == []


def test_lru_is_the_default_and_reads_no_file(ranked: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "pins.json").unlink()
    del ranked["policy"]["residency"]
    settings = settings_from(ranked, tmp_path)
    assert (settings.policy.residency, settings.ranking) == ("lru", ())
    assert [text.partition(":")[0] for text in warnings(settings)] == ["policy.pins"]


def test_more_than_the_pins_may_stand_in_the_file(ranked: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, written_at="2026-01-01", pins=[{**pin, "gain_s": 3.5} for pin in RANKING])
    assert len(settings_from(ranked, tmp_path).ranking) == 2


def test_ranked_without_a_ranking_is_refused(ranked: dict[str, Any], tmp_path: Path) -> None:
    del ranked["policy"]["pins"]
    assert refused(ranked, tmp_path).startswith("policy.pins: is missing: residency ranked takes a ranking")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read (No such file or directory): write it with loraledger advise --pins"),
        ("", "is no ranking (Input data was truncated)"),
        ("[]", "is no ranking (Expected `object`, got `array`)"),
        ('{"schema_version": 1, "kind": "pins"}', "missing required field `pins`"),
        ('{"schema_version": 1, "kind": "pins", "pins": [{"replica": "r0"}]}', "missing required field `adapter`"),
        ('{"schema_version": 1, "kind": "advice", "pins": []}', "is of kind 'advice', schema_version 1"),
        ('{"schema_version": 2, "kind": "pins", "pins": []}', "is of kind 'pins', schema_version 2"),
        ('{"schema_version": 1, "kind": "pins", "pins": []}', "names no adapter: leave policy.residency at lru"),
    ],
)
def test_a_file_that_is_no_ranking_is_refused_with_its_field_and_path(
    ranked: dict[str, Any], tmp_path: Path, text: str | None, reason: str
) -> None:
    if text is None:
        (tmp_path / "pins.json").unlink()
    else:
        write(tmp_path, text)
    said = refused(ranked, tmp_path)
    assert said.startswith(f"policy.pins: {tmp_path / 'pins.json'} ")
    assert reason in said


def test_a_file_that_is_too_large_is_not_read(
    ranked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraledger.config.pins.MOST_BYTES", 10)
    assert "is over 10 bytes" in refused(ranked, tmp_path)


def test_names_that_nothing_has_are_refused_each_with_its_place(ranked: dict[str, Any], tmp_path: Path) -> None:
    write(
        tmp_path,
        pins=[{"replica": "r0", "adapter": "sqk"}, {"replica": "r9", "adapter": "sql"}, RANKING[0], RANKING[0]],
    )
    at = tmp_path / "pins.json"
    assert [line.strip() for line in refused(ranked, tmp_path).splitlines()[1:]] == [
        f"policy.pins: {at}: pins[0]: 'sqk' is no adapter; did you mean 'sql'?",
        f"policy.pins: {at}: pins[1]: 'r9' is no replica; known: r0",
        f"policy.pins: {at}: pins[3]: 'chat' on 'r0' is a duplicate of pins[2]",
    ]


def test_with_a_folder_adapters_are_known_only_when_it_is_read(ranked: dict[str, Any], tmp_path: Path) -> None:
    ranked["adapters"]["folder"] = "adapters"
    write(tmp_path, pins=[{"replica": "r0", "adapter": "unheard-of"}])
    assert settings_from(ranked, tmp_path).ranking == (("r0", "unheard-of"),)


def test_other_problems_are_told_beside_it(ranked: dict[str, Any], tmp_path: Path) -> None:
    ranked["replicas"][0]["host_entries"] = 1
    del ranked["policy"]["pins"]
    said = refused(ranked, tmp_path)
    assert "replicas[0].host_entries" in said
    assert "policy.pins" in said


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("probe", None, "replicas[0].probe: is not set, so nothing is pinned on 'r0' and its LRU stays"),
        ("slots", 1, "replicas[0].slots: the only slot serves all adapters, so nothing is pinned on 'r0'"),
    ],
)
def test_where_nothing_can_be_pinned_a_warning_says_so(
    ranked: dict[str, Any], tmp_path: Path, field: str, value: object, said: str
) -> None:
    ranked["replicas"][0][field] = value
    assert warnings(settings_from(ranked, tmp_path)) == [said]


def test_settings_with_another_ranking_are_others(ranked: dict[str, Any], tmp_path: Path) -> None:
    one: Settings = settings_from(ranked, tmp_path)
    write(tmp_path, pins=RANKING[::-1])
    assert settings_from(ranked, tmp_path) != one
    write(tmp_path)
    assert settings_from(ranked, tmp_path) == one
