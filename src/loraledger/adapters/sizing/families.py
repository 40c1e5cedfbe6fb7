"""Model families as data: which linear layers a layer has, how wide they are, and what else has weights.

Widths are names (``hidden``, ``q``, ``ff``), filled in from ``config.json``. Shapes, biases and norms follow the models in
``transformers`` (``models/*/modeling_*.py``), packing and token tables vLLM's classes of the same architectures
(``packed_modules_mapping``, ``embedding_modules`` in ``vllm/model_executor/models``; a class without ``embedding_modules``
gives the token tables no LoRA).

A family is added by a line in ``FAMILIES``, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from loraledger.adapters.sizing.basemodel import Kind


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer of each model layer."""

    name: str
    """Below the model layer: ``self_attn.q_proj``."""
    inputs: str
    outputs: str
    kind: Kind
    packed: str = ""
    """The engine's layer that it is packed into (``self_attn.qkv_proj``); empty: none."""
    limited: str = ""
    """The width of its outputs that belong to KV heads; empty: none do."""
    bias: bool | str = False
    """Yes, no, or the key of ``config.json`` that says so."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model layer."""

    name: str = "mlp.experts"
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    beside: tuple[Linear, ...] = ()
    """Router and shared expert."""
    fused: bool = False
    """Whether the engine's class takes LoRA on gate and up of all experts as one pair (``is_3d_moe_weight``)."""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture."""

    attention: tuple[Linear, ...]
    mlp: tuple[Linear, ...]
    experts: Experts | None = None
    """In place of ``mlp`` in the layers that have experts."""
    norms: Mapping[str, int] = field(default_factory=lambda: {"hidden": 2})
    """Other weights of a model layer: how many vectors of which width."""
    last: Mapping[str, int] = field(default_factory=lambda: {"hidden": 1})
    """The same of the whole model."""
    tables: tuple[str, ...] = ()
    """Token tables that take LoRA: ``embed_tokens``, ``lm_head``."""
    tied: bool = False
    """Whether the output head shares the input table when ``config.json`` does not say."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Fields that ``config.json`` may leave out, since they are the class's defaults."""
    on: tuple[str, ...] = ()
    """Flags of biases that are true when left out."""


def _attention(
    qkv: bool | str = False, out: bool | str = False, o_proj: str = "o_proj", *, split: bool = False
) -> tuple[Linear, ...]:
    packed = "" if split else "self_attn.qkv_proj"
    return (
        Linear("self_attn.q_proj", "hidden", "q", "column", packed, bias=qkv),
        Linear("self_attn.k_proj", "hidden", "kv", "column", packed, limited="" if split else "kv", bias=qkv),
        Linear("self_attn.v_proj", "hidden", "kv", "column", packed, limited="" if split else "kv", bias=qkv),
        Linear(f"self_attn.{o_proj}", "q", "hidden", "row", bias=out),
    )


def _gated(at: str = "mlp", width: str = "ff", bias: bool | str = False) -> tuple[Linear, ...]:
    return (
        Linear(f"{at}.gate_proj", "hidden", width, "column", f"{at}.gate_up_proj", bias=bias),
        Linear(f"{at}.up_proj", "hidden", width, "column", f"{at}.gate_up_proj", bias=bias),
        Linear(f"{at}.down_proj", width, "hidden", "row", bias=bias),
    )


_TABLES: Final = ("embed_tokens", "lm_head")
_BACKEND: Final = ("embed_tokens",)
"""Architectures without a class in vLLM run on its Transformers backend, which gives LoRA to the input table alone."""
_HEAD_NORMS: Final = {"hidden": 2, "head_dim": 2}
_ROUTER: Final = (Linear("mlp.gate", "hidden", "experts", "replicated"),)

_LLAMA: Final = Family(_attention("attention_bias", "attention_bias"), _gated(bias="mlp_bias"), tables=_TABLES)
_QWEN2: Final = Family(_attention(True), _gated())
_MISTRAL: Final = Family(_attention(), _gated())
_OLMO2: Final = Family(
    _attention("attention_bias", "attention_bias"), _gated(), norms={"hidden": 2, "q": 1, "kv": 1}, tables=_BACKEND
)

FAMILIES: Final[Mapping[str, Family]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": Family(
        _attention("attention_bias", "attention_bias"), _gated(), norms=_HEAD_NORMS, tables=_TABLES
    ),
    "Qwen2MoeForCausalLM": Family(
        _attention("qkv_bias"),
        _gated(),
        on=("qkv_bias",),
        experts=Experts(
            beside=(
                *_ROUTER,
                Linear("mlp.shared_expert_gate", "hidden", "one", "replicated"),
                *_gated("mlp.shared_expert", "shared_ff"),
            )
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        _attention("attention_bias", "attention_bias"),
        _gated(),
        Experts(beside=_ROUTER),
        norms=_HEAD_NORMS,
        tables=_TABLES,
    ),
    "MixtralForCausalLM": Family(
        _attention(),
        (),
        Experts(
            "block_sparse_moe.experts",
            ("w1", "w3", "w2"),
            (Linear("block_sparse_moe.gate", "hidden", "experts", "replicated"),),
        ),
        tables=_TABLES,
    ),
    "GemmaForCausalLM": Family(
        _attention("attention_bias", "attention_bias"), _gated(), tied=True, defaults={"head_dim": 256}
    ),
    "Gemma2ForCausalLM": Family(
        _attention("attention_bias", "attention_bias"),
        _gated(),
        norms={"hidden": 4},
        tied=True,
        defaults={"head_dim": 256, "num_key_value_heads": 4},
    ),
    "Gemma3ForCausalLM": Family(
        _attention("attention_bias", "attention_bias"),
        _gated(),
        norms={"hidden": 4, "head_dim": 2},
        tied=True,
        defaults={"head_dim": 256, "num_key_value_heads": 4, "num_attention_heads": 8, "vocab_size": 262208},
    ),
    "Phi3ForCausalLM": Family(
        (
            Linear("self_attn.qkv_proj", "hidden", "qkv", "column", limited="2kv"),
            Linear("self_attn.o_proj", "q", "hidden", "row"),
        ),
        (
            Linear("mlp.gate_up_proj", "hidden", "2ff", "column"),
            Linear("mlp.down_proj", "ff", "hidden", "row"),
        ),
        tables=_TABLES,
    ),
    "GraniteForCausalLM": Family(
        _attention("attention_bias", "attention_bias"), _gated(bias="mlp_bias"), tables=_TABLES
    ),
    "Ministral3ForCausalLM": _MISTRAL,
    "SmolLM3ForCausalLM": Family(
        _attention("attention_bias", "attention_bias"), _gated(bias="mlp_bias"), tied=True, tables=_BACKEND
    ),
    "Ernie4_5ForCausalLM": Family(
        _attention("use_bias", "use_bias"),
        _gated(bias="use_bias"),
        tied=True,
        tables=_TABLES,
        defaults={"head_dim": 128},
    ),
    "Exaone4ForCausalLM": Family(_attention(), _gated(), norms=_HEAD_NORMS, tables=_TABLES),
    "Cohere2ForCausalLM": Family(
        _attention("attention_bias", "attention_bias"),
        _gated(),
        norms={"hidden": 1},
        tied=True,
        tables=("embed_tokens",),
    ),
    "SeedOssForCausalLM": Family(
        _attention("attention_bias", "attention_out_bias"),
        _gated(bias="mlp_bias"),
        tables=_BACKEND,
        on=("attention_bias",),
        defaults={"head_dim": 128},
    ),
    "OlmoeForCausalLM": Family(
        _attention("attention_bias", "attention_bias"),
        (),
        Experts(beside=_ROUTER),
        norms={"hidden": 2, "q": 1, "kv": 1},
    ),
    "GptOssForCausalLM": Family(
        tuple(
            replace(linear, packed=linear.packed.replace("self_attn", "attn") or "attn.o_proj")
            for linear in _attention(True, True)
        ),
        (),
        Experts(beside=(Linear("mlp.router", "hidden", "experts", "replicated", bias=True),), fused=True, bias=True),
        norms={"hidden": 2, "heads": 1},
        defaults={"head_dim": 64},
    ),
    "PhiForCausalLM": Family(
        _attention(True, True, "dense"),
        (
            Linear("mlp.fc1", "hidden", "ff", "column", bias=True),
            Linear("mlp.fc2", "ff", "hidden", "row", bias=True),
        ),
        norms={"hidden": 2},
        last={"hidden": 2, "vocab": 1},
        tables=_BACKEND,
    ),
    "OlmoForCausalLM": Family(
        _attention("attention_bias", "attention_bias"), _gated(), norms={}, last={}, tables=_BACKEND
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO2,
    "Starcoder2ForCausalLM": Family(
        _attention("use_bias", "use_bias"),
        (
            Linear("mlp.c_fc", "hidden", "ff", "column", bias="use_bias"),
            Linear("mlp.c_proj", "ff", "hidden", "row", bias="use_bias"),
        ),
        norms={"hidden": 4},
        last={"hidden": 2},
        tied=True,
        tables=_BACKEND,
        on=("use_bias",),
    ),
}
"""By architecture, the first name in ``architectures`` of ``config.json``."""

_NEW_NAMES: Final = (("model.language_model.", "language_model.model."), ("lm_head", "language_model.lm_head"))
_ANY_NAMES: Final = (*_NEW_NAMES, ("model.", "language_model.model."))

MULTIMODAL: Final[Mapping[str, tuple[str, tuple[tuple[str, str], ...]]]] = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", _NEW_NAMES),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", _ANY_NAMES),
    "Qwen2VLForConditionalGeneration": ("Qwen2ForCausalLM", _ANY_NAMES),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2ForCausalLM", _ANY_NAMES),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", _NEW_NAMES),
}
"""By architecture: the family of the language model, and how the engine renames the modules of an adapter
(``hf_to_vllm_mapper``), first match first. The engine gives LoRA to the language model alone unless told otherwise."""
