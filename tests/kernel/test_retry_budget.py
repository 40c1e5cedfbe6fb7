"""The retry budget, when replicas that look well break what they are sent."""

from __future__ import annotations

import pytest

from loraledger.kernel.settings import Limits

from .breaking import FAULTS, BreakingFleet, Fault

LIMITS = Limits(retry_ratio=0.1, retry_burst=8)


@pytest.mark.parametrize("broken", [("r1",), ("r1", "r2"), ("r1", "r2", "r3")])
@pytest.mark.parametrize("per_second", [0.5, 10, 100])
@pytest.mark.parametrize("fault", FAULTS)
def test_at_most_the_budget_is_sent_again_however_much_is_broken(
    fault: Fault, per_second: float, broken: tuple[str, ...]
) -> None:
    requests = 600
    world = BreakingFleet(fault, broken, limits=LIMITS)
    world.play(requests, per_second)
    again = world.sent.total() - requests
    assert again == world.fleet.state.counters.get("retries", 0)
    assert again <= LIMITS.retry_burst + LIMITS.retry_ratio * requests
    assert world.ends.total() == requests
    if len(broken) == 3:
        assert world.ends["ok"] == 0
    if fault == "cuts streams":
        assert again == 0, "a request of which the client has seen some was tried again"
    else:
        assert again > 0
