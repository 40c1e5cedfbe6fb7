"""What a replica may do wrong, and what the client, the kernel and the pool see of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from loraledger.events import AttemptFailed, RequestDispatched, RequestFinished
from loraledger.gateway.settings import PlaneSettings, ReplicaAddress

from .bad_replica import shut_port
from .support import (
    CHAT,
    DONE,
    ENGINE_NAME,
    PLAIN,
    STREAM_HEAD,
    STREAMED,
    Received,
    Script,
    answer_plainly,
    chunk,
    completion,
    dispatch,
    event,
    json_answer,
    post,
    running,
    silent_port,
    still,
    until,
)

MS = 1_000_000


def saying(data: bytes, *, keep: bool = True) -> Script:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        await writer.drain()
        return keep

    return script


def first(bad: Script) -> Script:
    """``bad`` for the first request, a plain answer for the others."""
    asked = 0

    async def script(request: Received, writer: asyncio.StreamWriter) -> bool | None:
        nonlocal asked
        asked += 1
        return await (bad if asked == 1 else answer_plainly)(request, writer)

    return script


async def failure(script: Script, body: Any = PLAIN, settings: PlaneSettings | None = None) -> AttemptFailed:
    """The failed attempt that ``script`` leads to; the client must get the kernel's 502, the pool must be empty."""
    async with running(script, settings) as rig:
        answer = await rig.ask(post(body))
        assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_failed")
        assert (answer.headers["retry-after"], answer.headers["x-loraledger-reason"]) == ("2", "upstream_failed")
        assert rig.conductor.names == ["RequestArrived", "RequestDispatched", "AttemptFailed"]
        await rig.settle()
        failed: AttemptFailed = rig.conductor.of(AttemptFailed)[0]
        return failed


async def test_a_refused_connection_is_a_failed_attempt_that_never_reached_the_engine() -> None:
    async with running(more={"r2": ReplicaAddress("r2", "127.0.0.1", shut_port())}) as rig:
        rig.conductor.on_arrival = lambda event: [dispatch(event.request, replica="r2")]
        rig.conductor.on_failure = lambda event: [dispatch(event.request, attempt=2)]
        assert (await rig.ask(post(PLAIN))).status == 200
        failed = rig.conductor.of(AttemptFailed)[0]
        assert (failed.status, failed.http_status, failed.attempt) == ("upstream_failed", None, 1)
        assert failed.reason.startswith("connect")
        assert [event.attempt for event in rig.conductor.of(RequestDispatched)] == [2]
        assert rig.conductor.end().status == "ok"


@pytest.mark.parametrize(
    "address", [ReplicaAddress("r2", "no.such.host.invalid", 80), ReplicaAddress("r2", "h", 99_999_999)]
)
async def test_an_address_that_cannot_be_is_a_failed_attempt(address: ReplicaAddress) -> None:
    async with running(more={"r2": address}) as rig:
        rig.conductor.on_arrival = lambda event: [dispatch(event.request, replica="r2")]
        assert (await rig.ask(post(PLAIN))).status == 502
        assert rig.conductor.of(AttemptFailed)[0].reason.startswith("connect")


async def test_an_unknown_replica_is_a_failed_attempt() -> None:
    async with running() as rig:
        rig.conductor.on_arrival = lambda event: [dispatch(event.request, replica="nowhere")]
        assert (await rig.ask(post(PLAIN))).status == 502
        assert "nowhere" in rig.conductor.of(AttemptFailed)[0].reason


async def test_a_connection_that_does_not_open_times_out() -> None:
    with silent_port() as port:
        settings = PlaneSettings(connect_timeout=50 * MS)
        async with running(settings=settings, more={"r2": ReplicaAddress("r2", "127.0.0.1", port)}) as rig:
            rig.conductor.on_arrival = lambda event: [dispatch(event.request, replica="r2")]
            assert (await rig.ask(post(PLAIN))).status == 502
            failed = rig.conductor.of(AttemptFailed)[0]
            assert (failed.status, failed.reason) == ("upstream_failed", "connect: timed out")


async def test_a_replica_that_closes_without_a_byte_failed() -> None:
    failed = await failure(saying(b"", keep=False))
    assert (failed.status, failed.http_status) == ("upstream_failed", None)
    assert not failed.reason.startswith("connect")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-ty",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n",
        b'HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{"id":',
        b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"id"',
        b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"id"\r\n',
        b'HTTP/1.1 200 OK\r\n\r\n{"id":',
        STREAM_HEAD,
        STREAM_HEAD + b"10\r\ndata: {",
        STREAM_HEAD + b"0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
    ],
)
async def test_an_answer_that_broke_off_before_anything_was_shown_may_be_tried_again(answer: bytes) -> None:
    failed = await failure(saying(answer, keep=False))
    assert failed.status == "upstream_reset"


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000,
    ],
)
async def test_an_answer_that_is_not_http_breaks_the_connection(answer: bytes) -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await asyncio.sleep(5)

    assert (await failure(script)).status == "upstream_reset"


async def test_an_answer_over_the_limit_is_not_held() -> None:
    failed = await failure(saying(json_answer({"x": "y" * 5000})), settings=PlaneSettings(answer_bytes=4096))
    assert (failed.status, failed.reason) == ("upstream_failed", "the answer is over 4096 bytes")
    endless = saying(STREAM_HEAD + chunk(b"data: " + b"x" * 5000))
    failed = await failure(endless, settings=PlaneSettings(answer_bytes=4096))
    assert failed.reason == "a frame of the stream is over 4096 bytes"


async def test_a_compressed_answer_cannot_be_read() -> None:
    failed = await failure(saying(json_answer(b"xx", extra="content-encoding: gzip\r\n")))
    assert failed.status == "upstream_failed"


ENGINE_DEAD = {"error": {"message": f"EngineCore died on {ENGINE_NAME}", "type": "InternalServerError", "code": 500}}


@pytest.mark.parametrize("keep", [True, False])
async def test_an_engine_that_answers_500_failed_and_its_words_are_the_reason(keep: bool) -> None:
    failed = await failure(saying(json_answer(ENGINE_DEAD, 500), keep=keep))
    assert (failed.status, failed.http_status, failed.reason) == ("engine_error", 500, "EngineCore died on alpaca")


async def test_half_an_answer_of_500_is_still_the_engines_error() -> None:
    failed = await failure(saying(b"HTTP/1.1 503 X\r\ncontent-length: 100\r\n\r\nbusy", keep=False))
    assert (failed.status, failed.http_status, failed.reason) == ("engine_error", 503, "busy")


async def test_an_engine_that_dies_in_its_first_frame_may_be_tried_again() -> None:
    frame = b"data: " + json.dumps(ENGINE_DEAD).encode() + b"\n\n"
    failed = await failure(saying(STREAM_HEAD + chunk(frame + DONE) + b"0\r\n\r\n"), STREAMED)
    assert (failed.status, failed.http_status, failed.reason) == ("engine_error", 200, "EngineCore died on alpaca")


async def test_a_second_attempt_answers_and_is_measured_on_its_own() -> None:
    async with running(first(saying(STREAM_HEAD + chunk(b": nothing shown"), keep=False))) as rig:
        rig.conductor.on_failure = lambda event: [dispatch(event.request, attempt=2)]
        answer = await rig.ask(post(STREAMED))
        assert answer.clean
        assert b"nothing shown" not in answer.body
        assert [event.attempt for event in rig.conductor.of(RequestDispatched)] == [1, 2]
        end = rig.conductor.end()
        assert end.status == "ok"
        assert end.measured.first_byte >= rig.conductor.of(RequestDispatched)[1].at


async def test_an_engine_error_in_the_middle_is_passed_on_and_recorded() -> None:
    frame = b"data: " + json.dumps(ENGINE_DEAD).encode() + b"\n\n"

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(ENGINE_NAME, {"content": "Hi"})))
        await asyncio.sleep(0.05)
        writer.write(chunk(frame + DONE) + b"0\r\n\r\n")

    async with running(script) as rig:
        answer = await rig.ask(post(STREAMED))
        assert answer.events()[-1]["error"]["message"] == "EngineCore died on alpaca"
        end = rig.conductor.end()
        assert (end.status, end.http_status, end.reason) == ("engine_error", 200, "EngineCore died on alpaca")
        assert end.measured.tokens_seen == 1


async def test_a_complaint_about_the_request_inside_the_stream_is_the_clients() -> None:
    frame = b'data: {"error":{"message":"too long","code":400}}\n\n'
    async with running(saying(STREAM_HEAD + chunk(frame + DONE) + b"0\r\n\r\n")) as rig:
        answer = await rig.ask(post(STREAMED))
        assert answer.events() == [{"error": {"message": "too long", "code": 400}}]
        assert (rig.conductor.end().status, rig.conductor.end().reason) == ("client_error", "too long")


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429, 501])
async def test_an_engines_answer_that_no_other_would_give_better_is_for_the_client(status: int) -> None:
    body = {"error": {"message": f"{ENGINE_NAME}: too long", "type": "BadRequestError", "code": status}}
    async with running(saying(json_answer(body, status, "retry-after: 7\r\nx-internal: a\r\n"))) as rig:
        answer = await rig.ask(post(STREAMED))
        assert answer.status == status
        assert answer.json()["error"]["message"] == "alpaca: too long"
        assert answer.headers["retry-after"] == "7"
        assert "x-internal" not in answer.headers
        end = rig.conductor.end()
        assert (end.status, end.http_status, end.reason) == ("client_error", status, "alpaca: too long")


async def test_a_replica_that_lost_the_adapter_is_a_failed_attempt() -> None:
    body = {"error": {"message": f"The model `{ENGINE_NAME}` does not exist.", "type": "NotFoundError", "code": 404}}
    failed = await failure(saying(json_answer(body, 404)))
    assert (failed.status, failed.http_status, failed.reason) == ("engine_error", 404, "not_registered")


@pytest.mark.parametrize("status", [401, 403, 307])
async def test_what_only_the_operator_can_mend_is_not_shown_to_the_client(status: int) -> None:
    failed = await failure(saying(json_answer({"error": "no"}, status, "location: http://inside/\r\n")))
    assert (failed.status, failed.http_status) == ("engine_error", status)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("ending", ["close", "garbage", "short", "silence"])
async def test_an_answer_that_breaks_off_after_something_was_shown_never_ends_cleanly(
    version: str, ending: str
) -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + chunk(event(ENGINE_NAME, {"content": "Hi"})))
        await writer.drain()
        await asyncio.sleep(0.02)
        if ending == "garbage":
            writer.write(b"zz\r\n")
        if ending == "short":
            writer.write(b"50\r\ndata: {")
        if ending in ("garbage", "silence"):
            await asyncio.sleep(5)
        return False

    idle = (100 if ending == "silence" else 60_000) * MS
    async with running(script, PlaneSettings(stream_idle_timeout=idle)) as rig:
        client = await rig.client()
        await client.send(post(STREAMED, version=version))
        answer = await client.answer()
        assert not answer.clean
        if version == "1.1":
            assert [e.get("model") for e in answer.events()] == ["alpaca", None]
            assert answer.events()[1]["error"]["type"] == "server_error"
        assert await client.at_end()
        end = rig.conductor.end()
        assert isinstance(end, RequestFinished)
        assert end.status == ("upstream_timeout" if ending == "silence" else "upstream_reset")
        assert (end.http_status, end.measured.tokens_seen) == (200, 1)
        assert end.measured.generated_tokens is None


async def test_a_connection_that_dies_after_done_was_a_whole_answer() -> None:
    async with running(saying(STREAM_HEAD + chunk(event(ENGINE_NAME, {"content": "Hi"}) + DONE), keep=False)) as rig:
        answer = await rig.ask(post(STREAMED))
        assert answer.clean
        assert rig.conductor.end().status == "ok"


async def test_a_replica_that_does_not_begin_to_answer_times_out() -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        await asyncio.sleep(5)

    failed = await failure(script, settings=PlaneSettings(first_byte_timeout=100 * MS))
    assert failed.status == "upstream_timeout"


@pytest.mark.parametrize(
    "began", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{", STREAM_HEAD + chunk(b"data: {")]
)
async def test_an_answer_of_which_nothing_was_shown_is_not_waited_for_once_its_replica_is_lost(began: bytes) -> None:
    async with running(first(saying(began, keep=True))) as rig:
        rig.conductor.on_failure = lambda event: [dispatch(event.request, attempt=2)]
        client = await rig.client()
        await client.send(post(PLAIN))
        await until(lambda: bool(rig.replica.requests))
        await asyncio.sleep(0.05)
        rig.plane.lose("r2")
        assert rig.conductor.of(AttemptFailed) == []
        rig.plane.lose("r1")
        assert (await client.answer()).json()["model"] == "alpaca"
        assert rig.conductor.of(AttemptFailed)[0].status == "upstream_failed"


async def test_a_stream_that_was_seen_goes_on_when_its_replica_is_lost() -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event(ENGINE_NAME, {"content": "Hi"})))
        await until(lambda: lost)
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    lost = False
    async with running(script) as rig:
        client = await rig.client()
        await client.send(post(STREAMED))
        await client.reader.readuntil(b"\r\n\r\n")
        await client.reader.readuntil(b"Hi")
        rig.plane.lose("r1")
        lost = True
        await client.reader.readuntil(DONE)
        await until(lambda: rig.conductor.names[-1] == "RequestFinished")
        assert rig.conductor.end().status == "ok"


async def test_answers_that_end_with_their_connection_are_whole_only_if_they_look_whole() -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        kind = "text/event-stream" if request.json().get("stream") else "application/json"
        body = (
            event(ENGINE_NAME, {"content": "Hi"}) + DONE if kind[0] == "t" else json.dumps(completion(request)).encode()
        )
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n\r\n".encode() + body)
        return False

    async with running(script) as rig:
        assert (await rig.ask(post(PLAIN))).json()["model"] == "alpaca"
        assert (await rig.ask(post(STREAMED))).body.endswith(DONE)
        assert [end.status for end in rig.conductor.of(RequestFinished)] == ["ok", "ok"]


async def test_a_stream_that_ends_with_its_connection_before_done_is_cut() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    async with running(saying(head + event(ENGINE_NAME, {"content": "Hi"}), keep=False)) as rig:
        answer = await rig.ask(post(STREAMED))
        assert not answer.clean
        assert rig.conductor.end().status == "upstream_reset"


async def test_a_1xx_is_skipped() -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
        await asyncio.sleep(0.01)
        await answer_plainly(request, writer)

    async with running(script) as rig:
        for _ in range(2):
            assert (await rig.ask(post(PLAIN))).json()["model"] == "alpaca"
        assert rig.replica.connections == 1


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    "extra", [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"garbage", b"\x00", b"HTTP/1.1 200 OK\r\n"]
)
async def test_bytes_after_an_answer_are_never_the_next_answer(extra: bytes, apart: bool) -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        answer = json_answer(completion(request))
        if apart:
            writer.write(answer)
            await asyncio.sleep(0.02)
            writer.write(extra)
        else:
            writer.write(answer + extra)

    async with running(script) as rig:
        client = await rig.client()
        for number in (1, 2, 3):
            await client.send(post(PLAIN))
            answer = await client.answer()
            assert answer.json()["id"] == "cmpl-" + rig.conductor.of(RequestDispatched)[number - 1].request
            await until(lambda: rig.replica.closed == number)  # noqa: B023 - used up here
        assert rig.replica.connections == 3


async def test_a_connection_that_the_replica_will_close_is_not_used_again() -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(json_answer(completion(request), extra="connection: close\r\n"))

    async with running(script) as rig:
        for _ in range(2):
            assert (await rig.ask(post(PLAIN))).status == 200
        assert rig.replica.connections == 2


async def test_a_stale_connection_is_replaced_within_the_same_attempt() -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        if request.connection == 1 and len(rig.replica.requests) == 2:
            return False  # closes without a byte, as a server does whose keep-alive time has just passed
        return await answer_plainly(request, writer)

    async with running(script, clock=still) as rig:
        for _ in range(2):
            assert (await rig.ask(post(PLAIN))).status == 200
        assert [request.connection for request in rig.replica.requests] == [1, 1, 2]
        first_id, *rest = [request.headers["x-request-id"] for request in rig.replica.requests]
        assert rest[0] == rest[1] != first_id
        assert len(rig.conductor.of(RequestDispatched)) == 2
        assert rig.conductor.of(AttemptFailed) == []


async def test_a_stale_connection_is_replaced_once() -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        return False if len(rig.replica.requests) > 1 else await answer_plainly(request, writer)

    async with running(script, clock=still) as rig:
        assert (await rig.ask(post(PLAIN))).status == 200
        assert (await rig.ask(post(PLAIN))).status == 502
        assert len(rig.replica.requests) == 3
        assert rig.conductor.of(AttemptFailed)[0].status == "upstream_failed"


async def test_an_engine_that_dies_of_a_request_on_a_used_connection_is_not_taken_for_unreachable() -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        if len(rig.replica.requests) == 1:
            return await answer_plainly(request, writer)
        rig.replica._server.close()  # type: ignore[union-attr]
        return False

    async with running(script, clock=still) as rig:
        assert (await rig.ask(post(PLAIN))).status == 200
        assert (await rig.ask(post(PLAIN))).status == 502
        reason = rig.conductor.of(AttemptFailed)[0].reason
        assert "connect" in reason
        assert not reason.startswith("connect")


async def test_a_used_connection_that_closes_late_is_not_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraledger.gateway.attempt.STALE", 10 * MS)

    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        if len(rig.replica.requests) == 1:
            return await answer_plainly(request, writer)
        await asyncio.sleep(0.05)
        return False

    async with running(script) as rig:
        assert (await rig.ask(post(PLAIN))).status == 200
        assert (await rig.ask(post(PLAIN))).status == 502
        assert len(rig.replica.requests) == 2


async def test_a_half_read_answer_on_a_used_connection_is_not_stale() -> None:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        if len(rig.replica.requests) == 1:
            return await answer_plainly(request, writer)
        writer.write(b"HTTP/1.1 200 OK\r\n")
        return False

    async with running(script) as rig:
        assert (await rig.ask(post(PLAIN))).status == 200
        assert (await rig.ask(post(PLAIN))).status == 502
        assert len(rig.replica.requests) == 2


async def test_idle_connections_close_with_age_or_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as rig:
        await rig.ask(post(PLAIN))
        assert rig.replica.closed == 0
        rig.plane.drop_idle("r1")
        await until(lambda: rig.replica.closed == 1)
        await rig.ask(post(PLAIN))
        monkeypatch.setattr("loraledger.gateway.upstream.IDLE", 0)
        await until(lambda: rig.replica.closed == 2)


async def test_a_connection_that_was_busy_when_its_replica_restarted_is_not_kept() -> None:
    async with running() as rig:
        client = await rig.client()
        await client.send(post(STREAMED))
        await until(lambda: bool(rig.replica.requests))
        rig.plane.drop_idle("r1")
        assert (await client.answer()).clean
        await until(lambda: rig.replica.closed == 1)


async def test_a_replica_can_move_and_be_added() -> None:
    async with running() as rig, running() as elsewhere:
        assert (await rig.ask(post(PLAIN))).status == 200
        rig.plane.set_address(ReplicaAddress("r1", "127.0.0.1", elsewhere.replica.port, "new-key"))
        assert (await rig.ask(post(PLAIN, path=CHAT))).status == 200
        assert elsewhere.replica.requests[0].headers["authorization"] == "Bearer new-key"
        rig.plane.set_address(ReplicaAddress("r9", "127.0.0.1", elsewhere.replica.port))
        rig.conductor.on_arrival = lambda event: [dispatch(event.request, replica="r9")]
        assert (await rig.ask(post(PLAIN))).status == 200
        assert "authorization" not in elsewhere.replica.requests[1].headers
        assert rig.plane.upstream_open == {"r1": 0, "r9": 0}
