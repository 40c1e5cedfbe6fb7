"""What a replica may do to a request, one case each, and who may notice: the table of docs/operations.md in code.

Each case runs in front of a real kernel with two replicas, streams beside on both, and goes on until the bad replica is used again.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from loraledger.events import AttemptFailed
from loraledger.gateway.settings import PlaneSettings, ReplicaAddress
from loraledger.gateway.sockets import reset
from loraledger.kernel.settings import Limits

from .bad_replica import MS, BadFleet, asking, bad_fleet, frames, shut_port
from .support import (
    DONE,
    PLAIN,
    STREAM_HEAD,
    Answer,
    RawClient,
    Received,
    Script,
    answer_plainly,
    chunk,
    completion,
    event,
    json_answer,
    post,
    running,
    silent_port,
    until,
)

STALL = PlaneSettings(first_byte_timeout=600 * MS, stream_idle_timeout=400 * MS)
SMALL = PlaneSettings(answer_bytes=64 * 1024)
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
OPEN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
TOKEN = event("base", {"content": "Hi"})
DIED = b'data: {"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}\n\n'


@dataclass(frozen=True)
class Case:
    """``end`` is what becomes of it:

    - ``elsewhere``: the attempt failed before a byte was shown, and the other replica answered;
    - ``here``: the replica's answer is taken, without a second attempt;
    - ``refused``: no second attempt, and an error of ours;
    - ``cut``: some was shown, then an error event, and no clean end.

    ``status``: of the row.
    """

    does: Script
    end: str = "elsewhere"
    status: str = "ok"
    stream: bool = False
    settings: PlaneSettings | None = None
    resent: bool = False


def say(*parts: bytes, then: str = "wait") -> Script:
    """Writes ``parts``, 20 ms apart, and then waits for the gateway to leave, closes, resets, or keeps the connection."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        for number, part in enumerate(parts):
            await asyncio.sleep(0.02 if number else 0)
            writer.write(part)
        await writer.drain()
        if then == "wait":
            await asyncio.sleep(30)
        if then == "reset":
            await asyncio.sleep(0.02)  # else the reset overtakes what was written
            reset(writer.transport)  # type: ignore[arg-type]
        return then == "keep"

    return script


def endlessly(start: bytes, again: bytes, pause: float = 0.0) -> Script:
    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        writer.write(start)
        while True:
            writer.write(again)
            await writer.drain()
            await asyncio.sleep(pause)

    return script


def plainly(change: Callable[[dict[str, Any], Received], bytes]) -> Script:
    """A whole answer, changed."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> bool:
        writer.write(change(completion(request), request))
        return True

    return script


def other_id(request: Received) -> str:
    boot, _, number = request.headers["x-request-id"].rpartition("-")
    return f"{boot}-{int(number) - 1}"


def head(line: str, *fields: str) -> bytes:
    return "\r\n".join((line, "content-type: application/json", *fields, "", "")).encode()


async def foreign_stream(request: Received, writer: asyncio.StreamWriter) -> None:
    frame = TOKEN.replace(b'"id":"c1"', b'"id":"chatcmpl-%b"' % other_id(request).encode())
    writer.write(STREAM_HEAD + chunk(frame) + chunk(DONE) + b"0\r\n\r\n")


async def closes_a_used_connection(request: Received, writer: asyncio.StreamWriter) -> bool:
    """As a server does whose keep-alive time has passed just now; then it answers."""
    return False


CASES: dict[str, Case] = {
    # --- the head -----------------------------------------------------------------------------------------------------
    "a status line of another protocol": Case(say(b"SSH-2.0-OpenSSH_9.6\r\n")),
    "HTTP/0.9: a body without a head": Case(say(b'{"id":"x"}', then="close")),
    "HTTP/0.9 in the status line": Case(say(head("HTTP/0.9 200 OK", "content-length: 2") + b"{}", then="keep")),
    "HTTP/2.0 in the status line": Case(say(head("HTTP/2.0 200 OK", "content-length: 2") + b"{}", then="keep")),
    "status 99": Case(say(head("HTTP/1.1 99 X", "content-length: 2") + b"{}")),
    "status 099, with a body before the real answer": Case(
        say(head("HTTP/1.1 099 X", "content-length: 2") + b"{}" + json_answer({"usage": {}}), then="keep")
    ),
    "status 600": Case(say(head("HTTP/1.1 600 X", "content-length: 2") + b"{}", then="keep")),
    "no reason phrase": Case(
        plainly(
            lambda body, _: head("HTTP/1.1 200", f"content-length: {len(json.dumps(body))}") + json.dumps(body).encode()
        ),
        end="here",
    ),
    "a header without a colon": Case(say(head("HTTP/1.1 200 OK", "nonsense", "content-length: 2") + b"{}")),
    "a folded header": Case(say(head("HTTP/1.1 200 OK", "a: b", " c", "content-length: 2") + b"{}")),
    "a header line without end": Case(endlessly(b"HTTP/1.1 200 OK\r\na: ", b"b" * 4096)),
    "headers without end": Case(endlessly(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 500)),
    "a whole head of 100 KB": Case(
        say(head("HTTP/1.1 200 OK", *(f"x{n}: {'y' * 100}" for n in range(1000)), "content-length: 2") + b"{}")
    ),
    "100 Continue and 103 Early Hints without end": Case(
        endlessly(b"", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * 50)
    ),
    "another protocol is switched to": Case(
        say(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
    ),
    "a head that stalls": Case(say(b"HTTP/1.1 200 OK\r\ncontent-"), "refused", "upstream_timeout", settings=STALL),
    "a head that drips": Case(
        endlessly(b"HTTP/1.1 200 OK\r\na: ", b"b", 0.05), "refused", "upstream_timeout", settings=STALL
    ),
    # --- framing ------------------------------------------------------------------------------------------------------
    "two lengths": Case(say(head("HTTP/1.1 200 OK", "content-length: 2", "content-length: 2") + b"{}", then="keep")),
    "length and chunks": Case(
        say(head("HTTP/1.1 200 OK", "content-length: 2", "transfer-encoding: chunked") + chunk(b"{}") + b"0\r\n\r\n")
    ),
    "chunks and length": Case(
        say(head("HTTP/1.1 200 OK", "transfer-encoding: chunked", "content-length: 2") + chunk(b"{}") + b"0\r\n\r\n")
    ),
    "a coding below the chunks": Case(
        say(head("HTTP/1.1 200 OK", "transfer-encoding: gzip, chunked") + chunk(gzip.compress(b"{}")) + b"0\r\n\r\n")
    ),
    "a length that is too long, then the end": Case(
        say(head("HTTP/1.1 200 OK", "content-length: 50") + b'{"id":', then="close")
    ),
    "a length that is too long, then silence": Case(
        say(head("HTTP/1.1 200 OK", "content-length: 50") + b'{"id":'),
        "refused",
        "upstream_timeout",
        settings=STALL,
    ),
    "a length that is too short": Case(
        plainly(lambda body, _: head("HTTP/1.1 200 OK", "content-length: 40") + json.dumps(body).encode())
    ),
    "a chunk that is cut off": Case(say(CHUNKED + b'50\r\n{"id":', then="close")),
    "a chunk size that is none": Case(say(CHUNKED + b"zz\r\n{}\r\n")),
    "a chunk size beyond all bounds": Case(say(CHUNKED + b"f" * 20 + b"\r\n{}\r\n")),
    "extensions of a chunk without end": Case(endlessly(CHUNKED + b"2;a=", b"b" * 4096)),
    "a trailer without end": Case(endlessly(CHUNKED + chunk(b"{}") + b"0\r\n", b"a: b\r\n" * 500)),
    "a trailer line without end": Case(endlessly(CHUNKED + chunk(b"{}") + b"0\r\na: ", b"b" * 4096)),
    "two answers at once": Case(
        plainly(lambda body, _: json_answer(body) + json_answer({"id": "smuggled"})), end="here"
    ),
    "204 with a body": Case(say(head("HTTP/1.1 204 X", "content-length: 2") + b"{}", then="keep")),
    "204 without one": Case(say(b"HTTP/1.1 204 No Content\r\n\r\n", then="keep")),
    "202": Case(plainly(lambda body, _: json_answer(body, 202))),
    "304 with a body": Case(say(head("HTTP/1.1 304 X", "content-length: 2") + b"{}", then="keep")),
    # --- what is answered ---------------------------------------------------------------------------------------------
    "500": Case(say(json_answer({"error": {"message": "EngineCore died"}}, 500), then="keep")),
    "200 with a page": Case(say(json_answer(b"<html>Welcome</html>"), then="keep")),
    "a redirect": Case(say(json_answer(b"", 307, "location: http://inside/\r\n"), then="keep")),
    "gzip that was not asked for": Case(
        say(json_answer(gzip.compress(b"{}"), extra="content-encoding: gzip\r\n"), then="keep")
    ),
    "gzip that is not said": Case(say(json_answer(gzip.compress(b"{}")), then="keep")),
    "the id of another request": Case(
        plainly(lambda body, request: json_answer({**body, "id": f"chatcmpl-{other_id(request)}"}))
    ),
    "the id of another request in the head": Case(
        plainly(lambda body, request: json_answer(body, extra=f"x-request-id: {other_id(request)}\r\n"))
    ),
    "the id of another request in a stream": Case(foreign_stream, stream=True),
    "an answer that drips": Case(
        endlessly(head("HTTP/1.1 200 OK", "content-length: 5000"), b" ", 0.05),
        "refused",
        "upstream_timeout",
        settings=STALL,
    ),
    "an answer over the limit": Case(say(json_answer({"x": "y" * 70_000}), then="keep"), settings=SMALL),
    # --- the connection -----------------------------------------------------------------------------------------------
    "no answer": Case(say(), "refused", "upstream_timeout", settings=STALL),
    "the end before the head": Case(say(then="close")),
    "a reset before the head": Case(say(then="reset")),
    "a reset inside the head": Case(say(b"HTTP/1.1 200 OK\r\n", then="reset")),
    "a used connection that closes just then": Case(closes_a_used_connection, end="here", resent=True),
    # --- a stream, before its first frame -----------------------------------------------------------------------------
    "a stream without a frame": Case(say(STREAM_HEAD + b"0\r\n\r\n", then="keep"), stream=True),
    "a stream that stalls before its first frame": Case(
        say(STREAM_HEAD), "refused", "upstream_timeout", stream=True, settings=STALL
    ),
    "a first frame that says the engine died": Case(
        say(STREAM_HEAD + chunk(DIED + DONE) + b"0\r\n\r\n", then="keep"), stream=True
    ),
    "a first frame without end": Case(
        endlessly(STREAM_HEAD, chunk(b"data: " + b"x" * 4096)), stream=True, settings=SMALL
    ),
    "a whole stream without its last event, at once": Case(
        say(STREAM_HEAD + chunk(TOKEN) + b"0\r\n\r\n", then="keep"), stream=True
    ),
    # --- a stream, once it was seen -----------------------------------------------------------------------------------
    "an engine that dies mid-stream": Case(
        say(STREAM_HEAD + chunk(TOKEN), chunk(DIED + DONE) + b"0\r\n\r\n", then="keep"),
        "here",
        "engine_error",
        stream=True,
    ),
    "a stream that stalls": Case(
        say(STREAM_HEAD + chunk(TOKEN)), "cut", "upstream_timeout", stream=True, settings=STALL
    ),
    "a frame that drips": Case(
        endlessly(STREAM_HEAD + chunk(TOKEN) + chunk(b"data: "), chunk(b"x"), 0.05),
        "cut",
        "upstream_timeout",
        stream=True,
        settings=STALL,
    ),
    "a frame without end": Case(
        endlessly(STREAM_HEAD + chunk(TOKEN), chunk(b"data: " + b"x" * 4096)),
        "cut",
        "upstream_failed",
        stream=True,
        settings=SMALL,
    ),
    "a reset mid-stream": Case(say(STREAM_HEAD + chunk(TOKEN), then="reset"), "cut", "upstream_reset", stream=True),
    "the end after half a frame": Case(
        say(STREAM_HEAD + chunk(TOKEN), chunk(TOKEN[:30]), then="close"),
        "cut",
        "upstream_reset",
        stream=True,
    ),
    "the end after half a frame, framed as whole": Case(
        say(STREAM_HEAD + chunk(TOKEN), chunk(TOKEN[:30]) + b"0\r\n\r\n", then="keep"),
        "cut",
        "upstream_reset",
        stream=True,
    ),
    "the end after half a frame, without framing": Case(
        say(OPEN + TOKEN, TOKEN[:30], then="close"), "cut", "upstream_reset", stream=True
    ),
    "bad framing mid-stream": Case(say(STREAM_HEAD + chunk(TOKEN), b"zz\r\n"), "cut", "upstream_reset", stream=True),
    "the last event is missing": Case(
        say(STREAM_HEAD + chunk(TOKEN), chunk(TOKEN) + b"0\r\n\r\n", then="keep"),
        "cut",
        "upstream_reset",
        stream=True,
    ),
    "the end is missing after the last event": Case(
        say(STREAM_HEAD + chunk(TOKEN + DONE)), "here", stream=True, settings=STALL
    ),
    "no end of what follows the last event": Case(
        endlessly(STREAM_HEAD + chunk(TOKEN + DONE), chunk(b": more\n\n"), 0.05),
        "here",
        stream=True,
        settings=STALL,
    ),
    "bad framing after the last event": Case(say(STREAM_HEAD + chunk(TOKEN + DONE), b"zz\r\n"), "here", stream=True),
}


@dataclass
class Outcome:
    """How one request went."""

    answer: Answer
    row: dict[str, Any]
    sent: list[str]
    reached: int
    """Times that the request came to ``r1``."""


@pytest.fixture
async def fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BadFleet]:
    async with bad_fleet(monkeypatch, getattr(request, "param", None)) as fleet:
        yield fleet


async def meet(fleet: BadFleet, case: Case) -> Outcome:
    """One request to ``r1``, with streams beside it on both replicas, and a look at what it may not have touched."""
    beside = [await fleet.beside(name) for name in ("r1", "r2")]
    if case.resent:
        assert (await fleet.ask(asking("first", False), "r1", "first")).status == 200
    fleet.bad = case.does
    before = len(fleet.performer.dispatched)
    answer = await fleet.ask(asking("Hello", case.stream, max_tokens=4), "r1")
    row = await fleet.row()
    sent = [command.replica for command in fleet.performer.dispatched[before:]]
    reached = sum(b"Hello" in request.body for request in fleet.replica.requests)
    for stream in beside:
        await stream.goes_on()
    await until(lambda: fleet.r1.up and not fleet.r1.doubted)
    again = await fleet.ask(asking("again", False), "r1", "again")
    assert (again.status, (await fleet.row("again"))["replica"]) == (200, "r1")
    for stream in beside:
        await stream.stop()
    await fleet.settle()
    return Outcome(answer, row, sent, reached)


def check_stream(answer: Answer, case: Case) -> None:
    events = frames(answer.body)
    if case.end == "cut":
        assert not answer.clean
        assert events[-1]["error"]["code"] == case.status
        assert [e["choices"][0]["delta"] for e in events[:-1]] == [{"content": "Hi"}] * (len(events) - 1)
        assert b"[DONE]" not in answer.body
    else:
        assert answer.clean
        assert DONE in answer.body


@pytest.mark.parametrize(
    ("fleet", "case"), [pytest.param(case.settings, case, id=name) for name, case in CASES.items()], indirect=["fleet"]
)
async def test_a_replica_that_misbehaves_harms_nobody_else(
    fleet: BadFleet, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = await meet(fleet, case)
    answer, row = outcome.answer, outcome.row
    assert outcome.sent == (["r1", "r2"] if case.end == "elsewhere" else ["r1"])
    assert outcome.reached == (2 if case.resent else 1)
    assert (row["status"], row["retries"]) == (case.status, len(outcome.sent) - 1)
    assert row["replica"] == outcome.sent[-1]
    broke = case.end == "elsewhere" or case.status in ("upstream_failed", "upstream_reset", "engine_error")
    assert fleet.doubted == ({"r1"} if broke else set())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    if case.end == "refused":
        assert (answer.status, answer.json()["error"]["code"]) == (504, case.status)
        assert answer.clean
    else:
        assert answer.status == 200
        assert b"smuggled" not in answer.body
        if case.stream:
            check_stream(answer, case)
        else:
            assert answer.json()["model"] == "base"


@pytest.mark.parametrize("fleet", [PlaneSettings(connect_timeout=100 * MS)], indirect=True)
@pytest.mark.parametrize("refuses", [True, False])
async def test_a_replica_that_cannot_be_reached_costs_nobody_an_answer(fleet: BadFleet, refuses: bool) -> None:
    beside = [await fleet.beside(name) for name in ("r1", "r2")]
    with silent_port() as silent:
        fleet.plane.set_address(ReplicaAddress("r1", "127.0.0.1", shut_port() if refuses else silent))
        assert (await fleet.ask(asking("Hello", False, max_tokens=4), "r1")).status == 200
    row = await fleet.row()
    assert (row["status"], row["retries"], row["replica"]) == ("ok", 1, "r2")
    assert fleet.doubted == {"r1"}
    fleet.plane.set_address(ReplicaAddress("r1", "127.0.0.1", fleet.replica.port))
    await until(lambda: not fleet.r1.doubted)
    assert (await fleet.ask(asking("again", False), "r1", "again")).status == 200
    for stream in beside:
        await stream.goes_on()
        await stream.stop()
    await fleet.settle()


async def test_a_used_connection_that_closes_twice_is_the_replicas_fault(fleet: BadFleet) -> None:
    assert (await fleet.ask(asking("first", False), "r1", "first")).status == 200
    fleet.bad, fleet.always = closes_a_used_connection, True
    assert (await fleet.ask(asking("Hello", False, max_tokens=4), "r1")).status == 200
    assert [command.replica for command in fleet.performer.dispatched] == ["r1", "r1", "r2"]
    assert sum(b"Hello" in request.body for request in fleet.replica.requests) == 2
    assert ((await fleet.row())["status"], fleet.doubted) == ("ok", {"r1"})


async def test_a_replica_that_closes_each_used_connection_is_not_sent_every_request_twice() -> None:
    served: Counter[int] = Counter()

    async def each_second_one(request: Received, writer: asyncio.StreamWriter) -> bool:
        served[request.connection] += 1
        return served[request.connection] < 2 and await answer_plainly(request, writer)

    requests = 200
    async with running(each_second_one) as rig:
        client = await rig.client()
        answered = 0
        for _ in range(requests):
            await client.send(post(PLAIN))
            answered += (await client.answer()).status == 200
        again = len(rig.replica.requests) - requests
        assert 8 <= again <= 8 + 0.1 * requests
        assert len(rig.conductor.of(AttemptFailed)) == requests - answered > 0


FAILS: dict[str, Script] = {
    "closes": say(then="close"),
    "answers 500": say(json_answer({"error": {"message": "no"}}, 500), then="keep"),
    "is not HTTP": say(b"SSH-2.0\r\n", then="close"),
}


@pytest.mark.parametrize("fails", FAILS.values(), ids=FAILS)
async def test_the_retry_budget_holds_when_one_replica_of_three_breaks_every_request(
    monkeypatch: pytest.MonkeyPatch, fails: Script
) -> None:
    requests, limits = 500, Limits(retry_ratio=0.1, retry_burst=8)
    answers: Counter[tuple[int, str]] = Counter()
    async with bad_fleet(monkeypatch, limits=limits, healthy=2, speed=50.0) as fleet:
        fleet.bad, fleet.always = fails, True

        async def caller(first: int) -> None:
            client = await RawClient.to(fleet.plane.port)
            for number in range(first, requests, 10):
                await client.send(post(asking("Hello", False, max_tokens=2), X_Request_Id=f"q{number}"))
                answer = await asyncio.wait_for(client.answer(), 30)
                answers[answer.status, answer.headers.get("x-loraledger-reason", "")] += 1
            client.close()

        await asyncio.gather(*(caller(first) for first in range(10)))
        await fleet.settle()
        sent = Counter(command.replica for command in fleet.performer.dispatched)
        reached = sum("completions" in request.line for request in fleet.replica.requests)
    assert answers.keys() <= {(200, ""), (503, "retry_budget_spent")}
    assert sum(answers.values()) == requests == len({row["client_id"] for row in fleet.rows}) == len(fleet.rows)
    retried = sent.total() - requests
    assert 0 < retried <= limits.retry_burst + limits.retry_ratio * requests
    assert retried == sum(int(str(row["retries"])) for row in fleet.rows)
    assert reached == sent["r1"] > 0
    assert answers[200, ""] == requests - (sent["r1"] - retried)
