"""Bytes of slots, host and device, by hand and against published figures; what vLLM really allocates is tested beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters.build_weights import BASE_8B, Dims, build, pairs
from loraledger.adapters.reading.folder import AdapterFolder, read_folder
from loraledger.adapters.sizing.base import build_base
from loraledger.adapters.sizing.basemodel import BaseModel, served_modules
from loraledger.adapters.sizing.engine import EngineName, EngineSettings, smallest_max_rank
from loraledger.adapters.sizing.footprint import (
    adapter_device_bytes,
    host_bytes,
    kv_tokens,
    lora_width,
    slora_cells,
    slot_bytes,
)
from loraledger.errors import InputFileError

RANK_16 = EngineSettings(max_lora_rank=16)
RANK_64 = EngineSettings(max_lora_rank=64)
SGLANG = EngineSettings(engine="sglang", max_lora_rank=16, max_loras=8)
SLORA = EngineSettings(engine="slora")
LORAX = EngineSettings(engine="lorax")
BASE_7B = Dims(hidden=4096, ff=11008, layers=32, heads=32, kv_heads=32)
BASE_70B = Dims(hidden=8192, ff=28672, layers=80, heads=64, kv_heads=8, vocabulary=128_256)
QWEN_7B = Dims(hidden=3584, ff=18944, layers=28, heads=28, kv_heads=4, vocabulary=152_064)
LLAMA_13B = Dims(hidden=5120, ff=13824, layers=40, heads=40, kv_heads=40)
TINY = Dims(hidden=256, ff=512, layers=4, heads=4, kv_heads=4, head_dim=64, vocabulary=512)
BASE_1B = Dims(hidden=2048, ff=8192, layers=8, heads=32, kv_heads=8, head_dim=64, vocabulary=512)
QKVO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def base_8b(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return BASE_8B.write(tmp_path_factory.mktemp("base"))


def slot(base: BaseModel, engine: EngineSettings) -> int:
    found = slot_bytes(base, engine)
    assert found is not None
    return found.total


def on(base: Dims, *names: str) -> Mapping[str, tuple[int, int]]:
    shapes = base.projections()
    return {name: shapes[name] for name in names or shapes}


def adapter(
    folder: Path, modules: Mapping[str, tuple[int, int]], rank: int, layers: int = 1, **options: Any
) -> AdapterFolder:
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["x"]}
    return read_folder("alpha", build(folder / "alpha", settings, pairs(modules, rank, layers, **options)))


def moe(tmp_path: Path, architecture: str = "Qwen3MoeForCausalLM") -> BaseModel:
    dims = Dims(hidden=128, ff=192, layers=1, heads=4, kv_heads=2, head_dim=32, vocabulary=320)
    return dims.write(tmp_path / "moe", architecture, **MOE, num_local_experts=8)


@pytest.mark.parametrize(
    ("dims", "engine", "bytes_"),
    [
        (TINY, RANK_64, 2_424_832),
        (TINY, replace(RANK_64, lora_target_modules=("q_proj", "v_proj")), 786_432),
        (TINY, replace(RANK_64, tensor_parallel=2), 1_769_472),
        (TINY, replace(RANK_64, tensor_parallel=2, fully_sharded_loras=True), 1_310_720),
        (BASE_1B, RANK_64, 45_744_128),
        (BASE_8B, RANK_16, 92_356_608),
        (BASE_8B, RANK_64, 369_426_432),
        (BASE_8B, replace(RANK_64, tensor_parallel=8), 178_585_600),
        (BASE_8B, replace(RANK_64, tensor_parallel=8, fully_sharded_loras=True), 75_825_152),
        (BASE_70B, replace(RANK_64, tensor_parallel=8), 755_826_688),
        (BASE_70B, replace(RANK_64, tensor_parallel=8, fully_sharded_loras=True), 242_024_448),
    ],
)
def test_slots_of_known_models(dims: Dims, engine: EngineSettings, bytes_: int, tmp_path: Path) -> None:
    assert slot(dims.write(tmp_path), engine) == bytes_


def test_projections_and_token_tables_are_apart(base_8b: BaseModel) -> None:
    found = slot_bytes(base_8b, RANK_16)
    assert found is not None
    assert found.projections == 83_886_080
    assert found.embeddings == 2 * 2 * 16 * (128_256 + 4096)
    assert found.total == found.projections + found.embeddings


def test_sixty_slots_at_rank_64_cost_what_was_reported(base_8b: BaseModel) -> None:
    at_64, at_16 = (slot_bytes(base_8b, replace(RANK_16, max_lora_rank=rank)) for rank in (64, 16))
    assert at_64 is not None
    assert at_16 is not None
    assert at_64.projections == 335_544_320
    assert 60 * at_64.projections == 20_132_659_200
    assert kv_tokens(60 * at_64.projections, base_8b, RANK_64) == 153_600
    assert kv_tokens(60 * at_16.projections, base_8b, RANK_16) == 38_400
    cut = slot_bytes(base_8b, replace(RANK_64, tensor_parallel=2))
    assert cut is not None
    assert cut.projections == 226_492_416


def test_a_second_slot_on_the_defaults_costs_one_slot(base_8b: BaseModel) -> None:
    default = EngineSettings()
    assert (default.max_loras, default.max_lora_rank, default.host_entries) == (1, 16, 1)
    found = slot_bytes(base_8b, default)
    assert found is not None
    assert found.projections == 83_886_080


def test_sixteen_slots_of_a_7b_model(tmp_path: Path) -> None:
    base = BASE_7B.write(tmp_path)
    found = slot_bytes(base, RANK_16)
    assert found is not None
    assert found.projections == 79_953_920
    assert base.kv_bytes_per_token() == 524_288
    assert kv_tokens(16 * found.projections, base, RANK_16) == 2440


def test_slots_grow_with_the_rank_alone(base_8b: BaseModel) -> None:
    assert [slot(base_8b, replace(RANK_16, max_lora_rank=16 * times)) for times in (1, 2, 4)] == [
        times * 92_356_608 for times in (1, 2, 4)
    ]
    assert slot(base_8b, replace(RANK_16, max_loras=9, max_cpu_loras=99)) == 92_356_608


@pytest.mark.parametrize(
    ("stored", "engine", "width"),
    [
        ("bfloat16", EngineSettings(), 2),
        ("float32", EngineSettings(), 2),
        ("float32", EngineSettings(dtype="float32"), 4),
        ("bfloat16", EngineSettings(dtype="float32"), 4),
        ("float32", EngineSettings(dtype="float32", lora_dtype="float16"), 2),
        ("float32", EngineSettings(engine="sglang", dtype="float32", lora_dtype="float16"), 4),
    ],
)
def test_the_lora_type_follows_the_served_type(stored: str, engine: EngineSettings, width: int, tmp_path: Path) -> None:
    base = TINY.write(tmp_path, torch_dtype=stored)
    assert lora_width(base, engine) == width
    assert slot(base, replace(engine, max_lora_rank=64)) % 2_097_152 % width == 0


def test_kv_tokens_are_rounded_up_and_follow_the_cache(base_8b: BaseModel) -> None:
    assert kv_tokens(131_073, base_8b, RANK_16) == 2
    assert kv_tokens(131_072, base_8b, replace(RANK_16, kv_cache_dtype="fp8")) == 2
    assert kv_tokens(131_072, base_8b, replace(RANK_16, tensor_parallel=8)) == 8
    assert kv_tokens(131_072, replace(base_8b, dtype="float32"), RANK_16) == 1
    assert kv_tokens(131_072, base_8b, replace(RANK_16, dtype="float32")) == 1
    assert kv_tokens(262_144, base_8b, replace(RANK_16, dtype="float32")) == 1


def test_a_model_that_cannot_be_cut_so_is_refused(base_8b: BaseModel) -> None:
    with pytest.raises(InputFileError, match="over 3 ranks"):
        slot_bytes(base_8b, replace(RANK_16, tensor_parallel=3))
    with pytest.raises(InputFileError, match="max_lora_rank"):
        slot_bytes(base_8b, replace(RANK_16, max_lora_rank=1, tensor_parallel=2, fully_sharded_loras=True))


@pytest.mark.parametrize("engine", [LORAX, SLORA])
def test_engines_without_slots_have_none(engine: EngineSettings, base_8b: BaseModel) -> None:
    assert slot_bytes(base_8b, engine) is None


def test_nothing_is_computed_from_names_alone(tmp_path: Path) -> None:
    base = served_modules("model.layers.0.self_attn.q_proj\n")
    small = adapter(tmp_path, on(TINY, "self_attn.q_proj"), 8)
    assert slot_bytes(base, RANK_16) is None
    assert adapter_device_bytes(small, base, RANK_16) is None
    assert adapter_device_bytes(small, base, SLORA) is None


def test_sglang_keeps_token_tables_only_where_targeted(base_8b: BaseModel) -> None:
    assert slot(base_8b, SGLANG) == 83_886_080
    some = replace(SGLANG, lora_target_modules=("q_proj", "lm_head"))
    found = slot_bytes(base_8b, some)
    assert found is not None
    assert found.embeddings == 2 * 16 * (4096 + 128_256)
    assert found.projections == 32 * 2 * 16 * (3 * 4096 + 4096 + 2 * 1024)
    half = slot_bytes(base_8b, replace(some, tensor_parallel=2))
    assert half is not None
    assert half.embeddings == 2 * 16 * (4096 + 128_256 // 2)


def test_sglang_has_no_room_for_routers(tmp_path: Path) -> None:
    base = moe(tmp_path)
    router = 2 * 16 * (128 + 8)
    tables = 2 * 2 * 16 * (320 + 128)
    assert slot(base, RANK_16) - slot(base, SGLANG) == router + tables


def test_in_sglang_the_base_model_takes_a_slot() -> None:
    assert (SGLANG.usable_slots, replace(SGLANG, engine="vllm").usable_slots) == (7, 8)


def test_experts_count_once_each(tmp_path: Path) -> None:
    base = moe(tmp_path)
    experts = replace(RANK_16, lora_target_modules=("experts",))
    one = 3 * 16 * (128 + 64)
    assert slot(base, experts) == 2 * 8 * one
    assert slot(base, replace(experts, tensor_parallel=2, expert_parallel=True)) == 2 * 4 * one
    assert slot(base, replace(experts, tensor_parallel=2)) == 2 * 8 * 16 * (2 * (128 + 32) + 32 + 128)


def test_fused_experts_share_one_a(tmp_path: Path) -> None:
    base = moe(tmp_path, "GptOssForCausalLM")
    assert slot(base, replace(RANK_16, lora_target_modules=("experts",))) == 2 * 8 * 16 * (128 + 2 * 64 + 64 + 128)


def test_the_host_holds_the_adapters_own_rank_in_the_lora_type(tmp_path: Path, base_8b: BaseModel) -> None:
    fp32 = adapter(tmp_path, on(BASE_8B), 16, 32, dtype="F32")
    host = host_bytes(fp32, RANK_64, base_8b)
    assert host is not None
    assert host.exact == 83_886_080
    whole = host_bytes(fp32, replace(RANK_64, tensor_parallel=8, fully_sharded_loras=True), base_8b)
    assert whole == host
    wide = host_bytes(fp32, replace(RANK_64, dtype="float32"), base_8b)
    assert wide is not None
    assert wide.exact == 2 * host.exact
    unknown = host_bytes(fp32, replace(RANK_64, dtype="float32"))
    assert unknown is not None
    assert unknown.exact == host.exact


@pytest.mark.parametrize(("dims", "ratio"), [(BASE_8B, 1.08), (QWEN_7B, 1.51), (LLAMA_13B, 1.42)])
def test_pinned_tensors_are_rounded_up_to_powers_of_two(dims: Dims, ratio: float, tmp_path: Path) -> None:
    host = host_bytes(adapter(tmp_path, on(dims), 16, dims.layers), RANK_16)
    assert host is not None
    assert host.pinned / host.exact == pytest.approx(ratio, abs=0.006)


def test_the_host_stacks_the_experts_of_one_projection(tmp_path: Path) -> None:
    modules = {f"mlp.experts.{i}.{name}": (128, 64) for i in range(6) for name in ("gate_proj", "up_proj")}
    host = host_bytes(adapter(tmp_path, modules, 4), RANK_16)
    assert host is not None
    assert host.exact == 2 * 6 * 2 * 4 * (128 + 64)
    assert host.pinned == 2 * (8192 + 4096)  # 6 x 1,024 and 6 x 512 bytes
    dealt = host_bytes(adapter(tmp_path / "b", modules, 4), replace(RANK_16, tensor_parallel=2, expert_parallel=True))
    assert dealt is not None
    assert dealt.exact == host.exact // 2


def test_fused_experts_pin_b_of_gate_and_up_twice(tmp_path: Path) -> None:
    host = host_bytes(adapter(tmp_path, {"mlp.experts.base_layer": (128, 128), "mlp.experts": (64, 128)}, 32), RANK_16)
    assert host is not None
    assert host.exact == 2 * 32 * (128 + 128 + 64 + 128)
    assert host.pinned == host.exact + 2 * 32 * 128


def test_sglang_holds_what_is_stored_and_zeros_for_a_missing_k(tmp_path: Path) -> None:
    fp32 = adapter(tmp_path, on(BASE_8B, "self_attn.q_proj", "self_attn.v_proj"), 8, dtype="F32")
    host = host_bytes(fp32, SGLANG)
    assert host is not None
    assert host.exact == 4 * 8 * (4096 + 4096 + 2 * (4096 + 1024))
    full = host_bytes(adapter(tmp_path / "b", on(BASE_8B), 8, dtype="F32"), SGLANG)
    assert full is not None
    assert full.exact == 4 * 8 * sum(sum(shape) for shape in on(BASE_8B).values())


def test_lorax_has_no_host_tier_and_counts_the_file(tmp_path: Path, base_8b: BaseModel) -> None:
    small = adapter(tmp_path, on(BASE_8B), 8)
    assert host_bytes(small, LORAX, base_8b) is None
    assert adapter_device_bytes(small, base_8b, LORAX) == (small.path / "adapter_model.safetensors").stat().st_size


def test_an_adapter_of_full_rank_and_all_modules_fills_the_projections(tmp_path: Path, base_8b: BaseModel) -> None:
    full = adapter(tmp_path, on(BASE_8B), 64, 32)
    for engine in (
        RANK_64,
        replace(RANK_64, tensor_parallel=2),
        replace(RANK_64, tensor_parallel=8, fully_sharded_loras=True),
        replace(SGLANG, max_lora_rank=64),
    ):
        found = slot_bytes(base_8b, engine)
        assert found is not None
        assert adapter_device_bytes(full, base_8b, engine) == found.projections


def test_what_the_engine_does_not_apply_fills_nothing(tmp_path: Path, base_8b: BaseModel) -> None:
    some = adapter(tmp_path, {**on(BASE_8B, "mlp.up_proj", "mlp.down_proj"), "mlp.strange": (4096, 4096)}, 8)
    up, down = 2 * 8 * (4096 + 14336), 2 * 8 * (14336 + 4096)
    assert adapter_device_bytes(some, base_8b, RANK_16) == up + down
    assert adapter_device_bytes(some, base_8b, replace(RANK_16, lora_target_modules=("down_proj",))) == down


def test_with_sharded_a_the_first_rank_has_the_most(tmp_path: Path, base_8b: BaseModel) -> None:
    small = adapter(tmp_path, on(BASE_8B, "mlp.up_proj"), 8)
    engine = replace(RANK_64, tensor_parallel=4, fully_sharded_loras=True)
    assert adapter_device_bytes(small, base_8b, engine) == 2 * (8 * 4096 + 8 * 14336 // 4)
    large = adapter(tmp_path / "b", on(BASE_8B, "mlp.up_proj"), 64)
    assert adapter_device_bytes(large, base_8b, engine) == 2 * (16 * 4096 + 64 * 14336 // 4)


def test_experts_fill_what_their_rank_holds(tmp_path: Path) -> None:
    base = moe(tmp_path)
    each = {f"mlp.experts.{i}.gate_proj": (128, 64) for i in range(8)}
    one = 2 * 4 * (128 + 64)
    adapted = adapter(tmp_path, each, 4)
    assert adapter_device_bytes(adapted, base, RANK_16) == 8 * one
    assert adapter_device_bytes(adapted, base, replace(RANK_16, tensor_parallel=2, expert_parallel=True)) == 4 * one


def test_slora_takes_four_cells_a_rank_for_plain_attention(tmp_path: Path) -> None:
    base = BASE_7B.write(tmp_path / "base")
    plain = adapter(tmp_path, on(BASE_7B, *QKVO), 16, 32)
    assert slora_cells(plain, base) == 64
    assert adapter_device_bytes(plain, base, SLORA) == 16 * 16 * 32 * 4096
    host = host_bytes(plain, SLORA, base)
    assert host is not None
    assert host.exact == 16 * 16 * 32 * 4096


def test_slora_counts_other_adapters_by_their_bytes(tmp_path: Path, base_8b: BaseModel) -> None:
    grouped = adapter(tmp_path, on(BASE_8B, *QKVO), 16, 32)
    stored = 2 * 16 * 32 * 2 * (2 * 4096 + 4096 + 1024)
    assert slora_cells(grouped, base_8b) == -(-stored // 131_072)
    mha = BASE_7B.write(tmp_path / "base")
    wide = adapter(tmp_path / "b", on(BASE_7B), 16, 32)
    assert slora_cells(wide, mha) == -(-79_953_920 // 524_288)


@pytest.mark.parametrize(("rank", "allowed"), [(1, 1), (2, 8), (8, 8), (10, 16), (96, 128), (257, 320), (513, None)])
def test_the_smallest_setting_that_takes_a_rank(rank: int, allowed: int | None) -> None:
    assert smallest_max_rank(rank) == allowed


@pytest.mark.parametrize("engine", ["vllm", "sglang", "lorax", "slora"])
def test_every_engine_answers_for_every_family(engine: EngineName, tmp_path: Path) -> None:
    small = adapter(tmp_path, {"self_attn.q_proj": (128, 128), "mlp.experts.0.gate_proj": (128, 64)}, 4)
    for architecture in ("LlamaForCausalLM", "Qwen2MoeForCausalLM", "GptOssForCausalLM", "Phi3ForCausalLM"):
        base = moe(tmp_path / architecture, architecture) if "Moe" not in architecture else shared(architecture)
        filled = adapter_device_bytes(small, base, EngineSettings(engine=engine))
        assert filled is not None
        assert filled >= 0


def shared(architecture: str) -> BaseModel:
    config = {
        "architectures": [architecture],
        **MOE,
        "shared_expert_intermediate_size": 96,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 320,
    }
    return build_base(config, None, "base")
