"""A twin that knows its adapters: where every run on a bare twin begins."""

from __future__ import annotations

from collections.abc import Iterable

from loraledger.twin.replica import ReplicaTwin


def registered(twin: ReplicaTwin, adapters: Iterable[tuple[str, int, int]]) -> int:
    """Let ``twin`` register (name, bytes, rank) of each, and run until it is idle; the time in ps of the last that happened."""
    for name, size, rank in adapters:
        twin.register(0, name, size, rank)
    now = 0
    while (due := twin.next_at()) is not None:
        now = due
        twin.advance(now)
    return now
