"""The minimal engine behind every proxy that is measured, and the requests that it understands.

Run: python -m benchmarks.peers.upstream PORT

An asyncio protocol on uvloop that speaks as much of vLLM's API as routers ask for at their start, and knows nothing but the answers
below, so that neither it nor the client is what is measured. A unary answer has some 700 bytes. A stream has as many events as
``max_tokens`` says, one write each, paced by ``seed`` (milliseconds), which every proxy passes on; then usage and the end in one.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Final, cast

import uvloop

from benchmarks.processes import KEY

ADAPTERS: Final = 4
MODELS: Final = tuple(name for number in range(ADAPTERS) for name in ("base", f"a{number}"))
"""What is asked for in turn: the base model for half of the requests."""
EVENTS: Final = 100
EVERY_MS: Final = 20
WORDS: Final = (" word", " more")
"""What streams say, in turn: LiteLLM takes a model that sends 100 equal events for one that repeats itself, and ends the stream."""
TEXT: Final = "a sentence of the answer, about as long as they are. " * 8
END: Final = b"0\r\n\r\n"
_METRICS: Final = b"process_start_time_seconds 1.7e9\nvllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
_USAGE: Final = b'"usage":{"prompt_tokens":180,"completion_tokens":100,"total_tokens":280}'
_KNOWN: Final = (b"/health", b"/version", b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter")


class Upstream(asyncio.Protocol):
    """One connection of the minimal engine. ``loaded`` is what it lists."""

    def __init__(self, loaded: dict[bytes, None]) -> None:
        self._loaded = loaded
        self._loop = asyncio.get_running_loop()
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lowered = head.lower()
        if b"transfer-encoding: chunked" in lowered:
            if not rest.endswith(END):
                return
            rest = unchunked(rest)
        elif len(rest) < int(_field(lowered, b"content-length: ", b"\r\n") or 0):
            return
        self._buffer = b""
        self._respond(head.split(b" ", 2)[1], rest)

    def _respond(self, path: bytes, body: bytes) -> None:
        if not path.endswith(b"completions"):
            self._control(path, body)
            return
        model = _field(body, b'"model":"', b'"') or _field(body, b'"model": "', b'"')
        asked = body.replace(b" ", b"")
        if b'"stream":true' in asked:
            self._stream(model, _count(asked, b"max_tokens"), _count(asked, b"seed") / 1000)
        else:
            self._answer(_unary(model))

    def _control(self, path: bytes, body: bytes) -> None:
        if path == b"/metrics":
            self._answer(_METRICS)
        elif path == b"/v1/models":
            cards = [b'{"id":"base","object":"model","owned_by":"vllm","parent":null}']
            cards += [b'{"id":"%b","object":"model","owned_by":"vllm","parent":"base"}' % name for name in self._loaded]
            self._answer(b'{"object":"list","data":[%b]}' % b",".join(cards))
        elif path in _KNOWN:
            if path == b"/v1/load_lora_adapter":
                self._loaded[json.loads(body)["lora_name"].encode()] = None
            elif path == b"/v1/unload_lora_adapter":
                self._loaded.pop(json.loads(body)["lora_name"].encode(), None)
            self._answer(b'{"version":"0"}')
        else:  # routers tell an engine by the paths that it lacks
            self._answer(b'{"detail":"Not Found"}', b"404 Not Found")

    def _answer(self, body: bytes, status: bytes = b"200 OK") -> None:
        self._transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body
        )

    def _stream(self, model: bytes, events: int, every_s: float) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        each = [_chunk(_event(model, b'{"index":0,"text":"%b"}' % word.encode(), b"")) for word in WORDS]
        self._tick(each, _chunk(_last(model)), 0, events, every_s)

    def _tick(self, each: list[bytes], last: bytes, number: int, events: int, every_s: float) -> None:
        if self._transport.is_closing():
            return
        if number < events:
            self._transport.write(each[number % len(each)])
            self._loop.call_later(every_s, self._tick, each, last, number + 1, events, every_s)
        else:
            self._transport.write(last + END)


def _field(data: bytes, before: bytes, after: bytes) -> bytes:
    return data.partition(before)[2].partition(after)[0]


def _count(body: bytes, name: bytes) -> int:
    return int(re.findall(b'"%b":([0-9]+)' % name, body)[0])


def unchunked(body: bytes) -> bytes:
    """What a chunked body says. Raises ValueError when it is no such body."""
    parts: list[bytes] = []
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16)
        if length == 0:
            return b"".join(parts)
        parts.append(body[:length])
        body = body[length + 2 :]


def streamed(events: int) -> str:
    """The text of a stream of so many."""
    return "".join(WORDS[number % len(WORDS)] for number in range(events))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _unary(model: bytes) -> bytes:
    return (
        b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"%b","choices":[{"index":0,"text":"%b",'
        b'"finish_reason":"length"}],%b}' % (model, TEXT.encode(), _USAGE)
    )


def _event(model: bytes, choices: bytes, more: bytes) -> bytes:
    head = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"%b",' % model
    return head + b'"choices":[%b]%b}\n\n' % (choices, more)


def _last(model: bytes) -> bytes:
    return _event(model, b"", b"," + _USAGE) + b"data: [DONE]\n\n"


def request(model: str, *, stream: bool, events: int = EVENTS, every_ms: int = EVERY_MS, key: str = KEY) -> bytes:
    """The bytes of one completion, some 900 of them."""
    prompt = "Tell me more about adapters, slots and hosts, please. " * 12
    asked = {"model": model, "prompt": prompt, "max_tokens": events, "seed": every_ms, "stream": stream}
    body = json.dumps(asked).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


async def serve(port: int) -> None:
    """Answer on ``port`` until cancelled."""
    loaded: dict[bytes, None] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(loaded), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1])))
