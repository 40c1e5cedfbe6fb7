from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ledger.replicas import GIB, replica, seen
from loraledger.ledger.accounts import ledger_of
from loraledger.ledger.limit import limiting
from loraledger.tiers import EngineTiers
from loraledger.twin.events import Activated, Loaded, TokenOut, TwinEvent, TwinRequest
from loraledger.twin.profile import PS_PER_MS, PS_PER_S, TwinProfile
from loraledger.twin.replica import ReplicaTwin

CASES = Path(__file__).parent.parent / "cases"


def given(case: str, name: str) -> Any:
    text = (CASES / case / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


def advance(twin: ReplicaTwin, until: int | None = None) -> list[TwinEvent]:
    events: list[TwinEvent] = []
    while (at := twin.next_at()) is not None and (until is None or at <= until):
        events += twin.advance(at)
    return events


def first_tokens(events: Iterable[TwinEvent]) -> dict[str, int]:
    return {event.id: event.at for event in events if isinstance(event, TokenOut) and event.first}


# --- thrash-8-slots: sixteen adapters in turn on eight slots


def cycle(adapters: int) -> list[str]:
    return [row["adapter"] for row in given("thrash-8-slots", f"trace_{adapters}_adapters.jsonl")]


EXPECT = given("thrash-8-slots", "expect.json")
SLOTS: int = EXPECT["slots"]


def loads_of(names: list[str], slots: int, host_entries: int) -> int:
    tiers = EngineTiers(slots, host_entries)
    return sum(tiers.use(name).activated for name in names)


def test_a_working_set_beyond_the_slots_hits_nothing_and_a_split_hits_all_but_the_first() -> None:
    assert loads_of(cycle(8), SLOTS, SLOTS) == EXPECT["loads_8_adapters"]
    sixteen = cycle(16)
    assert loads_of(sixteen, SLOTS, SLOTS) == EXPECT["loads_16_adapters"] == len(sixteen)
    order = list(dict.fromkeys(sixteen))
    halves = [[name for name in sixteen if (order.index(name) < 8) == first] for first in (True, False)]
    assert sum(loads_of(half, SLOTS, SLOTS) for half in halves) == EXPECT["loads_16_on_two_replicas_split_8_8"]


def test_more_host_memory_spares_reads_but_no_activation_and_sixteen_slots_spare_both() -> None:
    sixteen = cycle(16)
    assert loads_of(sixteen, SLOTS, 64) == EXPECT["loads_16_adapters"]
    assert loads_of(sixteen, 16, 16) == 16


def loads_under(leaves: Callable[[list[str], list[str]], str], names: list[str], slots: int) -> int:
    """Misses of ``names``; ``leaves`` picks who goes, of those held (first in, first) and of the uses to come."""
    held: list[str] = []
    loads = 0
    for number, name in enumerate(names):
        if name in held:
            continue
        loads += 1
        if len(held) == slots:
            held.remove(leaves(held, names[number:]))
        held.append(name)
    return loads


def first_in(held: list[str], _: list[str]) -> str:
    return held[0]


def used_last(held: list[str], to_come: list[str]) -> str:
    return max(held, key=lambda name: to_come.index(name) if name in to_come else len(to_come))


def test_first_in_first_out_hits_nothing_either_and_no_rule_at_all_comes_near_a_split() -> None:
    assert (loads_under(first_in, [*"abaca"], 2), loads_of([*"abaca"], 2, 2)) == (4, 3)  # where the two rules differ
    sixteen = cycle(16)
    assert loads_under(first_in, sixteen, SLOTS) == loads_of(sixteen, SLOTS, SLOTS) == len(sixteen)
    # Who knows what comes does hit on a cycle, by letting the newest go, and still loads thrice as often as a split.
    assert len(sixteen) > loads_under(used_last, sixteen, SLOTS) > 3 * EXPECT["loads_16_on_two_replicas_split_8_8"]


def twin_of(adapters: int, every_s: float) -> tuple[Counter[type], Counter[type], int]:
    """The trace on one replica, a request every ``every_s``: what load calls moved, what requests moved, median TTFT in ps."""
    twin = ReplicaTwin(
        TwinProfile(slots=SLOTS, host_entries=SLOTS, load_overhead_ps=380 * PS_PER_MS, load_bytes_per_s=10**12)
    )
    names, began = cycle(adapters), 20 * PS_PER_S
    for name in dict.fromkeys(names):
        twin.register(0, name, 1000, 8)
    called = Counter(type(event) for event in [*advance(twin, began), *twin.advance(began)])
    events: list[TwinEvent] = []
    arrivals = [began + round(number * every_s * PS_PER_S) for number in range(len(names))]
    for number, (at, name) in enumerate(zip(arrivals, names, strict=True)):
        events += advance(twin, at)
        twin.submit(at, TwinRequest(str(number), name, 100, 8))
        events += twin.advance(at)
    events += advance(twin)
    firsts = first_tokens(events)
    waits = sorted(firsts[str(number)] - at for number, at in enumerate(arrivals))
    return called, Counter(type(event) for event in events), waits[len(waits) // 2]


def test_the_twin_loads_as_often() -> None:
    called, moved, _ = twin_of(8, every_s=1)
    assert (called[Loaded] + moved[Loaded], called[Activated] + moved[Activated]) == (EXPECT["loads_8_adapters"],) * 2
    _, moved, _ = twin_of(16, every_s=1)
    assert (moved[Loaded], moved[Activated]) == (EXPECT["loads_16_adapters"],) * 2


def test_the_time_to_first_token_collapses_as_it_did_elsewhere() -> None:
    # 158 times there, on other hardware and with loads of unknown cost: that it collapses is the same, not how far.
    elsewhere = EXPECT["observed_elsewhere"]
    assert elsewhere["ttft_p50_ms_16"] / elsewhere["ttft_p50_ms_8"] > 100
    (*_, eight), (*_, sixteen) = (twin_of(adapters, every_s=0.25) for adapters in (8, 16))
    assert sixteen / eight > 100


def test_the_ledger_names_the_working_set_and_what_would_hold_it() -> None:
    found = limiting(
        ledger_of(
            replica(
                slots=seen(SLOTS, "slots"),
                slots_used=seen(SLOTS, "slots"),
                host_limit=seen(64, "adapters"),
                working_set=seen(16, "adapters"),
                loads=seen(0, "per minute"),
                activations=seen(240, "per minute"),  # 4 requests a second, none of them a hit
            )
        )
    )
    assert found.pool == "adapters"
    assert any("240.0 activations a minute of 16 adapters in 8 slots" in sign.statement for sign in found.evidence)
    levers = {lever.name: lever for lever in found.levers}
    more, split = levers["more slots"], levers["affinity"]
    assert more.statement == "8 more hold the working set: 8 GiB or 8,192 KV tokens less for KV"
    assert split.statement == "fewer adapters on this replica, more on others"
    assert (more.frees.value, split.frees.value) == (-8 * GIB, 0)
    assert "more host entries" not in levers


# --- hol-max-loras: a fourth adapter on three slots

QUEUE = given("hol-max-loras", "queue.json")
HOL = given("hol-max-loras", "expect.json")
NAMES = ("A", "B", "C", "D")
START = PS_PER_S


def queued(
    slots: int = QUEUE["max_loras"],
    output: int = 20,
    of: tuple[str, ...] = ("base", *NAMES),
    **changes: Any,
) -> ReplicaTwin:
    """What the queue of the case asks ``of``, all there at once, on a replica that knows all four adapters."""
    twin = ReplicaTwin(TwinProfile(slots=slots, host_entries=8, **changes))
    for name in NAMES:
        twin.register(0, name, 1000, 16)
    advance(twin, START)
    twin.advance(START)
    for number, asked in enumerate(QUEUE["queue"]):
        if asked not in of:
            continue
        adapter = None if asked == "base" else asked
        twin.submit(START, TwinRequest(f"{asked}{number}", adapter, 4, output))
    return twin


def test_requests_behind_one_that_lacks_a_slot_are_scheduled_and_those_of_the_fourth_adapter_left() -> None:
    twin = queued()
    began = first_tokens(twin.advance(START))
    step = twin.next_at()
    assert step is not None
    sample = twin.sample(START)
    expect = HOL["skip_ahead"]
    assert (sample.running, sample.waiting) == (expect["scheduled"], len(expect["left"]))
    began |= first_tokens(twin.advance(step))
    left = [f"{asked}{n}" for n, asked in enumerate(QUEUE["queue"]) if f"{asked}{n}" not in began]
    assert [key[0] for key in left] == expect["left"]
    assert len(began) == expect["scheduled"]


def test_a_layout_that_stops_at_the_first_misfit_leaves_those_behind_it_too() -> None:
    # S-LoRA takes requests in order up to the first that does not fit: here three adapters of 64 cells do, four never.
    twin = queued(output=1, layout="unified", kv_blocks=250, block_size=1)
    twin.advance(START)
    sample = twin.sample(START)
    expect = HOL["stop_at_first_misfit"]
    assert (sample.running, sample.waiting) == (expect["scheduled"], expect["left"])


def test_the_oldest_wait_of_each_adapter_shows_who_is_kept_out() -> None:
    firsts = first_tokens(advance(queued()))
    oldest = {name: max(at - START for key, at in firsts.items() if key.startswith(name)) for name in ("base", *NAMES)}
    assert len({oldest[name] for name in ("base", "A", "B", "C")}) == 1
    assert oldest["D"] > 5 * oldest["A"]


def test_what_waits_lacks_a_slot_while_kv_is_free_and_the_ledger_says_so() -> None:
    twin = queued()
    twin.advance(START)
    sample = twin.sample(START)
    assert sample.kv_used_blocks < sample.kv_blocks // 2
    slots = seen(QUEUE["max_loras"], "slots")
    found = limiting(
        ledger_of(
            replica(
                slots=slots,
                slots_used=slots,
                working_set=seen(len(sample.active), "adapters"),
                blocks_total=seen(sample.kv_blocks, "blocks"),
                blocks_free=seen(sample.kv_blocks - sample.kv_used_blocks, "blocks"),
                waiting_requests=seen(sample.waiting, "requests"),
                blocked_requests=seen(sample.waiting, "requests"),
            )
        )
    )
    assert (found.pool, found.also) == ("adapters", ())
    free = f"{1 - sample.kv_used_blocks / sample.kv_blocks:.0%} of the KV blocks are free"
    says = f"{HOL['skip_ahead']['left'].count('D')} requests wait because other adapters hold all slots, while {free}"
    assert says in [sign.statement for sign in found.evidence]
    levers = {lever.name: lever.statement for lever in found.levers}
    assert "1 more hold the working set" in levers["more slots"]
    assert levers["affinity"] == "fewer adapters on this replica, more on others"


def test_with_the_fourth_adapter_elsewhere_all_run_at_once() -> None:
    asked = Counter(QUEUE["queue"])
    for of in (("base", *NAMES[:3]), NAMES[3:]):
        twin = queued(of=of)
        twin.advance(START)
        sample = twin.sample(START)
        assert (sample.running, sample.waiting) == (sum(asked[name] for name in of), 0)


@pytest.mark.parametrize("slots", [3, 4])
def test_while_the_others_keep_coming_the_fourth_never_runs_unless_there_is_another_slot(slots: int) -> None:
    twin = queued(slots, output=40)
    seen_tokens, at = first_tokens(twin.advance(START)), START
    for round_ in range(60):  # each of A, B and C always has one running when the next comes
        at += 100 * PS_PER_MS
        seen_tokens |= first_tokens(advance(twin, at))
        for name in NAMES[:3]:
            twin.submit(at, TwinRequest(f"{name}later{round_}", name, 4, 40))
        seen_tokens |= first_tokens(twin.advance(at))
    assert any(key.startswith("D") for key in seen_tokens) == (slots == 4)
    seen_tokens |= first_tokens(advance(twin))  # they stop coming: draining is what else helps
    assert sum(key.startswith("D") for key in seen_tokens) == 3
