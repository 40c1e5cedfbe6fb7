"""What tests of verdicts need: small bases, and adapters made from a dictionary of shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from loraledger.adapters.reading.folder import AdapterFolder
from loraledger.adapters.reading.header import Tensor
from loraledger.adapters.reading.modules import take_inventory
from loraledger.adapters.reading.peft import read_config
from loraledger.adapters.sizing.basemodel import BaseModel, BaseModule, Kind
from loraledger.adapters.sizing.engine import EngineName, EngineSettings
from loraledger.adapters.verdict.alone import Finding
from loraledger.adapters.verdict.judge import Verdict

Sizes = dict[str, tuple[int, int]]
"""Full name -> (in, out)."""

PREFIX = "base_model.model."
SIZES: Sizes = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (64, 32),
    "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (64, 128),
    "mlp.up_proj": (64, 128),
    "mlp.down_proj": (128, 64),
}
PACKED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
QV = ("q_proj", "v_proj")
ALL = tuple(name.rpartition(".")[2] for name in SIZES)
VLLM = EngineSettings(max_lora_rank=16, max_loras=4)
OTHERS: Final[tuple[EngineName, ...]] = ("sglang", "lorax", "slora")


def module(name: str, size: tuple[int, int], kind: Kind, **more: Any) -> BaseModule:
    leaf = name.rpartition(".")[2]
    return BaseModule(name, *size, kind=kind, layer=name.removesuffix(leaf) + PACKED.get(leaf, leaf), **more)


def base_of(*modules: BaseModule, kv_heads: int = 2) -> BaseModel:
    return BaseModel(
        name="acme/base-8b",
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        layers=2,
        hidden=64,
        vocabulary=100,
        heads=4,
        kv_heads=kv_heads,
        head_dim=16,
        tied_embeddings=False,
        modules={module.name: module for module in modules},
        weight_bytes=1_000_000,
        weight_source="shapes",
    )


def layers_of(prefix: str = "model.") -> list[BaseModule]:
    kinds: dict[str, Kind] = {"o_proj": "row", "down_proj": "row"}
    return [
        module(f"{prefix}layers.{layer}.{name}", size, kinds.get(name.rpartition(".")[2], "column"))
        for layer in (0, 1)
        for name, size in SIZES.items()
    ]


TABLES = (module("model.embed_tokens", (100, 64), "embedding"), module("lm_head", (64, 100), "head"))
BASE = base_of(*layers_of(), *TABLES)
MOE = base_of(
    *(m for m in layers_of() if ".mlp." not in m.name),
    *(
        module(
            f"model.layers.{layer}.mlp.experts",
            (64, 16),
            "experts",
            experts=2,
            projections=("gate_proj", "up_proj", "down_proj"),
        )
        for layer in (0, 1)
    ),
)
MOE_FUSED = replace(MOE, modules={n: replace(m, fused_experts=m.kind == "experts") for n, m in MOE.modules.items()})


def shapes(parts: tuple[str, ...] = QV, layers: tuple[int, ...] = (0, 1), prefix: str = "model.") -> Sizes:
    return {
        f"{prefix}layers.{layer}.{name}": size
        for layer in layers
        for name, size in SIZES.items()
        if name.rpartition(".")[2] in parts
    }


def pairs(sizes: Mapping[str, tuple[int, int]], rank: int = 8) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {}
    for name, (inputs, outputs) in sizes.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = (rank, inputs)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = (outputs, rank)
    return tensors


def adapter_of(
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    *,
    dtype: Any = "BF16",
    sharded: bool = False,
    ignored: tuple[str, ...] = (),
    **changes: Any,
) -> AdapterFolder:
    """An adapter that lies nowhere; q and v of both layers at rank 8 unless said otherwise."""
    fields = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": list(QV),
        "base_model_name_or_path": None,
    }
    config = read_config(json.dumps(fields | changes).encode())
    found: dict[str, Tensor] = {}
    at = 0
    for name, shape in (pairs(shapes()) if tensors is None else tensors).items():
        tensor = Tensor(dtype, shape, (at, at))
        at += 2 * tensor.parameters
        found[name] = Tensor(dtype, shape, (at - 2 * tensor.parameters, at))
    inventory = take_inventory(found, config)
    return AdapterFolder(
        name="alpha",
        path=Path("alpha"),
        config=config,
        inventory=inventory,
        rank=max([config.max_rank, *(pair.rank for pair in inventory.modules.values())]),
        target_modules=config.target_modules or (),
        base_claim=config.base_claim,
        bytes_disk=at,
        parameters=at // 2,
        dtypes=(dtype,),
        files=(),
        sharded=sharded,
        ignored=ignored,
        layout_id="0" * 16,
        warnings=(),
    )


def refusals(verdict: Verdict) -> set[tuple[str, str]]:
    return {(finding.rule, finding.by) for finding in verdict.findings if finding.effect == "refuse"}


def finding(verdict: Verdict, rule: str) -> Finding:
    [found] = [finding for finding in verdict.findings if finding.rule == rule]
    return found
