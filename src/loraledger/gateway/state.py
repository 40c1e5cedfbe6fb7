"""What the parts of one data plane share."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from email.utils import formatdate
from typing import TYPE_CHECKING

from loraledger.conductor.ports import Clock, Feed
from loraledger.gateway.auth import Access
from loraledger.gateway.held import HeldBodies
from loraledger.gateway.ratio import TokenRatio
from loraledger.gateway.settings import PlaneSettings, ReplicaAddress
from loraledger.gateway.upstream import Pool
from loraledger.units import NS_PER_S

if TYPE_CHECKING:
    from loraledger.gateway.client import Client
    from loraledger.gateway.exchange import Exchange


class PlaneState:
    """One data plane's settings, connections and open requests. ``access`` may be replaced at any time."""

    def __init__(self, settings: PlaneSettings, feed: Feed, clock: Clock, access: Access) -> None:
        self.settings = settings
        self.feed = feed
        self.clock = clock
        self.access = access
        self.ratio = TokenRatio()
        self.pools: dict[str, Pool] = {}
        self.clients: set[Client] = set()
        self.open: dict[str, Exchange] = {}
        """Requests that arrived and have not ended, by id: each leaves exactly once, with its one end event."""
        self.refused: Counter[str] = Counter()
        """Requests answered with an error at the edge, by code: no event speaks of them."""
        self.bodies = HeldBodies(settings.body_bytes_total)
        self.draining = False
        self.deserted = asyncio.Event()
        """Set whenever the last client's connection closes."""
        self.date = b""
        self._all_busy = False
        self._boot = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self.tick()

    def tick(self) -> None:
        """Once a second: the Date header, and connections may be idle again."""
        self._all_busy = False
        self.date = formatdate(self.clock() / NS_PER_S, usegmt=True).encode("ascii")

    def request_id(self) -> str:
        """A new id: unique over restarts, safe in URLs and headers."""
        return f"{self._boot}-{next(self._numbers)}"

    def make_room(self) -> bool:
        """All connections that there may be are open: close one that is idle. Whether there was one.

        Which one is left to chance, so whoever keeps most idle ones loses most. A search that found none is not repeated before
        the next second: it has looked at all of them.
        """
        if self._all_busy:
            return False
        now = self.clock()
        self._all_busy = not any(client.give_way(now) for client in self.clients)
        return not self._all_busy

    def left(self, client: Client) -> None:
        """A client's connection is closed."""
        self.clients.discard(client)
        if not self.clients:
            self.deserted.set()

    def place(self, address: ReplicaAddress) -> None:
        """Add a replica, or move one."""
        pool = self.pools.get(address.name)
        if pool is None:
            self.pools[address.name] = Pool(address, self.clock, self.settings.connect_timeout)
        else:
            pool.move(address)
