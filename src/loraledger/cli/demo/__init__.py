"""``loraledger demo``: the main job on an embedded fleet, with real traffic, in under two minutes.

Two emulated replicas (twins on the wall clock behind vLLM's HTTP API) and one real gateway run as processes of their own; ten
minutes of the Azure 2023 conversation trace are played through them. Nothing is mocked between client and replica: the same
gateway, kernel and record serve real engines.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer


def _known_policy(name: str) -> str:
    from loraledger.kernel.policies import policy_names

    if name not in policy_names():
        raise typer.BadParameter(f"there is no policy {name!r}; known: {', '.join(policy_names())}")
    return name


def demo(
    speed: Annotated[float, typer.Option(min=0.5, max=20.0, help="How many times faster than recorded.")] = 10.0,
    seconds: Annotated[float, typer.Option(min=5.0, max=600.0, help="How much of the trace, in trace time.")] = 600.0,
    policy: Annotated[str, typer.Option(help="Routing policy.", callback=_known_policy)] = "bounded-affinity",
    keep: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Put settings, adapters and record here, and keep them. Default: a temporary folder."
        ),
    ] = None,
) -> None:
    """Play a recorded conversation trace through a gateway and two emulated replicas, then show what was found."""
    import asyncio

    from loraledger.cli.demo.fleet import DemoFleet
    from loraledger.cli.demo.player import play
    from loraledger.cli.demo.report import report
    from loraledger.cli.demo.workload import load_workload

    with tempfile.TemporaryDirectory(prefix="loraledger-demo-") as temporary:
        folder = temporary if keep is None else str(keep.absolute())
        print(
            "loraledger demo: 2 emulated replicas with 4 slots each, 24 adapters of rank 8 to 64, 3 tenants\n"
            f"(files in {folder}; the emulated engines run {speed:g} times as fast as real ones, times shown are wall clock)",
            file=sys.stderr,
        )
        with DemoFleet(Path(folder), policy, speed) as fleet:
            workload = load_workload(seconds, fleet.tenants)
            print(
                f"playing {len(workload)} requests of the Azure 2023 conversation trace at {speed:g}x "
                f"({seconds / speed:.0f} s) through {fleet.url}",
                file=sys.stderr,
            )
            asyncio.run(play(fleet, workload, speed))
        report(Path(folder) / "record", keep is not None)
