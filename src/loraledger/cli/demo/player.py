"""Plays the workload through the gateway, open loop: each call leaves at its recorded time, however the ones before it fare.

One connection a call and no parsing of the stream: at 50 calls a second of 200 tokens each, a client that parses events would cost
more than the gateway under show.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx2

from loraledger.cli.demo.fleet import DemoFleet
from loraledger.cli.demo.workload import Call

FILLER = "tell me more about that, please. "
REFRESH_S = 0.5


class Progress:
    """What the player has seen so far."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.sent = 0
        self.ended: Counter[str] = Counter()
        self.began = time.monotonic()


async def play(fleet: DemoFleet, workload: list[Call], speed: float) -> None:
    """Send all calls and wait for their ends, showing the fleet meanwhile."""
    progress = Progress(len(workload))
    show = asyncio.create_task(_show(fleet, progress))
    port = int(fleet.url.rpartition(":")[2])
    calls = set()
    for call in workload:
        await asyncio.sleep(max(0.0, progress.began + call.at / speed - time.monotonic()))
        task = asyncio.create_task(_send(port, call, progress))
        calls.add(task)
        task.add_done_callback(calls.discard)
        progress.sent += 1
    if calls:
        await asyncio.wait(calls, timeout=60)
    show.cancel()
    with suppress(asyncio.CancelledError):
        await show


async def _send(port: int, call: Call, progress: Progress) -> None:
    # The emulator counts four bytes a token; so does the prompt that is made here.
    prompt = (FILLER * (call.prompt_tokens * 4 // len(FILLER) + 1))[: max(4, call.prompt_tokens * 4 - 64)]
    body = json.dumps(
        {
            "model": call.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": call.generated_tokens,
            "stream": True,
        }
    )
    outcome = await streamed(port, "/v1/chat/completions", call.tenant.key, body)
    progress.ended[outcome] += 1


async def streamed(port: int, path: str, key: str, body: str) -> str:
    """Send a streaming request and read its answer to the end with as little work as can be: ``ok``, the HTTP status of another
    answer, ``cut``, or the name of an error of the connection."""
    content = body.encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: loraledger\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    ).encode()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + content)
        tail = first = b""
        while data := await reader.read(65536):
            first = first or data
            tail = (tail + data)[-64:]
        writer.close()
    except OSError as error:
        return type(error).__name__
    if b"[DONE]" in tail:
        return "ok"
    return first.split(b" ", 2)[1].decode() if first else "cut"


async def _show(fleet: DemoFleet, progress: Progress) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    async with httpx2.AsyncClient(timeout=2.0, trust_env=False) as client:
        if not console.is_terminal:
            while True:
                await asyncio.sleep(5.0)
                print(_line(progress), file=sys.stderr)
        with Live(console=console, refresh_per_second=4) as live:
            while True:
                reply = await client.get(f"{fleet.control_url}/api/replicas")
                live.update(_table(progress, reply.json()["replicas"]))
                await asyncio.sleep(REFRESH_S)


def _line(progress: Progress) -> str:
    done = sum(progress.ended.values())
    others = ", ".join(f"{name} {count}" for name, count in progress.ended.items() if name != "ok")
    return (
        f"{time.monotonic() - progress.began:5.1f} s: {progress.sent}/{progress.total} sent, {done} ended, "
        f"{progress.sent - done} open" + (f" ({others})" if others else "")
    )


def _table(progress: Progress, replicas: list[dict[str, Any]]) -> Any:  # noqa: ANN401 - a rich renderable
    from rich.table import Table

    table = Table(title=_line(progress), box=None, title_justify="left")
    for column in ("replica", "in flight", "waiting", "KV", "slots used", "held in slots"):
        table.add_column(column)
    for replica in replicas:
        held = [a["adapter"] for a in replica["adapters"] if a["tier"]["value"] == "gpu"]
        usage = replica["kv_usage"]["value"]
        table.add_row(
            replica["name"],
            str(replica["in_flight"]["value"]),
            str(replica["waiting"]["value"]),
            "-" if usage is None else f"{usage:.0%}",
            f"{replica['slots_used']['value']}/{replica['slots']}",
            ", ".join(held),
        )
    return table
