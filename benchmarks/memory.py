"""Memory of a gateway process with 1,000 open streams. Run: python -m benchmarks.memory [--streams N]

Two emulated replicas at a twentieth of their speed (a token a stream and some 0.3 s), 1,000 clients with a connection each that
read what comes. Three readings: idle after the start, while all streams are open and content flows, and after all have ended.

The file pages hold the journal's segment as far as it is written: up to ``record.segment_bytes`` (64 MiB) more than shown here once
a segment is full. They are page cache, which the kernel takes back when it needs memory; anonymous pages are what the process owns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.processes import KEY, Gateway, free_port, memory_mib, start

AIM_MIB = 120
HOLD_S = 5.0
SLOTS = 4


class Stream(asyncio.Protocol):
    """One client: asks for an endless answer and reads it."""

    def __init__(self, number: int) -> None:
        model = "base" if number % 2 else f"a{number // 2 % SLOTS}"
        prompt = f"Request {number}: tell me more."
        body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 4000, "stream": True}).encode()
        self._request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.reads = 0
        self.failed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.failed |= self.reads == 0 and not data.startswith(b"HTTP/1.1 200")
        self.reads += 1


async def hold(gateway: Gateway, count: int) -> dict[str, float]:
    """Open ``count`` streams, wait until content flows in each, read the memory, and hang up."""
    loop = asyncio.get_running_loop()
    streams = [Stream(number) for number in range(count)]
    for number, stream in enumerate(streams):
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", gateway.port)  # type: ignore[misc]
        if number % 20 == 0:
            await asyncio.sleep(0.01)
    for _ in range(300):
        if all(stream.reads >= 3 for stream in streams):
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(HOLD_S)
    flowing = sum(stream.reads >= 3 and not stream.failed for stream in streams)
    summary = await asyncio.to_thread(gateway.summary)
    found = memory_mib(gateway.pid)
    print(f"{summary['open_requests']} open, content flows in {flowing}")
    if flowing < count:
        raise RuntimeError("not all streams flow: the figure would be too low")
    for stream in streams:
        stream.transport.close()
    return found


def settle(gateway: Gateway) -> None:
    """Wait until every stream that was left has ended."""
    while gateway.summary()["open_requests"]:
        time.sleep(0.1)
    time.sleep(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    count = parser.parse_args().streams
    readings: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        ports = [free_port(), free_port()]
        for port in ports:
            flags = f"--port {port} --slots {SLOTS} --max-seqs 512 --speed 0.05 --kv-blocks 200000"
            start(stack, folder, "loraledger.engines.emulator", *flags.split())
        gateway = Gateway(stack, folder, ports, adapters=24, slots=SLOTS)
        time.sleep(2.0)
        readings["idle, just started"] = memory_mib(gateway.pid)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            readings[f"{count} open streams"] = runner.run(hold(gateway, count))
        settle(gateway)
        readings["after they ended"] = memory_mib(gateway.pid)
    print(f"{'MiB':<22} {'RSS':>7} {'PSS':>7} {'anonymous':>10} {'file':>7}")
    for what, found in readings.items():
        print(f"{what:<22} {found['Rss']:7.1f} {found['Pss']:7.1f} {found['Pss_Anon']:10.1f} {found['Pss_File']:7.1f}")
    worst = max(found["Rss"] for found in readings.values())
    print(f"aim: RSS below {AIM_MIB} MiB with {count} open streams: {'met' if worst < AIM_MIB else 'MISSED'}")


if __name__ == "__main__":
    main()
