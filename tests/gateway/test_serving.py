from __future__ import annotations

import asyncio
import json

from loraledger.events import RequestArrived, RequestDispatched, RequestFinished, RequestFirstToken

from .support import (
    BASE,
    DONE,
    ENGINE_NAME,
    PLAIN,
    STREAM_HEAD,
    STREAMED,
    Received,
    chunk,
    event,
    get,
    post,
    running,
    until,
    usage_event,
)


async def test_a_plain_answer_comes_back_under_the_name_that_the_client_used() -> None:
    async with running() as rig:
        answer = await rig.ask(post(PLAIN))
        assert (answer.status, answer.json()["model"]) == (200, "alpaca")
        assert rig.replica.requests[0].json()["model"] == ENGINE_NAME
        assert rig.conductor.names == ["RequestArrived", "RequestDispatched", "RequestFinished"]
        end = rig.conductor.end()
        assert (end.status, end.http_status, end.reason) == ("ok", 200, None)
        assert (end.measured.prompt_tokens, end.measured.generated_tokens) == (11, 2)
        assert end.measured.first_byte is not None
        assert end.measured.first_token is None
        assert end.measured.last_token is None


async def test_a_stream_is_measured_and_shows_no_usage_that_was_not_asked_for() -> None:
    async def apart(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(ENGINE_NAME, {"role": "assistant", "content": ""})))
        await asyncio.sleep(0.05)  # or it would be one read with the first token
        writer.write(chunk(event(ENGINE_NAME, {"content": "Hi"})))
        await until(lambda: rig.conductor.names[-1] == "RequestFirstToken")
        writer.write(chunk(event(ENGINE_NAME, {"content": " there"})) + chunk(usage_event(ENGINE_NAME)))
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    async with running(apart) as rig:
        answer = await rig.ask(post(STREAMED))
        assert answer.clean
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert {event["model"] for event in answer.events()} == {"alpaca"}
        assert b"usage" not in answer.body
        assert rig.replica.requests[0].json()["stream_options"] == {"include_usage": True}
        assert rig.conductor.names == ["RequestArrived", "RequestDispatched", "RequestFirstToken", "RequestFinished"]
        measured = rig.conductor.end().measured
        first_token = rig.conductor.of(RequestFirstToken)[0].at
        assert measured.first_byte < measured.first_token < measured.last_token
        assert measured.first_token == first_token
        assert (measured.prompt_tokens, measured.generated_tokens, measured.tokens_seen) == (11, 2, 2)
        assert measured.itl_mean == measured.itl_max == measured.last_token - measured.first_token
        assert sum(measured.itl_sketch.values()) == 1


async def test_a_client_that_asks_for_usage_gets_it() -> None:
    async with running() as rig:
        answer = await rig.ask(post({**STREAMED, "stream_options": {"include_usage": True}}))
        assert answer.events()[-1]["usage"]["prompt_tokens"] == 11


async def test_the_base_model_is_answered_under_the_alias_that_was_asked_for() -> None:
    async with running() as rig:
        answer = await rig.ask(post({**PLAIN, "model": "base"}))
        assert answer.json()["model"] == "base"
        assert rig.replica.requests[0].json()["model"] == BASE
        assert rig.conductor.of(RequestArrived)[0].adapter is None


async def test_arrival_says_what_the_kernel_must_know() -> None:
    async with running() as rig:
        body = {"model": "alpaca", "prompt": "x" * 396, "max_tokens": 7, "n": 2}
        await rig.ask(post(body, path="/v1/completions?trace=1", X_Request_Id="abc-1"))
        arrived = rig.conductor.of(RequestArrived)[0]
        assert (arrived.tenant, arrived.adapter, arrived.stream) == ("acme", "alpaca", False)
        assert (arrived.path, arrived.client_id, arrived.max_tokens) == ("/v1/completions", "abc-1", 14)
        assert arrived.prompt_tokens == 100  # 398 bytes of JSON at 4 bytes a token
        assert arrived.received <= arrived.at
        dispatched = rig.conductor.of(RequestDispatched)[0]
        assert (dispatched.request, dispatched.attempt) == (arrived.request, 1)


async def test_the_replica_gets_our_id_and_its_own_key_and_nothing_that_steers_it() -> None:
    async with running() as rig:
        answer = await rig.ask(
            post(
                PLAIN,
                X_Request_Id="mine",
                X_data_parallel_rank="3",
                X_Vllm_Priority="-9",
                X_Session_ID="s",
                endpoint_load_metrics_format="TEXT",
                Accept_Encoding="gzip",
                Cookie="a=b",
                traceparent="00-1-2-01",
                tracestate="a=1",
            )
        )
        received = rig.replica.requests[0]
        request = rig.conductor.of(RequestArrived)[0].request
        assert received.line == "POST /v1/chat/completions HTTP/1.1"
        assert received.headers == {
            "host": f"127.0.0.1:{rig.replica.port}",
            "content-type": "application/json",
            "authorization": "Bearer engine-key",
            "x-request-id": request,
            "traceparent": "00-1-2-01",
            "tracestate": "a=1",
            "content-length": str(len(received.body)),
        }
        assert answer.headers["x-request-id"] == "mine"


async def test_without_an_id_of_its_own_the_client_gets_ours() -> None:
    async with running() as rig:
        answers = [await rig.ask(post(PLAIN)), await rig.ask(post(PLAIN, X_Request_Id="bad id"))]
        ids = [event.request for event in rig.conductor.of(RequestArrived)]
        assert [answer.headers["x-request-id"] for answer in answers] == ids
        assert len(set(ids)) == 2


async def test_connections_are_kept_alive_on_both_sides() -> None:
    async with running() as rig:
        client = await rig.client()
        for _ in range(3):
            await client.send(post(PLAIN))
            assert (await client.answer()).status == 200
        await client.send(post(STREAMED))
        assert (await client.answer()).clean
        assert rig.replica.connections == 1
        assert len(rig.replica.requests) == 4
        assert len(rig.conductor.of(RequestFinished)) == 4


async def test_a_queued_request_waits_for_its_dispatch() -> None:
    async with running() as rig:
        from loraledger.events import Queue

        from .support import dispatch

        rig.conductor.on_arrival = lambda event: [Queue(event.request, "busy", event.at + 10**9)]
        client = await rig.client()
        await client.send(post(PLAIN))
        await until(lambda: bool(rig.conductor.events))
        await asyncio.sleep(0.02)
        assert rig.replica.requests == []
        rig.conductor.perform(dispatch(rig.conductor.events[0].request))  # type: ignore[union-attr]
        assert (await client.answer()).status == 200


async def test_a_rejected_request_is_answered_without_a_further_event() -> None:
    async with running() as rig:
        from loraledger.events import Reject

        rig.conductor.on_arrival = lambda event: [
            Reject(event.request, "rejected", 429, "tenant_queue_full", "too much", retry_after=1_000_000_001)
        ]
        client = await rig.client()
        for _ in range(2):  # the connection stays usable
            await client.send(post(PLAIN))
            answer = await client.answer()
            assert (answer.status, answer.headers["retry-after"]) == (429, "2")
            assert answer.headers["x-loraledger-reason"] == "tenant_queue_full"
            error = {"message": "too much", "type": "rate_limit_error", "param": None, "code": "tenant_queue_full"}
            assert answer.json() == {"error": error}
        assert rig.conductor.names == ["RequestArrived"] * 2
        assert rig.replica.requests == []


async def test_commands_for_requests_that_are_gone_are_ignored() -> None:
    async with running() as rig:
        from .support import bad_gateway, dispatch

        rig.conductor.perform(dispatch("nobody"))
        rig.conductor.perform(bad_gateway("nobody"))
        assert (await rig.ask(post(PLAIN))).status == 200


async def test_the_model_list_shows_own_adapters_with_their_parent() -> None:
    async with running() as rig:
        answer = await rig.ask(get())
        models = answer.json()["data"]
        assert [model["id"] for model in models] == [BASE, "base", "alpaca", "alpha", "sql"]
        assert models[2]["parent"] == BASE
        assert rig.conductor.events == []
        others = (await rig.ask(get(key="sk-other"))).json()["data"]
        assert [model["id"] for model in others] == ["other"]


async def test_grants_can_be_replaced_between_two_requests_of_one_connection() -> None:
    async with running() as rig:
        from loraledger.gateway.auth import Access

        client = await rig.client()
        await client.send(post(PLAIN))
        assert (await client.answer()).status == 200
        rig.plane.access = Access([], [BASE])
        await client.send(post(PLAIN))
        assert (await client.answer()).status == 401


async def test_bytes_per_token_are_learnt_from_usage() -> None:
    async with running() as rig:
        assert rig.plane.ratio.relative_error("/v1/chat/completions") is None
        await rig.ask(post(PLAIN))
        size = len(json.dumps(PLAIN["messages"]))
        expected = 4.0 + 0.05 * (size / 11 - 4.0)
        assert abs(rig.plane.ratio.bytes_per_token("/v1/chat/completions") - expected) < 1e-9
        error = rig.plane.ratio.relative_error("/v1/chat/completions")
        assert error is not None
        assert error > 0
