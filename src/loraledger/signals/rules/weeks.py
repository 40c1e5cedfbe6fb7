"""The three weeks before a moment, hour by hour.

Theory of operation. One query counts and sums by week and clock hour: some hundred rows, whatever the record's size. All that the
rule for slots needs and which hour is the busiest follow from these. Another one, of few columns, finds the versions first.

Ids are not compared: over three weeks that would take more memory than all else together, and a row that a crash of the gateway
doubled weighs nothing there. An hour is a clock hour (UTC) cut by its week's edges. Requests that the client got wrong
(``client_error``) count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from loraledger.record.reader import RecordReader
from loraledger.signals.durations import parted
from loraledger.signals.figures import Version, Window
from loraledger.signals.rules.advice import WEEKS, Week
from loraledger.signals.scope import Scope, with_
from loraledger.units import NS_PER_S

HOUR_NS: Final = 3600 * NS_PER_S
WEEK_NS: Final = 7 * 24 * HOUR_NS

_VERSIONS: Final = """
SELECT engine_version, base, config_digest, gateway_version, COUNT(replica) AS requests,
    MIN(arrived_ns) AS first_ns, MAX(arrived_ns) AS last_ns, COUNT(*) AS everything
FROM picked GROUP BY engine_version, base, config_digest, gateway_version
"""
_PLACED: Final = """
SELECT *, CASE WHEN arrived_ns >= $last THEN 2 WHEN arrived_ns >= $middle THEN 1 ELSE 0 END AS week,
    arrived_ns - arrived_ns % $hour_ns AS hour, cut_2 - cut_1 + cut_4 - cut_3 AS preparation
FROM parted WHERE ours = 1
"""
_HOURS: Final = """
SELECT week, hour, COUNT(*) AS requests,
    SUM(CASE WHEN adapter IS NOT NULL THEN 1 ELSE 0 END) AS bearing,
    SUM(CASE WHEN class IN ('gpu', 'host', 'disk', 'remote') THEN 1 ELSE 0 END) AS known,
    SUM(CASE WHEN class = 'gpu' THEN 1 ELSE 0 END) AS hits,
    COUNT(ttft) AS answered, COALESCE(SUM(ttft), 0) AS ttft_ns, COALESCE(SUM(preparation), 0) AS preparation_ns,
    COALESCE(SUM(CASE WHEN prepared = 0 THEN ttft - preparation END), 0) AS untold_ns,
    SUM(CASE WHEN prepared = 1 AND ttft IS NOT NULL THEN 1 ELSE 0 END) AS told,
    COUNT(preemptions) AS preemptions_told, COALESCE(SUM(preemptions), 0) AS preemptions
FROM placed GROUP BY week, hour
"""


class Hour(msgspec.Struct, frozen=True):
    """The requests of one clock hour of one week; the meanings are those of ``advice.Week``."""

    week: int
    hour: int
    requests: int
    bearing: int
    known: int
    hits: int
    answered: int
    ttft_ns: int
    preparation_ns: int
    untold_ns: int
    told: int
    preemptions_told: int
    preemptions: int


def span(until_ns: int) -> Window:
    """The three weeks that end at ``until_ns``."""
    return Window(until_ns - WEEKS * WEEK_NS, until_ns)


def read_versions(reader: RecordReader, window: Window) -> tuple[Version, ...]:
    """What made its rows, most requests first. Rows that were sent nowhere count only where there are no others."""
    scope = Scope(window)
    rows = reader.query(with_([("picked", scope.picked)], _VERSIONS), scope.parameters())
    count = "requests" if any(row["requests"] for row in rows) else "everything"
    names = ("engine_version", "base", "config_digest", "gateway_version", count, "first_ns", "last_ns")
    found = [Version(*(row[name] for name in names)) for row in rows if row[count]]  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda version: (-version.requests, -version.last_ns, repr(version))))


def read_hours(reader: RecordReader, until_ns: int, version: Version | None) -> list[Hour]:
    """All of the three weeks; ``None``: of any version."""
    scope = Scope(span(until_ns), version=version)
    edges = {"middle": until_ns - 2 * WEEK_NS, "last": until_ns - WEEK_NS, "hour_ns": HOUR_NS}
    rows = reader.query(with_([*parted(scope), ("placed", _PLACED)], _HOURS), scope.parameters(**edges))
    return [msgspec.convert(row, Hour) for row in rows]


def weeks_of(hours: Sequence[Hour], until_ns: int) -> tuple[Week, ...]:
    """The three weeks, oldest first."""
    return tuple(_week(hours, number, until_ns - (WEEKS - 1 - number) * WEEK_NS) for number in range(WEEKS))


def _week(hours: Sequence[Hour], number: int, until_ns: int) -> Week:
    mine = [one for one in hours if one.week == number]
    peak = min((one for one in mine if one.bearing), key=lambda one: (-one.bearing, one.hour), default=None)
    names = (
        "requests",
        "answered",
        "ttft_ns",
        "preparation_ns",
        "untold_ns",
        "told",
        "preemptions_told",
        "preemptions",
    )
    return Week(
        window=Window(until_ns - WEEK_NS, until_ns),
        peak_hour_ns=None if peak is None else peak.hour,
        peak_arrivals=0 if peak is None else peak.bearing,
        peak_known=0 if peak is None else peak.known,
        peak_hits=0 if peak is None else peak.hits,
        **{name: sum(getattr(one, name) for one in mine) for name in names},
    )
