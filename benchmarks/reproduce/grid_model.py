"""A run of the published grid on the twin, and the constants that its steps are made of.

Theory of operation. Seven constants of one (GPU, model, rank); ``b`` requests in a step, ``a`` distinct adapters, ``s`` slots ::

    step = base + request b + adapter a + adapter_slot a s          KV tokens = pool - s slot

and ``load``, a copy to the device. The cost of an adapter grows with the slots that exist: the kernels of that vLLM ran over all
of them. Prompt and KV have no constants of their own: every request has the same length, and its prompt is in the prefix cache
(below). ``slot`` is not fitted; it is the ledger's own figure for Llama-2-7B. ``arrivals`` is the share of requests that the
client did send: runs without any queue served 3 % less than their rate says.

Neither model nor engine flags are in the files. That the model is Llama-2-7B and prompts are shared follows from the data: a
request adds 0.1 ms to a step, as 370 tokens of its KV do (0.5 MiB each) and those of a model with grouped heads do not; batches
of 1,025 ran, whose prompts alone would be three times its KV; and the KV that explains the curves falls by some 75 tokens a slot
(78 by the ledger). The dataset's script tokenises with Llama-2-7B, too.

What is fitted to what: all constants to runs in which every adapter has its slot, so nothing is ever swapped. Time of a step: the
mean gap between tokens; where requests are preempted, which lengthens the gaps, duration over steps. ``a`` of a batch b drawn
from n adapters: n (1 - (1 - 1/n)^b). ``pool``: such that the runs with preemptions (of each number of slots the one with the
lowest rate) give their throughput on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import msgspec

from benchmarks.registered import registered
from benchmarks.reproduce.fit import fit
from benchmarks.reproduce.grid_files import PROMPT_TOKENS, Run
from loraledger.errors import InputFileError
from loraledger.replay.workloads.draws import stream
from loraledger.twin.events import Activated, TokenOut, TwinRequest
from loraledger.twin.profile import PS_PER_S, TwinProfile
from loraledger.twin.replica import ReplicaTwin

_BLOCK: Final = 16
_MAX_SEQS: Final = 2048
_PRIORS: Final = (10e-3, 50e-6, 500e-6, 1e-6)
_FREE: Final = 3.0
"""How far off a prior may be, as a factor's logarithm: a formality, there are many runs."""


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, but ``pool`` (KV tokens before slots) and ``arrivals`` (a share)."""

    base: float
    request: float
    adapter: float
    adapter_slot: float
    load: float
    arrivals: float
    pool: int


@dataclass(frozen=True)
class Predicted:
    """Output tokens/s of the requests that ended, and copies of adapters to the device."""

    throughput: float
    loads: int


def step_s(run: Run, constants: Constants) -> float:
    """The mean step of a run in which nobody lacks a slot, by its mean batch."""
    return _dot(_parts(run), (constants.base, constants.request, constants.adapter, constants.adapter_slot))


def measured_step_s(run: Run) -> float:
    """What ``step_s`` is compared with."""
    return run.seconds / run.steps if run.preempts else run.gap


def _parts(run: Run) -> tuple[float, float, float, float]:
    # A token sees a step that is larger than the mean one: by its own request, for a batch that comes and goes at random.
    batch = run.batch if run.preempts else run.batch + 1
    distinct = run.adapters * (1 - (1 - 1 / run.adapters) ** batch)
    return 1.0, batch, distinct, distinct * run.slots


def _dot(parts: Sequence[float], constants: Sequence[float]) -> float:
    return math.fsum(part * constant for part, constant in zip(parts, constants, strict=True))


def fitted(runs: Sequence[Run], slot_tokens: float) -> tuple[Constants, list[Run]]:
    """The constants, and the runs that they are fitted to. Raises ``InputFileError`` where there are too few."""
    used = [run for run in runs if run.slots == run.adapters]
    unhurried = [run for run in used if run.waiting < 1]
    full = [run for run in used if run.preempts]
    if len(used) < 8 or not unhurried or not full:
        raise InputFileError(
            "fewer than 8 runs in which every adapter has a slot, or none of them without a queue or with preemptions: "
            "nothing to fit to"
        )
    measured = [(_parts(run), measured_step_s(run)) for run in used]
    base, request, adapter, adapter_slot = fit(
        lambda constants: [(_dot(parts, constants) / time - 1) / 0.05 for parts, time in measured],
        _PRIORS,
        (_FREE,) * 4,
    )
    sent = sum(run.completed + run.batch for run in unhurried) / sum(run.rate * run.seconds for run in unhurried)
    rough = Constants(
        base=base,
        request=request,
        adapter=adapter,
        adapter_slot=adapter_slot,
        load=fmean(run.loading / run.adapters for run in used),
        arrivals=min(sent, 1.0),
        pool=0,
    )
    lightest: dict[int, Run] = {}
    for run in sorted(full, key=lambda run: run.rate):
        lightest.setdefault(run.slots, run)
    return _with_pool(rough, [*lightest.values()], slot_tokens), used


def _with_pool(rough: Constants, runs: Sequence[Run], slot_tokens: float) -> Constants:
    """The pool at which throughputs are right on average: more KV gives more, until a batch is never full.

    By the method of false position on the logarithm of the pool, with the factor of Illinois; within 1 %.
    """
    least = max(run.slots for run in runs) * slot_tokens

    def error(at: float) -> float:
        now = msgspec.structs.replace(rough, pool=int(math.exp(at)))
        return fmean(math.log(max(predict(run, now, slot_tokens).throughput, 1e-9) / run.throughput) for run in runs)

    low, high = math.log(1.1 * least), math.log(5 * least)
    below, above = error(low), error(high)
    at = low if below >= 0 else high
    while below < 0 < above and high - low > 0.01:
        at = low + (high - low) * below / (below - above)
        found = error(at)
        if abs(found) < 0.004:
            break
        if found < 0:
            low, below, above = at, found, above / 2
        else:
            high, above, below = at, found, below / 2
    return msgspec.structs.replace(rough, pool=int(math.exp(at)))


def profile_of(run: Run, constants: Constants, slot_tokens: float) -> TwinProfile:
    """The twin's profile for a run."""
    tokens = constants.pool - run.slots * slot_tokens
    least = PROMPT_TOKENS + run.output_tokens + _BLOCK
    return TwinProfile(
        slots=run.slots,
        host_entries=run.adapters,
        max_rank=run.rank,
        max_seqs=_MAX_SEQS,
        token_budget=_MAX_SEQS,
        kv_blocks=int(max(tokens, least)) // _BLOCK,
        block_size=_BLOCK,
        prefix_caching=True,
        step_base_ps=_ps(constants.base),
        step_per_seq_ps=_ps(constants.request),
        step_per_kv_token_ps=0,
        prefill_per_token_ps=0,
        prefill_floor_ps=0,
        prefill_offset_ps=0,
        adapter_step_ps=_ps(constants.adapter + constants.adapter_slot * run.slots),
        load_overhead_ps=0,
        load_bytes_per_s=PS_PER_S,
        activation_ps=_ps(constants.load),
    )


def _ps(seconds: float) -> int:
    return round(seconds * PS_PER_S)


def predict(run: Run, constants: Constants, slot_tokens: float) -> Predicted:
    """The run on the twin, all of its duration: Poisson arrivals, each adapter equally likely."""
    twin = ReplicaTwin(profile_of(run, constants, slot_tokens))
    now = registered(twin, ((f"a{number}", 0, 1) for number in range(run.adapters)))
    end, prefix = now + _ps(run.seconds), tuple(range(PROMPT_TOKENS // _BLOCK))
    rng, rate = stream(1, "grid"), run.rate * constants.arrivals / PS_PER_S
    arrival = now + round(rng.expovariate(rate))
    ended = loads = number = 0
    while True:
        upcoming = twin.next_at()
        if upcoming is not None and upcoming < arrival:
            if upcoming > end:
                break
            for event in twin.advance(upcoming):
                if type(event) is TokenOut:
                    ended += event.finished
                else:
                    loads += type(event) is Activated
            continue
        if arrival > end:
            break
        name = f"a{rng.randrange(run.adapters)}"
        twin.submit(arrival, TwinRequest(f"r{number}", name, PROMPT_TOKENS, run.output_tokens, prefix))
        number += 1
        arrival += round(rng.expovariate(rate))
    return Predicted(ended * run.output_tokens / run.seconds, loads)
