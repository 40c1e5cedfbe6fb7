"""What is told of a measured run and its replay; and a calibration in pieces, of which points of equal probes become one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.accuracy.compare import (
    CONTEXT,
    TARGETS,
    Figures,
    figures,
    fitted,
    hit_lines,
    lines,
    load_points,
    naive,
    naive_line,
    pieces,
    pooled,
    save_points,
    served_per_s,
    slowed,
    slowness,
    with_cause,
)

from loraledger.record.parquet import write_parquet
from loraledger.twin.calibrated import Calibrated
from loraledger.twin.fit_points import DecodePoint, MixedPoint, MovePoint, Points, PrefillPoint
from loraledger.twin.profile import PS_PER_MS, TwinProfile
from replay.runs import at, request_row


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
    slow = slowed(together, 2.0)
    assert fitted(found, slow).profile.step_ps(4, 4 * CONTEXT, 0, 0) == pytest.approx(80 * PS_PER_MS, rel=0.02)
    save_points(tmp_path / "calibration-pair-1.json", calibrated, slow)
    assert [path.name for path in pieces(tmp_path, pair=True)] == ["calibration-pair-1.json"]
    assert load_points(tmp_path) == (found, together)
    assert load_points(tmp_path, pair=True)[1] == slow


# --- a run and its replay ---------------------------------------------------------------------------------------------


def record(folder: Path) -> Path:
    """Ten requests, a second apart, that waited 0.1 to 1.0 s; one that failed; moves, of which one is a read from disk to host."""
    rows = [
        request_row(
            number,
            number,
            number + 0.1 * (number + 1),
            last=number + 2.0,
            generated_tokens=20,
            itl_mean_ns=None if number == 0 else 10_000_000 * number,
            hit_class="gpu" if number < 7 else "disk",
            engine_access="gpu" if number < 6 else "host",
        )
        for number in range(10)
    ]
    failed = request_row(99, 0.0, None, status="engine_error", hit_class="host", itl_mean_ns=None)
    moves = [
        {"cause": cause, "tier_before": before, "tier_after": after, "at_ns": at(1), "replica": "r1", "adapter": "a"}
        for cause, before, after in (
            ("load", "disk", "host"),
            ("load", "host", "gpu"),
            ("load", "gpu", "host"),
            ("eviction", "host", "disk"),
        )
    ]
    write_parquet({"requests": [*rows, failed], "residency": moves}, folder, "s1")
    return folder


def test_figures_are_of_the_requests_that_ended_well(tmp_path: Path) -> None:
    found = figures(record(tmp_path))
    assert found.requests == 10
    assert found.hits == {"gpu": 60.0, "host": 40.0, "gpu at the decision": 70.0, "disk at the decision": 30.0}
    assert found.values == {
        "throughput": pytest.approx(200 / 11.0),
        "mean TTFT": pytest.approx(550.0),
        "mean ITL": pytest.approx(50.0),
        "p90 TTFT": pytest.approx(1000.0),
        "p90 ITL": pytest.approx(90.0),
        "loads": 1.0,
    }
    assert served_per_s(tmp_path) == pytest.approx(10 / 11.0)


def came(hits: dict[str, float] | None = None, **changes: float) -> Figures:
    values = dict.fromkeys(TARGETS, 100.0)
    return Figures(
        10, values | {name.replace("_", " "): value for name, value in changes.items()}, hits or {"gpu": 100.0}
    )


def told(measured: list[Figures], ours: list[Figures], *, saturated: bool = True) -> dict[str, tuple[str, str, bool]]:
    found = lines("zipf", measured, ours, saturated=saturated)
    assert {line.target for line in found} == {"zipf"}
    return {line.what: (line.error, line.tolerance, line.passed) for line in found}


def test_a_figure_is_judged_by_its_target_where_runs_agree() -> None:
    found = told([came(), came()], [came(loads=101.0, mean_TTFT=111.0), came(loads=104.0, mean_TTFT=114.0)])
    assert found["loads"] == ("+2.5 %", "2.0 %", False)
    assert found["mean TTFT"] == ("+12.5 %", "12.0 %", False)
    assert found["p90 TTFT"] == ("+0.0 %", "20.0 %", True)


def test_twice_the_noise_of_two_runs_counts_where_it_is_the_larger() -> None:
    measured = [came(loads=95.0), came(loads=105.0)]
    ours = [came(loads=95.0 * 1.19), came(loads=105.0 * 1.19)]
    assert told(measured, ours)["loads"] == ("+19.0 %", "20.0 %", True)
    assert told(measured, [came(loads=95.0 * 1.21), came(loads=105.0 * 1.21)])["loads"][2] is False


def test_throughput_is_told_of_saturated_engines_over_the_mean_of_both() -> None:
    ours = [came(throughput=300.0)] * 2
    assert told([came()] * 2, ours)["throughput"] == ("+100.0 %", "5.0 %", False)
    below = told([came()] * 2, ours, saturated=False)
    assert below.keys() == {name for name in TARGETS if name != "throughput"} | {"hit rate, gpu"}


def test_a_miss_says_what_became_of_it_when_the_twin_was_as_slow_as_the_engine() -> None:
    measured = [came({"gpu": 50.0}, mean_ITL=120.0)] * 2
    ours = [came({"gpu": 60.0}, throughput=130.0, mean_TTFT=50.0)] * 2
    slower = [came({"gpu": 59.0}, throughput=101.0, mean_TTFT=95.0, mean_ITL=120.0)] * 2
    factor = slowness(measured, ours)
    assert factor == pytest.approx(1.2)
    found, again = (lines("zipf", measured, runs, saturated=True) for runs in (ours, slower))
    told = {line.what: line.reason for line in with_cause(found, again, factor)}
    assert told["throughput"] == "1.20 times as slow: +1.0 %, passes: step times alone; two runs differ by 0.0 %"
    assert told["mean TTFT"] == "1.20 times as slow: -5.0 %, passes: step times alone; two runs differ by 0.0 %"
    assert told["hit rate, gpu"] == (
        "1.20 times as slow: +9.00 points, misses still: not step times alone; two runs differ by 0.0 points"
    )
    assert told["loads"] == told["p90 TTFT"] == ""
    assert [line.passed for line in with_cause(found, again, factor)] == [line.passed for line in found]


def test_a_slower_engine_takes_as_much_longer_for_everything() -> None:
    probed = points(
        decodes=(decode(4, CONTEXT, 1, 10.0),),
        prefills=(PrefillPoint(tokens=64, adapters=1, seconds=0.1),),
        mixed=(mixed(2, 64, 0.5, 0.3),),
        loads=(move(100, 8, 1.0),),
    )
    assert slowed(probed, 1.5) == points(
        decodes=(decode(4, CONTEXT, 1, 15.0),),
        prefills=(PrefillPoint(tokens=64, adapters=1, seconds=0.1 * 1.5),),
        mixed=(mixed(2, 64, 0.75, 0.3 * 1.5),),
        loads=(move(100, 8, 1.5),),
    )


def test_hit_rates_are_compared_in_points_class_by_class() -> None:
    measured = [came({"gpu": 60.0, "disk": 40.0})] * 2
    found = {line.what: line for line in hit_lines("zipf", measured, [came({"gpu": 60.8, "host": 39.2})] * 2)}
    assert {what: (line.error, line.passed) for what, line in found.items()} == {
        "hit rate, gpu": ("+0.80 points", True),
        "hit rate, host": ("+39.20 points", False),
        "hit rate, disk": ("-40.00 points", False),
    }
    noisy = [came({"gpu": 58.0}), came({"gpu": 60.0})]
    (line,) = hit_lines("zipf", noisy, [came({"gpu": 62.0}), came({"gpu": 64.0})])
    assert (line.error, line.tolerance, line.passed) == ("+4.00 points", "4.0 points", True)
    (line,) = hit_lines("zipf", noisy, [came({"gpu": 62.2}), came({"gpu": 64.0})])
    assert (line.passed, line.reason) == (False, "two runs differ by 2.0 points")


def test_the_naive_predictor_answers_with_the_means_of_the_calibration() -> None:
    probed = points(
        decodes=(decode(4, CONTEXT, 0, 999.0), decode(2, CONTEXT, 1, 20.0), decode(8, CONTEXT, 2, 40.0)),
        prefills=(PrefillPoint(tokens=64, adapters=1, seconds=0.1),),
        mixed=(mixed(2, 64, 0.5, 0.3),),
    )
    assert naive(probed) == {
        "throughput": pytest.approx(150.0),
        "mean TTFT": pytest.approx(200.0),
        "mean ITL": pytest.approx(30.0),
    }
    measured = [came(throughput=150.0, mean_TTFT=200.0, mean_ITL=60.0)]
    near = [came(throughput=150.0, mean_TTFT=200.0, mean_ITL=54.0)]
    far = [came(throughput=150.0, mean_TTFT=90.0, mean_ITL=60.0)]
    won, lost = (naive_line("zipf", probed, measured, ours, saturated=True) for ours in (near, far))
    assert [won.published, won.ours] == pytest.approx([50 / 3, 10 / 3])
    assert (won.error, won.passed) == ("-13.3 points", True)
    assert lost.ours == pytest.approx(55 / 3)
    assert (won.reason, lost.passed) == ("", False)
    assert lost.reason == (
        "throughput 150, ours 150, the mean 150; mean TTFT 200, ours 90, the mean 200; mean ITL 60, ours 60, the mean 30"
    )
    wrong = [came(throughput=15_000.0, mean_TTFT=200.0, mean_ITL=54.0)]
    assert naive_line("zipf", probed, measured, wrong, saturated=False).passed
    assert not naive_line("zipf", probed, measured, wrong, saturated=True).passed
