"""What a worker process sees: every move of an adapter between disk, host cache and slots, and who asked for it.

vLLM 0.32 moves adapters in one place, ``LRUCacheWorkerLoRAManager.add_adapter``, called for each adapter of a step's
batch (``_apply_adapters``) or by an RPC between steps. Inside it, ``_load_adapter`` reads files, the manager's
``_add_adapter`` packs and inserts into the host cache, ``activate_adapter`` copies into a slot, and the two caches drop
their oldest entries, which shows in ``_on_remove`` (host) and ``_deactivate_adapter`` (slot).

The events of one worker, replayed in order, give its slot map and both least-recently-used orders exactly (`replay.py`),
warm-up adapters included. Touches that change the order without moving anything are events too, but only when the order
differs from the last one: a decode that goes on with the same batch adds no event.

Times of loads and activations are those of the call. On a GPU the copy into the slot goes on after the call.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from loraledger_probe import sizes
from loraledger_probe.guard import Guard, Hook
from loraledger_probe.moves import Cost, Known, Move
from loraledger_probe.names import MAX_REQUESTS, client_id_inside
from loraledger_probe.pins import Pins

ROLE = "worker"
COST_INTERVAL_NS = 1_000_000_000
_MANAGER = "vllm.lora.worker_manager"
_MODELS = "vllm.lora.model_manager"
_BASE = "vllm.v1.worker.worker_base"
_clock = time.perf_counter_ns


class WorkerProbe:
    """State and hooks of one worker process. ``manager`` is vLLM's own, None until the model is built."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._emit = guard.spool.emit
        self.spool = guard.spool
        self.manager: Any = None
        self.runner: Any = None
        self.pins = Pins()
        self.known: dict[int, Known] = {}
        self._pool_bytes: int | None = None
        self._in_step = False
        self._in_apply = False
        self._removal = ""  # why vLLM is removing right now, when it is not to make room
        self._move: Move | None = None
        self._moves: dict[int, Move] = {}
        self._new: dict[int, list[str]] = {}  # requests first computed in this step, by adapter id, 0 for none
        self._touched: list[int] = []
        self._last_touched: list[int] = []
        self._cost = Cost()

    def hooks(self) -> list[Hook]:
        """Return the hooks of a worker."""
        loads, base = "loads, activations, evictions and accesses", "rank and memory"
        return [
            Hook(ROLE, _BASE, "WorkerWrapperBase", "init_device", (), base, self._init_device),
            Hook(ROLE, _BASE, "WorkerWrapperBase", "initialize_from_config", ("kv_cache_configs",), "floor",
                 self._initialize, self._initialized),
            Hook(ROLE, _BASE, "WorkerWrapperBase", "execute_model", ("scheduler_output",),
                 "cause and requests of loads, accesses, worker_cost", self._step_begins, self._step_ends),
            Hook(ROLE, _MODELS, "LoRAModelManager", "__init__", ("model",), "slots_allocated", None, self._allocated),
            Hook(ROLE, _MANAGER, "LRUCacheWorkerLoRAManager", "_apply_adapters", ("lora_requests",),
                 "accesses, touches, protection of pins", self._apply_begins, self._apply_ends),
            Hook(ROLE, _MANAGER, "LRUCacheWorkerLoRAManager", "add_adapter", ("lora_request",), loads,
                 self._add_begins, self._add_ends),
            Hook(ROLE, _MANAGER, "WorkerLoRAManager", "_load_adapter", ("lora_request",), "loads",
                 self._load_begins, self._read),
            Hook(ROLE, _MANAGER, "WorkerLoRAManager", "add_dummy_lora", ("lora_request",), "names of warm-up adapters",
                 self._dummy),
            Hook(ROLE, _MANAGER, "WorkerLoRAManager", "remove_adapter", ("adapter_id",), "causes of evictions",
                 self._remove_begins, self._removed),
            Hook(ROLE, _MANAGER, "WorkerLoRAManager", "remove_all_adapters", (), "causes of evictions",
                 self._reset_begins, self._removed),
            Hook(ROLE, _MODELS, "LoRAModelManager", "_add_adapter", ("lora",), "loads, host entries",
                 self._insert_begins, self._inserted),
            Hook(ROLE, _MODELS, "LoRAModelManager", "activate_adapter", ("lora_id",), "activations",
                 self._activation_begins, self._activated),
            Hook(ROLE, _MODELS, "LoRAModelManager", "_deactivate_adapter", ("lora_id",), "slot evictions",
                 self._slot_evicted),
            Hook(ROLE, _MODELS, "AdapterLRUCache", "_on_remove", ("key", "value"), "host evictions",
                 self._host_evict_begins, self._host_evicted),
        ]  # fmt: skip

    # Start of the process

    def _init_device(self, wrapper: Any) -> None:
        self._guard.spool.rank = wrapper.global_rank

    def _initialize(self, wrapper: Any, kv_cache_configs: list[Any]) -> Any:
        return kv_cache_configs[wrapper.global_rank]

    def _initialized(self, wrapper: Any, kv: Any, result: Any, error: BaseException | None) -> None:
        self.runner = wrapper.worker.model_runner
        if error is None:
            self._emit(ROLE, "floor", **sizes.floor(wrapper.worker, self._pool_bytes, kv))

    def _allocated(self, manager: Any, token: Any, result: Any, error: BaseException | None) -> None:
        if error is not None:
            return
        self.manager = manager
        self._pool_bytes = sizes.slot_pool_bytes(manager.modules.values())
        self._emit(
            ROLE,
            "slots_allocated",
            slots=manager.lora_slots,
            bytes_per_slot=self._pool_bytes // manager.lora_slots,
            host_entries=manager.capacity,
            max_lora_rank=manager.lora_config.max_lora_rank,
            modules=len(manager.modules),
        )

    # Steps

    def _step_begins(self, wrapper: Any, scheduler_output: Any) -> int:
        self._in_step = True
        self._new = {}
        if not self._cost.since:  # what the start cost is not the cost of steps
            self._cost = Cost(spent_before=self._guard.spent_ns, since=_clock())
        for new in scheduler_output.scheduled_new_reqs:
            adapter = new.lora_request.lora_int_id if new.lora_request is not None else 0
            self._new.setdefault(adapter, []).append(client_id_inside(new.req_id))
        return _clock()

    def _step_ends(self, wrapper: Any, began: int, result: Any, error: BaseException | None) -> None:
        self._in_step = False
        now, cost = _clock(), self._cost
        cost.steps += 1
        cost.step_ns += now - began
        if now - cost.since >= COST_INTERVAL_NS:
            spent = self._guard.spent_ns
            self._emit(ROLE, "worker_cost", steps=cost.steps, step_ns=cost.step_ns, probe_ns=spent - cost.spent_before)
            self._cost = Cost(spent_before=spent, since=now)

    def _apply_begins(self, worker_manager: Any, lora_requests: Iterable[Any]) -> None:
        self._in_apply = True
        self._moves = {}
        self._touched = []
        if self.pins:
            batch = [request.lora_int_id for request in lora_requests]
            self._touched = self.pins.arrange(worker_manager._adapter_manager, batch)

    def _apply_ends(self, worker_manager: Any, token: Any, result: Any, error: BaseException | None) -> None:
        self._in_apply = False
        self._emit_touches()
        if self._new:
            self._emit_accesses()

    def _emit_accesses(self) -> None:
        stall = sum(move.load_ns + move.activation_ns for move in self._moves.values())
        for adapter, requests in self._new.items():
            move = self._moves.get(adapter)
            if move is None and (adapter or not stall):
                continue  # a request of the base model is told only that others' loads held it up
            self._emit(
                ROLE,
                "access",
                id=adapter or None,
                name=self.name_of(adapter) if adapter else None,
                state=move.state if move else "base",
                requests=requests[:MAX_REQUESTS],
                load_ns=move.load_ns if move else 0,
                activation_ns=move.activation_ns if move else 0,
                stall_ns=stall,
            )
        self._new = {}

    def _emit_touches(self) -> None:
        moved = any(move.state != "slot" for move in self._moves.values())
        implied = moved and len(self._touched) == 1  # its activation says already that it is the youngest
        if self._touched and not implied and (moved or self._touched != self._last_touched):
            self._emit(ROLE, "touch", ids=self._touched)
        self._last_touched = self._touched

    # One adapter

    def _add_begins(self, worker_manager: Any, lora_request: Any) -> None:
        adapter, manager = lora_request.lora_int_id, worker_manager._adapter_manager
        if not self._in_apply:
            self._moves = {}
            self._touched = self.pins.arrange(manager, [adapter]) if self.pins else []
        if adapter not in self.known:
            self.known[adapter] = Known(lora_request.lora_name, lora_request.lora_path)
        in_host = adapter in manager._registered_adapters and not lora_request.load_inplace
        state = "miss" if not in_host else "slot" if adapter in manager._active_adapters else "host"
        self._move = self._moves[adapter] = Move(adapter, state)
        self._touched.append(adapter)

    def _add_ends(self, worker_manager: Any, token: Any, result: Any, error: BaseException | None) -> None:
        self._move = None
        if not self._in_apply:
            self._emit_touches()

    def _load_begins(self, worker_manager: Any, lora_request: Any) -> int:
        adapter: int = lora_request.lora_int_id
        move = self._move or Move(adapter, "miss")
        move.requests = self._requests_of(adapter)[:MAX_REQUESTS]
        move.began = _clock()
        self._emit(
            ROLE,
            "load_start",
            id=adapter,
            name=lora_request.lora_name,
            path=lora_request.lora_path[:4096],
            cause=self._cause(),
            requests=move.requests,
            inplace=bool(lora_request.load_inplace),
        )
        return adapter

    def _read(self, worker_manager: Any, adapter: int, result: Any, error: BaseException | None) -> None:
        if self._move is not None:
            self._move.read_ns = _clock() - self._move.began
        if error is not None:
            self._emit_load_error(adapter, "read", error)

    def _insert_begins(self, manager: Any, lora: Any) -> tuple[Any, int]:
        return lora, _clock()

    def _inserted(self, manager: Any, token: tuple[Any, int], result: Any, error: BaseException | None) -> None:
        (lora, began), now, move = token, _clock(), self._move
        if error is not None:
            self._emit_load_error(lora.id, "pack", error)
            return
        known = self.known.setdefault(lora.id, Known(f"id-{lora.id}"))
        known.rank, known.bytes = lora.rank, sizes.adapter_bytes(lora)
        duration = now - (move.began if move and move.began else began)
        if move:
            move.load_ns = duration
        self._emit(
            ROLE,
            "load_end",
            id=lora.id,
            name=known.name,
            path=known.path[:4096],
            lora_rank=known.rank,
            bytes=known.bytes,
            modules=len(lora.loras),
            dur_ns=duration,
            read_ns=move.read_ns if move else None,
            cause=self._cause() if move else "warmup",
            requests=move.requests if move else [],
        )

    def _emit_load_error(self, adapter: int, phase: str, error: BaseException) -> None:
        self._emit(
            ROLE,
            "load_error",
            id=adapter,
            name=self.name_of(adapter),
            phase=phase,
            error=f"{type(error).__name__}: {error}"[:500],
            cause=self._cause(),
            requests=self._move.requests if self._move else [],
        )
        if self.manager is not None and adapter not in self.manager._registered_adapters:
            self.known.pop(adapter, None)

    def _activation_begins(self, manager: Any, lora_id: int) -> tuple[int, int, int] | None:
        if lora_id in manager._active_adapters or None not in manager.lora_index_to_id:
            return None
        slot = manager.lora_index_to_id.index(None)
        if lora_id in manager._registered_adapters:  # else vLLM fails before it writes the slot map
            self._emit(
                ROLE,
                "activation_start",
                slot=slot,
                id=lora_id,
                name=self.name_of(lora_id),
                cause=self._cause() if self._move else "warmup",
                requests=self._requests_of(lora_id)[:MAX_REQUESTS],
            )
        return slot, lora_id, _clock()

    def _activated(
        self, manager: Any, token: tuple[int, int, int] | None, result: Any, error: BaseException | None
    ) -> None:
        if token is None:
            return
        slot, adapter, began = token
        duration = _clock() - began
        if self._move is not None:
            self._move.activation_ns = duration
        fields = {"slot": slot, "id": adapter, "name": self.name_of(adapter), "dur_ns": duration}
        if error is None:
            self._emit(ROLE, "activation_end", **fields)
        else:
            self._emit(ROLE, "activation_error", **fields, error=f"{type(error).__name__}: {error}"[:500])

    # Evictions

    def _slot_evicted(self, manager: Any, lora_id: int) -> None:
        if lora_id in manager.lora_index_to_id:
            slot = manager.lora_index_to_id.index(lora_id)
            cause = self._eviction_cause(lora_id)
            name = self.name_of(lora_id)
            self._emit(ROLE, "slot_evict", slot=slot, id=lora_id, name=name, cause=cause, by=self._by())
            if self.pins.drop(lora_id):
                self._emit(ROLE, "pin_lost", id=lora_id, name=name, cause=cause, by=self._by())

    def _host_evict_begins(self, cache: Any, key: int, value: Any) -> tuple[int, str] | None:
        if value is None:  # the cache of slots, whose values are None
            return None
        cause = self._eviction_cause(key)
        known = self.known.get(key)
        self._emit(
            ROLE,
            "host_evict",
            id=key,
            name=self.name_of(key),
            bytes=known.bytes if known else None,
            cause=cause,
            by=self._by(),
        )
        before, self._removal = self._removal, "host_evict"
        return key, before

    def _host_evicted(
        self, cache: Any, token: tuple[int, str] | None, result: Any, error: BaseException | None
    ) -> None:
        if token is not None:
            key, self._removal = token
            if self._move is None or self._move.id != key:  # else it is being loaded anew
                self.known.pop(key, None)

    def _eviction_cause(self, adapter: int) -> str:
        if self._removal:
            return self._removal
        if self._move is None:
            return "other"
        return "reload" if self._move.id == adapter else "lru"

    def _remove_begins(self, worker_manager: Any, adapter_id: int) -> None:
        self._removal = "remove"

    def _reset_begins(self, worker_manager: Any) -> None:
        self._removal = "reset"

    def _removed(self, worker_manager: Any, token: Any, result: Any, error: BaseException | None) -> None:
        self._removal = ""

    def _dummy(self, worker_manager: Any, lora_request: Any, rank: int) -> None:
        self.known[lora_request.lora_int_id] = Known(lora_request.lora_name)

    # Small answers

    def _by(self) -> int | None:
        return self._move.id if self._move else None

    def _cause(self) -> str:
        return "step" if self._in_step else "rpc"

    def name_of(self, adapter: int) -> str | None:
        """Return the name of a resident adapter."""
        known = self.known.get(adapter)
        return known.name if known else None

    def _requests_of(self, adapter: int) -> list[str]:
        """Return client ids of the requests for which a step moves this adapter; looked up only when one is moved."""
        if not self._in_step:
            return []
        return self._new.get(adapter) or [client_id_inside(request) for request in self.running().get(adapter, ())]

    def protects_pins(self) -> bool:
        """Whether batches are arranged such that pins can neither be lost without need nor starve a batch."""
        return self._guard.works("LRUCacheWorkerLoRAManager._apply_adapters")

    def running(self) -> dict[int, set[str]]:
        """Return adapter id -> internal ids of requests in the worker's batch, in either of vLLM's model runners."""
        batch = getattr(self.runner, "input_batch", None)
        found: dict[int, set[str]] | None = getattr(batch, "lora_id_to_request_ids", None)
        if found is not None:
            return found
        by_id: dict[int, set[str]] = {}
        for request, lora in getattr(getattr(self.runner, "lora_state", None), "lora_requests", {}).items():
            by_id.setdefault(lora.lora_int_id, set()).add(request)
        return by_id
