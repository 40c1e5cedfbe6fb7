"""The order in which a step uses its adapters, and what it moves because of it."""

import random
from collections import Counter, OrderedDict

import pytest

from loraledger.twin.events import Activated, Evicted, Loaded, TwinEvent, TwinRequest
from loraledger.twin.profile import TwinProfile
from loraledger.twin.replica import ReplicaTwin
from loraledger.twin.requests import PLACE, Adapter
from loraledger.twin.slots import SlotStore

ORDERED = [adapter.name for adapter in sorted((Adapter(c, c, 0, 1) for c in "abcdefghij"), key=PLACE)]
"""Names in the order in which a step uses them."""


def activated_when(leaving: str, joining: str, slots: int = 4, pinned: bool = False) -> list[str]:
    """Four adapters run, perhaps one of them pinned; while ``leaving`` ends, ``joining`` comes. What the step of that moves."""
    running = [name for name in ORDERED[1:6] if name != joining][:4]
    twin = ReplicaTwin(TwinProfile(slots=slots, activation_ps=10))
    for name in (joining, *running, *["idle"] * (slots - 4)):
        twin.register(0, name, 0, 1)
    at = 10**13
    twin.advance(at)
    if pinned:
        twin.move(at, running[0], "pin")
    for name in running:
        twin.submit(at, TwinRequest(name, name, 1, 2 if name == leaving else 9))
    twin.advance(at)
    events: list[TwinEvent] = []
    twin.submit(at + 1, TwinRequest("late", joining, 1, 1))
    while (upcoming := twin.next_at()) is not None:
        events += twin.advance(upcoming)
    return [event.name for event in events if isinstance(event, Activated)]


def test_an_adapter_that_comes_before_the_one_that_left_moves_all_between() -> None:
    first, one, two, three, four, _ = ORDERED[:6]
    assert activated_when(leaving=four, joining=first) == [first, one, two, three]
    assert activated_when(leaving=two, joining=first) == [first, one]


def test_an_adapter_that_comes_after_the_one_that_left_moves_alone() -> None:
    _, one, _, three, four, last = ORDERED[:6]
    assert activated_when(leaving=one, joining=last) == [last]
    assert activated_when(leaving=three, joining=four) == [four]


def test_beside_a_pin_nobody_of_the_batch_is_moved() -> None:
    first, *_, four, _ = ORDERED[:6]
    assert activated_when(leaving=four, joining=first, pinned=True) == [first]


def test_what_runs_is_still_passed_over_after_the_last_pin_has_gone() -> None:
    twin = ReplicaTwin(TwinProfile(slots=3, host_entries=9, activation_ps=10))
    for name in ("pinned", "long", "b"):
        twin.register(0, name, 0, 1)
    for name in "cd":
        twin.register(0, name, 0, 1)
    for name in ("pinned", "long", "b"):
        twin.move(0, name, "activate")
    at, events = 10**13, twin.advance(10**13)
    twin.move(at, "pinned", "pin")
    twin.submit(at, TwinRequest("long", "long", 1, 900))
    twin.advance(at + 1)
    twin.move(at + 2, "pinned", "unpin")
    events.clear()
    for name in "bcd":
        twin.submit(at + 3, TwinRequest(name, name, 1, 1))
        at += 10**12
        events += twin.advance(at)
    assert twin.sample(at).active == ("long",)
    assert [event.name for event in events if isinstance(event, Evicted)] == ["pinned", "b"]


def test_with_a_slot_to_spare_nobody_of_the_batch_is_moved() -> None:
    first, *_, four, _ = ORDERED[:6]
    assert activated_when(leaving=four, joining=first, slots=5) == [first]


class Name:
    """A name with a hash of its own, as a string's is in one process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.hash = random.Random(number).getrandbits(60)

    def __hash__(self) -> int:
        return self.hash


class Engine:
    """vLLM's two lists and the set that it walks in each step."""

    def __init__(self, slots: int, host_entries: int) -> None:
        self.slots, self.host_entries = slots, host_entries
        self.active: OrderedDict[Name, None] = OrderedDict()
        self.host: OrderedDict[Name, None] = OrderedDict()
        self.activations = self.loads = 0

    def step(self, batch: list[Name]) -> None:
        for name in set(batch):
            if name not in self.host:
                self.loads += 1
                if len(self.host) == self.host_entries:
                    oldest, _ = self.host.popitem(last=False)
                    self.active.pop(oldest, None)
            self.host[name] = None
            self.host.move_to_end(name)
            if name not in self.active:
                self.activations += 1
                if len(self.active) == self.slots:
                    self.active.popitem(last=False)
            self.active[name] = None
            self.active.move_to_end(name)


def batches(slots: int, adapters: int, steps: int) -> list[list[int]]:
    """Of each step, in the order of joining: two in three changes come while all slots are in flight."""
    draw, batch, found = random.Random(slots), list[int](), []
    for _ in range(steps):
        leaving = draw.choice((0, 1, 1, 2)) if len(batch) == slots else 0
        for _ in range(leaving):
            batch.pop(draw.randrange(len(batch)))
        for _ in range(min(slots - len(batch), draw.choice((1, 1, 2)))):
            batch.append(draw.choice([number for number in range(adapters) if number not in batch]))
        found.append(list(batch))
    return found


@pytest.mark.parametrize(("slots", "host_entries"), [(4, 20), (8, 8), (8, 40), (24, 60)])
def test_moves_are_as_many_as_those_of_an_engine_that_walks_a_set(slots: int, host_entries: int) -> None:
    numbers, changes = 3 * host_entries, 0
    theirs: Counter[str] = Counter()
    ours: Counter[str] = Counter()
    for process in range(8):
        names = [Name(process * 1000 + number) for number in range(numbers)]
        adapters = [Adapter(name, name, 0, 1) for name in (f"{process}-{number}" for number in range(numbers))]
        engine, store = (
            Engine(slots, host_entries),
            SlotStore(TwinProfile(slots=slots, host_entries=host_entries), None),
        )
        events: list[TwinEvent] = []
        before: list[int] = []
        for batch in batches(slots, numbers, 500):
            engine.step([names[number] for number in batch])
            joined = [adapters[number] for number in batch if number not in before]
            left = [adapters[number] for number in before if number not in batch]
            store.step(dict.fromkeys((adapters[number] for number in batch), 1), joined, left, 0, events)
            assert all(store.tier(adapters[number]) == "gpu" for number in batch)
            before, changes = batch, changes + len(joined)
        theirs.update(load=engine.loads, activation=engine.activations)
        ours.update(
            "load" if isinstance(event, Loaded) else "activation"
            for event in events
            if isinstance(event, Loaded | Activated)
        )
    assert ours == pytest.approx(theirs, rel=0.05)
    assert ours["activation"] > 1.2 * changes
