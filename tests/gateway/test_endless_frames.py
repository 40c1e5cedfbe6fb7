"""A frame that does not end, as a hostile replica sends it: its cost grows with its bytes, not with their square."""

from __future__ import annotations

import time

import pytest

from loraledger.gateway.answers import Renamer
from loraledger.gateway.sse import SseReader


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize(("size", "read"), [(16 * 2**20, 64 * 2**10), (100_000, 1)])
def test_a_frame_without_end_is_looked_at_once(size: int, read: int, line_end: bytes) -> None:
    reader = SseReader(Renamer("a", "b"), hide_usage=True)
    part = b"x" * read
    reader.feed(b"data: ", 0)
    began = time.process_time()
    for _ in range(size // read):
        assert reader.feed(part, 0) == b""
    assert reader.pending == size // read * read + 6
    for end in line_end, line_end:  # apart, so that the end of the frame lies between two reads
        shown = reader.feed(end, 0)
    assert len(shown or reader.feed(b"x", 0)) == size // read * read + 8
    assert time.process_time() - began < 1.0  # 3 s and 10 s when each read looked at all that had come
