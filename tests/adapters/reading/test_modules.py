"""Inventory: each tensor is sorted by what it is, and none is lost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.adapters.reading.header import Tensor
from loraledger.adapters.reading.modules import Inventory, LoraModule, Part, take_inventory
from loraledger.adapters.reading.peft import PeftConfig, read_config

P = "base_model.model."


def config(**changes: object) -> PeftConfig:
    import json

    return read_config(json.dumps({"r": 2, "lora_alpha": 4, "target_modules": ["q"], **changes}).encode())


def laid_out(shapes: Mapping[str, Sequence[int]], width: int = 2) -> dict[str, Tensor]:
    tensors, at = {}, 0
    for name, shape in shapes.items():
        end = at + math.prod(shape) * width
        tensors[name] = Tensor("BF16" if width == 2 else "F32", tuple(shape), (at, end))
        at = end
    return tensors


def inventory(shapes: Mapping[str, Sequence[int]], **changes: object) -> Inventory:
    return take_inventory(laid_out(shapes), config(**changes))


def test_a_pair_makes_a_module_under_its_base_layer_name() -> None:
    kept = inventory({P + "l.0.q.lora_A.weight": (2, 8), P + "l.0.q.lora_B.weight": (6, 2)})
    assert kept.modules == {"l.0.q": LoraModule("l.0.q", 2, 8, 6, parameters=28, nbytes=56)}
    assert kept.modules["l.0.q"].suffix == "q"
    assert (kept.whole, kept.magnitude, kept.other, kept.halves, kept.mismatched) == (Part(), Part(), Part(), (), ())


def test_modules_are_in_the_order_of_the_file_and_need_no_prefix() -> None:
    kept = inventory({
        "z.lora_B.weight": (6, 2), "z.lora_A.weight": (2, 8), P + "a.lora_A.weight": (2, 8), P + "a.lora_B.weight": (6, 2),
    })  # fmt: skip
    assert list(kept.modules) == ["z", "a"]


def test_an_adapters_own_name_in_the_tensors_is_noted() -> None:
    kept = inventory({
        P + "q.lora_A.default.weight": (2, 8), P + "q.lora_B.default.weight": (6, 2),
        P + "e.lora_embedding_A.default": (2, 50), P + "e.lora_embedding_B.default": (8, 2),
        P + "k.lora_A.weight": (2, 8), P + "k.lora_B.weight": (6, 2),
    })  # fmt: skip
    assert set(kept.modules) == {"q", "e", "k"}
    assert kept.infixed == ("q", "e")


def test_token_tables_have_pairs_of_their_own() -> None:
    kept = inventory({P + "embed_tokens.lora_embedding_A": (2, 50), P + "embed_tokens.lora_embedding_B": (8, 2)})
    module = kept.modules["embed_tokens"]
    assert (module.rank, module.in_features, module.out_features, module.embedding) == (2, 50, 8, True)


def test_whole_matrices_are_kept_apart_with_their_biases() -> None:
    kept = inventory({
        P + "model.embed_tokens.weight": (50, 8), P + "lm_head.base_layer.weight": (50, 8),
        P + "score.modules_to_save.default.weight": (3, 8), P + "classifier.weight": (3, 8), P + "classifier.bias": (3,),
        P + "q.base_layer.bias": (6,), P + "q.lora_A.weight": (2, 8), P + "q.lora_B.weight": (6, 2),
    })  # fmt: skip
    assert kept.whole.names == (
        P + "model.embed_tokens.weight", P + "lm_head.base_layer.weight", P + "score.modules_to_save.default.weight",
        P + "classifier.weight", P + "classifier.bias",
    )  # fmt: skip
    assert (kept.whole.parameters, kept.whole.nbytes) == (400 + 400 + 24 + 24 + 3, 2 * 851)
    assert kept.other.names == (P + "q.base_layer.bias",)


@pytest.mark.parametrize(
    "tail", ["lora_magnitude_vector", "lora_magnitude_vector.weight", "lora_magnitude_vector.default.weight"]
)
def test_magnitude_vectors_are_counted_apart(tail: str) -> None:
    kept = inventory({P + "q." + tail: (6,), P + "q.lora_A.weight": (2, 8), P + "q.lora_B.weight": (6, 2)})
    assert (kept.magnitude.names, kept.magnitude.parameters, kept.magnitude.nbytes) == ((P + "q." + tail,), 6, 12)


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens.token_adapter.trainable_tokens_delta", "q.lora_B.bias", "q.lora_E", "q.lora_A.a.b.weight", "q.lora_A",
        "q.hada_w1_a", "k_proj.ia3_l", "q.bias", ".lora_magnitude_vector", "prompt_embeddings", "lora_A.weights",
    ],
)  # fmt: skip
def test_what_no_engine_reads_is_listed_as_other(name: str) -> None:
    kept = inventory({P + name: (2, 3)} if not name.startswith(".") else {name: (2, 3)})
    assert (kept.modules, kept.whole.names, kept.halves) == ({}, (), ())
    assert kept.other.parameters == 6


def test_halves_and_pairs_that_do_not_fit_are_named() -> None:
    kept = inventory({
        "a.lora_A.weight": (2, 8), "b.lora_B.weight": (6, 2), "t.lora_embedding_A": (2, 8), "x.lora_B.default.weight": (6, 2),
        "c.lora_A.weight": (2, 8), "c.lora_B.weight": (6, 3), "d.lora_A.weight": (16,), "d.lora_B.weight": (12,),
        "k.lora_A.weight": (2, 8), "k.lora_B.weight": (6, 2),
    })  # fmt: skip
    assert sorted(kept.halves) == ["a", "b", "t", "x"]
    assert kept.mismatched == ("c", "d")
    assert list(kept.modules) == ["k"]


def test_two_pairs_for_one_module_are_no_module_twice() -> None:
    kept = inventory({
        "q.lora_A.weight": (2, 8), "q.lora_B.weight": (6, 2), P + "q.lora_A.weight": (2, 4), P + "q.lora_B.weight": (4, 2),
    })  # fmt: skip
    assert (list(kept.modules), kept.mismatched) == (["q"], ("q",))


def test_a_half_that_is_there_twice_is_counted_once() -> None:
    kept = inventory(
        {"e.lora_embedding_A": (2, 50), "e.lora_embedding_A.default": (2, 60), "e.lora_embedding_B": (8, 2)}
    )
    assert (kept.modules["e"].in_features, kept.other.names) == (50, ("e.lora_embedding_A.default",))


def test_a_convolutions_pair_has_the_rank_of_its_first_dimension() -> None:
    kept = inventory({"c.lora_A.weight": (2, 3, 5, 5), "c.lora_B.weight": (7, 2, 1, 1)})
    module = kept.modules["c"]
    assert (module.rank, module.in_features, module.out_features, module.parameters) == (2, 75, 7, 2 * 82)


def test_pairs_of_all_experts_have_the_rank_of_one() -> None:
    shapes = {
        "mlp.experts.base_layer.lora_A.weight": (128, 8), "mlp.experts.base_layer.lora_B.weight": (12, 128),
        "mlp.experts.lora_A.weight": (128, 6), "mlp.experts.lora_B.weight": (8, 128),
        "mlp.experts.3.up.lora_A.weight": (2, 8), "mlp.experts.3.up.lora_B.weight": (6, 2),
    }  # fmt: skip
    kept = inventory(shapes, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    assert [(module.rank, module.experts) for module in kept.modules.values()] == [(2, 64), (2, 64), (2, 1)]
    assert kept.modules["mlp.experts"].parameters == 128 * (6 + 8)
    assert kept.unconfigured == ()


def test_the_rank_of_one_expert_may_come_from_a_pattern() -> None:
    shapes = {"mlp.experts.lora_A.weight": (128, 6), "mlp.experts.lora_B.weight": (8, 128)}
    kept = inventory(shapes, rank_pattern={"down_proj": 32}, target_parameters=["mlp.experts.down_proj"])
    assert (kept.modules["mlp.experts"].rank, kept.modules["mlp.experts"].experts) == (32, 4)


def test_experts_may_have_another_name_when_target_parameters_say_so() -> None:
    shapes = {"ffn.bank.lora_A.weight": (8, 6), "ffn.bank.lora_B.weight": (8, 8)}
    assert inventory(shapes, target_parameters=["ffn.bank.w1"]).modules["ffn.bank"].experts == 4
    plain = inventory(shapes, target_parameters=["mlp.experts.w1"])
    assert (plain.modules["ffn.bank"].rank, plain.modules["ffn.bank"].experts) == (8, 1)


def test_an_axis_that_is_no_multiple_of_the_rank_holds_no_experts() -> None:
    kept = inventory({"mlp.experts.lora_A.weight": (5, 6), "mlp.experts.lora_B.weight": (8, 5)})
    assert (kept.modules["mlp.experts"].rank, kept.modules["mlp.experts"].experts) == (5, 1)
    assert kept.unconfigured == ("mlp.experts",)


def test_tensors_of_another_rank_than_configured_have_their_own_and_are_named() -> None:
    shapes = {
        "q.lora_A.weight": (4, 8),
        "q.lora_B.weight": (6, 4),
        "k.lora_A.weight": (2, 8),
        "k.lora_B.weight": (6, 2),
    }
    kept = inventory(shapes)
    assert ([module.rank for module in kept.modules.values()], kept.unconfigured) == ([4, 2], ("q",))
    patterned = inventory(shapes, rank_pattern={"q": 4})
    assert ([module.rank for module in patterned.modules.values()], patterned.unconfigured) == ([4, 2], ())
    assert inventory(shapes, rank_pattern={"q": 4, "k": 8}).unconfigured == ("k",)


STEMS = st.sampled_from(["q", "k", P + "q", "mlp.experts", "mlp.experts.base_layer", "e"])
TAILS = st.sampled_from([
    ".lora_A.weight", ".lora_B.weight", ".lora_A.default.weight", ".lora_B.default.weight", ".lora_embedding_A",
    ".lora_embedding_B", ".lora_magnitude_vector", ".weight", ".bias", ".lora_B.bias", ".lora_C",
])  # fmt: skip
SHAPES = st.sampled_from([(2, 8), (8, 2), (2,), (4, 8), (8, 4), (2, 3, 1, 1), (7, 2, 1, 1), ()])


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.tuples(STEMS, TAILS).map("".join), SHAPES, max_size=12), st.sampled_from([2, 4]))
def test_no_tensor_is_lost_and_none_is_counted_twice(shapes: dict[str, tuple[int, ...]], width: int) -> None:
    tensors = laid_out(shapes, width)
    kept = take_inventory(tensors, config())
    parts = (kept.whole, kept.magnitude, kept.other)
    paired = sum(module.nbytes for module in kept.modules.values()) + sum(part.nbytes for part in parts)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert paired <= total
    named = {name for part in parts for name in part.names}
    unpaired = [name for name in tensors if name not in named and not _belongs(name, set(kept.modules))]
    gone = {name.removeprefix(P).partition(".lora_")[0] for name in unpaired}
    assert gone <= {*kept.halves, *kept.mismatched}
    if not kept.halves and not kept.mismatched:
        assert paired == total


def _belongs(name: str, modules: set[str]) -> bool:
    return ".lora_" in name and name.removeprefix(P).partition(".lora_")[0] in modules
