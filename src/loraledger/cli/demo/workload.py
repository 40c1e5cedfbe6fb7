"""The demo's traffic: recorded arrivals and lengths, with tenants and adapters drawn by a fixed seed.

The trace (CC-BY 4.0, see ``data/NOTICE``) has neither adapters nor tenants. Tenants share the traffic 5 : 3 : 2; within a tenant
adapters follow Zipf 1.0; one request in twelve goes to the base model.
"""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from importlib.resources import files

SHARES = (5, 3, 2)
BASE_SHARE = 1 / 12
CONTEXT = 8192
"""Tokens that the emulated model takes; the one longer request of the slice is left out."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant of the demo: its key and the adapters that it may call."""

    name: str
    key: str
    adapters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send ``at`` seconds of trace time."""

    at: float
    tenant: Tenant
    model: str
    prompt_tokens: int
    generated_tokens: int


def load_workload(seconds: float, tenants: tuple[Tenant, ...]) -> list[Call]:
    """The calls of the first ``seconds`` of the slice, in order."""
    rng = random.Random(2023)  # noqa: S311 - a workload, not a secret
    text = files(__package__).joinpath("data/azure_conv_2023_slice.csv").read_text(encoding="utf-8")
    calls = []
    for row in csv.DictReader(text.splitlines()):
        at = int(row["arrived_ms"]) / 1000
        if at >= seconds:
            break
        prompt, generated = int(row["prompt_tokens"]), int(row["generated_tokens"])
        if prompt + generated > CONTEXT:
            continue
        tenant = rng.choices(tenants, SHARES)[0]
        weights = [1 / (rank + 1) for rank in range(len(tenant.adapters))]
        model = "base" if rng.random() < BASE_SHARE else rng.choices(tenant.adapters, weights)[0]
        calls.append(Call(at, tenant, model, prompt, generated))
    return calls
