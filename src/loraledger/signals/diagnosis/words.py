"""Figures in a sentence, and claims that are held against the rows that they rest on.

Theory of operation. ``Words`` knows all rows of the five findings. A claim is made through it and nowhere else: one of whose rows a
value is unknown is not made. Text is printable ASCII whatever adapters and replicas are called.
"""

from __future__ import annotations

from collections.abc import Iterable

from loraledger.signals.diagnosis.verdict import Claim, Finding, Value
from loraledger.units import format_bytes

Draft = tuple[str, tuple[str, ...]]
"""What would be said, and the rows that have to be known for it."""


class Words:
    """Makes claims from the rows of ``findings``."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self._rows = {row.name: row for finding in findings for row in finding.evidence}

    def value(self, name: str) -> Value:
        """Of the row of that name; ``None`` where there is none."""
        row = self._rows.get(name)
        return None if row is None else row.value

    def number(self, name: str) -> float | None:
        """The same where it is a number."""
        value = self.value(name)
        return value if isinstance(value, int | float) else None

    def text(self, name: str) -> str:
        """The value of a row with its unit: ``2.1 s``."""
        row = self._rows.get(name)
        return "unknown" if row is None or row.value is None else _with_unit(row.unit, row.value)

    def row(self, name: str) -> str:
        """A row as words: ``load time, median 2.1 s (was 0.4 s)``. A unit that is in the name is not said again."""
        row = self._rows[name]
        unit = "" if row.unit in name and row.unit not in ("s", "share") else row.unit
        before = "" if row.baseline is None else f" (was {_with_unit(unit, row.baseline)})"
        return f"{name} {_with_unit(unit, row.value)}{before}"

    def known(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of ``names`` that have a value."""
        return tuple(name for name in names if self.value(name) is not None)

    def claims(self, drafts: Iterable[Draft]) -> tuple[Claim, ...]:
        """Of ``drafts``, those that rest on rows, each of which is known."""
        return tuple(Claim(text, names) for text, names in drafts if names and self.known(names) == names)


def _with_unit(unit: str, value: Value) -> str:
    if isinstance(value, str) or value is None:
        return str(value)
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit == "bytes":
        return format_bytes(int(value))
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()
