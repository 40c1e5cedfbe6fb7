"""A real kernel under a real conductor; the test says what its engines do, and reads what they were told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from loraledger.conductor.conductor import Conductor
from loraledger.conductor.fold import Emitted, FoldState, RowFold
from loraledger.events import (
    AdapterSpec,
    Command,
    CommandDone,
    CommandFailed,
    Dispatch,
    Event,
    Load,
    Measured,
    ReplicaDown,
    ReplicaSampled,
    ReplicaUp,
    RequestArrived,
    RequestFinished,
    RequestFirstToken,
    ScrapeStarted,
    engine_name,
)
from loraledger.gateway.metrics import GatewayMetrics
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.settings import FleetSettings, ReplicaSpec, TenantSpec
from loraledger.kernel.state import FleetState
from loraledger.ledger import Ledger, Limit, ReplicaFacts, ledger_of, limiting
from loraledger.record.tables import Row, TableName

NOW = 1_700_000_000 * 10**9
SECOND = 10**9
MS = 10**6
C = TypeVar("C", bound=Command)


def adapter(name: str, *, rank: int = 16, replicas: int = 0, version: str = "a") -> AdapterSpec:
    return AdapterSpec(name, version * 64, rank, 50 * 2**20, ("acme",), replicas)


def settings(*adapters: AdapterSpec, replicas: tuple[str, ...] = ("r1", "r2"), **replica: Any) -> FleetSettings:
    specs = tuple(ReplicaSpec(name, **{"slots": 2, "host_entries": 4, **replica}) for name in replicas)
    return FleetSettings(specs, adapters, (TenantSpec("acme", concurrency=8), TenantSpec("ten-2")), base="base")


class DrivenGateway:
    """Also what the control plane needs of a gateway."""

    version = "1.2.3"
    config_digest = "c0ffee"

    def __init__(self, fleet: FleetSettings, key: str | None = None) -> None:
        self.at = NOW
        self.key = key
        self.draining = False
        self.commands: list[Command] = []
        self.events: list[Event] = []
        self.metrics = GatewayMetrics()
        self.recent: Mapping[TableName, deque[Row]] = {
            "requests": deque(), "decisions": deque(), "residency": deque(), "samples": deque()
        }  # fmt: skip
        digests = {spec.name: spec.digest for spec in fleet.adapters}
        fold = RowFold(FoldState(fleet.base, self.config_digest, self.version, digests=digests))
        self._conductor = Conductor(Fleet(fleet), fold, self, self.now, self._take, lambda at: None)
        self._sent = 0

    @property
    def state(self) -> FleetState:
        return self._conductor.fleet.state

    def now(self) -> int:
        return self.at

    def perform(self, command: Command) -> None:
        self.commands.append(command)

    def feed(self, event: Event) -> None:
        self.events.append(event)
        self._conductor.feed(event)

    def ledgers(self, replica: str | None = None) -> Iterator[tuple[Ledger, Limit]]:
        for name in self.state.replicas if replica is None else [replica]:
            ledger = ledger_of(ReplicaFacts(name, self.at))
            yield ledger, limiting(ledger)

    async def rescan(self) -> dict[str, object]:
        return {"added": [], "changed": [], "removed": [], "problems": [], "warnings": []}

    @property
    def upstream_open(self) -> dict[str, int]:
        return {}

    def metrics_text(self) -> bytes:
        return self.metrics.text(self.state, None, {})

    def _take(self, rows: Emitted) -> None:
        for table, row in rows:
            self.recent[table].append(row)
        self.metrics.observe(rows)

    def take(self, kind: type[C]) -> list[C]:
        """The commands of one kind since they were last taken."""
        found: list[C] = [command for command in self.commands if isinstance(command, kind)]
        self.commands = [command for command in self.commands if not isinstance(command, kind)]
        return found

    def up(self, *replicas: str, start: int = 1, registered: tuple[str, ...] = ()) -> None:
        for name in replicas:
            self.feed(ReplicaUp(self.at, name, start, registered, "0.32.0"))

    def down(self, replica: str, reason: str = "connection refused") -> None:
        self.feed(ReplicaDown(self.at, replica, reason))

    def sample(self, replica: str, running: int | None = 0, waiting: int | None = 0, **figures: Any) -> None:
        self.feed(ScrapeStarted(self.at, replica))
        values = {"kv_usage": None, "kv_tokens": None, **figures}
        self.feed(ReplicaSampled(self.at, replica, self.at, running, waiting, **values))

    def loaded(self, took: int = 100 * MS) -> list[Load]:
        """Every load under way succeeds."""
        loads = self.take(Load)
        self.at += took
        for load in loads:
            self.feed(CommandDone(self.at, load.id, took))
        return loads

    def refused(self, reason: str, *, permanent: bool) -> list[Load]:
        """Every load under way is refused by its engine."""
        loads = self.take(Load)
        for load in loads:
            self.feed(CommandFailed(self.at, load.id, reason, permanent))
        return loads

    def ask(self, model: str | None, tenant: str = "acme", prompt: int = 200) -> str:
        """A request arrives; returns its id."""
        self._sent += 1
        name = f"q{self._sent}"
        self.feed(RequestArrived(self.at, name, tenant, model, prompt, 10, True, "/v1/chat/completions"))
        return name

    def answer(self, request: str, **measured: Any) -> None:
        """The request's answer comes, to its end, a second later."""
        self.feed(RequestFirstToken(self.at, request))
        self.at += SECOND
        self.feed(RequestFinished(self.at, request, "ok", 200, None, Measured(**measured)))

    def dispatched(self) -> list[tuple[str, str]]:
        """(request, replica) of each dispatch since the last look."""
        return [(command.request, command.replica) for command in self.take(Dispatch)]


def named(spec: AdapterSpec, generation: int = 1) -> str:
    return engine_name(spec.name, spec.digest, generation)
