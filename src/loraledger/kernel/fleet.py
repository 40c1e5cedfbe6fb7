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
from loraledger.kernel import failures, loads, queues, replicas, routing
from loraledger.kernel.cost import note_arrival
from loraledger.kernel.dispatch import first_token, release
from loraledger.kernel.policies import make_policy
from loraledger.kernel.policy import Policy
from loraledger.kernel.settings import FleetSettings
from loraledger.kernel.state import FleetState, RequestState, Turn, declare, fresh_state

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")
_DECODER = msgspec.msgpack.Decoder(FleetState)

Handler = Callable[[Turn, Policy, "ev.Event"], None]


class Fleet:
    """State and decisions for one gateway's fleet.

    ``settings`` must be valid: names unique, each tenant of a request known. Raises ``ConfigError`` on an unknown policy.
    """

    def __init__(self, settings: FleetSettings, state: FleetState | None = None) -> None:
        self.settings = settings
        self.policy = make_policy(settings)
        self.state = fresh_state(settings) if state is None else state
        self._handlers: dict[type, Callable[..., None]] = _handlers()

    @classmethod
    def restore(cls, settings: FleetSettings, snapshot: bytes) -> Fleet:
        """A fleet that continues from ``snapshot``. Raises ``msgspec.DecodeError`` when the bytes are not one."""
        return cls(settings, _DECODER.decode(snapshot))

    def snapshot(self) -> bytes:
        """The whole state as bytes."""
        return _ENCODER.encode(self.state)

    def step(self, event: ev.Event) -> tuple[list[ev.Command], int | None]:
        """Take in one event; returns the commands that follow and when to step next (``None``: nothing is timed)."""
        commands, _, wake_at = self.step_with_changes(event)
        return commands, wake_at

    def step_with_changes(self, event: ev.Event) -> tuple[list[ev.Command], list[ev.ResidencyChange], int | None]:
        """As ``step``, with what changed in the residency accounts."""
        state = self.state
        if event.at > state.now:
            state.now = event.at
        turn = Turn(self.settings, state)
        if state.timers and state.timers[0][0] <= state.now:
            _expire(turn)
        self._handlers[type(event)](turn, self.policy, event)
        timers = state.timers
        while timers and timers[0][1] and timers[0][1] not in state.requests:
            heappop(timers)
        return turn.commands, turn.changes, timers[0][0] if timers else None


def _handlers() -> dict[type, Callable[..., None]]:
    return {
        ev.RequestArrived: _arrived,
        ev.RequestDispatched: _dispatched,
        ev.RequestFirstToken: _first_token,
        ev.RequestFinished: _finished,
        ev.RequestCancelled: _cancelled,
        ev.AttemptFailed: failures.attempt_failed,
        ev.CommandDone: _command_done,
        ev.CommandFailed: _command_failed,
        ev.LoadObserved: _observed,
        ev.ActivationObserved: _observed,
        ev.EvictionObserved: _evicted,
        ev.ScrapeStarted: _scrape_started,
        ev.ReplicaSampled: replicas.sampled,
        ev.ReplicaUp: replicas.up,
        ev.ReplicaDown: replicas.down,
        ev.AdapterDeclared: _declared,
        ev.AdapterRetired: _retired,
        ev.DrainAsked: _drain,
        ev.LoadAsked: _load_asked,
        ev.UnloadAsked: _unload_asked,
        ev.GatewayStarted: _gateway_started,
        ev.Wake: _wake,
    }


def _arrived(turn: Turn, policy: Policy, event: ev.RequestArrived) -> None:
    state = turn.state
    tenant = state.tenants[event.tenant]
    adapter = state.adapters.get(event.adapter) if event.adapter is not None else None
    expected = (adapter.output if adapter is not None else state.output).value(turn.now)
    expect = max(1, int(expected if event.max_tokens is None else min(event.max_tokens, expected)))
    deadline = turn.now + tenant.spec.queue_deadline
    request = RequestState(event.request, event.tenant, event.adapter, event.prompt_tokens, expect, turn.now, deadline)
    state.requests[event.request] = request
    failures.earn(turn)
    if adapter is not None:
        note_arrival(adapter, turn.now)
    if not queues.room(tenant):
        queues.offer(turn, request, "tenant_concurrency")
        return
    routing.activate(turn, request)
    routing.settle(turn, policy, request)


def _dispatched(turn: Turn, policy: Policy, event: ev.RequestDispatched) -> None:
    request = turn.state.requests.get(event.request)
    if request is not None and request.attempt == event.attempt:
        request.dispatched = turn.now


def _first_token(turn: Turn, policy: Policy, event: ev.RequestFirstToken) -> None:
    request = turn.state.requests.get(event.request)
    if request is None or request.phase != "sent" or request.replica is None:
        return
    replica = turn.state.replicas[request.replica]
    # Only a long prompt that had the engine's prefill to itself and needed no adapter moved measures the prefill rate.
    if (
        request.lone
        and request.prompt >= 128
        and request.decision is not None
        and request.decision.hit_class in ("gpu", "base")
    ):
        seconds = (turn.now - request.dispatched - replica.itl.value(turn.now)) / 1e9
        if seconds > 0:
            replica.prefill_rate.observe(request.prompt / seconds, turn.now)
    first_token(turn, request)


def _finished(turn: Turn, policy: Policy, event: ev.RequestFinished) -> None:
    request = turn.state.requests.get(event.request)
    if request is None:
        return
    _learn(turn, request, event.measured)
    _end(turn, policy, request)


def _cancelled(turn: Turn, policy: Policy, event: ev.RequestCancelled) -> None:
    request = turn.state.requests.get(event.request)
    if request is not None:
        _end(turn, policy, request)


def _end(turn: Turn, policy: Policy, request: RequestState) -> None:
    state = turn.state
    if request.id in state.tenants[request.tenant].queue:
        queues.take(turn, request)
    else:
        release(turn, request)
        routing.deactivate(turn, request)
        state.held.pop(request.id, None)
    del state.requests[request.id]
    routing.pump(turn, policy)


def _learn(turn: Turn, request: RequestState, measured: ev.Measured) -> None:
    state, now = turn.state, turn.now
    if request.replica is not None and measured.itl_mean:
        state.replicas[request.replica].itl.observe(float(measured.itl_mean), now)
    generated = measured.generated_tokens if measured.generated_tokens is not None else measured.tokens_seen
    if generated:
        state.output.observe(float(generated), now)
        adapter = state.adapters.get(request.adapter) if request.adapter is not None else None
        if adapter is not None:
            adapter.output.observe(float(generated), now)


def _command_done(turn: Turn, policy: Policy, event: ev.CommandDone) -> None:
    found = _current(turn, event.command)
    if found is None:
        return
    replica_name, name = found
    replica = turn.state.replicas[replica_name]
    registration = replica.registrations[name]
    if registration.state == "loading":
        waiters = loads.loaded(turn, replica, name, event.took)
        routing.dispatch_waiters(turn, policy, replica, name, waiters)
    else:
        loads.step(turn, replica, name, registration, "done", "unloaded", event.took)
    routing.pump(turn, policy)


def _command_failed(turn: Turn, policy: Policy, event: ev.CommandFailed) -> None:
    found = _current(turn, event.command)
    if found is None:
        return
    replica_name, name = found
    replica = turn.state.replicas[replica_name]
    registration = replica.registrations[name]
    if registration.state == "loading":
        waiters = loads.load_failed(turn, replica, name, event.reason, event.permanent)
        routing.resettle_waiters(turn, policy, waiters, event.reason)
        replicas.hold_desired(turn)
    else:
        loads.step(turn, replica, name, registration, "fail", event.reason)


def _current(turn: Turn, command: int) -> tuple[str, str] | None:
    """Replica and adapter of a command, if it is still the one that counts there (a restart makes its answer stale)."""
    found = turn.state.commands.pop(command, None)
    if found is None:
        return None
    registration = turn.state.replicas[found[0]].registrations.get(found[1])
    if registration is None or registration.command != command or registration.state not in ("loading", "evicting"):
        return None
    return found


def _observed(turn: Turn, policy: Policy, event: ev.LoadObserved | ev.ActivationObserved) -> None:
    replica = turn.state.replicas[event.replica]
    if replica.tiers.tier(event.engine_name) != "gpu":
        turn.drift(replica, "residency")
        replica.tiers.use(event.engine_name)


def _evicted(turn: Turn, policy: Policy, event: ev.EvictionObserved) -> None:
    replica = turn.state.replicas[event.replica]
    if replica.tiers.tier(event.engine_name) == "gpu" or event.tier == "host":
        turn.drift(replica, "residency")
    replica.tiers.drop(event.engine_name, event.tier)


def _scrape_started(turn: Turn, policy: Policy, event: ev.ScrapeStarted) -> None:
    replicas.scrape_started(turn, turn.state.replicas[event.replica])


def _declared(turn: Turn, policy: Policy, event: ev.AdapterDeclared) -> None:
    state, name = turn.state, event.adapter.name
    known = state.adapters.get(name)
    if known is not None and known.spec.digest == event.adapter.digest:
        known.spec = event.adapter
        failures.unpark(known)
    else:
        if known is not None:
            _withdraw(turn, name)
        declare(state, event.adapter)
    replicas.hold_desired(turn)


def _retired(turn: Turn, policy: Policy, event: ev.AdapterRetired) -> None:
    if event.name in turn.state.adapters:
        _withdraw(turn, event.name)
        del turn.state.adapters[event.name]
        turn.state.desired.pop(event.name, None)


def _withdraw(turn: Turn, name: str) -> None:
    """The files of ``name`` are no longer served: replicas forget the old version; requests in flight there end by themselves."""
    for replica in turn.state.replicas.values():
        loads.forget(turn, replica, name)
        registration = replica.registrations.get(name)
        if registration is not None and registration.state != "loading":
            del replica.registrations[name]
            replica.wanted.pop(name, None)


def _drain(turn: Turn, policy: Policy, event: ev.DrainAsked) -> None:
    turn.state.replicas[event.replica].draining = event.on
    routing.pump(turn, policy)


def _load_asked(turn: Turn, policy: Policy, event: ev.LoadAsked) -> None:
    replica, adapter = turn.state.replicas[event.replica], turn.state.adapters[event.adapter]
    failures.unpark(adapter)
    registration = replica.registrations.get(event.adapter)
    if registration is None or registration.state not in ("registered", "evicting"):
        loads.want(turn, replica, event.adapter, None, "asked")


def _unload_asked(turn: Turn, policy: Policy, event: ev.UnloadAsked) -> None:
    loads.forget(turn, turn.state.replicas[event.replica], event.adapter)


def _gateway_started(turn: Turn, policy: Policy, event: ev.GatewayStarted) -> None:
    """A new process: no request is open, no command is under way, no replica has been asked yet. What was learnt stays."""
    state = turn.state
    state.requests.clear()
    state.held.clear()
    state.timers.clear()
    state.commands.clear()
    state.waiting_tenants.clear()
    state.queued = 0
    for tenant in state.tenants.values():
        tenant.active = 0
        tenant.queue.clear()
    for replica in state.replicas.values():
        replica.in_flight.clear()
        replica.adapters.clear()
        replica.prefill_out = replica.decode_out = replica.kv_own = 0
        replica.own_at_mark = replica.kv_at_mark = replica.foreign = replica.foreign_kv = 0
        loads.lose(turn, replica, "gateway restarted")
        replica.up, replica.doubted, replica.reason = False, 0, "not contacted yet"
        replica.exit_suspects.clear()


def _wake(turn: Turn, policy: Policy, event: ev.Wake) -> None:
    replicas.hold_desired(turn)
    routing.pump(turn, policy)


def _expire(turn: Turn) -> None:
    for request in queues.expire(turn):
        if request.phase == "queued":
            queues.take(turn, request)
            code = "queue_deadline"
        else:
            routing.deactivate(turn, request)
            turn.state.held.pop(request.id, None)
            code = "load_deadline" if request.phase == "loading" else "replica_check_deadline"
        queues.refuse(turn, request, 503, code, "the request waited for its deadline in the gateway", 1_000_000_000)
