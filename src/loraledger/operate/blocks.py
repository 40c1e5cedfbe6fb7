"""Blocks of time: the figures of the treated requests beside those of all others, of the same minutes.

Theory of operation. A request counts in the block in which it *ended*, so a block is complete when its time is over, whoever is
still waiting. It is treated when its tenant is, or the replica that answered it is, by the population's unit. What the client got
wrong, or gave up, counts for nobody. A figure of fewer than ``FEWEST`` requests is ``None``, as is one that nobody told.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final, Literal

import msgspec

from loraledger.operate.change import Metric
from loraledger.record.tables import Row
from loraledger.units import NS_PER_S

FEWEST: Final = 5
"""Requests of a part that a figure of it needs."""
_NOT_JUDGED: Final = ("client_error", "client_gone")
_KNOWN: Final = ("gpu", "host", "disk", "remote")
Figures = dict[Metric, float | None]


class Block(msgspec.Struct, frozen=True):
    """One block: when it began, and the figures of both parts."""

    began_ns: int
    treated: Figures
    control: Figures
    treated_requests: int
    control_requests: int

    def difference(self, metric: Metric) -> float | None:
        """Treated minus control; ``None`` where one of both is not known."""
        mine, rest = self.treated[metric], self.control[metric]
        return None if mine is None or rest is None else mine - rest


class Blocks:
    """Takes finished rows of table ``requests`` as they come, and gives blocks when they are over. Memory: one block's rows."""

    def __init__(
        self,
        unit: Literal["tenant", "replica"],
        treated: Container[str],
        began_ns: int,
        block_ns: int,
        slo_ns: int = NS_PER_S,
    ) -> None:
        self._unit = unit
        self._treated = treated
        self._began = began_ns
        self._length = block_ns
        self._slo = slo_ns
        self._parts: tuple[list[Row], list[Row]] = ([], [])

    def take(self, row: Row) -> list[Block]:
        """Count ``row``; the blocks that are over by it. What ended before the rollout began counts nowhere."""
        ended, name = row.get("finished_ns"), row.get(self._unit)
        if not isinstance(ended, int) or ended < self._began or not isinstance(name, str):
            return []
        over = self.until(ended)
        if row.get("status") not in _NOT_JUDGED:
            self._parts[name not in self._treated].append(row)
        return over

    def until(self, now_ns: int) -> list[Block]:
        """The blocks that are over at ``now_ns``."""
        over = []
        while now_ns - self._began >= self._length:
            mine, rest = self._parts
            over.append(
                Block(self._began, figures(mine, self._slo), figures(rest, self._slo), len(mine), len(rest)),
            )
            self._parts = ([], [])
            self._began += self._length
            if now_ns - self._began >= MOST * self._length:  # a process that slept, or a clock that was set
                self._began += (now_ns - self._began) // self._length * self._length
        return over


MOST: Final = 1000
"""Empty blocks that are given in a row; of a longer silence the rest is left out."""


def figures(rows: list[Row], slo_ns: int) -> Figures:
    """The figures of requests that ended in one block."""
    ttft = sorted(_between(rows, "arrived_ns", "first_token_ns"))
    known = [row for row in rows if row.get("adapter") is not None and row.get("hit_class") in _KNOWN]
    told = [row["preemptions"] for row in rows if isinstance(row.get("preemptions"), int)]
    gaps = [(row["itl_mean_ns"], row["generated_tokens"]) for row in rows]
    timed = [
        (gap, tokens - 1) for gap, tokens in gaps if isinstance(gap, int) and isinstance(tokens, int) and tokens > 1
    ]
    met = [row for row in rows if isinstance(row.get("first_token_ns"), int)]
    judged = [row for row in rows if row.get("stream") is not False]
    return {
        "hit_rate": _of(known, lambda: sum(row["hit_class"] == "gpu" for row in known) / len(known)),
        "ttft_mean": _of(ttft, lambda: sum(ttft) / len(ttft) / NS_PER_S),
        "ttft_p50": _of(ttft, lambda: _quantile(ttft, 0.5)),
        "ttft_p90": _of(ttft, lambda: _quantile(ttft, 0.9)),
        "ttft_p99": _of(ttft, lambda: _quantile(ttft, 0.99)),
        "itl_mean": _of(timed, lambda: sum(g * n for g, n in timed) / sum(n for _, n in timed) / NS_PER_S),
        "attainment": _of(
            judged, lambda: sum(took <= slo_ns for took in _between(met, "arrived_ns", "first_token_ns")) / len(judged)
        ),
        "preemptions": _of(told, lambda: 1000 * sum(told) / len(told)),  # type: ignore[arg-type]
        "refused": _of(rows, lambda: sum(row.get("status") == "rejected" for row in rows) / len(rows)),
    }


def replayed(rows: Iterable[Row], blocks: Blocks, until_ns: int) -> list[Block]:
    """All blocks of rows that are there already, in order of their ends."""
    found: list[Block] = []
    for row in sorted(rows, key=_ended):
        found += blocks.take(row)
    return found + blocks.until(until_ns)


def _ended(row: Mapping[str, object]) -> int:
    ended = row.get("finished_ns")
    return ended if isinstance(ended, int) else 0


def _of(of: list, figure: Callable[[], float]) -> float | None:  # type: ignore[type-arg]
    return figure() if len(of) >= FEWEST else None


def _between(rows: list[Row], start: str, end: str) -> list[int]:
    pairs = [(row.get(start), row.get(end)) for row in rows]
    return [b - a for a, b in pairs if isinstance(a, int) and isinstance(b, int) and b >= a]


def _quantile(ordered: list[int], q: float) -> float:
    """Linear between neighbours, in s."""
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return (ordered[low] + (ordered[high] - ordered[low]) * (at - low)) / NS_PER_S
