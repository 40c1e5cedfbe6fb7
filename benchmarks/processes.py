"""What the benchmarks of the whole gateway share: its process, its replicas' processes, and what the kernel accounts to them.

CPU time is utime + stime of ``/proc/PID/stat``: the whole process with all its threads, in ticks of 10 ms, without its children (a
compaction is one). Memory is ``/proc/PID/smaps_rollup``: RSS counts every page that is mapped in, PSS divides shared ones by
those who share them. Pages of the journal's segment count in both, as file pages: they are page cache that the kernel writes back.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2

from loraledger.config import hash_key

ROOT = Path(__file__).parents[1]
KEY = "benchmark-key"
TICKS = os.sysconf("SC_CLK_TCK")
START_LIMIT_S = 30.0


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(
    stack: ExitStack, log: Path, words: Sequence[str], *, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Run a program until ``stack`` unwinds, in a process group of its own: what it started ends with it."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            process_group=0,
        )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start(stack: ExitStack, folder: Path, *words: str) -> int:
    """Run a module of this tree until ``stack`` unwinds; returns its pid. Its output goes to ``folder``."""
    return launch(stack, folder / f"{words[0]}.log", [sys.executable, "-m", *words]).pid


def unwind_on_signals() -> None:
    """SIGTERM and SIGHUP end this program as Ctrl-C does: what it started is ended, its temporary folders go."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


class Gateway:
    """``loraledger serve`` in front of ``ports``, with ``adapters`` small adapters a0, a1, ... and one tenant.

    ``under``: the module that runs the verb, and its own words.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        ports: Sequence[int],
        adapters: int,
        slots: int,
        under: Sequence[str] = ("loraledger.cli.main",),
    ) -> None:
        self.port, self._control = free_port(), free_port()
        limits = {"concurrency": 4096, "queue": 4096}
        settings = {
            "base": {"names": ["base"]},
            "listen": {"port": self.port},
            "control": {"port": self._control},
            "replicas": [
                {"name": f"r{number}", "url": f"http://127.0.0.1:{port}", "slots": slots, "host_entries": 2 * slots}
                | {"max_seqs": 512, "max_in_flight": 1024}
                for number, port in enumerate(ports, 1)
            ],
            "adapters": {"list": [{"name": name, "path": str(path)} for name, path in _write(folder, adapters)]},
            "tenants": [{"name": "acme", "key_hashes": [hash_key(KEY)], "adapters": ["*"], "limits": limits}],
            "record": {"dir": str(folder / "record")},
        }
        config = folder / "loraledger.yaml"
        config.write_text(json.dumps(settings), encoding="utf-8")
        self._log = folder / f"{under[0]}.log"
        self.pid = start(stack, folder, *under, "serve", "--config", str(config))
        self.wait(len(ports))

    def wait(self, replicas: int) -> None:
        """Wait until so many replicas are up. Raises RuntimeError when they are not in time."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and running(self.pid):
            try:
                if len(self.summary()["replicas_up"]) == replicas:
                    return
            except httpx2.TransportError:
                pass  # not listening yet
            time.sleep(0.05)
        said = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"the gateway did not start (limit {START_LIMIT_S:.0f} s); it said:\n{said}")

    def summary(self) -> dict[str, Any]:
        """``/api/summary``."""
        found: dict[str, Any] = httpx2.get(
            f"http://127.0.0.1:{self._control}/api/summary", timeout=5.0, trust_env=False
        ).json()
        return found


def _write(folder: Path, count: int) -> list[tuple[str, Path]]:
    found = []
    for number in range(count):
        path = folder / "adapters" / f"a{number}"
        path.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "revision": str(number)}
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        module = "base_model.model.model.layers.0.self_attn.q_proj"
        header = json.dumps(
            {
                f"{module}.lora_A.weight": {"dtype": "BF16", "shape": [8, 8], "data_offsets": [0, 128]},
                f"{module}.lora_B.weight": {"dtype": "BF16", "shape": [8, 8], "data_offsets": [128, 256]},
            }
        ).encode()
        (path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(256))
        found.append((path.name, path))
    return found


def running(pid: int) -> bool:
    """Whether the process is there and has not ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def cpu_s(pid: int) -> float:
    """Seconds of CPU that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mib(pid: int) -> dict[str, float]:
    """MiB of the process: ``Rss``, ``Pss``, and its parts ``Pss_Anon`` and ``Pss_File``."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    parts = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return {name: parts[name] for name in ("Rss", "Pss", "Pss_Anon", "Pss_File")}


def spread(figures: Sequence[float]) -> str:
    """Median, and in brackets the lowest and highest."""
    return f"{statistics.median(figures):6.1f}  ({min(figures):.1f} .. {max(figures):.1f})"
