"""The journal of changes: who changed what, why, from what to what, on what evidence, and how it ended.

Theory of operation. One line of JSON an entry, with a checksum over the rest of it, appended and on the disk (fsync) before anyone
acts on it. The state of every change is what the entries come to when they are read from the start, so a process that was killed
at any moment finds what it has to finish or to take back. A last line without its end was being written when the process died:
nobody acted on it, and it is cut off by the next append. Damage anywhere else is an error, never skipped: a way back may be in it.

One writer at a time: a lock beside the file, held while a process has it open for writing. Reading needs no lock.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, Self

import msgspec

from loraledger.errors import ConfigError, InputFileError
from loraledger.operate.change import Change, Trigger

FILE: Final = "changes.jsonl"
LOCK: Final = "changes.lock"
MOST: Final = 64 * 2**20
"""Bytes that are read at most: some 100,000 entries."""

_Kind = Literal["propose"] | Trigger


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one change. ``change``: as it is after the step. ``evidence``: JSON that the step was taken on."""

    n: int
    at_ns: int
    kind: _Kind
    who: str
    why: str
    change: Change
    evidence: dict[str, object] = {}


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Entry)


def read_entries(directory: Path) -> list[Entry]:
    """Every entry of the journal in ``directory``, oldest first; none where there is no journal.

    Raises InputFileError when it is damaged anywhere but in a last line that was being written.
    """
    path = directory / FILE
    try:
        if path.stat().st_size > MOST:
            raise InputFileError(f"{path}: larger than {MOST // 2**20} MiB: move it away to begin a new one")
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    entries: list[Entry] = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        entries.append(_decode(path, number, line))
        if entries[-1].n != number:
            raise InputFileError(f"{path}: line {number} says that it is entry {entries[-1].n}: entries are missing")
    return entries


def changes_of(entries: list[Entry]) -> dict[str, Change]:
    """Each change as it stands after ``entries``, by id, in the order in which they were proposed."""
    found: dict[str, Change] = {}
    for entry in entries:
        found[entry.change.id] = entry.change
    return found


def lasting(entries: list[Entry]) -> dict[str, list[Change]]:
    """By variable, the accepted changes that the gateway holds unless the settings file says otherwise, oldest first."""
    settled = {entry.change.id for entry in entries if entry.kind == "accept" and "settled" in entry.evidence}
    found: dict[str, list[Change]] = {}
    for change in sorted(changes_of(entries).values(), key=lambda change: change.ended_ns or 0):
        if change.state == "accepted" and change.live and change.id not in settled:
            found.setdefault(change.variable, []).append(change)
    return found


class ChangeJournal:
    """The journal, open for writing. ``entries`` are those that are on the disk. Close it after use."""

    def __init__(self, directory: Path) -> None:
        """Make ``directory`` where it is missing, and take the lock. Raises ConfigError when another process has it."""
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o640)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"{directory}: another process writes the journal of changes: ask that one") from error
        self.directory = directory
        self._file, self._end = -1, 0
        try:
            self.entries = read_entries(directory)
            self._file = os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
            self._cut()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the lock back. May be called twice."""
        for handle in (self._file, self._lock):
            if handle >= 0:
                os.close(handle)
        self._file = self._lock = -1

    @property
    def changes(self) -> dict[str, Change]:
        """Each change as it stands, by id."""
        return changes_of(self.entries)

    def append(
        self, at_ns: int, kind: _Kind, who: str, why: str, change: Change, evidence: dict[str, object] | None = None
    ) -> Entry:
        """Write one step down; it is on the disk when this returns.

        Raises OSError when the disk refuses, and leaves nothing; what it would not give back is cut off before anything is added.
        """
        entry = Entry(
            n=len(self.entries) + 1, at_ns=at_ns, kind=kind, who=who, why=why, change=change, evidence=evidence or {}
        )
        if os.fstat(self._file).st_size != self._end:
            os.ftruncate(self._file, self._end)
        try:
            line = _encode(entry)
            if os.write(self._file, line) != len(line):
                raise OSError(f"{self.directory / FILE}: the disk took a part of an entry only")
            os.fsync(self._file)
            if not self.entries:
                _sync_directory(self.directory)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._end += len(line)
        self.entries.append(entry)
        return entry

    def _cut(self) -> None:
        """Cut off a last line that has no end."""
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, size, 0)
        self._end = data.rfind(b"\n") + 1
        if self._end != size:
            os.ftruncate(self._file, self._end)
            os.fsync(self._file)


def _encode(entry: Entry) -> bytes:
    body = _ENCODER.encode(entry)
    return b'{"crc":%d,"entry":%s}\n' % (zlib.crc32(body), body)


def _decode(path: Path, number: int, line: bytes) -> Entry:
    head, comma, rest = line.partition(b',"entry":')
    body = rest[:-1]
    if not comma or not head.startswith(b'{"crc":') or not head[7:].isdigit() or int(head[7:]) != zlib.crc32(body):
        raise InputFileError(f"{path}: line {number} is damaged: restore the file from a copy")
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise InputFileError(f"{path}: line {number} was written by another version: {error}") from error


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
