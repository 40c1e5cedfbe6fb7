"""The published grid of vLLM runs with many adapters: one run a row, told apart by what the row says.

Theory of operation. Every ``*.csv`` of the folder is read by its column names. A row is a run of ``duration`` seconds:
``cpu_loras`` adapters of one rank, asked for equally often, ``gpu_loras`` slots. In one file ``rate`` is of one adapter, in the
other of all; which of them is told by ``adapter_rates``, which is always of one adapter, cut to four decimals. All requests are
one conversation (the authors' create_dummy_dataset.py takes one of ShareGPT's mean lengths, 250 and 231 tokens, and repeats it).

A run in which nothing ended is left out. What is not of the form is refused with file and row.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraledger.errors import InputFileError

PROMPT_TOKENS: Final = 250
MAX_ADAPTERS: Final = 10_000
MAX_REQUESTS: Final = 1_000_000
_MAX_FILE: Final = 64 << 20
_ROUNDED: Final = 0.06
"""``adapter_rates`` times adapters may miss the rate of all by so much, by its rounding."""
COLUMNS: Final = (
    "gpu_loras",
    "cpu_loras",
    "rank",
    "rate",
    "adapter_rates",
    "duration",
    "steps",
    "completed_requests",
    "processed_tokens",
    "output_throughput",
    "mean_itl_ms",
    "avg_batch_size",
    "avg_waiting_queue",
    "max_lora_loading_time",
    "max_lora_loads_from_memory_corrected",
    "total_scheduling_time",
)


@dataclass(frozen=True)
class Run:
    """One run. Times in s; ``rate`` in requests/s of all adapters, ``throughput`` in output tokens/s.

    ``series`` is what is the same along a curve over slots: file and rate as written there. ``batch`` and ``waiting``: mean
    requests that ran and that waited. ``loads``: copies of adapters to the device beyond the first one of each.
    """

    series: tuple[str, float]
    rank: int
    slots: int
    adapters: int
    rate: float
    seconds: float
    steps: int
    completed: int
    output_tokens: int
    throughput: float
    gap: float
    batch: float
    waiting: float
    loads: float
    loading: float
    scheduling: float

    @property
    def preempts(self) -> bool:
        """Whether requests between their first and last token were often not running, that is, had been preempted.

        By Little's law throughput times gap is how many are between these tokens; where nothing is preempted they are the batch
        (measured: .95 to 1.06 of it).
        """
        return self.throughput * self.gap > 1.15 * self.batch


def read_runs(folder: Path) -> list[Run]:
    """All runs of the files in ``folder``, file by file. Raises ``InputFileError`` with file and row."""
    found = [run for path in sorted(folder.glob("*.csv")) for run in _read(path)]
    if not found:
        raise InputFileError(f"{folder}: no *.csv with a run in it")
    return found


def _read(path: Path) -> Iterator[Run]:
    try:
        if path.stat().st_size > _MAX_FILE:
            raise InputFileError(f"{path}: more than {_MAX_FILE >> 20} MiB")
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if missing := set(COLUMNS) - set(reader.fieldnames or ()):
                raise InputFileError(f"{path}: no column {min(missing)}")
            for number, row in enumerate(reader, start=2):
                run = _run(f"{path}: row {number}", path.stem, row)
                if run is not None:
                    yield run
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputFileError(f"{path}: cannot be read: {error}") from error


def _run(where: str, stem: str, row: Mapping[str, str | None]) -> Run | None:
    values = {name: _number(where, name, row[name]) for name in COLUMNS}
    slots, adapters, rank = (int(values[name]) for name in ("gpu_loras", "cpu_loras", "rank"))
    if not 1 <= slots <= adapters <= MAX_ADAPTERS or rank < 1:
        raise InputFileError(
            f"{where}: {slots} slots, {adapters} adapters of rank {rank}: slots lie between 1 and adapters"
        )
    seconds, rate = values["duration"], values["rate"]
    each, total = values["adapter_rates"], values["rate"]
    if not math.isclose(each, rate, rel_tol=1e-3):
        if not math.isclose(each * adapters, rate, rel_tol=_ROUNDED):
            raise InputFileError(f"{where}: rate {rate:g} is neither of one adapter nor of all ({each:g} each)")
    else:
        total = rate * adapters
    if not (0 < seconds * total <= MAX_REQUESTS):
        raise InputFileError(f"{where}: {seconds:g} s at {total:g} requests/s: up to {MAX_REQUESTS:,} requests")
    completed, steps = int(values["completed_requests"]), int(values["steps"])
    if not (completed and steps and values["mean_itl_ms"] and values["avg_batch_size"]):
        return None
    return Run(
        series=(stem, rate),
        rank=rank,
        slots=slots,
        adapters=adapters,
        rate=total,
        seconds=seconds,
        steps=steps,
        completed=completed,
        output_tokens=max(1, round(values["processed_tokens"] / completed)),
        throughput=values["output_throughput"],
        gap=values["mean_itl_ms"] / 1e3,
        batch=values["avg_batch_size"],
        waiting=values["avg_waiting_queue"],
        loads=values["max_lora_loads_from_memory_corrected"],
        loading=values["max_lora_loading_time"],
        scheduling=values["total_scheduling_time"],
    )


def _number(where: str, name: str, text: str | None) -> float:
    """A finite number of 0 or more; an empty mean of nothing is 0."""
    try:
        value = math.nan if text is None else float(text or 0)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e15:
        raise InputFileError(f"{where}: {name} is {text!r}: a number of 0 or more")
    return value
