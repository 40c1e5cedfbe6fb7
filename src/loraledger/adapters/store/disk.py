"""The store's folder as it lies on disk: what an entry is there, and the few steps whose order a crash must not betray.

::

    STORE/.lock                          the pid of the process that has the store, under an advisory lock
    STORE/.known                         see ``known_digests``
    STORE/.incoming-*, .dropping-*       half-made and half-removed entries, cleared at opening
    STORE/<content digest>/              an entry: two files, 0444, in a folder, 0555, both less the umask
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraledger.adapters.reading.files import CONFIG_NAME, WEIGHTS_NAME
from loraledger.errors import ConfigError, InputFileError

NAMES: Final = (CONFIG_NAME, WEIGHTS_NAME)
"""The files of an entry, whatever they were called where they came from."""
LOCK: Final = ".lock"
KNOWN: Final = ".known"
INCOMING: Final = ".incoming-"
DROPPING: Final = ".dropping-"

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One adapter in the store."""

    bytes: int
    """Of both files."""
    admitted_at: int
    """Wall clock, nanoseconds, as the file system stamped it."""


def locked(root: Path) -> int:
    """The descriptor that holds the lock. Raises ConfigError when another store has it, OSError."""
    fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode("ascii"), 0)
    except BlockingIOError:
        pid = os.pread(fd, 20, 0).decode("ascii", "replace") or "unknown"
        os.close(fd)
        raise ConfigError(
            f"the store {root} is in use by the process with pid {pid}: stop that one, or give this one its own store"
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def read_entry(path: Path) -> Entry:
    """The entry at ``path``. Raises ValueError saying why it is none, OSError."""
    if not _DIGEST.fullmatch(path.name):
        raise ValueError("not named by a digest")
    folder = path.lstat()
    if not stat.S_ISDIR(folder.st_mode):
        raise ValueError("not a folder")
    if {child.name for child in path.iterdir()} != set(NAMES):
        raise ValueError(f"does not hold {' and '.join(NAMES)} and nothing else")
    files = [(path / name).lstat() for name in NAMES]
    if not all(stat.S_ISREG(file.st_mode) for file in files):
        raise ValueError("a file in it is not a regular file")
    return Entry(sum(file.st_size for file in files), folder.st_mtime_ns)


def publish(incoming: Path, path: Path) -> None:
    """Give the copy its name. Raises InputFileError when that is taken, OSError."""
    try:
        incoming.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise InputFileError(
            f"{path} is damaged or not an adapter: remove it while no engine serves it", code="store_damaged"
        ) from error


def put_aside(path: Path) -> Path:
    """Rename an entry so that it is one no more, and return where it is. Raises OSError."""
    aside = path.with_name(f"{DROPPING}{path.name}-{secrets.token_hex(4)}")
    path.rename(aside)
    return aside


def make_durable(folder: Path) -> None:
    """Sync the files of ``folder`` and its names, and make it read-only as its files are. Raises OSError."""
    for name in NAMES:
        handle = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
            readable = stat.S_IMODE(os.fstat(handle).st_mode) & 0o444
        finally:
            os.close(handle)
    folder.chmod(readable | readable >> 2)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Delete a file, a link (never what it leads to) or a folder, read-only ones too. Raises OSError."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
    shutil.rmtree(path)
