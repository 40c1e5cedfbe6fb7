"""What helps when a pool limits, and what each of it would free or take on the device, where that can be worked out.

All figures are of one rank process and before the engine's own rounding. None of it happens while the engine runs: each lever
is another start. So these are candidates to try on a recorded trace, and no advice to change anything yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from loraledger.ledger.accounts import Ledger
from loraledger.ledger.figures import Figure, Number, combine, configured, rest, unknown
from loraledger.units import format_bytes


@dataclass(frozen=True, slots=True)
class Lever:
    """One thing that can be changed."""

    name: str
    statement: str
    frees: Figure
    """Device bytes; below 0 it takes them."""


def levers_for(pool: Literal["floor", "kv", "adapters"], ledger: Ledger) -> tuple[Lever, ...]:
    """What helps when ``pool`` limits; what has the figure to be judged by comes with it."""
    return tuple(_LEVERS[pool](ledger))


def shortfall(ledger: Ledger) -> Figure:
    """Device bytes by which headroom is below what is to be kept; 0 when it is not."""
    return combine("bytes", (ledger.safety, ledger.headroom), lambda keep, left: max(0, keep - left))


def _floor(ledger: Ledger) -> Iterator[Lever]:
    half = combine("bytes", (ledger.floor.weights,), lambda count: count // 2)
    yield Lever("quantization", f"weights at half their bits free {_size(half)}", half)
    yield Lever("sharding", f"twice the rank processes free about {_size(half)} of weights on each", half)
    freed, slots = _fewer_slots(ledger, shortfall(ledger))
    if slots:
        yield Lever("fewer slots", f"{slots} fewer free {_size(freed)}", freed)
    yield from _lower_rank(ledger)


def _kv(ledger: Ledger) -> Iterator[Lever]:
    account = ledger.adapters
    spare = rest(account.slots, _as_slots(account.working_set))
    if spare.value is not None and spare.value > 0 and ledger.layout == "slots":
        freed = combine("bytes", (spare, account.slot_bytes), lambda count, each: count * each)
        statement = f"{spare.value} slots are more than the working set and hold {_size(freed)}{_tokens(ledger, freed)}"
        yield Lever("fewer slots", statement, freed)
    yield from _lower_rank(ledger)
    yield Lever(
        "smaller KV values", "kv_cache_dtype fp8 holds twice the tokens in the same bytes", configured(0, "bytes")
    )
    yield Lever("another replica", "its KV is a pool of its own", configured(0, "bytes"))


def _adapters(ledger: Ledger) -> Iterator[Lever]:
    account = ledger.adapters
    if ledger.layout == "slots":
        missing = rest(_as_slots(account.working_set), account.slots)
        if missing.value is None or missing.value > 0:
            count = combine("bytes", (missing, account.slot_bytes), lambda lacking, each: -lacking * each)
            price = count if count.known else combine("bytes", (account.slot_bytes,), lambda each: -each)
            many = f"{missing.value} more hold the working set" if count.known else "each"
            taken = combine("bytes", (price,), lambda value: -value)
            yield Lever("more slots", f"{many}: {_size(taken)}{_tokens(ledger, taken)} less for KV", price)
        yield from _lower_rank(ledger)
    lacking = rest(account.working_set, account.host_limit)
    if lacking.value is None or lacking.value > 0:
        want = account.working_set.value
        to = "" if want is None else f" of {want}"
        yield Lever(
            "more host entries", f"max_cpu_loras{to} spares loads and takes host memory only", configured(0, "bytes")
        )
    yield Lever("affinity", "fewer adapters on this replica, more on others", configured(0, "bytes"))


_LEVERS: Final = {"floor": _floor, "kv": _kv, "adapters": _adapters}


def _fewer_slots(ledger: Ledger, wanted: Figure) -> tuple[Figure, int]:
    """What fewer slots free, one at least being left, and how many; as few as give ``wanted`` back if so many are there."""
    account = ledger.adapters
    each, slots, want = account.slot_bytes.value, account.slots.value, wanted.value
    if not each or slots is None or want is None or ledger.layout != "slots":
        return unknown("bytes"), 0
    count = min(int(slots) - 1, math.ceil(want / each))
    return combine("bytes", (account.slot_bytes, account.slots, wanted), lambda one, *_: one * count), max(0, count)


def _lower_rank(ledger: Ledger) -> Iterator[Lever]:
    """Slots are linear in the rank that they are padded to."""
    account = ledger.adapters
    now, need = account.max_lora_rank, account.needed_max_rank
    if ledger.layout == "slots" and now is not None and need is not None and need < now:

        def freed(pool: Number) -> Number:
            return pool - pool * need // now

        frees = combine("bytes", (account.pool,), freed)
        yield Lever(
            "lower rank", f"max_lora_rank {need} in place of {now} frees {_size(frees)}{_tokens(ledger, frees)}", frees
        )


def _as_slots(figure: Figure) -> Figure:
    return combine("slots", (figure,), lambda count: count)


def _tokens(ledger: Ledger, size: Figure) -> str:
    """``size`` in KV tokens, as text."""
    kv = ledger.kv
    tokens = combine("tokens", (size, kv.tokens, kv.bytes), lambda count, all_, of: count * all_ // of if of else None)
    return "" if tokens.value is None else f" or {tokens.value:,} KV tokens"


def _size(figure: Figure) -> str:
    return "an unknown amount" if figure.value is None else format_bytes(int(figure.value))
