"""Base models from their configuration, their headers, or a list of module names."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.build_weights import BASE_8B, SMALL, write_weights
from loraledger.adapters.sizing.base import build_base, read_base
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.families import FAMILIES, MULTIMODAL
from loraledger.errors import InputFileError

SMALL_MOE = {"num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}


def config(architecture: str = "LlamaForCausalLM", **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


def base_of(architecture: str = "LlamaForCausalLM", **more: Any) -> BaseModel:
    return build_base(config(architecture, **more), None, "base")


def refusal(**changes: Any) -> str:
    with pytest.raises(InputFileError) as caught:
        build_base({k: v for k, v in config(**changes).items() if v != "gone"}, None, "base")
    return caught.value.message


def test_llama_3_8b_has_its_published_size(tmp_path: Path) -> None:
    base = BASE_8B.write(tmp_path)
    assert base.weight_bytes == 2 * 8_030_261_248
    assert (base.architecture, base.dtype, base.layers, base.hidden) == ("LlamaForCausalLM", "bfloat16", 32, 4096)
    assert (base.heads, base.kv_heads, base.head_dim, base.vocabulary) == (32, 8, 128, 128_256)
    assert base.kv_bytes_per_token() == 131_072
    assert len(base.modules) == 32 * 7 + 2


def test_modules_know_their_shape_kind_and_layer(tmp_path: Path) -> None:
    modules = BASE_8B.write(tmp_path).modules
    k = modules["model.layers.31.self_attn.k_proj"]
    assert (k.in_features, k.out_features, k.kind, k.shards) == (4096, 1024, "column", 8)
    assert k.layer == "model.layers.31.self_attn.qkv_proj"
    down = modules["model.layers.0.mlp.down_proj"]
    assert (down.in_features, down.out_features, down.kind) == (14336, 4096, "row")
    assert down.layer == down.name
    table, head = modules["model.embed_tokens"], modules["lm_head"]
    assert (table.in_features, table.out_features, table.kind) == (128_256, 4096, "embedding")
    assert (head.in_features, head.out_features, head.kind) == (4096, 128_256, "head")


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM", "GemmaForCausalLM"])
def test_token_tables_take_lora_only_where_the_engine_says_so(architecture: str) -> None:
    assert not {"embedding", "head"} & {module.kind for module in base_of(architecture).modules.values()}


def test_head_width_is_the_configured_one_and_null_means_hidden_over_heads() -> None:
    assert base_of(head_dim=48).modules["model.layers.0.self_attn.o_proj"].in_features == 4 * 48
    assert base_of(head_dim=None).head_dim == 32


def test_a_tied_head_has_no_weights_of_its_own() -> None:
    assert base_of().weight_bytes - base_of(tie_word_embeddings=True).weight_bytes == 2 * 320 * 128


def test_biases_count_where_the_configuration_has_them() -> None:
    extra = base_of(attention_bias=True, mlp_bias=True).weight_bytes - base_of().weight_bytes
    assert extra == 2 * 2 * (128 + 64 + 64 + 128 + 192 + 192 + 128)


def test_missing_heads_for_keys_and_values_means_one_for_each_head() -> None:
    assert base_of(num_key_value_heads=None).kv_heads == 4


def test_type_is_read_from_either_key_and_float32_when_neither_says() -> None:
    assert base_of(torch_dtype=None, dtype="float16").dtype == "float16"
    assert base_of(torch_dtype="torch.bfloat16").dtype == "bfloat16"
    assert base_of(torch_dtype=None).dtype == "float32"


def test_a_sliding_window_is_noted_unless_it_is_switched_off() -> None:
    assert any("upper bound" in note for note in base_of(sliding_window=4096).notes)
    assert base_of("Qwen2ForCausalLM", sliding_window=4096, use_sliding_window=False).notes == ()


def test_an_output_head_too_wide_for_lora_is_noted() -> None:
    assert any("258,048" in note for note in base_of(vocab_size=262_144).notes)
    assert base_of("GemmaForCausalLM", vocab_size=262_144).notes == ()


def test_experts_of_a_layer_are_one_module_and_plain_layers_stay_plain() -> None:
    base = base_of("Qwen3MoeForCausalLM", **SMALL_MOE, mlp_only_layers=[0])
    names = set(base.modules)
    assert "model.layers.0.mlp.gate_proj" in names
    assert "model.layers.0.mlp.experts" not in names
    experts = base.modules["model.layers.1.mlp.experts"]
    assert (experts.kind, experts.experts, experts.in_features, experts.out_features) == ("experts", 8, 128, 64)
    assert base.modules["model.layers.1.mlp.gate"].kind == "replicated"


def test_a_multimodal_model_is_its_language_model_under_the_engines_names() -> None:
    text = {key: value for key, value in config().items() if key != "architectures"}
    outer = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": text, "torch_dtype": "bfloat16"}
    base = build_base(outer, None, "base")
    name = "language_model.model.layers.0.self_attn.q_proj"
    assert name in base.modules
    for written in (name, "model.language_model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"):
        found = base.find(written)
        assert found is not None
        assert found.name == name
    assert any("text_config" in note for note in base.notes)
    assert {family for family, _ in MULTIMODAL.values()} <= set(FAMILIES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"architectures": [3]}, "architectures"),
        ({"hidden_size": "gone"}, "lacks hidden_size"),
        ({"vocab_size": "gone"}, "lacks vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": 4096.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"intermediate_size": -1}, "intermediate_size"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": "no"}, "attention_bias"),
        ({"architecture": "Qwen3MoeForCausalLM", **SMALL_MOE, "mlp_only_layers": 3}, "mlp_only_layers"),
        ({"architecture": "Qwen3MoeForCausalLM", **SMALL_MOE, "mlp_only_layers": [[]]}, "mlp_only_layers"),
        ({"architecture": "Qwen3MoeForCausalLM"}, "num_experts"),
        ({"architecture": "FutureForCausalLM"}, "'FutureForCausalLM' is not known: put its safetensors files beside it"),
        ({"architecture": "DeepseekV3ForCausalLM", "kv_lora_rank": 512}, "'DeepseekV3ForCausalLM' is not known, and by kv_"),
        ({"architecture": "HybridForCausalLM", "layer_types": ["linear_attention"]}, "by layer_types"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_suffice_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    message = refusal(**changes)
    assert said in message
    assert "\n" not in message


def test_mla_is_refused_even_when_its_tensors_are_there(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="DeepseekV3ForCausalLM"):
        folder_of(tmp_path, config("DeepseekV3ForCausalLM", kv_lora_rank=64), q_a())


def q_a() -> list[dict[str, Any]]:
    return [{"name": "model.layers.{i}.self_attn.q_a_proj.weight", "layers": 2, "dtype": "BF16", "shape": [8, 128]}]


def folder_of(folder: Path, settings: dict[str, Any], tensors: list[dict[str, Any]]) -> BaseModel:
    (folder / "config.json").write_text(json.dumps(settings))
    write_weights({"tensors": tensors}, folder / "model.safetensors")
    return read_base(folder)


def test_an_unknown_architecture_is_read_from_its_tensors(tmp_path: Path) -> None:
    base = folder_of(
        tmp_path,
        config("FutureForCausalLM", torch_dtype=None),
        [
            {"name": "model.embed_tokens.weight", "dtype": "BF16", "shape": [320, 128]},
            {"name": "model.layers.{i}.self_attn.k_proj.weight", "layers": 2, "dtype": "BF16", "shape": [64, 128]},
            {"name": "model.layers.{i}.self_attn.k_proj.bias", "layers": 2, "dtype": "BF16", "shape": [64]},
            {"name": "model.layers.{i}.mlp.down_proj.weight", "layers": 2, "dtype": "BF16", "shape": [128, 192]},
            {"name": "model.layers.{i}.strange.weight", "layers": 2, "dtype": "BF16", "shape": [7, 128]},
            {"name": "model.layers.{i}.norm.weight", "layers": 2, "dtype": "BF16", "shape": [128]},
            {"name": "vision_tower.layers.{i}.q_proj.weight", "layers": 2, "dtype": "BF16", "shape": [8, 8]},
        ],
    )
    kinds = {module.suffix: (module.in_features, module.out_features, module.kind) for module in base.modules.values()}
    assert kinds == {
        "k_proj": (128, 64, "column"),
        "down_proj": (192, 128, "row"),
        "strange": (128, 7, "replicated"),
    }
    assert len(base.modules) == 6
    assert base.modules["model.layers.0.self_attn.k_proj"].shards == 2
    assert base.dtype == "bfloat16"
    assert any("guess" in note for note in base.notes)


def test_weight_bytes_are_those_of_the_headers_when_there_are_any(tmp_path: Path) -> None:
    quantized = [{"name": "model.layers.0.mlp.up_proj.qweight", "dtype": "F32", "shape": [16, 192]}]
    base = folder_of(tmp_path, config(quantization_config={"quant_method": "awq"}), quantized)
    assert (base.weight_bytes, base.weight_source) == (4 * 16 * 192, "headers")
    assert base.notes == ()
    (tmp_path / "model.safetensors").unlink()
    shaped = read_base(tmp_path)
    assert shaped.weight_source == "shapes"
    assert any("quantized" in note for note in shaped.notes)


def sharded(folder: Path) -> dict[str, str]:
    """A model in two files, and its weight map."""
    (folder / "config.json").write_text(json.dumps(config()))
    names = {"a.weight": "model-1-of-2.safetensors", "b.weight": "model-2-of-2.safetensors"}
    for name, file in names.items():
        write_weights({"tensors": [{"name": name, "dtype": "BF16", "shape": [4, 8]}]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return names


def test_shards_are_counted_together_and_other_files_left_alone(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"garbage")
    assert read_base(tmp_path).weight_bytes == 2 * 2 * 4 * 8


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ({"a.weight": "model-9-of-2.safetensors"}, "model-9-of-2.safetensors is missing"),
        ({"c.weight": "model-1-of-2.safetensors"}, "'c.weight' is in model.safetensors.index.json"),
        ({"a.weight": "../model-1-of-2.safetensors"}, "weight_map"),
        ({"a.weight": "/etc/model.safetensors"}, "weight_map"),
        ({"a.weight": 3}, "weight_map"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(tmp_path: Path, shards: object, said: str) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(InputFileError, match=said):
        read_base(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"a": 1, "a": 2}', b'{"hidden_size": NaN}', b"[" * 10**5])
def test_a_damaged_configuration_is_refused_in_one_line(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(InputFileError, match=r"config\.json") as caught:
        read_base(tmp_path)
    assert "\n" not in caught.value.message


def test_a_configuration_without_end_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(9 * 1024 * 1024)
    with pytest.raises(InputFileError, match="over 8,388,608 bytes"):
        read_base(tmp_path)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="is no base model's folder"):
        read_base(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputFileError, match="is no base model's folder"):
        read_base(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(InputFileError, match="is no base model's folder"):
        read_base(tmp_path)


def test_a_pipe_or_a_pointer_in_its_place_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InputFileError, match=r"config\.json is not JSON"):
        read_base(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 700\n")
    with pytest.raises(InputFileError, match="git lfs pull"):
        read_base(tmp_path)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 4)
    with pytest.raises(InputFileError, match=r"model\.safetensors"):
        read_base(tmp_path)


def test_a_base_is_called_as_its_folder_or_as_asked(tmp_path: Path) -> None:
    folder = tmp_path / "base-8b"
    SMALL.write(folder)
    assert (read_base(folder).name, read_base(folder, "acme").name) == ("base-8b", "acme")


def test_every_family_is_whole() -> None:
    for architecture in FAMILIES:
        base = base_of(architecture, **SMALL_MOE)
        assert base.shaped, architecture
        assert base.weight_bytes > 2 * 320 * 128
        assert all(name == module.name for name, module in base.modules.items())
        assert len({module.layer for module in base.modules.values()}) >= 4 * base.layers


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from([*config(), *SMALL_MOE, "head_dim", "mlp_only_layers", "layer_types", "text_config", "dtype",
                        "sliding_window", "quantization_config", "attention_bias", "decoder_sparse_step"])  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.sampled_from([*FAMILIES, *MULTIMODAL, "FutureForCausalLM"]), st.dictionaries(KEYS, JSON, max_size=4))
def test_no_configuration_raises_anything_but_its_refusal(architecture: str, changes: dict[str, object]) -> None:
    try:
        base = build_base({**config(architecture), **SMALL_MOE, **changes}, None, "base")
    except InputFileError:
        return
    assert base.shaped
    assert base.kv_bytes_per_token() > 0
