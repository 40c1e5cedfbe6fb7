"""Incidents played on real engines: users at a real gateway, and what the engines themselves say of it.

Theory of operation. Nothing here depends on how fast the machine is, because nothing is a rate: a part has so many users, each of
whom waits for its answer, pauses for a multiple of the time that it took, and asks again. What is scarce is then certain from
counts alone: with more users of a replica than its engine runs at once (``SEATS``), some wait; with more adapters in flight than
slots, some wait for a slot; with more tokens in flight than KV blocks hold, some are preempted. Arrivals adapt to the machine.

What happened is told by the engines, apart from gateway and record: their own metrics, looked at each second, and the lines of
their logs on adapters that were read from disk (``Truth``).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx2
import openai

from loraledger.adapters.reading.files import CONFIG_NAME, WEIGHTS_NAME
from loraledger.signals.facts import Facts, ReplicaFacts
from loraledger.signals.figures import Window
from support.gateway import GatewayProcess, replica, tenant

from .engine import Engine, Model
from .probe_client import probed_engine

VARIABLE = "PROBE_KEY_OF_THE_STAGE"
SLOTS, HOST_ENTRIES = 2, 4
"""As all engines of these tests have them."""
SEATS = 8
"""Sequences that an engine runs at once."""
SECONDS, ENOUGH = 20.0, 30
"""How long a part takes at least, and how many requests it has at least."""
STREAMING = ("--stream-interval", "8")
"""Tokens in one piece of an answer, after the first: client and gateway then leave the cores to the engines."""
PROMPT = "Adapters, slots and hosts: "
WHOLE_S = 300.0
"""Longest wait of a client and in the gateway: a backlog is served, however slow the machine."""


def staged_engine(model: Model, folder: Path, *arguments: str, seats: int = SEATS) -> Engine:
    """An engine with the probe that is not started yet."""
    folder.mkdir()
    return probed_engine(model, folder, ("--max-num-seqs", str(seats), *STREAMING, *arguments))


def variants(adapters: dict[str, Path], folder: Path, each: int) -> dict[str, Path]:
    """``each`` adapters for each of ``adapters``: the same weights, other content, hence other names in the engines."""
    made = {}
    for (name, path), number in itertools.product(adapters.items(), range(each)):
        target = folder / f"{name}-v{number}"
        target.mkdir(parents=True)
        config = json.loads((path / CONFIG_NAME).read_bytes())
        (target / CONFIG_NAME).write_text(json.dumps({**config, "revision": f"v{number}"}), encoding="utf-8")
        os.link(path / WEIGHTS_NAME, target / WEIGHTS_NAME)
        made[target.name] = target
    return made


@dataclass(frozen=True)
class User:
    """Asks for one adapter after the other. ``pause``: times the duration of an answer before it asks again."""

    names: Iterator[str]
    pause: float = 0.0


@dataclass(frozen=True)
class Truth:
    """One engine during a part, in its own words. ``waiting`` and ``kv_usage`` are the greatest of a look each second."""

    finished: int
    preemptions: int
    loads: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True)
class Part:
    """What was played in a window, and what became of it by engine. All that arrived in it has ended."""

    window: Window
    sent: tuple[str, ...]
    truth: dict[str, Truth]


class Watch:
    """Looks at one engine from ``async with`` to its end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = self._now()
        self._waiting, self._kv_usage = 0.0, 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _look(self) -> None:
        async with httpx2.AsyncClient(base_url=self._engine.url, timeout=30.0, trust_env=False) as http:
            while True:
                text = (await http.get("/metrics")).text
                self._waiting = max(self._waiting, _metric(text, "num_requests_waiting"))
                self._kv_usage = max(self._kv_usage, _metric(text, "kv_cache_usage_perc"))
                await asyncio.sleep(1.0)

    def _now(self) -> tuple[int, int, int]:
        """Requests finished, preemptions and adapters read from disk since the engine started."""
        text = httpx2.get(f"{self._engine.url}/metrics", timeout=30.0, trust_env=False).text
        log = self._engine.log.read_text(errors="replace")
        counted = (_metric(text, "request_success_total"), _metric(text, "num_preemptions_total"))
        return int(counted[0]), int(counted[1]), log.count("Adding lora. Model id")

    def truth(self) -> Truth:
        finished, preemptions, loads = (now - was for now, was in zip(self._now(), self._before, strict=True))
        return Truth(finished, preemptions, loads, int(self._waiting), self._kv_usage)


def _metric(text: str, name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


class Stage:
    """A gateway in front of engines, ``r1`` and so on, whose probes it knows, and its one tenant."""

    def __init__(self, folder: Path, engines: Sequence[Engine], adapters: dict[str, Path], seats: int = SEATS) -> None:
        self._adapters = adapters
        self.engines = {f"r{number}": engine for number, engine in enumerate(engines, 1)}
        seating = {"max_seqs": seats, "max_in_flight": 4096}
        limits = {"concurrency": 4096, "queue": 4096, "queue_deadline": f"{WHOLE_S:.0f}s"}
        settings = {
            "base": {"names": ["base"]},
            "replicas": [
                replica(name, engine.url, probe={"env": VARIABLE}, **seating) for name, engine in self.engines.items()
            ],
            "adapters": {"list": [{"name": name, "path": str(path)} for name, path in adapters.items()]},
            "tenants": [tenant("acme", list(adapters), limits=limits)],
            "policy": {"name": "strict-affinity"},
            "limits": {"scrape_interval": "500ms"},
        }
        folder.mkdir()
        self.gateway = GatewayProcess(folder, settings)
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        self.gateway.start(replicas_up=len(self.engines))
        self.gateway.wait(lambda: all(map(self._observed, self.engines)), "the probes to be heard of")
        return self

    def __exit__(self, *_: object) -> None:
        self.gateway.stop()

    def _observed(self, name: str) -> bool:
        return bool(self.gateway.api(f"/api/replicas/{name}")["slots_used"]["source"] == "observed")

    @property
    def facts(self) -> Facts:
        """What the settings say of the replicas, and the files of the adapters."""
        places = ReplicaFacts(slots=SLOTS, host_entries=HOST_ENTRIES)
        sizes = {name: (path / WEIGHTS_NAME).stat().st_size for name, path in self._adapters.items()}
        return Facts(replicas=dict.fromkeys(self.engines, places), adapter_bytes=sizes, source=str(self.gateway.config))

    def _client(self) -> openai.AsyncOpenAI:
        url = f"{self.gateway.url}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key="key-acme", max_retries=0, timeout=WHOLE_S)

    async def _ask(self, client: openai.AsyncOpenAI, name: str, tokens: int) -> None:
        """One streamed answer, read to its end; raises what the client raises."""
        prompt = f"{PROMPT}{next(self._numbers)}"
        stream = await client.completions.create(
            model=name, prompt=prompt, max_tokens=tokens, temperature=0, stream=True
        )
        async for _ in stream:
            pass

    async def warm(self, names: Iterable[str]) -> None:
        """Ask for each twice, one after the other: afterwards all of them are in slots, as far as they fit."""
        async with self._client() as client:
            for name in [*names] * 2:
                await self._ask(client, name, 1)

    async def play(self, users: Iterable[User], tokens: int) -> Part:
        """Let them ask for ``SECONDS``, or until there were ``ENOUGH`` requests, and wait until all have ended.

        Answers have ``tokens`` on average, from half of it to half as much again: users do not fall into step.
        """
        rng, sent = random.Random(11), list[str]()
        over = asyncio.Event()

        async def ask(user: User) -> None:
            while not over.is_set():
                began, name = time.monotonic(), next(user.names)
                sent.append(name)
                await self._ask(client, name, rng.randint(tokens // 2, tokens * 3 // 2))
                with suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), user.pause * (time.monotonic() - began))

        watches = {name: Watch(engine) for name, engine in self.engines.items()}
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(self._client())
            for watch in watches.values():
                await stack.enter_async_context(watch)
            since, began = time.time_ns(), time.monotonic()
            async with asyncio.TaskGroup() as group:
                for user in users:
                    group.create_task(ask(user))
                while time.monotonic() < began + SECONDS or len(sent) < ENOUGH:
                    await asyncio.sleep(0.1)
                over.set()
                until = time.time_ns()
        truth = {name: watch.truth() for name, watch in watches.items()}
        return Part(Window(since, until), tuple(sent), truth)
