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

from collections.abc import Callable, Collection

from loraledger.events import MoveVerb, Tier
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
        self._kv_blocks, self._kv_tokens = profile.kv_blocks, profile.kv_tokens
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
        return prompt + output - 1 > self._kv_tokens

    def rejects(self, adapter: Adapter) -> bool:
        """Whether ``adapter`` is larger than a slot."""
        return 0 < self._profile.slot_bytes < adapter.size

    def tier(self, adapter: Adapter) -> Tier:
        """``gpu``, ``host`` or ``disk``."""
        return self._store.tier(adapter)

    def load(self, adapter: Adapter, now: int, out: list[TwinEvent]) -> int:
        """Disk to host to slot."""
        return self._store.load(adapter, self.batch, self._left, now, out)

    def move(
        self,
        name: str,
        adapter: Adapter | None,
        verb: MoveVerb,
        in_flight: Collection[str],
        now: int,
        out: list[TwinEvent],
    ) -> int | str:
        """As ``loraledger-probe`` does it in vLLM."""
        refused = self._store.refusal(name, adapter, verb, in_flight)
        return refused or self._store.move(name, adapter, verb, self.batch, self._left, now, out)

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
        decodes, line, store = self._decodes, self._line, self._store
        more = decodes.new_blocks()
        chunk, preempted = 0, False
        if self._cut is not None or (line.count and not self._stuck) or self._used + more > self._kv_blocks:
            before = self.preemptions
            chunk = self._schedule(more, now, out)
            preempted = self.preemptions != before
        elif more:  # nobody has a prompt to compute
            self._take(more)
        if self._joined or self._left or store.disturbed:
            now = store.step(self.batch, self._joined, self._left, now, out)
            self.missing = store.missing
            self._joined.clear()
            self._left.clear()
            self._adapters_ps = self._adapters_cost(self.batch)
        running = len(decodes.running)
        intercept, slope = self._costs[running]
        growth = slope * running
        first = intercept + slope * decodes.kv_tokens + growth + self._adapters_ps
        self.steps = 1
        if chunk:
            first += self._profile.prefill_ps(chunk, running)
        elif running and not (self._every_token or preempted) and (self._stuck or not line.count):
            self.growth_ps = growth
            self.steps = decodes.horizon(self._kv_blocks - self._used)
        self.first_ps = first
        return now

    def _ran(self, further: int) -> None:
        self._take(self._decodes.demand(further))

    def _schedule(self, more: int, now: int, out: list[TwinEvent]) -> int:
        """Decide who runs, where decodes need ``more`` blocks; returns the prefill tokens. Preemptions go to ``out``."""
        profile, decodes, cut = self._profile, self._decodes, self._cut
        budget = profile.token_budget - len(decodes.running)
        chunk = 0
        if cut is not None:
            chunk = min(cut.need - cut.computed, budget)
            more += profile.blocks(cut.computed + chunk) - profile.blocks(cut.computed)
        short = self._used + more > self._kv_blocks
        if short:
            chunk = self._make_room(now, out)
        elif more:
            self._take(more)
        if chunk:
            self._compute(chunk)
        if budget > chunk and not short and not self._stuck and self._line.count:
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
        profile, line, batch, cache = self._profile, self._line, self.batch, self._cache
        block_size, slots = profile.block_size, profile.slots
        left, room = budget, profile.max_seqs - len(self._decodes.running) - len(self._completing)
        while left and line.count:
            request = line.first(batch, len(batch) >= slots)
            if request is None or room == 0:
                self._stuck = True
                break
            need = request.need
            if cache is not None and request.prefix:
                self._stuck = not self._reuse(request, cache)
            else:
                self._stuck = self._used - need // -block_size > self._kv_blocks
            if self._stuck:
                break
            room -= 1
            line.take(request)
            self._join_batch(request)
            reused = request.computed
            computed = min(need, reused + left)
            left -= computed - reused
            blocks = -(-computed // block_size) - reused // block_size
            self._used += blocks
            request.computed = computed
            if cache is not None:
                cache.take(blocks)
                cache.publish(request, block_size)
            if computed == need:
                self._completing.append(request)
            else:
                self._cut = request
        return budget - left

    def _reuse(self, request: Request, cache: PrefixCache) -> bool:
        """Whether all of ``request`` fits in free blocks; if so it has what it can reuse."""
        blocks = self._profile.blocks(request.need)
        free = self._kv_blocks - self._used
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
            while self._used >= self._kv_blocks:
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
        if self._used + more > self._kv_blocks:
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
        blocks = -(-request.computed // self._profile.block_size)
        self._used -= blocks if self._cache is None else self._cache.give_back(request, blocks)
        self._stuck = False
