"""How fast a replay is: our twins alone, our replay with the live kernel, and other simulators, paired in one run.

Traffic is that of ``benchmarks.twin``: 10 requests/s a replica, 16 replicas, 5,000 adapters. Each figure is one process pinned to
one core, timed by its own CPU time from the first request to the last (making the workload, imports and, for ours, the 80,000
registrations of the twins alone do not count; reading it counts for Dynamo, which takes a path); peak memory is that process's.
Rounds are interleaved (A B C A B C ...), so a busy neighbour slows all alike, and ratios are taken within a round.

- ``twin``: ``benchmarks.twin``, fewest outstanding requests, nothing recorded.
- ``live``: ``loraledger.replay.fleet.run``: the live kernel with bounded affinity, three candidates a decision kept with every
  term, and the record written as Parquet. ``kernel``: the share of that time spent in the kernel, from a round of its own with a
  timer around it (which costs some 3 %).
- ``dynamo-rr``, ``dynamo-kv``: Dynamo's replay, round robin and KV router. No adapters there; prompts share no blocks; its log line
  of each request is off. ``fleet-sim``: request-level, so no engine step is simulated.

The peers go into ``.cache/peers-venv`` on first use; one that cannot be installed is shown as such.

    python -m benchmarks.replay_speed [--requests 50000] [--repeats 3] [--quick] [--no-peers] [--long] [--markdown]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks import twin
from benchmarks.printed import judged, ranged, show
from loraledger.events import AdapterSpec
from loraledger.kernel.settings import MS, FleetSettings, ReplicaSpec, TenantSpec
from loraledger.replay.fleet.run import run
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.traces.trace import Request

REPLICAS = 16
RATE, OVERLOAD = 10.0, 18.0
PEERS = Path(".cache/peers-venv")
PINNED = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1", "vllm-sr-sim==0.1.0.dev20260713123629")
NEEDED = (
    "pydantic",
    "uvloop",
    "msgspec",
    "tqdm",
    "prometheus-client",
    "aiohttp",
    "pyzmq",
    "zstandard",
    "numpy",
    "scipy",
)
OURS, THEIRS = ("twin", "live"), ("dynamo-rr", "dynamo-kv", "fleet-sim")
AIMS = {"twin": 50_000.0, "live": 15_000.0}
FASTER = {"dynamo-kv": 3.0}
"""The least that ``live`` over the simulator should be."""
DEEP, PEAK_MIB = 10_000.0, 400.0
Figures = dict[str, float]


# --- one measurement, in a process of its own -----------------------------------------------------------------------------


def scenario() -> Scenario:
    profile = twin.profile("slots")
    specs = tuple(
        ReplicaSpec(
            f"r{n}",
            profile.slots,
            profile.host_entries,
            max_rank=profile.max_rank,
            max_seqs=profile.max_seqs,
            load_bytes_per_s=profile.load_bytes_per_s,
            load_overhead=profile.load_overhead_ps // 1000,
            activation=profile.activation_ps // 1000,
            prefill_tokens_per_s=40_000,
            itl=8 * MS,
        )
        for n in range(REPLICAS)
    )
    adapters = tuple(AdapterSpec(f"a{n}", f"{n:064x}", twin.RANK, twin.SIZE) for n in range(twin.ADAPTERS))
    settings = FleetSettings(specs, adapters, (TenantSpec("all", 10**6, 10**6),))
    return Scenario(label="speed", settings=settings, profiles={spec.name: profile for spec in specs})


def measure(what: str, requests: int, rate: float) -> Figures:
    """``what``: ``twin``, ``live``, ``kernel`` or ``stream``: ``live`` with the requests made on the way."""
    arrivals = twin.traffic(requests, rate * REPLICAS)
    if what == "twin":
        made = list(arrivals)
        fleet, start = twin.warmed(REPLICAS, "slots", every_token=False)
        began = time.process_time()
        ended = twin.play(fleet, made, start)
        return _figures(ended, began)
    trace: Iterable[Request] = (
        Request(at // 1000, "all", r.adapter, r.prompt_tokens, r.output_tokens) for at, r in arrivals
    )
    if what != "stream":
        trace = list(trace)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        timed = what == "kernel"
        outcome = run(scenario(), trace, Path(folder), trace_digest="", profile_kernel=timed)
        figures = _figures(outcome.requests - outcome.open, began)
    return figures | ({"kernel_share": outcome.kernel_share or 0.0} if timed else {})


def _figures(ended: int, began: float) -> Figures:
    cpu = time.process_time() - began
    return {"ended": ended, "cpu_s": cpu, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


# --- the parent -----------------------------------------------------------------------------------------------------------


def ours(what: str, requests: int, rate: float, core: int) -> Figures:
    command = [sys.executable, "-m", "benchmarks.replay_speed", "--measure", what]
    return _run([*command, "--requests", str(requests), "--rate", str(rate)], requests, core)


def theirs(what: str, requests: int, workload: Path, core: int) -> Figures:
    script = Path(__file__).with_name("replay_peers.py")
    return _run([str(PEERS / "bin/python"), str(script), what, str(workload), str(REPLICAS)], requests, core)


def _run(command: list[str], requests: int, core: int) -> Figures:
    """Raises ``RuntimeError`` with the last line said when the process fails or loses requests."""
    done = subprocess.run(["taskset", "-c", str(core), *command], capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not found:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}").splitlines()[-1])
    figures: Figures = json.loads(found[-1].removeprefix("RESULT "))
    if figures["ended"] != requests:
        raise RuntimeError(f"{figures['ended']:,.0f} of {requests:,} requests ended")
    return figures


def peers() -> str | None:
    """Install the other simulators if they are not there; returns why that failed."""
    pip = [str(PEERS / "bin/python"), "-m", "pip", "install", "-q"]
    mark = PEERS / "complete"
    if not mark.exists():
        for command in ([sys.executable, "-m", "venv", str(PEERS)], [*pip, *NEEDED], [*pip, "--no-deps", *PINNED]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return (done.stderr.strip() or "failed").splitlines()[-1]
        mark.touch()
    return None


def write_workload(path: Path, requests: int) -> None:
    """The same requests as lines that Dynamo reads."""
    block = 0
    with path.open("w") as file:
        for at, request in twin.traffic(requests, RATE * REPLICAS):
            blocks = -(-request.prompt_tokens // 64)
            line = {
                "timestamp": at / 1e9,
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(range(block, block + blocks)),
            }
            block += blocks
            file.write(json.dumps(line) + "\n")


def rounds(names: tuple[str, ...], requests: int, repeats: int, core: int) -> dict[str, list[Figures] | str]:
    """By name: a figure a round, or why there is none."""
    results: dict[str, list[Figures] | str] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "workload.jsonl"
        if set(names) & set(THEIRS):
            write_workload(workload, requests)
        for _ in range(repeats):
            for name in names:
                so_far = results[name]
                if isinstance(so_far, str):
                    continue
                try:
                    known = name in OURS
                    so_far.append(ours(name, requests, RATE, core) if known else theirs(name, requests, workload, core))
                except RuntimeError as error:
                    results[name] = str(error)
    return results


def rates(figures: list[Figures]) -> list[float]:
    return [f["ended"] / f["cpu_s"] for f in figures]


def table(results: dict[str, list[Figures] | str]) -> list[list[str]]:
    """Rows for a person: requests/s, ``live``'s rate over the simulator's, memory."""
    live = results.get("live")
    rows = [["simulator", "requests/s of CPU", "live / simulator", "peak MiB", "aim"]]
    for name, figures in results.items():
        if isinstance(figures, str):
            rows.append([name, f"none: {figures}", "-", "-", "-"])
            continue
        ratio = aim = "-"
        if name in AIMS:
            aim = judged(statistics.median(rates(figures)), AIMS[name], least=True)
        if name in THEIRS and isinstance(live, list):
            ratios = [mine / other for mine, other in zip(rates(live), rates(figures), strict=True)]
            ratio = ranged(ratios, ".2f")
            aim = judged(statistics.median(ratios), FASTER[name], least=True) if name in FASTER else "-"
        rows.append([name, ranged(rates(figures)), ratio, f"{max(f['peak_mib'] for f in figures):.0f}", aim])
    return rows


def alone(requests: int, long: bool, core: int) -> list[list[str]]:
    """What is only said of ours: the kernel's share, overload, and how it grows."""
    share = ours("kernel", requests, RATE, core)["kernel_share"]
    rows = [["figure", "value", "aim"], ["kernel's share of `live`", f"{100 * share:.0f} %", "-"]]
    for name in OURS:
        deep = rates([ours(name, requests, OVERLOAD, core)])[0]
        what = f"`{name}` in overload, {OVERLOAD:.0f} requests/s a replica: requests/s of CPU"
        rows.append([what, f"{deep:,.0f}", judged(deep, DEEP, least=True)])
        small, large = (ours(name, count, RATE, core) for count in (2 * requests, 8 * requests))
        each = [f["cpu_s"] / f["ended"] for f in (small, large)]
        rows.append(
            [
                f"`{name}`: cost of a request of {8 * requests:,} over one of {2 * requests:,}",
                f"{each[1] / each[0]:.2f}",
                "1",
            ]
        )
    if long:
        million = ours("stream", 1_000_000, RATE, core)
        what = f"`live`, 1,000,000 requests made on the way ({rates([million])[0]:,.0f} a second of CPU): peak MiB"
        rows.append([what, f"{million['peak_mib']:.0f}", judged(million["peak_mib"], PEAK_MIB)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--no-peers", action="store_true", help="only ours")
    parser.add_argument("--quick", action="store_true", help="the table alone, of 5,000 requests")
    parser.add_argument("--long", action="store_true", help="a million requests as well")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--measure", choices=(*OURS, "kernel", "stream"), help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=RATE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print("RESULT " + json.dumps(measure(arguments.measure, arguments.requests, arguments.rate)))
        return
    requests = 5_000 if arguments.quick else arguments.requests
    failure = None if arguments.no_peers else peers()
    names = OURS if arguments.no_peers or failure else (*OURS, *THEIRS)
    results = rounds(names, requests, arguments.repeats, arguments.core)
    if failure:
        results |= dict.fromkeys(THEIRS, f"not installed: {failure}")
    print(f"{requests:,} requests, {REPLICAS} replicas, {twin.ADAPTERS:,} adapters, {arguments.repeats} rounds\n")
    show(table(results), arguments.markdown)
    if not arguments.quick:
        show(alone(requests, arguments.long, arguments.core), arguments.markdown)


if __name__ == "__main__":
    main()
