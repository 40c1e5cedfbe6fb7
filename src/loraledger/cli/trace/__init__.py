"""``loraledger trace``: make, take in, pass on and look at traces, which a replay plays."""

from __future__ import annotations

import typer

from loraledger.cli.trace import describing, exchanging, generating

app = typer.Typer(
    help="Generate, import, export and describe traces: what arrived when, for which adapter.", no_args_is_help=True
)
app.command("generate")(generating.generate)
app.command("import")(exchanging.import_)
app.command("export")(exchanging.export)
app.command("describe")(describing.describe)
