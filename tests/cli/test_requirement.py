"""``loraledger requirement``: the document, its three forms, and what is said of what is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from adapters.build_weights import BASE_8B

from .conftest import Cli, Done, write
from .judged import SETTINGS, write_record

SLOT = 92_356_608
"""Bytes of a slot of rank 16 of that base, as ``loraledger budget`` says them."""


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return write_record(tmp_path / "record")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    BASE_8B.write(tmp_path / "base")
    return tmp_path / "base"


def needs(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    return {need["name"]: need for need in done.items("requirement")["needs"]}


def test_the_need_of_the_busiest_hour_after_growth(cli: Cli, record: Path, base: Path) -> None:
    done = cli("requirement", "--record", record, "--growth", "2", "--headroom", "1", "--base", base, "--json")
    found = needs(done)
    slots, tokens = found["slots"]["value"], found["KV tokens"]["value"]
    assert slots == 6
    assert found["host entries"]["value"] == 10
    assert found["usable memory"]["value"] == slots * SLOT + tokens * 131_072
    budget = cli("budget", "--device-memory", "80GiB", "--base", base, "--max-lora-rank", "16", "--json").items(
        "budget"
    )
    assert (budget["slot_bytes"], budget["kv_bytes_per_token"]) == (SLOT, 131_072)
    assert found["floor of a replica"]["value"] == budget["weight_bytes"]
    assert done.items("requirement")["peak"]["since_ns"] % (3600 * 10**9) == 0


def test_the_table_gives_unit_source_and_age_and_a_line_for_each(cli: Cli, record: Path, base: Path) -> None:
    done = cli("requirement", "--record", record, "--base", base)
    assert done.code == 0
    (row,) = [line.split() for line in done.out.splitlines() if line.startswith("slots")]
    assert row[:4] == ["slots", "4", "4", "slots"]
    assert row[4] == "observed"
    whole = " ".join(done.out.split())
    assert "- slots: 3 distinct adapters in flight at once, over 2 replicas, x 1 growth x 1.25 headroom" in whole
    assert "growth 1, headroom 1.25" in whole
    assert "counts back from there, not from now" in done.err


def test_yaml_is_the_same_document(cli: Cli, record: Path) -> None:
    as_json = json.loads(cli("requirement", "--record", record, "--json").out)
    as_yaml = yaml.safe_load(cli("requirement", "--record", record, "--yaml").out)
    for document in (as_json, as_yaml):
        for need in document["items"]["needs"]:
            del need["age_ns"]  # of two moments
    assert as_yaml == as_json


def test_without_a_base_the_counts_stand_and_the_bytes_are_unknown(cli: Cli, record: Path) -> None:
    done = cli("requirement", "--record", record)
    assert done.code == 0
    (row,) = [line.split() for line in done.out.splitlines() if line.startswith("usable memory")]
    assert row == ["usable", "memory", "-", "-", "-", "-"]
    assert "gives bytes of slots and of KV tokens" in " ".join(done.out.split())


def test_a_floor_is_taken_as_given(cli: Cli, record: Path, base: Path) -> None:
    for more in ((), ("--base", base)):
        found = needs(cli("requirement", "--record", record, "--floor", "20GiB", *more, "--json"))
        assert found["floor of a replica"]["value"] == 20 * 2**30
        assert "as given by --floor" in found["floor of a replica"]["words"]


def test_the_settings_name_record_and_base(cli: Cli, record: Path, base: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "base": {"names": ["base"], "path": str(base)}, "record": {"dir": str(record)}}
    write(tmp_path / "own.yaml", settings)
    found = needs(cli("requirement", "--config", tmp_path / "own.yaml", "--json"))
    assert found["usable memory"]["value"] == found["slots"]["value"] * SLOT + found["KV tokens"]["value"] * 131_072


def test_a_named_period_is_taken(cli: Cli, record: Path) -> None:
    words = ("--from", "2026-09-21T11:50:00Z", "--to", "2026-09-21T12:00:00Z", "--json")
    done = cli("requirement", "--record", record, *words)
    assert needs(done)["host entries"]["value"] == 2  # one adapter x 1.25
    assert any("may hold a higher peak" in note for note in done.items("requirement")["notes"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--growth", "0"), 2, "growth is 0.0: must be more than 0"),
        (("--headroom", "nan"), 2, "headroom is nan"),
        (("--json", "--yaml"), 2, "give one"),
        (("--floor", "20G"), 2, "no unit of a size"),
        (("--base", "nowhere"), 3, "is no base model's folder"),
        (("--base", "base", "--max-lora-rank", "17"), 2, "vLLM takes --max-lora-rank"),
    ],
)
def test_what_cannot_be_is_refused(
    cli: Cli, record: Path, base: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    done = cli("requirement", "--record", record, *words)
    assert done.code == code
    assert said in " ".join(done.err.replace("│", " ").split())
