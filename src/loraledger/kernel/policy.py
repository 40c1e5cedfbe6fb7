"""What a policy is: a pure function from what is known to a replica.

A policy never changes state and sees only feasible replicas: up, not draining, not doubted, with a seat, KV headroom and a
large enough rank for this adapter, and without a load of it parked there. It returns its candidates best first, so that each
decision can be explained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, Protocol

import msgspec

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

    def pool(self, state: FleetState, adapter: AdapterState | None) -> Iterable[ReplicaState]:
        """The replicas worth looking at for this adapter."""
        ...

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        """Rank ``feasible`` (never empty) for this request."""
        ...
