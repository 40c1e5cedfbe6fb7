"""Random small replicas and random calls: the twin says exactly what a plain stepper says.

``TWIN_EXAMPLES=10000 pytest tests/twin/test_against_oracle.py`` tries more than the 500 configurations of a plain run.
"""

import os
from collections.abc import Sequence

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraledger.events import MoveVerb
from loraledger.twin.events import (
    LoadDone,
    LoadFailed,
    MoveDone,
    MoveFailed,
    Rejected,
    TokenOut,
    TwinEvent,
    TwinRequest,
    TwinSample,
)
from loraledger.twin.profile import TwinProfile, UnifiedRules
from loraledger.twin.replica import ReplicaTwin
from twin.oracle import Call, Cancel, Forget, Oracle, Register, Shift, Submit
from twin.unified_oracle import UnifiedOracle

NAMES = ("ant", "bee", "cow", "doe")
PREFIXES = ((), (1, 11, 111, 1111), (1, 11, 112), (1, 12, 121, 1211, 12111), (2, 21), (2, 22, 221))
COSTS = st.integers(0, 9)


@st.composite
def points(draw: st.DrawFn, last: int) -> tuple[tuple[int, int], ...]:
    tokens = sorted(draw(st.sets(st.integers(1, last), max_size=3)) | {last})
    times = sorted(draw(st.lists(COSTS, min_size=len(tokens), max_size=len(tokens))))
    return tuple(zip(tokens, times, strict=True))


@st.composite
def decode_tables(draw: st.DrawFn, max_seqs: int) -> tuple[tuple[int, int, int], ...]:
    counts = sorted({1, max_seqs} | draw(st.sets(st.integers(1, max_seqs), max_size=2)))
    intercepts = sorted(draw(st.lists(st.integers(1, 30), min_size=len(counts), max_size=len(counts))))
    return tuple((count, time, draw(COSTS)) for count, time in zip(counts, intercepts, strict=True))


@st.composite
def costs(draw: st.DrawFn, max_seqs: int, most: int) -> dict[str, object]:
    """Steps by lines or by tables, adapters by count and by rank, activations by rank."""
    chosen: dict[str, object] = {
        "step_base_ps": draw(st.integers(1, 9)),
        "rank_cost": draw(st.sampled_from(("max", "sum"))),
        "prefill_offset_ps": draw(st.integers(-9, 9)),
        "load_bytes_per_s": 10**12,
        **{
            field: draw(COSTS)
            for field in (
                "step_per_seq_ps",
                "step_per_kv_token_ps",
                "prefill_per_token_ps",
                "prefill_floor_ps",
                "adapter_step_ps",
                "load_overhead_ps",
                "activation_ps",
            )
        },
    }
    if draw(st.booleans()):
        chosen |= {
            "lora_ps": draw(COSTS),
            "rank_step_ps": draw(COSTS),
            "activation_per_rank_ps": draw(st.integers(0, 2)),
        }
    if draw(st.booleans()):
        chosen["decode_table"] = draw(decode_tables(max_seqs))
    if draw(st.booleans()):
        chosen["prefill_table"] = draw(points(most))
        chosen["mixed_table"] = draw(st.one_of(st.just(()), points(most)))
    return chosen


@st.composite
def profiles(draw: st.DrawFn) -> TwinProfile:
    slots = draw(st.integers(1, 3))
    max_seqs = draw(st.integers(1, 6))
    block_size = draw(st.integers(1, 4))
    budget = max_seqs + draw(st.integers(0, 12))
    caching = draw(st.booleans())
    return msgspec.convert(
        {
            **draw(costs(max_seqs, budget)),
            "slots": slots,
            "host_entries": slots + draw(st.integers(0, 2)),
            "max_rank": 8,
            "max_seqs": max_seqs,
            "token_budget": budget,
            "kv_blocks": draw(st.integers(14, 40)) // block_size,
            "block_size": block_size,
            "slot_bytes": draw(st.sampled_from((0, 0, 17))),
            "prefix_caching": caching,
            "prefix_block_tokens": block_size * draw(st.integers(0, 2)) if caching else 0,
        },
        TwinProfile,
    )


@st.composite
def unified_profiles(draw: st.DrawFn) -> TwinProfile:
    max_seqs = draw(st.integers(1, 6))
    most = draw(st.integers(6, 30))
    rules = UnifiedRules(
        order=draw(st.sampled_from(("fifo", "lifo", "early_abort"))),
        prefetch=draw(st.booleans()),
        kv_bytes_per_token=draw(st.sampled_from((0, 3, 7))),
        attempt_steps=draw(st.integers(1, 10)),
        prefill_tokens=most,
        first_token_slo_ps=draw(st.integers(50, 900)),
        abort_margin_ps=draw(st.integers(0, 50)),
    )
    changes = {
        **draw(costs(max_seqs, most)),
        "layout": "unified",
        "max_rank": 8,
        "max_seqs": max_seqs,
        "kv_blocks": draw(st.integers(30, 90)),
        "block_size": draw(st.integers(1, 2)),
    }
    return msgspec.convert({**changes, "unified": msgspec.to_builtins(rules)}, TwinProfile)


@st.composite
def scripts(draw: st.DrawFn) -> list[Call]:
    moves = draw(st.sampled_from((0, 3)))
    calls: list[Call] = [Register(0, name, draw(st.integers(0, 20)), draw(st.integers(1, 8))) for name in NAMES]
    at = draw(st.sampled_from((100, 200)))
    open_ids: list[str] = []
    for number in range(draw(st.integers(1, 30))):
        at += draw(st.sampled_from((0, 0, 0, 1, 3, 20, 60)))
        kind = draw(st.sampled_from(("submit",) * 8 + ("cancel", "register", "forget", *("shift",) * moves)))
        if kind == "cancel" and open_ids:
            calls.append(Cancel(at, open_ids.pop(draw(st.integers(0, len(open_ids) - 1)))))
        elif kind == "register":
            name, size, rank = draw(st.sampled_from(NAMES)), draw(st.integers(0, 20)), draw(st.integers(7, 9))
            calls.append(Register(at, name, size, rank, draw(st.booleans())))
        elif kind == "forget":
            calls.append(Forget(at, draw(st.sampled_from(NAMES))))
        elif kind == "shift":
            verb: MoveVerb = draw(st.sampled_from(("pin", "pin", "pin", "unpin", "activate", "evict")))
            calls.append(Shift(at, draw(st.sampled_from(NAMES)), verb))
        else:
            adapter = draw(st.sampled_from((None, *NAMES)))
            prompt, output = draw(st.integers(1, 9)), draw(st.integers(1, 18))
            request = TwinRequest(f"r{number}", adapter, prompt, output, draw(st.sampled_from(PREFIXES)))
            calls.append(Submit(at, request))
            open_ids.append(request.id)
    return calls


def play(
    twin: ReplicaTwin, calls: Sequence[Call], early: bool = False, samples: list[TwinSample] | None = None
) -> list[TwinEvent]:
    """``early``: time has come to a call's time before the call, so that a step that begins then does not know of it."""
    events: list[TwinEvent] = []
    for call in calls:
        while (at := twin.next_at()) is not None and at < call.at:
            events += twin.advance(at)
        if early:
            events += twin.advance(call.at)
        if samples is not None:
            samples.append(twin.sample(call.at))
        give(twin, call)
    while (at := twin.next_at()) is not None:
        events += twin.advance(at)
    return events


def give(twin: ReplicaTwin, call: Call) -> None:
    if isinstance(call, Submit):
        twin.submit(call.at, call.request)
    elif isinstance(call, Cancel):
        twin.cancel(call.at, call.id)
    elif isinstance(call, Register):
        twin.register(call.at, call.name, call.size, call.rank, call.readable)
    elif isinstance(call, Shift):
        twin.move(call.at, call.name, call.verb)
    else:
        twin.forget(call.at, call.name)


def canonical(events: Sequence[TwinEvent]) -> list[tuple[int, str]]:
    return sorted((event.at, repr(event)) for event in events)


RUNS = settings(
    max_examples=int(os.environ.get("TWIN_EXAMPLES", "500")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
ANY = st.one_of(profiles(), unified_profiles())


def ends(events: Sequence[TwinEvent]) -> list[TwinEvent]:
    return [event for event in events if not isinstance(event, TokenOut) or event.first or event.finished]


@RUNS
@given(profiles(), scripts(), st.frozensets(st.sampled_from(NAMES), max_size=1))
def test_every_event_equals_the_plain_stepper(profile: TwinProfile, calls: list[Call], gone: frozenset[str]) -> None:
    twin = ReplicaTwin(profile, every_token=True, readable=lambda name: name not in gone)
    events = play(twin, calls)
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert canonical(events) == canonical(Oracle(profile, gone).run(calls))


@RUNS
@given(unified_profiles(), scripts())
def test_every_event_of_the_pool_equals_the_plain_stepper(profile: TwinProfile, calls: list[Call]) -> None:
    events = play(ReplicaTwin(profile, every_token=True), calls)
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert canonical(events) == canonical(UnifiedOracle(profile).run(calls))


@RUNS
@given(profiles(), scripts(), st.frozensets(st.sampled_from(NAMES), max_size=1))
def test_runs_of_steps_equal_the_plain_stepper(profile: TwinProfile, calls: list[Call], gone: frozenset[str]) -> None:
    events = play(ReplicaTwin(profile, readable=lambda name: name not in gone), calls)
    assert canonical(events) == canonical(ends(Oracle(profile, gone).run(calls)))


@RUNS
@given(unified_profiles(), scripts())
def test_runs_of_steps_of_the_pool_equal_the_plain_stepper(profile: TwinProfile, calls: list[Call]) -> None:
    events = play(ReplicaTwin(profile), calls)
    assert canonical(events) == canonical(ends(UnifiedOracle(profile).run(calls)))


@RUNS
@given(ANY, scripts(), st.booleans())
def test_single_steps_and_runs_are_the_same_seen_from_outside(
    profile: TwinProfile, calls: list[Call], early: bool
) -> None:
    single: list[TwinSample] = []
    run: list[TwinSample] = []
    every = play(ReplicaTwin(profile, every_token=True), calls, early, single)
    some = play(ReplicaTwin(profile), calls, early, run)
    assert some == ends(every)
    if early:
        assert run == single


@RUNS
@given(ANY, scripts())
def test_blocks_return_and_each_call_ends_once(profile: TwinProfile, calls: list[Call]) -> None:
    twin = ReplicaTwin(profile)
    ended: list[str] = []
    loads: list[str] = []
    moves: list[tuple[str, str]] = []
    taken: list[TwinEvent] = []
    for call in [*calls, None]:
        while (at := twin.next_at()) is not None and (call is None or at < call.at):
            taken = twin.advance(at)
            sample = twin.sample(at)
            assert 0 <= sample.kv_used_blocks <= profile.kv_blocks
            assert sample.running <= profile.max_seqs
            ended += [e.id for e in taken if isinstance(e, Rejected) or (isinstance(e, TokenOut) and e.finished)]
            loads += [e.name for e in taken if isinstance(e, LoadDone | LoadFailed)]
            moves += [(e.name, e.verb) for e in taken if isinstance(e, MoveDone | MoveFailed)]
        if isinstance(call, Cancel):
            ended += [call.id] if twin.cancel(call.at, call.id) else []
        elif call is not None:
            give(twin, call)
    end = twin.sample(10**6)
    assert (end.running, end.waiting, end.kv_used_blocks, end.active) == (0, 0, 0, ())
    assert sorted(ended) == sorted(call.request.id for call in calls if isinstance(call, Submit))
    assert sorted(loads) == sorted(call.name for call in calls if isinstance(call, Register))
    assert sorted(moves) == sorted((call.name, call.verb) for call in calls if isinstance(call, Shift))
