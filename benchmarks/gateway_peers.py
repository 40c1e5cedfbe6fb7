"""The gateway beside other proxies, same work, one core: CPU a request and an event, latency added, streams, memory.

Run: python -m benchmarks.gateway_peers [--rounds 3] [--only NAME ...] [--quick] [--markdown] [--json FILE]

Every proxy runs on one core, all of them started and idle while one is measured; upstreams and client share the other. In each
round each proxy gets the same load in turn, so that a slow minute of the machine falls on all. Ratios are taken within a round;
shown is the median of the rounds and in brackets the lowest and highest. CPU is that of its whole process tree. Before anything is
timed, each answer of each proxy is held against what the engine said. Who cannot be had, started or measured keeps a row with the
reason. Three rounds of all take a quarter of an hour, and the first time as long again to install them (1.5 GB).

- *us / request*: 32 connections, the next request when an answer is whole. The other core bounds what is sent, so requests a second
  are not compared here; CPU is.
- *us / event*: 200 streams, an event each 20 ms, so that an event usually comes alone. Its share of the request (a hundredth) is in
  it. *reads / event* are the client's reads: below 1 several came at once, which flatters.
- *added p50, p99*: at 200 requests a second, sent by the clock; latency less that of the upstream alone, which is asked as often
  at the same time, in between.
- *streams / s*: 128 connections, streams of 20 events 2 ms apart, the next one when one ends. *core busy*: how much of its core
  the proxy used meanwhile; well below 100 % the other core was the limit.
- *KiB / stream*: what 1,000 open streams add to the tree's proportional set size, for each; a dash where so many did not open.

The gateway does all of its work: key, tenant's rights and limits, look into the body, decision by the kernel, model rewritten
both ways for half of the requests, usage hidden, metrics, record. The others do what ``peers.catalog`` says. Python proxies get
fewer streams at once, as many as their core holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.peers import load, table
from benchmarks.peers.catalog import PEERS, Peer
from benchmarks.peers.load import LoadError, Target, quantile
from benchmarks.peers.running import Figures, Proxy, cpu_s, launched, pinned, pss_mib, two_cores
from benchmarks.peers.upstream import ADAPTERS, EVENTS
from benchmarks.printed import show
from benchmarks.processes import ROOT, Gateway, free_port, start, unwind_on_signals
from loraledger import __version__

AT_ONCE: Final = 32
RATE: Final = 200.0
SHORT_STREAMS, SHORT_EVENTS, SHORT_EVERY_MS = 128, 20, 2
OPEN_STREAMS: Final = 1000
FILES: Final = 65_536
FAILURES: Final = (LoadError, OSError)


@dataclass(frozen=True)
class Lengths:
    """Seconds of each part of a round."""

    unary: float = 4.0
    stream: float = 5.0
    latency: float = 8.0
    short: float = 4.0
    warm: float = 1.0


QUICK: Final = Lengths(1.0, 2.0, 2.0, 1.0, 0.5)


class Measuring:
    """One part after the other, on one proxy; what came out is put into it. Each raises one of FAILURES."""

    def __init__(self, runner: asyncio.Runner, upstream: int, lengths: Lengths) -> None:
        self._runner, self._alone, self._lengths = runner, Target(upstream), lengths

    def prepare(self, proxy: Proxy) -> None:
        """Look at every answer; load adapters, fill caches, import what is imported late."""
        self._runner.run(load.check(proxy.target))
        self._runner.run(load.closed_loop(proxy.target, self._lengths.warm, 8))

    def round(self, proxy: Proxy) -> None:
        """All figures of a round; what the proxy is not fit for is left out."""
        used = cpu_s(proxy.pid)
        done = self._runner.run(load.closed_loop(proxy.target, self._lengths.unary, AT_ONCE))
        figures: Figures = {"request us": (cpu_s(proxy.pid) - used) / done.requests * 1e6}
        used = cpu_s(proxy.pid)
        paced = load.closed_loop(proxy.target, self._lengths.stream, proxy.peer.streams, events=EVENTS)
        done = self._runner.run(paced)
        events = done.requests * EVENTS
        figures["event us"] = (cpu_s(proxy.pid) - used) / events * 1e6
        figures["reads"] = done.reads / events
        if proxy.peer.clocked:
            clocked = load.by_clock((self._alone, proxy.target), self._lengths.latency, RATE)
            alone, through = self._runner.run(clocked)
            for share, name in ((0.5, "p50 ms"), (0.99, "p99 ms")):
                figures[name] = 1e3 * (quantile(through, share) - quantile(alone, share))
        proxy.rounds.append(figures | self._saturated(proxy))

    def _saturated(self, proxy: Proxy) -> Figures:
        connections, used = min(proxy.peer.streams, SHORT_STREAMS), cpu_s(proxy.pid)
        short = load.closed_loop(
            proxy.target, self._lengths.short, connections, events=SHORT_EVENTS, every_ms=SHORT_EVERY_MS
        )
        done = self._runner.run(short)
        busy = (cpu_s(proxy.pid) - used) / done.seconds
        return {"streams/s": done.requests / done.seconds, "busy %": 100 * busy}

    def memory(self, proxy: Proxy) -> None:
        """KiB that an open stream takes."""
        streams, before = min(OPEN_STREAMS, 5 * proxy.peer.streams), pss_mib(proxy.pid)
        held = self._runner.run(load.held_open(proxy.target, streams, lambda: pss_mib(proxy.pid) - before))
        proxy.stream_kib = 1024 * held / streams


US: Final = Peer("loraledger", "everything", lambda: ROOT, lambda *_: [], "ours", __version__)


def start_all(stack: ExitStack, folder: Path, only: Sequence[str], runner: asyncio.Runner) -> tuple[list[Proxy], int]:
    """The proxies, ours first, each ready or with the reason why not; and the port of an upstream."""
    core, rest = two_cores()
    ports = [free_port(), free_port()]
    with pinned(rest):
        for port in ports:
            start(stack, folder, "benchmarks.peers.upstream", str(port))
    with pinned(core):
        ours = Gateway(stack, folder, ports, adapters=ADAPTERS, slots=ADAPTERS)
    found = [Proxy(US, __version__, "loraledger serve --config loraledger.yaml", ours.pid, ours.port)]
    for peer in PEERS:
        if not only or any(word in peer.name for word in only):
            say(f"{peer.name}: starting it, installed first if need be")
            found.append(launched(stack, folder, peer, ports, core, lambda target: runner.run(load.answers(target))))
            if found[-1].missing is not None:
                say(f"{peer.name}: none: {found[-1].missing}")
    os.sched_setaffinity(0, rest)
    return found, ports[0]


def measure(proxies: Sequence[Proxy], measuring: Measuring, rounds: int) -> None:
    """All rounds, in turn and back again, then memory."""
    for proxy in proxies:
        attempt(proxy, measuring.prepare)
    began, done, planned = time.monotonic(), 0, rounds * len(proxies)
    for number in range(rounds):
        for proxy in proxies if number % 2 == 0 else proxies[::-1]:
            left = f", {(time.monotonic() - began) / done * (planned - done) / 60:.0f} min left" if done else ""
            say(f"round {number + 1} of {rounds}: {proxy.peer.name}{left}")
            attempt(proxy, measuring.round)
            done += 1
    for proxy in proxies:
        say(f"memory: {proxy.peer.name}")
        attempt(proxy, measuring.memory, needed=False)


def attempt(proxy: Proxy, part: Callable[[Proxy], None], *, needed: bool = True) -> None:
    """Do a part, unless the proxy is out; a ``needed`` one that fails puts it out, with the reason; ours by SystemExit."""
    if proxy.missing is not None:
        return
    try:
        part(proxy)
    except FAILURES as error:
        why = str(error) or type(error).__name__
        say(f"{proxy.peer.name}: none: {why}")
        if needed and proxy.peer is US:
            raise SystemExit(f"ours failed, so there is nothing to compare: {why}") from error
        if needed:
            proxy.drop(why)


def say(text: str) -> None:
    """What is done now, for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def allow_files() -> None:
    """Two files a stream, for this process and for the proxies, which inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def machine() -> str:
    """What all of it ran on, in a line."""
    cpu = [
        line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if line.startswith("model name")
    ]
    name = cpu[0].partition(":")[2].strip() if cpu else platform.machine()
    return f"{os.cpu_count()} cores of {name}, Linux {platform.release()}, CPython {platform.python_version()}"


def report(proxies: Sequence[Proxy], rounds: int, markdown: bool) -> None:
    """Print the table, the ratios, and how each proxy was started."""
    print(f"{rounds} rounds on {machine()}; median [lowest to highest].\n")
    show(table.rows(proxies), markdown)
    print("\n".join(f"- {line}" for line in table.ratios(proxies)))
    print("\nStarted as (DIR: a folder with its configuration, written by `benchmarks/peers/catalog.py`):\n")
    lines = [f"{proxy.peer.name}: {proxy.command}" for proxy in proxies if proxy.command]
    print("\n".join(["```text", *lines, "```"] if markdown else lines))


def main() -> None:
    """Install and start what is asked for, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="parts of peers' names; ours is always measured")
    parser.add_argument(
        "--quick", action="store_true", help="one round, parts of 1 to 2 s: whether it works, not how fast"
    )
    parser.add_argument("--markdown", action="store_true", help="for docs/performance.md")
    parser.add_argument("--json", type=Path, help="write every round's figures to this file")
    given = parser.parse_args()
    unwind_on_signals()
    allow_files()
    rounds = 1 if given.quick else given.rounds
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        proxies, upstream = start_all(stack, Path(name), given.only, runner)
        measure(proxies, Measuring(runner, upstream, QUICK if given.quick else Lengths()), rounds)
    report(proxies, rounds, given.markdown)
    if given.json is not None:
        kept = [
            {
                "proxy": proxy.peer.name,
                "version": proxy.version,
                "rounds": proxy.rounds,
                "KiB/stream": proxy.stream_kib,
                "none": proxy.missing,
                "command": proxy.command,
            }
            for proxy in proxies
        ]
        given.json.write_text(json.dumps({"machine": machine(), "proxies": kept}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
