"""Which requests run in a step: vLLM 0.32's V1 scheduler with its slots.

Theory of operation. Running requests come first, in the order in which they joined, then waiting ones, first come, first
served, until the token budget is spent. The last prompt may be cut (chunked prefill): there is at most one such, it is the last
of the running, and it got all that was left of the budget. Since ``max_seqs`` never exceeds the budget, a sequence that decodes
always gets its token.

A request is admitted only when its whole prompt fits in free KV blocks (``scheduler_reserve_full_isl``, on by default), but
takes blocks as it computes. When a running request needs a block and none is free, the request that joined last loses all of
its blocks, goes to the front of the line and computes everything again; nothing is admitted in such a step. A request that fits
in an empty cache always ends, because the one that joined first is never the victim of another.

Distinct adapters in one step are at most ``slots``; a request that would exceed them is skipped and may be overtaken for ever.

Steps are a run while no prompt is computed and nobody who waits could join: until a sequence ends or KV blocks run out.
"""

from __future__ import annotations

from collections.abc import Callable

from loraledger.events import Tier
from loraledger.twin.events import Preempted, TwinEvent
from loraledger.twin.layout import Layout
from loraledger.twin.prefix import PrefixCache
from loraledger.twin.profile import TwinProfile
from loraledger.twin.requests import Adapter, Request, WaitingLine
from loraledger.twin.slots import SlotStore


class SlotsLayout(Layout):
    """vLLM: KV blocks, and adapters in slots that were paid for before them.

    ``readable`` is asked, by name, when a step must read an adapter from disk again.
    """

    def __init__(self, profile: TwinProfile, every_token: bool, readable: Callable[[str], bool] | None) -> None:
        super().__init__(profile, every_token, profile.block_size)
        self._line = WaitingLine()
        self._store = SlotStore(profile, readable)
        self._cut: Request | None = None  # the prompt that is computed in part
        self._stuck = False  # nothing more could be admitted, and nothing has changed since
        self._used = 0
        self._adapters_ps = 0
        ratio = (profile.prefix_block_tokens or profile.block_size) // profile.block_size
        self._cache = PrefixCache(profile.kv_blocks, ratio) if profile.prefix_caching else None

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self._decodes.running) or self._cut is not None or self._line.count > 0 or bool(self._completing)

    @property
    def running(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self._decodes.running) + len(self._completing) + (self._cut is not None)

    @property
    def waiting(self) -> int:
        """Requests in line, preempted ones included."""
        return self._line.count

    def used_blocks(self, steps: int) -> int:
        """KV blocks in use ``steps`` steps after the first one of the run."""
        return self._used + (self._decodes.demand(steps) if steps else 0)

    def refuses(self, prompt: int, output: int, adapter: Adapter | None) -> bool:
        """Whether a request of these tokens has more of them than there is KV for."""
        return prompt + output - 1 > self._profile.kv_tokens

    def rejects(self, adapter: Adapter) -> bool:
        """Whether ``adapter`` is larger than a slot."""
        return 0 < self._profile.slot_bytes < adapter.size

    def tier(self, adapter: Adapter) -> Tier:
        """``gpu``, ``host`` or ``disk``."""
        return self._store.tier(adapter)

    def load(self, adapter: Adapter, now: int, out: list[TwinEvent]) -> int:
        """Disk to host to slot."""
        return self._store.load(adapter, self.batch, self._left, now, out)

    def add(self, at: int, request: Request) -> None:
        """A request joins the line."""
        self._line.push(request)
        self._stuck = False

    def drop(self, request: Request, now: int, out: list[TwinEvent]) -> bool:
        """A request is cancelled at ``now``, between steps. ``False``: it was not here."""
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

    # --- a run begins -------------------------------------------------------------------------------------------------

    def begin(self, now: int, out: list[TwinEvent]) -> int:
        """Decide the next run. Preemptions and what its first step moves go to ``out``."""
        preemptions, decodes = self.preemptions, self._decodes
        closed = self._cut is None and (self._stuck or not self._line.count)  # nobody has a prompt to compute
        more = decodes.new_blocks() if closed else 0
        if closed and self._used + more <= self._profile.kv_blocks:
            chunk = 0
            self._take(more)
        else:
            chunk = self._schedule(now, out)
        if self._joined or self._left or self._store.disturbed:
            now = self._store.step(self.batch, self._joined, self._left, now, out)
            self.missing = self._store.missing
            self._joined, self._left = [], []
            self._adapters_ps = self._adapters_cost(self.batch)
        running = len(decodes.running)
        intercept, slope = self._costs[running]
        self.first_ps = intercept + slope * (decodes.kv_tokens + running) + self._adapters_ps
        self.steps = 1
        if chunk:
            self.first_ps += self._profile.prefill_ps(chunk, running)
        elif (
            running
            and not self._every_token
            and self.preemptions == preemptions
            and (self._stuck or not self._line.count)
        ):
            self.growth_ps = slope * running
            self.steps = decodes.horizon(self._profile.kv_blocks - self._used)
        return now

    def complete(self, end: int, out: list[TwinEvent]) -> list[Request]:
        """The run in flight is over."""
        further = self.steps - 1
        if further:
            self._take(self._decodes.demand(further))
            self._decodes.skip(further)
        return super().complete(end, out)

    def _schedule(self, now: int, out: list[TwinEvent]) -> int:
        """Decide who runs; returns the prefill tokens. Preemptions go to ``out``."""
        profile, decodes, cut = self._profile, self._decodes, self._cut
        budget = profile.token_budget - len(decodes.running)
        chunk = 0
        more = decodes.new_blocks()
        if cut is not None:
            chunk = min(cut.need - cut.computed, budget)
            more += profile.blocks(cut.computed + chunk) - profile.blocks(cut.computed)
        short = self._used + more > profile.kv_blocks
        if short:
            chunk = self._make_room(now, out)
        elif more:
            self._take(more)
        if chunk:
            self._compute(chunk)
        if not short and not self._stuck and budget > chunk and self._line.count:
            chunk += self._admit(budget - chunk)
        return chunk

    def _take(self, blocks: int) -> None:
        self._used += blocks
        if self._cache is not None:
            self._cache.take(blocks)

    def _compute(self, chunk: int) -> None:
        """The cut prompt gets ``chunk`` more tokens computed."""
        cut = self._cut
        assert cut is not None
        cut.computed += chunk
        if self._cache is not None:
            self._cache.publish(cut, self._profile.block_size)
        if cut.computed == cut.need:
            self._completing.append(cut)
            self._cut = None

    def _admit(self, budget: int) -> int:
        """Admit waiting requests within ``budget`` tokens; returns how many of these were given out."""
        profile, line, batch = self._profile, self._line, self.batch
        left, room = budget, profile.max_seqs - len(self._decodes.running) - len(self._completing)
        while left and line.count:
            request = line.first(batch, len(batch) >= profile.slots)
            if request is None or room == 0 or not self._fits(request):
                self._stuck = True
                break
            room -= 1
            line.take(request)
            self._join_batch(request)
            chunk = min(request.need - request.computed, left)
            left -= chunk
            reused = request.computed // profile.block_size
            self._take(profile.blocks(request.computed + chunk) - reused)
            self._cut = request
            self._compute(chunk)
        return budget - left

    def _fits(self, request: Request) -> bool:
        """Whether all of ``request`` fits in free blocks; if so it has what it can reuse."""
        blocks, cache = self._profile.blocks(request.need), self._cache
        free = self._profile.kv_blocks - self._used
        if cache is None or not request.prefix:
            return blocks <= free
        found, idle = cache.find(request, self._profile.block_size)
        if blocks - len(found) + idle > free:
            return False
        cache.reuse(request, found)
        self._used += idle
        request.computed = len(found) * self._profile.block_size
        return True

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
            while self._used >= profile.kv_blocks:
                victim = self._cut or decodes.last()
                self._preempt(victim, now, out)
                if victim is request:
                    return 0
            self._take(1)
        cut = self._cut
        if cut is None:
            return 0
        chunk = min(cut.need - cut.computed, profile.token_budget - len(decodes.running))
        more = profile.blocks(cut.computed + chunk) - profile.blocks(cut.computed)
        if self._used + more > profile.kv_blocks:
            self._preempt(cut, now, out)
            return 0
        self._take(more)
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

    def _free(self, request: Request) -> None:
        blocks = self._profile.blocks(request.computed)
        self._used -= blocks if self._cache is None else self._cache.give_back(request, blocks)
        self._stuck = False
