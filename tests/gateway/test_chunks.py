"""Bodies in chunks, read by us and by h11: what h11 refuses is refused, and what both take is the same bytes."""

from __future__ import annotations

from random import Random

import h11
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.errors import BadRequestError
from loraledger.gateway.bodies import ChunkedBody

GOOD_SIZES = (b"5", b"05", b"5;a=b", b'5;a="b c";d', b"000000005")
ODD_SIZES = (
    *(b"5 ", b" 5", b"5\t;a", b"-5", b"+5", b"0x5", b"5_", b"", b";a", b"F" * 17, b"5;\x00", b"5;\xff", b"5;a\rb"),
    *(b"5;a\nb", b"5,5", b"5;;", b"5;=", b"\xb5", b"6", b"4"),
)
TRAILERS = (b"A: b", b"A:", b"A: \xff", b"A : b", b"A", b": b", b"A: \x00", b"A: b\rc", b" x", b"Content-Length: 5")
LONG = b"0" * 20 + b"5\r\nhello\r\n0\r\n\r\n"

Read = tuple[bool, bytes]
"""Whether the body is complete, and what came of it."""


def drawn(seed: int) -> bytes:
    rng = Random(seed)
    raw = b""
    for _ in range(rng.randrange(3)):
        size = rng.choice(ODD_SIZES if rng.random() < 0.2 else GOOD_SIZES)
        raw += size + _line_end(rng) + b"hello" + _line_end(rng)
    raw += rng.choice((b"0", b"0", b"000", b"0;x", b"0 ")) + _line_end(rng)
    if rng.random() < 0.3:
        raw += rng.choice(TRAILERS) + _line_end(rng)
    raw += b"\r\n"
    if rng.random() < 0.2:
        at = rng.randrange(len(raw))
        raw = raw[:at] + bytes(rng.choices(b"\x00\t\r\n :;05ah\xff", k=rng.randrange(3))) + raw[at + rng.randrange(2) :]
    return raw


def _line_end(rng: Random) -> bytes:
    return b"\n" if rng.random() < 0.03 else b"\r\n"


def by_us(raw: bytes) -> Read | None:
    body = ChunkedBody(1000)
    try:
        return body.feed(raw) is not None, body.whole()
    except BadRequestError:
        return None


def by_h11(raw: bytes) -> Read | None:
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + raw)
    peer.next_event()
    body = b""
    try:
        while isinstance(event := peer.next_event(), h11.Data):
            body += bytes(event.data)
    except h11.RemoteProtocolError:
        return None
    return isinstance(event, h11.EndOfMessage), body


@settings(max_examples=1500)
@given(seed=st.integers(0, 2**64))
def test_chunks_that_h11_refuses_are_refused_and_others_hold_the_same(seed: int) -> None:
    raw = drawn(seed)
    ours = by_us(raw)
    assert ours is None or ours == by_h11(raw)


def test_chunks_that_are_drawn_are_of_every_kind() -> None:
    bodies = [drawn(seed) for seed in range(1000)]
    assert sum(by_us(raw) is not None for raw in bodies) > 300
    assert sum(by_h11(raw) is None for raw in bodies) > 200


def test_only_leading_zeros_are_taken_beyond_h11() -> None:
    assert (
        by_h11(LONG) is None
    )  # it counts digits, up to 20; here they are bounded in bytes, with the rest of the framing
    assert by_us(LONG) == (True, b"hello")
    assert by_us(LONG.replace(b"0" * 20, b"1" * 20)) is None
