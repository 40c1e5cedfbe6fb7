"""Follows the probe inside one engine: what it reports becomes events of the kernel.

Theory of operation. Begin with a snapshot, then read the events after it, in long polls. After a restart of the engine, a gap in
the events or any failure, begin again with a snapshot. Moves are told one by one, because they are timed; the lists that they
make are told once per reading, whole, so that a consumer need not know the engine's rules. Steps are summed per reading.

**Time.** The probe stamps events with its host's clock. The difference of that clock to ours lies between (its time - our time when
the answer came) and (its time - our time when we asked), for every answer; all answers together narrow it down, and the snapshot,
which is not held back, gives the tightest pair. ``as_of`` is put at the early end, and a tenth of a second before the answer,
because the probe gathers the events of its processes twenty times a second.

**What is fed is what the journal can read back.** A reply is only as well formed as the engine that sent it, so each event passes
through its own wire form first; what does not is a bad reply, like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Any, Final

from loraledger.conductor.ports import Clock, Feed
from loraledger.engines.probe_api import BootChangedError, ProbeApi
from loraledger.engines.protocol import ReplicaTarget
from loraledger.engines.residency import Residency
from loraledger.errors import TargetError
from loraledger.events import (
    ActivationObserved,
    EngineFinished,
    Event,
    EvictionObserved,
    FloorObserved,
    HitClass,
    LoadObserved,
    MoveVerb,
    ProbeLost,
    StepsObserved,
    TiersObserved,
    decode_event,
    encode,
)

log = logging.getLogger(__name__)
WAIT_S: Final = 2.0
GAP_S: Final = 0.05
"""Between two readings: a busy engine has events at all times."""
AGAIN_S: Final = (0.5, 10.0)
"""First and longest pause before a probe that failed is asked again."""
_LONG: Final = 30_000_000_000
"""What worked for so long and then failed is asked again soon."""
MOST_BLOCKED: Final = 256
"""Adapters whose waiting requests are told of, those with the most."""
LAG: Final = 100_000_000
RETELL: Final = 5_000_000_000
"""The lists are told this often even if nothing moved: their age shows that the probe answers."""
_ACCESS: Final[dict[str, HitClass]] = {"slot": "gpu", "host": "host", "miss": "disk", "base": "base"}


class Skew:
    """The difference of the probe's wall clock to ours, ns: it lies in ``low`` to ``high``."""

    def __init__(self) -> None:
        self.low: int | None = None
        self.high: int | None = None

    def see(self, theirs: int, asked: int, came: int) -> None:
        """One answer; a pair of clocks that moved apart begins anew."""
        low, high = theirs - came, theirs - asked
        if self.low is None or self.high is None or low > self.high or high < self.low:
            self.low, self.high = low, high
        else:
            self.low, self.high = max(low, self.low), min(high, self.high)

    def ours(self, theirs: int) -> int:
        """At the earliest, what our clock showed at ``theirs``."""
        return theirs - (self.high or 0)


class ProbeFollower:
    """One replica's probe. ``target.probe_key`` must be set. Nothing is asked before ``look``."""

    def __init__(self, target: ReplicaTarget, feed: Feed, clock: Clock) -> None:
        self._name = target.name
        self._feed = feed
        self._clock = clock
        self._api = ProbeApi(target)
        self._skew = Skew()
        self._told: str | None = ""
        """Why it does not answer, as last told; empty before the first answer."""
        self._told_tiers = 0
        self._anew = asyncio.Event()

    def look(self) -> None:
        """The replica came up, or up again: begin with a snapshot now, whatever was tried before."""
        self._anew.set()

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._anew.wait()
        pause = AGAIN_S[0]
        while True:
            self._anew.clear()
            began = self._clock()
            await self._try()
            if self._clock() - began > _LONG:
                pause = AGAIN_S[0]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._anew.wait()
            pause = AGAIN_S[0] if self._anew.is_set() else min(2 * pause, AGAIN_S[1])

    async def _try(self) -> None:
        """Follow until something is in the way."""
        try:
            await self._follow()
        except BootChangedError as error:
            log.info("replica %s: %s: its probe is read anew", self._name, error.message)
        except TargetError as error:
            self._lost(error.code, error.message)
        except Exception as error:  # noqa: BLE001 - task supervisor: no reply of an engine may end the watching of it
            self._lost("bad_reply", f"the probe sent what this version does not understand: {error!r}"[:400])

    async def move(self, engine_name: str, verb: MoveVerb) -> None:
        """Have an adapter moved. Raises ``TargetError`` with the probe's code and reason when it refuses."""
        await self._api.move(engine_name, verb)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    def _lost(self, code: str, message: str) -> None:
        if self._told != code:
            self._told = code
            log.warning("replica %s: no word from its probe: %s", self._name, message)
            self._say(ProbeLost(self._clock(), self._name, f"{code}: {message}"))

    def _say(self, event: Event) -> None:
        """Feed an event. Raises ``msgspec.DecodeError`` when one of its fields is of another kind than declared."""
        self._feed(decode_event(encode(event)))

    async def _follow(self) -> None:
        asked = self._clock()
        snapshot = await self._api.residency()
        self._skew.see(snapshot["taken"]["wall_ns"], asked, self._clock())
        residency = Residency(snapshot)
        self._tell_floor(snapshot)
        self._tell_tiers(residency, snapshot["taken"]["wall_ns"])
        if self._told is not None:
            log.info("replica %s: its probe answers: tiers are observed", self._name)
            self._told = None
        boot, after = snapshot["boot"], snapshot["seq"]
        never_came: int | None = None
        while not self._anew.is_set():
            asked = self._clock()
            answer = await self._api.events(after, boot, WAIT_S)
            if answer["lost"] or (never_came is not None and answer["spool_lost"] > never_came):
                raise BootChangedError("events were lost")
            never_came = answer["spool_lost"]
            now, events = answer["now"]["wall_ns"], answer["events"]
            self._skew.see(now, asked, self._clock())
            if self._take(residency, events) or self._clock() - self._told_tiers >= RETELL:
                last = events[-1]["wall_ns"] if events else now  # a page may end long before the present
                self._tell_tiers(residency, min(now - LAG, last))
            after = answer["next_seq"]
            await asyncio.sleep(GAP_S)

    def _take(self, residency: Residency, events: Iterable[dict[str, Any]]) -> bool:
        """Tell what is timed or counted; whether a list may have changed."""
        moved = False
        steps: list[dict[str, Any]] = []
        for event in events:
            if residency.contains(event):
                continue
            if residency.apply(event):
                moved = True
            match event["kind"]:
                case "load_end" | "activation_end" | "slot_evict" | "host_evict" if event["rank"] == 0:
                    self._tell_move(event)
                case "step":
                    steps.append(event)
                case "request_finished":
                    self._tell_request(event)
                case "pin_lost":
                    log.warning("replica %s: the pin of %s gave way (%s)", self._name, event["name"], event["cause"])
                case _:
                    pass
        if steps:
            self._tell_steps(steps)
        return moved

    def _tell_tiers(self, residency: Residency, wall: int) -> None:
        residency.forget_gone()
        self._told_tiers = self._clock()
        host = residency.host
        self._say(
            TiersObserved(
                self._clock(),
                self._name,
                self._skew.ours(wall),
                host,
                residency.active,
                residency.pinned,
                residency.bytes_of(host),
            )
        )

    def _tell_floor(self, snapshot: dict[str, Any]) -> None:
        floor: dict[str, Any] = next((entry for entry in snapshot["floor"] if entry["rank"] == 0), {})
        slots, kv = snapshot.get("allocated") or {}, snapshot.get("kv") or {}
        self._say(
            FloorObserved(
                self._clock(),
                self._name,
                floor.get("weights_bytes"),
                floor.get("peak_activation_bytes"),
                floor.get("slot_pool_bytes"),
                floor.get("kv_bytes"),
                floor.get("unattributed_bytes"),
                floor.get("requested_bytes"),
                floor.get("device_bytes"),
                slots.get("slots"),
                slots.get("bytes_per_slot"),
                slots.get("host_entries"),
                slots.get("max_lora_rank"),
                floor.get("kv_blocks"),
                kv.get("block_tokens"),
            )
        )

    def _tell_move(self, event: dict[str, Any]) -> None:
        at, name, took = self._clock(), event["name"], event.get("dur_ns")
        if name is None or event.get("cause") in ("warmup", "reset"):
            return
        match event["kind"]:
            case "load_end":
                self._say(LoadObserved(at, self._name, name, took, event.get("bytes")))
            case "activation_end":
                self._say(ActivationObserved(at, self._name, name, took))
            case "host_evict":
                self._say(EvictionObserved(at, self._name, name, "host", event["cause"]))
            case _ if event["cause"] != "host_evict":  # that one empties the slot by itself
                self._say(EvictionObserved(at, self._name, name, "gpu", event["cause"]))

    def _tell_steps(self, steps: list[dict[str, Any]]) -> None:
        last = steps[-1]
        blocked: dict[str, int] = {}
        for event in steps:
            for name, count in event["blocked"].items():
                blocked[name] = max(count, blocked.get(name, 0))
        most = sorted(blocked, key=blocked.__getitem__, reverse=True)[:MOST_BLOCKED]
        self._say(
            StepsObserved(
                self._clock(),
                self._name,
                sum(event["steps"] for event in steps),
                sum(event["tokens"] for event in steps),
                sum(event["dur_ns"] for event in steps),
                sum(event["preempted"] for event in steps),
                sum(event["recomputed_tokens"] for event in steps),
                {name: blocked[name] for name in most},
                last["adapters"],
                last["kv_free"],
            )
        )

    def _tell_request(self, event: dict[str, Any]) -> None:
        self._say(
            EngineFinished(
                self._clock(),
                self._name,
                event["request"],
                event["queue_ns"],
                event["prefill_ns"],
                event["decode_ns"],
                _ACCESS.get(event.get("access") or ""),
                event.get("load_ns"),
                event.get("activation_ns"),
                event.get("stall_ns"),
                event.get("cached_tokens"),
                event.get("preemptions"),
            )
        )
