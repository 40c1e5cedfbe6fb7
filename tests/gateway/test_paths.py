"""The paths beside chat and completions, in front of an emulated engine or of a replica that says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engines.emulated import adapter, client, emulator, load
from loraledger.events import (
    AttemptFailed,
    Command,
    Reject,
    RequestArrived,
    RequestFinished,
    RequestFirstToken,
)
from loraledger.gateway.paths import FORMS, ROUTES
from loraledger.gateway.settings import ReplicaAddress

from .support import (
    BASE,
    ENGINE_NAME,
    KEY,
    STREAM_HEAD,
    Answer,
    Received,
    Rig,
    bad_gateway,
    chunk,
    dispatch,
    get,
    json_answer,
    post,
    running,
)

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TURNS = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 3},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
    RESPONSES: {"input": "Hello", "max_output_tokens": 3},
    MESSAGES: {"messages": TURNS, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/v1/embeddings": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [12, 20]},
}
STREAMED = ("/v1/chat/completions", "/v1/completions", RESPONSES, MESSAGES)
TOKENIZER = tuple(form.path for form in FORMS.values() if not form.computes)


@contextlib.asynccontextmanager
async def emulated(tmp_path: Path, **settings: Any) -> AsyncIterator[Rig]:
    """A data plane whose requests go to an emulated engine that knows the adapter under its engine-side name."""
    async with emulator(model=BASE, **settings) as server:
        async with client(server) as http:
            assert (await load(http, ENGINE_NAME, adapter(tmp_path, "alpaca"))).status_code == 200
        address = ReplicaAddress("emu", "127.0.0.1", int(server.url.rpartition(":")[2]), None)
        async with running(more={"emu": address}) as rig:
            rig.conductor.on_arrival = to_emulator
            yield rig


def to_emulator(event: RequestArrived) -> list[Command]:
    return [dispatch(event.request, replica="emu", model=BASE if event.adapter is None else ENGINE_NAME)]


def models_in(value: Any) -> list[str]:
    """Every value of a key ``model``, however deep."""
    if isinstance(value, list):
        return [model for item in value for model in models_in(item)]
    if not isinstance(value, dict):
        return []
    return [item for key, item in value.items() if key == "model"] + models_in(list(value.values()))


def events_of(answer: Answer) -> list[Any]:
    lines = [line for frame in answer.body.split(b"\n\n") for line in frame.split(b"\n")]
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def finished(rig: Rig) -> RequestFinished:
    end = rig.conductor.end()
    assert isinstance(end, RequestFinished)
    return end


# --- what goes out, what comes back


async def test_an_answer_names_the_model_as_its_client_did(tmp_path: Path) -> None:
    async with emulated(tmp_path) as rig:
        answers = {path: await rig.ask(post({"model": "alpaca", **BODIES[path]}, path)) for path in BODIES}
    for path, answer in answers.items():
        assert answer.status == 200, path
        assert ENGINE_NAME.encode() not in answer.body, path
        assert set(models_in(answer.json())) == (set() if path in TOKENIZER else {"alpaca"}), path
    assert [end.status for end in rig.conductor.of(RequestFinished)] == ["ok"] * len(BODIES)


@pytest.mark.parametrize(("path", "named"), [(STREAMED[0], 4), (STREAMED[1], 3), (RESPONSES, 3), (MESSAGES, 1)])
async def test_a_stream_names_the_model_as_its_client_did(path: str, named: int, tmp_path: Path) -> None:
    async with emulated(tmp_path) as rig:
        answer = await rig.ask(post({"model": "alpaca", **BODIES[path], "stream": True}, path))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert ENGINE_NAME.encode() not in answer.body
    assert models_in(events_of(answer)) == ["alpaca"] * named
    assert finished(rig).status == "ok"
    assert len(rig.conductor.of(RequestFirstToken)) == 1
    assert finished(rig).measured.tokens_seen == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_the_record_has_the_tokens_that_the_engine_counted(stream: bool, tmp_path: Path) -> None:
    async with emulated(tmp_path) as rig:
        for path, body in BODIES.items():
            await rig.ask(post({"model": "alpaca", **body, "stream": stream}, path))
    ends = rig.conductor.of(RequestFinished)
    for path, measured in zip(BODIES, [end.measured for end in ends], strict=True):
        prompt = {"/v1/completions": 2, "/v1/embeddings": 2}.get(path, None if path in TOKENIZER else 4)
        assert measured.prompt_tokens == prompt, path
        assert measured.generated_tokens == (3 if path in STREAMED else 0), path
        assert (measured.first_token is not None) is (stream and path in STREAMED), path


async def test_what_an_arrival_says_of_each_path(tmp_path: Path) -> None:
    async with emulated(tmp_path) as rig:
        for path, body in BODIES.items():
            await rig.ask(post({"model": "alpaca", **body, "stream": True}, path))
        arrived = {event.path: event for event in rig.conductor.of(RequestArrived)}
    assert list(arrived) == list(BODIES)
    for path, event in arrived.items():
        assert event.adapter == (None if path in TOKENIZER else "alpaca"), path
        assert event.max_tokens == (3 if path in STREAMED else 0), path
        assert event.stream is (path in STREAMED), path
        assert (event.prompt_tokens == 0) is (path in TOKENIZER), path


async def test_only_chat_and_completions_are_asked_for_usage() -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        writer.write(json_answer({}))
        return True

    async with running(script) as rig:
        for path, body in BODIES.items():
            await rig.ask(post({"model": "alpaca", **body, "stream": True}, path))
        sent = {request.line.split(" ")[1]: request.json() for request in rig.replica.requests}
    asked = {path for path, body in sent.items() if "stream_options" in body}
    assert asked == {"/v1/chat/completions", "/v1/completions"}
    assert {path: body["model"] for path, body in sent.items()} == {
        path: BASE if path in TOKENIZER else ENGINE_NAME for path in BODIES
    }


async def test_an_adapter_that_the_replica_does_not_know_is_a_failed_attempt_on_every_path(tmp_path: Path) -> None:
    stale = ENGINE_NAME.replace("3fa9", "0000")
    async with emulated(tmp_path) as rig:
        rig.conductor.on_arrival = lambda event: [dispatch(event.request, replica="emu", model=stale)]
        paths = [path for path in BODIES if path not in TOKENIZER]
        answers = [await rig.ask(post({"model": "alpaca", **BODIES[path]}, path)) for path in paths]
        assert [event.reason for event in rig.conductor.of(AttemptFailed)] == ["not_registered"] * len(paths)
    assert {answer.status for answer in answers} == {502}
    assert not any(stale.encode() in answer.body for answer in answers)


# --- text that looks like a name


INNER = {"type": "message", "content": [{"type": "output_text", "text": ENGINE_NAME, "model": ENGINE_NAME}]}
HELD_NAME: dict[str, list[dict[str, Any]]] = {
    RESPONSES: [
        {
            "response": {"metadata": {"model": ENGINE_NAME}, "model": ENGINE_NAME, "output": []},
            "type": "response.created",
        },
        {"delta": f'say "model":"{ENGINE_NAME}"', "item_id": ENGINE_NAME, "type": "response.output_text.delta"},
        {"item": {**INNER, "model": ENGINE_NAME}, "type": "response.output_item.done"},
        {"response": {"model": ENGINE_NAME, "output": [INNER]}, "type": "response.completed"},
    ],
    MESSAGES: [
        {"type": "message_start", "message": {"content": [INNER], "model": ENGINE_NAME, "usage": None}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": ENGINE_NAME, "model": ENGINE_NAME}},
        {"type": "message_stop"},
    ],
}


@pytest.mark.parametrize("path", HELD_NAME)
async def test_a_name_inside_what_was_said_is_not_touched(path: str) -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD)
        for event in HELD_NAME[path]:
            writer.write(chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()))
        writer.write(b"0\r\n\r\n")
        return True

    expected = json.loads(json.dumps(HELD_NAME[path]))
    for event in expected:
        for inner in ("response", "message"):
            if inner in event:
                event[inner]["model"] = "alpaca"
    async with running(script) as rig:
        answer = await rig.ask(post({"model": "alpaca", **BODIES[path], "stream": True}, path))
    assert events_of(answer) == expected


# --- the first token, and what comes before it


def opening(path: str) -> bytes:
    event = HELD_NAME[path][0]
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_an_event_without_content_is_no_first_token_and_waits_for_one(path: str) -> None:
    shown: list[bool] = []

    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + chunk(opening(path)))
        await asyncio.sleep(0.1)
        shown.append(bool(rig.conductor.of(RequestFirstToken)))
        first.append(time.monotonic_ns())
        for event in HELD_NAME[path][1:]:
            writer.write(chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()))
        writer.write(b"0\r\n\r\n")
        return True

    first: list[int] = []
    async with running(script) as rig:
        answer = await rig.ask(post({"model": "alpaca", **BODIES[path], "stream": True}, path))
    measured = finished(rig).measured
    assert shown == [False]
    assert (measured.first_byte or 0) < first[0] < (measured.first_token or 0)
    assert answer.reads[0][0] * 1e9 > first[0]
    assert [event["type"] for event in events_of(answer)] == [event["type"] for event in HELD_NAME[path]]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_replica_that_breaks_before_content_is_followed_by_another(path: str) -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        if len(rig.replica.requests) == 1:
            writer.write(STREAM_HEAD + chunk(opening(path)))
            await writer.drain()
            await asyncio.sleep(0.05)
            return False
        writer.write(STREAM_HEAD)
        for event in HELD_NAME[path]:
            writer.write(chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()))
        writer.write(b"0\r\n\r\n")
        return True

    async with running(script) as rig:
        rig.conductor.on_failure = lambda event: [dispatch(event.request, attempt=2)]
        answer = await rig.ask(post({"model": "alpaca", **BODIES[path], "stream": True}, path))
        assert [event.status for event in rig.conductor.of(AttemptFailed)] == ["upstream_reset"]
    assert answer.clean
    assert [event["type"] for event in events_of(answer)] == [event["type"] for event in HELD_NAME[path]]
    assert finished(rig).status == "ok"


DEAD: dict[str, dict[str, Any]] = {
    MESSAGES: {"type": "error", "error": {"type": "internal_error", "message": f"{ENGINE_NAME} is gone"}},
    RESPONSES: {"type": "error", "code": "server_error", "message": f"{ENGINE_NAME} is gone", "sequence_number": 1},
}
FAILED = {"type": "response.failed", "response": {"model": ENGINE_NAME, "error": {"code": "x", "message": "gone"}}}


@pytest.mark.parametrize("seen", [1, 2])
@pytest.mark.parametrize(("path", "last"), [*DEAD.items(), (RESPONSES, FAILED)])
async def test_an_error_event_fails_the_attempt_unless_something_was_shown(
    path: str, last: dict[str, Any], seen: int
) -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD)
        for event in [*HELD_NAME[path][:seen], last]:
            writer.write(chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()))
            await asyncio.sleep(0.05)  # each is a read of its own
        writer.write(b"0\r\n\r\n")
        return True

    async with running(script) as rig:
        answer = await rig.ask(post({"model": "alpaca", **BODIES[path], "stream": True}, path))
        failures = rig.conductor.of(AttemptFailed)
    if seen == 1:
        assert [failure.status for failure in failures] == ["engine_error"]
        assert answer.status == 502
        assert failures[0].reason in ("alpaca is gone", "gone")
    else:
        assert failures == []
        assert finished(rig).status == "engine_error"
        assert ENGINE_NAME not in str(events_of(answer)[-1])
        assert "gone" in str(events_of(answer)[-1])


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_stream_that_is_cut_ends_in_its_own_forms_error(path: str) -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD)
        for event in HELD_NAME[path][:2]:
            writer.write(chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()))
        await writer.drain()
        await asyncio.sleep(0.05)
        return False

    async with running(script) as rig:
        answer = await rig.ask(post({"model": "alpaca", **BODIES[path], "stream": True}, path))
    assert not answer.clean
    assert b"event: error\ndata: {" in answer.body
    last = events_of(answer)[-1]
    assert last["type"] == "error"
    if path == MESSAGES:
        message = "the replica broke off its answer (upstream_reset)"
        assert last == {"type": "error", "error": {"type": "api_error", "message": message}}
    else:
        assert (last["code"], last["param"], last["sequence_number"]) == ("upstream_reset", None, None)
    assert finished(rig).status == "upstream_reset"
    assert finished(rig).measured.generated_tokens is None


# --- errors of the gateway itself


def unavailable(event: RequestArrived) -> list[Command]:
    return [Reject(event.request, "rejected", 503, "no_replica", "no replica is up", retry_after=1)]


def full(event: RequestArrived) -> list[Command]:
    return [Reject(event.request, "rejected", 429, "tenant_queue_full", "too many", retry_after=1)]


ANTHROPIC: list[tuple[bytes, Any, int, str, str]] = [
    (post({"model": "nobody"}, MESSAGES), None, 404, "not_found_error", "model_not_found"),
    (
        post({"model": "alpaca"}, MESSAGES, key=None, X_Api_Key="sk-wrong"),
        None,
        401,
        "authentication_error",
        "invalid_api_key",
    ),
    (post(b"{", MESSAGES), None, 400, "invalid_request_error", "invalid_request"),
    (post({}, "/v1/messages/count_tokens"), None, 400, "invalid_request_error", "invalid_request"),
    (post({"model": "alpaca"}, MESSAGES), unavailable, 503, "overloaded_error", "no_replica"),
    (post({"model": "alpaca"}, MESSAGES), full, 429, "rate_limit_error", "tenant_queue_full"),
    (post({"model": "alpaca"}, MESSAGES), lambda e: [bad_gateway(e.request)], 502, "api_error", "upstream_failed"),
]


async def test_refusals_of_messages_have_the_form_that_anthropics_clients_read() -> None:
    async with running() as rig:
        for request, on_arrival, status, kind, reason in ANTHROPIC:
            rig.conductor.on_arrival = on_arrival or rig.conductor.on_arrival
            answer = await rig.ask(request)
            assert answer.status == status
            assert answer.headers["x-loraledger-reason"] == reason
            error = answer.json()
            assert list(error) == ["type", "error"]
            assert (error["type"], error["error"]["type"], list(error["error"])) == ("error", kind, ["type", "message"])


async def test_a_key_as_anthropics_clients_send_it_is_taken(tmp_path: Path) -> None:
    async with emulated(tmp_path) as rig:
        request = post({"model": "alpaca", **BODIES[MESSAGES]}, f"{MESSAGES}?beta=true", key=None, X_Api_Key=KEY)
        assert (await rig.ask(request)).status == 200


# --- nothing of an answer is kept


@pytest.mark.parametrize("store", [{}, {"store": True}, {"store": False}, {"store": None}])
async def test_no_answer_is_stored_on_a_replica(store: Mapping[str, Any]) -> None:
    async with running() as rig:
        await rig.ask(post({"model": "alpaca", **BODIES[RESPONSES], **store}, RESPONSES))
        assert [request.json()["store"] for request in rig.replica.requests] == [False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("previous_response_id", ""),
        ("background", True),
        ("conversation", "conv_1"),
    ],
)
async def test_fields_that_need_a_stored_answer_are_refused(field: str, value: object) -> None:
    async with running() as rig:
        answer = await rig.ask(post({"model": "alpaca", **BODIES[RESPONSES], field: value}, RESPONSES))
        assert (answer.status, answer.json()["error"]["param"]) == (400, field)
        unset = {"previous_response_id": None, "background": False, "conversation": None}
        assert (await rig.ask(post({"model": "alpaca", **BODIES[RESPONSES], **unset}, RESPONSES))).status == 200
        assert not unset.keys() & rig.replica.requests[0].json().keys()
        assert len(rig.conductor.of(RequestArrived)) == 1


async def test_what_reads_stored_answers_does_not_exist() -> None:
    async with running() as rig:
        asked = [
            get("/v1/responses/resp_1"),
            post({}, "/v1/responses/resp_1/cancel"),
            get(RESPONSES),
            get("/tokenizer_info"),
        ]
        answers = [await rig.ask(request) for request in asked]
    assert [answer.status for answer in answers] == [404, 404, 405, 404]
    assert answers[2].headers["allow"] == "POST"
    assert rig.replica.requests == []


@pytest.mark.parametrize("encoding", ["bytes", "bytes_only", 7])
async def test_embeddings_come_only_as_json(encoding: object) -> None:
    async with running() as rig:
        body = {"model": "alpaca", "input": "Hello"}
        answer = await rig.ask(post({**body, "encoding_format": encoding}, "/v1/embeddings"))
        assert (answer.status, answer.json()["error"]["param"]) == (400, "encoding_format")
        for known in ("float", "base64", None):
            assert (await rig.ask(post({**body, "encoding_format": known}, "/v1/embeddings"))).status == 200
        assert len(rig.replica.requests) == 3


# --- the tokenizer


@pytest.mark.parametrize("path", TOKENIZER)
async def test_a_tenant_without_the_base_counts_with_its_adapters_name(path: str) -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        writer.write(json_answer({"count": 1}))
        return True

    async with running(script) as rig:
        asked = [post({"model": model, **BODIES[path]}, path, key="sk-other") for model in ("other", BASE, "alpaca")]
        assert [(await rig.ask(request)).status for request in asked] == [200, 404, 404]
        assert [request.json()["model"] for request in rig.replica.requests] == [BASE]


async def test_a_text_comes_back_from_its_tokens(tmp_path: Path) -> None:
    async with emulated(tmp_path) as rig:
        tokens = (await rig.ask(post({"model": "alpaca", "prompt": "Grüße"}, "/tokenize"))).json()["tokens"]
        back = (await rig.ask(post({"model": "alpaca", "tokens": tokens}, "/detokenize"))).json()
        counted = (await rig.ask(post({"model": "alpaca", "messages": TURNS}, "/v1/messages/count_tokens"))).json()
    assert back == {"prompt": "Grüße"}
    assert counted["input_tokens"] == len("user: Hello\n") // 4 + 1


def test_every_path_has_one_form_and_one_method() -> None:
    assert set(ROUTES) == {*FORMS, b"/v1/models"}
    assert [FORMS[path].path.encode() for path in FORMS] == list(FORMS)
    assert list(BODIES) == [form.path for form in FORMS.values()]
