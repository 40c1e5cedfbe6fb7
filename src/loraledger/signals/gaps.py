"""Times between tokens, merged from the sketches of requests, for each group and by hit class within it.

Theory of operation. A sketch is a JSON object of log-bucket to count (``record.sketch``), and merging is adding counts. The
value of rank floor(q * (n - 1)) lies in the first bucket at which the running count passes that rank; what stands for the bucket is
within 1.083 % of it. What is not a sketch is passed over. Of a window's queries this one takes longest, most of it for tenants and
adapters, each by class: whoever does not show these leaves them out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from loraledger.record.reader import RecordReader
from loraledger.record.sketch import PER_DOUBLING, RELATIVE_ERROR, value_of
from loraledger.record.tables import Row
from loraledger.signals.durations import timed
from loraledger.signals.figures import Spread
from loraledger.signals.scope import (
    TOTAL,
    Key,
    Kind,
    Scope,
    by_class,
    key_of,
    whole,
    with_,
)
from loraledger.units import NS_PER_S

_SKETCHED: Final = """
SELECT replica, tenant, adapter, class, itl_sketch FROM timed
WHERE ours = 1 AND back = 0 AND itl_sketch IS NOT NULL AND JSON_VALID(itl_sketch) AND JSON_TYPE(itl_sketch) = 'OBJECT'
"""
_CELLS: Final = """
SELECT replica, tenant, adapter, class, TRY_CAST(UNNEST(JSON_KEYS(itl_sketch)) AS BIGINT) AS bucket,
       TRY_CAST(UNNEST(JSON_EXTRACT(itl_sketch, '$.*')) AS BIGINT) AS n
FROM sketched
"""
_RANKED: Final = """
SELECT kind, name, of_class, bucket, n,
       SUM(n) OVER (PARTITION BY kind, name, of_class ORDER BY bucket ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS upto,
       SUM(n) OVER (PARTITION BY kind, name, of_class) AS total
FROM grouped
"""
_SPREADS: Final = """
SELECT kind, name, of_class, MAX(total) AS n,
       SUM(n * CASE WHEN bucket < 0 THEN 0 ELSE POWER(2, bucket / CAST($per_doubling AS DOUBLE)) * (1 + $error) END) AS total_ns,
       MIN(CASE WHEN upto > FLOOR(0.5 * (total - 1)) THEN bucket END) AS p50,
       MIN(CASE WHEN upto > FLOOR(0.9 * (total - 1)) THEN bucket END) AS p90,
       MIN(CASE WHEN upto > FLOOR(0.99 * (total - 1)) THEN bucket END) AS p99
FROM ranked GROUP BY kind, name, of_class
"""


class Gaps(msgspec.Struct, frozen=True):
    """Of the requests of a group that kept a sketch."""

    itl: Spread
    by_class: dict[str, Spread] = {}


def gaps(reader: RecordReader, scope: Scope, kinds: Collection[Kind]) -> dict[Key, Gaps]:
    """By group: of all requests, by hit class, and of ``kinds``; one without a sketch is not in it."""
    tables = [
        *timed(scope),
        ("sketched", _SKETCHED),
        ("cells", _CELLS),
        ("counted", "SELECT * FROM cells WHERE bucket BETWEEN -1 AND 2016 AND n > 0"),
        ("grouped", by_class(("bucket", "SUM(n) AS n"), "counted", kinds, "bucket")),
        ("ranked", _RANKED),
    ]
    parameters = scope.parameters(per_doubling=PER_DOUBLING, error=RELATIVE_ERROR)
    rows = reader.query(with_(tables, _SPREADS), parameters)
    found: dict[Key, Gaps] = {}
    inner: list[tuple[Key, str, Spread]] = []
    for row in rows:
        key, of_class = key_of(row), row["of_class"]
        if key is None:
            continue
        if of_class is None:
            found[key] = Gaps(_spread(row), {})
        else:
            inner.append((key, str(of_class), _spread(row)))
    for key, of_class, spread in inner:
        found[key].by_class[of_class] = spread
    for (kind, name), of in found.items():
        if kind == "class":
            of.by_class[name] = found[TOTAL].by_class[name] = of.itl
    return found


def _spread(row: Row) -> Spread:
    n = whole(row["n"])
    p50, p90, p99 = (value_of(whole(row[name])) / NS_PER_S for name in ("p50", "p90", "p99"))
    mean = float(row["total_ns"]) / n / NS_PER_S  # type: ignore[arg-type]
    return Spread(n, mean, p50, p90, p99, exact=False)
