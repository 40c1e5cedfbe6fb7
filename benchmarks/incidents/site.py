"""A fleet and its ordinary traffic, and the sums by which an incident is sized.

Theory of operation. The physics are the twin's default ones (an 8B model on one H100), all step times multiplied by ``slowness``: a
smaller device. What is scaled down is the fleet, so that minutes of it are seconds of computing: few sequences a batch, few
adapters, a KV cache of a few times what the batch needs.

Sizes come from two sums that hold in the mean. A request costs ``cost_s`` of an engine whose batch is full, so a replica is used to
the share rate x cost. And ``streams`` run on a replica at a rate when each step takes as long as that many streams make it.
"""

from __future__ import annotations

from random import Random
from typing import Final

import msgspec

from loraledger.events import AdapterSpec
from loraledger.kernel.settings import SECOND, FleetSettings, Limits, ReplicaSpec, TenantSpec
from loraledger.signals.facts import Facts, ReplicaFacts
from loraledger.twin.profile import PS_PER_S, TwinProfile

BYTES_PER_RANK: Final = 1_700_000
"""Of q, k, v and o of an 8B model in bf16."""
LONGEST: Final = 4.0
"""The longest prompt and the longest output, in means of it."""


class Disk:
    """The disk of all replicas. ``slow``: how many times longer a read takes than it should."""

    def __init__(self) -> None:
        self.slow = 1.0


class SlowableProfile(TwinProfile, frozen=True, kw_only=True):
    """A profile whose reads from disk take as long as ``disk`` says at the time."""

    disk: Disk

    def load_ps(self, size: int) -> int:
        """Disk to host for an adapter of ``size`` bytes, activation not included."""
        return round(TwinProfile.load_ps(self, size) * self.disk.slow)


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet as configured, and the means of its ordinary traffic. ``rate``: arrivals a second at each replica.

    ``standing`` adapters are asked for by popularity (Zipf with ``zipf``); ``scanned`` more are in the catalog and are not.
    """

    replicas: int
    slots: int
    host_entries: int
    standing: int
    scanned: int = 0
    ranks: tuple[int, ...]
    disk_bytes_per_s: int
    max_seqs: int
    slowness: float
    kv_blocks: int
    zipf: float
    base_share: float
    tenants: int
    rate: float
    prompt: int
    output: int
    policy: str = "bounded-affinity"
    park_s: int = 600

    @property
    def names(self) -> list[str]:
        """Of its replicas."""
        return [f"r{number + 1}" for number in range(self.replicas)]

    def adapter_bytes(self, number: int) -> int:
        """Of the ``number``-th adapter."""
        return self.ranks[number % len(self.ranks)] * BYTES_PER_RANK

    def profile(self, disk: Disk | None = None) -> SlowableProfile:
        """The twin of each of its replicas."""
        plain = TwinProfile()
        times = ("step_base_ps", "step_per_seq_ps", "step_per_kv_token_ps", "prefill_per_token_ps", "prefill_floor_ps")
        slower = {name: round(getattr(plain, name) * self.slowness) for name in times}
        return SlowableProfile(
            disk=disk or Disk(),
            slots=self.slots,
            host_entries=self.host_entries,
            max_rank=max(self.ranks),
            max_seqs=self.max_seqs,
            kv_blocks=self.kv_blocks,
            prefill_offset_ps=round(plain.prefill_offset_ps * self.slowness),
            load_bytes_per_s=self.disk_bytes_per_s,
            **slower,
        )

    def settings(self) -> FleetSettings:
        """What the gateway is told, priors as the engines really are."""
        profile = self.profile()
        replicas = tuple(
            ReplicaSpec(
                name,
                self.slots,
                self.host_entries,
                max_rank=profile.max_rank,
                max_seqs=self.max_seqs,
                kv_tokens=profile.kv_tokens,
                load_bytes_per_s=self.disk_bytes_per_s,
                load_overhead=profile.load_overhead_ps // 1000,
                activation=profile.activation_ps // 1000,
                prefill_tokens_per_s=PS_PER_S // profile.prefill_per_token_ps,
                itl=profile.step_ps(self.max_seqs // 2, self.max_seqs // 2 * self.prompt, 0, 1) // 1000,
            )
            for name in self.names
        )
        adapters = tuple(
            AdapterSpec(f"a{n}", f"{n:064x}", self.ranks[n % len(self.ranks)], self.adapter_bytes(n))
            for n in range(self.standing + self.scanned)
        )
        tenants = tuple(TenantSpec(f"t{n}", 512, 2048, 60 * SECOND) for n in range(self.tenants))
        limits = Limits(park=self.park_s * SECOND)
        return FleetSettings(replicas, adapters, tenants, policy=self.policy, limits=limits)

    def facts(self) -> Facts:
        """The same, as one who reads the settings file knows it."""
        settings = self.settings()
        known = {
            spec.name: ReplicaFacts(slots=spec.slots, host_entries=spec.host_entries, kv_tokens=spec.kv_tokens)
            for spec in settings.replicas
        }
        sizes = {spec.name: spec.bytes for spec in settings.adapters}
        return Facts(replicas=known, adapter_bytes=sizes, source="the incident's settings")

    def cost_s(self, prompt: float, output: float) -> float:
        """Seconds of a full engine that one request of these tokens takes."""
        profile, seqs = self.profile(), self.max_seqs
        context = round(seqs * (prompt + output / 2))
        step = profile.step_ps(seqs, context, 0, min(seqs, self.slots))
        whole, rest = divmod(round(prompt), profile.token_budget - seqs)
        prefill = whole * profile.prefill_ps(profile.token_budget - seqs, seqs)
        prefill += profile.prefill_ps(rest, seqs) if rest else 0
        return (output / seqs * step + prefill) / PS_PER_S

    def streams(self, rate: float, prompt: float, output: float) -> float:
        """How many run at once on a replica at ``rate`` arrivals a second; infinite when it cannot keep up with any batch."""
        profile = self.profile()
        busy = rate * profile.prefill_ps(max(1, round(prompt)), 1) / PS_PER_S
        if busy >= 1:
            return float("inf")
        running = 1.0
        for _ in range(200):
            step = profile.step_ps(max(1, round(running)), round(running * (prompt + output)), 0, 1) / PS_PER_S
            running = rate * output * step / (1 - busy)
            if running > 4096:
                return float("inf")
        return running


def loguniform(rng: Random, low: float, high: float) -> float:
    """Between ``low`` and ``high``, each doubling as likely as another."""
    return float(low * (high / low) ** rng.random())


def draw_site(rng: Random, *, use: tuple[float, float] = (0.35, 0.6), fill: tuple[float, float] = (0.4, 0.7)) -> Site:
    """A fleet used to a share in ``use``, whose adapters are a share in ``fill`` of all its slots, with KV to spare."""
    replicas, slots = rng.randint(2, 4), rng.choice((4, 6, 8, 12))
    seqs, prompt, output = rng.choice((16, 24, 32)), round(loguniform(rng, 120, 500)), round(loguniform(rng, 80, 220))
    ample = rng.uniform(4.0, 8.0)
    site = Site(
        replicas=replicas,
        slots=slots,
        host_entries=slots * rng.choice((2, 3, 4)),
        standing=max(2, round(replicas * slots * rng.uniform(*fill))),
        ranks=tuple(rng.choices((8, 16, 32, 64), k=5)),
        disk_bytes_per_s=round(loguniform(rng, 250e6, 900e6)),
        max_seqs=seqs,
        slowness=rng.uniform(1.2, 3.0),
        kv_blocks=round(seqs * (prompt + output) * ample / 16),
        zipf=rng.uniform(0.6, 1.3),
        base_share=rng.choice((0.0, 0.05, 0.15)),
        tenants=rng.randint(1, 4),
        rate=1.0,
        prompt=prompt,
        output=output,
    )
    return msgspec.structs.replace(site, rate=rng.uniform(*use) / site.cost_s(prompt, output))
