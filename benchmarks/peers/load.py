"""The client's side of the measurements: requests one after the other, by the clock, or held open; and a look at what comes back.

Everything runs on one event loop over raw protocols, because a client that costs as much as the proxy would be what is measured.
Whatever is not an answer with status 200 ends the measurement with ``LoadError``; nothing is retried, nothing is skipped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar, cast

from benchmarks.peers.upstream import END, EVENTS, EVERY_MS, MODELS, TEXT, request, streamed, unchunked
from benchmarks.processes import KEY

GRACE_S: Final = 40.0
"""Beyond the time that was asked for, until which every answer must have ended."""
HELD_EVENTS, HELD_EVERY_MS = 120, 1000
_P = TypeVar("_P", bound=asyncio.Protocol)


class LoadError(Exception):
    """What came back is not what is measured; the text says what came."""


@dataclass(frozen=True)
class Target:
    """Where requests go. ``models`` are asked for in turn, with ``key``."""

    port: int
    models: Sequence[str] = MODELS
    key: str = KEY

    def requests(self, events: int | None = None, every_ms: int = EVERY_MS) -> list[bytes]:
        """One request a model; ``events``: of streams with so many."""
        stream = events is not None
        return [
            request(m, stream=stream, events=events or EVENTS, every_ms=every_ms, key=self.key) for m in self.models
        ]


@dataclass(frozen=True)
class Done:
    """What a closed loop came to. ``reads``: how often bytes came at the client."""

    requests: int
    reads: int
    seconds: float


def whole(answer: bytes) -> bool:
    """Whether an answer is there to its end."""
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    _, stated, rest = head.lower().partition(b"content-length: ")
    return len(body) >= int(rest.partition(b"\r\n")[0]) if stated else body.endswith(END)


class Caller(asyncio.Protocol):
    """One connection: asks whenever ``turn`` has a request for it. ``done`` ends with it, or with what went wrong."""

    def __init__(self, turn: Callable[[], bytes | None], *, stream: bool) -> None:
        self._turn, self._stream = turn, stream
        self._got = b""
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reads = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        if not self._got and not data.startswith(b"HTTP/1.1 200"):
            self._fail(data[:500].decode(errors="replace"))
            return
        self._got = (self._got + data)[-64:] if self._stream else self._got + data
        if self._stream and self._got.endswith(END) and b"[DONE]" not in self._got:
            self._fail(f"a stream without its last event: {self._got!r}")
        elif self._got.endswith(END) if self._stream else whole(self._got):
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the connection was closed")

    def stop(self) -> None:
        """Hang up; what went wrong was told or is of no interest."""
        if not self.done.done():
            self.done.set_result(None)
        elif not self.done.cancelled():
            self.done.exception()
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, what: str) -> None:
        if not self.done.done():
            self.done.set_exception(LoadError(what))
        if self._transport is not None:
            self._transport.abort()

    def _next(self) -> None:
        assert self._transport is not None
        self._got = b""
        sent = self._turn()
        if sent is not None:
            self._transport.write(sent)
        elif not self.done.done():
            self.done.set_result(None)
            self._transport.close()


async def closed_loop(
    target: Target, seconds: float, connections: int, *, events: int | None = None, every_ms: int = EVERY_MS
) -> Done:
    """``connections`` clients for so long, each with the next request when an answer has ended; ``events``: streams of so many.

    Raises LoadError, TimeoutError or OSError.
    """
    requests, began, sent = target.requests(events, every_ms), time.perf_counter(), 0

    def turn() -> bytes | None:
        nonlocal sent
        if time.perf_counter() - began > seconds:
            return None
        sent += 1
        return requests[sent % len(requests)]

    callers: list[Caller] = []
    try:
        async with asyncio.timeout(seconds + GRACE_S):
            for _ in range(connections):
                callers.append(Caller(turn, stream=events is not None))
                await _connect(callers[-1], target.port)
                if events is not None:
                    await asyncio.sleep(
                        every_ms / 1000 / connections
                    )  # spread over the interval, as engines' steps are
            await asyncio.gather(*(caller.done for caller in callers))
    finally:
        for caller in callers:
            caller.stop()
    return Done(sent, sum(caller.reads for caller in callers), time.perf_counter() - began)


async def held_open(target: Target, streams: int, measure: Callable[[], float]) -> float:
    """What ``measure`` says while ``streams`` streams are open and each has begun; then all clients leave."""
    requests, number = target.requests(HELD_EVENTS, HELD_EVERY_MS), itertools.count()
    callers: list[Caller] = []
    try:
        async with asyncio.timeout(GRACE_S):
            for _ in range(streams):
                callers.append(Caller(lambda: requests[next(number) % len(requests)], stream=True))
                await _connect(callers[-1], target.port)
            while any(caller.reads == 0 and not caller.done.done() for caller in callers):  # noqa: ASYNC110 - a poll is enough
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)
            for caller in callers:
                if caller.done.done():
                    await caller.done
            found = measure()
    finally:
        for caller in callers:
            caller.stop()
        await asyncio.sleep(1.0)  # the proxy notices
    return found


async def _connect(protocol: _P, port: int) -> _P:
    await asyncio.get_running_loop().create_connection(partial(_same, protocol), "127.0.0.1", port)
    return protocol


def _same(protocol: _P) -> _P:
    return protocol


class Line:
    """Requests to one target by the clock: each on a connection that is idle, or a new one. ``took``: seconds of each answer."""

    def __init__(self, target: Target, count: int) -> None:
        self._port, self._requests, self._count = target.port, target.requests(), count
        self._sent = 0
        self.idle: list[Timed] = []
        self.all: list[Timed] = []
        self.took: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def send(self) -> None:
        """Send the next request."""
        if self.done.done():
            await self.done  # it failed
        if not self.idle:
            timed = Timed(self)
            self.all.append(await _connect(timed, self._port))
            self.idle.append(timed)
        self.idle.pop().send(self._requests[self._sent % len(self._requests)])
        self._sent += 1

    def ended(self, seconds: float) -> None:
        """An answer came to its end."""
        self.took.append(seconds)
        if len(self.took) == self._count and not self.done.done():
            self.done.set_result(None)

    def fail(self, what: str) -> None:
        """Something else came."""
        if not self.done.done():
            self.done.set_exception(LoadError(what))


class Timed(asyncio.Protocol):
    """One connection of a line."""

    def __init__(self, line: Line) -> None:
        self._line, self._got, self._open = line, b"", False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, data: bytes) -> None:
        """Send a request; the time begins."""
        self._got, self._open, self._began = b"", True, time.perf_counter()
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not whole(self._got):
            return
        if self._got.startswith(b"HTTP/1.1 200"):
            self._line.ended(time.perf_counter() - self._began)
            self._open = False
            self._line.idle.append(self)
        else:
            self._line.fail(self._got[:500].decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._open:
            self._line.fail("the connection was closed")
        elif self in self._line.idle:  # servers close what is idle for some seconds
            self._line.idle.remove(self)


async def by_clock(targets: Sequence[Target], seconds: float, rate: float) -> list[list[float]]:
    """Seconds that each answer of each target took, sorted; each gets ``rate`` requests a second, between those of the others.

    Raises LoadError, TimeoutError or OSError.
    """
    count = int(seconds * rate)
    lines = [Line(target, count) for target in targets]
    began = time.perf_counter()
    try:
        async with asyncio.timeout(seconds + GRACE_S):
            for number in range(count * len(lines)):
                due = began + number / (rate * len(lines))
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await lines[number % len(lines)].send()
            await asyncio.gather(*(line.done for line in lines))
    finally:
        for line in lines:
            if not line.done.done():
                line.done.cancel()
            elif not line.done.cancelled():
                line.done.exception()
            for timed in line.all:
                timed.transport.abort()
    return [sorted(line.took) for line in lines]


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted ``values``, the smallest that at least ``share`` of them do not exceed."""
    return values[min(len(values) - 1, int(share * len(values)))]


# --- what comes back --------------------------------------------------------------------------------------------------


async def answers(target: Target) -> bool:
    """Whether the first model answers with status 200: the proxy is up."""
    try:
        answer = await _ask(target.port, target.requests()[0], 10.0)
    except (OSError, TimeoutError, LoadError):
        return False
    return answer.startswith(b"HTTP/1.1 200")


async def check(target: Target) -> None:
    """Each model's answer, whole and streamed, is what the engine said. Raises LoadError with what is not."""
    for model in dict.fromkeys(target.models):
        one = Target(target.port, (model,), target.key)
        try:
            whole_answer = await _ask(one.port, one.requests()[0], 30.0)
            stream = await _ask(one.port, one.requests(EVENTS, 1)[0], 30.0)
            _check_whole(_payload(whole_answer), model)
            _check_stream(_payload(stream), model)
        except (TimeoutError, OSError) as error:
            raise LoadError(f"{model}: {type(error).__name__} {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise LoadError(f"{model}: no answer of the API ({type(error).__name__}: {error})") from error


async def _ask(port: int, data: bytes, limit_s: float) -> bytes:
    """The answer to ``data`` on a connection of its own."""
    async with asyncio.timeout(limit_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            got = b""
            while not whole(got):
                more = await reader.read(65536)
                if not more:
                    raise LoadError(f"the connection was closed after {got[:200]!r}")
                got += more
            return got
        finally:
            writer.transport.abort()


def _payload(answer: bytes) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.partition(b"\r\n")[0]
    if not status.startswith(b"HTTP/1.1 200"):
        raise LoadError(f"{status.decode(errors='replace')}: {body[:300].decode(errors='replace')}")
    return unchunked(body) if b"transfer-encoding: chunked" in head.lower() else body


def _check_whole(body: bytes, model: str) -> None:
    found = json.loads(body)
    if found["choices"][0]["text"] != TEXT:
        raise LoadError(f"{model}: the text is another: {body[:300]!r}")
    _check_model(found["model"], model)


def _check_stream(body: bytes, model: str) -> None:
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not lines or lines[-1].strip() != b"[DONE]":
        raise LoadError(f"{model}: the stream does not end with [DONE]: {body[-300:]!r}")
    events = [json.loads(line) for line in lines[:-1]]
    text = "".join(choice.get("text") or "" for event in events for choice in event["choices"])
    if text != streamed(EVENTS):
        raise LoadError(f"{model}: the streamed text is another: {text[:300]!r}")
    _check_model(events[0]["model"], model)


def _check_model(named: str, model: str) -> None:
    if not named.endswith(model):
        raise LoadError(f"{model}: the answer is of {named!r}")
