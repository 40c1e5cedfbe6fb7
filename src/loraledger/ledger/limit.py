"""Which pool limits a replica: the floor, the adapters, the KV cache, or none. Never one percentage.

A pool limits when a sign of it was seen; a sign needs figures that are known. A pool is *ruled out* when figures that are known
show no sign. What is neither is named in ``unknown``; when no pool limits for sure and one of them is in that state, the answer
is ``unknown`` and not ``none``.

Several pools can limit at once. The first one named is the one to act on first, and the order is floor, KV, adapters: while the
floor does not fit, there is nothing to divide; and the remedy for churn, more slots, takes memory away from KV, so it has to
wait until KV is not short itself.

A long prompt that waits for KV while slots are free is a matter of KV however many slots there are. Loads and activations that
go on while KV is free are a matter of adapters, unless all adapters in use are known to fit: then they are a start or explicit
calls, which more room would not spare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from loraledger.ledger.accounts import Ledger
from loraledger.ledger.figures import Figure
from loraledger.ledger.levers import Lever, levers_for
from loraledger.units import format_bytes

Pool = Literal["floor", "kv", "adapters"]
_POOLS: Final[tuple[Pool, ...]] = ("floor", "kv", "adapters")
_MINUTE: Final = 60 * 10**9


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From where on a figure is a sign. The floor's is the ledger's own ``safety``."""

    kv_usage: float = 0.9
    """Share of the KV blocks that requests hold."""
    loads: float = 6.0
    """A minute. Each stalls every stream: measured 37 to 219 ms for adapters of 11 to 45 MB (vLLM 0.32, 1B-like model, CPU)."""
    activations: float = 60.0
    """A minute. Measured there: 10 to 31 ms each."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One sign, and the figures that it rests on."""

    pool: Pool
    statement: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """The answer."""

    pool: Pool | Literal["none", "unknown"]
    """The pool to act on first."""
    also: tuple[Pool, ...]
    """The others that limit too."""
    evidence: tuple[Evidence, ...]
    unknown: tuple[str, ...]
    """What is not known and would have to be, to rule the pools out that do not limit for sure."""
    levers: tuple[Lever, ...]
    """What helps, for the pool named first."""

    @property
    def lever(self) -> str:
        """The names of the levers, in a line."""
        return ", ".join(lever.name for lever in self.levers)


def limiting(ledger: Ledger, thresholds: Thresholds | None = None) -> Limit:
    """Which pool limits the replica of ``ledger``."""
    found, unclear = [], []
    for pool in _POOLS:
        signs = tuple(_SIGNS[pool](ledger, thresholds or Thresholds()))
        found += [Evidence(pool, sign.statement, sign.figures) for sign in signs if isinstance(sign, _Sign)]
        if not any(isinstance(sign, _Sign) for sign in signs):
            unclear += [f"{pool}: {sign}" for sign in signs if isinstance(sign, str)]
    pools = [pool for pool in _POOLS if any(evidence.pool == pool for evidence in found)]
    first = pools[0] if pools else None
    return Limit(
        pool=first or ("unknown" if unclear else "none"),
        also=tuple(pools[1:]),
        evidence=tuple(found),
        unknown=tuple(unclear),
        levers=() if first is None else levers_for(first, ledger),
    )


@dataclass(frozen=True, slots=True)
class _Sign:
    statement: str
    figures: tuple[Figure, ...]


_Signs = Iterator[_Sign | str]
"""Signs of one pool, and as text what had to be known to look for the others."""


def _floor(ledger: Ledger, _: Thresholds) -> _Signs:
    headroom, safety = ledger.headroom, ledger.safety
    if headroom.value is None:
        yield _missing(
            ("device bytes", ledger.device),
            ("weights", ledger.floor.weights),
            ("engine overhead", ledger.floor.engine),
            ("adapters' device bytes", ledger.adapters.pool),
            ("KV bytes", ledger.kv.bytes),
        )
    elif headroom.value < 0:
        yield _Sign(
            f"floor, adapters and KV are {_size(-headroom.value)} more than the device: it cannot start, or will run out",
            (ledger.device, ledger.floor.total, ledger.adapters.pool, ledger.kv.bytes, headroom),
        )
    elif safety.value is None:
        yield "safety setting"
    elif headroom.value < safety.value:
        yield _Sign(f"headroom {_size(headroom.value)} is below the {_size(safety.value)} to keep", (headroom, safety))


def _kv(ledger: Ledger, thresholds: Thresholds) -> _Signs:
    kv = ledger.kv
    waiting, needed, free = kv.waiting_requests, kv.waiting_tokens, kv.free_tokens
    if needed.value is not None and free.value is not None:
        if needed.value > free.value:
            yield _Sign(
                f"the next request needs {needed.value:,} KV tokens and {free.value:,} are free{_slots_free(ledger)}",
                (needed, free, ledger.adapters.free),
            )
    elif waiting.value is None or waiting.value > (ledger.adapters.blocked.value or 0):
        yield _missing(("tokens that the next request needs", needed), ("free KV tokens", free))
    if kv.preemptions.value is None:
        yield "preemptions a minute"
    elif kv.preemptions.value > 0:
        lost = kv.recomputed_tokens
        again = "" if lost.value is None else f", {lost.value:,.0f} tokens a minute computed again"
        yield _Sign(f"{kv.preemptions.value:,.1f} preemptions a minute{again}", (kv.preemptions, lost))
    if kv.blocks_total.value == 0:
        yield _Sign("there is no KV block", (kv.blocks_total,))
    elif kv.usage.value is None:
        yield _missing(("KV blocks", kv.blocks_total), ("free KV blocks", kv.blocks_free))
    elif kv.usage.value >= thresholds.kv_usage:
        yield _Sign(f"requests hold {kv.usage.value:.0%} of the KV blocks{_slots_free(ledger)}", (kv.usage,))


def _adapters(ledger: Ledger, thresholds: Thresholds) -> _Signs:
    account = ledger.adapters
    if account.blocked.value:
        statement = f"{account.blocked.value} requests wait because other adapters hold all slots{_kv_free(ledger)}"
        yield _Sign(statement, (account.blocked, account.slots, ledger.kv.free_tokens))
    elif _may_block(ledger):
        yield "requests that wait for a slot"
    churns = (
        ("loads", account.loads, thresholds.loads, account.host_limit, "host entries"),
        ("activations", account.activations, thresholds.activations, account.slots, "slots"),
    )
    for name, rate, threshold, places, of in churns:
        working = account.working_set
        if _fits(working, places):
            continue
        if rate.value is None:
            yield _missing((f"{name} a minute", rate), ("working set", working), (of, places))
        elif rate.value >= threshold:
            known = working.known and places.known
            whose = f" of {working.value} adapters in {places.value} {of}" if known else ""
            statement = f"{rate.value:,.1f} {name} a minute{whose}{_stall(ledger, name)}{_kv_free(ledger)}"
            yield _Sign(statement, (rate, working, places, ledger.kv.free_tokens))


_SIGNS: Final = {"floor": _floor, "kv": _kv, "adapters": _adapters}


def _may_block(ledger: Ledger) -> bool:
    """Whether requests could wait for a slot unseen: not while one is free, nothing waits, or all adapters in use have one."""
    account = ledger.adapters
    unseen = not account.blocked.known and ledger.kv.waiting_requests.value != 0
    return unseen and not account.free.value and not _fits(account.working_set, account.slots)


def _fits(working: Figure, places: Figure) -> bool:
    return working.value is not None and places.value is not None and working.value <= places.value


def _missing(*needed: tuple[str, Figure]) -> str:
    return ", ".join(name for name, figure in needed if not figure.known)


def _slots_free(ledger: Ledger) -> str:
    free, slots = ledger.adapters.free.value, ledger.adapters.slots.value
    return f", while {free} of {slots} slots are free" if free else ""


def _kv_free(ledger: Ledger) -> str:
    usage = ledger.kv.usage.value
    return "" if usage is None else f", while {1 - usage:.0%} of the KV blocks are free"


def _stall(ledger: Ledger, name: str) -> str:
    """The share of the time that they hold the engine, by the median of what one took."""
    took = ledger.adapters.latencies.get("disk" if name == "loads" else "host")
    rate = ledger.adapters.loads if name == "loads" else ledger.adapters.activations
    if took is None or took.p50.value is None or rate.value is None:
        return ""
    return f", which hold the engine for {rate.value * took.p50.value / _MINUTE:.0%} of the time"


def _size(count: float) -> str:
    return format_bytes(int(count))
