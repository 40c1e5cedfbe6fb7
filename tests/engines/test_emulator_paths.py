"""The emulator's other paths. The expected events were made with the classes of vLLM 0.32, ids and times aside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from engines.emulated import adapter, client, emulator, load
from loraledger.engines.emulator_text import Speech, count_tokens, text_of, tokens_of

BEGUN = (
    '{"id":"resp_0","created_at":0,"incomplete_details":null,"instructions":null,"metadata":null,"model":"base","object":"response",'
    '"output":[],"parallel_tool_calls":true,"temperature":1.0,"tool_choice":"none","tools":[],"top_p":1.0,"background":false,'
    '"max_output_tokens":2,"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto",'
    '"status":"in_progress","text":null,"top_logprobs":null,"truncation":"disabled","usage":null,"user":null,"presence_penalty":0.0,'
    '"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}'
)
PART = '{"annotations":[],"text":"A B","type":"output_text","logprobs":null}'
ITEM = '{"id":"msg_0","content":[%s],"role":"assistant","status":"%s","type":"message","phase":null}'
DONE_ITEM = ITEM % (PART, "completed")
USAGE = (
    '{"input_tokens":3,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0,"input_tokens_per_turn":[3],'
    '"cached_tokens_per_turn":[0]},"output_tokens":2,"output_tokens_details":{"reasoning_tokens":0,"tool_output_tokens":0,'
    '"output_tokens_per_turn":[2],"tool_output_tokens_per_turn":[0]},"total_tokens":5}'
)
ENDED = (
    BEGUN.replace('"incomplete_details":null', '"incomplete_details":{"reason":"max_output_tokens"}')
    .replace('"output":[]', f'"output":[{DONE_ITEM}]')
    .replace("in_progress", "incomplete")
    .replace('"usage":null', f'"usage":{USAGE}')
)
RESPONSE_EVENTS = [
    f'{{"response":{BEGUN},"sequence_number":0,"type":"response.created"}}',
    f'{{"response":{BEGUN},"sequence_number":1,"type":"response.in_progress"}}',
    f'{{"item":{ITEM % ("", "in_progress")},"output_index":0,"sequence_number":2,"type":"response.output_item.added"}}',
    '{"content_index":0,"item_id":"msg_0","output_index":0,"part":{"annotations":[],"text":"","type":"output_text","logprobs":[]},'
    '"sequence_number":3,"type":"response.content_part.added"}',
    '{"content_index":0,"delta":"A","item_id":"msg_0","logprobs":[],"output_index":0,"sequence_number":4,'
    '"type":"response.output_text.delta"}',
    '{"content_index":0,"delta":" B","item_id":"msg_0","logprobs":[],"output_index":0,"sequence_number":5,'
    '"type":"response.output_text.delta"}',
    '{"content_index":0,"item_id":"msg_0","logprobs":[],"output_index":0,"sequence_number":6,"text":"A B",'
    '"type":"response.output_text.done"}',
    f'{{"content_index":0,"item_id":"msg_0","output_index":0,"part":{PART},"sequence_number":7,"type":"response.content_part.done"}}',
    f'{{"item":{DONE_ITEM},"output_index":0,"sequence_number":8,"type":"response.output_item.done"}}',
    f'{{"response":{ENDED},"sequence_number":9,"type":"response.completed"}}',
]
MESSAGE_EVENTS = [
    '{"type":"message_start","message":{"id":"chatcmpl-K","type":"message","role":"assistant","content":[],"model":"base",'
    '"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":3,"output_tokens":0}}}',
    '{"type":"content_block_start","content_block":{"type":"text","text":""},"index":0}',
    '{"type":"content_block_delta","delta":{"type":"text_delta","text":"A"},"index":0}',
    '{"type":"content_block_delta","delta":{"type":"text_delta","text":" B"},"index":0}',
    '{"type":"content_block_stop","index":0}',
    '{"type":"message_delta","delta":{"stop_reason":"max_tokens","stop_sequence":null},"usage":{"input_tokens":3,"output_tokens":2}}',
    '{"type":"message_stop"}',
]
MESSAGE = (
    '{"id":"chatcmpl-K","type":"message","role":"assistant","content":[{"type":"text","text":"A B"}],"model":"base",'
    '"stop_reason":"max_tokens","usage":{"input_tokens":3,"output_tokens":2}}'
)
PROMPT = "user: hi\n"
TURN = {"role": "user", "content": "hi"}


def words() -> list[str]:
    return Speech("base", PROMPT).text(2).split()


def plain(text: str) -> str:
    """``text`` with fixed ids and times, and the two words that the base says replaced by A and B."""
    first, second = words()
    text = text.replace(first, "A").replace(second, "B")
    return re.sub(r'"created_at":\d+', '"created_at":0', re.sub(r"(resp|msg)_[0-9a-f]{16}", r"\1_0", text))


def events(text: str) -> list[tuple[str, str]]:
    """Name and data of each event."""
    assert text.endswith("\n\n")
    pairs = [event.split("\n") for event in text[:-2].split("\n\n")]
    return [(name.removeprefix("event: "), data.removeprefix("data: ")) for name, data in pairs]


async def test_a_response_is_written_as_the_real_server_writes_it() -> None:
    body = {"model": "base", "input": "hi", "max_output_tokens": 2}
    async with emulator() as server, client(server) as http:
        whole = (await http.post("/v1/responses", json=body)).text
        streamed = await http.post("/v1/responses", json={**body, "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = events(plain(streamed.text))
    assert [data for _, data in found] == RESPONSE_EVENTS
    assert [name for name, _ in found] == [json.loads(data)["type"] for _, data in found]
    assert plain(whole) == ENDED


async def test_a_message_is_written_as_the_real_server_writes_it() -> None:
    body = {"model": "base", "messages": [TURN], "max_tokens": 2}
    async with emulator() as server, client(server) as http:
        whole = (await http.post("/v1/messages", json=body, headers={"x-request-id": "K"})).text
        streamed = await http.post("/v1/messages", json={**body, "stream": True}, headers={"x-request-id": "K"})
    found = events(plain(streamed.text))
    assert [data for _, data in found] == MESSAGE_EVENTS
    assert [name for name, _ in found] == [json.loads(data)["type"] for _, data in found]
    assert plain(whole) == MESSAGE


async def test_an_adapter_says_the_same_on_every_path(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    async with emulator() as server, client(server) as http:
        await load(http, "a", adapter(tmp_path, "a"))
        chat = (
            await http.post("/v1/chat/completions", json={"model": "a", "messages": [TURN], "max_tokens": 5})
        ).json()
        message = (await http.post("/v1/messages", json={"model": "a", "messages": [TURN], "max_tokens": 5})).json()
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as stock:
            response = await stock.responses.create(model="a", input=parts, max_output_tokens=5)  # type: ignore[arg-type]
            streamed = await stock.responses.create(model="a", input="hi", max_output_tokens=5, stream=True)
            deltas = [event.delta async for event in streamed if event.type == "response.output_text.delta"]
    said = chat["choices"][0]["message"]["content"]
    assert message["content"][0]["text"] == response.output_text == "".join(deltas) == said
    assert said != Speech("base", PROMPT).text(5)


async def test_instructions_are_read_as_a_system_turn() -> None:
    turns = [{"role": "system", "content": "be brief"}, TURN]
    async with emulator() as server, client(server) as http:
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": turns, "max_tokens": 3},
            "/v1/responses": {"input": "hi", "instructions": "be brief", "max_output_tokens": 3},
            "/v1/messages": {"messages": [TURN], "system": "be brief", "max_tokens": 3},
        }
        found = [
            (await http.post(path, json={"model": "base", **body})).json()["usage"] for path, body in bodies.items()
        ]
    tokens = count_tokens("system: be brief\n" + PROMPT)
    assert [usage.get("prompt_tokens", usage.get("input_tokens")) for usage in found] == [tokens] * 3


REFUSED: list[tuple[str, dict[str, object], int, str]] = [
    ("/v1/responses", {"input": 7}, 400, "body"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
    ("/v1/responses", {"input": "x", "background": True}, 400, "background"),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, 404, "response_id"),
    ("/v1/responses", {"input": "x" * 500}, 400, "input_tokens"),
    ("/v1/embeddings", {"input": "x" * 500}, 400, "input_tokens"),
    ("/v1/embeddings", {"input": []}, 400, "input"),
    ("/v1/embeddings", {"input": "x", "encoding_format": "bytes"}, 400, "encoding_format"),
    ("/tokenize", {}, 400, "body.prompt"),
    ("/detokenize", {"tokens": [5]}, 400, "tokens"),
    ("/tokenize", {"prompt": "x", "model": "nobody"}, 404, "model"),
    ("/v1/messages", {"messages": []}, 400, "body"),
]


async def test_refusals_name_their_field() -> None:
    async with emulator(max_model_len=100) as server, client(server) as http:
        for path, body, status, param in REFUSED:
            answer = await http.post(path, json={"model": "base", **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), (path, body)


async def test_messages_have_errors_of_their_own_form() -> None:
    body = {"model": "nobody", "messages": [TURN], "max_tokens": 5}
    async with emulator(max_model_len=100) as server, client(server) as http:
        unknown = await http.post("/v1/messages", json=body)
        uncounted = await http.post("/v1/messages/count_tokens", json=body)
        long = await http.post("/v1/messages", json={**body, "model": "base", "max_tokens": 101})
    message = "The model `nobody` does not exist. Valid aliases: base."
    for answer in (unknown, uncounted):
        assert answer.status_code == 404
        assert answer.json() == {"type": "error", "error": {"type": "NotFoundError", "message": message}}
    assert (long.status_code, long.json()["error"]["type"]) == (400, "BadRequestError")


async def test_a_dead_engine_ends_each_form_as_the_real_one_does(tmp_path: Path) -> None:
    path = adapter(tmp_path, "a")
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"messages": [TURN], "max_tokens": 8000},
        "/v1/responses": {"input": "hi", "max_output_tokens": 8000},
    }
    for route, body in bodies.items():
        async with emulator(speed=1.0) as server, client(server) as http:
            await load(http, "a", path)
            got = ""
            try:
                async with http.stream("POST", route, json={"model": "a", **body, "stream": True}) as answer:
                    async for text in answer.aiter_text():
                        got += text
                        server.engine.stop()
                clean = True
            except Exception as error:  # the client library's own, for a body that does not end
                assert "incomplete" in str(error)  # noqa: PT017
                clean = False
        assert clean is (route == "/v1/messages")
        assert ("event: error" in got) is clean


async def test_embeddings_are_vectors_of_adapter_and_text(tmp_path: Path) -> None:
    async with emulator() as server, client(server) as http:
        await load(http, "a", adapter(tmp_path, "a"))
        floats = (await http.post("/v1/embeddings", json={"model": "base", "input": ["one", "two"]})).json()
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as stock:  # asks for base64
            same = await stock.embeddings.create(model="base", input=["one", "two"])
            other = await stock.embeddings.create(model="a", input="one")
            ids = await stock.embeddings.create(model="base", input=[[1, 2], [3]])
    vectors = [entry["embedding"] for entry in floats["data"]]
    assert [entry.embedding for entry in same.data] == [pytest.approx(vector) for vector in vectors]
    assert other.data[0].embedding != pytest.approx(vectors[0])
    assert floats["usage"]["prompt_tokens"] == 2 * count_tokens("one")
    assert (ids.usage.prompt_tokens, len(ids.data)) == (3, 2)


async def test_tokens_turn_back_into_their_text() -> None:
    async with emulator() as server, client(server) as http:
        for text in ("", "abc", "abcd", "héllo \U0001f600 there\n"):
            tokens = (await http.post("/tokenize", json={"model": "base", "prompt": text})).json()
            back = (await http.post("/detokenize", json={"model": "base", "tokens": tokens["tokens"]})).json()
            assert (tokens["count"], tokens["max_model_len"]) == (count_tokens(text), 8192)
            assert tokens["tokens"] == tokens_of(text)
            assert back == {"prompt": text}


async def test_a_conversation_is_counted_as_chat_counts_it() -> None:
    async with emulator() as server, client(server) as http:
        tokens = (await http.post("/tokenize", json={"model": "base", "messages": [TURN]})).json()
        counted = (await http.post("/v1/messages/count_tokens", json={"model": "base", "messages": [TURN]})).json()
    assert tokens["count"] == counted["input_tokens"] == count_tokens(PROMPT)


@pytest.mark.parametrize("token", [-1, 5, 7, (1 << 35) | 4, (256 << 3) | 1])
def test_other_numbers_are_no_tokens(token: int) -> None:
    with pytest.raises(ValueError, match="not a token"):
        text_of([token])
