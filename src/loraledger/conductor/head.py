"""The snapshot that opens a journal segment: the kernel's state and the fold's, side by side."""

from __future__ import annotations

import msgspec


class Head(msgspec.Struct, frozen=True, array_like=True):
    """Both states as their own bytes: the kernel's must stay opaque here, it has its own decoder."""

    kernel: bytes
    fold: bytes


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Head)


def encode_head(head: Head) -> bytes:
    """``head`` as bytes."""
    return _ENCODER.encode(head)


def decode_head(data: bytes) -> Head:
    """The head in ``data``. Raises ``msgspec.DecodeError`` when the bytes are not one."""
    return _DECODER.decode(data)
