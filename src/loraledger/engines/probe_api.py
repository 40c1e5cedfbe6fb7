"""The calls to the probe inside one engine, and what its refusals mean."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from loraledger.engines.http import limited, new_client
from loraledger.engines.protocol import ReplicaTarget
from loraledger.errors import TargetError
from loraledger.events import MoveVerb

NO_PROBE = (
    "this engine has no probe: install loraledger-probe beside vLLM and start it with LORALEDGER_PROBE=1 and "
    "VLLM_PLUGINS=loraledger"
)
Answer = dict[str, Any]


class BootChangedError(TargetError):
    """The engine restarted, or events were lost: start again with a snapshot."""


class ProbeApi:
    """Each call raises ``TargetError``: ``no_probe``, ``probe_wants_key``, ``timeout``, ``connection_broken``, the probe's code."""

    def __init__(self, target: ReplicaTarget) -> None:
        self._target = target
        self._client = new_client(target)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def residency(self) -> Answer:
        """The state of the engine itself."""
        return await self._call("GET", "/loraledger/residency", self._target.probe_timeout)

    async def events(self, after: int, boot: str, wait_s: float) -> Answer:
        """Events with a number above ``after``; held back for up to ``wait_s`` until there is one."""
        path = f"/loraledger/events?after={after}&boot={quote(boot)}&wait_s={wait_s:g}"
        return await self._call("GET", path, self._target.probe_timeout + int(wait_s * 1e9))

    async def move(self, engine_name: str, verb: MoveVerb) -> Answer:
        """Activate, evict, pin or unpin."""
        path = f"/loraledger/adapters/{quote(engine_name, safe='')}/{verb}"
        return await self._call("POST", path, self._target.load_timeout)

    async def _call(self, method: str, path: str, limit: int) -> Answer:
        bare = path.partition("?")[0]
        async with limited(limit, bare):
            reply = await self._client.request(
                method, path, headers={"Authorization": f"Bearer {self._target.probe_key}"}
            )
        try:
            body = msgspec.json.decode(reply.content)
        except msgspec.DecodeError:
            body = None
        if reply.status_code == 200 and isinstance(body, dict):
            return body
        code, message = _refusal(body)
        if code == "boot_changed":
            raise BootChangedError(f"{bare}: {message}", code=code)
        if code is None and reply.status_code == 404:
            raise TargetError(f"{bare}: {NO_PROBE}", code="no_probe")
        if reply.status_code in (401, 403):
            raise TargetError(
                f"{bare}: {message}: set probe of this replica to the probe's key", code="probe_wants_key"
            )
        raise TargetError(
            f"{bare} answered HTTP {reply.status_code}: {message}", code=code or f"http_{reply.status_code}"
        )


def _refusal(body: object) -> tuple[str | None, str]:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return None, "no reason given"
    code = error.get("code")
    return code if isinstance(code, str) else None, str(error.get("message", ""))[:400]
