"""``loraledger trace import`` and ``trace export``: other formats, and our own record, into a trace; a trace into TraceV2."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraledger.cli.options import JsonOption, usage
from loraledger.cli.output import printable, watched
from loraledger.cli.trace.describing import MaxTokensOption, SkipOption, dropped_text, show
from loraledger.cli.trace.options import (
    ActiveOption,
    BaseOption,
    BytesOption,
    ChurnOption,
    DriftOption,
    NameOption,
    OutOption,
    RanksOption,
    SeedOption,
    TenantsOption,
    adapters_from,
    mix_from,
)
from loraledger.errors import InputFileError
from loraledger.units import spell_duration

if TYPE_CHECKING:
    from loraledger.record.lines import BadRows
    from loraledger.record.reader import RecordReader
    from loraledger.replay.traces.importers import Salted
    from loraledger.replay.traces.recorded import Recorded
    from loraledger.replay.traces.trace import Adapter
    from loraledger.replay.workloads.generate import Mix, Rows


class Format(StrEnum):
    """What can be imported."""

    azure = "azure"
    mooncake = "mooncake"
    vidur = "vidur"
    tracev2 = "tracev2"
    record = "record"
    trace = "trace"


class Target(StrEnum):
    """What a trace can be exported to."""

    tracev2 = "tracev2"


class Filling(StrEnum):
    """What stands in for token counts that a record lacks."""

    refuse = "refuse"
    drop = "drop"
    estimate = "estimate"


LICENCES: Final = {
    Format.azure: "as the Azure Public Dataset: CC-BY 4.0, cite Splitwise (ISCA 2024)",
    Format.mooncake: "as the Mooncake traces: Apache-2.0, cite Mooncake (FAST 2025)",
}
OWN: Final = "own traffic"
NAMELESS: Final = (Format.azure, Format.mooncake, Format.vidur)
"""Formats that know neither tenants nor adapters."""
_SALT_BYTES: Final = 4096

_Adapters = Annotated[
    int | None,
    typer.Option("--adapters", min=1, help="Lay so many adapters over it, with --popularity. Default: none."),
]
_Popularity = Annotated[
    str | None,
    typer.Option(
        "--popularity", help="How they are asked for: uniform, identical, zipf:S, exponential:C, power:ALPHA."
    ),
]
_SaltFile = Annotated[
    Path | None, typer.Option("--salt-file", help="Replace prefix block names by hashes keyed by this file.")
]
_SaltEnv = Annotated[
    str | None, typer.Option("--salt-env", metavar="NAME", help="The same, keyed by an environment variable.")
]
_Drop = Annotated[bool, typer.Option("--no-prefixes", help="Leave prefix blocks out.")]
_FromFirst = Annotated[
    bool, typer.Option("--from-first", help="Count times from the first request; azure and record always do.")
]
_Unknown = Annotated[
    Filling, typer.Option("--unknown", help="record: what stands in for token counts that are not known.")
]
_TraceHeader = Annotated[
    Path | None, typer.Option("--header", help="tracev2: its YAML header. Default: beside the CSV.")
]
_Licence = Annotated[
    str | None, typer.Option("--licence", help="What may be done with it. Default: that of the public data set.")
]


def import_(
    format_: Annotated[
        Format, typer.Argument(metavar="FORMAT", help="azure, mooncake, vidur, tracev2, record or trace.")
    ],
    file: Annotated[
        Path, typer.Argument(help="The file; for record its folder, of a run RUN/record.", show_default=False)
    ],
    out: OutOption,
    skip_bad: SkipOption = False,
    max_tokens: MaxTokensOption = None,
    adapters: _Adapters = None,
    popularity: _Popularity = None,
    seed: SeedOption = 42,
    tenants: TenantsOption = None,
    base_share: BaseOption = None,
    active: ActiveOption = None,
    drift: DriftOption = None,
    churn: ChurnOption = None,
    ranks: RanksOption = None,
    bytes_per_rank: BytesOption = None,
    salt_file: _SaltFile = None,
    salt_env: _SaltEnv = None,
    no_prefixes: _Drop = False,
    from_first: _FromFirst = False,
    unknown: _Unknown = Filling.refuse,
    header: _TraceHeader = None,
    licence: _Licence = None,
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read another format and write it as a trace; prompt text is never read.

    Exit code 3: the file is not of that format, or a row is bad and --skip-bad was not given.
    """
    from loraledger.record.lines import BadRows
    from loraledger.replay.traces.importers import from_first as counted_from_first
    from loraledger.replay.traces.trace import MAX_TOKENS, Header, Trace, write_trace
    from loraledger.replay.workloads.generate import laid_over

    mix = _mix(format_, adapters, popularity, tenants, base_share, active, drift, churn)
    laid = adapters_from(adapters, ranks, bytes_per_rank) if mix is not None and adapters else ()
    rename, bad = _rename(format_, salt_file, salt_env), BadRows(file, skip=skip_bad)
    with _record(file) if format_ is Format.record else nullcontext() as reader:
        begun = _begin(format_, file, bad, rename, unknown, header, reader)
        rows = counted_from_first(begun.rows) if from_first else begun.rows
        rows = _bare(rows) if no_prefixes else rows
        about = Header(
            name=name or begun.name,
            source=begun.source + ("" if mix is None else _mixed(mix, seed)),
            licence=begun.licence if licence is None else licence,
            seed=begun.seed if mix is None else seed,
            block_tokens=None if no_prefixes else begun.block_tokens,
            adapters=laid or begun.adapters,
        )
        with usage():
            drawn = rows if mix is None else laid_over(rows, mix, seed)
            write_trace(out, about, watched(drawn, "writing"), bad, max_tokens or MAX_TOKENS)
    _tell(bad, begun)
    show(Trace(out, max_tokens=max_tokens or MAX_TOKENS), as_json)


def _record(folder: Path) -> RecordReader:
    from loraledger.conductor.reading import open_record
    from loraledger.replay.traces.recorded import check_folder

    check_folder(folder)
    return open_record(folder)


@dataclass(frozen=True, kw_only=True)
class Begun:
    """An import under way: what the header is to say, and the rows."""

    rows: Rows
    name: str
    source: str
    licence: str = ""
    seed: int | None = None
    block_tokens: int | None = None
    adapters: tuple[Adapter, ...] = ()
    recorded: Recorded | None = None


def _begin(
    format_: Format,
    file: Path,
    bad: BadRows,
    rename: Salted | None,
    unknown: Filling,
    header: Path | None,
    reader: RecordReader | None,
) -> Begun:
    from loraledger.replay.traces import importers, tracev2
    from loraledger.replay.traces.recorded import Recorded, recorded_adapters

    name = printable(file.absolute().name)
    if format_ is Format.trace:
        return _again(file, bad, rename)
    source = f"{format_} {name}" + (", prefix blocks salted" if rename is not None else "")
    if reader is not None:
        recorded = Recorded(reader, bad, unknown.value)
        told = f"{source} --unknown {unknown}"
        found = recorded_adapters(reader)
        return Begun(rows=iter(recorded), name=name, source=told, licence=OWN, adapters=found, recorded=recorded)
    if format_ is Format.tracev2:
        tracev2.check_header(header or tracev2.header_path(file))
        found = tracev2.adapters_in(file, bad)
        size = tracev2.PREFIX_BLOCK if rename is not None else None
        return Begun(
            rows=tracev2.tracev2(file, bad, rename), name=name, source=source, block_tokens=size, adapters=found
        )
    licence = LICENCES.get(format_, "")
    if format_ is Format.mooncake:
        blocks, size = importers.mooncake(file, bad, rename), importers.MOONCAKE_BLOCK
        return Begun(rows=blocks, name=name, source=source, licence=licence, block_tokens=size)
    rows = importers.azure(file, bad) if format_ is Format.azure else importers.vidur(file, bad)
    return Begun(rows=rows, name=name, source=source, licence=licence)


def _again(file: Path, bad: BadRows, rename: Salted | None) -> Begun:
    """A trace written anew: of an edited one with the count and the digest that it now has."""
    from msgspec.structs import replace

    from loraledger.replay.traces.trace import Trace

    trace = Trace(file, verify=False)
    head = trace.header
    rows = (
        (n, replace(r, blocks=tuple(rename(str(b)) for b in r.blocks)) if rename else r) for n, r in trace.numbered(bad)
    )
    source = head.source + (", prefix blocks salted" if rename is not None else "")
    return Begun(
        rows=rows,
        name=head.name,
        source=source,
        licence=head.licence,
        seed=head.seed,
        block_tokens=head.block_tokens,
        adapters=head.adapters,
    )


def _mix(
    format_: Format,
    adapters: int | None,
    popularity: str | None,
    tenants: int | None,
    base_share: float | None,
    active: int | None,
    drift: str | None,
    churn: str | None,
) -> Mix | None:
    if adapters is None and popularity is None:
        if any(option is not None for option in (tenants, base_share, active, drift, churn)):
            raise typer.BadParameter(
                "--tenants, --base-share, --active, --drift and --churn need --adapters and --popularity"
            )
        return None
    if adapters is None or popularity is None:
        raise typer.BadParameter("--adapters and --popularity go together")
    if format_ not in NAMELESS and format_ is not Format.trace:
        raise typer.BadParameter(
            f"{format_} names its own adapters: import it, then lay others over it with `import trace`"
        )
    return mix_from(adapters, popularity, tenants, base_share, active, drift, churn)


def _mixed(mix: Mix, seed: int) -> str:
    said = f"; {mix.adapters} adapters laid over it: {mix.popularity}, seed {seed}"
    said += f", {mix.tenants} tenants" if mix.tenants > 1 else ""
    said += f", base share {mix.base_share:g}" if mix.base_share else ""
    said += f", {mix.active} active" if mix.active is not None else ""
    for name, every in (("drift", mix.drift), ("churn", mix.churn)):
        said += f", {name} {spell_duration(every.period)}:{every.amount}" if every is not None else ""
    return said


def _rename(format_: Format, salt_file: Path | None, salt_env: str | None) -> Salted | None:
    """The keyed hash that a salt asks for. The salt itself is never an argument: others can read a command line."""
    from loraledger.replay.traces.importers import salted

    if salt_file is None and salt_env is None:
        return None
    if salt_file is not None and salt_env is not None:
        raise typer.BadParameter("--salt-file or --salt-env, not both")
    if format_ not in (Format.mooncake, Format.tracev2, Format.trace):
        raise typer.BadParameter(f"{format_} has no prefix blocks to salt")
    if salt_env is not None:
        if salt_env not in os.environ:
            raise typer.BadParameter(f"--salt-env: there is no variable {salt_env}")
        return salted(os.fsencode(os.environ[salt_env]))
    try:
        with (salt_file or Path()).open("rb") as file:
            return salted(file.read(_SALT_BYTES).strip())
    except OSError as error:
        raise InputFileError(f"{salt_file}: cannot be read: {error.strerror or error}") from error


def _bare(rows: Rows) -> Rows:
    from msgspec.structs import replace

    for number, row in rows:
        yield number, replace(row, blocks=()) if row.blocks else row


def _tell(bad: BadRows, begun: Begun) -> None:
    if bad.dropped:
        print(f"loraledger: {dropped_text(bad.dropped)}", file=sys.stderr)
    if begun.recorded is not None:
        for column, count in sorted(begun.recorded.filled.items()):
            print(f"loraledger: {column} estimated for {count:,} requests", file=sys.stderr)


def export(
    target: Annotated[Target, typer.Argument(metavar="FORMAT", help="tracev2.")],
    trace: Annotated[Path, typer.Argument(help="A trace of ours, plain or .gz.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The CSV to write; its header goes beside it, as .yaml.")],
    skip_bad: SkipOption = False,
) -> None:
    """Write a trace as BLIS TraceV2: a CSV and its YAML header."""
    from loraledger.replay.traces.trace import Trace
    from loraledger.replay.traces.tracev2 import header_path, write_tracev2

    read = Trace(trace, skip_bad=skip_bad)
    if out.suffix == ".yaml":
        raise typer.BadParameter("--out names the CSV: the header beside it ends in .yaml")
    if trace.resolve() in (out.resolve(), header_path(out).resolve()):
        raise typer.BadParameter(f"--out {out} would write over the trace: name another file")
    lost = write_tracev2(out, read.header, watched(read, "writing", read.header.requests))
    if read.dropped:
        print(f"loraledger: {dropped_text(read.dropped)}", file=sys.stderr)
    if lost:
        print(f"loraledger: {lost:,} requests lost their prefix blocks: TraceV2 has no place for them", file=sys.stderr)
    print(f"{out} and {header_path(out)}: {target} of {read.digest}")
