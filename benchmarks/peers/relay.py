"""A proxy as many are written: FastAPI, one route, a client library, the answer as a StreamingResponse. Runs under a peer's Python.

    PEER/bin/python benchmarks/peers/relay.py httpx|aiohttp PORT UPSTREAM [UPSTREAM ...]

It reads the model's name out of the body, takes the upstreams in turn, and passes bytes on as they come. Nothing is recorded,
limited or checked. The production-stack router forwards in this way, with httpx in its first versions and with aiohttp since.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib import import_module
from typing import Any

Sent = tuple[int, Mapping[str, str], AsyncIterator[bytes]]
Send = Callable[[str, bytes], Awaitable[Sent]]
HEADERS = {"content-type": "application/json"}
KEPT = ("content-type", "content-length")


def by_httpx() -> Send:
    """Requests by httpx: status, headers, and the body as it comes."""
    httpx = import_module("httpx")
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def send(url: str, body: bytes) -> Sent:
        answer = await client.send(client.build_request("POST", url, content=body, headers=HEADERS), stream=True)

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()

        return answer.status_code, answer.headers, parts()

    return send


def by_aiohttp() -> Send:
    """The same by aiohttp, whose session wants a running loop."""
    aiohttp = import_module("aiohttp")
    sessions: list[Any] = []

    async def send(url: str, body: bytes) -> Sent:
        if not sessions:
            connector, limits = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
            sessions.append(aiohttp.ClientSession(connector=connector, timeout=limits))
        answer = await sessions[0].post(url, data=body, headers=HEADERS)

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in answer.content.iter_any():
                    yield part
            finally:
                answer.release()

        return answer.status, answer.headers, parts()

    return send


def build(send: Send, upstreams: list[str]) -> Any:  # noqa: ANN401 - fastapi is the peer's, not ours
    """The application."""
    fastapi, responses = import_module("fastapi"), import_module("fastapi.responses")
    app, turns = fastapi.FastAPI(), itertools.cycle(upstreams)

    async def relay(request: Any) -> Any:  # noqa: ANN401
        body = await request.body()
        assert json.loads(body)["model"]
        status, headers, parts = await send(next(turns) + request.url.path, body)
        return responses.StreamingResponse(parts, status, {name: headers[name] for name in KEPT if name in headers})

    relay.__annotations__["request"] = fastapi.Request
    app.post("/v1/completions", response_model=None)(relay)
    return app


if __name__ == "__main__":
    client, port, *upstreams = sys.argv[1:]
    uvicorn = import_module("uvicorn")
    app = build({"httpx": by_httpx, "aiohttp": by_aiohttp}[client](), upstreams)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", access_log=False)
