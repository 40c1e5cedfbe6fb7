"""Kinds of incident, the pool that each truly exhausts, and what is handed over of one that was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from loraledger.signals.facts import Facts
from loraledger.signals.figures import Window

Kind = Literal[
    "arrival surge",
    "cold scan",
    "hot adapter on one replica",
    "KV exhaustion",
    "slow disk loads",
    "routing skew",
    "slot starvation",
    "longer prompts",
    "restart storm",
    "floor too tight",
    "nothing wrong",
]
TruePool = Literal["demand", "adapters", "routing", "kv", "floor", "nothing"]

POOLS: Final[dict[Kind, TruePool]] = {
    "arrival surge": "demand",
    "cold scan": "adapters",
    "hot adapter on one replica": "routing",
    "KV exhaustion": "kv",
    "slow disk loads": "adapters",
    "routing skew": "routing",
    "slot starvation": "adapters",
    "longer prompts": "demand",
    "restart storm": "adapters",
    "floor too tight": "floor",
    "nothing wrong": "nothing",
}
KINDS: Final[tuple[Kind, ...]] = tuple(POOLS)


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded incident. ``directory`` is a record folder; ``parameters`` is all that was drawn, and ``redraws`` of it."""

    kind: Kind
    seed: int
    directory: Path
    baseline: Window
    window: Window
    facts: Facts
    pool: TruePool
    parameters: dict[str, object]
