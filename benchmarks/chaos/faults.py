"""The faults, one after the other while traffic goes on: each is done, lasts, and is undone.

The next begins ``pace`` seconds after the one before began, whether that is over or not: a killed vLLM takes half a minute to come
back. Two things are never broken at once, because then nobody could say what should still work: the last two replicas, and two of
the gateway's process, its disk and its clock. Kinds come from a deck that is shuffled anew when it is used up: each comes up.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx2

from benchmarks.chaos.stand import Replica, Stand

ON_REPLICAS = ("kill -9", "pause", "restart")
ON_GATEWAY = ("gateway: kill -9", "gateway: restart", "disk: full", "disk: slow", "clock: step")
CANNOT_UNDO = (AssertionError, RuntimeError, OSError, subprocess.SubprocessError, httpx2.HTTPError)
"""What the processes under test raise when they do not come back, and the control plane when it does not answer."""
DROPPING_S = 60.0


@dataclass
class Fault:
    """One of them. Times are of ``time.monotonic``; ``ended``: when all was as before; ``failed``: why it never was."""

    kind: str
    target: str
    began: float
    ended: float = 0.0
    note: str = ""
    failed: str | None = None


class Chaos:
    """Breaks things on ``stand``. Times in seconds; ``scale`` shortens how long faults last."""

    def __init__(self, stand: Stand, seed: int, pace: float, scale: float) -> None:
        self.faults: list[Fault] = []
        self.verified: list[str] = []
        self.off: list[tuple[float, float]] = []
        """When the journal took no frames."""
        self._stand = stand
        self._rng = random.Random(seed)
        self._pace, self._scale = pace, scale
        self._deck: list[str] = []
        self._broken: set[str] = set()
        self._began = time.monotonic()
        self._gateway = asyncio.Lock()

    async def run(self, seconds: float) -> float:
        """Begin faults for so long and wait until the last is over; returns when that was."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < until:
                tasks.create_task(self._next())
                await asyncio.sleep(self._pace)
        return time.monotonic()

    async def verify(self) -> None:
        """Note what comes of replaying the journal; nobody may be writing it."""
        try:
            self.verified.append(await asyncio.to_thread(self._stand.gateway.verify))
        except AssertionError as error:  # it replays to something else
            self.verified.append(str(error))

    async def _next(self) -> None:
        if not self._deck:
            self._deck = [*ON_REPLICAS * 2, *ON_GATEWAY]
            self._rng.shuffle(self._deck)
        kind = self._deck.pop()
        lasts = self._scale * self._rng.uniform(5.0, 20.0)
        well = [replica for replica in self._stand.replicas if replica.name not in self._broken]
        if kind in ON_REPLICAS:
            if len(well) <= 2:
                return
            replica = self._rng.choice(well)
            self._broken.add(replica.name)
            await self._lasting(kind, replica.name, lambda fault: self._on_replica(fault, replica, lasts))
            self._broken.discard(replica.name)
        else:
            size = self._rng.choice((-1, 1)) * 10 ** self._rng.uniform(0.0, 5.4)  # of the clock: from 1 s to 3 days
            async with self._gateway:
                await self._lasting(kind, "gateway", lambda fault: self._on_gateway(fault, lasts, size))

    async def _lasting(self, kind: str, target: str, do: Callable[[Fault], Awaitable[None]]) -> None:
        fault = Fault(kind, target, time.monotonic())
        self.faults.append(fault)
        self._say(fault, "begins")
        try:
            await do(fault)
        except CANNOT_UNDO as error:  # the other faults go on; the judge tells
            fault.failed = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        fault.ended = time.monotonic()
        self._say(fault, fault.failed or fault.note or "is over")

    def _say(self, fault: Fault, what: str) -> None:
        """For whoever waits."""
        print(
            f"{time.monotonic() - self._began:4.0f} s  {fault.kind} of {fault.target}: {what}",
            file=sys.stderr,
            flush=True,
        )

    async def _on_replica(self, fault: Fault, replica: Replica, lasts: float) -> None:
        if fault.kind == "pause":
            replica.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(lasts)
            finally:
                replica.signal(signal.SIGCONT)
            return
        if fault.kind == "kill -9":
            replica.kill9()
            await asyncio.sleep(lasts)
        else:
            await asyncio.to_thread(replica.end)
        replica.start()
        await asyncio.to_thread(replica.wait)

    async def _on_gateway(self, fault: Fault, lasts: float, size: float) -> None:
        stand, gateway = self._stand, self._stand.gateway
        match fault.kind:
            case "gateway: kill -9":
                gateway.kill9()
                await self._start_again()
            case "gateway: restart":
                code = await asyncio.to_thread(gateway.stop)
                await self._start_again()
                if code:
                    raise RuntimeError(f"the gateway ended with exit code {code}")
            case "clock: step":
                fault.note = f"left out: {stand.clock.missing}" if stand.clock.missing else f"{size:+.0f} s"
                stand.clock.step(size)
            case _ if stand.disk.missing is not None:
                fault.note = f"left out: {stand.disk.missing}"
            case "disk: full":
                await self._fill(fault, lasts)
            case _:
                await asyncio.to_thread(stand.disk.slow)
                try:
                    await asyncio.sleep(lasts)
                finally:
                    await asyncio.to_thread(stand.disk.fast)

    async def _start_again(self) -> None:
        await self.verify()
        self._stand.gateway.launch()
        await asyncio.to_thread(self._stand.gateway.wait_up, 1)

    async def _fill(self, fault: Fault, lasts: float) -> None:
        """Until frames were dropped, then for a while longer."""
        disk, gateway = self._stand.disk, self._stand.gateway
        before, began = await asyncio.to_thread(gateway.frames_dropped), time.monotonic()
        await asyncio.to_thread(disk.fill)
        try:
            for _ in range(300):
                if await asyncio.to_thread(gateway.frames_dropped) > before:
                    break
                await asyncio.sleep(0.2)
            await asyncio.sleep(lasts / 2)
        finally:
            await asyncio.to_thread(disk.free)
        last, dropped, until = -1.0, before, time.monotonic() + DROPPING_S
        while dropped != last and time.monotonic() < until:
            last = dropped
            await asyncio.sleep(2.0)  # the journal tries again each second
            dropped = await asyncio.to_thread(gateway.frames_dropped)
        fault.note = f"{dropped - before:.0f} frames dropped"
        self.off.append((began, time.monotonic()))
        if dropped != last:
            fault.failed = f"frames are still dropped {DROPPING_S:.0f} s after there is room again"
