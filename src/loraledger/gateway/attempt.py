"""One attempt at a request: sent to one replica, its answer read and changed for the client.

Theory of operation. An attempt gets a connection (an idle one, or a task opens one), writes the request, and reads the answer
in the callbacks in which it comes: a stream frame by frame, anything else held until it is whole, because its model name is
changed and because only then it is known to be one. It tells its owner what to show and how it ended, once.

- A request written into a kept-alive connection that closes without a byte was most likely not read: it is written once more to
  a fresh connection of the same replica, as part of this attempt. After a second that excuse is gone, because an engine that
  dies of a request also closes without a byte; and a replica that needs it often has it no more (``Pool.excuse``).
- Time. The first-byte limit bounds what the client waits for its first byte: a whole answer, or a stream's first frame. Beside it,
  the idle limit counts from the last bytes of a whole answer, and from the last frame that was shown of a stream, because a frame
  that drips is nothing to a client. Engines send the head of a stream at once and nothing until its prefill is done: that is no
  silence yet.
- Answers of 5xx, of 401 and 403 (the gateway's own key) and a 404 for a model that the replica should know are no answers for
  the client: the attempt has failed. Other 4xx are the client's, and so is 501: no replica of this model will ever do it.
- An engine that dies inside a stream says so in a frame of it, with status 200. Before anything was shown that is a failed
  attempt like any other.
- A whole answer is JSON with status 200, and a stream is whole with its last event (``[DONE]``, in most). What comes after that, or
  does not come, such as the end of the answer, changes nothing. Without it a stream is cut, and half a frame is not shown.
- An answer that names another model than the adapter that was asked is another adapter's, or the base model's: it is never shown.
- An id of this gateway's making that is not this request's means that a replica mixed answers up. Engines that make their own
  ids are not asked.
- The reason of a failure before the engine can have read a byte begins with ``connect``; no other one does.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from loraledger.events import Measured, Status
from loraledger.gateway import answers
from loraledger.gateway.answers import Renamer, Usage
from loraledger.gateway.heads import RequestHead, upstream_head
from loraledger.gateway.peek import Peek
from loraledger.gateway.replies import JSON
from loraledger.gateway.sse import SseReader
from loraledger.gateway.state import PlaneState
from loraledger.gateway.upstream import AnswerHead, Pool, Upstream
from loraledger.units import NS_PER_S

STALE: Final = NS_PER_S
FOREIGN: Final = "the replica answered another request"
STRANGER: Final = "the replica answered as another model"
CUT: Final = "the replica ended the stream before its last event"
NOT_REGISTERED: Final = "not_registered"
"""Reason of an attempt that the replica refused because it does not know the model."""


class Owner(Protocol):
    """The request that is attempted. ``failed``, ``finished`` and ``broke_off`` end the attempt."""

    @property
    def id(self) -> str:
        """The request's id."""

    @property
    def path(self) -> str:
        """Where it goes."""

    @property
    def head(self) -> RequestHead:
        """Its head."""

    @property
    def peek(self) -> Peek:
        """Its body."""

    @property
    def answering(self) -> bool:
        """Whether something was shown and more may be."""

    def sent(self, now: int) -> None:
        """It was written to a connection."""

    def first_token(self, now: int) -> None:
        """Content was shown for the first time."""

    def show(self, frames: bytes, *, last: bool) -> None:
        """Frames of a stream for the client."""

    def relay(self, status: int, kind: bytes, extra: bytes, body: bytes) -> None:
        """A whole answer for the client."""

    def failed(self, status: Status, http_status: int | None, reason: str) -> None:
        """Nothing was shown."""

    def finished(self, status: Status, http_status: int | None, reason: str | None) -> None:
        """All was shown."""

    def broke_off(self, status: Status, http_status: int | None, reason: str) -> None:
        """Some was shown."""


class Attempt:
    """An attempt on the replica of ``pool``, which knows the model as ``model``."""

    __slots__ = (
        "_body",
        "_deadline",
        "_first_byte",
        "_limit",
        "_opening",
        "_owner",
        "_pool",
        "_renamer",
        "_sent_again",
        "_sent_at",
        "_state",
        "_stream",
        "_upstream",
        "_usage",
        "status",
    )

    def __init__(self, owner: Owner, state: PlaneState, pool: Pool, model: str) -> None:
        self.status: int | None = None
        """The replica's HTTP status, once its body began."""
        self._owner = owner
        self._state = state
        self._pool = pool
        self._renamer = Renamer(model, owner.peek.model)
        self._opening: asyncio.Task[None] | None = None
        self._upstream: Upstream | None = None
        self._sent_at: int | None = None
        self._sent_again = False
        self._deadline: int | None = None
        self._limit = 0
        self._stream: SseReader | None = None
        self._body = bytearray()
        self._usage: Usage | None = None
        self._first_byte: int | None = None

    # --- for the owner ---

    def start(self) -> None:
        """Send the request, over an idle connection if there is one."""
        upstream = self._pool.take()
        if upstream is None:
            self._opening = self._pool.connect(self)
        else:
            self._send(upstream)

    def drop(self) -> None:
        """Let go of the connection: the replica sees that nobody waits any more."""
        if self._opening is not None:
            self._pool.cancel(self._opening)
        if self._upstream is not None:
            self._upstream.drop()
        self._opening = self._upstream = None

    def pause(self) -> None:
        """Read no more for now. Silence is ours from here."""
        if self._upstream is not None:
            self._deadline = None
            self._upstream.pause()

    def resume(self) -> None:
        """Read on. Silence counts from now."""
        if self._upstream is not None:
            self._deadline = self._state.clock() + self._state.settings.stream_idle_timeout
            self._upstream.resume()

    def check(self, now: int) -> None:
        """Give up if the replica has been silent for too long."""
        if self._deadline is not None and now >= self._deadline:
            self._break("upstream_timeout", "no answer began in time" if self.status is None else "the answer stalled")

    def lose(self, replica: str) -> None:
        """``replica`` is down and stays so: give up if this attempt waits there and nothing of the answer was shown."""
        if self._pool.address.name == replica and not self._owner.answering:
            self._break("upstream_failed", "the replica went down before it answered")

    def measured(self) -> Measured:
        """What was seen of the answer."""
        stream = self._stream
        usage = self._usage if stream is None else stream.usage
        if usage is None:
            usage = answers.UNKNOWN
        if stream is None:
            return Measured(
                first_byte=self._first_byte,
                prompt_tokens=usage.prompt_tokens,
                generated_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
            )
        return Measured(
            first_byte=self._first_byte,
            first_token=stream.first_token,
            last_token=stream.last_token,
            prompt_tokens=usage.prompt_tokens,
            generated_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            itl_mean=stream.gap_mean,
            itl_max=stream.gap_max,
            itl_sketch=stream.gaps.counts or None,
            tokens_seen=stream.tokens_seen,
            first_answer=stream.first_answer,
        )

    # --- from the connection ---

    def connected(self, upstream: Upstream) -> None:
        """The connection that was asked for."""
        self._opening = None
        self._send(upstream)

    def connect_failed(self, reason: str) -> None:
        """No connection; the engine has not seen the request, unless it was sent before."""
        self._opening = None
        if self._sent_again:
            reason = f"the replica closed the connection without a byte, then {reason}"
        self._owner.failed("upstream_failed", None, reason)

    def received(self, head: AnswerHead, body: bytes, *, ended: bool) -> None:
        """Some of the answer, in the callback in which it came."""
        now = self._state.clock()
        if ended:
            self._upstream = None
        if self.status is None:
            self.status = head.status
            if head.status == 200 and head.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                self._stream = SseReader(self._renamer, hide_usage=not self._owner.peek.asked_usage)
        if body and self._first_byte is None:
            self._first_byte = now
        if b"content-encoding" in head.headers:
            self._break("upstream_failed", "the replica compressed an answer that must be read")
        elif self._stream is not None:
            self._read_stream(self._stream, head, body, now, ended=ended)
        else:
            self._collect(head, body, now, ended=ended)

    def broken(self, reason: str, *, began: bool, stale: bool) -> None:
        """The connection will bring no more of the answer."""
        self._upstream = None
        recent = self._sent_at is not None and self._state.clock() - self._sent_at < STALE
        if stale and recent and not self._sent_again and self._pool.excuse():
            self._sent_again = True
            self._deadline = None
            self._opening = self._pool.connect(self)
        elif self.status is not None and self.status >= 500:
            self._owner.failed("engine_error", self.status, self._said(bytes(self._body)))
        else:
            self._break("upstream_reset" if began else "upstream_failed", reason)

    def _send(self, upstream: Upstream) -> None:
        owner = self._owner
        body = owner.peek.rewrite(self._renamer.engine_name)
        prefix = self._pool.prefix(owner.path)
        head = upstream_head(prefix, owner.id.encode("ascii"), owner.head.trace, len(body))
        self._upstream = upstream
        self._sent_at = now = self._state.clock()
        self._deadline = self._limit = now + self._state.settings.first_byte_timeout
        upstream.send(self, head + body)
        if not self._sent_again:
            owner.sent(now)

    # --- the answer ---

    def _read_stream(self, stream: SseReader, head: AnswerHead, body: bytes, now: int, *, ended: bool) -> None:
        silent, whole = stream.first_token is None, stream.done
        shown = stream.feed(body, now) if body else b""
        last = stream.finish(now) if ended else b""
        cut = ended and not stream.done and stream.error is None
        if not cut:
            shown += last
        fault = self._stream_fault(stream, head, shown, cut=cut)
        if fault is not None:
            self._break(*fault, whole=whole)
            return
        if shown and not stream.done and self._deadline is not None:
            self._deadline = now + self._state.settings.stream_idle_timeout
        self._owner.show(shown, last=ended and not cut)
        if silent and stream.first_token is not None:
            self._owner.first_token(now)
        if cut:
            self._break("upstream_reset", CUT)
        elif ended:
            self._end_stream(stream)

    def _stream_fault(
        self, stream: SseReader, head: AnswerHead, shown: bytes, *, cut: bool
    ) -> tuple[Status, str] | None:
        """Why the answer cannot go on, or must not begin."""
        limit = self._state.settings.answer_bytes
        if stream.pending > limit:
            return "upstream_failed", f"a frame of the stream is over {limit} bytes"
        if self._renamer.stranger:
            return "upstream_failed", STRANGER
        if self._owner.answering:
            return None
        if stream.error is not None and not stream.error.blames_client:
            return "engine_error", stream.error.message
        if cut:
            return "upstream_reset", CUT
        if shown and self._is_foreign(head, shown):
            return "upstream_failed", FOREIGN
        return None

    def _end_stream(self, stream: SseReader) -> None:
        error = stream.error
        if error is None:
            self._owner.finished("ok", self.status, None)
        else:
            blame: Status = "client_error" if error.blames_client else "engine_error"
            self._owner.finished(blame, self.status, error.message)

    def _collect(self, head: AnswerHead, body: bytes, now: int, *, ended: bool) -> None:
        self._body += body
        if self._deadline is not None:
            self._deadline = min(now + self._state.settings.stream_idle_timeout, self._limit)
        limit = self._state.settings.answer_bytes
        if len(self._body) > limit:
            self._break("upstream_failed", f"the answer is over {limit} bytes")
        elif ended:
            whole = bytes(self._body)
            if head.status == 200:
                self._answer(head, whole)
            else:
                self._refusal(head, whole)

    def _answer(self, head: AnswerHead, body: bytes) -> None:
        self._usage = answers.body_usage(body)
        if self._usage is None and not answers.is_json(body):
            cut = head.until_close and body
            self._break("upstream_reset" if cut else "upstream_failed", "the answer is not whole JSON")
            return
        shown = self._renamer.document(body)
        if self._renamer.stranger or self._is_foreign(head, body):
            self._break("upstream_failed", STRANGER if self._renamer.stranger else FOREIGN)
            return
        self._relay(head, shown)
        self._owner.finished("ok", head.status, None)

    def _refusal(self, head: AnswerHead, body: bytes) -> None:
        said = self._said(body)
        if head.status == 404 and "model" in said and "does not exist" in said:
            self._owner.failed("engine_error", 404, NOT_REGISTERED)
        elif head.status in (401, 403):
            self._owner.failed("engine_error", head.status, "the replica refused the gateway's key")
        elif 400 <= head.status < 500 or head.status == 501:
            self._relay(head, self._renamer.message(body))
            self._owner.finished("client_error", head.status, said)
        else:
            self._owner.failed("engine_error", head.status, said)

    def _is_foreign(self, head: AnswerHead, body: bytes) -> bool:
        """Whether the answer bears the id of another request of this gateway."""
        own = self._owner.id.encode("ascii")
        boot = own[: own.rindex(b"-") + 1]
        start = body.find(b'"id":"', 0, 16)
        told = body[start : start + 96].split(b'"', 4)[3] if start >= 0 else b""
        for name in (told, head.headers.get(b"x-request-id", b"")):
            at = name.find(boot)
            if at >= 0 and name[at:] != own and not name.startswith(own + b"-", at):
                return True
        return False

    def _relay(self, head: AnswerHead, body: bytes) -> None:
        retry = head.headers.get(b"retry-after")
        extra = b"Retry-After: %b\r\n" % retry if retry else b""
        self._owner.relay(head.status, head.headers.get(b"content-type", JSON), extra, body)

    def _said(self, body: bytes) -> str:
        return self._renamer.text(answers.error_text(body)[0]) or "no message"

    def _break(self, status: Status, reason: str, *, whole: bool = True) -> None:
        """End it early. ``whole``: if the last event of the stream has come, it was shown too."""
        if not self._owner.answering:
            self._owner.failed(status, self.status, reason)
        elif whole and self._stream is not None and self._stream.done:
            self._owner.show(b"", last=True)
            self._end_stream(self._stream)
        else:
            self._owner.broke_off(status, self.status, reason)
