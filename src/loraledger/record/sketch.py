"""A log-bucket sketch: quantiles of durations from counts that add up.

Theory of operation. A value x counts in bucket floor(log2(x) * 32), so bucket i spans [2^(i/32), 2^((i+1)/32)), a
factor g = 1.0219. The value that stands for it, 2*lo*hi/(lo + hi) = lo*(1 + e), is within e = (g - 1)/(g + 1) = 1.083 %
of each x in it (value and bound are those of DDSketch: Masson, Rim and Lee, PVLDB 12(12), 2019). Merging is adding
counts, so a warehouse can do it with SUM, in any order. The scale is that of schema 5 of Prometheus native histograms
and scale 5 of OpenTelemetry exponential histograms, which differ only in which bucket an exact edge is in.

Values are integer nanoseconds (any unit of which one is negligible works). Below 1 there is one bucket, ``ZERO``, which
stands for 0: frames that arrive in one read have a gap of 0. A sketch of a long answer has some tens of buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from loraledger.errors import InputFileError, InternalError

PER_DOUBLING: Final = 32
ZERO: Final = -1
"""The bucket of values below 1."""
RELATIVE_ERROR: Final = (2 ** (1 / PER_DOUBLING) - 1) / (2 ** (1 / PER_DOUBLING) + 1)
"""The largest error of a quantile, relative to the value that holds its rank."""

_COUNTS: Final = msgspec.json.Decoder(dict[int, int])


def bucket_of(value: float) -> int:
    """The bucket that counts ``value``. Raises InternalError for a negative, infinite or undefined one."""
    if 1 <= value < math.inf:
        return math.floor(math.log2(value) * PER_DOUBLING)
    if 0 <= value < 1:
        return ZERO
    raise InternalError(f"{value} cannot be counted in a sketch: durations are finite and not negative")


def value_of(bucket: int) -> float:
    """The value that stands for a bucket: at most ``RELATIVE_ERROR`` away from each value in it."""
    if bucket == ZERO:
        return 0.0
    return float(2 ** (bucket / PER_DOUBLING)) * (1 + RELATIVE_ERROR)


class Sketch:
    """Counts by bucket. ``counts`` may be read, and handed to ``Sketch`` again."""

    __slots__ = ("counts",)

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: dict[int, int] = dict(counts or {})

    @classmethod
    def from_json(cls, text: str | bytes) -> Sketch:
        """The sketch that ``to_json`` wrote. Raises InputFileError when ``text`` is not one."""
        try:
            counts = _COUNTS.decode(text)
        except msgspec.DecodeError as error:
            raise InputFileError(f"not a sketch ({error}): expected a JSON object of bucket index to count") from error
        for bucket, count in counts.items():
            if bucket < ZERO or count < 1:
                raise InputFileError(
                    f"not a sketch: bucket {bucket} counts {count}; buckets start at {ZERO}, counts at 1"
                )
        return cls(counts)

    def to_json(self) -> str:
        """``{"<bucket>": count}`` by rising bucket, the text of the record's ``itl_sketch`` column."""
        return msgspec.json.encode(dict(sorted(self.counts.items()))).decode()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sketch) and self.counts == other.counts

    __hash__ = None  # type: ignore[assignment]  # counts change

    def __len__(self) -> int:
        """How many values were counted."""
        return sum(self.counts.values())

    def add(self, value: float, times: int = 1) -> None:
        """Count ``value``. Raises InternalError for a negative, infinite or undefined one."""
        bucket = bucket_of(value)
        self.counts[bucket] = self.counts.get(bucket, 0) + times

    def merge(self, other: Sketch) -> None:
        """Count everything that ``other`` counted."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count

    def quantile(self, q: float) -> float | None:
        """The value of rank floor(q * (n - 1)) of the n sorted values, within ``RELATIVE_ERROR``; None when n is 0.

        ``q`` is in [0, 1], otherwise InternalError.
        """
        if not 0 <= q <= 1:
            raise InternalError(f"quantile {q} is not within 0 and 1")
        rank = math.floor(q * (len(self) - 1))
        for bucket in sorted(self.counts):
            rank -= self.counts[bucket]
            if rank < 0:
                return value_of(bucket)
        return None
