from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from benchmarks.reproduce import bounds_row, ledger_row
from benchmarks.reproduce.bounds_row import admitted, che, hit_ratio, simulated

from loraledger.replay.workloads.popularity import shares


def normal(spread: str, adapters: int) -> list[float]:
    weights = shares(spread, adapters)
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("concurrent", [0.3, 2.0, 40.0])
def test_share_admitted_at_once_is_that_of_all_cases_counted(concurrent: float) -> None:
    popularity = normal("zipf:1.2", 6)
    busy = [1 - math.exp(-share * concurrent) for share in popularity]
    for slots, found in enumerate(admitted(popularity, concurrent)):
        expected = 0.0
        for states in itertools.product((False, True), repeat=6):
            chance = math.prod(b if on else 1 - b for b, on in zip(busy, states, strict=True))
            expected += chance * sum(
                share for share, on in zip(popularity, states, strict=True) if on or sum(states) < slots
            )
        assert found == pytest.approx(expected, abs=1e-12)


def test_the_twin_admits_at_once_as_many_as_the_closed_form_says_where_few_wait() -> None:
    popularity = normal("zipf:1.2", 64)
    assert simulated(popularity, 30, 28, 4_000) == pytest.approx(admitted(popularity, 30)[28], abs=0.03)


def test_che_is_exact_for_a_uniform_spread_and_all_there_is_fits_a_list_of_all() -> None:
    assert che([0.01] * 100, 25) == pytest.approx(0.25)
    assert che(normal("zipf:1.0", 50), 50) == pytest.approx(1.0, abs=1e-6)


def test_the_slots_of_the_twin_hit_as_often_as_an_lru() -> None:
    popularity = normal("zipf:1.2", 100)
    assert hit_ratio(popularity, 10, 6_000) == pytest.approx(che(popularity, 10), abs=0.02)


def test_published_hit_ratios_are_those_of_the_closed_forms() -> None:
    found = bounds_row._closed_forms()
    assert len(found) == 2 * len(bounds_row.PUBLISHED)
    assert all(line.passed for line in found)


def test_the_hit_ratio_that_is_farthest_off_is_told_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = tuple(che(normal("zipf:1.0", 512), size) for size in bounds_row.SIZES)
    static = tuple(sum(normal("zipf:1.0", 512)[:size]) for size in bounds_row.SIZES)
    off = (exact[0] + 0.001, exact[1] - 0.02, *exact[2:])
    monkeypatch.setattr(bounds_row, "PUBLISHED", {("zipf:1.0", 512): (off, static)})
    lru, best = bounds_row._closed_forms()
    assert (lru.error, lru.passed) == ("+0.020", False)
    assert best.passed


@pytest.mark.parametrize(("least", "passed"), [(10.0, True), (20.0, True), (20.1, False)])
def test_a_policy_is_told_by_the_trace_that_comes_nearest_to_the_bound(
    monkeypatch: pytest.MonkeyPatch, least: float, passed: bool
) -> None:
    spent = {"calm": (60.0, 20.0), "near": (20.0, least), "far": (90.0, 20.0)}
    monkeypatch.setattr(bounds_row, "_traces", lambda: {name: [name] for name in spent})
    monkeypatch.setattr(bounds_row, "_work", lambda scenario, requests: spent[requests[0]])
    found = bounds_row._policies(lambda _: None)
    assert {(line.published, line.ours, line.passed) for line in found} == {(least, 20.0, passed)}
    assert all(line.what.endswith("(near)") for line in found)


def test_the_closed_form_gives_the_least_slots_with_95_percent_and_the_twin_is_searched_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_slots = {concurrent: admitted(bounds_row._normal("zipf:1.2", 512), concurrent) for concurrent in (50, 200, 800)}
    monkeypatch.setattr(bounds_row, "simulated", lambda popularity, concurrent, slots: 0.95 if slots >= 100 else 0.94)
    assert bounds_row._least([1.0], 1, 77) == 100
    monkeypatch.setattr(
        bounds_row, "_least", lambda popularity, concurrent, guess: guess + (concurrent == 50) * guess // 9
    )
    found = bounds_row._sizing(lambda _: None)
    for line, shares_by_slots in zip(found, by_slots.values(), strict=True):
        assert isinstance(line.ours, int)
        assert shares_by_slots[line.ours - 1] < 0.95 <= shares_by_slots[line.ours]
    assert [line.passed for line in found] == [False, True, True]


@pytest.mark.parametrize(("value", "off"), [(45.0, 0.125), (40.0, 0.0), (36.0, 0.0), (35.0, 0.0), (28.0, -0.2)])
def test_outside_of_a_range_is_told_by_the_nearer_end(value: float, off: float) -> None:
    assert ledger_row._outside(value, 35.0, 40.0) == pytest.approx(off)


def test_the_slot_of_the_ledger_costs_what_servers_had_less_of(tmp_path: Path) -> None:
    found = ledger_row.lines(tmp_path, lambda _: None)
    assert all(line.passed for line in found)
    assert [line.fitted for line in found] == [False, True, False, False, False]
    assert found[1].what == "fixed part of a slot (32 of it: rows for added tokens)"
    assert [abs(float(line.error.split()[0])) < 1 for line in found[2:]] == [True] * 3
    assert ledger_row.slot_tokens("llama-3.1-8b", 16) == pytest.approx(704.6, abs=0.1)
    assert ledger_row.slot_tokens("llama-2-7b", 8) == pytest.approx(78.45, abs=0.01)
