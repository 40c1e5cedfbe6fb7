"""Rows of the reproduction table, and its printed forms.

Theory of operation. A row is one published figure beside ours. Rows that were fitted to are shown and not counted. Every other one
counts, a miss with the reason for it; what could not be predicted at all stands below the table with its reason. For a document,
single runs that pass are folded into one row a group, so that what is left to read are aggregates and misses: of a group the
largest error is told, and where ours is only held to be no less than a bound (``FLOOR``), the one nearest to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

COLUMNS = ("target", "what", "published", "ours", "unit", "error", "tolerance", "pass", "reason")
RIGHT = ("published", "ours", "error")
LEAST_SHARE = 0.8
FLOOR = "never below"
"""The tolerance of what may exceed the published figure by any amount."""


@dataclass(frozen=True)
class Line:
    """``target`` says in a word or two whose measurement of what, ``what`` names the measured run or the aggregate over runs.

    ``published`` and ``ours`` in ``unit``; ``error`` as text in the terms of ``tolerance`` ("+1.3 %", "-0.02"). ``reason``
    says why a line misses, or what a reader of one that passes should know. ``fitted`` marks runs that the constants were
    fitted to: they are shown and never counted.
    ``group`` names the lines that may be folded into one where they pass; empty: never.
    """

    target: str
    what: str
    unit: str
    published: float | str
    ours: float | str
    error: str
    tolerance: str
    passed: bool
    reason: str = ""
    fitted: bool = False
    group: str = ""


@dataclass(frozen=True)
class Counted:
    """How many constants a model was fitted with, beside ``tables``: facts and sizes that were looked up, not fitted."""

    where: str
    constants: int
    points: int
    tables: str


@dataclass(frozen=True)
class LeftOut:
    """What was measured and is not predicted, and why."""

    what: str
    reason: str


def number(value: float | str) -> str:
    """Four figures, or the text itself."""
    return value if isinstance(value, str) else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def verdict(line: Line) -> str:
    """``fitted``, ``yes`` or ``MISS``."""
    return "fitted" if line.fitted else "yes" if line.passed else "MISS"


def cells(line: Line) -> tuple[str, ...]:
    """One row of the table, in the order of ``COLUMNS``."""
    return (
        line.target,
        line.what,
        number(line.published),
        number(line.ours),
        line.unit,
        line.error,
        line.tolerance,
        verdict(line),
        line.reason,
    )


def share(lines: Sequence[Line]) -> tuple[int, int]:
    """(lines that pass, lines that count)."""
    counted = [line for line in lines if not line.fitted]
    return sum(line.passed for line in counted), len(counted)


def summary(lines: Sequence[Line], counted: Sequence[Counted] = (), left_out: Sequence[LeftOut] = ()) -> list[str]:
    """What stands below the table."""
    passed, count = share(lines)
    said = [f"{passed} of {count} lines pass ({100 * passed / max(count, 1):.0f} %); {_targets(lines)}"]
    said += [f"{one.where}: {one.constants} constants, {one.points} runs; tables: {one.tables}" for one in counted]
    said += [f"not predicted: {one.what}: {one.reason}" for one in left_out]
    return said


def _targets(lines: Sequence[Line]) -> str:
    found = []
    for target in dict.fromkeys(line.target for line in lines):
        passed, count = share([line for line in lines if line.target == target])
        found.append(f"{target}: {passed} of {count}")
    return ", ".join(found)


def folded(lines: Sequence[Line]) -> list[Line]:
    """``lines`` with those that pass or were fitted, have a group and are not alone in it, as one line a group.

    It stands where the group's first line stood; ``published`` and ``ours`` become ranges, ``error`` the largest by size (of a
    ``FLOOR``: the smallest); a reason that all give is kept.
    """
    foldable: dict[tuple[str, str, bool], list[Line]] = {}
    for line in lines:
        if line.group and (line.passed or line.fitted):
            foldable.setdefault((line.target, line.group, line.fitted), []).append(line)
    done, found = set(), []
    for line in lines:
        key = line.target, line.group, line.fitted
        mates = foldable.get(key, []) if line.passed or line.fitted else []
        if len(mates) < 2:
            found.append(line)
        elif key not in done:
            done.add(key)
            found.append(_fold(mates))
    return found


def _fold(lines: Sequence[Line]) -> Line:
    first, tolerances, reasons = lines[0], {line.tolerance for line in lines}, {line.reason for line in lines}
    if tolerances == {FLOOR}:
        which, told = "nearest", min(lines, key=lambda line: _leading(line.error) or 0.0)
    else:
        which, told = "worst", max(lines, key=lambda line: abs(_leading(line.error) or 0.0))
    return Line(
        first.target,
        f"{first.group} ({len(lines)} runs)",
        first.unit,
        _range([line.published for line in lines]),
        _range([line.ours for line in lines]),
        first.error if _leading(told.error) is None else f"{which} {told.error}",
        first.tolerance if len(tolerances) == 1 else "as each",
        True,
        first.reason if len(reasons) == 1 else "",
        fitted=first.fitted,
    )


def _leading(text: str) -> float | None:
    """The number that ``text`` begins with; of a factor, as in ``x0.9``, its distance from 1."""
    try:
        first = text.split()[0]
        return float(first[1:]) - 1 if first.startswith("x") else float(first)
    except (IndexError, ValueError):
        return None


def _range(values: Sequence[float | str]) -> str:
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        return "-"
    low, high = number(min(numbers)), number(max(numbers))
    return low if low == high else f"{low} to {high}"


def markdown(lines: Sequence[Line], below: Sequence[str], theirs: str = "published") -> str:
    """A table for a document, folded, and what stands below it as a list; ``theirs`` heads what ours is held against."""
    head = tuple(theirs if name == "published" else name for name in COLUMNS)
    rows = [head, tuple("---:" if name in RIGHT else "---" for name in COLUMNS), *map(cells, folded(lines))]
    text = "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)
    return f"{text}\n\n" + "\n".join(f"- {line}" for line in below) + "\n"


def as_data(lines: Sequence[Line]) -> list[dict[str, object]]:
    """For a JSON file."""
    return [asdict(line) for line in lines]
