"""What a slot is worth that is kept for an adapter: avoided waiting, and what a miss waits for. Pure formulas, once.

Theory of operation. While an adapter is in a slot, none of its requests on that replica misses; so a slot kept for it avoids
rate x penalty of waiting: its requests an hour there, times what a miss of it waits for. GreedyDual-Size (Cao and Irani, 1997)
and GDSF rank by the same product over the size; where places are slots of one size, as in vLLM, the size does not matter and the
product alone ranks. Best by rank is the best that a fixed content can do when requests come independently of each other.

A penalty that was measured few times is drawn toward that of adapters of like size, and that toward the fleet's, by the weight
that the kernel gives its priors (``kernel.estimates``).
"""

from __future__ import annotations

from typing import Final

from loraledger.kernel.estimates import Estimate

MIB: Final = 2**20


def avoided(per_hour: float, penalty: float | None) -> float | None:
    """Waiting in s an hour that a slot kept for an adapter avoids; ``penalty`` in s."""
    return None if penalty is None else per_hour * penalty


def per_mib(value: float | None, size: int | None) -> float | None:
    """``value`` over the MiB of ``size`` bytes; ``None`` where one of both is unknown, or there are no bytes."""
    return None if value is None or not size else value * MIB / size


def shrunk(prior: float | None, total: float, n: int) -> float | None:
    """The mean of ``n`` values that sum up to ``total``, drawn toward ``prior``; the mean itself without one."""
    if n == 0:
        return prior
    if prior is None:
        return total / n
    return Estimate(prior, total / n, float(n)).value(0)
