"""The control plane: what operators, probes and scrapers ask a gateway, and the few things that they may tell it.

Theory of operation. Reading shows views of the kernel's state and never changes anything; telling feeds one event a replica to the
conductor, like anything else that happens, so that it is journalled, replayed and explained. The answer to that is 202 with what
was asked: whether it came about is seen by reading again. The control plane shares the event loop with the data plane, so long
lists are made a few items at a time, and others run in between.

With a key configured, all but ``/health``, ``/ready`` and ``/version`` asks for it; what those say to others has no hints at names.
Without a key (loopback only) a web page that is open on the same machine could still send a form here: browsers say when a request
comes from another site, and then nothing is done.

Names of adapters may hold slashes, colons and at signs. The path arrives percent-decoded, and no name contains a percent sign, so
``org%2Fname`` and ``org/name`` are one adapter; an adapter whose name ends in ``/load`` is told from the command by the method.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol, get_args

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraledger.errors import BadRequestError, UnavailableError
from loraledger.events import DrainAsked, Event, LoadAsked, MoveAsked, MoveVerb, UnloadAsked
from loraledger.gateway.control_edge import (
    Guard,
    error_handlers,
    json_answer,
    may,
    read_body,
    read_limit,
    unknown,
)
from loraledger.gateway.exposition import CONTENT_TYPE
from loraledger.gateway.ledger_view import ledger_view
from loraledger.gateway.views import (
    View,
    adapter_view,
    adapters_view,
    readiness_view,
    refusal,
    replica_view,
    replicas_view,
    tenants_view,
)
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState
from loraledger.ledger import Ledger, Limit
from loraledger.record.tables import Row, TableName

AT_ONCE: Final = 16
"""Items of a list that are made before others may run: about a millisecond."""


class ControlPort(Protocol):
    """What the control plane needs of a gateway."""

    @property
    def state(self) -> FleetState:
        """What the kernel knows."""
        ...

    @property
    def recent(self) -> Mapping[TableName, Sequence[Row]]:
        """The last finished rows of each table, oldest first."""
        ...

    @property
    def version(self) -> str:
        """This gateway's version."""
        ...

    @property
    def config_digest(self) -> str:
        """Changes when any setting does."""
        ...

    @property
    def key(self) -> str | None:
        """The key that callers must have; ``None``: none."""
        ...

    @property
    def draining(self) -> bool:
        """Whether the gateway was told to stop."""
        ...

    def now(self) -> int:
        """Nanoseconds since the epoch."""
        ...

    def feed(self, event: Event) -> None:
        """Tell the conductor what happened."""
        ...

    def metrics_text(self) -> bytes:
        """What a Prometheus scrape reads."""
        ...

    def ledgers(self, replica: str | None = None) -> Iterator[tuple[Ledger, Limit]]:
        """The accounts of each replica, or of one, and what limits it."""
        ...

    async def rescan(self) -> Mapping[str, object]:
        """Read the adapters' folders again; returns the names added, changed and removed, and what could not be taken in."""
        ...

    @property
    def upstream_open(self) -> Mapping[str, int]:
        """By replica, the connections that requests have: what the kernel's counts are held against."""
        ...


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a load or unload. Without a replica: every one that is up."""

    replica: str | None = None


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a drain or a rescan: none, or ``{}``."""


def control_app(plane: ControlPort, more: Sequence[Route] = ()) -> Starlette:
    """The control plane of ``plane`` as an ASGI application, with ``more`` routes."""
    api = _Control(plane)
    routes = [
        Route("/health", api.health),
        Route("/ready", api.ready),
        Route("/version", api.version),
        Route("/metrics", api.metrics),
        Route("/api/summary", api.summary),
        Route("/api/replicas", api.replicas),
        Route("/api/replicas/{name:path}/drain", api.drain, methods=["POST"]),
        Route("/api/replicas/{name:path}/undrain", api.undrain, methods=["POST"]),
        Route("/api/replicas/{name:path}", api.replica),
        Route("/api/adapters", api.adapters),
        Route("/api/adapters/{name:path}/load", api.load, methods=["POST"]),
        Route("/api/adapters/{name:path}/unload", api.unload, methods=["POST"]),
        *(
            Route(f"/api/adapters/{{name:path}}/{verb}", api.mover(verb), methods=["POST"])
            for verb in get_args(MoveVerb)
        ),
        Route("/api/adapters/{name:path}", api.adapter),
        Route("/api/ledger", api.ledger),
        Route("/api/rescan", api.rescan, methods=["POST"]),
        Route("/api/tenants", api.tenants),
        Route("/api/requests", api.requests),
        Route("/api/decisions", api.decisions),
        *more,
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, holder=plane)],
        exception_handlers=error_handlers(),
    )
    app.router.redirect_slashes = False  # a redirect would echo the Host header, and a name never ends in a slash
    return app


class _Control:
    """One method a route."""

    def __init__(self, plane: ControlPort) -> None:
        self._plane = plane

    async def health(self, request: Request) -> Response:
        return json_answer({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        plane, name = self._plane, request.query_params.get("adapter")
        if name is not None and name not in plane.state.adapters:
            known = plane.state.adapters if may(plane, request.headers.get("authorization")) else ()
            raise unknown("adapter", name, known)
        view = readiness_view(plane.state, plane.now(), name)
        if plane.draining:
            view = {**view, "ready": False, "reason": "the gateway is draining"}
        return json_answer(view, 200 if view["ready"] else 503)

    async def version(self, request: Request) -> Response:
        return json_answer({"version": self._plane.version})

    async def metrics(self, request: Request) -> Response:
        return Response(self._plane.metrics_text(), media_type=CONTENT_TYPE)

    async def summary(self, request: Request) -> Response:
        plane, state = self._plane, self._plane.state
        up = [name for name, replica in state.replicas.items() if replica.up]
        return json_answer(
            {
                "version": plane.version,
                "config_digest": plane.config_digest,
                "draining": plane.draining,
                "replicas": len(state.replicas),
                "replicas_up": up,
                "adapters": len(state.adapters),
                "tenants": len(state.tenants),
                "open_requests": len(state.requests),
                "queued_requests": state.queued,
                "self_check": {
                    name: {"kernel_in_flight": len(replica.in_flight), "connections": plane.upstream_open.get(name, 0)}
                    for name, replica in state.replicas.items()
                },
                "counters": dict(state.counters),
            }
        )

    async def replicas(self, request: Request) -> Response:
        return await _listing(b"replicas", replicas_view(self._plane.state, self._plane.now()), 1)

    async def replica(self, request: Request) -> Response:
        return json_answer(replica_view(self._plane.state, self._replica(request).spec.name, self._plane.now()))

    async def adapters(self, request: Request) -> Response:
        return await _listing(b"adapters", adapters_view(self._plane.state, self._plane.now()), AT_ONCE)

    async def adapter(self, request: Request) -> Response:
        return json_answer(adapter_view(self._plane.state, self._adapter(request), self._plane.now()))

    async def tenants(self, request: Request) -> Response:
        return await _listing(b"tenants", tenants_view(self._plane.state, self._plane.now()), AT_ONCE)

    async def requests(self, request: Request) -> Response:
        return self._rows(request, "requests", {"tenant": "tenant", "adapter": "adapter"})

    async def decisions(self, request: Request) -> Response:
        return self._rows(request, "decisions", {"request": "request_id"})

    async def drain(self, request: Request) -> Response:
        return await self._drain(request, on=True)

    async def undrain(self, request: Request) -> Response:
        return await self._drain(request, on=False)

    async def ledger(self, request: Request) -> Response:
        name = request.query_params.get("replica")
        if name is not None and name not in self._plane.state.replicas:
            raise unknown("replica", name, self._plane.state.replicas)
        return await _listing(
            b"ledger",
            (
                {"up": self._plane.state.replicas[ledger.replica].up, **ledger_view(ledger, limit)}
                for ledger, limit in self._plane.ledgers(name)
            ),
            1,
        )

    async def rescan(self, request: Request) -> Response:
        await read_body(request, Nothing)
        return json_answer(dict(await self._plane.rescan()))

    async def load(self, request: Request) -> Response:
        """Ask each replica that is up, or the one named, to register an adapter."""
        name, replicas = await self._targets(request)
        adapter = self._plane.state.adapters[name]
        skipped = {r.spec.name: why for r in replicas if (why := _cannot_load(adapter, r)) is not None}
        asked = [r.spec.name for r in replicas if r.spec.name not in skipped]
        if not asked:
            reasons = "; ".join(f"{replica}: {why}" for replica, why in skipped.items())
            raise BadRequestError(f"{name!r} cannot be loaded: {reasons}", code="adapter_not_loadable", param="replica")
        for replica in asked:
            self._plane.feed(LoadAsked(self._plane.now(), name, replica))
        return json_answer({"asked": "load", "adapter": name, "replicas": asked, "skipped": skipped}, 202)

    async def unload(self, request: Request) -> Response:
        """Ask each replica that is up, or the one named, to forget an adapter's name, where it has it."""
        name, replicas = await self._targets(request)
        skipped = {r.spec.name: "not registered there" for r in replicas if not _is_registered(name, r)}
        asked = [r.spec.name for r in replicas if r.spec.name not in skipped]
        for replica in asked:
            self._plane.feed(UnloadAsked(self._plane.now(), name, replica))
        return json_answer({"asked": "unload", "adapter": name, "replicas": asked, "skipped": skipped}, 202)

    def mover(self, verb: MoveVerb) -> Callable[[Request], Awaitable[Response]]:
        """Ask each replica whose probe answers, or the one named, to move an adapter that is registered there."""

        async def move(request: Request) -> Response:
            name, replicas = await self._targets(request)
            skipped = {r.spec.name: why for r in replicas if (why := _cannot_move(name, r)) is not None}
            asked = [r.spec.name for r in replicas if r.spec.name not in skipped]
            if not asked:
                reasons = "; ".join(f"{replica}: {why}" for replica, why in skipped.items())
                raise BadRequestError(
                    f"{name!r} cannot be moved: {reasons}", code="adapter_not_movable", param="replica"
                )
            for replica in asked:
                self._plane.feed(MoveAsked(self._plane.now(), name, replica, verb))
            return json_answer({"asked": verb, "adapter": name, "replicas": asked, "skipped": skipped}, 202)

        return move

    async def _drain(self, request: Request, *, on: bool) -> Response:
        await read_body(request, Nothing)
        name = self._replica(request).spec.name
        self._plane.feed(DrainAsked(self._plane.now(), name, on))
        return json_answer({"asked": "drain" if on else "undrain", "replica": name}, 202)

    async def _targets(self, request: Request) -> tuple[str, list[ReplicaState]]:
        """The adapter of a path, and the replicas that its body means."""
        where = await read_body(request, Where)
        name, replicas = self._adapter(request), self._plane.state.replicas
        if where.replica is not None:
            if where.replica not in replicas:
                raise unknown("replica", where.replica, replicas)
            return name, [replicas[where.replica]]
        up = [replica for replica in replicas.values() if replica.up]
        if not up:
            raise UnavailableError("no replica is up: name one to be asked when it is", code="no_replica")
        return name, up

    def _replica(self, request: Request) -> ReplicaState:
        name = request.path_params["name"]
        replica = self._plane.state.replicas.get(name)
        if replica is None:
            raise unknown("replica", name, self._plane.state.replicas)
        return replica

    def _adapter(self, request: Request) -> str:
        name: str = request.path_params["name"]
        if name not in self._plane.state.adapters:
            raise unknown("adapter", name, self._plane.state.adapters)
        return name

    def _rows(self, request: Request, table: TableName, filters: Mapping[str, str]) -> Response:
        """Recent rows, newest first. ``filters``: query parameter to column; an empty value means null (the base model)."""
        query = request.query_params
        strangers = [name for name in query if name != "limit" and name not in filters]
        if strangers:
            known = ", ".join(["limit", *filters])
            raise BadRequestError(f"no such parameter: {strangers[0]!r}; known: {known}", param=strangers[0])
        wanted = {column: query[name] or None for name, column in filters.items() if name in query}
        rows = (
            row
            for row in reversed(self._plane.recent[table])
            if all(row.get(column) == value for column, value in wanted.items())
        )
        return json_answer({table: list(islice(rows, read_limit(query.get("limit"))))})


async def _listing(name: bytes, views: Iterator[View], at_once: int) -> Response:
    parts: list[bytes] = []
    while some := list(islice(views, at_once)):
        parts.extend(msgspec.json.encode(view) for view in some)
        await asyncio.sleep(0)
    return Response(b'{"%b":[%b]}' % (name, b",".join(parts)), media_type="application/json")


def _cannot_load(adapter: AdapterState, replica: ReplicaState) -> str | None:
    registration = replica.registrations.get(adapter.spec.name)
    if registration is not None and registration.state == "evicting":
        return "being unloaded: ask again when that is done"
    return refusal(adapter, replica)


def _cannot_move(adapter: str, replica: ReplicaState) -> str | None:
    if replica.observed is None:
        return "no probe answers there"
    return None if _is_registered(adapter, replica) else "not registered there"


def _is_registered(adapter: str, replica: ReplicaState) -> bool:
    registration = replica.registrations.get(adapter)
    return registration is not None and registration.state == "registered"
