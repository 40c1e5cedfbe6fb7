"""An event loop whose clock jumps: it never waits for a timer, and work takes no time.

Emulator and client run in one such loop and talk over real loopback sockets, on which what was sent is readable at once. So when
nothing is readable the next timer is due, and its time is made now. Measurements of an emulated engine then hold no time of this
machine: they are exact, the same on a busy machine, and take as long as the work does.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

PATIENCE_S = 0.0005
"""Real time that a socket gets before the clock jumps."""


class VirtualSelector(selectors.DefaultSelector):
    """Ready sockets now, or else the end of the wait now."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(1.0)
        ready = super().select(0) or (super().select(PATIENCE_S) if timeout > 0 else [])
        if not ready and timeout > 0:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of that clock."""

    def __init__(self) -> None:
        self.clock = VirtualSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class Clock:
    """Stands in for the module ``time`` where durations are read."""

    def perf_counter(self) -> float:
        return asyncio.get_running_loop().time()

    def monotonic_ns(self) -> int:
        return round(self.perf_counter() * 1e9)

    def time(self) -> float:
        return self.perf_counter()


def on_virtual_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs in such a loop."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*arguments, **fixtures))

    return run
