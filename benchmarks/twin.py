"""How fast the twin is alone: a fleet of replicas behind a policy that costs next to nothing.

Traffic is the one on which other simulators were measured: Poisson arrivals at a rate a replica, prompts log-normal around 580
tokens (16 to 3,072), outputs around 164 (4 to 1,024), 5,000 adapters asked for in proportion to rank ** -0.9. Requests are made
before the clock starts; each goes to the replica with the fewest outstanding ones, the first of several. All adapters are known to
all replicas from the start; hosts keep 1,000 of them, so that there are reads from disk all the time. Figures are requests a
second of CPU time of this process; ``--every-token`` steps every step, as the emulator does.

``--markdown`` leaves out the reference rate with layout ``slots``: ``benchmarks.replay_speed`` has it, beside other simulators.

    python -m benchmarks.twin [--requests N] [--replicas N] [--rate R ...] [--repeats N] [--every-token] [--markdown]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import accumulate

from benchmarks.printed import judged, ranged, show
from benchmarks.registered import registered
from loraledger.twin.events import TokenOut, TwinRequest
from loraledger.twin.profile import PS_PER_MS, PS_PER_S, TwinProfile, UnifiedRules
from loraledger.twin.replica import ReplicaTwin

ADAPTERS = 5_000
SIZE, RANK = 20 << 20, 16
NAMES = tuple(f"a{number}" for number in range(ADAPTERS))
NEVER = 1 << 100
LAYOUTS = ("slots", "unified")
RATES = (1.0, 10.0, 30.0, 60.0)
ELSEWHERE = ("slots", 10.0)
OVERLOAD, AIM = 60.0, 10_000.0
"""Requests/s a replica from which on none can keep up, and requests/s of CPU that are wanted there."""


def profile(layout: str) -> TwinProfile:
    if layout == "unified":
        rules = UnifiedRules(prefetch=True)
        return TwinProfile(layout="unified", unified=rules, max_seqs=1000, block_size=1, kv_blocks=393_216)
    return TwinProfile(slots=32, host_entries=1_000, load_overhead_ps=10 * PS_PER_MS, load_bytes_per_s=2_000_000_000)


def lengths(rng: random.Random, mean: float, sigma: float, low: int, high: int) -> int:
    return min(high, max(low, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))


def traffic(requests: int, per_s: float, seed: int = 7) -> Iterator[tuple[int, TwinRequest]]:
    """(arrival in ps, request) in order of time, made as they are asked for."""
    rng = random.Random(seed)
    shares = list(accumulate((n + 1) ** -0.9 for n in range(ADAPTERS)))
    at = 0.0
    for number in range(requests):
        at += rng.expovariate(per_s)
        name = NAMES[bisect_left(shares, rng.random() * shares[-1])]
        prompt, output = lengths(rng, 583, 1.0, 16, 3072), lengths(rng, 164, 0.9, 4, 1024)
        yield round(at * PS_PER_S), TwinRequest(f"r{number}", name, prompt, output)


def warmed(replicas: int, layout: str, every_token: bool) -> tuple[list[ReplicaTwin], int]:
    """Replicas that know every adapter, and the time when the last one does."""
    fleet, ready = [], 0
    for _ in range(replicas):
        twin = ReplicaTwin(profile(layout), every_token=every_token)
        ready = max(ready, registered(twin, ((name, SIZE, RANK) for name in NAMES)))
        fleet.append(twin)
    return fleet, ready


def play(fleet: list[ReplicaTwin], arrivals: list[tuple[int, TwinRequest]], start: int) -> int:
    """Returns how many requests ended."""
    heap: list[tuple[int, int]] = []
    due = [-1] * len(fleet)  # when each one is looked at next; what the heap says otherwise is void
    open_ = [0] * len(fleet)
    ended = 0
    for after, request in [*arrivals, (NEVER, None)]:
        arrival = start + after
        while heap and heap[0][0] < arrival:
            at, which = heap[0]
            if due[which] != at:
                heappop(heap)
                continue
            twin = fleet[which]
            for event in twin.advance(at):
                if isinstance(event, TokenOut) and event.finished:
                    open_[which] -= 1
                    ended += 1
            upcoming = twin.next_at()
            if upcoming is None:
                heappop(heap)
                due[which] = -1
            else:
                heapreplace(heap, (upcoming, which))
                due[which] = upcoming
        if request is not None:
            which = open_.index(min(open_))
            open_[which] += 1
            twin = fleet[which]
            twin.submit(arrival, request)
            upcoming = twin.next_at()
            if upcoming is not None and upcoming != due[which]:
                due[which] = upcoming
                heappush(heap, (upcoming, which))
    return ended


def measure(layout: str, rate: float, replicas: int, requests: int, every_token: bool) -> float:
    """Requests a second of CPU time."""
    arrivals = list(traffic(requests, rate * replicas))
    fleet, start = warmed(replicas, layout, every_token)
    began = time.process_time()
    ended = play(fleet, arrivals, start)
    cpu = time.process_time() - began
    if ended != requests:
        raise RuntimeError(f"{ended:,} of {requests:,} requests ended")
    return requests / cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--rate", type=float, nargs="+", default=RATES, help="requests/s a replica")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--every-token", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    print(f"{given.requests:,} requests, {given.replicas} replicas; median and range of {given.repeats} rounds.\n")
    rows = [["requests/s a replica", *(f"layout `{name}`, requests/s of CPU" for name in LAYOUTS), "aim"]]
    for rate in given.rate:
        found = {
            name: [] if given.markdown and (name, rate) == ELSEWHERE else _rounds(name, rate, given) for name in LAYOUTS
        }
        slowest = min(statistics.median(values) for values in found.values() if values)
        aim = judged(slowest, AIM, least=True) if rate >= OVERLOAD else "-"
        cells = [ranged(values) if values else "[accuracy.md](accuracy.md)" for values in found.values()]
        rows.append([f"{rate:g}{', overload' if rate >= OVERLOAD else ''}", *cells, aim])
    show(rows, given.markdown)


def _rounds(layout: str, rate: float, given: argparse.Namespace) -> list[float]:
    return [measure(layout, rate, given.replicas, given.requests, given.every_token) for _ in range(given.repeats)]


if __name__ == "__main__":
    main()
