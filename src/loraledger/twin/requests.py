"""The twin's own record of a request and of an adapter, and the line in which requests wait.

Theory of operation. The engine's queue is first come, first served, but a request whose adapter cannot join the batch is skipped
and later arrivals overtake it. A plain scan would then cost the whole queue at every step, which is what makes simulators slow
in overload. So there is one FIFO per adapter and a heap over their heads: the first request that may join is found in the
logarithm of the adapters that wait, or, when all slots are taken, among the few adapters of the batch.

Cancelled requests stay where they are and are dropped when they reach the front; stale heap entries likewise. Sequence numbers
are unique, so no order ever depends on a hash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Final, Literal

import msgspec

BlockKey = tuple[str | None, int, int]
State = Literal["arriving", "waiting", "prefilling", "decoding", "over"]


class Adapter(msgspec.Struct, eq=False, gc=False):
    """A registered adapter. ``key`` is its entry in the tiers: a name registered again is another entry.

    A step uses its adapters in the order of ``place``, a number that follows from the key alone and tells nothing of it.
    """

    key: str
    name: str
    size: int
    rank: int
    ready_ps: int = 0
    place: int = 0

    def __post_init__(self) -> None:
        self.place = int.from_bytes(blake2b(self.key.encode(), digest_size=8).digest(), "big")


PLACE: Final = attrgetter("place")


class Request(msgspec.Struct, eq=False, gc=False):
    """A request inside the twin. ``need``: tokens to compute before its next token; ``computed``: those with KV so far.

    While it decodes, ``base`` and ``finish_step`` stand for ``computed`` and ``generated``, which then change at every step.
    ``ended`` is the caller's view (cancelled or finished), ``state`` the scheduler's, which lags until the step is over.
    ``prefix`` names the prompt's full KV blocks, each by what it and all before it hold; ``held`` are those of them that this
    request shares through the prefix cache.
    """

    id: str
    adapter_name: str | None
    prompt: int
    output: int
    need: int
    adapter: Adapter | None = None
    generated: int = 0
    computed: int = 0
    seq: int = 0
    base: int = 0
    finish_step: int = 0
    prefix: tuple[int, ...] = ()
    held: list[BlockKey] = []
    ended: bool = False
    state: State = "arriving"


class WaitingLine:
    """Requests that wait to join the batch. ``count``: how many still want to."""

    __slots__ = ("_back", "_front", "_heads", "_lines", "count")

    def __init__(self) -> None:
        self._lines: dict[Adapter | None, deque[Request]] = {}
        self._heads: list[tuple[int, Adapter | None]] = []
        self.count = 0
        self._back = 0
        self._front = 0

    def push(self, request: Request) -> None:
        """Last in line."""
        self._back = request.seq = self._back + 1
        self._join(request).append(request)

    def push_front(self, request: Request) -> None:
        """First in line: where a preempted request goes."""
        self._front = request.seq = self._front - 1
        self._join(request).appendleft(request)

    def _join(self, request: Request) -> deque[Request]:
        """The line that ``request`` joins."""
        adapter = request.adapter
        request.state = "waiting"
        self.count += 1
        heappush(self._heads, (request.seq, adapter))
        line = self._lines.get(adapter)
        if line is None:
            line = self._lines[adapter] = deque()
        return line

    def first(self, batch: Iterable[Adapter], full: bool) -> Request | None:
        """Whose turn it is: with all slots taken (``full``), only adapters of ``batch`` and the base model may join."""
        if not full:
            heads = self._heads
            while heads:
                seq, adapter = heads[0]
                head = self._head(adapter)
                if head is not None and head.seq == seq:
                    return head
                heappop(heads)
            return None
        best, lines = self._head(None), self._lines
        for adapter in batch:
            head = self._head(adapter) if adapter in lines else None
            if head is not None and (best is None or head.seq < best.seq):
                best = head
        return best

    def _head(self, adapter: Adapter | None) -> Request | None:
        line = self._lines.get(adapter)
        if line is None:
            return None
        while line:
            head = line[0]
            if head.state == "waiting":
                return head
            line.popleft()
        del self._lines[adapter]
        return None

    def take(self, request: Request) -> None:
        """Remove ``request``, which ``first`` returned."""
        self._lines[request.adapter].popleft()
        if self._heads[0][0] == request.seq:
            heappop(self._heads)
        self.count -= 1
        if len(self._heads) > 4 * self.count + 64:
            self._tidy()

    def forget(self, request: Request) -> None:
        """``request`` was cancelled; its entry goes when it reaches the front, or with the next tidying."""
        request.state = "over"
        self.count -= 1
        if len(self._heads) > 4 * self.count + 64:
            self._tidy()

    def _tidy(self) -> None:
        """Bound what cancelled requests and stale heads occupy."""
        lines = {
            adapter: deque(request for request in line if request.state == "waiting")
            for adapter, line in self._lines.items()
        }
        self._lines = {adapter: line for adapter, line in lines.items() if line}
        self._heads = [(request.seq, adapter) for adapter, line in self._lines.items() for request in line]
        heapify(self._heads)
