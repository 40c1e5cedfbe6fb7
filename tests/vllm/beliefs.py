"""What the gateway believed of an engine's tiers against what the engine found, request by request.

The gateway under test knows of no probe; only the comparison reads the probe's events, by the id that the gateway gives each
request. A request that waited for an explicit load says nothing about belief: its adapter was just put there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from loraledger.record.tables import Row
from support.gateway import GatewayProcess, replica, tenant

TRUTHS = {"slot": "gpu", "host": "host", "miss": "disk"}
"""The engine's word for each class."""
CLASSES = ("gpu", "host", "disk")
FEW = 5
"""With fewer truths of a class its recall says nothing."""

Confusion = Counter[tuple[str, str]]
"""How often (truth, belief) occurred."""


def zipf(names: Sequence[str], count: int, seed: int = 7) -> list[str]:
    """A stream of adapters, the first the most popular."""
    weights = [1 / (rank + 1) for rank in range(len(names))]
    return random.Random(seed).choices(names, weights, k=count)


def scan(names: Sequence[str], count: int) -> list[str]:
    """Two hot adapters in turn, and after each ten requests one walk over all."""
    hot = [names[i % 2] for i in range(10)]
    return ([*hot, *names] * (count // (len(hot) + len(names)) + 1))[:count]


def ask(http: httpx2.Client, url: str, model: str, tokens: int) -> int:
    """One streamed answer, read to its end; the HTTP status."""
    body = {"model": model, "prompt": "Hello, world", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    head = {"Authorization": "Bearer key-acme"}
    with http.stream("POST", f"{url}/v1/completions", json=body, headers=head) as reply:
        reply.read()
        return reply.status_code


def send(gateway: GatewayProcess, stream: Iterable[str], at_once: int = 4) -> Counter[int]:
    """Send a stream of requests, ``at_once`` open at any time; how often each HTTP status came."""
    rng = random.Random(3)
    with httpx2.Client(timeout=120.0, trust_env=False) as http, ThreadPoolExecutor(at_once) as pool:
        jobs = [pool.submit(ask, http, gateway.url, name, rng.randint(1, 8)) for name in stream]
        return Counter(job.result() for job in jobs)


def found_by_engine(events: Iterable[dict[str, Any]]) -> dict[str, str]:
    """By request, the tier in which the engine found its adapter."""
    return {
        request: TRUTHS[event["state"]]
        for event in events
        if event["kind"] == "access" and event["state"] in TRUTHS
        for request in event["requests"]
    }


def confusion(rows: Iterable[Row], found: dict[str, str]) -> Confusion:
    """Truth and belief of each request that was sent on without waiting for a load."""
    return Confusion(
        (found[str(row["id"])], str(row["hit_class"]))
        for row in rows
        if str(row["id"]) in found and row["load_start_ns"] is None
    )


def truths(table: Confusion, truth: str) -> int:
    """How many requests found their adapter there."""
    return sum(count for (true, _), count in table.items() if true == truth)


def recall(table: Confusion, truth: str) -> float:
    """Share of them for which that was believed."""
    return table[truth, truth] / max(1, truths(table, truth))


def printed(table: Confusion) -> str:
    """The confusion matrix, and the recall of each class."""
    words = (*CLASSES, "unknown")
    lines = [f"{'engine found':<14}" + "".join(f"{word:>9}" for word in words) + f"{'n':>7}{'recall':>9}"]
    for truth in CLASSES:
        counts = "".join(f"{table[truth, word]:>9}" for word in words)
        n = truths(table, truth)
        share = f"{recall(table, truth):>9.1%}" if n >= FEW else f"{'few':>9}"
        lines.append(f"{truth:<14}{counts}{n:>7}{share}")
    return "\n".join(lines)


def settings_for(url: str, adapters: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Settings of a gateway with one replica; ``more`` are fields of the replica."""
    return {
        "base": {"names": ["base"]},
        "replicas": [replica("r1", url, **more)],
        "adapters": {"list": [{"name": name, "path": str(path)} for name, path in adapters.items()]},
        "tenants": [tenant("acme", list(adapters))],
        "limits": {"scrape_interval": "500ms"},
    }
