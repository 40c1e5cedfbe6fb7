"""Rows for the tests of the tables: complete, plausible, and told apart by their id."""

from __future__ import annotations

from loraledger.record.tables import Row

HOUR = 3_600_000_000_000
NOON = 1_789_992_000 * 10**9
"""2026-09-21T12:00:00Z."""


def request(number: int, at: int = NOON, **other: object) -> Row:
    return {"id": f"req-{number}", "arrived_ns": at, "tenant": "acme", "status": "ok", "stream": True, **other}


def decision(number: int, request_id: str, at: int = NOON) -> Row:
    return {"decision_id": number, "request_id": request_id, "at_ns": at, "replica": "r1", "considered": 4}
