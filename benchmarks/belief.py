"""How well a gateway without a probe knows an engine's tiers: belief against truth. Run: python -m benchmarks.belief [--requests N]

One real vLLM on CPU (2 slots, 4 host entries, 12 adapters) behind a real gateway that is not told of the probe; the probe's events
are read here, by request. Streams of 300 requests, two at once: Zipf; a scan over all adapters after each ten requests to two hot
ones; Zipf with a restart of the engine in the middle. Then Zipf with four at once: more than there are slots, so that requests
queue in the engine and what was true when they were sent has changed when they run. Each stream has a gateway of its own, which
starts without any knowledge of the engine. Requests that waited for an explicit load are left out; ``unknown`` counts as wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT

sys.path.insert(0, str(ROOT / "tests"))  # the tests' engine and its client are the ones that can be started anywhere
sys.path.insert(0, str(ROOT / "probe/src"))

from support.gateway import GatewayProcess
from vllm.beliefs import confusion, found_by_engine, printed, scan, send, settings_for, zipf
from vllm.engine import Engine, Model, ensure_model
from vllm.probe_client import ProbeClient, probed_engine

Events = list[dict[str, Any]]
Run = Callable[[GatewayProcess, ProbeClient, list[str]], Events]


def straight(gateway: GatewayProcess, probe: ProbeClient, stream: list[str]) -> Events:
    """All in one go; returns what the probe told."""
    send(gateway, stream, at_once=2)
    return probe.fetch()


def crowded(gateway: GatewayProcess, probe: ProbeClient, stream: list[str]) -> Events:
    """The same with more at once than there are slots."""
    send(gateway, stream, at_once=4)
    return probe.fetch()


def with_restart(gateway: GatewayProcess, probe: ProbeClient, stream: list[str]) -> Events:
    """The engine is killed and comes back empty after half of them."""
    half = len(stream) // 2
    before = straight(gateway, probe, stream[:half])
    probe.engine.kill9()
    probe.engine.launch()
    probe.engine.wait_healthy()
    gateway.wait(lambda: gateway.summary()["counters"].get("engine_restarts"), "the restart to be seen")
    send(gateway, stream[half:], at_once=2)
    anew = ProbeClient(probe.engine, probe.model)
    after = anew.fetch()
    anew.close()
    return before + after


def scenario(folder: Path, engine: Engine, model: Model, stream: list[str], run: Run) -> str:
    """Play one stream through a new gateway; returns the table."""
    probe = ProbeClient(engine, model)
    probe.clear()
    folder.mkdir()
    with GatewayProcess(folder, settings_for(engine.url, model.adapters)).start(replicas_up=1) as gateway:
        events = run(gateway, probe, stream)
        gateway.stop()
        rows = gateway.rows()
    probe.close()
    return printed(confusion(rows, found_by_engine(events)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    requests = parser.parse_args().requests
    model = ensure_model()
    names = list(model.adapters)
    streams: dict[str, tuple[list[str], Run]] = {
        "Zipf": (zipf(names, requests), straight),
        "a scan": (scan(names, requests), straight),
        "a restart": (zipf(names, requests), with_restart),
        "Zipf, four at once": (zipf(names, requests), crowded),
    }
    with tempfile.TemporaryDirectory() as name, probed_engine(model, Path(name)) as engine:
        for number, (label, (stream, run)) in enumerate(streams.items()):
            print(f"{label}: {len(stream)} requests; columns: what was believed")
            print(scenario(Path(name) / str(number), engine, model, stream, run))
            print(flush=True)


if __name__ == "__main__":
    main()
