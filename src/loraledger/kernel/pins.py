"""The residency ranking as a pin set: the best adapters of each replica are kept in its slots.

Only where a probe answers (docs/probe.md): stock engines cannot pin, so without one nothing is sent and the engine's LRU stays. The
first of a replica's ranking that it can serve are pinned, as many as there are slots but ``SPARE``, less those that an operator
pinned by hand: at least one slot always serves the others. An adapter that is not registered there is loaded first, from the same
budget of placements as any other. One that may not be used for now (parked, withdrawn, refused for good) leaves its place to the
next.

Looked at when the replica's lists are told and when a load there ends, so nothing here is timed: a busy engine tells its lists many
times a second and an idle one each few seconds. One load or pin is under way at a time, and the next follows when the lists show
what came of the last: older ones would count a pin that has just been given up. A pin is not asked for while requests of other
adapters need every slot, since the probe would refuse it.

A pin is no lock: it gives way to a batch that needs every slot, and goes with the engine's process. Lost, it is made again after
a pause that doubles with each loss, like that of a load which fails; what held for the longest pause begins anew. One that its own
requests have brought back into a slot costs nothing to pin, and waits for the first pause alone. What a probe refuses for good is
not asked of that process again. All pins that were sent for here are remembered by their engine-side names; others are the
operator's and are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from loraledger.events import Move, MoveVerb
from loraledger.kernel import loads
from loraledger.kernel.pin import Pin
from loraledger.kernel.residency import Registration
from loraledger.kernel.settings import SECOND
from loraledger.kernel.state import ReplicaState
from loraledger.kernel.turn import Turn

SPARE: Final = 1
"""Slots of each replica that pins leave to the others. The probe refuses to pin the last one too."""
CAUSE: Final = "pinned"
_GONE: Final = "unknown_adapter"
_FOR_GOOD: Final = frozenset({"no_probe", "no_hook", "no_lora", "data_parallel", "not_modelled", "unknown_verb"})
"""Refusals that only another process takes back, whatever else the driver says of them."""


def told(turn: Turn, replica: ReplicaState) -> None:
    """The lists of ``replica`` were told: what they do not show pinned was lost."""
    observed = replica.observed
    if observed is None:
        return
    for pin in replica.pins.values():
        if not pin.engine_name or pin.command or observed.as_of <= pin.since:
            continue
        if pin.engine_name not in observed.pinned:
            if turn.now - pin.since > turn.settings.limits.load_backoff_max:
                pin.failures = 0
            pin.engine_name, pin.lost = "", turn.now
            _pause(turn, pin, "the pin was lost")
            turn.count("pins_lost")
    keep(turn, replica)


def keep(turn: Turn, replica: ReplicaState) -> None:
    """Send what is next to be done for the pins of ``replica``, if anything is."""
    observed = replica.observed
    if observed is None or any(pin.command or pin.since >= observed.as_of for pin in replica.pins.values()):
        return
    ours = [pin.engine_name for pin in replica.pins.values() if pin.engine_name]
    places = replica.tiers.slots - SPARE - sum(name not in ours for name in observed.pinned)
    wanted = _wanted(turn, replica, places)
    for name, pin in list(replica.pins.items()):
        registration = replica.registrations.get(name)
        if pin.engine_name and not (name in wanted and _stands(pin, registration)):
            if pin.retry_at <= turn.now:
                _send(turn, replica, name, pin, pin.engine_name, leaving=True)
        elif not pin.engine_name and not pin.ranked:
            del replica.pins[name]
    if replica.draining or len(ours) >= places or any(pin.command for pin in replica.pins.values()):
        return  # what is given up must be gone first
    for name in wanted:
        pin = replica.pins[name]
        if not pin.engine_name and _due(turn, replica, name, pin) and _begin(turn, replica, name, pin):
            return


def rank(replica: ReplicaState, ranking: Iterable[str]) -> None:
    """From now on ``ranking`` is that of ``replica``; what was pinned by another one is given up when the lists are next told."""
    before = replica.pins
    replica.pins = {name: before.get(name) or Pin() for name in ranking}
    for pin in replica.pins.values():
        pin.ranked = True
    for name, pin in before.items():
        if name not in replica.pins and pin.engine_name:
            pin.ranked = False
            replica.pins[name] = pin


def answered(turn: Turn, command: int, failure: tuple[str, bool] | None) -> None:
    """A command ended, perhaps a pin or an unpin; ``failure``: the reason, and whether it is for good."""
    found = turn.state.commands.get(command)
    if found is None:
        return
    replica, name = turn.state.replicas[found[0]], found[1]
    pin = replica.pins.get(name)
    if pin is None or not pin.command or pin.command != command:
        return
    del turn.state.commands[command]
    pin.command, pin.since = 0, turn.now
    leaving, pin.leaving = pin.leaving, False
    code = None if failure is None else failure[0].partition(":")[0]
    if leaving and code in (None, _GONE):
        pin.engine_name = ""
    elif failure is not None:
        if not leaving:
            pin.engine_name = ""
        _pause(turn, pin, failure[0])
        if failure[1] or code in _FOR_GOOD:
            pin.retry_at = loads.FOREVER
        turn.count("pins_failed")
    else:
        pin.reason = None
        turn.count("pins")
        if name in turn.state.adapters:
            turn.state.adapters[name].placed[replica.spec.name] = turn.now


def release(turn: Turn, replica: ReplicaState, name: str) -> None:
    """The replica is about to forget ``name``: under a name that it does not know nothing can be unpinned."""
    pin = replica.pins.get(name)
    if pin is None:
        return
    pin.failures, pin.retry_at, pin.reason = 0, 0, None
    if pin.engine_name and not pin.leaving and replica.up:
        _send(turn, replica, name, pin, pin.engine_name, leaving=True)


def forget(replica: ReplicaState) -> None:
    """Its process is new: nothing is pinned, and what the old one refused may be tried."""
    replica.pins = {name: Pin() for name, pin in replica.pins.items() if pin.ranked}


def unhear(replica: ReplicaState) -> None:
    """Whoever waited for its commands is gone: the lists will show what came of them."""
    for pin in replica.pins.values():
        pin.command, pin.leaving = 0, False


def _wanted(turn: Turn, replica: ReplicaState, places: int) -> dict[str, None]:
    """The best ``places`` of the ranking that can be pinned there, or are but for a pause."""
    found: dict[str, None] = {}
    for name, pin in replica.pins.items():
        if len(found) >= places:
            break
        if pin.ranked and _usable(turn, replica, name, pin):
            found[name] = None
    return found


def _usable(turn: Turn, replica: ReplicaState, name: str, pin: Pin) -> bool:
    adapter, registration = turn.state.adapters.get(name), replica.registrations.get(name)
    if adapter is None or adapter.parked_until > turn.now or adapter.spec.rank > replica.spec.max_rank:
        return False
    if pin.retry_at == loads.FOREVER:
        return False
    if registration is None:
        return True
    if registration.state == "parked" and registration.retry_at == loads.FOREVER:
        return False
    # One that an operator pinned by hand is in a slot already, and has been counted.
    by_hand = replica.observed is not None and registration.engine_name in replica.observed.pinned
    return bool(pin.engine_name) or not by_hand


def _stands(pin: Pin, registration: Registration | None) -> bool:
    """Whether what is pinned is what the replica serves under this name."""
    return registration is not None and registration.state != "absent" and registration.engine_name == pin.engine_name


def _due(turn: Turn, replica: ReplicaState, name: str, pin: Pin) -> bool:
    """Whether its pause is over."""
    if pin.lost and name in replica.registrations and replica.registrations[name].engine_name in replica.tiers.active:
        return turn.now - pin.lost >= turn.settings.limits.load_backoff
    return pin.retry_at <= turn.now


def _begin(turn: Turn, replica: ReplicaState, name: str, pin: Pin) -> bool:
    """Load or pin an adapter that is not pinned; ``False``: not now."""
    registration = replica.registrations.get(name)
    if registration is not None and registration.state == "registered":
        if not _room(replica, name):
            pin.reason = "every slot is needed"
            return False
        _send(turn, replica, name, pin, registration.engine_name, leaving=False)
        return True
    if replica.loading is not None or not _within_budget(turn, replica):
        return False
    if registration is not None and (registration.state == "evicting" or not loads.may_load(registration, turn.now)):
        return False
    loads.want(turn, replica, name, None, CAUSE)
    return True


def _room(replica: ReplicaState, name: str) -> bool:
    """Whether slots are enough for it, for all that is pinned, and for all that has requests there: else it would be refused."""
    held = {name: None, **replica.adapters}
    if replica.observed is not None:
        held.update((pinned.rpartition("@")[0], None) for pinned in replica.observed.pinned)
    held.update((other, None) for other, pin in replica.pins.items() if pin.engine_name)
    return len(held) <= replica.tiers.slots


def _within_budget(turn: Turn, replica: ReplicaState) -> bool:
    fresh = turn.now - replica.placements_since >= 60 * SECOND
    return fresh or replica.placements < turn.settings.limits.loads_per_minute


def _send(turn: Turn, replica: ReplicaState, name: str, pin: Pin, engine_name: str, leaving: bool) -> None:
    pin.command, pin.leaving = turn.command_id(replica.spec.name, name), leaving
    pin.engine_name, pin.since, pin.lost = engine_name, turn.now, 0
    if replica.observed is not None:
        replica.observed.moved = turn.now
    verb: MoveVerb = "unpin" if leaving else "pin"
    turn.commands.append(Move(pin.command, replica.spec.name, name, engine_name, verb))


def _pause(turn: Turn, pin: Pin, reason: str) -> None:
    """Not again at once."""
    limits = turn.settings.limits
    pin.failures += 1
    pin.retry_at = turn.now + min(limits.load_backoff << min(pin.failures - 1, 30), limits.load_backoff_max)
    pin.reason = reason
