from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import pytest

from engines.scripted import ScriptedEngine
from loraledger.engines import probe as probe_module
from loraledger.engines.probe import LAG, ProbeFollower, Skew
from loraledger.engines.protocol import ReplicaTarget
from loraledger.engines.vllm import VllmDriver
from loraledger.errors import TargetError
from loraledger.events import (
    ActivationObserved,
    CommandDone,
    CommandFailed,
    EngineFinished,
    Event,
    EvictionObserved,
    FloorObserved,
    LoadObserved,
    Move,
    ProbeLost,
    ReplicaDown,
    ReplicaUp,
    StepsObserved,
    TiersObserved,
    decode_event,
    encode,
)

KEY = "a key of the probe"
MS = 1_000_000
HOUR = 3_600_000 * MS
Json = dict[str, Any]
E = TypeVar("E", bound=Event)


@dataclass
class Rank:
    """One rank process: its lists, least recently used first, and how many events it emitted."""

    n: int = 0
    host: list[int] = field(default_factory=list)
    active: list[int] = field(default_factory=list)


@dataclass
class ScriptedProbe:
    """Stands for an engine's probe on a real socket. ``offset``: how far its clock is ahead of ours, in ns."""

    boot: str = "b1"
    ranks: dict[int, Rank] = field(default_factory=lambda: {0: Rank()})
    names: dict[int, str] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    events: list[Json] = field(default_factory=list)
    lost: int = 0
    spool_lost: int = 0
    offset: int = 0
    more: Json = field(default_factory=dict)
    """Fields of the snapshot that replace the usual ones."""
    replies: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Status and body by path, in place of the usual answer."""
    calls: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    def restart(self) -> None:
        """Another boot, with nothing in it."""
        self.boot = f"b{int(self.boot[1:]) + 1}"
        self.ranks = {rank: Rank() for rank in self.ranks}
        self.events.clear()
        self._news.set()

    def count(self, path: str) -> int:
        return sum(urlsplit(call).path == path for call in self.calls)

    def now(self) -> Json:
        return {"mono_ns": time.monotonic_ns(), "wall_ns": time.time_ns() + self.offset}

    def emit(self, kind: str, rank: int | None = 0, /, **fields: Any) -> None:
        """One event; of a worker if it has a rank."""
        n = 0
        if rank is not None:
            self.ranks[rank].n += 1
            n = self.ranks[rank].n
        role = fields.pop("role", "worker" if rank is not None else "core")
        head = {"seq": len(self.events) + 1, "pid": 100 + (rank or 0), "n": n, "role": role, "rank": rank, "kind": kind}
        self.events.append({**head, **self.now(), **fields})
        self._news.set()

    def use(
        self, adapter: int, name: str, rank: int = 0, slots: int = 2, entries: int = 4, cause: str = "step"
    ) -> None:
        """What a rank does and tells when a step needs an adapter."""
        state = self.ranks[rank]
        self.names[adapter] = name
        if adapter not in state.host:
            if len(state.host) >= entries:
                self.evict(state.host[0], rank)
            state.host.append(adapter)
            self.emit("load_end", rank, id=adapter, name=name, bytes=1000 + adapter, dur_ns=7 * MS, cause=cause)
        if adapter not in state.active:
            if len(state.active) >= slots:
                self.leave_slot(state.active[0], rank, "lru")
            state.active.append(adapter)
            self.emit("activation_start", rank, slot=0, id=adapter, name=name, cause=cause)
            self.emit("activation_end", rank, slot=0, id=adapter, name=name, dur_ns=2 * MS, cause=cause)
        for order in (state.host, state.active):
            order.remove(adapter)
            order.append(adapter)
        self.emit("touch", rank, ids=[adapter])

    def evict(self, adapter: int, rank: int = 0, cause: str = "lru") -> None:
        state = self.ranks[rank]
        state.host.remove(adapter)
        self.emit("host_evict", rank, id=adapter, name=self.names[adapter], bytes=1, cause=cause, by=None)
        if adapter in state.active:
            self.leave_slot(adapter, rank, "host_evict")

    def leave_slot(self, adapter: int, rank: int, cause: str) -> None:
        self.ranks[rank].active.remove(adapter)
        self.emit("slot_evict", rank, slot=0, id=adapter, name=self.names[adapter], cause=cause, by=None)

    def snapshot(self) -> Json:
        first = self.ranks[0]
        host = [
            {"id": a, "name": self.names[a], "path": "/x", "bytes": 1000 + a, "rank": 8, "pinned": a in self.pinned}
            for a in first.host
        ]
        workers = [
            {"pid": 100 + rank, "rank": rank, "n": state.n, "slots": [None, None], "running": {}}
            | {"slot_order": list(state.active), "host": list(state.host)}
            for rank, state in self.ranks.items()
        ]
        usual = {"schema": 1, "boot": self.boot, "seq": len(self.events), "taken": self.now(), "host": host}
        return {**usual, "workers": workers, "allocated": None, "floor": [], "kv": None, **self.more}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                target = head[0].split(" ")[1]
                self.calls.append(target)
                given = [line.partition(" ")[2] for line in head if line.lower().startswith("authorization")]
                status, text = await self._answer(target, given == [f"Bearer {KEY}"])
                data = text.encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, target: str, allowed: bool) -> tuple[int, str]:
        path = urlsplit(target).path
        if path in self.replies:
            return self.replies[path]
        if not allowed:
            return 401, refusal("wrong_key")
        if path == "/loraledger/residency":
            return 200, json.dumps(self.snapshot())
        if path == "/loraledger/events":
            return await self._page({name: values[0] for name, values in parse_qs(urlsplit(target).query).items()})
        return 404, json.dumps({"detail": "Not Found"})

    async def _page(self, query: dict[str, str]) -> tuple[int, str]:
        after, boot = int(query["after"]), self.boot
        if query["boot"] != boot or after > len(self.events):
            return 409, refusal("boot_changed")
        self.waits.append(float(query["wait_s"]))
        with suppress(TimeoutError):
            async with asyncio.timeout(float(query["wait_s"])):
                while len(self.events) <= after and self.boot == boot and not self.lost:
                    self._news.clear()
                    await self._news.wait()
        fresh = self.events[after:]
        page = {"boot": boot, "first_seq": 1, "next_seq": after + len(fresh), "lost": self.lost}
        return 200, json.dumps({**page, "spool_lost": self.spool_lost, "now": self.now(), "events": fresh})


def refusal(code: str, message: str = "no") -> str:
    return json.dumps({"error": {"message": message, "type": "X", "param": None, "code": code}})


class Followed:
    """A follower at work, and all that it fed."""

    def __init__(self, url: str, key: str = KEY) -> None:
        target = ReplicaTarget("gpu-0", url, probe_key=key, probe_timeout=1000 * MS)
        self.events: list[Event] = []
        self._news = asyncio.Event()
        self.follower = ProbeFollower(target, self._feed, time.time_ns)
        self.task = asyncio.create_task(self.follower.run())

    def _feed(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    async def nth(self, kind: type[E], number: int = 1, within: float = 20.0) -> E:
        await self.until(lambda: len(self.all(kind)) >= number, within)
        return self.all(kind)[number - 1]

    async def until(self, condition: Callable[[], bool], within: float = 20.0) -> None:
        async with asyncio.timeout(within):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def lists(self, host: tuple[str, ...], active: tuple[str, ...]) -> TiersObserved:
        """Wait until the lists that were told last are these."""
        await self.until(lambda: self._shows(host, active))
        return self.all(TiersObserved)[-1]

    def _shows(self, host: tuple[str, ...], active: tuple[str, ...]) -> bool:
        told = self.all(TiersObserved)
        return bool(told) and (told[-1].host, told[-1].active) == (host, active)


Follow = Callable[..., Awaitable[Followed]]


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "AGAIN_S", (0.02, 0.05))
    monkeypatch.setattr(probe_module, "GAP_S", 0.005)
    monkeypatch.setattr(probe_module, "RETELL", HOUR)  # what is told is told for a reason


@pytest.fixture
async def probe() -> AsyncIterator[ScriptedProbe]:
    probe = ScriptedProbe()
    await probe.start()
    yield probe
    await probe.kill()


@pytest.fixture
async def follow(probe: ScriptedProbe) -> AsyncIterator[Follow]:
    started: list[Followed] = []

    async def begin(key: str = KEY) -> Followed:
        followed = Followed(probe.url, key)
        started.append(followed)
        followed.follower.look()
        return followed

    yield begin
    for followed in started:
        assert not followed.task.done(), "the follower ended by itself"
        assert [decode_event(encode(event)) for event in followed.events] == followed.events, (
            "the journal reads it back"
        )
        followed.task.cancel()
        await asyncio.gather(followed.task, return_exceptions=True)
        await followed.follower.close()


# --- a snapshot, then events ------------------------------------------------------------------------------------------


async def test_nothing_is_asked_before_the_replica_is_up(probe: ScriptedProbe) -> None:
    followed = Followed(probe.url)
    await asyncio.sleep(0.1)
    assert probe.calls == []
    followed.task.cancel()
    await asyncio.gather(followed.task, return_exceptions=True)
    await followed.follower.close()


async def test_what_the_snapshot_shows_is_told_first(probe: ScriptedProbe, follow: Follow) -> None:
    for adapter, name in ((1, "a@1"), (2, "b@2"), (3, "c@3")):
        probe.use(adapter, name)
    probe.pinned = {3}
    kinds = {"kv_bytes": 50, "slot_pool_bytes": 20, "weights_bytes": None, "rank": 0, "kv_blocks": 9}
    probe.more = {"floor": [{**kinds, "rank": 1, "kv_bytes": 1}, kinds], "kv": {"block_tokens": 16}}
    probe.more["allocated"] = {"slots": 2, "bytes_per_slot": 10, "host_entries": 4, "max_lora_rank": 64}
    followed = await follow()
    tiers = await followed.nth(TiersObserved)
    assert (tiers.replica, tiers.host, tiers.active) == ("gpu-0", ("a@1", "b@2", "c@3"), ("b@2", "c@3"))
    assert (tiers.pinned, tiers.host_bytes) == (("c@3",), (1001, 1002, 1003))
    floor = followed.all(FloorObserved)[0]
    assert (floor.kv_bytes, floor.slot_pool, floor.weights, floor.kv_blocks) == (50, 20, None, 9)
    assert (floor.slots, floor.slot_bytes, floor.host_entries, floor.max_rank, floor.block_tokens) == (2, 10, 4, 64, 16)
    assert followed.all(LoadObserved) == [], "what the snapshot holds already is no move"


async def test_moves_are_told_one_by_one_and_the_lists_after_them(probe: ScriptedProbe, follow: Follow) -> None:
    for adapter in range(1, 5):
        probe.use(adapter, f"a{adapter}@")
    followed = await follow()
    await followed.nth(TiersObserved)
    probe.use(5, "a5@")
    await followed.lists(("a2@", "a3@", "a4@", "a5@"), ("a4@", "a5@"))
    load, activation = await followed.nth(LoadObserved), await followed.nth(ActivationObserved)
    assert (load.engine_name, load.took, load.bytes) == ("a5@", 7 * MS, 1005)
    assert (activation.engine_name, activation.took) == ("a5@", 2 * MS)
    evictions = [(e.engine_name, e.tier, e.cause) for e in followed.all(EvictionObserved)]
    assert evictions == [("a1@", "host", "lru"), ("a3@", "gpu", "lru")]
    assert isinstance(followed.events[-1], TiersObserved)


async def test_a_host_eviction_that_empties_a_slot_is_told_once(probe: ScriptedProbe, follow: Follow) -> None:
    probe.use(1, "a@")
    followed = await follow()
    await followed.nth(TiersObserved)
    probe.evict(1, cause="remove")
    await followed.lists((), ())
    assert [(e.engine_name, e.tier, e.cause) for e in followed.all(EvictionObserved)] == [("a@", "host", "remove")]


async def test_moves_of_the_warm_up_are_not_told(probe: ScriptedProbe, follow: Follow) -> None:
    followed = await follow()
    await followed.nth(TiersObserved)
    probe.use(901, "lora_901", cause="warmup")
    probe.evict(901, cause="reset")
    probe.use(1, "a@")
    await followed.lists(("a@",), ("a@",))
    kinds = LoadObserved | ActivationObserved | EvictionObserved
    moves = [event for event in followed.events if isinstance(event, kinds)]
    assert {move.engine_name for move in moves} == {"a@"}


async def test_events_that_the_snapshot_contains_move_nothing(probe: ScriptedProbe, follow: Follow) -> None:
    probe.use(1, "a@")
    probe.use(2, "b@")
    probe.more = {"seq": 0}  # the ring had not taken them in when the workers answered
    followed = await follow()
    await followed.lists(("a@", "b@"), ("a@", "b@"))
    probe.use(3, "c@")
    await followed.lists(("a@", "b@", "c@"), ("b@", "c@"))
    assert [load.engine_name for load in followed.all(LoadObserved)] == ["c@"]


async def test_two_copies_of_one_name_count_as_one(probe: ScriptedProbe, follow: Follow) -> None:
    for adapter, name in ((1, "a@"), (2, "b@"), (3, "a@")):  # 1 is the ghost of 3
        probe.use(adapter, name, slots=3)
    followed = await follow()
    await followed.lists(("b@", "a@"), ("b@", "a@"))
    probe.evict(1)
    probe.use(2, "b@")
    told = await followed.lists(("a@", "b@"), ("a@", "b@"))
    assert told.host_bytes == (1003, 1002)


async def test_only_what_every_rank_holds_counts_in_the_order_of_the_first(
    probe: ScriptedProbe, follow: Follow
) -> None:
    probe.ranks = {0: Rank(), 1: Rank()}
    followed = await follow()
    await followed.nth(TiersObserved)
    for adapter, name in ((1, "a@"), (2, "b@"), (3, "c@")):
        probe.use(adapter, name, rank=0, slots=3)
    probe.use(3, "c@", rank=1)
    probe.use(1, "a@", rank=1)
    await followed.lists(("a@", "c@"), ("a@", "c@"))
    assert [load.engine_name for load in followed.all(LoadObserved)] == ["a@", "b@", "c@"], "timed on one rank"
    probe.use(2, "b@", rank=1)
    await followed.lists(("a@", "b@", "c@"), ("a@", "b@"))


async def test_pins_by_command_show_until_unpinned_or_lost(probe: ScriptedProbe, follow: Follow) -> None:
    probe.use(1, "a@")
    probe.use(2, "b@")
    followed = await follow()
    await followed.nth(TiersObserved)

    async def pins_become(expected: tuple[str, ...]) -> None:
        await followed.until(lambda: followed.all(TiersObserved)[-1].pinned == expected)

    probe.emit("command", None, role="api", verb="pin", name="b@", refused="too_many_pins", dur_ns=1)
    probe.emit("command", None, role="api", verb="pin", name="a@", refused=None, dur_ns=1)
    await pins_become(("a@",))
    probe.emit("command", None, role="api", verb="unpin", name="a@", refused=None, dur_ns=1)
    await pins_become(())
    probe.emit("command", None, role="api", verb="pin", name="b@", refused=None, dur_ns=1)
    await pins_become(("b@",))
    probe.emit("pin_lost", id=2, name="b@", cause="lru", by=1)
    await pins_become(())


async def test_steps_of_one_reading_are_summed(probe: ScriptedProbe, follow: Follow) -> None:
    followed = await follow()
    await followed.nth(TiersObserved)
    usual = {
        "steps": 2,
        "tokens": 30,
        "dur_ns": 5,
        "preempted": 1,
        "recomputed_tokens": 8,
        "adapters": 1,
        "kv_free": 70,
    }
    probe.emit("step", None, **usual, blocked={"a@": 2, "b@": 1})
    probe.emit("step", None, **{**usual, "adapters": 2, "kv_free": 60}, blocked={"a@": 1})
    steps = await followed.nth(StepsObserved)
    assert (steps.steps, steps.tokens, steps.took, steps.preempted, steps.recomputed) == (4, 60, 10, 2, 16)
    assert (steps.blocked, steps.adapters, steps.kv_free) == ({"a@": 2, "b@": 1}, 2, 60)


@pytest.mark.parametrize(
    ("word", "tier"), [("slot", "gpu"), ("host", "host"), ("miss", "disk"), ("base", "base"), (None, None), ("x", None)]
)
async def test_how_a_request_went_is_told_in_the_words_of_tiers(
    probe: ScriptedProbe, follow: Follow, word: str | None, tier: str | None
) -> None:
    followed = await follow()
    await followed.nth(TiersObserved)
    times = {"queue_ns": 1, "prefill_ns": 20, "decode_ns": 3, "load_ns": 4, "activation_ns": 5, "stall_ns": 9}
    more = {"reason": "stop", "e2e_ns": 30, "prompt_tokens": 3, "cached_tokens": 2, "preemptions": 1, "access": word}
    probe.emit("request_finished", None, role="api", request="r-7", **times, **more)
    done = await followed.nth(EngineFinished)
    assert (done.request, done.queue, done.prefill, done.decode) == ("r-7", 1, 20, 3)
    assert (done.access, done.load, done.activation, done.stall) == (tier, 4, 5, 9)
    assert (done.cached_tokens, done.preemptions) == (2, 1)


async def test_readings_are_long_polls_and_lists_are_told_again_now_and_then(
    probe: ScriptedProbe, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "WAIT_S", 0.2)
    monkeypatch.setattr(probe_module, "RETELL", 500 * MS)
    followed = await follow()
    first, second = await followed.nth(TiersObserved), await followed.nth(TiersObserved, 2)
    assert second.at - first.at >= 500 * MS
    assert set(probe.waits) == {0.2}
    assert len(probe.waits) <= 5, "an idle engine is asked once a poll"


# --- starting again ---------------------------------------------------------------------------------------------------


async def test_another_boot_is_read_from_a_snapshot_at_once(probe: ScriptedProbe, follow: Follow) -> None:
    probe.use(1, "a@")
    followed = await follow()
    await followed.lists(("a@",), ("a@",))
    probe.restart()
    await followed.lists((), ())
    probe.use(1, "b@")
    await followed.lists(("b@",), ("b@",))
    assert followed.all(ProbeLost) == [], "the probe answered all the time"
    assert probe.count("/loraledger/residency") == 2


async def test_lost_events_lead_to_a_snapshot(probe: ScriptedProbe, follow: Follow) -> None:
    followed = await follow()
    await followed.nth(TiersObserved)
    probe.use(1, "a@")
    await followed.lists(("a@",), ("a@",))
    probe.ranks[0].host.append(2)  # no event tells of it
    probe.names[2] = "b@"
    probe.lost = 3
    probe.emit("worker_cost", steps=1, step_ns=1, probe_ns=1)
    await followed.until(lambda: probe.count("/loraledger/residency") > 1 or followed._shows(("a@", "b@"), ("a@",)))
    probe.lost = 0
    await followed.lists(("a@", "b@"), ("a@",))


async def test_a_growing_count_of_events_that_never_came_leads_to_a_snapshot(
    probe: ScriptedProbe, follow: Follow
) -> None:
    probe.spool_lost = 5  # from before: no reason by itself
    followed = await follow()
    await followed.nth(TiersObserved)
    probe.use(1, "a@")
    await followed.lists(("a@",), ("a@",))
    assert probe.count("/loraledger/residency") == 1
    probe.ranks[0].host.append(2)
    probe.names[2] = "b@"
    probe.spool_lost = 6
    probe.emit("worker_cost", steps=1, step_ns=1, probe_ns=1)
    await followed.lists(("a@", "b@"), ("a@",))
    assert probe.count("/loraledger/residency") == 2


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (401, refusal("wrong_key", "send the key"), "probe_wants_key"),
        (403, refusal("no_key_configured"), "probe_wants_key"),
        (404, json.dumps({"detail": "Not Found"}), "no_probe"),
        (404, "<html>", "no_probe"),
        (503, refusal("engine_unavailable"), "engine_unavailable"),
        (500, "oops", "http_500"),
        (200, "[1, 2]", "bad_reply"),
        (200, "not JSON", "bad_reply"),
        (200, "{}", "bad_reply"),
    ],
)
async def test_a_probe_that_does_not_serve_is_told_of_once_and_again_when_it_does(
    probe: ScriptedProbe, follow: Follow, status: int, body: str, code: str
) -> None:
    probe.replies["/loraledger/residency"] = (status, body)
    followed = await follow()
    lost = await followed.nth(ProbeLost)
    assert lost.reason.startswith(f"{code}: ")
    async with asyncio.timeout(20):
        while probe.count("/loraledger/residency") < 4:
            await asyncio.sleep(0.01)
    assert len(followed.all(ProbeLost)) == 1
    del probe.replies["/loraledger/residency"]
    await followed.nth(TiersObserved)
    probe.replies["/loraledger/residency"] = probe.replies["/loraledger/events"] = (status, body)
    probe.emit("worker_cost", steps=1, step_ns=1, probe_ns=1)
    await followed.nth(ProbeLost, 2)


async def test_a_key_that_is_wrong_is_named_with_its_remedy(follow: Follow) -> None:
    lost = await (await follow("another key")).nth(ProbeLost)
    assert "set probe of this replica" in lost.reason


async def test_an_engine_that_dies_and_comes_back_is_found_without_a_word_a_try(
    probe: ScriptedProbe, follow: Follow
) -> None:
    probe.use(1, "a@")
    followed = await follow()
    await followed.nth(TiersObserved)
    await probe.kill()
    await followed.nth(ProbeLost)
    await asyncio.sleep(0.3)
    assert [event.reason.partition(":")[0] for event in followed.all(ProbeLost)] in (
        ["connection_broken", "connect_failed"],
        ["connect_failed"],
    )
    told = len(followed.all(TiersObserved))
    probe.restart()
    await probe.start()
    assert (await followed.nth(TiersObserved, told + 1)).host == ()


BAD_EVENTS: list[Json] = [
    {"kind": "load_end", "id": 1, "name": 7, "dur_ns": 1},
    {"kind": "load_end", "id": 1, "name": "a", "dur_ns": "long"},
    {"kind": "load_end", "id": [1], "name": "a", "dur_ns": 1},
    {"kind": "load_end", "id": 1},
    {"kind": "touch", "ids": 5},
    {"kind": "slot_evict"},
    {"kind": "step", "steps": 1},
    {"kind": "step", "steps": 1, "tokens": 1, "dur_ns": 1, "preempted": 0, "recomputed_tokens": 0}
    | {"blocked": [1], "adapters": 1, "kv_free": 1},
    {"kind": "step", "steps": 10**30, "tokens": 1, "dur_ns": 1, "preempted": 0, "recomputed_tokens": 0}
    | {"blocked": {}, "adapters": 1, "kv_free": 1},
    {"kind": "request_finished", "request": 5, "queue_ns": 1, "prefill_ns": 1, "decode_ns": 1},
    {"kind": "request_finished", "request": "r", "queue_ns": 1.5, "prefill_ns": 1, "decode_ns": 1},
    {"kind": "command"},
    {"kind": None, "rank": {}},
]


@pytest.mark.parametrize("bad", BAD_EVENTS, ids=lambda event: str(event["kind"]))
async def test_an_event_of_another_shape_is_a_lost_probe_and_never_the_followers_end(
    probe: ScriptedProbe, follow: Follow, bad: Json
) -> None:
    followed = await follow()
    await followed.nth(TiersObserved)
    probe.emit("x", **bad)
    lost = await followed.nth(ProbeLost)
    assert lost.reason.startswith("bad_reply: ")
    await followed.nth(TiersObserved, 2)


@pytest.mark.parametrize(
    "more",
    [
        {"workers": 5},
        {"workers": [{"rank": 0}]},
        {"host": [{"id": 1}]},
        {"host": [5]},
        {"taken": None},
        {"taken": {"wall_ns": "noon"}},
        {"floor": {}, "allocated": "yes"},
        {"allocated": {"slots": "two"}},
        {"floor": [{"rank": 0, "kv_bytes": 1.5}]},
        {"seq": "x", "boot": None, "kv": [1]},
    ],
)
async def test_a_snapshot_of_another_shape_is_a_lost_probe_and_never_the_followers_end(
    probe: ScriptedProbe, follow: Follow, more: Json
) -> None:
    probe.more = more
    followed = await follow()
    assert (await followed.nth(ProbeLost)).reason.startswith("bad_reply: ")
    probe.more = {}
    told = len(followed.all(TiersObserved))
    await followed.nth(TiersObserved, told + 1)


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [-7, 0, 5])
async def test_the_lists_are_dated_by_our_clock_and_never_too_late(
    probe: ScriptedProbe, follow: Follow, hours: int
) -> None:
    probe.offset = hours * HOUR
    before = time.time_ns()
    followed = await follow()
    first = await followed.nth(TiersObserved)
    assert before - 1 * MS <= first.as_of <= first.at
    sent = time.time_ns()
    probe.use(1, "a@")
    told = await followed.lists(("a@",), ("a@",))
    assert sent - LAG - (told.at - before) <= told.as_of <= told.at - LAG


async def test_a_page_that_ends_long_ago_is_as_old_as_its_last_event(probe: ScriptedProbe, follow: Follow) -> None:
    followed = await follow()
    await followed.nth(TiersObserved)
    probe.offset = -60_000 * MS  # only the stamps of the events: the answer has the present
    probe.use(1, "a@")
    probe.offset = 0
    told = await followed.lists(("a@",), ("a@",))
    assert told.at - told.as_of >= 60_000 * MS


def test_the_difference_of_two_clocks_narrows_with_each_answer() -> None:
    skew = Skew()
    skew.see(theirs=1_000, asked=100, came=200)
    assert (skew.low, skew.high) == (800, 900)
    skew.see(theirs=2_000, asked=1_150, came=3_000)
    assert (skew.low, skew.high) == (800, 850)
    skew.see(theirs=3_000, asked=1_000, came=2_190)
    assert (skew.low, skew.high) == (810, 850)
    assert skew.ours(5_000) == 4_150, "the earliest that it can have been"


def test_clocks_that_moved_apart_begin_anew() -> None:
    skew = Skew()
    skew.see(theirs=1_000, asked=100, came=200)
    skew.see(theirs=9_000, asked=1_000, came=1_100)
    assert (skew.low, skew.high) == (7_900, 8_000)


def test_before_any_answer_the_clocks_are_taken_as_one() -> None:
    assert Skew().ours(5) == 5


# --- within the driver ------------------------------------------------------------------------------------------------


class Driven:
    """A driver of an engine whose probe listens elsewhere is not possible: the engine's own server answers for both."""

    def __init__(self, engine: ScriptedEngine, probe: ScriptedProbe) -> None:
        self.events: list[Event] = []
        target = ReplicaTarget("gpu-0", engine.url, scrape_interval=30 * MS, probe_timeout=1000 * MS, probe_key=KEY)
        self.driver = VllmDriver(target, self.events.append, time.time_ns, lambda name: name)
        self.task = asyncio.create_task(self.driver.run())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)

    def kinds(self) -> list[str]:
        told = [
            event for event in self.events if isinstance(event, ReplicaUp | ReplicaDown | TiersObserved | ProbeLost)
        ]
        return [type(event).__name__ for event in told]

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def lend(engine: ScriptedEngine, probe: ScriptedProbe) -> None:
    """Let the engine answer for the probe, as one server does: its snapshot, and no events for a while."""
    snapshot = probe.snapshot()
    engine.answers["/loraledger/residency"] = (200, snapshot)
    page = {"boot": probe.boot, "first_seq": 1, "next_seq": snapshot["seq"], "lost": 0, "spool_lost": 0}
    poll = f"/loraledger/events?after={snapshot['seq']}&boot={probe.boot}&wait_s=2"
    engine.answers[poll] = (200, {**page, "now": probe.now(), "events": []})
    engine.delays[poll] = 0.05


async def test_the_lists_are_told_after_the_replica_is_up_each_time_it_comes_up(probe: ScriptedProbe) -> None:
    engine = ScriptedEngine()
    await engine.start()
    probe.use(1, "a@")
    lend(engine, probe)
    driven = Driven(engine, probe)
    try:
        await driven.until(lambda: driven.kinds() == ["ReplicaUp", "TiersObserved"])
        engine.answers["/health"] = (503, "")  # the probe answers all the time
        await driven.until(lambda: driven.kinds()[-1] == "ReplicaDown")
        del engine.answers["/health"]
        await driven.until(lambda: driven.kinds() == ["ReplicaUp", "TiersObserved", "ReplicaDown", *driven.kinds()[:2]])
    finally:
        await driven.end()
        await engine.kill()


async def test_a_move_is_the_probes_to_carry_out_and_its_refusal_is_the_commands_failure(probe: ScriptedProbe) -> None:
    engine = ScriptedEngine()
    await engine.start()
    lend(engine, probe)
    path = "/loraledger/adapters/a%40b%2Fc/activate"
    engine.answers[path] = (200, {"name": "a@b/c", "verb": "activate", "activated": 3})
    engine.answers[path.replace("activate", "evict")] = (409, json.loads(refusal("in_use", "3 requests")))
    driven = Driven(engine, probe)
    try:
        driven.driver.perform(Move(1, "gpu-0", "a", "a@b/c", "activate"))
        driven.driver.perform(Move(2, "gpu-0", "a", "a@b/c", "evict"))
        await driven.until(lambda: any(isinstance(event, CommandFailed) for event in driven.events))
        (done,) = [event for event in driven.events if isinstance(event, CommandDone)]
        (failed,) = [event for event in driven.events if isinstance(event, CommandFailed)]
        assert (done.command, failed.command) == (1, 2)
        assert "in_use" in failed.reason
        assert "3 requests" in failed.reason
    finally:
        await driven.end()
        await engine.kill()


async def test_a_follower_that_is_asked_to_move_passes_the_probes_refusal_on(
    probe: ScriptedProbe, follow: Follow
) -> None:
    probe.replies["/loraledger/adapters/a/pin"] = (409, refusal("slots_busy", "3 adapters"))
    followed = await follow()
    with pytest.raises(TargetError, match="3 adapters") as caught:
        await followed.follower.move("a", "pin")
    assert caught.value.code == "slots_busy"
