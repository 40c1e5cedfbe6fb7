"""A replica without a GPU: the digital twin on the wall clock, behind vLLM's HTTP API and metric names.

For tests, the demo and rehearsals: whatever speaks to vLLM speaks to it, and it stalls, evicts, starves and dies by the same
rules. What it says is made up (``emulator_text``); how long it takes is the twin's model, on the clock of this machine.

::

    async with EmulatorServer(EmulatorSettings(profile=TwinProfile(slots=4))) as emulator:
        ... emulator.url ...

or ``python -m loraledger.engines.emulator --port 8001 --slots 4``, which writes its address to stdout when it listens. Several
emulators may run in one process; each has its own port, engine and registry.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from types import TracebackType
from typing import Self

import uvicorn
import uvloop

from loraledger.engines.emulator_api import emulator_app
from loraledger.engines.emulator_engine import EmulatedEngine, EmulatorSettings
from loraledger.errors import TargetError
from loraledger.twin.profile import TwinProfile

__all__ = ["EmulatorServer", "EmulatorSettings", "serve_emulator"]


class EmulatorServer:
    """An emulated engine that listens while the ``async with`` block runs. Raises TargetError when its address is taken."""

    def __init__(self, settings: EmulatorSettings) -> None:
        self.settings = settings
        self.engine = EmulatedEngine(settings)
        config = uvicorn.Config(
            emulator_app(self.engine),
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._port = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        return f"http://{self.settings.host}:{self._port}"

    async def __aenter__(self) -> Self:
        host, port = self.settings.host, self.settings.port
        try:
            listener = socket.create_server((host, port), backlog=2048)
        except OSError as error:
            raise TargetError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        # asyncio leaves Nagle's algorithm on here: each first token then waits 40 ms for the acknowledgement of its headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port = listener.getsockname()[1]
        server = self._server
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[listener])
        self._tasks = [
            asyncio.create_task(self._serve(listener)),
            asyncio.create_task(self.engine.run()),
            asyncio.create_task(self._close_on_death()),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.stop()
        self._server.should_exit = True
        await asyncio.gather(*self._tasks)

    async def closed(self) -> None:
        """Wait until the server has ended, which it does by itself only when its engine died."""
        await asyncio.shield(self._tasks[0])

    def kill(self) -> None:
        """End as SIGKILL would: the port refuses from now on, open connections break off."""
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self.engine.stop()

    async def _serve(self, listener: socket.socket) -> None:
        """uvicorn's ``serve`` without its signal handlers, which belong to the program, not to one of several servers."""
        await self._server.main_loop()
        await self._server.shutdown(sockets=[listener])

    async def _close_on_death(self) -> None:
        await self.engine.died.wait()
        if not self.settings.keep_alive_on_death:
            self._server.should_exit = True


async def serve_emulator(settings: EmulatorSettings) -> None:
    """Serve until SIGINT or SIGTERM, or until the engine died with ``keep_alive_on_death`` off."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with EmulatorServer(settings) as emulator:
        sys.stdout.write(f"{emulator.url}\n")
        sys.stdout.flush()
        ends = [asyncio.create_task(stop.wait()), asyncio.create_task(emulator.closed())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()


def main(arguments: list[str] | None = None) -> None:
    """The command line of the emulator."""
    settings = EmulatorSettings()
    profile = settings.profile
    parser = argparse.ArgumentParser(
        prog="python -m loraledger.engines.emulator", description="An emulated vLLM engine."
    )
    add = parser.add_argument
    add("--host", default=settings.host)
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--model", default=settings.model, help="name of the base model")
    add("--slots", type=int, default=profile.slots, help="vLLM's --max-loras")
    add("--host-entries", type=int, help="vLLM's --max-cpu-loras (default: four times the slots)")
    add("--max-rank", type=int, default=profile.max_rank)
    add("--max-seqs", type=int, default=profile.max_seqs)
    add("--token-budget", type=int, default=profile.token_budget, help="vLLM's --max-num-batched-tokens")
    add("--kv-blocks", type=int, default=profile.kv_blocks, help="of 16 tokens each")
    add("--max-model-len", type=int, default=settings.max_model_len)
    add("--api-key")
    add("--no-runtime-updating", action="store_true", help="no routes to load and unload adapters")
    add("--close-on-death", action="store_true", help="close the port when the engine core has died")
    add("--speed", type=float, default=settings.speed, help="emulated seconds per second")
    add("--load-delay", type=float, default=settings.load_delay_s, help="seconds added to each read from disk")
    given = parser.parse_args(arguments)
    try:
        settings = EmulatorSettings(
            host=given.host,
            port=given.port,
            model=given.model,
            profile=TwinProfile(
                slots=given.slots,
                host_entries=given.host_entries or 4 * given.slots,
                max_rank=given.max_rank,
                max_seqs=given.max_seqs,
                token_budget=given.token_budget,
                kv_blocks=given.kv_blocks,
            ),
            max_model_len=given.max_model_len,
            api_key=given.api_key,
            runtime_updating=not given.no_runtime_updating,
            keep_alive_on_death=not given.close_on_death,
            speed=given.speed,
            load_delay_s=given.load_delay,
        )
    except ValueError as error:
        parser.error(str(error))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_emulator(settings))


if __name__ == "__main__":
    main()
