from __future__ import annotations

import pytest

from loraledger.errors import BadRequestError
from loraledger.gateway.heads import has_bare_lf, parse_head, upstream_head, upstream_prefix

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


@pytest.mark.parametrize("value", [b"a b", b"x" * 129, b"\xff", b""])
def test_an_id_that_could_not_be_echoed_safely_is_ignored(value: bytes) -> None:
    assert parse_head(GOOD + b"X-Request-Id: " + value + b"\r\n").client_id is None


def test_trace_context_is_kept_as_header_lines() -> None:
    head = parse_head(GOOD + b"Traceparent: 00-a\r\nTraceState: b=1\r\ntracestate: c=2\r\n")
    assert head.trace == b"traceparent: 00-a\r\ntracestate: b=1,c=2\r\n"
    assert parse_head(GOOD + b"tracestate: b=1\r\n").trace == b""


def test_the_head_for_a_replica_is_written_from_nothing_of_the_clients() -> None:
    prefix = upstream_prefix("::1", 8000, "secret", "/v1/completions")
    assert upstream_head(prefix, b"id-1", b"", 3) == (
        b"POST /v1/completions HTTP/1.1\r\nHost: [::1]:8000\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer secret\r\nX-Request-Id: id-1\r\nContent-Length: 3\r\n\r\n"
    )
    assert b"Authorization" not in upstream_prefix("h", 1, None, "/")
