"""The digital twin of one engine replica, stepped by whoever owns the time.

Theory of operation. The engine's core is one loop: take what came in, schedule a batch, run the step, hand out tokens. So does
the twin, one iteration at a time. ``scheduler`` decides the batch; here are time, the calls from outside and the adapters:

- What comes in during a step waits for its end. A ``register`` call then runs before the next step and holds the engine for as
  long as it takes; ``forget`` only forgets a name.
- The adapters of a batch pass through the tiers in the order in which they joined it (the real order is a Python set's, which
  differs from process to process). Each read from disk and each copy into a slot makes the whole step longer, for everyone in
  it. While the batch stays the same its adapters are the youngest of both lists already and nothing moves.

Measured on one core, 20,000 requests over 5,000 adapters at 1 to 30 requests a second: 800,000 to 150,000 steps a second, 8,000
to 48,000 requests a second (load makes a step dearer and a request, which shares its steps, cheaper). With ``every_token`` at 10
requests a second: 213,000 steps a second.

Not modelled: prefix cache, speculative decoding, asynchronous scheduling, priorities, parallel sampling, stop conditions other
than the length that the caller gives.

How to drive it: before a call at a time T, ``advance`` through every ``next_at()`` below T; make all calls of T, then
``advance(T)``; look again at ``next_at()`` after each call. Time never goes back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter

from loraledger.events import Tier
from loraledger.tiers import EngineTiers
from loraledger.twin.events import (
    Activated,
    Died,
    Evicted,
    LoadDone,
    Loaded,
    LoadFailed,
    Rejected,
    TwinEvent,
    TwinRequest,
    TwinSample,
)
from loraledger.twin.profile import TwinProfile
from loraledger.twin.requests import Adapter, Request
from loraledger.twin.scheduler import Scheduler

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
        self._readable = readable
        self._scheduler = Scheduler(profile, every_token)
        self._tiers = EngineTiers(profile.slots, profile.host_entries)
        self._registered: dict[str, Adapter] = {}
        self._generations: dict[str, int] = {}
        self._names: dict[str, str] = {}  # of the keys in the host cache
        self._requests: dict[str, Request] = {}  # open, as the caller sees it
        self._in_flight: dict[str, int] = {}
        self._inbox: deque[tuple[int, Callable[[], None]]] = deque()
        self._out: list[TwinEvent] = []
        self._early: list[TwinEvent] = []  # said at the call itself, out of order with what is in flight
        self._given_ps = 0
        self._now_ps = 0  # the last boundary between steps
        self._end_ps: int | None = None  # when the step or load in flight ends
        self._loading: tuple[Adapter, int] | None = None

    # --- what happens to the engine -----------------------------------------------------------------------------------

    def submit(self, at: int, request: TwinRequest) -> None:
        """A request arrives. Raises ``ValueError`` for an id that is still open or a token count below 1."""
        self._check_time(at)
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"request {request.id}: prompt_tokens and output_tokens must be at least 1")
        if request.id in self._requests:
            raise ValueError(f"request {request.id} is still open: ids must be unique")
        if self.dead:
            self._early.append(Rejected(at, request.id, "engine_dead"))
        elif request.prompt_tokens + request.output_tokens - 1 > self.profile.kv_tokens:
            self._early.append(Rejected(at, request.id, "too_long"))
        else:
            mine = Request(request.id, request.adapter, request.prompt_tokens, request.output_tokens)
            self._requests[mine.id] = mine
            self._inbox.append((at, partial(self._arrive, at, mine)))

    def cancel(self, at: int, request_id: str) -> bool:
        """The caller gives up; no event follows for this request. ``False``: it was not open.

        Its place and its KV blocks are free from the next boundary between steps on.
        """
        self._check_time(at)
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        request.ended = True
        self._inbox.append((at, partial(self._drop, request)))
        return True

    def register(self, at: int, name: str, size: int, rank: int, readable: bool = True) -> None:
        """A load call for ``name``: disk to host to slot. ``size`` in bytes; not ``readable``: no files are there.

        Ends in ``LoadDone`` or ``LoadFailed``; the name can be asked for from ``LoadDone`` on.
        """
        self._check_time(at)
        if self.dead:
            self._early.append(LoadFailed(at, name, "engine_dead"))
        else:
            self._inbox.append((at, partial(self._begin_load, name, size, rank, readable)))

    def forget(self, at: int, name: str) -> None:
        """An unload call: only the name is forgotten. Running requests go on, bytes stay in the tiers until their turn."""
        self._check_time(at)
        self._inbox.append((at, partial(self._unregister, name)))

    # --- what it does -------------------------------------------------------------------------------------------------

    def next_at(self) -> int | None:
        """When something next happens inside if nothing comes in; ``None``: never."""
        if self._early:
            return self._early[0].at
        if self._out:
            return self._out[0].at
        return self._end_ps if self._end_ps is not None else self._next_start()

    def advance(self, to: int) -> list[TwinEvent]:
        """Let time pass up to and including ``to``: what happened, in order of time."""
        self._check_time(to)
        while True:
            end = self._end_ps
            if end is not None:
                if end > to:
                    break
                self._finish(end)
            else:
                start = self._next_start()
                if start is None or start > to:
                    break
                self._begin(start)
        return self._take_out(to)

    def sample(self, at: int) -> TwinSample:
        """What a scrape of the engine's metrics at ``at`` would say. Advance to ``at`` first."""
        self._check_time(at)
        scheduler = self._scheduler
        return TwinSample(
            scheduler.running,
            scheduler.waiting,
            scheduler.used_blocks,
            self.profile.kv_blocks,
            tuple(self._in_flight),
            scheduler.preemptions,
        )

    def tier(self, name: str) -> Tier | None:
        """Where the bytes of a registered adapter are: ``gpu``, ``host`` or ``disk``; ``None`` if the name is unknown."""
        adapter = self._registered.get(name)
        return None if adapter is None else self._tiers.tier(adapter.key)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _check_time(self, at: int) -> None:
        if at < self._given_ps:
            raise ValueError(f"time {at} is before {self._given_ps}, which was given already")
        self._given_ps = at

    def _next_start(self) -> int | None:
        if self._scheduler.busy:
            return self._now_ps
        return max(self._now_ps, self._inbox[0][0]) if self._inbox else None

    def _take_out(self, to: int) -> list[TwinEvent]:
        out = self._out
        if self._early:
            out += self._early
            out.sort(key=_AT)
            self._early = []
        if not out or out[-1].at <= to:
            self._out = []
            return out
        cut = bisect_right(out, to, key=_AT)
        self._out = out[cut:]
        return out[:cut]

    def _begin(self, now: int) -> None:
        """A boundary: what came in takes effect, then a step begins unless a load holds the engine."""
        self._now_ps = now
        inbox = self._inbox
        while inbox and inbox[0][0] <= now:
            inbox.popleft()[1]()
            if self._end_ps is not None:
                return
        scheduler = self._scheduler
        if not scheduler.busy:
            return
        duration = scheduler.schedule(now, self._out)
        if scheduler.batch_changed:
            scheduler.batch_changed = False
            now = self._use_batch(now)
            if self.dead:
                return
        self._end_ps = now + duration

    def _finish(self, end: int) -> None:
        self._now_ps = end
        self._end_ps = None
        if self._loading is not None:
            adapter, took = self._loading
            self._loading = None
            adapter.ready_ps = end
            self._registered[adapter.name] = adapter
            self._out.append(LoadDone(end, adapter.name, took))
            return
        for request in self._scheduler.complete(end, self._out):
            self._land(request)
            if not request.ended:
                request.ended = True
                del self._requests[request.id]

    # --- what came in, at a boundary ----------------------------------------------------------------------------------

    def _arrive(self, at: int, request: Request) -> None:
        if request.ended:
            return
        name = request.adapter_name
        if name is not None:
            adapter = self._registered.get(name)
            if adapter is None or adapter.ready_ps > at:
                del self._requests[request.id]
                self._out.append(Rejected(self._now_ps, request.id, "unknown_adapter"))
                return
            request.adapter = adapter
            self._in_flight[name] = self._in_flight.get(name, 0) + 1
        self._scheduler.add(request)

    def _drop(self, request: Request) -> None:
        if not self.dead and self._scheduler.drop(request):
            self._land(request)

    def _land(self, request: Request) -> None:
        """``request`` no longer keeps its adapter in flight."""
        name = request.adapter_name
        if name is None:
            return
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
            generation = self._generations.get(name, 0) + 1
            self._generations[name] = generation
            adapter = Adapter(name if generation == 1 else f"{name}#{generation}", name, size)
            self._end_ps = self._use(adapter, now)
            self._loading = adapter, self._end_ps - now
            self._scheduler.batch_changed = True  # its adapters are no longer the youngest

    def _unregister(self, name: str) -> None:
        self._registered.pop(name, None)

    # --- adapters -----------------------------------------------------------------------------------------------------

    def _use_batch(self, now: int) -> int:
        """The batch's adapters pass through the tiers; returns when the step itself can start."""
        for adapter in self._scheduler.batch:
            on_disk = self._tiers.tier(adapter.key) == "disk"
            if on_disk and self._readable is not None and not self._readable(adapter.name):
                self._die(now, adapter)
                break
            now = self._use(adapter, now)
        return now

    def _use(self, adapter: Adapter, now: int) -> int:
        """Bring ``adapter`` into a slot from ``now`` on; returns when it is there."""
        moved = self._tiers.use(adapter.key)
        if not moved.activated:
            return now
        out, took = self._out, self.profile.activation_ps
        load = self.profile.load_ps(adapter.size) if moved.loaded else 0
        now += load
        if moved.evicted_slot is not None:
            out.append(Evicted(now, self._names[moved.evicted_slot], "gpu"))
        if moved.evicted_host is not None:
            out.append(Evicted(now, self._names.pop(moved.evicted_host), "host"))
        if moved.loaded:
            self._names[adapter.key] = adapter.name
            out.append(Loaded(now, adapter.name, load))
        out.append(Activated(now + took, adapter.name, took))
        return now + took

    def _die(self, at: int, adapter: Adapter) -> None:
        """Whatever was open is lost."""
        self.dead = True
        self._out.append(Died(at, adapter.name, tuple(self._requests)))
        for request in self._requests.values():
            request.ended = True
        self._requests.clear()
        self._in_flight.clear()
        self._scheduler = Scheduler(self.profile, False)
