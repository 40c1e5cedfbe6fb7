"""All sequences that decode, as one aggregate: constant work a step, whatever the batch.

Theory of operation. In every step each decoding sequence computes one token, so what a step costs and needs follows from sums
that move by a known amount: KV tokens grow by the number of sequences; a sequence needs a new KV block whenever its computed
tokens are a multiple of the block size, so a histogram of block phases, read at ``step % block_size``, says how many do; and a
sequence that joins knows the number of the step in which it ends. Only joining and leaving touch a single sequence.

So while nothing else happens, many steps are one: ``k`` steps that begin with ``c`` and grow by ``g`` each take
``k c + g k (k - 1) / 2``. ``horizon`` says how many that is, ``done`` makes them, ``steps_to`` inverts the sum.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import isqrt

from loraledger.twin.requests import Request


class Decodes:
    """The decoding sequences of one replica, in the order in which they joined. ``step`` is the next step's number."""

    __slots__ = ("_block_size", "_endings", "_ends", "_phases", "_torn", "kv_tokens", "running", "step")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._phases = [0] * block_size
        self._endings: dict[int, list[Request]] = {}
        self._ends: list[int] = []  # a heap of the keys of _endings
        self._torn = False  # whether a sequence ever left before its end, and so may stand in _endings in vain
        self.running: dict[str, Request] = {}
        self.kv_tokens = 0
        self.step = 0

    def __len__(self) -> int:
        return len(self.running)

    def join(self, request: Request) -> None:
        """``request`` has its prompt computed and a token out; from the next step on it decodes."""
        step, computed = self.step, request.computed
        request.state = "decoding"
        request.base = base = computed - step
        request.finish_step = end = step + request.output - request.generated - 1
        self.running[request.id] = request
        self.kv_tokens += computed
        self._phases[-base % self._block_size] += 1
        ending = self._endings.get(end)
        if ending is None:
            self._endings[end] = [request]
            heappush(self._ends, end)
        else:
            ending.append(request)

    def leave(self, request: Request) -> None:
        """``request`` stops between steps; its ``computed`` and ``generated`` are true again."""
        step, base = self.step, request.base
        request.computed = computed = base + step
        left = request.finish_step - step + 1
        if left:
            self._torn = True
        request.generated = request.output - left
        del self.running[request.id]
        self.kv_tokens -= computed
        self._phases[-base % self._block_size] -= 1

    def new_blocks(self) -> int:
        """How many sequences need another KV block in the next step."""
        return self._phases[self.step % self._block_size]

    def needs_block(self, request: Request) -> bool:
        """Whether ``request`` is one of them."""
        return (request.base + self.step) % self._block_size == 0

    def demand(self, steps: int) -> int:
        """New KV blocks that the ``steps`` steps after the next one need."""
        size, phases = self._block_size, self._phases
        cycles, rest = divmod(steps, size)
        first = (self.step + 1) % size
        blocks = cycles * len(self.running) + sum(phases[first : first + rest])
        if first + rest > size:
            blocks += sum(phases[: first + rest - size])
        return blocks

    def horizon(self, free: int) -> int:
        """Steps until one ends a sequence (which is counted), or would need a block beyond ``free``, the next step's aside."""
        count, size = len(self.running), self._block_size
        further = self._ends[0] - self.step
        steps = further + 1
        if count * (further // size + 1) <= free:
            return steps
        cycles, free = divmod(free, count)
        fit = 1 + cycles * size
        while fit < steps:
            free -= self._phases[(self.step + fit) % size]
            if free < 0:
                break
            fit += 1
        return min(fit, steps)

    def last(self) -> Request:
        """The sequence that joined last: the first to be preempted."""
        return next(reversed(self.running.values()))

    def done(self, steps: int) -> list[Request]:
        """``steps`` steps are over, of which only the last one may have ended sequences: those, in running order.

        They have not left yet. A preempted sequence left its old entry behind; it joins again with a later ending.
        """
        running = self.running
        self.kv_tokens += steps * len(running)
        self.step += steps
        step = self.step - 1
        ending = self._endings.pop(step, None)
        if ending is None:
            return []
        heappop(self._ends)
        if not self._torn:
            return ending
        return [request for request in ending if request.finish_step == step and running.get(request.id) is request]


def elapsed(steps: int, first: int, growth: int) -> int:
    """How long ``steps`` steps take of which the first takes ``first`` and each further one ``growth`` more."""
    return steps * first + growth * (steps * (steps - 1) // 2)


def steps_to(time: int, first: int, growth: int) -> int:
    """The fewest steps (at least 1) that take ``time`` or longer; the inverse of ``elapsed``."""
    if time <= first:
        return 1
    if growth == 0:
        return -(-time // first)
    lean = 2 * first - growth
    steps = max(1, (isqrt(lean * lean + 8 * growth * time) - lean) // (2 * growth))
    while steps * first + growth * (steps * (steps - 1) // 2) < time:
        steps += 1
    return steps
