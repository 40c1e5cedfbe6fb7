"""``loraledger adapters``: what adapters are and cost, whether they do anything, and taking in new ones."""

from __future__ import annotations

import typer

from loraledger.cli.adapters import inspect, rescan, smoke

app = typer.Typer(help="Look at adapters on disk, try one out, take in new ones.", no_args_is_help=True)
app.command("inspect")(inspect.inspect)
app.command("smoke")(smoke.smoke)
app.command("rescan")(rescan.rescan)
