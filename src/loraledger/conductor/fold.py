"""From events, commands and changes to rows: the only place where a request's row comes into being.

Theory of operation. ``RowFold`` takes the same three streams that the journal holds, in order, and emits a row as soon as
nothing more will be known of it. It runs beside the kernel while the gateway serves, and again over a journal when that is
compacted or read after a crash: one code, so a row cannot depend on which way it came. Its own state (open rows, loads under
way, believed slots) is plain data and part of each snapshot, so that a segment can be folded alone.

``GatewayStarted`` closes what an earlier process left open as ``gateway_crashed``.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from loraledger import events as ev
from loraledger.conductor.rows import (
    Closed,
    OpenRow,
    ReplicaView,
    Tried,
    add_steps,
    request_columns,
    sample_row,
    tried_on,
)
from loraledger.record.tables import Row, TableName
from loraledger.units import NS_PER_S

Emitted = list[tuple[TableName, Row]]
ENGINE_WAIT = 3 * NS_PER_S
"""How long a finished row waits for what the engine's probe tells of it: a probe is read each 50 to 100 ms."""


class FoldState(msgspec.Struct):
    """Everything that the fold carries from one frame to the next."""

    base: str
    config_digest: str
    gateway_version: str
    open: dict[str, OpenRow] = {}
    loads: dict[int, tuple[str, str, int]] = {}
    """Command id to (replica, adapter, start)."""
    load_starts: dict[str, int] = {}
    """``replica adapter`` to the start of the load in hand."""
    digests: dict[str, str] = {}
    replicas: dict[str, ReplicaView] = {}
    closing: dict[str, Closed] = {}
    """Ended, the longest ago first."""
    rollouts: dict[str, Tried] = {}
    """By change: those that are being tried, without what was accepted."""


class RowFold:
    """Folds steps into rows. ``digests``: content digest of each adapter in the catalog at the start."""

    def __init__(self, state: FoldState) -> None:
        self.state = state
        self._waiting: dict[tuple[str, str | None], list[str]] = {}  # requests by the (replica, adapter) they wait for
        for row in state.open.values():
            if row.load_on is not None and row.load_end is None:
                self._waiting.setdefault((row.load_on, row.adapter), []).append(row.id)
        self._handlers: dict[type, Callable[..., None]] = {
            ev.RequestArrived: self._arrived,
            ev.RequestDispatched: self._dispatched,
            ev.RequestFirstToken: self._first_token,
            ev.RequestFinished: self._finished,
            ev.RequestCancelled: self._cancelled,
            ev.AttemptFailed: self._attempt_failed,
            ev.AdapterDeclared: self._declared,
            ev.GatewayStarted: self._gateway_started,
            **dict.fromkeys((ev.RolloutSet, ev.RolloutEnded), self._rollout),
            **dict.fromkeys((ev.CommandDone, ev.CommandFailed), self._load_ended),
            **dict.fromkeys((ev.ReplicaUp, ev.ReplicaDown, ev.ScrapeStarted, ev.ReplicaSampled), self._replica),
            **dict.fromkeys((ev.TiersObserved, ev.StepsObserved, ev.ProbeLost, ev.EngineFinished), self._probed),
        }

    def step(self, event: ev.Event, commands: list[ev.Command], changes: list[ev.ResidencyChange]) -> Emitted:
        """Take in one step of the kernel; returns the rows that are complete now."""
        out: Emitted = []
        at = event.at
        if self.state.closing:
            self._expire(at, out)
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event, out)
        for change in changes:
            out.append(("residency", self._residency(at, change)))
        for command in commands:
            self._command(at, command, out)
        return out

    def close_open(self) -> Emitted:
        """Rows of all open requests, as left by a process that is gone."""
        rows: Emitted = [("requests", self._closed(closed)) for closed in self.state.closing.values()]
        rows += [
            ("requests", self._row(row, ev.Measured(), "gateway_crashed", None, "the gateway stopped", None))
            for row in self.state.open.values()
        ]
        self.state.closing.clear()
        self.state.open.clear()
        self._waiting.clear()
        return rows

    def open_rows(self) -> Emitted:
        """Rows of the requests that are open now, their ``status`` null; and of those that ended and wait for a probe."""
        ended: Emitted = [("requests", self._closed(closed)) for closed in self.state.closing.values()]
        return ended + [
            ("requests", self._row(row, ev.Measured(), None, None, None, None)) for row in self.state.open.values()
        ]

    # --- events -------------------------------------------------------------------------------------------------------

    def _arrived(self, event: ev.RequestArrived, out: Emitted) -> None:
        arrived = event.at if event.received is None else event.received
        self.state.open[event.request] = OpenRow(
            event.request,
            event.client_id,
            event.tenant,
            event.adapter,
            arrived,
            event.stream,
            event.path,
            event.prompt_tokens,
            digest=self._digest(event.adapter),
            change=tried_on(self.state.rollouts, "tenant", event.tenant),
        )

    def _dispatched(self, event: ev.RequestDispatched, out: Emitted) -> None:
        row = self.state.open.get(event.request)
        if row is not None and row.attempt == event.attempt:
            row.dispatched = event.at

    def _finished(self, event: ev.RequestFinished, out: Emitted) -> None:
        self._close(event.at, event.request, event.measured, event.status, event.http_status, event.reason, out)

    def _cancelled(self, event: ev.RequestCancelled, out: Emitted) -> None:
        self._close(event.at, event.request, event.measured, "client_gone", None, "client_gone", out)

    def _first_token(self, event: ev.RequestFirstToken, out: Emitted) -> None:
        if (row := self.state.open.get(event.request)) is not None:
            row.first_token = event.at

    def _attempt_failed(self, event: ev.AttemptFailed, out: Emitted) -> None:
        row = self.state.open.get(event.request)
        if row is not None and row.attempt == event.attempt:
            self._leave(row)

    def _declared(self, event: ev.AdapterDeclared, out: Emitted) -> None:
        self.state.digests[event.adapter.name] = event.adapter.digest

    def _gateway_started(self, event: ev.GatewayStarted, out: Emitted) -> None:
        out.extend(self.close_open())
        self.state.config_digest, self.state.gateway_version = event.config_digest, event.version
        self.state.loads.clear()
        self.state.load_starts.clear()
        for view in self.state.replicas.values():
            view.in_flight = view.at_mark = 0
            view.probed = False

    def _rollout(self, event: ev.RolloutSet | ev.RolloutEnded, out: Emitted) -> None:
        if isinstance(event, ev.RolloutSet) and event.members is not None:
            self.state.rollouts[event.change] = Tried(event.unit, dict.fromkeys(event.members))
        else:
            self.state.rollouts.pop(event.change, None)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _command(self, at: int, command: ev.Command, out: Emitted) -> None:
        state = self.state
        match command:
            case ev.Dispatch():
                row = state.open[command.request]
                self._unqueue(row, at)
                self._decided(at, row, command.decision, out)
                row.replica, row.attempt, row.dispatched = command.replica, command.attempt, at
                row.engine = None  # of an attempt that failed
                row.replica_change = tried_on(state.rollouts, "replica", command.replica)
                row.digest = self._digest(row.adapter)
                state.replicas.setdefault(command.replica, ReplicaView()).in_flight += 1
            case ev.Queue():
                row = state.open[command.request]
                if command.reason == "loading" and command.decision is not None:
                    self._unqueue(row, at)
                    self._decided(at, row, command.decision, out)
                    row.load_on = command.decision.replica
                    row.load_start = state.load_starts.get(f"{row.load_on} {row.adapter}", at)
                    row.load_end = None
                    self._waiting.setdefault((row.load_on, row.adapter), []).append(row.id)
                elif row.queue_since is None:
                    row.queue_since = at
            case ev.Reject():
                self._close(at, command.request, ev.Measured(), command.status, command.http_status, command.code, out)
            case ev.Load():
                state.loads[command.id] = (command.replica, command.adapter, at)
                state.load_starts[f"{command.replica} {command.adapter}"] = at
            case _:
                pass

    def _decided(self, at: int, row: OpenRow, decision: ev.Decision, out: Emitted) -> None:
        if row.decision is not None and row.decision.id == decision.id:
            return
        row.decision = decision
        out.append(("decisions", decision_row(at, row.id, row.adapter, decision)))

    def _unqueue(self, row: OpenRow, at: int) -> None:
        if row.queue_since is not None:
            row.queued = (row.queued or 0) + at - row.queue_since
            row.queue_since = None

    def _digest(self, adapter: str | None, engine_name: str = "") -> str | None:
        """Content digest of an adapter's present files; ``None`` if ``engine_name`` is of others."""
        digest = self.state.digests.get(adapter) if adapter is not None else None
        return digest if digest is None or not engine_name or f"@{digest[:12]}" in engine_name else None

    def _leave(self, row: OpenRow) -> None:
        if row.replica is not None:
            self.state.replicas[row.replica].in_flight -= 1
            row.replica = None

    def _load_ended(self, event: ev.CommandDone | ev.CommandFailed, out: Emitted) -> None:
        found = self.state.loads.pop(event.command, None)
        if found is None:
            return
        replica, adapter, start = found
        self.state.load_starts.pop(f"{replica} {adapter}", None)
        for request in self._waiting.pop((replica, adapter), ()):
            row = self.state.open.get(request)
            if row is not None and row.load_on == replica and row.load_end is None:
                row.load_start, row.load_end = start, event.at

    def _close(
        self,
        at: int,
        request: str,
        measured: ev.Measured,
        status: ev.Status,
        http_status: int | None,
        reason: str | None,
        out: Emitted,
    ) -> None:
        row = self.state.open.pop(request, None)
        if row is None:
            return
        self._unqueue(row, at)
        replica = row.replica
        self._leave(row)
        row.replica = replica
        closed = Closed(row, measured, status, http_status, reason, at)
        probed = replica is not None and self.state.replicas[replica].probed
        if probed and status == "ok" and row.engine is None:
            self.state.closing[request] = closed
        else:
            out.append(("requests", self._closed(closed)))

    def _closed(self, closed: Closed) -> Row:
        return self._row(closed.row, closed.measured, closed.status, closed.http_status, closed.reason, closed.finished)

    def _expire(self, at: int, out: Emitted, replica: str | None = None) -> None:
        """Rows that waited long enough; with ``replica`` all of its rows, because its probe will tell no more."""
        for request, closed in list(self.state.closing.items()):
            if closed.row.replica == replica or at - closed.finished >= ENGINE_WAIT:
                del self.state.closing[request]
                out.append(("requests", self._closed(closed)))
            elif replica is None:
                return

    def _probed(
        self, event: ev.TiersObserved | ev.StepsObserved | ev.ProbeLost | ev.EngineFinished, out: Emitted
    ) -> None:
        view = self.state.replicas.setdefault(event.replica, ReplicaView())
        match event:
            case ev.TiersObserved():
                view.probed = True
                view.slots = dict.fromkeys(event.active)
            case ev.StepsObserved():
                add_steps(view, event)
            case ev.ProbeLost():
                view.probed = False
                self._expire(event.at, out, event.replica)
            case ev.EngineFinished():
                closed = self.state.closing.get(event.request)
                row = self.state.open.get(event.request) if closed is None else closed.row
                if row is None or row.replica != event.replica:
                    return  # of an attempt that was given up
                row.engine = event
                if closed is not None:
                    del self.state.closing[event.request]
                    out.append(("requests", self._closed(closed)))

    def _row(
        self,
        row: OpenRow,
        measured: ev.Measured,
        status: ev.Status | None,
        http_status: int | None,
        reason: str | None,
        finished: int | None,
    ) -> Row:
        decision = row.decision
        replica = row.replica or (decision.replica if decision is not None else None)
        view = self.state.replicas.get(replica) if replica is not None else None
        return {
            **request_columns(row, measured),
            "base": self.state.base,
            "replica": replica,
            "finished_ns": finished,
            "status": status,
            "http_status": http_status,
            "reason": reason,
            "engine_version": view.version if view is not None else None,
            "config_digest": self.state.config_digest,
            "gateway_version": self.state.gateway_version,
        }

    def _residency(self, at: int, change: ev.ResidencyChange) -> Row:
        view = self.state.replicas.setdefault(change.replica, ReplicaView())
        if change.tier_after == "gpu":
            view.slots[change.engine_name] = None
        elif change.tier_after in ("host", "disk"):
            view.slots.pop(change.engine_name, None)
        return {
            "at_ns": at,
            "replica": change.replica,
            "adapter": change.adapter,
            "digest": self._digest(change.adapter, change.engine_name),
            "engine_name": change.engine_name,
            "from_state": change.from_state,
            "to_state": change.to_state,
            "tier_before": None if change.tier_before in ("unknown", "base") else change.tier_before,
            "tier_after": None if change.tier_after in ("unknown", "base") else change.tier_after,
            "cause": change.cause,
            "source": change.source,
            "took_ns": change.took,
        }

    def _replica(
        self, event: ev.ReplicaUp | ev.ReplicaDown | ev.ScrapeStarted | ev.ReplicaSampled, out: Emitted
    ) -> None:
        view = self.state.replicas.setdefault(event.replica, ReplicaView())
        match event:
            case ev.ScrapeStarted():
                view.mark, view.at_mark = event.at, view.in_flight
            case ev.ReplicaUp():
                if event.process_start is None or event.process_start != view.process_start:
                    view.slots.clear()
                view.process_start = event.process_start
                view.version = event.engine_version or view.version
            case ev.ReplicaDown():
                view.probed = False
                self._expire(event.at, out, event.replica)
                out.append(("samples", {"at_ns": event.at, "replica": event.replica, "up": False}))
            case ev.ReplicaSampled():
                out.append(("samples", sample_row(event, view)))
                view.steps = None


def decision_row(at: int, request: str, adapter: str | None, decision: ev.Decision) -> Row:
    """The row of one decision; each cost term of its candidates in seconds."""
    candidates = [
        {
            "replica": c.replica,
            "tier": c.tier,
            "cost_s": c.cost / 1e9,
            "queue_s": c.queue / 1e9,
            "slot_wait_s": c.slot_wait / 1e9,
            "prepare_s": c.prepare / 1e9,
            "prefill_s": c.prefill / 1e9,
            "externality_s": c.externality / 1e9,
        }
        for c in decision.candidates
    ]
    return {
        "decision_id": decision.id,
        "request_id": request,
        "at_ns": at,
        "policy": decision.policy,
        "replica": decision.replica,
        "adapter": adapter,
        "reason": decision.reason,
        "candidates": msgspec.json.encode(candidates).decode(),
        "considered": decision.considered,
    }


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(FoldState)


def encode_fold(state: FoldState) -> bytes:
    """The fold's state as bytes, for a snapshot."""
    return _ENCODER.encode(state)


def decode_fold(data: bytes) -> FoldState:
    """The state in ``data``. Raises ``msgspec.DecodeError`` when the bytes are not one."""
    return _DECODER.decode(data)
