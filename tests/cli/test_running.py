"""``emulate`` and ``demo``: the verbs that run something."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from loraledger.record.tables import STATUSES

from .conftest import Cli


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--slots", "0"], "slots is 0: must be at least 1"),
        (["--slots", "8", "--host-entries", "4"], "host_entries is 4: must be at least slots (8)"),
        (["--speed", "0"], "speed is 0.0: must be above 0"),
        (["--max-rank", "0"], "max_rank is 0"),
        (["--slots", "two"], "valid integer"),
    ],
)
def test_an_emulator_that_cannot_be_is_refused_with_the_flag_that_is_wrong(
    cli: Cli, words: list[str], complaint: str
) -> None:
    done = cli("emulate", "--port", "0", *words)
    assert done.code == 2
    assert complaint in done.err


def test_emulate_needs_a_port_that_can_be(cli: Cli) -> None:
    assert cli("emulate").code == 2
    assert cli("emulate", "--port", "70000").code == 2


def test_emulate_on_a_taken_port_is_exit_code_4(cli: Cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = cli("emulate", "--port", str(port))
    assert done.code == 4
    assert f"cannot listen on 127.0.0.1:{port}" in done.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_emulate_says_where_it_listens_and_ends_when_asked(number: signal.Signals) -> None:
    words = [sys.executable, "-m", "loraledger.cli.main", "emulate", "--port", "0", "--slots", "3", "--speed", "5"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        body = {"model": "base", "prompt": "Hello", "max_tokens": 3}
        reply = httpx2.post(f"{url}/v1/completions", json=body, timeout=10.0).json()
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    assert reply["usage"]["completion_tokens"] == 3
    assert process.returncode == 0
    assert "Traceback" not in err


def test_the_demo_plays_and_reports(cli: Cli, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = cli("demo", "--seconds", "20", "--speed", "20", "--keep", "kept")
    assert done.code == 0
    for part in ("2 emulated replicas", "24 adapters", "3 tenants"):
        assert part in done.err
    sent = int(re.search(r"playing (\d+) requests of the Azure 2023 conversation trace", done.err)[1])  # type: ignore[index]
    statuses = re.search(r"^requests by status: (.*)$", done.out, re.MULTILINE)
    assert statuses is not None
    counts = {status: int(count) for status, count in (part.split() for part in statuses[1].split(", "))}
    assert set(counts) <= set(STATUSES)
    assert sum(counts.values()) == sent
    assert counts["ok"] == sent
    assert re.search(r"^adapter hit rate \(in a slot when decided\): \d+\.\d% of \d+$", done.out, re.MULTILINE)
    by_class = {line[0]: int(line[1]) for line in done.table() if line and line[0] in ("base", "gpu", "host", "disk")}
    assert sum(by_class.values()) == sent
    assert {"base", "gpu", "disk"} <= set(by_class)
    assert [line[0] for line in done.table() if len(line) == 6 and line[0] in ("r1", "r2")] == ["r1", "r2"]
    assert 1 <= len(re.findall(r"^decision \d+ \(bounded-affinity\): ", done.out, re.MULTILINE)) <= 3
    assert f"loraledger get requests --record {kept / 'record'}" in done.out
    listed = cli("get", "requests", "--json", "-n", "1000", "--record", kept / "record").items("requests")
    assert len(listed) == sent
    assert cli("check", "--offline", "--config", kept / "loraledger.yaml").code == 0
    assert cli("verify", "--record", kept / "record").code == 0
    again = cli("demo", "--keep", kept)
    assert again.code == 3
    assert "the record of an earlier demo: give --keep another folder" in again.err


def test_a_demo_that_cannot_start_says_why_and_leaves_nothing_running(cli: Cli, tmp_path: Path) -> None:
    done = cli("demo", "--keep", "/proc/nowhere")
    assert done.code == 3
    assert "/proc/nowhere cannot be used" in done.err
    file = tmp_path / "file"
    file.touch()
    assert cli("demo", "--keep", file).code == 2


def test_a_demo_whose_gateway_dies_at_its_start_shows_its_last_words(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loraledger.cli.demo import fleet

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(fleet, "_free_ports", lambda count: [taken.getsockname()[1]] * count)
        done = cli("demo", "--keep", tmp_path / "kept")
    assert done.code == 4
    assert "ended at its start: " in done.err
    assert "cannot listen on" in done.err or "address" in done.err
