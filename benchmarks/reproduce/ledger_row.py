"""What a slot of vLLM costs in KV, from the ledger's own sizes against what a fleet of real servers had left.

Theory of operation. vLLM pays its slots before KV. Servers of Llama-3.1-8B on one H100, started with many slots of three ranks,
had 307,500 - slots * {401, 753, 1,451} tokens of KV for ranks 8, 16 and 32 (runs of FerranAgulloLopez/GPULLMAdapterOptimization,
the code of arXiv 2508.08343). So a slot costs a line in its rank: 44.0 tokens a rank between 8 and 16, 43.6 between 16 and 32,
and a fixed part. The ledger's slot is linear in the rank with nothing fixed (``sizing.footprint.slot_bytes``): its slope is
compared as it is, and the fixed part is the one constant fitted, the mean of what is left at the three ranks.

What the fixed part is: vLLM 0.8, which the authors used, kept rows for tokens that adapters may add (``lora_extra_vocab_size``,
256) for the embedding and for the head of each slot, whatever its rank: 2 x 256 x hidden x 2 bytes, 32 tokens of this model. The
rest, some 14 tokens, is not explained here. vLLM 0.32 has no such rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.reproduce.table import Line
from loraledger.adapters.sizing.base import read_base
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.sizing.footprint import served_dtype, slot_bytes

TARGET: Final = "KV a slot costs"
MODELS: Final = Path(__file__).parent / "models"
"""Architecture numbers of the models that published runs used, as their ``config.json`` has them; no weights."""
PUBLISHED: Final = {8: 401, 16: 753, 32: 1_451}
"""KV tokens that a slot costs, by its rank."""
_EXTRA_ROWS: Final = 256
_TOLERANCE: Final = 0.03


def slot_tokens(model: str, rank: int) -> float:
    """KV tokens that one slot of vLLM displaces on one GPU that holds all of ``model`` (a folder of ``MODELS``)."""
    base, engine = read_base(MODELS / model), EngineSettings(max_lora_rank=rank)
    slot = slot_bytes(base, engine)
    assert slot is not None
    return slot.total / base.kv_bytes_per_token(served_dtype(base, engine))


def lines(data: Path, say: Callable[[str], None]) -> list[Line]:
    """The slope, and each rank's slot with the fixed part added. Needs nothing of ``data``."""
    model = "llama-3.1-8b"
    ours = {rank: slot_tokens(model, rank) for rank in PUBLISHED}
    fixed = fmean(PUBLISHED[rank] - ours[rank] for rank in PUBLISHED)
    low, high = min(PUBLISHED), max(PUBLISHED)
    slope = (ours[high] - ours[low]) / (high - low)
    steps = [
        (PUBLISHED[right] - PUBLISHED[left]) / (right - left)
        for left, right in zip(list(PUBLISHED), list(PUBLISHED)[1:], strict=False)
    ]
    off = _outside(slope, min(steps), max(steps))
    base = read_base(MODELS / model)
    rows = 2 * _EXTRA_ROWS * base.hidden * 2 / base.kv_bytes_per_token("bfloat16")
    found = [
        Line(
            TARGET,
            "KV tokens a rank of a slot, Llama-3.1-8B",
            "tokens",
            f"{min(steps):.1f} to {max(steps):.1f}",
            slope,
            f"{100 * off:+.1f} %",
            "3 %",
            abs(off) <= _TOLERANCE,
        ),
        Line(
            TARGET,
            f"fixed part of a slot ({rows:.0f} of it: rows for added tokens)",
            "tokens",
            "-",
            fixed,
            "-",
            "named",
            True,
            fitted=True,
        ),
    ]
    for rank, published in PUBLISHED.items():
        error = (ours[rank] + fixed) / published - 1
        found.append(
            Line(
                TARGET,
                f"a slot of rank {rank}, fixed part included",
                "tokens",
                published,
                ours[rank] + fixed,
                f"{100 * error:+.1f} %",
                "3 %",
                abs(error) <= _TOLERANCE,
                group="a slot",
            )
        )
    return found


def _outside(value: float, low: float, high: float) -> float:
    """How far outside [low, high] ``value`` lies, as a share of the nearer end; 0 inside."""
    if value < low:
        return value / low - 1
    return value / high - 1 if value > high else 0.0
