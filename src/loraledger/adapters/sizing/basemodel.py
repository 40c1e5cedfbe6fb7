"""The base model that adapters sit on: its modules and their shapes, its weights' bytes, its KV bytes a token.

A *module* is one linear layer as checkpoints and adapters name it (``model.layers.0.self_attn.q_proj``); a *layer* is what
the engine really holds (``...self_attn.qkv_proj``, into which q, k and v are packed). Only layers that vLLM wraps for LoRA
are modules here, because only they have room in a slot and only they can change an answer. All linear layers are wrapped;
the token tables are where the model's class says so (``embedding_modules``): Llama and Qwen3 do, Qwen2, Mistral and Gemma
do not. All experts of one layer are one module, as they are one layer of the engine; :meth:`BaseModel.find` knows the names
that adapters use inside it.

Bytes differ from rank process to rank process only in how an output is cut: :meth:`BaseModule.rank_outputs`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from loraledger.errors import InputFileError

Kind = Literal["column", "row", "replicated", "embedding", "head", "experts"]
"""How an engine cuts a module over tensor-parallel ranks: along its output, along its input, not at all; ``embedding`` and
``head`` are the token tables; ``experts`` are all experts of one layer, stored as one."""

DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one value of the types that a model can be served in."""

_PACKED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_MODULE_PATH: Final = re.compile(r"\w+(?:\.\w+)*")
_MAX_MODULES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class BaseModule:
    """One linear layer that LoRA may change, or all experts of one layer."""

    name: str
    """As in checkpoints and in adapters: ``model.layers.0.self_attn.q_proj``."""
    in_features: int
    """Of ``embedding``: the vocabulary. 0 where only the name is known."""
    out_features: int
    """Of ``head``: the vocabulary. Of ``experts``: the width inside one expert. 0 where only the name is known."""
    kind: Kind
    layer: str
    """The engine's layer that holds it: ``model.layers.0.self_attn.qkv_proj`` for ``q_proj``; its own name when alone."""
    shards: int | None = None
    """The most pieces that its output can be cut into (KV heads); ``None``: as many as asked."""
    experts: int = 1
    limited: int | None = None
    """How many of its outputs ``shards`` holds for (K and V inside one fused ``qkv_proj``); ``None``: all."""
    projections: tuple[str, ...] = ()
    """Of ``experts``: the names of gate, up and down inside one expert (``gate_proj``; Mixtral: ``w1``)."""
    fused_experts: bool = False
    """Whether the engine takes gate and up of all experts as one pair (3D), as ``target_parameters`` saves them."""

    @property
    def suffix(self) -> str:
        """Last part of the name: ``q_proj``."""
        return self.name.rpartition(".")[2]

    @property
    def shaped(self) -> bool:
        """Whether the shape is known."""
        return self.in_features > 0 and self.out_features > 0

    def rank_outputs(self, ranks: int) -> int:
        """Outputs that one of ``ranks`` processes holds when the output is cut.

        KV heads are copied once there are more ranks than heads (``QKVParallelLinear.__init__``).
        """
        limited = 0 if self.shards is None else self.out_features if self.limited is None else self.limited
        free = divide(self.out_features - limited, ranks, self.name)
        return free + (divide(limited, min(ranks, self.shards), self.name) if self.shards is not None else 0)

    def pairs(self) -> tuple[BaseModule, ...]:
        """The layers that have an A and a B of their own: itself, or those inside its experts (each of all ``experts``).

        With ``fused_experts`` gate and up share one pair, twice as wide.
        """
        if self.kind != "experts":
            return (self,)
        if self.fused_experts:
            return self.fused_pairs()
        gate, up, down = self.projections
        return self._inside(gate), self._inside(up), self._inside(down, down=True)

    def fused_pairs(self) -> tuple[BaseModule, BaseModule]:
        """Of ``experts``: gate and up of all of them in one, and down, by the names that ``target_parameters`` gives them."""
        return self._inside("base_layer", times=2), self._inside("", down=True)

    def _inside(self, name: str, *, down: bool = False, times: int = 1) -> BaseModule:
        wide = times * self.out_features
        return replace(
            self,
            name=f"{self.name}.{name}" if name else self.name,
            in_features=wide if down else self.in_features,
            out_features=self.in_features if down else wide,
            kind="row" if down else "column",
        )


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model, read from its folder's ``config.json`` and, where present, its safetensors headers."""

    name: str
    architecture: str
    dtype: str
    """``bfloat16``, ``float16`` or ``float32``, as the folder has it; an engine may serve it in another."""
    layers: int
    """0 where only module names are known; so are the figures below."""
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    tied_embeddings: bool
    modules: Mapping[str, BaseModule]
    """By name: each layer that vLLM wraps for LoRA, in the model's order."""
    weight_bytes: int
    """As stored."""
    weight_source: Literal["headers", "shapes"]
    notes: tuple[str, ...] = ()
    """What a reader must know of these figures."""
    aliases: tuple[tuple[str, str], ...] = ()
    """How the engine renames the modules of an adapter: a prefix, and what takes its place; the first that fits."""

    @property
    def shaped(self) -> bool:
        """Whether the shapes of all modules are known, so that bytes can be told."""
        return self.layers > 0 and all(module.shaped for module in self.modules.values())

    def kv_bytes_per_token(self, cache_dtype: str = "auto", tensor_parallel: int = 1) -> int:
        """Bytes of K and V of one token on one rank process: 2 x layers x KV heads there x head width x bytes.

        ``cache_dtype`` is the engine's ``kv_cache_dtype``; ``auto``: the model's type. Each rank has at least one KV head
        (vLLM ``config/model.py: get_num_kv_heads``). Sliding windows and other layers that forget are counted in full.
        """
        kv_heads = self.kv_heads // tensor_parallel or 1
        width = _cache_width(self.dtype if cache_dtype == "auto" else cache_dtype)
        return 2 * self.layers * kv_heads * self.head_dim * width

    def find(self, name: str) -> BaseModule | None:
        """The module that an adapter means by ``name``: by its exact name, after ``aliases``, or inside an ``experts`` module.

        ``...experts.7.gate_proj`` is one expert's layer. ``...experts.base_layer`` is gate and up of all experts and
        ``...experts`` down of all (PEFT ``target_parameters``): shapes of one expert, ``experts`` of all.
        """
        name = next((new + name[len(old) :] for old, new in self.aliases if name.startswith(old)), name)
        head, found, tail = name.rpartition(".experts.")
        module = self.modules.get(f"{head}.experts" if found else name)
        if module is None or module.kind != "experts":
            return None if found else module
        if not found or tail == "base_layer":
            return module.fused_pairs()[0 if found else 1]
        number, _, projection = tail.partition(".")
        if not number.isdecimal() or len(number) > 6 or int(number) >= module.experts:
            return None
        singles = (replace(pair, name=name, experts=1) for pair in replace(module, fused_experts=False).pairs())
        return next((pair for pair, own in zip(singles, module.projections, strict=True) if own == projection), None)

    def reached(self, targets: Iterable[str] | None) -> Mapping[str, BaseModule]:
        """The modules whose layer passes the engine's ``lora_target_modules``; all of them for ``None``.

        A layer passes by its last part or whole name, by one of the modules packed into it, or as such a module by the
        layer that packs it (``vllm/lora/utils.py: is_in_target_modules``). So ``q_proj`` brings k and v along.
        """
        if targets is None:
            return self.modules
        wanted = set(targets)
        packed: dict[str, set[str]] = {}
        for module in self.modules.values():
            if module.layer != module.name:
                packed.setdefault(module.layer.rpartition(".")[2], set()).add(module.suffix)
        open_layers = {leaf for leaf, children in packed.items() if leaf in wanted or children & wanted}
        open_layers |= {child for leaf in packed if leaf in wanted for child in packed[leaf]}
        return {
            name: module
            for name, module in self.modules.items()
            if (leaf := module.layer.rpartition(".")[2]) in open_layers
            or leaf in wanted
            or module.layer in wanted
            or (module.kind == "experts" and any(self._is_expert(module, target) for target in wanted))
        }

    def _is_expert(self, module: BaseModule, target: str) -> bool:
        found = self.find(f"{module.name[:-7]}{target}") if target.startswith("experts.") else None
        return found is not None and found.experts == 1

    def with_modules(self, names: Iterable[str]) -> BaseModel:
        """This base with the modules that an engine says it serves, in place of its family's.

        A module keeps the shape of the one that has the same name from ``layers.`` on (an engine may put
        ``language_model.`` before it); where there is none its shape is 0 x 0, "not known".
        """
        known = {_below(name): module for name, module in self.modules.items()}
        return replace(self, modules={name: _served(name, known.get(_below(name))) for name in names})


def served_modules(text: str, name: str = "served modules") -> BaseModel:
    """A base of which only the names of its modules are known: one a line in ``text``, empty lines and ``#`` aside.

    Names can be judged against it, bytes cannot: all its figures are 0. Raises :class:`InputFileError` with the line.
    """
    names: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        module = line.strip()
        if not module or module.startswith("#"):
            continue
        if not _MODULE_PATH.fullmatch(module) or number > _MAX_MODULES:
            raise InputFileError(f"line {number} of {name} is no module's name: write model.layers.0.self_attn.q_proj")
        names[module] = None
    if not names:
        raise InputFileError(f"{name} names no module")
    empty = BaseModel(
        name=name,
        architecture="unknown",
        dtype="bfloat16",
        layers=0,
        hidden=0,
        vocabulary=0,
        heads=0,
        kv_heads=0,
        head_dim=0,
        tied_embeddings=False,
        modules={},
        weight_bytes=0,
        weight_source="shapes",
        notes=("only the names of its modules are known: no bytes",),
    )
    return empty.with_modules(names)


def divide(features: int, ranks: int, what: str) -> int:
    """``features / ranks``; raises :class:`InputFileError` when that is no whole number, where vLLM does not start."""
    if features % ranks:
        raise InputFileError(f"{what}: {features:,} features cannot be cut over {ranks} ranks: choose another --tp")
    return features // ranks


def _cache_width(dtype: str) -> int:
    if dtype.startswith("fp8"):
        return 1
    if dtype not in DTYPE_BYTES:
        raise InputFileError(f"kv_cache_dtype {dtype!r} is not known: use auto, fp8, {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _below(name: str) -> str:
    return name[name.find("layers.") :] if "layers." in name else name.rpartition(".")[2]


def _served(name: str, known: BaseModule | None) -> BaseModule:
    head, dot, leaf = name.rpartition(".")
    if known is not None:
        return replace(known, name=name, layer=f"{head}{dot}{known.layer.rpartition('.')[2]}")
    return BaseModule(name, 0, 0, "replicated", f"{head}{dot}{_PACKED.get(leaf, leaf)}")
