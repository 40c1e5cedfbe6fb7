"""All sequences that decode, as one aggregate: constant work a step, whatever the batch.

Theory of operation. In every step each decoding sequence computes one token, so what a step costs and needs follows from sums
that move by a known amount: KV tokens grow by the number of sequences; a sequence needs a new KV block whenever its computed
tokens are a multiple of the block size, so a histogram of block phases, read at ``step % block_size``, says how many do; and a
sequence that joins knows the number of the step in which it ends. Only joining and leaving touch a single sequence.
"""

from __future__ import annotations

from loraledger.twin.requests import Request


class Decodes:
    """The decoding sequences of one replica, in the order in which they joined. ``step`` is the next step's number."""

    __slots__ = ("_block_size", "_endings", "_phases", "kv_tokens", "running", "step")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._phases = [0] * block_size
        self._endings: dict[int, list[Request]] = {}
        self.running: dict[str, Request] = {}
        self.kv_tokens = 0
        self.step = 0

    def __len__(self) -> int:
        return len(self.running)

    def join(self, request: Request) -> None:
        """``request`` has its prompt computed and a token out; from the next step on it decodes."""
        request.state = "decoding"
        request.base = request.computed - self.step
        request.finish_step = self.step + request.output - request.generated - 1
        self.running[request.id] = request
        self.kv_tokens += request.computed
        self._phases[-request.base % self._block_size] += 1
        self._endings.setdefault(request.finish_step, []).append(request)

    def leave(self, request: Request) -> None:
        """``request`` stops between steps; its ``computed`` and ``generated`` are true again."""
        request.computed = request.base + self.step
        request.generated = request.output - (request.finish_step - self.step + 1)
        del self.running[request.id]
        self.kv_tokens -= request.computed
        self._phases[-request.base % self._block_size] -= 1

    def new_blocks(self) -> int:
        """How many sequences need another KV block in the next step."""
        return self._phases[self.step % self._block_size]

    def needs_block(self, request: Request) -> bool:
        """Whether ``request`` is one of them."""
        return (request.base + self.step) % self._block_size == 0

    def last(self) -> Request:
        """The sequence that joined last: the first to be preempted."""
        return next(reversed(self.running.values()))

    def done(self) -> list[Request]:
        """One step is over: the sequences that generated their last token in it, in running order. They have not left yet.

        A preempted sequence left its old entry behind; it joins again with a later ending.
        """
        step = self.step
        self.kv_tokens += len(self.running)
        self.step += 1
        ending = self._endings.pop(step, None)
        if ending is None:
            return []
        return [
            request for request in ending if request.finish_step == step and self.running.get(request.id) is request
        ]
