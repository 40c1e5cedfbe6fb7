"""How many bytes of request bodies are held, and by whom: one bound for all clients together.

Theory of operation. A body is held from the first of its bytes (a stated length: from the head on, before any of it is asked for)
until nothing can need it again. Each connection is bounded already, but 10,000 of them times the largest
body is more than any machine has. A tenant may hold as much as is left: alone half of the bound, two of them a third each, and so
on. So whoever comes new finds room, however many connections a flood has. (Choudhury and Hahne, "Dynamic queue length thresholds
for shared-memory packet switches", 1998, with alpha 1.)
"""

from __future__ import annotations

from typing import Final

from loraledger.errors import UnavailableError

RETRY_AFTER_S: Final = 1.0


class HeldBodies:
    """The account of one data plane. ``limit`` in bytes."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        """Bytes held now."""
        self._limit = limit
        self._by_tenant: dict[str, int] = {}

    def take(self, tenant: str, size: int) -> None:
        """``tenant`` is about to hold ``size`` bytes more. Raises UnavailableError, and takes none, if that is too much."""
        held = self._by_tenant.get(tenant, 0) + size
        if held > self._limit - self.total:
            raise UnavailableError(
                "this gateway holds too many request bytes now", code="too_many_bytes", retry_after_s=RETRY_AFTER_S
            )
        self._by_tenant[tenant] = held
        self.total += size

    def give(self, tenant: str, size: int) -> None:
        """``size`` bytes of what ``tenant`` took are held no more."""
        self.total -= size
        left = self._by_tenant[tenant] - size
        if left:
            self._by_tenant[tenant] = left
        else:
            del self._by_tenant[tenant]


class Hold:
    """What one connection holds: the body of the one request that it reads or has answered."""

    __slots__ = ("_bodies", "_size", "_tenant")

    def __init__(self, bodies: HeldBodies) -> None:
        self._bodies = bodies
        self._tenant = ""
        self._size = 0

    def take(self, tenant: str, size: int) -> None:
        """As ``HeldBodies.take``; until ``release`` it is always the same tenant."""
        if size:
            self._bodies.take(tenant, size)
            self._tenant = tenant
            self._size += size

    def release(self) -> None:
        """Nothing is held any more. Does nothing where nothing was."""
        if self._size:
            self._bodies.give(self._tenant, self._size)
            self._size = 0
