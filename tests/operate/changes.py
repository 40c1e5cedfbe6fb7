"""Changes and blocks for tests."""

from __future__ import annotations

from typing import Any

import msgspec

from loraledger.operate.blocks import Block, Figures
from loraledger.operate.change import BETTER, Change, Guardrail, Population, Target
from loraledger.units import NS_PER_S


def change(**fields: Any) -> Change:
    """A change of the policy, to improve hits, with preemptions guarded, for half of the tenants; ``fields`` over it."""
    plain: dict[str, Any] = {
        "id": "c1",
        "who": "an operator",
        "why": "hits",
        "variable": "policy",
        "before": "least-loaded",
        "after": "bounded-affinity",
        "target": Target("hit_rate", 0.02),
        "guardrails": (Guardrail("preemptions", 10.0),),
        "window_ns": 3600 * NS_PER_S,
        "block_ns": 30 * NS_PER_S,
        "population": Population("tenant", 0.5, "c1"),
    }
    return Change(**(plain | fields))


def rolling(**fields: Any) -> Change:
    """The same, rolling out since 0."""
    return msgspec.structs.replace(change(**fields), state="rolling_out", began_ns=0)


def block(number: int, treated: dict[str, float | None], control: dict[str, float | None]) -> Block:
    """Block ``number`` of 30 s; a figure that is not given is unknown."""
    return Block(number * 30 * NS_PER_S, _figures(treated), _figures(control), 100, 100)


def _figures(given: dict[str, float | None]) -> Figures:
    return {metric: given.get(metric) for metric in BETTER}
