"""What a connection promises of the bytes that a client sends on it, however they come.

They are read by the gateway's own connection object, whole, byte by byte and in pieces: the answers must be the same. The second
reader is h11: a request that it refuses, or sees end elsewhere, must not be answered as one, and of what both take, method, path
and body must be the same.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import h11

from fuzz.pieces import pieces
from loraledger.events import Event, Reject, RequestArrived
from loraledger.gateway.auth import Access, Grant
from loraledger.gateway.client import Client
from loraledger.gateway.heads import CONTINUE
from loraledger.gateway.paths import FORMS
from loraledger.gateway.peek import peek
from loraledger.gateway.settings import PlaneSettings
from loraledger.gateway.state import PlaneState

SETTINGS: Final = PlaneSettings(header_bytes=4096, body_bytes=4096, pipelined=10_000)
ENGINE_NAME: Final = "alpaca@3fa9c1d20b7e"
NOW: Final = 1_700_000_000 * 10**9
KEY: Final = b"sk-acme"
ACCESS: Final = Access(
    [Grant(tenant="acme", key_hashes=(hashlib.sha256(KEY).digest(),), adapters=frozenset({"alpaca", "sql"}))], ["base"]
)
_CLOSING: Final = b"Connection: close\r\n"


class _Loop:
    """As much of an event loop as a connection asks for."""

    def __init__(self) -> None:
        self._soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._soon.append(callback)

    def settle(self) -> None:
        while self._soon:
            self._soon.pop(0)()


@dataclass
class _Wire:
    """The transport of one connection."""

    log: list[object]
    closing: bool = False

    def write(self, data: bytes) -> None:
        if data != CONTINUE:  # whether it is asked for depends on what has come by then
            self.log.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = write_eof = close

    def pause_reading(self) -> None:
        return

    resume_reading = pause_reading

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, _: str) -> None:
        return


@dataclass(frozen=True)
class Asked:
    """A request that the gateway took: whose, for what, and its body for an engine."""

    tenant: str
    adapter: str | None
    path: bytes
    stream: bool
    max_tokens: int | None
    client_id: str | None
    trace: bytes
    body: bytes


@dataclass(frozen=True)
class Answered:
    """One answer, ``closes``: and the connection with it; ``words``: all but the line that says so; ``asked``: what it answers."""

    status: int
    closes: bool
    words: bytes
    asked: Asked | None

    @property
    def framed(self) -> bool:
        """Whether the whole request was read, so that its end is where the next one begins."""
        return self.asked is not None or not self.closes


class _State(PlaneState):
    """With ids that are the same in each run."""

    def request_id(self) -> str:
        return "id"


@dataclass
class _Gateway:
    """One connection to a gateway that takes what it can and refuses all that it took."""

    log: list[object] = field(default_factory=list)

    def read(self, parts: list[bytes]) -> list[Answered]:
        loop, wire = _Loop(), _Wire(self.log)
        state = _State(SETTINGS, self._feed, lambda: NOW, ACCESS)
        self._state = state
        asyncio._set_running_loop(cast(asyncio.AbstractEventLoop, loop))
        try:
            client = Client(state)
            client.connection_made(cast(asyncio.Transport, wire))
            for part in parts:
                client.data_received(part)
                loop.settle()
            client.connection_lost(None)
        finally:
            asyncio._set_running_loop(None)
        assert not state.open
        assert state.bodies.total == 0
        return list(self._answers())

    def _feed(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            taken = self._state.open[event.request]
            head, body = taken.head, taken.peek.rewrite(ENGINE_NAME)
            said = (event.tenant, event.adapter, head.path, event.stream, event.max_tokens, head.client_id, head.trace)
            self.log.append(Asked(*said, body))
            taken.reject(Reject(event.request, "rejected", 503, "capacity", "not now"))

    def _answers(self) -> Iterator[Answered]:
        asked: Asked | None = None
        for entry in self.log:
            if isinstance(entry, Asked):
                asked = entry
            else:
                words = cast(bytes, entry)
                assert words.startswith(b"HTTP/1.1 "), words
                plain = words.replace(_CLOSING, b"", 1)
                yield Answered(int(words[9:12]), len(plain) < len(words), plain, asked)
                asked = None


@dataclass(frozen=True)
class Peer:
    """What h11 reads: whole requests as (method, path, body, in chunks), and whether it could say what comes after them."""

    requests: list[tuple[bytes, bytes, bytes, bool]]
    sure: bool


def http(data: bytes, _: Path) -> list[Answered]:
    """Read ``data`` as what one client sends. Returns the answers."""
    reference = _Gateway().read([data[at : at + 1] for at in range(len(data))])
    peer = read_by_h11(data)
    for parts in ([data] if data else [], *pieces(data)):
        answers = _Gateway().read(parts)
        assert _alike(answers, reference, peer), (parts, answers, reference)
    for number, answer in enumerate(reference):
        if not answer.framed or (number >= len(peer.requests) and not peer.sure):
            continue
        assert number < len(peer.requests), f"h11 does not take request {number}, answered {answer}"
        method, path, body, _chunked = peer.requests[number]
        if answer.asked is not None:
            assert (method, path) == (b"POST", answer.asked.path)
            assert peek(body, FORMS[path]).rewrite(ENGINE_NAME) == answer.asked.body
    return reference


def _alike(answers: list[Answered], reference: list[Answered], peer: Peer) -> bool:
    """Whether they are the same, or one is cut off because bytes came in one read with the end of a body in chunks."""
    for number, (answer, other) in enumerate(zip(answers, reference, strict=False)):
        if not answer.framed and not other.framed and answer.asked is other.asked is None:
            return True  # both close: which fault is named first may depend on what had come
        if (answer.status, answer.words, answer.asked) != (other.status, other.words, other.asked):
            return False
        if answer.closes != other.closes:
            return answer.closes and number < len(peer.requests) and peer.requests[number][3]
    return len(answers) == len(reference)


def read_by_h11(data: bytes) -> Peer:
    """What h11 makes of ``data``, which it is given whole."""
    peer = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    peer.receive_data(data)
    found: list[tuple[bytes, bytes, bytes, bool]] = []
    head, body = None, b""
    try:
        while True:
            event = peer.next_event()
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                chunked = any(name == b"transfer-encoding" for name, _ in head.headers)
                found.append((head.method, head.target.partition(b"?")[0], body, chunked))
                peer.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                peer.send(h11.EndOfMessage())
                if peer.our_state is not h11.DONE:
                    return Peer(found, True)
                peer.start_next_cycle()
            else:
                return Peer(found, True)
    except h11.RemoteProtocolError as error:
        # RFC 9112, 2.2: an empty line ahead of a request is to be ignored, which h11 does not do.
        return Peer(found, "no request line" not in str(error))
