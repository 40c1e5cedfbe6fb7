"""The second account: which adapters are where, and what their places cost.

A place in a slot is paid in full, at the largest rank and for every module, whatever lies in it. So the account keeps two sizes
apart: ``taken``, the slots in use at their full size, and ``filled``, what their adapters fill. The difference is fragmentation:
bytes that only a lower ``max_lora_rank`` gives back. A ghost (an adapter whose name was forgotten) counts as in use until it is
seen gone: its slot cannot be promised to another without an eviction.

``filled`` is known only when every occupant is: where the engine shows more slots in use than adapters that are known to be in
one, somebody unknown is in there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from loraledger.events import Tier
from loraledger.ledger.facts import AdapterFacts, Latencies, ReplicaFacts
from loraledger.ledger.figures import Figure, Unit, combine, first_known, product, ratio, rest, total, unknown
from loraledger.ledger.layouts import Layout

_TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
_GPU: Final[tuple[Tier, ...]] = ("gpu",)
_HELD: Final[tuple[Tier, ...]] = ("gpu", "host")
_P50, _P90 = (1, 2), (9, 10)


@dataclass(frozen=True, slots=True)
class TierLatency:
    """How long it took to bring adapters from one tier into use."""

    n: int
    """Samples."""
    p50: Figure
    """ns; as old as the newest sample."""
    p90: Figure


@dataclass(frozen=True, slots=True)
class AdapterAccount:
    """Adapters on one replica. Device bytes are of one rank process, host bytes of all."""

    slots: Figure
    used: Figure
    """Slots with an adapter in them, ghosts counted; of layout ``unified``, which has no slots, unknown."""
    free: Figure
    pinned: Figure
    ghosts: Figure
    """Ghosts in a slot or on the host."""
    slot_bytes: Figure
    pool: Figure
    """Device bytes that adapters take away from everything else."""
    taken: Figure
    """Device bytes of the slots in use, padded; of ``unified``, the cells in use."""
    filled: Figure
    """Device bytes that their adapters fill."""
    fragmentation: Figure
    """``taken - filled``."""
    padding: Figure
    """``taken / filled``: 4 means that three quarters of the slots in use are empty."""
    host_entries: Figure
    host_limit: Figure
    host_bytes: Figure
    store_bytes: Figure
    store_limit: Figure
    loads: Figure
    activations: Figure
    working_set: Figure
    blocked: Figure
    """Requests kept back because other adapters of the step hold all slots."""
    max_lora_rank: int | None
    needed_max_rank: int | None
    latencies: Mapping[Tier, TierLatency]
    adapters: tuple[AdapterFacts, ...]
    """By tier, nearest first; then the most used."""


def adapter_account(facts: ReplicaFacts, layout: Layout) -> AdapterAccount:
    """The account of ``facts``, whose device memory is divided as ``layout`` says."""
    there = resident(facts)
    counted = _count(facts.adapters, _GPU, "slots")
    used = first_known(facts.slots_used, counted) if layout.name == "slots" else unknown("slots")
    listed = used.value == len(there) if layout.name == "slots" else counted.known
    filled = total(there, "bytes") if listed else unknown("bytes")
    taken = product("bytes", used, facts.slot_bytes) if layout.name == "slots" else pool_of(facts, layout)
    on_host = [_placed(adapter, adapter.host) for adapter in facts.adapters if adapter.tier in _HELD]
    entries = first_known(facts.host_entries, _count(facts.adapters, _HELD, "adapters"))
    whole = entries.known and entries.value == len(on_host)
    return AdapterAccount(
        slots=facts.slots,
        used=used,
        free=rest(facts.slots, used),
        pinned=facts.slots_pinned,  # counting what is known to be pinned would make 0 of nobody looking
        ghosts=_count(facts.adapters, _HELD, "adapters", lambda a: a.ghost),
        slot_bytes=facts.slot_bytes,
        pool=pool_of(facts, layout),
        taken=taken,
        filled=filled,
        fragmentation=rest(taken, filled),
        padding=ratio(taken, filled),
        host_entries=entries,
        host_limit=facts.host_limit,
        host_bytes=first_known(facts.host_bytes, total(on_host, "bytes") if whole else unknown("bytes")),
        store_bytes=facts.store_bytes,
        store_limit=facts.store_limit,
        loads=facts.loads,
        activations=facts.activations,
        working_set=facts.working_set,
        blocked=facts.blocked_requests,
        max_lora_rank=facts.max_lora_rank,
        needed_max_rank=facts.needed_max_rank,
        latencies={tier: latency(found, facts.now) for tier, found in facts.latencies.items() if found.samples},
        adapters=tuple(sorted(facts.adapters, key=_nearest_first)),
    )


def resident(facts: ReplicaFacts) -> tuple[Figure, ...]:
    """What each adapter that is on the device fills there, ghosts too; no surer than that it is there."""
    return tuple(_placed(adapter, adapter.device) for adapter in facts.adapters if adapter.tier == "gpu")


def pool_of(facts: ReplicaFacts, layout: Layout) -> Figure:
    """Device bytes that adapters take; of layout ``unified`` unknown while the tier of any adapter is."""
    if layout.name == "unified" and any(adapter.tier is None for adapter in facts.adapters):
        return unknown("bytes")
    return layout.adapter_bytes(resident(facts))


def latency(found: Latencies, now: int) -> TierLatency:
    """Quantiles of ``found`` by nearest rank, so that each is a duration that was measured. ``found`` must have samples."""
    durations = sorted(duration for duration, _ in found.samples)
    age = now - max(ended for _, ended in found.samples)
    p50, p90 = (durations[-(-len(durations) * part // of) - 1] for part, of in (_P50, _P90))
    return TierLatency(len(durations), Figure(p50, "ns", found.source, age), Figure(p90, "ns", found.source, age))


def _count(
    adapters: Sequence[AdapterFacts],
    tiers: Collection[Tier],
    unit: Unit,
    which: Callable[[AdapterFacts], bool] = lambda adapter: True,
) -> Figure:
    """How many of ``adapters`` are ``which`` and in ``tiers``: unknown when the tier of one is, or when none was named."""

    def one(adapter: AdapterFacts) -> int | None:
        if not which(adapter):
            return 0
        return None if adapter.tier is None else int(adapter.tier in tiers)

    ones = (Figure(one(adapter), unit, adapter.tier_source, adapter.tier_age) for adapter in adapters)
    return total(ones, unit) if adapters else unknown(unit)


def _placed(adapter: AdapterFacts, size: Figure) -> Figure:
    """``size`` with the source and age of the adapter's tier beside its own."""
    place = Figure(1, "adapters", adapter.tier_source, adapter.tier_age)
    return combine(size.unit, (size, place), lambda count, _: count)


def _nearest_first(adapter: AdapterFacts) -> tuple[int, float, str]:
    tier = len(_TIERS) if adapter.tier is None else _TIERS.index(adapter.tier)
    return tier, -(adapter.rate.value or 0.0), adapter.name
