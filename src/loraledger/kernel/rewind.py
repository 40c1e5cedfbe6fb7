"""A clock that was set back between two processes: what the earlier one remembered is moved back with it.

Theory of operation. Kernel time comes from events, and within a process it only goes on. The next process reads the clock anew, and
that may have been set back meanwhile: corrected, restored with a virtual machine, or lost with its battery. Every moment in the
state then lies ahead. A pause of a second would last as long as the clock was set back, a second engine exit would always fall
into the parking time of the first, and what halves with its age would double instead: ``0.5 ** (age / 60 s)`` overflows after 17 h.

So all moments are moved back by what separates the last event of the earlier process from the first of the next. How much
time passed between them nobody can tell; it counts as none. Ages are what they were, pauses last for what was left of them, and
what was before something else still is. A clock that was set forward needs nothing: all is older, and counts for less.

Two numbers are no moments and stay: 0, which is never, and ``FOREVER``. What would come to lie before the epoch is put
at its first nanosecond. Not looked at is what a new process forgets anyway (requests and timers, loads and commands under way,
doubts, accusations, the probe's account), nor what is of another clock: the start of an engine's process, which only names
it, and the ticks of ``Shares``, which sees for itself that they went back.
"""

from __future__ import annotations

import msgspec

from loraledger.kernel.loads import FOREVER
from loraledger.kernel.observed import Activity
from loraledger.kernel.state import FleetState, ReplicaState


def rewind(state: FleetState, back: int) -> None:
    """Move every moment that ``state`` remembers back by ``back`` ns, but ``now``."""
    _move(state.output, back, "at")
    for adapter in state.adapters.values():
        _move(adapter, back, "rate_at", "suspect_since", "parked_until")
        _move(adapter.output, back, "at")
        adapter.placed = {name: _earlier(at, back) for name, at in adapter.placed.items()}
    for replica in state.replicas.values():
        _replica(replica, back)
        _activity(replica.activity, back)


def _replica(replica: ReplicaState, back: int) -> None:
    _move(replica, back, "broken_at", "exited_at", "mark", "placements_since")
    if replica.sampled is not None:
        replica.sampled = _earlier(replica.sampled, back)
    for figure in (replica.itl, replica.prefill_rate, replica.load_ratio):
        _move(figure, back, "at")
    for registration in replica.registrations.values():
        _move(registration, back, "since", "started", "retry_at", "verified")
    for pin in replica.pins.values():
        _move(pin, back, "since", "lost", "retry_at")
    if replica.floor is not None:
        replica.floor = msgspec.structs.replace(replica.floor, at=_earlier(replica.floor.at, back))


def _activity(activity: Activity, back: int) -> None:
    for durations in (activity.calls, activity.loads, activity.activations):
        durations[:] = [(_earlier(at, back), took) for at, took in durations]
    for rate in (activity.load_rate, activity.activation_rate, activity.eviction_rate, activity.preemption_rate):
        _move(rate, back, "at")


def _move(holder: msgspec.Struct, back: int, *fields: str) -> None:
    for field in fields:
        setattr(holder, field, _earlier(getattr(holder, field), back))


def _earlier(at: int, back: int) -> int:
    return at if at in (0, FOREVER) else max(1, at - back)
