"""What the tests of the emulator share: adapters on disk, a fast engine, a reader of streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from loraledger.engines.emulator import EmulatorServer, EmulatorSettings
from loraledger.twin.profile import TwinProfile


def adapter(folder: Path, name: str, *, rank: int = 8, size: int = 1000) -> str:
    path = folder / name
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"r": rank, "peft_type": "LORA"}))
    (path / "adapter_model.safetensors").write_bytes(bytes(size))
    return str(path)


def emulator(*, slots: int = 2, host_entries: int = 4, **changes: Any) -> EmulatorServer:
    profile = TwinProfile(slots=slots, host_entries=host_entries)
    return EmulatorServer(EmulatorSettings(**{"profile": profile, "speed": 50.0, **changes}))


def client(server: EmulatorServer) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=server.url, timeout=30.0, trust_env=False)


async def load(http: httpx2.AsyncClient, name: str, path: str) -> httpx2.Response:
    return await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


async def complete(http: httpx2.AsyncClient, model: str = "base", max_tokens: int = 4, **more: Any) -> httpx2.Response:
    body = {"model": model, "prompt": "once upon a time", "max_tokens": max_tokens, **more}
    return await http.post("/v1/completions", json=body)


def data(stream: str) -> list[Any]:
    """The parsed events of a stream; ``[DONE]`` stays text."""
    assert stream.endswith("\n\n")
    events = []
    for event in stream[:-2].split("\n\n"):
        assert event.startswith("data: ")
        events.append(event[6:] if event == "data: [DONE]" else json.loads(event[6:]))
    return events


async def metrics(http: httpx2.AsyncClient) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Sample name to its series."""
    series: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            series.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return series
