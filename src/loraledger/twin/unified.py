"""One pool for KV and adapters: S-LoRA's router, batch and memory.

Theory of operation (from slora/server/router/{manager,req_queue,abort_req_queue}.py and model_infer/infer_adapter.py). The pool is
``kv_blocks * block_size`` cells, a cell holds one token's keys and values over all layers, and an adapter takes ``4 * rank`` of
them while somebody runs with it. Prefills are steps of their own: a new batch is tried when nothing runs, and else once
``attempt_steps`` decode steps have passed since the last prefill, then before every step. Waiting requests are taken in order up
to the first that does not fit: its prompt within ``prefill_limit`` together with those before it, and, because the output length
is known, its *reservation*: with all requests sorted by what they still have to generate, longest first, the peak ::

    max over k of (remaining_k * k + tokens held by the first k)

must stay below the pool less the cells of all distinct adapters. So nothing is ever preempted. For a running request
``remaining + held`` does not change, hence the peak of those that run is the same at every step, and the sorted list is kept by
the number of the step in which they end.

Adapters are in host memory from their registration on. They are copied one after the other before a prefill that needs them,
which holds everybody up, and leave as soon as a request ends and no other runs with them. With ``prefetch``, in the middle of the
``attempt_steps`` and three steps before their end, the adapters of the requests that are next in line are copied while decoding
goes on, as far as cells are free; a prefill waits for what is still on its way. Prefetched copies make way when KV needs cells.

``early_abort`` gives up, at each attempt, on those that have waited too long, and serves the newest first while the line grows
faster than batches can take from it (two running means, cut to integers as there), else the oldest first.

Not modelled: the 10 ms between two looks at an empty line, clustering by adapters, several ranks of a tensor-parallel group.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from loraledger.events import Tier
from loraledger.twin.events import Activated, Evicted, Loaded, Rejected, TwinEvent
from loraledger.twin.layout import Layout
from loraledger.twin.profile import TwinProfile
from loraledger.twin.requests import Adapter, Request

Claim = tuple[int, int]  # (minus the step in which it ends, tokens held at step 0 if it had been there)


class UnifiedLayout(Layout):
    """S-LoRA. Requests that ``early_abort`` gives up are reported as rejected."""

    weighs_adapters = True

    def __init__(self, profile: TwinProfile, every_token: bool) -> None:
        super().__init__(profile, every_token, 1)
        self._rules = profile.unified
        self._line: deque[tuple[int, Request]] = deque()  # (arrival, request); cancelled ones stay until they are met
        self._waiting = 0
        self._claims: list[Claim] = []
        self._cells = 0  # of the adapters of running requests
        self._resident: dict[Adapter, int] = {}  # on the device, or on the way and there at this time
        self._resident_cells = 0
        self._wanted: dict[Adapter, None] = {}  # by the last prefetch
        self._link_ps = 0  # when the link is free
        self._decoding = False  # in the step in flight
        self._since = 0  # decode steps since the last prefill
        self._prefetch_points = self._rules.attempt_steps // 2, self._rules.attempt_steps - 3
        self._growth, self._last_line, self._mean_batch = 1, 0, 1

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self._decodes.running) or self._waiting > 0 or bool(self._completing)

    @property
    def running(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self._decodes.running) + len(self._completing)

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return self._waiting

    def used_blocks(self, steps: int) -> int:
        """KV blocks that the cells in use would be: those of KV and of adapters."""
        decodes = self._decodes
        tokens = sum(new.computed for new in self._completing)
        if self._decoding:
            tokens = len(decodes.running) * (steps + 1)
        return self._profile.blocks(decodes.kv_tokens + tokens + self._resident_cells)

    def refuses(self, prompt: int, output: int, adapter: Adapter | None) -> bool:
        """Whether a request of these tokens does not fit in an empty pool, or its prompt in no prefill."""
        return prompt + output >= self._profile.kv_tokens - self._size(adapter) or prompt > self._profile.prefill_limit

    def rejects(self, adapter: Adapter) -> bool:
        """Whether ``adapter`` leaves no cell for KV."""
        return self._size(adapter) >= self._profile.kv_tokens

    def tier(self, adapter: Adapter) -> Tier:
        """``gpu`` or ``host``."""
        return "gpu" if adapter in self._resident else "host"

    def load(self, adapter: Adapter, now: int, out: list[TwinEvent]) -> int:
        """Disk to host."""
        took = self._profile.load_ps(adapter.size)
        out.append(Loaded(now + took, adapter.name, took))
        return now + took

    def add(self, at: int, request: Request) -> None:
        """A request joins the line."""
        request.state = "waiting"
        if len(self._line) > 2 * self._waiting + 64:
            self._line = deque(entry for entry in self._line if entry[1].state == "waiting")
        self._line.append((at, request))
        self._waiting += 1

    def drop(self, request: Request, now: int, out: list[TwinEvent]) -> bool:
        """A request is cancelled, between steps. ``False``: it was not here."""
        if request.state == "waiting":
            request.state = "over"
            self._waiting -= 1
            return True
        if request.state != "decoding":
            return False
        self._decodes.leave(request)
        self._release(request)
        self._offload(now, out)
        return True

    def _size(self, adapter: Adapter | None) -> int:
        return 0 if adapter is None else self._profile.cells(adapter.rank, adapter.size)

    # --- a run begins -------------------------------------------------------------------------------------------------

    def begin(self, now: int, out: list[TwinEvent]) -> int:
        """Decide the next run. What it moves and who is given up goes to ``out``."""
        decodes, rules, running = self._decodes, self._rules, len(self._decodes.running)
        if (not running or self._since >= rules.attempt_steps) and running < self._profile.max_seqs:
            admitted = self._attempt(now, out)
            if admitted:
                return self._prefill(admitted, now, out)
            if not running:
                self.steps = 0
                return now
        elif rules.prefetch and self._waiting and self._since in self._prefetch_points:
            self._prefetch(now, out)
        self._make_way(running, now, out)
        intercept, slope = self._costs[running]
        self.first_ps = intercept + slope * (decodes.kv_tokens + running) + self._adapters_cost(self.batch)
        self.growth_ps = slope * running
        self.steps = self._horizon(running)
        self._decoding = True
        return now

    def complete(self, end: int, out: list[TwinEvent]) -> list[Request]:
        """The run in flight is over."""
        if self._completing:
            self._since = 0
            admitted = self._completing
            over = self._first_tokens(end, out)
            for request in admitted:
                if request.state == "decoding":
                    insort(self._claims, (-request.finish_step, request.base))
            for request in over:
                self._release(request)
        else:
            self._decoding = False
            self._pass_attempts()
            self._since += self.steps
            over = super().complete(end, out)
        if over:
            self._offload(end, out)
        return over

    def _horizon(self, running: int) -> int:
        """Steps of the next run: while anybody waits, up to the next attempt or prefetch."""
        if self._every_token:
            return 1
        since, attempt = self._since, self._rules.attempt_steps
        steps = self._decodes.horizon(self._profile.kv_tokens * running)
        if self._waiting:
            stops = [*self._prefetch_points] if self._rules.prefetch else []
            if running < self._profile.max_seqs:
                if since >= attempt:
                    return 1
                stops.append(attempt)
            steps = min([steps, *(stop - since for stop in stops if stop > since)])
        if self._resident_cells > self._cells:
            free = self._profile.kv_tokens - self._resident_cells - self._decodes.kv_tokens
            steps = min(steps, max(1, free // running))
        return steps

    def _prefill(self, admitted: list[Request], now: int, out: list[TwinEvent]) -> int:
        adapters: dict[Adapter, None] = {}
        tokens = 0
        for request in admitted:
            adapter = request.adapter
            if adapter is not None:
                adapters[adapter] = None
                if adapter not in self.batch:
                    self._cells += self._size(adapter)
            self._join_batch(request)
            request.computed = request.need
            tokens += request.need
        self._joined = []
        self._make_way(tokens + sum(self._size(new) for new in adapters if new not in self._resident), now, out)
        for adapter in adapters:
            now = self._bring(adapter, now, out)
        self._completing = admitted
        self.first_ps = self._costs[0][0] + self._adapters_cost(adapters) + self._profile.prefill_ps(tokens, 0)
        self.steps = 1
        return now

    # --- who is admitted ----------------------------------------------------------------------------------------------

    def _attempt(self, now: int, out: list[TwinEvent]) -> list[Request]:
        """Take from the line what fits beside those that run."""
        newest = self._rules.order == "lifo"
        early_abort = self._rules.order == "early_abort"
        if early_abort:
            self._grow()
            self._give_up(now, out)
            newest = self._growth >= self._mean_batch
        claims, cells, admitted = list(self._claims), self._cells, []
        fresh: dict[Adapter, None] = {}
        left = self._profile.prefill_limit
        while (request := self._next(newest)) is not None:
            adapter = request.adapter
            if adapter is not None and adapter not in self.batch and adapter not in fresh:
                fresh[adapter] = None
                cells += self._size(adapter)
            step = self._decodes.step
            insort(claims, (-(step + request.output - 1), request.prompt - step))
            fits = _peak(claims) < self._profile.kv_tokens - cells and len(claims) <= self._profile.max_seqs
            if not fits or request.need > left:
                break
            left -= request.need
            (self._line.pop if newest else self._line.popleft)()
            self._waiting -= 1
            admitted.append(request)
        if admitted and early_abort:
            self._last_line = self._waiting
            self._mean_batch = max(int(0.7 * len(admitted) + 0.3 * self._mean_batch), 1)
        return admitted

    def _next(self, newest: bool) -> Request | None:
        """Who is next in line; cancelled ones before it are dropped."""
        line = self._line
        while line:
            request = line[-1 if newest else 0][1]
            if request.state == "waiting":
                return request
            (line.pop if newest else line.popleft)()
        return None

    def _grow(self) -> bool:
        """The running mean of how much the line grew; ``False``: it stays as it is."""
        before = self._growth
        self._growth = int(0.7 * (self._waiting - self._last_line) + 0.3 * before)
        return self._growth != before

    def _give_up(self, now: int, out: list[TwinEvent]) -> None:
        """Whoever has waited too long is rejected. The line is in order of arrival, so these are its oldest."""
        line, latest = self._line, now + self._rules.abort_margin_ps - self._rules.first_token_slo_ps
        while line and (line[0][1].state != "waiting" or line[0][0] <= latest):
            _, request = line.popleft()
            if request.state == "waiting":
                request.state = "over"
                self._waiting -= 1
                self.given_up.append(request)
                out.append(Rejected(now, request.id, "aborted"))

    def _pass_attempts(self) -> None:
        """The attempts before further steps of the run, which found nobody in line: only the running mean moves."""
        if self._rules.order != "early_abort" or len(self._decodes.running) >= self._profile.max_seqs:
            return
        first = max(self._since + 1, self._rules.attempt_steps)
        for _ in range(self._since + self.steps - first):
            if not self._grow():
                return

    # --- adapters -----------------------------------------------------------------------------------------------------

    def _bring(self, adapter: Adapter, now: int, out: list[TwinEvent]) -> int:
        """``adapter`` is needed; returns when it is on the device."""
        ready = self._resident.get(adapter)
        if ready is not None:
            return max(now, ready)
        took = self._profile.activate_ps(adapter.rank)
        now = self._copy(adapter, max(now, self._link_ps), took)
        out.append(Activated(now, adapter.name, took))
        return now

    def _copy(self, adapter: Adapter, start: int, took: int) -> int:
        self._resident[adapter] = self._link_ps = start + took
        self._resident_cells += self._size(adapter)
        return start + took

    def _prefetch(self, now: int, out: list[TwinEvent]) -> None:
        """Copy what those need that are next in line, as far as cells are free, while the step runs."""
        decodes = self._decodes
        free = self._profile.kv_tokens - decodes.kv_tokens - len(decodes.running) - self._resident_cells
        left = self._profile.prefill_limit
        self._wanted = {}
        newest = self._rules.order != "fifo"
        for _, request in reversed(self._line) if newest else self._line:
            if request.state != "waiting":
                continue
            left -= request.need
            if left < 0:
                return
            adapter = request.adapter
            if adapter is None:
                continue
            if adapter not in self._resident:
                free -= self._size(adapter)
                if free < 0:
                    return
                took = self._profile.activate_ps(adapter.rank)
                self._copy(adapter, max(now, self._link_ps), took)
                out.append(Activated(now, adapter.name, took))
            self._wanted[adapter] = None

    def _offload(self, now: int, out: list[TwinEvent]) -> None:
        """Requests ended: adapters leave that nobody runs with, prefetched ones only with the last request."""
        self._left = []
        if not self._decodes.running:
            self._wanted = {}
        for adapter in [held for held in self._resident if held not in self.batch and held not in self._wanted]:
            self._evict(adapter, now, out)

    def _make_way(self, tokens: int, now: int, out: list[TwinEvent]) -> None:
        """``tokens`` more cells are needed: prefetched adapters that nobody runs with leave, oldest first."""
        limit = self._profile.kv_tokens - tokens - self._decodes.kv_tokens
        if self._resident_cells > limit:
            for adapter in [held for held in self._resident if held not in self.batch]:
                if self._resident_cells <= limit:
                    return
                self._evict(adapter, now, out)

    def _evict(self, adapter: Adapter, now: int, out: list[TwinEvent]) -> None:
        del self._resident[adapter]
        self._resident_cells -= self._size(adapter)
        out.append(Evicted(now, adapter.name, "gpu"))

    def _free(self, request: Request) -> None:
        adapter = request.adapter
        if adapter is not None and self.batch[adapter] == 1:
            self._cells -= self._size(adapter)
        if request.output > 1:
            del self._claims[bisect_left(self._claims, (-request.finish_step, request.base))]


def _peak(claims: list[Claim]) -> int:
    """The most tokens that requests with these claims will hold at once, on S-LoRA's count."""
    peak = held = 0
    for count, (minus_end, base) in enumerate(claims, 1):
        held += base
        here = held + count - minus_end * count
        if here > peak:
            peak = here
    return peak
