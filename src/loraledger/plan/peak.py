"""The busiest hour of a window, and how many tokens were active in it: what a fleet has to be large enough for.

Theory of operation. Capacity is for the peak, and a mean over a week hides it. One query finds the clock hour (UTC) with most
requests; that hour is then measured like any window, and the tokens in flight are followed through it.

A record may begin or end within the hour: it is new, it was cut, or a replay lasted a minute. What is divided by time is divided by
the part of the hour that lies between the first and the last moment of the record, of whatever table, and by a second at least. A
gap between them counts: a gateway that was down had no traffic.

*Active tokens.* A request holds its prompt's and its generated tokens from dispatch to its end. While it generates it holds fewer,
and a prefix that several share is held once, so the figure is an upper bound of the KV that is needed. Its p99 is over *time*: the
least level that was not exceeded in 99 % of that part of the hour. Requests that arrived before the hour are not in it, nor those
that told no token counts.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loraledger.record.reader import RecordReader
from loraledger.record.tables import TABLES
from loraledger.signals.durations import timed
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Signals, Version, Window
from loraledger.signals.measure import measure
from loraledger.signals.scope import Scope, bounds, maybe_whole, whole, with_
from loraledger.units import NS_PER_S

HOUR_NS: Final = 3600 * NS_PER_S
PERCENTILE: Final = 99

_BUSIEST: Final = """
SELECT arrived_ns - arrived_ns % $hour_ns AS hour, COUNT(*) AS requests
FROM requests WHERE arrived_ns >= $since AND arrived_ns < $until
GROUP BY arrived_ns - arrived_ns % $hour_ns ORDER BY requests DESC, hour LIMIT 1
"""
_HELD: Final = """
SELECT CAST(COALESCE(prompt_tokens, 0) AS BIGINT) + COALESCE(generated_tokens, 0) AS tokens, dispatched_ns AS began,
       CASE WHEN finished_ns < $until THEN finished_ns ELSE $until END AS ended
FROM timed
WHERE ours = 1 AND back = 0 AND (prompt_tokens >= 0 OR generated_tokens >= 0) AND dispatched_ns < $until
      AND (finished_ns > dispatched_ns OR (finished_ns IS NULL AND status = 'open'))
"""
_TURNS: Final = """
SELECT at_ns, SUM(change) AS change FROM (
    SELECT began AS at_ns, tokens AS change FROM held
    UNION ALL SELECT ended AS at_ns, -tokens AS change FROM held
    UNION ALL SELECT $since AS at_ns, 0 AS change
    UNION ALL SELECT $until AS at_ns, 0 AS change
) GROUP BY at_ns
"""
_LEVELS: Final = """
SELECT SUM(change) OVER (ORDER BY at_ns ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS level,
       LEAD(at_ns) OVER (ORDER BY at_ns) - at_ns AS lasted
FROM turns
"""
_TIMES: Final = "SELECT level, SUM(lasted) AS lasted FROM levels WHERE lasted > 0 GROUP BY level"
_UP_TO: Final = """
SELECT level, SUM(lasted) OVER (ORDER BY level ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS below FROM times
"""
_ACTIVE: Final = """
SELECT MIN(CASE WHEN below::HUGEINT * 100 >= $percentile * ($until::HUGEINT - $since) THEN level END) AS high, MAX(level) AS most,
       (SELECT COUNT(*) FROM held) AS requests
FROM up_to
"""


class ActiveTokens(msgspec.Struct, frozen=True):
    """Tokens in flight on all replicas. ``high``: p99 over time."""

    high: int
    most: int
    requests: int
    """That told of their tokens."""


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The busiest hour of ``period``: its figures, and its active tokens (``None``: no request told any).

    ``covered`` and ``seen``: the part of the period, and of the hour, that lies between the record's first and last moment.
    """

    period: Window
    covered: Window
    seen: Window
    signals: Signals
    active: ActiveTokens | None


def busiest(reader: RecordReader, window: Window) -> Window:
    """The clock hour with most requests, cut by ``window``; the first of those alike; ``window`` itself without a request."""
    rows = reader.query(_BUSIEST, {**bounds(window), "hour_ns": HOUR_NS})
    if not rows:
        return window
    hour = whole(rows[0]["hour"])
    return Window(max(hour, window.since_ns), min(hour + HOUR_NS, window.until_ns))


def read_peak(reader: RecordReader, window: Window, facts: Facts, *, pool_versions: bool = False) -> Peak:
    """The peak of ``window``, measured."""
    hour = busiest(reader, window)
    signals = measure(reader, hour, facts, pool_versions=pool_versions)
    covered, seen = between_rows(reader, window), between_rows(reader, hour)
    active = active_tokens(reader, seen, signals.version)
    return Peak(period=window, covered=covered, seen=seen, signals=signals, active=active)


def between_rows(reader: RecordReader, window: Window) -> Window:
    """The part of ``window`` between the first and the last moment of the record, a second at least; all of it without any."""
    times = [*((table.name, table.time) for table in TABLES.values()), ("requests", "finished_ns")]
    queries = (f"FROM {table} SELECT MIN({time}) AS first, MAX({time}) AS last" for table, time in times)
    ends = [maybe_whole(end) for query in queries for row in reader.query(query) for end in row.values()]
    known = [end for end in ends if end is not None]
    if not known or min(known) >= window.until_ns or max(known) < window.since_ns:
        return window
    first, last = min(known), max(known)
    since = max(window.since_ns, min(first, window.until_ns - NS_PER_S))
    return Window(since, min(window.until_ns, max(last + 1, since + NS_PER_S)))


def active_tokens(reader: RecordReader, window: Window, version: Version | None = None) -> ActiveTokens | None:
    """The tokens in flight in ``window``; ``None`` when no request in it told any."""
    scope = Scope(window, version=version)
    tables = [
        *timed(scope),
        ("held", _HELD),
        ("turns", _TURNS),
        ("levels", _LEVELS),
        ("times", _TIMES),
        ("up_to", _UP_TO),
    ]
    (row,) = reader.query(with_(tables, _ACTIVE), scope.parameters(percentile=PERCENTILE))
    requests = maybe_whole(row["requests"])
    return ActiveTokens(whole(row["high"]), whole(row["most"]), requests) if requests else None
