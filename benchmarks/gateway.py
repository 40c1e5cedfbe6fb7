"""CPU time of the whole gateway process for a unary request and for a streamed event, and which functions it goes to.

Run: python -m benchmarks.gateway [--runs 3] [--quick] [--profile] [--markdown] [--json FILE]

Kernel, journal, rows, metrics and sampling of two replicas included. The upstream is the minimal engine of ``peers.upstream``. The
gateway runs on one core, upstreams and client on another. Each run sends the same load to the gateway and, as the limit of what any
server of this kind can reach, straight to the upstream; runs alternate. For each process tree: user and system time by the
kernel's accounting, divided by what was done. Half of the requests are for one of four adapters, which stay loaded; their model
name is rewritten both ways.

Streams are paced, not saturated: 200 at a time, an event each 20 ms, so that an event usually comes alone, as an engine sends it.
Answers of one read that hold several events cost less for each.

``--profile`` runs nothing but the gateway, once with each load, under the sampler of ``benchmarks.profiled``, and prints what part
of its CPU each function took itself, and what that comes to for a request or an event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import uvloop

from benchmarks import profiled
from benchmarks.peers.load import Target, closed_loop
from benchmarks.peers.running import cpu_s, pinned, two_cores
from benchmarks.peers.upstream import ADAPTERS, EVENTS, EVERY_MS
from benchmarks.printed import ranged, show
from benchmarks.processes import Gateway, free_port, start, unwind_on_signals

AT_ONCE, STREAMS = 32, 200
RUN_S, PROFILE_S = 6.0, 20.0
TOP: Final = 25
LOADS: Final = ("unary", "stream")


class Reading:
    """CPU microseconds for each thing done, of one process tree, run by run; and what was done a second."""

    def __init__(self) -> None:
        self.cpu_us: list[float] = []
        self.per_s: list[float] = []

    def take(self, runner: asyncio.Runner, pid: int, port: int, load: str, seconds: float) -> None:
        """One run of so long."""
        before = cpu_s(pid)
        if load == "stream":
            done = runner.run(closed_loop(Target(port), seconds, STREAMS, events=EVENTS))
        else:
            done = runner.run(closed_loop(Target(port), seconds, AT_ONCE))
        count = done.requests * EVENTS if load == "stream" else done.requests
        self.per_s.append(count / done.seconds)
        self.cpu_us.append((cpu_s(pid) - before) / count * 1e6)


class Stand:
    """A gateway on one core in front of two minimal engines, its adapters loaded; ``under``: what runs it."""

    def __init__(self, stack: ExitStack, *under: str) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        core, rest = two_cores()
        self.ports = [free_port(), free_port()]
        stack.enter_context(pinned(rest))
        self.upstreams = [start(stack, folder, "benchmarks.peers.upstream", str(port)) for port in self.ports]
        with pinned(core):
            words = under or ("loraledger.cli.main",)
            self.gateway = Gateway(stack, folder, self.ports, adapters=ADAPTERS, slots=ADAPTERS, under=words)
        self.runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        self.runner.run(closed_loop(Target(self.gateway.port), 1.0, AT_ONCE))  # loads the adapters


def measure(runs: int, seconds: float) -> tuple[dict[str, Reading], float]:
    """Readings by what was called and with what; and the gateway's share of a core when nobody calls."""
    readings = {f"{who}, {load}": Reading() for load in LOADS for who in ("gateway", "upstream alone")}
    with ExitStack() as stack:
        stand = Stand(stack)
        idle = cpu_s(stand.gateway.pid)
        time.sleep(3.0)
        idle = (cpu_s(stand.gateway.pid) - idle) / 3.0
        for _ in range(runs):
            for load in LOADS:
                gateway, alone = readings[f"gateway, {load}"], readings[f"upstream alone, {load}"]
                gateway.take(stand.runner, stand.gateway.pid, stand.gateway.port, load, seconds)
                alone.take(stand.runner, stand.upstreams[0], stand.ports[0], load, seconds)
    return readings, idle


def report(readings: dict[str, Reading], idle: float, runs: int, markdown: bool) -> None:
    """Print what the runs came to."""
    print(
        f"{runs} runs: unary requests, {AT_ONCE} at once; {STREAMS} streams of {EVENTS} events {EVERY_MS} ms apart.\n"
    )
    rows = [["", "CPU us each, median [range]", "a second"]]
    rows += [[what, ranged(reading.cpu_us, ".1f"), ranged(reading.per_s)] for what, reading in readings.items()]
    unary = sorted(readings["gateway, unary"].cpu_us)[runs // 2]
    events = [us - unary / EVENTS for us in readings["gateway, stream"].cpu_us]
    rows.append(["gateway, an event without its request", ranged(events, ".1f"), ""])
    show(rows, markdown)
    print(f"Idle, sampling two replicas each second: {idle * 100:.1f} % of a core (in the figures above).")


def profile(seconds: float, markdown: bool) -> dict[str, list[list[object]]]:
    """Print, for each load, which functions the CPU goes to; returns the same."""
    kept = {}
    for load in LOADS:
        with ExitStack() as stack:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / f"samples-{os.getpid()}"
            stand, reading = Stand(stack, "benchmarks.profiled", str(out)), Reading()
            profiled.begin(stand.gateway.pid)
            reading.take(stand.runner, stand.gateway.pid, stand.gateway.port, load, seconds)
            seen = profiled.end(stand.gateway.pid, out)
        what = "event" if load == "stream" else "request"
        print(f"{load}: {sum(seen.values()):,} samples, {reading.cpu_us[0]:.1f} us of CPU a {what}.\n")
        show(_top(seen, reading.cpu_us[0], f"us / {what}"), markdown)
        show(_rooms(seen, reading.cpu_us[0], f"us / {what}"), markdown)
        kept[load] = [[*where, count] for where, count in seen.most_common()]
    return kept


def _top(seen: Counter[profiled.Where], each_us: float, unit: str) -> list[list[str]]:
    rows = [["function", "file", "own time, %", unit]]
    for (file, function), count in seen.most_common(TOP):
        share = count / sum(seen.values())
        rows.append([f"`{function}`", file, f"{100 * share:.1f}", f"{share * each_us:.1f}"])
    return rows


def _rooms(seen: Counter[profiled.Where], each_us: float, unit: str) -> list[list[str]]:
    rooms: Counter[str] = Counter()
    for where, count in seen.items():
        rooms[profiled.room(where)] += count
    rows = [["part", "own time, %", unit]]
    for name, count in rooms.most_common():
        share = count / sum(seen.values())
        rows.append([name, f"{100 * share:.1f}", f"{share * each_us:.1f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run of 2 s each: whether it works, not how fast")
    parser.add_argument("--profile", action="store_true", help="which functions the CPU goes to")
    parser.add_argument("--markdown", action="store_true", help="for docs/performance.md")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    given = parser.parse_args()
    unwind_on_signals()
    if given.profile:
        kept: object = profile(3.0 if given.quick else PROFILE_S, given.markdown)
    else:
        runs = 1 if given.quick else given.runs
        readings, idle = measure(runs, 2.0 if given.quick else RUN_S)
        report(readings, idle, runs, given.markdown)
        kept = {"idle": idle, **{what: vars(reading) for what, reading in readings.items()}}
    if given.json is not None:
        given.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
