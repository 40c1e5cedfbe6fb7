from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from benchmarks.reproduce import ledger_row
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


def test_the_slot_of_the_ledger_costs_what_servers_had_less_of(tmp_path: Path) -> None:
    found = ledger_row.lines(tmp_path, lambda _: None)
    assert all(line.passed for line in found)
    assert ledger_row.slot_tokens("llama-3.1-8b", 16) == pytest.approx(704.6, abs=0.1)
    assert ledger_row.slot_tokens("llama-2-7b", 8) == pytest.approx(78.45, abs=0.01)
