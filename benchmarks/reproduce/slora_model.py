"""A published S-LoRA run on the twin: constants to a profile, a configuration to requests, events to the published figures.

Theory of operation. The twin's ``unified`` layout is S-LoRA's loop; what it does not know is time, which eight constants of a
(GPU, model) say::

    decode  = decode + decode_seq b + decode_token KV + max(0, b prefill_token - weights / bandwidth)
              + rank (sum of distinct ranks) + seq_rank b (mean rank of requests + largest rank) / 2
    prefill = prefill + prefill_token (1 + 5 share largest rank) tokens + rank (sum of distinct ranks)
    copy    = 2 layers 60 us + load_rank rank

``b`` sequences multiply the weights in one go: free while the step is bound by reading them, and as dear as ``b`` prompt tokens
beyond (``bandwidth`` is 85 % of the data sheet's; it matters on the A100, where batches exceed 100). S-LoRA's decode kernels read
an adapter's cells for each request; the one that shrinks works on the request's own rank, the one that expands is padded to the
largest in the batch (slora/csrc/bgmv/bgmv_impl.cuh), hence the mean of both. A prefill pads to the largest rank
(slora/models/peft/triton_kernel/lora/lora_prefill.py); ``share`` is a rank's arithmetic over the model's, taken to run at a
fifth of its efficiency. A ninth constant replaces ``decode`` where no adapter is in play at all: then the loop runs without its
LoRA kernels.

``no_mem`` differs by its pool (``slora_setup``) and by copying every adapter's cells whenever one comes or goes
(slora/server/router/model_infer/naive_infer_adapter.py). ``bmm``: before each forward the authors' code builds padded batches
of adapters with 18 small PyTorch calls a layer for each group of equal neighbours in the batch
(slora/models/bmm/lora_bmm_infer.py), taken at 20 us a call, 11.5 ms for 32 layers. This one number, the same for all GPUs, was set
by eye on the A10G's runs and not fitted; a copy of a layer at 60 us is a guess.

Figures are the benchmark client's (benchmarks/run_exp.py): throughput is served requests over the time of the last answer,
attainment the share of all requests with a first token in less than 6 s, latencies are means over served requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Literal

import msgspec

from benchmarks.registered import registered
from benchmarks.reproduce.slora_files import Config, Run
from benchmarks.reproduce.slora_setup import LOG_ADAPTERS, Model, gpu_of, model_of, neighbours, pool_of
from loraledger.replay.workloads.generate import slora
from loraledger.twin.events import Rejected, TokenOut, TwinRequest
from loraledger.twin.profile import PS_PER_S, TwinProfile, UnifiedRules
from loraledger.twin.replica import ReplicaTwin

SLO_S: Final = 6.0
MAX_SEQS: Final = 1000
LOG_LENGTHS: Final = (85.0, 165.0)
"""Mean prompt and output tokens of the log behind the ``real`` runs, as the paper gives them."""
_LORA_INEFFICIENCY: Final = 5
_COPY_S: Final = 60e-6
_CALLS, _CALL_S = 18, 20e-6

Order = Literal["fifo", "lifo", "early_abort"]


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: a decode step, a sequence, a KV token, a prefill, a prompt token, a distinct rank in a step, a rank of a sequence
    in a step, a rank copied to the device.

    ``bare_decode`` stands for ``decode`` in a run without adapters; ``None``: no such run was fitted.
    """

    decode: float
    decode_seq: float
    decode_token: float
    prefill: float
    prefill_token: float
    rank: float
    seq_rank: float
    load_rank: float
    bare_decode: float | None = None

    @property
    def count(self) -> int:
        """How many constants were fitted."""
        return sum(value is not None for value in msgspec.structs.astuple(self))


@dataclass(frozen=True)
class Predicted:
    """What the benchmark's client would have written; ``None`` where nothing was served."""

    throughput: float
    latency: float | None
    first_token: float | None
    attainment: float
    aborted: int


def priors(gpu_name: str, model: Model) -> Constants:
    """Where a fit starts: weights, KV and adapters are read once a step, arithmetic runs at half the peak, the rest is Python.

    0.2 ms a layer for the kernels of a step and 60 us a sequence for what the loop does with each; adapters are copied twice
    (once for each half, as the code does) from pageable memory at 10 GB/s.
    """
    gpu = gpu_of(gpu_name)
    return Constants(
        decode=model.weights / gpu.reads + 0.2e-3 * model.layers,
        decode_seq=60e-6,
        decode_token=model.cell / gpu.reads,
        prefill=20e-3,
        prefill_token=2 * model.parameters / (0.5 * gpu.flops),
        rank=2 * model.cell / gpu.reads,
        seq_rank=2 * model.cell / gpu.reads,
        load_rank=2 * 4 * model.cell / 10e9,
    )


def profile_of(constants: Constants, run: Run, mean_rank: float) -> TwinProfile:
    """The twin's profile for a run; ``mean_rank`` over its requests."""
    model = model_of(run.setting)
    decode, prefill_token, each = constants.decode, constants.prefill_token, constants.decode_seq
    if run.config.num_adapters == 0:
        decode = constants.bare_decode or decode
    else:
        largest = max(model.ranks[: run.config.num_adapters])
        each += constants.seq_rank * (mean_rank + largest) / 2
        prefill_token *= 1 + largest * model.lora_share * _LORA_INEFFICIENCY
    return TwinProfile(
        layout="unified",
        unified=UnifiedRules(order=_order(run)),
        max_seqs=MAX_SEQS,
        max_rank=max(model.ranks),
        block_size=1,
        kv_blocks=pool_of(run),
        step_base_ps=_ps(decode),
        step_per_seq_ps=_ps(each),
        step_per_kv_token_ps=_ps(constants.decode_token),
        decode_table=_decodes(run, constants, decode, each),
        prefill_floor_ps=0,
        prefill_offset_ps=_ps(constants.prefill) - _ps(decode),
        prefill_per_token_ps=_ps(prefill_token),
        adapter_step_ps=0,
        rank_step_ps=_ps(constants.rank + _rebuilds(run)),
        rank_cost="sum",
        load_overhead_ps=0,
        load_bytes_per_s=PS_PER_S,
        activation_ps=_ps(2 * model.layers * _COPY_S),
        activation_per_rank_ps=_ps(constants.load_rank),
    )


def _order(run: Run) -> Order:
    if run.kind == "abort":
        return "early_abort"
    return "lifo" if run.kind == "lifo" else "fifo"


def _decodes(run: Run, constants: Constants, base: float, each: float) -> tuple[tuple[int, int, int], ...]:
    """Rows (sequences, ps, ps a KV token): two lines that meet where reading the weights no longer covers the arithmetic."""
    model = model_of(run.setting)
    if run.kind == "bmm" and run.config.num_adapters != 0:
        count = run.config.num_adapters or LOG_ADAPTERS
        group = _CALLS * _CALL_S * model.layers
        base += group * neighbours(0, count)
        each += group * (neighbours(1, count) - neighbours(0, count))
    read = model.weights / gpu_of(run.gpu).reads
    knee = int(min(max(read / constants.prefill_token, 1), MAX_SEQS - 1))
    return tuple(
        (b, _ps(base + each * b + max(0.0, b * constants.prefill_token - read)), _ps(constants.decode_token))
        for b in sorted({1, knee, knee + 1, MAX_SEQS})
    )


def _rebuilds(run: Run) -> float:
    """Seconds a distinct rank and step that ``no_mem`` spends on copying all adapter buffers.

    It does so when a request ends, of which a full batch has ``batch / mean output`` a step, and for a prefill, one in ten.
    """
    if run.kind != "no_mem" or run.config.num_adapters == 0:
        return 0.0
    output = sum(run.config.output_range) / 2
    batch = pool_of(run) / (output + sum(run.config.input_range) / 2)
    changes = -math.expm1(-batch / output) + 0.1
    return changes * 2 * 4 * model_of(run.setting).cell / gpu_of(run.gpu).reads


def _ps(seconds: float) -> int:
    return round(seconds * PS_PER_S)


# --- what is asked ----------------------------------------------------------------------------------------------------

Arrivals = list[tuple[int, TwinRequest]]
"""(ps after the start, request) as the benchmark's client sent them."""


def arrivals_of(config: Config, real: bool) -> Arrivals:
    """The requests of a configuration: the authors' own where they can be rebuilt, else a stand-in for their log."""
    if real or config.num_adapters is None or config.alpha is None or config.cv is None:
        return list(_log(config))
    requests = slora(
        adapters=max(config.num_adapters, 1),
        alpha=config.alpha,
        rate=config.req_rate,
        cv=config.cv,
        duration_s=config.duration,
        lengths=config.input_range,
    )
    return [
        (
            request.at * 1000,
            TwinRequest(
                str(number),
                request.adapter if config.num_adapters else None,
                request.prompt_tokens,
                request.output_tokens,
            ),
        )
        for number, request in enumerate(requests)
    ]


def _log(config: Config) -> Iterator[tuple[int, TwinRequest]]:
    """A stand-in for the log: its mean lengths, exponential and cut as there, at uniform times."""
    rng = random.Random(42)
    prompt, output = (
        _scale(mean, length[1])
        for mean, length in zip(LOG_LENGTHS, (config.input_range, config.output_range), strict=True)
    )
    times = sorted(rng.random() * config.duration for _ in range(int(config.req_rate * config.duration)))
    for number, at in enumerate(times):
        lengths = _length(rng, prompt, config.input_range[1]), _length(rng, output, config.output_range[1])
        yield _ps(at), TwinRequest(str(number), f"a{rng.randrange(LOG_ADAPTERS)}", *lengths)


def _scale(mean: float, below: float) -> float:
    """The scale at which an exponential that is cut at ``below`` has the mean ``min(mean, 0.45 below)``."""
    mean = min(mean, 0.45 * below)
    scale = mean
    for _ in range(200):
        scale *= mean / (scale - below / math.expm1(below / scale))
    return scale


def _length(rng: random.Random, scale: float, below: int) -> int:
    while (tokens := math.ceil(rng.expovariate(1 / scale))) >= below:
        pass
    return max(1, tokens)


# --- what comes out ---------------------------------------------------------------------------------------------------


class Predictor:
    """Predicts runs; keeps the requests of each configuration, which a fit asks for again and again."""

    def __init__(self) -> None:
        self._arrivals: dict[tuple[Config, bool], Arrivals] = {}
        self._ranks: dict[tuple[Config, bool, str], float] = {}

    def predict(self, run: Run, constants: Constants) -> Predicted:
        """What the client would have measured."""
        return self.play(run, profile_of(constants, run, self.mean_rank(run)))

    def mean_rank(self, run: Run) -> float:
        """Over requests; 0 without adapters."""
        key = run.config, run.real, run.setting
        mean = self._ranks.get(key)
        if mean is None:
            ranks = model_of(run.setting).ranks
            named = [request.adapter for _, request in self._asked(run) if request.adapter is not None]
            mean = fmean(ranks[int(name[1:]) % len(ranks)] for name in named) if named else 0.0
            self._ranks[key] = mean
        return mean

    def play(self, run: Run, profile: TwinProfile) -> Predicted:
        """The run's requests on a twin with ``profile``."""
        ranks = model_of(run.setting).ranks
        count = LOG_ADAPTERS if run.real else run.config.num_adapters or 0
        twin = ReplicaTwin(profile)
        start = registered(twin, ((f"a{index}", 1, ranks[index % len(ranks)]) for index in range(count)))
        return _measure(twin, self._asked(run), start + 1)

    def _asked(self, run: Run) -> Arrivals:
        key = run.config, run.real
        arrivals = self._arrivals.get(key)
        if arrivals is None:
            arrivals = self._arrivals[key] = arrivals_of(*key)
        return arrivals


class _Client:
    """Counts what the benchmark's client counts."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}
        self.firsts: list[int] = []
        self.latencies: list[int] = []
        self.aborted = 0
        self.last = 0

    def look(self, twin: ReplicaTwin, until: int | None) -> None:
        """All that happens before ``until``."""
        while (due := twin.next_at()) is not None and (until is None or due < until):
            for event in twin.advance(due):
                if isinstance(event, TokenOut):
                    if event.first:
                        self.firsts.append(event.at - self.sent[event.id])
                    if event.finished:
                        self.latencies.append(event.at - self.sent[event.id])
                        self.last = event.at
                elif isinstance(event, Rejected):
                    self.aborted += 1


def _measure(twin: ReplicaTwin, arrivals: Arrivals, start: int) -> Predicted:
    client = _Client()
    for after, request in arrivals:
        at = start + after
        client.look(twin, at)
        client.sent[request.id] = at
        twin.submit(at, request)
    client.look(twin, None)
    if not client.latencies:
        return Predicted(0.0, None, None, 0.0, client.aborted)
    return Predicted(
        len(client.latencies) * PS_PER_S / (client.last - start),
        fmean(client.latencies) / PS_PER_S,
        fmean(client.firsts) / PS_PER_S,
        sum(first < SLO_S * PS_PER_S for first in client.firsts) / len(arrivals),
        client.aborted,
    )
