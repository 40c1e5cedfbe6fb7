"""Run folders for the tests, written by hand: rows of the record and what a run came to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from loraledger.record.parquet import write_parquet
from loraledger.record.tables import Row, TableName
from loraledger.replay.fleet.observation import Observation
from loraledger.replay.fleet.outcome import RECORD_FOLDER, RUN_FILE, Outcome, ReplicaCounts, Saturation
from loraledger.units import NS_PER_S

START = 1_767_225_600 * NS_PER_S
PS_PER_S = 10**12


def at(second: float) -> int:
    return START + round(second * NS_PER_S)


def request_row(number: int, arrived: float, first: float | None, **columns: Any) -> Row:
    """A request that arrived, and whose first and last token came, so many seconds after the start."""
    last = columns.pop("last", first)
    return {
        "id": f"q{number}",
        "tenant": "acme",
        "arrived_ns": at(arrived),
        "first_token_ns": None if first is None else at(first),
        "last_token_ns": None if last is None else at(last),
        "finished_ns": None if last is None else at(last),
        "dispatched_ns": at(arrived),
        "replica": "r1",
        "prompt_tokens": 100,
        "generated_tokens": 1,
        "status": "ok",
        **columns,
    }


def counts(replica: str = "r1", **fields: Any) -> ReplicaCounts:
    names = [field.name for field in msgspec.structs.fields(ReplicaCounts) if field.name != "replica"]
    return ReplicaCounts(replica=replica, **{**dict.fromkeys(names, 0), "slots": 1, "host_entries": 2, **fields})


def outcome(requests: int, replicas: Iterable[ReplicaCounts] = (counts(),), **fields: Any) -> Outcome:
    calm = Saturation(saturated=False, offered_per_s=1.0, served_per_s=1.0, backlog=0, reason="")
    known = {
        "label": "one",
        "trace": "sha256:" + "0" * 64,
        "policy": "round-robin",
        "scenario": "sha256:" + "1" * 64,
        "observation": Observation(),
        "requests": requests,
        "open": 0,
        "start_ns": START,
        "simulated_ns": 0,
        "last_arrival_ns": 0,
        "saturation": calm,
        "replicas": tuple(replicas),
    }
    return Outcome(**{**known, **fields})


def write_run(
    directory: Path, rows: Iterable[Row], came_to: Outcome | None = None, residency: Iterable[Row] = ()
) -> Path:
    requests = list(rows)
    tables: dict[TableName, Iterable[Row]] = {"requests": requests, "residency": residency}
    write_parquet(tables, directory / RECORD_FOLDER, "replay")
    (directory / RUN_FILE).write_bytes(msgspec.json.encode(came_to or outcome(len(requests))))
    return directory
