"""What a client may do wrong or unusually, on the wire."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from loraledger.events import RequestArrived, RequestCancelled, RequestFinished
from loraledger.gateway import client as client_module
from loraledger.gateway.heads import has_bare_lf
from loraledger.gateway.settings import PlaneSettings

from .support import (
    CHAT,
    KEY,
    PLAIN,
    STREAMED,
    Received,
    answer_plainly,
    chunk,
    get,
    post,
    running,
    still,
    until,
)

MS = 1_000_000
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {KEY}\r\n".encode()
BODY = json.dumps(PLAIN).encode()


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        HEAD + b"Content-Length: +5\r\n\r\nhello",
        HEAD.replace(b"\r\n", b"\n") + b"\n",
        HEAD + b"X: a\r\n b\r\n\r\n",
        HEAD + b"X : a\r\n\r\n",
        HEAD + b"Host: other\r\n\r\n",
        HEAD.replace(b"POST /", b"POST http://h/") + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_a_malformed_head_is_answered_400_and_the_connection_closed(request_bytes: bytes) -> None:
    async with running() as rig:
        client = await rig.client()
        await client.send(request_bytes + get())
        answer = await client.answer()
        assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert answer.headers["connection"] == "close"
        assert await client.at_end()
        assert rig.conductor.events == []
        assert rig.plane.refused == {"invalid_request": 1}


async def test_a_head_may_come_in_pieces_after_an_empty_line() -> None:
    async with running() as rig:
        client = await rig.client()
        request = post(PLAIN)
        for piece in (b"\r", b"\n", request[:1], request[1:2], request[2:60], request[60:-1], request[-1:]):
            await client.send(piece)
            await asyncio.sleep(0.01)  # or they would be one read
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("lines", [1, 2])
async def test_an_empty_line_after_each_request_is_not_one_sent_ahead(lines: int) -> None:
    async with running(settings=PlaneSettings(pipelined=1)) as rig:
        client = await rig.client()
        for _ in range(4):
            await client.send(get() + b"\r\n" * lines)
            assert (await client.answer()).status == 200


async def test_a_head_in_small_pieces_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def count(data: bytes, start: int) -> bool:
        looked_at.append(len(data) - start)
        return has_bare_lf(data, start)

    monkeypatch.setattr(client_module, "has_bare_lf", count)
    async with running() as rig:
        client = await rig.client()
        head = get().removesuffix(b"\r\n") + b"A: " + b"a" * 3000
        for at in range(0, len(head), 100):
            await client.send(head[at : at + 100])
            await asyncio.sleep(0.002)
        await client.send(b"\r\n\r\n")
        assert (await client.answer()).status == 200
        assert len(looked_at) > 5
        assert sum(looked_at) <= len(head) + len(looked_at)


@pytest.mark.parametrize(
    ("line", "status"), [("x-api-key: sk-acme", 200), ("x-api-key: wrong", 401), ("X-API-KEY:", 401)]
)
async def test_the_key_may_come_where_anthropics_clients_put_it(line: str, status: int) -> None:
    async with running() as rig:
        assert (await rig.ask(f"GET /v1/models HTTP/1.1\r\nHost: h\r\n{line}\r\n\r\n".encode())).status == status


async def test_a_key_is_asked_for_again_when_it_comes_from_another_place() -> None:
    async with running() as rig:
        client = await rig.client()
        head = b"GET /v1/models HTTP/1.1\r\nHost: h\r\n%b\r\n\r\n"
        for line, names in (
            (b"x-api-key: sk-acme", 5),
            (b"x-api-key: sk-other", 1),
            (b"Authorization: Bearer sk-acme", 5),
        ):
            await client.send(head % line)
            assert len((await client.answer()).json()["data"]) == names


@pytest.mark.parametrize("whole", [True, False])
async def test_a_head_over_the_limit_is_answered_431_however_it_comes(whole: bool) -> None:
    async with running(settings=PlaneSettings(header_bytes=1000)) as rig:
        client = await rig.client()
        head = HEAD + b"X: " + b"a" * 1000 + b"\r\n\r\n"
        for part in [head] if whole else [head[at : at + 100] for at in range(0, len(head), 100)]:
            await client.send(part)
            await asyncio.sleep(0.002)
        answer = await client.answer()
        assert (answer.status, answer.headers["x-loraledger-reason"]) == (431, "headers_too_large")
        assert await client.at_end()


async def test_a_large_body_does_not_count_as_head() -> None:
    async with running(settings=PlaneSettings(header_bytes=1000)) as rig:
        assert (await rig.ask(post({**PLAIN, "user": "x" * 100_000}))).status == 200
        assert rig.replica.requests[0].json()["user"] == "x" * 100_000


async def test_a_body_over_the_limit_is_answered_413_before_it_is_read() -> None:
    async with running(settings=PlaneSettings(body_bytes=1000)) as rig:
        client = await rig.client()
        await client.send(HEAD + b"Content-Length: 1001\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.json()["error"]["code"]) == (413, "body_too_large")
        await client.send(get())  # as body, never as a request
        assert await client.at_end()
        assert rig.plane.refused == {"body_too_large": 1}


async def test_a_client_that_is_still_sending_can_read_its_413() -> None:
    async with running(settings=PlaneSettings(body_bytes=1000)) as rig:
        client = await rig.client()
        client.writer.write(HEAD + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3_000_000)
        assert (await client.answer()).status == 413
        await client.writer.drain()
        assert await client.at_end()


async def test_a_body_in_chunks_over_the_limit_is_answered_413() -> None:
    async with running(settings=PlaneSettings(body_bytes=1000)) as rig:
        client = await rig.client()
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(11):
            await client.send(chunk(b"x" * 100))
        assert (await client.answer()).status == 413


async def test_bodies_in_chunks_are_read_and_the_connection_kept() -> None:
    async with running() as rig:
        client = await rig.client()
        for _ in range(2):
            await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            for at in range(0, len(BODY), 7):
                await client.send(chunk(BODY[at : at + 7]))
                await asyncio.sleep(0.001)
            await client.send(b"0\r\nTrailer: x\r\n\r\n")
            assert (await client.answer()).status == 200
        assert json.loads(rig.replica.requests[0].body)["messages"] == PLAIN["messages"]


async def test_bytes_behind_a_body_in_chunks_are_dropped_and_the_client_is_told() -> None:
    async with running() as rig:
        client = await rig.client()
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(BODY) + b"0\r\n\r\n" + post(PLAIN))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.at_end()
        assert len(rig.replica.requests) == 1


@pytest.mark.parametrize("framing", [b"zz\r\n", b"5\nhello", b"-1\r\n", b"5\r\nhelloX\r\n"])
async def test_broken_chunks_are_answered_400(framing: bytes) -> None:
    async with running() as rig:
        client = await rig.client()
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + framing)
        assert (await client.answer()).status == 400
        assert await client.at_end()


@pytest.mark.parametrize(
    ("body", "param"),
    [(b"{", None), (b"[]", None), (b"", None), (b'{"model":null}', "model"), (b'{"model":7}', "model")],
)
async def test_a_bad_body_is_answered_400_and_the_connection_kept(body: bytes, param: str | None) -> None:
    async with running() as rig:
        client = await rig.client()
        for _ in range(2):
            await client.send(post(body))
            answer = await client.answer()
            assert (answer.status, answer.json()["error"]["param"]) == (400, param)
        assert rig.conductor.events == []


@pytest.mark.parametrize(
    "authorization", [None, "Bearer wrong", "Bearer", "Basic sk-acme", "sk-acme", f"Bearer {KEY}, Bearer {KEY}"]
)
async def test_without_a_valid_key_nothing_is_read_or_forwarded(authorization: str | None) -> None:
    async with running() as rig:
        client = await rig.client()
        headers = {} if authorization is None else {"Authorization": authorization}
        await client.send(post(PLAIN, key=None, **headers).removesuffix(BODY))  # the body is still to come
        answer = await client.answer()
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert await client.at_end()
        assert rig.conductor.events == []


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /v1/chat/completions", 405),
        ("OPTIONS /v1/chat/completions", 405),
        ("GET /", 404),
        ("GET /v1/models/alpaca", 404),
        ("GET /v1/models/", 404),
        ("GET //v1/models", 404),
        ("GET /v1//models", 404),
        ("GET /./v1/models", 404),
        ("GET /x/../v1/models", 404),
        ("GET /v1/model%73", 404),
        ("GET /V1/models", 404),
        ("GET /v1/models;x", 404),
        ("GET /v1/models#x", 400),
        ("GET /metrics", 404),
    ],
)
async def test_paths_match_exactly_or_not_at_all(line: str, status: int) -> None:
    async with running() as rig:
        client = await rig.client()
        await client.send(f"{line} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        answer = await client.answer()
        assert answer.status == status
        assert answer.headers.get("allow") == ("POST" if status == 405 else None)
        assert rig.replica.requests == []


@pytest.mark.parametrize(("path", "key"), [("/v1/models", KEY), ("/x", KEY), ("/v1/models", "wrong")])
async def test_a_head_request_gets_no_body_that_the_next_answer_could_begin_with(path: str, key: str) -> None:
    async with running() as rig:
        client = await rig.client()
        await client.send(get(path, key).replace(b"GET", b"HEAD") + get())
        refusal = await client.reader.readuntil(b"\r\n\r\n")
        assert int(refusal.split(b" ")[1]) in (401, 404, 405)
        assert b"Content-Length: 0" not in refusal
        assert (await client.answer()).json()["object"] == "list"


async def test_a_query_is_dropped() -> None:
    async with running() as rig:
        assert (await rig.ask(post(PLAIN, path=CHAT + "?user=x"))).status == 200
        assert rig.replica.requests[0].line == f"POST {CHAT} HTTP/1.1"


async def test_requests_sent_ahead_are_answered_in_order_each_once() -> None:
    async def slow_first(request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.03 if request.json()["n"] == 0 else 0)
        await answer_plainly(request, writer)

    async with running(slow_first) as rig:
        client = await rig.client()
        bodies: list[dict[str, object]] = [{**(STREAMED if n % 2 else PLAIN), "n": n} for n in range(6)]
        await client.send(b"".join(post(body, X_Request_Id=f"id-{body['n']}") for body in bodies) + get())
        answers = [await client.answer() for _ in range(7)]
        assert [answer.headers.get("x-request-id") for answer in answers[:6]] == [f"id-{n}" for n in range(6)]
        assert all(answer.clean for answer in answers)
        assert answers[6].json()["object"] == "list"
        assert [event.client_id for event in rig.conductor.of(RequestArrived)] == [f"id-{n}" for n in range(6)]
        assert len(rig.conductor.of(RequestFinished)) == 6
        assert [request.json()["n"] for request in rig.replica.requests] == list(range(6))


async def test_too_many_requests_sent_ahead_close_the_connection() -> None:
    async with running(settings=PlaneSettings(pipelined=3)) as rig:
        client = await rig.client()
        await client.send(get() * 6)
        assert [(await client.answer()).status for _ in range(5)] == [200] * 4 + [400]
        assert await client.at_end()


async def test_a_row_of_single_requests_is_not_sent_ahead() -> None:
    async with running(settings=PlaneSettings(pipelined=1)) as rig:
        client = await rig.client()
        for _ in range(5):
            await client.send(get())
            assert (await client.answer()).status == 200


async def test_a_client_that_sends_ahead_without_end_is_not_read_any_further() -> None:
    async def never(request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    async with running(never, PlaneSettings(header_bytes=10_000)) as rig:
        client = await rig.client()
        await client.send(post(PLAIN))
        client.writer.write(b"x" * 30_000_000)
        left = None
        while left != client.writer.transport.get_write_buffer_size():
            left = client.writer.transport.get_write_buffer_size()
            await asyncio.sleep(0.2)
        assert left > 10_000_000
        client.reset()
        await until(lambda: rig.plane.open_exchanges == 0)
        assert isinstance(rig.conductor.end(), RequestCancelled)


async def test_expect_100_is_answered_only_if_the_body_is_wanted() -> None:
    async with running() as rig:
        client = await rig.client()
        head, _, body = post(PLAIN, Expect="100-continue").partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        assert (await client.answer()).status == 100
        await client.send(body)
        assert (await client.answer()).status == 200
        await client.send(post(PLAIN, Expect="100-continue"))  # did not wait
        assert (await client.answer()).status == 200
        await client.send(post(PLAIN, key="wrong", Expect="100-continue").removesuffix(body))
        assert (await client.answer()).status == 401


async def test_an_http_1_0_client_gets_no_chunks() -> None:
    async with running() as rig:
        streamed = await rig.ask(post(STREAMED, version="1.0"))
        assert "transfer-encoding" not in streamed.headers
        assert (streamed.clean, streamed.headers["connection"]) == (True, "close")
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        assert (await rig.ask(post(PLAIN, version="1.0"))).json()["model"] == "alpaca"


async def test_connection_close_is_obeyed() -> None:
    async with running() as rig:
        client = await rig.client()
        await client.send(post(PLAIN, Connection="close"))
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.at_end()


@pytest.mark.parametrize(
    ("sent", "settings", "status"),
    [
        (b"", PlaneSettings(idle_timeout=50 * MS), None),
        (b"POST /v1", PlaneSettings(header_timeout=50 * MS), 408),
        (post(PLAIN)[:-5], PlaneSettings(body_timeout=50 * MS), 408),
    ],
)
async def test_what_does_not_arrive_in_time_is_not_waited_for(
    sent: bytes, settings: PlaneSettings, status: int | None
) -> None:
    async with running(settings=settings) as rig:
        client = await rig.client()
        await client.send(sent)
        if status is not None:
            answer = await client.answer()
            assert (answer.status, answer.json()["error"]["code"]) == (status, "request_timeout")
        assert await client.at_end()
        client.close()
        await until(lambda: rig.plane.connections == 0)


async def test_connections_over_the_limit_are_told_so() -> None:
    async with running(settings=PlaneSettings(connections=1), clock=still) as rig:
        kept = await rig.client()
        await kept.send(get())
        assert (await kept.answer()).status == 200
        over = await rig.client()
        answer = await over.answer()
        assert (answer.status, answer.json()["error"]["code"]) == (503, "too_many_connections")
        assert await over.at_end()
        await kept.send(get())
        assert (await kept.answer()).status == 200


async def test_streams_are_not_delayed_on_an_inherited_socket() -> None:
    sock = socket.socket()  # names no protocol: asyncio then leaves Nagle's algorithm on
    sock.bind(("127.0.0.1", 0))
    async with running(sock=sock) as rig:
        client = await rig.client()
        await client.send(get())
        await client.answer()
        served = next(iter(rig.plane._state.clients))._transport.get_extra_info("socket")
        assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_every_answer_is_dated() -> None:
    async with running() as rig:
        for request in (post(PLAIN), get(), get(key="wrong"), post(b"{")):
            assert (await rig.ask(request)).headers["date"].endswith("GMT")
