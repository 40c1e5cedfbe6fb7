"""The promises of the gateway's readers (``tests/fuzz``), on every input that was kept and on 2,000 new ones a reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.bodies import peek
from fuzz.requests import KEY, Asked, http, read_by_h11
from fuzz.strategies import cut_and_joined
from fuzz.streams import ENGINE_NAME, frames, sse

CORPUS = Path(__file__).parent.parent / "fuzz/corpus"
HERE = Path()
TARGETS = {"http": http, "sse": sse, "peek": peek}
KEPT = sorted(path for target in TARGETS for path in (CORPUS / target).iterdir())
SEEDS = {target: [path.read_bytes()[:400] for path in KEPT if path.parent.name == target] for target in TARGETS}

HEADERS = st.lists(
    st.sampled_from(
        [
            *(b"X: y", b"Connection: close", b"Connection: keep-alive", b"Expect: 100-continue", b"X-Request-Id: me"),
            *(b"Content-Type: application/json", b"Content-Encoding: gzip", b"Transfer-Encoding: identity", b"Host: i"),
            *(b"X : y", b" folded", b"Content-Length: 3", b"X:\xe9", b"TraceParent: 00-ab", b"x-api-key: sk-acme"),
        ]
    ),
    max_size=3,
    unique=True,
)
LINES = st.sampled_from(
    [
        *[b"POST /v1/chat/completions HTTP/1.1"] * 3,
        *(b"POST /v1/completions?a=b HTTP/1.1", b"POST /v1/completions HTTP/1.0", b"GET /v1/models HTTP/1.1"),
        *(b"POST /tokenize HTTP/1.1", b"POST /v1/messages HTTP/1.1", b"GET /metrics HTTP/1.1", b"post / HTTP/1.1"),
    ]
)
BODY = b'{"model":"alpaca","prompt":"one two three","messages":[]}'
BODIES = st.sampled_from([BODY, BODY, BODY.replace(b"alpaca", b"base"), BODY.replace(b"alpaca", b"none"), b"{}", b"x"])


def one_request(line: bytes, headers: list[bytes], body: bytes, chunks: list[int], keyed: bool) -> bytes:
    """A request, in chunks of such sizes if there are any, else with its length."""
    head = [line, b"Host: h", *([b"Authorization: Bearer " + KEY] if keyed else []), *headers]
    if line.startswith(b"GET"):
        return b"\r\n".join(head) + b"\r\n\r\n"
    if not chunks:
        return b"\r\n".join([*head, b"Content-Length: %d" % len(body)]) + b"\r\n\r\n" + body
    framed = b""
    for size in chunks:
        framed += b"%x;e\r\n%b\r\n" % (len(body[:size]), body[:size]) if body else b""
        body = body[size:]
    framed += b"%X\r\n%b\r\n" % (len(body), body) if body else b""
    return b"\r\n".join([*head, b"Transfer-Encoding: chunked"]) + b"\r\n\r\n" + framed + b"0\r\nT: x\r\n\r\n"


REQUESTS = st.lists(
    st.builds(
        one_request,
        LINES,
        HEADERS,
        BODIES,
        st.lists(st.integers(1, 30), max_size=3),
        st.sampled_from([True] * 4 + [False]),
    ),
    min_size=1,
    max_size=3,
).map(b"".join)

_SAID: st.SearchStrategy[object] = st.sampled_from(
    [
        ENGINE_NAME,
        "alpaca",
        "",
        "é",
        '"model":"x"',
        f'{{"model":"{ENGINE_NAME}"}}',
        None,
        0,
        1.5,
        True,
        [],
        {},
        {"model": ENGINE_NAME},
    ]
)
_NAMES = st.sampled_from(["model", "choices", "usage", "type", "delta", "response", "message", "error", "id", "x"])
DOCUMENTS = st.recursive(
    _SAID, lambda inner: st.dictionaries(_NAMES, inner, max_size=4) | st.lists(inner, max_size=2), max_leaves=6
)
FRAMES = st.builds(
    lambda event, document, compact, end: (
        event + b"data: " + json.dumps(document, separators=(",", ":") if compact else None).encode() + end * 2
    ),
    st.sampled_from([b"", b"", b"event: x\n", b": comment\n\n", b"id: 1\n"]),
    DOCUMENTS,
    st.booleans(),
    st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"]),
)
STREAMS = st.lists(FRAMES | st.sampled_from(SEEDS["sse"]), max_size=4).map(b"".join)

FIELDS = st.sampled_from(
    [
        *(
            b'"model":"alpaca"',
            b'"model":"b"',
            b'"\\u006dodel":"c"',
            b'"stream":true',
            b'"stream":false',
            b'"stream":null',
        ),
        *(b'"stream_options":{"include_usage":false}', b'"stream_options":null', b'"stream_options":{"x":[1,{"a":2}]}'),
        *(b'"prompt":"x"', b'"messages":[{"role":"user","content":"\\u00e9"}]', b'"max_tokens":5', b'"max_tokens":-1'),
        *(b'"n":2', b'"lora_path":"/x"', b'"\\u006cora_id":1', b'"priority":9', b'"rid":"a"', b'"x":1e5', b'"x":1.50'),
        *(
            b'"store":true',
            b'"previous_response_id":null',
            b'"chat_template":null',
            b'"x":"\xc3\xa9"',
            b'"":0',
            b'"x":-0.0',
        ),
        *(b'"stream":1', b'"x":"\xff"', b'"x":NaN', b'"x":"\n"', b'"max_output_tokens":3', b'"model":["a"]', b'"x":01'),
    ]
)
OBJECTS = st.lists(FIELDS, max_size=6).map(lambda fields: b"{" + b", ".join(fields) + b"}")


@pytest.mark.parametrize("path", KEPT, ids=[f"{path.parent.name}-{path.name}" for path in KEPT])
def test_inputs_that_were_kept_hold_every_promise(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes(), HERE)


@settings(max_examples=2000)
@given(data=REQUESTS | cut_and_joined(*SEEDS["http"]))
def test_requests_are_read_alike_however_they_are_cut_and_never_past_what_h11_takes(data: bytes) -> None:
    http(data, HERE)


@settings(max_examples=2000)
@given(data=STREAMS | cut_and_joined(*SEEDS["sse"]))
def test_streams_are_read_alike_however_they_are_cut_and_lose_no_frame(data: bytes) -> None:
    sse(data, HERE)


@settings(max_examples=2000)
@given(data=OBJECTS | cut_and_joined(*SEEDS["peek"]))
def test_bodies_are_read_as_the_engine_reads_them(data: bytes) -> None:
    peek(data, HERE)


def test_the_seeds_get_as_far_as_they_are_meant_to() -> None:
    three = http((CORPUS / "http/three_ahead").read_bytes(), HERE)
    assert [answer.status for answer in three] == [503, 200, 503]
    assert [isinstance(answer.asked, Asked) for answer in three] == [True, False, True]
    assert [answer.status for answer in http((CORPUS / "http/chunked_then_plain").read_bytes(), HERE)] == [503, 503]
    assert len(read_by_h11((CORPUS / "http/three_ahead").read_bytes()).requests) == 3
    assert len(frames(sse((CORPUS / "sse/chat").read_bytes(), HERE))) == 5
    looked = peek((CORPUS / "peek/stream_options").read_bytes(), HERE)
    assert looked is not None
    assert looked.stream
