"""Where a process writes its events: one JSON line each, appended to files of its own.

Events of one step are held back and leave in a single ``write(2)``, so that a step costs one system call however much
happened in it. A file that reached ``segment_bytes`` is followed by the next; the reader deletes what it has read. If
nobody reads, the writer deletes its own oldest file: disk use per process is bounded by ``segment_bytes x segments``.

Nothing here says that something was lost. It need not: each event carries its number within the process, without gaps,
so the reader counts what is missing. That covers a full disk, a torn line and a deleted file alike.

After a fork the child starts over under its own pid.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

MAX_HELD = 4096
"""Events held back before they are written although the step has not ended."""


class Spool:
    """The events of this process. ``rank`` is the worker's rank, None in processes without a worker."""

    def __init__(self, folder: Path, *, segment_bytes: int = 4 << 20, segments: int = 16) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._segments = segments
        self._encode = msgspec.json.Encoder().encode
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self.pid = os.getpid()
        self.rank: int | None = None
        self.announced: set[str] = set()
        self.n = 0
        self._held: list[bytes] = []
        self._file: int | None = None
        self._index = 0
        self._size = 0

    @property
    def holds(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._held)

    def emit(self, role: str, kind: str, **fields: Any) -> None:
        """Add one event; it is written by the next `flush`. ``fields`` must be what JSON can hold."""
        self.n += 1
        event = {
            "pid": self.pid,
            "n": self.n,
            "rank": self.rank if role == "worker" else None,
            "role": role,
            "mono_ns": time.monotonic_ns(),
            "wall_ns": time.time_ns(),
            "kind": kind,
            **fields,
        }
        self._held.append(self._encode(event))
        if len(self._held) >= MAX_HELD:
            self.flush()

    def flush(self) -> None:
        """Write what is held. Raises OSError; what could not be written is gone and shows as a gap."""
        if not self._held:
            return
        data = b"\n".join(self._held) + b"\n"
        self._held.clear()
        if self._file is None or self._size >= self._segment_bytes:
            self._next_segment()
        assert self._file is not None
        written = os.write(self._file, data)
        self._size += written
        if written != len(data):  # the disk is full; the torn line must not swallow the next one
            self._size = self._segment_bytes

    def _next_segment(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._index += 1
        path = self._path(self._index)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._size = 0
        self._path(self._index - self._segments).unlink(missing_ok=True)

    def _path(self, index: int) -> Path:
        return self._folder / f"{self.pid}.{index}.jsonl"
