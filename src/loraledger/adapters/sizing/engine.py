"""How one engine was started, as far as the bytes and the fate of adapters depend on it.

The names are those of the engine's own flags. Defaults are vLLM's (``vllm/config/lora.py``): one slot, rank 16, a host cache
as large as the slots; they are spelled out because "nothing was set" has a cost that operators do not expect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loraledger.config.schema import MAX_RANKS

EngineName = Literal["vllm", "sglang", "lorax", "slora"]
LoraDtype = Literal["auto", "float16", "bfloat16"]
ModelDtype = Literal["auto", "float16", "bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Flags of one engine. ``auto`` types follow the base model's."""

    engine: EngineName = "vllm"
    max_loras: int = 1
    """Slots."""
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    """Entries of the host cache; ``None``: as many as slots."""
    tensor_parallel: int = 1
    fully_sharded_loras: bool = False
    lora_target_modules: tuple[str, ...] | None = None
    """Only these modules get room in a slot; ``None``: every supported one."""
    lora_dtype: LoraDtype = "auto"
    kv_cache_dtype: str = "auto"
    dtype: ModelDtype = "auto"
    """What the base is served in. vLLM's ``auto`` keeps 16-bit types and turns float32 into bfloat16
    (``config/model.py: _resolve_auto_dtype``)."""
    expert_parallel: bool = False
    """Experts are dealt out over the ranks whole, in place of each being cut."""

    @property
    def host_entries(self) -> int:
        """Adapters that the host cache holds."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def usable_slots(self) -> int:
        """Slots that adapters can have: in SGLang the base model takes one (``srt/lora/mem_pool.py``)."""
        return self.max_loras - 1 if self.engine == "sglang" else self.max_loras


def smallest_max_rank(rank: int) -> int | None:
    """The smallest ``max_lora_rank`` that takes ``rank``; ``None`` when there is none."""
    return next((allowed for allowed in MAX_RANKS if allowed >= rank), None)
