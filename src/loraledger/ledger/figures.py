"""One figure of a ledger: a number, its unit, where it comes from and how old it is.

Unknown is a value of its own, ``None``, and never 0: a sum with an unknown part is unknown, since a total that leaves a part
out looks like one that does not. A figure made of several has the *weakest* source of its parts. ``believed`` (worked out from
what was sent) is weaker than ``configured`` (what the engine was started with, or a formula on it), because an engine may have
gone on since; ``configured`` is weaker than ``observed``, because nobody looked. So nothing passes for observed of which any
part was not seen. And it is as old as its oldest part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from loraledger.events import Source

Unit = Literal[
    "bytes",
    "tokens",
    "blocks",
    "slots",
    "adapters",
    "requests",
    "tokens/block",
    "ns",
    "share",
    "per minute",
    "per second",
]
Number = int | float

_WEAKEST_FIRST: Final[tuple[Source, ...]] = ("believed", "configured", "observed")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit, its source and its age."""

    value: Number | None
    """``None``: unknown."""
    unit: Unit
    source: Source = "believed"
    age: int | None = None
    """Nanoseconds since it was true; ``None`` for what was configured and so does not age, and where nobody noted the time."""

    @property
    def known(self) -> bool:
        """Whether there is a value."""
        return self.value is not None


def unknown(unit: Unit) -> Figure:
    """A figure that nobody knows."""
    return Figure(None, unit)


def configured(value: Number | None, unit: Unit) -> Figure:
    """A figure from settings, or from a formula on nothing else."""
    return Figure(value, unit, "configured")


def observed(value: Number | None, unit: Unit, age: int | None) -> Figure:
    """A figure that the engine showed ``age`` ns ago."""
    return Figure(value, unit, "observed", age)


def believed(value: Number | None, unit: Unit, age: int | None) -> Figure:
    """A figure worked out from what was sent, last changed ``age`` ns ago."""
    return Figure(value, unit, "believed", age)


def combine(unit: Unit, parts: Sequence[Figure], how: Callable[..., Number | None]) -> Figure:
    """``how`` of the values of ``parts``, in ``unit``: unknown if any part is, of the weakest source, as old as the oldest.

    ``how`` may return ``None`` where there is no answer (a division by 0). Of no parts it is a constant: configured.
    """
    values = [part.value for part in parts]
    value = None if any(number is None for number in values) else how(*values)
    sources = {part.source for part in parts}
    source: Source = next((weak for weak in _WEAKEST_FIRST if weak in sources), "configured")
    return Figure(value, unit, source, _oldest(parts))


def total(parts: Iterable[Figure], unit: Unit) -> Figure:
    """Their sum; 0 of none. Raises ``ValueError`` when a part has another unit."""
    found = _of(unit, parts)
    return combine(unit, found, lambda *values: sum(values))


def rest(whole: Figure, *parts: Figure) -> Figure:
    """What ``parts`` leave of ``whole``; below 0 when they are more. Raises ``ValueError`` when a part has another unit."""
    found = _of(whole.unit, parts)
    return combine(whole.unit, (whole, *found), lambda first, *others: first - sum(others))


def product(unit: Unit, *factors: Figure) -> Figure:
    """Two or more figures multiplied: slots x bytes of one."""

    def multiply(*values: Number) -> Number:
        result: Number = 1
        for value in values:
            result *= value
        return result

    return combine(unit, factors, multiply)


def ratio(part: Figure, whole: Figure) -> Figure:
    """``part / whole`` as a share; unknown for a whole of 0. Raises ``ValueError`` when their units differ."""
    _of(whole.unit, (part,))
    return combine("share", (part, whole), lambda upper, lower: upper / lower if lower else None)


def first_known(*figures: Figure) -> Figure:
    """The first of ``figures`` that has a value, else the last one: what was seen before what was worked out."""
    return next((figure for figure in figures if figure.known), figures[-1])


def _of(unit: Unit, parts: Iterable[Figure]) -> tuple[Figure, ...]:
    found = tuple(parts)
    for part in found:
        if part.unit != unit:
            raise ValueError(f"a figure in {part.unit} cannot be part of one in {unit}")
    return found


def _oldest(parts: Sequence[Figure]) -> int | None:
    ages = [part.age for part in parts if part.source != "configured" or part.age is not None]
    known = [age for age in ages if age is not None]
    return max(known) if known and len(known) == len(ages) else None
