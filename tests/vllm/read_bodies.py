"""Run by the engine's own Python: read bodies with vLLM's own request classes, in an app like its own.

One JSON line in for each body, ``[path, body in base64]``; one out: null when it is refused, else every field that was set, as the
``repr`` of what it was read as.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from typing import Any

from fastapi import Depends, FastAPI, Response  # type: ignore[import-not-found]
from fastapi.exceptions import RequestValidationError  # type: ignore[import-not-found]

from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMError

KINDS = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/v1/messages/count_tokens": AnthropicCountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


REFUSALS = (RequestValidationError, VLLMError, ValueError, TypeError, OverflowError, NotImplementedError)
"""What the server of vLLM turns into an error for the client, whichever way its classes say no."""


def app_of(seen: list[Any]) -> FastAPI:
    # FastAPI's own handler answers with the input, which may hold numbers that no JSON has.
    app = FastAPI(exception_handlers=dict.fromkeys(REFUSALS, lambda request, error: Response(status_code=400)))
    for path, kind in KINDS.items():

        async def read(request: kind) -> None:  # type: ignore[valid-type]
            seen.append(request)

        read.__annotations__["request"] = kind
        app.post(path, dependencies=[Depends(validate_json_request)])(read)
    return app


async def read_one(app: FastAPI, seen: list[Any], path: str, body: bytes) -> dict[str, str] | None:
    seen.clear()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
    }
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers, "root_path": ""}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(_: dict[str, Any]) -> None:
        return

    await app(scope, receive, send)
    if not seen:
        return None
    read = seen[0].model_dump(exclude_unset=True, warnings=False)
    return {name: repr(value) for name, value in read.items()}


async def main() -> None:
    seen: list[Any] = []
    app = app_of(seen)
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="ascii") as answers:
        os.dup2(2, 1)  # the engine logs to stdout
        for line in sys.stdin:
            path, body = json.loads(line)
            answers.write(json.dumps(await read_one(app, seen, path, base64.b64decode(body))) + "\n")


asyncio.run(main())
