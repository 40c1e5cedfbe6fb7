"""What the catalog and the operator ask of the replicas, and how the commands that follow end.

An adapter's files may change or go while a load of them is under way. The load cannot be called back: when it ends, the replica
forgets the name again, nothing is learnt of it, and those who waited are routed anew, to the new files or to a refusal.
"""

from __future__ import annotations

from loraledger import events as ev
from loraledger.kernel import failures, loads, pins, pumping, replicas, routing
from loraledger.kernel.fresh import declare, desire
from loraledger.kernel.policy import Policy
from loraledger.kernel.turn import Turn


def declared(turn: Turn, policy: Policy, event: ev.AdapterDeclared) -> None:
    """An adapter is new, has new files, or is vouched for again under the same digest."""
    state, name = turn.state, event.adapter.name
    known = state.adapters.get(name)
    if known is not None and known.spec.digest == event.adapter.digest:
        known.spec = event.adapter
        desire(state, event.adapter)
        failures.unpark(known)
        _unsettle(turn)
    else:
        waiters = [] if known is None else _withdraw(turn, name)
        declare(state, event.adapter)
        _unsettle(turn)
        routing.settle_waiters(turn, policy, waiters)
    replicas.hold_desired(turn)
    pumping.pump(turn, policy)


def retired(turn: Turn, policy: Policy, event: ev.AdapterRetired) -> None:
    """An adapter left the catalog: who waits for it is refused."""
    if event.name in turn.state.adapters:
        waiters = _withdraw(turn, event.name)
        del turn.state.adapters[event.name]
        turn.state.desired.pop(event.name, None)
        _unsettle(turn)
        routing.settle_waiters(turn, policy, waiters)
        pumping.pump(turn, policy)


def load_asked(turn: Turn, policy: Policy, event: ev.LoadAsked) -> None:
    """An operator wants the adapter on this replica, whatever failed before."""
    replica, adapter = turn.state.replicas[event.replica], turn.state.adapters[event.adapter]
    failures.unpark(adapter)
    registration = replica.registrations.get(event.adapter)
    if registration is None or registration.state not in ("registered", "evicting"):
        loads.want(turn, replica, event.adapter, None, "asked")


def unload_asked(turn: Turn, policy: Policy, event: ev.UnloadAsked) -> None:
    """An operator wants the replica to forget the adapter's name."""
    replica = turn.state.replicas[event.replica]
    if replica.pins:
        pins.release(turn, replica, event.adapter)
    loads.forget(turn, replica, event.adapter)


def command_done(turn: Turn, policy: Policy, event: ev.CommandDone) -> None:
    """A command was carried out."""
    pins.answered(turn, event.command, None)
    found = _current(turn, event.command)
    if found is None:
        return
    replica_name, name = found
    replica = turn.state.replicas[replica_name]
    registration = replica.registrations[name]
    if registration.state != "loading":
        loads.step(turn, replica, name, registration, "done", "unloaded", event.took)
        replicas.hold_desired(turn)
    elif loads.superseded(turn, name, registration):
        routing.settle_waiters(turn, policy, loads.abandon(turn, replica, name, done=True))
        replicas.hold_desired(turn)
    else:
        waiters = loads.loaded(turn, replica, name, event.took)
        routing.dispatch_waiters(turn, policy, replica, name, waiters)
    if replica.pins:
        pins.keep(turn, replica)
    pumping.pump(turn, policy)


def command_failed(turn: Turn, policy: Policy, event: ev.CommandFailed) -> None:
    """A command was refused, or broke."""
    pins.answered(turn, event.command, (event.reason, event.permanent))
    found = _current(turn, event.command)
    if found is None:
        return
    replica_name, name = found
    replica = turn.state.replicas[replica_name]
    registration = replica.registrations[name]
    if registration.state != "loading":
        loads.step(turn, replica, name, registration, "fail", event.reason)
    elif loads.superseded(turn, name, registration):
        routing.settle_waiters(turn, policy, loads.abandon(turn, replica, name, done=False))
    else:
        waiters = loads.load_failed(turn, replica, name, event.reason, event.permanent)
        routing.resettle_waiters(turn, policy, waiters, event.reason)
    if replica.pins:
        pins.keep(turn, replica)
    replicas.hold_desired(turn)
    pumping.pump(turn, policy)


def _current(turn: Turn, command: int) -> tuple[str, str] | None:
    """Replica and adapter of a command, if it is still the one that counts there (a restart makes its answer stale)."""
    found = turn.state.commands.pop(command, None)
    if found is None:
        return None
    registration = turn.state.replicas[found[0]].registrations.get(found[1])
    if registration is None or registration.command != command or registration.state not in ("loading", "evicting"):
        return None
    return found


def _unsettle(turn: Turn) -> None:
    """An adapter whose slot may be the next to go is another one now, or none."""
    for replica in turn.state.replicas.values():
        replica.standing = None


def _withdraw(turn: Turn, name: str) -> list[str]:
    """The files of ``name`` are no longer served: replicas forget the old version; requests in flight there end by themselves.

    Returns the requests that waited for a load which will not be sent any more. A load under way ends in ``superseded``.
    """
    waiters: list[str] = []
    for replica in turn.state.replicas.values():
        if replica.pins:
            pins.release(turn, replica, name)
        loads.forget(turn, replica, name)
        registration = replica.registrations.get(name)
        if registration is not None and registration.state != "loading":
            waiters.extend(registration.waiters)
            loads.set_aside(replica, replica.registrations.pop(name))
            replica.wanted.pop(name, None)
    return waiters
