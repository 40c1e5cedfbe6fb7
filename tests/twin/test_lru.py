"""The tiers under independent requests against Che's approximation of LRU: adapter ``i`` is found with probability
1 - exp(-p_i t), where t is such that these probabilities add up to the size of the list."""

import math
import random

import pytest

from loraledger.twin.events import Activated, Loaded, TwinRequest
from loraledger.twin.profile import TwinProfile
from loraledger.twin.replica import ReplicaTwin

ADAPTERS, WARM, COUNTED = 300, 5_000, 60_000


def che(shares: list[float], size: int) -> float:
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        held = sum(1 - math.exp(-share * middle) for share in shares)
        low, high = (middle, high) if held < size else (low, middle)
    return sum(share * (1 - math.exp(-share * low)) for share in shares)


@pytest.mark.parametrize(("exponent", "slots", "host"), [(0.9, 16, 100), (1.2, 8, 40)])
def test_hit_ratios_are_those_of_lru(exponent: float, slots: int, host: int) -> None:
    weights = [(n + 1) ** -exponent for n in range(ADAPTERS)]
    shares = [weight / sum(weights) for weight in weights]
    twin = ReplicaTwin(TwinProfile(slots=slots, host_entries=host))
    for n in range(ADAPTERS):
        twin.register(0, f"a{n}", 0, 8)
    while (at := twin.next_at()) is not None:
        twin.advance(at)
    ready = at = twin.profile.load_ps(0) * ADAPTERS * 10
    asked = random.Random(5).choices(range(ADAPTERS), shares, k=WARM + COUNTED)
    activated = loaded = 0
    for number, n in enumerate(asked):
        twin.submit(at, TwinRequest(f"r{number}", f"a{n}", 1, 1))
        while (upcoming := twin.next_at()) is not None:
            at = upcoming
            for event in twin.advance(at):
                if number >= WARM:
                    activated += isinstance(event, Activated)
                    loaded += isinstance(event, Loaded)
    assert at > ready
    assert 1 - activated / COUNTED == pytest.approx(che(shares, slots), abs=0.01)
    assert 1 - loaded / COUNTED == pytest.approx(che(shares, host), abs=0.01)
