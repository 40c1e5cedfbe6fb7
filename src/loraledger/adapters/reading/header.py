"""The header of a safetensors file: eight bytes of little-endian length, that much JSON, then the data.

The header says everything that accounting needs (names, shapes, types, offsets), so the data is never read. It is held to
what the format asks, because whatever passes here is counted, copied and sent to an engine: the length is bounded (a wrong
eight bytes may claim exabytes), each type is known, shape times width equals each tensor's extent, the extents cover
the data without hole or overlap, and the data ends with the file, which is how a download that stopped half-way shows.
Beyond the format, an empty tensor is refused: it is what remains of weights that were saved while split over GPUs.

**Two decoders, one verdict.** Typed decoding by msgspec is five times as fast as a strict parser, and blind to a name
given twice: the last wins. Counting quotes closes the gap. A tensor that decodes completely takes at least ten (two of
its name, six of its three keys, two of its type), so a header with exactly ten a tensor, plus those of its metadata, has
no second tensor of one name, no key twice and no key that the format lacks. Any other count, and any byte that the two parsers
might read differently (backslash, not ASCII, a minus sign), sends the header to the strict parser, which alone refuses.
"""

from __future__ import annotations

import math
import os
import reprlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from loraledger.adapters.reading.files import OPEN_FLAGS, refuse_lfs_pointer
from loraledger.adapters.reading.jsonfile import read_object
from loraledger.errors import InputFileError

MAX_HEADER: Final = 100_000_000
"""Bytes; the bound of the safetensors format."""

MAX_TENSORS: Final = 200_000
"""A pair on each of 384 experts' three matrices in 60 layers makes 138,240."""

MAX_NAME: Final = 256
"""Characters; the longest in public adapters has below 200. What matching a name costs an engine grows with its square."""

MAX_PARTS: Final = 32
"""Between dots; with a name for each block of a deep model 12 were seen."""

Dtype = Literal[
    "F4", "F6_E2M3", "F6_E3M2", "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "U16", "I16", "F16", "BF16", "U32", "I32", "F32", "U64", "I64", "F64", "C64",
]  # fmt: skip

BITS: Final[Mapping[str, int]] = {
    dtype: {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BF16": 16}.get(dtype)
    or (8 if dtype.startswith(("BOOL", "F8")) else int(dtype[1:]))
    for dtype in get_args(Dtype)
}
"""Width of one value, by the names of safetensors 0.8."""

_SMALL: Final = 10_000_000
"""Bytes; a header below has no room for twice ``MAX_TENSORS``, and is counted once it is decoded."""

_METADATA: Final = b'{"__metadata__":'


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """One entry of the header."""

    dtype: Dtype
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """First byte and the one after the last, counted from the end of the header."""

    @property
    def nbytes(self) -> int:
        """As stored."""
        return self.data_offsets[1] - self.data_offsets[0]

    @property
    def parameters(self) -> int:
        """Values."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """What a weights file holds."""

    tensors: Mapping[str, Tensor]
    dtypes: frozenset[str]
    data_bytes: int
    """What follows the header."""

    @property
    def parameters(self) -> int:
        """Values in all tensors."""
        if len(self.dtypes) == 1:
            return self.data_bytes * 8 // BITS[next(iter(self.dtypes))]
        return sum(tensor.parameters for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class RawHeader:
    """A header as it lies in the file ``name``: its JSON, and the bytes of data that follow it."""

    name: str
    json: bytes
    data_bytes: int

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return 8 + len(self.json) + self.data_bytes


def read_header(path: Path) -> Header:
    """Header of the file at ``path``. Raises :class:`InputFileError`, and ``OSError`` when it cannot be read."""
    return parse_header(read_raw(path))


def read_raw(path: Path) -> RawHeader:
    """Header of the file at ``path``, not yet parsed. Raises as :func:`read_header` does."""
    name = path.name
    descriptor = os.open(path, OPEN_FLAGS)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InputFileError(f"{name} is not a regular file")
        file_bytes = status.st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if file_bytes < 8 or length > MAX_HEADER or 8 + length > file_bytes:
            refuse_lfs_pointer(name, os.pread(descriptor, 1024, 0))
            raise _no_header(name, file_bytes, length)
        raw = os.pread(descriptor, length, 8)
    finally:
        os.close(descriptor)
    if len(raw) != length:
        raise InputFileError(f"{name} changed its length while it was read")
    return RawHeader(name, raw, file_bytes - 8 - length)


def parse_header(raw: RawHeader) -> Header:
    """What ``raw`` says. Raises :class:`InputFileError` saying what is wrong with it."""
    name, json = raw.name, raw.json
    if len(json) > _SMALL and (json.count(b'"') > 11 * MAX_TENSORS or json.count(b",") > 8 * MAX_TENSORS):
        raise _too_many(name)
    tensors = quick_parse(json)
    if tensors is None:
        tensors = strict_parse(name, json)
    if len(tensors) > MAX_TENSORS:
        raise _too_many(name)
    if not tensors:
        raise InputFileError(f"{name} holds no tensors: the adapter would change nothing")
    if max(map(len, tensors)) > MAX_NAME:
        raise InputFileError(f"{name} has a tensor with a name of over {MAX_NAME} characters: that is no adapter")
    if any(tensor.count(".") >= MAX_PARTS for tensor in tensors):
        raise InputFileError(f"{name} has a tensor with a name of over {MAX_PARTS} parts: that is no adapter")
    return Header(tensors, frozenset(_check_extents(name, tensors, raw.data_bytes)), raw.data_bytes)


def quick_parse(raw: bytes) -> dict[str, Tensor] | None:
    """The tensors of a header that is beyond doubt; ``None`` for any that only the strict parser can judge."""
    if b"\\" in raw or b"-" in raw or b"\x7f" in raw or not raw.isascii():
        return None
    body = raw
    try:
        if raw.startswith(_METADATA):
            end = raw.find(b"}") + 1
            _check_metadata("", read_object("", raw[len(_METADATA) : end]))
            if raw[end : end + 1] != b",":
                return None
            body = b"{" + raw[end + 1 :]
        elif not raw.startswith(b"{"):
            return None
        tensors: dict[str, Tensor] = msgspec.json.decode(body, type=dict[str, Tensor])
    except (msgspec.MsgspecError, InputFileError, RecursionError):
        return None
    certain = body.count(b'"') == 10 * len(tensors) and "__metadata__" not in tensors and "" not in tensors
    return tensors if certain else None


def strict_parse(name: str, raw: bytes) -> dict[str, Tensor]:
    """The tensors of any header that the format allows. Raises :class:`InputFileError` for every other."""
    if not raw.startswith(b"{"):
        raise InputFileError(f"{name} has a header that is not a JSON object: it is no safetensors file")
    header = read_object(f"the header of {name}", raw)
    if "__metadata__" in header:
        _check_metadata(name, header.pop("__metadata__"))
    for tensor in header:
        if not tensor.isprintable() or not tensor:
            raise InputFileError(f"{name}: {reprlib.repr(tensor)} is no tensor's name: it has to be printable text")
    return {tensor: _tensor(name, tensor, entry) for tensor, entry in header.items()}


def _tensor(name: str, tensor: str, entry: object) -> Tensor:
    try:
        return msgspec.convert(entry, Tensor)
    except msgspec.ValidationError as error:
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        reason = "has no valid dtype, shape and data_offsets"
        if isinstance(dtype, str) and dtype not in BITS:
            reason = f"has the type {reprlib.repr(dtype)}, which the format does not know"
        raise InputFileError(f"{name}: tensor {reprlib.repr(tensor)} {reason}") from error


def _too_many(name: str) -> InputFileError:
    return InputFileError(f"{name} has a header of over {MAX_TENSORS:,} tensors: that is no adapter")


def _no_header(name: str, file_bytes: int, length: int) -> InputFileError:
    if file_bytes < 8:
        return InputFileError(f"{name} has {file_bytes} bytes, less than the 8 of a header's length: fetch it again")
    return InputFileError(
        f"{name} claims a header of {length:,} bytes in {file_bytes:,}: it is cut off or no safetensors"
    )


def _check_metadata(name: str, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputFileError(f"{name}: __metadata__ must map names to text")


def _check_extents(name: str, tensors: Mapping[str, Tensor], data_bytes: int) -> set[str]:
    """Types in use. Raises :class:`InputFileError` unless ``tensors`` fill the data exactly."""
    last, dtype, width = 0, "", 0
    in_order = True
    dtypes: set[str] = set()
    for tensor, entry in tensors.items():
        begin, end = entry.data_offsets
        if begin != last:
            in_order = False
        last = end
        if entry.dtype != dtype:
            dtype = entry.dtype
            width = BITS[dtype]
            dtypes.add(dtype)
        shape = entry.shape
        plain = len(shape) == 2 and shape[0] > 0 < shape[1]
        bits = width * shape[0] * shape[1] if plain else _bits(width, shape, data_bytes)
        if bits != (end - begin) * 8 or bits < 1 or begin < 0:
            raise _wrong_extent(name, tensor, entry)
    if not in_order:
        last = _ordered_end(name, tensors)
    if last != data_bytes:
        raise InputFileError(f"{name} should hold {last:,} bytes of data and holds {data_bytes:,}: fetch it again")
    return dtypes


def _bits(width: int, shape: tuple[int, ...], data_bytes: int) -> int:
    """Width of all values of ``shape``; 0 when a dimension is not positive. Stops above the data, before numbers grow huge."""
    bits = width
    for size in shape:
        bits *= max(size, 0)
        if not 0 < bits <= data_bytes * 8:
            break
    return bits


def _ordered_end(name: str, tensors: Mapping[str, Tensor]) -> int:
    """Where the data ends, for tensors that are listed in another order than they are stored."""
    last = 0
    for tensor, entry in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != last:
            fault = "overlaps the one before it" if begin < last else f"leaves {begin - last:,} bytes before it unused"
            raise InputFileError(f"{name}: tensor {reprlib.repr(tensor)} {fault}: it is no safetensors file")
        last = end
    return last


def _wrong_extent(name: str, tensor: str, entry: Tensor) -> InputFileError:
    what = f"{name}: tensor {reprlib.repr(tensor)} of shape {reprlib.repr(list(entry.shape))}"
    if 0 in entry.shape:
        return InputFileError(f"{what} is empty: it was saved while split over GPUs, save the adapter again, gathered")
    begin, end = map(reprlib.repr, entry.data_offsets)
    return InputFileError(f"{what} and type {entry.dtype} cannot lie at {begin} to {end}: it is no safetensors file")
