"""Engines that were read and not run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adapters.verdict.builders import (
    ALL,
    ATTENTION,
    BASE,
    OTHERS,
    adapter_of,
    base_of,
    finding,
    layers_of,
    pairs,
    refusals,
    shapes,
)
from loraledger.adapters.sizing.engine import EngineName, EngineSettings
from loraledger.adapters.verdict.judge import judge


def test_sglang_takes_any_rank_as_setting_and_refuses_targets_outside_its_own() -> None:
    sglang = EngineSettings(engine="sglang", max_lora_rank=16, lora_target_modules=("q_proj",))
    assert judge(adapter_of(r=24), None, sglang).max_lora_rank == 24
    assert judge(adapter_of(), BASE, sglang).outcome == "loads"  # v shares the layer of q
    verdict = judge(adapter_of(pairs(shapes(ATTENTION))), BASE, sglang)
    assert refusals(verdict) == {("not_targeted", "engine")}
    assert "o_proj" in finding(verdict, "not_targeted").remedy
    unset = judge(adapter_of(), BASE, replace(sglang, lora_target_modules=None))
    assert finding(unset, "targets_unset").effect == "warn"
    moved = judge(adapter_of(), base_of(*layers_of("language_model.model.")), sglang)
    assert (moved.outcome, moved.applied) == ("loads", 4)  # it goes by the layer's number
    beyond = judge(adapter_of(pairs(shapes(layers=(1, 2)))), BASE, sglang)
    assert refusals(beyond) == {("not_in_base", "engine")}


@pytest.mark.parametrize(
    ("engine", "changes", "refused"),
    [
        ("sglang", {"use_rslora": True}, True),
        ("lorax", {"use_rslora": True}, False),
        ("slora", {"use_rslora": True}, True),
        ("sglang", {"alpha_pattern": {"q_proj": 32}}, True),
        ("lorax", {"alpha_pattern": {"q_proj": 32}}, True),
        ("lorax", {"alpha_pattern": {"q_proj": 16}}, False),
        ("slora", {"alpha_pattern": {"nowhere": 32}}, False),
    ],
)
def test_engines_with_one_scaling_are_not_given_adapters_with_several(
    engine: EngineName, changes: dict[str, Any], refused: bool
) -> None:
    verdict = judge(adapter_of(pairs(shapes(ATTENTION)), **changes), None, EngineSettings(engine=engine))
    assert refusals(verdict) == ({("scaling", "loraledger")} if refused else set())
    cause = "use_rslora" if "use_rslora" in changes else "rank_pattern or alpha_pattern"
    assert not refused or finding(verdict, "scaling").message.startswith(f"{cause}: ")


def test_lorax_drops_a_kind_of_module_that_lacks_a_layer() -> None:
    adapter = adapter_of(pairs(shapes(("q_proj",)) | shapes(("v_proj",), layers=(0,))))
    verdict = judge(adapter, BASE, EngineSettings(engine="lorax"))
    assert (verdict.outcome, verdict.applied, verdict.modules) == ("partly_applied", 2, 3)
    assert verdict.max_lora_rank is None
    assert finding(verdict, "layer_gap").effect == "drop"
    elsewhere = judge(adapter_of(), base_of(*layers_of("language_model.model.")), EngineSettings(engine="lorax"))
    assert (elsewhere.outcome, finding(elsewhere, "not_in_base").effect) == ("changes_nothing", "drop")


def test_slora_reads_attention_alone_and_needs_all_of_it() -> None:
    slora = EngineSettings(engine="slora")
    base = base_of(*layers_of(), kv_heads=4)
    assert refusals(judge(adapter_of(), base, slora)) == {("missing_attention", "engine")}
    verdict = judge(adapter_of(pairs(shapes(ALL))), base, slora)
    assert (verdict.outcome, verdict.applied, verdict.modules) == ("partly_applied", 8, 14)
    assert finding(verdict, "not_attention").effect == "drop"
    assert refusals(judge(adapter_of(pairs(shapes(ATTENTION))), BASE, slora)) == {("head_widths", "engine")}


@pytest.mark.parametrize("engine", OTHERS)
def test_a_verdict_from_source_alone_says_so_and_still_compares_shapes(
    engine: EngineName,
) -> None:
    wide = {name: (2 * i, o) for name, (i, o) in shapes(ATTENTION).items()}
    base = base_of(*layers_of(), kv_heads=4)
    verdict = judge(adapter_of(pairs(wide)), base, EngineSettings(engine=engine))
    assert {rule for rule, _ in refusals(verdict)} == {"shape"}
    assert finding(verdict, "not_run").effect == "warn"
