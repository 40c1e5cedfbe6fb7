"""What the record does not hold and whoever judges it must be told: places of each replica, bytes of each adapter.

``None`` is unknown. The command line fills this from the settings and the store; a foreign log comes with what its owner says.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import msgspec

from loraledger.units import format_bytes

SIZE_EDGES: Final = (16 * 2**20, 64 * 2**20, 256 * 2**20)
"""Between size classes of adapters, in bytes: rank 8, 16 to 32, 64 of an 8B model, and more (docs/adapters.md)."""


class ReplicaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as configured."""

    slots: int | None = None
    host_entries: int | None = None
    kv_tokens: int | None = None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """By name. A replica or an adapter that is not here is one of which nothing is known."""

    replicas: dict[str, ReplicaFacts] = {}
    adapter_bytes: dict[str, int] = {}
    source: str = "nothing was said of replicas and adapters"
    """Where these come from, as a person would look for it: a settings file, options of the command line."""

    def replica(self, name: str) -> ReplicaFacts:
        """What is known of it; all ``None`` when nothing is."""
        return self.replicas.get(name, _NOTHING)


_NOTHING: Final = ReplicaFacts()


def size_class(count: int | None) -> str:
    """The size class of an adapter of so many bytes: ``<16 MiB``, ``16 MiB to 64 MiB``, ... ``unknown``."""
    if count is None:
        return "unknown"
    if count < SIZE_EDGES[0]:
        return f"<{format_bytes(SIZE_EDGES[0])}"
    for low, high in pairwise(SIZE_EDGES):
        if count < high:
            return f"{format_bytes(low)} to {format_bytes(high)}"
    return f">={format_bytes(SIZE_EDGES[-1])}"
