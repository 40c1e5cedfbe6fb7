"""Pins that cannot kill an engine.

vLLM can pin an adapter, but its scheduler does not know of pins. It plans a batch of as many adapters as there are slots;
if a pinned idle one holds a slot, the step fails, and a failed step ends the engine ("All items are pinned", or a
KeyError for the adapter that lost its slot to another of the same batch).

So a pin here is no lock but an order. Before adapters are activated, the two least-recently-used lists are arranged:
whatever is neither pinned nor of this batch comes first, then pinned adapters, then those of this batch. vLLM then
evicts what it always evicts, the first. A pinned adapter stays for as long as any other could leave; when a batch needs
every slot, the pin gives way and ``pin_lost`` says so. Without a pin nothing is touched.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class Pins:
    """The pinned adapters of this worker, by id, oldest pin first."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._names

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, adapter: int, name: str) -> None:
        """Pin; the adapter must be in a slot."""
        self._names[adapter] = name

    def drop(self, adapter: int) -> bool:
        """Unpin; whether it was pinned."""
        return self._names.pop(adapter, None) is not None

    def ids(self) -> list[int]:
        """Return the pinned ids, oldest pin first."""
        return list(self._names)

    def arrange(self, manager: Any, batch: Collection[int]) -> list[int]:
        """Put pinned adapters, then those of ``batch``, at the young end of both lists; return the ids in that order."""
        order = [adapter for adapter in self._names if adapter not in batch]
        order += [adapter for adapter in batch if adapter in manager._registered_adapters]
        for adapter in order:
            manager._registered_adapters.touch(adapter)
            manager._active_adapters.touch(adapter)  # of one that is not there: does nothing
        return order
