"""Commands: what the kernel wants done about it."""

from __future__ import annotations

import msgspec

from loraledger.events.words import Decision, MoveVerb, Status


class _Command(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all commands."""


class Dispatch(_Command, frozen=True):
    """Send the request to this replica, asking for ``model`` (the engine-side name)."""

    request: str
    attempt: int
    replica: str
    model: str
    decision: Decision


class Queue(_Command, frozen=True):
    """Hold the request in the gateway queue. Later either a ``Dispatch`` or a ``Reject`` follows, at ``until`` at the latest."""

    request: str
    reason: str
    until: int
    decision: Decision | None = None


class Reject(_Command, frozen=True):
    """Answer the request with an error now. ``status`` is what its row will say, ``code`` what the client reads."""

    request: str
    status: Status
    http_status: int
    code: str
    message: str
    retry_after: int | None = None
    decision: Decision | None = None


class Load(_Command, frozen=True):
    """Register an adapter on a replica under a versioned name: disk to host to slot in one call."""

    id: int
    replica: str
    adapter: str
    engine_name: str


class Evict(_Command, frozen=True):
    """Make a replica forget a name. On stock vLLM its bytes stay until its own LRU drops them."""

    id: int
    replica: str
    adapter: str
    engine_name: str


class Move(_Command, frozen=True):
    """Move an adapter between a replica's tiers without a request: into a slot, out of both tiers, pinned, unpinned."""

    id: int
    replica: str
    adapter: str
    engine_name: str
    verb: MoveVerb


class Check(_Command, frozen=True):
    """Look at a replica now, not at the next scrape: something just went wrong there."""

    replica: str


Command = Dispatch | Queue | Reject | Load | Evict | Move | Check
