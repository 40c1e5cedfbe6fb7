"""The demo's processes and files: adapters, settings, two emulators, one gateway.

Adapters are real folders: a PEFT configuration and a safetensors file of the true size for a 1B-class model, whose data is a sparse
hole, so that 24 of them cost a few hundred KiB of disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import httpx2

from loraledger.cli.demo.workload import Tenant
from loraledger.errors import ConfigError, TargetError

RANKS = (8, 16, 32, 64)
NAMES = ("support", "sql", "legal", "triage", "summary", "tone", "extract", "route")
TENANTS = ("acme", "birch", "cedar")
LAYERS, HIDDEN, INNER, KV = 16, 2048, 8192, 512
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
SLOTS, HOST_ENTRIES = 4, 8
START_LIMIT_S = 30.0


class DemoFleet:
    """Everything that the demo starts; leaving the context stops it all, the gateway by SIGTERM so that it drains."""

    def __init__(self, folder: Path, policy: str, speed: float) -> None:
        self.folder = folder
        self.policy = policy
        self.speed = speed
        self.ports = _free_ports(4)
        self.url = f"http://127.0.0.1:{self.ports[2]}"
        self.control_url = f"http://127.0.0.1:{self.ports[3]}"
        self.tenants = tuple(
            Tenant(name, f"demo-key-{name}", tuple(f"{name}/{job}" for job in NAMES)) for name in TENANTS
        )
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            config = self._write_files()
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be used: {error.strerror}; give --keep another folder") from error
        try:
            for number, port in enumerate(self.ports[:2], 1):
                self._start(
                    f"emulator-r{number}",
                    *("loraledger.engines.emulator", "--port", str(port), "--slots", str(SLOTS)),
                    *("--host-entries", str(HOST_ENTRIES), "--speed", str(self.speed)),
                )
            self._start("gateway", "loraledger.cli.main", "serve", "--config", str(config))
            self._wait_until_ready()
        except BaseException:  # an interrupt too: what was started must not outlive the demo
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if (gateway := self._processes.get("gateway")) is not None:
            gateway.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed below
                gateway.wait(timeout=40)
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _start(self, name: str, module: str, *arguments: str) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LORALEDGER_")}
        command = [sys.executable, "-m", module, *arguments]
        self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)  # noqa: S603 - our own modules
        log.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise TargetError(f"the {name} of the demo ended at its start: {self._last_words(name)}")
            try:
                summary = httpx2.get(f"{self.control_url}/api/summary", timeout=1.0, trust_env=False).json()
                if summary["replicas_up"] == ["r1", "r2"]:
                    return
            except (httpx2.HTTPError, ValueError, KeyError):
                pass  # not listening yet
            time.sleep(0.1)
        raise TargetError(
            f"the demo's fleet was not ready within {START_LIMIT_S:.0f} s; the gateway's log ends with: "
            f"{self._last_words('gateway')}"
        )

    def _last_words(self, name: str) -> str:
        text = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return text.strip().rpartition("\n")[2] or "(nothing)"

    def _write_files(self) -> Path:
        if (self.folder / "record").exists():
            raise ConfigError(f"{self.folder} has the record of an earlier demo: give --keep another folder")
        adapters = self.folder / "adapters"
        entries = []
        for number, (tenant, job) in enumerate((t, j) for t in TENANTS for j in NAMES):
            path = adapters / tenant / job
            _write_adapter(path, RANKS[number % len(RANKS)], number)
            entries.append({"name": f"{tenant}/{job}", "path": str(path), "tenants": [tenant]})
        config = self.folder / "loraledger.yaml"
        # JSON is YAML: no writer is needed, and the file is a valid example either way.
        config.write_text(json.dumps(self._settings(entries), indent=2), encoding="utf-8")
        return config

    def _settings(self, adapters: list[dict[str, Any]]) -> dict[str, Any]:
        from loraledger.config import hash_key

        priors = {"load_bytes_per_s": "760MB/s", "load_overhead": "6ms", "activation": "8ms", "itl": "7ms"}
        return {
            "base": {"names": ["base"]},
            "listen": {"port": self.ports[2]},
            "control": {"port": self.ports[3]},
            "replicas": [
                {
                    "name": f"r{number}",
                    "url": f"http://127.0.0.1:{port}",
                    "engine": "emulator",
                    "slots": SLOTS,
                    "host_entries": HOST_ENTRIES,
                    "priors": priors | {"prefill_tokens_per_s": 40_000},
                }
                for number, port in enumerate(self.ports[:2], 1)
            ],
            "adapters": {"list": adapters},
            "tenants": [
                {"name": t.name, "key_hashes": [hash_key(t.key)], "adapters": ["*"], "limits": {"concurrency": 256}}
                for t in self.tenants
            ],
            "policy": {"name": self.policy},
            "record": {"dir": str(self.folder / "record"), "segment_bytes": "16MiB"},
        }


def _write_adapter(path: Path, rank: int, number: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [name.rpartition(".")[2] for name in MODULES],
        "task_type": "CAUSAL_LM",
        "revision": f"demo-{number}",
    }
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for layer in range(LAYERS):
        for module, (wide_in, wide_out) in MODULES.items():
            for part, shape in (("A", (rank, wide_in)), ("B", (wide_out, rank))):
                size = 2 * shape[0] * shape[1]
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{part}.weight"
                header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
                offset += size
    text = json.dumps(header).encode()
    with (path / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def _free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on now, all different: each is held until all are found."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
