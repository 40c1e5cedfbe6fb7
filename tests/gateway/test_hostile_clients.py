"""Clients that send what they should not: bytes in, answers out, what became of the connection, and what reached the replica.

Each case runs over real sockets against a gateway process and an emulated replica, while another tenant's request is half sent on
a connection that stays the same for the whole suite. That request must be answered as if nothing had happened.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from .hostile import BODY_BYTES, HEADER_BYTES, Answer, Peer, Site, site

PATH = "/v1/completions"
FINE = b'{"model":"mine","prompt":"Hi","max_tokens":2}'
SIZE = b"Content-Length: %d\r\n" % len(FINE)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(FINE), FINE)
KEPT, CLOSED = True, False


def head(
    *lines: bytes, target: str = PATH, method: str = "POST", version: str = "1.1", key: str = "key-mallory"
) -> bytes:
    """A head without its lengths and its end."""
    first = f"{method} {target} HTTP/{version}\r\nHost: gateway\r\nAuthorization: Bearer {key}\r\n"
    return first.encode() + b"".join(lines)


def post(body: bytes, *lines: bytes, **more: str) -> bytes:
    return head(b"Content-Length: %d\r\n" % len(body), *lines, **more) + b"\r\n" + body


def ask(*lines: bytes, **more: str) -> bytes:
    """A request that is fine but for what is added."""
    return head(*lines, SIZE, **more) + b"\r\n" + FINE


def framed(*lines: bytes, body: bytes = FINE) -> bytes:
    """A request whose length the case states."""
    return head(*lines) + b"\r\n" + body


def chunks(*pieces: bytes) -> bytes:
    return head(CHUNKED) + b"\r\n" + b"".join(pieces)


def swapped(old: bytes, new: bytes) -> bytes:
    """A request that is fine but for what is replaced."""
    request = ask()
    assert old in request
    return request.replace(old, new, 1)


LIST = head(method="GET", target="/v1/models") + b"\r\n"


@dataclass(frozen=True)
class Case:
    """``sent``, in parts; ``statuses`` of all answers; ``kept``: whether another request is answered afterwards.

    A 100 as first status is waited for before the second part is sent.
    """

    name: str
    sent: bytes | tuple[bytes, ...]
    statuses: tuple[int, ...]
    kept: bool
    reached: int = 0
    reason: str | None = None


def bad(name: str, sent: bytes | tuple[bytes, ...]) -> Case:
    """400, closed, nothing reached the replica: not even the innocent request that follows."""
    parts = (sent,) if isinstance(sent, bytes) else sent
    return Case(name, (*parts, ask()), (400,), CLOSED, 0, "invalid_request")


def fine(name: str, sent: bytes) -> Case:
    return Case(name, sent, (200,), KEPT, 1)


def body(name: str, sent: bytes, status: int = 400, reason: str = "invalid_request") -> Case:
    """A body that is refused after it was read: the connection goes on."""
    return Case(name, post(sent), (status,), KEPT, 0, reason)


LENGTHS = [
    bad("two lengths that differ", framed(SIZE, b"Content-Length: 5\r\n")),
    bad("two lengths that are equal", framed(SIZE, SIZE)),
    bad("a list of equal lengths", framed(SIZE.replace(b"\r\n", b", %d\r\n" % len(FINE)))),
    bad("a length with a plus", framed(SIZE.replace(b": ", b": +"))),
    bad("a length with a minus", framed(SIZE.replace(b": ", b": -"))),
    bad("a length in hex", framed(b"Content-Length: 0x2d\r\n")),
    bad("a length with a space inside", framed(b"Content-Length: 4 5\r\n")),
    bad("a length with an underscore", framed(b"Content-Length: 4_5\r\n")),
    bad("a length with a fraction", framed(b"Content-Length: 45.0\r\n")),
    bad("a length of no digits", framed(b"Content-Length:\r\n")),
    bad("a length in foreign digits", framed("Content-Length: ٤٥\r\n".encode())),
    bad("a length beyond 64 bits", framed(b"Content-Length: 18446744073709551661\r\n")),
    bad("a space before the colon of the length", framed(SIZE.replace(b":", b" :"))),
    Case("a length over the limit", (framed(b"Content-Length: 999999999999999\r\n"), ask()), (413,), CLOSED),
    Case("a length that is too short", framed(b"Content-Length: 7\r\n") + b"\r\n\r\n", (400, 400), CLOSED),
    fine("a length with leading zeros", framed(b"Content-Length: 000%d\r\n" % len(FINE))),
    fine("a length in tabs and spaces", framed(b"content-LENGTH:\t %d \t\r\n" % len(FINE))),
]

CODINGS = [
    bad("length before chunks", framed(SIZE, CHUNKED, body=IN_CHUNKS)),
    bad("chunks before length", framed(CHUNKED, SIZE, body=IN_CHUNKS)),
    bad("chunked twice in one line", framed(b"Transfer-Encoding: chunked, chunked\r\n", body=IN_CHUNKS)),
    bad("chunked twice in two lines", framed(CHUNKED, CHUNKED, body=IN_CHUNKS)),
    bad("chunked and identity in two lines", framed(CHUNKED, b"Transfer-Encoding: identity\r\n", body=IN_CHUNKS)),
    bad("gzip, then chunked", framed(b"Transfer-Encoding: gzip, chunked\r\n", body=IN_CHUNKS)),
    bad("chunked, then identity", framed(b"Transfer-Encoding: chunked, identity\r\n", body=IN_CHUNKS)),
    bad("xchunked", framed(b"Transfer-Encoding: xchunked\r\n", body=IN_CHUNKS)),
    bad("chunked in quotes", framed(b'Transfer-Encoding: "chunked"\r\n', body=IN_CHUNKS)),
    bad("chunked with a parameter", framed(b"Transfer-Encoding: chunked;q=1\r\n", body=IN_CHUNKS)),
    bad("chunked behind a vertical tab", framed(b"Transfer-Encoding: \x0bchunked\r\n", body=IN_CHUNKS)),
    bad("chunked folded into the next line", framed(b"Transfer-Encoding:\r\n chunked\r\n", body=IN_CHUNKS)),
    bad("chunked after a space before the colon", framed(b"Transfer-Encoding : chunked\r\n", body=IN_CHUNKS)),
    bad("no coding at all", framed(b"Transfer-Encoding:\r\n", body=IN_CHUNKS)),
    bad("chunks in HTTP/1.0", head(CHUNKED, version="1.0") + b"\r\n" + IN_CHUNKS),
    Case("chunks without a header", framed(b"Transfer_Encoding: chunked\r\n", body=IN_CHUNKS), (400, 400), CLOSED),
    fine("chunked in capitals", framed(b"TRANSFER-encoding: CHUNKED\r\n", body=IN_CHUNKS)),
    fine("chunked between tabs", framed(b"Transfer-Encoding:\tchunked\t\r\n", body=IN_CHUNKS)),
]

CHUNKS = [
    bad("a chunk of negative size", chunks(b"-1\r\n", FINE)),
    bad("a chunk size with 0x", chunks(b"0x2d\r\n", FINE, b"\r\n0\r\n\r\n")),
    bad("a chunk size with a plus", chunks(b"+2d\r\n", FINE, b"\r\n0\r\n\r\n")),
    bad("a chunk size behind a space", chunks(b" 2d\r\n", FINE, b"\r\n0\r\n\r\n")),
    bad("a chunk size before a space", chunks(b"2d \r\n", FINE, b"\r\n0\r\n\r\n")),
    bad("a chunk size beyond 64 bits", chunks(b"1000000000000002d\r\n", FINE, b"\r\n0\r\n\r\n")),
    bad("a chunk size without digits", chunks(b";x\r\n", FINE, b"\r\n0\r\n\r\n")),
    bad("a chunk size that ends in LF", chunks(b"2d\n", FINE, b"\r\n0\r\n\r\n")),
    bad("a chunk that ends in LF", chunks(b"2d\r\n", FINE, b"\n0\r\n\r\n")),
    bad("a chunk that is longer than its size", chunks(b"2c\r\n", FINE, b"\r\n0\r\n\r\n")),
    bad("an extension that ends in LF", chunks(b"2d;a\n", FINE, b"\r\n0\r\n\r\n")),
    bad("an extension with a bare CR", chunks(b"2d;a\rb\r\n", FINE, b"\r\n0\r\n\r\n")),
    bad("an extension with NUL", chunks(b"2d;\x00\r\n", FINE, b"\r\n0\r\n\r\n")),
    bad("a line end in a quoted extension", chunks(b'2d;a="\r\n"\r\n', FINE, b"\r\n0\r\n\r\n")),
    bad("a length among the trailers", chunks(b"2d\r\n", FINE, b"\r\n0\r\nContent-Length: 3\r\n\r\n")),
    bad("a trailer that is folded", chunks(b"2d\r\n", FINE, b"\r\n0\r\n a\r\n\r\n")),
    bad("a trailer that ends in LF", chunks(b"2d\r\n", FINE, b"\r\n0\r\nA: b\n\r\n")),
    Case("a chunk over the limit", chunks(b"ffffff\r\n", b"x" * (BODY_BYTES + 1)), (413,), CLOSED),
    Case("a flood of extensions", chunks(*[b"1;" + b"x" * 4000 + b"\r\n \r\n"] * 150), (413,), CLOSED),
    Case("one endless extension", chunks(b"1;" + b"x" * (3 * BODY_BYTES)), (413,), CLOSED),
    Case("endless trailers", chunks(b"2d\r\n", FINE, b"\r\n0\r\n", b"A: b\r\n" * BODY_BYTES), (413,), CLOSED),
    Case("a request behind chunks", chunks(IN_CHUNKS, ask()), (200,), CLOSED, 1),
    Case("a request behind an empty chunked body", chunks(b"0\r\n\r\n", ask()), (400,), CLOSED),
    fine("a chunk size with leading zeros", chunks(b"000000000000000000000002D\r\n", FINE, b"\r\n0\r\n\r\n")),
    fine("an extension, quoted", chunks(b'2d;a="b;c";d\r\n', FINE, b"\r\n0;e\r\n\r\n")),
    fine("trailers", chunks(b"2d\r\n", FINE, b"\r\n0\r\nX-Vllm-Priority: 1\r\nAuthorization: x\r\n\r\n")),
    fine("chunks of one byte", chunks(*(b"1\r\n%c\r\n" % byte for byte in FINE), b"0\r\n\r\n")),
]

HEADS = [
    bad("lines that end in LF", ask().replace(b"\r\n", b"\n")),
    bad("one line that ends in LF", swapped(b"gateway\r\n", b"gateway\n")),
    bad("a CR inside a value", ask(b"A: b\rc\r\n")),
    bad("a CR inside a name", ask(b"A\rB: c\r\n")),
    bad("a header folded with a space", ask(b"A: b\r\n c\r\n")),
    bad("a header folded with a tab", ask(b"A: b\r\n\tc\r\n")),
    bad("the first header folded", swapped(b"Host", b" Host")),
    bad("a space before a colon", ask(b"A : b\r\n")),
    bad("a space inside a name", ask(b"A B: c\r\n")),
    bad("a name of no characters", ask(b": b\r\n")),
    bad("a line without a colon", ask(b"A\r\n")),
    bad("NUL inside a value", ask(b"A: b\x00c\r\n")),
    bad("NUL inside a name", ask(b"A\x00: b\r\n")),
    bad("DEL inside a value", ask(b"A: b\x7f\r\n")),
    bad("a high byte inside a name", ask("Ä: b\r\n".encode())),
    bad("two hosts", ask(b"Host: gateway\r\n")),
    bad("no host", swapped(b"Host: gateway\r\n", b"")),
    bad("a host with a path", swapped(b"Host: gateway", b"Host: gateway/v1")),
    bad("a host with a user", swapped(b"Host: gateway", b"Host: a@gateway")),
    bad("two keys in two lines", ask(b"Authorization: Bearer key-bystander\r\n")),
    bad("a method in small letters", swapped(b"POST", b"post")),
    bad("two spaces before the target", swapped(b"POST ", b"POST  ")),
    bad("a tab before the target", swapped(b"POST ", b"POST\t")),
    bad("a space behind the version", swapped(b"HTTP/1.1", b"HTTP/1.1 ")),
    bad("HTTP/1.2", swapped(b"HTTP/1.1", b"HTTP/1.2")),
    bad("HTTP/0.9", b"GET /v1/models\r\n\r\n"),
    bad("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    bad("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    Case("a head over the limit", ask(b"A: " + b"b" * HEADER_BYTES + b"\r\n"), (431,), CLOSED),
    Case("a head without an end", (head(), *[b"A: b\r\n" * 100] * 60), (431,), CLOSED),
    Case("a target without an end", (b"GET /", *[b"a" * 1000] * 30), (431,), CLOSED),
    Case("more headers than the limit holds", ask(b"a:\r\n" * HEADER_BYTES), (431,), CLOSED),
    fine("thousands of headers within the limit", ask(b"a:\r\n" * 3900)),
    fine("high bytes inside a value", ask("A: ä\r\n".encode(), "X-Request-Id: ä\r\n".encode())),
    fine("an empty line before a request", b"\r\n" + ask()),
    fine("two empty lines before a request", b"\r\n\r\n" + ask()),
]

TARGETS = [
    bad("an absolute target", ask(target="http://gateway/v1/completions")),
    bad("a target of another scheme", ask(target="file:///v1/completions")),
    bad("an authority", b"CONNECT gateway:443 HTTP/1.1\r\nHost: gateway\r\n\r\n"),
    bad("an asterisk", b"OPTIONS * HTTP/1.1\r\nHost: gateway\r\n\r\n"),
    bad("a fragment", ask(target=PATH + "#x")),
    bad("a space in the target", ask(target=PATH + " x")),
    bad("a target that is not ASCII", swapped(b"completions", "completionsé".encode())),
    bad("no target", swapped(PATH.encode(), b"")),
    bad("NUL in the target", swapped(b"completions", b"completions\x00")),
    Case("an encoded path", ask(target="/v1/completion%73"), (404,), CLOSED, 0, "unknown_path"),
    Case("an encoded slash", ask(target="/v1%2fcompletions"), (404,), CLOSED, 0, "unknown_path"),
    Case("a doubled slash", ask(target="//v1/completions"), (404,), CLOSED, 0, "unknown_path"),
    Case("dots in the path", ask(target="/v1/x/../completions"), (404,), CLOSED, 0, "unknown_path"),
    Case("a slash behind the path", ask(target=PATH + "/"), (404,), CLOSED, 0, "unknown_path"),
    Case("a path parameter", ask(target=PATH + ";x"), (404,), CLOSED, 0, "unknown_path"),
    Case("an engine's own path", ask(target="/v1/load_lora_adapter"), (404,), CLOSED, 0, "unknown_path"),
    Case("another method", ask(method="PUT"), (405,), CLOSED, 0, "method_not_allowed"),
    Case("TRACE", head(method="TRACE") + b"\r\n", (405,), KEPT, 0, "method_not_allowed"),
    fine("a query", ask(target=PATH + "?model=theirs&lora_path=/etc")),
]

WAITING = b"Expect: 100-continue\r\n"
CONNECTIONS = [
    Case("a body that waits to be asked for", (head(SIZE, WAITING) + b"\r\n", FINE), (100, 200), KEPT, 1),
    Case("a body that waits, without a key", head(SIZE, WAITING, key="x") + b"\r\n", (401,), CLOSED),
    Case("a body that waits, at no path", head(SIZE, WAITING, target="/") + b"\r\n", (404,), CLOSED),
    Case("a body that waits, too large", head(b"Content-Length: 999999\r\n", WAITING) + b"\r\n", (413,), CLOSED),
    Case("another expectation", ask(b"Expect: 200-ok\r\n"), (417,), CLOSED, 0, "expectation_failed"),
    Case("two expectations", ask(b"Expect: 100-continue, x\r\n"), (417,), CLOSED, 0, "expectation_failed"),
    Case("an expectation of HTTP/1.0", ask(b"Expect: 200-ok\r\n", version="1.0"), (200,), CLOSED, 1),
    Case("HTTP/1.0", ask(version="1.0"), (200,), CLOSED, 1),
    Case("HTTP/1.0 that asks to be kept", ask(b"Connection: keep-alive\r\n", version="1.0"), (200,), CLOSED, 1),
    Case("a request to close among others", ask(b"Connection: a, CLOSE\r\n"), (200,), CLOSED, 1),
    Case("three requests at once", ask() + LIST + ask(), (200, 200, 200), KEPT, 2),
    Case("a bad one among requests sent ahead", ask() + ask(b"A\r\n") + ask(), (200, 400), CLOSED, 1),
    Case("a wrong key among requests sent ahead", ask() + ask(key="x") + ask(), (200, 401), CLOSED, 1),
    Case("another tenant's key among them", ask() + ask(key="key-bystander") + LIST, (200, 404, 200), KEPT, 1),
    Case("too many sent ahead", LIST * 9, (200, 200, 200, 200, 200, 400), CLOSED),
    fine(
        "an upgrade to HTTP/2",
        ask(b"Connection: Upgrade, HTTP2-Settings\r\n", b"Upgrade: h2c\r\nHTTP2-Settings: AAM\r\n"),
    ),
    fine("an upgrade to a web socket", ask(b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n")),
    fine(
        "headers that name other hosts",
        ask(b"X-Forwarded-Host: x\r\nX-Original-URL: /metrics\r\nForwarded: host=x\r\n"),
    ),
    Case("keys in two places that differ", ask(b"x-api-key: key-bystander\r\n"), (401,), CLOSED, 0, "invalid_api_key"),
    Case("a key of another tenant", ask(key="key-bystander"), (404,), KEPT, 0, "model_not_found"),
    fine("the key in two places", ask(b"x-api-key: key-mallory\r\n")),
]

TYPES = [
    Case("a body in gzip", ask(b"Content-Encoding: gzip\r\n"), (415,), CLOSED, 0, "unsupported_media_type"),
    Case("a body in two codings", ask(b"Content-Encoding: identity, br\r\n"), (415,), CLOSED),
    Case("a form", ask(b"Content-Type: application/x-www-form-urlencoded\r\n"), (415,), CLOSED),
    Case("text", ask(b"Content-Type: text/plain\r\n"), (415,), CLOSED),
    Case("two types", ask(b"Content-Type: text/plain\r\nContent-Type: application/json\r\n"), (400,), CLOSED),
    fine("JSON with a parameter", ask(b"Content-Type: Application/JSON; charset=utf-8\r\n")),
    fine("a body that says it is as it is", ask(b"Content-Encoding: identity\r\n")),
]

MINE = b'{"model":"mine","prompt":"Hi","max_tokens":2'
BODIES = [
    body("no body", b""),
    body("half a body", FINE[:-1]),
    body("two documents", FINE + FINE),
    body("a list", b"[%b]" % FINE),
    body("a byte order mark", b"\xef\xbb\xbf" + FINE),
    body("UTF-16", FINE.decode().encode("utf-16")),
    body("UTF-16 without a mark", FINE.decode().encode("utf-16-le")),
    body("UTF-32", FINE.decode().encode("utf-32")),
    body("bytes that are no UTF-8", MINE + b',"user":"\xff"}'),
    body("a surrogate in UTF-8", MINE + b',"user":"\xed\xa0\x80"}'),
    body("half a surrogate pair", MINE + b',"user":"\\ud83d"}'),
    body("gzip that says nothing of it", b"\x1f\x8b\x08\x00" + bytes(20)),
    body("100,000 brackets", MINE + b',"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    body("100,000 objects", MINE + b',"a":' + b'{"a":' * 40_000 + b"1" + b"}" * 40_001),
    body("NaN", MINE + b',"temperature":NaN}'),
    body("Infinity", MINE + b',"temperature":-Infinity}'),
    body("a comment", MINE + b"/**/}"),
    body("a comma too many", MINE + b",}"),
    body("single quotes", FINE.replace(b'"', b"'")),
    body("a control character in a string", MINE + b',"user":"\x01"}'),
    body("no model", b'{"prompt":"Hi"}'),
    body("a model of null", b'{"model":null,"prompt":"Hi"}'),
    body("a model that is a list", b'{"model":["mine"],"prompt":"Hi"}'),
    body("a stream of 1", MINE + b',"stream":1}'),
    body("a template", MINE + b',"chat_template":"{% for i in range(10**9) %}x{% endfor %}"}'),
    body("a template among its arguments", MINE + b',"chat_template_kwargs":{"chat_template":"x"}}'),
    body("arguments for the media reader", MINE + b',"media_io_kwargs":{"video":{"num_frames":-1}}}'),
    body("the last of two models", MINE + b',"model":"theirs"}', 404, "model_not_found"),
    body("an escaped name of the model", MINE + b',"mod\\u0065l":"theirs"}', 404, "model_not_found"),
    body("an escaped model", b'{"model":"\\u0074heirs","prompt":"Hi"}', 404, "model_not_found"),
    body("the base, not granted", b'{"model":"base","prompt":"Hi"}', 404, "model_not_found"),
    body("the engine's name of the model", b'{"model":"mine@000000000000","prompt":"Hi"}', 404, "model_not_found"),
    body("a model with NUL", b'{"model":"mine\\u0000","prompt":"Hi"}', 404, "model_not_found"),
    body("a model with a newline", b'{"model":"mine\\r\\nX: y","prompt":"Hi"}', 404, "model_not_found"),
    body("a model of 200,000 characters", b'{"model":"%b"}' % (b"m" * 200_000), 404, "model_not_found"),
    fine("a name of the model that is escaped", post(FINE.replace(b"model", b"\\u006dodel"))),
    fine("a number of 4,000 digits", post(MINE + b',"future":' + b"9" * 4000 + b"}")),
    fine("500 brackets", post(MINE + b',"future":' + b"[" * 500 + b"]" * 500 + b"}")),
    fine("the first of two models", post(b'{"model":"theirs",' + MINE[1:] + b"}")),
]

CASES = [*LENGTHS, *CODINGS, *CHUNKS, *HEADS, *TARGETS, *CONNECTIONS, *TYPES, *BODIES]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("hostile")) as found:
        yield found


@dataclass
class Bystander:
    """Another tenant's connection, the same one for the whole suite."""

    peer: Peer
    numbers: Iterator[int]
    said: str | None = None

    def begin(self) -> bytes:
        """Send half of a request; returns the other half."""
        asked = json.dumps({"model": "theirs", "prompt": "Hello", "max_tokens": 3, "user": f"b{next(self.numbers)}"})
        request = post(asked.encode(), key="key-bystander")
        self.peer.send(request[: len(request) // 2])
        return request[len(request) // 2 :]

    def end(self, rest: bytes) -> None:
        self.peer.send(rest)
        answer = self.peer.answer()
        assert answer.status == 200, answer
        text = answer.json()["choices"][0]["text"]
        self.said = self.said or text
        assert text == self.said


@pytest.fixture(scope="module")
def bystander(place: Site) -> Iterator[Bystander]:
    with place.peer() as peer:
        yield Bystander(peer, itertools.count())


def reached(place: Site) -> list[Any]:
    """What the replica was given since the last look, without the bystander's."""
    taken, place.tap.requests[:] = list(place.tap.requests), []
    return [request for request in taken if not request.json().get("user", "").startswith("b")]


def played(peer: Peer, case: Case) -> list[Answer]:
    first, *rest = [case.sent] if isinstance(case.sent, bytes) else case.sent
    peer.send(first)
    answers = [peer.answer()] if case.statuses[0] == 100 else []
    peer.send(*rest)
    answers += [peer.answer() for _ in case.statuses[len(answers) :]]
    assert tuple(answer.status for answer in answers) == case.statuses, answers
    if case.kept:
        peer.send(LIST)
        assert [model["id"] for model in peer.answer().json()["data"]] == ["mine"]
    else:
        assert peer.ended()
    return answers


def test_names_of_cases_are_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 45


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_hostile_client_gets_its_answer_and_nobody_else_is_harmed(
    place: Site, bystander: Bystander, case: Case
) -> None:
    reached(place)
    rest = bystander.begin()
    try:
        with place.peer() as peer:
            answers = played(peer, case)
    finally:
        bystander.end(rest)
    if case.reason is not None:
        assert (answers[-1].reason, answers[-1].json()["error"]["code"]) == (case.reason, case.reason)
        assert len(answers[-1].body) < 1000
    given = reached(place)
    assert len(given) == case.reached
    for request in given:
        assert request.line == f"POST {PATH} HTTP/1.1"
        assert request.json()["model"].startswith("mine@")
        assert set(request.headers) == {"host", "content-type", "x-request-id", "content-length"}
