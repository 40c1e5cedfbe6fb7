"""A request body as it comes in: of a stated length, or in chunks.

Chunks are read by httptools, which is shown a head of our own, since the client's has been read already (see ``heads``). Where a
chunked body ends inside a read is not told by the parser; bytes after it, a request sent ahead, cannot be found again. ``spilled``
says that there were some: they are dropped and the connection is closed after its answer, so that the client sends them again.

A body is one growing array, not a list of what came: in chunks of two bytes such a list takes eight times the body's own memory.
"""

from __future__ import annotations

from typing import Final

import httptools

from loraledger.errors import BadRequestError, TooLargeError

_HEAD: Final = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def check_size(size: int, limit: int) -> None:
    """Raise TooLargeError if a body of ``size`` bytes is over ``limit``."""
    if size > limit:
        raise TooLargeError(f"the body is over the limit of {limit} bytes")


class PlainBody:
    """A body of ``length`` bytes."""

    spilled: Final = False

    def __init__(self, length: int) -> None:
        self._body = bytearray()
        self._missing = length

    def feed(self, data: bytes) -> bytes | None:
        """Take one read. None while the body is incomplete, then what follows it."""
        mine, rest = data[: self._missing], data[self._missing :]
        self._body += mine
        self._missing -= len(mine)
        return None if self._missing else rest

    def whole(self) -> bytes:
        """The complete body."""
        return bytes(self._body)


class ChunkedBody:
    """A body in chunks, ``limit`` bytes at most; its framing may take as much again. Trailers are not read."""

    def __init__(self, limit: int) -> None:
        self.spilled = False
        self._limit = limit
        self._body = bytearray()
        self._raw = 0
        self._complete = False
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(_HEAD)

    def feed(self, data: bytes) -> bytes | None:
        """As ``PlainBody.feed``. Raises BadRequestError for broken framing, TooLargeError."""
        self._raw += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                raise BadRequestError(f"malformed chunked body: {error}") from error
            self.spilled = True
        check_size(len(self._body), self._limit)
        check_size(self._raw // 2, self._limit + len(_HEAD))
        return b"" if self._complete else None

    def whole(self) -> bytes:
        """The complete body."""
        return bytes(self._body)

    def on_message_begin(self) -> None:
        """The body's own message, or one after it."""
        self.spilled = self._complete

    def on_body(self, data: bytes) -> None:
        """Some of the body."""
        if not self._complete:
            self._body += data

    def on_message_complete(self) -> None:
        """All of it."""
        self._complete = True
