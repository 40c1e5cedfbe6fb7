"""A kernel among replicas that look well and break what they are sent, on a virtual clock.

Looks (one a second, and each that a ``Check`` asks for) always find every replica well: nothing but the requests tells.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import Literal

from loraledger import events as ev
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.settings import MS, SECOND, Limits, TenantSpec

from .bench import T0, fleet_of

Fault = Literal["closes", "answers 500", "cuts streams"]
FAULTS: tuple[Fault, ...] = ("closes", "answers 500", "cuts streams")
SERVICE, BREAKING, LOOK = 2 * SECOND, 5 * MS, 50 * MS
PROMPT = 4
"""Tokens. No first token is told here, so a prompt counts until its answer ends: 200 of them must be within a tenant's share."""
TENANT, POISON = "acme", "poison"


class BreakingFleet:
    """Replicas ``r1`` to ``rN``; those in ``broken`` break everything, all break what tenant ``poison`` sends.

    ``sent``: dispatches by replica. ``ends``: what became of the requests of ``acme``: ``ok``, ``cut`` or the code of a refusal.
    """

    def __init__(
        self, fault: Fault, broken: tuple[str, ...] = (), replicas: int = 3, limits: Limits | None = None
    ) -> None:
        tenants = [TenantSpec(name, 100_000, 100_000) for name in (TENANT, POISON)]
        self.fleet = Fleet(fleet_of(replicas, tenants=tenants, limits=limits))
        self.fault = fault
        self.broken = set(broken)
        self.sent: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self._due: list[tuple[int, int, Callable[[int], None]]] = []
        self._pushed = 0
        for name in self.fleet.state.replicas:
            self._feed(ev.ReplicaUp(T0, name, 1, ()))
            self._later(T0, lambda at, name=name: self._watch(at, name))  # type: ignore[misc]

    def play(self, requests: int, per_second: float, poison_per_second: float = 0.0) -> None:
        """Let requests arrive evenly from now on, and a minute pass after the last one."""
        began, first = self.fleet.state.now, self.ends.total()
        for number in range(requests):
            self._arrive(began + int((number + 1) / per_second * SECOND), f"q{first + number}", TENANT)
        for number in range(int(requests / per_second * poison_per_second)):
            self._arrive(began + int((number + 1) / poison_per_second * SECOND), f"p{number}", POISON)
        end = began + int(requests / per_second * SECOND) + 60 * SECOND
        while self._due[0][0] <= end:
            at, _, happen = heapq.heappop(self._due)
            happen(at)
        assert not self.fleet.state.requests

    def _arrive(self, at: int, request: str, tenant: str) -> None:
        arrival = ev.RequestArrived(at, request, tenant, None, PROMPT, 100, True, "/v1/chat/completions")
        self._later(at, lambda at: self._feed(arrival))

    def _later(self, at: int, happen: Callable[[int], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._due, (at, self._pushed, happen))

    def _watch(self, at: int, name: str) -> None:
        self._look(at, name)
        self._later(at + SECOND, lambda at: self._watch(at, name))

    def _look(self, at: int, name: str) -> None:
        self._feed(ev.ScrapeStarted(at, name))
        self._feed(ev.ReplicaSampled(at, name, at, 0, 0, 0.0, None))

    def _feed(self, event: ev.Event) -> None:
        commands, wake_at = self.fleet.step(event)
        for command in commands:
            if isinstance(command, ev.Dispatch):
                self._dispatched(event.at, command)
            elif isinstance(command, ev.Reject):
                self._ended(command.request, command.code)
            elif isinstance(command, ev.Check):
                self._later(event.at + LOOK, lambda at, name=command.replica: self._look(at, name))  # type: ignore[misc]
        if wake_at is not None:
            self._later(max(wake_at, event.at), lambda at: self._feed(ev.Wake(at)))

    def _dispatched(self, at: int, command: ev.Dispatch) -> None:
        self.sent[command.replica] += 1
        if command.replica in self.broken or command.request.startswith("p"):
            self._later(at + BREAKING, lambda at: self._break(at, command))
        else:
            self._later(at + SERVICE, lambda at: self._finish(at, command.request, "ok", "ok"))

    def _break(self, at: int, command: ev.Dispatch) -> None:
        if self.fault == "cuts streams":
            self._feed(ev.RequestFirstToken(at, command.request))
            self._finish(at, command.request, "upstream_reset", "cut")
        else:
            status: ev.Status = "engine_error" if self.fault == "answers 500" else "upstream_failed"
            http = 500 if self.fault == "answers 500" else None
            self._feed(ev.AttemptFailed(at, command.request, command.attempt, status, http, "broken"))

    def _finish(self, at: int, request: str, status: ev.Status, end: str) -> None:
        self._ended(request, end)
        measured = ev.Measured(generated_tokens=100, itl_mean=20 * MS) if status == "ok" else ev.Measured()
        self._feed(ev.RequestFinished(at, request, status, 200, None, measured))

    def _ended(self, request: str, end: str) -> None:
        if request.startswith("q"):
            self.ends[end] += 1
