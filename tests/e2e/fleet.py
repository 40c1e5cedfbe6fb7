"""What the end-to-end tests run: emulated replicas as processes, adapters on disk, calls by the stock OpenAI client.

An emulator's answer is a function of adapter, digest and prompt, so each answer can be told for right or wrong without asking.
Streams in progress are made by a slow emulator (``speed`` 1: about 150 tokens a second), everything else by a fast one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families

from loraledger.engines.emulator_text import Speech
from loraledger.record.tables import Row
from support.gateway import GatewayProcess, digest_of, free_port, replica, tenant

TENANTS = ("acme", "birch", "cedar")
PROMPTS = ("Hello, world", "The capital of France is", "def main():", "Adapters, slots and hosts.")
TOKENS = 8
LONG = 7000
"""Tokens of an answer that nobody waits for the end of."""

Series = dict[str, list[tuple[dict[str, str], float]]]


def write_adapter(folder: Path, name: str) -> Path:
    """A valid adapter of rank 4 in ``folder/name`` whose digest no other name has; returns its path."""
    path = folder / name
    path.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "revision": name}
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    header = {
        f"{prefix}.lora_A.weight": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]},
        f"{prefix}.lora_B.weight": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [64, 128]},
    }
    text = json.dumps(header).encode()
    (path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(128))
    return path


def write_adapters(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Several of them, by name."""
    return {name: write_adapter(folder, name) for name in names}


class Emulator:
    """An emulated replica as a process: 2 slots, 4 host entries, and it exits when its engine dies, as vLLM does."""

    def __init__(self, folder: Path, *, speed: float = 20.0, more: Iterable[str] = ()) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"emulator-{self.port}.log"
        self._words = ["--port", str(self.port), "--slots", "2", "--host-entries", "4", "--speed", str(speed)]
        self._words += ["--close-on-death", *more]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Launch it; it listens a moment later."""
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "loraledger.engines.emulator", *self._words]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill9()

    def kill9(self) -> None:
        """End it without a word."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def hang(self) -> None:
        """Freeze it: connections stay, nothing is answered. It can still be killed."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def metrics(self) -> dict[str, float]:
        """Running and waiting requests, and tokens generated since it started."""
        series = parse_metrics(httpx2.get(f"{self.url}/metrics", timeout=20.0).text)
        names = {
            "running": "vllm:num_requests_running",
            "waiting": "vllm:num_requests_waiting",
            "generated": "vllm:generation_tokens_total",
        }
        return {short: series[name][0][1] for short, name in names.items()}

    def registered(self) -> list[str]:
        """Names of the adapters that it lists."""
        entries = httpx2.get(f"{self.url}/v1/models", timeout=20.0).json()["data"]
        return [entry["id"] for entry in entries if entry["parent"] is not None]


def parse_metrics(text: str) -> Series:
    """A metrics page by the reference parser: sample name to its series."""
    series: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return series


def settings_for(emulators: Iterable[Emulator], paths: Mapping[str, Path], **more: Any) -> dict[str, Any]:
    """Settings of a fleet in which the three tenants may call everything; ``more`` replaces whole sections."""
    entries = [{"name": name, "path": str(path)} for name, path in paths.items()]
    return {
        "base": {"names": ["base"]},
        "replicas": [replica(f"r{i}", e.url, engine="emulator") for i, e in enumerate(emulators, 1)],
        "adapters": {"list": entries},
        "tenants": [tenant(name, ["*"]) for name in TENANTS],
        "limits": {"scrape_interval": "200ms"},
        **more,
    }


def expected_text(adapters: Mapping[str, Path], model: str, prompt: str, tokens: int) -> str:
    """What an emulator says, as ``model``, to ``prompt``: the words of the adapter's own files."""
    speaker = "base" if model == "base" else f"{model}@{digest_of(adapters[model])[:12]}"
    return Speech(speaker, prompt).text(tokens)


@dataclass
class Call:
    """One call and what became of it: its text, or the error that its client raised."""

    key: str
    tenant: str
    model: str
    prompt: str
    kind: str
    tokens: int = TOKENS
    text: str = ""
    error: str | None = None
    echoed: str | None = None
    ended: bool = False
    """Whether the answer came to its end; not so for one that the client cancelled."""


def client_of(gateway: GatewayProcess, name: str) -> openai.AsyncOpenAI:
    """The stock client as this tenant, without retries of its own."""
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=f"key-{name}", max_retries=0, timeout=60.0)


async def make(client: openai.AsyncOpenAI, call: Call, began: Callable[[Call], None] = lambda _: None) -> Call:
    """Make ``call``; ``began`` is told when its answer's head has come."""
    wanted: Any = {"max_tokens": call.tokens, "extra_headers": {"X-Request-Id": call.key}}
    try:
        if call.kind == "plain":
            reply = await client.completions.with_raw_response.create(model=call.model, prompt=call.prompt, **wanted)
            call.echoed = reply.headers.get("x-request-id")
            done = reply.parse()
            assert done.model == call.model
            call.text = done.choices[0].text
        elif call.kind == "chat":
            messages: Any = [{"role": "user", "content": call.prompt}]
            chat = await client.chat.completions.create(model=call.model, messages=messages, stream=True, **wanted)
            began(call)
            async for part in chat:
                call.text += part.choices[0].delta.content or ""
        else:
            stream = await client.completions.create(model=call.model, prompt=call.prompt, stream=True, **wanted)
            began(call)
            async for chunk in stream:
                assert chunk.model == call.model
                call.text += chunk.choices[0].text
                if call.kind == "cancelled":
                    await stream.close()
                    return call
        call.ended = True
    except openai.APIError as error:
        call.error = f"{type(error).__name__}: {error}"
    except Exception as error:
        # The transport errors of the client's HTTP library have no common base with its own.
        call.error = f"{type(error).__module__}.{type(error).__name__}: {error}"
    return call


async def play(
    gateway: GatewayProcess,
    calls: Iterable[Call],
    at_once: int = 8,
    on_start: Callable[[int], None] = lambda _: None,
    began: Callable[[Call], None] = lambda _: None,
) -> list[Call]:
    """Make all calls, ``at_once`` at a time; ``on_start`` is told the number of each before it leaves."""
    calls = list(calls)
    clients = {name: client_of(gateway, name) for name in {call.tenant for call in calls}}  # 25 ms each
    gate = asyncio.Semaphore(at_once)

    async def one(number: int, call: Call) -> Call:
        async with gate:
            on_start(number)
            return await make(clients[call.tenant], call, began)

    made = await asyncio.gather(*(one(number, call) for number, call in enumerate(calls)))
    for client in clients.values():
        await client.close()
    return list(made)


def ask(gateway: GatewayProcess, model: str, kind: str = "plain", **more: Any) -> Call:
    """One call of the first tenant."""
    key = f"ask-{model}-{time.monotonic_ns()}"
    return asyncio.run(play(gateway, [Call(key, TENANTS[0], model, PROMPTS[0], kind, **more)]))[0]


def mixed(models: list[str], count: int, seed: int, prefix: str = "c", kinds: str = "plain stream chat") -> list[Call]:
    """``count`` calls of the three tenants, models by Zipf, kinds alike."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(len(models))]
    return [
        Call(
            f"{prefix}{number}",
            rng.choice(TENANTS),
            rng.choices(models, weights)[0],
            rng.choice(PROMPTS),
            rng.choice(kinds.split()),
        )
        for number in range(count)
    ]


def check_texts(calls: Iterable[Call], adapters: Mapping[str, Path]) -> None:
    """Each answer is its own adapter's, whole if it ended and a beginning if it did not."""
    for call in calls:
        prompt = f"user: {call.prompt}\n" if call.kind == "chat" else call.prompt
        expected = expected_text(adapters, call.model, prompt, call.tokens)
        whole = call.error is None and call.kind != "cancelled"
        assert call.text == (expected if whole else expected[: len(call.text)]), call


def errors(calls: Iterable[Call]) -> list[tuple[str, str]]:
    """The calls that failed, with their errors."""
    return [(call.key, call.error) for call in calls if call.error is not None]


def post(gateway: GatewayProcess, path: str, body: object = None) -> Any:
    """Tell the control plane something."""
    content = b"" if body is None else json.dumps(body).encode()
    return httpx2.post(f"{gateway.control}{path}", content=content, timeout=20.0).raise_for_status().json()


def by_client(rows: Iterable[Row]) -> dict[str, Row]:
    """Rows by the client's own id; AssertionError when one has two rows."""
    found: dict[str, Row] = {}
    for row in rows:
        key = str(row["client_id"])
        assert key not in found, f"{key} has two rows"
        found[key] = row
    return found


def eventually(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> float:
    """Wait for ``condition``; returns the seconds that it took. AssertionError when it does not come about."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, f"waited {limit_s} s for {what}"
        time.sleep(0.01)
    return time.monotonic() - began


def loads_since(gateway: GatewayProcess, since_ns: int) -> list[tuple[str, str]]:
    """(replica, adapter) of each load that the record says was sent after ``since_ns``."""
    return [
        (str(row["replica"]), str(row["adapter"]))
        for row in gateway.rows("residency")
        if isinstance(row["at_ns"], int) and row["at_ns"] > since_ns and row["to_state"] == "loading"
    ]


def in_flight(gateway: GatewayProcess) -> dict[str, int]:
    """Everything that the gateway believes open, by where it is counted."""
    found = {f"replica {r['name']}": r["in_flight"]["value"] for r in gateway.api("/api/replicas")["replicas"]}
    for entry in gateway.api("/api/tenants")["tenants"]:
        found[f"active {entry['name']}"] = entry["active"]["value"]
        found[f"queued {entry['name']}"] = entry["queued"]["value"]
    summary = gateway.summary()
    return {**found, "open": summary["open_requests"], "queued": summary["queued_requests"]}


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    line = [sys.executable, "-m", "loraledger.cli.main", *words]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, env=dict(os.environ), check=False)
