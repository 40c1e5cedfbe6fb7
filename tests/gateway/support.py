"""What the gateway's tests share: a conductor that does as it is told, a replica that says what it is told, a plain client."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loraledger.conductor.ports import Clock
from loraledger.events import (
    AttemptFailed,
    Command,
    Decision,
    Dispatch,
    Event,
    Queue,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
)
from loraledger.gateway.auth import Access, Grant
from loraledger.gateway.listener import DataPlane
from loraledger.gateway.settings import PlaneSettings, ReplicaAddress

CASES = Path(__file__).parent.parent / "cases"
KEY = "sk-acme"
BASE = "acme/base-8b-instruct"
CHAT = "/v1/chat/completions"
ENGINE_NAME = "alpaca@3fa9c1d20b7e"
DECISION = Decision(1, "test", "r1", "only one", "gpu", "believed", 1, ())


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def access() -> Access:
    acme = Grant(tenant="acme", key_hashes=(digest(KEY),), adapters=frozenset({"alpaca", "alpha", "sql"}))
    other = Grant(tenant="other", key_hashes=(digest("sk-other"),), adapters=frozenset({"other"}), base=False)
    return Access([acme, other], [BASE, "base"], created=1_700_000_000)


def dispatch(request: str, attempt: int = 1, replica: str = "r1", model: str = ENGINE_NAME) -> Dispatch:
    return Dispatch(request, attempt, replica, model, DECISION)


def bad_gateway(request: str, status: Any = "upstream_failed") -> Reject:
    return Reject(request, status, 502, "upstream_failed", "the replica failed", retry_after=1_500_000_000)


class ScriptedConductor:
    """Answers arrivals with a dispatch to ``r1`` and failed attempts with a 502, unless told otherwise.

    As the real one, it lets an event wait that is fed while a command is performed.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.plane: DataPlane | None = None
        self.on_arrival: Callable[[RequestArrived], list[Command]] = lambda event: [
            dispatch(event.request, model=BASE if event.adapter is None else ENGINE_NAME)
        ]
        self.on_failure: Callable[[AttemptFailed], list[Command]] = lambda event: [
            bad_gateway(event.request, event.status)
        ]
        self._waiting: deque[Event] = deque()
        self._busy = False

    def feed(self, event: Event) -> None:
        self._waiting.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                event = self._waiting.popleft()
                self.events.append(event)
                for command in self._commands(event):
                    self.perform(command)
        finally:
            self._busy = False

    def perform(self, command: Command) -> None:
        assert self.plane is not None
        assert isinstance(command, Dispatch | Queue | Reject)
        self.plane.perform(command)

    def _commands(self, event: Event) -> list[Command]:
        if isinstance(event, RequestArrived):
            return self.on_arrival(event)
        if isinstance(event, AttemptFailed):
            return self.on_failure(event)
        return []

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def end(self) -> Any:
        """The one end event that there must be."""
        ends = [event for event in self.events if isinstance(event, RequestFinished | RequestCancelled)]
        assert len(ends) == 1, ends
        return ends[0]


@dataclass
class Received:
    """One request as the replica got it."""

    line: str
    headers: dict[str, str]
    body: bytes
    connection: int

    def json(self) -> Any:
        return json.loads(self.body)


Script = Callable[[Received, asyncio.StreamWriter], Awaitable[bool | None]]
"""Answers one request. False: close the connection after it."""


class ScriptedReplica:
    """A raw HTTP/1.1 server. ``closed`` counts connections that the other side ended."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Received] = []
        self.connections = 0
        self.closed = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        assert self._server is not None
        for _ in range(10):  # asyncio would leave open what it accepted a turn before the server is closed
            await asyncio.sleep(0)
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self.writers:  # a task that was cancelled before it began closed nothing
            writer.close()
        await asyncio.sleep(0)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        task = asyncio.create_task(self._serve(self.connections, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await self._read(reader, number)
                self.requests.append(request)
                answer = asyncio.ensure_future(self.script(request, writer))
                gone = asyncio.ensure_future(self._gone(reader))
                await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
                if gone.done():  # the answer may have failed at the same moment: that is one end, not two
                    self.closed += 1
                    answer.cancel()
                    await asyncio.gather(answer, return_exceptions=True)
                    break
                gone.cancel()
                if answer.result() is False:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed += 1
        except asyncio.CancelledError:
            return  # the test is over; asyncio's streams would log the cancellation
        finally:
            writer.close()

    async def _gone(self, reader: asyncio.StreamReader) -> None:
        """Return when the other side has closed; a request ahead of its answer would be a fault."""
        while not reader.at_eof():
            if reader.exception() is not None:
                break
            await asyncio.sleep(0.005)

    async def _read(self, reader: asyncio.StreamReader, number: int) -> Received:
        raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *lines = raw.removesuffix("\r\n\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (entry.partition(":") for entry in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return Received(line, headers, body, number)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def json_answer(body: object, status: int = 200, extra: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13}


def completion(request: Received) -> dict[str, Any]:
    return {
        "id": "cmpl-" + request.headers["x-request-id"],
        "object": "chat.completion",
        "created": 1,
        "model": request.json()["model"],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
        "usage": USAGE,
    }


def event(model: str, delta: dict[str, Any], **more: Any) -> bytes:
    body = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": model}
    choices = [{"index": 0, "delta": delta, "finish_reason": None}]
    return b"data: " + json.dumps({**body, "choices": choices, **more}, separators=(",", ":")).encode() + b"\n\n"


def usage_event(model: str) -> bytes:
    body = {"id": "c1", "object": "chat.completion.chunk", "model": model, "choices": [], "usage": USAGE}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def answer_plainly(request: Received, writer: asyncio.StreamWriter) -> bool:
    """As an engine does: JSON, or a stream of two tokens with usage if asked."""
    body = request.json()
    if body.get("stream") is not True:
        writer.write(json_answer(completion(request)))
        return True
    model = body["model"]
    writer.write(STREAM_HEAD)
    for delta in ({"role": "assistant", "content": ""}, {"content": "Hi"}, {"content": " there"}, {}):
        writer.write(chunk(event(model, delta)))
        await asyncio.sleep(0.002)
    if (body.get("stream_options") or {}).get("include_usage"):
        writer.write(chunk(usage_event(model)))
    writer.write(chunk(DONE) + b"0\r\n\r\n")
    return True


@dataclass
class Answer:
    """One answer as the client got it. ``clean``: it ended as its framing says."""

    status: int
    headers: dict[str, str]
    body: bytes
    clean: bool
    reads: list[tuple[float, bytes]] = field(default_factory=list)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        frames = [frame for frame in self.body.split(b"\n\n") if frame.startswith(b"data: ")]
        return [json.loads(frame[6:]) for frame in frames if frame != b"data: [DONE]"]


class RawClient:
    """A client that sends exactly what it is given."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, port: int) -> RawClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        line, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (entry.partition(":") for entry in lines)}
        answer = Answer(int(line.split(" ")[1]), headers, b"", True)
        try:
            await self._body(answer)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            answer.body += getattr(error, "partial", b"")
            answer.clean = False
        return answer

    async def _body(self, answer: Answer) -> None:
        if answer.status == 100:
            return
        if "content-length" in answer.headers:
            answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
        elif answer.headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                data = (await self.reader.readexactly(size + 2))[:-2]
                answer.reads.append((time.monotonic(), data))
                answer.body += data
            await self.reader.readexactly(2)
        else:
            answer.body = await self.reader.read()

    async def at_end(self) -> bool:
        """Whether the connection has been closed by the gateway, cleanly or not."""
        try:
            return await asyncio.wait_for(self.reader.read(1), 20) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Go without a goodbye."""
        if self.writer.transport.is_closing():
            return
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def post(body: object, path: str = CHAT, key: str | None = KEY, version: str = "1.1", **headers: str) -> bytes:
    """The bytes of one request. ``headers``: underscores become hyphens."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: gateway", f"Content-Length: {len(data)}"]
    lines += [f"Authorization: Bearer {key}"] if key is not None else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def get(path: str = "/v1/models", key: str | None = KEY) -> bytes:
    auth = f"Authorization: Bearer {key}\r\n" if key is not None else ""
    return f"GET {path} HTTP/1.1\r\nHost: gateway\r\n{auth}\r\n".encode()


PLAIN = {"model": "alpaca", "messages": [{"role": "user", "content": "Hello"}]}
STREAMED = {**PLAIN, "stream": True}


@dataclass
class Rig:
    """A data plane with its scripted surroundings."""

    plane: DataPlane
    conductor: ScriptedConductor
    replica: ScriptedReplica
    clients: list[RawClient] = field(default_factory=list)

    async def client(self) -> RawClient:
        client = await RawClient.to(self.plane.port)
        self.clients.append(client)
        return client

    async def ask(self, request: bytes) -> Answer:
        client = await self.client()
        await client.send(request)
        answer = await asyncio.wait_for(client.answer(), 20)
        client.close()
        return answer

    async def settle(self) -> None:
        """Wait until nothing is open, as it must be soon after the last client has gone."""
        await until(lambda: self.plane.open_exchanges == 0 and not any(self.plane.upstream_open.values()))


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port where connections are neither accepted nor refused, because its queue is full."""
    with socket.socket() as full, contextlib.ExitStack() as fillers:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        yield full.getsockname()[1]


def still() -> int:
    """A clock that stands still: nothing is late, however long this machine takes."""
    return 10**15


class Awake:
    """A clock for what is looked at many times a second: where nobody looked for over 50 ms, this process did not run either.

    So a machine that stalls makes nothing late that would have come meanwhile.
    """

    def __init__(self) -> None:
        self._seen = time.monotonic_ns()
        self._now = self._seen

    def __call__(self) -> int:
        seen = time.monotonic_ns()
        self._now += min(seen - self._seen, 50_000_000)
        self._seen = seen
        return self._now


async def until(condition: Callable[[], bool], timeout: float = 15.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(
    script: Script = answer_plainly,
    settings: PlaneSettings | None = None,
    sock: socket.socket | None = None,
    more: Mapping[str, ReplicaAddress] | None = None,
    clock: Clock = time.monotonic_ns,
) -> AsyncIterator[Rig]:
    replica = ScriptedReplica(script)
    await replica.start()
    conductor = ScriptedConductor()
    addresses = {"r1": ReplicaAddress("r1", "127.0.0.1", replica.port, "engine-key"), **(more or {})}
    plane = DataPlane(settings or PlaneSettings(), conductor.feed, clock, access(), addresses)
    conductor.plane = plane
    await plane.start("127.0.0.1", 0, sock)
    rig = Rig(plane, conductor, replica)
    try:
        yield rig
        await rig.settle()
    finally:
        for client in rig.clients:
            client.close()
        await plane.drain(0)
        await replica.stop()
