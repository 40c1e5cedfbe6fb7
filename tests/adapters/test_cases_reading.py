"""Folders as people really have them: the cases about what is read, and the set ``adapter_configs``."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.build_weights import (
    BASE_8B,
    CASES,
    PREFIX,
    SMALL,
    adapter_of,
    build,
    expected,
    inspect,
    pairs,
    spec_of,
    tensor_count,
    weight_bytes,
)
from loraledger.adapters.reading.folder import AdapterFolder, read_folder
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.verdict.judge import Verdict, judge
from loraledger.errors import InputFileError

ALL_SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
RANK_64 = EngineSettings(max_lora_rank=64)


def refusal(path: Path) -> str:
    with pytest.raises(InputFileError) as caught:
        read_folder("alpha", path)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("folder", ["adapter", "adapter_all_linear"])
def test_one_string_of_targets_stays_one_and_the_modules_come_from_the_tensors(tmp_path: Path, folder: str) -> None:
    want = expected("regex-targets")
    config = CASES / "regex-targets" / folder / "adapter_config.json"
    adapter = read_folder("alpha", build(tmp_path / "alpha", config, spec_of("regex-targets")))
    assert tensor_count(adapter) == want["tensor_count"]
    assert adapter.parameters == want["params"]
    assert weight_bytes(adapter) == want["weight_bytes"]
    assert len(adapter.inventory.modules) == want["modules_found"]
    text = json.loads(config.read_text())["target_modules"]
    assert adapter.target_modules == adapter.config.target_modules == text
    assert {module.suffix for module in adapter.inventory.modules.values()} == ALL_SEVEN
    verdict = judge(adapter, BASE_8B.write(tmp_path / "base"), RANK_64)
    assert (verdict.outcome, verdict.applied, verdict.modules) == ("loads", 224, 224)


def test_a_pointer_in_place_of_weights_is_named_with_the_real_size() -> None:
    message = refusal(CASES / "lfs-pointer/adapter")
    assert "Git LFS pointer" in message
    assert "83,945,072 bytes" in message
    assert "not fetched" in message
    assert "git lfs pull" in message
    assert "header" not in message
    length = (CASES / "lfs-pointer/adapter/adapter_model.safetensors").stat().st_size
    assert str(length) not in message


def test_a_pointer_in_place_of_the_configuration_is_named_too() -> None:
    message = refusal(CASES / "lfs-pointer/adapter_config_is_pointer")
    assert message.startswith("adapter_config.json is a Git LFS pointer")
    assert "1,049 bytes" in message
    assert "JSON" not in message


def test_inspect_says_pointer_of_both_and_reports_the_healthy_one_beside_them(tmp_path: Path) -> None:
    good = adapter_of("size-bf16-header", tmp_path)
    case = CASES / "lfs-pointer"
    done = inspect(case / "adapter", case / "adapter_config_is_pointer", good.path, "--json")
    assert done.returncode == 3
    assert "83,945,072 bytes" in done.stdout + done.stderr
    assert "1,049 bytes" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert '"alpha"' in done.stdout


def test_only_pickled_weights_are_refused_with_their_size() -> None:
    message = refusal(CASES / "bin-pickle/adapter")
    assert "adapter_model.bin" in message
    assert "4,549 bytes" in message
    assert "never opened" in message
    assert "safetensors" in message


def test_safetensors_win_over_pickled_weights_beside_them(tmp_path: Path) -> None:
    folder = both(tmp_path)
    adapter = read_folder("alpha", folder)
    assert adapter.ignored == ("adapter_model.bin",)
    assert any("adapter_model.bin" in warning for warning in adapter.warnings)
    assert adapter.bytes_disk == (folder / "adapter_model.safetensors").stat().st_size
    assert folder / "adapter_model.bin" not in adapter.files
    assert adapter.dtypes == ("BF16",)


def both(tmp_path: Path) -> Path:
    """The folder with both kinds of weights, its safetensors built."""
    source = CASES / "bin-pickle/adapter_both"
    spec = pairs(BASE_8B.projections(), 8, BASE_8B.layers)
    folder = build(tmp_path / "both", source / "adapter_config.json", spec)
    (folder / "adapter_model.bin").write_bytes((source / "adapter_model.bin").read_bytes())
    return folder


def test_the_pickle_is_never_opened_and_its_canary_never_printed(tmp_path: Path) -> None:
    assert b"CANARY" in (CASES / "bin-pickle/adapter/adapter_model.bin").read_bytes()
    program = """
import sys
def refuse(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".bin") or event.startswith("pickle."):
        raise SystemExit(f"{event} {arguments[0]}")
sys.addaudithook(refuse)
sys.argv[0] = "loraledger"
from loraledger.cli.main import main
main()
"""
    paths = [CASES / "bin-pickle/adapter", both(tmp_path)]
    for flags in ([], ["--json"]):
        command = [sys.executable, "-c", program, "adapters", "inspect", *map(str, paths), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        said = done.stdout + done.stderr
        assert done.returncode == 3, said
        assert "CANARY" not in said
        assert "adapter_model.bin" in said


def skewed(tmp_path: Path, folder: str, rank: int = 16) -> AdapterFolder:
    config = CASES / "peft-version-skew" / folder / "adapter_config.json"
    named = json.loads(config.read_text())["target_modules"]
    modules = {name: shape for name, shape in BASE_8B.projections().items() if name.rpartition(".")[2] in named}
    return read_folder(folder, build(tmp_path / folder, config, pairs(modules, rank, BASE_8B.layers)))


def test_keys_of_a_later_release_are_ignored_and_listed(tmp_path: Path) -> None:
    adapter = skewed(tmp_path, "new")
    assert adapter.config.unknown == ("some_field_from_2027",)
    assert any("some_field_from_2027" in warning for warning in adapter.warnings)
    assert adapter.config.peft_version == "0.18.1"
    assert judge(adapter, BASE_8B.write(tmp_path / "base"), RANK_64).outcome == "loads"
    assert "some_field_from_2027" in inspect(adapter.path).stdout


def test_keys_of_2023_are_accepted(tmp_path: Path) -> None:
    adapter = skewed(tmp_path, "old_2023")
    assert adapter.config.unknown == ()
    assert (adapter.rank, set(adapter.scalings.values())) == (16, {1.0})
    assert adapter.target_modules == ("k_proj", "o_proj", "q_proj", "v_proj")


def test_missing_fields_are_refused_by_name(tmp_path: Path) -> None:
    config = CASES / "peft-version-skew/missing_fields/adapter_config.json"
    folder = build(tmp_path / "alpha", config, pairs(SMALL.projections(), 8, SMALL.layers))
    message = refusal(folder)
    assert "lacks r, target_modules" in message
    assert "lora_alpha" not in message


def test_null_targets_are_taken_from_the_tensors_with_a_warning(tmp_path: Path) -> None:
    config = json.loads((CASES / "peft-version-skew/old_2023/adapter_config.json").read_text())
    config["target_modules"] = None
    adapter = read_folder("alpha", build(tmp_path / "alpha", config, pairs(SMALL.projections(), 16, SMALL.layers)))
    assert adapter.target_modules == tuple(sorted(ALL_SEVEN))
    assert any("target_modules" in warning for warning in adapter.warnings)


# The set of public configurations. Each is given weights that fit it.

FUSED = {
    "self_attention.query_key_value": (4096, 4608),
    "self_attention.dense": (4096, 4096),
    "mlp.dense_h_to_4h": (4096, 27392),
    "mlp.dense_4h_to_h": (13696, 4096),
}
ENCODER = {"attention.self.query": (768, 768), "attention.self.value": (768, 768)}
HYBRID = {
    "linear_attn.in_proj_qkv": (256, 768),
    "linear_attn.in_proj_z": (256, 256),
    "linear_attn.in_proj_a": (256, 16),
    "linear_attn.in_proj_b": (256, 16),
    "linear_attn.out_proj": (256, 256),
}
VISION = {
    "attn.qkv": (128, 384),
    "attn.proj": (128, 128),
    "mlp.linear_fc1": (128, 256),
    "mlp.linear_fc2": (256, 128),
}


def public(tmp_path: Path, name: str, *specs: dict[str, Any]) -> AdapterFolder:
    """Configuration ``name``; without ``specs`` on the projections of a small decoder that it targets, all for null."""
    [config] = (CASES / "adapter_configs").glob(f"{name}_*.json")
    settings = json.loads(config.read_text())
    wanted = settings["target_modules"] or ALL_SEVEN
    modules = {name: shape for name, shape in SMALL.projections().items() if name.rpartition(".")[2] in wanted}
    given = specs or (pairs(modules, settings["r"], SMALL.layers),)
    tensors = [tensor for spec in given for tensor in spec["tensors"]]
    return read_folder(name, build(tmp_path / name, config, {"tensors": tensors}))


@pytest.fixture
def small(tmp_path: Path) -> BaseModel:
    return SMALL.write(tmp_path / "base")


def refused_for(verdict: Verdict, word: str) -> bool:
    return any(f.effect == "refuse" and word in f.message for f in verdict.findings)


def test_every_public_configuration_is_tested_here() -> None:
    numbers = [path.name[:3] for path in sorted((CASES / "adapter_configs").glob("a*.json"))]
    assert numbers == sorted(expected("adapter_configs")) == [f"a{number:02d}" for number in range(1, 12)]


def test_a01_fused_names_of_rank_8(tmp_path: Path) -> None:
    adapter = public(tmp_path, "a01", pairs(FUSED, 8, 2, "transformer.encoder.layers.{i}."))
    assert adapter.rank == 8
    suffixes = {module.suffix for module in adapter.inventory.modules.values()}
    assert suffixes == set(adapter.target_modules) == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}


def test_a02_private_base_path_is_no_proof_of_a_mismatch(tmp_path: Path, small: BaseModel) -> None:
    adapter = public(tmp_path, "a02")
    assert adapter.rank == 64
    assert set(adapter.scalings.values()) == {0.25}
    assert adapter.base_claim == "/home/user/models/base-7b"
    assert judge(adapter, small, RANK_64).outcome == "loads"


def test_a03_every_key_of_peft_018_is_known(tmp_path: Path, small: BaseModel) -> None:
    adapter = public(tmp_path, "a03")
    assert adapter.rank == 64
    assert set(adapter.scalings.values()) == {2.0}
    assert adapter.config.unknown == ()
    assert judge(adapter, small, RANK_64).outcome == "loads"


def test_a04_two_modules_a_layer(tmp_path: Path) -> None:
    adapter = public(tmp_path, "a04")
    assert adapter.rank == 16
    assert adapter.target_modules == ("q_proj", "v_proj")
    assert len(adapter.inventory.modules) == 2 * SMALL.layers


def test_a05_four_bit_base_is_allowed_with_a_note(tmp_path: Path, small: BaseModel) -> None:
    adapter = public(tmp_path, "a05")
    verdict = judge(adapter, small, RANK_64)
    assert verdict.outcome == "loads"
    assert any(f.effect == "warn" and "acme/base-8b-instruct-bnb-4bit" in f.message for f in verdict.findings)


def test_a06_classifier_is_no_generator(tmp_path: Path, small: BaseModel) -> None:
    head = {"name": f"{PREFIX}classifier.weight", "dtype": "BF16", "shape": [3, 768]}
    adapter = public(tmp_path, "a06", pairs(ENCODER, 8, 12, "encoder.layer.{i}."), {"tensors": [head]})
    assert adapter.config.task_type == "SEQ_CLS"
    assert adapter.config.modules_to_save == ("classifier", "score")
    assert adapter.inventory.whole.parameters == 3 * 768
    plain = [f for f in judge(public(tmp_path / "plain", "a04"), small, RANK_64).findings if f.effect == "refuse"]
    assert plain == []
    for base in (small, None):
        verdict = judge(adapter, base, RANK_64)
        assert verdict.outcome == "refused"
        assert refused_for(verdict, "is a classifier")


def test_a07_wrong_task_tag_does_not_matter_and_foreign_targets_do(tmp_path: Path, small: BaseModel) -> None:
    text = pairs(SMALL.projections(), 16, SMALL.layers, "model.language_model.layers.{i}.")
    hybrid = pairs(HYBRID, 16, SMALL.layers, "model.language_model.layers.{i}.")
    adapter = public(tmp_path, "a07", text, hybrid, pairs(VISION, 16, 2, "model.visual.blocks.{i}."))
    assert adapter.config.task_type == "SEQ_2_SEQ_LM"
    assert "attn.proj" in adapter.target_modules
    assert adapter.inventory.modules["model.visual.blocks.1.attn.proj"].rank == 16
    verdict = judge(adapter, small, RANK_64)
    assert verdict.applied == 0  # its text part lies under another prefix than this base's
    foreign = [f for f in verdict.findings if f.effect in ("refuse", "drop")]
    assert verdict.outcome == "refused"
    assert not any("SEQ_2_SEQ_LM" in f.message for f in foreign)
    assert any(f.effect == "warn" and "SEQ_2_SEQ_LM" in f.message for f in verdict.findings)
    assert any("linear_attn" in f.message for f in foreign)


def test_a07_task_tag_alone_refuses_nothing(tmp_path: Path, small: BaseModel) -> None:
    adapter = public(tmp_path, "a07")
    assert judge(adapter, small, RANK_64).outcome == "loads"


def test_a08_rank_stabilized_scaling_and_targets_from_tensors(tmp_path: Path) -> None:
    adapter = public(tmp_path, "a08")
    assert adapter.config.use_rslora
    assert set(adapter.scalings.values()) == {64 / math.sqrt(64)} == {8.0}
    assert adapter.config.target_modules is None
    assert adapter.target_modules == tuple(sorted(ALL_SEVEN))


def test_a09_dora_with_null_targets(tmp_path: Path, small: BaseModel) -> None:
    modules = SMALL.projections()
    magnitude = [
        {
            "name": f"{PREFIX}model.layers.{{i}}.{name}.lora_magnitude_vector",
            "layers": 4,
            "dtype": "BF16",
            "shape": [out],
        }
        for name, (_, out) in modules.items()
    ]
    adapter = public(tmp_path, "a09", pairs(modules, 32, SMALL.layers), {"tensors": magnitude})
    assert adapter.config.use_dora
    assert adapter.target_modules == tuple(sorted(ALL_SEVEN))
    assert adapter.inventory.magnitude.parameters == SMALL.layers * sum(out for _, out in modules.values())
    assert refused_for(judge(adapter, small, RANK_64), "DoRA")


def test_a10_block_diagonal_variant_is_refused_and_rank_14_needs_16(tmp_path: Path, small: BaseModel) -> None:
    adapter = public(tmp_path, "a10")
    assert adapter.config.block_diagonal
    assert adapter.rank == 14
    verdict = judge(adapter, small, RANK_64)
    assert (verdict.outcome, verdict.max_lora_rank) == ("refused", 16)
    assert refused_for(verdict, "block-diagonal (use_bdlora)")


def test_a11_rank_10_needs_16(tmp_path: Path, small: BaseModel) -> None:
    adapter = public(tmp_path, "a11")
    assert adapter.rank == 10
    assert adapter.target_modules == ("down_proj", "gate_proj", "up_proj")
    verdict = judge(adapter, small, EngineSettings(max_lora_rank=16))
    assert (verdict.outcome, verdict.max_lora_rank) == ("loads", 16)
    assert judge(adapter, small, EngineSettings(max_lora_rank=8)).outcome == "refused"
