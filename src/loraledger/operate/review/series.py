"""The window cut into pieces: hit rate and waiting over time, the worst hour, and when each adapter was last asked for.

Theory of operation. Rows of the version that is measured count, as in ``measure``. Pieces begin with the window, so the piece of a
week lies over the same piece of the week before. They are as short as leaves a hundred requests in the mean one: of fewer a 99th
percentile is the slowest one. The worst hour is the clock hour (UTC) with most requests that got no first token in time.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loraledger.record.reader import RecordReader
from loraledger.signals.durations import timed
from loraledger.signals.figures import Signals, Window
from loraledger.signals.scope import Scope, maybe_float, share, whole, with_
from loraledger.units import NS_PER_S

HOUR_NS: Final = 3600 * NS_PER_S
PIECES: Final = tuple(
    seconds * NS_PER_S for seconds in (10, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 86_400, 7 * 86_400)
)
"""Lengths that a piece may have."""
MOST_PIECES: Final = 170
"""A week of hours, and two to spare."""
MEAN_REQUESTS: Final = 100
FEWEST: Final = 20
"""First tokens, or hit classes, that a piece needs to be drawn."""

_PIECES: Final = """
SELECT (arrived_ns - $since) // $piece AS number, COUNT(ttft) AS answered, QUANTILE_CONT(ttft, 0.99) AS p99,
    COUNT(CASE WHEN class IN ('gpu', 'host', 'disk', 'remote') THEN 1 END) AS known,
    COUNT(CASE WHEN class = 'gpu' THEN 1 END) AS hits
FROM timed WHERE ours = 1 GROUP BY number ORDER BY number
"""
_HOURS: Final = """
SELECT arrived_ns - arrived_ns % $hour AS hour, COUNT(*) AS requests, COUNT(CASE
    WHEN ttft > $slo THEN 1
    WHEN ttft IS NOT NULL OR back = 1 OR stream = FALSE OR status IN ('ok', 'client_gone', 'gateway_crashed') THEN NULL
    WHEN status = 'open' AND $until - arrived_ns <= $slo THEN NULL ELSE 1 END) AS late
FROM timed WHERE ours = 1 GROUP BY hour
"""
_LAST: Final = """
SELECT adapter, MAX(arrived_ns) AS last FROM requests
WHERE arrived_ns < $until AND adapter IS NOT NULL GROUP BY adapter
"""


class Point(msgspec.Struct, frozen=True):
    """A piece, by its number from 0. ``hit_rate``: of slots, of requests with an adapter; ``p99``: time to the first token, s."""

    number: int
    hit_rate: float | None
    p99: float | None


class Series(msgspec.Struct, frozen=True):
    """Pieces of ``piece_ns``; those without a request are left out."""

    piece_ns: int
    pieces: int
    now: tuple[Point, ...]
    before: tuple[Point, ...]


class LateHour(msgspec.Struct, frozen=True):
    """A clock hour, cut by the window. ``late``: of ``requests``, without a first token in time."""

    window: Window
    requests: int
    late: int


def read_series(reader: RecordReader, now: Signals, before: Signals) -> Series:
    """Of both windows, which are of the same length."""
    length = now.window.until_ns - now.window.since_ns
    requests = 0 if now.total is None else now.total.requests
    piece = _piece(length, requests)
    return Series(piece, -(-length // piece), _points(reader, now, piece), _points(reader, before, piece))


def worst_hour(reader: RecordReader, now: Signals) -> LateHour | None:
    """The clock hour with most late requests, or with most requests where none was late; ``None`` without any."""
    scope, window = _scope(now), now.window
    rows = reader.query(with_(timed(scope), _HOURS), scope.parameters(hour=HOUR_NS, slo=round(now.slo_s * NS_PER_S)))
    hours = [
        LateHour(
            Window(max(whole(row["hour"]), window.since_ns), min(whole(row["hour"]) + HOUR_NS, window.until_ns)),
            whole(row["requests"]),
            whole(row["late"]),
        )
        for row in rows
    ]
    return min(hours, key=lambda hour: (-hour.late, -hour.requests, hour.window), default=None)


def last_asked(reader: RecordReader, until_ns: int) -> dict[str, int]:
    """When each adapter was last asked for, in all rows that ``reader`` has open; ns since the epoch."""
    return {str(row["adapter"]): whole(row["last"]) for row in reader.query(_LAST, {"until": until_ns})}


def _piece(length_ns: int, requests: int) -> int:
    """The shortest that leaves enough requests in the mean piece and not too many pieces; the longest that gives two, else."""
    fitting = [piece for piece in PIECES if 2 * piece <= length_ns <= MOST_PIECES * piece]
    enough = (piece for piece in fitting if requests * piece >= MEAN_REQUESTS * length_ns)
    return next(enough, max(fitting, default=length_ns))


def _points(reader: RecordReader, of: Signals, piece_ns: int) -> tuple[Point, ...]:
    scope = _scope(of)
    rows = reader.query(with_(timed(scope), _PIECES), scope.parameters(piece=piece_ns))
    return tuple(
        Point(
            whole(row["number"]),
            share(whole(row["hits"]), whole(row["known"])) if whole(row["known"]) >= FEWEST else None,
            _seconds(row["p99"]) if whole(row["answered"]) >= FEWEST else None,
        )
        for row in rows
    )


def _scope(of: Signals) -> Scope:
    """The requests that ``of`` was measured on."""
    return Scope(of.window, of.quality.duplicates > 0, of.version)


def _seconds(ns: object) -> float | None:
    value = maybe_float(ns)
    return None if value is None else value / NS_PER_S
