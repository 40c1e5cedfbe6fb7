"""A calibration that was taken in pieces: points of equal probes become one, others stay apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.accuracy.compare import CONTEXT, load_points, pieces, pooled, save_points

from loraledger.twin.calibrated import Calibrated
from loraledger.twin.fit_points import DecodePoint, MixedPoint, MovePoint, Points, PrefillPoint
from loraledger.twin.profile import PS_PER_MS, TwinProfile


def decode(sequences: int, context: float, adapters: int, ms: float) -> DecodePoint:
    return DecodePoint(sequences=sequences, kv_tokens=round(sequences * context), adapters=adapters, seconds=ms / 1e3)


def mixed(sequences: int, tokens: int, delay: float, ttft: float) -> MixedPoint:
    return MixedPoint(sequences=sequences, kv_tokens=99, tokens=tokens, adapters=1, delay=delay, ttft=ttft)


def move(size: int, rank: int, seconds: float) -> MovePoint:
    return MovePoint(bytes=size, rank=rank, seconds=seconds)


def points(**changes: Any) -> Points:
    return Points(**{"decodes": (), "prefills": (), **changes})


def test_points_of_equal_probes_are_pooled_and_the_inner_mean_counts() -> None:
    parts = [
        points(
            decodes=(decode(4, 2 * CONTEXT + number, 1, ms),),
            prefills=(PrefillPoint(tokens=64, adapters=1, seconds=ms),),
            mixed=(mixed(2, 64, ms, 2 * ms),),
            loads=(move(100, 8, ms),),
            activations=(move(100, 8, 3 * ms),),
            calls=(move(100, 8, 4 * ms),),
        )
        for number, ms in enumerate((10.0, 99.0, 12.0, 14.0, 1.0))
    ]
    found = pooled(parts)
    assert [point.seconds for point in found.decodes] == [pytest.approx(0.012)]
    assert [point.seconds for point in found.prefills] == [pytest.approx(12.0)]
    assert [(point.delay, point.ttft) for point in found.mixed] == [pytest.approx((12.0, 24.0))]
    assert [[point.seconds for point in kind] for kind in (found.loads, found.activations, found.calls)] == [
        [pytest.approx(12.0)],
        [pytest.approx(36.0)],
        [pytest.approx(48.0)],
    ]


def test_points_that_differ_in_what_was_probed_stay_apart() -> None:
    first = points(
        decodes=(decode(4, CONTEXT, 1, 10), decode(4, CONTEXT, 2, 11), decode(4, 4 * CONTEXT, 1, 12)),
        prefills=(PrefillPoint(tokens=64, adapters=1, seconds=1.0), PrefillPoint(tokens=64, adapters=0, seconds=2.0)),
        mixed=(mixed(2, 64, 1, 1), mixed(8, 64, 1, 1)),
        loads=(move(100, 8, 1.0), move(100, 16, 2.0)),
    )
    second = points(
        decodes=(decode(8, CONTEXT, 1, 13),),
        prefills=(PrefillPoint(tokens=128, adapters=1, seconds=3.0),),
        mixed=(mixed(2, 128, 1, 1),),
        loads=(move(900, 8, 3.0),),
    )
    found = pooled([first, second])
    for kind in ("decodes", "prefills", "mixed", "loads"):
        assert getattr(found, kind) == getattr(first, kind) + getattr(second, kind)
    assert found.activations == ()


def test_pieces_on_disk_come_to_one_profile_of_their_pooled_points(tmp_path: Path) -> None:
    calibrated = Calibrated(
        name="n",
        engine="vllm",
        engine_version=None,
        model="base",
        device="d",
        date="2026-11-29",
        source="a test",
        profile=TwinProfile(slots=2),
    )
    for number, ms in enumerate((8.0, 12.0)):
        rows = tuple(decode(sequences, CONTEXT, 0, ms * sequences) for sequences in (1, 2, 4))
        piece = points(decodes=rows, prefills=(PrefillPoint(tokens=64, adapters=0, seconds=0.1),))
        save_points(tmp_path / f"calibration-{number}.json", calibrated, piece)
    assert [path.name for path in pieces(tmp_path)] == ["calibration-0.json", "calibration-1.json"]
    found, together = load_points(tmp_path)
    assert len(together.decodes) == 3
    assert found.profile.slots == 2
    assert found.profile.step_ps(4, 4 * CONTEXT, 0, 0) == pytest.approx(40 * PS_PER_MS, rel=0.02)
