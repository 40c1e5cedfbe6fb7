"""The header of a safetensors file: eight bytes of little-endian length, that much JSON, then the data.

The header says everything that accounting needs (names, shapes, types, offsets), so the data is never read here. It is
checked as far as it protects what comes after: the length is bounded (a wrong eight bytes may claim exabytes), each
tensor's extent lies inside the data, and the data ends where the last tensor does, which is how a download that stopped
half-way shows.
"""

from __future__ import annotations

import json
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loraledger.adapters.files import refuse_lfs_pointer
from loraledger.errors import InputFileError

MAX_HEADER: Final = 100_000_000
"""Bytes; the bound of the safetensors format."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What a weights file holds."""

    file_bytes: int
    shapes: Mapping[str, tuple[int, ...]]
    """By tensor name."""

    def lora_modules(self) -> tuple[str, ...]:
        """Last names of the modules that have LoRA tensors (``q_proj``), sorted."""
        modules = {name.split(".lora_", 1)[0].rpartition(".")[2] for name in self.shapes if ".lora_" in name}
        return tuple(sorted(modules))


def read_weights(path: Path) -> Weights:
    """Header of the file at ``path``. Raises :class:`InputFileError` saying what is wrong with it."""
    name = path.name
    with path.open("rb") as stream:
        file_bytes = stream.seek(0, 2)
        stream.seek(0)
        refuse_lfs_pointer(name, stream.read(1024))
        stream.seek(0)
        if file_bytes < 8:
            raise InputFileError(f"{name} has {file_bytes} bytes, less than the 8 of a header's length: fetch it again")
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > MAX_HEADER or 8 + length > file_bytes:
            raise InputFileError(
                f"{name} claims a header of {length:,} bytes in {file_bytes:,}: it is cut off or no safetensors"
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{name} has a header that is not JSON: it is no safetensors file") from error
    if not isinstance(header, dict):
        raise InputFileError(f"{name} has a header that is not a JSON object: it is no safetensors file")
    header.pop("__metadata__", None)
    return Weights(file_bytes, _shapes(name, header, file_bytes - 8 - length))


def _shapes(name: str, header: Mapping[str, Any], data_bytes: int) -> dict[str, tuple[int, ...]]:
    if not header:
        raise InputFileError(f"{name} holds no tensors: the adapter would change nothing")
    shapes: dict[str, tuple[int, ...]] = {}
    last = 0
    for tensor, entry in header.items():
        shape = _sizes(entry, "shape")
        extent = _sizes(entry, "data_offsets")
        if shape is None or extent is None or len(extent) != 2 or extent[0] > extent[1]:
            raise InputFileError(f"{name}: tensor {reprlib.repr(tensor)} has no valid shape and data_offsets")
        shapes[tensor] = shape
        last = max(last, extent[1])
    if last != data_bytes:
        raise InputFileError(f"{name} should hold {last:,} bytes of data and holds {data_bytes:,}: fetch it again")
    return shapes


def _sizes(entry: object, key: str) -> tuple[int, ...] | None:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)
