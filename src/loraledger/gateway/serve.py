"""One gateway process: everything put together, started, watched over and stopped.

Start: read the catalog, restore what the last process learnt from its journal, open a new journal segment, and only then listen.
Running: engine drivers, the journal's sync and the compaction are supervised tasks; a task that dies for a reason of its own
is logged and started again, because losing the scraper of one replica must not take down the data plane of all.
Stop (SIGTERM, SIGINT): stop accepting, let open answers end within the drain limit, close the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path

import uvicorn

from loraledger import __version__
from loraledger.adapters import Catalog
from loraledger.adapters.sizing.base import read_base
from loraledger.conductor.conductor import Conductor
from loraledger.conductor.fold import Emitted, FoldState, RowFold
from loraledger.conductor.reading import last_state
from loraledger.config import Secrets, Settings, resolve_secrets
from loraledger.engines.vllm import VllmDriver
from loraledger.errors import ConfigError, InputFileError, TargetError, UnavailableError
from loraledger.events import CommandFailed, Event, GatewayStarted, ReplicaDown, ReplicaUp
from loraledger.gateway import assemble
from loraledger.gateway.accounts import Accountant
from loraledger.gateway.changes import ChangeDesk
from loraledger.gateway.clock import WallClock
from loraledger.gateway.control import control_app
from loraledger.gateway.control_changes import change_routes
from loraledger.gateway.ledger_view import ledger_series
from loraledger.gateway.listener import DataPlane
from loraledger.gateway.metrics import GatewayMetrics, edge_gauges
from loraledger.gateway.performer import LivePerformer
from loraledger.gateway.shelf import Shelf, differences, names_of
from loraledger.kernel.carry import carry_over
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.state import FleetState
from loraledger.ledger import Ledger, Limit, ledger_of, limiting
from loraledger.record.journal import Journal
from loraledger.record.tables import Row, TableName
from loraledger.units import NS_PER_S

log = logging.getLogger("loraledger")
RECENT = 1000
"""Rows of each table that the control plane can show without reading the record."""


class Gateway:
    """One process's gateway. Create it, ``await start()``, and ``await stop()`` it; ``run`` does all three."""

    def __init__(self, settings: Settings, env: Mapping[str, str]) -> None:
        self.settings = settings
        self.secrets: Secrets = resolve_secrets(settings, env)
        self.shelf = Shelf(settings)
        base = None if settings.base.path is None else read_base(settings.base.path)
        self.accountant = Accountant(settings.replicas, base)
        self.config_digest = assemble.config_digest(settings)
        self.clock = WallClock()
        self.draining = False
        self.recent: dict[TableName, deque[Row]] = {
            name: deque(maxlen=RECENT) for name in ("requests", "decisions", "residency", "samples")
        }
        self.metrics = GatewayMetrics(settings.limits.metrics_adapters)
        self.changes = ChangeDesk(self)
        self._performer = LivePerformer()
        self.journal: Journal | None = None
        self.plane: DataPlane | None = None
        self._alarm_handle: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._control: uvicorn.Server | None = None
        self._rescanning = asyncio.Lock()

    @property
    def state(self) -> FleetState:
        """What the kernel knows."""
        return self.conductor.fleet.state

    @property
    def catalog(self) -> Catalog:
        """The adapters that are served."""
        return self.shelf.catalog

    def feed(self, event: Event) -> None:
        """Tell the conductor what happened."""
        self.shelf.observe(event)
        if isinstance(event, ReplicaUp | ReplicaDown | CommandFailed):
            self._log(event)
        self.conductor.feed(event)
        if isinstance(event, ReplicaDown):
            delay = self.settings.limits.upstream_lost_after / NS_PER_S
            asyncio.get_running_loop().call_later(delay, self._lose, event)

    def _lose(self, down: ReplicaDown) -> None:
        """A replica that hangs keeps its connections, and whoever waits there would wait for the first-byte limit."""
        replica = self.state.replicas[down.replica]
        if not replica.up and replica.exited_at <= down.at and self.plane is not None:
            self.plane.lose(down.replica)

    @property
    def control_port(self) -> int:
        """The port that the control plane listens on."""
        assert self._control is not None
        port: int = self._control.servers[0].sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Open the journal, listen, and begin to watch the replicas.

        Raises ``ConfigError`` when the journal cannot be used, ``TargetError`` when an address is taken.
        """

        def head() -> tuple[bytes, bytes]:
            return self.conductor.head()  # which makes the conductor, when it is first asked

        record = self.settings.record
        self.journal = Journal.open(record.dir, record.segment_bytes, head)
        self.conductor.journal = self.journal
        self.changes.open(record.dir)
        control = self._bind_control()
        plane = DataPlane(
            assemble.plane_settings(self.settings),
            self.feed,
            self.clock,
            assemble.access_of(self.settings, self.catalog, self.clock() // NS_PER_S),
            assemble.addresses(self.settings, self.secrets),
        )
        self.plane = self._performer.plane = plane
        drivers = {
            replica.name: VllmDriver(
                assemble.target_of(replica, self.settings, self.secrets), self.feed, self.clock, self.shelf.path_of
            )
            for replica in self.settings.replicas
        }
        self._performer.drivers = drivers
        self.feed(GatewayStarted(self.clock(), __version__, self.config_digest))
        self.changes.resume()
        await plane.start(self.settings.listen.host, self.settings.listen.port)
        for name, driver in drivers.items():
            self._supervise(f"driver of {name}", driver.run)
        self._supervise("journal sync", self._sync)
        self._supervise("compaction", self._compact)
        self._supervise("sweep of the store", self._sweep)
        self._supervise("changes", self.changes.watch)
        await self._start_control(control)

    async def stop(self) -> None:
        """Drain, then close everything."""
        self.draining = True
        if self.plane is not None:
            await self.plane.drain(self.settings.limits.drain)
            await self._hear_of_the_last()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._control is not None:
            self._control.should_exit = True
            await self._control_task
        await self.changes.close()
        if self._alarm_handle is not None:
            self._alarm_handle.cancel()
        if self.journal is not None:
            self.conductor.journal = None
            await asyncio.to_thread(self.journal.close)
        self.shelf.close()

    async def rescan(self) -> Mapping[str, object]:
        """Read the adapters' folders again and serve what they hold now; returns what changed and what could not be taken in."""
        async with self._rescanning:
            try:
                fresh = await asyncio.to_thread(self.shelf.read)
            except ConfigError as error:
                raise UnavailableError(error.message, code="adapters_unreadable") from error
            events = differences(self.state, fresh, self.clock())
            names = names_of(events, self.state)
            self.shelf.swap(fresh)
            for event in events:
                self.feed(event)
            if self.plane is not None:
                self.plane.access = assemble.access_of(self.settings, fresh, self.clock() // NS_PER_S)
            for name in names["removed"]:
                self.metrics.forget(name)
        return {**names, "problems": [str(problem) for problem in fresh.problems], "warnings": list(fresh.warnings)}

    async def _sweep(self) -> None:
        """Remove stored copies that no replica can read any more."""
        while True:
            await asyncio.sleep(self.settings.limits.store_sweep / NS_PER_S)
            async with self._rescanning:
                sent = (row.digest for row in self.conductor.fold.state.open.values() if row.digest is not None)
                self.shelf.sweep(self.state, sent)
                removed = await asyncio.to_thread(self.shelf.collect)
            if removed:
                log.info("%d stored copies that nothing reads any more were removed", len(removed))

    async def _hear_of_the_last(self) -> None:
        """Rows of the last answers wait for what the engines' probes tell of them: for a moment, no longer."""
        for _ in range(10):
            if self.journal is None or not self.conductor.fold.state.closing:
                return
            await asyncio.sleep(0.1)

    @property
    def _drain_s(self) -> float:
        return self.settings.limits.drain / NS_PER_S

    async def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until SIGTERM or SIGINT."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        try:
            await self.start()
            if ready is not None:
                ready()
            await stopping.wait()
            log.info("stopping: %d requests are open, up to %g s to end", len(self.state.requests), self._drain_s)
        finally:
            await self.stop()
            log.info("stopped")

    @cached_property
    def conductor(self) -> Conductor:
        """Who drives the kernel. Made when the journal asks for its first head, so with the directory locked: until then a
        process that is about to end may still write there."""
        wanted = assemble.fleet_settings(self.settings, self.catalog)
        digests = {spec.name: spec.digest for spec in wanted.adapters}
        try:
            restored = last_state(self.settings.record.dir)
        except InputFileError as error:
            log.warning("nothing that was learnt before is carried over: %s", error.message)
            restored = None
        state = None if restored is None else carry_over(restored[0].state, wanted)
        fold_state = FoldState(wanted.base, self.config_digest, __version__, digests=digests)
        if restored is not None:
            fold_state.open, fold_state.replicas = restored[1].open, restored[1].replicas
        return Conductor(
            Fleet(wanted, state), RowFold(fold_state), self._performer, self.clock, self._take_rows, self._arm
        )

    def _log(self, event: ReplicaUp | ReplicaDown | CommandFailed) -> None:
        """Say what an operator wants to find in the log afterwards."""
        match event:
            case ReplicaUp():
                log.info(
                    "replica %s is up: engine %s, %d names", event.replica, event.engine_version, len(event.registered)
                )
            case ReplicaDown():
                log.warning("replica %s is down: %s", event.replica, event.reason)
                if self.plane is not None:
                    self.plane.drop_idle(event.replica)
            case CommandFailed():
                replica, adapter = self.state.commands.get(event.command, ("?", "?"))
                log.warning("replica %s, adapter %s: %s", replica, adapter, event.reason)

    def _take_rows(self, rows: Emitted) -> None:
        for table, row in rows:
            self.recent[table].append(row)
        self.metrics.observe(rows)
        if self.changes.watching:
            self.changes.observe(rows)

    def _arm(self, at: int | None) -> None:
        if self._alarm_handle is not None:
            self._alarm_handle.cancel()
            self._alarm_handle = None
        if at is not None:
            delay = max(0.0, (at - self.clock()) / NS_PER_S)
            self._alarm_handle = asyncio.get_running_loop().call_later(delay, self.conductor.wake)

    def _supervise(self, name: str, job: Callable[[], Awaitable[None]]) -> None:
        async def keep_going() -> None:
            while True:
                try:
                    await job()
                    return
                except Exception:  # task supervisor: one job's fault must not stop the data plane
                    log.exception("%s failed; it starts again in a second", name)
                    await asyncio.sleep(1.0)

        self._tasks.append(asyncio.get_running_loop().create_task(keep_going(), name=name))

    async def _sync(self) -> None:
        interval = self.settings.record.fsync_interval / NS_PER_S
        journal = self.journal
        assert journal is not None
        dropped, was_off = 0, False
        while True:
            await asyncio.sleep(interval)
            await asyncio.to_thread(journal.sync)
            is_off = journal.segment is None or journal.dropped > dropped
            dropped = journal.dropped
            if is_off and not was_off:
                log.error("the journal is off and frames are dropped: %s", journal.error)
            elif was_off and not is_off:
                log.warning("the journal is on again; %d frames were dropped since the start", dropped)
            was_off = is_off

    async def _compact(self) -> None:
        """Fold closed segments into Parquet in a child process: at the start, and then each interval."""
        assert self.journal is not None
        record = self.settings.record
        while True:
            await _run_compaction(record.dir, record.keep)
            await asyncio.sleep(record.compact / NS_PER_S)
            # A rotation that the disk refuses turns the journal off, although the segment in hand may have room.
            if shutil.disk_usage(record.dir).free > 2 * record.segment_bytes:
                self.journal.rotate()

    def _bind_control(self) -> socket.socket:
        """Before the data plane listens: a gateway that cannot be operated must not take requests."""
        host, port = self.settings.control.host, self.settings.control.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            raise TargetError(f"cannot listen on {host}:{port}: {error.strerror}") from error

    async def _start_control(self, listener: socket.socket) -> None:
        config = uvicorn.Config(
            control_app(self, change_routes(self.changes)), log_level="warning", access_log=False, lifespan="off"
        )
        self._control = _ControlServer(config)
        self._control_task = asyncio.get_running_loop().create_task(self._control.serve([listener]))
        while not self._control.started:
            if self._control_task.done():
                await self._control_task
            await asyncio.sleep(0.01)

    @property
    def version(self) -> str:
        """This gateway's version."""
        return __version__

    @property
    def key(self) -> str | None:
        """The control plane's key."""
        return self.secrets.control_key

    def now(self) -> int:
        """Nanoseconds since the epoch."""
        return self.clock()

    @property
    def upstream_open(self) -> Mapping[str, int]:
        """By replica, the connections that requests have."""
        assert self.plane is not None
        return self.plane.upstream_open

    def metrics_text(self) -> bytes:
        """What a Prometheus scrape reads."""
        plane = self.plane
        assert plane is not None
        edge, ledgers = edge_gauges(plane.connections, plane.held_bytes), ledger_series(self.ledgers(on_disk=False))
        return self.metrics.text(self.state, self.journal, plane.refused, chain(edge, ledgers, self.changes.series()))

    def ledgers(self, replica: str | None = None, *, on_disk: bool = True) -> Iterator[tuple[Ledger, Limit]]:
        """The three accounts of each replica, or of one, and which of them limits it."""
        store = (self.shelf.store.bytes, self.settings.adapters.store_bytes)
        for facts in self.accountant.facts(
            self.state, self.catalog, store, self.recent["requests"], self.clock(), replica=replica, on_disk=on_disk
        ):
            ledger = ledger_of(facts)
            yield ledger, limiting(ledger)


class _ControlServer(uvicorn.Server):
    """Leaves the process's signals to the gateway, which drains before it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def _run_compaction(directory: Path, keep: int | None) -> None:
    words = [sys.executable, "-m", "loraledger.conductor.compact", str(directory)]
    if keep is not None:
        words += ["--keep-ns", str(keep)]
    child = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
    _, complaint = await child.communicate()
    if child.returncode != 0:
        log.error("compaction failed (exit %s): %s", child.returncode, complaint.decode(errors="replace")[-2000:])
