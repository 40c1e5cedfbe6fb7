"""``loraledger emulate``: one emulated replica, a twin on the wall clock behind vLLM's HTTP API."""

from __future__ import annotations

from typing import Annotated

import typer


def emulate(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    slots: Annotated[int, typer.Option(help="Adapter slots (max_loras).")] = 4,
    host_entries: Annotated[int, typer.Option(help="Adapters in the host cache (max_cpu_loras).")] = 16,
    max_rank: Annotated[int, typer.Option(help="Largest rank (max_lora_rank).")] = 64,
    speed: Annotated[float, typer.Option(help="How many times faster than the twin's own time it runs.")] = 1.0,
) -> None:
    """Run one emulated replica until interrupted. It needs no GPU and no model: a stand-in to try a configuration against."""
    import asyncio

    import uvloop

    from loraledger.engines.emulator import EmulatorSettings, serve_emulator
    from loraledger.twin.profile import TwinProfile

    try:
        profile = TwinProfile(slots=slots, host_entries=host_entries, max_rank=max_rank)
        settings = EmulatorSettings(host=host, port=port, profile=profile, speed=speed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_emulator(settings))
