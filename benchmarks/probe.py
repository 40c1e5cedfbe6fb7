"""What the probe costs a real vLLM: nanoseconds in its hooks over nanoseconds of steps, and pairs of runs with and without it.

Run: python -m benchmarks.probe [--pairs 10] [--model tiny|1b]

Two servers on CPU, alike but for the probe, which is on in one; each run sends the same requests to one of them while the other
idles, and the order within a pair alternates. Requests go to six adapters with two slots and a host cache of four, so that
loads and evictions happen; a client asks for the events twice a second meanwhile, as a gateway does. Of each pair: wall time and
CPU time (API server, engine core, worker) with the probe over without; the interval is that of the mean of logarithms, by Student.

The 1B-like model has 8 layers, hidden 2048, intermediate 8192, 8 key-value heads, weights of no meaning and adapters of zeros;
the tiny one is that of tests/vllm. On two shared cores single runs differ by several per cent.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.processes import ROOT, cpu_s

sys.path.insert(0, str(ROOT / "tests"))  # the tests' engine is the one that this repository can start anywhere

from vllm.engine import Engine, Model, ensure_model

AT_ONCE, ADAPTERS = 4, 6
WORK = {"tiny": (60, 48), "1b": (12, 8)}
"""Requests of a run and tokens of each."""
KEY = "a key of the probe"
FOLLOW_S = 0.5
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for a two-sided 95 % interval, by number of pairs."""

BIG = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32}
BIG |= {"num_key_value_heads": 8, "head_dim": 64}
SIZES = {"self_attn.q_proj": (2048, 2048), "self_attn.v_proj": (2048, 512), "mlp.down_proj": (8192, 2048)}


def big_model(tiny: Model, folder: Path) -> Model:
    """A folder of vLLM's dummy-weight loader and adapters of zeros at rank 16."""
    shutil.copytree(tiny.base, folder / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "base/config.json").read_text(encoding="utf-8")) | BIG
    (folder / "base/config.json").write_text(json.dumps(config), encoding="utf-8")
    adapters = {f"a{i:02d}": folder / f"a{i:02d}" for i in range(ADAPTERS)}
    for path in adapters.values():
        path.mkdir()
        fields = {
            "peft_type": "LORA",
            "r": 16,
            "lora_alpha": 32,
            "target_modules": [name.split(".")[1] for name in SIZES],
        }
        (path / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
        write_zeros(path / "adapter_model.safetensors", rank=16)
    return Model(folder / "base", adapters, tiny.too_wide)


def write_zeros(path: Path, rank: int) -> None:
    header: dict[str, Any] = {}
    end = 0
    for layer in range(BIG["num_hidden_layers"]):
        for name, (inputs, outputs) in SIZES.items():
            for part, shape in (("A", [rank, inputs]), ("B", [outputs, rank])):
                size = 4 * shape[0] * shape[1]
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{part}.weight"
                header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
                end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


class Server:
    """One engine under measurement, with its adapters registered."""

    def __init__(self, stack: ExitStack, model: Model, folder: Path, probe: bool, big: bool) -> None:
        environment = {"VLLM_PLUGINS": "loraledger" if probe else ""}
        if probe:
            environment |= {"LORALEDGER_PROBE": "1", "LORALEDGER_PROBE_KEY": KEY}
            environment |= {"LORALEDGER_PROBE_DIR": str(folder / "spool")}
        arguments = ("--load-format", "dummy") if big else ()
        self.engine = Engine(model.base, folder / f"probe-{probe}.log", arguments=arguments, environment=environment)
        self.probe, self._names = probe, list(model.adapters)[:ADAPTERS]
        stack.enter_context(self.engine)
        self._http = stack.enter_context(httpx2.Client(base_url=self.engine.url, timeout=300.0, trust_env=False))
        for name in self._names:
            body = {"lora_name": name, "lora_path": str(model.adapters[name])}
            self._http.post("/v1/load_lora_adapter", json=body).raise_for_status()
        self._pids = [self.engine.process.pid, *children(self.engine.process.pid)]
        self.events: list[dict[str, Any]] = []

    def run(self, requests: int, tokens: int, seed: int) -> tuple[float, float]:
        """Send the requests; returns seconds of wall time and of CPU."""
        rng = random.Random(seed)
        weights = [1 / (i + 1) for i in range(ADAPTERS)]
        names = rng.choices(self._names, weights=weights, k=requests)
        stop = threading.Event()
        with ThreadPoolExecutor(AT_ONCE + 1) as pool:
            following = pool.submit(self._follow, stop) if self.probe else None
            cpu, began = sum(map(cpu_s, self._pids)), time.perf_counter()
            for _ in pool.map(lambda name: self._ask(name, tokens), names):
                pass
            took = time.perf_counter() - began, sum(map(cpu_s, self._pids)) - cpu
            stop.set()
            if following is not None:
                following.result()
        return took

    def _ask(self, name: str, tokens: int) -> None:
        body = {"model": name, "prompt": "Hello, world", "max_tokens": tokens, "ignore_eos": True}
        self._http.post("/v1/completions", json=body).raise_for_status()

    def _follow(self, stop: threading.Event) -> None:
        after = self.events[-1]["seq"] if self.events else 0
        while not stop.is_set():
            reply = self._http.get(
                f"/loraledger/events?after={after}&limit=10000", headers={"authorization": f"Bearer {KEY}"}
            )
            page = reply.raise_for_status().json()
            self.events += page["events"]
            after = page["next_seq"]
            stop.wait(FOLLOW_S)


def children(pid: int) -> list[int]:
    """All processes below ``pid``."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            found += [int(child), *children(int(child))]
    return found


def interval(ratios: Sequence[float]) -> str:
    """Mean of the ratios and its 95 % interval, as changes in per cent."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logs)
    half = T_975[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (100 * (math.exp(value) - 1) for value in (mean - half, mean, mean + half))
    each = " ".join(f"{100 * (ratio - 1):+.0f}" for ratio in ratios)
    return f"{middle:+5.1f} %  (95 %: {low:+.1f} .. {high:+.1f}; pairs {each})"


def in_hook(events: Sequence[dict[str, Any]]) -> None:
    """Print the share of steps that was spent in the probe's own code."""
    for role, kind, step in (("worker", "worker_cost", "step_ns"), ("core", "step", "dur_ns")):
        found = [event for event in events if event["kind"] == kind]
        steps, step_ns = sum(event["steps"] for event in found), sum(event[step] for event in found)
        probe_ns = sum(event["probe_ns"] for event in found)
        each = f"{probe_ns / steps / 1000:6.1f} us of {step_ns / steps / 1e6:6.2f} ms"
        print(f"in hooks, {role:<7} {each} a step = {100 * probe_ns / step_ns:.2f} %   ({steps} steps)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, choices=sorted(T_975))
    parser.add_argument("--model", choices=sorted(WORK), default="tiny")
    given = parser.parse_args()
    requests, tokens = WORK[given.model]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        big = given.model == "1b"
        tiny = ensure_model()
        model = big_model(tiny, Path(name)) if big else tiny
        plain, probed = (Server(stack, model, Path(name), probe, big) for probe in (False, True))
        for server in (plain, probed):
            server.run(requests // 4, tokens, seed=0)
        pairs = []
        for number in range(given.pairs):
            order = (plain, probed) if number % 2 else (probed, plain)
            took = {server: server.run(requests, tokens, seed=number) for server in order}
            pairs.append((took[plain], took[probed]))
    print(f"{given.model} model, {given.pairs} pairs of {requests} requests of {tokens} tokens, {AT_ONCE} at once")
    in_hook(probed.events)
    for label, index in (("wall", 0), ("CPU", 1)):
        print(f"{label:<4} with the probe {interval([with_[index] / without[index] for without, with_ in pairs])}")


if __name__ == "__main__":
    main()
