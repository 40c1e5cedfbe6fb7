"""What loraledger says of odd adapters, and what a real vLLM then does with them.

The engines are this module's own: some adapters leave traces. A load that fails in the middle keeps a host entry and a slot.
And on CPU a resident adapter with an `lm_head` pair changes the base's answers even when the base runs alone (the logits'
kernel takes index -1 for the last slot), so the base is asked once, before anything is loaded.

Answers are compared by the five best log probabilities of the first token after each prompt. Over all adapters here, equal ones
were equal to the last bit, and different ones differed in which tokens are the five.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from loraledger.adapters.reading.folder import read_folder
from loraledger.adapters.sizing.base import read_base
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.verdict.judge import Verdict, judge
from loraledger.errors import InputFileError

from .engine import MODEL_CACHE, PYTHON, Engine, Model

PROMPTS = ("Hello, world", "The capital of France is")
SETTINGS = EngineSettings(max_loras=2, max_cpu_loras=4, max_lora_rank=64, dtype="float32")
FILTER = ("q_proj", "v_proj")

LOADS = (
    *("plain", "pattern-32", "bf16", "fp16", "fp64", "fp8", "rslora", "alpha-pattern", "all-linear", "targets-null"),
    *("gaussian", "classifies", "table", "table-with-base", "head", "no-prefix", "all-modules", "mlp-only", "k-only"),
)
CHANGES_NOTHING = ("wrong-prefix", "layers-beyond")
PARTLY = {"half-wrong-prefix": (4, 8), "six-layers": (8, 12), "odd-base-layer": (8, 9)}
"""Modules applied, of how many."""
ENGINE_REFUSES = {
    "rank-96": ("rank_over_max", "LoRA rank 96 is greater than max_lora_rank 64"),
    "rank-768": ("rank_over_max", "LoRA rank 768 is greater"),
    "pattern-96": ("rank_over_max", "LoRA rank 96 is greater"),
    "pattern-for-nothing": ("rank_over_max", "LoRA rank 96 is greater"),
    "config-96-tensors-8": ("rank_over_max", "LoRA rank 96 is greater"),
    "tensors-96": ("rank_over_max", "The size of tensor a (64) must match the size of tensor b (96)"),
    "dora": ("dora", "does not yet support DoRA"),
    "dora-unsaid": ("dora", "lora_magnitude_vector is unsupported"),
    "dora-without-vectors": ("dora", "does not yet support DoRA"),
    "bias-all": ("bias", "Adapter bias is not supported"),
    "lora-bias": ("bias", "does not support LoRA bias"),
    "lora-bias-unsaid": ("unknown_tensor", "lora_B.bias is unsupported"),
    "pissa": ("init", "init_lora_weights='pissa_niter_4'"),
    "activated": ("activated_lora", "Activated LoRA"),
    "replicated": ("layer_replication", "layer_replication"),
    "block-diagonal": ("block_diagonal", "block-diagonal"),
    "qalora": ("qalora", "QALoRA"),
    "adalora": ("unknown_tensor", "q_proj.lora_A is unsupported"),
    "saved-head": ("modules_to_save", "Unsupported modules_to_save: ['lm_head']"),
    "saved-table": ("modules_to_save", "Unsupported modules_to_save: ['embed_tokens']"),
    "saved-table-unsaid": ("whole_matrix", "embed_tokens.weight is unsupported"),
    "saved-score": ("classifier", "Cannot load full module 'score'"),
    "saved-score-unsaid": ("whole_matrix", "but received ['score']"),
    "table-too-small": ("shape", "embedding LoRA size(232) must be consistent"),
    "tokens": ("unknown_tensor", "trainable_tokens_delta is unsupported"),
    "wider": ("shape", "tensor a (256) must match the size of tensor b (512)"),
    "taller": ("shape", "tensor a (256) must match the size of tensor b (512)"),
    "row-wider": ("shape", "tensor a (256) must match the size of tensor b (512)"),
    "odd-module": ("unknown_module", "self_attn.rotary_proj"),
    "fused": ("unknown_module", "self_attn.qkv_proj"),
    "infix": ("infix", "lora_A.default.weight is unsupported"),
    "extra": ("unknown_tensor", "gate_scale is unsupported"),
    "extra-bias": ("unknown_tensor", "q_proj.bias is unsupported"),
    "extra-base": ("whole_matrix", "q_proj.base_layer.weight is unsupported"),
    "sharded": ("sharded", "doesn't contain tensors"),
}
"""Rule, and the engine's own words."""
WE_REFUSE = {
    "tensors-16": "rank_disagrees",
    "pair-8-16": "pair_ranks",
    "pair-16-8": "pair_ranks",
    "int8": "stored_type",
    "score-without-weights": "classifier",
    "head-too-small": "shape",
    "narrower": "shape",
    "lower": "shape",
    "row-narrower": "shape",
}
"""The engine answers 200 and serves something that nobody trained."""
HALVES = {"a-only": 500, "a-only-unscaled": 200, "b-only": 200, "a-only-single": 500, "b-only-single": 500}
"""Half pairs, and what the engine answers."""
ZEROS = "zero-b"
OTHER_METHOD = "ia3"
EXPERTS = {
    "experts-router": ("loads", None),
    "experts-all": ("loads", None),
    "experts-of-one-layer": ("loads", None),
    "experts-three": ("expert_missing", ""),
    "experts-five": ("unknown_module", "experts.4.gate_proj"),
    "experts-gates": ("expert_missing", ""),
    "experts-two-ranks": ("expert_ranks", "have different LoRA ranks for the same projection"),
    "experts-narrower": ("shape", None),
    "experts-fused": ("expert_format", "contains fused 3D MoE weights"),
    "experts-fused-gates": ("expert_format", None),
}
"""On the mixture of experts, which the CPU build loads adapters for and cannot run: outcome or rule, and the engine's own
words, `None` where it answers 200."""
FILTERED = {
    "plain": "loads",
    "k-only": "loads",  # k shares a layer with q and v
    "all-modules": "partly_applied",
    "mlp-only": "changes_nothing",
    "row-narrower": "changes_nothing",  # nobody looks at the shape of a pair that is dropped
    "row-wider": "changes_nothing",
}
"""With --lora-target-modules q_proj v_proj."""

Best = list[dict[str, float]]


@dataclass
class Answer:
    """What the engine did with one adapter."""

    status: int
    text: str
    best: Best | None
    health: int


@pytest.fixture(scope="session")
def odd(model: Model) -> Path:
    """The folder of all odd adapters."""
    script = Path(__file__).with_name("odd_adapters.py")
    built = subprocess.run([PYTHON, "-P", script, MODEL_CACHE, model.base], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return Path(built.stdout.strip())


@pytest.fixture(scope="session")
def base(model: Model) -> BaseModel:
    return read_base(model.base)


def best(client: httpx2.Client, name: str) -> Best:
    body = {"model": name, "prompt": list(PROMPTS), "max_tokens": 1, "temperature": 0, "logprobs": 5}
    choices = client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    ordered = sorted(choices, key=lambda choice: int(choice["index"]))
    return [choice["logprobs"]["top_logprobs"][0] for choice in ordered]


def same(one: Best, other: Best) -> bool:
    return all(
        a.keys() == b.keys() and all(abs(a[token] - b[token]) <= 1e-6 for token in a)
        for a, b in zip(one, other, strict=True)
    )


def ask_all(engine: Engine, odd: Path, names: list[str]) -> dict[str, Answer]:
    """Load, ask and unload each of ``names`` in this order; the base first, as `base`."""
    answers: dict[str, Answer] = {}
    with httpx2.Client(base_url=engine.url, timeout=60.0, trust_env=False) as client:
        answers["base"] = Answer(200, "", best(client, "base"), 200)
        for name in names:
            loaded = load(client, odd, name)
            found = best(client, name) if loaded.status_code == 200 else None
            if found is not None:
                client.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
            health = client.get("/health").status_code
            answers[name] = Answer(loaded.status_code, loaded.text.replace('\\"', '"'), found, health)
    return answers


@pytest.fixture(scope="module")
def answers(model: Model, odd: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Answer]]:
    """All adapters on an engine that serves all modules; `plain` once more at the end, as `again`."""
    names: list[str] = json.loads((odd / "names.json").read_text())
    with Engine(model.base, tmp_path_factory.mktemp("verdict") / "engine.log") as engine:
        found = ask_all(engine, odd, names)
        yield found | {"again": ask_all(engine, odd, ["plain"])["plain"]}


@pytest.fixture(scope="module")
def filtered(model: Model, odd: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Answer]]:
    """Some adapters on an engine that serves q and v alone."""
    log = tmp_path_factory.mktemp("filtered") / "engine.log"
    with Engine(model.base, log, arguments=("--lora-target-modules", *FILTER)) as engine:
        yield ask_all(engine, odd, [*FILTERED, "all-modules.twin"])


@pytest.fixture(scope="module")
def loads_of_experts(odd: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx2.Response]]:
    """What the load of each adapter for the mixture of experts answers."""
    with (
        Engine(odd / "experts-base", tmp_path_factory.mktemp("experts") / "engine.log") as engine,
        httpx2.Client(base_url=engine.url, timeout=60.0, trust_env=False) as client,
    ):
        yield {name: load(client, odd, name) for name in json.loads((odd / "experts.json").read_text())}


def load(client: httpx2.Client, odd: Path, name: str) -> httpx2.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(odd / name)})


def verdict(odd: Path, name: str, base: BaseModel, settings: EngineSettings = SETTINGS) -> Verdict:
    return judge(read_folder(name, odd / name), base, settings)


def refusing(verdict: Verdict) -> set[tuple[str, str]]:
    """Rule and refuser of each finding that refuses."""
    return {(finding.rule, finding.by) for finding in verdict.findings if finding.effect == "refuse"}


def test_every_odd_adapter_is_judged_here(odd: Path) -> None:
    names = {name for name in json.loads((odd / "names.json").read_text()) if not name.endswith(".twin")}
    judged = [*LOADS, *CHANGES_NOTHING, *PARTLY, *ENGINE_REFUSES, *WE_REFUSE, *HALVES, ZEROS, OTHER_METHOD]
    assert sorted(judged) == sorted(names)
    assert len(judged) > 60


@pytest.mark.parametrize("name", LOADS)
def test_what_loads_is_applied(name: str, odd: Path, base: BaseModel, answers: dict[str, Answer]) -> None:
    said = verdict(odd, name, base)
    assert (said.outcome, said.applied) == ("loads", said.modules), said.findings
    done = answers[name]
    assert done.status == 200, done.text
    assert done.best is not None
    assert not same(done.best, best_of(answers, "base"))


def best_of(answers: dict[str, Answer], name: str) -> Best:
    found = answers[name].best
    assert found is not None, answers[name].text
    return found


@pytest.mark.parametrize("name", CHANGES_NOTHING)
def test_what_changes_nothing_answers_as_the_base(
    name: str, odd: Path, base: BaseModel, answers: dict[str, Answer]
) -> None:
    said = verdict(odd, name, base)
    assert (said.outcome, said.applied) == ("changes_nothing", 0)
    assert same(best_of(answers, name), best_of(answers, "base"))


@pytest.mark.parametrize("name", PARTLY)
def test_what_is_partly_applied_answers_as_that_part(
    name: str, odd: Path, base: BaseModel, answers: dict[str, Answer]
) -> None:
    said = verdict(odd, name, base)
    assert (said.outcome, (said.applied, said.modules)) == ("partly_applied", PARTLY[name])
    assert verdict(odd, f"{name}.twin", base).outcome == "loads"
    assert same(best_of(answers, name), best_of(answers, f"{name}.twin"))
    assert not same(best_of(answers, name), best_of(answers, "base"))


@pytest.mark.parametrize("name", ENGINE_REFUSES)
def test_what_the_engine_refuses_is_refused_before(
    name: str, odd: Path, base: BaseModel, answers: dict[str, Answer]
) -> None:
    rule, words = ENGINE_REFUSES[name]
    said = verdict(odd, name, base)
    assert said.outcome == "refused"
    assert (rule, "engine") in refusing(said), said.findings
    assert answers[name].status == 500
    assert words in answers[name].text


@pytest.mark.parametrize("name", WE_REFUSE)
def test_what_the_engine_takes_wrongly_is_refused_here(
    name: str, odd: Path, base: BaseModel, answers: dict[str, Answer]
) -> None:
    said = verdict(odd, name, base)
    assert refusing(said) == {(WE_REFUSE[name], "loraledger")}, said.findings
    assert answers[name].status == 200, answers[name].text


@pytest.mark.parametrize("name", HALVES)
def test_half_pairs_are_refused_whatever_the_engine_does(
    name: str, odd: Path, base: BaseModel, answers: dict[str, Answer]
) -> None:
    assert ("half_pair", "loraledger") in refusing(verdict(odd, name, base))
    assert answers[name].status == HALVES[name], answers[name].text


def test_pairs_of_zeros_load_and_change_nothing_which_no_header_shows(
    odd: Path, base: BaseModel, answers: dict[str, Answer]
) -> None:
    assert verdict(odd, ZEROS, base).outcome == "loads"
    assert same(best_of(answers, ZEROS), best_of(answers, "base"))


def test_another_method_is_not_even_read(odd: Path, answers: dict[str, Answer]) -> None:
    with pytest.raises(InputFileError, match="IA3"):
        read_folder(OTHER_METHOD, odd / OTHER_METHOD)
    assert answers[OTHER_METHOD].status == 500


def test_no_odd_adapter_ends_the_engine_or_changes_what_a_good_one_answers(answers: dict[str, Answer]) -> None:
    assert {answer.health for answer in answers.values()} == {200}
    assert same(best_of(answers, "again"), best_of(answers, "plain"))


@pytest.mark.parametrize("name", FILTERED)
def test_a_filter_of_targets_drops_the_other_modules(
    name: str, odd: Path, base: BaseModel, filtered: dict[str, Answer]
) -> None:
    settings = EngineSettings(max_loras=2, max_lora_rank=64, dtype="float32", lora_target_modules=FILTER)
    outcome = verdict(odd, name, base, settings).outcome
    assert outcome == FILTERED[name]
    assert same(best_of(filtered, name), best_of(filtered, "base")) == (outcome == "changes_nothing")
    if outcome == "partly_applied":
        assert same(best_of(filtered, name), best_of(filtered, f"{name}.twin"))


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_come_all_or_not_at_all(name: str, odd: Path, loads_of_experts: dict[str, httpx2.Response]) -> None:
    assert EXPERTS.keys() == loads_of_experts.keys()
    expected, words = EXPERTS[name]
    answer = loads_of_experts[name]
    assert answer.status_code == (200 if words is None else 500), answer.text
    assert words is None or words in answer.text
    said = verdict(odd, name, read_base(odd / "experts-base"))
    if expected == "loads":
        assert (said.outcome, said.applied) == ("loads", said.modules), said.findings
    else:
        assert refusing(said) == {(expected, "loraledger" if words is None else "engine")}, said.findings
