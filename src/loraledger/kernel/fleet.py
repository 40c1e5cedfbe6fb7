"""The kernel: events in, commands out.

``Fleet.step(event)`` is the only way in. It is deterministic: the same settings and the same events give the same commands, byte
for byte, in any process. Time comes only from events; ``wake_at`` says when the kernel wants to be stepped next, so there are no
idle ticks. ``snapshot`` and ``Fleet.restore`` carry the whole state across a restart or into a new journal segment.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop

import msgspec

from loraledger import events as ev
from loraledger.kernel import catalog, failures, fairness, loads, observing, pins, pumping, replicas, requests, rollout
from loraledger.kernel.arms import arms as arms_of
from loraledger.kernel.fresh import fresh_state
from loraledger.kernel.policies import make_policy
from loraledger.kernel.policy import Policy
from loraledger.kernel.rewind import rewind
from loraledger.kernel.settings import FleetSettings
from loraledger.kernel.state import FleetState
from loraledger.kernel.turn import Turn

_ENCODER = msgspec.msgpack.Encoder()
"""Dicts keep their order: it is the order of the queues and of the LRU lists."""
_DECODER = msgspec.msgpack.Decoder(FleetState)


class Fleet:
    """State and decisions for one gateway's fleet.

    ``settings`` must be valid: names unique, each tenant of a request known. Raises ``ConfigError`` on an unknown policy.
    """

    def __init__(self, settings: FleetSettings, state: FleetState | None = None) -> None:
        self.settings = settings
        self.policy = make_policy(settings)
        self.state = fresh_state(settings) if state is None else state
        for replica in self.state.replicas.values():
            replica.reckon()
        fairness.recount(self.state)
        self.arms = arms_of(settings, self.state)
        self._handlers: dict[type, Callable[..., None]] = _handlers()

    @classmethod
    def restore(cls, settings: FleetSettings, snapshot: bytes) -> Fleet:
        """A fleet that continues from ``snapshot``. Raises ``msgspec.DecodeError`` when the bytes are not one."""
        return cls(settings, _DECODER.decode(snapshot))

    def snapshot(self) -> bytes:
        """The whole state as bytes, without what is only kept to save time."""
        for replica in self.state.replicas.values():
            replica.standing = None
        return _ENCODER.encode(self.state)

    def step(self, event: ev.Event) -> tuple[list[ev.Command], int | None]:
        """Take in one event; returns the commands that follow and when to step next (``None``: nothing is timed)."""
        commands, _, wake_at = self.step_with_changes(event)
        return commands, wake_at

    def step_with_changes(self, event: ev.Event) -> tuple[list[ev.Command], list[ev.ResidencyChange], int | None]:
        """As ``step``, with what changed in the residency accounts."""
        state, policy = self.state, self.policy
        timers = state.timers
        if event.at > state.now:
            state.now = event.at
        turn = Turn(self.settings, state, state.now, self.arms)
        due = bool(timers) and timers[0][0] <= turn.now
        if due:
            requests.expire(turn)
        self._handlers[type(event)](turn, policy, event)
        if due and type(event) is not ev.Wake:  # a pause ended on the way: nobody else asks who waited for that
            pumping.pump(turn, policy)
        while timers:
            at, key = timers[0]
            if not key or key in state.requests:
                return turn.commands, turn.changes, at
            heappop(timers)
        return turn.commands, turn.changes, None


def _handlers() -> dict[type, Callable[..., None]]:
    return {
        ev.RequestArrived: requests.arrived,
        ev.RequestDispatched: requests.dispatched,
        ev.RequestFirstToken: requests.first_token_seen,
        ev.RequestFinished: requests.finished,
        ev.RequestCancelled: requests.cancelled,
        ev.AttemptFailed: failures.attempt_failed,
        ev.CommandDone: catalog.command_done,
        ev.CommandFailed: catalog.command_failed,
        ev.LoadObserved: observing.loaded,
        ev.ActivationObserved: observing.activated,
        ev.EvictionObserved: observing.evicted,
        ev.TiersObserved: observing.tiers,
        ev.FloorObserved: observing.floor,
        ev.StepsObserved: observing.steps,
        ev.EngineFinished: _nothing,
        ev.ProbeLost: observing.lost,
        ev.MoveAsked: observing.move_asked,
        ev.ScrapeStarted: _scrape_started,
        ev.ReplicaSampled: replicas.sampled,
        ev.ReplicaUp: replicas.up,
        ev.ReplicaDown: replicas.down,
        ev.AdapterDeclared: catalog.declared,
        ev.AdapterRetired: catalog.retired,
        ev.DrainAsked: _drain,
        ev.LoadAsked: catalog.load_asked,
        ev.UnloadAsked: catalog.unload_asked,
        ev.GatewayStarted: _gateway_started,
        ev.Wake: _wake,
        ev.RolloutSet: rollout.begun,
        ev.RolloutEnded: rollout.ended,
    }


def _nothing(turn: Turn, policy: Policy, event: ev.EngineFinished) -> None:
    """Only the request's row wants to know."""


def _scrape_started(turn: Turn, policy: Policy, event: ev.ScrapeStarted) -> None:
    replicas.scrape_started(turn, turn.state.replicas[event.replica])


def _drain(turn: Turn, policy: Policy, event: ev.DrainAsked) -> None:
    replica = turn.state.replicas[event.replica]
    replica.draining = event.on
    replica.reckon()
    replicas.hold_desired(turn)
    pumping.pump(turn, policy)


def _gateway_started(turn: Turn, policy: Policy, event: ev.GatewayStarted) -> None:
    """A new process: no request is open, no command is under way, no replica has been asked yet. What was learnt stays."""
    state = turn.state
    if event.at < state.now:
        rewind(state, state.now - event.at)
    state.now = turn.now = event.at
    state.requests.clear()
    state.held.clear()
    state.timers.clear()
    state.wakes.clear()
    state.commands.clear()
    state.waiting_tenants.clear()
    state.queued = 0
    for tenant in state.tenants.values():
        tenant.active = 0
        tenant.queue.clear()
    for replica in state.replicas.values():
        replica.observed = None
        replica.in_flight.clear()
        replica.adapters.clear()
        replica.holdings.clear()
        replica.streamers.clear()
        replica.streams = 0
        replica.blocked.clear()
        replica.prefill_out = replica.decode_out = replica.stall_out = replica.kv_own = 0
        replica.own_at_mark = replica.kv_at_mark = replica.foreign = replica.foreign_kv = 0
        loads.lose(turn, replica, "gateway restarted")
        pins.unhear(replica)
        replica.up, replica.doubted, replica.shunned, replica.reason = False, 0, False, "not contacted yet"
        replica.reckon()
        replica.exit_suspects.clear()
        replica.accused.clear()


def _wake(turn: Turn, policy: Policy, event: ev.Wake) -> None:
    replicas.hold_desired(turn)
    pumping.pump(turn, policy)
