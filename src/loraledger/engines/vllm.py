"""Watches one vLLM replica and carries out its commands.

Theory of operation. Two loops under one task group. *Watching* asks ``/health`` and ``/metrics`` each interval;
``/v1/models`` only at first contact, after a restart, after a failed command (which may have changed what the engine
holds) and now and then; and all of it out of turn when a ``Check`` asks. *Working* takes commands from a queue, one
at a time. The loops meet in two places: a failed command asks for a look, and a list of models that a command
overtook is read again, so that what is fed as registered is never older than an outcome fed before it.

When a replica counts as down. At once: nobody listens, ``/health`` says 503 (the engine process is dead while its API
still talks, and ``/metrics`` would go on showing its last figures), a key is missing, or several engines sit behind
the URL. After two misses: anything that a busy or restarting machine also does, such as a timeout or a broken
connection. A down replica is polled fast at first, because most restarts are noticed by the refusal and end within
seconds.

A restart is told by ``process_start_time_seconds``, because a supervisor can restart an engine between two scrapes:
health was green at both, and every adapter is gone. Where the page lacks it (several API server processes) only a
seen outage tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from loraledger.conductor.ports import Clock, Feed
from loraledger.engines.probe import ProbeFollower
from loraledger.engines.probe_api import NO_PROBE
from loraledger.engines.protocol import ReplicaTarget
from loraledger.engines.scrape import EngineSample
from loraledger.engines.vllm_api import LoadVerdict, VllmApi
from loraledger.errors import LedgerError, TargetError
from loraledger.events import (
    Check,
    CommandDone,
    CommandFailed,
    Evict,
    Load,
    Move,
    ReplicaDown,
    ReplicaSampled,
    ReplicaUp,
    ScrapeStarted,
)

_AT_ONCE = frozenset({"connect_failed", "engine_dead", "engine_wants_api_key", "data_parallel"})
_MISSES = 2
_FAST_POLL = 200_000_000
_FAST_FOR = 5_000_000_000
_SLOW_POLL = 2_000_000_000
_MIN_GAP = 50_000_000
"""Between the starts of two looks: a burst of failing requests asks for a look each."""


class VllmDriver:
    """One vLLM replica.

    ``paths`` gives the local folder of one version of an adapter by its engine-side name; a ``LedgerError`` that it raises
    fails the load for good, with its code as the reason.
    """

    def __init__(self, target: ReplicaTarget, feed: Feed, clock: Clock, paths: Callable[[str], str]) -> None:
        self._target = target
        self._feed = feed
        self._clock = clock
        self._paths = paths
        self._api = VllmApi(target)
        self._probe = ProbeFollower(target, feed, clock) if target.probe_key is not None else None
        self._commands: asyncio.Queue[Load | Evict | Move] = asyncio.Queue()
        self._outcomes = 0
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._look = asyncio.Event()
        self._up = False
        self._down_reason: str | None = None
        self._down_since = 0
        self._misses = 0
        self._process_start: int | None = None
        self._until_models = 0

    @property
    def name(self) -> str:
        """The replica's name."""
        return self._target.name

    def perform(self, command: Load | Evict | Move | Check) -> None:
        """Queue a load or an unload, or look at the replica now (several such wishes become one look)."""
        if isinstance(command, Check):
            self._look.set()
        else:
            self._commands.put_nowait(command)

    async def run(self) -> None:
        """Watch and work until cancelled, then close."""
        self._down_since = self._clock()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(), name=f"watch {self.name}")
                group.create_task(self._work(), name=f"work {self.name}")
                if self._probe is not None:
                    group.create_task(self._probe.run(), name=f"probe {self.name}")
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connections to the replica."""
        await self._api.close()
        if self._probe is not None:
            await self._probe.close()

    # --- watching -----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            began = self._clock()
            self._look.clear()
            try:
                await self._scrape()
            except TargetError as error:
                self._missed(error)
            except Exception as error:  # task supervisor: a fault of ours must not leave a replica unwatched
                logging.getLogger(__name__).exception("driver of replica %s failed", self.name)
                self._set_down(f"driver_error: {error!r}")
            await self._pause(began)

    async def _scrape(self) -> None:
        status = await self._api.health()
        if status == 503:
            raise TargetError("/health answered 503: the engine process is dead", code="engine_dead")
        if status >= 500:
            raise TargetError(f"/health answered {status}", code=f"http_{status}")
        started = self._clock()
        self._feed(ScrapeStarted(started, self.name))
        sample = await self._api.metrics()
        if sample.engines is not None and sample.engines > 1:
            raise TargetError(
                f"{sample.engines} engines behind one URL (data parallel): give each its own URL", code="data_parallel"
            )
        registered = await self._registered(sample)
        self._misses = 0
        self._feed(
            ReplicaSampled(
                self._clock(),
                self.name,
                started,
                sample.running,
                sample.waiting,
                sample.kv_usage,
                sample.kv_tokens,
                sample.active_adapters,
                registered,
                sample.block_tokens,
                sample.preemptions_total,
            )
        )

    async def _registered(self, sample: EngineSample) -> tuple[str, ...] | None:
        """The list of adapters if it is due; feeds ``ReplicaUp`` when this engine process was not known as up."""
        start, known = sample.process_start_ns, self._process_start
        is_new = not self._up or (start is not None and known is not None and start != known)
        self._until_models -= 1
        if not is_new and self._until_models > 0:
            return None
        version = await self._api.version() if is_new else None
        names = await self._list_adapters()
        self._until_models = self._target.models_every
        if is_new:
            self._up, self._down_reason, self._process_start = True, None, start
            self._feed(ReplicaUp(self._clock(), self.name, start, names, version))
            if self._probe is not None:
                self._probe.look()
        return names

    async def _list_adapters(self) -> tuple[str, ...]:
        """What is registered, at a moment that no command outcome has passed: read at most twice, as none may begin."""
        self._may_begin.clear()
        try:
            outcomes = None
            while outcomes != self._outcomes:
                outcomes = self._outcomes
                names = (await self._api.models()).adapters
            return names
        finally:
            self._may_begin.set()

    def _missed(self, error: TargetError) -> None:
        self._misses += 1
        if error.code in _AT_ONCE or self._misses >= _MISSES:
            self._set_down(f"{error.code}: {error.message}")

    def _set_down(self, reason: str) -> None:
        if self._up or self._down_reason is None:
            self._down_since = self._clock()
        elif reason == self._down_reason:
            return
        self._up, self._down_reason = False, reason
        self._feed(ReplicaDown(self._clock(), self.name, reason))

    async def _pause(self, began: int) -> None:
        rest = self._interval() - (self._clock() - began)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(rest, 0) / 1e9):
                await self._look.wait()
        await asyncio.sleep(max(_MIN_GAP - (self._clock() - began), 0) / 1e9)

    def _interval(self) -> int:
        if self._up:
            return self._target.scrape_interval if self._misses == 0 else _FAST_POLL
        down_for = self._clock() - self._down_since
        return _FAST_POLL if down_for < _FAST_FOR else min(_SLOW_POLL, _FAST_POLL * down_for // _FAST_FOR)

    # --- working ------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            command = await self._commands.get()
            await self._may_begin.wait()
            began = self._clock()
            try:
                verdict = await self._carry_out(command)
            except TargetError as error:
                verdict = LoadVerdict(False, error.code, message=error.message)
            except LedgerError as error:
                verdict = LoadVerdict(False, error.code, permanent=True, message=error.message)
            except Exception as error:  # task supervisor: each command must get an outcome
                logging.getLogger(__name__).exception("command %d on replica %s failed", command.id, self.name)
                verdict = LoadVerdict(False, "driver_error", message=repr(error))
            self._outcomes += 1
            now = self._clock()
            if verdict.done:
                self._feed(CommandDone(now, command.id, now - began))
            else:
                self._until_models = 0
                self._look.set()
                self._feed(CommandFailed(now, command.id, verdict.text, verdict.permanent))

    async def _carry_out(self, command: Load | Evict | Move) -> LoadVerdict:
        if isinstance(command, Move):
            if self._probe is None:
                return LoadVerdict(False, "no_probe", permanent=True, message=NO_PROBE)
            await self._probe.move(command.engine_name, command.verb)
            return LoadVerdict(True, "moved")
        if isinstance(command, Evict):
            return await self._api.unload(command.engine_name)
        path = map_path(self._paths(command.engine_name), self._target.path_map)
        return await self._api.load(command.engine_name, path)


def map_path(path: str, path_map: tuple[tuple[str, str], ...]) -> str:
    """``path`` as the engine's machine sees it: whole components are matched, so ``/a`` does not match ``/ab``."""
    for ours, theirs in path_map:
        prefix = ours.rstrip("/")
        if path == prefix or path.startswith(f"{prefix}/"):
            return theirs.rstrip("/") + path[len(prefix) :]
    return path
