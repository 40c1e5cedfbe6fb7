"""The HTTP routes of the probe, beside vLLM's own, behind a key of their own.

Without a configured key every route answers 403: what is not opened on purpose stays closed. vLLM's ``--api-key`` guards
``/v1`` only and does not apply here. Keys are compared in constant time. Names and ids of tenants' adapters and requests are
visible to whoever has the key; prompts and answers never pass through the probe.

Errors are shaped like vLLM's, with a stable ``code``.
"""

from __future__ import annotations

import hmac
import time
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraledger_probe import __version__, settings
from loraledger_probe.commands import VERBS, Engine
from loraledger_probe.guard import Guard
from loraledger_probe.hub import Hub
from loraledger_probe.rpc import RefusedError

if TYPE_CHECKING:
    from starlette.applications import Starlette

PAGE_LIMIT = 10_000
WAIT_LIMIT_S = 10.0
STATUS = {"unknown_adapter": 404, "no_lora": 409, "probe_fault": 500}
"""HTTP status of a refusal by its code; 409 for every other."""


class AnswerError(Exception):
    """An answer that is an error: HTTP status, stable code, message, and further fields of the body."""

    def __init__(self, status: int, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.code, self.more = status, code, more


class Endpoints:
    """vLLM's endpoint plugin: `attach_router` while the app is built, `init_state` once the engine is up."""

    name = settings.NAME
    required_tasks = None

    def __init__(self, found: settings.Settings, guard: Guard) -> None:
        self._settings = found
        self._guard = guard
        self._engine: Engine | None = None
        self._hub: Hub | None = None
        self._problem = AnswerError(503, "no_engine", "this server has no engine of its own")

    def attach_router(self, app: Starlette) -> None:
        """Add the routes."""
        app.add_route("/loraledger/residency", self._residency, methods=["GET"])
        app.add_route("/loraledger/events", self._events, methods=["GET"])
        app.add_route("/loraledger/adapters/{name:path}/{verb}", self._command, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take the engine, and begin to read events."""
        if engine_client is None:
            return
        if engine_client.vllm_config.parallel_config.data_parallel_size > 1:
            message = "the probe does not know data parallelism: run one server per replica"
            self._problem = AnswerError(503, "data_parallel", message)
            return
        self._engine = Engine(engine_client, state.openai_serving_models)
        if self._engine.in_flight() is None:
            self._guard.note("api", "OutputProcessor.request_states", "not found", "in_flight, activate, pin")
        self._hub = Hub(self._settings, self._guard.spool)
        self._hub.start()

    async def _residency(self, request: Request) -> Response:
        return await self._answer(request, self._snapshot)

    async def _events(self, request: Request) -> Response:
        return await self._answer(request, self._page)

    async def _command(self, request: Request) -> Response:
        return await self._answer(request, self._do)

    async def _answer(self, request: Request, make: Any) -> Response:
        """The one edge where every failure becomes an answer."""
        try:
            self._check_key(request)
            return Response(await make(request), media_type="application/json")
        except AnswerError as problem:
            return _error(problem)
        except RefusedError as refused:
            return _error(AnswerError(STATUS.get(refused.code, 409), refused.code, str(refused)))
        except Exception as error:  # noqa: BLE001  (the engine may be gone, which vLLM reports in several ways)
            return _error(AnswerError(503, "engine_unavailable", f"{type(error).__name__}: {error}"[:500]))

    def _check_key(self, request: Request) -> None:
        key = self._settings.key
        if key is None:
            raise AnswerError(403, "no_key_configured", self._settings.key_problem)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode("latin-1"), key.encode()):
            raise AnswerError(401, "wrong_key", "send the probe's key: Authorization: Bearer KEY")

    def _parts(self) -> tuple[Engine, Hub]:
        if self._engine is None or self._hub is None:
            raise self._problem
        if not self._hub.reads:
            raise AnswerError(503, "not_the_reader", "another API server process answers for the probe: run only one")
        return self._engine, self._hub

    async def _page(self, request: Request) -> bytes:
        _, hub = self._parts()
        after = _number(request, "after", 0, 1 << 62, 0)
        limit = _number(request, "limit", 1, PAGE_LIMIT, 1000)
        wait_s = _seconds(request, "wait_s")
        hub.refresh()
        boot = self._settings.boot
        if request.query_params.get("boot", boot) != boot or after > hub.ring.last_seq:
            message = "the engine was restarted: take /loraledger/residency and go on from its seq"
            raise AnswerError(409, "boot_changed", message, boot=boot)
        if wait_s:
            await hub.wait(after, wait_s)
        page = hub.ring.after(after, limit)
        head = {
            "boot": boot,
            "first_seq": hub.ring.first_seq,
            "next_seq": page.next_seq,
            "lost": page.lost,
            "spool_lost": hub.ring.spool_lost,
            "now": {"mono_ns": time.monotonic_ns(), "wall_ns": time.time_ns()},
        }
        return msgspec.json.encode(head)[:-1] + b',"events":[' + b",".join(page.lines) + b"]}"

    async def _snapshot(self, request: Request) -> bytes:
        engine, hub = self._parts()
        workers = await engine.ask("snapshot")
        hub.refresh()
        registered = engine.registered()
        ids = {entry["id"] for entry in registered}
        first = workers[0]
        for entry in (*first["slots"], *first["host"]):
            entry["ghost"] = entry["id"] is not None and entry["id"] not in ids
        ring = hub.ring
        return msgspec.json.encode(
            {
                "schema": 1,
                "boot": self._settings.boot,
                "probe": __version__,
                "vllm": self._guard.version,
                "seq": ring.seq_at({worker["pid"]: worker["n"] for worker in workers}),
                "taken": {"mono_ns": first["mono_ns"], "wall_ns": first["wall_ns"]},
                "slots": first["slots"],
                "slot_order": first["slot_order"],
                "host": first["host"],
                "host_capacity": first["host_capacity"],
                "registered": registered,
                "in_flight": engine.in_flight(),
                "engine_pins": first["engine_pins"],
                "workers": [_worker(worker) for worker in workers],
                "allocated": _newest(ring.newest("slots_allocated")),
                "floor": sorted(ring.newest("floor"), key=lambda event: event["rank"] or 0),
                "kv": _newest(ring.newest("kv") + ring.newest("step")),
                "hooks": ring.newest("hooks"),
                "hook_faults": ring.newest("hook_fault"),
            }
        )

    async def _do(self, request: Request) -> bytes:
        engine, _ = self._parts()
        verb, name = request.path_params["verb"], request.path_params["name"]
        if verb not in VERBS:
            raise AnswerError(404, "unknown_verb", f"the last part of the path must be one of {', '.join(VERBS)}")
        began = time.monotonic_ns()
        try:
            done = await engine.command(verb, name)
        except RefusedError as refused:
            self._record(verb, name, began, refused.code)
            raise
        self._record(verb, name, began, None)
        return msgspec.json.encode({"name": name, "verb": verb, **done})

    def _record(self, verb: str, name: str, began: int, refused: str | None) -> None:
        took = time.monotonic_ns() - began
        fields = {"verb": verb, "name": name, "refused": refused, "dur_ns": took}
        self._guard.run("api", "command", lambda: self._guard.spool.emit("api", "command", **fields))


def _worker(answer: dict[str, Any]) -> dict[str, Any]:
    """Reduce one rank's answer to what a client needs to check and to continue it."""
    return {
        "pid": answer["pid"],
        "rank": answer["rank"],
        "n": answer["n"],
        "slots": [slot["id"] for slot in answer["slots"]],
        "slot_order": answer["slot_order"],
        "host": [entry["id"] for entry in answer["host"]],
        "running": answer["running"],
    }


def _newest(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    return max(events, key=lambda event: event["mono_ns"], default=None)


def _number(request: Request, name: str, low: int, high: int, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise AnswerError(400, "bad_parameter", f"{name} must be a whole number from {low} to {high}")
    return int(text)


def _seconds(request: Request, name: str) -> float:
    try:
        value = float(request.query_params.get(name, "0"))
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= WAIT_LIMIT_S:
        raise AnswerError(400, "bad_parameter", f"{name} must be a number of seconds from 0 to {WAIT_LIMIT_S:.0f}")
    return value


def _error(problem: AnswerError) -> Response:
    body = {"error": {"message": str(problem), "type": "loraledger_probe", "code": problem.code}, **problem.more}
    return Response(msgspec.json.encode(body), problem.status, media_type="application/json")
