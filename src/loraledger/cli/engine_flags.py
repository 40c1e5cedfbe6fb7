"""Flags of an engine as options of several verbs, under the engine's own names, and what an engine would not start with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from loraledger.adapters.sizing.engine import EngineSettings

ShardedOption = Annotated[
    bool | None, typer.Option("--fully-sharded-loras", help="Both halves of an adapter are cut over the ranks.")
]
ExpertOption = Annotated[
    bool | None, typer.Option("--enable-expert-parallel", help="Experts are dealt out over the ranks whole.")
]
TargetsOption = Annotated[
    list[str] | None,
    typer.Option(help="Only these modules get room in a slot: separated by commas, or the option repeated."),
]
LoraDtypeOption = Annotated[
    Literal["auto", "float16", "bfloat16"] | None, typer.Option(help="Default: auto, the base model's.")
]
DtypeOption = Annotated[
    Literal["auto", "float16", "bfloat16", "float32"] | None,
    typer.Option(help="What the base is served in. Default: auto."),
]


def listed(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """Names of several options, each of which may hold several. Raises ``BadParameter`` when that leaves none."""
    if not values:
        return None
    names = tuple(name.strip() for value in values for name in value.split(",") if name.strip())
    if not names:
        raise typer.BadParameter("--lora-target-modules names no module: leave it out to give all of them room")
    return names


def check_flags(flags: EngineSettings) -> None:
    """Raises ``BadParameter`` for what the engine itself would not start with."""
    from loraledger.adapters.sizing.basemodel import DTYPE_BYTES
    from loraledger.config.schema import MAX_RANKS

    cache = flags.kv_cache_dtype
    if cache not in ("auto", *DTYPE_BYTES) and not cache.startswith("fp8"):
        raise typer.BadParameter(f"--kv-cache-dtype is auto, fp8, {', '.join(DTYPE_BYTES)}")
    if flags.engine == "vllm" and flags.max_lora_rank not in MAX_RANKS:
        raise typer.BadParameter(f"vLLM takes --max-lora-rank {', '.join(map(str, MAX_RANKS))}")
    if flags.engine == "vllm" and flags.host_entries < flags.max_loras:
        raise typer.BadParameter(f"vLLM wants --max-cpu-loras of at least its slots ({flags.max_loras})")
