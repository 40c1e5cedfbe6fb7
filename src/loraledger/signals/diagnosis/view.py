"""A window beside its baseline: what the five steps read from both, and the rows that they write.

Theory of operation. Every figure is a pair, now and before; either may be unknown. ``ratio`` and ``rise`` of a pair are unknown
when one of the two is. A baseline of fewer than ``FEW`` requests is none. A ``Sheet`` collects rows by name, so that a claim can
be held against the row that it rests on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Final

from loraledger.signals.diagnosis.thresholds import FEW
from loraledger.signals.diagnosis.verdict import Evidence, Value
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Group, Hits, Pressure, Signals

NAME_LENGTH: Final = 40
Both = tuple[float | None, float | None]
"""Now and before."""


class View:
    """``now`` and a usable ``base``, with what is known of replicas and adapters. ``now.total`` is there."""

    def __init__(self, now: Signals, base: Signals | None, facts: Facts, total: Group) -> None:
        self.now, self.facts, self.total = now, facts, total
        usable = base is not None and base.total is not None and base.total.requests >= FEW
        self.base = base if usable else None
        self.before = self.base.total if self.base is not None else None

    def both(self, read: Callable[[Group], float | None]) -> Both:
        """``read`` of all requests, in both windows."""
        return read(self.total), None if self.before is None else read(self.before)

    def signals(self, read: Callable[[Signals], float | None]) -> Both:
        """``read`` of both windows as a whole."""
        return read(self.now), None if self.base is None else read(self.base)

    @cached_property
    def scale(self) -> float:
        """Length of the window over the baseline's."""
        if self.base is None or self.base.window.seconds <= 0 or self.now.window.seconds <= 0:
            return 1.0
        return self.now.window.seconds / self.base.window.seconds

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Replicas that either window has requests or samples of."""
        return tuple(sorted(self.now.replicas.keys() | (self.base.replicas.keys() if self.base is not None else set())))

    @cached_property
    def probed(self) -> bool:
        """Whether a probe told of the engine's own side, in this window and in the baseline, if there is one."""
        return self.total.engine_hits is not None and (self.before is None or self.before.engine_hits is not None)

    def hits(self, group: Group) -> Hits:
        """By the kernel's decisions, or by what engines found where both windows have it, whichever tells of more misses.

        An engine finds in a slot what a load that the request caused has just brought there, and it misses what was pushed out
        while the request waited.
        """
        told, decided = group.engine_hits, group.hits
        if not self.probed or told is None or told.gpu_rate is None:
            return decided
        return told if decided.gpu_rate is None or told.gpu_rate < decided.gpu_rate else decided


def pressures(signals: Signals) -> list[Pressure]:
    """Of each replica; of the fleet where replicas have none."""
    found = [group.pressure for group in signals.replicas.values() if group.pressure is not None]
    if found or signals.total is None or signals.total.pressure is None:
        return found
    return [signals.total.pressure]


def largest(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    return max((value for value in values if value is not None), default=None)


def quotient(value: float | None, of: float | None) -> float | None:
    """``None`` when either is unknown or there is nothing, or next to nothing, to divide by."""
    if value is None or of is None or of <= 0:
        return None
    found = value / of
    return found if math.isfinite(found) else None


def ratio(pair: Both) -> float | None:
    """Now over before."""
    return quotient(*pair)


def rise(pair: Both) -> float | None:
    """Now less before."""
    now, before = pair
    return now - before if now is not None and before is not None else None


def at_least(value: float | None, threshold: float) -> bool:
    """Whether ``value`` is known and reaches ``threshold``."""
    return value is not None and value >= threshold


def plain(name: str) -> str:
    """A name as it can stand in any line: printable ASCII, at most ``NAME_LENGTH`` of it."""
    text = "".join(char if char.isprintable() else "?" for char in name).encode("ascii", "replace").decode()
    return text if len(text) <= NAME_LENGTH else f"{text[: NAME_LENGTH - 3]}..."


class Sheet:
    """Rows by name, in the order in which they were written."""

    def __init__(self) -> None:
        self.rows: dict[str, Evidence] = {}

    def put(self, name: str, pair: tuple[Value, Value], unit: str = "") -> None:
        """A row. Figures that nobody will read to the last digit are kept to nine."""
        now, before = (_kept(value) for value in pair)
        self.rows[name] = Evidence(name, now, before, unit)

    def put_one(self, name: str, value: Value, unit: str = "") -> None:
        """A row that has no counterpart in the baseline."""
        self.put(name, (value, None), unit)

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """All rows."""
        return tuple(self.rows.values())


def _kept(value: Value) -> Value:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    return plain(value) if isinstance(value, str) else value
