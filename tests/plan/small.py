"""A comparison small enough for a test: the 8B base by its configuration, a canary of a minute or less, the shipped profile."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.plan.canary import Canary, Twins, read_canary
from loraledger.plan.candidates import Candidate, Setup, candidates, read_setup
from loraledger.plan.compare import Asked, Comparison, compare
from loraledger.plan.hardware import Catalogue, catalogue
from loraledger.plan.offers import Offer
from loraledger.plan.runs import Runs, runs
from loraledger.plan.trials import Objective
from loraledger.replay.fleet.observation import Observation
from loraledger.replay.fleet.outcome import Outcome
from loraledger.replay.fleet.run import Progress
from loraledger.replay.scenarios.profiles import DEFAULT, read_profile
from loraledger.replay.scenarios.sweep import Watcher
from loraledger.replay.traces.trace import Header, Request, write_trace
from loraledger.replay.workloads.draws import parse_arrivals, parse_lengths
from loraledger.replay.workloads.generate import Mix, named_adapters, workload

ROOT = Path(__file__).parents[2]
BASE = ROOT / "benchmarks/reproduce/models/llama-3.1-8b"
SLICE = ROOT / "src/loraledger/cli/demo/data/azure_conv_2023_slice.csv"
GPUS = catalogue()


class Nobody:
    """Looks at no run."""

    def moved(self, index: int, progress: Progress) -> None:
        """Nothing."""

    def ended(self, index: int, outcome: Outcome) -> None:
        """Nothing."""


@contextmanager
def unwatched(labels: Sequence[str], requests: int) -> Iterator[Watcher]:
    """Nobody looks."""
    yield Nobody()


def canary(folder: Path, *, rate: float = 4.0, requests: int = 60, adapters: int = 12, seed: int = 7) -> Canary:
    """Poisson arrivals, Zipf 1.0, short answers."""
    drawn = workload(
        Mix(adapters=adapters, popularity="zipf:1.0"),
        parse_arrivals("poisson"),
        parse_lengths("64-511"),
        parse_lengths("16-63"),
        rate=rate,
        requests=requests,
        duration=None,
        seed=seed,
    )
    return written(folder / "canary.jsonl", list(drawn), adapters, seed)


def written(path: Path, requests: list[Request], adapters: int, seed: int) -> Canary:
    """A trace of ``requests``, read back."""
    named = named_adapters(adapters, (8, 16), 2_621_440)
    header = Header(name="small", source="a test", licence="none needed", seed=seed, adapters=named)
    write_trace(path, header, enumerate(requests, 1))
    return read_canary(path)


def azure(path: Path, seconds: float) -> None:
    """The first ``seconds`` of the shipped slice of Azure's trace, as ``trace import vidur`` reads it."""
    with SLICE.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if int(row["arrived_ms"]) < seconds * 1000]
    lines = [f"{int(row['arrived_ms']) / 1000},{row['prompt_tokens']},{row['generated_tokens']}\n" for row in rows]
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(lines), encoding="utf-8")


def offer(name: str, gpu: str, **changes: Any) -> Offer:
    """One of that GPU for a dollar an hour."""
    found = GPUS.find(gpu)
    assert found is not None
    given: dict[str, Any] = {
        "name": name,
        "provider": "p",
        "gpu": found,
        "count": 1,
        "memory_bytes": found.memory.value,
        "host_link": None,
        "price_per_hour": 1.0,
        "currency": "USD",
        "term": "on-demand",
        "region": None,
        "as_of": "2026-11-30",
    }
    return Offer(**given | changes)


def setup(slots: int = 4, entries: int = 16, **changes: Any) -> Setup:
    """The 8B base under an engine with slots of rank 16."""
    found = read_setup(BASE, (), EngineSettings(max_loras=slots, max_cpu_loras=entries, max_lora_rank=16))
    for name, value in ({"least_kv_tokens": 1024} | changes).items():
        object.__setattr__(found, name, value)
    return found


def twins(gpus: Catalogue = GPUS, entries: int = 16) -> Twins:
    """The shipped profile."""
    measured = gpus.find("h100-sxm")
    assert measured is not None
    profile = read_profile(DEFAULT)
    return Twins(calibrated=profile, measured_on=measured, gpus=gpus, host_entries=entries, observation=Observation())


def asked(**changes: Any) -> Asked:
    """Two policies, two steps of slots, four replicas at most."""
    given: dict[str, Any] = {
        "policies": ("bounded-affinity", "least-loaded"),
        "ladder": (4, 8),
        "replicas_max": 4,
        "objective": Objective(),
    }
    return Asked(**given | changes)


@contextmanager
def playing(out: Path, found: Canary, objective: Objective | None = None) -> Iterator[Runs]:
    """Runs in this process, one after the other."""
    with runs(out, found, objective or Objective(), 1, unwatched) as played:
        yield played


def compared(out: Path, found: Canary, offers: Sequence[Offer], **changes: Any) -> tuple[Comparison, list[Candidate]]:
    """A comparison of ``offers``, and its candidates."""
    judged = candidates(offers, setup())
    question = asked(**changes)
    with playing(out, found, question.objective) as played:
        return compare(judged, found, twins(), question, played), judged
