"""The grid's files are made by the twin itself here, with known constants: then the fit finds them and every line passes."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.reproduce.grid import FOLDER, MODEL, _of_curve, lines
from benchmarks.reproduce.grid_files import COLUMNS, Run, read_runs
from benchmarks.reproduce.grid_model import Constants, Predicted, fitted, predict, profile_of, step_s
from benchmarks.reproduce.ledger_row import slot_tokens
from benchmarks.reproduce.table import Line

from loraledger.errors import InputFileError

SLOT = slot_tokens(MODEL, 8)
TRUE = Constants(
    base=0.02, request=2e-4, adapter=1e-3, adapter_slot=1e-4, load=0.01, arrivals=1.0, pool=6_000 + int(24 * SLOT)
)
ROW = "8,16,8,0.5,0.5,60,2000,400,92400,1540,30,46.2,0,0.16,12,1"


def run(slots: int, adapters: int, rate: float) -> Run:
    """What the twin makes of such a run, as a row would say it. A batch of a run that cannot keep up is what its KV holds."""
    calm = Run(
        ("grid", rate / adapters),
        8,
        slots,
        adapters,
        rate,
        60.0,
        1,
        1,
        40,
        1.0,
        1.0,
        1.0,
        0.0,
        0.0,
        0.01 * adapters,
        0.0,
    )
    found = predict(calm, TRUE, SLOT)
    rough = replace(calm, throughput=found.throughput, completed=round(found.throughput * 60 / 40), loads=found.loads)
    hurried = found.throughput < 0.9 * rate * 40
    batch = 40.0 if hurried else 0.0
    for _ in range(50 if not hurried else 0):
        batch = found.throughput * step_s(replace(rough, batch=batch, gap=1e-9), TRUE)
    step = step_s(replace(rough, batch=batch, gap=1e-9 if not hurried else 1e9), TRUE)
    gap = 2 * step if hurried else step
    return replace(
        rough,
        batch=batch,
        gap=gap,
        steps=round(60 / step),
        waiting=50.0 if hurried else 0.0,
        throughput=found.throughput,
    )


def text(one: Run) -> list[str]:
    values = (
        one.slots,
        one.adapters,
        one.rank,
        one.series[1],
        one.rate / one.adapters,
        one.seconds,
        one.steps,
        one.completed,
        one.completed * 40,
        one.throughput,
        1e3 * one.gap,
        one.batch,
        one.waiting,
        one.loading,
        one.loads,
        0.0,
    )
    return [repr(value) for value in values]


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    whole = [run(n, n, rate * n) for n in (4, 8, 12, 16, 24) for rate in (0.1, 0.4, 3.0)]
    return whole + [run(slots, 24, 12.0) for slots in (4, 8, 16)]


def write(folder: Path, rows: list[list[str]]) -> Path:
    path = folder / "grid.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path


def test_the_constants_that_made_the_runs_are_found(runs: list[Run]) -> None:
    found, used = fitted(runs, SLOT)
    assert {one.slots for one in used} == {4, 8, 12, 16, 24}
    assert found.base == pytest.approx(TRUE.base, rel=0.1)
    assert found.adapter + 16 * found.adapter_slot == pytest.approx(TRUE.adapter + 16 * TRUE.adapter_slot, rel=0.15)
    assert found.load == pytest.approx(TRUE.load)
    assert found.arrivals == pytest.approx(1.0, abs=0.05)
    assert found.pool == pytest.approx(TRUE.pool, rel=0.15)


def test_the_share_of_arrivals_counts_what_was_still_in_service_at_the_end(runs: list[Run]) -> None:
    calm = [replace(one, completed=round(0.9 * one.rate * one.seconds - one.batch)) for one in runs if one.waiting < 1]
    found, _ = fitted([*calm, *(one for one in runs if one.waiting >= 1)], SLOT)
    assert found.arrivals == pytest.approx(0.9, abs=0.005)


def test_the_pool_is_that_of_the_run_of_the_lowest_rate_that_preempts(runs: list[Run]) -> None:
    heavier = [replace(one, rate=2 * one.rate, throughput=1.3 * one.throughput) for one in runs if one.preempts]
    assert heavier
    assert fitted([*heavier, *runs], SLOT)[0].pool == pytest.approx(fitted(runs, SLOT)[0].pool, rel=0.03)


BUSY = Run(("grid", 1.0), 8, 16, 16, 16.0, 60.0, 100, 100, 40, 100.0, 0.05, 5.0, 0.0, 0.0, 0.2, 0.0)


def test_a_token_sees_its_own_request_in_the_step_unless_requests_are_preempted() -> None:
    one = replace(BUSY, adapters=1, slots=1)
    extra = TRUE.base + TRUE.adapter + TRUE.adapter_slot
    assert not one.preempts
    assert step_s(one, TRUE) == pytest.approx(extra + 6 * TRUE.request)
    preempted = replace(one, throughput=1.2 * one.batch / one.gap)
    assert preempted.preempts
    assert step_s(preempted, TRUE) == pytest.approx(extra + 5 * TRUE.request)
    assert not replace(one, throughput=1.1 * one.batch / one.gap).preempts


def test_each_slot_takes_its_tokens_of_kv_and_makes_an_adapter_dearer() -> None:
    few, many = (profile_of(replace(BUSY, slots=slots), TRUE, 160.0) for slots in (4, 16))
    assert few.kv_blocks - many.kv_blocks == 12 * 160 // 16
    assert many.adapter_step_ps - few.adapter_step_ps == round(12 * TRUE.adapter_slot * 1e12)


SIZES = (8, 32, 128, 448)
MEASURED = (1000.0, 3000.0, 2000.0, 1000.0)


def judged(ours: tuple[float, ...], **changes: float) -> list[Line]:
    """The lines of a curve that measured ``MEASURED`` and is predicted as ``ours``, with 100 copies in each run."""
    curve = [
        replace(BUSY, slots=slots, adapters=512, throughput=measured, loads=100.0, loading=1.0, **changes)  # type: ignore[arg-type]
        for slots, measured in zip(SIZES, MEASURED, strict=True)
    ]
    return _of_curve(curve, [Predicted(throughput, 90) for throughput in ours])


def test_each_run_is_judged_by_a_tenth_and_their_mean_by_the_size_of_errors() -> None:
    found = judged((1090.0, 2700.0, 2181.0, 889.0))
    assert [(line.error, line.passed) for line in found[:4]] == [
        ("+9.0 %", True),
        ("-10.0 %", True),
        ("+9.1 %", True),
        ("-11.1 %", False),
    ]
    assert (found[4].what.split(": ")[1], found[4].error, found[4].passed) == ("mean error", "9.8 %", False)
    assert judged((1050.0, 2850.0, 2100.0, 950.0))[4].passed


def test_the_top_may_lie_one_step_off_and_the_loss_is_that_of_the_most_slots() -> None:
    beside, off = judged((1000.0, 2000.0, 3000.0, 1000.0)), judged((1000.0, 2000.0, 1000.0, 3000.0))
    assert [(line.published, line.ours, line.error, line.passed) for line in (beside[5], off[5])] == [
        (32, 128, "+1 grid steps", True),
        (32, 448, "+2 grid steps", False),
    ]
    assert [(line.published, line.ours, line.passed) for line in (beside[6], off[6])] == [
        (3.0, 3.0, True),
        (3.0, 1.0, False),
    ]
    assert judged((900.0, 3000.0, 2000.0, 1095.0))[6].passed


def test_a_miss_says_what_the_run_spent_on_what_the_twin_does_otherwise() -> None:
    def why(**changes: float) -> str:
        return judged((1500.0, *MEASURED[1:]), **changes)[0].reason

    assert judged(MEASURED)[0].reason == ""
    assert why() == "the linear form of a step (how far it is off: first line of this target)"
    assert why(scheduling=6.0) == "10 % of it was spent on looking through the waiting line"
    assert why(seconds=60.0, scheduling=1.0) == why()
    curve = [replace(BUSY, slots=8, adapters=512, loads=200.0, loading=30.0)]
    (line, _) = _of_curve(curve, [Predicted(200.0, 100)])
    assert line.reason.startswith("200 loads (14 % of it) where the twin has 100: vLLM's LRU may evict")


def test_runs_that_the_twin_made_are_predicted(tmp_path: Path, runs: list[Run]) -> None:
    (tmp_path / FOLDER).mkdir()
    write(tmp_path / FOLDER, [text(one) for one in runs])
    said: list[str] = []
    found = lines(tmp_path, said.append)
    assert [line.what for line in found if not (line.passed or line.fitted)] == []
    assert len([line for line in found if "slots" in line.unit or line.unit == "tokens/s"]) == 4
    assert said


def test_the_rate_is_of_one_adapter_or_of_all(tmp_path: Path) -> None:
    write(
        tmp_path,
        [ROW.split(","), ROW.replace("0.5,0.5", "8,0.5").split(","), ROW.replace("0.5,0.5", "8,0.48").split(",")],
    )
    assert [one.rate for one in read_runs(tmp_path)] == [8.0, 8.0, 8.0]


def test_a_run_in_which_nothing_ended_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, [ROW.split(","), ROW.replace(",400,92400,", ",0,0,").split(",")])
    assert len(read_runs(tmp_path)) == 1


BAD: list[tuple[Callable[[str], str], str]] = [
    (lambda row: row.replace("8,16", "0,16", 1), "row 3: 0 slots, 16 adapters of rank 8"),
    (lambda row: row.replace("8,16", "17,16", 1), "row 3: 17 slots, 16 adapters"),
    (lambda row: row.replace(",60,", ",-60,"), "row 3: duration is '-60'"),
    (lambda row: row.replace(",60,", ",nan,"), "row 3: duration is 'nan'"),
    (lambda row: row.replace(",60,", ",many,"), "row 3: duration is 'many'"),
    (lambda row: row.replace(",60,", ",1e9,"), "row 3: 1e.09 s at 8 requests/s"),
    (lambda row: row.replace("0.5,0.5", "8,0.45"), "row 3: rate 8 is neither of one adapter nor of all"),
    (lambda row: row.replace("0.5,0.5", "3,0.5"), "row 3: rate 3 is neither of one adapter nor of all"),
    (lambda row: "8,16", "row 3: rank is None"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD)
def test_a_bad_row_is_refused_with_file_and_row(tmp_path: Path, spoil: Callable[[str], str], message: str) -> None:
    write(tmp_path, [ROW.split(","), spoil(ROW).split(",")])
    with pytest.raises(InputFileError, match=rf"grid\.csv: {message}"):
        read_runs(tmp_path)


def test_a_file_without_a_column_and_a_folder_without_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"no \*\.csv with a run in it"):
        read_runs(tmp_path)
    (tmp_path / "x.csv").write_text("gpu_loras,cpu_loras\n8,8\n")
    with pytest.raises(InputFileError, match=r"x\.csv: no column adapter_rates"):
        read_runs(tmp_path)
