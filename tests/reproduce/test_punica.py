from __future__ import annotations

import msgspec
import pytest
from benchmarks.reproduce.punica import MODELS, Model, _profile, _rates, _ratios, rate

from loraledger.replay.traces.trace import Request
from loraledger.replay.workloads.popularity import PUNICA
from loraledger.twin.profile import PS_PER_MS, TwinProfile


def flat(batches: str) -> TwinProfile:
    """Steps of 10 ms whatever is in them."""
    profile = _profile(MODELS[0], 0.01, 0.0, "split" if batches == "split" else "mixed")
    return msgspec.structs.replace(
        profile, step_base_ps=10 * PS_PER_MS, step_per_kv_token_ps=0, prefill_per_token_ps=0, lora_ps=0
    )


def asked(*adapters: str) -> list[Request]:
    """Ten prompt tokens and ten of output each: ten steps."""
    return [Request(0, "t0", name, 10, 10) for name in adapters]


@pytest.mark.parametrize(
    ("adapters", "steps"),
    [
        ("a", 10),
        ("aa", 11),  # at most one new prompt a step
        ("ab", 20),
        ("aab", 21),
        ("aba", 30),  # the third waits behind the second, which waits for the batch to end
    ],
)
def test_split_batches_are_first_come_first_served_and_of_one_adapter(adapters: str, steps: int) -> None:
    assert rate(flat("split"), asked(*adapters), "split") == pytest.approx(20 * len(adapters) / (steps * 0.01))


@pytest.mark.parametrize(("adapters", "steps"), [("a", 10), ("ab", 11), ("aba", 12), ("abc" * 11, 42)])
def test_mixed_batches_take_whoever_is_next_up_to_32(adapters: str, steps: int) -> None:
    assert rate(flat("mixed"), asked(*adapters), "mixed") == pytest.approx(20 * len(adapters) / (steps * 0.01))


def test_the_33rd_request_waits_until_one_has_ended_and_joins_a_step_later() -> None:
    requests = [Request(0, "t0", name, 10, 40) for name in "ab" * 17]
    assert rate(flat("mixed"), requests, "mixed") == pytest.approx(34 * 50 / (82 * 0.01))


def test_a_step_of_many_adapters_costs_two_ms_more_and_a_prompt_token_its_arithmetic() -> None:
    mixed, split = (_profile(MODELS[0], 0.01, 0.0002, batches) for batches in ("mixed", "split"))
    assert (mixed.lora_ps, split.lora_ps) == (2 * PS_PER_MS, 0)
    assert mixed.prefill_per_token_ps == pytest.approx(2 * 6.7e9 / 156e12 * 1e12, rel=1e-3)
    assert mixed.step_per_kv_token_ps == pytest.approx(524_288 / 2.039e12 * 1e12, rel=1e-3)
    large = _profile(MODELS[2], 0.01, 0.0002, "mixed")
    assert large.prefill_per_token_ps == pytest.approx(2 * 68.9e9 / (8 * 156e12) * 1e12, rel=1e-3)


def as_published(model: Model) -> dict[tuple[str, str], float]:
    return {
        (batches, spread): float(figure)
        for batches, figures in (("mixed", model.mixed), ("split", model.split))
        for spread, figure in zip(PUNICA, figures, strict=True)
    }


def test_rates_are_held_against_their_own_publication_and_the_two_fitted_ones_are_not_counted() -> None:
    rates = as_published(MODELS[1])
    found = _rates(MODELS[1], rates)
    assert [line.error for line in found] == ["+0.0 %"] * 8
    assert [line.what.split(", ")[1:] for line in found if line.fitted] == [
        ["distinct", "split by adapter"],
        ["identical", "split by adapter"],
    ]
    for factor, passed in ((1.09, True), (1.11, False), (0.91, True), (0.89, False)):
        line = _rates(MODELS[1], rates | {("mixed", "skewed"): factor * MODELS[1].mixed[2]})[2]
        assert (line.passed, bool(line.reason)) == (passed, not passed)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_ratios_may_stray_as_far_as_published_for_the_small_model(model: Model) -> None:
    rates = as_published(model)
    assert [(line.error, line.passed) for line in _ratios(model, rates)] == [("+0.0 %", True)] * 2
    reference = MODELS[0].mixed[0] / MODELS[0].split[0]
    for most, passed in ((13.9, True), (14.1, False), (10.1, True), (9.9, False)):
        off = rates | {("mixed", "distinct"): rates["mixed", "distinct"] * most / reference}
        assert _ratios(model, off)[0].passed is passed
