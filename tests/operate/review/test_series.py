"""Pieces of a window lie over those of the window before, and say nothing of too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraledger.operate.review.series import HOUR_NS, PIECES, Point, _piece, read_series
from loraledger.record.parquet import write_parquet
from loraledger.record.reader import RecordReader
from loraledger.signals.figures import Window
from loraledger.signals.measure import measure
from signals.records import NOON, SECOND, base_request, request

from .made import DAY, FACTS, WEEK, WINDOW


@pytest.mark.parametrize(
    ("length", "requests", "piece"),
    [
        (WEEK, 100 * 168, HOUR_NS),
        (WEEK, 100 * 168 - 1, 3 * HOUR_NS),
        (WEEK, 700, DAY),
        (WEEK, 3, DAY),
        (HOUR_NS, 10**6, 60 * SECOND),
        (365 * DAY, 10**9, 7 * DAY),
        (5 * SECOND, 10, 5 * SECOND),
    ],
)
def test_a_piece_is_as_short_as_its_requests_allow(length: int, requests: int, piece: int) -> None:
    assert _piece(length, requests) == piece
    assert set(PIECES) | {length} >= {piece}


def test_hits_and_waits_of_a_piece_are_those_of_its_requests(tmp_path: Path) -> None:
    def day(at: int, hits: int, ttft_ms: int) -> list[dict[str, object]]:
        rows = [
            request(arrived_ns=at + n, first_token_ns=at + n + ttft_ms * 10**6, hit_class="gpu" if n < hits else "disk")
            for n in range(20)
        ]
        return [*rows, *(base_request(arrived_ns=at + n, status="client_error") for n in range(5))]

    rows = day(NOON - 3 * DAY, 15, 250) + day(NOON - WEEK - 3 * DAY, 10, 100)
    rows += [request(arrived_ns=NOON - DAY + n) for n in range(19)]
    write_parquet({"requests": rows}, tmp_path, "made")
    with RecordReader(tmp_path) as reader:
        now = measure(reader, WINDOW, FACTS)
        before = measure(reader, Window(NOON - 2 * WEEK, NOON - WEEK), FACTS, like=now.version)
        found = read_series(reader, now, before)
    assert (found.piece_ns, found.pieces) == (DAY, 7)
    assert found.now == (Point(4, 0.75, 0.25), Point(6, None, None))
    assert found.before == (Point(4, 0.5, 0.1),)
