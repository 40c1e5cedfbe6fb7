"""``loraledger adapters inspect``: what adapters on disk are, what they cost on each tier, and whether an engine applies them.

Nothing is loaded and no engine is asked: folders are read by their headers and judged against the flags that an engine is
started with and, where ``--base`` says where it lies, the base model's shapes. A path that leads to no adapter and a folder that
cannot be read are named on stderr while all others are still reported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from loraledger.cli.engine_flags import (
    DtypeOption,
    ExpertOption,
    LoraDtypeOption,
    ShardedOption,
    TargetsOption,
    check_flags,
    listed,
)
from loraledger.cli.options import JsonOption, load_settings
from loraledger.cli.output import print_json
from loraledger.errors import InputFileError, ObjectiveError

if TYPE_CHECKING:
    from loraledger.adapters.sizing.basemodel import BaseModel
    from loraledger.adapters.sizing.engine import EngineSettings
    from loraledger.adapters.survey import Place, Totals, Unreadable

PROGRESS_FROM = 50
"""Folders; fewer are read before a bar could be looked at."""

_MAX_NAMES = 16 * 2**20
"""Bytes of a file of module names."""


BaseOption = Annotated[
    Path | None,
    typer.Option(
        "--base",
        help="Folder of the base model (config.json), or a text file of the module names that an engine serves.",
    ),
]
FlagsFrom = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Take base.path and the first replica's flags from this settings file."),
]


def inspect(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Adapter folders, or folders of such folders.")
    ],
    base: BaseOption = None,
    engine: Annotated[Literal["vllm", "sglang", "lorax", "slora"] | None, typer.Option(help="Default: vllm.")] = None,
    max_loras: Annotated[int | None, typer.Option(min=1, help="Slots. Default: 1, as the engine's.")] = None,
    max_lora_rank: Annotated[int | None, typer.Option(min=1, help="Default: 16, as the engine's.")] = None,
    max_cpu_loras: Annotated[int | None, typer.Option(min=1, help="Host cache entries. Default: max_loras.")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tp", min=1, help="Rank processes that share the model. Default: 1.")
    ] = None,
    fully_sharded_loras: ShardedOption = None,
    expert_parallel: ExpertOption = None,
    lora_target_modules: TargetsOption = None,
    lora_dtype: LoraDtypeOption = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="Default: auto, the base model's.")] = None,
    dtype: DtypeOption = None,
    config: FlagsFrom = None,
    as_json: JsonOption = False,
) -> None:
    """Say what adapters are, what they cost on disk, host and GPU, and whether the engine will apply them.

    Exit code 3: something cannot be read; 5: an adapter would be refused, or loaded without changing an answer.
    """
    given = {
        "engine": engine,
        "max_loras": max_loras,
        "max_lora_rank": max_lora_rank,
        "max_cpu_loras": max_cpu_loras,
        "tensor_parallel": tensor_parallel,
        "fully_sharded_loras": fully_sharded_loras,
        "expert_parallel": expert_parallel,
        "lora_target_modules": listed(lora_target_modules),
        "lora_dtype": lora_dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "dtype": dtype,
    }
    flags, base = _from_settings(config, base)
    flags = replace(flags, **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    check_flags(flags)
    _inspect(paths, None if base is None else _read_base(base), flags, as_json)


def _from_settings(config: Path | None, base: Path | None) -> tuple[EngineSettings, Path | None]:
    from loraledger.adapters.sizing.engine import EngineSettings

    if config is None:
        return EngineSettings(), base
    from loraledger.adapters.catalog import engine_settings

    settings = load_settings(config).settings
    return engine_settings(settings.replicas[0]), base or settings.base.path


def _read_base(path: Path) -> BaseModel:
    from loraledger.adapters.sizing.base import read_base
    from loraledger.adapters.sizing.basemodel import served_modules

    try:
        if not path.is_file():
            return read_base(path)
        with path.open("rb") as stream:
            text = stream.read(_MAX_NAMES)
        return served_modules(text.decode(errors="replace"), path.name)
    except OSError as error:
        raise InputFileError(f"--base: {path} cannot be read: {error.strerror}") from error
    except InputFileError as error:
        raise InputFileError(f"--base: {path}: {error.message}") from error


def _inspect(paths: Iterable[Path], base: BaseModel | None, flags: EngineSettings, as_json: bool) -> None:
    from loraledger.adapters.survey import Unreadable, find, slots_of, sum_up, survey
    from loraledger.cli.adapters.document import document
    from loraledger.cli.adapters.report import complaint, print_report

    slots = slots_of(base, flags)  # before any folder: a base that cannot be cut so is an error of its own
    places, problems = find(paths)
    rows = list(survey(_with_progress(places), base, flags))
    totals = sum_up(rows, flags)
    if as_json:
        print_json("inspection", document(rows, problems, totals, slots, base, flags))
    elif rows:
        print_report(rows, totals, slots, base, flags)
        sys.stdout.flush()
    bad = [*problems, *(row for row in rows if isinstance(row, Unreadable))]
    for item in bad:
        print(f"loraledger: {complaint(item)}", file=sys.stderr)
    _judge(totals, bad)


def _with_progress(places: Sequence[Place]) -> Iterable[Place]:
    if len(places) <= PROGRESS_FROM or not sys.stderr.isatty():
        return places
    from rich.console import Console
    from rich.progress import track

    return track(places, description="reading", console=Console(stderr=True), transient=True)


def _judge(totals: Totals, bad: Sequence[Unreadable]) -> None:
    if bad:
        raise InputFileError(f"{len(bad)} could not be read")
    refused, useless = totals.outcomes["refused"], totals.outcomes["changes_nothing"]
    if refused or useless:
        raise ObjectiveError(f"{refused} of {totals.outcomes.total()} adapters refused, {useless} would change nothing")
