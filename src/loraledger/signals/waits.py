"""Times to the first token: exact percentiles and the split, for each group and by hit class within it.

Theory of operation. One scan. Percentiles do not add up, so each set of groups is aggregated from the requests themselves; DuckDB
holds each time once for each of the eight sets. Percentiles are linear between neighbours (``quantile_cont``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import msgspec

from loraledger.record.reader import RecordReader
from loraledger.record.tables import Row
from loraledger.signals.durations import parted
from loraledger.signals.figures import Split, Spread
from loraledger.signals.scope import (
    TOTAL,
    Key,
    Scope,
    by_class,
    key_of,
    maybe_float,
    whole,
    with_,
)
from loraledger.units import NS_PER_S

_COLD: Final = "CASE WHEN class IN ('host', 'disk', 'remote') THEN ttft END"
_COLUMNS: Final = (
    "COUNT(ttft) AS n",
    "SUM(ttft) AS total",
    "QUANTILE_CONT(ttft, [0.5, 0.9, 0.99]) AS percentiles",
    f"QUANTILE_CONT({_COLD}, 0.99) AS cold",
    *(f"SUM(cut_{number}) AS cut_{number}" for number in range(1, 6)),
    "SUM(CASE WHEN probed = 1 THEN ttft - cut_5 END) AS unattributed",
    "SUM(CASE WHEN prepared = 1 THEN 1 ELSE 0 END) AS told",
    "SUM(probed) AS probed",
)
_PARTS: Final = ("gateway_queue", "preparation", "engine_queue", "prefill", "unattributed", "engine")


class Waits(msgspec.Struct, frozen=True):
    """Of the requests of a group that got a first token, by hit class too. ``cold``: p99 of misses, s. ``probed``: how many had
    queue and prefill told."""

    ttft: Spread
    split: Split
    cold: float | None
    probed: int
    ttft_by_class: dict[str, Spread] = {}
    split_by_class: dict[str, Split] = {}


def waits(reader: RecordReader, scope: Scope) -> dict[Key, Waits]:
    """By group; one without a first token is not in it."""
    tables = [
        *parted(scope),
        ("told", "SELECT * FROM parted WHERE ttft IS NOT NULL"),
        ("grouped", by_class(_COLUMNS, "told")),
    ]
    rows = reader.query(with_(tables, "SELECT * FROM grouped"), scope.parameters())
    found: dict[Key, Waits] = {}
    inner: list[tuple[Key, str, Row]] = []
    for row in rows:
        key, of_class = key_of(row), row["of_class"]
        if key is None or not whole(row["n"]):
            continue
        if of_class is None:
            found[key] = Waits(_spread(row), _split(row), _seconds(row["cold"]), whole(row["probed"]), {}, {})
        else:
            inner.append((key, str(of_class), row))
    for key, of_class, row in inner:
        found[key].ttft_by_class[of_class] = _spread(row)
        found[key].split_by_class[of_class] = _split(row)
    for (kind, name), of in found.items():
        if kind == "class":
            for holder in (of, found[TOTAL]):
                holder.ttft_by_class[name] = of.ttft
                holder.split_by_class[name] = of.split
    return found


def _spread(row: Row) -> Spread:
    n, total = whole(row["n"]), whole(row["total"])
    percentiles = row["percentiles"]
    assert isinstance(percentiles, list)
    p50, p90, p99 = (value / NS_PER_S for value in percentiles)
    return Spread(n, total / n / NS_PER_S, p50, p90, p99)


def _split(row: Row) -> Split:
    """``ttft`` is the sum of the parts as they stand: in floats the whole need not be."""
    cuts = [0, *(whole(row[f"cut_{number}"]) for number in range(1, 6)), whole(row["total"])]
    queue, load, engine_queue, stall, prefill, rest = (later - earlier for earlier, later in pairwise(cuts))
    unattributed = whole(row["unattributed"])
    ns = (queue, load + stall, engine_queue, prefill, unattributed, rest - unattributed)
    parts = dict(zip(_PARTS, (part / NS_PER_S for part in ns), strict=True))
    return Split(n=whole(row["n"]), ttft=sum(parts.values()), told=whole(row["told"]), **parts)


def _seconds(ns: object) -> float | None:
    value = maybe_float(ns)
    return None if value is None else value / NS_PER_S
