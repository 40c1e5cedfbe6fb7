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


def evidence(**fields: Any) -> dict[str, Any]:
    """What ``loraledger change replay`` attaches of a replay that is for ``change``; ``fields`` over it."""
    checks = [
        {"metric": "hit_rate", "role": "target", "limit": 0.02, "before": 0.5, "after": 0.75, "moved": 0.25},
        {"metric": "preemptions", "role": "guardrail", "limit": 10.0, "before": 3.0, "after": 4.0, "moved": 1.0},
    ]
    plain: dict[str, Any] = {
        "trace": "sha256:1",
        "requests": 900,
        "runs": {"before": "sha256:2", "after": "sha256:3"},
        "figures": {"before": {"hit_rate": 0.5, "preemptions": 3.0}, "after": {"hit_rate": 0.75, "preemptions": 4.0}},
        "guardrails": [{**check, "verdict": "pass"} for check in checks],
        "profile": {"name": "measured", "engine_version": "0.32.0"},
        "stale": False,
        "ok": True,
        "reasons": [],
    }
    return plain | fields


def _figures(given: dict[str, float | None]) -> Figures:
    return {metric: given.get(metric) for metric in BETTER}
