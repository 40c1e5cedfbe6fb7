"""Counts of requests by replica, tenant, adapter and hit class.

Theory of operation. All groups are aggregated from the requests themselves, each kind in a hash table of its own. To add them
up from the finest groups that occur was slower: there are nearly as many of these as requests, and a row of them is wide. Adapters
within each group (distinct ones, their bytes, the most active one) come from its pairs with adapters.
"""

from __future__ import annotations

from typing import Final

from loraledger.record.reader import RecordReader
from loraledger.record.tables import HIT_CLASSES, STATUSES, Row
from loraledger.signals.durations import timed
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Hits
from loraledger.signals.scope import FINEST, Key, Scope, key_of, kind_of, select, sizes, whole, with_
from loraledger.units import NS_PER_S

ENDS: Final = (*STATUSES, "open")
_FOUND: Final = (*HIT_CLASSES, "undecided")

_JUDGED: Final = """CASE WHEN ttft IS NOT NULL THEN 1
     WHEN ours = 0 OR back = 1 OR stream = FALSE OR status IN ('ok', 'client_gone', 'gateway_crashed') THEN NULL
     WHEN status = 'open' AND (finished_ns IS NOT NULL OR $until - arrived_ns <= $slo) THEN NULL ELSE 1 END"""
_GAPS: Final = "ours = 1 AND back = 0 AND itl_mean_ns IS NOT NULL AND generated_tokens > 1"


def _count(condition: str) -> str:
    return f"COUNT(CASE WHEN {condition} THEN 1 END)"


_COLUMNS: Final[dict[str, str]] = {
    "requests": "COUNT(*)",
    "ours": _count("ours = 1"),
    **{f"status_{status}": _count(f"status = '{status}'") for status in ENDS},
    **{f"hit_{found}": _count(f"ours = 1 AND class = '{found}'") for found in _FOUND},
    **{f"access_{found}": _count(f"ours = 1 AND access = '{found}'") for found in _FOUND},
    "prompt": "SUM(CASE WHEN ours = 1 THEN prompt_tokens END)",
    "generated": "SUM(CASE WHEN ours = 1 THEN generated_tokens END)",
    "cached": "SUM(CASE WHEN ours = 1 THEN cached_tokens END)",
    "preempted": "SUM(CASE WHEN ours = 1 THEN preemptions END)",
    "active": "SUM(active)",
    "judged": f"COUNT({_JUDGED})",
    "attained": _count("ttft <= $slo"),
    "gaps": f"SUM(CASE WHEN {_GAPS} THEN generated_tokens - 1 END)",
    "gaps_ns": f"SUM(CASE WHEN {_GAPS} THEN CAST(itl_mean_ns AS DOUBLE) * (generated_tokens - 1) END)",
    "untold": _count("status = 'ok' AND prompt_tokens IS NULL AND generated_tokens IS NULL"),
    "back": _count("back = 1"),
    "sketches": "COUNT(itl_sketch)",
    "untenanted": _count("tenant IS NULL"),
    "wait": "MAX(wait)",
    "replicas": "COUNT(DISTINCT CASE WHEN ours = 1 THEN replica END)",
}
"""Of each group. COUNT where it can be: with SUM over 0 and 1 the query took 1.3 times as long (500,000 requests)."""

_USED: Final = "SELECT * FROM timed WHERE adapter IS NOT NULL AND ours = 1"
_MOST: Final = """
SELECT kind, pairs.name, COUNT(*) AS adapters, COUNT(bytes) AS sized, SUM(bytes) AS bytes, MAX(active) AS top_active
FROM pairs LEFT JOIN sizes ON sizes.name = pairs.adapter GROUP BY kind, pairs.name
"""
_TOP: Final = """
SELECT pairs.kind, pairs.name, MIN(pairs.adapter) AS adapter
FROM pairs JOIN most ON most.kind = pairs.kind AND most.name = pairs.name AND most.top_active = pairs.active
WHERE pairs.active > 0 GROUP BY pairs.kind, pairs.name
"""
_TOTALS: Final = """
SELECT added.*, most.adapters, most.sized, most.bytes, most.top_active, top.adapter AS top
FROM added LEFT JOIN most ON most.kind = added.kind AND most.name = added.name
LEFT JOIN top ON top.kind = added.kind AND top.name = added.name
"""


def totals(reader: RecordReader, scope: Scope, facts: Facts, slo_s: float) -> dict[Key, Row]:
    """By group: ``_COLUMNS`` (``wait``: the longest, ns; ``active`` in tokens times ns); of its distinct ``adapters`` how many, how
    many ``sized`` and the ``bytes`` of these; the ``top`` adapter and its active tokens times ns, ``top_active``."""
    groups = "GROUPING SETS ((), (replica), (tenant), (adapter), (class))"
    within = "GROUPING SETS ((adapter), (replica, adapter), (tenant, adapter), (class, adapter))"
    known, parameters = sizes(facts)
    tables = [
        *timed(scope),
        ("added", select([kind_of(FINEST), *(f"{sql} AS {name}" for name, sql in _COLUMNS.items())], "timed", groups)),
        ("used", _USED),
        ("pairs", select([kind_of("replica, tenant, class"), "adapter", "SUM(active) AS active"], "used", within)),
        known,
        ("most", _MOST),
        ("top", _TOP),
    ]
    rows = reader.query(with_(tables, _TOTALS), scope.parameters(slo=round(slo_s * NS_PER_S), **parameters))
    return {key: row for row in rows if (key := key_of(row)) is not None and whole(row["requests"])}


def hits(row: Row, prefix: str = "hit") -> Hits:
    """Counts by where the adapter was; with ``prefix`` ``access`` by what engines found."""
    return Hits(**{found: whole(row[f"{prefix}_{found}"]) for found in _FOUND})
