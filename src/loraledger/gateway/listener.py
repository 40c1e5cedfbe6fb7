"""The data plane as one object: where clients connect, where commands go, and how it ends.

Theory of operation. One process, one event loop, no task for a request. Commands about requests come from the conductor by
``perform``, events go to it by ``feed``; either may happen inside the other. A request that has ended is not in the table of open
ones, so a command that comes too late finds nothing and does nothing.

Draining: no new connections, idle ones are closed, each further answer closes its connection. What is still open at the limit is
told (503) where nothing was sent yet, and cut where something was.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Final, cast

from loraledger.conductor.ports import Clock, Feed
from loraledger.errors import TargetError
from loraledger.events import Dispatch, Queue, Reject
from loraledger.gateway.auth import Access
from loraledger.gateway.client import Client
from loraledger.gateway.ratio import TokenRatio
from loraledger.gateway.settings import PlaneSettings, ReplicaAddress
from loraledger.gateway.state import PlaneState
from loraledger.units import NS_PER_S

SWEEP_S: Final = 1.0
_BACKLOG: Final = 1024
TOLD: Final = 256
"""Connections over the limit that are told so at a time; those beyond are closed without a word, so that files do not run out."""
_LAST_WORDS_S: Final = 1.0
"""Time for the last answers to leave once the drain's limit has passed."""


class DataPlane:
    """Serves clients on one address. All methods belong to the event loop's thread."""

    def __init__(
        self,
        settings: PlaneSettings,
        feed: Feed,
        clock: Clock,
        access: Access,
        replicas: Mapping[str, ReplicaAddress],
    ) -> None:
        self._state = PlaneState(settings, feed, clock, access)
        self._server: asyncio.Server | None = None
        self._port = 0
        self._sweeping: asyncio.TimerHandle | None = None
        for address in replicas.values():
            self._state.place(address)

    async def start(self, host: str, port: int, sock: socket.socket | None = None) -> None:
        """Listen on ``host`` and ``port`` (0: any free one), or on ``sock``. Raises TargetError when that cannot be done."""
        loop = asyncio.get_running_loop()
        try:
            if sock is not None:
                self._server = await loop.create_server(self._client, sock=sock, backlog=_BACKLOG)
            else:
                self._server = await loop.create_server(self._client, host, port, backlog=_BACKLOG)
        except OSError as error:
            raise TargetError(f"cannot listen on {host}:{port}: {error}") from error
        self._port = int(self._server.sockets[0].getsockname()[1])
        self._sweep()

    @property
    def port(self) -> int:
        """The port it listens on, 0 before ``start``."""
        return self._port

    def perform(self, command: Dispatch | Queue | Reject) -> None:
        """Do what the kernel says about one request. A queued request waits: nothing is to be done for it."""
        exchange = self._state.open.get(command.request)
        if exchange is None:
            return
        if isinstance(command, Dispatch):
            exchange.dispatch(command)
        elif isinstance(command, Reject):
            exchange.reject(command)

    async def drain(self, timeout: int | None = None) -> None:  # noqa: ASYNC109 - in ns, and it ends in order
        """Stop: let open requests end within ``timeout`` ns (the settings' limit if None), then cut what is left."""
        state = self._state
        state.draining = True
        if self._server is not None:
            self._server.close()
        for client in list(state.clients):
            client.close_idle()
        await self._deserted((state.settings.drain if timeout is None else timeout) / NS_PER_S)
        for client in list(state.clients):
            client.shut()
        await self._deserted(_LAST_WORDS_S)
        for client in list(state.clients):
            client.abort()
        for pool in state.pools.values():
            pool.close()
        if self._sweeping is not None:
            self._sweeping.cancel()

    # --- what may change while it serves ---

    @property
    def access(self) -> Access:
        """Who may call what; replace it by a new object at any time."""
        return self._state.access

    @access.setter
    def access(self, access: Access) -> None:
        self._state.access = access

    def set_address(self, address: ReplicaAddress) -> None:
        """Add a replica, or say that it is somewhere else now."""
        self._state.place(address)

    def drop_idle(self, replica: str) -> None:
        """This replica restarted: connections opened before are not used again."""
        pool = self._state.pools.get(replica)
        if pool is not None:
            pool.drop_idle()

    def lose(self, replica: str) -> None:
        """This replica is down and stays so: its requests without a byte of answer fail now, and may be tried elsewhere."""
        for exchange in list(self._state.open.values()):
            exchange.lose(replica)

    # --- what can be seen ---

    @property
    def open_exchanges(self) -> int:
        """Requests that arrived and have not ended."""
        return len(self._state.open)

    @property
    def connections(self) -> int:
        """Client connections open now."""
        return len(self._state.clients)

    @property
    def held_bytes(self) -> int:
        """Bytes of request bodies held now."""
        return self._state.bodies.total

    @property
    def upstream_open(self) -> dict[str, int]:
        """For each replica the connections that an exchange has or waits for: to hold against the kernel's counts."""
        return {name: pool.busy for name, pool in self._state.pools.items()}

    @property
    def refused(self) -> dict[str, int]:
        """Requests answered with an error at the edge, by code; no event speaks of them."""
        return dict(self._state.refused)

    @property
    def ratio(self) -> TokenRatio:
        """What was learnt of bytes per token."""
        return self._state.ratio

    def _client(self) -> asyncio.Protocol:
        state = self._state
        crowded = len(state.clients) >= state.settings.connections + TOLD
        return _Unwanted() if crowded else Client(state)

    async def _deserted(self, seconds: float) -> None:
        """Wait until there is no client, ``seconds`` at most."""
        self._state.deserted.clear()
        if self._state.clients:
            try:
                await asyncio.wait_for(self._state.deserted.wait(), seconds)
            except TimeoutError:
                return

    def _sweep(self) -> None:
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        self._state.tick()
        now = self._state.clock()
        for client in list(self._state.clients):
            client.check(now)
        for pool in self._state.pools.values():
            pool.sweep(now)


class _Unwanted(asyncio.Protocol):
    """A connection that is closed as it comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it. Its socket is not kept for a lingering goodbye."""
        cast(asyncio.Transport, transport).abort()
