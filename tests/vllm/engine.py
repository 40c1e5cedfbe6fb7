"""A real vLLM server on CPU as a test fixture: start, health, kill, restart, log.

The server runs in its own virtual environment (`.venv-vllm`, made by `tools/vllm_env.sh`); this side knows it only by
its address. What the settings below buy, measured on two cores with the tiny model of `model.py`:

- Healthy 25 s after the launch, 30 s for two launched together. Nearly all of it is three processes (API server,
  engine core, worker) that each import torch and vLLM for 8 s, one after the other; vLLM spawns them and takes no
  fork on CPU. About 2 GiB of memory per engine.
- `TORCHDYNAMO_DISABLE=1`: `--enforce-eager` does not cover the sampler's helper for logprobs, which is compiled with
  g++ at the first request that asks for them. That request then takes 18 s and stalls every other; 0.05 s without.
- One OpenMP thread each, unbound (`VLLM_CPU_OMP_THREADS_BIND=nobind`): two engines bound by default would share the
  same cores and leave none to the code under test.
- Its own process *group*, not its own session. A Linux kernel with autogroups shares CPU time per session, and an
  engine in a session of its own froze a busy neighbour for up to 4.4 s; in one session no gap exceeded 50 ms. A group
  is all that killing the three processes at once needs.
- `--dtype float32`: vLLM would turn the float32 weights into bfloat16, in which the greedy answer can depend on the
  batch that a request runs in.
- Two slots, host cache of four: six adapters are enough to see evictions from both.
- `python -P` and a neutral working directory: this package is itself called `vllm`.

Hazard for tests that compare texts: on CPU, a *base* request that shares a step with adapter requests gets the weights
of the adapter in the last slot. The torch fallback of the LoRA kernels indexes the slots with -1, "no adapter", and
does not skip it as the GPU kernels do (vLLM pull requests 48421 and 49656, open). Wrong KV blocks of it are kept, under
the base model's name, in the prefix cache. Adapter requests are right in any mix. So compare base answers only
when nothing else runs on that engine, or with prompts under one block (128 tokens) after the mix.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2

from support.gateway import free_port

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-vllm"
PYTHON = VENV / "bin/python"
MODEL_CACHE = ROOT / ".cache/vllm-model"
REMEDY = "run `make test-vllm`, which makes the environment with tools/vllm_env.sh first"

ARGUMENTS = (
    *("--served-model-name", "base"),
    *("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "64"),
    *("--max-model-len", "1024", "--dtype", "float32", "--enforce-eager"),
)
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
STOP_LIMIT_S = 20.0  # a stop by SIGTERM takes 1.5 s


@dataclass(frozen=True)
class Model:
    """Where the tiny base model and its adapters lie; `too_wide` has rank 128, which the engines refuse."""

    base: Path
    adapters: dict[str, Path]
    too_wide: Path


def require_environment() -> None:
    """Raise RuntimeError with the remedy when the engine's virtual environment is missing or half made."""
    if not (VENV / ".complete").exists():
        raise RuntimeError(f"there is no complete {VENV}: {REMEDY}")


def ensure_model(cache: Path = MODEL_CACHE) -> Model:
    """Build the model in the engine's environment when it is missing (5 s) and tell where its parts are."""
    require_environment()
    built = subprocess.run(
        [PYTHON, "-P", Path(__file__).with_name("model.py"), cache], capture_output=True, text=True, check=False
    )
    if built.returncode != 0:
        raise RuntimeError(f"building the test model failed:\n{built.stderr}")
    folder = Path(built.stdout.strip())
    names: list[str] = list(json.loads((folder / "manifest.json").read_text())["adapters"])
    adapters = {name: folder / name for name in names}
    too_wide = adapters.pop("too-wide")
    return Model(folder / "base", adapters, too_wide)


class Engine:
    """One vLLM server. `launch` and `wait_healthy` are apart so that several can start at once; `with` does both."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare, start nothing. `arguments` and `environment` come after the defaults and win over them."""
        self.port = free_port()
        self.log = log
        self._command = [str(PYTHON), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), *ARGUMENTS, *arguments]
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._environment = {**inherited, **ENVIRONMENT, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address without a trailing slash; it outlives restarts."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The API server, which leads the process group; RuntimeError before the first launch."""
        if self._process is None:
            raise RuntimeError("this engine was never launched")
        return self._process

    def launch(self) -> None:
        """Start the processes and return at once; the log goes on where it ended."""
        require_environment()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self.log.parent,
                process_group=0,
            )

    def wait_healthy(self, limit_s: float = 240.0) -> None:
        """Return when /health answers 200; RuntimeError with the log's end when it dies or takes over `limit_s`."""
        deadline = time.monotonic() + limit_s
        with httpx2.Client(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while not self._healthy(client):
                if not self.alive():
                    raise RuntimeError(f"vLLM exited with {self.process.returncode}:\n{self.log_tail()}")
                if time.monotonic() > deadline:
                    self.kill9()
                    raise RuntimeError(f"vLLM was not healthy after {limit_s:.0f} s:\n{self.log_tail()}")
                time.sleep(0.2)

    @staticmethod
    def _healthy(client: httpx2.Client) -> bool:
        try:
            return client.get("/health").status_code == 200
        except httpx2.TransportError:
            return False

    def alive(self) -> bool:
        """Whether the API server process runs. The engine core behind it may have died: ask /health."""
        return self._process is not None and self._process.poll() is None

    def forget_adapters(self) -> None:
        """Unload every registered name. Their weights stay in the host cache and slots until others push them out."""
        with httpx2.Client(base_url=self.url, trust_env=False) as client:
            for entry in client.get("/v1/models").raise_for_status().json()["data"]:
                if entry["parent"] is not None:
                    client.post("/v1/unload_lora_adapter", json={"lora_name": entry["id"]}).raise_for_status()

    def kill9(self) -> None:
        """End all processes of the engine at once, as a machine that loses power would."""
        with suppress(ProcessLookupError):  # the whole group is gone already
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Ask the server to end, then make sure that nothing of its group is left."""
        if self._process is None:
            return
        if self.alive():
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):  # then it is killed below
                self._process.wait(STOP_LIMIT_S)
        self.kill9()

    def restart(self, limit_s: float = 240.0) -> None:
        """End what runs and start again on the same port: a new process with an empty registry."""
        self.stop()
        self.launch()
        self.wait_healthy(limit_s)

    def log_tail(self, lines: int = 60) -> str:
        """Return the last lines of the log of all launches."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Self:
        self.launch()
        try:
            self.wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
