"""Which policy decides for a tenant while changes of the policy are tried: made when a rollout is set, not for each request.

Tenants under the same rollouts share an ``Arm``, a policy with books of its own. It is made from the settings with the changes:
first the policy, then its parameters. One that the policy has not, or does not take, has no effect: then another policy was set for
these tenants since, or by a new settings file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from loraledger.errors import ConfigError
from loraledger.kernel.policies import make_policy
from loraledger.kernel.rollout_state import Rollout
from loraledger.kernel.settings import FleetSettings
from loraledger.kernel.state import FleetState
from loraledger.kernel.turn import Arm

POLICY: Final = "policy"
PARAM: Final = "policy."


def arms(settings: FleetSettings, state: FleetState) -> dict[str, Arm]:
    """By tenant, the policy that decides for it: of those for whom that is not the settings' own."""
    bearing = [(change, rollout, holder(rollout)) for change, rollout in state.rollouts.items() if bears(rollout)]
    found: dict[str, Arm] = {}
    made: dict[str, Arm] = {}
    for tenant in state.tenants if bearing else ():
        mine = {change: rollout for change, rollout, holds in bearing if holds is None or tenant in holds}
        key = " ".join(mine)
        if key and key not in made:
            made[key] = Arm(make_policy(under(settings, mine.values())), key)
        if key:
            found[tenant] = made[key]
    return found


@contextmanager
def own_books(state: FleetState, arm: Arm) -> Iterator[None]:
    """Meanwhile ``state`` has the books of ``arm``, which know only of its own requests, in place of the settings' policy's.

    With one count of turns for all, a tenant whose requests come after another's each time would be sent to every other replica.
    """
    books, kept = state.books[arm.books], (state.round_robin, state.shares)
    state.round_robin, state.shares = books.round_robin, books.shares
    try:
        yield
    finally:
        books.round_robin, books.shares = state.round_robin, state.shares
        state.round_robin, state.shares = kept


def holder(rollout: Rollout) -> frozenset[str] | None:
    """To be asked, never walked through: its order is chance."""
    return None if rollout.members is None else frozenset(rollout.members)


def bears(rollout: Rollout) -> bool:
    """Whether it is of the policy."""
    return rollout.variable == POLICY or rollout.variable.startswith(PARAM)


def under(settings: FleetSettings, rollouts: Iterable[Rollout]) -> FleetSettings:
    """``settings`` as the rollouts of the policy change them, those that have an effect."""
    now = settings
    for rollout in sorted(rollouts, key=lambda rollout: rollout.variable != POLICY):
        changed = changed_by(settings, now, rollout.variable, msgspec.json.decode(rollout.value))
        now = changed if refusal(changed) is None else now
    return now


def changed_by(settings: FleetSettings, now: FleetSettings, variable: str, value: object) -> FleetSettings:
    """``now`` with one change. Parameters belong to a policy: those of ``settings`` to theirs."""
    if variable == POLICY:
        params = settings.params if value == settings.policy else {}
        return msgspec.structs.replace(now, policy=value, params=params)
    return msgspec.structs.replace(now, params={**now.params, variable.removeprefix(PARAM): float(value)})  # type: ignore[arg-type]


def refusal(settings: FleetSettings) -> str | None:
    """What is wrong with the policy that ``settings`` name."""
    try:
        make_policy(settings)
    except ConfigError as error:
        return error.message
    return None
