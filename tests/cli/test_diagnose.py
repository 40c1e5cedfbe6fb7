"""``diagnose``: the answer first, each step with its figures, a command to paste, and the exit code."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from loraledger.record.parquet import write_parquet
from signals.records import NOON, SECOND, request

from .conftest import Cli, on_a_terminal, write
from .judged import SETTINGS, WINDOW, write_record

STEPS = 5


@pytest.fixture
def record(tmp_path: Path) -> Path:
    write(tmp_path / "loraledger.yaml", SETTINGS)
    return write_record(tmp_path / "record")


def test_the_sentence_of_the_document_stands_first_and_then_five_steps(cli: Cli, record: Path) -> None:
    answer = cli("diagnose", *WINDOW, "--json").items("diagnosis")
    done = cli("diagnose", *WINDOW)
    assert done.code == 0
    _, sentence, *rest = done.out.split("\n\n")
    assert " ".join(sentence.split()) == answer["sentence"]
    assert answer["pool"] == "adapters"
    steps = [part for part in rest if part[:2] in {f"{number}." for number in range(1, STEPS + 1)}]
    assert [int(step[0]) for step in steps] == list(range(1, STEPS + 1))
    for step, finding in zip(steps, answer["findings"], strict=True):
        assert finding["question"] in " ".join(step.split())
        assert finding["verdict"].upper() in step
        for evidence in finding["evidence"]:
            assert evidence["name"] in " ".join(step.split())


def test_a_figure_is_shown_in_its_unit_now_and_before(cli: Cli, record: Path) -> None:
    lines = [" ".join(line.split()) for line in cli("diagnose", *WINDOW).out.splitlines()]
    assert "GPU hit rate 75.0% 100.0%" in lines
    assert "requests a minute 9 4" in lines
    assert "TTFT of misses, 99th percentile 2.000 s -" in lines


def test_the_next_experiment_is_commands_on_lines_of_their_own(cli: Cli, record: Path) -> None:
    answer = cli("diagnose", *WINDOW, "--json").items("diagnosis")
    lines = cli("diagnose", *WINDOW).out.splitlines()
    commands = [line for line in lines if line.startswith("loraledger ")]
    assert commands == [answer["experiment"]["before"], answer["experiment"]["command"]]
    trace, replay = (shlex.split(command) for command in commands)
    assert trace[:5] == ["loraledger", "trace", "import", "record", "record"]
    assert replay[:2] == ["loraledger", "replay"]
    assert replay[replay.index("--fleet") + 1] == "loraledger.yaml"


def test_what_would_not_help_and_what_is_not_observable_are_said(cli: Cli, record: Path) -> None:
    out = cli("diagnose", *WINDOW).out
    for title in (
        "what would help",
        "what would not help, and why",
        "why this is not more certain",
        "what no record shows",
    ):
        assert f"\n\n{title}" in out
    assert "- kernel choice\n- tensor-parallel communication" in out


def test_require_is_exit_code_5_only_when_a_pool_limits(cli: Cli, record: Path, tmp_path: Path) -> None:
    done = cli("diagnose", *WINDOW, "--require")
    assert done.code == 5
    assert done.err.startswith("loraledger: Adapters limit")
    assert done.out.startswith("2026-09-21 12:00:00")
    calm = [request(arrived_ns=NOON + n * SECOND) for n in range(-500, 500)]
    write_parquet({"requests": calm}, tmp_path / "calm", "made")
    done = cli("diagnose", *WINDOW, "--record", "calm", "--require")
    assert done.code == 0, done.err
    assert cli("diagnose", *WINDOW, "--record", "calm", "--json").items("diagnosis")["pool"] == "nothing"


def test_an_empty_record_accuses_nothing(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = cli("diagnose", "--record", "empty", "--require")
    assert done.code == 0
    assert "Nothing is shown to limit" in done.out
    assert "BEFORE" not in done.out


def test_one_request_is_answered_without_nan(cli: Cli, tmp_path: Path) -> None:
    write_parquet({"requests": [request()]}, tmp_path / "one", "made")
    for words in ([], ["--json"], ["--baseline", "none"]):
        done = cli("diagnose", "--record", "one", *words)
        assert done.code == 0, done.err
        assert "nan" not in done.out.lower().replace("tenant", "")


def test_sentences_fold_at_the_terminals_width_and_commands_do_not(record: Path, tmp_path: Path) -> None:
    out, _ = on_a_terminal(tmp_path, 80, "diagnose", *WINDOW)
    piped = out.decode().splitlines()
    assert max(len(line) for line in piped if not line.startswith("loraledger ")) <= 100
