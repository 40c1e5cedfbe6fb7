"""The calls to the probe inside one engine, and what its refusals mean."""

from __future__ import annotations

from typing import Any, Final
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
MAX_ANSWER: Final = 16 * 2**20
"""Bytes. A page of events has 4 MiB at most, and a snapshot of a thousand adapters 300 KiB."""
MOST: Final = 10_000
"""Entries of a list or an object."""
LONGEST: Final = 4096
"""Characters of a text; the longest are paths."""
LARGEST: Final = 2**53
"""Of counts, bytes and durations; clocks may show more."""


_CLOCKS: Final = frozenset({"wall_ns", "mono_ns"})


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
        headers = {"Authorization": f"Bearer {self._target.probe_key}"}
        raw = bytearray()
        async with limited(limit, bare), self._client.stream(method, path, headers=headers) as reply:
            async for chunk in reply.aiter_bytes():
                raw += chunk
                if len(raw) > MAX_ANSWER:
                    raise TargetError(f"{bare}: the answer is over {MAX_ANSWER:,} bytes", code="bad_reply")
        try:
            body = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            body = None
        if reply.status_code == 200:
            if not isinstance(body, dict):
                raise TargetError(f"{bare}: the answer is no JSON object", code="bad_reply")
            refuse_implausible(body)
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


def refuse_implausible(value: object, key: str = "") -> None:
    """Raises ``ValueError`` when ``value``, decoded JSON, holds what no engine says: it would poison sums and records."""
    if isinstance(value, dict | list):
        if len(value) > MOST:
            raise ValueError(f"{key or 'the answer'} has {len(value):,} entries")
        for name, item in value.items() if isinstance(value, dict) else ((key, item) for item in value):
            if len(name) > LONGEST:
                raise ValueError("a name is too long")
            refuse_implausible(item, name)
    elif isinstance(value, str) and len(value) > LONGEST:
        raise ValueError(f"{key} has {len(value):,} characters")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        most = 2**62 if key in _CLOCKS else LARGEST
        if not (0 <= value <= most or (key == "unattributed_bytes" and value >= -LARGEST)):
            raise ValueError(f"{key} is {value}")


def _refusal(body: object) -> tuple[str | None, str]:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return None, "no reason given"
    code = error.get("code")
    return code if isinstance(code, str) else None, str(error.get("message", ""))[:400]
