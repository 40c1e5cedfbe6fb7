"""Idle connections: what they take, and whether others notice.

Run: python -m benchmarks.idle_connections [--connections N] [--quick] [--markdown] [--json FILE]

A gateway process in front of one emulated replica. A probe asks for the model list, 50 times a second on a connection of its own:
no engine is involved, its times are the gateway's. 5 s each: with no other connection, with N that were opened and sent nothing,
with N that had an answer each and are kept alive, the same opened a second time, and after all have closed. For each: memory that
the process owns, its CPU, the probe's times, open files. Memory is flat if the connections take the same when opened again.

It takes a minute. The exit code is 1 when connections take over 5 % more memory opened again, or the gateway closed some.

The default N is 9,999 (the probe is one more) or what this process may have open: the other ends of the connections are here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

import uvloop

from benchmarks.printed import show
from benchmarks.processes import KEY, Gateway, cpu_s, free_port, memory_mib, start, unwind_on_signals

PROBES: Final = 250
EVERY_S: Final = 0.02
MOST: Final = 9_999
OWN: Final = 200
WITHIN: Final = 0.05
LIMIT_S: Final = 60.0
ASK: Final = f"GET /v1/models HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()


class Idle(asyncio.Protocol):
    """A connection that asks once, or never, and then stays."""

    def __init__(self, ask: bool) -> None:
        self._ask = ask
        self.answered = False
        self.lost = self.left = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._ask:
            self.transport.write(ASK)

    def data_received(self, data: bytes) -> None:
        self.answered |= data.startswith(b"HTTP/1.1 200 ")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = not self.left

    def leave(self) -> None:
        """Hang up."""
        self.left = True
        self.transport.close()


def open_files(pid: int) -> int:
    """Of the process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def probe(gateway: Gateway) -> list[float]:
    """Milliseconds of each of ``PROBES`` requests on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    found = []
    for _ in range(PROBES):
        began = time.perf_counter()
        writer.write(ASK)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        found.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(EVERY_S)
    writer.close()
    return sorted(found)


async def opened(gateway: Gateway, count: int, *, ask: bool) -> list[Idle]:
    """Open ``count`` connections; with ``ask`` wait until each had an answer."""
    loop = asyncio.get_running_loop()
    idle = [Idle(ask) for _ in range(count)]
    for at in range(0, count, 100):
        batch = idle[at : at + 100]
        await asyncio.gather(*(loop.create_connection(lambda one=one: one, "127.0.0.1", gateway.port) for one in batch))  # type: ignore[misc]
    for _ in range(400):
        if all(one.answered or one.lost or not ask for one in idle):
            break
        await asyncio.sleep(0.05)
    return idle


@dataclass
class Phase:
    """One line: what the process owns (MiB), its CPU, the probe's times (ms), open files, connections that it closed."""

    what: str
    own_mib: float
    cpu: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    files: int
    lost: int = 0

    def row(self) -> list[str]:
        """Its cells, as ``HEADINGS`` names them."""
        times = [f"{ms:.2f}" for ms in (self.p50_ms, self.p99_ms, self.max_ms)]
        return [self.what, f"{self.own_mib:.1f}", f"{100 * self.cpu:.1f}", *times, str(self.files), str(self.lost)]


HEADINGS: Final = ("other connections", "own MiB", "CPU %", "p50 ms", "p99 ms", "max ms", "files", "closed")


async def phase(gateway: Gateway, what: str) -> Phase:
    """Probe, and read the process."""
    print(what, file=sys.stderr, flush=True)
    before, began = cpu_s(gateway.pid), time.monotonic()
    async with asyncio.timeout(LIMIT_S):
        times = await probe(gateway)
    cpu = (cpu_s(gateway.pid) - before) / (time.monotonic() - began)
    own, files = memory_mib(gateway.pid)["Pss_Anon"], open_files(gateway.pid)
    return Phase(what, own, cpu, times[len(times) // 2], times[int(len(times) * 0.99)], times[-1], files)


async def run(gateway: Gateway, count: int) -> list[Phase]:
    """All phases. Raises RuntimeError when connections that ask get no answer."""
    found = [await phase(gateway, "none")]
    for what, ask in (("that sent nothing", False), ("kept alive", True), ("kept alive, opened again", True)):
        idle = await opened(gateway, count, ask=ask)
        silent = sum(ask and not one.answered for one in idle)
        if silent:
            raise RuntimeError(f"{silent} of {count} connections had no answer")
        found.append(await phase(gateway, f"{count:,} {what}"))
        found[-1].lost = sum(one.lost for one in idle)
        for one in idle:
            one.leave()
        await asyncio.sleep(2.0)
    return [*found, await phase(gateway, "all have closed")]


def report(found: list[Phase], count: int, markdown: bool) -> bool:
    """Print the phases and what they come to; returns whether memory was flat and nothing was closed."""
    show([HEADINGS, *(one.row() for one in found)], markdown)
    alone, _, once, again, after = (one.own_mib for one in found)
    each, more, lost = 1024 * (again - alone) / count, again / once - 1, sum(one.lost for one in found)
    flat = abs(more) <= WITHIN
    print(f"- {each:.2f} KiB a kept-alive connection, what is kept for later ones included")
    print(f"- opened again {100 * more:+.1f} % (aim: within {100 * WITHIN:.0f} %): {'met' if flat else 'missed'}")
    print(f"- {after - alone:.1f} MiB more than at first after all have closed; {lost} closed by the gateway (aim: 0)")
    return flat and lost == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST + OWN if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    parser.add_argument("--connections", type=int, default=min(MOST, files - OWN))
    parser.add_argument("--quick", action="store_true", help="a tenth of the connections")
    parser.add_argument("--markdown", action="store_true", help="for docs/performance.md")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    given = parser.parse_args()
    unwind_on_signals()
    count = given.connections // 10 if given.quick else given.connections
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        port = free_port()
        start(stack, Path(name), "loraledger.engines.emulator", *f"--port {port} --slots 4".split())
        gateway = Gateway(stack, Path(name), [port], adapters=1, slots=4)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(run(gateway, count))
    good = report(found, count, given.markdown)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")
    sys.exit(0 if good or given.quick else 1)


if __name__ == "__main__":
    main()
