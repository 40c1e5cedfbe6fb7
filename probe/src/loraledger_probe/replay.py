"""From events to the state of one worker: the slot map, the host cache, and what each would evict next.

Pure Python, without a dependency: what a client does with a snapshot and the events after it. The rules are few:

==================  =====================================================================
slots_allocated     all slots and the host cache are empty
load_end            the adapter is the youngest host entry
host_evict          the adapter leaves the host cache
activation_start    the adapter has the slot, and is the youngest in both orders
slot_evict          the slot is empty
touch               these become the youngest in both orders, in this sequence
==================  =====================================================================

``activation_error`` changes nothing: vLLM leaves an adapter in the slot into which it failed to copy it. A ``lost`` event of
the worker, and an answer of the events endpoint with ``lost`` above 0, mean that the state must be taken from a snapshot again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Event = Mapping[str, Any]


class Residency:
    """The state of the worker of one ``rank``; ``lost`` counts its events that are missing."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.slots: list[int | None] = []
        self.slot_order: dict[int, None] = {}
        self.host: dict[int, str | None] = {}
        self.lost = 0
        self._n = 0

    @classmethod
    def from_snapshot(cls, snapshot: Event, rank: int = 0) -> Residency:
        """Start from an answer of the residency endpoint; apply the events after its ``seq``."""
        (worker,) = [worker for worker in snapshot["workers"] if worker["rank"] == rank]
        names = {entry["id"]: entry["name"] for entry in snapshot["host"]}
        state = cls(rank)
        state.slots = list(worker["slots"])
        state.slot_order = dict.fromkeys(worker["slot_order"])
        state.host = {adapter: names.get(adapter) for adapter in worker["host"]}
        state._n = worker["n"]
        return state

    def apply(self, event: Event) -> None:
        """Take in one event; those of other processes and those that a snapshot already contained change nothing."""
        if event["role"] != "worker" or event["rank"] != self.rank or event["n"] <= self._n:
            return
        self._n = event["n"]
        kind = event["kind"]
        if kind == "lost":
            self.lost += event["count"]
        elif kind == "slots_allocated":
            self.slots, self.slot_order, self.host = [None] * event["slots"], {}, {}
        elif kind == "load_end":
            self.host[event["id"]] = event["name"]
        elif kind == "host_evict":
            self.host.pop(event["id"], None)
        elif kind == "activation_start":
            self.slots[event["slot"]] = event["id"]
            self._touch(event["id"], into_slot=True)
        elif kind == "slot_evict":
            self.slots[event["slot"]] = None
            self.slot_order.pop(event["id"], None)
        elif kind == "touch":
            for adapter in event["ids"]:
                self._touch(adapter)

    def _touch(self, adapter: int, *, into_slot: bool = False) -> None:
        if adapter in self.host:
            self.host[adapter] = self.host.pop(adapter)
        if into_slot or adapter in self.slot_order:
            self.slot_order.pop(adapter, None)
            self.slot_order[adapter] = None
