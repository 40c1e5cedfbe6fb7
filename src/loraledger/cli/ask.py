"""How verbs ask a running gateway's control plane."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loraledger.cli.options import load_settings
from loraledger.errors import TargetError

if TYPE_CHECKING:
    import httpx2


def ask_gateway(
    method: Literal["GET", "POST"], path: str, config: Path | None, timeout_s: float = 10.0
) -> dict[str, Any]:
    """The answer to ``method`` on ``/api/{path}`` of the gateway that the settings describe.

    Raises ``TargetError`` when no gateway answers there, or answers anything but a JSON object with 2xx.
    """
    reply = send(method, path, config, timeout_s)
    url = reply.request.url
    if not 200 <= reply.status_code < 300:
        raise TargetError(f"{url} answered {reply.status_code}: {reply.text[:300]}")
    try:
        found = reply.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TargetError(f"{url} is not a gateway's control plane: correct control.port")
    return found


def send(
    method: Literal["GET", "POST"], path: str, config: Path | None, timeout_s: float = 10.0, body: object = None
) -> httpx2.Response:
    """The answer, whatever its status, with ``body`` as JSON. Raises ``TargetError`` when no gateway answers there."""
    import httpx2
    import msgspec

    from loraledger.config import resolve_secrets

    settings = load_settings(config).settings
    key = resolve_secrets(settings, os.environ).control_key
    url = f"http://{at(settings.control.host)}:{settings.control.port}/api/{path}"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    content = None if body is None else msgspec.json.encode(body)
    try:
        return httpx2.request(method, url, headers=headers, content=content, timeout=timeout_s, trust_env=False)
    except httpx2.HTTPError as error:
        raise TargetError(f"no gateway answers at {url}: {error}; start it with `loraledger serve`") from error


def at(host: str) -> str:
    """``host`` as a URL wants it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
