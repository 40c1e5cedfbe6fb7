"""Memory and open files of a gateway process over a million requests and ten thousand clients that leave.

Run: python -m benchmarks.flat_memory [--requests 1000000] [--leavers 10000] [--quick] [--markdown] [--json FILE]

Two emulated replicas, 32 connections, four tenths of the requests for adapters of which not all fit, one in ten streamed. Every
twentieth of the way the memory is read; the first tenth is warm-up, and from its end on RSS must stay within 5 % of its median.
Then clients ask for long streams, 100 at a time, and reset their connections in the middle: RSS must stay within the same 5 %, and
the gateway must have seen nine in ten of them leave. At the end no more files may be open than at the first reading under load.

Journal segments are 2 MiB here instead of 64: the pages of the segment in hand count as RSS of the process, although they are page
cache, and up to 64 MiB that come and go would hide what is looked for. They are made into tables each 5 minutes, or a gigabyte of
them would lie in TMPDIR; no reading falls into that. What the control plane keeps (1,000 rows of each table) and the allocator's
own reserve are reached within the warm-up: replicas are sampled four times a second for that.

A million requests and those who leave take some ten minutes on two cores. An answer that is not 200 is counted, and one is too
many; the exit code is 1 when anything is missed. ``--quick`` says whether the program works: after so few requests RSS still grows
to where it stays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import httpx2
import uvloop

from benchmarks.peers.running import tree
from benchmarks.printed import show
from benchmarks.processes import ROOT, cpu_s, free_port, memory_mib, start, unwind_on_signals

sys.path.insert(0, str(ROOT / "tests"))  # the gateway's process is that of the tests

from e2e.fleet import parse_metrics, write_adapters
from support.gateway import GatewayProcess, replica, tenant

ADAPTERS, SLOTS = 8, 4
CONNECTIONS, LEAVERS_AT_ONCE = 32, 100
READINGS, QUICK_READINGS = 20, 5
WITHIN = 0.05
SEEN_LEAVING = 0.9
LONG = 8_000
"""Tokens of a stream that is left after its second read: with half as many one in nine had ended before, beside other work."""
IDLE_S = 6.0
"""Idle connections to replicas are closed after 4 s, by a sweep each second."""
COMPACTION_S = 900.0
"""Five minutes of segments are some 200 of them, four tables each, on a core that is shared."""


def request(model: str, *, stream: bool, tokens: int) -> bytes:
    """The bytes of one."""
    prompt = "Tell me more about adapters, slots and hosts, please."
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens, "stream": stream}).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer key-acme\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


class Caller(asyncio.Protocol):
    """One connection: asks again whenever an answer is whole, as long as ``turn`` gives it something to ask."""

    def __init__(
        self, turn: Callable[[], bytes | None], done: asyncio.Future[None], refused: Callable[[bytes], None]
    ) -> None:
        self._turn, self._done, self._refused, self._got = turn, done, refused, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, body = self._got.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if found and (len(body) >= int(length) if length else body.endswith(b"0\r\n\r\n")):
            if not head.startswith(b"HTTP/1.1 200"):
                self._refused(self._got)
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError("the connection was closed"))

    def _next(self) -> None:
        self._got = b""
        sent = self._turn()
        if sent is not None:
            self._transport.write(sent)
        elif not self._done.done():
            self._done.set_result(None)
            self._transport.close()


class Leaver(asyncio.Protocol):
    """One client that asks for a long stream and resets the connection once some of it has come."""

    def __init__(self, sent: bytes, gone: asyncio.Future[None]) -> None:
        self._sent, self._gone, self._reads = sent, gone, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._sent)

    def data_received(self, data: bytes) -> None:
        self._reads += 1
        if self._reads == 2:
            linger = struct.pack("ii", 1, 0)  # a reset, not an orderly end
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reads < 2:
            self._gone.set_exception(RuntimeError("the stream did not get under way"))
        else:
            self._gone.set_result(None)


async def ask(port: int, count: int) -> Counter[str]:
    """``count`` requests, one after the other on each of the connections; returns the first lines of answers that are not 200.

    Raises RuntimeError when a connection is closed.
    """
    models = ["base"] * 12 + [f"a{number}" for number in range(ADAPTERS)]
    requests = [request(model, stream=number % 10 == 0, tokens=1) for number, model in enumerate(models)]
    left = count

    def turn() -> bytes | None:
        nonlocal left
        left -= 1
        return requests[left % len(requests)] if left >= 0 else None

    refused: Counter[str] = Counter()

    def note(answer: bytes) -> None:
        refused[answer.partition(b"\r\n")[0].decode(errors="replace")] += 1

    loop = asyncio.get_running_loop()
    ends = [loop.create_future() for _ in range(CONNECTIONS)]
    for end in ends:
        await loop.create_connection(lambda end=end: Caller(turn, end, note), "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*ends)
    return refused


async def leave(port: int, count: int) -> None:
    """``count`` clients that leave in the middle of a stream."""
    loop = asyncio.get_running_loop()
    sent = request("base", stream=True, tokens=LONG)
    for _ in range(count // LEAVERS_AT_ONCE):
        ends = [loop.create_future() for _ in range(LEAVERS_AT_ONCE)]
        for end in ends:
            await loop.create_connection(lambda end=end: Leaver(sent, end), "127.0.0.1", port)  # type: ignore[misc]
        await asyncio.gather(*ends)


@dataclass
class Reading:
    """One line: memory in MiB, seconds since the first one."""

    what: str
    rss: float
    anonymous: float
    files: int
    cpu_s: float
    wall_s: float

    def row(self) -> list[str]:
        """Its cells."""
        return [self.what, *(f"{mib:.1f}" for mib in (self.rss, self.anonymous)), str(self.files)] + [
            f"{seconds:,.0f}" for seconds in (self.cpu_s, self.wall_s)
        ]


class Readings:
    """What is read of the process, in order."""

    def __init__(self, gateway: GatewayProcess) -> None:
        assert gateway.process is not None
        self._gateway, self._pid = gateway, gateway.process.pid
        self._began = time.monotonic()
        self.all: list[Reading] = []

    def take(self, what: str) -> None:
        """Read when nothing is open, and no connection to a replica is kept."""
        self._gateway.wait(lambda: self._gateway.summary().get("open_requests") == 0, "every request to end")
        time.sleep(IDLE_S)
        self._gateway.wait(lambda: tree(self._pid) == [self._pid], "a compaction to end", COMPACTION_S)
        memory, files = memory_mib(self._pid), len(list(Path(f"/proc/{self._pid}/fd").iterdir()))
        wall = time.monotonic() - self._began
        self.all.append(Reading(what, memory["Rss"], memory["Pss_Anon"], files, cpu_s(self._pid), wall))
        print(f"{what}: RSS {memory['Rss']:.1f} MiB, {files} files, {wall:.0f} s", file=sys.stderr, flush=True)

    def spread(self, since: int, until: int | None = None) -> float:
        """Largest distance of RSS from its median, as a share of that, over the readings from ``since`` to before ``until``."""
        rss = [one.rss for one in self.all[since:until]]
        middle = statistics.median(rss)
        return max(abs(one - middle) / middle for one in rss)


def settings_of(folder: Path, ports: list[int]) -> dict[str, Any]:
    """A fleet of two emulators; one tenant may have everything open at once."""
    paths = write_adapters(folder / "adapters", [f"a{number}" for number in range(ADAPTERS)])
    sizes = {"slots": SLOTS, "host_entries": 2 * SLOTS}
    return {
        "base": {"names": ["base"]},
        "replicas": [replica(f"r{n}", f"http://127.0.0.1:{port}", **sizes) for n, port in enumerate(ports, 1)],
        "adapters": {"list": [{"name": name, "path": str(path)} for name, path in paths.items()]},
        "tenants": [tenant("acme", ["*"], limits={"concurrency": 4096, "queue": 4096})],
        "limits": {"scrape_interval": "250ms"},
        "record": {"dir": str(folder / "record"), "segment_bytes": "2MiB", "compact": "5m"},
    }


def left_first(gateway: GatewayProcess) -> int:
    """Requests whose clients left first, as the gateway counts them."""
    page = httpx2.get(f"{gateway.control}/metrics", timeout=10.0, trust_env=False).text
    found = parse_metrics(page).get("loraledger_requests_total", [])
    return int(sum(value for labels, value in found if labels["status"] == "client_gone"))


def measure(count: int, leavers: int, readings: int) -> tuple[Readings, Counter[str], int]:
    """All requests, then all who leave; what was read, the first lines of answers that were not 200, rows of those who left."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, ports = Path(name), [free_port(), free_port()]
        for port in ports:
            flags = f"--port {port} --slots {SLOTS} --max-seqs 512 --speed 200 --kv-blocks 200000"
            start(stack, folder, "loraledger.engines.emulator", *flags.split())
        gateway = stack.enter_context(GatewayProcess(folder, settings_of(folder, ports))).start(2)
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        found, refused = Readings(gateway), Counter[str]()
        found.take("just started")
        for number in range(1, readings + 1):
            refused += runner.run(ask(gateway.port, count // readings))
            found.take(f"{number * count // readings:,} requests")
        for number in range(1, 5):
            runner.run(leave(gateway.port, leavers // 4))
            found.take(f"{number * leavers // 4:,} clients that left")
        gone = left_first(gateway)
    return found, refused, gone


def report(found: Readings, refused: Counter[str], left: tuple[int, int], readings: int, markdown: bool) -> bool:
    """Print the readings and what they come to; returns whether all is as it should be. ``left``: of so many, so many had a row."""
    rows = [["after", "RSS MiB", "anonymous MiB", "open files", "CPU s", "wall s"]]
    show([*rows, *(one.row() for one in found.all)], markdown)
    warm, after = found.spread(max(1, readings // 10), readings + 1), found.spread(readings)
    gained, (leavers, gone) = found.all[-1].files - found.all[1].files, left
    lines = (
        (f"RSS from the end of the first tenth on: within {warm:.1%} of its median", warm <= WITHIN),
        (f"RSS over those who left: within {after:.1%}", after <= WITHIN),
        (f"open files gained since the first reading under load: {gained}", gained <= 0),
        (f"clients that left, seen by the gateway as such: {gone:,} of {leavers:,}", gone >= SEEN_LEAVING * leavers),
        (f"answers that were not 200: {refused.total()}{f' {dict(refused)}' if refused else ''}", not refused),
    )
    for text, met in lines:
        print(f"- {text}: {'met' if met else 'missed'}")
    return all(met for _, met in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--leavers", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="a fiftieth of both: whether it works, not what it says")
    parser.add_argument("--markdown", action="store_true", help="for docs/performance.md")
    parser.add_argument("--json", type=Path, help="write every reading to this file")
    given = parser.parse_args()
    unwind_on_signals()
    share, readings = (50, QUICK_READINGS) if given.quick else (1, READINGS)
    count, leavers = given.requests // share, max(given.leavers // share, 4 * LEAVERS_AT_ONCE)
    found, refused, gone = measure(count, leavers, readings)
    good = report(found, refused, (leavers, gone), readings, given.markdown)
    if given.json is not None:
        kept = {"readings": [asdict(one) for one in found.all], "not 200": refused, "left": [leavers, gone]}
        given.json.write_text(json.dumps(kept), encoding="utf-8")
    sys.exit(0 if good or given.quick else 1)


if __name__ == "__main__":
    main()
