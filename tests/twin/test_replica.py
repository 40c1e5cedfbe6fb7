"""Every figure here was computed by hand from this profile: a step is 1000 + 10 a sequence + 1 a KV token it reads, a prefill
5 a token but at least 50, an adapter 7, a load 100 + 1 a byte, an activation 30."""

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from loraledger.twin.events import (
    Activated,
    Died,
    Evicted,
    LoadDone,
    Loaded,
    LoadFailed,
    Preempted,
    Rejected,
    TokenOut,
    TwinEvent,
    TwinRequest,
)
from loraledger.twin.profile import TwinProfile
from loraledger.twin.replica import ReplicaTwin
from loraledger.twin.requests import PLACE, Adapter

PLAIN = TwinProfile(
    slots=2,
    host_entries=3,
    max_rank=16,
    max_seqs=4,
    token_budget=64,
    kv_blocks=100,
    block_size=4,
    step_base_ps=1000,
    step_per_seq_ps=10,
    step_per_kv_token_ps=1,
    prefill_per_token_ps=5,
    prefill_floor_ps=50,
    prefill_offset_ps=0,
    adapter_step_ps=7,
    load_overhead_ps=100,
    load_bytes_per_s=10**12,
    activation_ps=30,
)


def make(readable: Any = None, **changes: Any) -> ReplicaTwin:
    return ReplicaTwin(msgspec.structs.replace(PLAIN, **changes), every_token=True, readable=readable)


def ask(twin: ReplicaTwin, at: int, name: str, prompt: int, output: int, adapter: str | None = None) -> None:
    twin.submit(at, TwinRequest(name, adapter, prompt, output))


def drain(twin: ReplicaTwin) -> list[TwinEvent]:
    events: list[TwinEvent] = []
    while (at := twin.next_at()) is not None:
        events += twin.advance(at)
    return events


def registered(twin: ReplicaTwin, *names: str, rank: int = 8) -> int:
    """Register one after the other, 400 bytes each; returns the time when all are there."""
    for name in names:
        twin.register(0, name, 400, rank)
    drain(twin)
    at = 10_000
    twin.advance(at)
    return at


def times(events: list[TwinEvent], name: str) -> list[int]:
    return [event.at for event in events if isinstance(event, TokenOut) and event.id == name]


# --- step times


def test_prefill_then_decode_steps_of_one_request() -> None:
    twin = make()
    ask(twin, 500, "a", prompt=4, output=3)
    prefill = 1000 + 50
    second, third = 1000 + 10 + 5, 1000 + 10 + 6
    assert drain(twin) == [
        TokenOut(500 + prefill, "a", 1, True, False),
        TokenOut(500 + prefill + second, "a", 2, False, False),
        TokenOut(500 + prefill + second + third, "a", 3, False, True),
    ]


def test_single_token_answer_is_first_and_last() -> None:
    twin = make()
    ask(twin, 0, "a", prompt=30, output=1)
    assert drain(twin) == [TokenOut(1000 + 150, "a", 1, True, True)]


def test_arrival_during_a_step_joins_the_next_one() -> None:
    twin = make()
    ask(twin, 0, "a", prompt=4, output=3)
    twin.advance(10)
    ask(twin, 10, "b", prompt=20, output=1)
    mixed = 1000 + 10 + 5 + 100
    events = drain(twin)
    assert times(events, "a")[:2] == [1050, 1050 + mixed]
    assert times(events, "b") == [1050 + mixed]


def test_idle_twin_wants_nothing_and_starts_at_the_arrival() -> None:
    twin = make()
    assert twin.next_at() is None
    ask(twin, 700, "a", prompt=1, output=1)
    assert twin.next_at() == 700
    assert twin.advance(700) == []
    assert twin.next_at() == 700 + 1050


def test_adapter_term_is_per_distinct_adapter() -> None:
    twin = make()
    at = registered(twin, "x", "y")
    ask(twin, at, "a", 1, 1, "x")
    ask(twin, at, "b", 1, 1, "x")
    ask(twin, at, "c", 1, 1, "y")
    assert times(drain(twin), "c") == [at + 1000 + 50 + 2 * 7]


# --- chunked prefill


def test_long_prompt_is_cut_to_the_budget_that_decodes_leave() -> None:
    twin = make(token_budget=8)
    ask(twin, 0, "a", prompt=2, output=4)
    twin.advance(0)
    ask(twin, 0, "b", prompt=17, output=1)
    first = 1050
    chunk_7 = [first + 1010 + 3 + 50, first + 1010 + 3 + 50 + 1010 + 4 + 50]
    last_3 = chunk_7[1] + 1010 + 5 + 50
    events = drain(twin)
    assert times(events, "a") == [first, *chunk_7, last_3]
    assert times(events, "b") == [last_3]


def test_next_in_line_gets_what_is_left_of_the_budget() -> None:
    twin = make(token_budget=8)
    ask(twin, 0, "a", prompt=6, output=1)
    ask(twin, 0, "b", prompt=6, output=1)
    events = drain(twin)
    assert times(events, "a") == [1050]
    assert times(events, "b") == [1050 + 1050]


# --- slots


def test_request_without_a_slot_is_skipped_and_overtaken() -> None:
    twin = make(slots=1)
    at = registered(twin, "x", "y")
    ask(twin, at, "x1", 1, 3, "x")
    ask(twin, at, "y1", 1, 1, "y")
    ask(twin, at, "base", 1, 1)
    ask(twin, at, "x2", 1, 1, "x")
    events = drain(twin)
    assert times(events, "base") == times(events, "x2") == times(events, "x1")[:1]
    assert times(events, "y1")[0] > times(events, "x1")[-1]


def test_skipped_request_starves_while_its_rivals_keep_coming() -> None:
    twin = make(slots=1)
    at = registered(twin, "x", "y")
    ask(twin, at, "x0", 1, 8, "x")
    ask(twin, at, "y", 1, 1, "y")
    for number in range(1, 20):
        at += 3000
        twin.advance(at)
        ask(twin, at, f"x{number}", 1, 8, "x")
    assert twin.sample(at).waiting == 1
    events = drain(twin)
    assert times(events, "y")[0] > times(events, "x19")[-1]


def test_max_seqs_holds_the_line_in_order() -> None:
    twin = make(max_seqs=2)
    for number in range(4):
        ask(twin, 0, f"r{number}", 1, 2)
    events = drain(twin)
    firsts = [event.id for event in events if isinstance(event, TokenOut) and event.first]
    assert firsts == ["r0", "r1", "r2", "r3"]
    assert times(events, "r2")[0] > times(events, "r1")[-1]


# --- loads and tiers


def test_register_moves_disk_to_host_to_slot() -> None:
    twin = make()
    twin.register(50, "x", 400, 8)
    assert twin.tier("x") is None
    assert drain(twin) == [Loaded(550, "x", 500), Activated(580, "x", 30), LoadDone(580, "x", 530)]
    assert twin.tier("x") == "gpu"


def test_explicit_load_delays_a_running_stream_by_exactly_itself() -> None:
    def stream(loading: bool) -> list[int]:
        twin = make()
        ask(twin, 0, "a", prompt=4, output=6)
        twin.advance(3000)
        if loading:
            twin.register(3000, "x", 2000, 8)
        return times(drain(twin), "a")

    before, after = stream(loading=False), stream(loading=True)
    assert after[0] == before[0], "the step in flight is not touched"
    assert [late - early for early, late in zip(before[1:], after[1:], strict=True)] == [100 + 2000 + 30] * 3


def test_step_load_delays_the_bystander_by_exactly_itself() -> None:
    twin = make(slots=1, host_entries=1)
    at = registered(twin, "x", "y")
    ask(twin, at, "bystander", 1, 3)
    twin.advance(at)
    ask(twin, at, "miss", 1, 1, "x")
    events = drain(twin)
    assert twin.tier("x") == "gpu"
    assert twin.tier("y") == "disk"
    gap = times(events, "bystander")[1] - times(events, "bystander")[0]
    assert gap == (100 + 400 + 30) + 1000 + 10 + 2 + 50 + 7


def test_least_recently_used_adapter_leaves_first() -> None:
    twin = make()
    at = registered(twin, "x", "y")
    ask(twin, at, "a", 1, 1, "x")
    at = 20_000
    assert [e for e in twin.advance(at) if not isinstance(e, TokenOut)] == []
    twin.register(at, "z", 400, 8)
    moved = drain(twin)
    assert [e for e in moved if isinstance(e, Evicted)] == [Evicted(at + 500, "y", "gpu")]
    assert (twin.tier("x"), twin.tier("y"), twin.tier("z")) == ("gpu", "host", "gpu")


def test_return_from_host_costs_an_activation_only() -> None:
    twin = make()
    at = registered(twin, "x", "y", "z")
    assert twin.tier("x") == "host"
    ask(twin, at, "a", 1, 1, "x")
    assert drain(twin) == [
        Evicted(at, "y", "gpu"),
        Activated(at + 30, "x", 30),
        TokenOut(at + 30 + 1000 + 50 + 7, "a", 1, True, True),
    ]


def test_full_host_cache_evicts_its_oldest_for_good() -> None:
    twin = make()
    registered(twin, "v", "w", "x", "y")
    assert [twin.tier(name) for name in "vwxy"] == ["disk", "host", "gpu", "gpu"]


def test_moves_of_a_round_robin_over_one_adapter_too_many() -> None:
    twin = make(slots=2, host_entries=2)
    at = registered(twin, "x", "y", "z")
    loads = 0
    for turn, name in enumerate("xyzxyz"):
        ask(twin, at, f"r{turn}", 1, 1, name)
        loads += sum(isinstance(event, Loaded) for event in drain(twin))
        at += 5000
    assert loads == 6


def test_batch_can_push_out_its_own_member() -> None:
    first, second = sorted((Adapter(name, name, 0, 1) for name in ("old", "x")), key=PLACE)
    twin = make(slots=2, host_entries=2)
    at = registered(twin, first.name, second.name, "y")
    assert [twin.tier(name) for name in (first.name, second.name, "y")] == ["disk", "gpu", "gpu"]
    ask(twin, at, "a", 1, 1, second.name)
    ask(twin, at, "b", 1, 1, first.name)
    events = drain(twin)
    assert [e.name for e in events if isinstance(e, Loaded)] == [first.name, second.name]
    assert [e.name for e in events if isinstance(e, Evicted) and e.tier == "host"] == [second.name, "y"]


def test_forgotten_name_keeps_its_place_and_its_running_requests() -> None:
    twin = make()
    at = registered(twin, "x")
    ask(twin, at, "a", 1, 3, "x")
    twin.advance(at)
    twin.forget(at, "x")
    ask(twin, at, "b", 1, 1, "x")
    events = drain(twin)
    assert len(times(events, "a")) == 3
    assert [e for e in events if isinstance(e, Rejected)] == [Rejected(at + 1057, "b", "unknown_adapter")]
    twin.register(20_000, "x", 400, 8)
    assert [e.name for e in drain(twin) if isinstance(e, Loaded)] == ["x"]
    twin.register(30_000, "y", 400, 8)
    evicted = [e for e in drain(twin) if isinstance(e, Evicted)]
    assert evicted == [Evicted(30_500, "x", "gpu")], "the forgotten copy leaves its slot, the new one stays"
    assert twin.tier("x") == "gpu"


def test_loads_that_cannot_be_leave_everything_as_it_was() -> None:
    twin = make()
    at = registered(twin, "x")
    twin.register(at, "x", 400, 8)
    twin.register(at, "big", 400, 17)
    twin.register(at, "gone", 400, 8, readable=False)
    assert drain(twin) == [
        LoadFailed(at, "x", "already_registered"),
        LoadFailed(at, "big", "rank_too_high"),
        LoadFailed(at, "gone", "unreadable"),
    ]
    assert twin.tier("big") is None


def test_name_cannot_be_asked_for_before_its_load_is_done() -> None:
    twin = make()
    twin.register(0, "x", 400, 8)
    twin.advance(100)
    ask(twin, 100, "early", 1, 1, "x")
    events = twin.advance(529)
    ask(twin, 530, "punctual", 1, 1, "x")
    events += drain(twin)
    assert [e for e in events if isinstance(e, Rejected)] == [Rejected(530, "early", "unknown_adapter")]
    assert times(events, "punctual") == [530 + 1057]


def test_adapter_larger_than_a_slot_is_refused() -> None:
    twin = make(slot_bytes=400)
    twin.register(0, "fits", 400, 8)
    twin.register(0, "big", 401, 8)
    failed = [event for event in drain(twin) if isinstance(event, LoadFailed)]
    assert failed == [LoadFailed(530, "big", "too_large")]


def test_activation_takes_longer_for_a_higher_rank() -> None:
    twin = make(activation_per_rank_ps=3)
    twin.register(0, "x", 400, 5)
    assert [event.took for event in drain(twin) if isinstance(event, Activated)] == [30 + 15]


@pytest.mark.parametrize(("rank_cost", "weight"), [("max", 12), ("sum", 16)])
def test_ranks_weigh_on_the_step_by_their_kernel(rank_cost: str, weight: int) -> None:
    twin = make(rank_cost=rank_cost, rank_step_ps=100, lora_ps=11)
    twin.register(0, "x", 400, 4)
    twin.register(0, "y", 400, 12)
    drain(twin)
    twin.advance(10_000)
    for name, adapter in (("a", "x"), ("b", "y"), ("c", "y")):
        ask(twin, 10_000, name, 1, 1, adapter)
    assert times(drain(twin), "a") == [10_000 + 1050 + 2 * 7 + 11 + 100 * weight]


# --- runs of equal steps


def test_run_of_decodes_is_one_look_and_ends_where_its_steps_do() -> None:
    twin = ReplicaTwin(PLAIN)
    ask(twin, 0, "a", prompt=4, output=301)
    assert len(twin.advance(0)) == 0
    assert len(twin.advance(1050)) == 1
    end = 1050 + 300 * 1010 + sum(range(5, 305))
    assert twin.next_at() == end
    assert twin.advance(end) == [TokenOut(end, "a", 301, False, True)]


def test_arrival_cuts_a_run_at_the_next_boundary_between_steps() -> None:
    twin = ReplicaTwin(PLAIN)
    ask(twin, 0, "a", prompt=4, output=301)
    twin.advance(1050)
    boundary = 1050 + 10 * 1010 + sum(range(5, 15))
    ask(twin, boundary - 1, "b", prompt=20, output=1)
    assert twin.next_at() == boundary
    assert times(drain(twin), "b") == [boundary + 1000 + 10 + 15 + 100]


@pytest.mark.parametrize(("seen", "steps"), [(-1, 10), (0, 11)])
def test_arrival_at_a_boundary_joins_its_step_unless_that_has_begun(seen: int, steps: int) -> None:
    for every_token in (False, True):
        twin = ReplicaTwin(PLAIN, every_token=every_token)
        ask(twin, 0, "a", prompt=4, output=301)
        boundary = 1050 + 10 * 1010 + sum(range(5, 15))
        twin.advance(boundary + seen)
        ask(twin, boundary, "b", prompt=20, output=1)
        joined = 1050 + steps * 1010 + sum(range(5, 5 + steps))
        assert times(drain(twin), "b") == [joined + 1000 + 10 + 5 + steps + 100]


def test_sample_in_a_run_counts_the_blocks_of_the_step_at_hand() -> None:
    twin = ReplicaTwin(PLAIN)
    ask(twin, 0, "a", prompt=4, output=301)
    twin.advance(1050)
    boundary = 1050 + 10 * 1010 + sum(range(5, 15))
    twin.advance(boundary - 1)
    assert twin.sample(boundary - 1).kv_used_blocks == 4  # 4 + 10 tokens
    twin.advance(boundary + 2 * 1010 + 15 + 16)
    assert twin.sample(boundary + 2 * 1010 + 15 + 16).kv_used_blocks == 5  # the 13th decode, 17 tokens


# --- KV blocks


def test_last_arrival_loses_its_blocks_and_computes_again() -> None:
    twin = make(kv_blocks=4)
    ask(twin, 0, "a", prompt=8, output=5)
    ask(twin, 0, "b", prompt=7, output=4)
    prefill = 1000 + 75
    events = drain(twin)
    # step 2: "a" needs a third block and there is none, so "b" (two blocks) goes and "a" runs alone.
    assert [e for e in events if isinstance(e, Preempted)] == [Preempted(prefill, "b")]
    assert times(events, "a") == [prefill + n * 1010 + sum(range(9, 9 + n)) for n in range(5)]
    # "b" comes back with its prompt and the one token it had: 8 tokens, 2 blocks; 4 - 3 were free until "a" ended.
    resumed = times(events, "a")[-1] + 1050
    assert times(events, "b") == [prefill, resumed, resumed + 1010 + 9, resumed + 2 * 1010 + 9 + 10]
    assert [e.n_generated for e in events if isinstance(e, TokenOut) and e.id == "b"] == [1, 2, 3, 4]
    assert sum(isinstance(e, TokenOut) and e.first for e in events) == 2


def test_whole_prompt_must_fit_before_it_is_admitted() -> None:
    twin = make(kv_blocks=4, token_budget=4)
    ask(twin, 0, "a", prompt=4, output=4)
    ask(twin, 0, "b", prompt=13, output=1)
    twin.advance(1060)
    assert twin.sample(1060).waiting == 1
    assert [e for e in drain(twin) if isinstance(e, Preempted)] == []


def test_request_that_can_never_fit_is_rejected_at_once() -> None:
    twin = make(kv_blocks=4)
    ask(twin, 0, "a", prompt=4, output=9)
    twin.advance(10)
    ask(twin, 20, "long", prompt=17, output=1)
    ask(twin, 20, "longer than it looks", prompt=10, output=8)
    assert twin.next_at() == 20
    assert twin.advance(20) == [Rejected(20, "long", "too_long"), Rejected(20, "longer than it looks", "too_long")]
    ask(twin, 20, "just fits", prompt=10, output=7)
    assert len(times(drain(twin), "just fits")) == 7


def test_sample_counts_blocks_and_adapters_in_use() -> None:
    twin = make(slots=1, kv_blocks=20)
    at = registered(twin, "x", "y")
    ask(twin, at, "a", 9, 3, "x")
    ask(twin, at, "b", 1, 3, "y")
    ask(twin, at, "c", 4, 3)
    twin.advance(at)
    sample = twin.sample(at)
    assert (sample.running, sample.waiting, sample.kv_used_blocks, sample.kv_blocks) == (2, 1, 3 + 1, 20)
    assert sample.active == ("x", "y")
    drain(twin)
    assert twin.sample(10**6).active == ()


# --- cancelling


def test_cancelled_stream_ends_silently_and_frees_its_blocks() -> None:
    twin = make(kv_blocks=6)
    ask(twin, 0, "a", prompt=16, output=9)
    assert len(twin.advance(1100)) == 1
    assert twin.cancel(1100, "a")
    ask(twin, 1100, "b", prompt=20, output=1)
    boundary = 1000 + 80 + 1010 + 17
    assert drain(twin) == [TokenOut(boundary + 1000 + 100, "b", 1, True, True)]
    assert twin.sample(10**5).kv_used_blocks == 0


def test_cancel_in_line_lets_the_next_one_pass() -> None:
    twin = make(max_seqs=1)
    ask(twin, 0, "a", 1, 3)
    ask(twin, 0, "b", 1, 3)
    ask(twin, 0, "c", 1, 1)
    twin.advance(0)
    assert twin.cancel(5, "b")
    events = drain(twin)
    assert times(events, "b") == []
    assert times(events, "c")[0] == times(events, "a")[-1] + 1050


def test_cancel_during_a_cut_prompt_frees_it() -> None:
    twin = make(token_budget=4, max_seqs=1)
    ask(twin, 0, "a", 12, 1)
    twin.advance(1060)
    assert twin.cancel(1060, "a")
    assert drain(twin) == []
    assert twin.sample(9999).kv_used_blocks == 0


def test_cancel_of_what_is_not_open_says_so() -> None:
    twin = make()
    assert not twin.cancel(0, "never")
    ask(twin, 0, "a", 1, 1)
    drain(twin)
    assert not twin.cancel(5000, "a")


def test_id_can_be_used_again_after_its_end_only() -> None:
    twin = make()
    ask(twin, 0, "a", 1, 1)
    with pytest.raises(ValueError, match="request a is still open"):
        ask(twin, 0, "a", 1, 1)
    drain(twin)
    ask(twin, 5000, "a", 1, 1)
    assert len(times(drain(twin), "a")) == 1


# --- death


def test_files_gone_when_a_step_needs_them_end_the_engine() -> None:
    gone: list[str] = []
    twin = make(readable=lambda name: name not in gone, slots=1, host_entries=1)
    at = registered(twin, "x", "y")
    ask(twin, at, "bystander", 1, 30)
    twin.advance(at)
    gone.append("x")
    ask(twin, at + 5, "killer", 1, 1, "x")
    assert drain(twin) == [
        TokenOut(at + 1050, "bystander", 1, True, False),
        Died(at + 1050, "x", ("bystander", "killer")),
    ]
    assert twin.dead
    ask(twin, 20_000, "late", 1, 1)
    twin.register(20_000, "z", 1, 1)
    assert drain(twin) == [Rejected(20_000, "late", "engine_dead"), LoadFailed(20_000, "z", "engine_dead")]
    assert not twin.cancel(20_000, "bystander")


def test_files_gone_do_no_harm_while_the_host_has_a_copy() -> None:
    twin = make(readable=lambda name: False)
    at = registered(twin, "x", "y", "z")
    ask(twin, at, "a", 1, 1, "x")
    assert len(times(drain(twin), "a")) == 1


# --- time


def test_time_cannot_go_back() -> None:
    twin = make()
    twin.advance(100)
    with pytest.raises(ValueError, match="time 99 is before 100"):
        ask(twin, 99, "a", 1, 1)


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0)])
def test_request_without_tokens_is_refused(prompt: int, output: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        ask(make(), 0, "a", prompt, output)


def test_one_long_advance_equals_many_short_ones() -> None:
    def run(stride: int) -> list[TwinEvent]:
        twin = make(slots=1, kv_blocks=9)
        registered(twin, "x", "y")
        for number in range(9):
            ask(twin, 10_000, f"r{number}", 5 + number, 6, (None, "x", "y")[number % 3])
        events: list[TwinEvent] = []
        for to in range(10_000, 200_000, stride):
            events += twin.advance(to)
        return events

    assert run(190_000 - 1) == run(17)


SCRIPT = """
from loraledger.twin.events import TwinRequest
from loraledger.twin.profile import UnifiedRules
from twin.test_replica import drain, make, registered
rules = UnifiedRules(order="early_abort", prefetch=True, prefill_tokens=20, first_token_slo_ps=9000, abort_margin_ps=0)
for changes in ({}, {"prefix_caching": True}, {"layout": "unified", "unified": rules}):
    twin = make(slots=2, kv_blocks=30 if "layout" in changes else 9, max_seqs=3, **changes)
    at = registered(twin, "ant", "bee", "cow", "doe", rank=2)
    for n in range(60):
        adapter = (None, "ant", "bee", "cow", "doe")[n % 5]
        print(twin.advance(at + 300 * n))
        twin.submit(at + 300 * n, TwinRequest(f"r{n}", adapter, 4 + n % 7, 4, (n % 3,)))
    print(drain(twin))
    print(twin.sample(10**9))
"""


def test_hash_seed_changes_nothing() -> None:
    def run(seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
        return done.stdout

    first = run("1")
    assert first.count("Preempted") > 0
    assert first.count("aborted") > 0
    assert run("2") == first
