"""What may be changed to what, under the settings and the kernel as they are: all that the change desk checks, and no step."""

from __future__ import annotations

from typing import Final, Literal, Protocol

import msgspec

from loraledger.conductor.conductor import Conductor
from loraledger.config import Settings
from loraledger.errors import BadRequestError, ConflictError
from loraledger.events import Event
from loraledger.gateway.changes_case import Case, Proposal
from loraledger.gateway.changes_force import (
    Engine,
    check_restart,
    configured,
    names_of,
    shown,
    spelled,
    unit_of,
)
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.rollout import problem
from loraledger.operate.change import Change, Population, Value, check, check_variable
from loraledger.operate.population import treated

_PREEMPTIONS: Final = "preemptions"
_FIELDS: Final = {
    "after": "after", "why": "why", "target": "target", "guardrail": "guardrails", "share": "share", "block": "block_ns"
}  # fmt: skip
"""With which word ``check`` begins what it has against a field."""


class Host(Protocol):
    """What the desk needs of a gateway."""

    @property
    def settings(self) -> Settings:
        """As the file says."""
        ...

    @property
    def conductor(self) -> Conductor:
        """Who drives the kernel."""
        ...

    def now(self) -> int:
        """Nanoseconds since the epoch."""
        ...

    def feed(self, event: Event) -> None:
        """Tell the conductor what happened."""
        ...


class Checks:
    """The checks of one desk. ``held``: by variable, the accepted change whose value all have, though the file does not say so."""

    def __init__(self, host: Host) -> None:
        self.held: dict[str, Change] = {}
        self._host = host

    @property
    def fleet(self) -> Fleet:
        """The kernel."""
        return self._host.conductor.fleet

    def proposal(self, asked: Proposal, name: str) -> Change:
        """The change that is asked for. Raises BadRequestError naming the field, ConflictError when ``before`` is not in force."""
        try:
            check_variable(asked.variable)
            if asked.variable != "replicas":
                self._must_have_others(unit_of(asked.variable))
            force = self.in_force(asked.variable)
        except ValueError as error:
            raise BadRequestError(str(error), param="variable") from error
        change = Change(
            id=name,
            who=asked.who,
            why=asked.why,
            variable=asked.variable,
            before=force if asked.before is msgspec.UNSET else asked.before,
            after=asked.after,
            target=asked.target,
            guardrails=asked.guardrails,
            window_ns=asked.window_ns,
            block_ns=asked.block_ns,
            population=Population(unit_of(asked.variable), asked.share, asked.salt or name),
            proposed_ns=self._host.now(),
            reason=asked.why,
        )
        self.must_be_in_force(change)
        checked = self.checked(change)
        self._must_be_measured(checked)
        return checked

    def checked(self, change: Change) -> Change:
        """``change`` itself. Raises BadRequestError, naming the field, when it cannot be."""
        try:
            check(change)
        except ValueError as error:
            raise BadRequestError(str(error), param=_FIELDS.get(str(error).split()[0].rstrip(":"), "target")) from error
        objection = None
        if change.live:
            objection = self.problem(change, None)
        else:
            try:
                check_restart(self._host.settings, change.variable, change.after)
            except ValueError as error:
                objection = str(error)
        if objection is not None:
            raise BadRequestError(objection, param="after")
        return change

    def must_be_in_force(self, change: Change) -> None:
        """Raises ConflictError when something else is in force than what ``change`` begins with."""
        try:
            force = self.in_force(change.variable)
        except ValueError as error:
            raise ConflictError(str(error), code="change_conflict", param="variable") from error
        if force != change.before:
            raise ConflictError(
                f"before is {spelled(change.before)}, but {change.variable} is {spelled(force)} now: propose it from there",
                code="change_conflict",
                param="before",
            )

    def _must_have_others(self, unit: Literal["tenant", "replica"]) -> None:
        """Raises ConflictError when no part can be told from a rest."""
        if len(names_of(self._host.settings, unit)) < 2:
            raise ConflictError(
                f"there are fewer than two {unit}s: nobody would be left to compare with", code="change_conflict"
            )

    def _must_be_measured(self, change: Change) -> None:
        """Raises BadRequestError, naming the field, for a metric that nobody would tell."""
        blind = [replica.name for replica in self._host.settings.replicas if replica.probe is None]
        aimed = change.target.metric == _PREEMPTIONS
        if blind and (aimed or any(rail.metric == _PREEMPTIONS for rail in change.guardrails)):
            raise BadRequestError(
                f"preemptions of a request are told by an engine's probe alone, and there is none in {', '.join(blind)}:"
                " name another metric, or give every engine a probe (docs/probe.md)",
                param="target" if aimed else "guardrails",
            )

    def problem(self, change: Change, members: tuple[str, ...] | None) -> str | None:
        """Why the kernel would not take it for ``members``."""
        fleet = self.fleet
        return problem(fleet.settings, fleet.state, change.variable, change.after, members)

    def in_force(self, variable: str) -> Value:
        """What everybody has who is not being tried on. Raises ValueError where that is no one value."""
        held = self.held.get(variable)
        return self.configured(variable) if held is None else held.after

    def configured(self, variable: str) -> Value:
        """What the settings file says. Raises ValueError where that is no one value."""
        held, settings = self.held.get("policy"), self._host.settings
        return configured(settings, variable, settings.policy.name if held is None else str(held.after))

    def cannot_go_on(self, case: Case) -> str | None:
        """Why a trial cannot go on under the settings of this start."""
        change, members = case.change, set(case.members or ())
        names = set(names_of(self._host.settings, change.population.unit))
        if not members & names or not names - members:
            return f"of the {change.population.unit}s with the change or of the others none is left"
        if not change.live:
            return None
        try:
            value = self.in_force(change.variable)
        except ValueError as error:
            return str(error)
        if value != change.before:
            return f"the settings say {spelled(value)} for {change.variable} now, not {spelled(change.before)}"
        return self.problem(change, case.members)

    def engines(self, case: Case) -> dict[str, Engine]:
        """What the engines that a change waits for show; those that left the settings are missed for ever."""
        probed = {replica.name: replica.probe is not None for replica in self._host.settings.replicas}
        found = {}
        for name in case.members or ():
            replica = self.fleet.state.replicas.get(name)
            found[name] = (
                Engine(False, None)
                if replica is None
                else shown(replica, case.change.variable, probed[name], case.starts.get(name), case.waiting_since)
            )
        return found

    def members_of(self, change: Change) -> tuple[str, ...]:
        """Who gets it first; of more replicas nobody who is there. Raises ConflictError when no rest would be left to compare."""
        if change.variable == "replicas":
            return ()
        unit, population = change.population.unit, change.population
        self._must_have_others(unit)
        members = treated(names_of(self._host.settings, unit), population.share, population.salt)
        if change.live and (objection := self.problem(change, members)) is not None:
            raise ConflictError(objection, code="change_conflict")
        return members
