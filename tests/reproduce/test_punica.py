from __future__ import annotations

import msgspec
import pytest
from benchmarks.reproduce.punica import MODELS, _profile, rate

from loraledger.replay.traces.trace import Request
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
