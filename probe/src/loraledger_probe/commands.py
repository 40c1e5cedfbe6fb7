"""What may be commanded: activate, evict, pin, unpin an adapter, or a refusal with its reason.

The rule behind the refusals: pinned adapters and adapters of requests under way together never exceed the slots. vLLM's
scheduler knows only the second half of that (`pins.py`). Requests under way are those that this API server has not
answered, waiting ones included; there must be only one API server, as vLLM itself demands for loading adapters at run time.

Each command is one call into the engine between two steps, where a failure to read an adapter's files is an answer. In a
step the same failure ends the engine. So ``activate`` is also the safe way to find out whether an adapter can be read.

``load_inplace``, which vLLM keeps with a registered adapter and which makes every later step read the files again, is never
passed on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec

from loraledger_probe.rpc import METHOD, RefusedError

TIMEOUT_S = 60.0
VERBS = ("activate", "evict", "pin", "unpin")


class Engine:
    """The engine as the API server reaches it: ``client`` is vLLM's EngineClient, ``models`` its registry of names."""

    def __init__(self, client: Any, models: Any) -> None:
        self._client = client
        self._models = models
        self._one_at_a_time = asyncio.Lock()

    def registered(self) -> list[dict[str, Any]]:
        """Return name, id and path of each adapter that requests may name."""
        return [
            {"name": name, "id": request.lora_int_id, "path": request.lora_path}
            for name, request in self._models.lora_requests.items()
        ]

    def in_flight(self) -> dict[str, int] | None:
        """Return requests not yet answered, by adapter name; None when vLLM keeps them elsewhere than expected."""
        states = getattr(getattr(self._client, "output_processor", None), "request_states", None)
        if states is None:
            return None
        return dict(Counter(state.lora_name for state in states.values() if state.lora_name is not None))

    async def ask(self, verb: str, *arguments: Any) -> list[dict[str, Any]]:
        """Ask every worker; one answer per rank. Raises RefusedError with the first refusal."""
        texts = await self._client.collective_rpc(METHOD, timeout=TIMEOUT_S, args=(verb, *arguments))
        answers: list[dict[str, Any]] = [msgspec.json.decode(text) for text in texts]
        for answer in answers:
            if "refused" in answer:
                raise RefusedError(answer["refused"], answer["reason"])
        return answers

    async def command(self, verb: str, name: str) -> dict[str, Any]:
        """Perform one command, one after another. Raises RefusedError, or what vLLM raises when the engine is gone."""
        async with self._one_at_a_time:
            if verb == "evict":
                return await self._evict(name)
            request = self._models.lora_requests.get(name)
            if request is None:
                raise RefusedError("unknown_adapter", f"no adapter {name!r} is registered: load it first")
            if verb == "unpin":
                return (await self.ask("unpin", request.lora_int_id))[0]
            if verb == "pin":
                return await self._pin(name, request)
            return await self._activate(name, request)

    async def _pin(self, name: str, request: Any) -> dict[str, Any]:
        await self._check_slots(name, "pin")
        adapter = request.lora_int_id
        try:
            (first, *_) = await self.ask("pin", adapter, name, request.lora_path, request.is_3d_lora_weight)
        except RefusedError as refused:
            if refused.code == "load_failed":  # on one rank at least; it must not stay pinned on the others
                await self.ask("unpin", adapter)
            raise
        return first

    async def _activate(self, name: str, request: Any) -> dict[str, Any]:
        await self._check_slots(name, "activate")
        wanted = msgspec.structs.replace(request, load_inplace=False)
        try:
            await self._client.add_lora(wanted)
        except Exception as error:
            if getattr(self._client, "errored", False):
                raise
            raise RefusedError("load_failed", str(error)[:500]) from error
        return {"activated": request.lora_int_id}

    async def _evict(self, name: str) -> dict[str, Any]:
        flying = (self.in_flight() or {}).get(name, 0)
        if flying:
            raise RefusedError("in_use", f"{flying} requests for it are under way")
        copies = {adapter for answer in await self.ask("evict", name) for adapter in answer["evicted"]}
        if not copies and name not in self._models.lora_requests:
            raise RefusedError("unknown_adapter", f"no adapter {name!r} is registered or resident")
        return {"evicted": sorted(copies)}  # ranks may hold different ones

    async def _check_slots(self, name: str, verb: str) -> None:
        """Refuse what would leave a running request without a slot, or be undone at once."""
        (state, *_) = await self.ask("snapshot")
        pinned = {slot["name"] for slot in state["slots"] if slot["pinned"]}
        flying = self.in_flight()
        if flying is None:
            raise RefusedError(
                "no_hook", f"{verb} needs the requests under way, which this version of vLLM keeps elsewhere"
            )
        held = {name} | pinned | set(flying)
        if len(held) > len(state["slots"]):
            reason = (
                f"{len(held)} adapters would be pinned, in use or activated, and there are {len(state['slots'])} slots"
            )
            raise RefusedError("slots_busy", reason)
