"""vLLM's HTTP routes over an emulated engine.

Theory of operation. Each generating request becomes an ``Answer`` at once; a response object then writes what the answer gets,
frame by frame, while a second task waits for the client to leave. Headers of a stream go out before its first token, as the real
server's do, so a request that dies later is a 200 whose last event is an error. Frames that became ready together are written
together, each still a frame of its own.

Order of refusals is the real one: API key (only under ``/v1``), then the body, then the model's name, then lengths.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loraledger.engines.emulator_engine import Answer, EmulatedEngine
from loraledger.engines.emulator_frames import DONE, RefusedError, Shape
from loraledger.engines.emulator_metrics import CONTENT_TYPE
from loraledger.engines.emulator_text import Speech, count_tokens, speaker_of

Kind = Literal["chat", "completion"]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Generate(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _Chat(_Generate, kw_only=True):
    messages: list[_Message]


class _Completion(_Generate, kw_only=True):
    prompt: str | list[str | int]


class _Load(msgspec.Struct):
    lora_name: str
    lora_path: str


class _Unload(msgspec.Struct):
    lora_name: str


_Body = TypeVar("_Body", _Chat, _Completion, _Load, _Unload)


def _parse(data: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(400, "Bad Request", f"1 validation error: {error}", "body") from error


def _chat_prompt(body: _Chat) -> tuple[str, int]:
    lines = []
    for message in body.messages:
        content = message.content
        if isinstance(content, list):
            content = "".join(part.text or "" for part in content)
        lines.append(f"{message.role}: {content or ''}\n")
    text = "".join(lines)
    return text, count_tokens(text)


def _completion_prompt(body: _Completion) -> tuple[str, int]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return prompt, count_tokens(prompt)
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0], count_tokens(prompt[0])
    if prompt and all(isinstance(token, int) for token in prompt):
        return json.dumps(prompt), len(prompt)
    raise RefusedError(400, "BadRequestError", "the emulator takes one prompt a request", "prompt")


def _output_tokens(body: _Generate, prompt_tokens: int, most: int) -> int:
    """What the request may generate; 16 unless it says. Raises ``RefusedError`` for lengths that cannot be."""
    if body.n not in (None, 1):
        raise RefusedError(400, "BadRequestError", f"the emulator gives one answer a request, got n={body.n}", "n")
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    wanted = 16 if wanted is None else wanted
    if wanted < 1:
        raise RefusedError(400, "BadRequestError", f"max_tokens must be at least 1, got {wanted}.", "max_tokens")
    if wanted > most:
        message = (
            f"max_tokens={wanted} cannot be greater than max_model_len={most}. Please request fewer output tokens."
        )
        raise RefusedError(400, "BadRequestError", message, "max_tokens")
    if prompt_tokens >= most:
        message = (
            f"This model's maximum context length is {most} tokens. However, your prompt contains {prompt_tokens} "
            "input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
        raise RefusedError(400, "BadRequestError", message, "input_tokens")
    return min(wanted, most - prompt_tokens)


class _AnswerResponse(Response):
    """Writes an answer as it comes, or whole when it is complete."""

    def __init__(
        self, engine: EmulatedEngine, answer: Answer, speech: Speech, shape: Shape, stream: bool, usage: bool
    ) -> None:
        self._engine = engine
        self._answer = answer
        self._speech = speech
        self._shape = shape
        self._streamed = stream
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(self._watch(receive))
        try:
            if self._streamed:
                await self._stream(send)
            else:
                await self._whole(scope, receive, send)
        finally:
            leaving.cancel()
            self._engine.abandon(self._answer)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._engine.abandon(self._answer)

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        answer, sent = self._answer, 0
        while not answer.over or sent < answer.produced:
            await answer.more_than(sent)
            frames = self._frames(sent)
            sent = answer.produced
            if frames:
                await send({"type": "http.response.body", "body": frames, "more_body": True})
        ending = DONE
        if answer.failure is not None:
            ending = answer.failure.event() + DONE
        elif self._usage:
            ending = self._shape.usage(answer.prompt_tokens, sent) + DONE
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    def _frames(self, sent: int) -> bytes:
        answer, shape, token = self._answer, self._shape, self._speech.token
        last = answer.produced - 1 if answer.finished else -1
        frames = [shape.head] if sent == 0 and answer.produced else []
        for index in range(sent, answer.produced):
            text = token(index)
            frames.append(shape.last(text, self._usage) if index == last else shape.token(text))
        return b"".join(frames)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        while not answer.over:
            await answer.more_than(answer.produced)
        if answer.failure is not None:
            await _refusal(answer.failure)(scope, receive, send)
            return
        body = self._shape.whole(self._speech.text(answer.produced), answer.prompt_tokens, answer.produced)
        await Response(body, media_type="application/json")(scope, receive, send)


class _Api:
    """The routes of one engine."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self._engine = engine

    async def chat(self, request: Request) -> Response:
        body = _parse(await request.body(), _Chat)
        return self._generate(request, "chat", body, *_chat_prompt(body))

    async def completion(self, request: Request) -> Response:
        body = _parse(await request.body(), _Completion)
        return self._generate(request, "completion", body, *_completion_prompt(body))

    def _generate(self, request: Request, kind: Kind, body: _Generate, prompt: str, prompt_tokens: int) -> Response:
        settings = self._engine.settings
        adapter = None if body.model in (None, "", settings.model) else body.model
        if adapter is not None and adapter not in self._engine.adapters:
            message = f"The model `{adapter}` does not exist. Valid aliases: {settings.model}."
            raise RefusedError(404, "NotFoundError", message, "model")
        answer = self._engine.ask(adapter, prompt_tokens, _output_tokens(body, prompt_tokens, settings.max_model_len))
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        answer_id = f"{prefix}-{request.headers.get('x-request-id') or secrets.token_hex(8)}"
        shape = Shape(kind, answer_id, int(time.time()), adapter or settings.model)
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return _AnswerResponse(
            self._engine, answer, Speech(speaker_of(adapter), prompt), shape, bool(body.stream), usage
        )

    async def models(self, _: Request) -> Response:
        settings, now = self._engine.settings, int(time.time())

        def card(name: str, root: str, parent: str | None, most: int | None) -> dict[str, object]:
            card: dict[str, object] = {"id": name, "object": "model", "created": now, "owned_by": "vllm", "root": root}
            return {**card, "parent": parent, "max_model_len": most, "permission": []}

        cards = [card(settings.model, settings.model, None, settings.max_model_len)]
        cards += [card(name, path, settings.model, None) for name, path in self._engine.adapters.items()]
        return JSONResponse({"object": "list", "data": cards})

    async def load(self, request: Request) -> Response:
        body = _parse(await request.body(), _Load)
        if not body.lora_name or not body.lora_path:
            raise RefusedError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        await self._engine.load(body.lora_name, body.lora_path)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        body = _parse(await request.body(), _Unload)
        self._engine.unload(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def health(self, _: Request) -> Response:
        return Response(status_code=503 if self._engine.dead else 200)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": self._engine.settings.version})

    async def metrics(self, _: Request) -> Response:
        return Response(self._engine.metrics(), headers={"content-type": CONTENT_TYPE})


class _RequireKey:
    """vLLM's guard: a bearer token for everything under ``/v1``, before any route is looked up."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1") and not self._allows(scope):
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(key, self._key)


def _refusal(error: RefusedError) -> Response:
    return JSONResponse(error.body(), status_code=error.status)


def emulator_app(engine: EmulatedEngine) -> ASGIApp:
    """The ASGI application of one engine; the caller runs ``engine.run``."""
    api = _Api(engine)
    handlers: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
        "/v1/chat/completions": ("POST", api.chat),
        "/v1/completions": ("POST", api.completion),
        "/v1/models": ("GET", api.models),
        "/health": ("GET", api.health),
        "/version": ("GET", api.version),
        "/metrics": ("GET", api.metrics),
    }
    if engine.settings.runtime_updating:
        handlers["/v1/load_lora_adapter"] = ("POST", api.load)
        handlers["/v1/unload_lora_adapter"] = ("POST", api.unload)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)
        return _refusal(error)

    async def no_route(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"detail": error.detail}, status_code=error.status_code)

    app = Starlette(
        routes=[Route(path, handler, methods=[method]) for path, (method, handler) in handlers.items()],
        exception_handlers={RefusedError: refused, HTTPException: no_route},
    )
    key = engine.settings.api_key
    return app if key is None else _RequireKey(app, key)
