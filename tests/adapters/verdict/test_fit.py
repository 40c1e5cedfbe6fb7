"""Names and shapes against a base."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adapters.verdict.builders import (
    ALL,
    BASE,
    MOE,
    MOE_FUSED,
    PREFIX,
    TABLES,
    VLLM,
    Sizes,
    adapter_of,
    base_of,
    finding,
    layers_of,
    module,
    pairs,
    refusals,
    shapes,
)
from loraledger.adapters.verdict.judge import judge


def test_full_paths_decide_and_the_remedy_names_the_right_one() -> None:
    base = base_of(*layers_of("language_model.model."))
    verdict = judge(adapter_of(), base, VLLM)
    assert (verdict.outcome, verdict.applied, verdict.modules) == ("changes_nothing", 0, 4)
    remedy = finding(verdict, "not_in_base").remedy
    assert remedy.endswith("'model.layers.0.self_attn.q_proj' 'language_model.model.layers.0.self_attn.q_proj'")


def test_layers_beyond_the_base_are_dropped() -> None:
    verdict = judge(adapter_of(pairs(shapes(layers=(0, 1, 2)))), BASE, VLLM)
    assert (verdict.outcome, verdict.applied, verdict.modules) == ("partly_applied", 4, 6)
    assert finding(verdict, "not_in_base").remedy.endswith("this one has 2 layers")


def test_one_unknown_part_of_a_name_refuses_the_whole_adapter() -> None:
    tensors = pairs(shapes() | {"model.layers.0.self_attn.rotary": (64, 64)})
    assert refusals(judge(adapter_of(tensors), BASE, VLLM)) == {("unknown_module", "engine")}
    hidden = pairs(shapes() | {"model.layers.0.mlp.gate.base_layer": (64, 64)})
    assert judge(adapter_of(hidden), BASE, VLLM).outcome == "partly_applied"  # vLLM lets base_layer through


def test_a_token_table_is_a_known_name_only_where_the_base_gives_it_room() -> None:
    tensors = pairs(shapes()) | {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": (8, 100),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": (64, 8),
    }
    adapter = adapter_of(tensors)
    assert judge(adapter, BASE, VLLM).outcome == "loads"
    assert refusals(judge(adapter, base_of(*layers_of()), VLLM)) == {("unknown_module", "engine")}
    larger = base_of(*layers_of(), replace(TABLES[0], in_features=128))
    assert refusals(judge(adapter, larger, VLLM)) == {("shape", "engine")}  # the vocabulary must be the same


def test_fused_and_split_names_are_told_apart_both_ways() -> None:
    fused_base = base_of(*(module(f"model.layers.{layer}.self_attn.qkv_proj", (64, 128), "column") for layer in (0, 1)))
    fused = adapter_of(pairs({f"model.layers.{layer}.self_attn.qkv_proj": (64, 128) for layer in (0, 1)}))
    on_split = judge(fused, BASE, VLLM)
    assert refusals(on_split) == {("unknown_module", "engine")}
    assert finding(on_split, "unknown_module").remedy.startswith("split qkv_proj")
    on_fused = judge(fused, fused_base, VLLM)
    assert (on_fused.outcome, finding(on_fused, "fused_names").effect) == ("loads", "warn")
    assert finding(judge(fused, None, VLLM), "fused_names").effect == "warn"
    split = judge(adapter_of(), fused_base, VLLM)
    assert refusals(split) == {("unknown_module", "engine")}
    assert "this base has qkv_proj: stack the pairs" in finding(split, "unknown_module").remedy
    gates = judge(adapter_of(pairs(shapes(("gate_proj",)))), fused_base, VLLM)
    assert finding(gates, "unknown_module").remedy == "this base has qkv_proj: train it on those"


@pytest.mark.parametrize(
    ("targets", "outcome", "applied"),
    [
        (("q_proj",), "partly_applied", 6),  # q, k and v are one layer
        (("qkv_proj", "o_proj"), "partly_applied", 8),
        (("lm_head",), "changes_nothing", 0),
        (ALL, "loads", 14),
    ],
)
def test_a_filter_of_targets_drops_the_rest(targets: tuple[str, ...], outcome: str, applied: int) -> None:
    verdict = judge(adapter_of(pairs(shapes(ALL))), BASE, replace(VLLM, lora_target_modules=targets))
    assert (verdict.outcome, verdict.applied) == (outcome, applied)
    dropped = [found for found in verdict.findings if found.effect == "drop"]
    assert [found.rule for found in dropped] == ([] if outcome == "loads" else ["not_targeted"])
    assert all(f"lora_target_modules ({', '.join(targets)})" in found.message for found in dropped)


def test_shapes_of_dropped_modules_do_not_matter() -> None:
    narrow = {name: (i // 2, o) for name, (i, o) in shapes(("o_proj",)).items()}
    assert (
        judge(adapter_of(pairs(narrow)), BASE, replace(VLLM, lora_target_modules=("q_proj",))).outcome
        == "changes_nothing"
    )


@pytest.mark.parametrize(
    ("part", "factor", "tp", "by"),
    [
        ("q_proj", (2, 1), 1, "engine"),
        ("q_proj", (1, 2), 1, "engine"),
        ("q_proj", (0.5, 1), 1, "loraledger"),
        ("q_proj", (1, 0.5), 1, "loraledger"),
        ("q_proj", (1, 2), 2, "loraledger"),  # each rank cuts its part out of B
        ("q_proj", (2, 1), 2, "engine"),
        ("o_proj", (2, 1), 2, "loraledger"),  # each rank cuts its part out of A
        ("o_proj", (1, 2), 2, "engine"),
    ],
)
def test_any_other_shape_is_refused_by_the_engine_or_here(
    part: str, factor: tuple[float, float], tp: int, by: str
) -> None:
    sizes = {name: (int(i * factor[0]), int(o * factor[1])) for name, (i, o) in shapes((part,)).items()}
    verdict = judge(adapter_of(pairs(sizes)), BASE, replace(VLLM, tensor_parallel=tp))
    assert refusals(verdict) == {("shape", by)}
    inputs, outputs = next(iter(sizes.values()))
    message = finding(verdict, "shape").message
    assert f"in {inputs} and out {outputs} in the adapter, 64 and 64 in the base" in message
    assert message.endswith("the engine fails on it" if by == "engine" else "the engine would apply it in part")


@pytest.mark.parametrize(("part", "by"), [("q_proj", "loraledger"), ("o_proj", "loraledger"), ("lm_head", "engine")])
def test_fully_sharded_ranks_cut_their_part_out_of_more(part: str, by: str) -> None:
    sizes = {name: (i, 2 * o) for name, (i, o) in (shapes((part,)) or {"lm_head": (64, 100)}).items()}
    sharded = replace(VLLM, tensor_parallel=2, fully_sharded_loras=True)
    assert refusals(judge(adapter_of(pairs(sizes)), BASE, sharded)) == {("shape", by)}


@pytest.mark.parametrize(
    ("claim", "warned"),
    [
        (None, False),
        ("acme/base-8b", False),
        ("mirror/Base-8B/", False),
        ("acme/base-8b-bnb-4bit", True),
        ("../m", True),
    ],
)
def test_another_name_of_the_base_is_only_a_warning(claim: str | None, warned: bool) -> None:
    verdict = judge(adapter_of(base_model_name_or_path=claim), BASE, VLLM)
    assert verdict.outcome == "loads"
    assert [found.rule for found in verdict.findings] == (["base_name"] if warned else [])


def experts(numbers: tuple[int, ...] = (0, 1), parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> Sizes:
    return {
        f"model.layers.0.mlp.experts.{number}.{part}": (16, 64) if part == "down_proj" else (64, 16)
        for number in numbers
        for part in parts
    }


ALL_IN_ONE = {"model.layers.0.mlp.experts.base_layer": (64, 32), "model.layers.0.mlp.experts": (16, 64)}
PARAMETERS: dict[str, Any] = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (experts(), None),
        (experts((0,)), ("expert_missing", "engine")),
        (experts(parts=("gate_proj", "up_proj")), ("expert_missing", "engine")),
        (experts((0, 1, 2)), ("unknown_module", "engine")),
        ({name: (i, o // 2) for name, (i, o) in experts().items()}, ("shape", "loraledger")),
    ],
)
def test_single_experts_come_all_or_not_at_all(sizes: Sizes, expected: tuple[str, str] | None) -> None:
    verdict = judge(adapter_of(pairs(sizes)), MOE, VLLM)
    assert refusals(verdict) == (set() if expected is None else {expected})
    assert verdict.outcome == ("loads" if expected is None else "refused")


def test_experts_of_two_ranks_are_refused() -> None:
    one = "model.layers.0.mlp.experts.1.gate_proj"
    adapter = adapter_of(pairs(experts()) | pairs({one: (64, 16)}, 16), rank_pattern={one: 16})
    assert refusals(judge(adapter, MOE, VLLM)) == {("expert_ranks", "engine")}


def test_pairs_of_all_experts_need_an_engine_that_keeps_them_together() -> None:
    adapter = adapter_of(pairs(ALL_IN_ONE, 16), **PARAMETERS)
    together = judge(adapter, MOE_FUSED, VLLM)
    assert (together.outcome, adapter.rank) == ("loads", 8)
    assert finding(together, "expert_parameters").effect == "warn"
    apart = judge(adapter, MOE, VLLM)
    assert refusals(apart) == {("expert_format", "engine")}
    assert "--enable-mixed-moe-lora-format" in finding(apart, "expert_format").remedy
    of_three = judge(adapter_of(pairs(ALL_IN_ONE, 24), **PARAMETERS), MOE_FUSED, VLLM)
    assert refusals(of_three) == {("shape", "loraledger")}
    assert "3 experts against 2" in finding(of_three, "shape").message
    assert refusals(judge(adapter_of(pairs(experts())), MOE_FUSED, VLLM)) == {("unknown_module", "engine")}


def test_half_of_the_pairs_of_all_experts_fails_or_does_nothing() -> None:
    gates, downs = ({name: size} for name, size in ALL_IN_ONE.items())
    for sizes, by in ((gates, "loraledger"), (downs, "engine")):
        verdict = judge(adapter_of(pairs(sizes, 16), **PARAMETERS), MOE_FUSED, VLLM)
        assert refusals(verdict) == {("expert_missing", by)}
