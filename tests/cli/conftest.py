"""The verbs run in this process, by the entry point; one small fleet serves all tests that need one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from e2e.fleet import Emulator, ask, eventually, mixed, play, settings_for, write_adapters
from loraledger.cli.main import main
from support.gateway import GatewayProcess


class Done(NamedTuple):
    """How a verb ended."""

    code: int
    out: str
    err: str

    def items(self, kind: str) -> Any:
        """What its one JSON document holds."""
        document = json.loads(self.out)
        assert (document["schema_version"], document["kind"]) == (1, kind)
        return document["items"]

    def table(self) -> list[list[str]]:
        """Its lines as words; for tables whose cells hold no blank."""
        return [line.split() for line in self.out.splitlines()]


class Cli(Protocol):
    """Runs ``loraledger WORDS``."""

    def __call__(self, *words: str | Path) -> Done: ...


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """The command line in an empty working directory, without settings in the environment."""
    for name in [name for name in os.environ if name.startswith("LORALEDGER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["loraledger", *map(str, words)])
        code: Any = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Done(code, out, err)

    return run


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """A small valid fleet whose replica nobody runs."""
    return {
        "base": {"names": ["base"]},
        "replicas": [{"name": "r1", "url": "http://127.0.0.1:1", "slots": 2, "host_entries": 4}],
        "adapters": {"list": [{"name": "a0", "path": str(tmp_path / "adapters" / "a0")}]},
        "tenants": [{"name": "acme", "key_hashes": ["0" * 64], "adapters": ["*"]}],
    }


@pytest.fixture
def written(tmp_path: Path, settings: dict[str, Any]) -> Path:
    """``settings`` as ``loraledger.yaml`` in the working directory, with the adapter that they name."""
    write_adapters(tmp_path / "adapters", ["a0"])
    return write(tmp_path / "loraledger.yaml", settings)


def write(path: Path, settings: dict[str, Any]) -> Path:
    """JSON is YAML."""
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


def on_a_terminal(folder: Path, columns: int, *words: str) -> tuple[bytes, bytes]:
    """Runs ``loraledger WORDS``; its stdout, and all that the terminal showed which is its stderr."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    command = [sys.executable, "-m", "loraledger.cli.main", *words]
    process = subprocess.Popen(command, cwd=folder, stderr=slave, stdout=subprocess.PIPE, env=environment)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that its last writer left
        while piece := os.read(master, 65536):
            shown += piece
    os.close(master)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out, shown


class Fleet(NamedTuple):
    """A gateway that serves, and what it was asked: 20 requests that ended well, ``slow`` that has not ended."""

    gateway: GatewayProcess
    emulators: tuple[Emulator, Emulator]
    adapters: dict[str, Path]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two emulated replicas behind a gateway, for tests that read."""
    folder = tmp_path_factory.mktemp("fleet")
    adapters = write_adapters(folder / "adapters", [f"a{number}" for number in range(4)])
    with ExitStack() as stack:
        first, second = (stack.enter_context(Emulator(folder)) for _ in range(2))
        gateway = stack.enter_context(GatewayProcess(folder, settings_for((first, second), adapters)))
        gateway.start(replicas_up=2)
        asyncio.run(play(gateway, mixed([*adapters, "base"], 20, seed=20)))
        for adapter in adapters:  # each replica has shown its slots once it used an adapter
            ask(gateway, adapter)
        eventually(lambda: gateway.summary()["open_requests"] == 0, "the last request to end")
        yield Fleet(gateway, (first, second), adapters)
