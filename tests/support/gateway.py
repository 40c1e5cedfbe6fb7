"""A real gateway process under test: its files, its start, its deaths, and its record afterwards."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx2

from loraledger.adapters import content_digest
from loraledger.adapters.reading.files import CONFIG_NAME, WEIGHTS_NAME
from loraledger.conductor.reading import open_record
from loraledger.config import hash_key
from loraledger.record.tables import Row, TableName

START_LIMIT_S = 60.0


_PORTS = itertools.cycle(range(20_000, 32_000))
"""Below those that the kernel gives out by itself, so that nobody is given one between its choice and its use."""
next(itertools.islice(_PORTS, secrets.randbelow(12_000), None))  # other runs of the tests begin elsewhere


def free_port() -> int:
    """A loopback port that nobody listens on now, another one each time."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def tenant(name: str, adapters: list[str], **more: Any) -> dict[str, Any]:
    """A tenant of the settings whose key is ``key-NAME``."""
    return {"name": name, "key_hashes": [hash_key(f"key-{name}")], "adapters": adapters, **more}


def replica(name: str, url: str, **more: Any) -> dict[str, Any]:
    """A replica of the settings with the engine flags that the tests use: 2 slots, 4 host entries."""
    return {"name": name, "url": url, "slots": 2, "host_entries": 4, **more}


def digest_of(folder: Path) -> str:
    """Identity of what an adapter folder holds."""
    return content_digest([folder / CONFIG_NAME, folder / WEIGHTS_NAME])


class GatewayProcess:
    """``loraledger serve`` as a process of its own. ``settings`` lack only ports and the record directory."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.record = folder / "record"
        self.port, self.control_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.control = f"http://127.0.0.1:{self.control_port}"
        self.config = folder / "loraledger.yaml"
        self.process: subprocess.Popen[bytes] | None = None
        self.program: list[str] = ["-m", "loraledger.cli.main"]
        """What Python is told to run."""
        self._settings = dict(settings)

    def start(self, replicas_up: int) -> Self:
        """Start it and wait until ``replicas_up`` replicas are up (1 at least, so that it answers)."""
        own = {
            "listen": {"port": self.port},
            "control": {"port": self.control_port},
            "record": {"dir": str(self.record), "segment_bytes": "4MiB"},
        }
        self.config.write_text(json.dumps({**own, **self._settings}), encoding="utf-8")
        with (self.folder / "gateway.log").open("ab") as log:
            command = [sys.executable, *self.program, "serve", "--config", str(self.config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONHASHSEED": "7"})
        self.wait(lambda: len(self.summary().get("replicas_up", ())) >= replicas_up, f"{replicas_up} replicas to be up")
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def summary(self) -> dict[str, Any]:
        """``/api/summary``; without ``replicas_up`` while nobody listens."""
        try:
            reply: dict[str, Any] = httpx2.get(f"{self.control}/api/summary", timeout=10.0).json()
        except httpx2.TransportError:
            return {}
        return reply

    def api(self, path: str) -> Any:
        """A document of the control plane."""
        return httpx2.get(f"{self.control}{path}", timeout=20.0).json()

    def wait(self, condition: Any, what: str, limit_s: float = START_LIMIT_S) -> None:
        """Wait until ``condition()`` holds; AssertionError with the log's end when it does not in time."""
        deadline = time.monotonic() + limit_s
        while not condition():
            died = self.process is not None and self.process.poll() is not None
            if died or time.monotonic() > deadline:
                raise AssertionError(f"waited for {what}{' (the process died)' if died else ''}:\n{self.log()[-4000:]}")
            time.sleep(0.05)

    def lose_copy(self, adapter: Path) -> None:
        """Delete the stored copy of the adapter in this folder, as somebody with the operator's rights could."""
        copy = self.folder / "store" / digest_of(adapter)
        copy.chmod(0o700)
        shutil.rmtree(copy)

    def log(self) -> str:
        """Everything that it logged."""
        return (self.folder / "gateway.log").read_text(encoding="utf-8", errors="replace")

    def stop(self) -> int:
        """SIGTERM and wait for the drain; returns the exit code."""
        if self.process is None or self.process.poll() is not None:
            return self.process.returncode if self.process is not None else 0
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def kill9(self) -> None:
        """End it without a word."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def rows(self, table: TableName = "requests") -> list[Row]:
        """All rows of a table, oldest first."""
        with open_record(self.record) as reader:
            return reader.rows(table)[::-1]

    def verify(self, hash_seed: str = "31337") -> str:
        """Step the journal through a fresh kernel in another process with another hash seed; returns its words."""
        done = subprocess.run(
            [sys.executable, "-m", "loraledger.cli.main", "verify", "--record", str(self.record)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
