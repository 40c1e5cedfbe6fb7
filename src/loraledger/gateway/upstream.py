"""Connections to replicas: one protocol object each, kept alive in one pool for each replica.

Theory of operation. A connection serves one exchange at a time and hands it what came in, in the callback in which it came: no
task, no queue. Only opening one takes a task. Parser callbacks do nothing but note; what they noted is acted on after
``feed_data`` has returned, because an error in a callback would look like a broken replica, and because only then it is known
whether bytes follow the end of the message.

- Such bytes mean a broken or hostile replica: the connection is dropped, they are never the next request's answer.
- The parser is strict in most things, but takes any three digits for a status, HTTP/0.9 and 2.0 for versions, and codings before
  ``chunked`` for none: that is checked here. A status below 100 would otherwise pass for a 1xx, with a body.
- A 1xx answer is skipped. A change of protocol breaks the connection.
- What is neither body nor next to some (heads, 1xx answers, extensions of chunks, trailers) is bounded: the parser neither tells of
  all of it nor ends it by itself.
- An answer without a length ends with its connection; ``AnswerHead.until_close`` tells the exchange that a cut looks the same.
- ``should_keep_alive`` of httptools is right only inside its callbacks.
- The last used idle connection is taken first, and one idle for 4 s is closed: uvicorn closes after 5 s, and a request written
  into a connection that the other side is closing would have to be sent again.
- A connection belongs to the generation of its pool in which it was opened. A replica that restarts or moves begins a new one,
  and no connection of the old one is kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol, cast

import httptools
import msgspec

from loraledger.conductor.ports import Clock
from loraledger.gateway.heads import upstream_prefix
from loraledger.gateway.settings import ReplicaAddress
from loraledger.gateway.sockets import send_at_once
from loraledger.units import NS_PER_S

IDLE: Final = 4 * NS_PER_S
HEAD_BYTES: Final = 64 * 1024
"""Most bytes of an answer that come without any of its body: its head and what stands before it, extensions, trailers."""
EXCUSES: Final = 8.0
EXCUSES_EARNED: Final = 0.1
"""Requests of a replica that may be written again because their connection closed, at first and by each answer: else one that
closes each kept-alive connection at its second request is sent half of all requests twice, past the kernel's budget."""


class AnswerHead(msgspec.Struct, frozen=True, gc=False):
    """Status and headers (lower case) of one answer; ``until_close``: its end is the end of the connection."""

    status: int
    headers: dict[bytes, bytes]
    until_close: bool


class Receiver(Protocol):
    """Who a connection works for. After ``received(ended=True)`` or ``broken`` nothing more comes."""

    def connected(self, upstream: Upstream) -> None:
        """A connection that was asked for is open."""

    def connect_failed(self, reason: str) -> None:
        """It could not be opened."""

    def received(self, head: AnswerHead, body: bytes, *, ended: bool) -> None:
        """One read's worth of the answer, its head complete; ``body`` may be empty."""

    def broken(self, reason: str, *, began: bool, stale: bool) -> None:
        """The answer will not be whole. ``began``: bytes of it had come. ``stale``: none had, on a connection used before."""


class Upstream(asyncio.Protocol):
    """One connection to a replica."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.generation = pool.generation
        self.idle_since = 0
        self.receiver: Receiver | None = None
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._used = False
        self._eof = False
        self._paused = False
        self._dropped = False
        self._reset()

    def _reset(self) -> None:
        self._head: AnswerHead | None = None
        self._headers: dict[bytes, bytes] = {}
        self._fault: str | None = None
        self._bare = self._fields = 0
        self._parts: list[bytes] = []
        self._began = False
        self._complete = False
        self._trailing = False
        self._keep_alive = False

    # --- for the exchange ---

    def send(self, receiver: Receiver, request: bytes) -> None:
        """Send a whole request; its answer goes to ``receiver``."""
        assert self.receiver is None
        self.receiver = receiver
        if self._transport is not None:
            self._transport.write(request)

    def drop(self) -> None:
        """Let go of the exchange and close at once: the engine sees that nobody waits any more."""
        self.receiver = None
        self._dropped = True
        self.pool.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read no more for now: the client does not keep up."""
        if self._transport is not None and not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open."""
        self._transport = cast(asyncio.Transport, transport)
        if self._dropped:
            self._transport.abort()
            return
        send_at_once(self._transport)
        self.pool.opened(self)

    def eof_received(self) -> None:
        """The replica closed its side; the transport closes the other."""
        self._eof = True
        if self.receiver is None:
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed, by whichever side."""
        receiver, self.receiver = self.receiver, None
        self._transport = None
        self._parser = None  # it holds this object's bound methods: a cycle
        self.pool.forget(self)
        if receiver is None:
            return
        if self._head is not None and self._head.until_close and self._eof and exc is None:
            receiver.received(self._head, b"", ended=True)
        else:
            said = f"{exc}" if exc is not None else "the replica closed the connection"
            receiver.broken(said, began=self._began, stale=self._used and not self._began)

    def data_received(self, data: bytes) -> None:
        """Parse one read, then act on what the parser noted."""
        receiver = self.receiver
        if receiver is None or self._parser is None:
            self.drop()  # nobody asked for these bytes
            return
        self._began = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fault = "the replica changed the protocol"
        except httptools.HttpParserError as error:
            self._fault = f"malformed answer: {error}"
        if self._complete:
            self._finish(receiver, usable=self._fault is None)
            return
        if self._parts:
            assert self._head is not None
            self._bare = 0
            receiver.received(self._head, self._body(), ended=False)
        else:
            self._bare += len(data)
            if self._bare > HEAD_BYTES:
                self._fault = f"over {HEAD_BYTES} bytes of the answer without any of its body"
        if self._fault is not None and self.receiver is receiver:
            fault = self._fault
            self.drop()
            receiver.broken(fault, began=True, stale=False)

    def _body(self) -> bytes:
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _finish(self, receiver: Receiver, *, usable: bool) -> None:
        head, body = self._head, self._body()
        assert head is not None
        self.receiver = None
        self.resume()
        if usable and self._keep_alive and not self._trailing and not self._eof:
            self._used = True
            self._reset()
            self.pool.release(self)
        else:
            self.drop()
        receiver.received(head, body, ended=True)

    # --- httptools ---

    def on_message_begin(self) -> None:
        """A message begins; after a complete one it is one that nobody asked for."""
        self._trailing = self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer, which nobody reads."""
        self._fields += len(name) + len(value)
        if self._head is None:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is whole, unless it is a 1xx, which announces the real one."""
        assert self._parser is not None
        status, version = self._parser.get_status_code(), self._parser.get_http_version()
        headers, self._headers = self._headers, {}
        coding = headers.get(b"transfer-encoding", b"").lower()
        if self._complete or self._fault is not None:
            return
        if version not in ("1.1", "1.0") or not 100 <= status < 600 or coding not in (b"", b"chunked"):
            self._fault = f"malformed answer: HTTP/{version} {status} {coding.decode('latin-1')}".rstrip()
        elif self._fields > HEAD_BYTES:
            self._fault = f"the head of the answer is over {HEAD_BYTES} bytes"
        elif status >= 200:
            self._keep_alive = self._parser.should_keep_alive()
            framed = b"content-length" in headers or coding or status in (204, 304)
            self._head = AnswerHead(status, headers, not framed)

    def on_body(self, data: bytes) -> None:
        """Some of the body."""
        if self._head is not None and not self._complete:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """The message ends, or a 1xx did."""
        self._complete = self._head is not None


class Pool:
    """The connections of one replica. ``busy`` counts those that an exchange has or waits for."""

    def __init__(self, address: ReplicaAddress, clock: Clock, connect_timeout: int) -> None:
        self.address = address
        self.generation = 0
        self._clock = clock
        self._connect_timeout = connect_timeout
        self._excuses = EXCUSES
        self._idle: deque[Upstream] = deque()
        self._open: set[Upstream] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._prefixes: dict[str, bytes] = {}

    @property
    def busy(self) -> int:
        """Connections that an exchange has or waits for: the count to hold against the kernel's."""
        return len(self._open) - len(self._idle) + len(self._connecting)

    def prefix(self, path: str) -> bytes:
        """The unchanging part of a request head to this replica."""
        prefix = self._prefixes.get(path)
        if prefix is None:
            to = self.address
            prefix = self._prefixes[path] = upstream_prefix(to.host, to.port, to.api_key, path)
        return prefix

    def take(self) -> Upstream | None:
        """The idle connection that was used last, if there is one."""
        return self._idle.pop() if self._idle else None

    def excuse(self) -> bool:
        """Whether one more request may be written again because its kept-alive connection closed without a byte."""
        if self._excuses < 1.0:
            return False
        self._excuses -= 1.0
        return True

    def connect(self, receiver: Receiver) -> asyncio.Task[None]:
        """Open a connection; ``receiver`` is told how that went, unless ``cancel`` comes first."""
        task = asyncio.get_running_loop().create_task(self._connect(receiver))
        self._connecting.add(task)
        return task

    def cancel(self, task: asyncio.Task[None]) -> None:
        """The connection that ``connect`` is opening is no longer wanted."""
        self._connecting.discard(task)
        task.cancel()

    def release(self, upstream: Upstream) -> None:
        """An exchange is done with it, and it can be used again."""
        self._excuses = min(self._excuses + EXCUSES_EARNED, EXCUSES)
        if upstream.generation != self.generation:
            upstream.drop()
            return
        upstream.idle_since = self._clock()
        self._idle.append(upstream)

    def move(self, address: ReplicaAddress) -> None:
        """The replica is somewhere else from now on."""
        self.address = address
        self._prefixes.clear()
        self.drop_idle()

    def drop_idle(self) -> None:
        """Close what is idle, and what is busy now once it is not."""
        self.generation += 1
        while self._idle:
            self._idle.popleft().drop()

    def close(self) -> None:
        """Close every connection."""
        for upstream in list(self._open):
            upstream.drop()

    def sweep(self, now: int) -> None:
        """Close connections that have been idle too long."""
        while self._idle and now - self._idle[0].idle_since > IDLE:
            self._idle.popleft().drop()

    def opened(self, upstream: Upstream) -> None:
        """A connection tells that it is open."""
        self._open.add(upstream)

    def forget(self, upstream: Upstream) -> None:
        """A connection tells that it is closed."""
        self._open.discard(upstream)
        if upstream in self._idle:
            self._idle.remove(upstream)

    async def _connect(self, receiver: Receiver) -> None:
        loop, to = asyncio.get_running_loop(), self.address
        upstream, failure = Upstream(self), ""
        try:
            async with asyncio.timeout(self._connect_timeout / NS_PER_S):
                await loop.create_connection(lambda: upstream, to.host, to.port)
        except asyncio.CancelledError:
            upstream.drop()  # uvloop lets a connection that it is opening come about all the same
            raise
        except TimeoutError:
            failure = "connect: timed out"
        except (OSError, ValueError, OverflowError) as error:  # the latter two: a name or port that cannot exist
            failure = f"connect: {error}"
        task = asyncio.current_task()
        assert task is not None
        self._connecting.discard(task)
        if failure:
            upstream.drop()
            receiver.connect_failed(failure)
        else:
            receiver.connected(upstream)
