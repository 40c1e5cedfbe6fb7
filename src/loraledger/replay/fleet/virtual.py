"""The live kernel on a virtual clock, in front of twins.

Theory of operation. ``VirtualFleet`` is a performer: it hands the conductor's commands to one ``ReplicaTwin`` a replica and feeds
what those do back as events, as the gateway and its engine drivers would. The clock jumps from one happening to the next. At equal
times what engines did comes first, then timers, scrapes, readings of probes, calls that reach an engine, arrivals, then the order
in which things were scheduled: the order is total, so two runs are the same byte for byte.

The kernel does not see the twins. It sees what ``Observation`` lets through: scrapes at an interval and with a delay, outcomes of
its own commands, its requests' boundary, and what a probe tells. Twin time is integer picoseconds, kernel time integer
nanoseconds: an outcome is seen at the first nanosecond that is not before it. The boundary sees when the first and the last token
came and how many there were, so the mean time between tokens; single gaps are not in the twin's events, and stay unknown.

An open loop lets requests arrive when the trace says. A closed one (``clients``) takes the trace for a list of what to ask: at
most so many are open, and the next one arrives when one of them ends.

What a prompt begins with reaches a twin that caches prefixes, if the trace's blocks are as long as the twin's. Moves between tiers
are carried out as the probe does; where the observation has none they fail, as they do live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from heapq import heappop, heappush
from typing import Final

from loraledger import __version__
from loraledger import events as ev
from loraledger.conductor.conductor import Conductor
from loraledger.conductor.fold import Emitted, FoldState, RowFold
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.settings import FleetSettings
from loraledger.record.tables import Row, TableName
from loraledger.replay.fleet.observation import PS_PER_NS, Observation, Probe
from loraledger.replay.fleet.replica import Replica
from loraledger.replay.fleet.saturation import NO_ROOM, Backlog
from loraledger.replay.traces.trace import Request
from loraledger.twin.events import (
    LoadDone,
    LoadFailed,
    MoveDone,
    MoveFailed,
    Rejected,
    TokenOut,
    TwinEvent,
    TwinRequest,
)
from loraledger.twin.profile import TwinProfile
from loraledger.twin.replica import ReplicaTwin

ENGINE, TIMER, SCRAPE, PROBE, CALL = range(5)
"""Who comes first at the same instant. Plain numbers: an ``IntEnum`` takes 0.1 us to compare, ten times a request."""
BEATS: Final = 512
"""Turns of the loop from one ``beat`` to the next: some milliseconds."""

Sink = Callable[[Emitted], None]
Happening = Replica | Callable[[], None] | None
"""The replica that something is due at, or the call that is due; ``None``: the kernel's timer."""


class VirtualFleet:
    """A fleet of twins under one conductor.

    ``profiles``: of each replica, by name. ``start``: the first moment, ns since the epoch. ``sink`` takes what the fold emits;
    without one it is collected in ``rows``, by table. ``block_tokens``: what one number of a request's ``blocks`` stands for.
    ``config_digest`` goes into the rows. ``beat`` is called now and then while the fleet runs.
    """

    def __init__(
        self,
        settings: FleetSettings,
        profiles: Mapping[str, TwinProfile],
        observation: Observation | None = None,
        start: int = 0,
        *,
        sink: Sink | None = None,
        block_tokens: int | None = None,
        config_digest: str = "",
        beat: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings
        self.now = self.start = start
        self.rows: dict[TableName, list[Row]] = {"requests": [], "decisions": [], "residency": [], "samples": []}
        self.backlog = Backlog()
        self.ended: Counter[str] = Counter()
        """Requests that ended, by how: ``ok``, or status and reason."""
        self.observation = observation or Observation()
        self.replicas = {
            spec.name: Replica(spec.name, profiles[spec.name], self.observation, block_tokens)
            for spec in settings.replicas
        }
        self._beat = beat
        self._specs = {spec.name: spec for spec in settings.adapters}
        self._heap: list[tuple[int, int, int, Happening]] = []
        self._sequence = 0
        self._arrived = 0
        self._trace: dict[str, Request] = {}
        self._loads: dict[tuple[str, str], tuple[int, int]] = {}
        self._first_token: dict[str, int] = {}
        self._alarm: int | None = None
        digests = {spec.name: spec.digest for spec in settings.adapters}
        fold = RowFold(FoldState(settings.base, config_digest, __version__, digests=digests))
        self.conductor = Conductor(Fleet(settings), fold, self, lambda: self.now, sink or self._take_rows, self._arm)
        self._feed = self.conductor.feed
        for replica in self.replicas.values():
            self._feed(ev.ReplicaUp(start, replica.name, 1, ()))
            self._push(start + self.observation.scrape_interval, SCRAPE, replica)
            if replica.probe is not None:
                self.begin_probe(replica, replica.probe)

    # --- time ---------------------------------------------------------------------------------------------------------

    def run(self, trace: Iterable[Request], until: int | None = None, *, clients: int | None = None) -> None:
        """Play ``trace`` (in order of time) to its end and until every request has ended, or up to ``until``.

        With ``clients`` the times of the trace mean nothing: see above.
        """
        arrivals = iter(trace)
        base, heap, requests = self.now, self._heap, self.conductor.fleet.state.requests
        coming = next(arrivals, None)
        turns = 0
        while coming is not None or requests:
            turns += 1
            if not turns % BEATS and self._beat is not None:
                self._beat()
            if coming is None:
                at = None
            elif clients is None:
                at = base + coming.at
            else:
                at = self.now if len(requests) < clients else None
            if heap and (at is None or heap[0][0] <= at):
                if until is not None and heap[0][0] > until:
                    return
                self._happen()
            elif coming is not None and at is not None:
                if until is not None and at > until:
                    return
                self.now = max(self.now, at)
                self._arrive(coming)
                coming = next(arrivals, None)
            else:
                return  # requests wait for something that will never happen: the caller sees them as open
        self._hear_of_the_last()

    def at(self, at: int, call: Callable[[], None]) -> None:
        """Have ``call`` called at ``at``, ns, before what arrives then: an operator's act, or a look at the twins."""
        self._push(at, CALL, call)

    def _happen(self) -> None:
        """The next thing in the heap."""
        at, kind, _, replica = heappop(self._heap)
        if at > self.now:
            self.now = at
        if replica is None:
            if self._alarm == at:
                self._alarm = None
                self.conductor.wake()
        elif not isinstance(replica, Replica):
            replica()
        elif kind == ENGINE:
            if replica.watched == at:
                replica.watched = None
                self._follow(replica, self.now * PS_PER_NS)
                self._watch(replica)
        elif kind == SCRAPE:
            self._scrape(replica)
        elif replica.probe is not None and replica.probe.next_reading == at:
            self._read(replica, replica.probe)

    def _hear_of_the_last(self) -> None:
        """Rows of the last answers wait for what the probes tell of them: go on until they have."""
        while self.conductor.fold.state.closing and self._heap:
            self._happen()

    def _push(self, at: int, kind: int, what: Happening) -> None:
        self._sequence += 1
        heappush(self._heap, (at, kind, self._sequence, what))

    def _arm(self, at: int | None) -> None:
        """One alarm at a time: another time replaces it, and what was armed before is void when its turn comes."""
        self._alarm = None if at is None else max(at, self.now)
        if self._alarm is not None:
            self._push(self._alarm, TIMER, None)

    # --- what the kernel wants ----------------------------------------------------------------------------------------

    def perform(self, command: ev.Command) -> None:
        """Carry out one command on the twins."""
        if isinstance(command, ev.Dispatch):
            self._dispatch(command)
            return
        match command:
            case ev.Load():
                self._loads[command.replica, command.engine_name] = (command.id, self.now)
                self._reach(self.observation.load_call, partial(self._register, command))
            case ev.Evict():
                replica = self.replicas[command.replica]
                self._advanced(replica).forget(self.now * PS_PER_NS, command.engine_name)
                self._feed(ev.CommandDone(self.now, command.id, 0))
                self._watch(replica)
            case ev.Move() if self.replicas[command.replica].probe is None:
                self._feed(ev.CommandFailed(self.now, command.id, "no_probe", permanent=True))
            case ev.Move():
                self._loads[command.replica, f"{command.verb} {command.engine_name}"] = (command.id, self.now)
                self._reach(self.observation.load_call, partial(self._move, command))
            case ev.Reject():
                self._over(command.request, command.status, command.code)
            case _:
                pass  # a queued request waits; and a twin needs no second look: it cannot fail between two events

    def _dispatch(self, command: ev.Dispatch) -> None:
        request, replica, now = self._trace[command.request], self.replicas[command.replica], self.now
        prefix: tuple[int, ...] = ()
        if replica.reach and request.blocks:
            prefix = request.blocks[: request.prompt_tokens // replica.reach]
        sent = TwinRequest(
            command.request,
            None if request.adapter is None else command.model,
            request.prompt_tokens,
            request.output_tokens,
            prefix,
        )
        seen = self.observation
        self._reach(seen.boundary + seen.boundary_per_seq * replica.open, partial(self._submit, replica, sent))
        replica.requests += 1
        replica.open += 1
        self._feed(ev.RequestDispatched(now, command.request, command.attempt))

    def _reach(self, delay: int, call: Callable[[], None]) -> None:
        """``call`` reaches an engine in ``delay`` ns."""
        if delay:
            self._push(self.now + delay, CALL, call)
        else:
            call()

    def _submit(self, replica: Replica, request: TwinRequest) -> None:
        if not replica.up:
            return  # it ended on the way
        at = self.now * PS_PER_NS
        self._advanced(replica).submit(at, request)
        if replica.probe is not None:
            replica.probe.sent(at, request)
        self._watch(replica)

    def _register(self, command: ev.Load) -> None:
        spec, replica = self._specs[command.adapter], self.replicas[command.replica]
        if not replica.up:
            return
        replica.sizes[command.engine_name] = spec.bytes
        self._advanced(replica).register(self.now * PS_PER_NS, command.engine_name, spec.bytes, spec.rank)
        self._watch(replica)

    def _move(self, command: ev.Move) -> None:
        replica = self.replicas[command.replica]
        if replica.up:
            self._advanced(replica).move(self.now * PS_PER_NS, command.engine_name, command.verb)
            self._watch(replica)

    # --- what happens -------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        self._arrived += 1
        key, now = f"q{self._arrived}", self.now
        self._trace[key] = request
        self.backlog.arrival(now)
        self._feed(
            ev.RequestArrived(now, key, request.tenant, request.adapter, request.prompt_tokens, None, True, "/trace")
        )

    def _over(self, key: str, status: ev.Status, reason: str | None) -> None:
        """A request ended."""
        if self._trace.pop(key, None) is None:
            return
        backlog = self.backlog
        backlog.open -= 1
        if self._first_token.pop(key, None) is None:
            backlog.waiting -= 1
        if status == "ok":
            backlog.served += 1
        elif reason in NO_ROOM:
            backlog.refused += 1
        self.ended[status if reason is None else f"{status}: {reason}"] += 1

    def _follow(self, replica: Replica, to: int) -> None:
        """Let time pass in a twin up to ``to`` ps, and feed what the boundary sees of it."""
        happened = replica.twin.advance(to)
        if not happened:
            return
        for event in happened:
            if type(event) is TokenOut:
                if event.first:
                    self._first_token[event.id] = -(-event.at // PS_PER_NS)
                    self.backlog.waiting -= 1
                    self._feed(ev.RequestFirstToken(self.now, event.id))
                if event.finished:
                    replica.open -= 1
                    self._finished(event)
            else:
                self._engine_did(replica, event)
        if replica.probe is not None:
            replica.probe.happened(happened)
            self._expect(replica, replica.probe)

    def _finished(self, event: TokenOut) -> None:
        request = self._trace[event.id]
        first, last, tokens = self._first_token[event.id], -(-event.at // PS_PER_NS), event.n_generated
        itl = (last - first) // (tokens - 1) if tokens > 1 else None
        measured = ev.Measured(first, first, last, request.prompt_tokens, tokens, None, itl, None, None, tokens, first)
        self._over(event.id, "ok", None)
        self._feed(ev.RequestFinished(self.now, event.id, "ok", 200, None, measured))

    def _engine_did(self, replica: Replica, event: TwinEvent) -> None:
        """Anything but a token."""
        match event:
            case LoadDone() | MoveDone():
                command, began = self._loads.pop((replica.name, _call_of(event)))
                self._feed(ev.CommandDone(self.now, command, self.now - began))
            case LoadFailed() | MoveFailed():
                command, _ = self._loads.pop((replica.name, _call_of(event)))
                lasting = isinstance(event, LoadFailed) or event.reason == "not_modelled"
                self._feed(ev.CommandFailed(self.now, command, event.reason, permanent=lasting))
            case Rejected():
                # vLLM answers 400 to what can never fit; an engine that gives up on a request has failed it.
                replica.open -= 1
                late = event.reason == "aborted"
                status: ev.Status = "engine_error" if late else "client_error"
                self._over(event.id, status, event.reason)
                code = 503 if late else 400
                self._feed(ev.RequestFinished(self.now, event.id, status, code, event.reason, ev.Measured()))
            case _:
                replica.count(event)

    def _scrape(self, replica: Replica) -> None:
        """Take a scrape, or deliver the one that was taken ``scrape_delay`` ago."""
        now, taken = self.now, replica.scraped
        if not replica.up:
            self._push(now + self.observation.scrape_interval, SCRAPE, replica)
            return
        if taken is not None:
            replica.scraped = None
            self._feed(taken)
            self._push(max(now, taken.scrape_start + self.observation.scrape_interval), SCRAPE, replica)
            return
        self._advanced(replica)
        seen = now + self.observation.scrape_delay
        replica.scraped = replica.sample(now, seen)
        self._feed(ev.ScrapeStarted(now, replica.name))
        self._push(seen, SCRAPE, replica)
        self._watch(replica)

    def begin_probe(self, replica: Replica, probe: Probe) -> None:
        """A first look through ``probe``, and when the next one is due."""
        for event in probe.start(self.now):
            self._feed(event)
        self._expect(replica, probe)

    def _read(self, replica: Replica, probe: Probe) -> None:
        """A reading of a probe, which knows what happened up to now."""
        self._follow(replica, self.now * PS_PER_NS)
        for event in probe.read(self.now):
            self._feed(event)
        probe.next_reading = None
        self._expect(replica, probe)
        self._watch(replica)

    def _expect(self, replica: Replica, probe: Probe) -> None:
        """See to it that the probe is read when it is due."""
        due = probe.due(self.now)
        if probe.next_reading is None or due < probe.next_reading:
            probe.next_reading = due
            self._push(due, PROBE, replica)

    def _advanced(self, replica: Replica) -> ReplicaTwin:
        """The twin of ``replica``, told of every happening before this instant."""
        twin = replica.twin
        upcoming = twin.next_at()
        if upcoming is not None and upcoming < self.now * PS_PER_NS:
            self._follow(replica, self.now * PS_PER_NS)
        return twin

    def _watch(self, replica: Replica) -> None:
        """Look at this twin again when something happens inside; an earlier look that is due later is void."""
        upcoming = replica.twin.next_at()
        if upcoming is None:
            return
        at = max(self.now, -(-upcoming // PS_PER_NS))
        if replica.watched is None or at < replica.watched:
            replica.watched = at
            self._push(at, ENGINE, replica)

    def _take_rows(self, rows: Emitted) -> None:
        for table, row in rows:
            self.rows[table].append(row)


def _call_of(ended: LoadDone | LoadFailed | MoveDone | MoveFailed) -> str:
    """What its command is kept under, beside the replica."""
    return ended.name if isinstance(ended, LoadDone | LoadFailed) else f"{ended.verb} {ended.name}"
