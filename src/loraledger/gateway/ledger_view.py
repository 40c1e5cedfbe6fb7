"""What operators are shown of the ledgers: documents for the control plane, series for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Final

from loraledger.gateway.exposition import PREFIX, Family
from loraledger.gateway.views import View
from loraledger.ledger import Figure, Ledger, Limit
from loraledger.units import NS_PER_S


def ledger_view(ledger: Ledger, limit: Limit) -> View:
    """One replica's ledger and what limits it; each figure is ``{"value", "unit", "source", "age_s"}``."""
    document = _plain(ledger)
    assert isinstance(document, dict)
    return {**document, "limit": _plain(limit)}


def ledger_series(ledgers: Iterable[tuple[Ledger, Limit]]) -> Iterator[Family]:
    """Every ledger as Prometheus families. What is unknown has no sample."""
    found = list(ledgers)
    for name, doc, labels, samples in _SERIES:
        family = Family("gauge", PREFIX + name, doc, ("replica", *labels))
        for ledger, limit in found:
            for values, number in samples(ledger, limit):
                family.set((ledger.replica, *values), number)
        yield family


def _memory(ledger: Ledger, _: Limit) -> Samples:
    parts = {
        "weights": ledger.floor.weights,
        "engine": ledger.floor.engine,
        "unattributed": ledger.floor.unattributed,
        "slots": ledger.adapters.pool,
        "kv": ledger.kv.bytes,
        "headroom": ledger.headroom,
        "device": ledger.device,
    }
    return (((part, figure.source), figure.value) for part, figure in parts.items())


def _slots(ledger: Ledger, _: Limit) -> Samples:
    account = ledger.adapters
    return ((("taken",), account.taken.value), (("filled",), account.filled.value))


def _host_entries(ledger: Ledger, _: Limit) -> Samples:
    account = ledger.adapters
    return ((("used",), account.host_entries.value), (("limit",), account.host_limit.value))


def _host_bytes(ledger: Ledger, _: Limit) -> Samples:
    found = ledger.adapters.host_bytes
    return (((found.source,), found.value),)


def _ghosts(ledger: Ledger, _: Limit) -> Samples:
    return (((), ledger.adapters.ghosts.value),)


def _blocks(ledger: Ledger, _: Limit) -> Samples:
    return ((("used",), ledger.kv.blocks_used.value), (("free",), ledger.kv.blocks_free.value))


def _rates(ledger: Ledger, _: Limit) -> Samples:
    account, kv = ledger.adapters, ledger.kv
    rates = {
        "loads": account.loads,
        "activations": account.activations,
        "preemptions": kv.preemptions,
        "recomputed_tokens": kv.recomputed_tokens,
    }
    return (((what,), figure.value) for what, figure in rates.items())


def _latencies(ledger: Ledger, _: Limit) -> Samples:
    for tier, found in ledger.adapters.latencies.items():
        for quantile, figure in (("0.5", found.p50), ("0.9", found.p90)):
            yield (tier, quantile), None if figure.value is None else figure.value / NS_PER_S


def _limiting(_: Ledger, limit: Limit) -> Samples:
    return (((pool,), 1) for pool in (limit.pool, *limit.also) if pool not in ("none", "unknown"))


Samples = Iterable[tuple[tuple[str, ...], float | None]]
_SERIES: Final[Sequence[tuple[str, str, tuple[str, ...], Callable[[Ledger, Limit], Samples]]]] = (
    ("memory_bytes", "Device memory of one rank process, by what it is for.", ("part", "source"), _memory),
    ("slot_bytes", "Bytes of slots in use: taken (padded), and filled by their adapters.", ("kind",), _slots),
    ("host_entries", "Adapters in the engine's host cache, and its limit.", ("kind",), _host_entries),
    ("host_bytes", "Bytes in the host caches of all rank processes.", ("source",), _host_bytes),
    ("ghosts", "Adapters that are resident under forgotten names.", (), _ghosts),
    ("kv_blocks", "KV blocks by use.", ("state",), _blocks),
    ("per_minute", "Loads, activations, preemptions and recomputed tokens a minute.", ("what",), _rates),
    (
        "tier_latency_seconds",
        "Time to bring an adapter into use, by the tier it came from.",
        ("tier", "quantile"),
        _latencies,
    ),
    ("limiting", "1 for each pool that limits the replica: floor, adapters, kv.", ("pool",), _limiting),
)


def _plain(value: object) -> object:
    """Dataclasses as dicts; a figure in the control plane's shape; durations that are no figures in seconds."""
    if isinstance(value, Figure):
        age = None if value.age is None else round(value.age / NS_PER_S, 3)
        return {"value": value.value, "unit": value.unit, "source": value.source, "age_s": age}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
