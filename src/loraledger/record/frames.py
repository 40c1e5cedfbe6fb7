"""Frames: the bytes of a journal segment, and how to read them back.

Theory of operation. A segment is a file of frames laid end to end from offset 0::

    u32 n, little-endian     length of kind + payload, so never 0
    u32 crc                  zlib.crc32 over kind + payload
    u8  kind                 one of Kind
    payload                  n - 1 bytes

Segments are preallocated, so what follows the last frame is zeros, and a length of 0 means "no more yet". A reader
stops there, at the end of the file, or at the first frame that is not whole; everything before is, because the CRC
covers it. ``SegmentReader.torn`` tells a clean end (nothing but zeros follow: the writer stopped between two appends)
from a torn one (it was killed within an append, or the machine lost pages that had not been synced).

Hazard: segments are read with ``read``, never mapped. A writer that closes cuts its segment to the used length, and a
reader that had mapped the rest would die of SIGBUS. A reader buffers ahead, so it may miss frames that are appended
meanwhile: read a live segment again from ``reader.offset``.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from loraledger.errors import InputFileError

HEADER: Final = struct.Struct("<IIB")
OVERHEAD: Final = HEADER.size
"""Bytes that a frame takes besides its payload."""

_NAME: Final = re.compile(r"journal-(\d{8,})\.log")
_CHUNK: Final = 1 << 20


class Kind:
    """What a frame holds. Numbers are part of the file format: never reuse one."""

    SETTINGS: Final = 1
    SNAPSHOT: Final = 2
    EVENT: Final = 3
    COMMANDS: Final = 4
    NOTE: Final = 5


KIND_CRC: Final = tuple(zlib.crc32(bytes((kind,))) for kind in range(256))
"""CRC of each kind byte: the value that the CRC of a payload continues from."""


class Frame(NamedTuple):
    """One frame. ``offset`` is where it starts in its segment, in bytes."""

    kind: int
    payload: bytes
    offset: int


class SegmentReader(Iterator[Frame]):
    """The frames of one segment from ``offset`` on, which has to be the start of a frame.

    ``offset`` moves on with each frame, to where the next one would start. Raises InputFileError when the file cannot
    be opened.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self._frames = self._read()

    def __next__(self) -> Frame:
        return next(self._frames)

    @property
    def torn(self) -> bool:
        """Whether bytes that form no frame follow the frames read so far. Reads the rest of the segment.

        On a segment that another process appends to, the append under way may show as torn.
        """
        with _open(self.path) as file:
            file.seek(self.offset)
            if _frame_at(file, self.offset, _size(file)) is not None:
                return False
            file.seek(self.offset)
            return any(chunk != bytes(len(chunk)) for chunk in iter(lambda: file.read(_CHUNK), b""))

    def _read(self) -> Iterator[Frame]:
        with _open(self.path) as file:
            size = _size(file)
            file.seek(self.offset)
            while (frame := _frame_at(file, self.offset, size)) is not None:
                self.offset += OVERHEAD + len(frame.payload)
                yield frame


def read_segment(path: Path, offset: int = 0) -> SegmentReader:
    """Iterate over the frames of ``path`` from ``offset`` on; stops without an error at the first that is not whole."""
    return SegmentReader(path, offset)


def segments(directory: Path) -> list[Path]:
    """The journal segments in ``directory``, oldest first. A directory that does not exist has none.

    A writer that was killed while it created a segment leaves one without a frame.
    """
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=sequence_of)


def sequence_of(path: Path) -> int:
    """The sequence number in a segment's name. Raises InputFileError when ``path`` is not named like a segment."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise InputFileError(f"{path} is not a journal segment: its name should look like journal-00000001.log")
    return int(match[1])


def segment_path(directory: Path, sequence: int) -> Path:
    """Where the segment with this sequence number lies."""
    return directory / f"journal-{sequence:08d}.log"


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=_CHUNK)
    except OSError as error:
        raise InputFileError(f"journal segment {path} cannot be read: {error.strerror}") from error


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _frame_at(file: BinaryIO, offset: int, size: int) -> Frame | None:
    """The frame at the file's position, which is ``offset``; None when no whole frame is there."""
    header = file.read(OVERHEAD)
    if len(header) < OVERHEAD:
        return None
    length, crc, kind = HEADER.unpack(header)
    # The length is checked against the file before it is believed: a flipped bit may ask for 4 GiB.
    if length == 0 or offset + OVERHEAD + length - 1 > size:
        return None
    payload = file.read(length - 1)
    return Frame(kind, payload, offset) if zlib.crc32(payload, KIND_CRC[kind]) == crc else None
