"""Weights that lie in several safetensors files, listed by an index.

``adapter_model.safetensors.index.json`` maps each tensor to the file that holds it. The map is checked against the files'
own headers both ways, so that what is counted is what the index promises and nothing is there twice. File names come from a
tenant: only plain names in the same folder are opened.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraledger.adapters.reading.files import INDEX_NAME, read_small, regular_file, weights_file
from loraledger.adapters.reading.header import MAX_TENSORS, Header, RawHeader, Tensor, parse_header, read_raw
from loraledger.adapters.reading.jsonfile import read_object
from loraledger.errors import InputFileError

MAX_INDEX: Final = 32 * 1024 * 1024
"""Bytes; an entry takes about 130."""

MAX_SHARDS: Final = 1_000


@dataclass(frozen=True, slots=True)
class RawWeights:
    """The weights of one adapter as they lie on disk, not yet parsed."""

    files: tuple[Path, ...]
    """The one file; or the index, then its shards by name."""
    headers: tuple[RawHeader, ...]
    index: bytes
    """Empty for one file."""

    @property
    def nbytes(self) -> int:
        """Length of the file, or of all shards."""
        return sum(header.file_bytes for header in self.headers)


def read_weights(folder: Path, root: Path | None) -> RawWeights:
    """The weights in ``folder``. Raises :class:`InputFileError`, or ``OSError`` for what cannot be read."""
    path = weights_file(folder, root)
    if path.name != INDEX_NAME:
        return RawWeights((path,), (read_raw(path),), b"")
    index = read_small(path, MAX_INDEX)
    shards = [regular_file(folder, shard, root) for shard in sorted(set(_weight_map(index).values()))]
    return RawWeights((path, *shards), tuple(read_raw(shard) for shard in shards), index)


def parse_weights(raw: RawWeights) -> Header:
    """The header of ``raw``, or those of all its shards as one. Raises :class:`InputFileError` saying what is wrong."""
    if not raw.index:
        return parse_header(raw.headers[0])
    index = _weight_map(raw.index)
    tensors: dict[str, Tensor] = {}
    dtypes: set[str] = set()
    for header in raw.headers:
        shard = parse_header(header)
        dtypes |= shard.dtypes
        for name, tensor in shard.tensors.items():
            if index.get(name) != header.name:
                raise InputFileError(
                    f"{header.name} holds {reprlib.repr(name)}, which {INDEX_NAME} does not place there"
                )
            tensors[name] = tensor
    if len(tensors) < len(index):
        lost = next(name for name in index if name not in tensors)
        raise InputFileError(
            f"{index[lost]} lacks {reprlib.repr(lost)}, which {INDEX_NAME} places there: fetch it again"
        )
    return Header(tensors, frozenset(dtypes), sum(header.data_bytes for header in raw.headers))


def _weight_map(raw: bytes) -> dict[str, str]:
    index = read_object(INDEX_NAME, raw).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise InputFileError(f"{INDEX_NAME} has no weight_map from tensors to files")
    shards = set()
    for shard in index.values():
        if not isinstance(shard, str) or "/" in shard or not shard.isprintable() or not shard.endswith(".safetensors"):
            raise InputFileError(f"{INDEX_NAME} names {reprlib.repr(shard)}: shards are safetensors files beside it")
        shards.add(shard)
    if len(shards) > MAX_SHARDS or len(index) > MAX_TENSORS:
        raise InputFileError(
            f"{INDEX_NAME} lists over {MAX_SHARDS:,} files or {MAX_TENSORS:,} tensors: that is no adapter"
        )
    return index
