"""The events and bodies of vLLM 0.32's ``/v1/responses`` and ``/v1/messages``, field for field.

Taken from the real server's own classes. Responses: two events go out before anything is computed, each with the whole answer as it
stands, the model's name in it; with the first token come two that open an item and its part; then one event a token; at the end the
text three times over, and the whole answer once more, now with usage. There is no ``[DONE]``, and an engine that dies leaves the
stream without an end. Messages: one event with the model's name and the prompt's tokens comes with the first token; the usage comes
before the last event; an error is an event of its own.

A token's event is encoded once but for the token, and for responses its number.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

import msgspec

from loraledger.engines.emulator_frames import RefusedError

_BEFORE_TOKENS: Final = 4
"""Events of a response before that of the first token."""
_TEXT_DELTA: Final = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"%b"},"index":0}\n\n'
)


def _event(body: dict[str, object]) -> bytes:
    kind = body["type"]
    assert isinstance(kind, str)
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))


class ResponsesShape:
    """The events and the body of one answer of ``/v1/responses``. Tokens must need no escaping in JSON."""

    __slots__ = ("_after", "_before", "_created", "_item", "_limit", "_model", "_response", "head", "opening")

    def __init__(self, created: int, model: str, limit: int) -> None:
        self._response = f"resp_{secrets.token_hex(8)}"
        self._item = f"msg_{secrets.token_hex(8)}"
        self._created, self._model, self._limit = created, model, limit
        begun = self._body("in_progress", [], None)
        self.opening = _event({"response": begun, "sequence_number": 0, "type": "response.created"})
        self.opening += _event({"response": begun, "sequence_number": 1, "type": "response.in_progress"})
        place = {"content_index": 0, "item_id": self._item, "output_index": 0}
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        self.head = _event(
            {"item": self._message("in_progress", []), "output_index": 0, "sequence_number": 2}
            | {"type": "response.output_item.added"}
        )
        self.head += _event({**place, "part": part, "sequence_number": 3, "type": "response.content_part.added"})
        self._before = b'event: response.output_text.delta\ndata: {"content_index":0,"delta":"'
        self._after = (
            b'","item_id":"%b","logprobs":[],"output_index":0,"sequence_number":%%d,"type":"response.output_text.delta"}\n\n'
            % self._item.encode()
        )

    def token(self, index: int, text: str, *, last: bool) -> bytes:
        """The event of one token."""
        return self._before + text.encode() + self._after % (_BEFORE_TOKENS + index)

    def ending(self, text: Callable[[int], str], prompt_tokens: int, generated: int) -> bytes:
        """Everything after the last token."""
        said = text(generated)
        part, number = self._part(said), _BEFORE_TOKENS + generated
        here: dict[str, object] = {"content_index": 0, "item_id": self._item}
        events: list[dict[str, object]] = [
            {**here, "logprobs": [], "output_index": 0, "sequence_number": number, "text": said}
            | {"type": "response.output_text.done"},
            {**here, "output_index": 0, "part": part, "sequence_number": number + 1}
            | {"type": "response.content_part.done"},
            {"item": self._message("completed", [part]), "output_index": 0, "sequence_number": number + 2}
            | {"type": "response.output_item.done"},
            {"response": self._whole(said, prompt_tokens, generated), "sequence_number": number + 3}
            | {"type": "response.completed"},
        ]
        return b"".join([_event(event) for event in events])

    def broken(self, failure: RefusedError) -> bytes | None:
        """None: the real server has no event for it, and breaks the connection off."""
        return None

    def whole(self, text: str, prompt_tokens: int, generated: int) -> bytes:
        """The body of an answer that is not streamed."""
        return msgspec.json.encode(self._whole(text, prompt_tokens, generated))

    def error(self, failure: RefusedError) -> object:
        """The body of an error."""
        return failure.body()

    def _whole(self, text: str, prompt_tokens: int, generated: int) -> dict[str, object]:
        usage = {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": 0,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [prompt_tokens],
                "cached_tokens_per_turn": [0],
            },
            "output_tokens": generated,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [generated],
                "tool_output_tokens_per_turn": [0],
            },
            "total_tokens": prompt_tokens + generated,
        }
        return self._body("incomplete", [self._message("completed", [self._part(text)])], usage)

    def _body(self, status: str, output: list[object], usage: dict[str, object] | None) -> dict[str, object]:
        absent = ("kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages")
        return {
            "id": self._response,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "metadata": None,
            "model": self._model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": self._limit,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **dict.fromkeys(absent),
        }

    def _message(self, status: str, content: list[object]) -> dict[str, object]:
        return {
            "id": self._item,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _part(self, text: str) -> dict[str, object]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


class MessagesShape:
    """The events and the body of one answer of ``/v1/messages``. Tokens must need no escaping in JSON."""

    __slots__ = ("_id", "_model", "head", "opening")

    def __init__(self, answer_id: str, model: str, prompt_tokens: int) -> None:
        self._id, self._model = answer_id, model
        self.opening = b""
        begun = {
            **self._envelope([]),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }
        self.head = _event({"type": "message_start", "message": begun})
        self.head += _event({"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0})

    def token(self, index: int, text: str, *, last: bool) -> bytes:
        """The event of one token."""
        return _TEXT_DELTA % text.encode()

    def ending(self, text: Callable[[int], str], prompt_tokens: int, generated: int) -> bytes:
        """Everything after the last token."""
        usage = {"input_tokens": prompt_tokens, "output_tokens": generated}
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        return (
            _event({"type": "content_block_stop", "index": 0})
            + _event({"type": "message_delta", "delta": delta, "usage": usage})
            + _event({"type": "message_stop"})
        )

    def broken(self, failure: RefusedError) -> bytes | None:
        """The last event of a stream that fails."""
        return _event({"type": "error", "error": {"type": "internal_error", "message": failure.message}})

    def whole(self, text: str, prompt_tokens: int, generated: int) -> bytes:
        """The body of an answer that is not streamed."""
        usage = {"input_tokens": prompt_tokens, "output_tokens": generated}
        body = {**self._envelope([{"type": "text", "text": text}]), "stop_reason": "max_tokens", "usage": usage}
        return msgspec.json.encode(body)

    def error(self, failure: RefusedError) -> object:
        """The body of an error."""
        return anthropic_error(failure)

    def _envelope(self, content: list[object]) -> dict[str, object]:
        return {"id": self._id, "type": "message", "role": "assistant", "content": content, "model": self._model}


def anthropic_error(failure: RefusedError) -> object:
    """The body of an error of ``/v1/messages``, in vLLM's own words for its type."""
    return {"type": "error", "error": {"type": failure.kind, "message": failure.message}}
