"""An emulated replica with a probe in it, which tells of each request how often it was preempted. Run as a process.

It also keeps to itself how much its KV cache holds, so that no gateway spares it: it preempts by itself when it runs full.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextvars import ContextVar
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loraledger.engines.emulator_api import emulator_app
from loraledger.engines.emulator_engine import Answer, EmulatedEngine, EmulatorSettings
from loraledger.engines.emulator_frames import RefusedError
from loraledger.twin.events import Activated, Evicted, Loaded, Preempted, TwinEvent
from loraledger.twin.profile import TwinProfile
from loraledger.twin.replica import ReplicaTwin

PROBE_KEY = "key-of-the-probe"
_REQUEST: ContextVar[str] = ContextVar("request", default="")
Json = dict[str, Any]


class _Overheard:
    """A twin; ``hear`` is told what happens in it."""

    def __init__(self, twin: ReplicaTwin, hear: Any) -> None:
        self._twin = twin
        self._hear = hear

    def advance(self, to: int) -> list[TwinEvent]:
        events = self._twin.advance(to)
        for event in events:
            self._hear(event)
        return events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._twin, name)


class ProbedEngine(EmulatedEngine):
    """Keeps the two lists and the events that a probe has of one rank process."""

    def __init__(self, settings: EmulatorSettings) -> None:
        super().__init__(settings)
        self._twin: Any = _Overheard(self._twin, self._hear)
        self.boot = f"b{time.time_ns()}"
        self.events: list[Json] = []
        self.news = asyncio.Event()
        self._n = 0
        self._ids: dict[str, int] = {}
        self._host: dict[int, str] = {}
        self._active: dict[int, str] = {}
        self._preempted: dict[str, int] = {}
        self._requests: dict[str, str] = {}

    def ask(self, adapter: str | None, prompt_tokens: int, output_tokens: int) -> Answer:
        answer = super().ask(adapter, prompt_tokens, output_tokens)
        self._requests[answer.id] = _REQUEST.get()
        return answer

    def metrics(self) -> str:
        lines = super().metrics().splitlines(keepends=True)
        return "".join(line for line in lines if "cache_config_info" not in line)

    def _end_answer(self, answer_id: str, failure: RefusedError | None) -> None:
        super()._end_answer(answer_id, failure)
        unknown = dict.fromkeys(("queue_ns", "prefill_ns", "decode_ns"))
        preemptions = self._preempted.pop(answer_id, 0)
        request = self._requests.pop(answer_id, None)
        if request is not None:
            self._emit("request_finished", "core", request=request, preemptions=preemptions, **unknown)

    def _hear(self, event: TwinEvent) -> None:
        match event:
            case Preempted():
                self._preempted[event.id] = self._preempted.get(event.id, 0) + 1
            case Loaded():
                self._host[self._id(event.name)] = event.name
                self._move("load_end", event.name, bytes=None, dur_ns=event.took // 1000, cause="step")
            case Activated():
                self._active[self._id(event.name)] = event.name
                self._move("activation_start", event.name, slot=0, cause="step")
                self._move("activation_end", event.name, slot=0, dur_ns=event.took // 1000, cause="step")
            case Evicted():
                held = self._host if event.tier == "host" else self._active
                held.pop(self._id(event.name), None)
                kind = "host_evict" if event.tier == "host" else "slot_evict"
                self._move(kind, event.name, cause=event.cause)
            case _:
                pass

    def _id(self, name: str) -> int:
        return self._ids.setdefault(name, len(self._ids) + 1)

    def _move(self, kind: str, name: str, **fields: Any) -> None:
        self._n += 1
        self._emit(kind, "worker", id=self._id(name), name=name, **fields)

    def _emit(self, kind: str, role: str, **fields: Any) -> None:
        worker = role == "worker"
        head = {"seq": len(self.events) + 1, "n": self._n if worker else 0, "rank": 0 if worker else None}
        self.events.append({**head, "role": role, "kind": kind, **_clocks(), **fields})
        self.news.set()

    def snapshot(self) -> Json:
        host = [{"id": key, "name": name, "bytes": None, "pinned": False} for key, name in self._host.items()]
        worker = {"rank": 0, "n": self._n, "slot_order": list(self._active), "host": list(self._host)}
        slots = {"slots": self.settings.profile.slots, "host_entries": self.settings.profile.host_entries}
        taken = {"boot": self.boot, "seq": len(self.events), "taken": _clocks()}
        return {**taken, "host": host, "workers": [worker], "allocated": slots, "floor": [], "kv": None}


def _clocks() -> Json:
    return {"mono_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}


def probed_app(engine: ProbedEngine) -> ASGIApp:
    """vLLM's routes, and beside them the probe's."""

    def refused(request: Request) -> Response | None:
        if request.headers.get("authorization") == f"Bearer {PROBE_KEY}":
            return None
        return JSONResponse({"error": {"code": "wrong_key", "message": "no"}}, 401)

    async def residency(request: Request) -> Response:
        return refused(request) or JSONResponse(engine.snapshot())

    async def events(request: Request) -> Response:
        after = int(request.query_params["after"])
        deadline = time.monotonic() + float(request.query_params["wait_s"])
        while len(engine.events) <= after and (left := deadline - time.monotonic()) > 0:
            engine.news.clear()
            try:
                await asyncio.wait_for(engine.news.wait(), left)
            except TimeoutError:
                break
        fresh = engine.events[after : after + 500]
        page = {"boot": engine.boot, "next_seq": after + len(fresh), "lost": False, "spool_lost": 0}
        return refused(request) or JSONResponse({**page, "now": _clocks(), "events": fresh})

    inner = emulator_app(engine)

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        _REQUEST.set(Request(scope).headers.get("x-request-id", "") if scope["type"] == "http" else "")
        await inner(scope, receive, send)

    return Starlette(
        routes=[
            Route("/loraledger/residency", residency),
            Route("/loraledger/events", events),
            Mount("/", noting),
        ]
    )


async def _serve(port: int, settings: EmulatorSettings) -> None:
    engine = ProbedEngine(settings)
    config = uvicorn.Config(probed_app(engine), port=port, lifespan="off", access_log=False, log_level="warning")
    working = asyncio.create_task(engine.run())
    await uvicorn.Server(config).serve()
    engine.stop()
    await working


def main() -> None:
    """Take the sizes of an emulator from the command line, and serve."""
    parser = argparse.ArgumentParser()
    for name, default in (
        ("port", 0),
        ("slots", 2),
        ("host-entries", 4),
        ("kv-blocks", 24_576),
        ("max-model-len", 8192),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--speed", type=float, default=1.0)
    given = parser.parse_args()
    profile = TwinProfile(slots=given.slots, host_entries=given.host_entries, kv_blocks=given.kv_blocks)
    settings = EmulatorSettings(profile=profile, speed=given.speed, max_model_len=given.max_model_len)
    asyncio.run(_serve(given.port, settings))


if __name__ == "__main__":
    main()
