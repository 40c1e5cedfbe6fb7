"""How fast the twin is alone: a fleet of replicas behind a policy that costs next to nothing.

Traffic is the one on which other simulators were measured: Poisson arrivals at a rate a replica, prompts log-normal around 580
tokens (16 to 3,072), outputs around 164 (4 to 1,024), 5,000 adapters asked for in proportion to rank ** -0.9. Requests are made
before the clock starts; each goes to the replica with the fewest outstanding ones, the first of several. All adapters are known to
all replicas from the start; hosts keep 1,000 of them, so that there are reads from disk all the time. Figures are requests a
second of CPU time of this process; ``--every-token`` steps every step, as the emulator does.

    python -m benchmarks.twin [--requests N] [--replicas N] [--rate R ...] [--layout slots|unified] [--every-token]
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import time
from bisect import bisect_left
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import accumulate

from loraledger.twin.events import TokenOut, TwinRequest
from loraledger.twin.profile import PS_PER_MS, PS_PER_S, TwinProfile, UnifiedRules
from loraledger.twin.replica import ReplicaTwin

ADAPTERS = 5_000
SIZE, RANK = 20 << 20, 16
NAMES = tuple(f"a{number}" for number in range(ADAPTERS))
NEVER = 1 << 100


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
        for name in NAMES:
            twin.register(0, name, SIZE, RANK)
        while (at := twin.next_at()) is not None:
            twin.advance(at)
            ready = max(ready, at)
        fleet.append(twin)
    return fleet, ready


def play(fleet: list[ReplicaTwin], arrivals: list[tuple[int, TwinRequest]], start: int) -> tuple[int, int, int]:
    """Returns (requests that ended, when the last one did, looks at a replica)."""
    heap: list[tuple[int, int]] = []
    due = [-1] * len(fleet)  # when each one is looked at next; what the heap says otherwise is void
    open_ = [0] * len(fleet)
    ended = looks = now = 0
    for after, request in [*arrivals, (NEVER, None)]:
        arrival = start + after
        while heap and heap[0][0] < arrival:
            at, which = heap[0]
            if due[which] != at:
                heappop(heap)
                continue
            looks += 1
            twin = fleet[which]
            for event in twin.advance(at):
                if isinstance(event, TokenOut) and event.finished:
                    open_[which] -= 1
                    ended += 1
                    now = event.at
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
    return ended, now - start, looks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, nargs="+", default=[50_000, 200_000])
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--rate", type=float, nargs="+", default=[1.0, 10.0, 30.0], help="requests/s a replica")
    parser.add_argument("--layout", choices=("slots", "unified"), default="slots")
    parser.add_argument("--every-token", action="store_true")
    args = parser.parse_args()
    print(f"{args.replicas} replicas, layout {args.layout}{', every token' if args.every_token else ''}")
    for rate in args.rate:
        for requests in args.requests:
            arrivals = list(traffic(requests, rate * args.replicas))
            fleet, start = warmed(args.replicas, args.layout, args.every_token)
            began = time.process_time()
            ended, took, looks = play(fleet, arrivals, start)
            cpu = time.process_time() - began
            assert ended == requests, f"{ended} of {requests} ended"
            behind = took / PS_PER_S - arrivals[-1][0] / PS_PER_S
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(
                f"{rate:5.1f} req/s a replica, {requests:8,} requests: {requests / cpu:9,.0f} requests/s CPU,"
                f" {looks / requests:.2f} looks a request, {behind:6.0f} s behind at the end, peak {peak} MiB"
            )


if __name__ == "__main__":
    main()
