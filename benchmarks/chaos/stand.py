"""What the faults are done to: a gateway on a disk and a clock of its own, emulated replicas, and, if asked for, vLLM servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import httpx2

from benchmarks.chaos.clock import SteppedClock
from benchmarks.chaos.disk import Disk
from benchmarks.processes import ROOT

sys.path.insert(0, str(ROOT / "tests"))  # processes under test are those of the tests

from benchmarks.chaos.traffic import PROMPTS
from e2e.fleet import Emulator, expected_text, parse_metrics, write_adapters
from support.gateway import GatewayProcess, replica, tenant
from vllm.engine import Engine, ensure_model
from vllm.test_gateway import References, ask_directly

TENANTS = ("acme", "birch", "cedar")
ADAPTERS = 8


class Replica(Protocol):
    """What can be done to one."""

    name: str
    url: str

    def start(self) -> object:
        """Begin to run it."""

    def wait(self) -> None:
        """Wait until it answers."""

    def kill9(self) -> None:
        """End it without a word."""

    def end(self) -> None:
        """Ask it to end, and wait."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""


class EmulatedReplica(Emulator):
    """A fast one, as its own process."""

    def __init__(self, name: str, folder: Path, speed: float) -> None:
        super().__init__(folder, speed=speed)
        self.name = name

    def wait(self) -> None:
        """It listens a moment after its start, which the gateway waits for anyway."""

    def end(self) -> None:
        """SIGTERM."""
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill9()

    def signal(self, number: signal.Signals) -> None:
        """Freeze or thaw it."""
        assert self._process is not None
        self._process.send_signal(number)


class RealReplica:
    """A vLLM server."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.url, self._engine = name, engine.url, engine

    def start(self) -> None:
        """25 s before it answers."""
        self._engine.launch()

    def wait(self) -> None:
        """Until its health is good."""
        self._engine.wait_healthy()

    def kill9(self) -> None:
        """All of its processes."""
        self._engine.kill9()

    def end(self) -> None:
        """SIGTERM to the API server, which ends the others."""
        self._engine.stop()

    def signal(self, number: signal.Signals) -> None:
        """Freeze or thaw its process group."""
        os.killpg(self._engine.process.pid, number)


class Gateway(GatewayProcess):
    """Started with a clock that can step."""

    def __init__(self, folder: Path, settings: dict[str, Any], clock: SteppedClock) -> None:
        super().__init__(folder, settings)
        self._clock = clock

    def launch(self) -> None:
        """Begin to run it, under that clock. In the thread that starts replicas, so that none of them gets it too."""
        with self._clock.worn():
            super().start(0)  # which waits for nothing

    def wait_up(self, replicas_up: int) -> None:
        """Wait until so many replicas are up. AssertionError when they are not in time."""
        self.wait(lambda: len(self.summary().get("replicas_up", ())) >= replicas_up, f"{replicas_up} replicas to be up")

    def start(self, replicas_up: int) -> Self:
        """Both."""
        self.launch()
        self.wait_up(replicas_up)
        return self

    def frames_dropped(self) -> float:
        """Frames that the running process could not journal."""
        page = parse_metrics(httpx2.get(f"{self.control}/metrics", timeout=5.0).text)
        return page["loraledger_journal_dropped_frames_total"][0][1]


@dataclass
class Stand:
    """Everything together. ``references``: what the real server answers to who asks it directly."""

    gateway: Gateway
    replicas: list[Replica]
    adapters: dict[str, Path]
    real: frozenset[str]
    references: References
    clock: SteppedClock
    disk: Disk

    @property
    def models(self) -> list[str]:
        """What is called."""
        return [*self.adapters, "base"]

    def words(self, where: str, model: str, prompt: str, tokens: int) -> str | None:
        """What ``model`` says there, as far as that is certain; None where it is not.

        On CPU a base request that shares a step with adapters is answered with one's weights (vLLM pull requests 48421, 49656).
        """
        if where in self.real:
            return None if model == "base" else self.references[model, prompt].certain
        return expected_text(self.adapters, model, prompt, tokens)


@contextmanager
def stand(folder: Path, *, engines: int, emulators: int, speed: float, park_s: float) -> Iterator[Stand]:
    """A running one: so many vLLM servers and so many emulators, which run at ``speed``.

    ``park_s``: how long the gateway refuses an adapter whose use coincided with two exits of engines within as long. Its default is
    10 minutes, in which each adapter would come to that here: engines are killed all the while, and by none of them.
    """
    with ExitStack() as stack:
        clock = SteppedClock(folder)
        disk = Disk(folder / "disk.img", folder / "record")
        stack.callback(disk.close)
        replicas: list[Replica] = []
        references: References = {}
        if engines:
            model = ensure_model()
            adapters = dict(list(model.adapters.items())[:ADAPTERS])
            started = [Engine(model.base, folder / f"vllm-{number}.log") for number in range(engines)]
            for number, engine in enumerate(started):
                stack.callback(engine.stop)
                engine.launch()
                replicas.append(RealReplica(f"vllm-{number}", engine))
            for engine in started:
                engine.wait_healthy()
            references = _references(started[0], adapters)
        else:
            adapters = write_adapters(folder / "adapters", [f"a{number}" for number in range(ADAPTERS)])
        emulated = [EmulatedReplica(f"emulator-{number}", folder, speed) for number in range(emulators)]
        replicas += [stack.enter_context(one) for one in emulated]
        gateway = Gateway(folder, _settings(folder, replicas, adapters, park_s), clock)
        stack.enter_context(gateway).start(len(replicas))
        known = frozenset(replica.name for replica in replicas if isinstance(replica, RealReplica))
        yield Stand(gateway, replicas, adapters, known, references, clock, disk)


def _settings(folder: Path, replicas: list[Replica], adapters: dict[str, Path], park_s: float) -> dict[str, Any]:
    return {
        "base": {"names": ["base"]},
        "replicas": [replica(one.name, one.url) for one in replicas],
        "adapters": {"list": [{"name": name, "path": str(path)} for name, path in adapters.items()]},
        "tenants": [tenant(name, ["*"]) for name in TENANTS],
        "limits": {"scrape_interval": "500ms", "upstream_first_byte_timeout": "30s", "park": f"{park_s:g}s"},
        "record": {"dir": str(folder / "record"), "segment_bytes": "1MiB", "fsync_interval": "200ms"},
    }


def _references(engine: Engine, adapters: dict[str, Path]) -> References:
    found: References = {}
    with httpx2.Client(base_url=engine.url, timeout=60.0, trust_env=False) as client:
        for name, path in adapters.items():
            client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}).raise_for_status()
            for prompt in PROMPTS:
                found[name, prompt] = ask_directly(client, name, prompt)
            client.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
    return found
