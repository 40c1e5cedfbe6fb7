"""The store: the bytes that engines are told to read, where nothing can change them.

An engine reads an adapter's files again after it dropped them from memory, and dies when they are gone by then. So no
engine is ever pointed at a tenant's folder. An adapter is first copied to ``STORE/<content digest>/``, read-only, under
the two names that engines look for, and stays there while anybody needs it. Equal content is kept once. The folder is
the gateway's own: whoever can write in it can change what is served.

**Admission** (see ``admission``) copies into ``.incoming-*``, syncs it, and renames it to its digest: an entry is
whole or absent. One adapter is taken in at a time; each is bound by the disk and by SHA-256, and nothing needs to be
reserved. **Collection** renames to ``.dropping-*`` first and deletes then, so that no half of an entry ever bears a
digest. Opening the store clears both kinds of leftovers. Anything else that is not a whole entry is somebody's: it is
named in ``foreign`` and left alone, also when it has the name of a digest.

**Holders.** An entry with a holder is never removed. Holders are names that callers choose (a catalog name, a
registration on a replica) and live in memory only. After a restart engines may still have any entry registered, so each
is held by :data:`EARLIER` until the caller, having asked all replicas and held what they have, calls ``settle``.

Data that is damaged in place is found by ``verify``. Remedy: delete that entry's folder while no engine serves it; the
next admission writes it anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from loraledger.adapters.store.admission import Source, opened
from loraledger.adapters.store.disk import (
    DROPPING,
    INCOMING,
    KNOWN,
    LOCK,
    NAMES,
    Entry,
    locked,
    make_durable,
    publish,
    put_aside,
    read_entry,
    remove,
    sync_folder,
)
from loraledger.adapters.store.known_digests import KnownDigests
from loraledger.errors import ConfigError, InputFileError, InternalError
from loraledger.units import format_bytes

EARLIER: Final = "(an earlier run)"
"""Holder of what was found at opening, until ``settle``."""

_SAVE_EVERY: Final = 1024**3
"""Bytes read since the known digests were saved: what a crash may cost again."""
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of an admission."""

    digest: str
    """64 hex digits; see ``content_digest``."""
    path: Path
    """The folder to register with engines."""
    bytes: int
    """Of both files."""
    new: bool
    """False: the content was there already."""


class Store:
    """A folder of adapters by digest. Make one with ``Store.open``. Methods may be called from any thread.

    ``limit`` is in bytes of files, ``None`` for the disk's own. ``adapter_limit`` is that of one adapter: a file of holes takes
    4 KB of a tenant's disk and its whole length here. ``foreign`` says of each child that is not an entry why it is not.
    """

    def __init__(self, root: Path, limit: int | None, adapter_limit: int | None = None) -> None:
        self.root = root
        self.limit = limit
        self.adapter_limit = adapter_limit
        self.foreign: dict[str, str] = {}
        self._now: Callable[[], int] = time.time_ns
        self._lock_fd: int | None = None
        self._admitting = threading.Lock()
        """Taken before ``_state`` where both are; also guards what is known."""
        self._state = threading.Lock()
        self._entries: dict[str, Entry] = {}
        """In the order of admission."""
        self._holders: dict[str, set[str]] = {}
        self._known = KnownDigests()
        self._unsaved = 0

    @classmethod
    def open(
        cls, root: Path, limit: int | None, adapter_limit: int | None = None, *, now: Callable[[], int] = time.time_ns
    ) -> Self:
        """Lock ``root`` (created if missing), clear what broken admissions left, list the entries.

        ``now`` is the wall clock in nanoseconds, by which files are judged too young to be known again. Raises
        ConfigError when another process has the store, or the disk refuses.
        """
        store = cls(root.absolute(), limit, adapter_limit)
        store._now = now
        try:
            store.root.mkdir(parents=True, exist_ok=True)
            store._lock_fd = locked(store.root)
            store._known = KnownDigests.load(store.root / KNOWN)
            store._list()
        except OSError as error:
            store.close()
            raise ConfigError(
                f"the store {root} cannot be used: {error.strerror}: choose a folder that this process may write"
            ) from error
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Save what is known and give the folder free. Holders are forgotten. May be called twice."""
        with self._admitting:
            if self._lock_fd is not None:
                self._save_known()
                os.close(self._lock_fd)
                self._lock_fd = None

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All entries by digest, oldest admission first, as they are now."""
        with self._state:
            return dict(self._entries)

    @property
    def bytes(self) -> int:
        """Bytes of all entries' files."""
        with self._state:
            return self._used()

    def path_of(self, digest: str) -> Path:
        """The folder of an entry. Raises InternalError when there is none."""
        with self._state:
            self._must_have(digest)
            return self.root / digest

    def admit(self, config: Path, weights: Path, *, root: Path | None = None, holder: str | None = None) -> Stored:
        """Take in the adapter of these two files and return its entry. Reads nothing of files that are known unchanged.

        With ``root``, what is opened must lie below it after links are followed. ``holder`` holds the entry from the
        start: without one, the next admission may collect it before the caller can hold it. Raises InputFileError, and
        leaves nothing behind, for files that cannot be read or change meanwhile (``bad_input_file``), or are over the limit of
        one adapter (``adapter_too_large``), when there is no room even after collecting (``store_full``), when the digest is
        taken by something damaged or foreign (``store_damaged``), or the disk fails (``store_failed``).
        """
        with self._admitting:
            self._must_be_open()
            now = self._now()
            with opened(config, weights, root) as source, self._disk_errors(source.bytes):
                self._check_length(source.bytes)
                known = self._known.get(source.key)
                stored = self._claim(known, holder) or self._recover(known, holder)
                if stored is None:
                    stored = self._make_room(source, holder) or self._take_in(source, holder)
                    self._learn(source, stored.digest, now)
                return stored

    def hold(self, digest: str, holder: str) -> None:
        """Keep the entry for ``holder``; holding twice is holding once. Raises InternalError when there is no entry."""
        with self._state:
            self._must_have(digest)
            self._holders.setdefault(digest, set()).add(holder)

    def release(self, digest: str, holder: str) -> None:
        """End what ``hold`` began. Nothing happens when ``holder`` does not hold it."""
        with self._state:
            self._release(digest, holder)

    def holders(self, digest: str) -> frozenset[str]:
        """Who holds the entry; empty also when there is none."""
        with self._state:
            return frozenset(self._holders.get(digest, ()))

    def settle(self) -> None:
        """Say that each entry which an engine still has registered from an earlier run is held by now."""
        with self._state:
            for digest in list(self._holders):
                self._release(digest, EARLIER)

    def collect(self, need: int | None = None) -> tuple[str, ...]:
        """Remove entries that nobody holds, oldest first, until ``need`` bytes are free (``None``: all). The removed.

        An entry that the disk does not let go stays. Raises nothing but InternalError on a closed store.
        """
        self._must_be_open()
        freed = 0
        dropped: dict[str, Path] = {}
        with self._state:
            for digest, entry in list(self._entries.items()):
                if need is not None and freed >= need:
                    break
                if digest not in self._holders and (aside := self._put_aside(digest)):
                    dropped[digest] = aside
                    freed += entry.bytes
        with contextlib.suppress(OSError):
            # Without this a power cut could undo the renaming and keep the deleting.
            sync_folder(self.root)
            for path in dropped.values():
                remove(path)
        return tuple(dropped)

    def verify(self, digest: str) -> bool:
        """Read the entry and compare. False when it is damaged or gone. Raises InternalError when there is no entry."""
        path = self.path_of(digest)
        try:
            with opened(path / NAMES[0], path / NAMES[1]) as source:
                return source.digest() == digest
        except InputFileError:
            return False

    def _list(self) -> None:
        found: list[tuple[int, str, Entry]] = []
        for child in self.root.iterdir():
            if child.name.startswith((INCOMING, DROPPING)):
                try:
                    remove(child)
                except OSError as error:
                    self.foreign[child.name] = f"a leftover that cannot be removed: {error.strerror}"
            elif child.name not in (LOCK, KNOWN):
                try:
                    entry = read_entry(child)
                except (OSError, ValueError) as error:
                    self.foreign[child.name] = (error.strerror if isinstance(error, OSError) else None) or str(error)
                else:
                    found.append((entry.admitted_at, child.name, entry))
        self._entries = {name: entry for _, name, entry in sorted(found, key=lambda item: item[:2])}
        self._holders = {name: {EARLIER} for name in self._entries}

    def _claim(self, digest: str | None, holder: str | None) -> Stored | None:
        """The entry of ``digest`` if it is there and whole, held."""
        with self._state:
            if digest is None or digest not in self._entries:
                return None
            path = self.root / digest
            try:
                entry = read_entry(path)
            except (FileNotFoundError, ValueError):
                # Somebody took it away: an engine that is sent to it would die.
                del self._entries[digest]
                return None
            if holder is not None:
                self._holders.setdefault(digest, set()).add(holder)
            return Stored(digest, path, entry.bytes, new=False)

    def _recover(self, digest: str | None, holder: str | None) -> Stored | None:
        """The entry of ``digest`` if it is good and only not listed, held: the store's disk was away for a while."""
        if digest is None:
            return None
        path = self.root / digest
        try:
            entry = read_entry(path)
            with opened(path / NAMES[0], path / NAMES[1]) as source:
                if source.digest() != digest:
                    return None
        except (FileNotFoundError, ValueError, InputFileError):
            return None
        with self._state:
            self._entries[digest] = entry
            self.foreign.pop(digest, None)
        return self._claim(digest, holder)

    def _make_room(self, source: Source, holder: str | None) -> Stored | None:
        """See to it that ``source`` fits. The entry, when it turned out to be there already.

        Raises InputFileError. Room on the disk is asked for as if no extents could be shared.
        """
        short = self._short(source.bytes)
        if short <= 0:
            return None
        with self._state:
            lengths = {entry.bytes for entry in self._entries.values()}
            loose = sum(entry.bytes for digest, entry in self._entries.items() if digest not in self._holders)
        # Read only where an entry of that length exists: a file of holes may claim any length.
        if source.bytes in lengths and (stored := self._claim(source.digest(), holder)):
            return stored
        if short <= loose:
            self.collect(short)
            short = self._short(source.bytes)
        if short > 0:
            raise self._full(source.bytes)
        return None

    def _take_in(self, source: Source, holder: str | None) -> Stored:
        incoming = Path(tempfile.mkdtemp(prefix=INCOMING, dir=self.root))
        try:
            digest = source.copy_into(incoming)
            if stored := self._claim(digest, holder):
                return stored
            make_durable(incoming)
            entry = Entry(source.bytes, incoming.stat().st_mtime_ns)
            path = self.root / digest
            try:
                publish(incoming, path)
            except InputFileError:
                if stored := self._recover(digest, holder):
                    return stored
                raise
            try:
                sync_folder(self.root)
            except OSError:
                incoming = put_aside(path)
                raise
            with self._state:
                self._entries[digest] = entry
                if holder is not None:
                    self._holders.setdefault(digest, set()).add(holder)
            return Stored(digest, path, entry.bytes, new=True)
        finally:
            if incoming.exists():
                with contextlib.suppress(OSError):
                    remove(incoming)

    def _put_aside(self, digest: str) -> Path | None:
        path = self.root / digest
        try:
            path = put_aside(path)
        except FileNotFoundError:
            pass
        except OSError:
            return None
        del self._entries[digest]
        return path

    def _learn(self, source: Source, digest: str, now: int) -> None:
        self._known.put(source.key, digest, now)
        self._unsaved += source.bytes
        if self._unsaved >= _SAVE_EVERY:
            self._save_known()

    def _save_known(self) -> None:
        self._unsaved = 0
        self._known.save(self.root / KNOWN, self.root / f"{INCOMING}{KNOWN}")

    def _used(self) -> int:
        return sum(entry.bytes for entry in self._entries.values())

    def _short(self, need: int) -> int:
        """Bytes that are missing for ``need`` more; negative when there is room. Raises OSError."""
        over = 0 if self.limit is None else self.bytes + need - self.limit
        return max(over, need - shutil.disk_usage(self.root).free)

    def _check_length(self, need: int) -> None:
        if self.adapter_limit is not None and need > self.adapter_limit:
            message = f"its files have {need:,} bytes and one adapter's may have {self.adapter_limit:,}"
            raise InputFileError(f"{message}: save it in a smaller type, or raise the limit", code="adapter_too_large")

    def _full(self, need: int, reason: str | None = None) -> InputFileError:
        limit = "no limit set" if self.limit is None else f"the limit is {format_bytes(self.limit)}"
        free = "" if reason else f", {format_bytes(shutil.disk_usage(self.root).free)} of the disk are free"
        return InputFileError(
            f"the store {self.root} has no room: the adapter needs {format_bytes(need)}, {limit}, "
            f"{format_bytes(self.bytes)} are used{free}{f' ({reason})' if reason else ''}: "
            "remove adapters that nobody serves, or give the store more",
            code="store_full",
        )

    @contextlib.contextmanager
    def _disk_errors(self, need: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise self._full(need, error.strerror) from error
            raise InputFileError(
                f"the store {self.root} cannot take the adapter: {error.strerror}: see to its disk", code="store_failed"
            ) from error

    def _must_be_open(self) -> None:
        if self._lock_fd is None:
            raise InternalError("the store is closed")

    def _must_have(self, digest: str) -> None:
        if digest not in self._entries:
            raise InternalError(f"the store has no entry {digest}")

    def _release(self, digest: str, holder: str) -> None:
        holders = self._holders.get(digest, set())
        holders.discard(holder)
        if not holders:
            self._holders.pop(digest, None)
