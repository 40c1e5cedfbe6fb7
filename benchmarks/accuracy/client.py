"""Plays calls through the gateway with as little work as can be: the record keeps the times, not the client."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator

from benchmarks.accuracy.workload import Call
from loraledger.cli.demo.player import streamed
from loraledger.engines.calibrate.asking import HIGHEST_ID, LOWEST_ID

DRAIN_S = 120.0


class Player:
    """``ended`` counts how the calls ended: ``ok``, an HTTP status, or the name of an error."""

    def __init__(self, port: int, key: str) -> None:
        self.ended: Counter[str] = Counter()
        self._port = port
        self._key = key
        self._random = random.Random(5)

    async def open_loop(self, calls: list[Call]) -> None:
        """Each call leaves at its time, however the ones before it fare."""
        began, tasks = time.perf_counter(), []
        for call in calls:
            await asyncio.sleep(max(0.0, began + call.at - time.perf_counter()))
            tasks.append(asyncio.create_task(self._send(call)))
        if tasks:
            await asyncio.wait(tasks, timeout=DRAIN_S)

    async def closed_loop(self, calls: Iterator[Call], clients: int, seconds: float) -> None:
        """``clients`` at once for ``seconds``: the next call leaves when one ends."""
        stop = time.perf_counter() + seconds

        async def one() -> None:
            while time.perf_counter() < stop:
                await self._send(next(calls))

        await asyncio.gather(*(one() for _ in range(clients)))

    async def _send(self, call: Call) -> None:
        body = json.dumps(
            {
                "model": call.adapter,
                # Drawn anew, so that the engine's prefix cache has nothing of it: the twin is told of none.
                "prompt": [self._random.randint(LOWEST_ID, HIGHEST_ID) for _ in range(call.prompt_tokens)],
                "max_tokens": call.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        )
        outcome = await streamed(self._port, "/v1/completions", self._key, body)
        self.ended[outcome] += 1
