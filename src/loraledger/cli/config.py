"""``loraledger config``: the settings in force, and what there is to set."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from loraledger.cli.options import ConfigOption, JsonOption, load_settings
from loraledger.cli.output import print_json, print_table

app = typer.Typer(help="Show the settings in force, or their schema.", no_args_is_help=True)


@app.command("show")
def show(
    config: ConfigOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every setting in force. Secrets are references and stay so."""
    shown = load_settings(config).shown()
    items = [{"setting": path, "value": value, "origin": str(where)} for path, value, where in shown]
    if as_json:
        print_json("settings", items)
        return
    columns = ["setting", "value", "origin"] if origin else ["setting", "value"]
    print_table(columns, [[item[column] for column in columns] for item in items])


@app.command("schema")
def schema() -> None:
    """Print the JSON Schema of ``loraledger.yaml``, for editors."""
    import json

    from loraledger.config import json_schema

    json.dump(json_schema(), sys.stdout, indent=2)
    print()
