"""Steps the kernel and makes the world follow: journal first, then decide, then act, then write rows.

Theory of operation. ``feed`` is how everything that happens comes in. Events are taken strictly one after the other: what is fed
while a command is being performed waits its turn. For each event: append it to the journal (it is in the page cache before anyone
acts on it), step the kernel, append what it answered, fold both into rows, perform the commands, arm the next wake-up. Live and
replay differ only in the performer, the clock and the alarm that are handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from loraledger import events as ev
from loraledger.conductor.fold import Emitted, RowFold, encode_fold
from loraledger.conductor.head import Head, encode_head
from loraledger.conductor.ports import Clock, Performer
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.settings import encode_settings
from loraledger.record.frames import Kind
from loraledger.record.journal import Journal

RESERVE = 256 * 1024
"""Room that an event, its commands and its changes may need together: they must not be split over two segments."""
PER_REQUEST = 2048
"""More of it for each waiting request: one event may move them all (a load that ends sends or refuses all who waited)."""

Sink = Callable[[Emitted], None]
Alarm = Callable[[int | None], None]


class Conductor:
    """One kernel, driven. ``sink`` receives finished rows, ``alarm`` the time at which ``wake`` should be called (or ``None``)."""

    def __init__(
        self, fleet: Fleet, fold: RowFold, performer: Performer, clock: Clock, sink: Sink, alarm: Alarm
    ) -> None:
        self.fleet = fleet
        self.fold = fold
        self.journal: Journal | None = None
        self.steps = 0
        self._performer = performer
        self._clock = clock
        self._sink = sink
        self._alarm = alarm
        self._armed: int | None = None
        self._wake_at: int | None = None
        self._inbox: deque[ev.Event] = deque()
        self._busy = False

    def head(self) -> tuple[bytes, bytes]:
        """What a new journal segment begins with: the settings, and the state to continue from."""
        state = Head(self.fleet.snapshot(), encode_fold(self.fold.state))
        return encode_settings(self.fleet.settings), encode_head(state)

    def feed(self, event: ev.Event) -> None:
        """Something happened. Safe to call from inside a performed command."""
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                self._step(self._inbox.popleft())
        finally:
            self._busy = False
            if self._wake_at != self._armed:
                self._armed = self._wake_at
                self._alarm(self._wake_at)

    def wake(self) -> None:
        """The armed time has come."""
        self._armed = None
        self.feed(ev.Wake(self._clock()))

    def _step(self, event: ev.Event) -> None:
        journal = self.journal
        kept = False
        if journal is not None:
            # Half a segment at most: with small ones and many waiting, each event would begin a new segment.
            if 0 < journal.room < min(self._room_needed(), journal.segment_bytes // 2):
                journal.rotate()
            kept = journal.append(Kind.EVENT, ev.encode(event))
        try:
            commands, changes, self._wake_at = self.fleet.step_with_changes(event)
        except Exception:
            # Ours is the fault, and whoever fed the event hears of it. What follows begins a segment from the state as it is now,
            # so that the next process does not meet this event again.
            self.fold.step(event, [], [])
            if journal is not None and kept:
                journal.rotate()
            raise
        if journal is not None and kept:  # an answer without its event would mean nothing
            if commands:
                journal.append(Kind.COMMANDS, ev.encode(commands))
            if changes:
                journal.append(Kind.NOTE, ev.encode(changes))
        self.steps += 1
        rows = self.fold.step(event, commands, changes)
        for command in commands:
            self._performer.perform(command)
        if rows:
            self._sink(rows)

    def _room_needed(self) -> int:
        state = self.fleet.state
        waiting = len(state.requests) - sum(len(replica.in_flight) for replica in state.replicas.values())
        return RESERVE + PER_REQUEST * waiting
