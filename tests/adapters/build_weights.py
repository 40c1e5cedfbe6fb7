"""Adapters and base models of true size that take no room: what the cases are made of.

A case describes its tensors once a layer. The safetensors file written from that has a real header and a hole for data, so that an
adapter of 3 GB costs a few KB of disk. A base model is only its ``config.json``.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from loraledger.adapters.reading.folder import AdapterFolder, read_folder
from loraledger.adapters.sizing.base import read_base
from loraledger.adapters.sizing.basemodel import BaseModel

CASES = Path(__file__).parent.parent / "cases"
WIDTHS = {"BF16": 2, "F32": 4}
PREFIX = "base_model.model."


@dataclass(frozen=True)
class Dims:
    """Sizes of a decoder of the Llama kind."""

    hidden: int
    ff: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 32_000

    def projections(self) -> dict[str, tuple[int, int]]:
        """In and out features of the seven linear layers, by their names in a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (self.hidden, q),
            "self_attn.k_proj": (self.hidden, kv),
            "self_attn.v_proj": (self.hidden, kv),
            "self_attn.o_proj": (q, self.hidden),
            "mlp.gate_proj": (self.hidden, self.ff),
            "mlp.up_proj": (self.hidden, self.ff),
            "mlp.down_proj": (self.ff, self.hidden),
        }

    def write(self, folder: Path, architecture: str = "LlamaForCausalLM", **more: object) -> BaseModel:
        """The base model, read back from a ``config.json`` written into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": [architecture],
            "model_type": architecture.removesuffix("ForCausalLM").lower(),
            "hidden_size": self.hidden,
            "intermediate_size": self.ff,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **more,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return read_base(folder)


BASE_8B = Dims(hidden=4096, ff=14336, layers=32, heads=32, kv_heads=8, vocabulary=128_256)
SMALL = Dims(hidden=256, ff=512, layers=4, heads=4, kv_heads=2, head_dim=64, vocabulary=1024)


def expected(case: str) -> Any:
    """The right answer of ``case``."""
    return json.loads((CASES / case / "expect.json").read_text())


def spec_of(case: str, name: str = "tensors.json") -> dict[str, Any]:
    """Description of the tensors of ``case``."""
    spec: dict[str, Any] = json.loads((CASES / case / name).read_text())
    return spec


def pairs(
    modules: Mapping[str, tuple[int, int]],
    rank: int,
    layers: int = 1,
    stem: str = "model.layers.{i}.",
    dtype: str = "BF16",
) -> dict[str, Any]:
    """A description of LoRA pairs on ``modules`` (in and out features by name) of each layer."""
    return {
        "tensors": [
            {"name": f"{PREFIX}{stem}{name}.lora_{side}.weight", "layers": layers, "dtype": dtype, "shape": shape}
            for name, (into, out) in modules.items()
            for side, shape in (("A", [rank, into]), ("B", [out, rank]))
        ]
    }


def tensors(spec: Mapping[str, Any]) -> Iterator[tuple[str, str, list[int]]]:
    """Name, type and shape of each tensor; ``{i}`` runs over the layers."""
    for entry in spec["tensors"]:
        for layer in range(entry.get("layers", 1)):
            yield entry["name"].replace("{i}", str(layer)), entry["dtype"], entry["shape"]


def write_weights(spec: Mapping[str, Any], path: Path) -> None:
    """A valid safetensors file whose data is a hole."""
    header: dict[str, Any] = {"__metadata__": spec.get("metadata", {"format": "pt"})}
    end = 0
    for name, dtype, shape in tensors(spec):
        start, end = end, end + prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw = raw.ljust((len(raw) + 7) // 8 * 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + end)


def build(folder: Path, config: Path | Mapping[str, object], spec: Mapping[str, Any]) -> Path:
    """An adapter's folder, from a configuration (a file is copied as it is) and a description of tensors."""
    folder.mkdir(parents=True)
    text = config.read_bytes() if isinstance(config, Path) else json.dumps(config).encode()
    (folder / "adapter_config.json").write_bytes(text)
    write_weights(spec, folder / "adapter_model.safetensors")
    return folder


def adapter_of(case: str, tmp_path: Path, spec: str = "tensors.json", name: str = "alpha") -> AdapterFolder:
    """The adapter of ``case``, built below ``tmp_path`` and read."""
    config = CASES / case / "adapter/adapter_config.json"
    return read_folder(name, build(tmp_path / name, config, spec_of(case, spec)))


def lora_bytes(adapter: AdapterFolder, suffixes: Iterable[str] | None = None) -> int:
    """Stored bytes of its LoRA pairs, or of those on modules called one of ``suffixes``."""
    wanted = None if suffixes is None else set(suffixes)
    return sum(m.nbytes for m in adapter.inventory.modules.values() if wanted is None or m.suffix in wanted)


def weight_bytes(adapter: AdapterFolder) -> int:
    """Stored bytes of all its tensors: what its file holds beside the header."""
    inventory = adapter.inventory
    return lora_bytes(adapter) + inventory.whole.nbytes + inventory.magnitude.nbytes + inventory.other.nbytes


def tensor_count(adapter: AdapterFolder) -> int:
    """Tensors: two a pair, and the rest."""
    inventory = adapter.inventory
    others = (inventory.whole, inventory.magnitude, inventory.other)
    return 2 * len(inventory.modules) + len(inventory.halves) + sum(len(part.names) for part in others)


def inspect(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """``loraledger adapters inspect WORDS``, in a process of its own."""
    command = [sys.executable, "-m", "loraledger.cli.main", "adapters", "inspect", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
