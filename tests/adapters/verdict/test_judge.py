"""The outcome, and what surrounds it. That verdicts agree with a real engine is shown in `tests/vllm`."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.verdict.builders import (
    ALL,
    BASE,
    MOE,
    MOE_FUSED,
    OTHERS,
    VLLM,
    Sizes,
    adapter_of,
    finding,
    pairs,
    shapes,
)
from loraledger.adapters.sizing.basemodel import served_modules
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.verdict.judge import Verdict, judge


def test_a_plain_adapter_on_its_base_loads_without_a_word() -> None:
    verdict = judge(adapter_of(), BASE, VLLM)
    assert verdict == Verdict(outcome="loads", findings=(), applied=4, modules=4, max_lora_rank=8)


def test_shapes_that_nobody_knows_fit_and_it_is_said() -> None:
    base = served_modules("\n".join(shapes(ALL)))
    verdict = judge(adapter_of(), base, VLLM)
    assert (verdict.outcome, [finding.rule for finding in verdict.findings]) == ("loads", ["shapes_unknown"])


def test_without_a_base_only_the_adapter_is_judged_and_it_is_said() -> None:
    verdict = judge(adapter_of(), None, VLLM)
    assert (verdict.outcome, verdict.applied) == ("loads", 4)
    assert finding(verdict, "base_unknown").effect == "warn"


def test_findings_come_with_the_gravest_first() -> None:
    tensors = pairs(shapes(layers=(0, 1, 2)))
    verdict = judge(adapter_of(tensors, task_type="SEQ_CLS", use_dora=True), BASE, VLLM)
    assert [finding.effect for finding in verdict.findings] == ["refuse", "drop", "warn"]


parts = ("base_model.model", "model", "layers", "0", "1", "9", "mlp", "self_attn", "experts", "q_proj", "gate_proj")
endings = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_A.default.weight",
    "lora_embedding_A",
    "weight",
    "bias",
    "lora_A.bias",
)
names = st.builds(
    lambda words, ending: ".".join([*words, ending]),
    st.lists(st.sampled_from([*parts, "base_layer", "down_proj", "x", ""]), max_size=7),
    st.sampled_from(endings),
)
pairs_of_names = st.dictionaries(
    names.map(lambda name: name.split(".lora_")[0]), st.tuples(st.integers(1, 99), st.integers(1, 99))
)


@given(
    loose=st.dictionaries(names, st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6),
    paired=pairs_of_names,
)
@settings(max_examples=200)
def test_no_name_or_shape_makes_a_verdict_fail(loose: dict[str, tuple[int, ...]], paired: Sizes) -> None:
    adapter = adapter_of(pairs(paired) | loose)
    for base in (None, BASE, MOE, MOE_FUSED):
        for engine in ("vllm", *OTHERS):
            verdict = judge(adapter, base, EngineSettings(engine=engine))
            assert 0 <= verdict.applied <= verdict.modules
