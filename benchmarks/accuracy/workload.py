"""What is asked of the engine: which adapters in which order, how long, and when.

Lengths are uniform, so that no run hangs on one long request: prompts of 8 to 40 tokens, outputs of 8 to 40. Three orders of
adapters:

- ``zipf``: independent draws, the i-th adapter with weight 1 / i;
- ``scan``: a1, a2, ... in a cycle over more adapters than the host cache has entries, so that under LRU each request is a load;
- ``bursts``: runs of requests of one adapter, of 8 in the mean; in an open loop a run arrives within a tenth of a second.

Open loops are Poisson (of runs, for ``bursts``). All draws come from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["zipf", "scan", "bursts"]
KINDS: Final[tuple[Kind, ...]] = ("zipf", "scan", "bursts")
SHORTEST, LONGEST = 8, 40
RUN: Final = 8
SPREAD_S: Final = 0.1


@dataclass(frozen=True)
class Call:
    """One request. ``at``: s after the start, of no meaning in a closed loop."""

    at: float
    adapter: str
    prompt_tokens: int
    output_tokens: int


def calls(kind: Kind, adapters: list[str], seed: int, rate: float | None = None) -> Iterator[Call]:
    """Calls without an end; ``rate``: requests a second of an open loop, ``None`` for a closed one."""
    rng = random.Random(f"{kind}-{seed}")
    at, number = 0.0, 0
    weights = [1 / (rank + 1) for rank in range(len(adapters))]
    while True:
        if kind == "bursts":
            adapter, count = rng.choice(adapters), 1 + min(int(rng.expovariate(1 / (RUN - 1))), 4 * RUN)
        elif kind == "scan":
            adapter, count = adapters[number % len(adapters)], 1
        else:
            adapter, count = rng.choices(adapters, weights)[0], 1
        number += 1
        if rate is not None:
            at += rng.expovariate(rate / (RUN if kind == "bursts" else 1))
        offsets = (
            sorted(rng.random() * SPREAD_S for _ in range(count)) if count > 1 and rate is not None else [0.0] * count
        )
        for offset in offsets:
            yield Call(at + offset, adapter, rng.randint(SHORTEST, LONGEST), rng.randint(SHORTEST, LONGEST))


def in_order(endless: Iterator[Call], seconds: float) -> list[Call]:
    """The calls of an open loop's first ``seconds``; runs that overlap are put in order of time."""
    found: list[Call] = []
    for call in endless:
        if call.at >= seconds + 2 * SPREAD_S:
            break
        found.append(call)
    return sorted((call for call in found if call.at < seconds), key=lambda call: call.at)
