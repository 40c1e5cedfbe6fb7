"""Reads the event files of all processes, in the API server.

One `poll` takes what each process has written since the last, in order of its numbers, and merges the processes by
their monotonic clocks, which are one clock on one host. A file is deleted once it is read to its end and the next one
exists. What is missing is counted from the gaps in each process's numbers and reported in place, as a ``lost`` event.
"""

from __future__ import annotations

import heapq
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

Event = dict[str, Any]


@dataclass
class _Source:
    """How far one process has been read."""

    index: int
    offset: int = 0
    torn: bytes = b""
    last_n: int = 0


class Tail:
    """The reader of one spool folder. ``poll`` takes at most ``limit_bytes`` from each process."""

    def __init__(self, folder: Path, *, limit_bytes: int = 4 << 20) -> None:
        self._folder = folder
        self._limit = limit_bytes
        self._sources: dict[int, _Source] = {}
        self._decode = msgspec.json.Decoder(dict[str, Any]).decode

    def poll(self) -> list[Event]:
        """Return the new events of all processes, oldest first. Raises OSError when the folder is gone."""
        files: dict[int, list[int]] = {}
        for name in os.listdir(self._folder):  # noqa: PTH208  (names, not paths, 20 times a second)
            parts = name.split(".")
            if len(parts) == 3 and parts[2] == "jsonl" and parts[0].isdigit() and parts[1].isdigit():
                files.setdefault(int(parts[0]), []).append(int(parts[1]))
        streams = [self._read(pid, sorted(indexes)) for pid, indexes in files.items()]
        return list(heapq.merge(*streams, key=lambda event: event["mono_ns"]))

    def _read(self, pid: int, indexes: list[int]) -> list[Event]:
        source = self._sources.setdefault(pid, _Source(indexes[0]))
        events: list[Event] = []
        left = self._limit
        for index in (i for i in indexes if i >= source.index):
            if index != source.index:
                (self._folder / f"{pid}.{source.index}.jsonl").unlink(missing_ok=True)
                source.index, source.offset, source.torn = index, 0, b""
            data = self._bytes(pid, source, left)
            left -= len(data)
            events += self._parse(pid, source, data)
            if left <= 0:
                break
        return events

    def _bytes(self, pid: int, source: _Source, limit: int) -> bytes:
        with suppress(FileNotFoundError):  # its writer deleted it since the folder was listed
            file = os.open(self._folder / f"{pid}.{source.index}.jsonl", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                return os.pread(file, limit, source.offset)
            finally:
                os.close(file)
        return b""

    def _parse(self, pid: int, source: _Source, data: bytes) -> list[Event]:
        source.offset += len(data)
        *lines, source.torn = (source.torn + data).split(b"\n")
        events: list[Event] = []
        for line in lines:
            with suppress(msgspec.DecodeError):  # a torn line: the gap in the numbers tells of it
                event = self._decode(line)
                missing = event["n"] - source.last_n - 1
                if missing > 0:
                    events.append(_lost(event, missing))
                source.last_n = event["n"]
                events.append(event)
        return events


def _lost(before: Event, count: int) -> Event:
    """Stand for ``count`` events of a process that are missing before this one; it has no number of its own."""
    kept = {name: before[name] for name in ("pid", "rank", "role", "mono_ns", "wall_ns")}
    return {**kept, "n": before["n"] - 1, "kind": "lost", "count": count}
