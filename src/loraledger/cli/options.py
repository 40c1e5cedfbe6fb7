"""Options that several verbs share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from loraledger.config import Loaded

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Settings file. Default: $LORALEDGER_CONFIG, then ./loraledger.yaml."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
RecordOption = Annotated[
    Path | None, typer.Option("--record", help="Record directory. Default: record.dir of the settings.")
]


def load_settings(config: Path | None) -> Loaded:
    """The settings that the options and the environment name. Raises ``ConfigError``."""
    from loraledger.config import load

    return load(config, env=os.environ)


def record_directory(record: Path | None, config: Path | None) -> Path:
    """The record directory: the option, else what the settings say."""
    return record if record is not None else load_settings(config).settings.record.dir
