"""KV, batch and steps of replicas, from their samples.

Theory of operation. Each replica is summed up from its own samples; the fleet is put together from its replicas, so that one that
is scraped more often does not weigh more. A sample that found the engine down tells nothing else. A usage outside of 0 to 1 is no
usage. A process start that differs from the ones before is a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

import msgspec

from loraledger.record.reader import RecordReader
from loraledger.record.tables import Row
from loraledger.signals.figures import Pressure, Window
from loraledger.signals.scope import bounds, maybe_float, maybe_whole, whole
from loraledger.units import NS_PER_S

Number = TypeVar("Number", int, float)

FULL: Final = 0.9
"""Share of KV blocks in use from which on a sample counts as full."""

_SAMPLES: Final = """
SELECT replica, COUNT(*) AS samples, SUM(CASE WHEN up = FALSE THEN 1 ELSE 0 END) AS down,
       COUNT(DISTINCT process_start_ns) AS starts,
       AVG(CASE WHEN kv_usage >= 0 AND kv_usage <= 1 THEN kv_usage END) AS kv_mean,
       MAX(CASE WHEN kv_usage >= 0 AND kv_usage <= 1 THEN kv_usage END) AS kv_max,
       AVG(CASE WHEN kv_usage >= $full AND kv_usage <= 1 THEN 1.0 WHEN kv_usage >= 0 AND kv_usage <= 1 THEN 0.0 END) AS kv_full,
       MIN(kv_tokens) AS kv_tokens, AVG(running) AS running, AVG(waiting) AS waiting, SUM(preempted) AS preempted,
       SUM(recomputed_tokens) AS recomputed, SUM(CASE WHEN step_tokens IS NOT NULL THEN steps END) AS steps,
       SUM(CASE WHEN steps IS NOT NULL THEN step_tokens END) AS step_tokens, AVG(distinct_adapters) AS adapters,
       MAX(blocked) AS blocked, SUM(step_ns) AS step_ns
FROM samples WHERE at_ns >= $since AND at_ns < $until AND replica IS NOT NULL GROUP BY replica
"""


def pressures(reader: RecordReader, window: Window) -> dict[str, Pressure]:
    """By replica; one without a sample is not in it."""
    rows = reader.query(_SAMPLES, {**bounds(window), "full": FULL})
    return {str(row["replica"]): _pressure(row, window) for row in rows}


def with_requests(pressure: Pressure | None, preempted: int | None) -> Pressure | None:
    """``pressure``, its preemptions by requests where no step told of them."""
    if preempted is None or (pressure is not None and pressure.preemptions is not None):
        return pressure
    return msgspec.structs.replace(pressure or Pressure(), preemptions=preempted)


def fleet(replicas: Sequence[Pressure]) -> Pressure | None:
    """All of them; ``None`` without any."""
    if not replicas:
        return None
    return Pressure(
        samples=sum(each.samples for each in replicas),
        down=sum(each.down for each in replicas),
        restarts=sum(each.restarts for each in replicas),
        kv_usage_mean=_mean(each.kv_usage_mean for each in replicas),
        kv_usage_max=max(_known(each.kv_usage_max for each in replicas), default=None),
        kv_full=_mean(each.kv_full for each in replicas),
        kv_tokens=_total(each.kv_tokens for each in replicas),
        running_mean=_total(each.running_mean for each in replicas),
        waiting_mean=_total(each.waiting_mean for each in replicas),
        preemptions=_total(each.preemptions for each in replicas),
        recomputed_tokens=_total(each.recomputed_tokens for each in replicas),
        tokens_per_step=_mean(each.tokens_per_step for each in replicas),
        adapters_per_step=_mean(each.adapters_per_step for each in replicas),
        blocked_max=max(_known(each.blocked_max for each in replicas), default=None),
        busy=_mean(each.busy for each in replicas),
    )


def _pressure(row: Row, window: Window) -> Pressure:
    steps, step_ns = whole(row["steps"]), maybe_whole(row["step_ns"])
    return Pressure(
        samples=whole(row["samples"]),
        down=whole(row["down"]),
        restarts=max(0, whole(row["starts"]) - 1),
        kv_usage_mean=maybe_float(row["kv_mean"]),
        kv_usage_max=maybe_float(row["kv_max"]),
        kv_full=maybe_float(row["kv_full"]),
        kv_tokens=maybe_whole(row["kv_tokens"]),
        running_mean=maybe_float(row["running"]),
        waiting_mean=maybe_float(row["waiting"]),
        preemptions=maybe_whole(row["preempted"]),
        recomputed_tokens=maybe_whole(row["recomputed"]),
        tokens_per_step=whole(row["step_tokens"]) / steps if steps else None,
        adapters_per_step=maybe_float(row["adapters"]),
        blocked_max=maybe_whole(row["blocked"]),
        busy=None if step_ns is None else min(1.0, step_ns / NS_PER_S / window.seconds),
    )


def _known(values: Iterable[Number | None]) -> list[Number]:
    return [value for value in values if value is not None]


def _total(values: Iterable[Number | None]) -> Number | None:
    known = _known(values)
    return sum(known[1:], known[0]) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None
