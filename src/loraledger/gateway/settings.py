"""The limits of the data plane, and where replicas are.

Every limit has a default and is a setting of the operator's. Sizes are bytes, times integer nanoseconds.
"""

from __future__ import annotations

import msgspec

from loraledger.units import NS_PER_S


class PlaneSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one data plane accepts, and how long it waits."""

    header_bytes: int = 64 * 1024
    """Largest request head, and the most that a client may send ahead of its answer before reading stops."""
    body_bytes: int = 8 * 1024 * 1024
    body_bytes_total: int = 512 * 1024 * 1024
    """Bytes of request bodies held at once, all clients together."""
    answer_bytes: int = 64 * 1024 * 1024
    """Largest answer that is not a stream: it is held whole, because its model name is changed. A stream's frame likewise."""
    header_timeout: int = 10 * NS_PER_S
    body_timeout: int = 30 * NS_PER_S
    idle_timeout: int = 75 * NS_PER_S
    """A kept-alive client connection without a request is closed after it."""
    connect_timeout: int = 2 * NS_PER_S
    first_byte_timeout: int = 300 * NS_PER_S
    """From the request's last byte to the first byte of its answer. An answer that is not a stream begins at its end."""
    stream_idle_timeout: int = 60 * NS_PER_S
    """Silence inside an answer, from the replica, or a client that takes nothing of it."""
    connections: int = 10_000
    pipelined: int = 16
    """Requests that one connection may send ahead of their answers."""
    drain: int = 30 * NS_PER_S


class ReplicaAddress(msgspec.Struct, frozen=True):
    """Where one replica listens. ``api_key`` is what the engine itself asks for, never a tenant's key."""

    name: str
    host: str
    port: int
    api_key: str | None = None
