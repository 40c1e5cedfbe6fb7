"""``loraledger hardware``: the GPUs that plans are made of, and for one of them where each figure comes from.

Theory of operation. The table compares; the page of one GPU gives sources and dates, and the ladder that an adapter climbs on a
node of which nothing else is known. Figures that have not been checked against their source yet are marked: check them before money
depends on them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraledger.cli.options import JsonOption
from loraledger.cli.output import print_json, print_table
from loraledger.cli.signals import shown
from loraledger.errors import InputFileError
from loraledger.units import format_bytes, format_duration

if TYPE_CHECKING:
    from loraledger.plan.hardware import Catalogue, Gpu, Rung, Sourced

_COLUMNS: Final = ("gpu", "memory", "GB/s", "TFLOP/s", "link GB/s")
_FIELDS: Final = ("memory", "memory_bandwidth", "bf16", "host_link")
_UNITS: Final = {"memory": "", "memory_bandwidth": " GB/s", "bf16": " TFLOP/s", "host_link": " GB/s"}
_CHECK: Final = " (not yet checked against this source)"


def hardware(
    name: Annotated[
        str | None, typer.Argument(help="A GPU, by name or alias: its figures with sources and dates.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="More GPUs in a file of the same form (docs/plan.md); they win.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """GPUs: device memory, memory bandwidth, dense bf16 arithmetic, host link one way.

    Exit code 3: the file cannot be used, or there is no such GPU.
    """
    from loraledger.plan.hardware import catalogue

    gpus = catalogue(file)
    if name is None:
        _print_all(gpus, as_json)
        return
    gpu = gpus.find(name)
    if gpu is None:
        raise InputFileError(f"{name!r} is no GPU that is known{gpus.hint(name)}")
    _print_one(gpus, gpu, as_json)


def _print_all(gpus: Catalogue, as_json: bool) -> None:
    if as_json:
        print_json("hardware", [_document(gpu) for gpu in gpus.gpus.values()])
        return
    rows = [[gpu.name, format_bytes(gpu.memory.value), *_speeds(gpu), _mark(gpu)] for gpu in gpus.gpus.values()]
    print_table((*_COLUMNS, ""), rows, right=_COLUMNS[1:])
    print("\nmemory as the device reports it; speeds are peaks: bf16 dense, the link one way")
    if any(row[-1] for row in rows):
        print(
            "*: a figure of it is not yet checked against its source: `loraledger hardware NAME` says which, with all sources"
        )
    sys.stdout.flush()


def _speeds(gpu: Gpu) -> list[str]:
    return [
        f"{gpu.memory_bandwidth.value / 1e9:,.0f}",
        f"{gpu.bf16.value / 1e12:,.0f}",
        f"{gpu.host_link.value / 1e9:,.0f}",
    ]


def _mark(gpu: Gpu) -> str:
    return "*" if any(getattr(gpu, field).recalled for field in _FIELDS) else ""


def _print_one(gpus: Catalogue, gpu: Gpu, as_json: bool) -> None:
    ladder = gpus.ladder(gpu)
    if as_json:
        print_json("gpu", {**_document(gpu), "ladder": [_rung(rung) for rung in ladder.rungs]})
        return
    print(shown.fold(f"{gpu.name}, also called {', '.join(gpu.aliases) or 'nothing else'}") + "\n")
    values = dict(zip(_FIELDS, (format_bytes(gpu.memory.value), *_speeds(gpu)), strict=True))
    figures: list[tuple[str, Sourced]] = [(field, getattr(gpu, field)) for field in _FIELDS]
    rows = [[field, f"{values[field]}{_UNITS[field]}", f"{one.value:,}", one.as_of] for field, one in figures]
    print_table(("figure", "value", "exact", "as of"), rows, right=("value", "exact"))
    print("\nthe way up from each rung of a node; a node's own figures are better\n")
    ways = [_way(rung) for rung in ladder.rungs[1:]]
    print_table(("from", "to", "rate", "latency", "16 MiB take"), ways, right=("rate", "latency", "16 MiB take"))
    sources = [f"{field}: {one.source}{_CHECK if one.recalled else ''}" for field, one in figures]
    shown.bullets("sources", (*sources, *(f"{rung.name}: {rung.source}" for rung in ladder.rungs[1:])))
    sys.stdout.flush()


def _way(rung: Rung) -> list[object]:
    above = {"host": "device", "disk": "host", "remote": "disk"}[rung.name]
    took = format_duration(rung.takes_ns(16 * 2**20))
    return [rung.name, above, f"{rung.bytes_per_s / 1e9:,.3g} GB/s", format_duration(rung.latency_ns), took]


def _document(gpu: Gpu) -> dict[str, object]:
    figures = {
        field: {
            "value": figure.value,
            "source": figure.source,
            "as_of": figure.as_of,
            "recalled": figure.recalled,
        }
        for field in _FIELDS
        if (figure := getattr(gpu, field))
    }
    return {"name": gpu.name, "aliases": list(gpu.aliases), **figures}


def _rung(rung: Rung) -> dict[str, object]:
    return {
        "name": rung.name,
        "bytes": rung.bytes,
        "bytes_per_s": rung.bytes_per_s,
        "latency_ns": rung.latency_ns,
        "source": rung.source,
    }
