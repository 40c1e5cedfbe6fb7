"""The events of the whole engine, kept current in the API server.

One task reads the spool 20 times a second; a request that must see everything up to now reads it itself first. All of it
runs in the API server's event loop, so nothing here needs a lock between threads. Only one process may read a spool, since
reading deletes; if vLLM runs several API servers, the first one has the hub and the others say so.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from contextlib import suppress

from loraledger_probe.ring import Ring
from loraledger_probe.settings import Settings
from loraledger_probe.spool import Spool
from loraledger_probe.tail import Tail

POLL_S = 0.05
_log = logging.getLogger(__name__)


class Hub:
    """Ring and tail of this process. ``own`` is this process's spool, flushed before each reading."""

    def __init__(self, settings: Settings, own: Spool) -> None:
        self.ring = Ring(settings.ring_events, settings.ring_bytes)
        self._tail = Tail(settings.spool)
        self._own = own
        self._settings = settings
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lock: int | None = None

    @property
    def reads(self) -> bool:
        """Whether this process is the one that reads the spool."""
        return self._task is not None

    def start(self) -> None:
        """Begin to read, in the running event loop, unless another process does."""
        lock = os.open(self._settings.spool / "reader", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return
        self._lock = lock
        self._task = asyncio.create_task(self._read_on())

    def refresh(self) -> None:
        """Take in what every process has written by now. Raises OSError when the spool is gone."""
        self._own.flush()
        events = self._tail.poll()
        if events:
            self.ring.add(events)
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait(self, seq: int, wait_s: float) -> None:
        """Return when there is an event above ``seq``, or after ``wait_s``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while self.ring.last_seq <= seq and (left := deadline - loop.time()) > 0:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    async def _read_on(self) -> None:
        failed = False
        while True:
            try:
                self.refresh()
                failed = False
            except Exception as error:  # noqa: BLE001  (reading must go on whatever one line or file was like)
                if not failed:
                    _log.warning("the loraledger probe cannot read its events: %s: %s", type(error).__name__, error)
                failed = True
            await asyncio.sleep(POLL_S)
