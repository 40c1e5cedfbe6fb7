"""The newest events of all processes, numbered for clients.

Each event gets a sequence number, without gaps, in the order in which it was read. The ring holds at most so many
events and so many bytes; a client that asks for older ones is told how many it missed.

Events pass here once, so this is also where a finished request is joined with how it found its adapter: the worker
tells that in the step in which the request was first computed, the API server tells of the end.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import accumulate, islice
from typing import Any, NamedTuple

import msgspec

Event = dict[str, Any]
JOIN_LIMIT = 16_384
"""Requests that may be under way at once and still be joined."""

PAGE_BYTES = 4 << 20
"""Bytes of JSON after which a page ends, whatever its limit of events."""

LATEST = ("hooks", "floor", "slots_allocated", "kv", "step", "worker_cost", "hook_fault")
"""Kinds whose newest event per process is kept beside the ring."""


class Kept(NamedTuple):
    """One event of the ring."""

    seq: int
    pid: int
    n: int
    line: bytes


class Page(NamedTuple):
    """Events after a sequence number; ``lost`` of them are no longer there."""

    lines: list[bytes]
    next_seq: int
    lost: int


class Ring:
    """The numbered events; ``last_seq`` is 0 before the first. Bounds are in events and in bytes of JSON."""

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self._max_events, self._max_bytes = max_events, max_bytes
        self._kept: deque[Kept] = deque()
        self._bytes = 0
        self._encode = msgspec.json.Encoder().encode
        self._found: OrderedDict[str, Event] = OrderedDict()
        self.last_seq = 0
        self.spool_lost = 0
        self.latest: dict[tuple[str, int], Event] = {}

    @property
    def first_seq(self) -> int:
        """The oldest number still here; one past the newest when there is none."""
        return self.last_seq - len(self._kept) + 1

    def add(self, events: list[Event]) -> None:
        """Number the events and keep them, dropping the oldest beyond the bounds."""
        for event in events:
            kind = event["kind"]
            if kind == "access":
                self._note(event)
            elif kind == "request_finished":
                event = event | self._found.get(event["request"], _UNKNOWN)
            elif kind == "lost":
                self.spool_lost += event["count"]
            if kind in LATEST:
                self.latest[kind, event["pid"]] = event
            self.last_seq += 1
            line = self._encode({"seq": self.last_seq, **event})
            self._kept.append(Kept(self.last_seq, event["pid"], event["n"], line))
            self._bytes += len(line)
        while len(self._kept) > self._max_events or self._bytes > self._max_bytes:
            self._bytes -= len(self._kept.popleft().line)

    def after(self, seq: int, limit: int) -> Page:
        """Return up to ``limit`` events, or `PAGE_BYTES`, whose number is above ``seq``."""
        lost = max(0, self.first_seq - 1 - seq)
        skip = max(0, seq + 1 - self.first_seq)
        count = len(self._kept) - skip
        if count < skip:  # a client that follows asks for the end: walk from there
            found = list(islice(reversed(self._kept), count))[::-1][:limit]
        else:
            found = list(islice(self._kept, skip, skip + limit))
        sizes = accumulate(len(kept.line) for kept in found)
        del found[max(1, sum(size <= PAGE_BYTES for size in sizes)) :]
        return Page([kept.line for kept in found], found[-1].seq if found else max(seq, self.last_seq), lost)

    def seq_at(self, marks: dict[int, int]) -> int:
        """Return a number up to which every event of the given processes is within ``pid -> n``."""
        seq = self.last_seq
        for pid, n in marks.items():
            for kept in reversed(self._kept):
                if kept.pid == pid:
                    if kept.n <= n:
                        break
                    seq = min(seq, kept.seq - 1)
        return seq

    def newest(self, kind: str) -> list[Event]:
        """Return the newest event of this kind of each process."""
        return [event for (name, _), event in self.latest.items() if name == kind]

    def _note(self, event: Event) -> None:
        """Remember how an adapter was found, for the requests that it was found for."""
        for request in event["requests"]:
            # Kept after the end: a request with several prompts ends several times under one id.
            self._found[request] = {
                "access": event["state"],
                "load_ns": event["load_ns"],
                "activation_ns": event["activation_ns"],
                "stall_ns": event["stall_ns"],
            }
            self._found.move_to_end(request)
        while len(self._found) > JOIN_LIMIT:
            self._found.popitem(last=False)


_UNKNOWN: Event = {"access": None, "load_ns": None, "activation_ns": None, "stall_ns": None}
