"""Virtual fleets for the tests: settings and profiles that agree, and traces."""

from __future__ import annotations

import random
from collections.abc import Iterable

from loraledger import events as ev
from loraledger.kernel.settings import MS, SECOND, FleetSettings, ReplicaSpec, TenantSpec
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.traces.trace import Request
from loraledger.twin.profile import TwinProfile

PROFILE = TwinProfile(slots=4, host_entries=8)
MIB = 1 << 20


def adapters(number: int, size: int = 20 * MIB) -> tuple[ev.AdapterSpec, ...]:
    return tuple(ev.AdapterSpec(f"a{n}", f"{n:064x}", 16, size) for n in range(number))


def settings_for(
    replicas: int, specs: Iterable[ev.AdapterSpec], policy: str = "bounded-affinity", profile: TwinProfile = PROFILE
) -> FleetSettings:
    """Replicas whose priors are what the twin really does."""
    named = tuple(
        ReplicaSpec(
            f"r{n + 1}",
            profile.slots,
            profile.host_entries,
            max_rank=profile.max_rank,
            max_seqs=profile.max_seqs,
            load_bytes_per_s=profile.load_bytes_per_s,
            load_overhead=profile.load_overhead_ps // 1000,
            activation=profile.activation_ps // 1000,
            prefill_tokens_per_s=40_000,
            itl=8 * MS,
        )
        for n in range(replicas)
    )
    return FleetSettings(named, tuple(specs), (TenantSpec("acme", 10_000, 10_000),), policy=policy)


def virtual(settings: FleetSettings, profile: TwinProfile = PROFILE, start: int = 0) -> VirtualFleet:
    return VirtualFleet(settings, {spec.name: profile for spec in settings.replicas}, start=start)


def zipf_trace(
    requests: int, adapters: int, per_second: float, seed: int = 1, base_share: float = 0.0
) -> list[Request]:
    """Poisson arrivals; the n-th most popular adapter is asked for in proportion to 1/n."""
    rng = random.Random(seed)
    weights = [1 / (n + 1) for n in range(adapters)]
    trace, now = [], 0.0
    for _ in range(requests):
        now += rng.expovariate(per_second)
        name = None if rng.random() < base_share else f"a{rng.choices(range(adapters), weights)[0]}"
        prompt, output = rng.randint(20, 400), rng.randint(1, 60)
        trace.append(Request(round(now * SECOND), "acme", name, prompt, output))
    return trace


def loads(fleet: VirtualFleet) -> int:
    """Explicit loads and reads from disk that a step needed, as the fleet's kernel believes."""
    rows = fleet.rows["residency"]
    return sum(row["tier_before"] in ("disk", None) and row["tier_after"] in ("gpu", "host") for row in rows)
