"""``loraledger calibrate``: measure a running engine and write the profile that replays use.

It sends requests of its own, loads adapters under names of its own and unloads them again; all of it slows whoever else the engine
serves, and the engine's tiers are full of its adapters afterwards. So it refuses a busy engine, and is for idle replicas. A SIGTERM
ends it as Ctrl-C does, once its names are unloaded: 143 and 130, as shells have it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraledger.cli.options import STOPPED, DurationType, JsonOption
from loraledger.errors import ConfigError, InputFileError, TargetError
from loraledger.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from loraledger.engines.calibrate.measure import Folder
    from loraledger.engines.calibrate.run import Result
    from loraledger.twin.calibrated import Calibrated

BUDGET_S = 120.0
MOST_ADAPTERS = 256

ModelOption = Annotated[str | None, typer.Option(help="Name of the base model there. Default: the only one served.")]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(help="NAME=PATH of an adapter to measure with, a path that the engine sees too; repeatable."),
]
FolderOption = Annotated[
    Path | None, typer.Option(help="Each sub-folder with an adapter_config.json is an adapter to measure with.")
]
SlotsOption = Annotated[int | None, typer.Option(min=1, help="The engine's --max-loras. Default: as it shows.")]
HostOption = Annotated[int | None, typer.Option(min=1, help="Its --max-cpu-loras. Default: as its probe tells.")]
RankOption = Annotated[int | None, typer.Option(min=1, help="Its --max-lora-rank. Default: as its probe tells.")]
SeqsOption = Annotated[int | None, typer.Option(min=1, help="Its --max-num-seqs. No engine shows it.")]
TokensOption = Annotated[int | None, typer.Option(min=1, help="Its --max-num-batched-tokens. No engine shows it.")]
BudgetOption = Annotated[
    int | None,
    typer.Option(
        parser=DurationType, metavar="TIME", help=f"Longest time that it may measure for. Default: {BUDGET_S:g}s."
    ),
]
KeyOption = Annotated[str | None, typer.Option(help="Environment variable with the engine's API key.")]
ProbeOption = Annotated[str | None, typer.Option(help="Environment variable with the key of the probe in it.")]


def calibrate(
    engine: Annotated[str, typer.Option(help="http://HOST:PORT of the engine itself, not of a gateway.")],
    model: ModelOption = None,
    adapter: AdapterOption = None,
    adapters_folder: FolderOption = None,
    out: Annotated[Path, typer.Option(help="The profile that is written.")] = Path("profile.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points, each measured once.")] = False,
    budget: BudgetOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the profile. Default: that of the file.")] = None,
    device: Annotated[str, typer.Option(help="What the engine runs on, for whoever reads the profile.")] = "unknown",
    slots: SlotsOption = None,
    host_entries: HostOption = None,
    max_rank: RankOption = None,
    max_seqs: SeqsOption = None,
    token_budget: TokensOption = None,
    key_env: KeyOption = None,
    probe_key_env: ProbeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure an idle engine and write its profile: prefill, decode by batch and context, loads by bytes, adapters a step.

    Exit code 3: an adapter, a file or a flag cannot be used; 4: the engine does not answer, is busy, refuses an adapter or was too
    slow for the budget; 130 and 143: ended by Ctrl-C and SIGTERM, its adapters unloaded.
    """
    import asyncio
    import sys

    from loraledger.engines.calibrate.facts import Given
    from loraledger.engines.calibrate.run import Request
    from loraledger.engines.protocol import ReplicaTarget

    if budget == 0:
        raise typer.BadParameter("--budget must be above 0")
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out {out}: give a file in a folder that exists")
    folders = _folders(adapter or [], adapters_folder)
    given = Given(
        slots=slots, host_entries=host_entries, max_rank=max_rank, max_seqs=max_seqs, token_budget=token_budget
    )
    target = ReplicaTarget("engine", _address(engine), api_key=_secret(key_env), probe_key=_secret(probe_key_env))
    request = Request(
        target=target,
        model=model,
        given=given,
        folders=folders,
        budget_s=BUDGET_S if budget is None else budget / NS_PER_S,
        quick=quick,
        name=name or out.stem,
        device=device,
        date=_today(),
        source="loraledger calibrate" + (" --quick" if quick else ""),
    )
    print(
        f"calibrate: {target.url} gets requests and adapters of ours for up to {request.budget_s:g} s: anyone else's would be "
        "slowed, and its adapter tiers are ours afterwards; run it on an idle replica",
        file=sys.stderr,
    )
    result = asyncio.run(_measured(request))
    _write(out, result.calibrated)
    if as_json:
        _print_json(result)
    else:
        _print(result.calibrated)
    print(f"calibrate: wrote {out}", file=sys.stderr)


async def _measured(request: object) -> Result:
    """The calibration under a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from loraledger.engines.calibrate.run import Progress, Request, calibrate

    assert isinstance(request, Request)
    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} points"), TimeElapsedColumn())
    with Bar(*columns, TextColumn("{task.description}"), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking at the engine", total=None)

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, description=progress.what)

        try:
            return await _stoppable(calibrate(request, show))
        except TargetError as error:
            raise TargetError(f"{request.target.url}: {error.message}", code=error.code) from error


async def _stoppable(work: Coroutine[None, None, Result]) -> Result:
    """The end of ``work``. The first SIGTERM cancels it, which cleans up; then raises ``typer.Exit``."""
    import asyncio
    import signal
    import sys

    loop, task, stopping = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    assert task is not None

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        return await work
    except asyncio.CancelledError:
        if not stopping.is_set():
            raise
        print("calibrate: stopped, and what it loaded is unloaded: no profile was written", file=sys.stderr)
        raise typer.Exit(STOPPED) from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _folders(named: list[str], folder: Path | None) -> tuple[Folder, ...]:
    """The adapters to measure with. Raises ``ConfigError`` or ``InputFileError`` naming the one that cannot be used."""
    from loraledger.adapters.reading.folder import read_folder
    from loraledger.engines.calibrate.measure import Folder

    paths: dict[str, Path] = {}
    for entry in named:
        label, split, path = entry.partition("=")
        if not split or not label or not path:
            raise ConfigError(f"--adapter {entry}: write NAME=PATH")
        paths[label] = Path(path).resolve()
    if folder is not None:
        if not folder.is_dir():
            raise ConfigError(f"--adapters-folder {folder}: is no folder")
        paths |= {path.parent.name: path.parent.resolve() for path in sorted(folder.glob("*/adapter_config.json"))}
        if not paths:
            raise ConfigError(f"--adapters-folder {folder}: no sub-folder has an adapter_config.json")
    if len(paths) > MOST_ADAPTERS:
        raise ConfigError(
            f"{len(paths)} adapters to measure with, limit {MOST_ADAPTERS}: give a few, of different sizes"
        )
    found = []
    for name, place in paths.items():
        try:
            one = read_folder(name, place)
        except InputFileError as error:
            raise InputFileError(f"adapter {name} ({place}): {error.message}") from error
        found.append(Folder(one.path, one.bytes_disk, one.rank))
    return tuple(found)


def _address(url: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from loraledger.config.schema import Url

    try:
        found: str = TypeAdapter(Url).validate_python(url)
    except ValidationError as error:
        raise typer.BadParameter(f"--engine {error.errors()[0]['ctx']['error']}") from error
    return found


def _secret(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"the environment variable {variable} is not set: it should hold the key")
    return key


def _today() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).date().isoformat()


def _write(out: Path, calibrated: Calibrated) -> None:
    """The file appears whole or not at all. Raises ``ConfigError`` when it cannot be written."""
    from loraledger.twin.calibrated import encode

    scratch = out.with_name(out.name + ".part")
    try:
        scratch.write_bytes(encode(calibrated))
        scratch.replace(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; give a file that can be written") from error


def _print(calibrated: Calibrated) -> None:
    """What was fitted, how well, and what to doubt."""
    from loraledger.cli.output import print_table

    rows = [
        (
            term.name,
            term.points or None,
            None if term.error_mean is None else f"{term.error_mean:.1%}",
            None if term.error_worst is None else f"{term.error_worst:.1%}",
            term.note or "",
        )
        for term in calibrated.terms
    ]
    print_table(
        ("term", "points", "mean miss", "worst miss", "note"), rows, right=("points", "mean miss", "worst miss")
    )
    for note in calibrated.notes:
        print(note)


def _print_json(result: Result) -> None:
    import msgspec

    from loraledger.cli.output import print_json

    print_json("calibration", msgspec.to_builtins({"profile": result.calibrated, "points": result.points}))
