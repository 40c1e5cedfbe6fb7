"""What asyncio leaves to its users to do with a socket."""

from __future__ import annotations

import asyncio
import select
import socket
import struct


def send_at_once(transport: asyncio.Transport) -> None:
    """Switch Nagle's algorithm off.

    asyncio does so only for sockets that name their protocol, which an inherited one need not: streams then gain 35 to 40 ms.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def reset(transport: asyncio.Transport) -> None:
    """Close so that the other side sees an error (RST), where an orderly close would look like the end of the answer."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def hung_up(transport: asyncio.Transport) -> bool:
    """Whether the other side has closed. For a connection that is not being read, where nothing else tells."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLRDHUP)  # errors are always reported
    return bool(poll.poll(0))
