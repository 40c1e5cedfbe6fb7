"""The fit gives back the constants that points were made from, survives noise and disturbance, and refuses what it cannot fit."""

from __future__ import annotations

import random

import msgspec
import pytest

from loraledger.twin.calibrated import Calibrated
from loraledger.twin.fit import Fit, fit
from loraledger.twin.fit_points import DecodePoint, MixedPoint, MovePoint, Points, PrefillPoint
from loraledger.twin.fit_solving import isotonic, least_squares, without_outliers
from loraledger.twin.profile import PS_PER_MS, PS_PER_S, PS_PER_US, TwinProfile

TRUE = TwinProfile(
    step_base_ps=20 * PS_PER_MS,
    step_per_seq_ps=800 * PS_PER_US,
    step_per_kv_token_ps=100_000,
    adapter_step_ps=300 * PS_PER_US,
    lora_ps=500 * PS_PER_US,
    prefill_floor_ps=3 * PS_PER_MS,
    prefill_offset_ps=-4 * PS_PER_MS,
    prefill_per_token_ps=90 * PS_PER_US,
    load_overhead_ps=4 * PS_PER_MS,
    load_bytes_per_s=500_000_000,
    activation_ps=2 * PS_PER_MS,
    activation_per_rank_ps=50 * PS_PER_US,
)
BOUNDARY, PER_SEQ, CALL = 0.003, 0.0005, 0.010
FITTED = (
    "step_base_ps",
    "step_per_seq_ps",
    "step_per_kv_token_ps",
    "adapter_step_ps",
    "lora_ps",
    "prefill_per_token_ps",
    "prefill_offset_ps",
    "load_overhead_ps",
    "load_bytes_per_s",
    "activation_ps",
    "activation_per_rank_ps",
)


def decodes(true: TwinProfile, noisy: random.Random | None = None, noise: float = 0.0) -> tuple[DecodePoint, ...]:
    rows = [(n, n * context, 1) for n in (1, 2, 4, 8, 16, 32) for context in (32, 400)]
    rows += [(8, 256, k) for k in (2, 4)] + [(1, 32, 0), (8, 256, 0)]
    return tuple(
        DecodePoint(
            sequences=n,
            kv_tokens=kv,
            adapters=k,
            seconds=true.step_ps(n, kv, 0, k) / PS_PER_S * (1 + (noisy.gauss(0, noise) if noisy else 0)),
        )
        for n, kv, k in rows
    )


def measured(true: TwinProfile = TRUE, noise: float = 0.0) -> Points:
    rng = random.Random(7)

    def seen(ps: float) -> float:
        return ps / PS_PER_S * (1 + rng.gauss(0, noise))

    mixed = []
    for n in (2, 8):
        for tokens in (16, 128, 512):
            step, prompt = true.step_ps(n, n * 60, 0, 1), true.prefill_ps(tokens, n)
            ttft = seen(1.5 * step + prompt + (BOUNDARY + PER_SEQ * n) * PS_PER_S)
            mixed.append(
                MixedPoint(sequences=n, kv_tokens=n * 60, tokens=tokens, adapters=1, delay=seen(prompt), ttft=ttft)
            )
    sizes = ((1_000_000, 8), (10_000_000, 16), (50_000_000, 64))
    return Points(
        decodes=decodes(true, rng, noise),
        prefills=tuple(
            PrefillPoint(tokens=tokens, adapters=1, seconds=seen(true.step_ps(0, 0, tokens, 1) + BOUNDARY * PS_PER_S))
            for tokens in (1, 16, 64, 128, 256, 512, 1024)
        ),
        mixed=tuple(mixed),
        loads=tuple(MovePoint(bytes=b, rank=r, seconds=seen(true.load_ps(b))) for b, r in sizes),
        activations=tuple(MovePoint(bytes=b, rank=r, seconds=seen(true.activate_ps(r))) for b, r in sizes),
        calls=tuple(
            MovePoint(bytes=b, rank=r, seconds=seen(true.load_ps(b) + true.activate_ps(r)) + CALL) for b, r in sizes
        ),
    )


def term(found: Fit, name: str) -> tuple[float, float, str]:
    (one,) = [one for one in found.terms if one.name == name]
    return one.error_mean or 0.0, one.error_worst or 0.0, one.note or ""


def test_known_constants_come_back() -> None:
    found = fit(measured(), TwinProfile())
    for name in FITTED:
        assert getattr(found.profile, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert found.boundary_ps == pytest.approx(BOUNDARY * PS_PER_S, rel=0.01)
    assert found.boundary_per_seq_ps == pytest.approx(PER_SEQ * PS_PER_S, rel=0.01)
    assert found.load_call_ps == pytest.approx(CALL * PS_PER_S, rel=0.01)
    assert max(one.error_worst or 0.0 for one in found.terms) < 1e-3
    tables = (found.profile.decode_table, found.profile.prefill_table, found.profile.mixed_table)
    assert not any(tables)


def test_sizes_come_from_the_facts_and_times_from_the_points() -> None:
    facts = TwinProfile(slots=3, host_entries=5, kv_blocks=77, block_size=128, max_seqs=12, token_budget=96)
    found = fit(measured(), facts).profile
    assert (found.slots, found.host_entries, found.kv_blocks, found.block_size) == (3, 5, 77, 128)
    assert (found.max_seqs, found.token_budget) == (12, 96)


def test_noise_of_two_per_cent_stays_two_per_cent_of_a_step() -> None:
    found = fit(measured(noise=0.02), TwinProfile()).profile
    for n, kv in ((3, 300), (12, 2000), (32, 9000)):
        assert found.step_ps(n, kv, 0, 1) == pytest.approx(TRUE.step_ps(n, kv, 0, 1), rel=0.03)
    assert found.step_ps(0, 0, 700, 1) == pytest.approx(TRUE.step_ps(0, 0, 700, 1), rel=0.05)


def test_a_disturbed_decode_is_left_out_and_counted() -> None:
    points = measured()
    wrong = msgspec.structs.replace(points.decodes[4], seconds=points.decodes[4].seconds * 4)
    disturbed = msgspec.structs.replace(points, decodes=(*points.decodes[:4], wrong, *points.decodes[5:]))
    found = fit(disturbed, TwinProfile())
    assert found.profile.step_ps(8, 800, 0, 1) == pytest.approx(TRUE.step_ps(8, 800, 0, 1), rel=0.01)
    assert "1 points left out" in term(found, "decode")[2]


def test_where_a_line_misses_batches_get_rows_of_their_own() -> None:
    rows = ((1, 5 * PS_PER_MS, 0), (8, 40 * PS_PER_MS, 0), (32, 50 * PS_PER_MS, 0), (256, 60 * PS_PER_MS, 0))
    bent = msgspec.structs.replace(TRUE, decode_table=rows, adapter_step_ps=0, lora_ps=0)
    found = fit(measured(bent), TwinProfile())
    assert [row[0] for row in found.profile.decode_table] == [1, 2, 4, 8, 16, 32, 256]
    mean, worst, note = term(found, "decode")
    assert worst < 0.01 >= mean
    assert "a line misses" in note


def test_a_batch_that_ran_while_the_machine_was_fast_does_not_make_larger_batches_cheaper() -> None:
    rows = ((1, 5 * PS_PER_MS, 0), (8, 40 * PS_PER_MS, 0), (32, 50 * PS_PER_MS, 0), (256, 60 * PS_PER_MS, 0))
    bent = msgspec.structs.replace(TRUE, decode_table=rows, adapter_step_ps=0, lora_ps=0)
    points = measured(bent)
    lucky = tuple(
        msgspec.structs.replace(p, seconds=p.seconds * 0.7) if p.sequences == 16 else p for p in points.decodes
    )
    found = fit(msgspec.structs.replace(points, decodes=lucky), TwinProfile()).profile
    steps = [found.step_ps(n, 600, 0, 1) for n in (1, 2, 4, 8, 16, 32)]
    assert found.decode_table
    assert steps == sorted(steps)


def test_batches_that_ran_at_unlike_contexts_make_no_table_that_a_profile_refuses() -> None:
    steep = [DecodePoint(sequences=1, kv_tokens=kv, adapters=0, seconds=0.001 + kv * 1e-6) for kv in (100, 550, 1000)]
    flat = [DecodePoint(sequences=2, kv_tokens=kv, adapters=0, seconds=0.0009 + kv * 5e-7) for kv in (400, 1200, 2000)]
    points = msgspec.structs.replace(measured(), decodes=(*steep, *flat))
    table = fit(points, TwinProfile()).profile.decode_table
    assert [row[0] for row in table[:2]] == [1, 2]
    assert table[0][1] == table[1][1]
    assert table[0][2] == pytest.approx(1_000_000)
    assert table[1][2] == pytest.approx(500_000)


def test_what_is_known_of_an_engine_gets_what_was_fitted_and_keeps_the_rest() -> None:
    found = fit(measured(), TwinProfile(slots=3))
    known = Calibrated(
        name="lab",
        engine="vllm",
        engine_version=None,
        model="m",
        device="d",
        date="2026-11-29",
        source="a test",
        profile=TwinProfile(slots=3),
        slot_bytes=5,
        notes=("a note",),
    )
    whole = found.into(known)
    assert (whole.name, whole.slot_bytes, whole.notes) == ("lab", 5, ("a note",))
    assert (whole.profile, whole.terms) == (found.profile, found.terms)
    assert (whole.boundary_ps, whole.boundary_per_seq_ps) == (found.boundary_ps, found.boundary_per_seq_ps)
    assert whole.load_call_ps == found.load_call_ps > 0 < whole.boundary_ps


def test_prompts_that_no_line_fits_get_a_table_and_prompts_beside_decodes_their_own() -> None:
    alone, beside = ((1, 10**9), (64, 10**10), (256, 9 * 10**10), (2048, 10**12)), ((1, 10**10), (2048, 2 * 10**12))
    bent = msgspec.structs.replace(TRUE, prefill_table=alone, mixed_table=beside)
    points = measured(bent)
    found = fit(points, TwinProfile()).profile
    assert found.prefill_table
    assert found.mixed_table
    assert found.mixed_table[-1][0] == found.token_budget
    assert found.prefill_ps(128, 4) == pytest.approx(bent.prefill_ps(128, 4), rel=0.02)


def test_an_adapter_that_costs_less_than_nothing_costs_nothing_and_it_is_said() -> None:
    points = measured()
    cheaper = tuple(
        msgspec.structs.replace(p, seconds=p.seconds - 0.001 * p.adapters) if p.adapters > 1 else p
        for p in points.decodes
    )
    found = fit(msgspec.structs.replace(points, decodes=cheaper), TwinProfile())
    assert found.profile.adapter_step_ps == 0
    assert found.adapter_ps is not None
    assert found.adapter_ps < 0
    assert "clamped to 0" in term(found, "adapter")[2]


def test_base_requests_that_are_overpriced_are_said_to_be() -> None:
    points = measured()
    cheap = tuple(
        p if p.adapters or p.sequences == 1 else msgspec.structs.replace(p, seconds=p.seconds / 2)
        for p in points.decodes
    )
    assert "base requests come out +5" in term(fit(msgspec.structs.replace(points, decodes=cheap), TRUE), "decode")[2]


def test_without_adapters_everything_else_is_fitted_and_the_rest_keeps_the_default() -> None:
    points = measured(msgspec.structs.replace(TRUE, lora_ps=0, adapter_step_ps=0))
    base = tuple(msgspec.structs.replace(p, adapters=0) for p in points.decodes)
    found = fit(
        Points(decodes=base, prefills=tuple(msgspec.structs.replace(p, adapters=0) for p in points.prefills)),
        TwinProfile(),
    )
    assert found.profile.step_base_ps == pytest.approx(TRUE.step_base_ps, rel=0.001)
    assert found.profile.load_overhead_ps == TwinProfile().load_overhead_ps
    assert found.adapter_ps is None
    assert "not measured" in term(found, "load")[2]


def test_one_point_of_each_gives_a_profile_that_repeats_it() -> None:
    points = measured()
    found = fit(Points(decodes=points.decodes[:1], prefills=points.prefills[:1]), TwinProfile())
    assert found.profile.step_ps(1, 32, 0, 1) == pytest.approx(TRUE.step_ps(1, 32, 0, 1), rel=1e-6)


def test_loads_of_one_size_do_not_pretend_to_know_a_rate() -> None:
    points = measured()
    found = fit(msgspec.structs.replace(points, loads=points.loads[:1] * 3), TwinProfile())
    assert found.profile.load_ps(1_000_000) == pytest.approx(TRUE.load_ps(1_000_000), rel=0.001)
    assert "one size only" in term(found, "load")[2]


def test_moves_below_what_the_clock_can_tell_are_zero_and_it_is_said() -> None:
    points = measured()
    none = tuple(msgspec.structs.replace(p, seconds=-0.001) for p in points.activations)
    found = fit(msgspec.structs.replace(points, activations=none), TwinProfile())
    assert found.profile.activation_ps == found.profile.activation_per_rank_ps == 0
    assert "not above" in term(found, "activation")[2]


@pytest.mark.parametrize("missing", ["decodes", "prefills"])
def test_nothing_is_made_up_from_no_points(missing: str) -> None:
    with pytest.raises(ValueError, match="a profile needs both"):
        fit(msgspec.structs.replace(measured(), **{missing: ()}), TwinProfile())


def test_least_squares_never_gives_a_negative_coefficient_and_is_exact_where_it_can_be() -> None:
    rows = [(1.0, float(x)) for x in range(1, 6)]
    assert least_squares(rows, [2 + 3 * x for _, x in rows]) == pytest.approx((2, 3))
    falling = least_squares(rows, [10 - x for _, x in rows], relative=False)
    assert falling == pytest.approx((7, 0))
    assert least_squares([(1.0, 2.0)] * 3, [4.0] * 3) == pytest.approx((4, 0))


def test_few_points_are_never_left_out() -> None:
    assert without_outliers([(1.0,)] * 4, [1.0, 1.0, 1.0, 100.0]) == ([0, 1, 2, 3], 0)
    assert without_outliers([(1.0,)] * 6, [1.0, 1.0, 1.0, 100.0, 1.0, 1.0]) == ([0, 1, 2, 4, 5], 1)


def test_isotonic_pools_what_falls() -> None:
    assert isotonic([1, 3, 2, 5]) == [1, 2.5, 2.5, 5]
    assert isotonic([3, 2, 1]) == [2, 2, 2]
