"""One step in the making, and what decides in it."""

from __future__ import annotations

from heapq import heappush

import msgspec

from loraledger.events import Command, ResidencyChange
from loraledger.kernel.policy import Policy
from loraledger.kernel.settings import FleetSettings
from loraledger.kernel.state import FleetState, ReplicaState


class Arm(msgspec.Struct, frozen=True):
    """The policy of the tenants that the same rollouts hold for. ``books``: the key of its books in the state."""

    policy: Policy
    books: str


class Turn(msgspec.Struct):
    """One step in the making: the state, the time, and what the step has decided so far."""

    settings: FleetSettings
    state: FleetState
    now: int
    arms: dict[str, Arm] = {}
    """By tenant, what decides for it in place of the settings' policy."""
    commands: list[Command] = []
    changes: list[ResidencyChange] = []

    def count(self, name: str) -> None:
        """Add one to a named counter."""
        counters = self.state.counters
        counters[name] = counters.get(name, 0) + 1

    def drift(self, replica: ReplicaState, kind: str) -> None:
        """What the engine shows contradicts what was believed: counted, never an error."""
        replica.drift[kind] = replica.drift.get(kind, 0) + 1
        self.count(f"drift:{kind}")

    def wake(self, at: int) -> None:
        """Ask to be stepped at ``at``."""
        if at not in self.state.wakes:
            self.state.wakes[at] = None
            heappush(self.state.timers, (at, ""))

    def command_id(self, replica: str, adapter: str) -> int:
        """A fresh id for a command whose outcome will be reported."""
        number = self.state.next_command
        self.state.next_command = number + 1
        self.state.commands[number] = (replica, adapter)
        return number
