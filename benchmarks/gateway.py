"""CPU time of the whole gateway process for a unary request and for a streamed event. Run: python -m benchmarks.gateway [--runs 3]

Kernel, journal, rows, metrics and sampling of two replicas included. The upstream is a minimal server of this file (an asyncio
protocol on uvloop that knows nothing but the answers below), so that neither it nor the client is what is measured. Each run sends
the same load to the gateway and, as the limit of what any server of this kind can reach, straight to the upstream; runs alternate.
For each process: user and system time by the kernel's accounting, divided by what was done. Half of the requests are for one of
four adapters, which stay loaded; their model name is rewritten both ways.

Streams are paced, not saturated: 200 at a time, an event each 20 ms, so that an event usually comes alone, as an engine sends it.
Answers of one read that hold several events cost less for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.processes import KEY, Gateway, cpu_s, free_port, spread, start

UNARY, AT_ONCE = 8000, 32
STREAMS, EVENTS, EVERY_MS = 200, 100, 20
ADAPTERS = 4
MODELS = [name for number in range(ADAPTERS) for name in ("base", f"a{number}")]
METRICS = b"process_start_time_seconds 1.7e9\nvllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
USAGE = b'"usage":{"prompt_tokens":180,"completion_tokens":100,"total_tokens":280}'
TEXT = "a sentence of the answer, about as long as they are. " * 8


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
        length = _field(head.lower(), b"content-length: ", b"\r\n")
        if len(rest) < int(length or 0):
            return
        self._buffer = b""
        path = head.split(b" ", 2)[1]
        if path.endswith(b"completions"):
            model = _field(rest, b'"model":"', b'"') or _field(rest, b'"model": "', b'"')
            asked = rest.replace(b" ", b"")
            if b'"stream":true' in asked:
                self._stream(model, _count(asked, b"max_tokens"), _count(asked, b"seed") / 1000)
            else:
                self._answer(_unary(model))
        else:
            self._answer(self._control(path, rest))

    def _control(self, path: bytes, body: bytes) -> bytes:
        if path == b"/metrics":
            return METRICS
        if path == b"/v1/models":
            cards = [b'{"id":"base","parent":null}'] + [b'{"id":"%b","parent":"base"}' % name for name in self._loaded]
            return b'{"object":"list","data":[%b]}' % b",".join(cards)
        if path == b"/v1/load_lora_adapter":
            self._loaded[json.loads(body)["lora_name"].encode()] = None
        return b'{"version":"0"}'

    def _answer(self, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )

    def _stream(self, model: bytes, events: int, every_s: float) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self._tick(_chunk(_event(model, b'{"index":0,"text":" word"}', b"")), _chunk(_last(model)), events, every_s)

    def _tick(self, event: bytes, last: bytes, left: int, every_s: float) -> None:
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(event)
            self._loop.call_later(every_s, self._tick, event, last, left - 1, every_s)
        else:
            self._transport.write(last + b"0\r\n\r\n")


def _field(data: bytes, before: bytes, after: bytes) -> bytes:
    return data.partition(before)[2].partition(after)[0]


def _count(body: bytes, name: bytes) -> int:
    return int(re.findall(b'"%b":([0-9]+)' % name, body)[0])


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _unary(model: bytes) -> bytes:
    return (
        b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"%b","choices":[{"index":0,"text":"%b",'
        b'"finish_reason":"length"}],%b}' % (model, TEXT.encode(), USAGE)
    )


def _event(model: bytes, choices: bytes, more: bytes) -> bytes:
    head = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"%b",' % model
    return head + b'"choices":[%b]%b}\n\n' % (choices, more)


def _last(model: bytes) -> bytes:
    return _event(model, b"", b"," + USAGE) + b"data: [DONE]\n\n"


async def serve_upstream(port: int) -> None:
    loaded: dict[bytes, None] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(loaded), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


class Caller(asyncio.Protocol):
    """One client connection: sends a request whenever ``turn`` has one more for it, and counts whole answers."""

    def __init__(self, turn: Callable[[], bytes | None], done: asyncio.Future[None], ending: bytes | None) -> None:
        self._turn, self._done, self._ending = turn, done, ending
        self._got = b""
        self.reads = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def data_received(self, data: bytes) -> None:
        if self._ending is not None:  # a stream: kept is only what may hold its end
            self._got = (self._got + data)[-64:]
            if self._got.endswith(self._ending):
                self._next()
            return
        self._got += data
        head, found, body = self._got.partition(b"\r\n\r\n")
        if found and len(body) >= int(_field(head.lower(), b"content-length: ", b"\r\n")):
            if b" 200 " not in head[:20]:
                self._done.set_exception(RuntimeError(self._got.decode()))
                return
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError("the connection was closed"))

    def _next(self) -> None:
        self._got = b""
        request = self._turn()
        if request is not None:
            self._transport.write(request)
        elif not self._done.done():
            self._done.set_result(None)
            self._transport.close()


def request(model: str, stream: bool, events: int = EVENTS, every_ms: int = EVERY_MS) -> bytes:
    """A request; the minimal engine reads its pace from the seed, which every proxy passes on."""
    prompt = "Tell me more about adapters, slots and hosts, please. " * 12
    asked = {"model": model, "prompt": prompt, "max_tokens": events, "seed": every_ms, "stream": stream}
    body = json.dumps(asked).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


async def load(port: int, count: int, connections: int, stream: bool) -> None:
    """``count`` requests over ``connections`` connections, each one after the other on its connection."""
    loop = asyncio.get_running_loop()
    requests = [request(model, stream) for model in MODELS]
    left = count

    def turn() -> bytes | None:
        nonlocal left
        left -= 1
        return requests[left % len(requests)] if left >= 0 else None

    ends: list[asyncio.Future[None]] = []
    for _ in range(connections):
        ends.append(loop.create_future())
        await loop.create_connection(
            lambda: Caller(turn, ends[-1], b"[DONE]\n\n\r\n0\r\n\r\n" if stream else None), "127.0.0.1", port
        )
        if stream:
            await asyncio.sleep(EVERY_MS / 1000 / connections)  # spread over the interval, as engines' steps are
    await asyncio.gather(*ends)


class Reading:
    """CPU microseconds for each thing done, of one process, run by run; and what was done a second."""

    def __init__(self) -> None:
        self.cpu_us: list[float] = []
        self.per_s: list[float] = []

    def take(self, runner: asyncio.Runner, pid: int, port: int, *, stream: bool) -> None:
        """One run."""
        before, began = cpu_s(pid), time.perf_counter()
        if stream:
            runner.run(load(port, STREAMS, STREAMS, True))
        else:
            runner.run(load(port, UNARY, AT_ONCE, False))
        count = STREAMS * EVENTS if stream else UNARY
        self.per_s.append(count / (time.perf_counter() - began))
        self.cpu_us.append((cpu_s(pid) - before) / count * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--upstream", type=int, metavar="PORT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.upstream is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_upstream(given.upstream))
        return
    kinds = ("gateway, unary", "upstream alone, unary", "gateway, stream", "upstream alone, stream")
    readings = {kind: Reading() for kind in kinds}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        ports = [free_port(), free_port()]
        upstreams = [start(stack, Path(name), "benchmarks.gateway", "--upstream", str(port)) for port in ports]
        gateway = Gateway(stack, Path(name), ports, adapters=ADAPTERS, slots=ADAPTERS)
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        runner.run(load(gateway.port, 400, AT_ONCE, False))  # loads the adapters
        idle = cpu_s(gateway.pid)
        time.sleep(3.0)
        idle = (cpu_s(gateway.pid) - idle) / 3.0
        for _ in range(given.runs):
            readings[kinds[0]].take(runner, gateway.pid, gateway.port, stream=False)
            readings[kinds[1]].take(runner, upstreams[0], ports[0], stream=False)
            readings[kinds[2]].take(runner, gateway.pid, gateway.port, stream=True)
            readings[kinds[3]].take(runner, upstreams[0], ports[0], stream=True)
    print(f"{given.runs} runs: {UNARY} unary requests, {AT_ONCE} at once; {STREAMS} streams of {EVENTS} events, paced")
    print(f"{'':<24} CPU us each, median (range)     a second")
    for kind, reading in readings.items():
        print(f"{kind:<24} {spread(reading.cpu_us):<31} {spread(reading.per_s)}")
    unary = sorted(readings[kinds[0]].cpu_us)[given.runs // 2]
    streamed = [us - unary / EVENTS for us in readings[kinds[2]].cpu_us]
    print(f"{'an event without its request':<28} {spread(streamed)}")
    print(f"idle, sampling two replicas each second: {idle * 100:.1f} % of a core (in the figures above)")


if __name__ == "__main__":
    main()
