"""A real kernel and data plane in front of replicas: ``r1`` does as the test tells it, ``r2`` is a healthy emulator.

Both are watched by real drivers. Requests are steered by draining the other replica until the first dispatch is out, so that a
second attempt may go anywhere. On each replica a stream runs beside, and must not notice anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from loraledger.conductor.conductor import Conductor
from loraledger.conductor.fold import Emitted, FoldState, RowFold
from loraledger.engines.emulator import EmulatorServer, EmulatorSettings
from loraledger.engines.emulator_text import Speech
from loraledger.engines.protocol import ReplicaTarget
from loraledger.engines.vllm import VllmDriver
from loraledger.events import Command, Dispatch, DrainAsked, Event
from loraledger.gateway.listener import DataPlane
from loraledger.gateway.performer import LivePerformer
from loraledger.gateway.settings import PlaneSettings, ReplicaAddress
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.settings import FleetSettings, Limits, ReplicaSpec, TenantSpec
from loraledger.kernel.state import FleetState, ReplicaState
from loraledger.record.tables import Row

from .support import (
    DONE,
    STREAM_HEAD,
    Answer,
    Awake,
    RawClient,
    Received,
    Script,
    ScriptedReplica,
    access,
    answer_plainly,
    chunk,
    event,
    json_answer,
    post,
    until,
)

MS = 1_000_000
SECOND = 1_000 * MS
METRICS = b"process_start_time_seconds 1.7e9\nvllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
CARD = {"id": "base", "object": "model", "root": "base", "parent": None}
PAGES = {
    "/health": json_answer(b""),
    "/metrics": json_answer(METRICS),
    "/version": json_answer({"version": "0.32.0"}),
    "/v1/models": json_answer({"object": "list", "data": [CARD]}),
}
"""What an engine in good health says, whatever becomes of the requests to it."""


def shut_port() -> int:
    """A port that refuses, and that the kernel gives to nobody meanwhile."""
    return 1


def asking(words: str, stream: bool, **more: Any) -> dict[str, Any]:
    return {"model": "base", "messages": [{"role": "user", "content": words}], "stream": stream, **more}


async def steadily(request: Received, writer: asyncio.StreamWriter) -> None:
    """A token each 10 ms until the client leaves."""
    writer.write(STREAM_HEAD)
    for number in range(3000):
        writer.write(chunk(event("base", {"content": f" {number}"})))
        await asyncio.sleep(0.01)
    writer.write(chunk(DONE) + b"0\r\n\r\n")


class Beside:
    """A stream that runs while something else goes wrong."""

    def __init__(self, client: RawClient, expected: str) -> None:
        self._client = client
        self._expected = expected
        self._answer = Answer(0, {}, b"", True)
        self._task = asyncio.create_task(self._read())

    @property
    def text(self) -> str:
        body = self._answer.body
        events = Answer(200, {}, body[: body.rfind(b"\n\n") + 2], True).events()
        return "".join(e["choices"][0]["delta"].get("content") or "" for e in events)

    async def goes_on(self) -> None:
        """It has missed nothing so far, and more of it comes."""
        before = len(self._answer.body)
        await until(lambda: len(self._answer.body) > before + 500 or self._task.done())
        assert not self._task.done(), self._answer
        assert self.text
        assert self._expected.startswith(self.text)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._client.close()

    async def _read(self) -> None:
        reader, answer = self._client.reader, self._answer
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        while size := int(await reader.readuntil(b"\r\n"), 16):
            answer.body += (await reader.readexactly(size + 2))[:-2]


class Performer(LivePerformer):
    """Remembers what was dispatched; ``steered`` is called once after the next dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatched: list[Dispatch] = []
        self.steered: Callable[[], None] | None = None

    def perform(self, command: Command) -> None:
        super().perform(command)
        if isinstance(command, Dispatch):
            self.dispatched.append(command)
            steered, self.steered = self.steered, None
            if steered is not None:
                steered()


class BadFleet:
    """``bad`` is what ``r1`` does with the next request that is not a stream beside (with each, if ``always``); then it is well."""

    def __init__(self, plane: PlaneSettings, limits: Limits, emulators: list[EmulatorServer]) -> None:
        self.rows: list[Row] = []
        self._clock = Awake()
        self.bad: Script | None = None
        self.always = False
        self.replica = ScriptedReplica(self._script)
        self.doubted: set[str] = set()
        self.performer = Performer()
        self._alarm_handle: asyncio.TimerHandle | None = None
        self._clients: list[RawClient] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._limits = limits
        self._plane_settings = plane
        self._emulators = emulators

    async def start(self) -> None:
        await self.replica.start()
        urls = [f"http://127.0.0.1:{self.replica.port}", *(emulator.url for emulator in self._emulators)]
        urls_by_name = {f"r{number}": url for number, url in enumerate(urls, 1)}
        specs = tuple(ReplicaSpec(name, 2, 4) for name in urls_by_name)
        fleet = FleetSettings(specs, (), (TenantSpec("acme", 1000),), base="base", limits=self._limits)
        fold = RowFold(FoldState("base", "c0ffee", "0"))
        self._conductor = Conductor(Fleet(fleet), fold, self.performer, self._clock, self._take, self._arm)
        addresses = {n: ReplicaAddress(n, "127.0.0.1", int(url.rsplit(":", 1)[1])) for n, url in urls_by_name.items()}
        self.plane = DataPlane(self._plane_settings, self.feed, self._clock, access(), addresses)
        drivers = {}
        for name, url in urls_by_name.items():
            target = ReplicaTarget(name, url, scrape_interval=100 * MS)
            drivers[name] = VllmDriver(target, self.feed, self._clock, lambda name: name)
        self.performer.plane, self.performer.drivers = self.plane, drivers
        await self.plane.start("127.0.0.1", 0)
        self._tasks = [asyncio.create_task(driver.run()) for driver in drivers.values()]
        await until(lambda: all(replica.up for replica in self.state.replicas.values()))

    async def stop(self) -> None:
        for client in self._clients:
            client.close()
        await self.plane.drain(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._alarm_handle is not None:
            self._alarm_handle.cancel()
        await self.replica.stop()

    @property
    def state(self) -> FleetState:
        return self._conductor.fleet.state

    @property
    def r1(self) -> ReplicaState:
        return self.state.replicas["r1"]

    def feed(self, event: Event) -> None:
        self._conductor.feed(event)
        self.doubted |= {name for name, replica in self.state.replicas.items() if replica.doubted}

    async def ask(self, body: object, on: str | None = None, name: str = "victim") -> Answer:
        """The answer to a request whose first attempt goes to ``on``."""
        client = await self.send(body, on, name)
        answer = await asyncio.wait_for(client.answer(), 30)
        client.close()
        return answer

    async def send(self, body: object, on: str | None, name: str) -> RawClient:
        client = await RawClient.to(self.plane.port)
        self._clients.append(client)
        if on is None:
            await client.send(post(body, X_Request_Id=name))
            return client
        before = len(self.performer.dispatched)
        self._drain(on, True)
        self.performer.steered = lambda: self._drain(on, False)
        await client.send(post(body, X_Request_Id=name))
        await until(lambda: self.performer.steered is None)
        assert self.performer.dispatched[before].replica == on
        return client

    async def beside(self, on: str) -> Beside:
        """A stream on ``on`` that has begun."""
        words = f"beside {on}"
        client = await self.send(asking(words, True, max_tokens=3000), on, words.replace(" ", "-"))
        counted = "".join(f" {number}" for number in range(3000))
        stream = Beside(client, counted if on == "r1" else Speech("base", f"user: {words}\n").text(3000))
        await stream.goes_on()
        return stream

    async def row(self, name: str = "victim") -> Row:
        """The one row of a request."""
        await until(lambda: any(row["client_id"] == name for row in self.rows))
        (row,) = [row for row in self.rows if row["client_id"] == name]
        return row

    async def settle(self) -> None:
        """Wait until no request is open, and no connection to a replica in use."""
        await until(lambda: not self.state.requests and not any(self.plane.upstream_open.values()))

    def _drain(self, spared: str, asked: bool) -> None:
        for name in self.state.replicas:
            if name != spared:
                self.feed(DrainAsked(self._clock(), name, asked))

    async def _script(self, request: Received, writer: asyncio.StreamWriter) -> bool | None:
        page = PAGES.get(request.line.split(" ")[1])
        if page is not None:
            writer.write(page)
            return True
        if b"beside" in request.body:
            await steadily(request, writer)
            return True
        bad = self.bad
        if not self.always:
            self.bad = None
        return await (bad or answer_plainly)(request, writer)

    def _take(self, rows: Emitted) -> None:
        self.rows += [row for table, row in rows if table == "requests"]

    def _arm(self, at: int | None) -> None:
        if self._alarm_handle is not None:
            self._alarm_handle.cancel()
        if at is not None:
            delay = max(0.0, (at - self._clock()) / SECOND)
            self._alarm_handle = asyncio.get_running_loop().call_later(delay, self._conductor.wake)


@contextlib.asynccontextmanager
async def bad_fleet(
    monkeypatch: pytest.MonkeyPatch,
    plane: PlaneSettings | None = None,
    limits: Limits | None = None,
    healthy: int = 1,
    speed: float = 2.0,
) -> AsyncIterator[BadFleet]:
    """Doubt lasts 60 ms instead of 500, and limits of time are looked at each 20 ms instead of each second."""
    monkeypatch.setattr("loraledger.kernel.failures.DOUBT", 60 * MS)
    monkeypatch.setattr("loraledger.gateway.listener.SWEEP_S", 0.02)
    async with contextlib.AsyncExitStack() as stack:
        emulators = [
            await stack.enter_async_context(EmulatorServer(EmulatorSettings(speed=speed))) for _ in range(healthy)
        ]
        fleet = BadFleet(plane or PlaneSettings(), limits or Limits(), emulators)
        await fleet.start()
        try:
            yield fleet
        finally:
            await fleet.stop()


def frames(body: bytes) -> list[Any]:
    """What a client's reader makes of a stream's body: each data frame must be JSON or the end."""
    assert body.endswith(b"\n\n")
    data = [frame[6:] for frame in body[:-2].split(b"\n\n") if frame.startswith(b"data: ")]
    return [json.loads(payload) for payload in data if payload != b"[DONE]"]
