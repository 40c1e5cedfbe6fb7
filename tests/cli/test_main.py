"""What holds for every verb: version, usage errors, wrong settings, and readers that leave early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loraledger import __version__

from .conftest import Cli, Fleet, write

READERS = [
    ("check", "--offline"),
    ("config", "show"),
    ("get", "requests"),
    ("get", "decisions"),
    ("get", "replicas"),
    ("get", "adapters"),
    ("get", "tenants"),
    ("explain", "x"),
    ("signals",),
    ("diagnose",),
    ("advise",),
    ("query", "SELECT 1 AS x"),
    ("verify",),
    ("serve",),
]
names = pytest.mark.parametrize("verb", READERS, ids=" ".join)


def test_version_goes_to_stdout(cli: Cli) -> None:
    done = cli("--version")
    assert done == (0, f"loraledger {__version__}\n", "")


def test_help_of_every_verb_is_quick_to_reach_and_names_the_exit_codes(cli: Cli) -> None:
    done = cli("--help")
    assert done.code == 0
    for word in ("serve", "check", "demo", "get", "explain", "verify", "config", "emulate", "Exit codes"):
        assert word in done.out
    for verb, *_ in READERS:
        assert cli(verb, "--help").code == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nope"], "No such command 'nope'"),
        (["get"], ""),
        (["get", "nothing"], "No such command 'nothing'"),
        (["explain"], "Missing argument"),
        (["get", "requests", "--limit", "0"], "greater than or equal to 1"),
        (["get", "requests", "--limit", "many"], "valid integer"),
        (["serve", "--log-level", "loud"], "'loud'"),
        (["check", "--strictly"], "No such option"),
        (["demo", "--speed", "1000"], "20"),
        (["demo", "--policy", "nope"], "known: bounded-affinity"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_hint(cli: Cli, words: list[str], complaint: str) -> None:
    done = cli(*words)
    assert done.code == 2
    assert complaint in done.err


@names
def test_without_settings_the_ways_to_give_them_are_named(cli: Cli, verb: tuple[str, ...]) -> None:
    done = cli(*verb)
    assert done.code == 3
    assert done.out == ""
    for way in ("--config", "LORALEDGER_CONFIG", "./loraledger.yaml"):
        assert way in done.err


@names
def test_a_file_that_does_not_exist_is_named(cli: Cli, verb: tuple[str, ...]) -> None:
    done = cli(*verb, "--config", "missing.yaml")
    assert done.code == 3
    assert "missing.yaml does not exist" in done.err


@names
def test_bad_yaml_is_told_with_its_line(cli: Cli, tmp_path: Path, verb: tuple[str, ...]) -> None:
    (tmp_path / "loraledger.yaml").write_text("base: {names: [base]}\nreplicas: [\n", encoding="utf-8")
    done = cli(*verb)
    assert done.code == 3
    assert "loraledger.yaml:" in done.err
    assert "not valid YAML" in done.err


@names
def test_an_unknown_key_is_told_with_the_nearest_match_and_all_problems_at_once(
    cli: Cli, tmp_path: Path, settings: dict[str, Any], verb: tuple[str, ...]
) -> None:
    settings["replicas"][0]["slot"] = settings["replicas"][0].pop("slots")
    settings["recrd"] = {}
    write(tmp_path / "loraledger.yaml", settings)
    done = cli(*verb)
    assert done.code == 3
    assert "replicas[0].slot: unknown field; did you mean 'slots'?" in done.err
    assert "recrd: unknown field; did you mean 'record'?" in done.err
    assert "replicas[0].slots: is missing" in done.err


@names
def test_an_unknown_variable_is_told_with_the_nearest_match(
    cli: Cli, written: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    monkeypatch.setenv("LORALEDGER_LISTEN__PROT", "8000")
    done = cli(*verb)
    assert done.code == 3
    assert "LORALEDGER_LISTEN__PROT: no such setting; did you mean LORALEDGER_LISTEN__PORT?" in done.err


def test_a_segment_too_small_for_one_event_is_refused(cli: Cli, tmp_path: Path, settings: dict[str, Any]) -> None:
    write(tmp_path / "loraledger.yaml", {**settings, "record": {"segment_bytes": "64KiB"}})
    done = cli("config", "show")
    assert done.code == 3
    assert "record.segment_bytes" in done.err


@pytest.mark.parametrize(
    "words",
    [
        ("get", "requests"),
        ("get", "requests", "--json"),
        ("get", "decisions"),
        ("verify",),
        ("signals",),
        ("diagnose", "--json"),
        ("query", "SELECT * FROM requests", "--csv"),
    ],
    ids=" ".join,
)
def test_a_reader_of_the_output_that_leaves_is_met_without_a_word(fleet: Fleet, words: tuple[str, ...]) -> None:
    read, written = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "loraledger.cli.main", *words, "--record", str(fleet.gateway.record)]
    done = subprocess.run(line, stdout=written, stderr=subprocess.PIPE, text=True)
    os.close(written)
    assert done.stderr == ""
    assert done.returncode in (0, 1)


def test_a_full_disk_under_the_output_is_told_in_one_line(fleet: Fleet) -> None:
    line = [sys.executable, "-m", "loraledger.cli.main", "get", "requests", "--record", str(fleet.gateway.record)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("loraledger: ")
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
