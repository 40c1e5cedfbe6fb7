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
from heapq import heapify, heappop, heappush
from typing import Literal

BlockKey = tuple[str | None, int, int]
State = Literal["arriving", "waiting", "prefilling", "decoding", "over"]


class Adapter:
    """A registered adapter. ``key`` is its entry in the tiers: a name registered again is another entry.

    ``joined`` is the number under which it last joined the batch: the order in which a step uses adapters.
    """

    __slots__ = ("joined", "key", "name", "rank", "ready_ps", "size")

    def __init__(self, key: str, name: str, size: int, rank: int) -> None:
        self.key = key
        self.name = name
        self.size = size
        self.rank = rank
        self.ready_ps = 0
        self.joined = 0


class Request:
    """A request inside the twin. ``need``: tokens to compute before its next token; ``computed``: those with KV so far.

    While it decodes, ``base`` and ``finish_step`` stand for ``computed`` and ``generated``, which then change at every step.
    ``ended`` is the caller's view (cancelled or finished), ``state`` the scheduler's, which lags until the step is over.
    ``prefix`` names the prompt's full KV blocks, each by what it and all before it hold; ``held`` are those of them that this
    request shares through the prefix cache.
    """

    __slots__ = (
        "adapter",
        "adapter_name",
        "base",
        "computed",
        "ended",
        "finish_step",
        "generated",
        "held",
        "id",
        "need",
        "output",
        "prefix",
        "prompt",
        "seq",
        "state",
    )

    def __init__(self, request_id: str, adapter_name: str | None, prompt: int, output: int) -> None:
        self.id = request_id
        self.adapter_name = adapter_name
        self.adapter: Adapter | None = None
        self.prompt = prompt
        self.output = output
        self.generated = 0
        self.need = prompt
        self.computed = 0
        self.seq = 0
        self.base = 0
        self.finish_step = 0
        self.prefix: tuple[int, ...] = ()
        self.held: list[BlockKey] = []
        self.ended = False
        self.state: State = "arriving"


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
        self._back += 1
        request.seq = self._back
        self._join(request)
        self._line(request.adapter).append(request)

    def push_front(self, request: Request) -> None:
        """First in line: where a preempted request goes."""
        self._front -= 1
        request.seq = self._front
        self._join(request)
        self._line(request.adapter).appendleft(request)

    def _join(self, request: Request) -> None:
        request.state = "waiting"
        self.count += 1
        heappush(self._heads, (request.seq, request.adapter))

    def _line(self, adapter: Adapter | None) -> deque[Request]:
        line = self._lines.get(adapter)
        if line is None:
            line = self._lines[adapter] = deque()
        return line

    def first(self, batch: Iterable[Adapter], full: bool) -> Request | None:
        """Whose turn it is: with all slots taken (``full``), only adapters of ``batch`` and the base model may join."""
        if not full:
            heads = self._heads
            while heads:
                head = self._head(heads[0][1])
                if head is not None and head.seq == heads[0][0]:
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
        while line and line[0].state != "waiting":
            line.popleft()
        if not line:
            del self._lines[adapter]
            return None
        return line[0]

    def take(self, request: Request) -> None:
        """Remove ``request``, which ``first`` returned."""
        self._lines[request.adapter].popleft()
        self.count -= 1
        self._tidy()

    def forget(self, request: Request) -> None:
        """``request`` was cancelled; its entry goes when it reaches the front, or with the next tidying."""
        request.state = "over"
        self.count -= 1
        self._tidy()

    def _tidy(self) -> None:
        """Bound what cancelled requests and stale heads may occupy."""
        if len(self._heads) <= 4 * self.count + 64:
            return
        lines = {
            adapter: deque(request for request in line if request.state == "waiting")
            for adapter, line in self._lines.items()
        }
        self._lines = {adapter: line for adapter, line in lines.items() if line}
        self._heads = [(request.seq, adapter) for adapter, line in self._lines.items() for request in line]
        heapify(self._heads)
