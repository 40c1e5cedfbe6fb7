"""How long a comparison takes: 20 candidates x 3 policies on a canary of 100,000 requests, two runs at a time.

The offers are GPUs of the catalogue, alone and in pairs; prices are made up, since no figure here depends on them. The canary is
drawn: Poisson arrivals of 20 a second for 200 adapters (Zipf 0.9), prompts of 64 to 1,023 tokens, answers of 16 to 255. So small
offers have to be taken several times, and the smallest never keep up: their runs are the longest. What is timed is the comparison
from its first replay to its last figure, with nothing kept from before. Requests a second are those of all replays over the wall
time, on however many cores were used.

    python -m benchmarks.compare [--candidates N] [--policies N] [--requests N] [--slots N,N] [--jobs N] [--quick] [--markdown]

``--slots`` gives the ladder of slots that is looked through (default: as ``loraledger compare``). One step makes about a third of
the replays.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.printed import show
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.cli.replay.progress import watching
from loraledger.plan.canary import Canary, Twins, read_canary
from loraledger.plan.candidates import candidates, read_setup
from loraledger.plan.compare import Asked, compare, default_ladder
from loraledger.plan.hardware import Catalogue, catalogue
from loraledger.plan.offers import Offer
from loraledger.plan.runs import runs
from loraledger.plan.trials import Objective
from loraledger.replay.fleet.observation import Observation
from loraledger.replay.scenarios.profiles import DEFAULT, read_profile
from loraledger.replay.traces.trace import Header, write_trace
from loraledger.replay.workloads.draws import parse_arrivals, parse_lengths
from loraledger.replay.workloads.generate import Mix, named_adapters, workload

BASE = Path(__file__).parent / "reproduce/models/llama-3.1-8b"
POLICIES = ("bounded-affinity", "least-loaded", "strict-affinity", "round-robin")
ADAPTERS, RATE, SEED = 200, 20.0, 7


def offers(count: int, gpus: Catalogue) -> list[Offer]:
    """GPUs of the catalogue, then pairs of them."""
    found = [
        Offer(
            f"{gpu.name}-{devices}", "none", gpu, devices, gpu.memory.value, None, 1.0, "USD", "-", None, "2026-11-30"
        )
        for devices in (1, 2)
        for gpu in gpus.gpus.values()
    ]
    if count > len(found):
        raise ValueError(f"{count} candidates: the catalogue makes {len(found)}")
    return found[:count]


def canary(path: Path, requests: int) -> Canary:
    mix = Mix(adapters=ADAPTERS, popularity="zipf:0.9", tenants=10)
    prompts, answers = parse_lengths("64-1023"), parse_lengths("16-255")
    drawn = workload(
        mix, parse_arrivals("poisson"), prompts, answers, rate=RATE, requests=requests, duration=None, seed=SEED
    )
    named = named_adapters(ADAPTERS, (8, 16), 2_621_440)
    header = Header(name="benchmark", source="benchmarks.compare", licence="none needed", seed=SEED, adapters=named)
    write_trace(path, header, enumerate(drawn, 1))
    return read_canary(path)


def cpu_s() -> float:
    """Of this process and of all that it has waited for."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=20)
    parser.add_argument("--policies", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--slots", type=lambda text: tuple(map(int, text.split(","))), default=default_ladder(ADAPTERS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="6 candidates, 2 policies, 1,000 requests")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    if given.quick:
        given.candidates, given.policies, given.requests = 6, 2, 1_000
    gpus = catalogue()
    measured = gpus.find("h100-sxm")
    if measured is None:
        raise RuntimeError("the catalogue has no h100-sxm, which the shipped profile was measured on")
    engine = EngineSettings(max_loras=given.slots[0], max_cpu_loras=2 * given.slots[-1], max_lora_rank=16)
    twins = Twins(
        calibrated=read_profile(DEFAULT),
        measured_on=measured,
        gpus=gpus,
        host_entries=engine.host_entries,
        observation=Observation(),
    )
    asked = Asked(policies=POLICIES[: given.policies], ladder=given.slots, replicas_max=8, objective=Objective())
    with tempfile.TemporaryDirectory(prefix="loraledger-") as folder:
        trace = canary(Path(folder) / "canary.jsonl", given.requests)
        setup = replace(read_setup(BASE, (), engine), least_kv_tokens=trace.most_tokens)
        judged = candidates(offers(given.candidates, gpus), setup)
        wall, cpu = time.perf_counter(), cpu_s()
        with runs(Path(folder) / "out", trace, asked.objective, given.jobs, watching) as played:
            found = compare(judged, trace, twins, asked, played)
        wall, cpu = time.perf_counter() - wall, cpu_s() - cpu
    requests = played.played * given.requests
    rows = [
        ["candidates x policies", "slots", "requests", "replays", "wall", "requests/s", "requests/s of CPU"],
        [
            f"{given.candidates} x {given.policies}",
            ", ".join(map(str, given.slots)),
            f"{given.requests:,}",
            f"{played.played:,}",
            f"{wall / 60:.1f} min",
            f"{requests / wall:,.0f}",
            f"{requests / cpu:,.0f}",
        ],
    ]
    fits = sum(one.fits for one in judged)
    kept = sum(cell.trial.meets for cell in found.cells)
    print(
        f"{fits} of {given.candidates} candidates hold the base; {kept} of {len(found.cells)} cells keep the objectives; "
        f"{given.jobs} runs at a time on {len(os.sched_getaffinity(0))} cores.\n"
    )
    show(rows, given.markdown)


if __name__ == "__main__":
    main()
