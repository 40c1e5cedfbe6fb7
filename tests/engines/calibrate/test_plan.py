"""What is measured follows from what the engine is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from loraledger.engines.calibrate.facts import Facts
from loraledger.engines.calibrate.plan import (
    MOST_NAMES,
    MOST_STREAMS,
    STEPS,
    DecodeProbe,
    MixedProbe,
    MoveProbe,
    PrefillProbe,
    Probe,
    left_out,
    places,
    plan,
    pool_size,
)


def facts(**changes: Any) -> Facts:
    sizes = {"slots": 4, "host_entries": 8, "max_rank": 64, "max_seqs": 16, "token_budget": 256, "max_model_len": 1024}
    known = {"version": None, "model": "base", "kv_blocks": 2048, "block_size": 16}
    return Facts(**{**sizes, **known, "block_bytes": None, "slot_bytes": None, **changes})


def of(kind: type[Any], probes: list[Probe]) -> list[Any]:
    return [probe for probe in probes if isinstance(probe, kind)]


FOLDERS = [(100, 8), (900, 64), (400, 16)]


def test_no_probe_asks_for_more_than_the_engine_takes() -> None:
    for changes in ({}, {"max_seqs": 2}, {"max_model_len": 64}, {"kv_blocks": 4}, {"slots": 1, "host_entries": 1}):
        engine = facts(**changes)
        probes = plan(engine, FOLDERS, quick=False)
        for probe in of(DecodeProbe, probes):
            assert 1 <= probe.sequences <= engine.max_seqs
            assert 0 <= probe.adapters <= min(engine.slots, probe.sequences)
            assert probe.prompt >= 1
            assert probe.prompt + STEPS <= engine.max_model_len
        for probe in of(PrefillProbe, probes):
            assert probe.tokens < engine.max_model_len
            assert probe.tokens <= engine.token_budget
        for probe in of(MixedProbe, probes):
            assert probe.sequences <= engine.max_seqs


def test_prompts_reach_the_most_that_a_step_computes_and_batches_the_most_that_run() -> None:
    probes = plan(facts(), FOLDERS, quick=False)
    assert [probe.tokens for probe in of(PrefillProbe, probes)] == [8, 16, 32, 64, 128, 256]
    assert {probe.sequences for probe in of(DecodeProbe, probes) if probe.adapters == 1} == {1, 2, 4, 8, 16}


def test_distinct_adapters_are_compared_within_one_batch() -> None:
    probes = of(DecodeProbe, plan(facts(), FOLDERS, quick=False))
    several = {(2, 2), (4, 4), (8, 2), (8, 4), (16, 4)}
    assert {(p.sequences, p.adapters) for p in probes if p.adapters != 1} == {(1, 0), (8, 0)} | several
    assert len(set(probes)) == len(probes)
    assert [p.sequences for p in probes[:-1]] == sorted(p.sequences for p in probes[:-1])


def test_a_place_is_left_free_for_the_prompt_that_is_injected() -> None:
    for most, beside in ((16, {2, 8}), (8, {2, 7}), (2, {1}), (1, set())):
        found = of(MixedProbe, plan(facts(max_seqs=most), FOLDERS, quick=False))
        assert {probe.sequences for probe in found} == beside


def test_moves_are_measured_with_the_smallest_and_the_largest_adapter() -> None:
    quick = of(MoveProbe, plan(facts(), FOLDERS, quick=True))
    assert {probe.folder for probe in quick} == {0, 1}
    assert {probe.folder for probe in of(MoveProbe, plan(facts(), FOLDERS, quick=False))} == {0, 1, 2}
    assert [probe.kind for probe in quick if probe.folder == 0] == ["activation", "load", "call"]


def test_an_engine_whose_host_cache_is_its_slots_has_no_activation_apart_from_loads() -> None:
    kinds = {probe.kind for probe in of(MoveProbe, plan(facts(host_entries=4), FOLDERS, quick=False))}
    assert kinds == {"load", "call"}


def test_moves_that_would_need_too_many_adapters_at_once_are_left_out_and_said() -> None:
    for changes, kept, said in (
        ({"host_entries": MOST_NAMES - 5}, {"activation", "load", "call"}, 0),
        ({"host_entries": MOST_NAMES - 4}, {"activation", "call"}, 1),
        ({"slots": 10**6, "host_entries": 10**7}, {"call"}, 2),
    ):
        engine = facts(**changes)
        cycles = of(MoveProbe, plan(engine, FOLDERS, quick=False))
        assert {probe.kind for probe in cycles} == kept
        assert all(pool_size(engine) + places(engine, kind) < MOST_NAMES for kind in kept - {"call"})
        assert len(left_out(engine)) == said
    assert pool_size(engine) == MOST_STREAMS
    assert "10000000 host entries" in left_out(engine)[1]


def test_without_adapters_only_the_base_model_is_measured() -> None:
    probes = plan(facts(), [], quick=False)
    assert not of(MoveProbe, probes)
    assert {probe.adapters for probe in of(DecodeProbe, probes)} == {0}


def test_quick_is_a_part_of_the_whole_and_lengths_only_grow() -> None:
    whole, quick = plan(facts(), FOLDERS, quick=False), plan(facts(), FOLDERS, quick=True)
    assert len(quick) < len(whole) * 0.8
    tokens = [probe.tokens for probe in of(PrefillProbe, whole)]
    assert all(low < high for low, high in pairwise(tokens))
