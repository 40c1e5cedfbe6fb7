"""A vLLM server with the probe in it, and a client of the probe's endpoints and of the server's own."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx2

from loraledger_probe.replay import Residency

from .engine import PYTHON, Engine, Model

KEY = "a-key-of-the-probe"
Json = dict[str, Any]


def probe_environment(folder: Path, **more: str) -> dict[str, str]:
    """What switches the probe on, and vLLM's own lines on adapters with it."""
    return {
        "LORALEDGER_PROBE": "1",
        "LORALEDGER_PROBE_KEY": KEY,
        "LORALEDGER_PROBE_DIR": str(folder),
        "VLLM_PLUGINS": "loraledger",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        **more,
    }


def probed_engine(model: Model, folder: Path, arguments: Iterable[str] = (), **more: str) -> Engine:
    """A server that is not yet started; its log is ``engine.log`` in ``folder``."""
    if not list(PYTHON.parents[1].glob("lib/python3*/site-packages/loraledger_probe-*")):
        raise RuntimeError("the probe is not installed beside vLLM: run tools/vllm_env.sh")
    environment = probe_environment(folder / "spool", **more)
    return Engine(model.base, folder / "engine.log", arguments=tuple(arguments), environment=environment)


class ProbeClient:
    """Calls one server. ``events`` holds all events since boot that were fetched."""

    def __init__(self, engine: Engine, model: Model) -> None:
        self.engine, self.model = engine, model
        self.http = httpx2.Client(base_url=engine.url, timeout=120.0, trust_env=False)
        self.events: list[Json] = []
        self._after = 0

    def get(self, path: str, key: str | None = KEY) -> httpx2.Response:
        return self.http.get(path, headers={"authorization": f"Bearer {key}"} if key else {})

    def residency(self) -> Json:
        found: Json = self.get("/loraledger/residency").raise_for_status().json()
        return found

    def command(self, name: str, verb: str) -> tuple[int, Json]:
        headers = {"authorization": f"Bearer {KEY}"}
        reply = self.http.post(f"/loraledger/adapters/{name}/{verb}", headers=headers)
        body: Json = reply.json()
        return reply.status_code, body

    def done(self, name: str, verb: str) -> Json:
        status, body = self.command(name, verb)
        assert status == 200, body
        return body

    def refused(self, name: str, verb: str) -> str:
        status, body = self.command(name, verb)
        assert status >= 400, body
        code: str = body["error"]["code"]
        return code

    def fetch(self) -> list[Json]:
        """Return the events since the last fetch; they are also added to ``events``."""
        fresh: list[Json] = []
        while True:
            page = self.get(f"/loraledger/events?after={self._after}&limit=10000").raise_for_status().json()
            assert page["lost"] == page["spool_lost"] == 0
            fresh += page["events"]
            self._after = page["next_seq"]
            if len(page["events"]) < 10_000:
                self.events += fresh
                return fresh

    def load(self, name: str, path: Path | None = None, **more: Any) -> httpx2.Response:
        body = {"lora_name": name, "lora_path": str(path or self.model.adapters[name]), **more}
        return self.http.post("/v1/load_lora_adapter", json=body)

    def unload(self, name: str) -> None:
        self.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()

    def ask(self, name: str, tokens: int = 4, key: str = "K", prompt: str = "Hello, world") -> httpx2.Response:
        body = {"model": name, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return self.http.post("/v1/completions", json=body, headers={"x-request-id": key})

    def answers(self, name: str) -> bool:
        """Whether a bystander is served."""
        return self.ask(name).status_code == 200

    def clear(self) -> None:
        """Unpin and evict everything, forget every name, and skip the events up to here."""
        state = self.residency()
        for entry in state["host"]:
            if entry["pinned"]:
                self.done(entry["name"], "unpin")
        for name in {entry["name"] for entry in state["host"]}:
            self.done(name, "evict")
        self.engine.forget_adapters()
        self.fetch()

    def close(self) -> None:
        self.http.close()


def rebuilt(events: Iterable[Json], snapshot: Json, rank: int = 0, start: Json | None = None) -> Json:
    """Replay a worker's events up to a snapshot, from boot or from an earlier one, in the form in which it shows that worker."""
    (worker,) = [worker for worker in snapshot["workers"] if worker["rank"] == rank]
    state = Residency.from_snapshot(start, rank) if start else Residency(rank)
    for event in events:
        if event["pid"] == worker["pid"] and event["n"] <= worker["n"]:
            state.apply(event)
    assert state.lost == 0
    return {"slots": state.slots, "slot_order": list(state.slot_order), "host": list(state.host)}


def shown(snapshot: Json, rank: int = 0) -> Json:
    """The same of the engine's own objects."""
    (worker,) = [worker for worker in snapshot["workers"] if worker["rank"] == rank]
    return {name: worker[name] for name in ("slots", "slot_order", "host")}


def too_wide_inputs(source: Path, folder: Path) -> Path:
    """Write an adapter like ``source`` but with twice the inputs in each A: vLLM notices while it copies into the slot."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    raw = (source / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header: dict[str, Json] = json.loads(raw[8 : 8 + length])
    end = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        if "lora_A" in name:
            tensor["shape"][1] *= 2
        size = 4 * tensor["shape"][0] * tensor["shape"][1]
        tensor["dtype"] = "F32"
        tensor["data_offsets"] = [end, end + size]
        end += size
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return folder
