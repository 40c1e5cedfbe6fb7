"""One request's life: from the arrival of its last byte to its one end event.

Theory of operation. An exchange stands between a client's connection and, for each ``Dispatch``, an ``Attempt``. It feeds
events and does what commands say; both may happen inside each other, so its own state is changed before it feeds. ::

    WAITING --Dispatch--> TRYING --first bytes for the client--> ANSWERING --> DONE
       ^                    |                                        |
       +-- AttemptFailed ---+ (the kernel may choose again)          +--> DONE, the client's connection cut

Nothing is sent to the client before there is a whole frame of a stream, or the whole of an answer that is not one: until then
an attempt that fails can be made again on another replica. Afterwards the only honest end of a stream is an error frame and a cut
connection. Whatever happens, ``_end`` is passed once: the request leaves the table of open ones, its
connection is given back or dropped, and either one event is fed or, when the kernel itself refused it, none.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, Protocol

import msgspec

from loraledger.events import (
    AttemptFailed,
    Dispatch,
    Measured,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestDispatched,
    RequestFinished,
    RequestFirstToken,
    Status,
)
from loraledger.gateway.attempt import Attempt
from loraledger.gateway.heads import CHUNKED, RequestHead, answer_head, content_length
from loraledger.gateway.paths import FORMS
from loraledger.gateway.peek import Peek
from loraledger.gateway.replies import error_frame, reject_reply
from loraledger.gateway.state import PlaneState

_EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
_NO_BUFFERS: Final = b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
"""A stream that a proxy in front would collect is no stream."""


class Caller(Protocol):
    """The client's side of an exchange."""

    @property
    def closes(self) -> bool:
        """Whether its connection will be closed after this answer."""

    def begun(self) -> None:
        """The answer begins: the request's body is not needed again."""

    def send(self, data: bytes) -> None:
        """Write some of the answer."""

    def answered(self) -> None:
        """The answer is complete."""

    def cut(self) -> None:
        """The answer will never be complete: make the client see that."""


class Phase(Enum):
    """Where an exchange stands; see the drawing above."""

    WAITING = auto()
    TRYING = auto()
    ANSWERING = auto()
    DONE = auto()


class Exchange:
    """One request. ``adapter`` is its public name, None the base; ``received`` when its first byte came.

    A request that needs only the tokenizer is one to the base model, of no tokens.
    """

    __slots__ = (
        "_adapter",
        "_attempt",
        "_caller",
        "_chunked",
        "_form",
        "_number",
        "_phase",
        "_received",
        "_shown_id",
        "_state",
        "_tenant",
        "head",
        "id",
        "path",
        "peek",
    )

    def __init__(
        self,
        state: PlaneState,
        caller: Caller,
        head: RequestHead,
        peek: Peek,
        *,
        tenant: str,
        adapter: str | None,
        received: int,
    ) -> None:
        self.id = state.request_id()
        self.path = head.path.decode("ascii")
        self.head = head
        self.peek = peek
        self._state = state
        self._caller = caller
        self._chunked = head.minor == 1
        self._form = FORMS[head.path]
        self._tenant = tenant
        self._adapter = adapter if self._form.computes else None
        self._received = received
        self._shown_id = (head.client_id or self.id).encode("ascii")
        self._phase = Phase.WAITING
        self._attempt: Attempt | None = None
        self._number = 0

    @property
    def answering(self) -> bool:
        """Whether the client has seen some of an answer, and will see more."""
        return self._phase is Phase.ANSWERING

    # --- from the client's side ---

    def arrive(self) -> None:
        """Tell of the request; commands about it may come before this returns."""
        self._state.open[self.id] = self
        peek, form = self.peek, self._form
        self._state.feed(
            RequestArrived(
                at=self._state.clock(),
                request=self.id,
                tenant=self._tenant,
                adapter=self._adapter,
                prompt_tokens=self._state.ratio.estimate(self.path, peek.prompt_bytes) if form.computes else 0,
                max_tokens=peek.max_tokens,
                stream=peek.stream,
                path=self.path,
                client_id=self.head.client_id,
                received=self._received,
            )
        )

    def cancel(self) -> None:
        """The client is gone, and with it the reason for the replica to go on."""
        if self._phase is not Phase.DONE:
            measured = self._end()
            self._state.feed(RequestCancelled(self._state.clock(), self.id, measured))

    def pause(self) -> None:
        """The client does not keep up."""
        if self._attempt is not None:
            self._attempt.pause()

    def resume(self) -> None:
        """The client takes bytes again."""
        if self._attempt is not None:
            self._attempt.resume()

    def check(self, now: int) -> None:
        """Give up on a replica that is silent for too long."""
        if self._attempt is not None:
            self._attempt.check(now)

    def lose(self, replica: str) -> None:
        """A replica stays down: do not wait for it."""
        if self._attempt is not None:
            self._attempt.lose(replica)

    def abandon(self) -> bool:
        """This process ends, and so does the request. Returns whether the client can still be told by an answer."""
        began = self._phase is Phase.ANSWERING
        status = None if self._attempt is None else self._attempt.status
        measured = self._end()
        now = self._state.clock()
        self._state.feed(RequestFinished(now, self.id, "gateway_crashed", status, "drain_timeout", measured))
        return not began

    # --- commands ---

    def dispatch(self, command: Dispatch) -> None:
        """Make an attempt. Anything that goes wrong with it comes back as an event."""
        if self._phase is not Phase.WAITING:
            return
        self._phase = Phase.TRYING
        self._number = command.attempt
        pool = self._state.pools.get(command.replica)
        if pool is None:
            self.failed("upstream_failed", None, f"connect: replica {command.replica} has no address")
            return
        self._attempt = Attempt(self, self._state, pool, command.model)
        self._attempt.start()

    def reject(self, command: Reject) -> None:
        """Answer with the kernel's error. No event follows: the kernel has ended the request."""
        began, caller = self._phase is Phase.ANSWERING, self._caller
        self._end()
        if began:
            caller.cut()
            return
        date, form = self._state.date, self._form.errors
        caller.send(reject_reply(command, date=date, request_id=self._shown_id, close=caller.closes, form=form))
        caller.answered()

    # --- from the attempt ---

    def sent(self, now: int) -> None:
        """The request is on its way to the replica."""
        self._state.feed(RequestDispatched(now, self.id, self._number))

    def first_token(self, now: int) -> None:
        """Content has come, and was passed on."""
        self._state.feed(RequestFirstToken(now, self.id))

    def show(self, frames: bytes, *, last: bool) -> None:
        """Send frames of a stream, all that one read brought as one write; with ``last`` the stream's end too."""
        pieces = []
        if frames:
            if self._phase is Phase.TRYING:
                self._begin()
                framing = CHUNKED if self._chunked else b""
                pieces.append(self._answer_head(200, _EVENT_STREAM, framing, _NO_BUFFERS))
            pieces.append(b"%x\r\n%b\r\n" % (len(frames), frames) if self._chunked else frames)
        if last and self._chunked:
            pieces.append(b"0\r\n\r\n")
        if pieces:
            self._caller.send(b"".join(pieces))

    def relay(self, status: int, kind: bytes, extra: bytes, body: bytes) -> None:
        """Send a whole answer. ``kind`` is its content type, ``extra`` further header lines."""
        self._begin()
        self._caller.send(self._answer_head(status, kind, content_length(len(body)), extra) + body)

    def failed(self, status: Status, http_status: int | None, reason: str) -> None:
        """The attempt is over and the client has seen nothing of it: the kernel may choose again."""
        if self._attempt is not None:
            self._attempt.drop()
        self._attempt = None
        self._phase = Phase.WAITING
        now = self._state.clock()
        self._state.feed(AttemptFailed(now, self.id, self._number, status, http_status, reason))

    def finished(self, status: Status, http_status: int | None, reason: str | None) -> None:
        """The answer is complete, and so is the request."""
        measured, caller = self._end(), self._caller
        if status == "ok" and not self._form.computes:
            measured = msgspec.structs.replace(measured, generated_tokens=0)
        elif status == "ok" and measured.prompt_tokens is not None:
            self._state.ratio.learn(self.path, self.peek.prompt_bytes, measured.prompt_tokens)
        caller.answered()
        self._state.feed(RequestFinished(self._state.clock(), self.id, status, http_status, reason, measured))

    def broke_off(self, status: Status, http_status: int | None, reason: str) -> None:
        """The stream will not be complete, and the client has seen some of it."""
        self.show(error_frame("the replica broke off its answer", status, self._form.errors), last=False)
        measured, caller = self._end(), self._caller
        caller.cut()
        self._state.feed(RequestFinished(self._state.clock(), self.id, status, http_status, reason, measured))

    def _begin(self) -> None:
        """From here on no attempt is made again, so the body may go: a stream may last for minutes."""
        self._phase = Phase.ANSWERING
        self.peek.fields.clear()
        self._caller.begun()

    def _end(self) -> Measured:
        attempt, self._attempt = self._attempt, None
        self._phase = Phase.DONE
        del self._state.open[self.id]
        if attempt is None:
            return Measured()
        attempt.drop()
        return attempt.measured()

    def _answer_head(self, status: int, kind: bytes, framing: bytes, extra: bytes) -> bytes:
        return answer_head(
            status,
            date=self._state.date,
            content_type=kind,
            framing=framing,
            request_id=self._shown_id,
            extra=extra,
            close=self._caller.closes,
        )
