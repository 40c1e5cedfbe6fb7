"""Signals made by hand: a fleet of two replicas that is well, and each thing that can be otherwise."""

from __future__ import annotations

from typing import Final

import msgspec

from loraledger.signals.facts import Facts, ReplicaFacts
from loraledger.signals.figures import (
    Group,
    Hits,
    Moves,
    Pressure,
    Quality,
    Signals,
    Split,
    Spread,
    Version,
    Window,
    WorkingSet,
)

MINUTES: Final = 10
WINDOW: Final = Window(0, MINUTES * 60 * 10**9)
VERSION: Final = Version("0.32.0", "llama", "digest", "1.0", 1000, 0, 1)
FACTS: Final = Facts(
    replicas={name: ReplicaFacts(slots=8, host_entries=16, kv_tokens=32_000) for name in ("r1", "r2")},
    adapter_bytes={f"a{number}": 40 * 2**20 for number in range(40)},
)


def spread(
    mean: float, n: int = 1000, p50: float | None = None, p90: float | None = None, p99: float | None = None
) -> Spread:
    """Durations around ``mean``, in s."""
    return Spread(
        n, mean, mean * 0.7 if p50 is None else p50, mean * 2 if p90 is None else p90, mean * 4 if p99 is None else p99
    )


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What a window is made of; the defaults are a fleet that is well."""

    requests: int = 1000
    shares: dict[str, float] = msgspec.field(default_factory=lambda: {"r1": 0.5, "r2": 0.5})
    asked: dict[str, int] = msgspec.field(default_factory=lambda: {f"a{number}": 50 for number in range(20)})
    prompt: int | None = 500
    answer: int | None = 200
    ttft: float = 0.1
    ttft_on: dict[str, float] = {}
    warm: float = 0.05
    attainment: float | None = 0.99
    attainment_on: dict[str, float] = {}
    rejected: int = 0
    hit_rate: float = 0.9
    replicas_of_adapter: int = 1
    loads: int = 40
    load_time: float = 0.1
    part: str = "engine"
    slots: int | None = 8
    working: int = 8
    in_flight: int | None = 5
    over: float | None = 0.01
    blocked: int | None = None
    kv_tokens: int | None = 32_000
    kv_usage: float | None = 0.4
    kv_full: float | None = 0.0
    preemptions: int | None = 0
    restarts: int = 0
    down: int = 0
    active: float | None = 6_000
    itl: float | None = 0.01
    top: tuple[str | None, float | None] = ("a0", 0.1)
    waits: dict[str, float] = {}
    engine_hits: bool = False
    version: Version | None = VERSION
    measure_again: str | None = None
    minutes: int = MINUTES

    def hits(self, requests: int) -> Hits:
        gpu = round(requests * self.hit_rate)
        return Hits(gpu=gpu, host=0, disk=requests - gpu)

    def group(self, requests: int, active: float = 1.0, **changes: object) -> Group:
        """Of ``requests`` with a share of ``active`` of the tokens in flight."""
        hits = self.hits(requests)
        fields: dict[str, object] = {
            "requests": requests,
            "share": requests / self.requests if self.requests else None,
            "per_minute": requests / self.minutes,
            "by_status": {"ok": requests},
            "rejections": {},
            "prompt_tokens": None if self.prompt is None else self.prompt * requests,
            "generated_tokens": None if self.answer is None else self.answer * requests,
            "cached_tokens": None,
            "active_tokens": None if self.active is None else self.active * active,
            "hits": hits,
            "engine_hits": hits if self.engine_hits else None,
            "ttft": spread(self.ttft, requests),
            "ttft_by_class": {"gpu": spread(self.warm, requests, p50=self.warm)},
            "itl": None,
            "itl_by_class": {},
            "itl_mean": self.itl,
            "split": self.split(requests),
            "split_by_class": {},
            "attainment": self.attainment,
            "cold_ttft_p99": self.ttft * 4,
            "oldest_wait": self.ttft * 5,
            "distinct_adapters": len(self.asked),
        }
        return Group(**{**fields, **changes})  # type: ignore[arg-type]

    def split(self, requests: int) -> Split:
        parts = dict.fromkeys(
            ("gateway_queue", "preparation", "engine_queue", "prefill", "unattributed", "engine"), 0.0
        )
        parts["preparation"] = 0.01 * requests
        parts[self.part] += (self.ttft - 0.01) * requests
        return Split(n=requests, ttft=self.ttft * requests, told=requests, **parts)

    def moves(self, share: float) -> Moves:
        loads = round(self.loads * share)
        took = {"load": spread(self.load_time, loads, p50=self.load_time)} if loads else {}
        return Moves(loads, loads, loads, 0, took, {"16 MiB to 64 MiB": took["load"]} if loads else {})

    def pressure(self) -> Pressure:
        return Pressure(
            samples=120,
            down=self.down,
            restarts=self.restarts,
            kv_usage_mean=self.kv_usage,
            kv_usage_max=self.kv_usage,
            kv_full=self.kv_full,
            kv_tokens=self.kv_tokens,
            preemptions=self.preemptions,
            blocked_max=self.blocked,
            waiting_mean=0.1,
        )

    def replica(self, name: str) -> Group:
        share = self.shares[name]
        return self.group(
            round(self.requests * share),
            share,
            ttft=spread(self.ttft_on.get(name, self.ttft), round(self.requests * share)),
            attainment=self.attainment_on.get(name, self.attainment),
            top_adapter=self.top[0],
            top_adapter_share=self.top[1],
            moves=self.moves(share),
            working_set=WorkingSet(self.working, None, self.slots, 16, self.in_flight, self.over),
            pressure=self.pressure(),
        )

    def signals(self) -> Signals:
        """The window's figures."""
        capacity = None if self.kv_tokens is None else self.kv_tokens * len(self.shares)
        pressure = msgspec.structs.replace(self.pressure(), kv_tokens=capacity)
        total = self.group(
            self.requests,
            by_status={"ok": self.requests - self.rejected, "rejected": self.rejected},
            moves=self.moves(1.0),
            working_set=WorkingSet(self.working * 2, None, self.slots, 16, self.in_flight, self.over),
            pressure=pressure,
        )
        adapters = {
            name: self.group(count, replicas=self.replicas_of_adapter, oldest_wait=self.waits.get(name, self.ttft * 5))
            for name, count in self.asked.items()
        }
        window = Window(0, self.minutes * 60 * 10**9)
        return Signals(
            window=window,
            slo_s=1.0,
            version=self.version,
            versions=(VERSION,),
            measure_again=self.measure_again,
            quality=Quality(),
            total=total,
            replicas={name: self.replica(name) for name in self.shares},
            tenants={},
            adapters=adapters,
            classes={},
        )


EMPTY: Final = Signals(
    window=WINDOW,
    slo_s=1.0,
    version=None,
    versions=(),
    measure_again=None,
    quality=Quality(),
    total=None,
    replicas={},
    tenants={},
    adapters={},
    classes={},
)
