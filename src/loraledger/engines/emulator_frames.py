"""The bodies of vLLM 0.32's API, byte for byte where a client can tell the difference.

Seen on the real server: JSON is compact except in error events inside a stream; a chat stream opens with a role frame that
carries no token and goes out together with the first one; then comes one frame a token; the last token's frame carries the
finish reason; a usage frame, if asked for, has an empty list of choices; ``data: [DONE]`` closes. Without ``include_usage`` no
frame has a ``usage`` key.

Everything of a frame but the token is fixed for a request, so it is encoded once: a frame then costs one concatenation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, Literal, Protocol

import msgspec

FINGERPRINT: Final = "loraledger-emulator"
DONE: Final = b"data: [DONE]\n\n"
ENGINE_DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class RefusedError(Exception):
    """A request that is answered with vLLM's error body. ``kind`` is the body's ``type``, ``status`` its code."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    def body(self) -> dict[str, dict[str, str | int | None]]:
        """The error as vLLM shapes it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}

    def event(self) -> bytes:
        """The error as the last event of a stream that has begun."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"


def engine_dead() -> RefusedError:
    """What every open and later request gets once the engine core is dead."""
    return RefusedError(500, "InternalServerError", ENGINE_DEAD)


class Shape(Protocol):
    """How one answer is written. ``opening`` goes out before anything is computed, ``head`` with the first token."""

    opening: bytes
    head: bytes

    def token(self, index: int, text: str, *, last: bool) -> bytes:
        """The frame of the token at ``index``, from 0."""

    def ending(self, text: Callable[[int], str], prompt_tokens: int, generated: int) -> bytes:
        """Everything after the last token. ``text``: all that was said in so many tokens."""

    def broken(self, failure: RefusedError) -> bytes | None:
        """The end of a stream that fails; None: it has none, the connection breaks off."""

    def whole(self, text: str, prompt_tokens: int, generated: int) -> bytes:
        """The body of an answer that is not streamed."""

    def error(self, failure: RefusedError) -> object:
        """The body of an error."""


class ChunkShape:
    """The frames and the body of one answer of chat or completions. Tokens must need no escaping in JSON."""

    __slots__ = ("_after", "_after_last", "_before", "_envelope", "_kind", "_usage", "head", "opening")

    def __init__(
        self, kind: Literal["chat", "completion"], answer_id: str, created: int, model: str, *, usage: bool
    ) -> None:
        self._kind = kind
        self._usage = usage
        self.opening = b""
        chunk = "chat.completion.chunk" if kind == "chat" else "text_completion"
        self._envelope: dict[str, object] = {"id": answer_id, "object": chunk, "created": created, "model": model}
        opened = b"data: " + msgspec.json.encode(self._envelope)[:-1] + b',"choices":[{"index":0,'
        if kind == "chat":
            delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            self.head = opened + delta + b',"prompt_token_ids":null,"prompt_text":null}\n\n'
            self._before = opened + b'"delta":{"content":"'
            self._after = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
            ending = b'"},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}]'
        else:
            self.head = b""
            self._before = opened + b'"text":"'
            rest = b',"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
            self._after = b'","logprobs":null,"finish_reason":null' + rest + b"}\n\n"
            ending = b'","logprobs":null,"finish_reason":"length"' + rest
        # The fingerprint is in whichever frame is really the last.
        mark = b"" if usage else b',"system_fingerprint":"' + FINGERPRINT.encode() + b'"'
        self._after_last = ending + mark + b"}\n\n"

    def token(self, index: int, text: str, *, last: bool) -> bytes:
        """The frame of one token."""
        return self._before + text.encode() + (self._after_last if last else self._after)

    def ending(self, text: Callable[[int], str], prompt_tokens: int, generated: int) -> bytes:
        """The frame that ``include_usage`` asks for, and the end."""
        if not self._usage:
            return DONE
        frame = {
            **self._envelope,
            "choices": [],
            "usage": _usage(prompt_tokens, generated),
            "system_fingerprint": FINGERPRINT,
        }
        return b"data: " + msgspec.json.encode(frame) + b"\n\n" + DONE

    def broken(self, failure: RefusedError) -> bytes | None:
        """The error as a frame, and the end."""
        return failure.event() + DONE

    def error(self, failure: RefusedError) -> object:
        """The body of an error."""
        return failure.body()

    def whole(self, text: str, prompt_tokens: int, generated: int) -> bytes:
        """The body of an answer that is not streamed."""
        said: dict[str, object]
        if self._kind == "chat":
            message = {
                "role": "assistant",
                "content": text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            }
            said = {"index": 0, "message": message}
        else:
            said = {"index": 0, "text": text}
        choice = {**said, "logprobs": None, "finish_reason": "length", "stop_reason": None, "token_ids": None}
        usage = {
            **_usage(prompt_tokens, generated),
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        }
        body = {
            **self._envelope,
            "object": "chat.completion" if self._kind == "chat" else "text_completion",
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage,
            "kv_transfer_params": None,
        }
        return msgspec.json.encode(body)


def _usage(prompt_tokens: int, generated: int) -> dict[str, int | None]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + generated,
        "completion_tokens": generated,
    }
