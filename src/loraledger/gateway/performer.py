"""Carries out the kernel's commands live: requests go to the data plane, adapters and checks to the engine's driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from loraledger.engines.protocol import EngineDriver
from loraledger.events import Check, Command, Dispatch, Evict, Load, Move, Queue, Reject


class Plane(Protocol):
    """What of the data plane the performer needs."""

    def perform(self, command: Dispatch | Queue | Reject) -> None:
        """Carry out a command for one of its requests."""
        ...


class LivePerformer:
    """The conductor's performer in a gateway process. ``plane`` and ``drivers`` are set before the first event."""

    def __init__(self) -> None:
        self.plane: Plane | None = None
        self.drivers: Mapping[str, EngineDriver] = {}

    def perform(self, command: Command) -> None:
        """Hand ``command`` to whoever it is for."""
        if isinstance(command, Load | Evict | Move | Check):
            self.drivers[command.replica].perform(command)
        else:
            assert self.plane is not None
            self.plane.perform(command)
