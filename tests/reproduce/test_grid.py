"""The grid's files are made by the twin itself here, with known constants: then the fit finds them and every line passes."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.reproduce.grid import FOLDER, MODEL, lines
from benchmarks.reproduce.grid_files import COLUMNS, Run, read_runs
from benchmarks.reproduce.grid_model import Constants, fitted, predict, step_s
from benchmarks.reproduce.ledger_row import slot_tokens

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
