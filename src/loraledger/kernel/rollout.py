"""Changes that are tried on a part of the tenants or replicas: what they change, for whom, and how all is as before when they end.

Theory of operation. A rollout gives one variable another value than the settings do, for its members or for everybody. What follows
from it is worked out when it is set, when it ends and when a kernel begins, never for a request:

- ``policy`` and ``policy.PARAM``: other policies decide for the tenants, see ``arms``. ``routing.route`` takes them.
- ``tenant.concurrency`` stands in the tenant's spec. Requests above a lower limit stay in flight; none follows until there is room.
- ``pins``: the ranking of the members, in place of the settings'. What it does not name is unpinned when the lists are next told.

Who is no tenant or replica is left out of the members, and nobody is added to them later. Of two changes of one variable that hold
for somebody, the one that was set later counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from sys import float_info
from typing import Final

import msgspec

from loraledger.events import RolloutEnded, RolloutSet
from loraledger.kernel import pins, pumping
from loraledger.kernel.arms import PARAM, POLICY, arms, bears, changed_by, holder, refusal, under
from loraledger.kernel.policy import Policy
from loraledger.kernel.rollout_state import Books, Rollout
from loraledger.kernel.settings import FleetSettings
from loraledger.kernel.state import FleetState
from loraledger.kernel.turn import Turn

CONCURRENCY: Final = "tenant.concurrency"
PINS: Final = "pins"
_MOST: Final = 2**31 - 1


def begun(turn: Turn, policy: Policy, event: RolloutSet) -> None:
    """A change is set, or is set for others. Raises ValueError for one that ``problem`` finds fault with."""
    state = turn.state
    if event.unit != unit(event.variable):
        raise ValueError(f"change {event.change}: {event.variable} is set for each {unit(event.variable)}")
    members = None if event.members is None else _known(state, event.variable, event.members)
    rollout, before = Rollout(event.variable, event.value, members), state.rollouts.get(event.change)
    if before is not None:
        if before == rollout:
            return
        if before.variable != event.variable:
            raise ValueError(f"change {event.change} is of {before.variable} already")
    wrong = None
    if before is None or before.value != event.value or bears(rollout):  # pins may name what was withdrawn since
        wrong = problem(turn.settings, state, event.variable, msgspec.json.decode(event.value), members)
    if wrong is not None:
        raise ValueError(f"change {event.change}: {wrong}")
    state.rollouts[event.change] = rollout
    _act(turn, policy, event.variable)


def ended(turn: Turn, policy: Policy, event: RolloutEnded) -> None:
    """A change is set no more; nothing happens if it was not."""
    rollout = turn.state.rollouts.pop(event.change, None)
    if rollout is not None:
        _act(turn, policy, rollout.variable)


def unit(variable: str) -> str:
    """Of what a variable has one value each: ``replica`` or ``tenant``."""
    return "replica" if variable == PINS else "tenant"


def problem(
    settings: FleetSettings, state: FleetState, variable: str, value: object, members: Iterable[str] | None = None
) -> str | None:
    """Why ``variable`` cannot be set to ``value`` (decoded JSON) for ``members``, ``None`` for everybody; ``None`` if it can be."""
    if variable == POLICY or variable.startswith(PARAM):
        return _policy_problem(settings, state, variable, value, members)
    if variable == CONCURRENCY:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return None if whole and 1 <= value <= _MOST else f"{variable} must be a whole number from 1 to {_MOST}"  # type: ignore[operator]
    if variable == PINS:
        return _pins_problem(state, value)
    return f"{variable} cannot be set while the fleet runs: use policy, policy.PARAM, tenant.concurrency or pins"


def apply(settings: FleetSettings, state: FleetState, variable: str) -> None:
    """Have ``state`` say what follows from the rollouts of ``variable``."""
    if variable == PINS:
        _rank(settings, state)
    elif variable == CONCURRENCY:
        _limit(settings, state)
    else:
        kept = dict.fromkeys(arm.books for arm in arms(settings, state).values())
        state.books = {key: state.books.get(key) or Books() for key in kept}


def carry(old: FleetState, new: FleetState, settings: FleetSettings) -> None:
    """Keep the rollouts of ``old`` in ``new``, a state for ``settings``, with those of their members that are left."""
    new.rollouts, new.books = old.rollouts, old.books
    for rollout in new.rollouts.values():
        if rollout.members is not None:
            rollout.members = _known(new, rollout.variable, rollout.members)
    for variable in dict.fromkeys(rollout.variable for rollout in new.rollouts.values()):
        apply(settings, new, variable)


def _known(state: FleetState, variable: str, members: tuple[str, ...]) -> tuple[str, ...]:
    known: Mapping[str, object] = state.replicas if variable == PINS else state.tenants
    return tuple(name for name in members if name in known)


def _act(turn: Turn, policy: Policy, variable: str) -> None:
    apply(turn.settings, turn.state, variable)
    if variable not in (PINS, CONCURRENCY):
        turn.arms.clear()
        turn.arms.update(arms(turn.settings, turn.state))
    pumping.pump(turn, policy)


# --- policy -----------------------------------------------------------------------------------------------------------


def _policy_problem(
    settings: FleetSettings, state: FleetState, variable: str, value: object, members: Iterable[str] | None
) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max
    if variable != POLICY and not number:
        return f"{variable} must be a number"
    others = [(r, holder(r)) for r in state.rollouts.values() if bears(r)]
    for tenant in list(state.tenants if members is None else members) or [""]:
        now = under(settings, [rollout for rollout, holds in others if holds is None or tenant in holds])
        wrong = refusal(changed_by(settings, now, variable, value))
        if wrong is not None:
            return wrong
    return None


# --- tenant.concurrency -----------------------------------------------------------------------------------------------


def _limit(settings: FleetSettings, state: FleetState) -> None:
    limits = {spec.name: spec.concurrency for spec in settings.tenants}
    for rollout in state.rollouts.values():
        if rollout.variable == CONCURRENCY:
            value = msgspec.json.decode(rollout.value, type=int)
            limits.update(dict.fromkeys(limits if rollout.members is None else rollout.members, value))
    for name, tenant in state.tenants.items():
        tenant.spec = msgspec.structs.replace(tenant.spec, concurrency=limits[name])


# --- pins -------------------------------------------------------------------------------------------------------------


def _pins_problem(state: FleetState, value: object) -> str | None:
    if not isinstance(value, list):
        return "pins must be a list of [replica, adapter]"
    for pair in value:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(name, str) for name in pair)):
            return f"pins: {pair!r} must be [replica, adapter]"
        if pair[0] not in state.replicas:
            return f"pins: there is no replica {pair[0]!r}"
        if pair[1] not in state.adapters:
            return f"pins: there is no adapter {pair[1]!r}"
    return None


def _rank(settings: FleetSettings, state: FleetState) -> None:
    rankings = _by_replica(settings.pins if settings.residency == "ranked" else ())
    for rollout in state.rollouts.values():
        if rollout.variable == PINS:
            changed = _by_replica(msgspec.json.decode(rollout.value))
            for name in state.replicas if rollout.members is None else rollout.members:
                rankings[name] = changed.get(name, [])
    for name, replica in state.replicas.items():
        pins.rank(replica, rankings.get(name, ()))


def _by_replica(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for replica, adapter in pairs:
        found.setdefault(replica, []).append(adapter)
    return found
