"""Connections to one engine, and what can go wrong on the wire: each exchange is bounded and fails as ``TargetError``."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from loraledger.engines.protocol import ReplicaTarget
from loraledger.errors import TargetError


def new_client(target: ReplicaTarget) -> httpx2.AsyncClient:
    """A pool of connections to ``target``."""
    # A context costs 50 ms of a blocked loop per replica, and http needs none. The environment's proxies are not
    # for engines; OpenSSL's own SSL_CERT_FILE and SSL_CERT_DIR still count.
    secure = target.url.startswith("https")
    return httpx2.AsyncClient(
        base_url=target.url,
        verify=ssl.create_default_context() if secure else False,
        trust_env=False,
        timeout=httpx2.Timeout(None, connect=target.probe_timeout / 1e9),
        limits=httpx2.Limits(max_connections=4, max_keepalive_connections=2, keepalive_expiry=4.0),
        headers={"Accept-Encoding": "identity", "User-Agent": "loraledger"},
    )


@asynccontextmanager
async def limited(nanoseconds: int, path: str) -> AsyncIterator[None]:
    """Bound one whole exchange, and turn what can go wrong on the wire into ``TargetError``."""
    try:
        async with asyncio.timeout(nanoseconds / 1e9):
            yield
    except (TimeoutError, httpx2.TimeoutException) as error:
        raise TargetError(f"{path}: no whole answer within {nanoseconds / 1e9:g} s", code="timeout") from error
    except httpx2.ConnectError as error:
        raise TargetError(f"{path}: {error}", code="connect_failed") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise TargetError(f"{path}: {error or type(error).__name__}", code="connection_broken") from error
