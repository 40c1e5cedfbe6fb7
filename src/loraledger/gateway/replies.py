"""Answers that the gateway writes itself: errors in the shape that OpenAI clients read, and the model list.

An error is ``{"error": {"message", "type", "param", "code"}}`` with ``code`` from the one list of reasons, repeated in the
header ``x-loraledger-reason``, so that a client, a proxy's log and the record speak of the same thing. On the paths of Anthropic's
API it is ``{"type": "error", "error": {"type", "message"}}``, with the words for ``type`` that its clients know, and the code is
only in the header. Inside a stream, which has no headers any more, the message ends with the code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from loraledger.errors import LedgerError
from loraledger.events import Reject
from loraledger.gateway.heads import answer_head, content_length
from loraledger.gateway.paths import Errors, errors_of
from loraledger.units import NS_PER_S

JSON: Final = b"application/json"
_PATH: Final = re.compile(r"(?<![\w.:<])/(?:[\w.@+~-]+/)+[\w.@+~-]*")
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES: Final = {413: "request_too_large", 503: "overloaded_error"}
_HEADERS: Final = {401: b"WWW-Authenticate: Bearer\r\n"}


def error_body(status: int, message: str, code: str, param: str | None = None, *, form: Errors = "openai") -> bytes:
    """The JSON body of an error. ``type`` follows from the HTTP status."""
    if form == "anthropic":
        kind = _ANTHROPIC_TYPES.get(status) or _kind(status, "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    kind = _kind(status, "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_reply(
    error: LedgerError, *, date: bytes, request_id: bytes = b"", close: bool, extra: bytes = b"", path: bytes = b""
) -> bytes:
    """The whole HTTP answer for an error that the gateway found itself, in the form that clients of ``path`` read."""
    body = error_body(error.status, error.message, error.code, error.param, form=errors_of(path))
    retry = b"" if error.retry_after_s is None else _retry_after(math.ceil(error.retry_after_s))
    extra += _HEADERS.get(error.status, b"") + retry + _reason(error.code)
    return _reply(error.status, body, date=date, request_id=request_id, extra=extra, close=close)


def reject_reply(command: Reject, *, date: bytes, request_id: bytes, close: bool, form: Errors = "openai") -> bytes:
    """The whole HTTP answer for a request that the kernel refused."""
    # Engines put paths of their machine into what they say: the record keeps them, a tenant has no use for them.
    body = error_body(command.http_status, _PATH.sub("<path>", command.message), command.code, form=form)
    retry = b"" if command.retry_after is None else _retry_after(-(-command.retry_after // NS_PER_S))
    extra = retry + _reason(command.code)
    return _reply(command.http_status, body, date=date, request_id=request_id, extra=extra, close=close)


def models_reply(models: Sequence[dict[str, object]], *, date: bytes, request_id: bytes, close: bool) -> bytes:
    """The whole HTTP answer to ``GET /v1/models``."""
    body = msgspec.json.encode({"object": "list", "data": models})
    return _reply(200, body, date=date, request_id=request_id, extra=b"", close=close)


def error_frame(message: str, code: str, form: Errors = "openai") -> bytes:
    """A server-sent event that says why a stream is about to be cut. Its place in the order of events is unknown here."""
    if form == "openai":
        return b"data: %b\n\n" % error_body(502, message, code)
    if form == "anthropic":
        return b"event: error\ndata: %b\n\n" % error_body(502, f"{message} ({code})", code, form=form)
    event = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": None}
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)


def _kind(status: int, fault: str) -> str:
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else fault)


def _reply(status: int, body: bytes, *, date: bytes, request_id: bytes, extra: bytes, close: bool) -> bytes:
    framing = content_length(len(body))
    head = answer_head(
        status, date=date, content_type=JSON, framing=framing, request_id=request_id, extra=extra, close=close
    )
    return head + body


def _retry_after(seconds: int) -> bytes:
    return b"Retry-After: %d\r\n" % max(seconds, 0)


def _reason(code: str) -> bytes:
    return b"x-loraledger-reason: %b\r\n" % code.encode("ascii", "replace")
