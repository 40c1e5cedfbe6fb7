"""``loraledger check``: what is wrong with settings, adapters and replicas, and the exit code that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.fleet import Emulator, eventually, settings_for, write_adapters
from support.gateway import free_port, replica

from .conftest import Cli, Fleet, write


@pytest.fixture
def good(tmp_path: Path, fleet: Fleet) -> dict[str, Any]:
    """Settings that agree with the running replicas."""
    return settings_for(fleet.emulators, fleet.adapters, control={"port": free_port()})


def check(cli: Cli, tmp_path: Path, settings: dict[str, Any], *words: str) -> Any:
    return cli("check", "--config", write(tmp_path / "checked.yaml", settings), *words)


def test_a_good_fleet_passes_with_its_warnings_shown(cli: Cli, tmp_path: Path, good: dict[str, Any]) -> None:
    done = check(cli, tmp_path, good)
    assert done.code == 0
    assert done.out.splitlines()[-1] == "4 adapters, 3 tenants, 2/2 replicas reached"
    assert done.out.count("anyone who reaches this port can load and unload adapters") == 2
    assert "problem" not in done.out


def test_strict_fails_for_a_load_route_that_is_open(cli: Cli, tmp_path: Path, good: dict[str, Any]) -> None:
    done = check(cli, tmp_path, good, "--strict")
    assert done.code == 5
    assert "warnings (strict)" in done.err


def test_a_document_holds_each_finding(cli: Cli, tmp_path: Path, good: dict[str, Any]) -> None:
    items = check(cli, tmp_path, good, "--json").items("check")
    assert {item["severity"] for item in items} == {"warning"}
    assert {item["subject"] for item in items} >= {"replica r1", "replica r2"}


def test_a_replica_that_asks_for_a_key_is_no_warning_and_a_wrong_key_is_a_problem(
    cli: Cli, tmp_path: Path, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "right")
    with Emulator(tmp_path, more=["--api-key", "right"]) as emulator:
        settings = settings_for([], fleet.adapters)
        settings["replicas"] = [replica("r1", emulator.url, key={"env": "ENGINE_KEY"})]
        eventually(lambda: check(cli, tmp_path, settings).code == 0, "the replica to listen")
        assert "anyone who reaches" not in check(cli, tmp_path, settings).out
        monkeypatch.setenv("ENGINE_KEY", "wrong")
        done = check(cli, tmp_path, settings)
    assert done.code == 5
    assert "problem: replica r1" in done.out


@pytest.mark.parametrize(
    ("section", "changes", "complaint"),
    [
        ("replicas", {"slots": 3, "host_entries": 6}, "the engine has 2 slots, configured are 3"),
        ("replicas", {"max_rank": 1}, "rank 4 is above every replica's max_rank"),
        ("base", {"names": ["other"]}, "serves base, not other"),
        ("adapters", {"list": [{"name": "gone", "path": "/nowhere"}]}, "does not exist: correct the path"),
    ],
)
def test_what_the_fleet_does_not_bear_out_is_exit_code_5(
    cli: Cli, tmp_path: Path, good: dict[str, Any], section: str, changes: dict[str, Any], complaint: str
) -> None:
    for part in good["replicas"] if section == "replicas" else [good[section]]:
        part.update(changes)
    done = check(cli, tmp_path, good)
    assert done.code == 5
    assert complaint in done.out
    assert "problems" in done.err


def test_an_unreachable_replica_is_exit_code_4_and_named(cli: Cli, tmp_path: Path, good: dict[str, Any]) -> None:
    good["replicas"][1]["url"] = f"http://127.0.0.1:{free_port()}"
    done = check(cli, tmp_path, good)
    assert done.code == 4
    assert "1/2 replicas reached" in done.out
    assert done.err == "loraledger: not reached: r2\n"
    assert check(cli, tmp_path, good, "--offline").code == 0


def test_an_unknown_policy_is_found_without_serving(cli: Cli, tmp_path: Path, good: dict[str, Any]) -> None:
    done = check(cli, tmp_path, {**good, "policy": {"name": "bounded-afinity"}}, "--offline")
    assert done.code == 3
    assert "known: bounded-affinity" in done.err
    done = check(cli, tmp_path, {**good, "policy": {"name": "round-robin", "params": {"x": 1}}}, "--offline")
    assert done.code == 3


def test_a_folder_of_adapters_is_looked_through(cli: Cli, tmp_path: Path, settings: dict[str, Any]) -> None:
    write_adapters(tmp_path / "adapters", ["a0", "a1"])
    (tmp_path / "adapters" / "a1" / "adapter_model.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/"
    )
    settings["adapters"] = {"folder": "adapters"}
    done = check(cli, tmp_path, settings, "--offline")
    assert done.code == 5
    assert "a1" in done.out
    assert "Git LFS pointer" in done.out
    assert "1 adapters" in done.out


def test_a_secret_that_is_not_there_is_named(cli: Cli, tmp_path: Path, settings: dict[str, Any]) -> None:
    settings["replicas"][0]["key"] = {"env": "NO_SUCH_KEY"}
    done = check(cli, tmp_path, settings)
    assert done.code == 3
    assert "NO_SUCH_KEY" in done.err
