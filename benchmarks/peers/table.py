"""What the rounds came to: a row a proxy, and ratios taken within each round, which is what a noisy machine leaves to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from benchmarks.peers.running import Proxy

COLUMNS: Final = {
    "request us": "us / request",
    "event us": "us / event",
    "reads": "reads / event",
    "p50 ms": "added p50 ms",
    "p99 ms": "added p99 ms",
    "streams/s": "streams / s",
    "busy %": "core busy %",
}
"""Figures of a round, and what their columns are called."""


def rows(proxies: Sequence[Proxy]) -> list[list[str]]:
    """Headings, then a row a proxy: median and range of its rounds, or the reason why it has none."""
    found = [["proxy", "work", *COLUMNS.values(), "KiB / stream"]]
    for proxy in proxies:
        who = [f"{proxy.peer.name} {proxy.version}".strip(), proxy.peer.work]
        if proxy.missing is not None:
            found.append([*who, f"none: {proxy.missing.replace('|', '/')[:60]}", *[""] * len(COLUMNS)])
            continue
        cells = [spread([figures[name] for figures in proxy.rounds if name in figures]) for name in COLUMNS]
        found.append([*who, *cells, "-" if proxy.stream_kib is None else f"{proxy.stream_kib:.0f}"])
    return found


def ratios(proxies: Sequence[Proxy]) -> list[str]:
    """A line for each aim: ours to the best Rust router, to nginx, and of the Python proxies to ours. ``proxies[0]`` is ours."""
    ours = proxies[0]
    there = [proxy for proxy in proxies[1:] if proxy.missing is None]
    rust = [proxy for proxy in there if proxy.peer.kind == "rust"]
    found = []
    for name, what in (("request us", "CPU a request"), ("p50 ms", "added p50"), ("p99 ms", "added p99")):
        found.append(_line(f"{what}, ours to the best Rust router", ours, rust, name, 1.0))
    found.append(_line("streams a second, ours to the best Rust router", ours, rust, "streams/s", None, best=max))
    nginx = [proxy for proxy in there if proxy.peer.name == "nginx"]
    found.append(_line("CPU an event, ours to nginx", ours, nginx, "event us", 1.2))
    python = [proxy for proxy in there if proxy.peer.kind == "python"]
    found += [_line(f"CPU a request, {p.peer.name} to ours", ours, [p], "request us", 15, turned=True) for p in python]
    return found


def _line(
    what: str,
    ours: Proxy,
    others: Sequence[Proxy],
    name: str,
    aim: float | None,
    *,
    best: Callable[[Sequence[float]], float] = min,
    turned: bool = False,
) -> str:
    """One ratio, ours to the best of ``others`` or ``turned``, when more is better; where none can be taken it says so."""
    found = []
    for number, mine in enumerate(ours.rounds):
        theirs = [proxy.rounds[number][name] for proxy in others if name in proxy.rounds[number]]
        if theirs and best(theirs) > 0:  # added latency can be below what this clock tells
            found.append(best(theirs) / mine[name] if turned else mine[name] / best(theirs))
    if not found:
        return f"{what}: none, nobody to compare with"
    told = f"{what}: {median(found):.2f} [{min(found):.2f} to {max(found):.2f}]"
    if aim is None:
        return told
    return f"{told}; aim {'>=' if turned else '<='} {aim:.2g}: {judged(median(found), aim, turned)}"


def judged(value: float, aim: float, turned: bool = False) -> str:
    """Whether ``value`` is at most ``aim`` (``turned``: at least), and by what factor not."""
    off = aim / value if turned else value / aim
    return "met" if off <= 1 else f"missed by {off:.1f} x"


def spread(values: Sequence[float]) -> str:
    """Median, and in brackets the lowest and highest."""
    if not values:
        return "-"
    form = _form(median(values))
    return f"{median(values):{form}} [{min(values):{form}} to {max(values):{form}}]"


def _form(value: float) -> str:
    return ",.0f" if abs(value) >= 100 else ".1f" if abs(value) >= 10 else ".2f"
