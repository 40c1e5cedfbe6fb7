"""Real mistakes of real gateways: each case is an input and the right answer, in ``tests/cases``."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from loraledger.events import RequestArrived

from .support import (
    CASES,
    ENGINE_NAME,
    KEY,
    PLAIN,
    STREAM_HEAD,
    Received,
    Rig,
    Script,
    chunk,
    json_answer,
    post,
    running,
)

SPEED = 5
"""The transcripts are played this much faster, on a clock that runs as much faster."""


def clock() -> int:
    return time.monotonic_ns() * SPEED


def expected(case: str) -> Any:
    return json.loads((CASES / case / "expect.json").read_text())


def play(transcript: Path, said_at: dict[float, int] | None = None) -> Script:
    """A replica that says the transcript's lines as far apart as it has them.

    ``said_at``: when it did, by the time in the transcript.
    """
    lines = [
        line.split("\t", 1)
        for line in transcript.read_text().splitlines()
        if not line.split("\t", 1)[1].startswith("request")
    ]
    streamed = "not_streamed" not in transcript.name

    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        before = 0.0
        for number, (at, said) in enumerate(lines):
            await asyncio.sleep((float(at) - before) / SPEED)
            before = float(at)
            if said_at is not None:
                said_at.setdefault(before, clock())
            data = said.replace('"alpha"', json.dumps(ENGINE_NAME)).encode()
            if said == "<upstream reset>":
                return False
            if not streamed:
                writer.write(json_answer(data))
            else:
                writer.write((STREAM_HEAD if number == 0 else b"") + chunk(data + b"\n\n"))
        if streamed:
            writer.write(b"0\r\n\r\n")
        return True

    return script


async def hear(rig: Rig, transcript: Path) -> Any:
    request = transcript.read_text().splitlines()[0]
    body: dict[str, Any] = {**PLAIN, "model": "alpha", "stream": "not_streamed" not in transcript.name}
    if "include_usage=true" in request:
        body["stream_options"] = {"include_usage": True}
    return await rig.ask(post(body))


@pytest.mark.parametrize("name", ["reasoning", "tool_only", "capped_in_reasoning", "not_streamed"])
async def test_first_token_is_the_first_content_of_any_channel(name: str) -> None:
    transcript = CASES / "ttft-first-content" / f"{name}.tsv"
    right = expected("ttft-first-content")[name]
    said_at: dict[float, int] = {}
    async with running(play(transcript, said_at), clock=clock) as rig:
        answer = await hear(rig, transcript)
        assert answer.clean
        end = rig.conductor.end()
        assert end.status == "ok"
        seen = {
            "first_byte": end.measured.first_byte,
            "first_token": end.measured.first_token,
            "first_answer": end.measured.first_answer,
            "total": end.at,
        }
        for what in ("first_byte", "first_token", "first_answer", "total"):
            if what in right and right[what] is None:
                assert seen[what] is None
            elif what in right:
                later = [at for time_of, at in said_at.items() if time_of > right[what] + 0.05]
                assert said_at[right[what]] <= seen[what] <= min(later, default=seen[what])


async def test_usage_that_was_not_asked_for_is_neither_zero_nor_shown() -> None:
    right = expected("stream-no-usage")["asked_plain"]
    transcript = CASES / "stream-no-usage" / "asked_plain.tsv"
    async with running(play(transcript), clock=clock) as rig:
        answer = await hear(rig, transcript)
        assert right["client_sees_extra_usage_chunk"] is (b"usage" in answer.body)
        assert rig.replica.requests[0].json()["stream_options"]["include_usage"] is True
        measured = rig.conductor.end().measured
        assert (measured.prompt_tokens, measured.generated_tokens) == (None, None)
        assert measured.tokens_seen == 2


async def test_usage_that_the_gateway_asked_for_is_known_and_not_shown() -> None:
    right = expected("stream-no-usage")
    transcript = CASES / "stream-no-usage" / "asked_usage.tsv"
    async with running(play(transcript), clock=clock) as rig:
        answer = await rig.ask(post({**PLAIN, "model": "alpha", "stream": True}))
        assert right["asked_plain"]["client_sees_extra_usage_chunk"] is (b"usage" in answer.body)
        measured = rig.conductor.end().measured
        usage = {"prompt": measured.prompt_tokens, "completion": measured.generated_tokens}
        assert usage == right["asked_usage"]


async def test_usage_that_the_client_asked_for_is_known_and_shown() -> None:
    transcript = CASES / "stream-no-usage" / "asked_usage.tsv"
    async with running(play(transcript), clock=clock) as rig:
        answer = await hear(rig, transcript)
        assert [event["usage"] is None for event in answer.events()] == [True, True, True, False]
        measured = rig.conductor.end().measured
        usage = {"prompt": measured.prompt_tokens, "completion": measured.generated_tokens}
        assert usage == expected("stream-no-usage")["asked_usage"]


async def test_a_cut_stream_has_unknown_usage_and_the_tokens_that_were_seen() -> None:
    right = expected("stream-no-usage")["cut"]
    transcript = CASES / "stream-no-usage" / "cut.tsv"
    async with running(play(transcript), clock=clock) as rig:
        answer = await hear(rig, transcript)
        assert not answer.clean
        end = rig.conductor.end()
        assert (end.status, end.measured.tokens_seen) == (right["outcome"], right["tokens_seen"])
        assert (end.measured.prompt_tokens, end.measured.generated_tokens) == (None, None)


@pytest.mark.parametrize(
    "call",
    json.loads((CASES / "admin-auth" / "calls.json").read_text()),
    ids=lambda c: f"{c['method']} {c['path']} {c['as']}",
)
async def test_what_is_not_for_tenants_is_never_forwarded(call: dict[str, str]) -> None:
    allowed = {tuple(entry.split(" ")[:2]) for entry in expected("admin-auth")["tenant_allowed"]}
    async with running() as rig:
        auth = f"Authorization: Bearer {KEY}\r\n" if call["as"] == "tenant-key" else ""
        body = json.dumps({**PLAIN, "lora_name": "x", "lora_path": "/etc"}) if call["method"] != "GET" else ""
        head = f"{call['method']} {call['path']} HTTP/1.1\r\nHost: h\r\n{auth}Content-Length: {len(body)}\r\n\r\n"
        answer = await rig.ask((head + body).encode())
        if auth and (call["method"], call["path"]) in allowed:
            assert answer.status == 200
            assert len(rig.replica.requests) == (call["method"] == "POST")
            assert all("lora_path" not in request.json() for request in rig.replica.requests)
        else:
            assert answer.status in ((404, 405) if auth else (401,))
            assert rig.replica.requests == []
            assert rig.replica.connections == 0


async def test_a_wrong_adapter_name_fails_and_is_never_answered_by_another_model() -> None:
    bodies = [json.loads(line) for line in (CASES / "unknown-adapter" / "requests.jsonl").read_text().splitlines()]
    right = expected("unknown-adapter")["status"]
    async with running() as rig:
        for body, status in zip(bodies, right, strict=True):
            before = len(rig.replica.requests)
            answer = await rig.ask(post({**body, "messages": []}))
            if isinstance(status, int):
                assert answer.status == status
            else:  # the explicit model wins
                assert (answer.status, answer.json()["model"]) == (200, body["model"])
                assert set(rig.replica.requests[-1].json()) == {"model", "messages"}
            if answer.status == 404:
                assert answer.json()["error"]["code"] == "model_not_found"
            assert len(rig.replica.requests) - before == (answer.status == 200)
        assert [event.adapter for event in rig.conductor.of(RequestArrived)] == ["alpaca", None, "alpaca"]
