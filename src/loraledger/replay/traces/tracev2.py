"""BLIS TraceV2, both ways: a YAML header and a CSV of requests, the format of the one other simulator that knows adapters.

Theory of operation. Columns are found by name. Of the 27 and more only what a workload is made of is taken: tenant (else
client), adapter, ``arrival_time_us``, ``input_tokens`` and ``output_tokens``; ``input_tokens`` counts what comes behind the
shared prefix, so a prompt is ``prefix_length`` + ``input_tokens``. Measured times are results and are left behind.
``prefix_group`` is a label that anybody may have chosen: with a salt the full blocks of a prefix are named by a keyed hash of
(group, place), else it is dropped.

Writing gives ``F`` (CSV) and ``F`` with the ending ``.yaml``, as mode ``generated``. Times are cut to microseconds, prefixes
are left out: TraceV2 has one prefix a request and no block numbers.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import yaml

from loraledger.errors import InputFileError
from loraledger.record.lines import BadRows
from loraledger.replay.traces.importers import TENANT, Salted, count, table
from loraledger.replay.traces.trace import MAX_ADAPTERS, Adapter, Header, Request, replacing
from loraledger.replay.workloads.draws import US
from loraledger.replay.workloads.generate import Rows

COLUMNS: Final = (
    "request_id client_id tenant_id slo_class session_id round_index prefix_group prefix_length streaming input_tokens "
    "output_tokens text_tokens image_tokens audio_tokens video_tokens reason_ratio model deadline_us server_input_tokens "
    "arrival_time_us send_time_us first_chunk_time_us last_chunk_time_us num_chunks status error_message finish_reason "
    "adapter"
)
PREFIX_BLOCK: Final = 16
"""Tokens of a block that prefixes are cut into: vLLM's own block size."""

_WANTED: Final = (
    *("client_id", "tenant_id", "prefix_group", "prefix_length"),
    *("input_tokens", "output_tokens", "arrival_time_us"),
)
_HEADER_BYTES: Final = 1 << 20


def check_header(path: Path) -> None:
    """Refuse a header of another version or time unit. Raises ``InputFileError``."""
    try:
        with path.open("rb") as file:
            found = yaml.safe_load(file.read(_HEADER_BYTES).decode("utf-8"))
    except OSError as error:
        raise InputFileError(
            f"{path}: cannot be read: {error.strerror or error}: TraceV2 is a CSV and this header"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputFileError(f"{path}: not the YAML header of a TraceV2: {' '.join(str(error).split())}") from error
    version, unit = (found.get("trace_version"), found.get("time_unit")) if isinstance(found, dict) else (None, None)
    if version not in (2, 3) or unit not in ("microseconds", "us"):
        raise InputFileError(
            f"{path}: trace_version {version!r}, time_unit {unit!r}: 2 or 3, and microseconds, are read"
        )


def adapters_in(path: Path, bad: BadRows) -> tuple[Adapter, ...]:
    """Every adapter that rows name, in order of name: a pass over the file. Raises ``InputFileError``."""
    names: set[str] = set()
    for row, cells in _rows(path, BadRows(bad.file, skip=True)):
        if name := cells[-1].strip():
            names.add(name)
        if len(names) > MAX_ADAPTERS:
            raise InputFileError(f"{path}: row {row}: over {MAX_ADAPTERS:,} adapters")
    return tuple(Adapter(name) for name in sorted(names))


def tracev2(path: Path, bad: BadRows, rename: Salted | None = None) -> Rows:
    """The requests of the CSV ``path``; ``rename`` names the blocks of prefixes, which are dropped without it."""
    for row, (client, tenant, group, prefix, tokens, output, at, adapter) in _rows(path, bad):
        try:
            shared, own = count(prefix), count(tokens)
            if shared < 0 or own < 0:
                raise ValueError(f"prefix_length {shared}, input_tokens {own}: 0 or more")
            blocks: tuple[int, ...] = ()
            if rename is not None and group and shared <= 1 << 24:
                blocks = tuple(rename(f"{group}/{place}") for place in range(shared // PREFIX_BLOCK))
            name, owner = adapter.strip() or None, tenant.strip() or client.strip() or TENANT
            yield row, Request(count(at) * US, owner, name, shared + own, count(output), blocks)
        except ValueError as error:
            bad.bad(row, "not a request", str(error))


def _rows(path: Path, bad: BadRows) -> Iterator[tuple[int, list[str]]]:
    return table(path, bad, _WANTED, ("adapter",))


def write_tracev2(path: Path, header: Header, requests: Iterable[Request]) -> int:
    """Write the CSV ``path`` and the header beside it; how many requests lost a prefix. Raises ``InputFileError`` if it
    cannot."""
    about = {
        "trace_version": 2,
        "time_unit": "microseconds",
        "mode": "generated",
        "warm_up_requests": 0,
        **({} if header.seed is None else {"workload_seed": header.seed}),
        "workload_spec": f"loraledger:{header.name}@{header.digest or 'unknown'}",
    }
    lost = 0
    with replacing(path) as staged:
        with staged.open("w", encoding="utf-8", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow(COLUMNS.split())
            for number, request in enumerate(requests):
                out.writerow(_cells(number, request))
                lost += bool(request.blocks)
        header_path(path).write_text(yaml.safe_dump(about, sort_keys=False), encoding="utf-8")
    return lost


def header_path(path: Path) -> Path:
    """Where the header of the CSV ``path`` lies, unless it is named."""
    return path.with_suffix(".yaml")


def _cells(number: int, request: Request) -> tuple[object, ...]:
    prompt, output, at = request.prompt_tokens, request.output_tokens, request.at // US
    identity = (number, request.tenant, request.tenant, "", "", 0, "", 0, "true")
    tokens = (prompt, output, prompt, 0, 0, 0, 0, "", 0, 0)
    return (*identity, *tokens, at, 0, 0, 0, 0, "ok", "", "", request.adapter or "")
