"""A proxy as many are written: FastAPI, one route, an httpx client, the answer as a StreamingResponse. Runs under a peer's Python.

    PEER/bin/python benchmarks/peers/relay.py PORT UPSTREAM [UPSTREAM ...]

It reads the model's name out of the body, takes the upstreams in turn, and passes bytes on as they come. Nothing is recorded,
limited or checked.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any


def build(upstreams: list[str]) -> Any:  # noqa: ANN401 - fastapi is the peer's, not ours
    fastapi, httpx, responses = (import_module(name) for name in ("fastapi", "httpx", "fastapi.responses"))
    app, turns = fastapi.FastAPI(), itertools.cycle(upstreams)
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def relay(request: Any) -> Any:  # noqa: ANN401
        body = await request.body()
        assert json.loads(body)["model"]
        headers = {"content-type": "application/json"}
        sent = client.build_request("POST", next(turns) + request.url.path, content=body, headers=headers)
        answer = await client.send(sent, stream=True)

        async def through() -> AsyncIterator[bytes]:
            async for part in answer.aiter_raw():
                yield part
            await answer.aclose()

        kept = {name: answer.headers[name] for name in ("content-type", "content-length") if name in answer.headers}
        return responses.StreamingResponse(through(), answer.status_code, kept)

    relay.__annotations__["request"] = fastapi.Request
    app.post("/v1/completions", response_model=None)(relay)
    return app


if __name__ == "__main__":
    uvicorn = import_module("uvicorn")
    uvicorn.run(build(sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
