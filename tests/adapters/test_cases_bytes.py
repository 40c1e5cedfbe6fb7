"""What adapters and slots weigh: the cases about sizes, with their numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from adapters.build_weights import (
    BASE_8B,
    CASES,
    Dims,
    adapter_of,
    build,
    expected,
    inspect,
    lora_bytes,
    spec_of,
    tensor_count,
    weight_bytes,
)
from loraledger.adapters.reading.folder import AdapterFolder, read_folder
from loraledger.adapters.sizing.engine import EngineName, EngineSettings
from loraledger.adapters.sizing.footprint import SlotBytes, adapter_device_bytes, host_bytes, kv_tokens, slot_bytes
from loraledger.adapters.verdict.judge import judge

RANK_16 = EngineSettings(max_lora_rank=16)
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
BASE_65B = Dims(hidden=8192, ff=22016, layers=80, heads=64, kv_heads=64)
BASE_1B = Dims(hidden=2048, ff=5632, layers=22, heads=32, kv_heads=4, head_dim=64)
BASE_4B = Dims(hidden=2560, ff=9728, layers=36, heads=32, kv_heads=8, vocabulary=151_936)
BASE_3B = Dims(hidden=2048, ff=11008, layers=36, heads=16, kv_heads=2, vocabulary=151_936)
MINI_4B = Dims(hidden=3072, ff=8192, layers=32, heads=32, kv_heads=32, head_dim=96, vocabulary=32_064)
MOE_A3B = Dims(hidden=2048, ff=6144, layers=24, heads=16, kv_heads=2)


def slots(base: Any, engine: EngineSettings) -> SlotBytes:
    found = slot_bytes(base, engine)
    assert found is not None
    return found


def on_host(adapter: AdapterFolder, engine: EngineSettings, base: Any = None) -> int:
    found = host_bytes(adapter, engine, base)
    assert found is not None
    return found.exact


def check_totals(adapter: AdapterFolder, want: dict[str, Any]) -> None:
    """What each size case says of the tensors; the file is longer by its header alone."""
    assert tensor_count(adapter) == want["tensor_count"]
    assert adapter.parameters == want["params"]
    assert weight_bytes(adapter) == want["weight_bytes"]
    file = (adapter.path / "adapter_model.safetensors").stat().st_size
    assert adapter.bytes_disk == file
    with (adapter.path / "adapter_model.safetensors").open("rb") as stream:
        assert file == 8 + int.from_bytes(stream.read(8), "little") + want["weight_bytes"]


def test_size_units_the_parameter_count_is_not_the_bytes(tmp_path: Path) -> None:
    want = expected("size-units-42mb")
    base = BASE_8B.write(tmp_path / "base")
    adapter = adapter_of("size-units-42mb", tmp_path)
    check_totals(adapter, want)
    assert slots(base, RANK_16).projections == want["slot_bytes_at_max_rank_16"]
    engine = replace(RANK_16, max_loras=8, max_cpu_loras=64)
    assert engine.max_loras * slots(base, engine).projections == want["gpu_bytes_8_slots"]
    assert engine.host_entries * on_host(adapter, engine, base) == want["host_bytes_64"]


def test_size_units_both_explanations_of_the_claimed_42_mb(tmp_path: Path) -> None:
    claimed = 41_943_040
    assert all(f"{claimed:,}" in line for line in expected("size-units-42mb")["explanations_of_42MB"])
    spec = spec_of("size-units-42mb")
    assert adapter_of("size-units-42mb", tmp_path).parameters == claimed
    for tensor in spec["tensors"]:
        tensor["shape"] = [8 if size == 16 else size for size in tensor["shape"]]
    config = json.loads((CASES / "size-units-42mb/adapter/adapter_config.json").read_text())
    half = read_folder("half", build(tmp_path / "half", {**config, "r": 8}, spec))
    assert weight_bytes(half) == claimed


def test_size_units_both_units_are_shown(tmp_path: Path) -> None:
    BASE_8B.write(tmp_path / "base")
    adapter = adapter_of("size-units-42mb", tmp_path)
    done = inspect(adapter.path, "--base", tmp_path / "base", "--max-loras", "8", "--max-cpu-loras", "64")
    assert done.returncode == 0, done.stderr
    [layers] = [line for line in done.stdout.splitlines() if line.split()[:1] == ["layers"]]
    assert all(figure in layers for figure in ("80.0 MiB", "83.9 MB", "83,886,080"))


def test_size_units_inspect_counts_what_the_case_counts(tmp_path: Path) -> None:
    want = expected("size-units-42mb")
    BASE_8B.write(tmp_path / "base")
    adapter = adapter_of("size-units-42mb", tmp_path)
    done = inspect(adapter.path, "--base", tmp_path / "base", "--max-loras", "8", "--max-cpu-loras", "64", "--json")
    document = json.loads(done.stdout)["items"]
    [row], totals = document["adapters"], document["totals"]
    assert row["parameters"] == want["params"]
    assert row["lora_bytes"] == row["host_bytes"] == want["weight_bytes"]
    assert totals["slot_projection_bytes_per_rank_process"] == want["slot_bytes_at_max_rank_16"]
    both = totals["slot_projection_bytes_per_rank_process"] + totals["slot_embedding_bytes_per_rank_process"]
    assert totals["all_slots_bytes_per_rank_process"] == 8 * both
    assert document["engine"]["host_entries"] * row["host_bytes"] == want["host_bytes_64"]


def test_fp32_and_bf16_files_differ_on_disk_only(tmp_path: Path) -> None:
    want = expected("size-fp32-vs-bf16")
    base = BASE_65B.write(tmp_path / "base")
    wide = adapter_of("size-fp32-vs-bf16", tmp_path, "tensors_fp32.json", "wide")
    narrow = adapter_of("size-fp32-vs-bf16", tmp_path, "tensors_bf16.json", "narrow")
    assert (wide.path / "adapter_config.json").read_bytes() == (narrow.path / "adapter_config.json").read_bytes()
    assert wide.config == narrow.config
    assert narrow.config.alpha == 16.0
    assert set(narrow.scalings.values()) == {0.25}
    assert (wide.dtypes, narrow.dtypes) == (("F32",), ("BF16",))
    assert wide.parameters == narrow.parameters == want["params_both"]
    assert weight_bytes(wide) == want["bytes_fp32"]
    assert weight_bytes(narrow) == want["bytes_bf16"]
    assert wide.layout_id != narrow.layout_id
    engine = EngineSettings(max_lora_rank=64)
    assert slots(base, engine).projections == want["bytes_bf16"]
    assert on_host(wide, engine, base) == on_host(narrow, engine, base) == want["bytes_bf16"]
    assert judge(wide, base, engine).outcome == judge(narrow, base, engine).outcome == "loads"


def test_bf16_header_is_counted(tmp_path: Path) -> None:
    want = expected("size-bf16-header")
    adapter = adapter_of("size-bf16-header", tmp_path)
    check_totals(adapter, want)
    assert len(adapter.inventory.modules) == want["modules"]
    assert adapter.dtypes == ("BF16",)


def test_bf16_header_is_read_without_its_data_or_a_tensor_library(tmp_path: Path) -> None:
    adapter = adapter_of("size-units-42mb", tmp_path)
    header = adapter.bytes_disk - expected("size-units-42mb")["weight_bytes"]
    program = """
import sys
from pathlib import Path
from loraledger.adapters.reading.folder import read_folder
def read():
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar: ")[1].split()[0])
read_folder("warm", Path(sys.argv[1]))
before = read()
read_folder("alpha", Path(sys.argv[1]))
print(read() - before, sorted({"numpy", "torch", "safetensors"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", program, str(adapter.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    count, _, libraries = done.stdout.strip().partition(" ")
    assert libraries == "[]"
    assert header <= int(count) < header + 64 * 1024


def test_rank_pattern_decides_rank_size_and_scaling_of_each_module(tmp_path: Path) -> None:
    want = expected("rank-pattern")
    base = BASE_4B.write(tmp_path / "base")
    adapter = adapter_of("rank-pattern", tmp_path)
    check_totals(adapter, want)
    assert adapter.rank == adapter.config.max_rank == want["effective_max_rank"]
    ranks = {"q_proj": 32, "down_proj": 4}
    for name, module in adapter.inventory.modules.items():
        assert module.rank == adapter.config.rank_of(name) == ranks.get(module.suffix, 8)
        scaling = want["scaling"].get(module.suffix, want["scaling"]["others"])
        assert adapter.config.scaling_of(name) == adapter.scalings[name] == scaling
    modules = adapter.inventory.modules.values()
    assert sum(8 * (m.in_features + m.out_features) for m in modules) == want["naive_params_if_r_only"]
    assert on_host(adapter, EngineSettings(max_lora_rank=32), base) == want["weight_bytes"]
    verdict = judge(adapter, base, RANK_16)
    assert (verdict.outcome, verdict.max_lora_rank) == ("refused", want["effective_max_rank"])
    assert judge(adapter, base, EngineSettings(max_lora_rank=32)).outcome == "loads"


def test_modules_to_save_are_split_off_refused_and_never_slot_bytes(tmp_path: Path) -> None:
    want = expected("modules-to-save")
    base = BASE_3B.write(tmp_path / "base")
    adapter = adapter_of("modules-to-save", tmp_path)
    check_totals(adapter, want)
    assert lora_bytes(adapter) == want["lora_bytes"]
    assert adapter.inventory.whole.nbytes == want["full_matrix_bytes"]
    assert len(adapter.inventory.whole.names) == 2
    assert adapter.config.modules_to_save == ("embed_tokens", "lm_head")
    engine = EngineSettings(max_lora_rank=32)
    assert slots(base, engine).projections == want["lora_bytes"]
    assert adapter_device_bytes(adapter, base, engine) == want["lora_bytes"]
    assert on_host(adapter, engine, base) == want["lora_bytes"]
    for known, name in product((base, None), ENGINES):
        verdict = judge(adapter, known, replace(engine, engine=name))
        assert verdict.outcome == "refused"
        [finding] = [f for f in verdict.findings if f.effect == "refuse" and f.rule == "modules_to_save"]
        assert "modules_to_save" in finding.message
        assert "embed_tokens" in finding.message
        assert "merge" in finding.remedy
        assert "train" in finding.remedy


def test_fused_qkv_is_counted_as_stored_and_grows_when_split(tmp_path: Path) -> None:
    want = expected("fused-qkv")
    adapter = adapter_of("fused-qkv", tmp_path)
    check_totals(adapter, want)
    split = MINI_4B.write(tmp_path / "split")
    assert slots(split, RANK_16).projections == 2 * want["unfused_params_after_split"]
    assert slots(split, RANK_16).projections > weight_bytes(adapter)
    fused = MINI_4B.write(tmp_path / "fused", "Phi3ForCausalLM")
    assert slots(fused, RANK_16).projections == want["weight_bytes"]


def test_fused_qkv_is_warned_about(tmp_path: Path) -> None:
    adapter = adapter_of("fused-qkv", tmp_path)
    for base in (MINI_4B.write(tmp_path / "split"), MINI_4B.write(tmp_path / "fused", "Phi3ForCausalLM")):
        findings = judge(adapter, base, RANK_16).findings
        assert any("qkv_proj" in f.message and "split" in f"{f.message} {f.remedy}" for f in findings), base


def test_dora_magnitudes_are_counted_and_the_adapter_is_refused(tmp_path: Path) -> None:
    want = expected("dora")
    base = BASE_1B.write(tmp_path / "base")
    adapter = adapter_of("dora", tmp_path)
    check_totals(adapter, want)
    assert adapter.inventory.magnitude.parameters == want["magnitude_params"]
    assert adapter.inventory.magnitude.nbytes == 2 * want["magnitude_params"]
    assert adapter.config.use_dora
    for known, engine in product((base, None), ENGINES):
        verdict = judge(adapter, known, EngineSettings(engine=engine))
        assert verdict.outcome == "refused"
        assert any(f.effect == "refuse" and "DoRA" in f.message for f in verdict.findings)


def test_moe_experts_behind_target_parameters_are_seen(tmp_path: Path) -> None:
    want = expected("moe-target-parameters")
    more = {"num_experts": want["experts"], "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
    base = MOE_A3B.write(tmp_path / "base", "Qwen3MoeForCausalLM", **more)
    adapter = adapter_of("moe-target-parameters", tmp_path)
    check_totals(adapter, want)
    experts = [m for m in adapter.inventory.modules.values() if m.experts != 1]
    assert {m.experts for m in experts} == {want["experts"]}
    assert len(experts) == 2 * MOE_A3B.layers
    assert sum(m.nbytes for m in experts) == want["expert_bytes"]
    assert lora_bytes(adapter, adapter.target_modules) == want["naive_bytes_if_targets_only"]
    assert {m.rank for m in adapter.inventory.modules.values()} == {want["effective_rank"]}
    assert adapter.rank == want["effective_rank"]
    verdict = judge(adapter, base, RANK_16)
    assert verdict.max_lora_rank == want["effective_rank"]
    flagged = [f for f in verdict.findings if "target_parameters" in f.message]
    assert any("vLLM" in f"{f.message} {f.remedy}" for f in flagged)


def test_default_slot_count_is_one_and_a_second_costs_its_projections(tmp_path: Path) -> None:
    want = expected("max-loras-default-one")
    flags = (CASES / "max-loras-default-one/serve_args.txt").read_text()
    assert not any(flag in flags for flag in ("--max-loras", "--max-lora-rank", "--max-cpu-loras"))
    settings = EngineSettings()
    assert settings.max_loras == want["max_loras"]
    assert settings.max_lora_rank == want["max_lora_rank"]
    assert settings.host_entries == want["max_cpu_loras"]
    base = BASE_8B.write(tmp_path / "base")
    assert slots(base, settings).projections == 83_886_080
    assert f"{slots(base, settings).projections:,}" in want["right_answer"]
    assert replace(settings, max_loras=2).host_entries == 2
    assert kv_tokens(83_886_080, base, settings) == 640  # of 131,072 bytes


def test_two_adapters_on_the_default_single_slot_are_pointed_out(tmp_path: Path) -> None:
    BASE_8B.write(tmp_path / "base")
    paths = [adapter_of("size-units-42mb", tmp_path, name=name).path for name in ("alpha", "beta")]
    done = inspect(*paths, "--base", tmp_path / "base")
    assert done.returncode == 0, done.stderr
    assert "max_loras 1, max_lora_rank 16, max_cpu_loras 1" in done.stdout
    [note] = [line for line in done.stdout.splitlines() if line.endswith("[one_slot]")]
    assert "one adapter" in note
    assert "2 take turns" in note
    assert "MiB" in note
    said = note.replace("--", "").replace("-", "_")
    assert "max_loras 2" in said
    assert "max_cpu_loras" in said
