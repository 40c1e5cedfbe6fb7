"""The gateway beside other proxies, same work, one core: CPU a request and an event, latency added, streams, memory.

Run: python -m benchmarks.gateway_peers [--rounds 3] [--only NAME ...]

Every proxy runs on core 0, all of them started and idle while one is measured; upstreams and client share core 1. In each round
each proxy gets the same load in turn, so that a slow minute of the machine falls on all. Ratios are taken within a round; shown is
the median of the rounds and in brackets the lowest and highest. CPU is that of its whole process tree.

- *request*: 32 connections, the next request when an answer is whole. The machine's other core bounds what is sent, so requests a
  second are not compared here; CPU is.
- *event*: 200 streams, an event each 20 ms, so that an event usually comes alone. Its share of the request (a hundredth) is in it.
  *reads* are the client's reads for an event: below 1 several came at once, which flatters.
- *added*: at 200 requests a second, sent by the clock; latency less that of the upstream alone in the same round.
- *streams a second*: 64 connections, streams of 20 events 2 ms apart, the next one when one ends.
- *memory*: what 1,000 open streams add to the tree's proportional set size, for each.

The gateway does all of its work: key, tenant's rights and limits, look into the body, decision by the kernel, model rewritten
both ways for half of the requests, usage hidden, metrics, record. The others do what ``peers.catalog`` says.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

import httpx2
import uvloop

from benchmarks.gateway import ADAPTERS, AT_ONCE, EVENTS, EVERY_MS, MODELS, STREAMS, Caller, request
from benchmarks.peers.catalog import PEERS, Peer
from benchmarks.processes import KEY, TICKS, Gateway, free_port, memory_mib, start

PROXIES, OURS = {0}, {1}
US = "loraledger"
UNARY_S, STREAM_S, SHORT_S = 4.0, 5.0, 4.0
RATE, LATENCY_S = 200.0, 8.0
SHORT_STREAMS, SHORT_EVENTS, SHORT_EVERY_MS = 64, 20, 2
OPEN_STREAMS, OPEN_EVENTS, OPEN_EVERY_MS = 1000, 6, 1000
SLOW = {"litellm 1.105.7": 8, "fastapi and httpx": 50}
"""Streams at once of those whose one core holds no 200; LiteLLM does not reach 200 requests a second either."""
NO_RATE = "litellm 1.105.7"
READY_S = 90.0

Figures = dict[str, float]


@dataclass
class Proxy:
    """One started proxy and its figures, a dictionary for each round."""

    name: str
    work: str
    kind: str
    pid: int
    port: int
    rounds: list[Figures] = field(default_factory=list)


# --- load -------------------------------------------------------------------------------------------------------------


class Counter(Caller):
    """Counts its reads, and knows the end of an answer of any framing."""

    def __init__(self, turn: Callable[[], bytes | None], done: asyncio.Future[None], *, stream: bool) -> None:
        super().__init__(turn, done, None)
        self._stream = stream

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        if not self._got and b" 200 " not in data[:20]:
            self._done.set_exception(RuntimeError(data[:500].decode(errors="replace")))
            self._transport.close()
            return
        self._got = (self._got + data)[-64:] if self._stream else self._got + data
        if self._got.endswith(b"0\r\n\r\n") if self._stream else whole(self._got):
            self._next()


def whole(answer: bytes) -> bool:
    """Whether an answer is there to its end."""
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    _, stated, rest = head.lower().partition(b"content-length: ")
    return len(body) >= int(rest.partition(b"\r\n")[0]) if stated else body.endswith(b"0\r\n\r\n")


async def closed_loop(
    port: int, seconds: float, connections: int, *, events: int | None = None, every_ms: int = EVERY_MS
) -> tuple[int, int]:
    """Requests ended and reads made by ``connections`` clients within ``seconds``; ``events``: streams of so many."""
    loop = asyncio.get_running_loop()
    stream = events is not None
    requests = [request(model, stream, events or EVENTS, every_ms) for model in MODELS]
    began, sent = time.perf_counter(), 0

    def turn() -> bytes | None:
        nonlocal sent
        if time.perf_counter() - began > seconds:
            return None
        sent += 1
        return requests[sent % len(requests)]

    ends, callers = [], []
    for _ in range(connections):
        end: asyncio.Future[None] = loop.create_future()
        caller = Counter(turn, end, stream=stream)
        await loop.create_connection(partial(_same, caller), "127.0.0.1", port)
        ends.append(end)
        callers.append(caller)
        if stream:
            await asyncio.sleep(every_ms / 1000 / connections)  # spread over the interval, as engines' steps are
    await asyncio.gather(*ends)
    return sent, sum(caller.reads for caller in callers)


def _same(caller: Counter) -> Counter:
    return caller


async def by_clock(port: int, seconds: float, rate: float) -> list[float]:
    """Seconds that each answer took, of requests sent ``rate`` times a second, sorted."""
    loop = asyncio.get_running_loop()
    requests = [request(model, False) for model in MODELS]
    idle: list[Timed] = []
    took: list[float] = []
    began = time.perf_counter()
    for number in range(int(seconds * rate)):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        if not idle:
            _, made = await loop.create_connection(lambda: Timed(idle, took), "127.0.0.1", port)
            idle.append(made)
        idle.pop().send(requests[number % len(requests)])
    while len(took) < int(seconds * rate):  # noqa: ASYNC110 - nothing is measured any more
        await asyncio.sleep(0.05)
    return sorted(took)


class Timed(asyncio.Protocol):
    """A connection that goes back to ``idle`` when its answer is whole, and notes how long that took."""

    def __init__(self, idle: list[Timed], took: list[float]) -> None:
        self._idle, self._took, self._got = idle, took, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, data: bytes) -> None:
        """Send a request."""
        self._got, self._began = b"", time.perf_counter()
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if whole(self._got):
            self._took.append(time.perf_counter() - self._began)
            self._idle.append(self)


# --- readings ---------------------------------------------------------------------------------------------------------


def tree(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(word) for word in task.read_text(encoding="ascii").split()]
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds of the tree, with what its ended children used."""
    total = 0
    for member in tree(pid):
        words = Path(f"/proc/{member}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        total += sum(int(word) for word in words[11:15])
    return total / TICKS


def pss_mib(pid: int) -> float:
    """Proportional set size of the tree."""
    return sum(memory_mib(member)["Pss"] for member in tree(pid))


class Measuring:
    """One round on one proxy."""

    def __init__(self, runner: asyncio.Runner, upstream: int) -> None:
        self._runner, self._upstream = runner, upstream

    def round(self, proxy: Proxy) -> Figures:
        """All figures of ``proxy``; what it cannot do is left out."""
        streams = SLOW.get(proxy.name, STREAMS)
        figures: Figures = {}
        used = cpu_s(proxy.pid)
        requests, _ = self._runner.run(closed_loop(proxy.port, UNARY_S, AT_ONCE))
        figures["request us"] = (cpu_s(proxy.pid) - used) / requests * 1e6
        used = cpu_s(proxy.pid)
        ended, reads = self._runner.run(closed_loop(proxy.port, STREAM_S, streams, events=EVENTS))
        figures["event us"] = (cpu_s(proxy.pid) - used) / (ended * EVENTS) * 1e6
        figures["reads"] = reads / (ended * EVENTS)
        if proxy.name != NO_RATE:
            alone = self._runner.run(by_clock(self._upstream, LATENCY_S, RATE))
            through = self._runner.run(by_clock(proxy.port, LATENCY_S, RATE))
            for share, name in ((0.5, "p50 ms"), (0.99, "p99 ms")):
                figures[name] = 1e3 * (through[int(share * len(through))] - alone[int(share * len(alone))])
        began = time.perf_counter()
        ended, _ = self._runner.run(
            closed_loop(proxy.port, SHORT_S, min(streams, SHORT_STREAMS), events=SHORT_EVENTS, every_ms=SHORT_EVERY_MS)
        )
        figures["streams/s"] = ended / (time.perf_counter() - began)
        return figures

    def memory(self, proxy: Proxy) -> float:
        """KiB that an open stream takes."""
        streams = OPEN_STREAMS if proxy.name not in SLOW else 200
        return self._runner.run(self._open(proxy, streams))

    async def _open(self, proxy: Proxy, streams: int) -> float:
        before = pss_mib(proxy.pid)
        work = asyncio.create_task(closed_loop(proxy.port, 0.5, streams, events=OPEN_EVENTS, every_ms=OPEN_EVERY_MS))
        await asyncio.sleep(4.0)
        held = pss_mib(proxy.pid) - before
        await work
        return 1024 * held / streams


# --- starting ---------------------------------------------------------------------------------------------------------


def start_all(stack: ExitStack, folder: Path, only: Sequence[str]) -> tuple[list[Proxy], int]:
    """The proxies, ready, ours first; and the port of an upstream."""
    os.sched_setaffinity(0, OURS)
    ports = [free_port(), free_port()]
    for port in ports:
        start(stack, folder, "benchmarks.gateway", "--upstream", str(port))
    os.sched_setaffinity(0, PROXIES)
    ours = Gateway(stack, folder, ports, adapters=ADAPTERS, slots=ADAPTERS)
    found = [Proxy(US, "everything", "ours", ours.pid, ours.port)]
    chosen = [peer for peer in PEERS if not only or any(word in peer.name for word in only)]
    found += [_started(stack, folder, peer, ports) for peer in chosen]
    os.sched_setaffinity(0, OURS)
    return found, ports[0]


def _started(stack: ExitStack, folder: Path, peer: Peer, upstreams: Sequence[int]) -> Proxy:
    home = folder / peer.name.replace(" ", "-")
    home.mkdir()
    port = free_port()
    words = peer.command(port, upstreams, home)
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=home, env=os.environ | peer.environment)
    stack.callback(process.wait)
    stack.callback(process.kill)
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        if _answers(port):
            return Proxy(peer.name, peer.work, peer.kind, process.pid, port)
        time.sleep(0.3)
    said = (home / "log").read_text(encoding="utf-8", errors="replace")[-2000:]
    raise SystemExit(f"{peer.name} did not start:\n{said}")


def _answers(port: int) -> bool:
    body = {"model": "base", "prompt": "x", "max_tokens": 1, "seed": 1}
    try:
        answer = httpx2.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json=body,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=5.0,
            trust_env=False,
        )
    except httpx2.TransportError:
        return False
    return answer.status_code == httpx2.codes.OK


# --- the table --------------------------------------------------------------------------------------------------------

COLUMNS = ("request us", "event us", "reads", "p50 ms", "p99 ms", "streams/s", "KiB/stream")


def table(proxies: Sequence[Proxy], memory: dict[str, float]) -> str:
    """Markdown: a row a proxy, and our ratios to the rivals below it."""
    rows = [["proxy", "work", *COLUMNS]]
    for proxy in proxies:
        cells = [_spread([figures[name] for figures in proxy.rounds if name in figures]) for name in COLUMNS[:-1]]
        rows.append([proxy.name, proxy.work, *cells, f"{memory[proxy.name]:.0f}"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([*lines, "", *ratios(proxies)])


def ratios(proxies: Sequence[Proxy]) -> list[str]:
    """Ours to the best Rust router, to nginx, and of the Python proxies to ours, round by round."""
    found = []
    ours = proxies[0].rounds
    rust = [proxy for proxy in proxies if proxy.kind == "rust"]
    for name, aim in (("request us", "1.0"), ("p50 ms", "1.0"), ("p99 ms", "1.0")):
        if rust:
            best = [min(proxy.rounds[number][name] for proxy in rust) for number in range(len(ours))]
            found.append(
                _ratio(f"{name}, ours to the best Rust router", [figures[name] for figures in ours], best, f"<= {aim}")
            )
    for proxy in proxies:
        theirs = proxy.rounds
        if proxy.name == "nginx":
            mine = [figures["event us"] for figures in ours]
            found.append(_ratio("event us, ours to nginx", mine, [figures["event us"] for figures in theirs], "<= 1.2"))
        if proxy.kind == "python":
            mine = [figures["request us"] for figures in ours]
            found.append(
                _ratio(
                    f"request us, {proxy.name} to ours", [figures["request us"] for figures in theirs], mine, ">= 15"
                )
            )
    return found


def _ratio(what: str, above: Sequence[float], below: Sequence[float], aim: str) -> str:
    return f"- {what}: {_spread([a / b for a, b in zip(above, below, strict=True)])} (aim {aim})"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    form = _form(median(values))
    return f"{median(values):{form}} [{min(values):{form}} to {max(values):{form}}]"


def _form(value: float) -> str:
    return ",.0f" if value >= 100 else ".1f" if value >= 10 else ".2f"


def main() -> None:
    """Install and start what is asked for, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="parts of peers' names; ours is always measured")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        proxies, upstream = start_all(stack, Path(name), given.only)
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        measuring = Measuring(runner, upstream)
        for proxy in proxies:  # adapters are loaded, caches warm, lazy imports done
            runner.run(closed_loop(proxy.port, 1.0, 8))
        for number in range(given.rounds):
            for proxy in proxies:
                print(f"round {number + 1}: {proxy.name}", file=sys.stderr, flush=True)
                proxy.rounds.append(measuring.round(proxy))
        memory = {proxy.name: measuring.memory(proxy) for proxy in proxies}
    print(f"{given.rounds} rounds; median [lowest to highest]\n\n{table(proxies, memory)}")


if __name__ == "__main__":
    main()
