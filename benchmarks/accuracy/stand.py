"""The test stand: real vLLM servers on one core, the gateway and the client on the other.

The engine, its API server and its worker are pinned together, as they would share a small machine; what the API server takes from
the engine's step is then part of the step, when it is calibrated and when it is judged. Hash seeds are fixed, because the order
in which vLLM moves the adapters of a batch is that of a Python set. Engines have the probe, which tells of their loads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT

sys.path.insert(0, str(ROOT / "probe/src"))  # the tests' client of the probe needs the probe's own package
sys.path.insert(0, str(ROOT / "tests"))  # the tests' engine is the one that this repository can start anywhere

from support.gateway import GatewayProcess, tenant
from vllm.engine import Engine as Engine
from vllm.engine import Model as Model
from vllm.engine import ensure_model
from vllm.probe_client import KEY, probed_engine

SLOTS, HOST_ENTRIES, MAX_SEQS, TOKEN_BUDGET, MAX_RANK = 4, 8, 8, 256, 64
ENGINE_CORES, OUR_CORES = {0}, {1}
TENANT = "acme"
PROBE_VARIABLE = "ACCURACY_PROBE_KEY"
PROBE_KEY = KEY
FLAGS = (
    *("--max-loras", str(SLOTS), "--max-cpu-loras", str(HOST_ENTRIES)),
    *("--max-num-seqs", str(MAX_SEQS), "--max-num-batched-tokens", str(TOKEN_BUDGET)),
)


def pin(cores: set[int]) -> None:
    """This process, and what it starts from here on, runs on ``cores``; on a machine with fewer it runs where it can."""
    os.sched_setaffinity(0, cores & os.sched_getaffinity(0) or os.sched_getaffinity(0))


@contextmanager
def engines(folder: Path, count: int) -> Iterator[tuple[Model, list[Engine]]]:
    """``count`` servers, all on the engines' core."""
    everywhere = os.sched_getaffinity(0)
    model = ensure_model()
    with ExitStack() as stack:
        started = []
        for number in range(count):
            home = folder / f"engine{number + 1}"
            home.mkdir(parents=True, exist_ok=True)
            engine = probed_engine(model, home, FLAGS, PYTHONHASHSEED="0", VLLM_LOGGING_LEVEL="WARNING")
            stack.callback(engine.stop)
            pin(ENGINE_CORES)
            try:
                engine.launch()
            finally:
                os.sched_setaffinity(0, everywhere)
            started.append(engine)
        for engine in started:
            engine.wait_healthy()
        pin(OUR_CORES)
        stack.callback(os.sched_setaffinity, 0, everywhere)
        yield model, started


@contextmanager
def gateway(folder: Path, model: Model, running: list[Engine]) -> Iterator[GatewayProcess]:
    """``loraledger serve`` in front of engines that know no adapter; its record is in ``folder``."""
    for engine in running:
        engine.forget_adapters()
    os.environ[PROBE_VARIABLE] = PROBE_KEY
    sizes = {"slots": SLOTS, "host_entries": HOST_ENTRIES, "max_seqs": MAX_SEQS, "max_rank": MAX_RANK}
    limits = {"limits": {"concurrency": 1024, "queue": 4096, "queue_deadline": "10m"}}
    settings: dict[str, Any] = {
        "base": {"names": ["base"]},
        "replicas": [
            {"name": f"r{number}", "url": engine.url, "probe": {"env": PROBE_VARIABLE}, **sizes}
            for number, engine in enumerate(running, 1)
        ],
        "adapters": {"list": [{"name": name, "path": str(path)} for name, path in model.adapters.items()]},
        "tenants": [tenant(TENANT, ["*"], **limits)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    with GatewayProcess(folder, settings).start(len(running)) as process:
        yield process


def key() -> str:
    """What the tenant sends."""
    return f"key-{TENANT}"
