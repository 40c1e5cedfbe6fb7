"""The ways in which bytes are cut before they are read: what is read must not depend on it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator


def pieces(data: bytes) -> Iterator[list[bytes]]:
    """``data`` byte by byte, and cut three times at random places."""
    yield [data[at : at + 1] for at in range(len(data))]
    rng = random.Random(zlib.crc32(data))
    for _ in range(3):
        cuts = sorted(rng.sample(range(len(data)), min(len(data), rng.randrange(1, 9))))
        yield [piece for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if (piece := data[a:b])]
