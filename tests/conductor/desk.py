"""A conductor whose performer only takes notes: what it is told to do is done by the test."""

from __future__ import annotations

from loraledger import events as ev
from loraledger.conductor.conductor import Conductor
from loraledger.conductor.fold import Emitted, FoldState, RowFold
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.settings import MS, SECOND, FleetSettings, ReplicaSpec, TenantSpec
from loraledger.record.tables import TABLES, Row, check

T0 = 1_700_000_000 * SECOND
DIGEST = "aa11".ljust(64, "0")


def settings_of(replicas: int = 2, concurrency: int = 8, *adapters: ev.AdapterSpec) -> FleetSettings:
    specs = tuple(ReplicaSpec(f"r{n + 1}", 2, 4) for n in range(replicas))
    known = adapters or (ev.AdapterSpec("a", DIGEST, 8, 10_000_000), ev.AdapterSpec("b", DIGEST, 8, 10_000_000))
    return FleetSettings(specs, known, (TenantSpec("acme", concurrency, 16, 20 * SECOND),))


def fold_of(settings: FleetSettings) -> RowFold:
    return RowFold(FoldState(settings.base, "cfg", "9.9", digests={a.name: a.digest for a in settings.adapters}))


class Desk:
    """``rows`` holds what was emitted, ``done`` the commands in their order, ``alarms`` what was armed."""

    def __init__(self, settings: FleetSettings | None = None) -> None:
        self.settings = settings or settings_of()
        self.now = T0
        self.done: list[ev.Command] = []
        self.rows: Emitted = []
        self.alarms: list[int | None] = []
        self.conductor = Conductor(
            Fleet(self.settings), fold_of(self.settings), self, lambda: self.now, self._sink, self.alarms.append
        )
        for spec in self.settings.replicas:
            self.feed(ev.ReplicaUp(self.now, spec.name, 7, (), "0.32.0"))

    def perform(self, command: ev.Command) -> None:
        self.done.append(command)

    def _sink(self, rows: Emitted) -> None:
        for name, row in rows:
            check(TABLES[name], row)
        self.rows.extend(rows)

    def feed(self, event: ev.Event) -> None:
        self.conductor.feed(event)

    def tick(self, milliseconds: float) -> None:
        self.now += round(milliseconds * MS)

    def arrive(
        self, request: str, adapter: str | None = None, received: int | None = None, tenant: str = "acme"
    ) -> None:
        self.feed(
            ev.RequestArrived(
                self.now, request, tenant, adapter, 80, 20, True, "/v1/completions", f"c-{request}", received
            )
        )

    def sent(self, request: str) -> ev.Dispatch:
        """The last dispatch of a request, reported as done."""
        last = [c for c in self.done if isinstance(c, ev.Dispatch) and c.request == request][-1]
        self.feed(ev.RequestDispatched(self.now, request, last.attempt))
        return last

    def first_token(self, request: str) -> None:
        self.feed(ev.RequestFirstToken(self.now, request))

    def finish(self, request: str, status: ev.Status = "ok", measured: ev.Measured | None = None) -> None:
        http_status, reason = (200, None) if status == "ok" else (None, status)
        self.feed(ev.RequestFinished(self.now, request, status, http_status, reason, measured or ev.Measured()))

    def last(self, kind: type[ev.Command]) -> ev.Command:
        return [command for command in self.done if isinstance(command, kind)][-1]

    def load_ends(self, reason: str | None = None) -> None:
        """The last load that was asked for ends."""
        load = self.last(ev.Load)
        assert isinstance(load, ev.Load)
        if reason is None:
            self.feed(ev.CommandDone(self.now, load.id, 5 * MS))
        else:
            self.feed(ev.CommandFailed(self.now, load.id, reason, False))

    def table(self, name: str) -> list[Row]:
        return [row for table, row in self.rows if table == name]

    def row(self, request: str) -> Row:
        """The one row of a request."""
        (row,) = [row for row in self.table("requests") if row["id"] == request]
        return row
