from __future__ import annotations

from random import Random

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.errors import BadRequestError
from loraledger.gateway.heads import RequestHead, has_bare_lf, parse_head, upstream_head, upstream_prefix

GOOD = b"POST /v1/chat/completions?a=1 HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nAUTHORIZATION:Bearer k \r\n"


def test_a_good_head_is_read_and_its_query_dropped() -> None:
    head = parse_head(GOOD + b"x-request-id: \tme-1\t\r\nConnection: keep-alive, foo\r\nExpect: 100-Continue\r\n")
    assert (head.method, head.path, head.minor) == (b"POST", b"/v1/chat/completions", 1)
    assert (head.length, head.chunked, head.has_body, head.keep_alive) == (5, False, True, True)
    assert (head.authorization, head.client_id, head.expects_continue) == (b"Bearer k", "me-1", True)
    assert head.trace == b""


def test_a_head_without_a_body_has_none() -> None:
    head = parse_head(b"GET / HTTP/1.1\r\nhost:\r\nconnection: foo, Close\r\n")
    assert (head.length, head.chunked, head.has_body, head.keep_alive) == (0, False, False, False)


def test_an_http_1_0_head_needs_no_host_and_never_keeps_alive() -> None:
    assert not parse_head(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n").keep_alive


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (GOOD.replace(b"\r\nHost", b"\nHost"), "LF without CR"),
        (GOOD + b"a: b\rc\r\n", "CR without LF"),
        (GOOD + b"A: b\r\n c\r\n", "folded"),
        (GOOD + b"A : b\r\n", "before the colon"),
        (GOOD.replace(b"Host:", b"Host :"), "before the colon"),
        (GOOD.replace(b"/v1", b"http://h/v1"), "must be a path"),
        (GOOD.replace(b"/v1/chat/completions?a=1", b"*"), "must be a path"),
        (GOOD.replace(b"POST /v1/chat/completions?a=1", b"CONNECT h:443"), "must be a path"),
        (GOOD.replace(b"?a=1", b"?a=1#b"), "fragment"),
        (GOOD.replace(b"?a=1", b"?a=\xc3\xa9"), "malformed"),
        (GOOD.replace(b"Host: h", b"Host: h/v1"), "Host is no name"),
        (GOOD.replace(b"Host: h", b"Host: a b"), "Host is no name"),
        (GOOD.replace(b"Host: h", b"Host: u@h"), "Host is no name"),
        (GOOD + b"X-Api-Key: a\r\nx-api-key: a\r\n", "x-api-key is given twice"),
        (GOOD + b"Content-Type: a\r\nContent-Type: a\r\n", "content-type is given twice"),
        (GOOD + b"Content-Encoding: gzip\r\nContent-Encoding: identity\r\n", "content-encoding is given twice"),
        (GOOD + b"Expect: a\r\nExpect: 100-continue\r\n", "expect is given twice"),
        (GOOD + b"N\xc3\xa9: a\r\n", "malformed"),
        (GOOD.replace(b"HTTP/1.1", b"HTTP/2.0"), "HTTP/1.1 or"),
        (GOOD.replace(b"HTTP/1.1", b"HTTP/1.1 "), "HTTP/1.1 or"),
        (b"PRI * HTTP/2.0\r\n", "must be a path"),
        (GOOD.replace(b"POST ", b"POST  "), "malformed"),
        (GOOD.replace(b"POST", b"post"), "malformed"),
        (GOOD + b"no colon\r\n", "malformed"),
        (GOOD + b": no name\r\n", "malformed"),
        (GOOD + b"A: nul\x00\r\n", "malformed"),
        (GOOD + b"Transfer-Encoding: chunked\r\n", "both"),
        (GOOD + b"Content-Length: 5\r\n", "content-length is given twice"),
        (GOOD + b"content-length: 6\r\n", "content-length is given twice"),
        (GOOD + b"Host: other\r\n", "host is given twice"),
        (GOOD + b"Authorization: Bearer other\r\n", "authorization is given twice"),
        (GOOD.replace(b"Length: 5", b"Length: +5"), "one number"),
        (GOOD.replace(b"Length: 5", b"Length: -5"), "one number"),
        (GOOD.replace(b"Length: 5", b"Length: 5, 5"), "one number"),
        (GOOD.replace(b"Length: 5", b"Length: 0x5"), "one number"),
        (GOOD.replace(b"Length: 5", b"Length: "), "one number"),
        (GOOD.replace(b"Length: 5", b"Length: 5_0"), "one number"),
        (GOOD.replace(b"Length: 5", b"Length: " + b"9" * 16), "one number"),
        (GOOD.replace(b"Content-Length: 5", b"Transfer-Encoding: gzip, chunked"), "only Transfer-Encoding"),
        (GOOD.replace(b"Content-Length: 5", b"Transfer-Encoding: identity"), "only Transfer-Encoding"),
        (GOOD.replace(b"Content-Length: 5", b"Transfer-Encoding: chunked").replace(b"/1.1", b"/1.0"), "only Transfer"),
        (GOOD.replace(b"Host: h\r\n", b""), "needs a Host"),
    ],
)
def test_a_head_that_the_grammar_does_not_allow_is_refused_by_name(raw: bytes, words: str) -> None:
    with pytest.raises(BadRequestError, match="malformed request head") as caught:
        parse_head(raw)
    assert words in caught.value.message


def test_a_bad_head_of_the_largest_size_is_refused_in_one_pass() -> None:
    raw = GOOD + b"a: b\r\n" * 10_000 + b"bad\r\n"
    with pytest.raises(BadRequestError):
        parse_head(raw)


def test_a_bare_lf_is_seen_before_the_head_is_complete() -> None:
    assert has_bare_lf(b"GET / HTTP/1.1\r\nHost: x\n\n")
    assert has_bare_lf(b"\n")
    assert not has_bare_lf(b"GET / HTTP/1.1\r\nHost: x\r")
    assert not has_bare_lf(b"a\r\n", 2)
    assert has_bare_lf(b"a\n", 1)


@pytest.mark.parametrize("value", [b"a b", b"x" * 129, b"\xff", b""])
def test_an_id_that_could_not_be_echoed_safely_is_ignored(value: bytes) -> None:
    assert parse_head(GOOD + b"X-Request-Id: " + value + b"\r\n").client_id is None


PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_trace_context_is_kept_as_header_lines() -> None:
    head = parse_head(GOOD + b"Traceparent: " + PARENT + b"\r\nTraceState: b=1\r\ntracestate: c=2\r\n")
    assert head.trace == b"traceparent: " + PARENT + b"\r\ntracestate: b=1,c=2\r\n"
    assert parse_head(GOOD + b"tracestate: b=1\r\n").trace == b""


@pytest.mark.parametrize("parent", [b"", PARENT.upper(), PARENT + b"\xff", b"00 " + PARENT, PARENT + b"-" * 128])
def test_what_is_no_trace_context_does_not_reach_a_replica(parent: bytes) -> None:
    assert parse_head(GOOD + b"Traceparent: " + parent + b"\r\nTraceState: b=1\r\n").trace == b""


@pytest.mark.parametrize("state", [b"", b"\xff", b"x" * 513, b"a=1\r\ntracestate:" + b"x" * 510])
def test_state_that_nobody_must_pass_on_is_left_behind(state: bytes) -> None:
    head = parse_head(GOOD + b"Traceparent: " + PARENT + b"\r\nTracestate: " + state + b"\r\n")
    assert head.trace == b"traceparent: " + PARENT + b"\r\n"


@pytest.mark.parametrize(
    ("kind", "json"),
    [
        (b"application/json", True),
        (b"Application/JSON", True),
        (b"application/json; charset=utf-8", True),
        (b"application/json ;charset=utf-8", True),
        (b"application/json;", True),
        (b"", False),
        (b"text/plain", False),
        (b"application/jsonp", False),
        (b"application/vnd.api+json", False),
        (b"application/json, text/plain", False),
        (b"application/x-www-form-urlencoded", False),
        (b"multipart/form-data; boundary=application/json", False),
    ],
)
def test_the_kind_of_body_is_read_as_engines_do(kind: bytes, json: bool) -> None:
    assert parse_head(GOOD).json
    assert parse_head(GOOD + b"Content-Type: " + kind + b"\r\n").json is json


@pytest.mark.parametrize(
    ("coding", "coded"),
    [(b"", False), (b"identity", False), (b"Identity", False), (b"gzip", True), (b"identity, br", True)],
)
def test_a_body_that_is_coded_is_known_as_such(coding: bytes, coded: bool) -> None:
    assert parse_head(GOOD + b"Content-Encoding: " + coding + b"\r\n").coded is coded


def test_of_an_http_1_0_client_nothing_is_expected() -> None:
    raw = GOOD + b"Expect: 200-ok\r\n"
    assert parse_head(raw).expects == b"200-ok"
    assert parse_head(raw.replace(b"HTTP/1.1", b"HTTP/1.0")).expects == b""


def test_the_head_for_a_replica_is_written_from_nothing_of_the_clients() -> None:
    prefix = upstream_prefix("::1", 8000, "secret", "/v1/completions")
    assert upstream_head(prefix, b"id-1", b"", 3) == (
        b"POST /v1/completions HTTP/1.1\r\nHost: [::1]:8000\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer secret\r\nX-Request-Id: id-1\r\nContent-Length: 3\r\n\r\n"
    )
    assert b"Authorization" not in upstream_prefix("h", 1, None, "/")


STARTS = (
    *(b"GET /v1/models?x=%41 HTTP/1.0", b"GET * HTTP/1.1", b"CONNECT h:1 HTTP/1.1", b"GET http://h/ HTTP/1.1"),
    *(
        b"G@T / HTTP/1.1",
        b"GET  / HTTP/1.1",
        b"GET / HTTP/1.1 ",
        b"GET / HTTP/1",
        b"GET / HTTP/11.1",
        b"GET /\x7f HTTP/1.1",
    ),
    *(b"GET /\xc3\xa9 HTTP/1.1", b"GET /\x00 HTTP/1.1", b"GET /", b"GET / http/1.1", b" GET / HTTP/1.1", b"", b"{}"),
)
GOOD_LINES = (
    *(b"Content-Length: 5", b"content-length:  05 ", b"Transfer-Encoding: chunked", b"Transfer-Encoding: CHUNKED\t"),
    *(b"Connection: close", b"Connection: Keep-Alive, X", b"Upgrade: h2c", b"Expect: 100-continue", b"X:", b"X: \xe4"),
    *(b"Content-Type: application/json", b"X-Request-Id: 1", b"Authorization: Bearer k", b"Accept: */*", b"!#$: {}"),
)
ODD_LINES = (
    *(b"host:h", b"Host: ", b"Host : h", b"Host: \xff", b"Host: a b", b"Content-Length: 6", b"Content-Length: 0x5"),
    *(
        b"Content-Length: 5, 5",
        b"Content-Length: 5,6",
        b"Content-Length: -5",
        b"Content-Length: 5_0",
        b"Content-Length: ",
    ),
    *(b"Content-Length: " + b"5" * 21, b"Content-Length: \xb2", b"Transfer-Encoding: gzip", b"Transfer-Encoding: "),
    *(b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding: identity", b"Transfer-Encoding: xchunked"),
    *(b" folded", b"\tfolded", b"X: a\x00b", b"X: a\x0bb", b"X: a\rb", b"X: a\nb", b"X\x00: a", b"X\xe4: a", b"X y: a"),
    *(b"X(: a", b"X: a\x7f", b":", b"X"),
)


def drawn(seed: int) -> bytes:
    """A head of good and odd pieces, and now and then a byte too many, too few or wrong."""
    rng = Random(seed)
    lines = [rng.choice(STARTS) if rng.random() < 0.2 else b"POST /v1/completions HTTP/1.1"]
    lines += [b"Host: h"] if rng.random() < 0.9 else []
    lines += [rng.choice(ODD_LINES if rng.random() < 0.2 else GOOD_LINES) for _ in range(rng.randrange(4))]
    raw = b"".join(line + (b"\n" if rng.random() < 0.02 else b"\r\n") for line in lines)
    if rng.random() < 0.2:
        at = rng.randrange(len(raw))
        raw = raw[:at] + bytes(rng.choices(b"\x00\t\r\n :,;/ha\xff", k=rng.randrange(3))) + raw[at + rng.randrange(2) :]
    return raw


def by_h11(raw: bytes) -> h11.Request | None:
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(raw + b"\r\n")
    try:
        event = peer.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Request) else None


def by_us(raw: bytes) -> RequestHead | None:
    try:
        return parse_head(raw)
    except BadRequestError:
        return None


@settings(max_examples=3000)
@given(seed=st.integers(0, 2**64))
def test_what_h11_refuses_is_refused_and_what_both_take_is_read_alike(seed: int) -> None:
    raw = drawn(seed)
    ours, theirs = by_us(raw), by_h11(raw)
    if ours is None:
        return
    assert theirs is not None, raw
    fields: dict[bytes, bytes] = dict(theirs.headers)
    assert (ours.method, ours.path) == (theirs.method, theirs.target.partition(b"?")[0])
    assert ours.minor == int(theirs.http_version[-1:])
    assert ours.length == int(fields.get(b"content-length", b"0"))
    assert ours.chunked == (fields.get(b"transfer-encoding") == b"chunked")
    assert ours.authorization == fields.get(b"authorization")


def test_heads_that_are_drawn_are_of_every_kind() -> None:
    heads = [drawn(seed) for seed in range(1000)]
    assert sum(by_us(raw) is not None for raw in heads) > 250
    assert sum(by_h11(raw) is None for raw in heads) > 250
    assert sum(by_us(raw) is None and by_h11(raw) is not None for raw in heads) > 50
