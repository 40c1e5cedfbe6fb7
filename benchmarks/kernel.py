"""Microseconds of kernel time a request: arrival, dispatch, first token, end, loads included, for each policy and fleet size.

    python -m benchmarks.kernel [--requests 10000] [--repeats 5] [--markdown]

Zipf 1.0 over the adapters, 20 requests in flight a replica, 32 slots and 64 host entries; loads are answered at once. CPU time of
this process, so a busy neighbour does not count; median and range over the repeats, policies interleaved.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque

from benchmarks.printed import judged, ranged, show
from loraledger import events as ev
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.policies import policy_names
from loraledger.kernel.settings import MS, SECOND, FleetSettings, ReplicaSpec, TenantSpec

FLEETS = ((16, 1_000, 25.0), (1_000, 10_000, 60.0))
"""Replicas, adapters, and what a request should cost under the policy of ours, in us."""


def fleet(replicas: int, adapters: int, policy: str) -> Fleet:
    settings = FleetSettings(
        tuple(ReplicaSpec(f"r{i}", 32, 64, max_seqs=64) for i in range(replicas)),
        tuple(ev.AdapterSpec(f"a{i}", f"{i:064x}", 16, 50_000_000) for i in range(adapters)),
        (TenantSpec("tenant", 10**6),),
        policy=policy,
    )
    kernel = Fleet(settings)
    for spec in settings.replicas:
        kernel.step(ev.ReplicaUp(10**18, spec.name, 1, ()))
    return kernel


def run(replicas: int, adapters: int, policy: str, requests: int) -> float:
    """Microseconds a request, after as many requests of warming up."""
    kernel = fleet(replicas, adapters, policy)
    rng = random.Random(1)
    weights = [1 / (i + 1) for i in range(adapters)]
    names = rng.choices([f"a{i}" for i in range(adapters)], weights, k=2 * requests)
    open_requests: deque[str] = deque()
    now, began = 10**18, 0.0
    for number, adapter in enumerate(names):
        if number == requests:
            began = time.process_time()
        now += MS
        commands, _ = kernel.step(ev.RequestArrived(now, f"q{number}", "tenant", adapter, 200, 100, True, "/v1"))
        for command in commands:
            if isinstance(command, ev.Load):
                commands += kernel.step(ev.CommandDone(now, command.id, 50 * MS))[0]
            elif isinstance(command, ev.Dispatch):
                kernel.step(ev.RequestDispatched(now, command.request, 1))
                kernel.step(ev.RequestFirstToken(now, command.request))
                open_requests.append(command.request)
        if len(open_requests) > replicas * 20:
            measured = ev.Measured(generated_tokens=100, itl_mean=20 * MS)
            kernel.step(ev.RequestFinished(now, open_requests.popleft(), "ok", 200, None, measured))
    return (time.process_time() - began) / requests * SECOND / 1000


def measured(replicas: int, adapters: int, requests: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds a request by policy, a figure a round; fewer requests with many replicas."""
    figures: dict[str, list[float]] = {name: [] for name in policy_names()}
    count = max(500, requests * 16 // max(16, replicas // 4))
    for _ in range(repeats):
        for name, values in figures.items():
            values.append(run(replicas, adapters, name, count))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    by_fleet = [measured(replicas, adapters, arguments.requests, arguments.repeats) for replicas, adapters, _ in FLEETS]
    ours = policy_names()[0]
    print(f"Median and range of {arguments.repeats} rounds, us a request.\n")
    rows = [["policy", *(f"{replicas:,} replicas, {adapters:,} adapters" for replicas, adapters, _ in FLEETS)]]
    rows += [[f"`{name}`", *(ranged(figures[name], ".1f") for figures in by_fleet)] for name in by_fleet[0]]
    aims = [aim for _, _, aim in FLEETS]
    rows.append(
        [f"aim for `{ours}`", *(judged(statistics.median(f[ours]), a) for f, a in zip(by_fleet, aims, strict=True))]
    )
    show(rows, arguments.markdown)


if __name__ == "__main__":
    main()
