"""Punica: requests of many adapters in one batch against batches of one adapter, as Punica measured it.

Theory of operation. Punica (MLSys'24; benchmarks/bench_textgen_lora.py of punica-ai/punica) gives 1,024 requests in a closed loop
to one engine, at most 32 at a time, at most one new prompt a step. Its own engine batches whatever comes next. The baseline, vLLM
with the backbone alone, takes the next request only while its adapter is that of the batch: first come, first served, so one that
differs holds up all behind it. Both rules are the client's, here as there: it hands the twin one request at a time. Switching
adapters costs the baseline nothing, and all adapters are on the device from the start.

A step of b sequences with KV tokens takes ``base + each * b + KV bytes / bandwidth``; a prompt token takes its arithmetic at half
of the peak; adapters add 2 ms to a step (Punica's abstract). ``base`` and ``each`` of a model are fitted to two measured token
rates of the baseline: all requests of one adapter (batches of 32) and all of different ones (batches of 1). The rest is
predicted: the baseline's rates for the two spreads in between, and Punica's own, for four spreads. Rates count prompt and output
tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from benchmarks.registered import registered
from benchmarks.reproduce.fit import fit
from benchmarks.reproduce.table import Line
from loraledger.replay.traces.trace import Request
from loraledger.replay.workloads.draws import parse_arrivals
from loraledger.replay.workloads.generate import punica
from loraledger.replay.workloads.popularity import PUNICA
from loraledger.twin.events import TokenOut, TwinRequest
from loraledger.twin.profile import PS_PER_MS, PS_PER_S, TwinProfile
from loraledger.twin.replica import ReplicaTwin

TARGET: Final = "Punica"
REQUESTS: Final = 1_024
BATCH: Final = 32
_LORA_PS: Final = 2 * PS_PER_MS
_BANDWIDTH: Final = 2.039e12
_FLOPS: Final = 0.5 * 312e12
"""A100-80: bytes/s of its data sheet, half of its fp16 peak."""
_BLOCK: Final = 16
_DISTINCT: Final = (10.0, 14.0)
_IDENTICAL: Final = (0.85, 1.0)
_EACH: Final = 0.10

Batches = Literal["mixed", "split"]
_REASONS: Final[dict[str, str]] = {
    "mixed": "the 2 ms that adapters add are a figure for the 7B model",
    "split": "fitted to the rate of distinct adapters; in uniform one neighbour in 32 shares an adapter, so both should be near",
}


@dataclass(frozen=True)
class Model:
    """A model on ``gpus`` A100-80, and token rates for ``PUNICA``'s spreads, in their order."""

    name: str
    parameters: float
    kv_bytes: int
    gpus: int
    mixed: tuple[int, int, int, int]
    split: tuple[int, int, int, int]


MODELS: Final = (
    Model("7B", 6.7e9, 524_288, 1, (1053, 1064, 1056, 1044), (87, 89, 100, 1140)),
    Model("13B", 13.0e9, 819_200, 1, (696, 696, 696, 693), (40, 50, 56, 789)),
    Model("70B", 68.9e9, 327_680, 8, (446, 444, 442, 443), (21, 23, 25, 456)),
)


def lines(data: Path, say: Callable[[str], None]) -> list[Line]:
    """Token rates and their ratios for each model. Needs nothing of ``data``."""
    runs = {
        spread: list(punica(spread, requests=REQUESTS, gap=parse_arrivals("at-once"), rate=1.0, seed=1))
        for spread in PUNICA
    }
    found = []
    for model in MODELS:
        say(f"{TARGET}: {model.name}")
        base, each = _fitted(model, runs)
        rates = {
            (batches, spread): rate(_profile(model, base, each, batches), runs[spread], batches)
            for spread in PUNICA
            for batches in ("mixed", "split")
        }
        found += _rates(model, rates) + _ratios(model, rates)
    return found


def _fitted(model: Model, runs: dict[str, list[Request]]) -> tuple[float, float]:
    """``base`` and ``each`` in s, from the baseline's rates at the two ends."""
    ends = [(runs["distinct"], model.split[0]), (runs["identical"], model.split[-1])]

    def missed(constants: list[float]) -> list[float]:
        profile = _profile(model, constants[0], constants[1], "split")
        return [100 * (rate(profile, requests, "split") / measured - 1) for requests, measured in ends]

    base, each = fit(missed, (10e-3, 0.2e-3), (3.0, 3.0), rounds=6)
    return base, each


def _profile(model: Model, base: float, each: float, batches: Batches) -> TwinProfile:
    return TwinProfile(
        slots=BATCH,
        host_entries=REQUESTS,
        max_rank=16,
        max_seqs=BATCH,
        token_budget=4096,
        kv_blocks=BATCH * 2048 // _BLOCK,
        block_size=_BLOCK,
        step_base_ps=round(base * PS_PER_S),
        step_per_seq_ps=round(each * PS_PER_S),
        step_per_kv_token_ps=round(model.kv_bytes / (model.gpus * _BANDWIDTH) * PS_PER_S),
        prefill_per_token_ps=round(2 * model.parameters / (model.gpus * _FLOPS) * PS_PER_S),
        prefill_floor_ps=0,
        prefill_offset_ps=0,
        adapter_step_ps=0,
        lora_ps=_LORA_PS if batches == "mixed" else 0,
        load_overhead_ps=0,
        load_bytes_per_s=PS_PER_S,
        activation_ps=0,
    )


def rate(profile: TwinProfile, requests: list[Request], batches: Batches) -> float:
    """Prompt and output tokens a second over the whole run.

    A request is handed over before the step that it is to join begins. The one that follows a request that ended is known of
    only when that step has begun, and joins the next.
    """
    twin = ReplicaTwin(profile)
    names = sorted({request.adapter for request in requests if request.adapter is not None})
    now = start = joins = registered(twin, ((name, 0, 16) for name in names))
    line = deque(enumerate(requests))
    running: dict[str, str | None] = {}

    def hand_over(at: int) -> None:
        number, request = line[0]
        if len(running) == BATCH or (batches == "split" and running and request.adapter not in running.values()):
            return
        line.popleft()
        name = f"r{number}"
        running[name] = request.adapter
        twin.submit(at, TwinRequest(name, request.adapter, request.prompt_tokens, request.output_tokens))

    while line or running:
        upcoming = twin.next_at()
        if upcoming is None:
            hand_over(now)
            joins = now
            continue
        if line and joins < upcoming:
            hand_over(upcoming)
            joins = upcoming
        now = upcoming
        ended = [event.id for event in twin.advance(now) if type(event) is TokenOut and event.finished]
        for name in ended:
            del running[name]
        if line and ended and running and joins < now:
            hand_over(now)
            joins = twin.next_at() or now
    tokens = sum(request.prompt_tokens + request.output_tokens for request in requests)
    return tokens * PS_PER_S / (now - start)


def _rates(model: Model, rates: dict[tuple[str, str], float]) -> list[Line]:
    found = []
    for batches, measured in (("mixed", model.mixed), ("split", model.split)):
        for spread, published in zip(PUNICA, measured, strict=True):
            ours = rates[batches, spread]
            error = ours / published - 1
            found.append(
                Line(
                    TARGET,
                    f"{model.name}, {spread}, {'Punica' if batches == 'mixed' else 'split by adapter'}",
                    "tokens/s",
                    published,
                    ours,
                    f"{100 * error:+.1f} %",
                    "10 %",
                    abs(error) <= _EACH,
                    "" if abs(error) <= _EACH else _REASONS[batches],
                    fitted=batches == "split" and spread in ("distinct", "identical"),
                    group=f"{model.name}, {batches}",
                )
            )
    return found


def _ratios(model: Model, rates: dict[tuple[str, str], float]) -> list[Line]:
    """Mixed over split: the published ranges for 7B, as wide relative to what was measured for the others."""
    found = []
    for at, spread, (low, high) in ((0, "distinct", _DISTINCT), (-1, "identical", _IDENTICAL)):
        published = model.mixed[at] / model.split[at]
        reference = MODELS[0].mixed[at] / MODELS[0].split[at]
        least, most = low / reference * published, high / reference * published
        ours = rates["mixed", spread] / rates["split", spread]
        found.append(
            Line(
                TARGET,
                f"{model.name}, {spread}: one batch over split by adapter",
                "ratio",
                published,
                ours,
                f"{100 * (ours / published - 1):+.1f} %",
                f"{least:.3g} to {most:.3g}",
                least <= ours <= most,
            )
        )
    return found
