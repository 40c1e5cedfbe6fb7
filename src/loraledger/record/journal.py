"""The write-ahead journal: what happened, on disk before anyone acts on it.

Theory of operation. Frames (``frames`` has their bytes) are copied into a memory-mapped, preallocated segment. A copy
into a shared mapping is in the page cache when it returns, so it outlives ``kill -9`` of this process without a system
call; it outlives a power cut once ``sync`` has returned, which its owner calls from a thread each interval. Measured on
two shared cores and ext4 (``benchmarks/journal.py``): 0.55 us to append 200 bytes, 0.13 ms for the slowest of 20,000
appends at 4,000/s while another thread syncs, 2 ms for a rotation with segments of 64 MiB.

- Space is allocated when a segment is created, never sparse: a full disk is an ``ENOSPC`` there, where it can be
  handled, instead of a SIGBUS at some later store. Copy-on-write file systems (btrfs, ZFS) do not keep that promise:
  put the journal on another one.
- ``sync`` uses ``fdatasync``. On Linux it writes the dirty pages of a mapping just as ``msync`` does, but CPython's
  ``mmap.flush`` keeps the interpreter lock: measured with 256 MiB, no other thread ran for 96 ms, against 4 ms.
- Rotation does not wait for the disk: the full segment is put aside, and the next ``sync`` makes it durable, cuts it to
  its used length and closes it. Each segment begins with the settings and a snapshot, so it can be replayed alone.
- A process never appends to a segment that another one began. What that one left stays as it is, with the zeros that
  were allocated for it: readers stop at its end, torn or not.
- After a frame had to be dropped, the journal is off until a new segment, with a new snapshot, could be created: a gap
  never lies within a segment. Disk errors after ``open`` never raise: ``dropped``, ``sync_failures`` and ``error`` tell
  of them. After a failed ``sync`` Linux counts the pages as clean, so a later success does not vouch for them.

Threads: ``append``, ``rotate`` and ``close`` belong to one thread, ``sync`` may run in another at the same time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from loraledger.errors import ConfigError, InputFileError, InternalError
from loraledger.record.frames import HEADER, KIND_CRC, OVERHEAD, Kind, segment_path, segments, sequence_of

LOCK_NAME: Final = "journal.lock"
RETRY_S: Final = 1.0
"""How long the journal stays off before it tries again to create a segment."""

Head = Callable[[], tuple[bytes, bytes]]
"""Returns the payloads of the settings frame and of the snapshot frame that open a segment."""


class _Segment:
    """One preallocated file and its mapping. ``used`` is where the next frame goes."""

    __slots__ = ("_map", "capacity", "closed", "fd", "path", "used")

    def __init__(self, path: Path, size: int) -> None:
        """Create and allocate the file. Raises OSError, and then leaves none behind."""
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
        try:
            os.posix_fallocate(self.fd, 0, size)
            self._map = mmap.mmap(self.fd, size)
        except OSError:
            os.close(self.fd)
            path.unlink()
            raise
        self.capacity = size
        self.used = 0
        self.closed = False

    def put(self, kind: int, payload: bytes) -> bool:
        """Append a frame; False when there is no room for it."""
        start = self.used
        end = start + OVERHEAD + len(payload)
        if end > self.capacity:
            return False
        # Payload first: a reader of the live segment, or of one whose writer was killed, sees a length only in front of
        # a payload that is there.
        self._map[start + OVERHEAD : end] = payload
        HEADER.pack_into(self._map, start, len(payload) + 1, zlib.crc32(payload, KIND_CRC[kind]), kind)
        self.used = end
        return True

    def finish(self) -> None:
        """Cut to the used length, make durable, close. Raises OSError, closed all the same."""
        self.closed = True
        self._map.close()
        try:
            os.ftruncate(self.fd, self.used)
            os.fsync(self.fd)
        finally:
            os.close(self.fd)


class _Lock:
    """The lock file of a directory, ``<pid> <sequence>``: who writes there, and the highest sequence number ever given.

    The number is kept because segments are deleted once they are compacted, and the rows of a segment are known by its
    name: a name used twice would replace the rows of the first.
    """

    def __init__(self, directory: Path) -> None:
        """Take the lock. Raises ConfigError when another process has it, OSError when the file cannot be used."""
        self._fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o640)
        try:
            taken = self._take()
        except OSError:
            os.close(self._fd)
            raise
        holder, self.sequence = self._read()
        if not taken:
            os.close(self._fd)
            raise ConfigError(
                f"journal directory {directory} is in use by the process with pid {holder}: "
                "stop that one, or give this one a directory of its own"
            )

    def _take(self) -> bool:
        # Tried for 1 s, because a reader that asks in_use holds the lock for a moment, or for longer if it waits for a core.
        for _ in range(100):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
            else:
                return True
        return False

    def _read(self) -> tuple[str, int]:
        words = os.pread(self._fd, 64, 0).decode("ascii", "replace").split()
        return (words[0], int(words[1])) if len(words) == 2 and words[1].isdecimal() else ("unknown", 0)

    def note(self, sequence: int) -> None:
        """Write who holds the lock and the number that is about to be given. Raises OSError."""
        os.pwrite(self._fd, f"{os.getpid():<10} {sequence:>20}\n".encode("ascii"), 0)

    def release(self) -> None:
        os.close(self._fd)


def in_use(directory: Path) -> bool:
    """Whether a process has ``directory`` open for writing now. Raises InputFileError when its lock cannot be read."""
    try:
        handle = os.open(directory / LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise InputFileError(f"{directory / LOCK_NAME} cannot be read: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


class Journal:
    """Appends frames to segments in a directory, one writer a directory. Make one with ``Journal.open``.

    ``dropped`` counts frames that were not taken because the disk refused a segment, ``sync_failures`` the times that
    it refused to make one durable, ``error`` is the last thing that it said.
    """

    def __init__(self, directory: Path, lock: _Lock, segment_bytes: int, head: Head, now: Callable[[], float]) -> None:
        self.directory = directory
        self.dropped = 0
        self.sync_failures = 0
        self.error: OSError | None = None
        self._lock = lock
        self.segment_bytes = segment_bytes
        self._head = head
        self._now = now
        self._retry_at = float("-inf")
        self._sequence = max([lock.sequence, *map(sequence_of, segments(directory))])
        self._closed = False
        self._segment: _Segment | None = None
        self._retired: deque[_Segment] = deque()
        self._sync_lock = threading.Lock()
        self._synced: tuple[_Segment | None, int] = (None, 0)
        self._synced_sequence = 0

    @classmethod
    def open(
        cls, directory: Path, segment_bytes: int, head: Head, *, now: Callable[[], float] = time.monotonic
    ) -> Self:
        """Lock ``directory`` (created if missing) and begin a new segment.

        ``segment_bytes`` is the room for frames after the two that ``head`` gives, so that no snapshot is too large;
        ``now`` is a clock in seconds, read only while the journal is off. Raises ConfigError when another process has
        the directory, or the disk refuses.
        """
        if segment_bytes < mmap.PAGESIZE:
            raise ConfigError(f"a journal segment of {segment_bytes} bytes is too small: give at least {mmap.PAGESIZE}")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = _Lock(directory)
        except OSError as error:
            raise ConfigError(f"journal directory {directory} cannot be used: {error.strerror}") from error
        journal = cls(directory, lock, segment_bytes, head, now)
        if not journal.rotate():
            journal.close()
            raise ConfigError(
                f"a journal segment of {segment_bytes} bytes cannot be created in {directory}: {journal.error}; "
                "free some space, or choose another directory or a smaller segment"
            )
        return journal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def segment(self) -> Path | None:
        """The segment that frames go to now; None while the journal is off."""
        return None if self._segment is None else self._segment.path

    @property
    def room(self) -> int:
        """Bytes left in this segment, 0 while off. A frame takes ``OVERHEAD`` besides its payload.

        For frames that belong together: ``rotate`` first when they do not all fit.
        """
        return 0 if self._segment is None else self._segment.capacity - self._segment.used

    def append(self, kind: int, payload: bytes) -> bool:
        """Write one frame, in a new segment if it does not fit this one. False when it was dropped: the journal is off.

        Raises InternalError for a frame that fits no segment, and on a closed journal.
        """
        segment = self._segment
        if segment is not None and segment.put(kind, payload):
            return True
        if len(payload) + OVERHEAD > self.segment_bytes:
            raise InternalError(
                f"a journal frame of {len(payload)} bytes does not fit a segment of {self.segment_bytes} bytes: "
                "use larger segments"
            )
        if self.rotate() and self._segment is not None:
            return self._segment.put(kind, payload)
        self.dropped += 1
        return False

    def rotate(self) -> bool:
        """Begin a new segment. False when the disk refused: the journal is off, and tries once a second."""
        if self._closed:
            raise InternalError("the journal is closed")
        if self._segment is None and self._now() < self._retry_at:
            return False
        settings, snapshot = self._head()
        self._retire()
        sequence = self._sequence + 1
        size = 2 * OVERHEAD + len(settings) + len(snapshot) + self.segment_bytes
        try:
            self._lock.note(sequence)
            segment = _Segment(segment_path(self.directory, sequence), size)
        except OSError as error:
            self.error = error
            self._retry_at = self._now() + RETRY_S
            return False
        finally:
            self._sequence = sequence
        segment.put(Kind.SETTINGS, settings)
        segment.put(Kind.SNAPSHOT, snapshot)
        self._segment = segment
        return True

    def sync(self) -> bool:
        """Make every frame durable that was appended before the call. False when the disk did not agree.

        Blocks for as long as the disk takes, without the interpreter lock.
        """
        with self._sync_lock:
            # In this order: a segment that is put aside after this line is either among the retired or still open,
            # and the sequence is never older than the segment, so neither bytes nor a file name are missed.
            segment = self._segment
            sequence = self._sequence
            durable = self._finish_retired()
            if segment is not None and not segment.closed:
                durable &= self._sync_segment(segment)
            return self._sync_names(sequence) and durable

    def close(self) -> None:
        """Make all durable, cut the last segment to its used length, release the directory. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._retire()
        with self._sync_lock:
            self._finish_retired()
            self._sync_names(self._sequence)
            self._lock.release()

    def _retire(self) -> None:
        if self._segment is not None:
            self._retired.append(self._segment)
            self._segment = None

    def _finish_retired(self) -> bool:
        durable = True
        while self._retired:
            durable &= self._attempt(self._retired.popleft().finish)
        return durable

    def _sync_segment(self, segment: _Segment) -> bool:
        used = segment.used
        if self._synced == (segment, used):
            return True
        if not self._attempt(lambda: os.fdatasync(segment.fd)):
            return False
        self._synced = (segment, used)
        return True

    def _sync_names(self, sequence: int) -> bool:
        """Make the names of segments up to ``sequence`` durable: a synced file without a name is lost all the same."""
        if self._synced_sequence == sequence:
            return True
        if not self._attempt(lambda: _sync_directory(self.directory)):
            return False
        self._synced_sequence = sequence
        return True

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError as error:
            self.error = error
            self.sync_failures += 1
            return False
        return True


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
