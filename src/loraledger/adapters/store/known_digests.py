"""What is already known of files on disk: their digests by stat, so that a restart does not read them again.

A pair of files that was read once is recognised by device, inode, length, modification time and change time of both.
Programs can set back a modification time, but not a change time, so equal keys mean equal bytes, with two exceptions.
One is Git's "racily clean" file: changed within the clock's grain after it was read, it has the key that was read. A
key is therefore kept only when both its times were :data:`SETTLED_NS` in the past before the reading began. The other
is a file that a program has mapped to memory: Linux stamps the first write to a page, and no more until that page was
written back. A tenant who edits weights in this way may be served their older version until they touch the file.

The cache lives in one file: a checksum line, then JSON. It saves time and nothing else, so whatever is wrong with that
file makes it empty, and an entry counts only while the store has its digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Final, Self

import msgspec

SETTLED_NS: Final = 2_000_000_000
"""Nanoseconds; covers the coarsest times in use, the 2 s of FAT."""
ENTRIES: Final = 65_536
"""Pairs kept; the least recently used goes first. A pair takes about 230 bytes in the file."""

_FILE_LIMIT: Final = 32 * 1024 * 1024

StatKey = tuple[int, int, int, int, int]
"""Device, inode, length in bytes, modification and change time in nanoseconds."""
PairKey = tuple[StatKey, StatKey]
"""Config, weights."""


def stat_key(stat: os.stat_result) -> StatKey:
    """What of ``stat`` tells that a file is the same and unchanged."""
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class KnownDigests:
    """Digests of content by :data:`PairKey`. Not for threads: the store serialises."""

    def __init__(self) -> None:
        self._digests: dict[PairKey, str] = {}

    def __len__(self) -> int:
        return len(self._digests)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read ``path``; empty when that cannot be done for any reason."""
        known = cls()
        with contextlib.suppress(OSError, ValueError):
            with path.open("rb") as stream:
                checksum, _, body = stream.read(_FILE_LIMIT).partition(b"\n")
            # A file that was cut at the limit fails here too.
            if checksum == _checksum(body):
                # msgspec's errors are ValueErrors.
                rows = msgspec.json.decode(body, type=list[tuple[StatKey, StatKey, str]])
                known._digests = {(config, weights): digest for config, weights, digest in rows[-ENTRIES:]}
        return known

    def save(self, path: Path, scratch: Path) -> bool:
        """Write all to ``scratch``, then rename it to ``path``. False when the disk refused: what was there stays."""
        body = msgspec.json.encode([(*key, digest) for key, digest in self._digests.items()])
        try:
            scratch.write_bytes(_checksum(body) + b"\n" + body)
            scratch.replace(path)
        except OSError:
            return False
        return True

    def get(self, key: PairKey) -> str | None:
        """The digest, or None when the files are unknown or have changed."""
        digest = self._digests.pop(key, None)
        if digest is not None:
            self._digests[key] = digest
        return digest

    def put(self, key: PairKey, digest: str, now_ns: int) -> None:
        """Keep the digest, unless a file of ``key`` is too young. ``now_ns``: wall clock before ``key`` was taken."""
        if any(max(mtime, ctime) > now_ns - SETTLED_NS for *_, mtime, ctime in key):
            return
        self._digests.pop(key, None)
        self._digests[key] = digest
        if len(self._digests) > ENTRIES:
            del self._digests[next(iter(self._digests))]


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode("ascii")
