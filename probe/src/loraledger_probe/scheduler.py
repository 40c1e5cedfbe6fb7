"""What the engine core sees: steps, requests that wait for a slot, preemptions, KV blocks.

vLLM's scheduler puts at most ``max_loras`` distinct adapters into a step and skips a request whose adapter would be one
more. It keeps no count of those; they are found here after each step in which something was deferred.

Steps are summed and emitted every `INTERVAL_NS`, or when the engine falls idle: 20 events a second at most, however fast it
steps. With asynchronous scheduling a step is planned while the one before still runs; its duration counts from the end of
that one.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from loraledger_probe.guard import Guard, Hook

ROLE = "core"
INTERVAL_NS = 50_000_000
PREEMPTED_LIMIT = 65_536
_MODULE = "vllm.v1.core.sched.scheduler"
_clock = time.perf_counter_ns


@dataclass(slots=True)
class Window:
    """Sums since the last ``step`` event."""

    since: int
    n: int = 0
    tokens: int = 0
    dur_ns: int = 0
    preempted: int = 0
    recomputed_tokens: int = 0
    blocked_steps: int = 0
    blocked: Counter[str] = field(default_factory=Counter)


class SchedulerProbe:
    """State and hooks of the engine core process."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._emit = guard.spool.emit
        self._planned: deque[tuple[int, int]] = deque(maxlen=64)
        self._ended = 0
        self._spent_before = 0
        self._window = Window(_clock())
        self._preempted: dict[str, int] = {}  # request -> tokens whose KV blocks it lost

    def hooks(self) -> list[Hook]:
        """Return the hooks of the engine core."""
        return [
            Hook(ROLE, _MODULE, "Scheduler", "__init__", ("vllm_config",), "kv before the first step", None, self._made),
            Hook(ROLE, _MODULE, "Scheduler", "schedule", (), "step", None, self._scheduled),
            Hook(ROLE, _MODULE, "Scheduler", "update_from_output", ("scheduler_output",), "step",
                 self._update_begins, self._updated),
            Hook(ROLE, _MODULE, "Scheduler", "_preempt_request", ("request",), "preempted, recomputed_tokens",
                 self._preempt),
        ]  # fmt: skip

    def _made(self, scheduler: Any, token: Any, result: Any, error: BaseException | None) -> None:
        if error is None:
            pool = scheduler.kv_cache_manager.block_pool
            self._emit(
                ROLE,
                "kv",
                kv_total=pool.num_gpu_blocks,
                kv_free=pool.get_num_free_blocks(),
                block_tokens=scheduler.block_size,
            )

    def _scheduled(self, scheduler: Any, token: Any, plan: Any, error: BaseException | None) -> None:
        if error is not None:
            return
        self._planned.append((_clock(), plan.total_num_scheduled_tokens))
        if self._preempted:
            self._count_recomputed(scheduler, plan)
        if scheduler.deferred_waiting:
            self._count_blocked(scheduler)

    def _count_blocked(self, scheduler: Any) -> None:
        config = scheduler.lora_config
        if config is None:
            return
        held = {request.lora_request.lora_int_id for request in scheduler.running if request.lora_request}
        if len(held) < config.max_loras:
            return
        now: Counter[str] = Counter()
        for request in scheduler.deferred_waiting:
            if request.lora_request and request.lora_request.lora_int_id not in held:
                now[request.lora_request.lora_name] += 1
        if now:
            self._window.blocked_steps += 1
            self._window.blocked |= now

    def _preempt(self, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        self._window.preempted += 1
        if len(self._preempted) < PREEMPTED_LIMIT:
            self._preempted[request.request_id] = request.num_computed_tokens

    def _count_recomputed(self, scheduler: Any, plan: Any) -> None:
        """Count what a preempted request has to compute again: what it lost, less what the prefix cache gave back."""
        for request_id, lost in list(self._preempted.items()):
            request = scheduler.requests.get(request_id)
            if request is None:
                del self._preempted[request_id]
            elif request_id in plan.num_scheduled_tokens:
                kept = request.num_computed_tokens - plan.num_scheduled_tokens[request_id]
                self._window.recomputed_tokens += max(0, lost - kept)
                del self._preempted[request_id]

    def _update_begins(self, scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> None:
        now = _clock()
        planned, tokens = self._planned.popleft() if self._planned else (now, 0)
        if tokens:
            self._window.n += 1
            self._window.tokens += tokens
            self._window.dur_ns += now - max(planned, self._ended)
        self._ended = now

    def _updated(self, scheduler: Any, token: Any, result: Any, error: BaseException | None) -> None:
        window, now = self._window, _clock()
        if not window.n or (now - window.since < INTERVAL_NS and scheduler.running):
            return
        pool, spent = scheduler.kv_cache_manager.block_pool, self._guard.spent_ns
        running, waiting = scheduler.get_request_counts()
        self._emit(
            ROLE,
            "step",
            steps=window.n,
            tokens=window.tokens,
            dur_ns=window.dur_ns,
            adapters=len({r.lora_request.lora_int_id for r in scheduler.running if r.lora_request}),
            running=running,
            waiting=waiting,
            blocked=dict(window.blocked),
            blocked_steps=window.blocked_steps,
            preempted=window.preempted,
            recomputed_tokens=window.recomputed_tokens,
            kv_free=pool.get_num_free_blocks(),
            kv_total=pool.num_gpu_blocks,
            block_tokens=scheduler.block_size,
            probe_ns=spent - self._spent_before,
        )
        self._spent_before = spent
        self._window = Window(now)
