"""The live kernel on a virtual clock, in front of twins.

Theory of operation. ``VirtualFleet`` is a performer: it hands the conductor's commands to one ``ReplicaTwin`` a replica and feeds
what those do back as events, as the gateway and its engine drivers would. The clock jumps from one happening to the next. At equal
times what engines did comes first, then timers, then scrapes, then arrivals (``Priority``), then the order in which things were
scheduled: the order is total, so two runs are the same byte for byte.

The kernel does not see the twins. It sees what ``Observation`` lets through: scrapes at an interval and with a delay, outcomes of
its own commands, and its requests' boundary. Twin time is integer picoseconds, kernel time integer nanoseconds: an outcome is
seen at the first nanosecond that is not before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from heapq import heappop, heappush

import msgspec

from loraledger import events as ev
from loraledger.conductor.conductor import Conductor
from loraledger.conductor.fold import Emitted, FoldState, RowFold
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.settings import MS, SECOND, FleetSettings
from loraledger.record.tables import Row, TableName
from loraledger.twin.events import LoadDone, LoadFailed, Rejected, TokenOut, TwinEvent, TwinRequest
from loraledger.twin.profile import TwinProfile
from loraledger.twin.replica import ReplicaTwin

PS_PER_NS = 1_000


class Priority(IntEnum):
    """Who comes first at the same instant."""

    ENGINE = 0
    TIMER = 1
    SCRAPE = 2
    ARRIVAL = 3


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace. ``at`` in ns from the trace's start; ``adapter`` ``None`` for the base model."""

    at: int
    tenant: str
    adapter: str | None
    prompt_tokens: int
    output_tokens: int


class Observation(msgspec.Struct, frozen=True):
    """What a live gateway would have seen: how often it scrapes, and how old an answer is when it arrives. ns."""

    scrape_interval: int = SECOND
    scrape_delay: int = 5 * MS


class VirtualFleet:
    """A fleet of twins under one conductor. ``rows`` collects what the fold emits, by table."""

    def __init__(
        self,
        settings: FleetSettings,
        profiles: Mapping[str, TwinProfile],
        observation: Observation | None = None,
        start: int = 0,
    ) -> None:
        self.settings = settings
        self.now = start
        self.rows: dict[TableName, list[Row]] = {"requests": [], "decisions": [], "residency": [], "samples": []}
        self._observation = observation or Observation()
        self._twins = {spec.name: ReplicaTwin(profiles[spec.name]) for spec in settings.replicas}
        self._specs = {spec.name: spec for spec in settings.adapters}
        self._heap: list[tuple[int, int, int, str]] = []
        self._sequence = 0
        self._trace: dict[str, TraceRequest] = {}
        self._loads: dict[tuple[str, str], tuple[int, int]] = {}
        self._first_token: dict[str, int] = {}
        self._scrapes: dict[str, ev.ReplicaSampled] = {}
        self._watched: dict[str, int] = {}
        self._alarm: int | None = None
        fold = RowFold(FoldState(settings.base, "", "", digests={a.name: a.digest for a in settings.adapters}))
        self.conductor = Conductor(Fleet(settings), fold, self, lambda: self.now, self._take_rows, self._arm)
        for spec in settings.replicas:
            self.conductor.feed(ev.ReplicaUp(self.now, spec.name, 1, ()))
            self._push(self.now + self._observation.scrape_interval, Priority.SCRAPE, spec.name)

    def run(self, trace: Iterable[TraceRequest], until: int | None = None) -> None:
        """Play ``trace`` (in order of time) to its end and until every request has ended, or up to ``until``."""
        arrivals = iter(trace)
        base = self.now
        coming = self._next_arrival(arrivals, base)
        while coming is not None or self.conductor.fleet.state.requests:
            if self._heap and (coming is None or self._heap[0][:2] < (coming[0], Priority.ARRIVAL)):
                at, priority, _, what = self._heap[0]
                if until is not None and at > until:
                    return
                heappop(self._heap)
                self.now = max(self.now, at)
                self._happen(priority, what)
            elif coming is not None:
                at, request_id, request = coming
                if until is not None and at > until:
                    return
                self.now = max(self.now, at)
                self._arrive(request_id, request)
                coming = self._next_arrival(arrivals, base)
            else:
                return  # requests wait for something that will never happen: the caller sees them as open

    def perform(self, command: ev.Command) -> None:
        """Carry out one command on the twins."""
        match command:
            case ev.Dispatch():
                request = self._trace[command.request]
                adapter = None if request.adapter is None else command.model
                twin = self._advanced(command.replica)
                twin.submit(
                    self.now * PS_PER_NS,
                    TwinRequest(command.request, adapter, request.prompt_tokens, request.output_tokens),
                )
                self.conductor.feed(ev.RequestDispatched(self.now, command.request, command.attempt))
                self._watch(command.replica)
            case ev.Load():
                spec = self._specs[command.adapter]
                self._loads[command.replica, command.engine_name] = (command.id, self.now)
                twin = self._advanced(command.replica)
                twin.register(self.now * PS_PER_NS, command.engine_name, spec.bytes, spec.rank)
                self._watch(command.replica)
            case ev.Evict():
                self._advanced(command.replica).forget(self.now * PS_PER_NS, command.engine_name)
                self.conductor.feed(ev.CommandDone(self.now, command.id, 0))
            case ev.Move():
                self.conductor.feed(ev.CommandFailed(self.now, command.id, "no_probe", permanent=True))
            case ev.Reject():
                self._trace.pop(command.request, None)
            case ev.Queue() | ev.Check():
                pass  # a twin needs no second look: it cannot fail between two events

    def _next_arrival(self, arrivals: Iterator[TraceRequest], base: int) -> tuple[int, str, TraceRequest] | None:
        request = next(arrivals, None)
        if request is None:
            return None
        self._sequence += 1
        return base + request.at, f"q{self._sequence}", request

    def _arrive(self, request_id: str, request: TraceRequest) -> None:
        self._trace[request_id] = request
        self.conductor.feed(
            ev.RequestArrived(
                self.now, request_id, request.tenant, request.adapter, request.prompt_tokens, None, True, "/trace"
            )
        )

    def _happen(self, priority: int, what: str) -> None:
        if priority == Priority.ENGINE:
            if self._watched.get(what) != self.now:
                return
            del self._watched[what]
            for event in self._twins[what].advance(self.now * PS_PER_NS):
                self._engine_did(what, event)
            self._watch(what)
        elif priority == Priority.TIMER:
            if self._alarm == self.now:
                self._alarm = None
                self.conductor.wake()
        else:
            self._scrape(what)

    def _engine_did(self, replica: str, event: TwinEvent) -> None:
        match event:
            case TokenOut():
                at = _ceil_ns(event.at)
                if event.first:
                    self._first_token[event.id] = at
                    self.conductor.feed(ev.RequestFirstToken(self.now, event.id))
                if event.finished:
                    self._finished(event, at)
            case LoadDone():
                command, began = self._loads.pop((replica, event.name))
                self.conductor.feed(ev.CommandDone(self.now, command, self.now - began))
            case LoadFailed():
                command, _ = self._loads.pop((replica, event.name))
                self.conductor.feed(ev.CommandFailed(self.now, command, event.reason, permanent=True))
            case Rejected():
                self._trace.pop(event.id, None)
                self.conductor.feed(
                    ev.RequestFinished(self.now, event.id, "client_error", 400, event.reason, ev.Measured())
                )
            case _:
                pass

    def _finished(self, event: TokenOut, at: int) -> None:
        request = self._trace.pop(event.id)
        first = self._first_token.pop(event.id)
        itl = (at - first) // (event.n_generated - 1) if event.n_generated > 1 else None
        measured = ev.Measured(
            first, first, at, request.prompt_tokens, event.n_generated, None, itl, None, None, event.n_generated
        )
        self.conductor.feed(ev.RequestFinished(self.now, event.id, "ok", 200, None, measured))

    def _scrape(self, replica: str) -> None:
        """Take a scrape, or deliver the one that was taken ``scrape_delay`` ago."""
        taken = self._scrapes.pop(replica, None)
        if taken is not None:
            self.conductor.feed(msgspec.structs.replace(taken, at=self.now))
            self._push(taken.scrape_start + self._observation.scrape_interval, Priority.SCRAPE, replica)
            return
        twin = self._advanced(replica)
        sample = twin.sample(self.now * PS_PER_NS)
        self.conductor.feed(ev.ScrapeStarted(self.now, replica))
        usage = sample.kv_used_blocks / sample.kv_blocks
        self._scrapes[replica] = ev.ReplicaSampled(
            self.now, replica, self.now, sample.running, sample.waiting, usage, twin.profile.kv_tokens, sample.active
        )
        self._push(self.now + self._observation.scrape_delay, Priority.SCRAPE, replica)
        self._watch(replica)

    def _advanced(self, replica: str) -> ReplicaTwin:
        twin = self._twins[replica]
        upcoming = twin.next_at()
        if upcoming is not None and upcoming < self.now * PS_PER_NS:
            for event in twin.advance(self.now * PS_PER_NS):
                self._engine_did(replica, event)
        return twin

    def _watch(self, replica: str) -> None:
        """Look at this twin again when something happens inside; an earlier look that is due later is void."""
        upcoming = self._twins[replica].next_at()
        if upcoming is None:
            return
        at = max(self.now, _ceil_ns(upcoming))
        watched = self._watched.get(replica)
        if watched is None or at < watched:
            self._watched[replica] = at
            self._push(at, Priority.ENGINE, replica)

    def _push(self, at: int, priority: Priority, what: str) -> None:
        self._sequence += 1
        heappush(self._heap, (at, priority, self._sequence, what))

    def _arm(self, at: int | None) -> None:
        """One alarm at a time: another time replaces it, and what was armed before is void when its turn comes."""
        self._alarm = None if at is None else max(at, self.now)
        if self._alarm is not None:
            self._push(self._alarm, Priority.TIMER, "")

    def _take_rows(self, rows: Emitted) -> None:
        for table, row in rows:
            self.rows[table].append(row)


def _ceil_ns(at_ps: int) -> int:
    return -(-at_ps // PS_PER_NS)
