"""The bodies that an emulated engine takes: as much of vLLM's as decides what is answered.

Theory of operation. Each path has a struct for its body and a function that says what the model reads, as one text. One request
gives one answer, so what vLLM would answer several times over is refused. The same words asked through chat, responses or messages
are the same prompt, so an adapter says the same to them.
"""

from __future__ import annotations

import json
from typing import TypeVar

import msgspec

from loraledger.engines.emulator_frames import RefusedError
from loraledger.engines.emulator_text import count_tokens

DEFAULT_OUTPUT = 16
"""Tokens of an answer to a request that does not say; vLLM's chat fills the context."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Generate(msgspec.Struct):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the output, and what it says."""
        if self.max_completion_tokens is not None:
            return "max_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[_Part] | None = None


class Chat(Generate, kw_only=True):
    """``/v1/chat/completions``."""

    messages: list[Message]


class Completion(Generate, kw_only=True):
    """``/v1/completions``."""

    prompt: str | list[str | int]


class Responses(msgspec.Struct, kw_only=True):
    """``/v1/responses``."""

    model: str | None = None
    input: str | list[Message]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """As ``Generate.limit``."""
        return "max_output_tokens", self.max_output_tokens


class Count(msgspec.Struct, kw_only=True):
    """``/v1/messages/count_tokens``."""

    model: str
    messages: list[Message]
    system: str | list[_Part] | None = None


class Messages(Count, kw_only=True):
    """``/v1/messages``."""

    max_tokens: int
    stream: bool | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """As ``Generate.limit``."""
        return "max_tokens", self.max_tokens


class Embeddings(msgspec.Struct, kw_only=True):
    """``/v1/embeddings``."""

    model: str | None = None
    input: str | list[str | int | list[int]]
    encoding_format: str = "float"


class Tokenize(msgspec.Struct, kw_only=True):
    """``/tokenize``: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class Detokenize(msgspec.Struct, kw_only=True):
    """``/detokenize``."""

    model: str | None = None
    tokens: list[int]


class Load(msgspec.Struct):
    """``/v1/load_lora_adapter``."""

    lora_name: str
    lora_path: str


class Unload(msgspec.Struct):
    """``/v1/unload_lora_adapter``."""

    lora_name: str


Limited = Generate | Responses | Messages
_Body = TypeVar("_Body", Chat, Completion, Responses, Messages, Count, Embeddings, Tokenize, Detokenize, Load, Unload)


def parse(data: bytes, kind: type[_Body]) -> _Body:
    """The body in ``data``. Raises ``RefusedError`` as vLLM answers what does not validate, on every path alike."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(400, "Bad Request", f"1 validation error: {error}", "body") from error


def conversation(messages: list[Message], system: str | list[_Part] | None = None) -> str:
    """What the model reads of a conversation."""
    turns = messages if system is None else [Message("system", system), *messages]
    return "".join(f"{turn.role}: {_words(turn.content)}\n" for turn in turns)


def completion_prompt(body: Completion) -> tuple[str, int]:
    """The prompt and its tokens."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return prompt, count_tokens(prompt)
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0], count_tokens(prompt[0])
    if prompt and all(isinstance(token, int) for token in prompt):
        return json.dumps(prompt), len(prompt)
    raise RefusedError(400, "BadRequestError", "the emulator takes one prompt a request", "prompt")


def responses_prompt(body: Responses) -> str:
    """What the model reads. Raises ``RefusedError`` for what leans on a store of answers, which is off as in vLLM by default."""
    if body.background:
        message = "This vLLM engine does not support `store=True` and therefore does not support the background mode."
        raise RefusedError(400, "invalid_request_error", message, "background")
    if body.previous_response_id is not None:
        message = f"Response with id '{body.previous_response_id}' not found."
        raise RefusedError(404, "invalid_request_error", message, "response_id")
    turns = [Message("user", body.input)] if isinstance(body.input, str) else body.input
    return conversation(turns, body.instructions)


def tokenized_text(body: Tokenize) -> str:
    """What is to be cut into tokens."""
    if body.messages is not None:
        return conversation(body.messages)
    if body.prompt is None:
        raise RefusedError(400, "Bad Request", "1 validation error: Field required", "body.prompt")
    return body.prompt


def embedded_texts(body: Embeddings) -> list[tuple[str, int]]:
    """Each text to embed, and its tokens."""
    given = body.input
    if isinstance(given, str):
        return [(given, count_tokens(given))]
    ids = [token for token in given if isinstance(token, int)]
    if ids:
        return [(json.dumps(ids), len(ids))]
    return [
        (text, count_tokens(text)) if isinstance(text, str) else (json.dumps(text), len(text))
        for text in given
        if not isinstance(text, int)
    ]


def output_tokens(body: Limited, prompt_tokens: int, most: int) -> int:
    """What the request may generate. Raises ``RefusedError`` for lengths that cannot be."""
    if isinstance(body, Generate) and body.n not in (None, 1):
        raise RefusedError(400, "BadRequestError", f"the emulator gives one answer a request, got n={body.n}", "n")
    field, limit = body.limit
    wanted = DEFAULT_OUTPUT if limit is None else limit
    if wanted < 1:
        raise RefusedError(400, "BadRequestError", f"{field} must be at least 1, got {wanted}.", field)
    if wanted > most:
        message = f"{field}={wanted} cannot be greater than max_model_len={most}. Please request fewer output tokens."
        raise RefusedError(400, "BadRequestError", message, field)
    check_prompt(prompt_tokens, most)
    return min(wanted, most - prompt_tokens)


def check_prompt(prompt_tokens: int, most: int) -> None:
    """Raise ``RefusedError`` for a prompt that leaves no room in the context."""
    if prompt_tokens >= most:
        message = (
            f"This model's maximum context length is {most} tokens. However, your prompt contains {prompt_tokens} "
            "input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
        raise RefusedError(400, "BadRequestError", message, "input_tokens")


def _words(content: str | list[_Part] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text or "" for part in content)
    return content or ""
