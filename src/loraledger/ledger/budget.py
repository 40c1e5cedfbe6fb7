"""What fits on a device, worked out before an engine is started.

Two ways. :func:`rough_budget` divides what is left of the device by the size of one adapter: the arithmetic of a planner who has
four estimates and no engine yet. :func:`exact_budget` follows an engine with slots, in the order in which vLLM takes memory:
weights, slots of the largest rank, activation peak and graphs, then as many KV blocks as ``gpu_memory_utilization`` leaves
(``vllm/v1/worker/gpu_worker.py: determine_available_memory``). Slots are exact to the byte. So are weights on one rank; over
several they are a fair share, which leaves out what each holds whole (norms: under 0.1 % of an 8B model). The overhead depends
on the device and has to be measured; while it is not given it is unknown, and what is said of KV is an upper bound. vLLM also
refuses to start with less KV than one request of ``max_model_len`` takes, which a plan says by the KV that it wants.

All device figures are of one device, that is one rank process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from loraledger.adapters.sizing.basemodel import DTYPE_BYTES, BaseModel
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.sizing.footprint import served_dtype
from loraledger.adapters.survey import Slots, Totals, kv_bytes_of, slots_of
from loraledger.errors import InputFileError

UTILIZATION: Final = 0.92
"""``gpu_memory_utilization`` where it is not set (vLLM 0.32, ``config/cache.py``)."""

BLOCK_TOKENS: Final = 16
"""Tokens of one KV block where ``block_size`` is not set."""


@dataclass(frozen=True, slots=True)
class RoughBudget:
    """One device divided by estimates. Bytes."""

    device: int
    floor: int
    safety: int
    kv: int
    adapter: int

    @property
    def left(self) -> int:
        """What nobody has claimed; below 0 when the others do not fit."""
        return self.device - self.floor - self.safety - self.kv

    @property
    def adapters(self) -> int:
        """Whole adapters in it."""
        return max(0, self.left) // self.adapter

    @property
    def spare(self) -> int:
        """What is left after those; below 0 when floor, safety and KV are more than the device."""
        return self.left - self.adapters * self.adapter


def rough_budget(device: int, floor: int, safety: int, kv: int, adapter: int) -> RoughBudget:
    """``device`` bytes, of which three parts are claimed, for adapters of ``adapter`` bytes each (1 or more)."""
    if adapter < 1:
        raise ValueError("an adapter has at least one byte")
    return RoughBudget(device, floor, safety, kv, adapter)


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine that somebody means to start."""

    device: int
    """Bytes of one device."""
    base: BaseModel
    engine: EngineSettings
    utilization: float = UTILIZATION
    """The share of the device that the engine may use."""
    safety: int = 0
    """Bytes to keep free at least; more than the utilization leaves counts."""
    overhead: int | None = None
    """Bytes that the engine takes beside weights, slots and KV."""
    kv: int | None = None
    """Bytes of KV that are wanted; ``None``: what remains."""
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class ExactBudget:
    """One device divided as the engine will do it. ``weights + overhead + slots.total + kv + kept + left = device``."""

    device: int
    weights: int
    overhead: int | None
    """``None``: not known; it then lies in ``kv``, or in ``left`` where KV was wanted."""
    slots: Slots
    kv: int
    """As wanted, else whole blocks of what remains."""
    kv_wanted: bool
    kv_tokens: int
    kv_bytes_per_token: int
    block_tokens: int
    kept: int
    """Kept free by the settings."""
    left: int
    """Less than a block where KV takes what remains, else what the engine would add to KV; below 0: short by so much."""
    largest_slots: int
    """The most slots of this rank that leave room for all the rest; 0 when not even one does."""
    host_entries: int

    @property
    def fits(self) -> bool:
        """Whether the engine would start; while the overhead is unknown, whether it is not known that it would not."""
        return self.left >= 0

    @property
    def kv_at_most(self) -> bool:
        """Whether ``kv`` is only an upper bound."""
        return self.overhead is None and not self.kv_wanted

    def tokens(self, size: int) -> int:
        """KV tokens that fit in ``size`` bytes, in whole blocks."""
        return size // (self.kv_bytes_per_token * self.block_tokens) * self.block_tokens


def exact_budget(plan: Plan) -> ExactBudget:
    """What ``plan`` takes and what it leaves.

    Raises :class:`InputFileError` when the base cannot be cut over so many ranks, when its shapes are not known, and when
    ``lora_target_modules`` are none of its modules.
    """
    slots = slots_of(plan.base, plan.engine)
    if slots is None:
        raise InputFileError(f"{plan.base.name}: slots need the base's own folder and an engine that has them")
    if not slots.one.total:
        raise InputFileError(f"{plan.base.name}: no module has room in a slot: correct --lora-target-modules")
    weights, kept = rank_weights(plan.base, plan.engine), kept_free(plan)
    token = kv_bytes_of(plan.base, plan.engine)
    block = token * plan.block_tokens
    room = plan.device - kept - weights - (plan.overhead or 0)
    least = block if plan.kv is None else plan.kv
    rest = room - slots.total
    kv = plan.kv if plan.kv is not None else max(rest // block, 1) * block
    return ExactBudget(
        device=plan.device,
        weights=weights,
        overhead=plan.overhead,
        slots=slots,
        kv=kv,
        kv_wanted=plan.kv is not None,
        kv_tokens=kv // block * plan.block_tokens,
        kv_bytes_per_token=token,
        block_tokens=plan.block_tokens,
        kept=kept,
        left=rest - kv,
        largest_slots=max(0, room - least) // slots.one.total,
        host_entries=plan.engine.host_entries,
    )


def rank_weights(base: BaseModel, engine: EngineSettings) -> int:
    """Bytes of the base's weights on one rank process, in the type that they are served in.

    What is stored in 16 bits or less stays so; float32 is halved by vLLM's ``auto`` (``config/model.py: _resolve_auto_dtype``).
    Over several ranks: an even share, rounded up.
    """
    stored, served = DTYPE_BYTES[base.dtype], DTYPE_BYTES[served_dtype(base, engine)]
    return -(-base.weight_bytes * served // (stored * engine.tensor_parallel))


def kept_free(plan: Plan) -> int:
    """Device bytes that the engine will leave alone (vLLM ``v1/worker/utils.py: request_memory``), or ``safety`` if more."""
    return max(plan.device - math.ceil(plan.device * plan.utilization), plan.safety)


def kv_for(tokens: int, base: BaseModel, engine: EngineSettings, block_tokens: int = BLOCK_TOKENS) -> int:
    """Bytes of the whole blocks that hold ``tokens``, on one rank process."""
    return -(-tokens // block_tokens) * block_tokens * kv_bytes_of(base, engine)


def at_rank(plan: Plan, max_lora_rank: int) -> ExactBudget:
    """The budget of ``plan`` with slots of another rank."""
    return exact_budget(replace(plan, engine=replace(plan.engine, max_lora_rank=max_lora_rank)))


@dataclass(frozen=True, slots=True)
class FolderBudget:
    """What a folder of adapters asks of a plan."""

    adapters: int
    """Those that the engine would take, if their rank is left aside."""
    smallest_max_rank: int | None
    """``max_lora_rank`` that takes them; ``None`` when there are none, or no value takes any."""
    at_smallest: ExactBudget | None
    """The plan with that rank; ``None`` also when ``fully_sharded_loras`` cannot cut it over the ranks."""
    too_big: tuple[str, ...]
    """Adapters that no value takes."""
    host: int | None
    """Bytes of the fullest host cache, over all rank processes of one host."""
    turns: bool
    """Whether there are more adapters than slots, so that not all can be in one step."""


def folder_budget(plan: Plan, totals: Totals) -> FolderBudget:
    """``plan`` against the adapters that ``totals`` sum up."""
    rank, judged = totals.fit.without_too_big, totals.outcomes.total() - totals.fit.aside
    taken = judged - len(totals.fit.too_big)
    return FolderBudget(
        adapters=taken,
        smallest_max_rank=rank,
        at_smallest=None if rank is None or _uncut(plan.engine, rank) else at_rank(plan, rank),
        too_big=totals.fit.too_big,
        host=None if totals.host_fullest is None else totals.host_fullest * plan.engine.tensor_parallel,
        turns=taken > plan.engine.usable_slots,
    )


def _uncut(engine: EngineSettings, rank: int) -> bool:
    return engine.fully_sharded_loras and rank % engine.tensor_parallel > 0
