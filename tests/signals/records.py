"""Rows and temporary records for the tests of signals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from loraledger.record.parquet import write_parquet
from loraledger.record.reader import RecordReader
from loraledger.record.tables import Row
from loraledger.signals.facts import Facts, ReplicaFacts
from loraledger.signals.figures import Group, Signals, Window
from loraledger.signals.measure import measure

NOON: Final = 1_789_992_000 * 10**9
"""2026-09-21T12:00:00Z."""
SECOND: Final = 10**9
MS: Final = 10**6
MINUTE: Final = 60 * SECOND
WINDOW: Final = Window(NOON, NOON + MINUTE)

_numbers = count(1)


def record(
    tmp_path: Path,
    requests: Sequence[Row] = (),
    samples: Sequence[Row] = (),
    residency: Sequence[Row] = (),
    decisions: Sequence[Row] = (),
) -> RecordReader:
    """A reader over a record of these rows, in Parquet under ``tmp_path``; what was there before is replaced."""
    tables = {"requests": requests, "samples": samples, "residency": residency, "decisions": decisions}
    write_parquet({name: rows for name, rows in tables.items() if rows}, tmp_path, "test")  # type: ignore[misc]
    return RecordReader(tmp_path)


def request(**columns: object) -> Row:
    """A streamed request that ended well: a slot hit of ``acme``'s adapter on ``r1``, first token after 0.2 s, 10 gaps of 20 ms.

    Times of the defaults follow ``arrived_ns``; a column given as ``None`` is null.
    """
    arrived = columns.get("arrived_ns", NOON)
    assert isinstance(arrived, int)
    row: Row = {
        "id": f"req-{next(_numbers)}",
        "tenant": "acme",
        "adapter": "acme/support",
        "digest": "sha256:aa",
        "base": "base-8b",
        "replica": "r1",
        "policy": "bounded",
        "hit_class": "gpu",
        "hit_source": "believed",
        "arrived_ns": arrived,
        "dispatched_ns": arrived + 1_000_000,
        "first_byte_ns": arrived + 190_000_000,
        "first_token_ns": arrived + 200_000_000,
        "first_answer_ns": arrived + 200_000_000,
        "last_token_ns": arrived + 400_000_000,
        "finished_ns": arrived + 401_000_000,
        "itl_mean_ns": 20_000_000,
        "itl_max_ns": 20_000_000,
        "prompt_tokens": 100,
        "generated_tokens": 11,
        "cached_tokens": 0,
        "predicted_prompt_tokens": 100,
        "status": "ok",
        "http_status": 200,
        "stream": True,
        "retries": 0,
        "path": "/v1/chat/completions",
        "engine_version": "0.11.0",
        "config_digest": "sha256:cc",
        "gateway_version": "0.1.0",
    }
    return row | columns


def base_request(**columns: object) -> Row:
    """The same of the base model."""
    return request(**({"adapter": None, "digest": None, "hit_class": "base", "hit_source": "configured"} | columns))


def sample(**columns: object) -> Row:
    """A sample of ``r1`` in good health, without a probe."""
    row: Row = {
        "at_ns": NOON,
        "replica": "r1",
        "up": True,
        "running": 4,
        "waiting": 0,
        "kv_usage": 0.5,
        "kv_tokens": 100_000,
        "own_in_flight": 4,
        "foreign_in_flight": 0,
        "slots_used_believed": 2,
        "process_start_ns": NOON - 3600 * SECOND,
        "age_ns": 10_000_000,
    }
    return row | columns


def move(before: str | None, after: str | None, **columns: object) -> Row:
    """A change of the tier of ``acme/support`` on ``r1``."""
    row: Row = {
        "at_ns": NOON,
        "replica": "r1",
        "adapter": "acme/support",
        "engine_name": "acme/support@aa",
        "from_state": "registered",
        "to_state": "registered",
        "tier_before": before,
        "tier_after": after,
        "cause": "request",
        "source": "observed",
    }
    return row | columns


FACTS: Final = Facts(
    replicas={"r1": ReplicaFacts(slots=2, host_entries=8), "r2": ReplicaFacts(slots=2, host_entries=4)},
    adapter_bytes={"acme/support": 80 * 2**20, "b": 10 * 2**20},
    source="loraledger.yaml",
)


def measured(
    tmp_path: Path,
    requests: list[Row],
    samples: list[Row] | None = None,
    moves: list[Row] | None = None,
    facts: Facts = FACTS,
    slo_s: float = 1.0,
) -> Signals:
    """What the minute from noon comes to."""
    with record(tmp_path, requests, samples or [], moves or []) as reader:
        return measure(reader, WINDOW, facts, slo_s=slo_s)


def about(value: float) -> Any:
    """Equal to what is nearly so, also as a field of a struct."""
    return pytest.approx(value)


def total(signals: Signals) -> Group:
    """The figures of all requests."""
    assert signals.total is not None
    return signals.total
