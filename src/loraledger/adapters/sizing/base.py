"""The folder of a base model, read: ``config.json`` and, where they lie beside it, the headers of its safetensors files.

The architecture decides. One of ``FAMILIES`` gives modules, widths and what else has weights; weight bytes are exact, from the
headers or from all shapes. Any other architecture is read from the headers alone: each matrix ``....weight`` of a numbered
layer is a module, cut the way its last name part is cut in the families, else taken as whole on each rank; a note says so.
Without headers, or where a layer keeps something else than K and V of each head (MLA, state-space and linear-attention
layers), it is refused by name: wrong figures would be worse than none.
"""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from loraledger.adapters.reading.files import read_small
from loraledger.adapters.reading.header import Tensor, read_header
from loraledger.adapters.reading.jsonfile import read_object
from loraledger.adapters.sizing.basemodel import DTYPE_BYTES, BaseModel, BaseModule, Kind
from loraledger.adapters.sizing.families import FAMILIES, MULTIMODAL, Family, Linear
from loraledger.errors import InputFileError

CONFIG: Final = "config.json"
MAX_CONFIG: Final = 8 * 1024 * 1024
"""Bytes; the label maps of the largest public ones take under 2 MB."""

MAX_INDEX: Final = 64 * 1024 * 1024
"""Bytes; the index of a base of 92,000 tensors takes 8 MB."""

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_MAX_LAYERS: Final = 4096
_MAX_WIDTH: Final = 2**31
_MAX_HEAD: Final = 258_048
_TORCH: Final[Mapping[str, str]] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_OTHER_STATE: Final = (
    "kv_lora_rank",
    "state_size",
    "mamba_d_state",
    "mamba_num_heads",
    "linear_num_value_heads",
    "ssm_cfg",
)
_FULL: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_LAYER_MATRIX: Final = re.compile(r"(?!.*\b(?:vision|visual|audio))(.*\.\d+\..*)\.weight")


def read_base(folder: Path, name: str | None = None) -> BaseModel:
    """The base model in ``folder``, called ``name`` or as the folder is.

    Raises :class:`InputFileError` naming what is wrong: no readable ``config.json``, a field that is missing or of the wrong
    kind, weights that are damaged, an architecture of which neither the family nor the tensors are known.
    """
    try:
        config = read_object(CONFIG, read_small(folder / CONFIG, MAX_CONFIG))
        return build_base(config, read_tensors(folder), name or folder.resolve().name)
    except OSError as error:
        file = Path(error.filename or CONFIG).name
        raise InputFileError(f"{folder} is no base model's folder: {file}: {error.strerror or error}") from error


def build_base(config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None, name: str) -> BaseModel:
    """The base model of a parsed ``config.json`` and the tensors of its headers, ``None`` where there are none.

    Raises :class:`InputFileError`, as :func:`read_base` does.
    """
    architecture = _architecture(config)
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    language, aliases = MULTIMODAL.get(architecture, (architecture, ()))
    family = FAMILIES.get(language)
    if family is None:
        _refuse_unknown(architecture, text, tensors)
    widths = _Widths(text, family or _UNKNOWN)
    root = "language_model." if aliases else ""
    found = _matrices(tensors or {}, widths) if family is None else _family_modules(family, widths, root)
    modules = {module.name: module for module in found}
    if not modules:
        raise InputFileError(
            f"{CONFIG}: architecture {reprlib.repr(architecture)} is not known, and no tensor is a layer's matrix"
        )
    dtype = _dtype(config, text, tensors)
    parameters = _parameters(family, widths) if family else 0
    return BaseModel(
        name=name,
        architecture=architecture,
        dtype=dtype,
        layers=widths.layers,
        hidden=widths["hidden"],
        vocabulary=widths["vocab"],
        heads=widths.heads,
        kv_heads=widths.kv_heads,
        head_dim=widths["head_dim"],
        tied_embeddings=widths.tied,
        modules=modules,
        weight_bytes=sum(t.nbytes for t in tensors.values()) if tensors else parameters * DTYPE_BYTES[dtype],
        weight_source="headers" if tensors else "shapes",
        notes=tuple(_notes(config, text, family, widths, exact=bool(tensors))),
        aliases=aliases,
    )


_UNKNOWN: Final = Family((), ())


class _Widths:
    """The widths that ``config.json`` gives, by the names that the families use; each one checked when it is asked for."""

    def __init__(self, text: Mapping[str, Any], family: Family) -> None:
        self._text = {**family.defaults, **{key: value for key, value in text.items() if value is not None}}
        self.layers = self.count("num_hidden_layers", limit=_MAX_LAYERS)
        self.heads = self.count("num_attention_heads")
        self.kv_heads = self.count("num_key_value_heads", self.heads)
        self.tied = self.flag("tie_word_embeddings", family.tied)
        hidden = self.count("hidden_size")
        head_dim = self.count("head_dim", max(hidden // self.heads, 1))
        kv, q = self.kv_heads * head_dim, self.heads * head_dim
        self._known = {
            "one": 1,
            "heads": self.heads,
            "hidden": hidden,
            "head_dim": head_dim,
            "q": q,
            "kv": kv,
            "2kv": 2 * kv,
            "qkv": q + 2 * kv,
        }

    def __getitem__(self, width: str) -> int:
        match width:
            case "vocab":
                return self.count("vocab_size")
            case "ff":
                return self.count("intermediate_size")
            case "2ff":
                return 2 * self.count("intermediate_size")
            case "moe_ff":
                return self.count("moe_intermediate_size", self._text.get("intermediate_size"))
            case "shared_ff":
                return self.count("shared_expert_intermediate_size")
            case "experts":
                return self.count("num_experts", self._text.get("num_local_experts"))
            case _:
                return self._known[width]

    def count(self, key: str, default: object = None, *, limit: int = _MAX_WIDTH) -> int:
        """The whole number at ``key``, 1 to ``limit``."""
        value = self._text.get(key, default)
        if value is None:
            raise InputFileError(f"{CONFIG} lacks {key}: take the file that the model was published with")
        if type(value) is not int or not 1 <= value <= limit:
            raise InputFileError(f"{CONFIG}: {key} must be a whole number from 1 to {limit:,}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The truth at ``key``."""
        value = self._text.get(key, default)
        if not isinstance(value, bool):
            raise InputFileError(f"{CONFIG}: {key} must be true or false")
        return value

    def has_experts(self, layer: int) -> bool:
        """Whether ``layer`` of a family with experts has them (``transformers``, ``Qwen3MoeDecoderLayer``)."""
        return layer not in self._plain_layers and (layer + 1) % self.count("decoder_sparse_step", 1) == 0

    @cached_property
    def _plain_layers(self) -> frozenset[int]:
        plain = self._text.get("mlp_only_layers", [])
        if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
            raise InputFileError(f"{CONFIG}: mlp_only_layers must be a list of layer numbers")
        return frozenset(plain)


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str) or not named[0]:
        raise InputFileError(f"{CONFIG} names no architecture: its field architectures must be a list of one name")
    return named[0]


def _refuse_unknown(architecture: str, text: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> None:
    kinds = text.get("layer_types")
    other = [key for key in _OTHER_STATE if text.get(key)]
    if isinstance(kinds, list) and not all(isinstance(kind, str) and kind in _FULL for kind in kinds):
        other.append("layer_types")
    if other:
        raise InputFileError(
            f"{CONFIG}: architecture {reprlib.repr(architecture)} is not known, and by {other[0]} it keeps other state"
            " than K and V of each head: no figures for it"
        )
    if not tensors:
        raise InputFileError(
            f"{CONFIG}: architecture {reprlib.repr(architecture)} is not known: put its safetensors files beside it, or use one of"
            f" {', '.join(sorted(FAMILIES))}"
        )


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> str:
    """The type that the model is written in: by the configuration, else that of most bytes, else float32."""
    for where in (text, config):
        for key in ("dtype", "torch_dtype"):
            value = where.get(key)
            if isinstance(value, str) and value.removeprefix("torch.") in DTYPE_BYTES:
                return value.removeprefix("torch.")
    stored: Counter[str] = Counter()
    for tensor in (tensors or {}).values():
        if tensor.dtype in _TORCH:
            stored[_TORCH[tensor.dtype]] += tensor.nbytes
    return max(stored, key=stored.__getitem__) if stored else "float32"


def _linears(family: Family, widths: _Widths, layer: int) -> tuple[tuple[Linear, ...], bool]:
    """The linear layers of one model layer, and whether it has experts beside them."""
    if family.experts is None or not widths.has_experts(layer):
        return (*family.attention, *family.mlp), False
    return (*family.attention, *family.experts.beside), True


def _family_modules(family: Family, widths: _Widths, root: str) -> Iterator[BaseModule]:
    vocab, hidden = widths["vocab"], widths["hidden"]
    if "embed_tokens" in family.tables:
        yield BaseModule(f"{root}model.embed_tokens", vocab, hidden, "embedding", f"{root}model.embed_tokens")
    for layer in range(widths.layers):
        linears, experts = _linears(family, widths, layer)
        at = f"{root}model.layers.{layer}."
        for linear in linears:
            yield BaseModule(
                name=at + linear.name,
                in_features=widths[linear.inputs],
                out_features=widths[linear.outputs],
                kind=linear.kind,
                layer=at + (linear.packed or linear.name),
                shards=widths.kv_heads if linear.limited else None,
                limited=widths[linear.limited] if linear.limited else None,
            )
        if experts and family.experts is not None:
            yield BaseModule(
                name=at + family.experts.name,
                in_features=hidden,
                out_features=widths["moe_ff"],
                kind="experts",
                layer=at + family.experts.name,
                experts=widths["experts"],
                projections=family.experts.projections,
                fused_experts=family.experts.fused,
            )
    if "lm_head" in family.tables:
        yield BaseModule(f"{root}lm_head", hidden, vocab, "head", f"{root}lm_head")


def _parameters(family: Family, widths: _Widths) -> int:
    """Values in all weights, biases and norms."""
    total = widths["vocab"] * widths["hidden"] * (1 if widths.tied else 2)
    total += sum(count * widths[width] for width, count in family.last.items())
    for layer in range(widths.layers):
        linears, experts = _linears(family, widths, layer)
        total += sum(count * widths[width] for width, count in family.norms.items())
        for linear in linears:
            biased = (
                linear.bias if isinstance(linear.bias, bool) else widths.flag(linear.bias, linear.bias in family.on)
            )
            total += widths[linear.outputs] * (widths[linear.inputs] + biased)
        if experts and family.experts is not None:
            inside, hidden = widths["moe_ff"], widths["hidden"]
            total += widths["experts"] * (3 * hidden * inside + family.experts.bias * (2 * inside + hidden))
    return total


def _matrices(tensors: Mapping[str, Tensor], widths: _Widths) -> Iterator[BaseModule]:
    """Modules of an unknown architecture. Token tables are left out: a vLLM class has to name them to give them LoRA."""
    kinds: dict[str, Kind] = {
        linear.name.rpartition(".")[2]: linear.kind
        for family in FAMILIES.values()
        for linear in (*family.attention, *family.mlp, *(family.experts.beside if family.experts else ()))
    }
    kv = widths["kv"]
    for name, tensor in tensors.items():
        matched = _LAYER_MATRIX.fullmatch(name)
        if matched is None or len(tensor.shape) != 2:
            continue
        module = matched[1]
        leaf = module.rpartition(".")[2]
        yield BaseModule(
            name=module,
            in_features=tensor.shape[1],
            out_features=tensor.shape[0],
            kind=kinds.get(leaf, "replicated"),
            layer=module,
            shards=widths.kv_heads if leaf in ("k_proj", "v_proj") and tensor.shape[0] == kv else None,
        )


def _notes(
    config: Mapping[str, Any], text: Mapping[str, Any], family: Family | None, widths: _Widths, *, exact: bool
) -> Iterator[str]:
    if family is None:
        yield "architecture not known: modules are the matrices in its files, and how ranks cut them is a guess by their names"
    if text.get("sliding_window") and text.get("use_sliding_window") is not False:
        yield "some layers attend to a window only: KV bytes a token are an upper bound for long contexts"
    if config.get("quantization_config") and not exact:
        yield "the weights are quantized, and without their files they are counted as if they were not"
    if family is not None and "lm_head" in family.tables and widths["vocab"] > _MAX_HEAD:
        yield f"vLLM refuses LoRA for an output head of over {_MAX_HEAD:,} tokens: it needs lora_target_modules without lm_head"
    if text is not config and not exact:
        yield "weights are those of the language model alone, by text_config"


def read_tensors(folder: Path) -> dict[str, Tensor] | None:
    """The tensors of the model's safetensors files in ``folder``; ``None`` where there are no such files.

    One file, or an index and the shards that it names, each of which must be there. Other safetensors files beside them (an
    adapter, a second format) are left alone. Raises :class:`InputFileError` naming the file, ``OSError``.
    """
    index = folder / _INDEX
    if not index.exists():
        single = folder / _SINGLE
        return dict(read_header(single).tensors) if single.exists() else None
    shards = read_object(_INDEX, read_small(index, MAX_INDEX)).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(map(_is_shard, shards.values())):
        raise InputFileError(f"{_INDEX}: weight_map must name a safetensors file of this folder for each tensor")
    tensors: dict[str, Tensor] = {}
    for shard in dict.fromkeys(shards.values()):
        if not (folder / shard).exists():
            raise InputFileError(f"{shard} is missing, and {_INDEX} names it: fetch the model again")
        tensors |= read_header(folder / shard).tensors
    if missing := shards.keys() - tensors.keys():
        raise InputFileError(
            f"{reprlib.repr(min(missing))} is in {_INDEX} and in none of its files: fetch the model again"
        )
    return tensors


def _is_shard(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[\w.-]{1,200}\.safetensors", name) is not None
