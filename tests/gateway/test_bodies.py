from __future__ import annotations

import pytest

from loraledger.errors import BadRequestError, TooLargeError
from loraledger.gateway.bodies import ChunkedBody, PlainBody

from .support import chunk

CHUNKED = chunk(b"hello ") + b"5;extension=1\r\nworld\r\n" + b"0\r\nTrailer: x\r\n\r\n"


def test_a_body_of_a_stated_length_ends_wherever_its_reads_do() -> None:
    for at in range(11):
        body = PlainBody(11)
        assert body.feed(b"hello world"[:at]) is None
        assert body.feed(b"hello world"[at:] + b"POST") == b"POST"
        assert (body.whole(), body.spilled) == (b"hello world", False)


def test_a_body_in_chunks_ends_wherever_its_reads_do() -> None:
    for at in range(len(CHUNKED)):
        body = ChunkedBody(100)
        assert body.feed(CHUNKED[:at]) is None
        assert body.feed(CHUNKED[at:]) == b""
        assert (body.whole(), body.spilled) == (b"hello world", False)


@pytest.mark.parametrize("after", [b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", b"P", b"\x00", chunk(b"more")])
def test_what_follows_a_body_in_chunks_is_noticed_and_is_no_part_of_it(after: bytes) -> None:
    body = ChunkedBody(100)
    assert body.feed(CHUNKED + after) == b""
    assert (body.whole(), body.spilled) == (b"hello world", True)


@pytest.mark.parametrize("framing", [b"zz\r\n", b"-1\r\n", b"5\nhello", b"5\r\nhelloX", b"5 \r\nhello", b"\r\n\r\n"])
def test_broken_chunks_are_refused(framing: bytes) -> None:
    with pytest.raises(BadRequestError, match="chunked body"):
        ChunkedBody(100).feed(framing)


def test_the_limit_counts_the_body_and_bounds_its_framing() -> None:
    assert ChunkedBody(11).feed(CHUNKED) == b""
    with pytest.raises(TooLargeError):
        ChunkedBody(10).feed(CHUNKED)
    padded = b"1;" + b"x" * 50 + b"\r\na\r\n"
    with pytest.raises(TooLargeError):
        ChunkedBody(1000).feed(padded * 1000)
    assert ChunkedBody(1000).feed(padded * 10) is None
