"""What the conductor needs of the outside: a clock, and someone who carries out commands.

Live, the performer is the gateway (dispatch, queue, reject) with its engine drivers (load, evict, check), and the clock is the
wall clock. In replay the performer is a fleet of twins and the clock is virtual. The conductor cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from loraledger.events import Command, Event

Clock = Callable[[], int]
"""Nanoseconds since the epoch; never goes back within a process."""

Feed = Callable[[Event], None]
"""How everyone tells the conductor what happened. Safe to call from inside ``Performer.perform``: the event waits its turn."""


class Performer(Protocol):
    """Carries out one command. Must not block and must not raise: failures come back as events."""

    def perform(self, command: Command) -> None:
        """Begin to carry out ``command``; its outcome is fed back as an event."""
        ...
