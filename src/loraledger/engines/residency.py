"""The slots and the host cache of one engine, rebuilt from its probe's snapshot and events (docs/probe.md).

Each rank process of an engine keeps lists of its own, and they may differ: a batch's adapters are walked in the order of a hash
set, which is another in each process. An adapter is surely in a tier only where every rank has it, so what counts is what all
have, in the order of rank 0. Names are engine-side; two copies of one name (a ghost and its successor) count as one. Which slot
an adapter is in decides nothing, so only the lists are kept.
"""

from __future__ import annotations

from typing import Any

from loraledger.engines.probe_api import MOST

Event = dict[str, Any]


class Worker:
    """One rank process: ids in both lists, least recently used first."""

    def __init__(self, snapshot: Event) -> None:
        self.n: int = snapshot["n"]
        self.active: dict[int, None] = dict.fromkeys(snapshot["slot_order"])
        self.host: dict[int, None] = dict.fromkeys(snapshot["host"])

    def apply(self, event: Event) -> bool:
        """Take in one event; ``False`` when it moved nothing, or the snapshot contained it already. Raises ``ValueError``."""
        if event["n"] <= self.n:
            return False
        self.n = event["n"]
        match event["kind"]:
            case "slots_allocated":
                self.active, self.host = {}, {}
            case "load_end":
                self.host.pop(event["id"], None)
                self.host[event["id"]] = None
                if len(self.host) > MOST:
                    raise ValueError(f"{len(self.host)} adapters in one host cache")
            case "host_evict":
                self.host.pop(event["id"], None)
            case "activation_start":
                self.active[event["id"]] = None
                self._touch(event["id"])
            case "slot_evict":
                self.active.pop(event["id"], None)
            case "touch":
                for adapter in event["ids"]:
                    self._touch(adapter)
            case _:
                return False
        return True

    def _touch(self, adapter: int) -> None:
        for order in (self.host, self.active):
            if adapter in order:
                del order[adapter]
                order[adapter] = None


class Residency:
    """All rank processes of one engine."""

    def __init__(self, snapshot: Event) -> None:
        self._workers: dict[int, Worker] = {worker["rank"]: Worker(worker) for worker in snapshot["workers"]}
        self._names: dict[int, str] = {}
        self._bytes: dict[int, int | None] = {}
        for entry in snapshot["host"]:
            self._learn(entry)
        self._pinned: set[str] = {entry["name"] for entry in snapshot["host"] if entry["pinned"]}

    def apply(self, event: Event) -> bool:
        """Take in one event; whether a list or a pin may have changed."""
        match event["kind"]:
            case "command":
                return self._commanded(event)
            case "pin_lost":
                self._pinned.discard(event["name"])
                return True
            case "load_end":
                self._learn(event)
            case _:
                pass
        worker = self._workers.get(event["rank"]) if event["role"] == "worker" else None
        return worker is not None and worker.apply(event)

    def contains(self, event: Event) -> bool:
        """Whether this is an event of a worker that was taken in before, or was in the snapshot."""
        worker = self._workers.get(event["rank"]) if event["role"] == "worker" else None
        return worker is not None and event["n"] <= worker.n

    @property
    def host(self) -> tuple[str, ...]:
        """Names that every rank holds in memory, least recently used first."""
        return self._common([worker.host for worker in self._workers.values()])

    @property
    def active(self) -> tuple[str, ...]:
        """Names that every rank holds in a slot, least recently used first."""
        return self._common([worker.active for worker in self._workers.values()])

    @property
    def pinned(self) -> tuple[str, ...]:
        """Names that the probe keeps."""
        return tuple(sorted(self._pinned.intersection(self._names.values())))

    def bytes_of(self, names: tuple[str, ...]) -> tuple[int | None, ...]:
        """Bytes in memory of one rank, of each of ``names``; ``None`` where the probe did not say."""
        by_name = {self._names[adapter]: count for adapter, count in self._bytes.items()}
        return tuple(by_name.get(name) for name in names)

    def forget_gone(self) -> None:
        """Drop the names of what no rank holds any more."""
        held = {adapter for worker in self._workers.values() for adapter in worker.host}
        self._names = {adapter: name for adapter, name in self._names.items() if adapter in held}
        self._bytes = {adapter: count for adapter, count in self._bytes.items() if adapter in held}

    def _commanded(self, event: Event) -> bool:
        """Pins are made by commands only."""
        if event["refused"] is not None or event["verb"] not in ("pin", "unpin"):
            return False
        if event["verb"] == "pin":
            self._pinned.add(event["name"])
        else:
            self._pinned.discard(event["name"])
        return True

    def _learn(self, entry: Event) -> None:
        if entry["name"] is not None:
            self._names[entry["id"]] = entry["name"]
            self._bytes[entry["id"]] = entry.get("bytes")

    def _common(self, lists: list[dict[int, None]]) -> tuple[str, ...]:
        if not lists:
            return ()
        everywhere = [adapter for adapter in lists[0] if all(adapter in other for other in lists[1:])]
        names = [self._names[adapter] for adapter in everywhere if adapter in self._names]
        return tuple(dict.fromkeys(reversed(names)))[::-1]
