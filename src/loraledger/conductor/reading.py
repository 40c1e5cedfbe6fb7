"""Reading a journal back: into rows, into the state it ended in, and against the kernel that wrote it.

A segment stands alone: settings, snapshot, then steps. ``read_steps`` groups its frames into steps; ``fold_segment`` makes rows of
them without running the kernel; ``last_state`` runs the kernel over the last segment to continue from where a process stopped;
``verify`` runs it over every segment and compares each answer with the journalled one, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from loraledger import events as ev
from loraledger.conductor.fold import Emitted, FoldState, RowFold, decode_fold
from loraledger.conductor.head import Head, decode_head
from loraledger.errors import InputFileError
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.settings import FleetSettings, decode_settings
from loraledger.record.frames import Frame, Kind, read_segment, segments
from loraledger.record.journal import in_use
from loraledger.record.reader import RecordReader
from loraledger.record.tables import TABLES, Row, TableName


class Step(msgspec.Struct, frozen=True):
    """One event with what the kernel answered, as journalled. ``changes`` are residency changes, encoded."""

    event: bytes
    commands: bytes | None
    changes: bytes | None
    offset: int


class Segment:
    """One segment: its settings, the state at its start, and its steps. Raises ``InputFileError`` when its head is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._frames = read_segment(path)
        try:
            self.settings: FleetSettings = decode_settings(self._expect(Kind.SETTINGS))
            self.head: Head = decode_head(self._expect(Kind.SNAPSHOT))
        except msgspec.MsgspecError as error:
            raise InputFileError(f"{path}: not a journal of this version: {error}") from error

    def _expect(self, kind: int) -> bytes:
        frame = next(self._frames, None)
        if frame is None or frame.kind != kind:
            raise InputFileError(f"{self.path}: the segment's head is missing or damaged")
        return frame.payload

    def fleet(self) -> Fleet:
        """The kernel as it was when the segment began."""
        return Fleet.restore(self.settings, self.head.kernel)

    def fold(self) -> FoldState:
        """The fold's state as it was when the segment began."""
        return decode_fold(self.head.fold)

    @property
    def torn(self) -> bool:
        """Once its steps were read: whether bytes follow that form no frame, of an append that was cut short or of damage."""
        return self._frames.torn

    def steps(self) -> Iterator[Step]:
        """Each step in order. The last one may lack its answer: the process stopped between the two."""
        event: Frame | None = None
        commands = changes = None
        for frame in self._frames:
            if frame.kind == Kind.EVENT:
                if event is not None:
                    yield Step(event.payload, commands, changes, event.offset)
                event, commands, changes = frame, None, None
            elif frame.kind == Kind.COMMANDS:
                commands = frame.payload
            elif frame.kind == Kind.NOTE:
                changes = frame.payload
        if event is not None:
            yield Step(event.payload, commands, changes, event.offset)


def fold_segment(segment: Segment) -> tuple[Emitted, RowFold]:
    """All rows that one segment completes, and the fold as it stands at its end (with the open requests)."""
    fold = RowFold(segment.fold())
    rows: Emitted = []
    for step in segment.steps():
        rows.extend(_fold_step(fold, segment.path, step))
    return rows, fold


def _fold_step(fold: RowFold, path: Path, step: Step) -> Emitted:
    event = _event(path, step)
    commands = ev.decode_commands(step.commands) if step.commands else []
    changes = ev.decode_changes(step.changes) if step.changes else []
    return fold.step(event, commands, changes)


def _event(path: Path, step: Step) -> ev.Event:
    try:
        return ev.decode_event(step.event)
    except msgspec.MsgspecError as error:
        raise InputFileError(f"{path} at {step.offset}: an event of another version: {error}") from error


def last_state(directory: Path) -> tuple[Fleet, FoldState] | None:
    """Kernel and fold as the last process left them; ``None`` if there is no usable segment.

    The kernel is stepped through the whole last segment. The fold takes only answers that were journalled, as compaction does:
    what was decided but not written was not acted on either, so a request that it would have ended is still open.
    """
    for path in reversed(segments(directory)):
        try:
            segment = Segment(path)
        except InputFileError:
            continue  # a process that died while it created its segment: the one before holds the state
        try:
            fleet, fold = segment.fleet(), RowFold(segment.fold())
        except msgspec.MsgspecError as error:
            raise InputFileError(f"{path}: its state was written by another version: {error}") from error
        for step in segment.steps():
            fleet.step(_event(path, step))
            _fold_step(fold, path, step)
        return fleet, fold.state
    return None


def open_record(directory: Path, *, since_ns: int | None = None, until_ns: int | None = None) -> RecordReader:
    """The whole record: compacted tables, and what the journal holds beyond them.

    A request that is open at the end of the journal has a null status while a process still writes there, and is
    ``gateway_crashed`` when none does. Raises ``InputFileError`` when there is no such directory, or a file in it is damaged.
    """
    _require_directory(directory)
    tail: dict[TableName, list[Row]] = {name: [] for name in TABLES}
    labels: list[str] = []
    last: RowFold | None = None
    for path in segments(directory):
        try:
            segment = Segment(path)
        except InputFileError:
            continue  # begun and never used: its process died, or has only just made it
        rows, last = fold_segment(segment)
        labels.append(path.stem)
        for table, row in rows:
            tail[table].append(row)
    if last is not None:
        for table, row in last.open_rows() if in_use(directory) else last.close_open():
            tail[table].append(row)
    return RecordReader(directory, tail, labels, since_ns=since_ns, until_ns=until_ns)


def _require_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise InputFileError(
            f"there is no record in {directory}: start `loraledger serve`, or give its record.dir with --record"
        )


class Difference(msgspec.Struct, frozen=True):
    """The first step at which a fresh kernel answered otherwise than the journal says."""

    segment: str
    offset: int
    event: str
    journalled: str
    replayed: str


class Verified(msgspec.Struct, frozen=True):
    """What ``verify`` saw. ``steps`` counts compared answers, ``unanswered`` events at the end of a crashed segment, ``headless``
    segments whose process died while it created them: they hold no step; ``torn`` those with bytes behind their last step that
    could not be read: an append that a crash cut short, or damage, and then steps are missing."""

    segments: int
    steps: int
    commands: int
    unanswered: int
    difference: Difference | None
    headless: int = 0
    torn: int = 0


def verify(directory: Path) -> Verified:
    """Step a fresh kernel through each segment and compare its commands with the journalled ones, byte for byte.

    Raises ``InputFileError`` when there is no such directory.
    """
    _require_directory(directory)
    steps = commands = unanswered = count = headless = torn = 0
    for path in segments(directory):
        try:
            segment = Segment(path)
        except InputFileError:
            headless += 1
            continue
        fleet = segment.fleet()
        count += 1
        pending: tuple[Step, bytes] | None = None
        for step in segment.steps():
            if pending is not None and (found := _compare(path, *pending)):
                return Verified(count, steps, commands, unanswered, found)
            answer, _ = fleet.step(_event(path, step))
            pending = (step, ev.encode(answer) if answer else b"")
            steps += 1
            commands += len(answer)
        if pending is not None and (found := _compare(path, *pending)):
            if pending[0].commands is not None:
                return Verified(count, steps, commands, unanswered, found)
            unanswered += 1
        torn += segment.torn
    return Verified(count, steps, commands, unanswered, None, headless, torn)


def _compare(path: Path, step: Step, answer: bytes) -> Difference | None:
    journalled = step.commands or b""
    if journalled == answer:
        return None
    return Difference(
        path.name,
        step.offset,
        repr(ev.decode_event(step.event)),
        repr(ev.decode_commands(journalled) if journalled else []),
        repr(ev.decode_commands(answer) if answer else []),
    )
