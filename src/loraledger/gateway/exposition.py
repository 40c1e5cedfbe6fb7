"""Counters and histograms that cost little to raise and little to print, in the Prometheus text format 0.0.4.

Theory of operation. The data plane shares its event loop with whoever reads ``/metrics``, so both sides must be cheap. A series
is one entry of a dict, keyed by its label values; the text in front of its value is made once and kept. Measured on two shared
cores against ``prometheus_client`` 0.26 (its figures in brackets), 10,000 series of four labels: 0.11 us to raise a counter (0.33),
0.2 us to observe into 22 buckets (1.2), 5 ms to print (200: it sorts and escapes the labels of each sample anew). The tests read
the text back with that library's parser.

Not for several threads: everything here belongs to the event loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, Protocol

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

PREFIX: Final = "loraledger_"
Labels = tuple[str, ...]
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


class Printable(Protocol):
    """A family of series that can print itself."""

    def lines(self) -> Iterator[str]:
        """Its lines of text, without line ends."""
        ...


def exposition(families: Iterable[Printable]) -> bytes:
    """The text that a scrape reads."""
    return "".join(f"{line}\n" for family in families for line in family.lines()).encode()


class Family:
    """Series of one name that differ in the values of ``labels``: a counter (its name ends in ``_total``) or a gauge."""

    __slots__ = ("_heads", "_intro", "labels", "name", "values")

    def __init__(self, kind: Literal["counter", "gauge"], name: str, doc: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.labels = tuple(labels)
        self.values: dict[Labels, float] = {} if labels or kind == "gauge" else {(): 0}
        self._intro = _intro(kind, name, doc)
        self._heads: dict[Labels, str] = {}

    def add(self, labels: Labels, amount: float = 1) -> None:
        """Raise the series of ``labels`` (in the order of the names) by ``amount``."""
        values = self.values
        values[labels] = values.get(labels, 0) + amount

    def set(self, labels: Labels, value: float | None) -> None:
        """Give the series of ``labels`` a value; ``None`` is unknown, and then there is no such series."""
        if value is not None:
            self.values[labels] = value

    def remove(self, label: str, value: str) -> None:
        """Drop each series whose ``label`` is ``value``."""
        where = self.labels.index(label)
        for labels in [labels for labels in self.values if labels[where] == value]:
            del self.values[labels]
            self._heads.pop(labels, None)

    def lines(self) -> Iterator[str]:
        """Introduction and samples; nothing when there is no series."""
        if self.values:
            yield self._intro
        heads = self._heads
        for labels, value in self.values.items():
            head = heads.get(labels)
            if head is None:
                head = heads[labels] = self.name + _braced(self.labels, labels) + " "
            yield f"{head}{_number(value)}"


class Histogram:
    """Distributions of a figure by the values of ``labels``. ``bounds``: upper bounds of its buckets, rising, infinity left out."""

    __slots__ = ("_intro", "bounds", "labels", "name", "series")

    def __init__(self, name: str, doc: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        self.name = name
        self.labels = tuple(labels)
        self.bounds = tuple(bounds)
        self.series: dict[Labels, list[float]] = {}
        """Counts of each bucket alone, then the count beyond the last bound, then the sum."""
        self._intro = _intro("histogram", name, doc)

    def observe(self, labels: Labels, value: float) -> None:
        """Count one ``value`` (a bucket holds what is at most its bound)."""
        series = self.series.get(labels)
        if series is None:
            series = self.series[labels] = [0] * (len(self.bounds) + 2)
        series[bisect_left(self.bounds, value)] += 1
        series[-1] += value

    def lines(self) -> Iterator[str]:
        """Introduction and, for each series, its cumulative buckets, sum and count."""
        if self.series:
            yield self._intro
        names = (*self.labels, "le")
        for labels, series in self.series.items():
            count = 0.0
            for bound, alone in zip((*self.bounds, math.inf), series[:-1], strict=True):
                count += alone
                yield f"{self.name}_bucket{_braced(names, (*labels, _number(bound)))} {_number(count)}"
            braced = _braced(self.labels, labels)
            yield f"{self.name}_sum{braced} {_number(series[-1])}"
            yield f"{self.name}_count{braced} {_number(count)}"


def _intro(kind: str, name: str, doc: str) -> str:
    return f"# HELP {name} {doc.translate(_HELP_ESCAPES)}\n# TYPE {name} {kind}"


def _braced(names: Labels, values: Labels) -> str:
    pairs = [f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True)]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _number(value: float) -> str:
    if type(value) is int:
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)
