"""A kernel on the bench: terse events on a clock of its own, each step checked in full.

Every step is taken twice, by the kernel under test and by one that was just restored from its snapshot, and must give
the same commands, changes, wake-up and snapshot. Then the invariants are checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from loraledger import events as ev
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.residency import Registration
from loraledger.kernel.settings import MS, SECOND, FleetSettings, Limits, ReplicaSpec, TenantSpec
from loraledger.kernel.state import AdapterState, ReplicaState

from .invariants import active, check, keep_all

T0 = 1_700_000_000 * SECOND
MIB = 1 << 20
CommandType = TypeVar("CommandType", bound=ev.Command)


def digest(version: str) -> str:
    """A digest that begins with ``version`` (hexadecimal digits)."""
    return version.ljust(64, "0")


def adapter(name: str, version: str = "aa11", **fields: int) -> ev.AdapterSpec:
    return ev.AdapterSpec(
        name, digest(version), fields.get("rank", 16), fields.get("bytes", 20 * MIB), (), fields.get("replicas", 0)
    )


def replica(name: str, slots: int = 4, host_entries: int = 8, **fields: int) -> ReplicaSpec:
    return ReplicaSpec(name, slots, host_entries, **fields)


def fleet_of(
    replicas: int | Iterable[ReplicaSpec] = 1,
    adapters: Iterable[ev.AdapterSpec] = (),
    tenants: Iterable[TenantSpec] = (TenantSpec("acme"),),
    policy: str = "bounded-affinity",
    limits: Limits | None = None,
    params: dict[str, float] | None = None,
    pins: Iterable[tuple[str, str]] = (),
) -> FleetSettings:
    """Settings for replicas ``r1``, ``r2``, ... or the given ones. With ``pins`` residency is ranked."""
    specs = tuple(replica(f"r{n + 1}") for n in range(replicas)) if isinstance(replicas, int) else tuple(replicas)
    ranking = tuple(pins)
    return FleetSettings(
        specs,
        tuple(adapters),
        tuple(tenants),
        "base",
        policy,
        params or {},
        limits or Limits(),
        "ranked" if ranking else "lru",
        ranking,
    )


class Bench:
    """One kernel. ``now`` moves only by ``tick``; ``commands`` holds what the last event gave."""

    def __init__(self, settings: FleetSettings, up: bool = True) -> None:
        self.settings = settings
        self.fleet = Fleet(settings)
        self.now = T0
        self.wake_at: int | None = None
        self.commands: list[ev.Command] = []
        self.changes: list[ev.ResidencyChange] = []
        self._count = 0
        if up:
            for spec in settings.replicas:
                self.up(spec.name)

    # --- what happens -------------------------------------------------------------------------------------------------

    def feed(self, event: ev.Event) -> list[ev.Command]:
        shadow = Fleet.restore(self.settings, self.fleet.snapshot())
        keep_all(self.fleet.state)
        before = active(self.fleet)
        answer = self.fleet.step_with_changes(event)
        assert shadow.step_with_changes(event) == answer
        self.commands, self.changes, self.wake_at = answer
        check(self.fleet, self.wake_at, before)
        assert shadow.snapshot() == self.fleet.snapshot()
        return self.commands

    def tick(self, ns: int) -> None:
        self.now += ns

    def wake(self) -> list[ev.Command]:
        """Go to the time that the kernel asked for."""
        assert self.wake_at is not None
        self.now = max(self.now, self.wake_at)
        return self.feed(ev.Wake(self.now))

    def up(self, name: str, listed: Iterable[str] = (), start: int | None = 1) -> list[ev.Command]:
        return self.feed(ev.ReplicaUp(self.now, name, start, tuple(listed)))

    def down(self, name: str) -> list[ev.Command]:
        return self.feed(ev.ReplicaDown(self.now, name, "connect_failed"))

    def scrape(
        self, name: str, listed: Iterable[str] | None = None, running: int = 0, waiting: int = 0, kv: float = 0.0
    ) -> None:
        """A scrape that begins and ends now."""
        self.feed(ev.ScrapeStarted(self.now, name))
        self.feed(
            ev.ReplicaSampled(
                self.now, name, self.now, running, waiting, kv, None, None, None if listed is None else tuple(listed)
            )
        )

    def arrive(
        self,
        adapter: str | None = None,
        tenant: str = "acme",
        prompt: int = 100,
        max_tokens: int | None = 50,
        id: str | None = None,  # noqa: A002 - the word of the events
        stream: bool = True,
    ) -> str:
        self._count += 1
        request = id or f"q{self._count}"
        self.feed(
            ev.RequestArrived(self.now, request, tenant, adapter, prompt, max_tokens, stream, "/v1/chat/completions")
        )
        return request

    def first_token(self, request: str) -> list[ev.Command]:
        return self.feed(ev.RequestFirstToken(self.now, request))

    def finish(
        self, request: str, status: ev.Status = "ok", generated: int | None = None, itl: int | None = None
    ) -> list[ev.Command]:
        measured = ev.Measured(generated_tokens=generated, itl_mean=itl)
        return self.feed(ev.RequestFinished(self.now, request, status, 200, None, measured))

    def cancel(self, request: str) -> list[ev.Command]:
        return self.feed(ev.RequestCancelled(self.now, request, ev.Measured()))

    def fail_attempt(
        self, request: str, reason: str = "reset", status: ev.Status = "upstream_failed"
    ) -> list[ev.Command]:
        attempt = self.fleet.state.requests[request].attempt
        return self.feed(ev.AttemptFailed(self.now, request, attempt, status, None, reason))

    def done(self, name: str, took: int = 100 * MS) -> list[ev.Command]:
        """The load in hand on this replica succeeds."""
        return self.feed(ev.CommandDone(self.now, self.loading(name).command, took))

    def failed(self, name: str, reason: str = "broken", permanent: bool = False) -> list[ev.Command]:
        """The load in hand on this replica fails."""
        return self.feed(ev.CommandFailed(self.now, self.loading(name).command, reason, permanent))

    def declare(self, spec: ev.AdapterSpec) -> list[ev.Command]:
        return self.feed(ev.AdapterDeclared(self.now, spec))

    def hold(self, adapter: str, name: str) -> str:
        """Have an adapter loaded on a replica, whatever it takes; its engine name there."""
        self.feed(ev.LoadAsked(self.now, adapter, name))
        if self.replica(name).loading is not None:
            self.done(name)
        return self.registration(adapter, name).engine_name

    # --- what can be seen ---------------------------------------------------------------------------------------------

    def only(self, kind: type[CommandType]) -> CommandType:
        """The one command of this kind that the last event gave."""
        found = self.all(kind)
        assert len(found) == 1, self.commands
        return found[0]

    def all(self, kind: type[CommandType]) -> list[CommandType]:
        return [command for command in self.commands if isinstance(command, kind)]

    def replica(self, name: str) -> ReplicaState:
        return self.fleet.state.replicas[name]

    def registration(self, adapter: str, name: str) -> Registration:
        return self.replica(name).registrations[adapter]

    def adapter(self, name: str) -> AdapterState:
        return self.fleet.state.adapters[name]

    def loading(self, name: str) -> Registration:
        loading = self.replica(name).loading
        assert loading is not None, f"no load under way on {name}"
        return self.registration(loading, name)

    def counter(self, name: str) -> int:
        return self.fleet.state.counters.get(name, 0)
