"""Moves of adapters between tiers: how many, and how long they took.

Theory of operation. A row of ``residency`` says from which tier to which an adapter went. Disk or remote to host or slot is a load;
to a slot from anywhere else an activation (so a load that ends in a slot is both); out of a slot, and from host or slot to disk,
are evictions. A row without a tier moved nothing that is known.

Loads are timed by the probe, on their own rows. Where none was, a load call was timed at the gateway, on the row that says that it
is registered (``loading`` to ``registered``): its time holds the engine's own wait too. Where there are both, the probe's count.
"""

from __future__ import annotations

from typing import Final

from loraledger.record.reader import RecordReader
from loraledger.record.tables import Row
from loraledger.signals.facts import SIZE_EDGES, Facts, size_class
from loraledger.signals.figures import Moves, Spread, Window
from loraledger.signals.scope import TOTAL, Key, bounds, key_of, select, sizes, whole, with_
from loraledger.units import NS_PER_S

_STEPPED: Final = """
SELECT residency.replica,
       CASE WHEN tier_before IN ('disk', 'remote') AND tier_after IN ('host', 'gpu') THEN 1 ELSE 0 END AS load,
       CASE WHEN tier_before <> 'gpu' AND tier_after = 'gpu' THEN 1 ELSE 0 END AS activation,
       CASE WHEN tier_before = 'gpu' AND tier_after <> 'gpu' THEN 1 ELSE 0 END AS slot_eviction,
       CASE WHEN tier_before IN ('gpu', 'host') AND tier_after = 'disk' THEN 1 ELSE 0 END AS host_eviction,
       CASE WHEN from_state = 'loading' AND to_state = 'registered' THEN 1 ELSE 0 END AS call,
       CASE WHEN took_ns >= 0 THEN took_ns END AS took, COALESCE(residency.bytes, sizes.bytes) AS bytes
FROM residency LEFT JOIN sizes ON sizes.name = residency.adapter
WHERE at_ns >= $since AND at_ns < $until
"""
_SIZES: Final = (None, *(edge - 1 for edge in SIZE_EDGES), SIZE_EDGES[-1])
"""A size in each size class; unknown first."""
_SIZED: Final = " ".join((
    "SELECT *, CASE WHEN bytes IS NULL THEN 0",
    *(f"WHEN bytes < {edge} THEN {number}" for number, edge in enumerate(SIZE_EDGES, 1)),
    f"ELSE {len(SIZE_EDGES) + 1} END AS size FROM stepped",
))  # fmt: skip
_COUNTS: Final = ("load", "activation", "slot_eviction", "host_eviction")
_TOOK: Final = {
    "load": "CASE WHEN load = 1 THEN took END",
    "activation": "CASE WHEN load = 0 AND activation = 1 THEN took END",
    "call": "CASE WHEN load = 0 AND activation = 0 AND call = 1 THEN took END",
}
_COLUMNS: Final = (
    "CASE WHEN GROUPING(replica) = 0 THEN 'replica' ELSE 'total' END AS kind",
    "CASE WHEN GROUPING(replica) = 0 THEN replica ELSE '' END AS name",
    "CASE WHEN GROUPING(size) = 0 THEN size END AS size",
    *(f"SUM({name}) AS {name}" for name in _COUNTS),
    *(f"COUNT({value}) AS n_{name}" for name, value in _TOOK.items()),
    *(f"SUM({value}) AS total_{name}" for name, value in _TOOK.items()),
    *(f"QUANTILE_CONT({value}, [0.5, 0.9, 0.99]) AS took_{name}" for name, value in _TOOK.items()),
)


def moves(reader: RecordReader, window: Window, facts: Facts) -> dict[Key, Moves]:
    """Of each replica with a row in the window, and of all (also without any)."""
    known, parameters = sizes(facts)
    tables = [
        known,
        ("stepped", _STEPPED),
        ("sized", _SIZED),
        ("grouped", select(_COLUMNS, "sized", "GROUPING SETS ((), (size), (replica), (replica, size))")),
    ]
    rows = reader.query(with_(tables, "SELECT * FROM grouped"), {**bounds(window), **parameters})
    found: dict[Key, Moves] = {}
    by_size: dict[Key, dict[str, Spread]] = {}
    for row in rows:
        key, size = key_of(row), row["size"]
        if key is None:
            continue
        took = {name: spread for name in _TOOK if (spread := _spread(row, name)) is not None}
        call = took.pop("call", None)
        if call is not None:
            took.setdefault("load", call)
        if size is None:
            loads, activations, slot_evictions, host_evictions = (whole(row[name]) for name in _COUNTS)
            spreads = by_size.setdefault(key, {})
            found[key] = Moves(loads, activations, slot_evictions, host_evictions, took, spreads)
        elif "load" in took:
            by_size.setdefault(key, {})[size_class(_SIZES[whole(size)])] = took["load"]
    found.setdefault(TOTAL, Moves())
    return found


def _spread(row: Row, name: str) -> Spread | None:
    n, percentiles = whole(row[f"n_{name}"]), row[f"took_{name}"]
    if not n or not isinstance(percentiles, list):
        return None
    p50, p90, p99 = (value / NS_PER_S for value in percentiles)
    return Spread(n, whole(row[f"total_{name}"]) / n / NS_PER_S, p50, p90, p99)
