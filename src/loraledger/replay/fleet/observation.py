"""What a live gateway would have seen of its engines: the view that a replay's decisions are made on.

Theory of operation. ``Observation`` says how often an engine is scraped, how old an answer is when it arrives, and whether a probe
inside it tells what moved. Without a probe the kernel believes, as it does live.

With it, ``Probe`` stands for the probe in one twin and for the follower that reads it. What happened in the twin waits there, and a
*reading* tells all of it that is ``probe_delay`` old: first each move by itself, in order, and how each request went, then the
lists that the moves made, whole. Readings follow a happening, at least ``GAP`` apart; the lists are told each ``RETELL`` even if
nothing moved. At the replica's start come what its memory is divided into and empty lists.

The lists are rebuilt from the moves, as a reader of the real probe's events rebuilds them: what was copied in or ran last is the
youngest. Adapters in use are the youngest of all, in the order in which they came into use. A request's use is taken to begin with
its first token, for that is what the twin tells.

What the twin does not tell is left unknown: when a request was first computed (its engine queue and its prefill), what others'
loads cost it and cached tokens. ``access`` is the tier in which a request's adapter was found: that of the move which its
adapter's first token after it follows, if it was sent before the step with that move began, else a slot.

Step statistics (``StepsObserved``) are not fed. No decision reads them: the kernel keeps them for the gateway's account of blocked
requests, free KV and tokens computed again, and the record's samples show them. So these columns are null in a replayed record.

The way into the engine is the profile's (``Calibrated``), and the kernel learns of it as live, from first tokens and load calls
that come later. ``boundary`` and ``boundary_per_seq`` delay each request on its way in. What a real one loses on its way back is in
them too, so first tokens are right, and a request joins the engine's queue a little late. Each request that was sent there and has
not ended counts for ``boundary_per_seq``, also one that waits, although what is measured grows with the streams that run.
``load_call`` delays the call and leaves the engine free meanwhile, although a real one may hold it: loads inside steps and in calls
last as the profile says, and whoever waits for the call waits for all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from loraledger import events as ev
from loraledger.kernel.settings import MS, SECOND
from loraledger.twin.events import (
    Activated,
    Evicted,
    LoadDone,
    Loaded,
    MoveDone,
    PinLost,
    Preempted,
    Rejected,
    TokenOut,
    TwinEvent,
    TwinRequest,
)
from loraledger.twin.profile import TwinProfile

PS_PER_NS: Final = 1_000
GAP: Final = 50 * MS
"""Between two readings: the follower of a live probe rests as long."""
RETELL: Final = 5 * SECOND


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """How often engines are scraped and how old an answer is when it arrives, in ns; whether the probe tells what moved.

    Without the probe tiers are believed, as they are live. With it loads, activations, evictions and how each request went
    inside arrive ``probe_delay`` after they happened.

    The way into an engine: a request reaches its queue ``boundary`` after it was sent, and ``boundary_per_seq`` later for each
    request that is in flight there (an API server that parses, tokenises and streams on one core); a load call takes ``load_call``
    beyond what the engine does for it.
    """

    scrape_interval: int = SECOND
    scrape_delay: int = 5 * MS
    probe: bool = False
    probe_delay: int = 100 * MS
    boundary: int = 0
    boundary_per_seq: int = 0
    load_call: int = 0

    def __post_init__(self) -> None:
        if self.scrape_interval < MS:
            raise ValueError(f"scrape_interval is {self.scrape_interval} ns: must be at least 1 ms")
        for field in ("scrape_delay", "probe_delay", "boundary", "boundary_per_seq", "load_call"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is {getattr(self, field)} ns: must not be negative")


class _Use:
    """A request in the engine, as its probe follows it."""

    __slots__ = ("access", "activation", "adapter", "first", "load", "preemptions", "sent")

    def __init__(self, adapter: str | None, sent: int) -> None:
        self.adapter = adapter
        self.sent = sent
        self.first = 0
        self.access: ev.HitClass = "base" if adapter is None else "gpu"
        self.load: int | None = None
        self.activation: int | None = None
        self.preemptions = 0


class _Move:
    """An adapter that a step brought into a slot: who was first computed in that step is still to be seen."""

    __slots__ = ("activation", "began", "first", "load")

    def __init__(self, began: int, load: int | None, activation: int) -> None:
        self.began = began
        self.load = load
        self.activation = activation
        self.first: int | None = None


class Probe:
    """The probe of one twin. ``sizes``: bytes of each engine-side name that was ever sent there; its owner keeps it."""

    def __init__(self, replica: str, profile: TwinProfile, delay: int, sizes: dict[str, int]) -> None:
        self.next_reading: int | None = None
        """When the owner has set out to read next, ns."""
        self._replica = replica
        self._profile = profile
        self._delay = delay
        self._sizes = sizes
        self._read = -GAP
        self._told_tiers = 0
        self._untold: deque[TwinEvent] = deque()
        self._uses: dict[str, _Use] = {}
        self._moves: dict[str, _Move] = {}
        self._loads: dict[str, int] = {}  # disk to host, before the activation that follows
        self._began = 0  # when the step began, or the load call, to which the last move belongs, ps
        self._moved = -1  # when that move ended: the next one of the same step begins then
        self._host: dict[str, int] = {}  # name to copies: a name registered anew is another copy
        self._active: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._pinned: dict[str, None] = {}

    def start(self, now: int) -> list[ev.Event]:
        """The replica came up: what a first look shows."""
        profile = self._profile
        slots = profile.layout == "slots"
        self._read = self._told_tiers = now
        floor = ev.FloorObserved(
            now,
            self._replica,
            slots=profile.slots if slots else None,
            slot_bytes=profile.slot_bytes or None,
            host_entries=profile.host_entries if slots else None,
            max_rank=profile.max_rank,
            kv_blocks=profile.kv_blocks,
            block_tokens=profile.block_size,
        )
        return [floor, self._lists(now, now)]

    def sent(self, at: int, request: TwinRequest) -> None:
        """``request`` was handed to the engine at ``at`` ps."""
        self._uses[request.id] = _Use(request.adapter, at)

    def happened(self, events: Iterable[TwinEvent]) -> None:
        """What the twin did, in order."""
        self._untold.extend(events)

    def due(self, now: int) -> int:
        """When to read next, ns."""
        if self._untold:
            seen = -(-self._untold[0].at // PS_PER_NS) + self._delay
            return max(now, seen, self._read + GAP)
        return max(now, self._told_tiers + RETELL)

    def read(self, now: int) -> list[ev.Event]:
        """One reading at ``now``: what it tells."""
        self._read = now
        as_of = now - self._delay
        cut, untold = as_of * PS_PER_NS, self._untold
        out: list[ev.Event] = []
        moved = False
        while untold and untold[0].at <= cut:
            event = untold.popleft()
            if type(event) is TokenOut:
                self._token(now, event, out)
            elif self._move(now, event, out):
                moved = True
        if moved or now - self._told_tiers >= RETELL:
            self._told_tiers = now
            out.append(self._lists(now, as_of))
        return out

    # --- requests -----------------------------------------------------------------------------------------------------

    def _token(self, now: int, event: TokenOut, out: list[ev.Event]) -> None:
        use = self._uses[event.id]
        name = use.adapter
        if event.first:
            use.first = event.at
            if name is not None:
                self._running[name] = self._running.get(name, 0) + 1
                self._find(use, name)
        if not event.finished:
            return
        del self._uses[event.id]
        if name is not None:
            self._leave(name)
        took = event.at - use.first
        out.append(
            ev.EngineFinished(
                now,
                self._replica,
                event.id,
                decode=took // PS_PER_NS,
                access=use.access,
                load=use.load,
                activation=use.activation,
                preemptions=use.preemptions,
            )
        )

    def _find(self, use: _Use, name: str) -> None:
        """Whether the step that first computed this request had to bring its adapter in."""
        move = self._moves.get(name)
        if move is None or use.sent > move.began:
            return
        if move.first is None:
            move.first = use.first
        if move.first == use.first:
            use.access = "host" if move.load is None else "disk"
            use.load, use.activation = move.load or 0, move.activation
        else:
            del self._moves[name]

    def _leave(self, name: str) -> None:
        """A request of ``name`` ended: with the last one it is the youngest of those that are idle."""
        users = self._running[name] - 1
        if users:
            self._running[name] = users
            return
        del self._running[name]
        for held in (self._host, self._active):
            if name in held:
                held[name] = held.pop(name)

    # --- moves --------------------------------------------------------------------------------------------------------

    def _move(self, now: int, event: TwinEvent, out: list[ev.Event]) -> bool:
        """Tell one move; whether the lists changed."""
        match event:
            case Loaded():
                self._follows(event)
                took = event.took // PS_PER_NS
                self._loads[event.name] = took
                _young(self._host, event.name, 1)
                out.append(ev.LoadObserved(now, self._replica, event.name, took, self._sizes.get(event.name)))
            case Activated():
                took = event.took // PS_PER_NS
                load = self._loads.pop(event.name, None)
                self._moves[event.name] = _Move(self._follows(event), load, took)
                _young(self._host, event.name, 0)
                _young(self._active, event.name, 1)
                out.append(ev.ActivationObserved(now, self._replica, event.name, took))
            case Evicted():
                self._evicted(now, event, out)
            case LoadDone():
                self._moves.pop(event.name, None)  # a load call brought it, and no request waited in that step
                self._moved = -1
                return False
            case MoveDone():
                self._moves.pop(event.name, None)  # no request waited for it either
                self._moved = -1
                return self._commanded(event)
            case PinLost():
                self._pinned.pop(event.name, None)
            case Preempted():
                self._uses[event.id].preemptions += 1
                return False
            case Rejected():
                self._uses.pop(event.id, None)
                return False
            case _:
                return False
        return True

    def _follows(self, move: Loaded | Activated) -> int:
        """When the step began to which ``move`` belongs, ps: its moves follow each other without a gap."""
        if move.at - move.took != self._moved:
            self._began = move.at - move.took
        self._moved = move.at
        return self._began

    def _evicted(self, now: int, event: Evicted, out: list[ev.Event]) -> None:
        held = self._host if event.tier == "host" else self._active
        copies = held.get(event.name, 0) - 1
        if copies > 0:
            held[event.name] = copies
        else:
            held.pop(event.name, None)
        follows = self._untold[0] if self._untold else None
        if event.tier == "gpu" and follows == Evicted(event.at, event.name, "host", event.cause):
            return  # leaving the host empties the slot: that is told once
        out.append(ev.EvictionObserved(now, self._replica, event.name, event.tier, event.cause))

    def _commanded(self, event: MoveDone) -> bool:
        """Whether a command changed the pins; what else it did was told with each move."""
        if event.verb == "pin":
            self._pinned[event.name] = None
        elif event.verb == "unpin":
            self._pinned.pop(event.name, None)
        return event.verb in ("pin", "unpin")

    def _lists(self, now: int, as_of: int) -> ev.TiersObserved:
        host, active = self._ordered(self._host), self._ordered(self._active)
        sizes = tuple(self._sizes.get(name) for name in host)
        return ev.TiersObserved(now, self._replica, as_of, host, active, tuple(self._pinned), sizes)

    def _ordered(self, held: dict[str, int]) -> tuple[str, ...]:
        """Names, least recently used first: what runs is the youngest."""
        running = self._running
        return (*(name for name in held if name not in running), *(name for name in running if name in held))


def _young(held: dict[str, int], name: str, copies: int) -> None:
    """``name`` moves to the young end, with so many more copies."""
    held[name] = held.pop(name, 0) + copies
