"""Real adapter folders of a few hundred bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

CONFIG: dict[str, Any] = {
    "base_model_name_or_path": "acme/base-8b",
    "bias": "none",
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 4,
    "rank_pattern": {},
    "target_modules": ["v_proj", "q_proj"],
    "use_dora": False,
}

TENSORS: dict[str, tuple[int, ...]] = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (4, 8),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (8, 4),
    "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight": (4, 8),
    "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight": (2, 4),
}

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881\nsize 83945072\n"
)


def safetensors(tensors: Mapping[str, tuple[int, ...]] = TENSORS, *, fill: bytes = b"\0") -> bytes:
    """A valid safetensors file: bfloat16 tensors (two bytes a value) of ``fill``."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        size = 2
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + fill * offset


class MakeAdapter(Protocol):
    """Writes an adapter folder."""

    def __call__(
        self, name: str, *, weights: bytes | None = ..., parent: Path | None = ..., **changes: object
    ) -> Path: ...


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeAdapter:
    """Writes a valid adapter folder, with changes to its configuration and other weights when given; returns its path."""

    def make(name: str, *, weights: bytes | None = None, parent: Path | None = None, **changes: object) -> Path:
        folder = (tmp_path if parent is None else parent) / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
        (folder / "adapter_model.safetensors").write_bytes(safetensors() if weights is None else weights)
        return folder

    return make
