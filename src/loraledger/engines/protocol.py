"""What the gateway needs of an engine replica, whichever engine it is.

Theory of operation. A driver owns one replica: it watches it and carries out the commands that touch its adapters. It
decides nothing. All that it learns goes to the conductor as events, and so does the outcome of each command; nothing
is returned and nothing is raised, because live and replay must look the same from the kernel's side.

Order. Commands of one replica are carried out one at a time, in the order in which they were given: each load stalls
every stream of that engine, so two at once gain nothing, and an unload that overtook a load would undo it. What a
driver feeds as ``registered`` is never older than the command outcomes that it fed before.

Reasons. ``ReplicaDown.reason`` and ``CommandFailed.reason`` begin with a stable machine-readable code; where the
engine said something itself, ``": "`` and its words follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from loraledger.events import Check, Evict, Load, Move


@dataclass(frozen=True, slots=True)
class ReplicaTarget:
    """Where one replica is and how patiently to treat it. All times in nanoseconds.

    ``path_map`` holds pairs (path prefix here, path prefix on the engine's machine), the first match wins; a path that
    matches none goes out unchanged.
    """

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    probe_key: str | None = field(default=None, repr=False)
    """Key of the probe inside the engine; ``None``: it is not asked for one."""
    tensor_parallel: int = 1
    """Rank processes, as configured."""
    path_map: tuple[tuple[str, str], ...] = ()
    scrape_interval: int = 1_000_000_000
    models_every: int = 30
    """Scrapes between two readings of the list of registered adapters, when nothing else asks for one."""
    probe_timeout: int = 2_000_000_000
    """For one whole answer to a question: health, metrics, models, version."""
    load_timeout: int = 120_000_000_000
    """For one whole answer to a load or an unload."""


class EngineDriver(Protocol):
    """One replica, watched and commanded."""

    @property
    def name(self) -> str:
        """The replica's name, as in every event that this driver feeds."""
        ...

    async def run(self) -> None:
        """Watch the replica and carry out commands until cancelled. Run it once."""
        ...

    def perform(self, command: Load | Evict | Move | Check) -> None:
        """Begin to carry out ``command``. Never blocks, never raises; how loads and evictions end comes as events."""
        ...

    async def close(self) -> None:
        """Give back connections. ``run`` does so itself at its end; closing twice is harmless."""
        ...
