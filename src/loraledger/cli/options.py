"""Options that several verbs share, how typed values are read, and the exit code of what a signal ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from loraledger.cli.output import printable
from loraledger.units import parse_duration

if TYPE_CHECKING:
    from loraledger.config import Loaded

T = TypeVar("T")

STOPPED: Final = 143
"""Exit code after SIGTERM, as shells have it; 130 after Ctrl-C."""

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


def as_option(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` for an option: its ``ValueError`` is a usage error."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return read


@contextmanager
def usage() -> Iterator[None]:
    """A ``ValueError`` is a usage error, said in one line: what it is about came from the command line.

    Not a ``BadParameter``: the library would fold it into a box, and nobody can search for or copy a folded line.
    """
    try:
        yield
    except ValueError as error:
        print(f"loraledger: {printable(str(error))}", file=sys.stderr)
        raise typer.Exit(2) from error


DurationType = as_option(parse_duration)
