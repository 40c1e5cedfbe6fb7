"""The client's side: one protocol object for each connection.

Theory of operation. A connection is in one phase: reading a head, reading a body, waiting for an answer, or closing. Requests sent
ahead of an answer wait unread, so answers are in order by construction; they are bounded in bytes (reading stops above
``header_bytes``) and in number. Within the bounds reading goes on, because only a read tells at once that the client left; while
it is stopped the sweep asks the socket. The end of a client's stream counts as leaving: nothing distinguishes a client that
closed from one that half-closes, and an engine that generates for nobody costs more.

- A key is asked for before the body is read, and so are the path, the kind of body and its stated length. A refusal then leaves
  bytes that are not read as a request: the connection closes.
- Closing lingers: what was written is flushed, our side is shut, and what the client still sends is thrown away for at most 2 s.
  A socket closed over unread bytes sends a reset, which takes the answer away from a client that is still sending.
- ``Expect: 100-continue`` is answered only once the body is known to be wanted.
- There is one sweep a second over all connections for all limits of time, instead of a timer each.
"""

from __future__ import annotations

import asyncio
import re
from enum import Enum, auto
from typing import Final, cast

from loraledger.errors import (
    BadRequestError,
    HeadersTooLargeError,
    LedgerError,
    MethodError,
    SlowRequestError,
    UnauthorizedError,
    UnavailableError,
    UnknownPathError,
)
from loraledger.gateway.auth import Access, key_of
from loraledger.gateway.bodies import ChunkedBody, PlainBody, check_size
from loraledger.gateway.exchange import Exchange
from loraledger.gateway.heads import CONTINUE, RequestHead, has_bare_lf, parse_head
from loraledger.gateway.held import Hold
from loraledger.gateway.paths import FORMS, ROUTES
from loraledger.gateway.peek import peek
from loraledger.gateway.replies import error_reply, models_reply
from loraledger.gateway.sockets import hung_up, reset, send_at_once
from loraledger.gateway.state import PlaneState
from loraledger.units import NS_PER_S

LINGER: Final = 2 * NS_PER_S
_EMPTY_LINES: Final = re.compile(rb"(?:\r\n)++")
_NO_HEAD: Final = frozenset({b"", b"\r", b"\r\n"})
"""What may come between two requests without being the beginning of one."""


class Phase(Enum):
    """What the next byte from the client is part of."""

    HEAD = auto()
    BODY = auto()
    ANSWER = auto()
    CLOSING = auto()


class Client(asyncio.Protocol):
    """One connection from a client. ``Exchange`` knows it as its ``Caller``."""

    def __init__(self, state: PlaneState) -> None:
        self._state = state
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._phase = Phase.HEAD
        self._pending = b""
        self._seen = 0
        """How much of a head that is not whole was looked at: one that comes in single bytes costs one pass over it, not many."""
        self._head: RequestHead | None = None
        self._body: PlainBody | ChunkedBody | None = None
        self._exchange: Exchange | None = None
        self._hold = Hold(state.bodies)
        self._tenant = ""
        self._known: tuple[Access, bytes | None, bytes | None, str] | None = None
        self._started: int | None = None
        self._deadline = 0
        self._ahead = 0
        self._reading = True
        self._full_since: int | None = None
        self._unsent = 0

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open."""
        self._transport = cast(asyncio.Transport, transport)
        send_at_once(self._transport)
        state = self._state
        self._deadline = state.clock() + state.settings.idle_timeout
        full = len(state.clients) >= state.settings.connections and not state.make_room()
        state.clients.add(self)
        if full or state.draining:
            code = "shutting_down" if state.draining else "too_many_connections"
            message = "this gateway takes no more connections now"
            self._refuse(UnavailableError(message, code=code, retry_after_s=1.0), close=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed, by whichever side."""
        self._leave()
        self._phase = Phase.CLOSING
        self._state.left(self)

    def eof_received(self) -> None:
        """The client sends no more: it is gone. The transport closes once it has flushed."""
        self._leave()
        self._phase = Phase.CLOSING
        self._deadline = self._state.clock() + LINGER

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of one sent ahead."""
        if self._phase is Phase.BODY:
            self._read_body(data)
        elif self._phase is Phase.HEAD and self._full_since is None:
            self._read_head(self._pending + data if self._pending else data)
        elif self._phase is not Phase.CLOSING:
            self._pending += data
            if len(self._pending) > self._state.settings.header_bytes and self._reading:
                self._reading = False
                self._transport.pause_reading()

    def pause_writing(self) -> None:
        """The client does not keep up: neither need the replica."""
        self._full_since = self._state.clock()
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        """It takes bytes again."""
        self._full_since = None
        if self._exchange is not None:
            self._exchange.resume()
        elif self._phase is Phase.HEAD:
            self._read_pending()

    # --- for the exchange ---

    @property
    def closes(self) -> bool:
        """Whether the connection will be closed after this answer."""
        return self._state.draining or self._head is None or not self._head.keep_alive

    def send(self, data: bytes) -> None:
        """Write some of the answer."""
        self._transport.write(data)

    def begun(self) -> None:
        """The answer begins: the request's body is not needed again."""
        self._hold.release()

    def answered(self) -> None:
        """The answer is complete: the next request may be read."""
        self._exchange = None
        if self.closes:
            self._close()
        else:
            self._next()

    def cut(self) -> None:
        """The answer will never be complete. Without chunks only a reset shows that to the client."""
        self._exchange = None
        if self._head is not None and self._head.minor == 1:
            self._close()
        else:
            self._phase = Phase.CLOSING
            reset(self._transport)

    # --- for the sweep and the drain ---

    def check(self, now: int) -> None:
        """Act on limits of time."""
        if self._exchange is not None:
            limit = self._state.settings.stream_idle_timeout
            takes_nothing = self._full_since is not None and now - self._full_since > limit
            if takes_nothing or (not self._reading and hung_up(self._transport)):
                self._transport.abort()
                self._leave()
            else:
                self._exchange.check(now)
        elif now >= self._deadline:
            if self._phase is Phase.CLOSING:
                self._check_closing(now)
            elif self._started is None:
                self._transport.abort()
            else:
                what = "head" if self._phase is Phase.HEAD else "body"
                self._refuse(SlowRequestError(f"the request's {what} did not arrive in time"), close=True)

    def close_idle(self) -> None:
        """Close if no request is being read or answered."""
        if self._phase is Phase.HEAD and self._started is None and self._pending in _NO_HEAD:
            self._transport.close()

    def give_way(self, now: int) -> bool:
        """Another connection wants this one's place: close if it has been idle for over a second. Whether it did."""
        idle = self._phase is Phase.HEAD and self._started is None and self._pending in _NO_HEAD
        if not idle or now - (self._deadline - self._state.settings.idle_timeout) < NS_PER_S:
            return False
        self._phase = Phase.CLOSING
        self._transport.close()
        return True

    def shut(self) -> None:
        """This process ends: tell the client if that is still possible, and close."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.abandon():
            self.cut()
        elif self._phase is not Phase.CLOSING:
            self._refuse(UnavailableError("this gateway is shutting down", code="shutting_down"), close=True)

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    # --- requests ---

    def _read_head(self, data: bytes) -> None:
        settings = self._state.settings
        now = self._state.clock()
        seen, self._seen, self._pending = self._seen, 0, b""
        if self._started is None:
            data = _EMPTY_LINES.sub(b"", data, 1) if data[:2] == b"\r\n" else data  # RFC 9112, 2.2
            if data in _NO_HEAD:  # nothing was sent ahead
                self._pending, self._ahead = data, 0
                return
            self._started = now
            self._deadline = now + settings.header_timeout
        end = data.find(b"\r\n\r\n", max(0, seen - 3), settings.header_bytes)
        try:
            if end < 0:
                if len(data) >= settings.header_bytes:
                    raise HeadersTooLargeError(f"the head is over the limit of {settings.header_bytes} bytes")
                if has_bare_lf(data, max(0, seen - 1)):
                    raise BadRequestError("malformed request head: a line ends in LF without CR")
                self._pending, self._seen = data, len(data)
                return
            self._head = head = parse_head(data[: end + 2])
        except LedgerError as error:
            self._refuse(error, close=True)
            return
        try:
            self._admit(head)
        except LedgerError as error:
            self._pending = data[end + 4 :]
            self._refuse(error, close=head.has_body)
            return
        self._await_body(head, data[end + 4 :], now)

    def _admit(self, head: RequestHead) -> None:
        """Raise what is wrong with a request of which only the head is known."""
        asked = self._state.access, head.authorization, head.api_key
        if self._known is None or self._known[:3] != asked:
            key = key_of(head.authorization, head.api_key)
            tenant = None if key is None else self._state.access.authenticate(key)
            if tenant is None:
                self._known = None
                raise UnauthorizedError("send a valid key as Authorization: Bearer KEY")
            self._known = (*asked, tenant)
        self._tenant = self._known[3]
        method = ROUTES.get(head.path)
        if method is None:
            raise UnknownPathError("this path is not served here")
        if head.method != method:
            raise MethodError(f"use {method.decode()} for this path")
        if method == b"POST":
            head.check_body()
        check_size(head.length, self._state.settings.body_bytes)
        self._hold.take(self._tenant, head.length)

    def _await_body(self, head: RequestHead, rest: bytes, now: int) -> None:
        settings = self._state.settings
        if not head.has_body:
            self._pending = rest
            self._handle(head, b"")
        elif not head.chunked and len(rest) >= head.length:
            self._pending = rest[head.length :]
            self._handle(head, rest[: head.length])
        else:
            self._body = ChunkedBody(settings.body_bytes) if head.chunked else PlainBody(head.length)
            self._phase = Phase.BODY
            self._deadline = now + settings.body_timeout
            if rest:
                self._read_body(rest)
            elif head.expects_continue:
                self._transport.write(CONTINUE)

    def _read_body(self, data: bytes) -> None:
        body, head = self._body, self._head
        assert body is not None
        assert head is not None
        try:
            if head.chunked:
                self._hold.take(self._tenant, len(data))
            rest = body.feed(data)
        except LedgerError as error:
            self._refuse(error, close=True)
            return
        if rest is None:
            return
        self._body = None
        if body.spilled:
            self._head = head = head.closing()
        self._pending = rest
        self._handle(head, body.whole())

    def _handle(self, head: RequestHead, body: bytes) -> None:
        """Answer a whole request, or begin to."""
        self._phase = Phase.ANSWER
        state = self._state
        if head.method == b"GET":
            models = state.access.models(self._tenant)
            client_id = (head.client_id or "").encode("ascii")
            self._transport.write(models_reply(models, date=state.date, request_id=client_id, close=self.closes))
            self.answered()
            return
        try:
            peeked = peek(body, FORMS[head.path])
            adapter = state.access.resolve(self._tenant, peeked.model)
        except LedgerError as error:
            self._refuse(error, close=False)
            return
        self._exchange = Exchange(
            state, self, head, peeked, tenant=self._tenant, adapter=adapter, received=self._started or state.clock()
        )
        self._exchange.arrive()

    def _next(self) -> None:
        self._hold.release()
        self._phase = Phase.HEAD
        self._head = None
        self._started = None
        self._deadline = self._state.clock() + self._state.settings.idle_timeout
        if self._pending in _NO_HEAD:
            self._ahead = 0
        elif self._full_since is None:
            asyncio.get_running_loop().call_soon(self._read_pending)
        if not self._reading and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def _read_pending(self) -> None:
        """Read a request that was sent ahead; on its own turn of the loop, so that a row of them does not hold up others."""
        if self._phase is not Phase.HEAD or not self._pending or self._full_since is not None:
            return
        self._ahead += 1
        if self._ahead > self._state.settings.pipelined:
            limit = self._state.settings.pipelined
            self._refuse(BadRequestError(f"more than {limit} requests sent ahead of their answers"), close=True)
            return
        self._read_head(self._pending)

    # --- ends ---

    def _refuse(self, error: LedgerError, *, close: bool) -> None:
        """Answer with an error that no event speaks of."""
        state, head = self._state, self._head
        state.refused[error.code] += 1
        close = close or self.closes
        allow = b"Allow: %b\r\n" % ROUTES[head.path] if head is not None and error.status == MethodError.status else b""
        client_id = (head.client_id or "").encode("ascii") if head is not None else b""
        path = b"" if head is None else head.path
        reply = error_reply(error, date=state.date, request_id=client_id, close=close, extra=allow, path=path)
        if head is not None and head.method == b"HEAD":
            reply = reply[: reply.index(b"\r\n\r\n") + 4]  # a body would be taken for the beginning of the next answer
        self._transport.write(reply)
        if close:
            self._close()
        else:
            self._next()

    def _close(self) -> None:
        self._hold.release()
        self._phase = Phase.CLOSING
        self._pending = b""
        self._body = None
        self._deadline = self._state.clock() + LINGER
        if not self._transport.is_closing():
            self._transport.write_eof()
            if not self._reading:
                self._reading = True
                self._transport.resume_reading()

    def _check_closing(self, now: int) -> None:
        unsent = self._transport.get_write_buffer_size()
        if unsent and unsent != self._unsent:
            self._unsent = unsent
            self._deadline = now + self._state.settings.stream_idle_timeout
        else:
            self._transport.abort()

    def _leave(self) -> None:
        self._hold.release()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()
