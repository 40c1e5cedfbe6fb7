"""Plays one workload through another simulator and prints what it took as JSON. Runs under the peers' own Python, not ours.

    PEERS/bin/python benchmarks/replay_peers.py dynamo-kv|dynamo-rr|fleet-sim WORKLOAD REPLICAS

WORKLOAD: lines of ``{"timestamp": ms, "input_length": .., "output_length": .., "hash_ids": [..]}``, blocks of 64 tokens that no two
requests share. Reading it counts for Dynamo, which takes a path, and not for fleet-sim, which takes objects. What Dynamo logs of
each request is turned off. CPU time of this process, all threads.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def dynamo(workload: Path, replicas: int, router: str) -> Callable[[], int]:
    os.environ["DYN_LOG"] = "off"
    api = import_module("dynamo.replay.api")
    engine = {"num_gpu_blocks": 6000, "block_size": 64, "max_num_seqs": 256, "max_num_batched_tokens": 2048}

    def play() -> int:
        report = api.run_trace_replay(
            str(workload),
            num_workers=replicas,
            router_mode=router,
            trace_block_size=64,
            extra_engine_args={"engine": engine},
        )
        return int(report.summary["completed_requests"])

    return play


def fleet_sim(workload: Path, replicas: int) -> Callable[[], int]:
    fleet, request = import_module("fleet_sim.core.fleet"), import_module("fleet_sim.core.request")
    gpu = import_module("fleet_sim.gpu_profiles.profiles").H100_80GB
    pool = fleet.PoolConfig("all", gpu, replicas, 8192, lb_strategy="least_loaded")
    arrivals = []
    for number, line in enumerate(map(json.loads, workload.read_text().splitlines())):
        at = line["timestamp"] / 1000
        arrivals.append((at, request.Request(number, at, line["input_length"], line["output_length"])))
    config = fleet.FleetConfig([pool], router_type="LeastLoadedRouter")
    return lambda: len(fleet.Fleet(config).run(arrivals).completed)


def main() -> None:
    which, workload, replicas = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if which == "fleet-sim":
        play = fleet_sim(workload, replicas)
    else:
        play = dynamo(workload, replicas, "kv_router" if which == "dynamo-kv" else "round_robin")
    began = time.process_time()
    ended = play()
    cpu = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print("RESULT " + json.dumps({"ended": ended, "cpu_s": cpu, "peak_mib": peak}))


if __name__ == "__main__":
    main()
