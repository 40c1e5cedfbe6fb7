"""Text files of others, read line by line in bounded memory, plain or gzip; and what becomes of a bad row.

Theory of operation. A log or a trace can have millions of lines, come from anybody, and be compressed a thousandfold. So a file is
read in pieces of 1 MiB and cut at line ends; a line that is longer than the caller allows, a damaged archive and a file that cannot
be opened are all one kind of error, ``InputFileError``. Whether a file is compressed is told by its first bytes, never by its name.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from loraledger.errors import InputFileError

PIECE: Final = 1 << 20
MAX_LINE: Final = 1 << 24
"""Bytes of a line: the header of a trace with 100,000 adapters takes 5 MB."""

_MAX_CSV_LINE: Final = 1 << 16
_GZIP: Final = b"\x1f\x8b"


class _Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


class BadRows:
    """What becomes of a bad row: the file is refused with the row's number and the reason, or the row is dropped and counted."""

    def __init__(self, file: Path | str, *, skip: bool = False) -> None:
        self.file = file
        self.skip = skip
        self.dropped: Counter[str] = Counter()

    def bad(self, row: int, reason: str, detail: str = "") -> None:
        """Count row ``row`` (of the file, from 1) under ``reason``. Raises ``InputFileError`` unless rows may be dropped."""
        if not self.skip:
            said = f"{reason}: {detail}" if detail else reason
            raise InputFileError(f"{self.file}: row {row}: {said} (--skip-bad drops such rows and counts them)")
        self.dropped[reason] += 1


def lines(path: Path, max_line: int = MAX_LINE) -> Iterator[bytes]:
    """The lines of ``path`` without their ends; a last line may lack one. Raises ``InputFileError``."""
    try:
        with path.open("rb") as raw:
            yield from _cut(path, _unpacked(raw), max_line)
    except EOFError as error:
        raise InputFileError(f"{path}: cannot be read: its gzip data are cut short: get the file again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputFileError(f"{path}: cannot be read: damaged gzip data ({error}): get the file again") from error
    except OSError as error:
        raise InputFileError(f"{path}: cannot be read: {error.strerror or error}") from error


def csv_rows(path: Path, bad: BadRows) -> Iterator[tuple[int, list[str]]]:
    """(number of the line, cells) of a CSV file in UTF-8, heading included. A cell holds no line end here."""
    for row, line in enumerate(lines(path, _MAX_CSV_LINE), 1):
        try:
            text = line.decode("utf-8-sig" if row == 1 else "utf-8").rstrip("\r")
            cells = next(csv.reader((text,), strict=True), [])
        except (UnicodeDecodeError, csv.Error) as error:
            bad.bad(row, "not CSV in UTF-8", str(error))
            continue
        if cells:
            yield row, cells
        else:
            bad.bad(row, "a hole")


def _unpacked(raw: io.BufferedReader) -> _Source:
    return gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP else raw


def _cut(path: Path, stream: _Source, max_line: int) -> Iterator[bytes]:
    rest, number = b"", 0
    while piece := stream.read(PIECE):
        found = (rest + piece).split(b"\n")
        rest = found.pop()
        for line in found:
            number += 1
            if len(line) > max_line:
                raise _too_long(path, number, max_line)
            yield line
        if len(rest) > max_line:
            raise _too_long(path, number + 1, max_line)
    if rest:
        yield rest


def _too_long(path: Path, number: int, max_line: int) -> InputFileError:
    return InputFileError(f"{path}: row {number}: longer than {max_line:,} bytes: not a file of this format")
