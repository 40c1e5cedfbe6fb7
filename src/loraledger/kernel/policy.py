"""What a policy is: a pure function from what is known to a replica.

``choose`` never changes state (``pool`` may keep a policy's own books there), and sees only feasible replicas: up, not draining,
not doubted, with a seat, KV headroom and a large enough rank for this adapter, and without a load of it parked there. It returns
its candidates best first, so that each decision can be explained.

While a policy is tried on some tenants, two decide. What one keeps in the state from one decision to the next is a field of
``Books``, of which each has its own (see ``arms``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, Protocol

import msgspec

from loraledger.errors import ConfigError
from loraledger.events import Candidate
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState, RequestState

Stability = Literal["alpha", "beta", "stable"]


class Choice(msgspec.Struct, frozen=True, gc=False):
    """Candidates best first (the first is chosen), why, and how many replicas were looked at."""

    candidates: tuple[Candidate, ...]
    reason: str
    considered: int


class Policy(Protocol):
    """Chooses a replica for one request."""

    name: ClassVar[str]
    stability: ClassVar[Stability]
    reads: ClassVar[frozenset[str]]
    """Signals that it uses, in the vocabulary of the observation model."""
    defaults: ClassVar[Mapping[str, float]]
    bounds: ClassVar[Mapping[str, tuple[float, float]]]
    """Least and greatest allowed value of each parameter."""
    counts_tries: ClassVar[bool]
    """Whether ``pool`` keeps books: then it is asked also for requests that cannot be placed."""

    def pool(self, state: FleetState, adapter: AdapterState | None) -> Iterable[ReplicaState]:
        """The replicas worth looking at for this adapter."""
        ...

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """Rank ``feasible`` (never empty) for this request."""
        ...


def check_params(
    name: str,
    params: Mapping[str, float],
    known: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
) -> None:
    """Refuse parameters that a policy does not have, or that lie outside their least and greatest value.

    Raises ``ConfigError`` naming what it has, or the bounds.
    """
    unknown = [key for key in params if key not in known]
    if unknown:
        raise ConfigError(
            f"policy.params: {name} has no parameter {unknown[0]!r}; it has {', '.join(known) or 'none'}",
            param=f"policy.params.{unknown[0]}",
        )
    for key, (least, greatest) in bounds.items():
        value = params.get(key, known[key])
        if not least <= value <= greatest:
            raise ConfigError(
                f"policy.params.{key}: {value:g} must be from {least:g} to {greatest:g}", param=f"policy.params.{key}"
            )
