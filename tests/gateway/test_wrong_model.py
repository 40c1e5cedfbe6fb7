"""A replica that answers as another model than the adapter that was asked."""

from __future__ import annotations

import asyncio

import pytest

from loraledger.events import AttemptFailed
from loraledger.gateway.answers import Renamer

from .support import (
    BASE,
    DONE,
    ENGINE_NAME,
    PLAIN,
    STREAM_HEAD,
    STREAMED,
    Received,
    chunk,
    completion,
    event,
    json_answer,
    post,
    running,
)

OTHERS = ["base", "alpaca", "other@3fa9c1d20b7e", f"{ENGINE_NAME}~2"]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("body", [PLAIN, STREAMED])
async def test_an_answer_as_another_model_is_never_shown(other: str, body: dict[str, object]) -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        if body is STREAMED:
            writer.write(STREAM_HEAD + chunk(event(other, {"content": "Hi"}) + DONE) + b"0\r\n\r\n")
        else:
            writer.write(json_answer({**completion(request), "model": other}))

    async with running(script) as rig:
        answer = await rig.ask(post(body))
        assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_failed")
        assert rig.conductor.of(AttemptFailed)[0].reason == "the replica answered as another model"


@pytest.mark.parametrize("last", [b"", DONE])
async def test_a_stream_that_becomes_another_models_is_cut(last: bytes) -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(ENGINE_NAME, {"content": "Hi"})))
        await asyncio.sleep(0.05)
        writer.write(chunk(event("other@3fa9c1d20b7e", {"content": "secret"}) + last))
        await asyncio.sleep(5)

    async with running(script) as rig:
        answer = await rig.ask(post(STREAMED))
        assert not answer.clean
        assert b"secret" not in answer.body
        assert rig.conductor.end().status == "upstream_failed"


@pytest.mark.parametrize("inner", ["response", "message"])
def test_an_event_may_not_hold_another_models_answer(inner: str) -> None:
    renamer = Renamer(ENGINE_NAME, "alpaca")
    held = '{"type":"x","%s":{"model":"%s"}}'
    renamer.document((held % (inner, ENGINE_NAME)).encode())
    assert not renamer.stranger
    renamer.document((held % (inner, "other@3fa9c1d20b7e")).encode())
    assert renamer.stranger


@pytest.mark.parametrize("model", [b"null", b"7", b"{}", b'"\xe0"', b'"\\ud800"'])
def test_a_model_that_is_no_name_is_nobodys(model: bytes) -> None:
    renamer = Renamer(ENGINE_NAME, "alpaca")
    renamer.document(b'{"model":%b}' % model)
    assert not renamer.stranger


async def test_a_base_may_come_back_under_its_main_name() -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer({**completion(request), "model": "acme/main-name"}))

    async with running(script) as rig:
        assert (await rig.ask(post({**PLAIN, "model": BASE}))).status == 200
