"""The stock OpenAI client, unchanged, against the data plane."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from loraledger.events import RequestArrived, RequestCancelled, RequestFinished

from .support import ENGINE_NAME, KEY, Rig, bad_gateway, running, until
from .test_attempts import saying
from .test_gone import one_token
from .test_paths import emulated

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


def stock(rig: Rig, key: str = KEY) -> Any:
    # Any: its overloads cannot tell a stream from an answer in these calls.
    return openai.AsyncOpenAI(api_key=key, base_url=f"http://127.0.0.1:{rig.plane.port}/v1", max_retries=0)


async def test_completions_streams_and_models() -> None:
    async with running() as rig, stock(rig) as client:
        plain = await client.chat.completions.create(model="alpaca", messages=MESSAGES)
        assert (plain.model, plain.usage.prompt_tokens) == ("alpaca", 11)
        stream = await client.chat.completions.create(model="alpaca", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hi there"
        assert {(chunk.model, chunk.usage) for chunk in chunks} == {("alpaca", None)}
        options = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="alpaca", messages=MESSAGES, stream=True, stream_options=options
        )
        *_, last = [chunk async for chunk in stream]
        assert last.usage.completion_tokens == 2
        assert "alpaca" in [model.id async for model in client.models.list()]
        assert rig.replica.connections == 1
        assert len(rig.conductor.of(RequestFinished)) == 3


async def test_errors_are_the_clients_own_exceptions() -> None:
    async with running() as rig:
        async with stock(rig) as client:
            with pytest.raises(openai.NotFoundError) as missing:
                await client.chat.completions.create(model="alpacca", messages=MESSAGES)
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            assert "Did you mean `alpaca`" in missing.value.message
            with pytest.raises(openai.NotFoundError, match="not served"):
                await client.moderations.create(model="alpaca", input="x")
            with pytest.raises(openai.BadRequestError, match="nothing of an answer is kept") as kept:
                await client.responses.create(model="alpaca", input="x", background=True)
            assert kept.value.param == "background"
            rig.conductor.on_arrival = lambda event: [bad_gateway(event.request)]
            with pytest.raises(openai.InternalServerError) as bad:
                await client.chat.completions.create(model="alpaca", messages=MESSAGES)
            assert bad.value.status_code == 502
        async with stock(rig, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


async def test_responses_and_embeddings(tmp_path: Path) -> None:
    async with emulated(tmp_path) as rig, stock(rig) as client:
        response = await client.responses.create(model="alpaca", input="Hello", max_output_tokens=3)
        assert (response.model, response.usage.input_tokens, response.usage.output_tokens) == ("alpaca", 4, 3)
        stream = await client.responses.create(model="alpaca", input="Hello", max_output_tokens=3, stream=True)
        events = [event async for event in stream]
        assert (
            "".join(event.delta for event in events if event.type == "response.output_text.delta")
            == response.output_text
        )
        assert [event.response.model for event in events if hasattr(event, "response")] == ["alpaca"] * 3
        assert [event.sequence_number for event in events] == list(range(len(events)))
        async with client.responses.stream(model="alpaca", input="Hello", max_output_tokens=3) as accumulated:
            assert (await accumulated.get_final_response()).output_text == response.output_text
        embedded = await client.embeddings.create(model="alpaca", input=["Hello", "there"])
        assert (embedded.model, [len(entry.embedding) for entry in embedded.data]) == ("alpaca", [16, 16])
        ends = [
            (end.measured.prompt_tokens, end.measured.generated_tokens) for end in rig.conductor.of(RequestFinished)
        ]
        assert ends == [(4, 3)] * 3 + [(4, 0)]


async def test_a_request_id_of_the_clients_is_echoed_and_recorded() -> None:
    async with running() as rig, stock(rig) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="alpaca", messages=MESSAGES, extra_headers={"X-Request-Id": "mine-1"}
        )
        assert raw.headers["x-request-id"] == "mine-1"
        assert rig.conductor.of(RequestArrived)[0].client_id == "mine-1"


async def test_a_stream_that_is_cut_is_an_error_for_the_client() -> None:
    token = json.dumps(
        {
            "id": "1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": ENGINE_NAME,
            "choices": [{"index": 0, "delta": {"content": "Hi"}}],
        }
    )
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    async with running(saying(head + f"data: {token}\n\n".encode(), keep=False)) as rig, stock(rig) as client:
        stream = await client.chat.completions.create(model="alpaca", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in stream:
                pass


async def test_leaving_a_stream_stops_the_replica() -> None:
    async with running(one_token) as rig, stock(rig) as client:
        stream = await client.chat.completions.create(model="alpaca", messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: rig.replica.closed == 1)
        assert isinstance(rig.conductor.end(), RequestCancelled)
