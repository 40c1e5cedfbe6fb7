"""Idle connections: what they take, and whether others notice. Run: python -m benchmarks.idle_connections [--connections N]

A gateway process in front of one emulated replica. A probe asks for the model list, 50 times a second on a connection of its own:
no engine is involved, its times are the gateway's. 5 s each: with no other connection, with N that were opened and sent nothing,
with N that had an answer each and are kept alive, the same opened a second time, and after all have closed. For each: memory that
the process owns, its CPU, the probe's times, open files. Memory is flat if the connections take the same when opened again.

The default N is 9,999 (the probe is one more) or what this process may have open: the other ends of the connections are here.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final, cast

import uvloop

from benchmarks.processes import KEY, Gateway, cpu_s, free_port, memory_mib, start

PROBES: Final = 250
EVERY_S: Final = 0.02
OWN: Final = 200
ASK: Final = f"GET /v1/models HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()


class Idle(asyncio.Protocol):
    """A connection that asks once, or never, and then stays."""

    def __init__(self, ask: bool) -> None:
        self._ask = ask
        self.answered = False
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._ask:
            self.transport.write(ASK)

    def data_received(self, data: bytes) -> None:
        self.answered |= data.startswith(b"HTTP/1.1 200 ")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


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


async def phase(gateway: Gateway, what: str) -> float:
    """Probe, and print one line. Returns the memory that the process owns, MiB."""
    before, began = cpu_s(gateway.pid), time.monotonic()
    times = await probe(gateway)
    cpu = (cpu_s(gateway.pid) - before) / (time.monotonic() - began)
    memory, files = memory_mib(gateway.pid), open_files(gateway.pid)
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    print(
        f"{what:<34} {memory['Pss_Anon']:8.1f} {100 * cpu:6.1f} {p50:8.2f} {p99:8.2f} {times[-1]:8.2f} {files:7d}",
        flush=True,
    )
    return memory["Pss_Anon"]


async def run(gateway: Gateway, count: int) -> None:
    """All phases."""
    alone = await phase(gateway, "no other connection")
    held = []
    for what, ask in (("that sent nothing", False), ("kept alive", True), ("kept alive, opened again", True)):
        idle = await opened(gateway, count, ask=ask)
        held.append(await phase(gateway, f"{count} {what}"))
        lost = sum(one.lost for one in idle)
        if lost:
            print(f"  {lost} of them were closed by the gateway")
        for one in idle:
            one.transport.close()
        await asyncio.sleep(2.0)
    after = await phase(gateway, "after all have closed")
    each, again = 1024 * (held[-1] - alone) / count, 100 * (held[2] / held[1] - 1)
    print(f"{each:.2f} KiB a connection; opened again {again:+.1f} %; {after - alone:.1f} MiB more than before, after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    parser.add_argument("--connections", type=int, default=min(9_999, hard - OWN))
    count = parser.parse_args().connections
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        port = free_port()
        start(stack, Path(name), "loraledger.engines.emulator", *f"--port {port} --slots 4".split())
        gateway = Gateway(stack, Path(name), [port], adapters=1, slots=4)
        print(f"{'':<34} {'own MiB':>8} {'CPU %':>6} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} {'files':>7}")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(gateway, count))


if __name__ == "__main__":
    main()
