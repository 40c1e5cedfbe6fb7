"""An engine that does what a test tells it: vLLM's control routes on a real socket, killed and restarted at will.

Replies have the shapes of vLLM 0.32. Answers can be delayed or replaced per path; every call is recorded.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

Answer = tuple[int, object]
HINT = "If you want to load the adapter in place, set 'load_inplace' to True."


@dataclass
class ScriptedEngine:
    process_start: float | None = 1_792_700_010.25
    registered: dict[str, str] = field(default_factory=dict)
    api_key: str | None = None
    runtime_updates: bool = True
    max_loras: int = 4
    engines: int = 1
    running: int = 0
    lora_lines: list[str] = field(default_factory=list)
    delays: dict[str, float] = field(default_factory=dict)
    """Seconds per path before the engine acts on a call."""
    lags: dict[str, float] = field(default_factory=dict)
    """Seconds per path between the act and its answer, which may be stale by then."""
    answers: dict[str, Answer] = field(default_factory=dict)
    calls: list[tuple[str, Any, bool]] = field(default_factory=list)
    """(path, body, whether it carried a key) of each call, in order of arrival."""
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """End as a killed process does: the port refuses, open connections break."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def restart(self, process_start: float) -> None:
        """Another process on the same port: its adapters are gone."""
        await self.kill()
        self.process_start, self.registered = process_start, {}
        await self.start()

    def count(self, path: str) -> int:
        return sum(called == path for called, _, _ in self.calls)

    async def called(self, path: str, times: int) -> None:
        """Wait until it was, so often since the start."""
        async with asyncio.timeout(20):
            while self.count(path) < times:
                await asyncio.sleep(0.01)

    def bodies(self, path: str) -> list[Any]:
        return [body for called, body, _ in self.calls if called == path]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                path = head[0].split(" ")[1]
                headers = {
                    line.split(":")[0].lower(): line.split(":", 1)[1].strip() for line in head[1:] if ":" in line
                }
                raw = await reader.readexactly(int(headers.get("content-length", "0")))
                body = json.loads(raw) if raw else None
                self.calls.append((path, body, "authorization" in headers))
                await asyncio.sleep(self.delays.get(path, 0.0))
                status, said = self._answer(path, body, headers.get("authorization"))
                await asyncio.sleep(self.lags.get(path, 0.0))
                await self._write(writer, status, said)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter, status: int, said: object) -> None:
        text = said if isinstance(said, str) else json.dumps(said)
        data = text.encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)
        await writer.drain()

    def _answer(self, path: str, body: Any, authorization: str | None) -> Answer:
        guarded = path.startswith("/v1") and self.api_key is not None
        if guarded and authorization != f"Bearer {self.api_key}":
            return 401, {"error": "Unauthorized"}
        if path in self.answers:
            return self.answers[path]
        if path == "/health":
            return 200, ""
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path == "/metrics":
            return 200, self._metrics()
        if path == "/v1/models":
            return 200, self._models()
        if self.runtime_updates and path == "/v1/load_lora_adapter":
            return self._load(body)
        if self.runtime_updates and path == "/v1/unload_lora_adapter":
            return self._unload(body)
        return 404, {"detail": "Not Found"}

    def _models(self) -> object:
        base = {"id": "acme/base", "object": "model", "root": "/models/base", "parent": None}
        adapters = [{"id": name, "root": path, "parent": "acme/base"} for name, path in self.registered.items()]
        return {"object": "list", "data": [base, *adapters]}

    def _load(self, body: Any) -> Answer:
        if "lora_name" not in body or "lora_path" not in body:
            return 400, error("1 validation error:\n  {'type': 'missing', 'loc': 'body.lora_name'}", "Bad Request", 400)
        name = body["lora_name"]
        if name in self.registered:
            return 400, error(f"The lora adapter '{name}' has already been loaded. {HINT}", "InvalidUserInput", 400)
        self.registered[name] = body["lora_path"]
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unload(self, body: Any) -> Answer:
        name = body["lora_name"]
        if self.registered.pop(name, None) is None:
            return 404, error(f"The lora adapter '{name}' cannot be found.", "NotFoundError", 404)
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def _metrics(self) -> str:
        lines = [] if self.process_start is None else [f"process_start_time_seconds {self.process_start}"]
        for engine in range(self.engines):
            label = f'{{engine="{engine}",model_name="acme/base"}}'
            lines.append(f"vllm:num_requests_running{label} {self.running}.0")
            lines.append(f"vllm:num_requests_waiting{label} 1.0")
            lines.append(f"vllm:kv_cache_usage_perc{label} 0.25")
            lines.append(f'vllm:cache_config_info{{block_size="16",engine="{engine}",num_gpu_blocks="1000"}} 1.0')
        return "\n".join([*lines, "# TYPE vllm:lora_requests_info gauge", *self.lora_lines, ""])


def error(message: str, kind: str, code: int) -> object:
    """vLLM's error body."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
