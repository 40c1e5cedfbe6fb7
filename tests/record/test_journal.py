from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loraledger.errors import ConfigError, InputFileError, InternalError
from loraledger.record.frames import OVERHEAD, Frame, Kind, read_segment, segments
from loraledger.record.journal import LOCK_NAME, Journal, in_use

SEGMENT = 8192
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def head() -> tuple[bytes, bytes]:
    return b"settings", b"snapshot"


def opened(directory: Path, clock: Callable[[], float] = Clock()) -> Journal:  # noqa: B008 - a clock that stands still
    return Journal.open(directory, SEGMENT, head, now=clock)


def frames(directory: Path) -> list[Frame]:
    return [frame for path in segments(directory) for frame in read_segment(path)]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def events(directory: Path) -> list[bytes]:
    return [frame.payload for frame in frames(directory) if frame.kind == Kind.EVENT]


def test_a_segment_begins_with_settings_and_snapshot_and_is_read_while_it_is_written(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        assert journal.append(Kind.EVENT, b"one")
        assert journal.append(Kind.NOTE, b"")
        assert [(frame.kind, frame.payload) for frame in frames(tmp_path)] == [
            (Kind.SETTINGS, b"settings"),
            (Kind.SNAPSHOT, b"snapshot"),
            (Kind.EVENT, b"one"),
            (Kind.NOTE, b""),
        ]
        assert journal.segment == segments(tmp_path)[0]
        assert segments(tmp_path)[0].stat().st_blocks * 512 >= SEGMENT


def test_close_cuts_the_segment_to_what_was_used(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.append(Kind.EVENT, b"one")
    journal.close()
    journal.close()
    used = len(b"settings" + b"snapshot" + b"one") + 3 * OVERHEAD
    assert segments(tmp_path)[0].stat().st_size == used
    with pytest.raises(InternalError, match="closed"):
        journal.append(Kind.EVENT, b"two")


def test_rotation_loses_nothing_and_takes_a_new_snapshot(tmp_path: Path) -> None:
    taken: list[int] = []

    def counting() -> tuple[bytes, bytes]:
        taken.append(len(taken))
        return b"settings", b"%d" % taken[-1]

    payloads = [bytes([number % 256]) * (number % 500) for number in range(400)]
    with Journal.open(tmp_path, SEGMENT, counting) as journal:
        for payload in payloads:
            assert journal.append(Kind.EVENT, payload)
            if len(payload) == 250:
                assert journal.sync()
    assert events(tmp_path) == payloads
    assert len(taken) == len(segments(tmp_path)) > 10
    for number, path in enumerate(segments(tmp_path)):
        assert [frame.payload for frame in read_segment(path)][:2] == [b"settings", b"%d" % number]


def test_frames_that_belong_together_can_be_kept_in_one_segment(tmp_path: Path) -> None:
    pair = (b"e" * 900, b"c" * 700)
    with opened(tmp_path) as journal:
        for _ in range(40):
            if journal.room < sum(len(payload) + OVERHEAD for payload in pair):
                assert journal.rotate()
            room = journal.room
            journal.append(Kind.EVENT, pair[0])
            assert journal.append(Kind.COMMANDS, pair[1])
            assert journal.room == room - len(pair[0]) - len(pair[1]) - 2 * OVERHEAD
    kinds = [[frame.kind for frame in read_segment(path)][2:] for path in segments(tmp_path)]
    assert len(kinds) > 5
    assert all(each == [Kind.EVENT, Kind.COMMANDS] * (len(each) // 2) for each in kinds)


def test_a_frame_fits_a_segment_exactly_or_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.append(Kind.EVENT, b"small")
        assert journal.append(Kind.EVENT, bytes(SEGMENT - OVERHEAD))
        assert journal.room == 0
        with pytest.raises(InternalError, match="8184 bytes does not fit a segment of 8192 bytes"):
            journal.append(Kind.EVENT, bytes(SEGMENT - OVERHEAD + 1))
        assert journal.append(Kind.EVENT, b"after")
        assert journal.dropped == 0
    assert [len(payload) for payload in events(tmp_path)] == [5, SEGMENT - OVERHEAD, 5]


def test_a_snapshot_may_be_larger_than_the_room_for_frames(tmp_path: Path) -> None:
    with Journal.open(tmp_path, SEGMENT, lambda: (b"settings", bytes(5 * SEGMENT))) as journal:
        assert journal.room == SEGMENT
        assert journal.append(Kind.EVENT, b"one")
    assert events(tmp_path) == [b"one"]


def test_a_second_writer_is_refused_and_told_who_holds_the_directory(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        with pytest.raises(ConfigError, match=f"in use by the process with pid {os.getpid()}"):
            opened(tmp_path)
        assert journal.append(Kind.EVENT, b"one")
    with opened(tmp_path):
        assert len(segments(tmp_path)) == 2


def test_a_lock_file_that_nobody_holds_does_not_stop_a_start_whatever_it_says(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_bytes(b"\xff\0 not a lock")
    with opened(tmp_path):
        pass
    assert [path.name for path in segments(tmp_path)] == ["journal-00000001.log"]


def test_whether_a_directory_is_in_use_can_be_asked_without_disturbing_its_writer(tmp_path: Path) -> None:
    assert not in_use(tmp_path)
    with opened(tmp_path) as journal:
        assert in_use(tmp_path)
        assert in_use(tmp_path)
        assert journal.append(Kind.EVENT, b"one")
    assert not in_use(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputFileError, match=r"journal\.lock cannot be read: Not a directory"):
        in_use(tmp_path / "file")


def test_a_start_is_not_refused_because_a_reader_is_just_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path).close()
    waited: list[float] = []
    with (tmp_path / LOCK_NAME).open() as reader, monkeypatch.context() as patch:
        fcntl.flock(reader, fcntl.LOCK_SH)

        def asked(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 3:
                fcntl.flock(reader, fcntl.LOCK_UN)

        patch.setattr("loraledger.record.journal.time.sleep", asked)
        with opened(tmp_path):
            assert waited == [0.01] * 3


def test_a_name_is_never_given_twice_even_when_all_segments_were_deleted(tmp_path: Path) -> None:
    for number in range(1, 4):
        with opened(tmp_path) as journal:
            assert journal.segment is not None
            assert journal.segment.name == f"journal-{number:08d}.log"
        segments(tmp_path)[0].unlink()


WRITER = """
import os, sys
from pathlib import Path
from loraledger.record.frames import Kind
from loraledger.record.journal import Journal
journal = Journal.open(Path(sys.argv[1]), 65536, lambda: (b"settings", b"snapshot"))
number = 0
while journal.append(Kind.EVENT, b"%d " % number + bytes(number % 300)):
    os.write(1, b"%d\\n" % number)
    number += 1
"""


@pytest.mark.parametrize("acknowledged", [1, 700, 5000])
def test_every_append_that_returned_before_kill_9_is_read_back(tmp_path: Path, acknowledged: int) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, env=ENVIRONMENT)
    assert writer.stdout is not None
    with writer.stdout as pipe:
        for _ in range(acknowledged):
            pipe.readline()
        writer.send_signal(signal.SIGKILL)
        last = [line for line in pipe.read().split(b"\n")[:-1] if line]
    assert writer.wait() == -signal.SIGKILL
    returned = int(last[-1]) if last else acknowledged - 1
    found = [int(payload.split(b" ")[0]) for payload in events(tmp_path)]
    assert found == list(range(len(found)))
    assert len(found) > returned
    before = len(segments(tmp_path))
    with opened(tmp_path) as journal:
        journal.append(Kind.EVENT, b"%d " % len(found))
    assert len(segments(tmp_path)) == before + 1
    assert len(events(tmp_path)) == len(found) + 1


def test_a_full_disk_turns_the_journal_off_until_a_segment_can_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def full(fd: int, offset: int, size: int) -> None:
        attempts.append(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    clock = Clock()
    journal = opened(tmp_path, clock)
    with monkeypatch.context() as disk:
        disk.setattr(os, "posix_fallocate", full)
        sent = 0
        while journal.append(Kind.EVENT, b"before" + bytes(500)):
            sent += 1
        for _ in range(10):
            assert not journal.append(Kind.EVENT, b"lost")
        assert len(attempts) == 1
        clock.seconds = 0.999
        assert not journal.append(Kind.EVENT, b"lost")
        clock.seconds = 1.0
        assert not journal.append(Kind.EVENT, b"lost")
        assert len(attempts) == 2
        assert journal.dropped == 13
        assert journal.segment is None
        assert journal.room == 0
        assert journal.error is not None
        assert journal.error.errno == errno.ENOSPC
        assert journal.sync()
    clock.seconds = 2.0
    assert journal.append(Kind.EVENT, b"after")
    journal.close()
    assert [payload[:6] for payload in events(tmp_path)] == [b"before"] * sent + [b"after"]
    assert [frame.kind for frame in read_segment(segments(tmp_path)[-1])] == [Kind.SETTINGS, Kind.SNAPSHOT, Kind.EVENT]


def test_a_file_size_limit_of_the_system_is_met_like_a_full_disk(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SEGMENT // 2, hard))
        try:
            rotated = journal.rotate()
            appended = journal.append(Kind.EVENT, b"lost")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (rotated, appended, journal.dropped) == (False, False, 1)
        assert journal.error is not None
        assert journal.error.errno == errno.EFBIG
    assert len(segments(tmp_path)) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_on_a_disk_that_is_really_full_no_append_dies_and_a_freed_segment_is_used(small_disk: Path) -> None:
    clock = Clock()
    with Journal.open(small_disk, 200_000, head, now=clock) as journal:
        written = 0
        while journal.append(Kind.EVENT, b"x" * 1000):
            written += 1
        assert journal.sync()
        assert written == len(events(small_disk))
        assert len(segments(small_disk)) == 5
        assert not journal.append(Kind.EVENT, b"lost")
        for path in segments(small_disk)[:3]:
            path.unlink()
        clock.seconds += 1
        assert journal.append(Kind.EVENT, b"after")
        assert journal.dropped == 2
    assert events(small_disk)[-1] == b"after"
    assert len(segments(small_disk)) == 3


def test_a_directory_without_room_for_one_segment_is_refused_at_the_start(small_disk: Path) -> None:
    with pytest.raises(ConfigError, match=r"segment of 4000000 bytes cannot be created.*No space left"):
        Journal.open(small_disk, 4_000_000, head)
    assert segments(small_disk) == []
    Journal.open(small_disk, SEGMENT, head).close()


def test_settings_that_cannot_work_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="segment of 100 bytes is too small"):
        Journal.open(tmp_path, 100, head)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used: File exists"):
        Journal.open(tmp_path / "file", SEGMENT, head)


def test_appends_go_on_while_another_thread_syncs_and_all_files_are_closed(tmp_path: Path) -> None:
    gc.collect()  # else files that other tests dropped close meanwhile
    descriptors = open_descriptors()
    journal = opened(tmp_path)
    done = threading.Event()
    verdicts = []

    def keep_syncing() -> None:
        while not done.is_set():
            verdicts.append(journal.sync())

    thread = threading.Thread(target=keep_syncing)
    thread.start()
    payloads = [b"%d " % number + bytes(number % 300) for number in range(3000)]
    for payload in payloads:
        assert journal.append(Kind.EVENT, payload)
    done.set()
    thread.join()
    journal.close()
    assert all(verdicts)
    assert events(tmp_path) == payloads
    assert len(segments(tmp_path)) > 50
    assert open_descriptors() <= descriptors


def test_an_append_and_a_rotation_do_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, release = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        reached.set()
        assert release.wait(10)

    monkeypatch.setattr(os, "fdatasync", slow)
    with opened(tmp_path) as journal:
        thread = threading.Thread(target=journal.sync)
        thread.start()
        assert reached.wait(10)
        assert journal.append(Kind.EVENT, b"one")
        assert journal.rotate()
        assert journal.append(Kind.EVENT, b"two")
        assert thread.is_alive()
        release.set()
        thread.join()
    assert events(tmp_path) == [b"one", b"two"]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inodes in the order in which they were made durable."""
    inodes: list[int] = []

    def watched(really: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            inodes.append(os.fstat(fd).st_ino)
            really(fd)

        return sync

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    return inodes


def test_sync_reaches_each_segment_and_its_name_and_an_idle_journal_leaves_the_disk_alone(
    tmp_path: Path, synced: list[int]
) -> None:
    with opened(tmp_path) as journal:
        journal.append(Kind.EVENT, b"one")
        journal.rotate()
        journal.rotate()
        journal.append(Kind.EVENT, b"two")
        assert journal.sync()
        expected = [path.stat().st_ino for path in [*segments(tmp_path), tmp_path]]
        assert synced == expected
        assert journal.sync()
        assert synced == expected
        journal.append(Kind.EVENT, b"three")
        assert journal.sync()
        assert synced == [*expected, expected[2]]


def test_a_rotation_in_the_midst_of_a_sync_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.fsync
    with opened(tmp_path) as journal:

        def rotating(fd: int) -> None:
            monkeypatch.setattr(os, "fsync", really)
            journal.rotate()
            really(fd)

        journal.rotate()
        monkeypatch.setattr(os, "fsync", rotating)
        assert journal.sync()
        assert journal.error is None
    assert [path.stat().st_size for path in segments(tmp_path)] == [len(b"settings" + b"snapshot") + 2 * OVERHEAD] * 3


def test_what_was_put_aside_while_the_journal_is_off_still_gets_its_name_synced(
    tmp_path: Path, synced: list[int]
) -> None:
    clock = Clock()
    with opened(tmp_path, clock) as journal:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SEGMENT // 2, hard))
        try:
            journal.rotate()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert journal.sync()
        assert synced == [segments(tmp_path)[0].stat().st_ino, tmp_path.stat().st_ino]


def test_a_disk_that_refuses_to_sync_is_counted_and_never_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(tmp_path) as journal:
        journal.append(Kind.EVENT, b"one")
        with monkeypatch.context() as disk:
            disk.setattr(os, "fdatasync", broken)
            assert not journal.sync()
            assert not journal.sync()
        assert journal.sync_failures == 2
        assert journal.error is not None
        assert journal.error.errno == errno.EIO
        assert journal.append(Kind.EVENT, b"two")
        assert journal.sync()
        really = os.fsync
        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync", lambda fd: really(fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else broken(fd))
            journal.rotate()
            assert not journal.sync()
        assert journal.sync_failures == 3
    assert events(tmp_path) == [b"one", b"two"]
