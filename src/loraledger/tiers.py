"""An engine's adapter tiers as it really runs them: two LRU lists, host cache and slots.

Theory of operation. vLLM keeps two least-recently-used lists in each worker: adapters in host memory (a *count*,
``max_cpu_loras``) and adapters in GPU slots (``max_loras``). What it does when a step needs an adapter:

1. not on the host: read it from disk, evict the oldest host entry if the list is full (which also empties that adapter's slot);
2. not in a slot: evict the oldest slot if all are taken, copy it in;
3. move it to the young end of both lists.

An explicit load call does the same. Unloading only forgets the *name*: the entry stays in both lists until its turn comes, so
names here are engine-side versioned names and a reload is another entry. The lists protect nobody. The scheduler lets a
request wait whose adapter would be one more than there are slots, but once running adapters take them all, a newcomer pushes out
the first one whose turn in that step is still to come, which comes back at its turn (``twin.slots``); what lies where after the
step is the same as if only idle ones had left. A load call does not wait: the slot that it takes from a
running adapter goes back to that one in the next step.

**Pins** are those of the probe (docs/probe.md): no lock but an order. Before anything is brought in, ``arrange`` puts what is
pinned and then the batch at the young end of both lists, so a pinned adapter leaves when only the batch is left to leave, and its
pin with it.

The kernel keeps one ``EngineTiers`` per replica as its belief and replays what it sent; the twin keeps one as the truth.
Python dicts keep insertion order, so a dict is the LRU list: first key oldest.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from loraledger.events import Tier


class Movement(msgspec.Struct, frozen=True, gc=False):
    """What one use of an adapter moved. ``loaded``: disk to host; ``activated``: host to slot."""

    loaded: bool = False
    activated: bool = False
    evicted_host: str | None = None
    evicted_slot: str | None = None


_HIT = Movement()


class EngineTiers(msgspec.Struct):
    """Both lists of one engine. ``slots`` and ``host_entries`` are counts; ``host`` always contains ``active``.

    ``pinned``: of ``active``, oldest pin first.
    """

    slots: int
    host_entries: int
    active: dict[str, None] = msgspec.field(default_factory=dict)
    host: dict[str, None] = msgspec.field(default_factory=dict)
    pinned: dict[str, None] = msgspec.field(default_factory=dict)

    def tier(self, name: str) -> Tier:
        """Where this registered adapter's bytes are: ``gpu``, ``host`` or ``disk``."""
        if name in self.active:
            return "gpu"
        return "host" if name in self.host else "disk"

    def use(self, name: str) -> Movement:
        """A step (or a load call) needs ``name``: bring it into a slot and return what moved."""
        active, host = self.active, self.host
        if name in active:
            del active[name], host[name]
            active[name] = host[name] = None
            return _HIT
        loaded = name not in host
        evicted_host = evicted_slot = None
        if not loaded:
            del host[name]
        elif len(host) >= self.host_entries:
            evicted_host = next(iter(host))
            del host[evicted_host]
            if evicted_host in active:
                del active[evicted_host]
                evicted_slot = evicted_host
        host[name] = None
        if len(active) >= self.slots:
            evicted_slot = next(iter(active))
            del active[evicted_slot]
        active[name] = None
        if self.pinned and evicted_slot is not None:
            self.pinned.pop(evicted_slot, None)
        return Movement(loaded, True, evicted_host, evicted_slot)

    def touch(self, names: Iterable[str]) -> None:
        """A step ran requests of ``names``: those in a slot are the youngest now."""
        active, host = self.active, self.host
        for name in names:
            if name in active:
                del active[name], host[name]
                active[name] = host[name] = None

    def arrange(self, batch: Iterable[str]) -> None:
        """Something is to be brought in while ``batch`` runs: what is pinned leaves after what is not, the batch last."""
        if not self.pinned:
            self.touch(batch)
            return
        batch = tuple(batch)
        for name in (*(held for held in self.pinned if held not in batch), *batch):
            for held in (self.host, self.active):
                if name in held:
                    del held[name]
                    held[name] = None

    def leaving(self) -> list[str]:
        """The adapters in slots, in the order in which others push them out."""
        return [*(name for name in self.active if name not in self.pinned), *self.pinned]

    def fetch(self, name: str) -> Movement:
        """A load call while running requests hold every slot: all that stays of it is the copy on the host."""
        host = self.host
        loaded, evicted = name not in host, None
        if loaded and len(host) >= self.host_entries:
            evicted = next((held for held in host if held not in self.active), None)
            if evicted is None:
                return self.use(name)  # it pushes out what runs
            del host[evicted]
        host.pop(name, None)
        host[name] = None
        self.touch(list(self.active))
        return Movement(loaded=loaded, evicted_host=evicted)

    def victim(self, name: str) -> str | None:
        """The adapter that would lose its slot if ``name`` were used now; ``None`` if none would. Pins have been arranged."""
        if name in self.active or len(self.active) < self.slots:
            return None
        if name not in self.host and len(self.host) >= self.host_entries:
            oldest = next(iter(self.host))
            if oldest in self.active:
                return oldest
        return next(iter(self.active))

    def drop(self, name: str, tier: Tier) -> None:
        """The engine reported that ``name`` left ``tier``; leaving the host empties its slot too."""
        self.active.pop(name, None)
        self.pinned.pop(name, None)
        if tier == "host":
            self.host.pop(name, None)

    def clear(self) -> None:
        """The engine's process is new: nothing is resident."""
        self.active.clear()
        self.host.clear()
        self.pinned.clear()
