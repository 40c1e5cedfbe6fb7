from __future__ import annotations

from typing import Any, Literal

import pytest

from loraledger.twin.events import LoadDone, LoadFailed, Rejected, TokenOut, TwinEvent, TwinRequest
from loraledger.twin.profile import TwinProfile, UnifiedRules
from loraledger.twin.replica import ReplicaTwin

Layout = Literal["slots", "unified"]
KV_TOKENS = 160
SMALL = {"slots": 2, "host_entries": 4, "max_seqs": 8, "kv_blocks": 10}
SLOPES = (
    "step_per_seq_ps",
    "step_per_kv_token_ps",
    "prefill_per_token_ps",
    "adapter_step_ps",
    "rank_step_ps",
    "activation_per_rank_ps",
)


def small(layout: Layout, **more: Any) -> ReplicaTwin:
    return ReplicaTwin(TwinProfile(layout=layout, **(SMALL | more)))


def drain(twin: ReplicaTwin) -> list[TwinEvent]:
    events: list[TwinEvent] = []
    for _ in range(1_000):
        if (at := twin.next_at()) is None:
            return events
        events += twin.advance(at)
    raise AssertionError("it never comes to rest")


def refused(events: list[TwinEvent]) -> list[tuple[str, str]]:
    named = [(event.id, event.reason) for event in events if isinstance(event, Rejected)]
    return named + [(event.name, event.reason) for event in events if isinstance(event, LoadFailed)]


def finished(events: list[TwinEvent]) -> list[str]:
    return [event.id for event in events if isinstance(event, TokenOut) and event.finished]


@pytest.mark.parametrize("layout", ["slots", "unified"])
@pytest.mark.parametrize("field", SLOPES)
def test_a_negative_slope_is_refused_by_name(layout: Layout, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is -1: must not be negative"):
        small(layout, **{field: -1})


@pytest.mark.parametrize("slots", [0, -1])
def test_no_slots_are_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=rf"^slots is {slots}: must be at least 1"):
        small("slots", slots=slots)


@pytest.mark.parametrize("layout", ["slots", "unified"])
def test_no_kv_is_refused(layout: Layout) -> None:
    with pytest.raises(ValueError, match=r"^kv_blocks is 0: must be at least 1"):
        small(layout, kv_blocks=0)


@pytest.mark.parametrize(
    ("layout", "more", "rank", "size"),
    [
        ("slots", {"slot_bytes": 1000}, 8, 1001),
        ("unified", {}, KV_TOKENS // 4, 1),
        ("unified", {"unified": UnifiedRules(kv_bytes_per_token=10)}, 8, 10 * KV_TOKENS),
    ],
)
def test_an_adapter_without_a_place_fails_to_load_and_nothing_else_does(
    layout: Layout, more: dict[str, Any], rank: int, size: int
) -> None:
    twin = small(layout, **more)
    twin.register(0, "large", size, rank)
    twin.register(0, "small", 10, 8)
    loading = drain(twin)
    ready = max(event.at for event in loading if isinstance(event, LoadDone))
    twin.submit(ready, TwinRequest("r1", "large", 10, 2))
    twin.submit(ready, TwinRequest("r2", "small", 10, 2))
    events = drain(twin)
    assert refused(loading) == [("large", "too_large")]
    assert refused(events) == [("r1", "unknown_adapter")]
    assert finished(events) == ["r2"]
    assert twin.tier("large") is None


@pytest.mark.parametrize("layout", ["slots", "unified"])
@pytest.mark.parametrize("adapter", [None, "x"])
def test_a_request_larger_than_all_kv_is_rejected_and_the_largest_that_fits_runs(
    layout: Layout, adapter: str | None
) -> None:
    twin = small(layout)
    twin.register(0, "x", 10, 8)
    ready = max(event.at for event in drain(twin) if isinstance(event, LoadDone))
    # vLLM never writes KV of the last token; S-LoRA reserves it, stays below the pool, and has the adapter in it.
    largest = KV_TOKENS if layout == "slots" else KV_TOKENS - 2 - (32 if adapter else 0)
    twin.submit(ready, TwinRequest("larger", adapter, largest + 1, 1))
    twin.submit(ready, TwinRequest("long", adapter, largest, 2))
    twin.submit(ready, TwinRequest("largest", adapter, largest, 1))
    events = drain(twin)
    assert sorted(refused(events)) == [("larger", "too_long"), ("long", "too_long")]
    assert finished(events) == ["largest"]


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0), (-1, 1), (1, -1)])
def test_a_request_without_tokens_is_an_error_of_the_caller(prompt: int, output: int) -> None:
    with pytest.raises(ValueError, match=r"^request r: prompt_tokens and output_tokens must be at least 1"):
        small("slots").submit(0, TwinRequest("r", None, prompt, output))
