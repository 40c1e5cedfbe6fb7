"""One change of one variable: what is changed, for whom, what it is to improve, what it must not harm, and where it stands.

Theory of operation. A change is a state machine written as a table, as an adapter's residency is::

    proposed --replay--> replayed --roll_out--> rolling_out --accept----> accepted
       |                    |                    |    ^     \\--roll_back-> rolled_back
       |                    |                    |    |
       |                    +----await----> waiting_restart --roll_back--> rolled_back
       +------withdraw------+--> withdrawn            (an engine came back with the new setting: roll_out)

It is *open* from ``proposed`` on until it ended. A replay is not optional: nothing goes live that was not played first.

What can be changed while the fleet runs (policy, one of its parameters, pins, a tenant's limit) is set for a part of the tenants or
replicas and compared with the rest. What an engine reads only when it starts (slots, host entries) and what is bought (replicas)
is never applied from here: the flags are given to the operator, and the change goes on when an engine shows the new value.

Values are JSON: numbers and names, and for pins a list of [replica, adapter].
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

State = Literal["proposed", "replayed", "waiting_restart", "rolling_out", "accepted", "rolled_back", "withdrawn"]
Trigger = Literal["replay", "roll_out", "await", "accept", "roll_back", "withdraw"]

TABLE: Final[dict[tuple[State, Trigger], State]] = {
    ("proposed", "replay"): "replayed",
    ("replayed", "replay"): "replayed",  # played again, say on a newer record
    ("replayed", "roll_out"): "rolling_out",
    ("replayed", "await"): "waiting_restart",
    ("waiting_restart", "roll_out"): "rolling_out",
    ("waiting_restart", "roll_back"): "rolled_back",
    ("rolling_out", "accept"): "accepted",
    ("rolling_out", "roll_back"): "rolled_back",
    ("proposed", "withdraw"): "withdrawn",
    ("replayed", "withdraw"): "withdrawn",
}
OPEN: Final[frozenset[State]] = frozenset(("proposed", "replayed", "waiting_restart", "rolling_out"))

Metric = Literal[
    "hit_rate", "ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99", "itl_mean", "attainment", "preemptions", "refused"
]
BETTER: Final[dict[Metric, Literal["up", "down"]]] = {
    "hit_rate": "up",
    "attainment": "up",
    "ttft_mean": "down",
    "ttft_p50": "down",
    "ttft_p90": "down",
    "ttft_p99": "down",
    "itl_mean": "down",
    "preemptions": "down",
    "refused": "down",
}
"""Which way each is better. Shares: ``hit_rate``, ``attainment``, ``refused``; s: ``ttft_*``, ``itl_mean``; ``preemptions``: KV
preemptions for 1,000 requests."""

LIVE: Final = ("policy", "pins", "tenant.concurrency")
"""With ``policy.PARAM``: set while the fleet runs."""
RESTART: Final = ("slots", "host_entries", "replicas")
"""Read by engines when they start, or bought."""
_PARAM: Final = re.compile(r"policy\.[a-z][a-z0-9_]*")

Value = bool | int | float | str | None | list[list[str]]


class Target(msgspec.Struct, frozen=True):
    """``metric`` is to get better by more than ``least`` (in its unit, 0 or more)."""

    metric: Metric
    least: float = 0.0


class Guardrail(msgspec.Struct, frozen=True):
    """``metric`` must not get worse by more than ``worse_by`` (in its unit, 0 or more) against the rest of the fleet."""

    metric: Metric
    worse_by: float = 0.0


class Check(msgspec.Struct, frozen=True):
    """The target, or a guardrail, of two runs. ``moved``: by how much it got better (target) or worse (guardrail), in its unit."""

    metric: Metric
    role: Literal["target", "guardrail"]
    limit: float
    before: float | None
    after: float | None
    moved: float | None
    verdict: Literal["pass", "fail", "unknown"]


class Population(msgspec.Struct, frozen=True):
    """Who gets the change first: so large a share of the tenants, or of the replicas, by hash with ``salt``."""

    unit: Literal["tenant", "replica"]
    share: float
    salt: str


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """``before`` and ``after`` are values of ``variable``; ``window_ns``: the time by which the target has to be better."""

    id: str
    who: str
    why: str
    variable: str
    before: Value
    after: Value
    target: Target
    guardrails: tuple[Guardrail, ...]
    window_ns: int
    block_ns: int
    """Length of one block of time: each gives one difference to the test."""
    population: Population
    state: State = "proposed"
    proposed_ns: int = 0
    began_ns: int | None = None
    """When the rollout began."""
    ended_ns: int | None = None
    reason: str = ""
    """Why it is in its state, as it was journalled."""

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.state in OPEN

    @property
    def live(self) -> bool:
        """Whether its variable is set while the fleet runs."""
        return is_live(self.variable)

    def step(self, trigger: Trigger, at_ns: int, reason: str) -> Change:
        """The change after ``trigger``. Raises ValueError, saying what may be done with it, where the table has no such step."""
        after = TABLE.get((self.state, trigger))
        if after is None:
            may = ", ".join(known for state, known in TABLE if state == self.state)
            raise ValueError(
                f"change {self.id} is {self.state}: it cannot {trigger}; it can {may or 'do nothing more'}"
            )
        return msgspec.structs.replace(
            self,
            state=after,
            reason=reason,
            began_ns=at_ns if trigger == "roll_out" else self.began_ns,
            ended_ns=None if after in OPEN else at_ns,
        )


def is_live(variable: str) -> bool:
    """Whether ``variable`` is set while the fleet runs; ``False``: engines read it when they start, or it is bought."""
    return variable in LIVE or _PARAM.fullmatch(variable) is not None


def check_variable(variable: str) -> None:
    """Raises ValueError for what cannot be changed, with what can."""
    if variable not in RESTART and not is_live(variable):
        raise ValueError(f"{variable!r} cannot be changed here: use {', '.join((*LIVE, 'policy.PARAM', *RESTART))}")


def check(change: Change) -> None:
    """Raises ValueError, naming the field and the remedy, for a change that cannot be."""
    check_variable(change.variable)
    if change.before == change.after:
        raise ValueError(f"after is {change.after!r} as before: there is nothing to change")
    if not change.why.strip():
        raise ValueError("why is empty: say what the change is for, in a few words")
    if change.target.least < 0:
        raise ValueError(f"target: {change.target.least:g} is negative: give the least improvement that is worth it")
    for guardrail in change.guardrails:
        if guardrail.worse_by < 0:
            raise ValueError(
                f"guardrail {guardrail.metric}: {guardrail.worse_by:g} is negative: say how much worse it may get"
            )
    if change.target.metric in {guardrail.metric for guardrail in change.guardrails}:
        raise ValueError(f"{change.target.metric} is the target and a guardrail: it can be one of both")
    if not 0 < change.population.share < 1:
        raise ValueError(
            f"share is {change.population.share:g}: must be above 0 and below 1, to leave a rest to compare with"
        )
    if not 0 < change.block_ns <= change.window_ns:
        raise ValueError("block must be longer than 0 and no longer than the window")


def conflict(change: Change, others: list[Change]) -> str | None:
    """Why ``change`` may not be opened beside ``others``: one variable, or one population, is changed once at a time."""
    for other in others:
        if not other.open or other.id == change.id:
            continue
        if other.variable == change.variable:
            return f"{change.variable} is being changed already, by {other.id} ({other.state}): end that one first"
        if other.population.unit == change.population.unit:
            return (
                f"{other.id} ({other.state}) is being tried on a part of the {change.population.unit}s already:"
                " two changes at once could not be told apart; end that one first"
            )
    return None


def held(value: Value, accepted: Iterable[Change]) -> tuple[Change | None, list[Change]]:
    """Of the ``accepted`` changes of one variable, oldest first: the one that still has to be held, and those that the file ended.

    ``value`` is what the settings file says. Each change began with what the one before it had brought.
    """
    rest, over = list(accepted), list[Change]()
    while rest and value != rest[-1].after:
        if value == rest[0].before:
            return rest[-1], over
        over.append(rest.pop(0))
    return None, over + rest
