"""The verb: what it refuses before it sends anything, what it writes, what it prints."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from loraledger.cli import calibrate as verb
from loraledger.engines.calibrate import run as running
from loraledger.engines.calibrate.facts import Facts
from loraledger.errors import ConfigError, InputFileError, LedgerError, TargetError
from loraledger.twin.calibrated import Calibrated, Term, decode
from loraledger.twin.fit import Fit
from loraledger.twin.fit_points import DecodePoint, Points, PrefillPoint
from loraledger.twin.profile import TwinProfile

ENGINE = ("--engine", "http://127.0.0.1:1")
FOUND = Calibrated(
    name="profile",
    engine="vllm",
    engine_version="0.32.0",
    model="base",
    device="unknown",
    date="2026-11-29",
    source="loraledger calibrate",
    profile=TwinProfile(),
    terms=(Term(name="decode", points=4, error_mean=0.012, error_worst=0.03), Term(name="load", points=0, note="none")),
    notes=("something to doubt",),
)


def invoke(*words: str) -> Result:
    app = typer.Typer()
    app.command()(verb.calibrate)
    return CliRunner().invoke(app, [*ENGINE, *words])


def refusal(*words: str) -> LedgerError:
    result = invoke(*words)
    assert isinstance(result.exception, LedgerError), result.output
    assert "\n" not in result.exception.message
    return result.exception


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[running.Request]:
    """The requests that reach the measurement, which answers at once."""
    seen: list[running.Request] = []

    async def answer(request: running.Request, progress: Callable[[running.Progress], None]) -> running.Result:
        seen.append(request)
        progress(running.Progress(1, 2, 0.1, 10.0, "decode"))
        facts: dict[str, Any] = {
            "slots": 1,
            "host_entries": 1,
            "max_rank": 16,
            "max_seqs": 1,
            "token_budget": 1,
            "max_model_len": 9,
        }
        points = Points(
            decodes=(DecodePoint(sequences=1, kv_tokens=9, adapters=0, seconds=0.01),),
            prefills=(PrefillPoint(tokens=8, adapters=0, seconds=0.02),),
        )
        blank: dict[str, Any] = {"version": None, "model": "base", "kv_blocks": 1, "block_size": 16}
        fit = Fit(
            profile=TwinProfile(), terms=(), boundary_ps=0, boundary_per_seq_ps=0, load_call_ps=0, adapter_ps=None
        )
        return running.Result(
            calibrated=FOUND, points=points, facts=Facts(**facts, **blank, block_bytes=None, slot_bytes=None), fit=fit
        )

    monkeypatch.setattr(running, "calibrate", answer)
    return seen


def test_the_profile_is_written_whole_and_the_terms_are_shown(asked: list[running.Request], tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    result = invoke("--out", str(out), "--slots", "4", "--budget", "90s", "--quick")
    assert result.exit_code == 0, result.output
    assert decode(out.read_bytes()) == FOUND
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    assert "1.2%" in result.stdout
    assert "something to doubt" in result.stdout
    assert "run it on an idle replica" in result.stderr
    (request,) = asked
    assert (request.budget_s, request.quick, request.given.slots, request.name) == (90.0, True, 4, "mine")
    assert invoke("--out", str(out)).exit_code == 0
    assert asked[1].budget_s == 120.0


def test_json_holds_the_profile_and_every_point(asked: list[running.Request], tmp_path: Path) -> None:
    document = json.loads(invoke("--out", str(tmp_path / "p.json"), "--json").stdout)
    assert document["kind"] == "calibration"
    assert document["items"]["profile"]["engine_version"] == "0.32.0"
    assert document["items"]["points"]["decodes"][0]["seconds"] == 0.01
    assert asked


def test_adapters_are_read_before_the_engine_is_touched(asked: list[running.Request], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert isinstance(refusal("--adapter", f"x={tmp_path}/empty"), InputFileError)
    assert "NAME=PATH" in refusal("--adapter", "just-a-name").message
    assert "no sub-folder" in refusal("--adapters-folder", str(tmp_path / "empty")).message
    assert "is no folder" in refusal("--adapters-folder", str(tmp_path / "none")).message
    for number in range(verb.MOST_ADAPTERS):
        (tmp_path / f"a{number}").mkdir()
        (tmp_path / f"a{number}" / "adapter_config.json").touch()
    found = refusal("--adapters-folder", str(tmp_path), "--adapter", "one=/too/many")
    assert isinstance(found, ConfigError)
    assert found.message == "257 adapters to measure with, limit 256: give a few, of different sizes"
    assert not asked


def test_an_adapter_that_cannot_be_read_is_named_with_its_path(asked: list[running.Request], tmp_path: Path) -> None:
    assert refusal("--adapter", "x=/nope").message.startswith("adapter x (/nope): ")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "adapter_config.json").write_text("no json")
    found = refusal("--adapters-folder", str(tmp_path))
    assert isinstance(found, InputFileError)
    assert found.message.startswith(f"adapter odd ({tmp_path}/odd): ")
    assert not asked


def test_an_engine_that_is_down_is_named_by_its_address(tmp_path: Path) -> None:
    found = refusal("--out", str(tmp_path / "p.json"))
    assert isinstance(found, TargetError)
    assert found.message.startswith("http://127.0.0.1:1: ")
    assert found.code == "connect_failed"


@pytest.fixture
def _sigterm_is_ours() -> Iterator[None]:
    """Without the verb's own handler, the signal fails the test and not the run of all tests."""
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("SIGTERM was not handled"))
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_sigterm_is_ours")
def test_sigterm_cleans_up_once_writes_no_profile_and_ends_with_143(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    async def answer(*_: object) -> running.Result:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(5)
            raise AssertionError
        finally:
            steps.append("cleaning")
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            steps.append("cleaned")

    monkeypatch.setattr(running, "calibrate", answer)
    result = invoke("--out", str(tmp_path / "p.json"))
    assert result.exit_code == 143, result.output
    assert steps == ["cleaning", "cleaned"]
    assert "no profile was written" in result.stderr
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_keys_come_from_variables_that_are_set(
    asked: list[running.Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "NOT_SET" in refusal("--key-env", "NOT_SET").message
    monkeypatch.setenv("ENGINE_KEY", "secret")
    assert invoke("--key-env", "ENGINE_KEY", "--out", str(tmp_path / "p.json")).exit_code == 0
    assert asked[0].target.api_key == "secret"


@pytest.mark.parametrize(
    "words",
    [
        ("--engine", "https://host"),
        ("--engine", "http://user:secret@host:1"),
        ("--budget", "soon"),
        ("--budget", "-5s"),
        ("--budget", "0s"),
        ("--slots", "0"),
    ],
)
def test_what_cannot_be_is_a_usage_error_and_is_not_echoed(
    words: tuple[str, ...], asked: list[running.Request]
) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert "secret" not in result.output
    assert not asked


def test_a_profile_that_cannot_be_written_is_said_before_anything_is_measured(
    asked: list[running.Request], tmp_path: Path
) -> None:
    for out in (tmp_path / "no" / "p.json", tmp_path):
        found = refusal("--out", str(out))
        assert isinstance(found, ConfigError)
        assert str(out) in found.message
    assert not asked
