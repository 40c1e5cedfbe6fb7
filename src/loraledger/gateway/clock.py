"""The wall clock of one process: nanoseconds since the epoch that never go back."""

from __future__ import annotations

import time


class WallClock:
    """Epoch time at the start, carried on by the monotonic clock, so that a step of the system clock cannot reorder events."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def __call__(self) -> int:
        """Now, in ns since the epoch."""
        return time.monotonic_ns() + self._offset
