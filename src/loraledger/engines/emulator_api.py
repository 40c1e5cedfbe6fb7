"""vLLM's HTTP routes over an emulated engine.

Theory of operation. Each generating request becomes an ``Answer`` at once; a response object then writes what the answer gets,
frame by frame, while a second task waits for the client to leave. Headers of a stream go out before its first token, as the real
server's do, so a request that dies later is a 200 whose last event is an error, or which has no end. Frames that became ready
together are written together, each still a frame of its own.

Embeddings are a prompt whose vector is there with its first token, which the counters then count; a model that generates and
embeds exists only here. Tokenizer calls need no step of the engine.

Order of refusals is the real one: API key (only under ``/v1``), then the body, then the model's name, then lengths.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import struct
import time
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loraledger.engines import emulator_bodies as bodies
from loraledger.engines.emulator_bodies import parse
from loraledger.engines.emulator_engine import Answer, EmulatedEngine
from loraledger.engines.emulator_events import MessagesShape, ResponsesShape, anthropic_error
from loraledger.engines.emulator_frames import ChunkShape, RefusedError, Shape
from loraledger.engines.emulator_metrics import CONTENT_TYPE
from loraledger.engines.emulator_text import Speech, count_tokens, embedding_of, speaker_of, text_of, tokens_of

_Handler = Callable[[Request], Awaitable[Response]]


class _AnswerResponse(Response):
    """Writes an answer as it comes, or whole when it is complete."""

    def __init__(self, engine: EmulatedEngine, answer: Answer, speech: Speech, shape: Shape, stream: bool) -> None:
        self._engine = engine
        self._answer = answer
        self._speech = speech
        self._shape = shape
        self._streamed = stream

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
        answer, shape, sent = self._answer, self._shape, 0
        if shape.opening:
            await send({"type": "http.response.body", "body": shape.opening, "more_body": True})
        while not answer.over or sent < answer.produced:
            await answer.more_than(sent)
            frames = self._frames(sent)
            sent = answer.produced
            if frames:
                await send({"type": "http.response.body", "body": frames, "more_body": True})
        ending: bytes | None
        if answer.failure is not None:
            ending = shape.broken(answer.failure)
        else:
            ending = shape.ending(self._speech.text, answer.prompt_tokens, sent)
        if ending is not None:  # without it, uvicorn closes the connection over an answer that is not complete
            await send({"type": "http.response.body", "body": ending, "more_body": False})

    def _frames(self, sent: int) -> bytes:
        answer, shape, token = self._answer, self._shape, self._speech.token
        last = answer.produced - 1 if answer.finished else -1
        frames = [shape.head] if sent == 0 and answer.produced else []
        frames += [shape.token(index, token(index), last=index == last) for index in range(sent, answer.produced)]
        return b"".join(frames)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, shape = self._answer, self._shape
        await _completed(answer)
        if answer.failure is not None:
            await JSONResponse(shape.error(answer.failure), status_code=answer.failure.status)(scope, receive, send)
            return
        body = shape.whole(self._speech.text(answer.produced), answer.prompt_tokens, answer.produced)
        await Response(body, media_type="application/json")(scope, receive, send)


async def _completed(answer: Answer) -> None:
    while not answer.over:
        await answer.more_than(answer.produced)


class _Api:
    """The routes of one engine."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self._engine = engine
        self._settings = engine.settings

    async def chat(self, request: Request) -> Response:
        body = parse(await request.body(), bodies.Chat)
        prompt = bodies.conversation(body.messages)
        return self._chunks(request, body, prompt, count_tokens(prompt))

    async def completion(self, request: Request) -> Response:
        body = parse(await request.body(), bodies.Completion)
        return self._chunks(request, body, *bodies.completion_prompt(body))

    def _chunks(
        self, request: Request, body: bodies.Chat | bodies.Completion, prompt: str, prompt_tokens: int
    ) -> Response:
        adapter = self._adapter(body.model)
        answer = self._ask(adapter, body, prompt_tokens)
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        name, now = self._name(adapter), int(time.time())
        if isinstance(body, bodies.Chat):
            shape = ChunkShape("chat", _answer_id(request, "chatcmpl"), now, name, usage=usage)
        else:
            shape = ChunkShape("completion", _answer_id(request, "cmpl"), now, name, usage=usage)
        return self._respond(adapter, answer, prompt, shape, body.stream)

    async def responses(self, request: Request) -> Response:
        body = parse(await request.body(), bodies.Responses)
        adapter, prompt = self._adapter(body.model), bodies.responses_prompt(body)
        tokens = count_tokens(prompt)
        limit = bodies.output_tokens(body, tokens, self._settings.max_model_len)
        answer = self._engine.ask(adapter, tokens, limit)
        shape = ResponsesShape(int(time.time()), self._name(adapter), limit)
        return self._respond(adapter, answer, prompt, shape, body.stream)

    async def messages(self, request: Request) -> Response:
        body = parse(await request.body(), bodies.Messages)
        try:
            adapter, prompt = self._adapter(body.model), bodies.conversation(body.messages, body.system)
            answer = self._ask(adapter, body, count_tokens(prompt))
        except RefusedError as error:
            return JSONResponse(anthropic_error(error), status_code=error.status)
        shape = MessagesShape(_answer_id(request, "chatcmpl"), self._name(adapter), answer.prompt_tokens)
        return self._respond(adapter, answer, prompt, shape, body.stream)

    async def count(self, request: Request) -> Response:
        body = parse(await request.body(), bodies.Count)
        try:
            self._adapter(body.model)
        except RefusedError as error:
            return JSONResponse(anthropic_error(error), status_code=error.status)
        tokens = count_tokens(bodies.conversation(body.messages, body.system))
        return JSONResponse({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})

    async def embeddings(self, request: Request) -> Response:
        body = parse(await request.body(), bodies.Embeddings)
        adapter, texts = self._adapter(body.model), bodies.embedded_texts(body)
        for _, tokens in texts:
            bodies.check_prompt(tokens, self._settings.max_model_len)
        if body.encoding_format not in ("float", "base64") or not texts:
            message = "the emulator embeds one text or more, as float or base64"
            raise RefusedError(400, "BadRequestError", message, "encoding_format" if texts else "input")
        total = sum(tokens for _, tokens in texts)
        done = self._engine.ask(adapter, total, 1)
        await _completed(done)
        if done.failure is not None:
            raise done.failure
        vectors = [embedding_of(speaker_of(adapter), text) for text, _ in texts]
        encoded = [base64.b64encode(struct.pack("<16f", *v)).decode() for v in vectors]
        shown: list[object] = [*vectors] if body.encoding_format == "float" else [*encoded]
        usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}
        answer = {
            "id": _answer_id(request, "embd"),
            "object": "list",
            "created": int(time.time()),
            "model": self._name(adapter),
            "data": [{"index": i, "object": "embedding", "embedding": vector} for i, vector in enumerate(shown)],
            "usage": {**usage, "prompt_tokens_details": None, "completion_tokens_details": None},
        }
        return JSONResponse(answer)

    async def tokenize(self, request: Request) -> Response:
        body = parse(await request.body(), bodies.Tokenize)
        self._adapter(body.model)
        tokens = tokens_of(bodies.tokenized_text(body))
        most = self._settings.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        body = parse(await request.body(), bodies.Detokenize)
        self._adapter(body.model)
        try:
            return JSONResponse({"prompt": text_of(body.tokens)})
        except ValueError as error:
            raise RefusedError(400, "BadRequestError", str(error), "tokens") from error

    def _adapter(self, model: str | None) -> str | None:
        """The adapter of that name, None for the base. Raises ``RefusedError`` for a name that is not registered."""
        if model in (None, "", self._settings.model):
            return None
        if model not in self._engine.adapters:
            message = f"The model `{model}` does not exist. Valid aliases: {self._settings.model}."
            raise RefusedError(404, "NotFoundError", message, "model")
        return model

    def _name(self, adapter: str | None) -> str:
        return adapter or self._settings.model

    def _ask(self, adapter: str | None, body: bodies.Limited, prompt_tokens: int) -> Answer:
        return self._engine.ask(
            adapter, prompt_tokens, bodies.output_tokens(body, prompt_tokens, self._settings.max_model_len)
        )

    def _respond(self, adapter: str | None, answer: Answer, prompt: str, shape: Shape, stream: bool | None) -> Response:
        return _AnswerResponse(self._engine, answer, Speech(speaker_of(adapter), prompt), shape, bool(stream))

    async def models(self, _: Request) -> Response:
        settings, now = self._settings, int(time.time())

        def card(name: str, root: str, parent: str | None, most: int | None) -> dict[str, object]:
            card: dict[str, object] = {"id": name, "object": "model", "created": now, "owned_by": "vllm", "root": root}
            return {**card, "parent": parent, "max_model_len": most, "permission": []}

        cards = [card(settings.model, settings.model, None, settings.max_model_len)]
        cards += [card(name, path, settings.model, None) for name, path in self._engine.adapters.items()]
        return JSONResponse({"object": "list", "data": cards})

    async def load(self, request: Request) -> Response:
        body = parse(await request.body(), bodies.Load)
        if not body.lora_name or not body.lora_path:
            raise RefusedError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        await self._engine.load(body.lora_name, body.lora_path)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        body = parse(await request.body(), bodies.Unload)
        self._engine.unload(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def health(self, _: Request) -> Response:
        return Response(status_code=503 if self._engine.dead else 200)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": self._settings.version})

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


def _answer_id(request: Request, prefix: str) -> str:
    return f"{prefix}-{request.headers.get('x-request-id') or secrets.token_hex(8)}"


def _refusal(error: RefusedError) -> Response:
    return JSONResponse(error.body(), status_code=error.status)


def emulator_app(engine: EmulatedEngine) -> ASGIApp:
    """The ASGI application of one engine; the caller runs ``engine.run``."""
    api = _Api(engine)
    handlers: dict[str, tuple[str, _Handler]] = {
        "/v1/chat/completions": ("POST", api.chat),
        "/v1/completions": ("POST", api.completion),
        "/v1/responses": ("POST", api.responses),
        "/v1/messages": ("POST", api.messages),
        "/v1/messages/count_tokens": ("POST", api.count),
        "/v1/embeddings": ("POST", api.embeddings),
        "/tokenize": ("POST", api.tokenize),
        "/detokenize": ("POST", api.detokenize),
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
