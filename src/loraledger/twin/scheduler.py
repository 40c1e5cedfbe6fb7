"""Which requests run in a step: vLLM 0.32's V1 scheduler, without time.

Theory of operation. Running requests come first, in the order in which they joined, then waiting ones, first come, first
served, until the token budget is spent. The last prompt may be cut (chunked prefill): there is at most one such, it is the last
of the running, and it got all that was left of the budget. Since ``max_seqs`` never exceeds the budget, a sequence that decodes
always gets its token.

A request is admitted only when its whole prompt fits in free KV blocks (``scheduler_reserve_full_isl``, on by default), but
takes blocks as it computes. When a running request needs a block and none is free, the request that joined last loses all of
its blocks, goes to the front of the line and computes everything again; nothing is admitted in such a step. A request that fits
in an empty cache always ends, because the one that joined first is never the victim of another.

Distinct adapters in one step are at most ``slots``; a request that would exceed them is skipped and may be overtaken for ever.
"""

from __future__ import annotations

from loraledger.twin.decodes import Decodes
from loraledger.twin.events import Preempted, TokenOut, TwinEvent
from loraledger.twin.profile import TwinProfile
from loraledger.twin.requests import Adapter, Request, WaitingLine


class Scheduler:
    """The queue, the batch and the KV blocks of one replica.

    ``batch`` maps the adapters of running requests, in the order in which they joined, to how many use them; ``batch_changed``
    says that it is not what it was when the owner last cleared the flag. ``every_token``: report each token, not only the first
    and last one of a request.
    """

    def __init__(self, profile: TwinProfile, every_token: bool) -> None:
        self._profile = profile
        self._every_token = every_token
        self._line = WaitingLine()
        self._decodes = Decodes(profile.block_size)
        self._cut: Request | None = None  # the prompt that is computed in part
        self._completing: list[Request] = []  # prompts that will be complete when the step in flight ends
        self._stuck = False  # nothing more could be admitted, and nothing has changed since
        self.batch: dict[Adapter, int] = {}
        self.batch_changed = False
        self.used_blocks = 0
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self._decodes.running) or self._cut is not None or len(self._line) > 0

    @property
    def running(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self._decodes.running) + len(self._completing) + (self._cut is not None)

    @property
    def waiting(self) -> int:
        """Requests in line, preempted ones included."""
        return len(self._line)

    def add(self, request: Request) -> None:
        """A request arrives."""
        self._line.push(request)
        self._stuck = False

    def drop(self, request: Request) -> bool:
        """A request is cancelled, between steps. ``False``: it was not here."""
        if request.state == "waiting":
            self._line.forget(request)
            self._stuck = False
            return True
        if request.state == "decoding":
            self._decodes.leave(request)
        elif request.state == "prefilling":
            self._cut = None
        else:
            return False
        self._release(request)
        return True

    # --- a step begins ------------------------------------------------------------------------------------------------

    def schedule(self, now: int, out: list[TwinEvent]) -> int:
        """Decide the next step and return its duration in picoseconds, loads not included. Preemptions go to ``out``."""
        profile, decodes, cut = self._profile, self._decodes, self._cut
        budget = profile.token_budget - len(decodes.running)
        chunk = 0
        more = decodes.new_blocks()
        if cut is not None:
            chunk = min(cut.need - cut.computed, budget)
            more += profile.blocks(cut.computed + chunk) - profile.blocks(cut.computed)
        short = self.used_blocks + more > profile.kv_blocks
        if short:
            chunk = self._make_room(now, out)
        else:
            self.used_blocks += more
        if chunk:
            self._compute(chunk)
        if not short and not self._stuck and budget > chunk and self._line:
            chunk += self._admit(budget - chunk)
        running = len(decodes.running)
        return profile.step_ps(running, decodes.kv_tokens + running, chunk, len(self.batch))

    def _compute(self, chunk: int) -> None:
        """The cut prompt gets ``chunk`` more tokens computed."""
        cut = self._cut
        assert cut is not None
        cut.computed += chunk
        if cut.computed == cut.need:
            self._completing.append(cut)
            self._cut = None

    def _admit(self, budget: int) -> int:
        """Admit waiting requests within ``budget`` tokens; returns how many of these were given out."""
        profile, line, batch = self._profile, self._line, self.batch
        left = budget
        while left and line:
            request = line.first(batch, len(batch) >= profile.slots)
            if (
                request is None
                or len(self._decodes.running) + len(self._completing) >= profile.max_seqs
                or self.used_blocks + profile.blocks(request.need) > profile.kv_blocks
            ):
                self._stuck = True
                break
            line.take(request)
            request.state = "prefilling"
            if request.adapter is not None:
                self.batch_changed |= request.adapter not in batch
                batch[request.adapter] = batch.get(request.adapter, 0) + 1
            chunk = min(request.need, left)
            left -= chunk
            self.used_blocks += profile.blocks(chunk)
            self._cut = request
            self._compute(chunk)
        return budget - left

    def _make_room(self, now: int, out: list[TwinEvent]) -> int:
        """Too few KV blocks: give out what there is in running order, preempting from the end of it.

        Returns the tokens that the cut prompt may compute.
        """
        profile, decodes = self._profile, self._decodes
        for request in list(decodes.running.values()):
            if request.state != "decoding":
                break
            if not decodes.needs_block(request):
                continue
            while self.used_blocks >= profile.kv_blocks:
                victim = self._cut or decodes.last()
                self._preempt(victim, now, out)
                if victim is request:
                    return 0
            self.used_blocks += 1
        cut = self._cut
        if cut is None:
            return 0
        chunk = min(cut.need - cut.computed, profile.token_budget - len(decodes.running))
        more = profile.blocks(cut.computed + chunk) - profile.blocks(cut.computed)
        if self.used_blocks + more > profile.kv_blocks:
            self._preempt(cut, now, out)
            return 0
        self.used_blocks += more
        return chunk

    def _preempt(self, victim: Request, now: int, out: list[TwinEvent]) -> None:
        if victim is self._cut:
            self._cut = None
        else:
            self._decodes.leave(victim)
        self._leave_batch(victim)
        victim.need = victim.prompt + victim.generated
        victim.computed = 0
        self._line.push_front(victim)
        self.preemptions += 1
        out.append(Preempted(now, victim.id))

    # --- a step ends --------------------------------------------------------------------------------------------------

    def complete(self, end: int, out: list[TwinEvent]) -> list[Request]:
        """The step in flight is over: its tokens go to ``out``. Returns the requests that are over with it."""
        decodes, every_token = self._decodes, self._every_token
        if every_token:
            for request in decodes.running.values():
                if not request.ended:
                    left = request.finish_step - decodes.step
                    out.append(TokenOut(end, request.id, request.output - left, False, left == 0))
        over = decodes.done()
        for request in over:
            if not every_token and not request.ended:
                out.append(TokenOut(end, request.id, request.output, False, True))
            decodes.leave(request)
        if self._completing:
            over += self._first_tokens(end, out)
        for request in over:
            self._release(request)
        return over

    def _first_tokens(self, end: int, out: list[TwinEvent]) -> list[Request]:
        """Prompts that are complete give a token and then decode; returns those that end with it."""
        over = []
        for request in self._completing:
            request.generated += 1
            first, last = request.generated == 1, request.generated == request.output
            if not request.ended and (self._every_token or first or last):
                out.append(TokenOut(end, request.id, request.generated, first, last))
            if last:
                over.append(request)
            else:
                self._decodes.join(request)
        self._completing = []
        return over

    def _release(self, request: Request) -> None:
        request.state = "over"
        self._leave_batch(request)

    def _leave_batch(self, request: Request) -> None:
        """What a running request holds is free again: its KV blocks and its part of its adapter."""
        self.used_blocks -= self._profile.blocks(request.computed)
        self._stuck = False
        adapter = request.adapter
        if adapter is None:
            return
        users = self.batch[adapter] - 1
        if users:
            self.batch[adapter] = users
        else:
            del self.batch[adapter]
            self.batch_changed = True
