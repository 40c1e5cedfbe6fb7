from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import combinations

from loraledger.kernel.rendezvous import seed_of, weight

ADAPTERS = [seed_of(f"adapter-{n}") for n in range(20_000)]
REPLICAS = {f"replica-{n}": seed_of(f"replica-{n}") for n in range(8)}


def homes(names: list[str]) -> list[str]:
    return [max(names, key=lambda name: weight(seed, REPLICAS[name])) for seed in ADAPTERS]


def test_each_replica_is_home_to_its_fair_share() -> None:
    shares = Counter(homes(list(REPLICAS)))
    fair = len(ADAPTERS) / len(REPLICAS)
    chi_squared = sum((shares[name] - fair) ** 2 / fair for name in REPLICAS)
    assert chi_squared < 24.3  # 99.9th percentile with 7 degrees of freedom


def test_bits_of_the_weight_are_uniform_and_pairs_are_independent() -> None:
    first, second = list(REPLICAS.values())[:2]
    for bit in (0, 17, 40, 63):
        ones = sum(weight(seed, first) >> bit & 1 for seed in ADAPTERS)
        agree = sum((weight(seed, first) ^ weight(seed, second)) >> bit & 1 == 0 for seed in ADAPTERS)
        assert abs(ones - len(ADAPTERS) / 2) < 3.3 * (len(ADAPTERS) / 4) ** 0.5
        assert abs(agree - len(ADAPTERS) / 2) < 3.3 * (len(ADAPTERS) / 4) ** 0.5


def test_a_replica_that_leaves_moves_only_its_own_adapters() -> None:
    names = list(REPLICAS)
    before, after = homes(names), homes(names[:-1])
    moved = [was for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) == {names[-1]}
    assert len(moved) == before.count(names[-1])


def test_the_order_of_the_members_does_not_matter() -> None:
    names = list(REPLICAS)
    assert homes(names) == homes(names[::-1])


def test_similar_names_have_unrelated_seeds() -> None:
    seeds = [seed_of(f"r{n}") for n in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    distances = [(a ^ b).bit_count() for a, b in combinations(seeds[:60], 2)]
    assert 29 < sum(distances) / len(distances) < 34


def test_weights_are_the_same_in_every_process() -> None:
    program = "from loraledger.kernel.rendezvous import *; print(weight(seed_of('support'), seed_of('r1')))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert seen == {f"{weight(seed_of('support'), seed_of('r1'))}\n"}
