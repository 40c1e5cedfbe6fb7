"""Our account of one rank against the probe's own replay, event by event, on any sequence that an engine could tell."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger.engines import residency as residency_module
from loraledger.engines.residency import Residency

Json = dict[str, Any]
SOURCE = Path(__file__).parents[2] / "probe/src/loraledger_probe/replay.py"


@pytest.fixture(scope="module")
def replay() -> ModuleType:
    """The probe's pure replay, a module of another distribution."""
    spec = importlib.util.spec_from_file_location("replay_of_the_probe", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(adapter: int) -> str:
    return f"a{adapter}@"


class Engine:
    """Two lists and their slots as vLLM keeps them; each move is appended to ``events``."""

    def __init__(self, slots: int, entries: int) -> None:
        self.slots: list[int | None] = [None] * slots
        self.entries = entries
        self.active: list[int] = []
        self.host: list[int] = []
        self.events: list[Json] = []

    def emit(self, kind: str, **fields: Any) -> None:
        n = len(self.events) + 1
        self.events.append({"seq": n, "pid": 1, "n": n, "role": "worker", "rank": 0, "kind": kind, **fields})

    def use(self, adapter: int) -> None:
        if adapter not in self.host:
            if len(self.host) >= self.entries:
                self.evict(self.host[0])
            self.emit("load_start", id=adapter, name=name_of(adapter))
            self.host.append(adapter)
            self.emit("load_end", id=adapter, name=name_of(adapter), bytes=10 * adapter)
        if adapter not in self.active:
            if None not in self.slots:
                self.leave(self.active[0], "lru")
            slot = self.slots.index(None)
            self.slots[slot] = adapter
            self.active.append(adapter)
            self.emit("activation_start", slot=slot, id=adapter, name=name_of(adapter))
            self.host.remove(adapter)
            self.host.append(adapter)
            self.emit("activation_end", slot=slot, id=adapter, name=name_of(adapter))

    def touch(self, adapters: list[int]) -> None:
        ids = [adapter for adapter in adapters if adapter in self.active]
        for adapter in ids:
            for order in (self.host, self.active):
                order.remove(adapter)
                order.append(adapter)
        self.emit("touch", ids=ids)

    def leave(self, adapter: int, cause: str) -> None:
        slot = self.slots.index(adapter)
        self.slots[slot] = None
        self.active.remove(adapter)
        self.emit("slot_evict", slot=slot, id=adapter, name=name_of(adapter), cause=cause)

    def evict(self, adapter: int) -> None:
        if adapter in self.host:
            self.host.remove(adapter)
            self.emit("host_evict", id=adapter, name=name_of(adapter), cause="lru")
            if adapter in self.active:
                self.leave(adapter, "host_evict")

    def reset(self) -> None:
        self.emit("slots_allocated", slots=len(self.slots))
        self.slots, self.active, self.host = [None] * len(self.slots), [], []

    def snapshot(self) -> Json:
        host = [{"id": a, "name": name_of(a), "bytes": 10 * a, "pinned": False} for a in self.host]
        worker = {"pid": 1, "rank": 0, "n": len(self.events), "slots": list(self.slots)}
        return {"host": host, "workers": [worker | {"slot_order": list(self.active), "host": list(self.host)}]}


acts = st.one_of(
    st.tuples(st.just("use"), st.integers(1, 7)),
    st.tuples(st.just("evict"), st.integers(1, 7)),
    st.tuples(st.just("touch"), st.lists(st.integers(1, 7), unique=True, max_size=4)),
    st.tuples(st.sampled_from(("reset", "other")), st.just(0)),
)


def perform(engine: Engine, act: tuple[str, Any]) -> None:
    match act:
        case "use", adapter:
            engine.use(adapter)
        case "evict", adapter:
            engine.evict(adapter)
        case "touch", adapters:
            engine.touch(adapters)
        case "reset", _:
            engine.reset()
        case _:
            engine.emit("worker_cost", steps=1)


@given(
    slots=st.integers(1, 3),
    more=st.integers(0, 3),
    before=st.lists(acts),
    after=st.lists(acts),
    repeat=st.integers(0, 9),
)
def test_one_rank_is_rebuilt_as_the_probes_own_replay_and_the_engine_have_it(
    replay: ModuleType, slots: int, more: int, before: list[Any], after: list[Any], repeat: int
) -> None:
    engine = Engine(slots, slots + more)
    for act in before:
        perform(engine, act)
    snapshot, known = engine.snapshot(), len(engine.events)
    ours, theirs = Residency(snapshot), replay.Residency.from_snapshot(snapshot)
    for act in after:
        perform(engine, act)
    for event in engine.events[max(0, known - repeat) :]:  # some that the snapshot contains
        assert ours.contains(event) == (event["n"] <= known)
        lists = ours.host, ours.active
        moved = ours.apply(event)
        theirs.apply(event)
        assert ours.host == tuple(map(name_of, theirs.host))
        assert ours.active == tuple(map(name_of, theirs.slot_order))
        assert moved or (ours.host, ours.active) == lists, "a move that was not said to be one"
    assert ours.host == tuple(map(name_of, engine.host))
    assert ours.active == tuple(map(name_of, engine.active))
    ours.forget_gone()
    assert ours.bytes_of(ours.host) == tuple(10 * adapter for adapter in engine.host)


@given(st.lists(st.tuples(st.integers(0, 2), acts), max_size=40))
def test_of_several_ranks_only_what_all_have_counts(script: list[tuple[int, Any]]) -> None:
    ranks = [Engine(2, 4) for _ in range(3)]
    empty = {"pid": 1, "n": 0, "slots": [None, None], "slot_order": [], "host": []}
    ours = Residency({"host": [], "workers": [{**empty, "rank": rank} for rank in range(3)]})
    for rank, act in script:
        told = len(ranks[rank].events)
        perform(ranks[rank], act)
        for event in ranks[rank].events[told:]:
            ours.apply({**event, "rank": rank})
    first, *others = ranks
    assert ours.host == tuple(name_of(a) for a in first.host if all(a in other.host for other in others))
    assert ours.active == tuple(name_of(a) for a in first.active if all(a in other.active for other in others))


def test_names_of_what_is_gone_are_forgotten_and_those_of_what_stays_are_not() -> None:
    engine = Engine(1, 2)
    ours = Residency(engine.snapshot())
    for adapter in (1, 2, 3):
        engine.use(adapter)
    for event in engine.events:
        ours.apply(event)
    ours.forget_gone()
    assert ours.bytes_of((name_of(1), name_of(2), name_of(3))) == (None, 20, 30)


def test_a_host_cache_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "MOST", 5)
    engine = Engine(1, 1000)
    ours = Residency(engine.snapshot())
    for adapter in range(1, 7):
        engine.use(adapter)
    *before, last = [event for event in engine.events if event["kind"] == "load_end"]
    for event in before:
        ours.apply(event)
    with pytest.raises(ValueError, match="6 adapters"):
        ours.apply(last)
