from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraledger.twin.events import LoadDone, LoadFailed, Rejected, TokenOut, TwinEvent, TwinRequest
from loraledger.twin.profile import TwinProfile
from loraledger.twin.replica import ReplicaTwin
from twin.oracle import Call, Cancel, Forget, Oracle, Register, Submit

NAMES = ("ant", "bee", "cow", "doe")


@st.composite
def profiles(draw: st.DrawFn) -> TwinProfile:
    slots = draw(st.integers(1, 3))
    max_seqs = draw(st.integers(1, 6))
    costs = st.integers(0, 9)
    block_size = draw(st.integers(1, 4))
    return TwinProfile(
        slots=slots,
        host_entries=slots + draw(st.integers(0, 2)),
        max_rank=8,
        max_seqs=max_seqs,
        token_budget=max_seqs + draw(st.integers(0, 12)),
        kv_blocks=draw(st.integers(14, 40)) // block_size,
        block_size=block_size,
        step_base_ps=draw(st.integers(1, 9)),
        step_per_seq_ps=draw(costs),
        step_per_kv_token_ps=draw(costs),
        prefill_per_token_ps=draw(costs),
        prefill_floor_ps=draw(costs),
        prefill_offset_ps=draw(st.integers(-9, 9)),
        adapter_step_ps=draw(costs),
        load_overhead_ps=draw(costs),
        load_bytes_per_s=10**12,
        activation_ps=draw(costs),
    )


@st.composite
def scripts(draw: st.DrawFn) -> list[Call]:
    calls: list[Call] = [Register(0, name, draw(st.integers(0, 20)), 8) for name in NAMES]
    at = draw(st.sampled_from((100, 200)))
    open_ids: list[str] = []
    for number in range(draw(st.integers(1, 30))):
        at += draw(st.sampled_from((0, 0, 0, 1, 3, 20, 60)))
        kind = draw(st.sampled_from(("submit",) * 8 + ("cancel", "register", "forget")))
        if kind == "cancel" and open_ids:
            calls.append(Cancel(at, open_ids.pop(draw(st.integers(0, len(open_ids) - 1)))))
        elif kind == "register":
            name, size, rank = draw(st.sampled_from(NAMES)), draw(st.integers(0, 20)), draw(st.integers(7, 9))
            calls.append(Register(at, name, size, rank, draw(st.booleans())))
        elif kind == "forget":
            calls.append(Forget(at, draw(st.sampled_from(NAMES))))
        else:
            adapter = draw(st.sampled_from((None, *NAMES)))
            request = TwinRequest(f"r{number}", adapter, draw(st.integers(1, 9)), draw(st.integers(1, 9)))
            calls.append(Submit(at, request))
            open_ids.append(request.id)
    return calls


def play(twin: ReplicaTwin, calls: Sequence[Call]) -> list[TwinEvent]:
    events: list[TwinEvent] = []
    for call in calls:
        while (at := twin.next_at()) is not None and at < call.at:
            events += twin.advance(at)
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
    else:
        twin.forget(call.at, call.name)


def canonical(events: Sequence[TwinEvent]) -> list[tuple[int, str]]:
    return sorted((event.at, repr(event)) for event in events)


RUNS = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@RUNS
@given(profiles(), scripts(), st.frozensets(st.sampled_from(NAMES), max_size=1))
def test_every_event_equals_the_plain_stepper(profile: TwinProfile, calls: list[Call], gone: frozenset[str]) -> None:
    twin = ReplicaTwin(profile, every_token=True, readable=lambda name: name not in gone)
    events = play(twin, calls)
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert canonical(events) == canonical(Oracle(profile, gone).run(calls))


@RUNS
@given(profiles(), scripts())
def test_first_and_last_tokens_alone_are_the_same_run(profile: TwinProfile, calls: list[Call]) -> None:
    every = play(ReplicaTwin(profile, every_token=True), calls)
    some = play(ReplicaTwin(profile), calls)
    kept = [event for event in every if not isinstance(event, TokenOut) or event.first or event.finished]
    assert some == kept


@RUNS
@given(profiles(), scripts())
def test_blocks_return_and_each_call_ends_once(profile: TwinProfile, calls: list[Call]) -> None:
    twin = ReplicaTwin(profile)
    ends: list[str] = []
    loads: list[str] = []
    taken: list[TwinEvent] = []
    for call in [*calls, None]:
        while (at := twin.next_at()) is not None and (call is None or at < call.at):
            taken = twin.advance(at)
            sample = twin.sample(at)
            assert 0 <= sample.kv_used_blocks <= profile.kv_blocks
            assert sample.running <= profile.max_seqs
            ends += [e.id for e in taken if isinstance(e, Rejected) or (isinstance(e, TokenOut) and e.finished)]
            loads += [e.name for e in taken if isinstance(e, LoadDone | LoadFailed)]
        if isinstance(call, Cancel):
            ends += [call.id] if twin.cancel(call.at, call.id) else []
        elif call is not None:
            give(twin, call)
    end = twin.sample(10**6)
    assert (end.running, end.waiting, end.kv_used_blocks, end.active) == (0, 0, 0, ())
    assert sorted(ends) == sorted(call.request.id for call in calls if isinstance(call, Submit))
    assert sorted(loads) == sorted(call.name for call in calls if isinstance(call, Register))
