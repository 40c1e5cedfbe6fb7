"""S-LoRA's engine written a second time, plainly: whole lists, sorted anew at every attempt, one step after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraledger.events import MoveVerb
from loraledger.twin.events import Activated, Evicted, Loaded, Rejected, TwinRequest
from twin.oracle import Call, Cancel, Entry, Live, Oracle, Register


@dataclass
class UnifiedOracle(Oracle):
    ready: dict[int, int] = field(default_factory=dict)  # by id() of the adapters in ``slots``
    wanted: list[Entry] = field(default_factory=list)
    link: int = 0
    since: int = 0
    ended: bool = False
    rate: int = 1
    last: int = 0
    size: int = 1

    @property
    def pool(self) -> int:
        return self.profile.kv_blocks * self.profile.block_size

    @property
    def most(self) -> int:
        return self.profile.unified.prefill_tokens or max(self.pool // 6, 3072)

    def cells(self, entry: Entry | None) -> int:
        if entry is None:
            return 0
        per_token = self.profile.unified.kv_bytes_per_token
        return (entry.size + per_token - 1) // per_token if per_token else 4 * entry.rank

    def too_long(self, request: TwinRequest, entry: Entry | None) -> bool:
        alone = request.prompt_tokens + request.output_tokens >= self.pool - self.cells(entry)
        return alone or request.prompt_tokens > self.most

    def too_large(self, call: Register) -> bool:
        return self.cells(Entry(call.name, call.size, call.rank, 0)) >= self.pool

    def use(self, entry: Entry, now: int) -> int:
        took = self.profile.load_overhead_ps + entry.size * 10**12 // self.profile.load_bytes_per_s
        self.events.append(Loaded(now + took, entry.name, took))
        return now + took

    def refusal(self, name: str, verb: MoveVerb) -> str | None:
        return "not_modelled"

    def take(self, call: Call) -> None:
        super().take(call)
        if isinstance(call, Cancel):
            self.offload()

    def end(self, live: Live) -> None:
        self.ended |= live in self.running
        super().end(live)

    # --- one step

    def step(self) -> None:
        rules = self.profile.unified
        due = not self.running or self.since >= rules.attempt_steps
        if due and len(self.running) < self.profile.max_seqs:
            batch = self.attempt()
            if batch:
                self.prefill(batch)
                self.offload()
                return
        elif rules.prefetch and self.since in (rules.attempt_steps // 2, rules.attempt_steps - 3):
            self.prefetch()
        if self.running:
            self.make_way(len(self.running))
            self.now += self.cost(self.running, 0, self.batch)
            self.since += 1
            for live in list(self.running):
                live.computed += 1
                self.generate(live)
            self.offload()

    def ordered(self, newest: bool) -> list[Live]:
        return list(reversed(self.waiting)) if newest else list(self.waiting)

    def attempt(self) -> list[Live]:
        rules = self.profile.unified
        newest = rules.order == "lifo"
        if rules.order == "early_abort":
            self.rate = int(0.7 * (len(self.waiting) - self.last) + 0.3 * self.rate)
            for live in list(self.waiting):
                if self.now - live.at + rules.abort_margin_ps >= rules.first_token_slo_ps:
                    self.waiting.remove(live)
                    self.open.remove(live.request.id)
                    self.events.append(Rejected(self.now, live.request.id, "aborted"))
            newest = self.rate >= self.size
        batch: list[Live] = []
        for live in self.ordered(newest):
            prompts = sum(other.request.prompt_tokens for other in [*batch, live])
            if prompts > self.most or not self.fits([*batch, live]):
                break
            batch.append(live)
        self.waiting = [live for live in self.waiting if live not in batch]
        if batch and rules.order == "early_abort":
            self.last = len(self.waiting)
            self.size = max(int(0.7 * len(batch) + 0.3 * self.size), 1)
        return batch

    def fits(self, new: list[Live]) -> bool:
        claims = [
            (live.request.output_tokens - live.generated - 1, live.request.prompt_tokens + live.generated)
            for live in self.running
        ] + [(live.request.output_tokens - 1, live.request.prompt_tokens + 1) for live in new]
        claims.sort(key=lambda claim: -claim[0])
        needs = [left * (k + 1) + sum(held for _, held in claims[: k + 1]) for k, (left, _) in enumerate(claims)]
        adapters = {live.adapter for live in [*self.running, *new]}
        room = self.pool - sum(self.cells(entry) for entry in adapters)
        return max(needs) < room and len(claims) <= self.profile.max_seqs

    def prefill(self, batch: list[Live]) -> None:
        adapters: list[Entry] = []
        for live in batch:
            if live.adapter is not None and live.adapter not in adapters:
                adapters.append(live.adapter)
            if live.adapter is not None and live.adapter not in self.batch:
                self.batch.append(live.adapter)
        tokens = sum(live.need for live in batch)
        self.make_way(tokens + sum(self.cells(entry) for entry in adapters if entry not in self.slots))
        for entry in adapters:
            if entry not in self.slots:
                took = self.copy(entry, self.now)
                self.events.append(Activated(self.link, entry.name, took))
            self.now = max(self.now, self.ready[id(entry)])
        self.now += self.cost([], tokens, adapters)
        self.since = 0
        self.running += batch
        for live in batch:
            live.computed = live.need
            self.generate(live)
        self.check()

    def copy(self, entry: Entry, now: int) -> int:
        took = self.profile.activation_ps + self.profile.activation_per_rank_ps * entry.rank
        self.link = max(now, self.link) + took
        self.ready[id(entry)] = self.link
        self.slots.append(entry)
        return took

    # --- adapters

    def held(self) -> int:
        return sum(live.computed for live in self.running)

    def resident(self) -> int:
        return sum(self.cells(entry) for entry in self.slots)

    def check(self) -> None:
        assert self.held() + sum(self.cells(entry) for entry in self.batch) <= self.pool

    def evict(self, entry: Entry) -> None:
        self.slots.remove(entry)
        self.events.append(Evicted(self.now, entry.name, "gpu"))

    def offload(self) -> None:
        if self.ended:
            self.ended = False
            if not self.running:
                self.wanted = []
            for entry in list(self.slots):
                if entry not in self.batch and entry not in self.wanted:
                    self.evict(entry)

    def make_way(self, tokens: int) -> None:
        for entry in list(self.slots):
            if entry not in self.batch and self.held() + self.resident() + tokens > self.pool:
                self.evict(entry)

    def prefetch(self) -> None:
        if not self.waiting:
            return
        self.wanted = []
        tokens = 0
        for live in self.ordered(self.profile.unified.order != "fifo"):
            tokens += live.need
            if tokens > self.most:
                return
            entry = live.adapter
            if entry is None:
                continue
            if entry not in self.slots:
                if self.held() + len(self.running) + self.resident() + self.cells(entry) > self.pool:
                    return
                self.events.append(Activated(self.now, entry.name, self.copy(entry, self.now)))
            self.wanted.append(entry)
