"""How many distinct adapters were in flight on each replica at one moment, against its slots.

Theory of operation. A request is in flight on its replica from dispatch to its end, an open one until the window ends. An adapter
is while one of its requests is. Of each request only the piece that no earlier one of the same adapter covers is kept; the number
of pieces at a moment is the number of adapters. What happens in one ns is one change: a piece that ends where the next one of its
adapter begins changes nothing. Requests that arrived before the window are not in it, so at its beginning this is a lower bound.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loraledger.record.reader import RecordReader
from loraledger.signals.durations import timed
from loraledger.signals.facts import Facts
from loraledger.signals.scope import Scope, maybe_whole, whole, with_

_FLYING: Final = """
SELECT replica, adapter, dispatched_ns AS began, CASE WHEN finished_ns < $until THEN finished_ns ELSE $until END AS ended
FROM timed
WHERE ours = 1 AND back = 0 AND adapter IS NOT NULL AND replica IS NOT NULL AND dispatched_ns < $until
      AND (finished_ns > dispatched_ns OR (finished_ns IS NULL AND status = 'open'))
"""
_SEEN: Final = """
SELECT replica, began, ended, MAX(ended) OVER (
    PARTITION BY replica, adapter ORDER BY began ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
) AS covered FROM flying
"""
_PIECES: Final = """
SELECT replica, CASE WHEN covered > began THEN covered ELSE began END AS began, ended
FROM seen WHERE covered IS NULL OR ended > covered
"""
_TURNS: Final = """
SELECT replica, at_ns, SUM(change) AS change FROM (
    SELECT replica, began AS at_ns, 1 AS change FROM pieces
    UNION ALL SELECT replica, ended AS at_ns, -1 AS change FROM pieces
) GROUP BY replica, at_ns
"""
_HELD: Final = """
SELECT replica, SUM(change) OVER (
    PARTITION BY replica ORDER BY at_ns ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
) AS adapters, LEAD(at_ns) OVER (PARTITION BY replica ORDER BY at_ns) - at_ns AS lasted FROM turns
"""
_PLACES: Final = "SELECT UNNEST(CAST($replicas AS VARCHAR[])) AS replica, UNNEST(CAST($slots AS BIGINT[])) AS slots"
_FLIGHTS: Final = """
SELECT held.replica, MAX(held.adapters) AS most, MAX(places.slots) AS slots,
       SUM(CASE WHEN held.adapters > places.slots THEN held.lasted ELSE 0 END) AS over
FROM held LEFT JOIN places ON places.replica = held.replica GROUP BY held.replica
"""


class Flight(msgspec.Struct, frozen=True):
    """``over``: ns with more distinct adapters in flight than slots; ``None`` where these are unknown."""

    most: int
    over: int | None


def flights(reader: RecordReader, scope: Scope, facts: Facts) -> dict[str, Flight]:
    """By replica; one to which no request with an adapter was sent is not in it."""
    slots = {name: replica.slots for name, replica in facts.replicas.items()}
    tables = [
        *timed(scope),
        ("flying", _FLYING),
        ("seen", _SEEN),
        ("pieces", _PIECES),
        ("turns", _TURNS),
        ("held", _HELD),
        ("places", _PLACES),
    ]
    parameters = scope.parameters(replicas=list(slots), slots=list(slots.values()))
    return {
        str(row["replica"]): Flight(whole(row["most"]), None if row["slots"] is None else maybe_whole(row["over"]))
        for row in reader.query(with_(tables, _FLIGHTS), parameters)
    }
