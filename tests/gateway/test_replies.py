from __future__ import annotations

import json

import pytest

from loraledger import errors
from loraledger.events import Reject
from loraledger.gateway.paths import Errors
from loraledger.gateway.replies import error_frame, error_reply, reject_reply

LEAVES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LedgerError)]

KNOWN = {"invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large"}
KNOWN |= {"rate_limit_error", "api_error", "overloaded_error"}
"""The types that Anthropic documents."""


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_every_error_has_a_body_that_openai_clients_read(kind: type[errors.LedgerError]) -> None:
    error = kind("what went wrong", param="model", retry_after_s=0.2)
    head, _, body = error_reply(error, date=b"now", request_id=b"id-1", close=True).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0].startswith(f"HTTP/1.1 {kind.status} ")
    assert f"Content-Length: {len(body)}" in lines
    assert {"Date: now", "X-Request-Id: id-1", "Connection: close", "Retry-After: 1"} <= set(lines)
    assert f"x-loraledger-reason: {kind.code}" in lines
    error_object = json.loads(body)["error"]
    assert list(error_object) == ["message", "type", "param", "code"]
    assert (error_object["message"], error_object["code"]) == ("what went wrong", kind.code)
    assert error_object["type"].endswith("_error")


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_every_error_has_a_body_that_anthropics_clients_read(kind: type[errors.LedgerError]) -> None:
    reply = error_reply(kind("what went wrong", param="model"), date=b"now", close=True, path=b"/v1/messages")
    head, _, body = reply.partition(b"\r\n\r\n")
    assert f"x-loraledger-reason: {kind.code}" in head.decode().split("\r\n")
    error = json.loads(body)
    assert (error["type"], error["error"]["message"]) == ("error", "what went wrong")
    assert error["error"]["type"] in KNOWN
    assert (error["error"]["type"] in ("api_error", "overloaded_error")) is (kind.status >= 500)


def test_the_kernels_refusal_is_rounded_up_to_whole_seconds() -> None:
    for wait, header in ((1, b"Retry-After: 1\r\n"), (2 * 10**9, b"Retry-After: 2\r\n"), (0, b"Retry-After: 0\r\n")):
        command = Reject("r", "rejected", 429, "tenant_queue_full", "no", retry_after=wait)
        assert header in reject_reply(command, date=b"", request_id=b"", close=False)
    command = Reject("r", "rejected", 503, "no_replica", "no")
    assert b"Retry-After" not in reject_reply(command, date=b"", request_id=b"", close=False)


def test_a_status_without_a_name_is_still_an_answer() -> None:
    reply = reject_reply(Reject("r", "rejected", 599, "odd", "no"), date=b"", request_id=b"", close=False)
    assert reply.startswith(b"HTTP/1.1 599 ")


def test_words_cannot_break_out_of_a_frame() -> None:
    words = "line\n\ndata: {}"
    frame = error_frame(words, "upstream_reset")
    assert frame.count(b"\n") == 2
    assert json.loads(frame.removeprefix(b"data: "))["error"]["code"] == "upstream_reset"
    forms: tuple[Errors, ...] = ("responses", "anthropic")
    for form in forms:
        event = error_frame(words, "upstream_reset", form)
        assert event.count(b"\n") == 3
        said = json.loads(event.removeprefix(b"event: error\ndata: "))
        assert said["type"] == "error"
        assert words in (said["message"] if form == "responses" else said["error"]["message"])
