"""What the readers of adapter folders promise, as one function a reader that takes any bytes.

Only :class:`InputFileError` may come out, in one line of bounded length; what is accepted is accepted by the safetensors
library too, with the same names, types, shapes and sizes; the quick and the strict parser agree. An input of ``header``
that starts with a brace is the JSON of a header, to which length and data are added; any other is a whole file.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import safetensors

from loraledger.adapters.reading.folder import AdapterFolder, FolderReader
from loraledger.adapters.reading.header import Header, quick_parse, read_header, strict_parse
from loraledger.errors import InputFileError

_Read = TypeVar("_Read")

CORPUS: Final = Path(__file__).parent / "corpus"
MAX_DATA: Final = 1 << 20

CONFIG: Final = b'{"r":2,"lora_alpha":4,"target_modules":["q_proj"],"rank_pattern":{"k_proj":3}}'
HEADER: Final = (
    b'{"base_model.model.a.q_proj.lora_A.weight":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
    b'"base_model.model.a.q_proj.lora_B.weight":{"dtype":"BF16","shape":[5,2],"data_offsets":[12,32]}}'
)


def whole_file(data: bytes) -> bytes:
    """``data``, or the file whose header it is, as long as that header's largest offset below 1 MiB asks."""
    if not data.startswith(b"{"):
        return data
    ends = [int(end) for end in re.findall(rb'data_offsets"\s*:\s*\[[^],]*,\s*(\d{1,7})\s*]', data)]
    return struct.pack("<Q", len(data)) + data + bytes(max((end for end in ends if end <= MAX_DATA), default=0))


def header(data: bytes, folder: Path) -> Header | None:
    """Read ``data`` as a weights file in ``folder``; the header, when it was accepted."""
    file = whole_file(data)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(file)
    (folder / "adapter_config.json").write_bytes(CONFIG)
    accepted = _accepted(lambda: read_header(path))
    folder_accepted = _accepted(lambda: FolderReader().read("x", folder))
    if folder_accepted is not None:
        assert accepted is not None
        _check_folder(folder_accepted)
        assert folder_accepted.parameters == sum(math.prod(tensor.shape) for tensor in accepted.tensors.values())
    _check_parsers(file[8 : 8 + int.from_bytes(file[:8], "little")])
    if accepted is not None:
        _check_against_library(file, accepted)
    return accepted


def config(data: bytes, folder: Path) -> AdapterFolder | None:
    """Read ``data`` as an ``adapter_config.json`` in ``folder``; what was read, when it was accepted."""
    (folder / "adapter_model.safetensors").write_bytes(whole_file(HEADER))
    (folder / "adapter_config.json").write_bytes(data)
    accepted = _accepted(lambda: FolderReader().read("x", folder))
    if accepted is not None:
        _check_folder(accepted)
        assert isinstance(json.loads(data), dict)
    return accepted


TARGETS: Final[Mapping[str, Callable[[bytes, Path], object]]] = {"header": header, "config": config}


def _accepted(read: Callable[[], _Read]) -> _Read | None:
    try:
        return read()
    except InputFileError as error:
        message = error.message
    assert message.isprintable(), message
    assert len(message) < 500, message
    return None


def _check_folder(read: AdapterFolder) -> None:
    assert read.rank >= max(1, read.config.max_rank)
    assert all(0 < scaling < math.inf for scaling in read.scalings.values())
    assert all(warning.isprintable() and len(warning) < 500 for warning in read.warnings)
    assert re.fullmatch("[0-9a-f]{16}", read.layout_id)
    kept = read.inventory
    nbytes = sum(module.nbytes for module in kept.modules.values())
    assert nbytes + kept.whole.nbytes + kept.magnitude.nbytes + kept.other.nbytes < read.bytes_disk
    for name in ("a.k_proj", "a.mlp.experts", "a" * 900):
        assert read.config.rank_of(name) >= 1


def _check_parsers(raw: bytes) -> None:
    quick = quick_parse(raw)
    if quick is not None:
        assert quick == strict_parse("x", raw)


def _check_against_library(file: bytes, read: Header) -> None:
    deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize
    theirs = {name: (info["dtype"], tuple(info["shape"]), len(info["data"])) for name, info in deserialize(file)}
    assert theirs == {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in read.tensors.items()}
