"""Adapters that an engine refuses, or takes and does not apply: the cases about verdicts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters.build_weights import (
    BASE_8B,
    CASES,
    SMALL,
    Dims,
    adapter_of,
    build,
    expected,
    inspect,
    pairs,
    tensor_count,
    weight_bytes,
)
from loraledger.adapters.reading.folder import AdapterFolder, read_folder
from loraledger.adapters.sizing.basemodel import BaseModel, served_modules
from loraledger.adapters.sizing.engine import EngineSettings, smallest_max_rank
from loraledger.adapters.sizing.footprint import slot_bytes
from loraledger.adapters.verdict.alone import Finding
from loraledger.adapters.verdict.judge import Verdict, judge
from loraledger.config.schema import MAX_RANKS
from loraledger.errors import InputFileError

RANKS: list[dict[str, Any]] = json.loads((CASES / "rank-over-max/adapters.json").read_text())
RANK_ENGINE: dict[str, Any] = json.loads((CASES / "rank-over-max/engine.json").read_text())
RANK_16 = EngineSettings(max_lora_rank=RANK_ENGINE["max_lora_rank"], max_loras=4)
BASE_7B = Dims(hidden=4096, ff=11008, layers=32, heads=32, kv_heads=32)
BASE_13B = Dims(hidden=5120, ff=13824, layers=40, heads=40, kv_heads=40)


def ranked(tmp_path: Path, entry: dict[str, Any]) -> Path:
    """The folder of one adapter of ``rank-over-max``: q and v of four layers, with the ranks that its configuration says."""
    modules = {name: shape for name, shape in SMALL.projections().items() if name.endswith(("q_proj", "v_proj"))}
    spec = pairs(modules, entry["r"] or 8, SMALL.layers)
    for pattern, rank in entry["rank_pattern"].items():
        layer = int(pattern.split(".")[2])
        rest = pattern.split(".", 3)[3]
        spec["tensors"] = [t for t in spec["tensors"] if rest not in t["name"]]
        for index in range(SMALL.layers):
            here = rank if index == layer else entry["r"]
            spec["tensors"] += pairs({rest: modules[rest]}, here, 1, f"model.layers.{index}.")["tensors"]
    config = {
        "peft_type": "LORA",
        "r": entry["r"],
        "lora_alpha": 16,
        "rank_pattern": entry["rank_pattern"],
        "target_modules": ["q_proj", "v_proj"],
    }
    return build(tmp_path / str(entry["name"]), config, spec)


def named(name: str) -> dict[str, Any]:
    return next(entry for entry in RANKS if entry["name"] == name)


def only_refusal(verdict: Verdict) -> Finding:
    [finding] = [f for f in verdict.findings if f.effect == "refuse"]
    return finding


def test_every_rank_of_the_case_is_decided() -> None:
    want = expected("rank-over-max")
    decided = [*want["load_ok"], *want["refuse_too_big"], *want["refuse_no_setting"], *want["refuse_invalid"]]
    assert sorted(decided) == [entry["name"] for entry in RANKS]
    assert list(MAX_RANKS) == RANK_ENGINE["allowed_max_lora_rank"]


@pytest.mark.parametrize("name", expected("rank-over-max")["load_ok"])
def test_ranks_within_the_setting_load(tmp_path: Path, name: str) -> None:
    adapter = read_folder(name, ranked(tmp_path, named(name)))
    assert adapter.rank == named(name)["r"]
    assert judge(adapter, SMALL.write(tmp_path / "base"), RANK_16).outcome == "loads"


@pytest.mark.parametrize(("name", "needed"), expected("rank-over-max")["refuse_too_big"].items())
def test_ranks_over_the_setting_are_refused_with_the_smallest_that_takes_them_and_its_cost(
    tmp_path: Path, name: str, needed: int
) -> None:
    base = SMALL.write(tmp_path / "base")
    adapter = read_folder(name, ranked(tmp_path, named(name)))
    effective = max(named(name)["r"], *named(name)["rank_pattern"].values(), 0)
    assert adapter.rank == effective
    verdict = judge(adapter, base, RANK_16)
    assert (verdict.outcome, verdict.max_lora_rank) == ("refused", needed)
    assert needed == smallest_max_rank(effective)
    finding = only_refusal(verdict)
    assert (finding.rule, finding.by) == ("rank_over_max", "engine")
    assert f"rank {effective} " in finding.message
    assert f"--max-lora-rank {needed}" in finding.remedy
    now, then = slot_bytes(base, RANK_16), slot_bytes(base, replace(RANK_16, max_lora_rank=needed))
    assert now is not None
    assert then is not None
    assert f"{then.total - now.total:,} bytes" in finding.remedy
    assert judge(adapter, base, replace(RANK_16, max_lora_rank=needed)).outcome == "loads"


@pytest.mark.parametrize("name", expected("rank-over-max")["refuse_no_setting"])
def test_rank_above_all_settings_is_refused_with_the_word_that_there_is_none(tmp_path: Path, name: str) -> None:
    adapter = read_folder(name, ranked(tmp_path, named(name)))
    verdict = judge(adapter, SMALL.write(tmp_path / "base"), RANK_16)
    assert (verdict.outcome, verdict.max_lora_rank) == ("refused", None)
    finding = only_refusal(verdict)
    assert str(named(name)["r"]) in finding.message
    assert "no setting" in f"{finding.message} {finding.remedy}"
    assert "512" in f"{finding.message} {finding.remedy}"


@pytest.mark.parametrize("name", expected("rank-over-max")["refuse_invalid"])
def test_rank_zero_is_no_adapter(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputFileError, match=r"adapter_config.json: r is 0"):
        read_folder(name, ranked(tmp_path, named(name)))


def test_inspect_names_each_refused_adapter_with_its_rank_and_the_setting(tmp_path: Path) -> None:
    SMALL.write(tmp_path / "base")
    valid = [entry for entry in RANKS if entry["r"]]
    paths = [ranked(tmp_path, entry) for entry in valid]
    done = inspect(*paths, "--base", tmp_path / "base", "--max-lora-rank", "16")
    assert done.returncode == 5, done.stderr
    lines = done.stdout.splitlines()
    for name, needed in expected("rank-over-max")["refuse_too_big"].items():
        effective = max(named(name)["r"], *named(name)["rank_pattern"].values(), 0)
        [line] = [line for line in lines if line.startswith(f"refused: {name}:")]
        assert f"rank {effective} " in line
        assert f"--max-lora-rank {needed}:" in line
        assert "makes each slot" in line
    for name in expected("rank-over-max")["refuse_no_setting"]:
        [line] = [line for line in lines if line.startswith(f"refused: {name}:")]
        assert "no setting takes it" in line
    refused = [line.split(":")[1].strip() for line in lines if line.startswith("refused: ")]
    assert sorted(refused) == sorted([*expected("rank-over-max")["refuse_too_big"], "i-r768"])


@pytest.fixture
def of_7b(tmp_path: Path) -> AdapterFolder:
    return adapter_of("wrong-base-dims", tmp_path)


def test_adapter_of_a_smaller_base_is_counted_and_refused_on_shapes(tmp_path: Path, of_7b: AdapterFolder) -> None:
    want = expected("wrong-base-dims")
    assert tensor_count(of_7b) == want["tensor_count"]
    assert of_7b.parameters == want["params"]
    assert weight_bytes(of_7b) == want["weight_bytes"]
    modules = of_7b.inventory.modules
    assert modules["model.layers.0.self_attn.q_proj"].in_features == want["adapter_hidden_seen"]
    assert modules["model.layers.0.mlp.up_proj"].out_features == want["adapter_ff_seen"]
    assert len({name.split(".")[2] for name in modules}) == want["adapter_layers_seen"]
    base = BASE_13B.write(tmp_path / "base")
    served = want["serving_base"]
    assert (base.hidden, BASE_13B.ff, base.layers) == (served["hidden"], served["ff"], served["layers"])
    verdict = judge(of_7b, base, EngineSettings(max_lora_rank=32))
    assert verdict.outcome == "refused"
    finding = only_refusal(verdict)
    assert all(figure in finding.message.replace(",", "") for figure in ("q_proj", "4096", "5120"))


@pytest.mark.parametrize(
    ("base_name", "claim", "answer"), json.loads((CASES / "wrong-base-dims/names_that_should_match.json").read_text())
)
def test_names_neither_prove_nor_disprove_a_base(
    tmp_path: Path, of_7b: AdapterFolder, base_name: str, claim: str, answer: str
) -> None:
    same = "same shapes" in answer
    base = replace((BASE_7B if same else BASE_13B).write(tmp_path / "base"), name=base_name)
    adapter = replace(of_7b, base_claim=claim, config=replace(of_7b.config, base_claim=claim))
    verdict = judge(adapter, base, EngineSettings(max_lora_rank=32))
    if same:
        assert verdict.outcome == "loads"
        assert any(f.effect == "warn" and claim in f.message for f in verdict.findings)
    else:
        assert verdict.outcome == "refused"
        assert "4096" in only_refusal(verdict).message.replace(",", "")


def test_the_right_name_does_not_save_the_wrong_shapes(tmp_path: Path, of_7b: AdapterFolder) -> None:
    assert of_7b.base_claim is not None
    base = replace(BASE_13B.write(tmp_path / "base"), name=of_7b.base_claim)
    assert judge(of_7b, base, EngineSettings(max_lora_rank=32)).outcome == "refused"


def served() -> BaseModel:
    return served_modules((CASES / "zero-effective-modules/served_modules.txt").read_text())


def test_suffixes_that_match_and_paths_that_do_not_change_nothing(tmp_path: Path) -> None:
    adapter = adapter_of("zero-effective-modules", tmp_path)
    base = served()
    suffixes = {module.rpartition(".")[2] for module in base.modules}
    assert suffixes == set(adapter.target_modules)
    verdict = judge(adapter, base, RANK_16)
    assert verdict.outcome == "changes_nothing"
    assert verdict.applied == expected("zero-effective-modules")["matched_modules"]
    assert verdict.modules == len(adapter.inventory.modules) == 252
    assert any("language_model." in f"{f.message} {f.remedy}" for f in verdict.findings)


def test_the_same_adapter_under_the_served_paths_is_applied(tmp_path: Path) -> None:
    config = CASES / "zero-effective-modules/adapter/adapter_config.json"
    dims = Dims(hidden=2560, ff=9728, layers=36, heads=32, kv_heads=8)
    spec = pairs(dims.projections(), 8, 2, "language_model.model.layers.{i}.")
    adapter = read_folder("alpha", build(tmp_path / "alpha", config, spec))
    verdict = judge(adapter, served(), RANK_16)
    assert (verdict.outcome, verdict.applied) == ("loads", 14)


def test_an_engine_side_filter_that_excludes_every_target_changes_nothing(tmp_path: Path) -> None:
    asked = json.loads((CASES / "zero-effective-modules/engine_target_filter.json").read_text())
    modules = {
        name: shape
        for name, shape in BASE_8B.projections().items()
        if name.rpartition(".")[2] in asked["adapter_targets"]
    }
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": asked["adapter_targets"]}
    adapter = read_folder("alpha", build(tmp_path / "alpha", config, pairs(modules, 8, BASE_8B.layers)))
    base = BASE_8B.write(tmp_path / "base")
    filtered = replace(RANK_16, lora_target_modules=tuple(asked["lora_target_modules"]))
    verdict = judge(adapter, base, filtered)
    assert (verdict.outcome, verdict.applied) == ("changes_nothing", 0)
    assert any("lora_target_modules" in f"{f.message} {f.remedy}" for f in verdict.findings)
    assert judge(adapter, base, RANK_16).outcome == "loads"


def test_inspect_ends_with_code_5_when_an_adapter_would_change_nothing(tmp_path: Path) -> None:
    BASE_8B.write(tmp_path / "base")
    modules = {name: shape for name, shape in BASE_8B.projections().items() if name.startswith("mlp")}
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    path = build(tmp_path / "alpha", config, pairs(modules, 8, BASE_8B.layers))
    done = inspect(path, "--base", tmp_path / "base", "--lora-target-modules", "qkv_proj")
    assert done.returncode == 5
    assert "nothing" in done.stdout
