"""Figures by hand: a step is 1000 + 10 a sequence + 1 a KV token it reads, a prefill 5 a token, a copy to the device 30."""

from collections.abc import Sequence

import msgspec
import pytest

from loraledger.twin.events import Activated, Evicted, LoadFailed, Rejected, TokenOut, TwinEvent
from loraledger.twin.profile import TwinProfile, UnifiedRules
from loraledger.twin.replica import ReplicaTwin
from loraledger.twin.unified import UnifiedLayout
from twin.test_replica import ask, drain, times

POOL = TwinProfile(
    layout="unified",
    unified=UnifiedRules(prefill_tokens=100),
    max_rank=64,
    max_seqs=8,
    kv_blocks=200,
    block_size=1,
    step_base_ps=1000,
    step_per_seq_ps=10,
    step_per_kv_token_ps=1,
    prefill_per_token_ps=5,
    prefill_floor_ps=0,
    prefill_offset_ps=0,
    adapter_step_ps=0,
    load_overhead_ps=0,
    load_bytes_per_s=10**12,
    activation_ps=30,
)


def make(rules: UnifiedRules = POOL.unified, **changes: int) -> ReplicaTwin:
    twin = ReplicaTwin(msgspec.structs.replace(POOL, unified=rules, **changes), every_token=True)
    for name in ("x", "y"):
        twin.register(0, name, 70, 5)
    drain(twin)
    twin.advance(1000)
    return twin


def moves(events: Sequence[TwinEvent]) -> list[TwinEvent]:
    return [event for event in events if isinstance(event, Activated | Evicted)]


def test_prefill_is_a_step_of_its_own_and_the_next_one_waits_for_ten_decodes() -> None:
    twin = make()
    ask(twin, 1000, "a", 10, 20)
    twin.advance(1000)
    ask(twin, 1001, "b", 10, 2)
    events = drain(twin)
    tenth = times(events, "a")[10]
    assert tenth == 1000 + 1050 + 10 * 1010 + sum(range(11, 21))
    assert times(events, "b")[0] == tenth + 1050
    assert times(events, "a")[11] == tenth + 1050 + 1020 + 21 + 11


def test_reservation_keeps_room_for_every_token_to_come() -> None:
    twin = make()
    ask(twin, 1000, "a", 50, 100)
    ask(twin, 1000, "b", 20, 30)
    ask(twin, 1000, "c", 10, 20)
    # a and b alone peak at 70 + 2 + 2 * 29 = 130 or at 50 + 100 = 150 tokens; with c: 83 + 3 * 19, 131, 150; all below 200.
    twin.advance(1000)
    assert twin.sample(1000).running == 3
    full = make()
    ask(full, 1000, "a", 50, 100)
    ask(full, 1000, "d", 50, 50)
    full.advance(1000)
    assert full.sample(1000).running == 1  # 102 + 2 * 49 = 200 is not below 200


def test_adapter_takes_four_cells_a_rank_while_somebody_runs_with_it() -> None:
    twin = make()
    ask(twin, 1000, "a", 10, 1, "x")
    assert twin.tier("x") == "host"
    events = twin.advance(1000)
    assert moves(events) == []
    assert moves(twin.advance(1030)) == [Activated(1030, "x", 30)]
    assert twin.sample(1030).kv_used_blocks == 10 + 4 * 5
    assert moves(drain(twin)) == [Evicted(1030 + 1050, "x", "gpu")]
    assert twin.tier("x") == "host"


def test_adapter_can_be_priced_by_its_bytes() -> None:
    twin = make(UnifiedRules(prefill_tokens=100, kv_bytes_per_token=8))
    ask(twin, 1000, "a", 10, 1, "x")
    twin.advance(1030)
    assert twin.sample(1030).kv_used_blocks == 10 + 9


def test_prefetch_overlaps_what_would_have_held_everybody_up() -> None:
    def run(prefetch: bool) -> list[TwinEvent]:
        twin = make(UnifiedRules(prefill_tokens=100, prefetch=prefetch))
        ask(twin, 1000, "a", 10, 20)
        twin.advance(1000)
        ask(twin, 1001, "b", 10, 2, "x")
        return drain(twin)

    late, early = run(False), run(True)
    assert times(late, "b")[0] - times(early, "b")[0] == 30
    assert moves(early)[0] == Activated(times(early, "a")[5], "x", 30)


def test_newest_first_is_lifo() -> None:
    twin = make(UnifiedRules(prefill_tokens=10, order="lifo"))
    for name in ("a", "b", "c"):
        ask(twin, 1000, name, 10, 1)
    firsts = [event.id for event in drain(twin) if isinstance(event, TokenOut)]
    assert firsts == ["c", "b", "a"]


def test_early_abort_gives_up_those_that_would_be_late() -> None:
    twin = make(UnifiedRules(prefill_tokens=10, order="early_abort", first_token_slo_ps=2000, abort_margin_ps=500))
    for name in ("a", "b", "c"):
        ask(twin, 1000, name, 10, 1)
    events = drain(twin)
    served = [event.id for event in events if isinstance(event, TokenOut)]
    given_up = [event for event in events if isinstance(event, Rejected)]
    # Attempts at 1000, 2050 and 3100. The first sees a line that grew by 3 and takes the newest, the second one that did not
    # grow and takes the oldest; at the third 2100 + 500 have passed of 2000.
    assert served == ["c", "a"]
    assert [(event.at, event.reason) for event in given_up] == [(3100, "aborted")]
    assert twin.sample(3100).active == ()


@pytest.mark.parametrize("steps", [11, 12, 13, 30])
def test_attempts_inside_a_run_move_the_running_mean_as_single_ones_do(steps: int) -> None:
    """A burst lets the line's growth jump; every attempt after that, one a step from the tenth on, lets it fall."""
    rules = UnifiedRules(prefill_tokens=100, order="early_abort", first_token_slo_ps=10**9, abort_margin_ps=0)
    growths = []
    for every_token in (False, True):
        twin = ReplicaTwin(
            msgspec.structs.replace(POOL, unified=rules, max_seqs=99, kv_blocks=2000), every_token=every_token
        )
        for n in range(60):
            ask(twin, 0, f"r{n}", 1, steps + 1)
        drain(twin)
        layout = twin._layout
        assert isinstance(layout, UnifiedLayout)
        growths.append(layout._growth)
    assert growths[0] == growths[1]
    assert growths[0] == {11: 12, 12: 3, 13: 0, 30: 0}[steps]


@pytest.mark.parametrize(
    ("prompt", "output", "adapter", "fits"),
    [
        (99, 100, None, True),
        (100, 100, None, False),
        (79, 100, "x", True),
        (80, 100, "x", False),
        (101, 1, None, False),
    ],
)
def test_request_that_can_never_run_is_refused(prompt: int, output: int, adapter: str | None, fits: bool) -> None:
    twin = make()
    ask(twin, 1000, "a", prompt, output, adapter)
    refused = [event for event in drain(twin) if isinstance(event, Rejected)]
    assert refused == ([] if fits else [Rejected(1000, "a", "too_long")])


def test_adapter_larger_than_the_pool_is_refused() -> None:
    twin = make()
    twin.register(1000, "huge", 1, 50)
    assert drain(twin) == [LoadFailed(1000, "huge", "too_large")]
