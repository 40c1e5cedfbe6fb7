"""vLLM's HTTP API as a control plane uses it: the calls, and what its replies mean.

Theory of operation. One small client per replica, with its own few connections, so that watching a replica never
waits behind the tenants' traffic. A call either returns the engine's reply or raises ``TargetError`` with a stable
code, because to a watcher "refused", "too slow" and "answered 503" are different facts.

What a reply to a load means is read from its status *and* its body, since statuses alone mislead (seen on vLLM 0.32):

- 404 is four things: no such route, because runtime updating is switched off (or the port is a router's); no files at
  that path; no such adapter, from an unload; and, from a proxy in between, anything. Only the body tells them apart.
- 500 is two things: the engine broke, or it refused this adapter (rank, unsupported feature, wrong shapes), because
  any exception in its worker comes back as 500 with "Call to add_lora method failed". The second must not be tried
  again: each such try stalls all streams and may evict good adapters.
- 400 "already been loaded" is success, because the names that we load under carry the digest of the weights.
- 401 comes before routing, so with a key set it says nothing of the route behind it.

``load_inplace`` is never sent: the engine keeps it on the registration and reads the weights from disk at every later
step.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from loraledger.engines.http import limited, new_client
from loraledger.engines.protocol import ReplicaTarget
from loraledger.engines.scrape import EngineSample, PageReader
from loraledger.errors import TargetError
from loraledger.events import parse_engine_name

_LOAD = "/v1/load_lora_adapter"
_MESSAGE_LIMIT = 400
_ADD_LORA_FAILED = "Call to add_lora method failed"
_MAY_PASS = ("out of memory", "[errno", "timed out", "timeout", "enginecore encountered", "engine is dead")

NO_LOAD_ROUTE = (
    "this address has no route to load adapters: start the engine with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, "
    "and give its own address, not a router's"
)
WANTS_KEY = "the engine wants an API key: set key of this replica to the engine's --api-key"


@dataclass(frozen=True, slots=True)
class Reply:
    """A status and a body: parsed when it is JSON, else its text."""

    status: int
    body: object


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """What a reply to a load or an unload means. ``permanent``: only new files or new engine settings can mend it."""

    done: bool
    reason: str
    permanent: bool = False
    message: str = ""

    @property
    def text(self) -> str:
        """The reason with the words that go with it, as ``CommandFailed`` carries it."""
        return f"{self.reason}: {self.message}" if self.message else self.reason


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What ``/v1/models`` lists: the base under its names, and the adapters registered in that process."""

    base: tuple[str, ...]
    adapters: tuple[str, ...]


def diagnose_load(status: int, body: object) -> LoadVerdict:
    """What ``status`` with ``body`` (parsed JSON or text) means as the answer to a load. Reasons:

    ``loaded``, ``already_loaded`` (done); ``adapter_files_missing``, ``adapter_refused``, ``adapter_not_registered``
    (permanent: the adapter is at fault); ``runtime_update_off``, ``engine_wants_api_key`` (the engine's settings are, which an
    operator mends without touching the adapter), ``engine_busy``, ``engine_error`` (may pass).
    """
    said = _message(body)
    if 200 <= status < 300:
        return LoadVerdict(done=True, reason="loaded")
    if status in (401, 403):
        return LoadVerdict(False, "engine_wants_api_key", permanent=False, message=WANTS_KEY)
    if status == 404:
        return _diagnose_not_found(body, said)
    if status in (408, 425, 429):
        return LoadVerdict(False, "engine_busy", message=said)
    if status >= 500:
        refused = _ADD_LORA_FAILED in said and not any(sign in said.lower() for sign in _MAY_PASS)
        return LoadVerdict(False, "adapter_refused" if refused else "engine_error", permanent=refused, message=said)
    if "already been loaded" in said:
        return LoadVerdict(done=True, reason="already_loaded")
    return LoadVerdict(False, "adapter_refused", permanent=True, message=said or f"HTTP {status}")


def diagnose_unload(status: int, body: object) -> LoadVerdict:
    """As ``diagnose_load``, for an unload: what is not registered is unloaded already."""
    verdict = diagnose_load(status, body)
    if verdict.done or verdict.reason == "adapter_not_registered":
        return LoadVerdict(done=True, reason="unloaded")
    return verdict


def _diagnose_not_found(body: object, said: str) -> LoadVerdict:
    if not isinstance(body, dict) or "detail" in body or not said:
        return LoadVerdict(False, "runtime_update_off", permanent=False, message=NO_LOAD_ROUTE)
    if "does not exist" in said or "cannot be found" in said:
        return LoadVerdict(False, "adapter_not_registered", permanent=True, message=said)
    return LoadVerdict(False, "adapter_files_missing", permanent=True, message=said)


def _message(body: object) -> str:
    """The engine's own words, on one line and cut to size, wherever its version puts them."""
    found: object = body
    if isinstance(body, dict):
        found = body.get("error", body.get("message", body.get("detail", "")))
        if isinstance(found, dict):
            found = found.get("message", "")
    text = " ".join(str(found or "").split())
    return text if len(text) <= _MESSAGE_LIMIT else text[: _MESSAGE_LIMIT - 3] + "..."


def read_models(body: object) -> ServedModels:
    """The names in the body of ``/v1/models``. Raises ``TargetError`` (``bad_reply``) when it is no such list."""
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list):
        raise TargetError("GET /v1/models did not answer with a list of models", code="bad_reply")
    base: list[str] = []
    adapters: list[str] = []
    for card in data:
        if isinstance(card, dict) and isinstance(card.get("id"), str):
            ours = parse_engine_name(card["id"]) is not None
            (adapters if ours or card.get("parent") is not None else base).append(card["id"])
    return ServedModels(tuple(base), tuple(adapters))


class VllmApi:
    """The calls to one replica. Each raises ``TargetError`` when no whole answer came: ``connect_failed``, ``timeout``,
    ``connection_broken``; readings also when the answer was not the one asked for."""

    def __init__(self, target: ReplicaTarget) -> None:
        self._target = target
        self._client = new_client(target)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def health(self) -> int:
        """The status of ``/health``: 200 alive, 503 engine dead."""
        return (await self._get("/health")).status

    async def version(self) -> str | None:
        """The engine's version, ``None`` when it does not say."""
        body = (await self._get("/version")).body
        version = body.get("version") if isinstance(body, dict) else None
        return version if isinstance(version, str) else None

    async def models(self) -> ServedModels:
        """What is registered."""
        reply = await self._get("/v1/models")
        _expect_ok(reply.status, "/v1/models")
        return read_models(reply.body)

    async def metrics(self) -> EngineSample:
        """One scrape, read while it arrives."""
        reader = PageReader()
        async with (
            limited(self._target.probe_timeout, "/metrics"),
            self._client.stream("GET", "/metrics", headers=self._auth(with_key=True)) as response,
        ):
            _expect_ok(response.status_code, "/metrics")
            async for chunk in response.aiter_bytes():
                reader.feed(chunk)
                await asyncio.sleep(0)  # a long page in one buffer must not hold the loop
        return reader.finish()

    async def load(self, name: str, path: str) -> LoadVerdict:
        """Register ``name`` with the weights at ``path``, as the engine's machine sees it: disk to host to slot."""
        reply = await self._call("POST", _LOAD, {"lora_name": name, "lora_path": path}, self._target.load_timeout)
        return diagnose_load(reply.status, reply.body)

    async def unload(self, name: str) -> LoadVerdict:
        """Make the engine forget ``name``."""
        reply = await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, self._target.load_timeout)
        return diagnose_unload(reply.status, reply.body)

    async def knock(self, *, with_key: bool) -> Reply:
        """Post an empty object to the load route: its answer shows who may load, and there is nothing in it to load."""
        return await self._call("POST", _LOAD, {}, self._target.probe_timeout, with_key=with_key)

    async def _get(self, path: str) -> Reply:
        return await self._call("GET", path, None, self._target.probe_timeout)

    async def _call(
        self, method: str, path: str, body: dict[str, str] | None, limit: int, *, with_key: bool = True
    ) -> Reply:
        async with limited(limit, path):
            response = await self._client.request(method, path, json=body, headers=self._auth(with_key=with_key))
        try:
            return Reply(response.status_code, json.loads(response.content))
        except ValueError:
            return Reply(response.status_code, response.text)

    def _auth(self, *, with_key: bool) -> dict[str, str]:
        key = self._target.api_key
        return {"Authorization": f"Bearer {key}"} if with_key and key is not None else {}


def _expect_ok(status: int, path: str) -> None:
    if status in (401, 403):
        raise TargetError(f"{path}: {WANTS_KEY}", code="engine_wants_api_key")
    if status != 200:
        raise TargetError(f"{path} answered HTTP {status}", code=f"http_{status}")
