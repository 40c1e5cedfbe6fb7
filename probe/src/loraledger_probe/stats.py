"""Finished requests, as vLLM's API server accounts them: one ``request_finished`` event each.

This is vLLM's public interface for statistics. The class must exist and be one of vLLM's loggers even when the probe is
off, as vLLM refuses to start otherwise; then it records nothing. A request that its client gave up has no such statistics.

With PREFILL vLLM books whatever happened between the first step of a request and its first token, the load of its adapter
included; `ring.py` adds what the worker measured of that.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from loraledger_probe.guard import Guard
from loraledger_probe.names import client_id
from loraledger_probe.plugin import process_guard

ROLE = "api"


class StatLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM's classes have no types here
    """Records the end of each request."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._guard: Guard | None = process_guard()
        if self._guard is not None:
            self._guard.note(ROLE, "StatLoggerBase.record", "", "request_finished")

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM for each batch of outputs."""
        if self._guard is not None and iteration_stats is not None and iteration_stats.finished_requests:
            self._guard.run(ROLE, "StatLoggerBase.record", self._finished, iteration_stats.finished_requests)

    def log_engine_initialized(self) -> None:
        """Called by vLLM once the engine is up."""
        if self._guard is not None:
            self._guard.run(ROLE, "StatLoggerBase.record", self._guard.announce, ROLE)

    def _finished(self, finished: list[Any]) -> None:
        assert self._guard is not None
        for request in finished:
            self._guard.spool.emit(
                ROLE,
                "request_finished",
                request=client_id(request.request_id or ""),
                reason=str(request.finish_reason),
                queue_ns=_ns(request.queued_time),
                prefill_ns=_ns(request.prefill_time),
                decode_ns=_ns(request.decode_time),
                e2e_ns=_ns(request.e2e_latency),
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=request.num_cached_tokens,
                generated_tokens=request.num_generation_tokens,
                preemptions=request.num_preemptions,
            )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
