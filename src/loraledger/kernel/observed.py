"""What the probe inside a replica's engine said of its tiers, its memory and its steps: plain data of the kernel's state."""

from __future__ import annotations

import msgspec

from loraledger.kernel.settings import SECOND

KEPT = 64
"""Durations of loads and activations that are kept for their quantiles."""
TAU = 60 * SECOND
"""Time over which events a minute are averaged."""


class Rate(msgspec.Struct, array_like=True):
    """Things a minute, exponentially averaged over ``TAU``: the average of a Poisson stream is then its rate."""

    level: float = 0.0
    at: int = 0

    def add(self, count: int, now: int) -> None:
        """``count`` more of them."""
        self.level = self.value(now) + count * 0.6931 * 60 * SECOND / TAU
        self.at = now

    def value(self, now: int) -> float:
        """The rate at ``now``."""
        return float(self.level * 0.5 ** ((now - self.at) / TAU))


class Observed(msgspec.Struct):
    """What one probe said last. ``as_of``: when its account of the tiers was true, ns since the epoch."""

    as_of: int
    pinned: tuple[str, ...] = ()
    host_bytes: dict[str, int | None] = {}
    """By engine-side name."""
    blocked: dict[str, int] = {}
    """Requests that waited for a slot in the last steps seen, by engine-side name."""
    adapters: int | None = None
    """Distinct adapters in the last batch seen."""
    kv_free: int | None = None
    """Free KV blocks."""
    steps_at: int = 0
    moved: int = 0
    """When an operator last had something moved there: what changes then is no contradiction."""
    preempted: Rate = msgspec.field(default_factory=Rate)
    recomputed: Rate = msgspec.field(default_factory=Rate)


class Activity(msgspec.Struct):
    """What went on at one replica lately. Durations are (when it ended, how long it took), ns, the last ``KEPT`` of each."""

    calls: list[tuple[int, int]] = []
    """Explicit load calls, as this gateway timed them: disk to host to slot, and the way there."""
    loads: list[tuple[int, int]] = []
    """Disk to host, as the engine timed them."""
    activations: list[tuple[int, int]] = []
    """Host to slot, as the engine timed them."""
    load_rate: Rate = msgspec.field(default_factory=Rate)
    activation_rate: Rate = msgspec.field(default_factory=Rate)
    eviction_rate: Rate = msgspec.field(default_factory=Rate)
    preemption_rate: Rate = msgspec.field(default_factory=Rate)
    preemptions: int | None = None
    """The engine's own count at the last sample."""


def keep(durations: list[tuple[int, int]], at: int, took: int | None) -> None:
    """Add one duration and forget the oldest beyond ``KEPT``."""
    if took is not None:
        durations.append((at, took))
        del durations[:-KEPT]
