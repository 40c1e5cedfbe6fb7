"""The reader of an event stream: cuts it into frames, changes what the client must not see, measures what matters.

Theory of operation. Bytes come in reads that begin and end anywhere: inside a frame, a line, a CRLF, a UTF-8 sequence. Line
ends are brought to LF first (JSON cannot contain a raw CR, so ``b"\\r" in data`` is the whole test on the usual path), frames
end at an empty line, what is left waits for the next read and is not searched again. All frames of one read are returned as one
bytes object, so that a burst is one write. Nothing is awaited and nothing is made per frame but the decoded chunk, about 2 us.

A frame goes on only whole. So a stream that is cut is cut between frames, and an error frame can still be put there.

- *First token* is the first frame with content on any channel; not the role frame, not a comment, not usage, not the end, not an
  event that only opens an answer or a part of one.
- Engines send the events that open an answer (``response.created``) before they have computed anything. They are held until content
  comes, or the end: so a replica that breaks in between has shown the client nothing, and the attempt can be made again.
- The gateway asks each stream for usage. A client that did not ask must not see that: neither the usage chunk at the end nor
  the ``"usage": null`` that engines then add to the others.
- Frames that come in one read share its time, so the gaps between them count as 0.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loraledger.gateway import answers
from loraledger.gateway.answers import ABSENT, Renamer, Usage
from loraledger.record.sketch import Sketch

_NULL_USAGE: Final = b',"usage":null}'
_LAST: Final = frozenset({"response.completed", "response.incomplete", "response.failed", "message_stop"})
"""Events after which nothing comes; chunks end with ``[DONE]``."""


class StreamError(msgspec.Struct, frozen=True):
    """What an engine said inside its stream instead of going on. ``code``: the HTTP status it names, if any."""

    message: str
    code: int | None

    @property
    def blames_client(self) -> bool:
        """Whether the request was at fault, not the engine."""
        return self.code is not None and 400 <= self.code < 500


class SseReader:
    """Reads one stream. ``hide_usage``: the client did not ask for usage. Times are whatever clock the caller uses, in ns."""

    __slots__ = (
        "_after_cr",
        "_answers",
        "_fresh",
        "_held",
        "_held_bytes",
        "_hide_usage",
        "_opening",
        "_pending",
        "_renamer",
        "done",
        "error",
        "first_answer",
        "first_token",
        "gap_max",
        "gaps",
        "last_token",
        "tokens_seen",
        "usage",
    )

    def __init__(self, renamer: Renamer, *, hide_usage: bool) -> None:
        self._renamer = renamer
        self._hide_usage = hide_usage
        self._pending = bytearray()
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._opening = False
        """Only events have come, and none with content."""
        self._after_cr = False
        self._fresh = 0
        self._answers = False
        self.done = False
        """``[DONE]`` has come, or the event that is the last."""
        self.error: StreamError | None = None
        self.usage: Usage | None = None
        self.first_token: int | None = None
        self.first_answer: int | None = None
        """First text of the answer itself, after any reasoning."""
        self.last_token: int | None = None
        self.tokens_seen = 0
        """Frames with content."""
        self.gap_max: int | None = None
        self.gaps = Sketch()

    @property
    def pending(self) -> int:
        """Bytes of a frame that has not ended, and of those that are held."""
        return len(self._pending) + self._held_bytes

    @property
    def gap_mean(self) -> int | None:
        """Mean time between two frames with content; None with fewer than two."""
        if self.first_token is None or self.last_token is None or self.tokens_seen < 2:
            return None
        return (self.last_token - self.first_token) // (self.tokens_seen - 1)

    def feed(self, data: bytes, now: int) -> bytes:
        """Take one read, return what goes to the client: whole frames, or nothing yet."""
        if self._after_cr or b"\r" in data:
            data = self._line_feeds(data)
        pending = self._pending
        if pending:  # each byte is looked at once: 16 MB of one frame, in reads of 64 KB, took 3 s otherwise
            if b"\n\n" not in data and not (data.startswith(b"\n") and pending.endswith(b"\n")):
                pending += data
                return b""
            data = bytes(pending) + data
            pending.clear()
        *frames, rest = data.split(b"\n\n")
        pending += rest
        shown = b"".join([self._frame(frame) for frame in frames])
        self._count(now)
        if self._opening:
            self._held.append(shown)
            self._held_bytes += len(shown)
            return b""
        return self._with_held(shown) if self._held else shown

    def finish(self, now: int) -> bytes:
        """The stream has ended: a last frame may lack its empty line."""
        last = bytes(self._pending)
        self._pending.clear()
        shown = self._frame(last) if last.strip(b"\n") else b""
        self._count(now)
        return self._with_held(shown)

    def _with_held(self, shown: bytes) -> bytes:
        held, self._held, self._held_bytes = self._held, [], 0
        return b"".join([*held, shown])

    def _line_feeds(self, data: bytes) -> bytes:
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r") if data else False
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _frame(self, frame: bytes) -> bytes:
        if not frame.startswith(b"data:") or b"\n" in frame:
            return self._unusual(frame)
        payload = frame[6:] if frame.startswith(b"data: ") else frame[5:]
        shown = self._payload(payload)
        return b"" if shown is None else b"data: %b\n\n" % shown

    def _unusual(self, frame: bytes) -> bytes:
        """Comments, other fields, data over several lines, stray empty lines."""
        lines = frame.split(b"\n")
        data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
        if not data:
            return frame + b"\n\n"
        payload = data[0] if len(data) == 1 else b"\n".join(data)
        shown = self._payload(payload)
        if shown is None:
            return b""
        if shown is data[0]:  # as it came, which is how most events go on
            return frame + b"\n\n"
        others = [line for line in lines if line and not line.startswith(b"data:")]
        return b"\n".join([*others, *(b"data: " + line for line in shown.split(b"\n"))]) + b"\n\n"

    def _payload(self, payload: bytes) -> bytes | None:
        """Read one frame's data; what the client gets instead, None for nothing."""
        if payload == b"[DONE]":
            self.done = True
            return payload
        chunk = answers.read_chunk(payload)
        if chunk is None:
            return self._renamer.document(payload)
        if chunk.has_content:
            self._fresh += 1
            if self.first_answer is None and chunk.has_answer:
                self._answers = True
        if chunk.type is not None and chunk.choices is None:
            return self._event(payload, chunk)
        if chunk.error is not ABSENT and bytes(chunk.error) != b"null":
            return self._failure(payload, payload)
        if chunk.usage is ABSENT:
            return self._renamer.document(payload)
        return self._with_usage(payload, chunk)

    def _event(self, payload: bytes, chunk: answers.Chunk) -> bytes:
        """A frame that says its ``type``. Its usage is never hidden: clients of these forms expect it."""
        failure = chunk.failure
        if failure is not None:
            self._opening = False
            return self._failure(payload, failure or payload)
        counts = chunk.counts
        if counts is not None:
            self.usage = counts.after(self.usage)
        if chunk.type in _LAST:
            self.done = True
        self._opening = self.last_token is None and not self._fresh and not self.done
        return self._renamer.document(payload)

    def _failure(self, payload: bytes, said: bytes | msgspec.Raw) -> bytes:
        message, code = answers.error_text(said)
        self.error = StreamError(self._renamer.text(message), code)
        return self._renamer.message(payload)

    def _with_usage(self, payload: bytes, chunk: answers.Chunk) -> bytes | None:
        self.usage = answers.read_usage(chunk.usage) or self.usage
        if not self._hide_usage:
            return self._renamer.document(payload)
        if chunk.choices == [] and bytes(chunk.usage) != b"null":
            return None
        if payload.endswith(_NULL_USAGE):
            return self._renamer.document(payload[: -len(_NULL_USAGE)] + b"}")
        return self._renamer.document(payload, drop_usage=True)

    def _count(self, now: int) -> None:
        """Note when the frames with content of one read came."""
        fresh, self._fresh = self._fresh, 0
        if not fresh:
            return
        if self._answers and self.first_answer is None:
            self.first_answer = now
        if self.last_token is None:
            self.first_token = now
            self.gap_max = 0 if fresh > 1 else None
        else:
            gap = max(0, now - self.last_token)
            self.gaps.add(gap)
            self.gap_max = gap if self.gap_max is None or gap > self.gap_max else self.gap_max
        if fresh > 1:
            self.gaps.add(0, fresh - 1)
        self.last_token = now
        self.tokens_seen += fresh
