"""What a base model says of names that adapters and engines use, and of its KV cache."""

from __future__ import annotations

import pytest

from adapters.sizing.test_base import SMALL_MOE, base_of
from loraledger.adapters.sizing.basemodel import served_modules
from loraledger.errors import InputFileError


@pytest.mark.parametrize(("ranks", "heads_there"), [(1, 2), (2, 1), (4, 1), (8, 1)])
def test_kv_bytes_on_one_rank_stop_falling_at_one_head(ranks: int, heads_there: int) -> None:
    assert base_of().kv_bytes_per_token(tensor_parallel=ranks) == 2 * 2 * heads_there * 32 * 2


@pytest.mark.parametrize(
    ("dtype", "width"), [("auto", 2), ("fp8", 1), ("fp8_e5m2", 1), ("float32", 4), ("bfloat16", 2)]
)
def test_kv_bytes_follow_the_type_of_the_cache(dtype: str, width: int) -> None:
    assert base_of().kv_bytes_per_token(dtype) == 2 * 2 * 2 * 32 * width


def test_a_cache_type_that_nobody_knows_is_refused() -> None:
    with pytest.raises(InputFileError, match="kv_cache_dtype 'int3'"):
        base_of().kv_bytes_per_token("int3")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.mlp.experts.7.gate_proj", (128, 64, 1)),
        ("model.layers.1.mlp.experts.0.down_proj", (64, 128, 1)),
        ("model.layers.1.mlp.experts.base_layer", (128, 128, 8)),
        ("model.layers.1.mlp.experts", (64, 128, 8)),
        ("model.layers.1.mlp.experts.8.gate_proj", None),
        ("model.layers.1.mlp.experts.1.w1", None),
        ("model.layers.1.mlp.experts.x.gate_proj", None),
        ("model.layers.1.mlp.experts." + "9" * 5000 + ".gate_proj", None),
        ("model.layers.2.mlp.experts.0.gate_proj", None),
        ("model.layers.1.self_attn.experts.0.gate_proj", None),
        ("model.layers.1.self_attn.q_proj", (128, 128, 1)),
        ("layers.1.self_attn.q_proj", None),
    ],
)
def test_names_of_adapters_are_found_also_inside_experts(name: str, shape: tuple[int, int, int] | None) -> None:
    found = base_of("Qwen3MoeForCausalLM", **SMALL_MOE).find(name)
    assert (found and (found.in_features, found.out_features, found.experts)) == shape
    assert found is None or found.name == name


@pytest.mark.parametrize(
    ("targets", "suffixes"),
    [
        (("q_proj",), {"q_proj", "k_proj", "v_proj"}),
        (("qkv_proj",), {"q_proj", "k_proj", "v_proj"}),
        (("up_proj", "lm_head"), {"gate_proj", "up_proj", "lm_head"}),
        (("o_proj",), {"o_proj"}),
        (("dense",), set()),
        ((), set()),
    ],
)
def test_target_modules_bring_along_what_is_packed_with_them(targets: tuple[str, ...], suffixes: set[str]) -> None:
    assert {module.suffix for module in base_of().reached(targets).values()} == suffixes


def test_a_target_by_its_whole_path_reaches_one_layer() -> None:
    reached = base_of().reached(["model.layers.1.self_attn.qkv_proj"])
    assert set(reached) == {f"model.layers.1.self_attn.{part}_proj" for part in "qkv"}


def test_one_expert_as_target_reaches_all_of_them() -> None:
    base = base_of("Qwen3MoeForCausalLM", **SMALL_MOE)
    assert set(base.reached(["experts.3.up_proj"])) == {f"model.layers.{i}.mlp.experts" for i in range(2)}
    assert base.reached(["experts.8.up_proj", "experts.base_layer"]) == {}


def test_served_modules_are_names_without_figures() -> None:
    base = served_modules(
        "# from the engine\nmodel.layers.0.self_attn.q_proj\n\nmodel.layers.0.mlp.down_proj\n", "list"
    )
    assert [module.layer for module in base.modules.values()] == [
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.mlp.down_proj",
    ]
    assert not base.shaped
    assert base.weight_bytes == base.layers == 0
    assert base.find("model.layers.0.self_attn.q_proj") is not None
    assert set(base.reached(["qkv_proj"])) == {"model.layers.0.self_attn.q_proj"}


@pytest.mark.parametrize("text", ["", "# nothing\n", "model.layers.0 q_proj\n", "..\n", "a\x00b\n", "x.\n"])
def test_a_list_that_names_no_module_is_refused(text: str) -> None:
    with pytest.raises(InputFileError):
        served_modules(text)


def test_served_names_keep_the_shapes_of_the_base_below_another_prefix() -> None:
    base = base_of().with_modules(["language_model.model.layers.1.self_attn.k_proj", "model.layers.9.mlp.up_proj"])
    served, unknown = base.modules.values()
    assert (served.in_features, served.out_features, served.shards) == (128, 64, 2)
    assert served.layer == "language_model.model.layers.1.self_attn.qkv_proj"
    assert not unknown.shaped
    assert unknown.layer == "model.layers.9.mlp.gate_up_proj"
    assert not base.shaped
