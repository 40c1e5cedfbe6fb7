"""The digital twin of one engine replica, stepped by whoever owns the time.

Theory of operation. The engine's core is one loop: take what came in, schedule a batch, run the step, hand out tokens. So does
the twin. A layout (``scheduler``: vLLM's slots; ``unified``: S-LoRA's pool) decides the batch and what has to be loaded for it;
here are time and the calls from outside. What comes in during a step waits for its end. A ``register`` call then runs before
the next step and holds the engine for as long as it takes; ``forget`` only forgets a name.

Steps of which each follows from the one before are one run with one end. What comes in during a run cuts it at the first
boundary between steps that is not before the call and that no ``advance`` has passed yet, which is where a step would have taken
it in: events are the same as if every step were stepped. With ``every_token`` each step is its own run.

Not modelled: speculative decoding, asynchronous scheduling, priorities, parallel sampling, stop conditions other than the length
that the caller gives.

How to drive it: before a call at a time T, ``advance`` through every ``next_at()`` below T; make all calls of T, then
``advance(T)``; look again at ``next_at()`` after each call. Time never goes back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter

from loraledger.events import MoveVerb, Tier
from loraledger.twin.decodes import elapsed, steps_to
from loraledger.twin.events import (
    Died,
    LoadDone,
    LoadFailed,
    MoveDone,
    MoveFailed,
    Rejected,
    TwinEvent,
    TwinRequest,
    TwinSample,
)
from loraledger.twin.layout import Layout
from loraledger.twin.profile import TwinProfile
from loraledger.twin.requests import Adapter, Request
from loraledger.twin.scheduler import SlotsLayout
from loraledger.twin.unified import UnifiedLayout

_AT = attrgetter("at")


class ReplicaTwin:
    """One replica. ``every_token`` reports each token instead of only the first and last one of a request.

    ``readable`` is asked, by name, when a step must read an adapter from disk again; ``False`` ends the engine, as it does in
    vLLM. Without it every adapter is readable.
    """

    def __init__(
        self, profile: TwinProfile, *, every_token: bool = False, readable: Callable[[str], bool] | None = None
    ) -> None:
        self.profile = profile
        self.dead = False
        self._layout: Layout = (
            SlotsLayout(profile, every_token, readable)
            if profile.layout == "slots"
            else UnifiedLayout(profile, every_token)
        )
        self._registered: dict[str, Adapter] = {}
        self._generations: dict[str, int] = {}
        self._requests: dict[str, Request] = {}  # open, as the caller sees it
        self._in_flight: dict[str, int] = {}
        self._inbox: deque[tuple[int, Request | Callable[[], None]]] = deque()  # an arrival, or another call
        self._out: list[TwinEvent] = []
        self._early: list[TwinEvent] = []  # said at the call itself, out of order with what is in flight
        self._given_ps = 0
        self._now_ps = 0  # the last boundary between steps
        self._seen_ps = -1  # up to where steps have begun
        self._start_ps = 0  # when the first step of the run in flight began
        self._end_ps: int | None = None  # when the run or load in flight ends
        self._loading: Callable[[int], None] | None = None  # what the call that holds the engine does at its end

    # --- what happens to the engine -----------------------------------------------------------------------------------

    def submit(self, at: int, request: TwinRequest) -> None:
        """A request arrives. Raises ``ValueError`` for an id that is still open or a token count below 1."""
        if at < self._given_ps:
            self._check_time(at)
        self._given_ps = at
        key, prompt, output = request.id, request.prompt_tokens, request.output_tokens
        if prompt < 1 or output < 1:
            raise ValueError(f"request {key}: prompt_tokens and output_tokens must be at least 1")
        if key in self._requests:
            raise ValueError(f"request {key} is still open: ids must be unique")
        if self.dead:
            self._early.append(Rejected(at, key, "engine_dead"))
        elif self._layout.refuses(prompt, output, None):
            self._early.append(Rejected(at, key, "too_long"))
        else:
            mine = Request(key, request.adapter, prompt, output, prompt)
            if request.prefix:
                mine.prefix = request.prefix
            self._requests[key] = mine
            self._put(at, mine)

    def cancel(self, at: int, request_id: str) -> bool:
        """The caller gives up; no event follows for this request. ``False``: it was not open.

        Its place and its KV blocks are free from the next boundary between steps on.
        """
        self._check_time(at)
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        request.ended = True
        self._put(at, partial(self._drop, request))
        return True

    def register(self, at: int, name: str, size: int, rank: int, readable: bool = True) -> None:
        """A load call for ``name``: disk to host to slot. ``size`` in bytes; not ``readable``: no files are there.

        Ends in ``LoadDone`` or ``LoadFailed``; the name can be asked for from ``LoadDone`` on.
        """
        self._check_time(at)
        if self.dead:
            self._early.append(LoadFailed(at, name, "engine_dead"))
        else:
            self._put(at, partial(self._begin_load, name, size, rank, readable))

    def forget(self, at: int, name: str) -> None:
        """An unload call: only the name is forgotten. Running requests go on, bytes stay in the tiers until their turn."""
        self._check_time(at)
        self._put(at, partial(self._unregister, name))

    def move(self, at: int, name: str, verb: MoveVerb) -> None:
        """A command of the probe inside: into a slot, out of both tiers, pinned, unpinned.

        Ends in ``MoveDone`` or ``MoveFailed``.
        """
        self._check_time(at)
        if self.dead:
            self._early.append(MoveFailed(at, name, verb, "engine_unavailable"))
        else:
            self._put(at, partial(self._begin_move, name, verb))

    # --- what it does -------------------------------------------------------------------------------------------------

    def next_at(self) -> int | None:
        """When to look again if nothing comes in: something ends or begins then; ``None``: never.

        What moves at the beginning of a step or in a load call is told with its end at the latest: to look at each movement too
        would be 1.3 looks a request more where every other request misses the slots.
        """
        if self._early:
            return self._early[0].at
        if self._end_ps is not None:
            return self._end_ps
        return self._out[0].at if self._out else self._next_start()

    def advance(self, to: int) -> list[TwinEvent]:
        """Let time pass up to and including ``to``: what happened, in order of time."""
        if to < self._given_ps:
            self._check_time(to)
        self._given_ps = to
        while True:
            at = self._end_ps
            if at is None:
                at = self._next_start()
            if at is None or at > to:
                break
            self._pass(at)
        self._seen_ps = to
        out = self._out
        if self._early or (out and out[-1].at > to):
            return self._take_out(to)
        self._out = []
        return out

    def sample(self, at: int) -> TwinSample:
        """What a scrape of the engine's metrics at ``at`` would say. Advance to ``at`` first."""
        self._check_time(at)
        if self.dead:
            return TwinSample(0, 0, 0, self.profile.kv_blocks, (), 0)
        layout = self._layout
        return TwinSample(
            layout.running,
            layout.waiting,
            layout.used_blocks(self._steps_done(at)),
            self.profile.kv_blocks,
            tuple(self._in_flight),
            layout.preemptions,
        )

    def _steps_done(self, at: int) -> int:
        """How many steps of the run in flight are over at ``at``, before its end."""
        layout, time = self._layout, at - self._start_ps
        if self._end_ps is None or self._loading is not None or layout.steps == 1 or time < layout.first_ps:
            return 0
        steps = steps_to(time, layout.first_ps, layout.growth_ps)
        over = elapsed(steps, layout.first_ps, layout.growth_ps) <= time
        return min(steps - (not over), layout.steps - 1)

    def tier(self, name: str) -> Tier | None:
        """Where the bytes of a registered adapter are: ``gpu``, ``host`` or ``disk``; ``None`` if the name is unknown."""
        adapter = self._registered.get(name)
        return None if adapter is None else self._layout.tier(adapter)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _check_time(self, at: int) -> None:
        if at < self._given_ps:
            raise ValueError(f"time {at} is before {self._given_ps}, which was given already")
        self._given_ps = at

    def _next_start(self) -> int | None:
        if self._layout.busy and not self.dead:
            return self._now_ps
        return max(self._now_ps, self._inbox[0][0]) if self._inbox else None

    def _take_out(self, to: int) -> list[TwinEvent]:
        out = self._out
        if self._early:
            out += self._early
            out.sort(key=_AT)
            self._early = []
        cut = bisect_right(out, to, key=_AT)
        self._out = out[cut:]
        return out[:cut]

    def _pass(self, now: int) -> None:
        """A boundary: what was in flight is over, what came in takes effect, a step begins unless a load holds the engine."""
        layout, inbox = self._layout, self._inbox
        self._now_ps = now
        if self._end_ps is not None:
            self._end_ps = None
            loading, self._loading = self._loading, None
            if loading is not None:
                loading(now)
            else:
                for request in layout.complete(now, self._out):
                    self._over(request)
        while inbox and inbox[0][0] <= now:
            at, call = inbox.popleft()
            if isinstance(call, Request):
                self._arrive(at, call)
                continue
            call()
            if self._end_ps is not None:
                return
        if not layout.busy or self.dead:
            return
        start = layout.begin(now, self._out)
        if layout.given_up:
            for request in layout.given_up:
                self._over(request)
            layout.given_up.clear()
        steps = layout.steps
        if layout.missing is not None:
            self._die(start, layout.missing)
        elif steps:
            self._start_ps = start
            if steps == 1:
                self._end_ps = start + layout.first_ps
            else:
                self._end_ps = start + elapsed(steps, layout.first_ps, layout.growth_ps)
                if inbox:
                    self._cut(inbox[0][0])

    def _put(self, at: int, call: Request | Callable[[], None]) -> None:
        """``call`` takes effect at the next boundary between steps that is not before ``at``."""
        self._inbox.append((at, call))
        end = self._end_ps
        if end is not None and end > at and self._layout.steps > 1 and self._loading is None:
            self._cut(at)

    def _cut(self, at: int) -> None:
        """The run in flight ends at its first boundary that is not before ``at`` and has not been passed yet."""
        layout, start = self._layout, self._start_ps
        first, growth = layout.first_ps, layout.growth_ps
        steps = steps_to((at if at > self._seen_ps else self._seen_ps + 1) - start, first, growth)
        if steps < layout.steps:
            layout.steps = steps
            self._end_ps = start + elapsed(steps, first, growth)

    def _loaded(self, adapter: Adapter, took: int, end: int) -> None:
        adapter.ready_ps = end
        self._registered[adapter.name] = adapter
        self._out.append(LoadDone(end, adapter.name, took))

    def _over(self, request: Request) -> None:
        if request.adapter_name is not None:
            self._land(request.adapter_name)
        if not request.ended:
            request.ended = True
            del self._requests[request.id]

    # --- what came in, at a boundary ----------------------------------------------------------------------------------

    def _arrive(self, at: int, request: Request) -> None:
        if request.ended:
            return
        name = request.adapter_name
        if name is not None:
            adapter, in_flight = self._registered.get(name), self._in_flight
            if adapter is None or adapter.ready_ps > at:
                del self._requests[request.id]
                self._out.append(Rejected(self._now_ps, request.id, "unknown_adapter"))
                return
            layout = self._layout
            if layout.weighs_adapters and layout.refuses(request.prompt, request.output, adapter):
                del self._requests[request.id]
                self._out.append(Rejected(self._now_ps, request.id, "too_long"))
                return
            request.adapter = adapter
            in_flight[name] = in_flight.get(name, 0) + 1
        self._layout.add(at, request)

    def _drop(self, request: Request) -> None:
        if not self.dead and self._layout.drop(request, self._now_ps, self._out) and request.adapter_name is not None:
            self._land(request.adapter_name)

    def _land(self, name: str) -> None:
        """One request less keeps this adapter in flight."""
        users = self._in_flight[name] - 1
        if users:
            self._in_flight[name] = users
        else:
            del self._in_flight[name]

    def _begin_load(self, name: str, size: int, rank: int, readable: bool) -> None:
        now = self._now_ps
        if self.dead:
            self._out.append(LoadFailed(now, name, "engine_dead"))
        elif name in self._registered:
            self._out.append(LoadFailed(now, name, "already_registered"))
        elif not readable:
            self._out.append(LoadFailed(now, name, "unreadable"))
        elif rank > self.profile.max_rank:
            self._out.append(LoadFailed(now, name, "rank_too_high"))
        else:
            self._load(name, size, rank)

    def _load(self, name: str, size: int, rank: int) -> None:
        generation = self._generations.get(name, 0) + 1
        adapter = Adapter(name if generation == 1 else f"{name}#{generation}", name, size, rank)
        if self._layout.rejects(adapter):
            self._out.append(LoadFailed(self._now_ps, name, "too_large"))
            return
        self._generations[name] = generation
        self._end_ps = self._layout.load(adapter, self._now_ps, self._out)
        self._loading = partial(self._loaded, adapter, self._end_ps - self._now_ps)

    def _begin_move(self, name: str, verb: MoveVerb) -> None:
        now = self._now_ps
        if self.dead:
            self._out.append(MoveFailed(now, name, verb, "engine_unavailable"))
            return
        end = self._layout.move(name, self._registered.get(name), verb, self._in_flight, now, self._out)
        if isinstance(end, str):
            self._out.append(MoveFailed(now, name, verb, end))
        elif end == now:
            self._out.append(MoveDone(now, name, verb, 0))
        else:
            self._end_ps, self._loading = end, partial(self._moved, name, verb, end - now)

    def _moved(self, name: str, verb: MoveVerb, took: int, end: int) -> None:
        self._out.append(MoveDone(end, name, verb, took))

    def _unregister(self, name: str) -> None:
        self._registered.pop(name, None)

    def _die(self, at: int, adapter: Adapter) -> None:
        """Whatever was open is lost."""
        self.dead = True
        self._out.append(Died(at, adapter.name, tuple(self._requests)))
        for request in self._requests.values():
            request.ended = True
        self._requests.clear()
        self._in_flight.clear()
