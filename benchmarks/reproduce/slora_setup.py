"""What S-LoRA's published runs were made on: models, ranks, GPUs, sizes of the pool; and what physics says of their speed.

Sources: settings S1 to S6, ranks and pool sizes (``--num-token``) from the paper (Sheng et al., MLSys 2024, tables 1 and 2) and
its repository (S-LoRA/S-LoRA: benchmarks/exp_suite.py and the exp_cmds*.sh beside the results); GPU figures from vendors' data
sheets. These are facts of the experiment and guesses to start from, none is fitted here.

A cell is one token's keys and values over all layers; an adapter on q, k, v, o takes 4 cells a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.reproduce.slora_files import Kind, Run

LOG_ADAPTERS: Final = 26
"""Adapters of the ``real`` runs: one for each model in the authors' log, which is not public; by the paper around 26."""
_FP16: Final = 2
_SLACK: Final = 3e9
"""Bytes of a GPU that hold neither weights nor pool: 3.0 GB on the A10G, 6 GB of 85 on the A100-80, by the published pools."""


@dataclass(frozen=True)
class Model:
    """``ranks`` cycle over adapters by index. ``known``: the setting is a published one."""

    name: str
    parameters: float
    layers: int
    hidden: int
    ranks: tuple[int, ...]
    known: bool = True

    @property
    def weights(self) -> float:
        """Bytes in fp16."""
        return self.parameters * _FP16

    @property
    def lora_share(self) -> float:
        """Arithmetic of one rank of an adapter on q, k, v, o over that of the model."""
        return 16 * self.hidden * self.layers / (2 * self.parameters)

    @property
    def cell(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * _FP16 * self.layers * self.hidden


@dataclass(frozen=True)
class Gpu:
    """Bytes, bytes/s, FLOP/s (dense fp16). ``known``: not a guess."""

    memory: float
    bandwidth: float
    flops: float
    known: bool = True

    @property
    def reads(self) -> float:
        """Bytes/s that kernels get of the data sheet's bandwidth: 85 % is what a good one does."""
        return 0.85 * self.bandwidth


_7B, _13B = ("llama-7b", 6.74e9, 32, 4096), ("llama-13b", 13.0e9, 40, 5120)
_MODELS: Final = {
    "S1": Model(*_7B, (8,)),
    "S2": Model(*_7B, (64, 32, 16, 8)),
    "S3": Model(*_13B, (16,)),
    "S4": Model(*_13B, (64, 32, 16)),
    "S5": Model("llama-30b", 32.5e9, 60, 6656, (32,)),
    "S6": Model("llama-70b", 69.0e9, 80, 8192, (64,)),
}
_GPUS: Final = {
    "a10g": Gpu(24.1e9, 600e9, 70e12),
    "a10": Gpu(24.1e9, 600e9, 125e12),
    "l4": Gpu(24.1e9, 300e9, 121e12),
    "t4": Gpu(16.1e9, 320e9, 65e12),
    "v100": Gpu(34.0e9, 900e9, 125e12),
    "a40": Gpu(48.0e9, 696e9, 150e12),
    "a6000": Gpu(48.0e9, 768e9, 155e12),
    "l40s": Gpu(48.0e9, 864e9, 362e12),
    "a100-40": Gpu(42.4e9, 1555e9, 312e12),
    "a100-80": Gpu(85.2e9, 2039e9, 312e12),
    "h100": Gpu(85.2e9, 3350e9, 989e12),
    "h100-80": Gpu(85.2e9, 3350e9, 989e12),
    "h200": Gpu(151e9, 4800e9, 989e12),
}
_POOLS: Final = {
    ("a10g", "llama-7b"): 14_500,
    ("a100-80", "llama-7b"): 125_000,
    ("a100-80", "llama-13b"): 65_000,
    ("a100-40", "llama-13b"): 14_000,
}
_SPLIT_POOLS: Final[dict[tuple[str, str, Kind, bool], tuple[tuple[int, int], ...]]] = {
    ("a10g", "S1", "no_mem", False): ((1, 13_500),),
    ("a10g", "S2", "no_mem", False): ((1, 13_500), (20, 10_000), (50, 9_000)),
    ("a10g", "S2", "no_mem", True): ((1, 10_000),),
    ("a100-80", "S2", "no_mem", False): ((1, 125_000), (50, 110_000), (100, 100_000), (200, 90_000)),
    ("a100-80", "S4", "no_mem", False): ((1, 65_000), (100, 40_000), (400, 35_000)),
    ("a100-40", "S4", "no_mem", False): ((1, 14_000), (20, 9_000)),
    ("a10g", "S1", "bmm", False): ((1, 14_500), (20, 12_000)),
    ("a10g", "S2", "bmm", False): ((1, 13_000), (10, 9_000), (20, 8_000)),
    ("a10g", "S2", "bmm", True): ((1, 6_000),),
    ("a100-80", "S2", "bmm", False): ((1, 125_000), (20, 70_000)),
    ("a100-80", "S4", "bmm", False): ((1, 65_000), (100, 35_000)),
    ("a100-40", "S4", "bmm", False): ((1, 14_000), (20, 7_000)),
}
"""Without unified memory: (adapters from which on, cells), lowered by the authors until nothing ran out of memory."""


def model_of(setting: str) -> Model:
    """The model of a setting; an unknown one is taken for a 7B with rank 32, which the fit then has to make up for."""
    return _MODELS.get(setting) or Model(f"unknown-{setting.lower()}", 6.74e9, 32, 4096, (32,), known=False)


def gpu_of(name: str) -> Gpu:
    """A GPU by name: ``a100`` is the one of 40 GB, as in the paper; an unknown one is guessed from the size in its name."""
    known = _GPUS.get("a100-40" if name == "a100" else name)
    if known is not None:
        return known
    size = name.rpartition("-")[2]
    return Gpu(float(size) * 1.065e9 if size.isdecimal() else 42.4e9, 1e12, 150e12, known=False)


def unified_pool(gpu: str, model: Model) -> int:
    """Cells of the one pool: as published, else what weights and a slack leave of the GPU's memory (at least 4,000)."""
    published = _POOLS.get(("a100-40" if gpu == "a100" else gpu, model.name))
    if published is not None:
        return published
    memory = gpu_of(gpu).memory
    return max(4000, int((0.96 * memory - _SLACK - model.weights) / model.cell))


def pool_of(run: Run) -> int:
    """Cells for keys and values in a run: as its server was launched where that is published, else by ``split_pool``."""
    model = model_of(run.setting)
    whole = unified_pool(run.gpu, model)
    count = LOG_ADAPTERS if run.real else run.config.num_adapters
    if run.kind not in ("no_mem", "bmm") or not count:
        return whole
    steps = _SPLIT_POOLS.get((run.gpu, run.setting, run.kind, run.real))
    if steps is not None:
        return next(cells for least, cells in reversed(steps) if least <= count)
    tokens = (sum(run.config.input_range) + sum(run.config.output_range)) / 2
    return split_pool(run.kind, whole, tokens, [model.ranks[index % len(model.ranks)] for index in range(count)])


def split_pool(kind: Kind, whole: int, tokens: float, ranks: Sequence[int]) -> int:
    """Cells that are left of ``whole`` where adapters do not share the pool; a request holds ``tokens`` of them.

    ``no_mem``: adapters lie in buffers of their own that are rebuilt by concatenation, so old and new ones stand side by side
    at a change: twice the cells of the distinct adapters of a full batch. ``bmm``: each adapter once, and for each group of
    equal neighbours in the batch a copy padded to the largest rank. Within 13 % of what the authors set by hand for all 200 or
    400 adapters on the A10G (S2) and the A100-80 (S2, S4).
    """
    count, mean, largest = len(ranks), sum(ranks) / len(ranks), max(ranks)
    pool = float(whole)
    for _ in range(50):
        batch = max(1.0, pool / tokens)
        if kind == "no_mem":
            taken = 2 * 4 * mean * count * -math.expm1(-batch / count)
        else:
            taken = 4 * (mean + largest) * neighbours(batch, count)
        pool = (pool + max(whole / 10, whole - taken)) / 2
    return int(pool)


def neighbours(batch: float, adapters: int) -> float:
    """Groups of equal neighbours to expect among ``batch`` requests with uniform choice of ``adapters``."""
    return 1 + (batch - 1) * (1 - 1 / adapters)


def comparable(kind: Kind) -> bool:
    """Whether the system behind ``kind`` is S-LoRA's loop at all, with or without one of its parts."""
    return kind not in ("vllm", "peft", "merge", "cluster")
