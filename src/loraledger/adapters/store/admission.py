"""How the bytes of one adapter enter the store: from files that a tenant may change at any moment.

Nothing is believed of a path, only of what was opened. The two files are opened first, without blocking on a pipe, and
judged as opened: regular, and below the root that was asked for. What is read from them is hashed in the same pass as
it is written, so the digest is that of the copy whatever happens to the original meanwhile. A file that has another
length or other times after the pass than before it was being written to; its copy may be half old and half new and is
given up.

Where the file system can share extents (btrfs, XFS) the file is cloned, and the clone is hashed: it costs no space, and
unlike a hard link it does not follow what the tenant does to the inode. Elsewhere bytes go through memory, since the
hash needs them there anyway.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loraledger.adapters.store.disk import NAMES
from loraledger.adapters.store.known_digests import PairKey, StatKey, stat_key
from loraledger.errors import InputFileError

if TYPE_CHECKING:
    from hashlib import _Hash

_CHUNK: Final = 1024 * 1024
_FICLONE: Final = 0x40049409
"""``_IOW(0x94, 9, int)`` of linux/fs.h."""


@dataclass(frozen=True, slots=True)
class _File:
    """One opened file and its stat when it was opened."""

    path: Path
    fd: int
    key: StatKey

    @property
    def length(self) -> int:
        """Bytes."""
        return self.key[2]

    def read(self, sha: _Hash, target: int | None = None) -> None:
        """Feed length and bytes to ``sha``, and write the bytes to the empty file ``target``.

        Raises InputFileError when reading fails or ends early, OSError when writing fails.
        """
        sha.update(self.length.to_bytes(8, "little"))
        source, cloned = self.fd, False
        if target is not None and _clone(self.fd, target):
            source, cloned = target, True
            if os.fstat(target).st_size != self.length:
                raise self.changed()
        buffer = bytearray(min(_CHUNK, self.length))
        view = memoryview(buffer)
        offset = 0
        while offset < self.length:
            count = self._pread(source, view[: self.length - offset], offset)
            sha.update(view[:count])
            if target is not None and not cloned:
                _write(target, view[:count])
            offset += count

    def _pread(self, source: int, view: memoryview, offset: int) -> int:
        try:
            count = os.preadv(source, [view], offset)
        except OSError as error:
            raise InputFileError(f"{self.path.name} cannot be read: {error.strerror}") from error
        if count == 0:
            raise self.changed()
        return count

    def changed(self) -> InputFileError:
        """The error for a file that is being written to."""
        return InputFileError(f"{self.path.name} changed while it was read: try again once its writing has ended")


@dataclass(frozen=True, slots=True)
class Source:
    """The two files of an adapter, opened. Made by :func:`opened`."""

    files: tuple[_File, _File]

    @property
    def key(self) -> PairKey:
        """What the files are known by."""
        return (self.files[0].key, self.files[1].key)

    @property
    def bytes(self) -> int:
        """Length of both files."""
        return sum(file.length for file in self.files)

    def digest(self) -> str:
        """The digest of ``digest.content_digest``, by reading all. Raises InputFileError."""
        sha = hashlib.sha256()
        for file in self.files:
            file.read(sha)
        self._check_unchanged()
        return sha.hexdigest()

    def copy_into(self, folder: Path) -> str:
        """Copy both files into the empty ``folder``, read-only, and return the digest of the copies.

        Raises InputFileError for what is wrong with the files, OSError for what is wrong with ``folder``.
        """
        sha = hashlib.sha256()
        for file, name in zip(self.files, NAMES, strict=True):
            # Created without the right to write, which binds later openings and not this one; the umask applies.
            target = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
            try:
                file.read(sha, target)
            finally:
                os.close(target)
        self._check_unchanged()
        return sha.hexdigest()

    def _check_unchanged(self) -> None:
        for file in self.files:
            if stat_key(os.fstat(file.fd)) != file.key:
                raise file.changed()


@contextlib.contextmanager
def opened(config: Path, weights: Path, root: Path | None = None) -> Iterator[Source]:
    """Open the files of an adapter and close them at the end.

    Links are followed. With ``root``, what they led to must lie below it. Raises InputFileError for a file that is
    missing, unreadable, not regular or outside.
    """
    with contextlib.ExitStack() as stack:
        files = []
        for path in (config, weights):
            fd = _open(path)
            stack.callback(os.close, fd)
            files.append(_judged(path, fd, root))
        yield Source((files[0], files[1]))


def _open(path: Path) -> int:
    try:
        # Not blocking: opening a pipe that nobody writes to would wait for ever.
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputFileError(f"{path.name} cannot be opened: {reason}") from error


def _judged(path: Path, fd: int, root: Path | None) -> _File:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise InputFileError(f"{path.name} is not a regular file")
    if root is not None and not _lies_below(fd, root):
        raise InputFileError(f"{path.name} leads out of {root}: put the file itself there, not a link")
    return _File(path, fd, stat_key(found))


def _lies_below(fd: int, root: Path) -> bool:
    """Asked of what was opened: a path that is resolved and then opened can be changed in between."""
    try:
        return Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(root.resolve(strict=True))
    except (OSError, RuntimeError):
        return False


def _clone(source: int, target: int) -> bool:
    """Share the extents of ``source`` with ``target``. False when it cannot be: the copy then tells what is wrong."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def _write(target: int, view: memoryview) -> None:
    while view:
        view = view[os.write(target, view) :]
