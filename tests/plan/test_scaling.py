"""A profile carried over: the roofline's ratios, what stays, and how far off the shipped fits are."""

from __future__ import annotations

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger.plan.hardware import Gpu, catalogue
from loraledger.plan.scaling import ALL_REDUCE_PS, EXPONENTS, SEQUENCE_EXPONENT, Scaled, measured_on, scaled
from loraledger.replay.scenarios.profiles import read_profile, shipped
from loraledger.twin.profile import TwinProfile

GPUS = catalogue()
H100 = GPUS.gpus["h100-sxm"]
PROFILE = read_profile("llama-3.1-8b-h100").profile
names = st.sampled_from(sorted(GPUS.gpus))
TABLED = TwinProfile(
    max_seqs=64,
    token_budget=2048,
    decode_table=((1, 6_000_000_000, 30_000), (64, 7_000_000_000, 40_000)),
    prefill_table=((16, 1_000_000_000), (256, 1_200_000_000), (2048, 38_000_000_000)),
    mixed_table=((16, 1_500_000_000), (2048, 40_000_000_000)),
)


def factor(found: tuple[Scaled, ...], term: str) -> Scaled:
    (one,) = [each for each in found if each.term == term]
    return one


@pytest.mark.parametrize("name", shipped())
def test_a_profile_on_its_own_gpu_is_itself(name: str) -> None:
    profile = read_profile(name).profile
    result, found = scaled(profile, H100, H100)
    assert result == profile
    assert {(each.factor, each.low, each.high) for each in found} == {(1.0, 1.0, 1.0)}


def test_tables_on_their_own_gpu_are_themselves() -> None:
    steep = TwinProfile(step_base_ps=10**9, prefill_table=((256, 2 * 10**9), (2048, 40 * 10**9)))
    for profile in (TABLED, steep):
        assert scaled(profile, H100, H100)[0] == profile


def test_decode_follows_memory_bandwidth_and_prefill_arithmetic() -> None:
    l4 = GPUS.gpus["l4"]
    result, found = scaled(PROFILE, H100, l4)
    memory, compute = 3350 / 300, 989 / 121
    assert result.step_base_ps == pytest.approx(PROFILE.step_base_ps * memory, rel=1e-6)
    assert result.step_per_kv_token_ps == pytest.approx(PROFILE.step_per_kv_token_ps * memory, rel=1e-4)
    assert result.prefill_per_token_ps == pytest.approx(PROFILE.prefill_per_token_ps * compute, rel=1e-6)
    assert factor(found, "decode").factor == pytest.approx(memory)
    assert factor(found, "prefill").factor == pytest.approx(compute)
    assert (result.load_overhead_ps, result.load_bytes_per_s) == (PROFILE.load_overhead_ps, PROFILE.load_bytes_per_s)


@given(to=names)
def test_the_constant_of_a_prefill_does_not_move(to: str) -> None:
    result, _ = scaled(PROFILE, H100, GPUS.gpus[to])
    assert result.step_base_ps + result.prefill_offset_ps == PROFILE.step_base_ps + PROFILE.prefill_offset_ps
    tokens = 2048
    constant = PROFILE.step_base_ps + PROFILE.prefill_offset_ps
    assert result.step_ps(0, 0, tokens, 0) >= constant + result.prefill_per_token_ps * tokens


def test_activation_follows_the_host_link_of_the_node() -> None:
    a100 = GPUS.gpus["a100-80"]
    assert scaled(PROFILE, H100, a100)[0].activation_ps == 2 * PROFILE.activation_ps
    slow = GPUS.ladder(a100, host_link=16 * 10**9).with_rung("disk", "fio", bytes_per_s=2 * PROFILE.load_bytes_per_s)
    result, found = scaled(PROFILE, H100, a100, ladder=slow)
    assert result.activation_ps == 4 * PROFILE.activation_ps
    assert result.load_bytes_per_s == 2 * PROFILE.load_bytes_per_s
    assert (factor(found, "load").factor, factor(found, "activation").low) == (0.5, 1.0)


def test_more_devices_share_memory_and_arithmetic_and_pay_for_reduces() -> None:
    alone, _ = scaled(PROFILE, H100, H100)
    free, unpriced = scaled(PROFILE, H100, H100, 2)
    priced, said = scaled(PROFILE, H100, H100, 2, layers=32)
    assert free.step_base_ps == alone.step_base_ps // 2
    assert free.prefill_per_token_ps == alone.prefill_per_token_ps // 2
    assert priced.step_base_ps - free.step_base_ps == 2 * 32 * ALL_REDUCE_PS
    assert "are not counted" in factor(unpriced, "decode").words
    assert "two all-reduces a layer at 10 us are added" in factor(said, "decode").words
    with pytest.raises(ValueError, match="tensor_parallel is 0"):
        scaled(PROFILE, H100, H100, 0)


@given(of=names, to=names, width=st.sampled_from([1, 2, 4, 8]), tabled=st.booleans())
def test_whatever_the_gpus_a_scaled_profile_is_one_and_sizes_stay(of: str, to: str, width: int, tabled: bool) -> None:
    profile = TABLED if tabled else PROFILE
    result, found = scaled(profile, GPUS.gpus[of], GPUS.gpus[to], width)
    for field in ("slots", "host_entries", "max_rank", "kv_blocks", "max_seqs", "token_budget"):
        assert getattr(result, field) == getattr(profile, field)
    for each in found:
        assert each.low <= each.factor * 1.000001
        assert each.high >= each.factor * 0.999999
    for tokens in (16, 100, 2048):
        assert result.prefill_ps(tokens, 0) >= 0


@given(to=names)
def test_a_step_is_no_shorter_than_memory_or_arithmetic_allows(to: str) -> None:
    gpu = GPUS.gpus[to]
    result, _ = scaled(TABLED, H100, gpu)
    memory = H100.memory_bandwidth.value / gpu.memory_bandwidth.value
    compute = H100.bf16.value / gpu.bf16.value
    for tokens in (16, 256, 2048):
        whole = TABLED.step_ps(0, 0, tokens, 0)
        then = result.step_ps(0, 0, tokens, 0)
        assert then >= whole * memory * 0.999999
        assert then <= whole * max(memory, compute) * 1.000001
    longest = TABLED.step_ps(0, 0, 2048, 0)
    assert result.step_ps(0, 0, 2048, 0) == pytest.approx(longest * max(memory, compute), rel=1e-6)


def between(term: str) -> float:
    """By how much a term of the fit on an A10G is longer than on an A100-80."""
    a100, a10g = (read_profile(name).profile for name in ("slora-llama-7b-a100-80", "slora-llama-7b-a10g"))
    return float(getattr(a10g, term) / getattr(a100, term))


def ratio(what: str) -> float:
    return float(getattr(GPUS.gpus["a100-80"], what).value / getattr(GPUS.gpus["a10g"], what).value)


def test_the_stated_exponents_are_those_of_the_shipped_fits() -> None:
    memory, compute = log(ratio("memory_bandwidth")), log(ratio("bf16"))
    base, kv = log(between("step_base_ps")) / memory, log(between("step_per_kv_token_ps")) / memory
    assert (round(base, 2), round(kv, 2)) == (0.66, 0.70)
    prefill = log(between("prefill_per_token_ps")) / compute
    assert (round(base, 2), round(prefill, 2)) == EXPONENTS
    assert round(log(between("step_per_seq_ps")) / memory, 2) == SEQUENCE_EXPONENT


def test_the_stated_range_holds_the_other_measured_gpu() -> None:
    profile = read_profile("slora-llama-7b-a100-80").profile
    _, found = scaled(profile, GPUS.gpus["a100-80"], GPUS.gpus["a10g"])
    for term, field in (
        ("decode", "step_base_ps"),
        ("decode", "step_per_kv_token_ps"),
        ("prefill", "prefill_per_token_ps"),
    ):
        one = factor(found, term)
        assert one.low * 0.99 <= between(field) <= one.high * 1.01, field
    assert factor(found, "sequence").low * 0.99 <= between("step_per_seq_ps") <= factor(found, "sequence").high


@pytest.mark.parametrize("name", shipped())
def test_the_gpu_of_each_shipped_profile_is_found(name: str) -> None:
    found: Gpu | None = measured_on(read_profile(name).device, GPUS)
    assert found is not None
    assert found.name == {"llama-3.1-8b-h100": "h100-sxm"}.get(name, name.removeprefix("slora-llama-7b-"))


def test_a_device_that_is_no_gpu_of_the_catalogue_is_none() -> None:
    assert measured_on("a CPU server", GPUS) is None
