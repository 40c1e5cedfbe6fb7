"""The same replica written a second time, plainly: one list of running requests, every request walked at every step.

Slow on purpose. Nothing is shared with the twin but its events and its profile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Literal

from loraledger.events import MoveVerb
from loraledger.twin.events import (
    Activated,
    Died,
    Evicted,
    LoadDone,
    Loaded,
    LoadFailed,
    MoveDone,
    MoveFailed,
    PinLost,
    Preempted,
    Rejected,
    TokenOut,
    TwinEvent,
    TwinRequest,
)
from loraledger.twin.profile import TwinProfile


@dataclass(frozen=True)
class Submit:
    at: int
    request: TwinRequest


@dataclass(frozen=True)
class Cancel:
    at: int
    id: str


@dataclass(frozen=True)
class Register:
    at: int
    name: str
    size: int
    rank: int
    readable: bool = True


@dataclass(frozen=True)
class Forget:
    at: int
    name: str


@dataclass(frozen=True)
class Shift:
    at: int
    name: str
    verb: MoveVerb


Call = Submit | Cancel | Register | Forget | Shift


@dataclass(eq=False)
class Entry:
    """One registration: an own place in the tiers, even if the name was there before."""

    name: str
    size: int
    rank: int
    ready: int
    number: int = 1

    def turn(self) -> bytes:
        """When a step uses it, among others: by the hash of its name, as a set does. It says nothing and never changes."""
        name = self.name if self.number == 1 else f"{self.name}#{self.number}"
        return blake2b(name.encode(), digest_size=8).digest()


@dataclass(eq=False)
class Block:
    """One KV block; ``key``: what it can be found by."""

    key: tuple[Entry | None, int, int] | None = None
    users: int = 0


@dataclass(eq=False)
class Live:
    request: TwinRequest
    adapter: Entry | None
    at: int = 0
    computed: int = 0
    generated: int = 0
    blocks: list[Block] = field(default_factory=list)
    decoding: bool = False

    @property
    def need(self) -> int:
        return self.request.prompt_tokens + self.generated


@dataclass
class Oracle:
    """``gone``: adapters whose files a step cannot read again."""

    profile: TwinProfile
    gone: frozenset[str] = frozenset()
    events: list[TwinEvent] = field(default_factory=list)
    now: int = 0
    registered: dict[str, Entry] = field(default_factory=dict)
    running: list[Live] = field(default_factory=list)
    waiting: list[Live] = field(default_factory=list)
    batch: list[Entry] = field(default_factory=list)
    host: list[Entry] = field(default_factory=list)
    slots: list[Entry] = field(default_factory=list)
    pinned: list[Entry] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    cancelled: dict[str, int] = field(default_factory=dict)
    dead: bool = False
    free: list[Block] = field(default_factory=list)
    registrations: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.free = [Block() for _ in range(self.profile.kv_blocks)]

    def run(self, calls: Sequence[Call]) -> list[TwinEvent]:
        """``calls`` in order of time, at most one cancel a request. Returns all that happened, in order of time."""
        todo = list(calls)
        self.cancelled = {call.id: call.at for call in calls if isinstance(call, Cancel)}
        while todo or self.running or self.waiting:
            while todo and todo[0].at <= self.now:
                self.take(todo.pop(0))
            if self.running or self.waiting:
                self.step()
            elif todo:
                self.now = max(self.now, todo[0].at)
        return sorted(self.events, key=lambda event: event.at)

    def take(self, call: Call) -> None:
        if isinstance(call, Submit):
            self.arrive(call)
        elif isinstance(call, Register):
            self.load(call)
        elif isinstance(call, Forget):
            self.registered.pop(call.name, None)
        elif isinstance(call, Shift):
            self.shift(call)
        else:
            for live in [*self.running, *self.waiting]:
                if live.request.id == call.id:
                    self.end(live)

    def arrive(self, call: Submit) -> None:
        request = call.request
        if self.dead:
            self.events.append(Rejected(call.at, request.id, "engine_dead"))
            return
        if self.too_long(request, None):
            self.events.append(Rejected(call.at, request.id, "too_long"))
            return
        if self.is_cancelled(request.id, self.now):
            return
        entry = None
        if request.adapter is not None:
            entry = self.registered.get(request.adapter)
            if entry is None or entry.ready > call.at:
                self.events.append(Rejected(self.now, request.id, "unknown_adapter"))
                return
        if self.too_long(request, entry):
            self.events.append(Rejected(self.now, request.id, "too_long"))
            return
        self.open.append(request.id)
        self.waiting.append(Live(request, entry, call.at))

    def too_long(self, request: TwinRequest, entry: Entry | None) -> bool:
        return request.prompt_tokens + request.output_tokens - 1 > self.profile.kv_blocks * self.profile.block_size

    def too_large(self, call: Register) -> bool:
        return self.profile.slot_bytes != 0 and call.size > self.profile.slot_bytes

    def is_cancelled(self, request_id: str, now: int) -> bool:
        return request_id in self.cancelled and self.cancelled[request_id] <= now

    # --- adapters

    def load(self, call: Register) -> None:
        if self.dead:
            self.events.append(LoadFailed(call.at, call.name, "engine_dead"))
        elif call.name in self.registered:
            self.events.append(LoadFailed(self.now, call.name, "already_registered"))
        elif not call.readable:
            self.events.append(LoadFailed(self.now, call.name, "unreadable"))
        elif call.rank > self.profile.max_rank:
            self.events.append(LoadFailed(self.now, call.name, "rank_too_high"))
        elif self.too_large(call):
            self.events.append(LoadFailed(self.now, call.name, "too_large"))
        else:
            self.arrange([])
            self.registrations[call.name] += 1
            entry = Entry(call.name, call.size, call.rank, 0, self.registrations[call.name])
            began = self.now
            self.now = entry.ready = self.use(entry, began)
            self.registered[call.name] = entry
            self.events.append(LoadDone(self.now, call.name, self.now - began))

    def shift(self, call: Shift) -> None:
        name, verb = call.name, call.verb
        refused = "engine_unavailable" if self.dead else self.refusal(name, verb)
        if refused is not None:
            self.events.append(MoveFailed(call.at if self.dead else self.now, name, verb, refused))
            return
        entry, began = self.registered.get(name), self.now
        if verb == "evict":
            for copy in [copy for copy in self.host if copy.name == name]:
                self.leave_slot(copy, "remove")
                self.host.remove(copy)
                self.events.append(Evicted(self.now, name, "host", "remove"))
        elif verb == "unpin":
            self.pinned = [other for other in self.pinned if other is not entry]
        elif entry is not None:
            self.arrange([entry])
            self.now = self.use(entry, began)
            if verb == "pin" and entry not in self.pinned:
                self.pinned.append(entry)
        self.events.append(MoveDone(self.now, name, verb, self.now - began))

    def refusal(self, name: str, verb: MoveVerb) -> str | None:
        copies = [copy for copy in self.host if copy.name == name]
        flying = {live.adapter.name for live in [*self.running, *self.waiting] if live.adapter is not None}
        entry = self.registered.get(name)
        if verb == "evict":
            if name in flying:
                return "in_use"
            if any(copy in self.pinned for copy in copies):
                return "pinned"
            return None if copies or entry else "unknown_adapter"
        if entry is None:
            return "unknown_adapter"
        if verb == "unpin":
            return None
        if len({name} | flying | {other.name for other in self.pinned}) > self.profile.slots:
            return "slots_busy"
        if verb == "pin" and len([other for other in self.pinned if other is not entry]) + 1 >= self.profile.slots:
            return "too_many_pins"
        return "load_failed" if entry not in self.host and name in self.gone else None

    def arrange(self, batch: list[Entry]) -> None:
        """Only while something is pinned."""
        if not self.pinned:
            return
        for entry in [*(other for other in self.pinned if other not in batch), *batch]:
            for held in (self.host, self.slots):
                if entry in held:
                    held.remove(entry)
                    held.append(entry)

    def leave_slot(self, entry: Entry, cause: Literal["lru", "remove"] = "lru", now: int | None = None) -> None:
        if entry in self.slots:
            self.slots.remove(entry)
            at = self.now if now is None else now
            self.events.append(Evicted(at, entry.name, "gpu", cause))
            if entry in self.pinned:
                self.pinned.remove(entry)
                self.events.append(PinLost(at, entry.name))

    def use(self, entry: Entry, now: int) -> int:
        if entry in self.host:
            self.host.remove(entry)
        else:
            took = self.profile.load_overhead_ps + entry.size * 10**12 // self.profile.load_bytes_per_s
            now += took
            self.events.append(Loaded(now, entry.name, took))
            if len(self.host) == self.profile.host_entries:
                oldest = self.host.pop(0)
                self.events.append(Evicted(now, oldest.name, "host"))
                self.leave_slot(oldest, now=now)
        self.host.append(entry)
        if entry in self.slots:
            self.slots.remove(entry)
        else:
            if len(self.slots) == self.profile.slots:
                self.leave_slot(self.slots[0], now=now)
            took = self.profile.activation_ps + self.profile.activation_per_rank_ps * entry.rank
            now += took
            self.events.append(Activated(now, entry.name, took))
        self.slots.append(entry)
        return now

    # --- one step

    def step(self) -> None:
        planned: list[tuple[Live, int]] = []
        preempted = False
        for live in list(self.running):
            if live not in self.running:
                break
            tokens = min(live.need - live.computed, self.budget_left(planned))
            while live in self.running and not self.grow(live, tokens):
                self.preempt(self.running[-1])
                preempted = True
            if live in self.running:
                planned.append((live, tokens))
        if not preempted:
            self.admit(planned)
        self.execute(planned)

    def budget_left(self, planned: list[tuple[Live, int]]) -> int:
        return self.profile.token_budget - sum(tokens for _, tokens in planned)

    def blocks(self, tokens: int) -> int:
        return (tokens + self.profile.block_size - 1) // self.profile.block_size

    def grow(self, live: Live, tokens: int) -> bool:
        more = self.blocks(live.computed + tokens) - len(live.blocks)
        if more > len(self.free):
            return False
        for _ in range(more):
            block = self.free.pop(0)
            block.key, block.users = None, 1
            live.blocks.append(block)
        if not live.decoding:
            self.name_blocks(live, live.computed + tokens)
        return True

    # --- prefixes

    def keys(self, live: Live, tokens: int) -> list[tuple[Entry | None, int, int]]:
        """What the full blocks of the first ``tokens`` prompt tokens can be found by."""
        if not self.profile.prefix_caching:
            return []
        ratio = max(1, self.profile.prefix_block_tokens // self.profile.block_size)
        named = [(live.adapter, number, part) for number in live.request.prefix for part in range(ratio)]
        return named[: min(tokens, live.request.prompt_tokens) // self.profile.block_size]

    def name_blocks(self, live: Live, tokens: int) -> None:
        for key, block in zip(self.keys(live, tokens), live.blocks, strict=False):
            if block.key is None:
                if self.named(key) is not None:
                    return
                block.key = key

    def named(self, key: tuple[Entry | None, int, int]) -> Block | None:
        used = [block for live in self.running for block in live.blocks]
        return next((block for block in used + self.free if block.key == key), None)

    def reusable(self, live: Live) -> list[Block]:
        found: list[Block] = []
        for key in self.keys(live, live.need - 1):
            block = self.named(key)
            if block is None:
                break
            found.append(block)
        return found

    def preempt(self, live: Live) -> None:
        self.leave(live)
        live.computed = 0
        live.decoding = False
        self.waiting.insert(0, live)
        self.events.append(Preempted(self.now, live.request.id))

    def admit(self, planned: list[tuple[Live, int]]) -> None:
        for live in list(self.waiting):
            if self.budget_left(planned) == 0 or len(self.running) == self.profile.max_seqs:
                return
            if live.adapter is not None and live.adapter not in self.batch and len(self.batch) == self.profile.slots:
                continue
            reused = self.reusable(live)
            idle = [block for block in reused if block.users == 0]
            if self.blocks(live.need) - len(reused) > len(self.free) - len(idle):
                return
            self.waiting.remove(live)
            self.running.append(live)
            for block in reused:
                block.users += 1
            self.free = [block for block in self.free if block.users == 0]
            live.blocks = reused
            live.computed = len(reused) * self.profile.block_size
            if live.adapter is not None and live.adapter not in self.batch:
                self.batch.append(live.adapter)
            tokens = min(live.need - live.computed, self.budget_left(planned))
            assert self.grow(live, tokens)
            planned.append((live, tokens))

    def execute(self, planned: list[tuple[Live, int]]) -> None:
        end = self.now
        self.arrange(self.batch)
        for entry in sorted(self.batch, key=Entry.turn):
            if entry not in self.host and entry.name in self.gone:
                self.die(end, entry)
                return
            end = self.use(entry, end)
        decoding = [live for live, _ in planned if live.decoding]
        prefill = sum(tokens for live, tokens in planned if not live.decoding)
        end += self.cost(decoding, prefill, self.batch)
        self.now = end
        for live, tokens in planned:
            live.computed += tokens
            if live.computed == live.need:
                self.generate(live)

    def cost(self, decoding: Sequence[Live], prefill: int, adapters: Sequence[Entry]) -> int:
        profile = self.profile
        kv = sum(live.computed + 1 for live in decoding)
        if decoding and profile.decode_table:
            rows = profile.decode_table
            time = at([(n, base) for n, base, _ in rows], len(decoding))
            time += at([(n, slope) for n, _, slope in rows], len(decoding)) * kv
        else:
            time = profile.step_base_ps + profile.step_per_seq_ps * len(decoding) + profile.step_per_kv_token_ps * kv
        if adapters:
            ranks = [entry.rank for entry in adapters]
            weight = sum(ranks) if profile.rank_cost == "sum" else max(ranks)
            time += profile.lora_ps + profile.adapter_step_ps * len(adapters) + profile.rank_step_ps * weight
        table = profile.mixed_table if decoding and profile.mixed_table else profile.prefill_table
        if prefill and table:
            time += at(table, prefill)
        elif prefill:
            time += max(profile.prefill_floor_ps, profile.prefill_offset_ps + profile.prefill_per_token_ps * prefill)
        return time

    def generate(self, live: Live) -> None:
        live.decoding = True
        live.generated += 1
        first, last = live.generated == 1, live.generated == live.request.output_tokens
        if not self.is_cancelled(live.request.id, self.now):
            self.events.append(TokenOut(self.now, live.request.id, live.generated, first, last))
        if last:
            self.end(live)

    def leave(self, live: Live) -> None:
        self.running.remove(live)
        for block in reversed(live.blocks):
            block.users -= 1
            if block.users == 0:
                self.free.append(block)
        live.blocks = []
        if live.adapter is not None and all(other.adapter is not live.adapter for other in self.running):
            self.batch.remove(live.adapter)

    def end(self, live: Live) -> None:
        self.open.remove(live.request.id)
        if live in self.running:
            self.leave(live)
        else:
            self.waiting.remove(live)

    def die(self, at: int, entry: Entry) -> None:
        lost = tuple(name for name in self.open if not self.is_cancelled(name, self.now))
        self.events.append(Died(at, entry.name, lost))
        self.dead = True
        self.running.clear()
        self.waiting.clear()


def at(points: Sequence[tuple[int, int]], x: int) -> int:
    """The broken line through ``points`` at ``x``, rounded down; level before the first."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return (y0 * (x1 - x) + y1 * (x - x0)) // (x1 - x0)
    raise AssertionError(f"{x} is beyond the table")
