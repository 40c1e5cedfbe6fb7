"""S-LoRA's published result files: one run a line, told apart by what the path says.

Theory of operation. Every ``*.jsonl`` below a folder is looked at. Its path says on which GPU and in which setting (S1 to S6:
model and ranks) a run was made and under which variant of the system (``bmm``, ``no_mem``, ``lifo`` ...); its lines say the
workload and what came out. Nothing is known of single files: one more file of the same form is one more set of runs. A path
that names no GPU and setting is left out with a reason; a line that is not of the form is refused with file and row.

Known words in a path: ``slora`` and ``dm`` (an older name of the same system), ``abort``, ``lifo``, ``pets``, ``no_mem``, ``bmm``,
``vllm``, ``peft``, ``cluster``, ``merge``; ``real`` for a workload that its lines do not fully describe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from loraledger.errors import InputFileError
from loraledger.record.lines import lines

Kind = Literal["slora", "abort", "lifo", "pets", "no_mem", "bmm", "vllm", "peft", "cluster", "merge"]

MAX_LINE: Final = 1 << 16
MAX_REQUESTS: Final = 200_000
MAX_ADAPTERS: Final = 20_000
_KINDS: Final[tuple[tuple[str, Kind], ...]] = (
    ("vllm", "vllm"),
    ("peft", "peft"),
    ("merge", "merge"),
    ("cluster", "cluster"),
    ("bmm", "bmm"),
    ("no_mem", "no_mem"),
    ("abort", "abort"),
    ("lifo", "lifo"),
    ("pets", "pets"),
    ("slora", "slora"),
    ("dm", "slora"),
)
_SETTING: Final = re.compile(r"s\d{1,2}")
_GPU: Final = re.compile(r"(?=[a-z0-9]*\d)[a-z]+[a-z0-9]*(-\d+)?")


class Config(msgspec.Struct, frozen=True):
    """The workload of a run: ``req_rate`` in requests/s, ``duration`` in s, lengths in [low, high). ``None``: not said."""

    num_adapters: int | None
    alpha: float | None
    req_rate: float
    cv: float | None
    duration: float
    input_range: tuple[int, int]
    output_range: tuple[int, int]


class Result(msgspec.Struct, frozen=True):
    """Measured: times in s, ``throughput`` in served requests/s, ``avg_attainment`` the share with its first token in 6 s."""

    total_time: float
    throughput: float
    avg_latency: float | None
    avg_first_token_latency: float | None
    avg_attainment: float
    num_abort: int | None = None


class _Row(msgspec.Struct, frozen=True):
    config: Config
    result: Result


@dataclass(frozen=True)
class Run:
    """One measured run. ``file`` is relative to the folder that was read; ``real``: its workload comes from a log."""

    file: str
    row: int
    gpu: str
    setting: str
    kind: Kind
    real: bool
    config: Config
    result: Result

    @property
    def place(self) -> str:
        """GPU and setting, as in ``a10g S2``."""
        return f"{self.gpu} {self.setting}"

    @property
    def workload(self) -> str:
        """What was asked of the system, in few words."""
        config = self.config
        if self.real:
            return f"log R={config.req_rate:g}"
        text = f"n={config.num_adapters} R={config.req_rate:g}"
        if config.cv != 1:
            text += f" cv={config.cv:g}"
        if config.alpha != 1:
            text += f" alpha={config.alpha:g}"
        return text if config.duration == 300 else f"{text} {config.duration:g}s"

    @property
    def name(self) -> str:
        """Where, which variant, which workload."""
        return f"{self.place} {self.kind} {self.workload}"


def read_runs(root: Path) -> tuple[list[Run], list[tuple[str, str]]]:
    """All runs below ``root`` in order of path, and (path, reason) of files that are not read.

    Raises ``InputFileError`` for a folder without files and for a bad line.
    """
    files = sorted(root.rglob("*.jsonl"))
    if not files:
        raise InputFileError(f"{root}: no *.jsonl in it; it should hold S-LoRA's benchmark results")
    runs, left_out = [], []
    for file in files:
        relative = file.relative_to(root)
        words = [word for part in (*relative.parts[:-1], relative.stem) for word in re.split(r"[_ .]", part.lower())]
        kind = next((kind for word, kind in _KINDS if _has(words, word)), None)
        place = place_of(words)
        if place is None:
            left_out.append((str(relative), "its path names no GPU and setting"))
        elif kind is None:
            left_out.append((str(relative), "its path names no known variant"))
        else:
            real = "real" in words
            for row, line in enumerate(lines(file, MAX_LINE), 1):
                if line.strip():
                    found = _decode(file, row, line, real)
                    runs.append(Run(str(relative), row, *place, kind, real, found.config, found.result))
    return runs, left_out


def place_of(words: Sequence[str]) -> tuple[str, str] | None:
    """GPU and setting among the words of a path; the GPU stands right before the setting or is the last word that looks like one.

    ``a100 80 s4`` and ``a100-80 s4`` are the same.
    """
    at = next((index for index in reversed(range(len(words))) if _SETTING.fullmatch(words[index])), None)
    if at is None:
        return None
    if at >= 2 and words[at - 1].isdecimal() and _is_gpu(words[at - 2]) and "-" not in words[at - 2]:
        return f"{words[at - 2]}-{words[at - 1]}", words[at].upper()
    near = [words[at - 1]] if at else []
    gpu = next((word for word in (*near, *reversed(words)) if _is_gpu(word)), None)
    return None if gpu is None else (gpu, words[at].upper())


def _is_gpu(word: str) -> bool:
    return bool(_GPU.fullmatch(word)) and not _SETTING.fullmatch(word) and not re.fullmatch(r"(cv|fig)\d+", word)


def _has(words: Sequence[str], wanted: str) -> bool:
    return f"_{wanted}_" in f"_{'_'.join(words)}_"


def _decode(file: Path, row: int, line: bytes, real: bool) -> _Row:
    try:
        found = msgspec.json.decode(line, type=_Row)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InputFileError(f"{file}: row {row}: not a result of S-LoRA's benchmark: {error}") from error
    fault = _fault(found, real)
    if fault is not None:
        raise InputFileError(f"{file}: row {row}: {fault}")
    return found


def _fault(found: _Row, real: bool) -> str | None:
    config, result = found.config, found.result
    if not real and (config.num_adapters is None or config.alpha is None or config.cv is None):
        return "num_adapters, alpha and cv are null, which only a workload from a log may have"
    if not 0 <= (config.num_adapters or 0) <= MAX_ADAPTERS:
        return f"num_adapters is {config.num_adapters}: 0 to {MAX_ADAPTERS:,}"
    for name, value, most in (
        ("req_rate", config.req_rate, 1e4),
        ("duration", config.duration, 1e6),
        ("cv", 1.0 if config.cv is None else config.cv, 100.0),
        ("alpha", 1.0 if config.alpha is None else config.alpha, 100.0),
        ("total_time", result.total_time, 1e8),
    ):
        if not 0 < value <= most:
            return f"{name} is {value:g}: above 0, up to {most:g}"
    if not 1 <= config.req_rate * config.duration <= MAX_REQUESTS:
        return f"req_rate times duration is {config.req_rate * config.duration:g} requests: 1 to {MAX_REQUESTS:,}"
    for name, (low, high) in (("input_range", config.input_range), ("output_range", config.output_range)):
        if not 1 <= low < high <= 1_000_000:
            return f"{name} is [{low}, {high}): 1 or more, the smaller number first"
    if not (0 <= result.throughput <= 1e5 and 0 <= result.avg_attainment <= 1):
        return f"throughput {result.throughput:g} or avg_attainment {result.avg_attainment:g} cannot be"
    if min(result.num_abort or 0, result.avg_first_token_latency or 0, result.avg_latency or 0) < 0:
        return "a negative latency or number of aborted requests"
    return None
