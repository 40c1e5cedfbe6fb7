"""S-LoRA's results are told apart by rule, fitted to few of them, and predicted; what is not of the form is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from benchmarks.reproduce import __main__ as reproduce
from benchmarks.reproduce import slora
from benchmarks.reproduce.slora_files import Run, place_of, read_runs
from benchmarks.reproduce.slora_fit import Fitted, fit_points
from benchmarks.reproduce.slora_lines import FIRST_TOKEN, GENERATOR, THROUGHPUT, generator_lines
from benchmarks.reproduce.slora_model import Constants, Predictor, arrivals_of, priors
from benchmarks.reproduce.slora_setup import gpu_of, model_of, pool_of, split_pool, unified_pool

from loraledger.errors import InputFileError
from loraledger.replay.scenarios.profiles import read_profile

DATA = Path(__file__).parent / "data"
CONFIG = {
    "num_adapters": 20,
    "alpha": 1,
    "req_rate": 2,
    "cv": 1,
    "duration": 20,
    "input_range": [8, 512],
    "output_range": [8, 512],
}
RESULT = {
    "total_time": 25.0,
    "throughput": 1.6,
    "avg_latency": 9.0,
    "avg_first_token_latency": 0.5,
    "avg_attainment": 1.0,
    "num_abort": 0,
}


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def row(**changes: object) -> dict[str, object]:
    return {
        "config": {**CONFIG, **{key: value for key, value in changes.items() if key in CONFIG}},
        "result": {**RESULT, **{key: value for key, value in changes.items() if key in RESULT}},
    }


def published() -> list[Run]:
    return read_runs(DATA / slora.FOLDER)[0]


def one(kind: str, **changes: object) -> Run:
    return next(
        run
        for run in published()
        if run.place == "a10g S2" and run.kind == kind and all(getattr(run.config, k) == v for k, v in changes.items())
    )


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("synthetic req rate a10g s2 slora", ("a10g", "S2")),
        ("synthetic num adapters a100-80 s1 slora table", ("a100-80", "S1")),
        ("synthetic num adapters a100 80 s4 slora large", ("a100-80", "S4")),
        ("ablation cluster cv size 1 a100 s2", ("a100", "S2")),
        ("num adapter a100-80 s1 peft fig3", ("a100-80", "S1")),
        ("h100-80 s5 slora sweep", ("h100-80", "S5")),
        ("x99-24 slora s7 sweep", ("x99-24", "S7")),
        ("all results slora", None),
        ("slora s2 sweep", None),
    ],
)
def test_gpu_and_setting_are_read_from_the_path(words: str, place: tuple[str, str] | None) -> None:
    assert place_of(words.split()) == place


def test_runs_are_read_with_kind_and_place() -> None:
    runs = published()
    found = {(run.place, run.kind) for run in runs}
    assert found == {("a10g S1", "slora"), ("a10g S2", "slora"), ("a10g S2", "lifo"), ("a100-80 S1", "slora")}
    assert len(runs) == 22
    assert one("lifo", cv=8).name == "a10g S2 lifo n=200 R=2 cv=8"


def test_file_that_says_no_place_or_variant_is_left_out_with_a_reason(tmp_path: Path) -> None:
    write(tmp_path / "synthetic_slora.jsonl", row())
    write(tmp_path / "synthetic_a10g_S2_magic.jsonl", row())
    runs, left_out = read_runs(tmp_path)
    assert runs == []
    assert dict(left_out) == {
        "synthetic_slora.jsonl": "its path names no GPU and setting",
        "synthetic_a10g_S2_magic.jsonl": "its path names no known variant",
    }


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "not a result"),
        ('{"config": {}, "result": {}}', "missing required field"),
        (row(num_adapters=None), "only a workload from a log"),
        (row(num_adapters=-1), "num_adapters is -1"),
        (row(req_rate=0), "req_rate is 0"),
        (row(req_rate="fast"), "not a result"),
        (row(duration=1e9), "duration is 1e\\+09"),
        (row(duration=0.1), "requests: 1 to"),
        (row(input_range=[512, 8]), "input_range"),
        (row(input_range=[1, 2, 3]), "not a result"),
        (row(avg_attainment=1.5), "avg_attainment 1.5"),
        (row(throughput=-1), "throughput -1"),
        (row(avg_latency=-1), "negative latency"),
        (row(total_time=0), "total_time is 0"),
    ],
)
def test_bad_row_is_refused_with_file_and_row(tmp_path: Path, bad: object, why: str) -> None:
    write(tmp_path / "sweep_a10g_S2_slora.jsonl", row(), "", bad)
    with pytest.raises(InputFileError, match=f"sweep_a10g_S2_slora.jsonl: row 3: .*{why}"):
        read_runs(tmp_path)


def test_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"no \*.jsonl"):
        read_runs(tmp_path)


# --- what is fitted ---------------------------------------------------------------------------------------------------


def test_request_rates_are_fitted_where_there_are_any_and_two_named_points_elsewhere() -> None:
    runs = published()
    rates = fit_points([run for run in runs if run.gpu == "a10g"])
    assert [(run.setting, run.config.req_rate) for run in rates] == [
        (setting, rate) for setting in ("S1", "S2") for rate in (1, 1.5, 2, 2.5)
    ]
    named = fit_points([run for run in runs if run.gpu == "a100-80"])
    assert [run.config.num_adapters for run in named] == [5, 100]


def test_run_that_asks_for_what_was_fitted_is_told_apart() -> None:
    points = fit_points([run for run in published() if run.gpu == "a10g"])
    fitted = Fitted("a10g", "llama-7b", priors("a10g", model_of("S2")), tuple(points), None, ())
    assert fitted.repeats(one("slora", num_adapters=200, req_rate=2))
    assert not fitted.repeats(one("slora", num_adapters=100))
    assert not fitted.repeats(one("lifo", cv=1))


# --- what is predicted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("slora", {"req_rate": 1.5}), ("slora", {"num_adapters": 50}), ("lifo", {"cv": 4})],
)
def test_shipped_profile_predicts_published_runs(kind: str, changes: dict[str, object]) -> None:
    run = one(kind, **changes)
    profile = read_profile("slora-llama-7b-a10g").profile
    if kind == "lifo":
        profile = msgspec.structs.replace(profile, unified=msgspec.structs.replace(profile.unified, order="lifo"))
    ours = Predictor().play(run, profile)
    assert ours.throughput == pytest.approx(run.result.throughput, rel=0.05)
    assert ours.attainment == pytest.approx(run.result.avg_attainment, abs=0.06)
    assert ours.first_token == pytest.approx(run.result.avg_first_token_latency, rel=0.2)


def test_rebuilt_sequences_are_the_published_ones() -> None:
    lines = generator_lines(published())
    assert [line.passed for line in lines] == [True, True, True]


def test_workload_from_a_log_has_the_published_mean_lengths() -> None:
    config = msgspec.structs.replace(published()[0].config, num_adapters=None, alpha=None, cv=None, req_rate=20.0)
    asked = arrivals_of(config, real=True)
    assert len(asked) == 6000
    assert sum(request.prompt_tokens for _, request in asked) / 6000 == pytest.approx(85, rel=0.05)
    assert sum(request.output_tokens for _, request in asked) / 6000 == pytest.approx(165, rel=0.05)
    assert max(request.output_tokens for _, request in asked) < 512


def test_split_pools_come_near_those_that_were_launched() -> None:
    ranks = [(64, 32, 16, 8)[index % 4] for index in range(200)]
    assert split_pool("no_mem", 125_000, 520, ranks) == pytest.approx(90_000, rel=0.13)
    assert split_pool("bmm", 125_000, 520, ranks) == pytest.approx(70_000, rel=0.13)
    assert split_pool("no_mem", 14_500, 520, ranks) == pytest.approx(9_000, rel=0.13)
    assert split_pool("bmm", 14_500, 520, ranks) == pytest.approx(8_000, rel=0.13)


def test_unknown_gpu_and_setting_get_a_pool_from_the_size_in_the_name() -> None:
    assert not gpu_of("x99-24").known
    assert not model_of("S9").known
    small, large = unified_pool("x99-24", model_of("S9")), unified_pool("x99-80", model_of("S9"))
    assert 8_000 < small < 20_000 < 100_000 < large < 140_000


def test_pool_is_the_launched_one_for_the_next_smaller_number_of_adapters() -> None:
    pools = []
    for adapters in (20, 100):
        run = one("slora", num_adapters=adapters)
        split = Run(run.file, run.row, run.gpu, run.setting, "no_mem", False, run.config, run.result)
        pools.append((pool_of(run), pool_of(split)))
    assert pools == [(14_500, 10_000), (14_500, 9_000)]


# --- from one end to the other ----------------------------------------------------------------------------------------

TRUE = msgspec.structs.replace(priors("a10g", model_of("S1")), decode=0.040, prefill_token=0.30e-3, decode_seq=90e-6)


def made_up(folder: Path, constants: Constants) -> Path:
    """Results of a GPU that is as ``constants`` say: a sweep of rates, and one file to be predicted."""
    predictor = Predictor()
    for name, field, values in (
        ("sweep_a10g_S1_slora", "req_rate", [1.0, 2.5, 3.5]),
        ("n_a10g_S1_slora", "num_adapters", [1, 200]),
    ):
        rows = [row(**{"req_rate": 2.5, "duration": 40, field: value}) for value in values]
        path = write(folder / slora.FOLDER / f"{name}.jsonl", *rows)
        for text, run in zip(rows, (run for run in read_runs(path.parent)[0] if run.file == path.name), strict=True):
            ours = predictor.predict(run, constants)
            total = run.config.req_rate * run.config.duration / ours.throughput
            text["result"] = {
                **RESULT,
                "total_time": total,
                "throughput": ours.throughput,
                "avg_latency": ours.latency,
                "avg_first_token_latency": ours.first_token,
                "avg_attainment": ours.attainment,
            }
        write(path, *rows)
    return folder


def test_made_up_gpu_is_fitted_predicted_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, profiles = made_up(tmp_path / "data", TRUE), tmp_path / "profiles"
    report, document = tmp_path / "out.json", tmp_path / "out.md"
    options = ["--only", "slora", "--json", str(report), "--markdown", str(document), "--write-profiles", str(profiles)]
    assert reproduce.main([str(data), *options]) == 0
    found = json.loads(report.read_text())["lines"]
    assert [line["target"] for line in found][:3] == [GENERATOR] * 3
    lines = [line for line in found if line["target"] in (THROUGHPUT, FIRST_TOKEN)]
    held_out = [line for line in lines if not line["fitted"] and isinstance(line["ours"], float)]
    assert len(held_out) == 4
    assert all(
        line["ours"] == pytest.approx(line["published"], rel=0.03) for line in held_out if line["target"] == THROUGHPUT
    )
    assert sum(line["fitted"] for line in lines) == 6
    assert "a10g S1 slora (3 runs)" in document.read_text()
    written = read_profile(str(profiles / "slora-llama-7b-a10g.json"))
    assert written.profile.kv_blocks == 14_500
    assert written.profile.decode_ps(1)[0] == pytest.approx(40e9, rel=0.05)
    assert "lines pass (100 %)" in capsys.readouterr().out


def test_bad_data_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main([str(tmp_path / "none"), "--only", "slora"]) == 3
    write(tmp_path / slora.FOLDER / "sweep_a10g_S2_slora.jsonl", "{}")
    assert reproduce.main([str(tmp_path), "--only", "slora"]) == 3
    assert "sweep_a10g_S2_slora.jsonl: row 1" in capsys.readouterr().err


def test_one_missing_folder_is_said_and_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bsc-vllm-lora-grid").mkdir()
    assert reproduce.main([str(tmp_path), "--only", "slora"]) == 0
    assert f"not predicted: S-LoRA: {tmp_path} has no slora-results" in capsys.readouterr().out


def test_a_folder_without_any_of_the_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main([str(tmp_path), "--only", "slora"]) == 3
    said = capsys.readouterr().err
    assert "no folder with slora-results or bsc-vllm-lora-grid in it; docs/accuracy.md says where" in said


def test_place_without_anything_to_fit_to_is_left_out_with_a_reason(tmp_path: Path) -> None:
    write(tmp_path / slora.FOLDER / "one_a10g_S2_slora.jsonl", row())
    write(tmp_path / slora.FOLDER / "n_a10g_S2_vllm.jsonl", row())
    study = slora.study(tmp_path, lambda _: None)
    assert study.fits == []
    assert [left.reason.split(":")[0] for left in study.left_out] == [
        "another system",
        "neither a file of request rates nor one of numbers of adapters",
    ]
