"""The paths beside chat and completions, through a gateway process to a real vLLM server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from support.gateway import GatewayProcess, replica, tenant

from .engine import Engine, Model

ADAPTER = "a00"
TURNS = [{"role": "user", "content": "Hello, world"}]
RESPONSE: dict[str, Any] = {"input": "Hello, world", "max_output_tokens": 6, "temperature": 0}
MESSAGE: dict[str, Any] = {"messages": TURNS, "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def gateway(
    engines: tuple[Engine, Engine], model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    engine = engines[0]
    if not engine.alive():  # another module ended it
        engine.restart()
    path = str(model.adapters[ADAPTER])
    settings = {
        "base": {"names": ["base"]},
        "replicas": [replica("r1", engine.url)],
        "adapters": {"list": [{"name": ADAPTER, "path": path}]},
        "tenants": [tenant("acme", [ADAPTER]), tenant("birch", [ADAPTER], base=False)],
    }
    with GatewayProcess(tmp_path_factory.mktemp("paths"), settings).start(1) as running:
        yield running


@pytest.fixture
def http(gateway: GatewayProcess) -> Iterator[httpx2.Client]:
    headers = {"authorization": "Bearer key-acme"}
    with httpx2.Client(base_url=gateway.url, headers=headers, timeout=120.0, trust_env=False) as client:
        yield client


@pytest.fixture
def stock(gateway: GatewayProcess) -> Iterator[Any]:
    # Any: its overloads cannot tell a stream from an answer in these calls.
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="key-acme", max_retries=0, timeout=120.0) as client:
        yield client


def row(gateway: GatewayProcess, request_id: str) -> dict[str, Any]:
    """The row of the request to which the client gave this id, once it is there."""

    def found() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = gateway.api("/api/requests?limit=100")["requests"]
        return [row for row in rows if row["client_id"] == request_id]

    gateway.wait(found, f"the row of {request_id}")
    return found()[0]


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


def said_in_chat(http: httpx2.Client, model: str) -> tuple[str, int]:
    body = {"model": model, "messages": TURNS, "max_tokens": 6, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("model_name", [ADAPTER, "base"])
def test_a_response_is_the_chats_answer(
    gateway: GatewayProcess, stock: Any, http: httpx2.Client, model_name: str
) -> None:
    text, prompt = said_in_chat(http, model_name)
    name = f"response-{model_name}"
    whole = stock.responses.create(model=model_name, **RESPONSE)
    assert (whole.model, whole.output_text, whole.usage.input_tokens) == (model_name, text, prompt)
    events = list(
        stock.responses.create(model=model_name, stream=True, extra_headers={"X-Request-Id": name}, **RESPONSE)
    )
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [event.response.model for event in events if hasattr(event, "response")] == [model_name] * 3
    assert [event.sequence_number for event in events] == list(range(len(events)))
    found = row(gateway, name)
    assert (found["status"], found["prompt_tokens"], found["generated_tokens"]) == ("ok", prompt, 6)
    assert found["first_byte_ns"] < found["first_token_ns"] <= found["last_token_ns"]


@pytest.mark.parametrize("model_name", [ADAPTER, "base"])
def test_a_message_is_the_chats_answer(gateway: GatewayProcess, http: httpx2.Client, model_name: str) -> None:
    text, prompt = said_in_chat(http, model_name)
    body = {"model": model_name, **MESSAGE}
    key = {"x-api-key": "key-acme", "authorization": "Bearer key-acme", "x-request-id": f"message-{model_name}"}
    whole = http.post("/v1/messages", json=body).raise_for_status().json()
    assert (whole["model"], whole["content"][0]["text"]) == (model_name, text)
    assert whole["usage"] == {"input_tokens": prompt, "output_tokens": 6}
    streamed = http.post("/v1/messages", json={**body, "stream": True}, headers=key).raise_for_status()
    events = events_of(streamed.text)
    assert [event["message"]["model"] for event in events if "message" in event] == [model_name]
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == text
    assert events[-1] == {"type": "message_stop"}
    found = row(gateway, f"message-{model_name}")
    assert (found["status"], found["prompt_tokens"], found["generated_tokens"]) == ("ok", prompt, 6)
    counted = http.post("/v1/messages/count_tokens", json={"model": model_name, "messages": TURNS}).raise_for_status()
    assert counted.json()["input_tokens"] == prompt


def test_no_answer_names_the_engines_adapter(engines: tuple[Engine, Engine], http: httpx2.Client) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": TURNS, "max_tokens": 2},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
        "/v1/messages": {"messages": TURNS, "max_tokens": 2},
        "/tokenize": {"prompt": "Hi"},
        "/v1/messages/count_tokens": {"messages": TURNS},
    }
    texts = {
        (path, stream): http.post(path, json={"model": ADAPTER, **body, "stream": stream}).raise_for_status().text
        for path, body in bodies.items()
        for stream in (False, True)
    }
    listed = httpx2.get(f"{engines[0].url}/v1/models", trust_env=False).json()["data"]
    names = [card["id"] for card in listed if card["id"].startswith(f"{ADAPTER}@")]
    assert names
    assert [key for key, text in texts.items() if f"{ADAPTER}@" in text] == []


def test_a_text_comes_back_from_its_tokens_without_the_base(http: httpx2.Client) -> None:
    key = {"authorization": "Bearer key-birch"}
    body = {"model": ADAPTER, "prompt": "Grüße, world", "add_special_tokens": False}
    tokens = http.post("/tokenize", json=body, headers=key).raise_for_status().json()
    assert tokens["count"] == len(tokens["tokens"])
    back = http.post("/detokenize", json={"model": ADAPTER, "tokens": tokens["tokens"]}, headers=key).raise_for_status()
    assert back.json() == {"prompt": "Grüße, world"}
    assert http.post("/tokenize", json={**body, "model": "base"}, headers=key).status_code == 404


ERRORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {"messages": TURNS, "max_tokens": 0}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x " * 4000}], "max_tokens": 5}),
    ("/v1/responses", {"input": "x " * 4000}),
    ("/v1/responses", {"input": "x", "max_output_tokens": -1}),
    ("/v1/responses", {"input": [{"type": "nonsense"}]}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "nonsense"}]}),
    ("/v1/embeddings", {"input": "x"}),
    ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {"tokens": ["x"]}),
    ("/tokenize", {}),
]


def test_what_the_engine_blames_on_the_client_reaches_it_and_takes_no_replica_out(
    gateway: GatewayProcess, http: httpx2.Client
) -> None:
    for path, body in ERRORS:
        answer = http.post(path, json={"model": ADAPTER, **body})
        assert 400 <= answer.status_code < 500, (path, body, answer.status_code, answer.text)
        assert "x-loraledger-reason" not in answer.headers, (path, answer.text)
        assert f"{ADAPTER}@" not in answer.text, (path, answer.text)
    assert gateway.api("/api/replicas/r1")["up"] is True


def test_a_stored_answer_cannot_be_had(http: httpx2.Client) -> None:
    answer = http.post("/v1/responses", json={"model": ADAPTER, **RESPONSE, "store": True}).raise_for_status().json()
    refused = http.post("/v1/responses", json={"model": ADAPTER, **RESPONSE, "previous_response_id": answer["id"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    assert http.get(f"/v1/responses/{answer['id']}").status_code == 404
