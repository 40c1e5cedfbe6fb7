"""Adapters in a fixed number of slots, with a host cache behind them: what each step moves.

Theory of operation. Each read from disk and each copy into a slot makes the whole step longer, for everyone in it; so does a load
call, which holds the engine. A step uses its adapters one after the other, in vLLM in the order of a Python set of their names,
which is fixed within a process and differs from one to the next. Here it is the order of a number drawn from the name
(``Adapter.place``), which stands for one such process.

The order matters, for the lists protect nobody: what is used while all slots are taken pushes out the oldest, and once no idle
adapter is left that is one of the batch, namely the first whose turn in this step is still to come. It comes back at its turn and
pushes out the next. So an adapter that takes the slot of one that has just left moves every adapter between the two in that
order: with all of S slots in flight (S + 5) / 6 activations a change in the mean instead of 1, and as many loads where the host
cache has no idle entry either. Where everything is after the step does not depend on the order.

Every step makes its batch the youngest of both lists, which only matters once something must leave. So batches that move nothing
are not carried out at once. Adapters that leave the batch are remembered in the order in which they did, and become the youngest
when the next adapter has to come in; those of the batch stay where they are and are passed over when it is their turn to leave.
What leaves is then what would have left, as long as this step's adapters and the last one's have slots enough together. Before a
step in which they have not, and before a load call, both lists are made true, and nobody is passed over.

**Pins** are the probe's (docs/probe.md). With one, each step first puts what is pinned and then its whole batch at the young end
of both lists: idle adapters leave first, then pinned ones, and nobody of the batch before its turn. Nothing is then put off: both
lists are true after each step that changes the batch. A load call protects pins and not the batch. What a command of the probe may
do is the probe's rule too: what is pinned and what has requests must fit the slots, one of which serves the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from loraledger.events import MoveVerb, Tier
from loraledger.tiers import EngineTiers
from loraledger.twin.events import Activated, Evicted, Loaded, PinLost, TwinEvent
from loraledger.twin.profile import TwinProfile
from loraledger.twin.requests import PLACE, Adapter


class SlotStore:
    """The tiers of one replica. ``missing``: a step needed this adapter, and ``readable`` said that its files are gone.

    ``disturbed``: a load call may have taken a slot of the batch, so that its adapters have to pass even if it does not change.
    """

    def __init__(self, profile: TwinProfile, readable: Callable[[str], bool] | None) -> None:
        self.missing: Adapter | None = None
        self._profile = profile
        self._readable = readable
        self._tiers = EngineTiers(profile.slots, profile.host_entries)
        self._names: dict[str, str] = {}  # of the keys in the host cache
        self._idle: dict[Adapter, None] = {}  # left the batch since the lists were last true, first one oldest
        self.disturbed = False
        self._busy: set[str] = set()  # keys of the batch, passed over

    def tier(self, adapter: Adapter) -> Tier:
        """Where the bytes of ``adapter`` are."""
        return self._tiers.tier(adapter.key)

    def load(
        self, adapter: Adapter, batch: Iterable[Adapter], left: list[Adapter], now: int, out: list[TwinEvent]
    ) -> int:
        """A load call after a step of ``batch`` and of those that ``left`` it since; returns when it is done."""
        self._interrupt(batch, left)
        self._tiers.arrange((adapter.key,))
        return self._use(adapter, now, out)

    def refusal(self, name: str, adapter: Adapter | None, verb: MoveVerb, in_flight: Collection[str]) -> str | None:
        """Why the probe would not carry out ``verb``, as its code; ``None``: it would. ``in_flight``: names with open requests.

        ``adapter``: the one registered under ``name``, if one is.
        """
        tiers, names = self._tiers, self._names
        if verb == "evict":
            copies = self._copies(name)
            if name in in_flight:
                return "in_use"
            if any(key in tiers.pinned for key in copies):
                return "pinned"
            return None if copies or adapter is not None else "unknown_adapter"
        if adapter is None:
            return "unknown_adapter"
        if verb == "unpin":
            return None
        if len({name, *(names[key] for key in tiers.pinned), *in_flight}) > tiers.slots:
            return "slots_busy"
        if verb == "pin" and len({adapter.key, *tiers.pinned}) > tiers.slots - 1:
            return "too_many_pins"
        return None if self._can_read(adapter) else "load_failed"

    def move(
        self,
        name: str,
        adapter: Adapter | None,
        verb: MoveVerb,
        batch: Iterable[Adapter],
        left: list[Adapter],
        now: int,
        out: list[TwinEvent],
    ) -> int:
        """Carry out a command that is not refused; returns when it is done."""
        if verb == "evict":
            self._interrupt(batch, left)
            for key in self._copies(name):
                if key in self._tiers.active:
                    out.append(Evicted(now, name, "gpu", "remove"))
                out.append(Evicted(now, name, "host", "remove"))
                self._tiers.drop(key, "host")
                del self._names[key]
        elif adapter is not None:
            if verb == "unpin":
                self._tiers.pinned.pop(adapter.key, None)
                return now
            now = self.load(adapter, batch, left, now, out)
            if verb == "pin":
                self._tiers.pinned[adapter.key] = None
        return now

    def step(
        self, batch: dict[Adapter, int], joined: list[Adapter], left: list[Adapter], now: int, out: list[TwinEvent]
    ) -> int:
        """A step runs ``batch``, which some ``joined`` and ``left`` since the last one; returns when the step can start."""
        busy, active = self._busy, self._tiers.active
        if self._tiers.pinned:
            return self._step_beside_pins(batch, now, out)
        if left:
            if len(left) > 1:
                left.sort(key=PLACE)
            for adapter in left:
                busy.discard(adapter.key)
        passing: Iterable[Adapter] = batch
        if not self.disturbed:
            for adapter in joined:
                if adapter.key not in active:
                    break
            else:
                self._pass(batch, joined, left)
                return now
            if len(batch) + len(left) > self._profile.slots:
                self._settle([*(held for held in batch if held not in joined), *left])
            else:
                self._retire(left)
                passing = joined
        for adapter in sorted(passing, key=PLACE):
            if not self._can_read(adapter):
                self.missing = adapter
                break
            now = self._use(adapter, now, out)
            busy.add(adapter.key)
        self.disturbed = False
        return now

    def _step_beside_pins(self, batch: dict[Adapter, int], now: int, out: list[TwinEvent]) -> int:
        """A step while something is pinned: the lists are arranged first."""
        keys = [adapter.key for adapter in batch]
        self._busy = set(keys)
        self._tiers.arrange(keys)
        for adapter in sorted(batch, key=PLACE):
            if not self._can_read(adapter):
                self.missing = adapter
                break
            now = self._use(adapter, now, out)
        self.disturbed = False
        return now

    def _can_read(self, adapter: Adapter) -> bool:
        """Whether it need not be read, or its files are there."""
        return self._readable is None or adapter.key in self._tiers.host or self._readable(adapter.name)

    def _copies(self, name: str) -> list[str]:
        """Keys of this name in the host cache, those of forgotten registrations too."""
        return [key for key in self._tiers.host if self._names[key] == name]

    def _interrupt(self, batch: Iterable[Adapter], left: list[Adapter]) -> None:
        """A call between two steps moves something: both lists become true, and the next step uses all of its batch."""
        if not self.disturbed:
            self._settle([*batch, *left])
        left.clear()
        self.disturbed = True

    def _pass(self, batch: dict[Adapter, int], joined: list[Adapter], left: list[Adapter]) -> None:
        """A step that moves nothing: who left is idle, who joined is not."""
        idle = self._idle
        for adapter in left:
            idle.pop(adapter, None)
            if adapter not in batch:
                idle[adapter] = None
        for adapter in joined:
            idle.pop(adapter, None)
            self._busy.add(adapter.key)

    def _retire(self, left: Iterable[Adapter]) -> None:
        """Those that became idle are the youngest, the last to leave the batch last."""
        for adapter in self._idle:
            self._tiers.use(adapter.key)
        self._idle.clear()
        for adapter in left:
            self._tiers.use(adapter.key)

    def _settle(self, ran: Iterable[Adapter]) -> None:
        """Both lists become true, as a step of ``ran`` left them."""
        self._retire(sorted(ran, key=PLACE))
        self._busy.clear()

    def _make_room(self, key: str) -> tuple[str | None, str | None]:
        """``key`` comes in next: the oldest that are not in the batch leave. Returns who left (its slot, the host)."""
        tiers, busy = self._tiers, self._busy
        from_slot = from_host = None
        if key not in tiers.host and len(tiers.host) >= tiers.host_entries:
            from_host = _oldest(tiers.host, busy)
            from_slot = from_host if from_host in tiers.active else None
            tiers.drop(from_host, "host")
        if len(tiers.active) >= tiers.slots:
            from_slot = _oldest(tiers.active, busy)
            tiers.drop(from_slot, "gpu")
        return from_slot, from_host

    def _use(self, adapter: Adapter, now: int, out: list[TwinEvent]) -> int:
        """Bring ``adapter`` into a slot from ``now`` on; returns when it is there."""
        key, tiers, profile = adapter.key, self._tiers, self._profile
        if key in tiers.active:
            tiers.use(key)
            return now
        pins = tuple(tiers.pinned)
        from_slot, from_host = self._make_room(key)
        moved = tiers.use(key)
        took = profile.activate_ps(adapter.rank)
        load = profile.load_ps(adapter.size) if moved.loaded else 0
        now += load
        if from_slot is not None:
            if from_slot in pins:
                out.append(PinLost(now, self._names[from_slot]))
            out.append(Evicted(now, self._names[from_slot], "gpu"))
        if from_host is not None:
            out.append(Evicted(now, self._names.pop(from_host), "host"))
        if moved.loaded:
            self._names[key] = adapter.name
            out.append(Loaded(now, adapter.name, load))
        out.append(Activated(now + took, adapter.name, took))
        return now + took


def _oldest(held: Iterable[str], busy: set[str]) -> str:
    """The first of ``held`` that is not in the batch: there is one, since a batch never fills a list that something joins."""
    for key in held:
        if key not in busy:
            return key
    raise AssertionError
