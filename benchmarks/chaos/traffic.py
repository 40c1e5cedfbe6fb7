"""Callers that never stop: three tenants, adapters by Zipf, answers whole and streamed, clients that leave.

A call is over when its answer is, well or not. What counts as well: status 200 and a whole body, or a stream with its end and no
error in it. ``heard``: a head came, so the gateway had taken the request or says why not. ``wrong``: what other model the
answer names.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

PROMPTS = ("Hello, world", "The capital of France is", "def main():", "Adapters, slots and hosts.")
TOKENS = (8, 8, 40)
AT_THE_EDGE = ("shutting_down", "too_many_connections")
"""Codes of answers to requests that were not taken: no row speaks of them."""


@dataclass
class Call:
    """One request and what became of it. Times are of ``time.monotonic``."""

    key: str
    tenant: str
    model: str
    prompt: str
    tokens: int
    kind: str
    began: float
    ended: float = 0.0
    status: int | None = None
    code: str | None = None
    text: str = ""
    error: str | None = None
    left: bool = False
    wrong: str | None = None

    @property
    def heard(self) -> bool:
        """Whether the gateway had taken it for sure, and so owes a row."""
        return self.status is not None and self.code not in AT_THE_EDGE

    @property
    def well(self) -> bool:
        """Whether it was answered to its end."""
        return self.error is None and not self.left

    def named(self, model: str) -> None:
        """The answer says that it is of ``model``."""
        if model != self.model:
            self.wrong = model


class Traffic:
    """``callers`` of them at a time, until ``stop``. ``calls`` is all that was asked so far."""

    def __init__(self, url: str, tenants: Sequence[str], models: Sequence[str], seed: int, callers: int) -> None:
        self.calls: list[Call] = []
        self._url, self._tenants, self._models = url, tenants, models
        self._weights = [1 / rank for rank in range(1, len(models) + 1)]
        self._rng = random.Random(seed)
        self._stopping = False
        self._tasks = [asyncio.create_task(self._caller(number)) for number in range(callers)]

    async def stop(self) -> None:
        """Let the open calls end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _caller(self, number: int) -> None:
        limits = httpx2.Timeout(90.0, connect=5.0)
        async with httpx2.AsyncClient(base_url=self._url, timeout=limits, trust_env=False) as http:
            while not self._stopping:
                call = self._draw(number)
                self.calls.append(call)
                try:
                    await self._make(http, call)
                except (httpx2.HTTPError, httpx2.StreamError, ValueError, LookupError) as error:
                    call.error = f"{type(error).__name__}: {error}"
                call.ended = time.monotonic()
                await asyncio.sleep(0.3 if call.status is None else 0.05)

    def _draw(self, number: int) -> Call:
        rng = self._rng
        kind = rng.choices(("plain", "stream", "leaves"), (5, 6, 1))[0]
        model = rng.choices(self._models, self._weights)[0]
        key = f"c{number}-{len(self.calls)}"
        return Call(
            key, rng.choice(self._tenants), model, rng.choice(PROMPTS), rng.choice(TOKENS), kind, time.monotonic()
        )

    async def _make(self, http: httpx2.AsyncClient, call: Call) -> None:
        body = {
            "model": call.model,
            "prompt": call.prompt,
            "max_tokens": call.tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        headers = {"Authorization": f"Bearer key-{call.tenant}", "X-Request-Id": call.key}
        sent = {**body, "stream": call.kind != "plain"}
        async with http.stream("POST", "/v1/completions", json=sent, headers=headers) as reply:
            call.status, call.code = reply.status_code, reply.headers.get("x-loraledger-reason")
            if reply.status_code != 200:
                call.error = f"{reply.status_code} {call.code}"
                await reply.aread()
            elif call.kind == "plain":
                answer = json.loads(await reply.aread())
                call.named(answer["model"])
                call.text = answer["choices"][0]["text"]
            else:
                await self._read(reply, call)

    async def _read(self, reply: httpx2.Response, call: Call) -> None:
        call.error = "cut off"
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                call.error = None if call.error == "cut off" else call.error
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    call.error = f"in the stream: {event['error']}"
                    continue
                call.named(event["model"])
                call.text += event["choices"][0]["text"]
                if call.kind == "leaves":
                    call.error, call.left = None, True
                    return
