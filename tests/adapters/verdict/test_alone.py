"""Rules on the adapter alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.verdict.builders import (
    ATTENTION,
    BASE,
    OTHERS,
    PREFIX,
    VLLM,
    adapter_of,
    finding,
    pairs,
    refusals,
    shapes,
)
from loraledger.adapters.sizing.basemodel import served_modules
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.sizing.footprint import slot_bytes
from loraledger.adapters.verdict.judge import judge
from loraledger.config.schema import MAX_RANKS


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({"r": 24}, "r is 24"),
        ({"rank_pattern": {"q_proj": 24}}, "rank_pattern goes up to 24, r is 8"),
        ({"rank_pattern": {"nowhere": 24}}, "rank_pattern goes up to 24, r is 8"),
    ],
)
def test_a_rank_over_the_setting_names_figure_setting_and_cost(changes: dict[str, Any], source: str) -> None:
    verdict = judge(adapter_of(**changes), BASE, VLLM)
    found = finding(verdict, "rank_over_max")
    assert (verdict.outcome, verdict.max_lora_rank, found.by) == ("refused", 32, "engine")
    assert found.message == f"rank 24 ({source}) is above max_lora_rank 16; it takes 32 at least"
    small, large = slot_bytes(BASE, VLLM), slot_bytes(BASE, replace(VLLM, max_lora_rank=32))
    assert small is not None
    assert large is not None
    assert "--max-lora-rank 32: raising max_lora_rank 16 -> 32 makes each slot" in found.remedy
    assert f" {large.total - small.total:,} bytes larger (x max_loras 4 = " in found.remedy
    assert "rank process" not in found.remedy
    cut = judge(adapter_of(**changes), BASE, replace(VLLM, tensor_parallel=2))
    assert finding(cut, "rank_over_max").remedy.endswith("on each rank process)")


def test_a_rank_only_in_the_tensors_counts_as_well() -> None:
    verdict = judge(adapter_of(pairs(shapes(), 24)), BASE, VLLM)
    assert refusals(verdict) == {("rank_over_max", "engine"), ("rank_disagrees", "loraledger")}
    assert "its tensors have rank 24, r is 8" in finding(verdict, "rank_over_max").message


def test_above_the_largest_setting_there_is_none_to_name() -> None:
    verdict = judge(adapter_of(r=768), None, VLLM)
    assert verdict.max_lora_rank is None
    assert finding(verdict, "rank_over_max").by == "engine"
    assert "no setting takes it, the largest max_lora_rank is 512" in finding(verdict, "rank_over_max").message
    assert "--max-lora-rank" not in finding(verdict, "rank_over_max").remedy


def test_the_cost_of_a_rank_is_unknown_without_shapes() -> None:
    for base in (None, served_modules("model.layers.0.self_attn.q_proj")):
        assert finding(judge(adapter_of(r=32), base, VLLM), "rank_over_max").remedy.endswith(
            "in proportion to the rank"
        )


@given(rank=st.integers(1, 600), setting=st.sampled_from(MAX_RANKS))
@settings(max_examples=60)
def test_a_rank_is_refused_exactly_when_it_is_above_the_setting(rank: int, setting: int) -> None:
    adapter = adapter_of(pairs(shapes(), rank), r=rank)
    verdict = judge(adapter, BASE, replace(VLLM, max_lora_rank=setting))
    assert (verdict.outcome == "refused") == (rank > setting)
    if verdict.max_lora_rank is not None:
        assert judge(adapter, BASE, replace(VLLM, max_lora_rank=verdict.max_lora_rank)).outcome == "loads"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"use_dora": True}, "dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "bias"),
        ({"init_lora_weights": "pissa"}, "init"),
        ({"init_lora_weights": "loftq"}, "init"),
        ({"alora_invocation_tokens": [1]}, "activated_lora"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"use_bdlora": {"nblocks": 2}}, "block_diagonal"),
        ({"use_qalora": True}, "qalora"),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, "modules_to_save"),
    ],
)
def test_a_setting_that_is_not_plain_lora_is_refused_by_vllm_and_here_for_the_others(
    changes: dict[str, Any], rule: str
) -> None:
    adapter = adapter_of(pairs(shapes(ATTENTION)), **changes)
    assert refusals(judge(adapter, BASE, VLLM)) == {(rule, "engine")}
    for engine in OTHERS:
        by = "engine" if (engine, rule) == ("sglang", "dora") else "loraledger"
        assert refusals(judge(adapter, None, EngineSettings(engine=engine))) == {(rule, by)}


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "lora_ga"])
def test_an_init_that_leaves_the_base_alone_is_fine(init: bool | str) -> None:
    assert judge(adapter_of(init_lora_weights=init), BASE, VLLM).findings == ()


@pytest.mark.parametrize(
    ("extra", "rule"),
    [
        ({"model.layers.0.self_attn.q_proj.lora_magnitude_vector": (64,)}, "dora"),
        ({"model.embed_tokens.weight": (100, 64)}, "whole_matrix"),
        ({"model.layers.0.self_attn.q_proj.base_layer.weight": (64, 64)}, "whole_matrix"),
        ({"model.layers.0.self_attn.q_proj.lora_B.bias": (64,)}, "unknown_tensor"),
        ({"model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 64)}, "unknown_tensor"),
        ({"model.layers.0.self_attn.q_proj.scale": (1,)}, "unknown_tensor"),
    ],
)
def test_a_tensor_beside_the_pairs_is_refused(extra: dict[str, tuple[int, ...]], rule: str) -> None:
    tensors = pairs(shapes()) | {PREFIX + name: shape for name, shape in extra.items()}
    verdict = judge(adapter_of(tensors), BASE, VLLM)
    assert refusals(verdict) == {(rule, "engine")}
    assert next(iter(extra)) in finding(verdict, rule).message


def test_whole_matrices_are_named_with_their_share_of_the_file() -> None:
    tensors = pairs(shapes()) | {f"{PREFIX}lm_head.weight": (100, 64)}
    verdict = judge(adapter_of(tensors, modules_to_save=["lm_head"]), BASE, VLLM)
    assert "'lm_head' (12.5 KiB of 19.5 KiB)" in finding(verdict, "modules_to_save").message


def test_a_copy_of_the_token_table_is_only_a_warning_since_the_engine_skips_it() -> None:
    tensors = pairs(shapes()) | {f"{PREFIX}model.embed_tokens.base_layer.weight": (100, 64)}
    verdict = judge(adapter_of(tensors), BASE, VLLM)
    assert (verdict.outcome, finding(verdict, "saved_table").effect) == ("loads", "warn")


def test_a_classifier_is_refused_by_the_engine_only_when_its_head_is_there() -> None:
    fields: dict[str, Any] = {"modules_to_save": ["classifier", "score"], "task_type": "SEQ_CLS"}
    with_head = pairs(shapes()) | {f"{PREFIX}score.weight": (2, 64)}
    assert refusals(judge(adapter_of(**fields), BASE, VLLM)) == {("classifier", "loraledger")}
    assert refusals(judge(adapter_of(with_head, **fields), BASE, VLLM)) == {("classifier", "engine")}


@pytest.mark.parametrize("task", ["SEQ_CLS", "SEQ_2_SEQ_LM"])
def test_a_task_alone_is_only_a_warning_since_tags_are_often_wrong(task: str) -> None:
    verdict = judge(adapter_of(task_type=task), BASE, VLLM)
    assert (verdict.outcome, finding(verdict, "task").effect) == ("loads", "warn")


def test_tensors_of_another_rank_than_configured_would_be_scaled_wrongly() -> None:
    verdict = judge(adapter_of(pairs(shapes(), 16)), BASE, VLLM)
    assert refusals(verdict) == {("rank_disagrees", "loraledger")}
    assert "rank 16 in the file, 8 in the configuration" in finding(verdict, "rank_disagrees").message


def test_halves_and_unequal_pairs_are_refused_here() -> None:
    whole = pairs(shapes())
    name = f"{PREFIX}model.layers.0.self_attn.q_proj"
    half = {key: shape for key, shape in whole.items() if key != f"{name}.lora_B.weight"}
    unequal = whole | {f"{name}.lora_B.weight": (64, 4)}
    alone = {f"{name}.lora_A.weight": (8, 64)}
    for tensors in (half, alone):
        assert refusals(judge(adapter_of(tensors), BASE, VLLM)) == {("half_pair", "loraledger")}
    assert refusals(judge(adapter_of(unequal), BASE, VLLM)) == {("pair_ranks", "loraledger")}
    assert refusals(judge(adapter_of({f"{PREFIX}x.q.weight": (1, 1)}), BASE, VLLM)) == {
        ("no_pairs", "engine"),
        ("whole_matrix", "engine"),
    }


def test_names_that_kept_the_adapters_own_name_are_refused() -> None:
    tensors = {name.replace(".weight", ".default.weight"): shape for name, shape in pairs(shapes()).items()}
    assert refusals(judge(adapter_of(tensors), BASE, VLLM)) == {("infix", "engine")}


def test_several_files_are_refused_and_worse_with_a_pickle_beside_them() -> None:
    assert refusals(judge(adapter_of(sharded=True), BASE, VLLM)) == {("sharded", "engine")}
    with_pickle = adapter_of(sharded=True, ignored=("adapter_model.bin",))
    assert refusals(judge(with_pickle, BASE, VLLM)) == {("sharded", "loraledger")}
    assert "unpickle 'adapter_model.bin'" in finding(judge(with_pickle, BASE, VLLM), "sharded").message


@pytest.mark.parametrize(
    ("dtype", "lora_dtype", "effect"),
    [
        ("BF16", "auto", None),
        ("F16", "auto", None),
        ("F32", "auto", "warn"),
        ("F64", "float16", "warn"),
        ("F8_E4M3", "auto", "warn"),
        ("I8", "auto", "refuse"),
        ("U8", "auto", "refuse"),
        ("BOOL", "auto", "refuse"),
    ],
)
def test_types_are_cast_and_whole_numbers_lose_their_scales(
    dtype: str, lora_dtype: Literal["auto", "float16"], effect: str | None
) -> None:
    verdict = judge(adapter_of(dtype=dtype), BASE, replace(VLLM, lora_dtype=lora_dtype))
    assert [finding.effect for finding in verdict.findings] == ([] if effect is None else [effect])
    assert refusals(verdict) == ({("stored_type", "loraledger")} if effect == "refuse" else set())


def test_a_method_that_has_loras_fields_is_refused_by_name() -> None:
    verdict = judge(adapter_of(peft_type="ADALORA"), BASE, VLLM)
    assert refusals(verdict) == {("method", "loraledger")}
    assert "ADALORA" in finding(verdict, "method").message
