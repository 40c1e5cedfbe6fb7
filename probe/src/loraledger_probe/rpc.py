"""What the API server asks of the workers, by vLLM's ``collective_rpc``: a snapshot, and the commands.

vLLM runs an RPC in the engine's loop between two steps, on every rank, so what is read here is consistent and what is done
here cannot meet a step halfway. One method is added to vLLM's worker class; it answers JSON text, never raises, and every
rank answers for itself.

A snapshot carries the number of the worker's last event. The events that it already contains are those up to that number,
so a client continues with the next one, without a gap or an overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from loraledger_probe.guard import Guard
from loraledger_probe.worker import ROLE, WorkerProbe

METHOD = "loraledger_probe"


class RefusedError(Exception):
    """A command that would do harm or cannot be done now: a code for programs and a reason for people."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def install(worker_base: type, guard: Guard, probe: WorkerProbe) -> None:
    """Add the method to vLLM's worker class."""

    def answer(worker: Any, verb: str, *arguments: Any) -> str:
        found = guard.run(ROLE, METHOD, _answer, probe, worker, verb, arguments)
        if found is None:
            found = {"refused": "probe_fault", "reason": "the probe failed in this worker: see its hook_fault events"}
        return msgspec.json.encode(found).decode()

    setattr(worker_base, METHOD, answer)


def _answer(probe: WorkerProbe, worker: Any, verb: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    verbs: dict[str, Callable[..., dict[str, Any]]] = {
        "snapshot": _snapshot,
        "pin": _pin,
        "unpin": _unpin,
        "evict": _evict,
    }
    try:
        if probe.manager is None:
            raise RefusedError("no_lora", "this engine runs without LoRA: start it with --enable-lora")
        probe.runner = worker.model_runner
        return verbs[verb](probe, worker, *arguments)
    except RefusedError as refused:
        return {"refused": refused.code, "reason": str(refused)}


def _snapshot(probe: WorkerProbe, worker: Any) -> dict[str, Any]:
    manager, spool = probe.manager, probe.spool
    host = list(manager._registered_adapters.order)
    return {
        "pid": spool.pid,
        "rank": spool.rank,
        "n": spool.n,
        "mono_ns": time.monotonic_ns(),
        "wall_ns": time.time_ns(),
        "slots": [_slot(probe, index, adapter) for index, adapter in enumerate(manager.lora_index_to_id)],
        "slot_order": list(manager._active_adapters.order),
        "host": [_host(probe, adapter) for adapter in host],
        "host_capacity": int(manager.capacity),
        "running": {str(adapter): len(requests) for adapter, requests in probe.running().items()},
        "engine_pins": sorted(manager._active_adapters.pinned_items | manager._registered_adapters.pinned_items),
    }


def _slot(probe: WorkerProbe, index: int, adapter: int | None) -> dict[str, Any]:
    name = None if adapter is None else probe.name_of(adapter)
    return {"slot": index, "id": adapter, "name": name, "pinned": adapter in probe.pins}


def _host(probe: WorkerProbe, adapter: int) -> dict[str, Any]:
    known = probe.known.get(adapter)
    return {
        "id": adapter,
        "name": known.name if known else None,
        "path": known.path if known else None,
        "bytes": known.bytes if known else None,
        "rank": known.rank if known else None,
        "pinned": adapter in probe.pins,
    }


def _pin(probe: WorkerProbe, worker: Any, adapter: int, name: str, path: str, is_3d: bool) -> dict[str, Any]:
    """Bring the adapter into a slot and pin it, in one go: between two RPCs a step could take the slot again."""
    from vllm.lora.request import LoRARequest

    if not probe.protects_pins():
        raise RefusedError("no_hook", "pins need the hook of _apply_adapters, which is missing: see the hooks event")
    slots = probe.manager.lora_slots
    pinned = {*probe.pins.ids(), adapter}
    if len(pinned) > slots - 1:
        raise RefusedError(
            "too_many_pins", f"of {slots} slots at most {slots - 1} may be pinned: one must serve the others"
        )
    held = pinned | set(probe.running())
    if len(held) > slots:
        raise RefusedError("slots_busy", f"{len(held)} adapters are pinned or running, and there are {slots} slots")
    try:
        worker.add_lora(LoRARequest(name, adapter, path, is_3d_lora_weight=is_3d))
    except Exception as error:
        raise RefusedError("load_failed", f"{type(error).__name__}: {error}"[:500]) from error
    probe.pins.add(adapter, name)
    return {"pinned": probe.pins.ids()}


def _unpin(probe: WorkerProbe, worker: Any, adapter: int) -> dict[str, Any]:
    return {"was_pinned": probe.pins.drop(adapter), "pinned": probe.pins.ids()}


def _evict(probe: WorkerProbe, worker: Any, name: str) -> dict[str, Any]:
    """Remove every copy of this name, those of forgotten registrations too."""
    copies = [adapter for adapter in probe.manager._registered_adapters.order if probe.name_of(adapter) == name]
    running = probe.running()
    for adapter in copies:
        if running.get(adapter):
            raise RefusedError("in_use", f"{len(running[adapter])} requests are running with it")
        if adapter in probe.pins:
            raise RefusedError("pinned", "it is pinned: unpin it first")
    for adapter in copies:
        worker.remove_lora(adapter)
    return {"evicted": copies}
