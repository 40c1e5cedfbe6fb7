"""The bodies of vLLM 0.32's API, byte for byte where a client can tell the difference.

Seen on the real server: JSON is compact except in error events inside a stream; a chat stream opens with a role frame that
carries no token and goes out together with the first one; then comes one frame a token; the last token's frame carries the
finish reason; a usage frame, if asked for, has an empty list of choices; ``data: [DONE]`` closes. Without ``include_usage`` no
frame has a ``usage`` key.

Everything of a frame but the token is fixed for a request, so it is encoded once: a frame then costs one concatenation.
"""

from __future__ import annotations

import json
from typing import Final, Literal

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


class Shape:
    """The frames and the body of one answer. Tokens must need no escaping in JSON."""

    __slots__ = ("_after", "_after_last", "_after_last_marked", "_before", "_envelope", "_kind", "head")

    def __init__(self, kind: Literal["chat", "completion"], answer_id: str, created: int, model: str) -> None:
        self._kind = kind
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
        self._after_last = ending + b"}\n\n"
        self._after_last_marked = ending + b',"system_fingerprint":"' + FINGERPRINT.encode() + b'"}\n\n'

    def token(self, text: str) -> bytes:
        """The frame of a token that is not the last."""
        return self._before + text.encode() + self._after

    def last(self, text: str, usage_follows: bool) -> bytes:
        """The frame of the last token: the fingerprint is in whichever frame is really the last."""
        return self._before + text.encode() + (self._after_last if usage_follows else self._after_last_marked)

    def usage(self, prompt_tokens: int, generated: int) -> bytes:
        """The frame that ``include_usage`` asks for."""
        frame = {
            **self._envelope,
            "choices": [],
            "usage": _usage(prompt_tokens, generated),
            "system_fingerprint": FINGERPRINT,
        }
        return b"data: " + msgspec.json.encode(frame) + b"\n\n"

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
