"""How many replicas should hold each adapter, in proportion to its share of the load: NVIDIA Dynamo's LoRA controller.

From ``lib/llm/src/lora/controller.rs`` (version 1.6): each tick the arrivals of a window, smoothed (EMA), are a load per adapter;

    copies = min(replicas, max(1, ceil(share of load x slots of the fleet)))

and where the sum exceeds the slots, all are scaled down, at least 1 (so it may still exceed them), and what rounding leaves
goes to the largest remainders.
An adapter loses copies only when it should have had fewer for ``cooldown`` ticks; one whose load rounds to 0 is idle and has one.

Here the window is the kernel's own exponential average of arrivals, which is why no arrival needs to be remembered, and ticks
are taken when the first request after them is routed: nothing in between would have read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import msgspec


class Shares(msgspec.Struct):
    """What is kept from tick to tick. ``tick``: the last that was taken; the rest by adapter, active ones only."""

    tick: int = 0
    load: dict[str, float] = {}
    copies: dict[str, int] = {}
    shrinking: dict[str, int] = {}
    """The tick since which an adapter has had more copies than its share."""

    def advance(self, tick: int, arrivals: Mapping[str, float], alpha: float) -> None:
        """Smooth the loads up to ``tick``. ``arrivals``: expected in the window, by adapter; absent is none."""
        if tick < self.tick:  # the clock was set back between two processes
            self.shrinking.clear()
        kept = (1.0 - alpha) ** max(1, tick - self.tick)
        self.tick = tick
        loads = {name: self.load.get(name, count) * kept + count * (1.0 - kept) for name, count in arrivals.items()}
        for name, load in self.load.items():
            if name not in loads:
                loads[name] = load * kept
        self.load = {name: load for name, load in loads.items() if load >= 0.01}

    def allot(self, slots: int, replicas: int, cooldown: int) -> None:
        """Set ``copies`` for a fleet of so many slots and replicas that are in routing."""
        wanted = proportional({name: int(load + 0.5) for name, load in self.load.items()}, slots, replicas)
        self.shrinking = {name: since for name, since in self.shrinking.items() if name in wanted}
        self.copies = {name: self._damped(name, count, cooldown) for name, count in wanted.items()}

    def _damped(self, name: str, wanted: int, cooldown: int) -> int:
        present = self.copies.get(name, 0)
        if wanted >= present:
            self.shrinking.pop(name, None)
            return wanted
        since = self.shrinking.setdefault(name, self.tick)
        return wanted if since < self.tick and self.tick - since >= cooldown else present


def proportional(loads: Mapping[str, int], slots: int, replicas: int) -> dict[str, int]:
    """Copies of each adapter with a load, at least 1 and at most ``replicas``; equal remainders in the order of ``loads``."""
    active = {name: load for name, load in loads.items() if load > 0}
    total = sum(active.values())
    raw = {name: min(replicas, max(1, ceil(load * slots / total))) for name, load in active.items()}
    asked = sum(raw.values())
    if asked <= slots:
        return raw
    scaled = {name: max(1.0, count * slots / asked) for name, count in raw.items()}
    floors = {name: int(count) for name, count in scaled.items()}
    left = slots - sum(floors.values())
    for name in sorted(scaled, key=lambda n: floors[n] - scaled[n]):
        if left <= 0:
            break
        if floors[name] < replicas:
            floors[name] += 1
            left -= 1
    return floors
