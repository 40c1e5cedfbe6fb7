"""ServeGen's published clients as tenants: real rates, burstiness and lengths of many API customers over days.

Theory of operation. A folder of ServeGen (arXiv 2505.09999) holds, for each client, ``chunk-N-trace.csv``: windows of equal
length with the rate (requests/s), the coefficient of variation and a fitted inter-arrival law (Gamma or Weibull; neither:
idle). Some clients have ``chunk-N-dataset.json`` too: probability mass functions of input and output tokens, for windows of 6
h. Nothing in it is personal.

Each client is a renewal process in its own time: gaps have mean 1 and the shape of the window that they begin in, and are used
up at the rate of the windows that they pass. So a window's expected count is its rate times its length whatever the shape.
Starting afresh in each window with the fitted scale instead would not keep it: a fresh start adds (CV^2 - 1)/2 requests a
window, and the fitted laws' own mean is off by more than 20 % in a quarter of the windows (of m-large: 10th percentile 0.75,
90th 1.20, 99th 2.93 of the measured gap). The first gap is the rest of one that is already under way.

A client without lengths of its own borrows them: it ranks those that have some by the seed, and takes in each window those of the
first one that was seen with 20 different prompt lengths or more there.
"""

from __future__ import annotations

import csv
import heapq
import math
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import msgspec

from loraledger.errors import InputFileError
from loraledger.record.lines import lines
from loraledger.replay.traces.trace import MAX_ADAPTERS, Request
from loraledger.replay.workloads.draws import (
    MAX_LENGTH,
    MAX_SHAPE,
    MIN_SHAPE,
    Draw,
    Gap,
    check_pmf,
    gamma_gap,
    stream,
    to_ns,
    weibull_gap,
    weighted,
)

MAX_WINDOWS: Final = 1_000_000
MAX_RATE: Final = 1e6
_LENGTHS_BYTES: Final = 1 << 26
_NAME: Final = re.compile(r"chunk-(\d{1,9})-trace\.csv")
_PAIR: Final = re.compile(r"(\d{1,9}): ([0-9.]{1,30}(?:e-?\d{1,3})?)", re.IGNORECASE)
_UNDER_WAY: Final = 32
"""Gaps laid out before the start to find the one that is under way."""
_WORTH_BORROWING: Final = 20
"""Different prompt lengths: a window of a client that was all but idle says little about others."""


class Window(NamedTuple):
    """From ``start`` s on: requests/s, and how gaps are spread (``None`` when idle)."""

    start: float
    rate: float
    gap: Gap | None


class Lengths(NamedTuple):
    """From ``start`` s on: tokens of prompt and output, and how many different prompt lengths were seen."""

    start: float
    prompt: Draw
    output: Draw
    values: int


class Client(NamedTuple):
    """One client: its number, its windows of ``width`` s in order, and lengths in order of time where published."""

    number: int
    width: float
    windows: tuple[Window, ...]
    lengths: tuple[Lengths, ...]


def read_clients(folder: Path) -> list[Client]:
    """All clients of a folder, by number. Raises ``InputFileError``, with file and row."""
    try:
        found = sorted((int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))
    except OSError as error:
        raise InputFileError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if not 0 < len(found) <= MAX_ADAPTERS:
        raise InputFileError(f"{folder}: {len(found):,} files chunk-N-trace.csv: 1 to {MAX_ADAPTERS:,} clients")
    return [_read_client(number, path) for number, path in found]


def _read_client(number: int, path: Path) -> Client:
    windows: list[Window] = []
    for row, line in enumerate(lines(path, 1 << 12), 1):
        try:
            windows.append(_window(line))
        except (ValueError, csv.Error) as error:
            raise InputFileError(f"{path}: row {row}: not start, rate, CV, law, shape, scale: {error}") from error
        if row > MAX_WINDOWS:
            raise InputFileError(f"{path}: over {MAX_WINDOWS:,} windows")
    width = windows[1].start - windows[0].start if len(windows) > 1 else 0.0
    if not 0 < width < math.inf:
        raise InputFileError(f"{path}: needs two windows or more, in order of time")
    for row, window in enumerate(windows, 1):
        if not math.isclose(window.start, windows[0].start + (row - 1) * width, abs_tol=1e-3):
            raise InputFileError(
                f"{path}: row {row}: begins at {window.start:g} s: windows are {width:g} s wide, no hole"
            )
    dataset = path.with_name(f"chunk-{number}-dataset.json")
    return Client(number, width, tuple(windows), _read_lengths(dataset) if dataset.exists() else ())


def _window(line: bytes) -> Window:
    start, rate, _cv, law, shape, _scale = next(csv.reader((line.decode("ascii").rstrip("\r"),)), [])
    at, a_second = float(start), float(rate)
    if not 0 <= at < math.inf or not 0 <= a_second <= MAX_RATE:
        raise ValueError(f"start {at:g} s, {a_second:g} requests/s")
    if a_second == 0:
        return Window(at, 0.0, None)
    if law not in ("Gamma", "Weibull"):
        raise ValueError(f"{law!r} with requests is neither Gamma nor Weibull")
    number = float(shape)
    if not number > 0:
        raise ValueError(f"shape {number:g}")
    number = min(max(number, MIN_SHAPE), MAX_SHAPE)
    return Window(at, a_second, gamma_gap(number) if law == "Gamma" else weibull_gap(number))


def _read_lengths(path: Path) -> tuple[Lengths, ...]:
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(_LENGTHS_BYTES), type=dict[str, dict[str, str]])
        laid = [
            (float(start), _pmf(path, parts["input_tokens"]), _pmf(path, parts["output_tokens"]))
            for start, parts in found.items()
        ]
    except OSError as error:
        raise InputFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, RecursionError, KeyError, ValueError) as error:
        raise InputFileError(f"{path}: not windows with input_tokens and output_tokens: {error}") from error
    if not all(math.isfinite(start) for start, _, _ in laid):
        raise InputFileError(f"{path}: a window begins at no time")
    known = [Lengths(start, weighted(p), weighted(o), len(p)) for start, p, o in laid if p and o]
    return tuple(sorted(known, key=lambda lengths: lengths.start))


def _pmf(path: Path, text: str) -> dict[int, float]:
    """Tokens to weight, from a Python dict in text, which is never evaluated. Empty for an idle window."""
    pairs = [_PAIR.fullmatch(part) for part in text.strip().removeprefix("{").removesuffix("}").split(", ") if part]
    if not all(pairs):
        raise ValueError("a probability mass function is written {tokens: weight, ...}")
    weights = {
        max(1, int(pair[1])): float(pair[2]) for pair in pairs if pair is not None and int(pair[1]) <= MAX_LENGTH
    }
    if weights:
        check_pmf(path, weights)
    return weights


def servegen(
    clients: list[Client],
    *,
    start_s: float = 0.0,
    duration_s: float,
    rate_scale: float = 1.0,
    seed: int,
    lengths: tuple[Draw, Draw] | None = None,
) -> Iterator[Request]:
    """Requests of all clients in [start, start + duration) s of their traces, in order of time; tenant and adapter named after
    each.

    ``rate_scale`` multiplies every rate; ``lengths`` replaces the published ones. Raises ``ValueError`` when no lengths are
    there.
    """
    if not 0 < rate_scale <= MAX_RATE or not duration_s > 0 or start_s < 0:
        raise ValueError(f"rates times {rate_scale:g}, {duration_s:g} s from {start_s:g} s: all above 0")
    published = [client for client in clients if client.lengths]
    if lengths is None and not published:
        raise ValueError("no client here has published lengths (chunk-N-dataset.json): give prompt and output lengths")
    merged = heapq.merge(*(_of_client(c, published, start_s, duration_s, rate_scale, seed, lengths) for c in clients))
    for at, number, prompt, output in merged:
        yield Request(to_ns(at - start_s), f"client-{number}", f"a{number}", prompt, output)


def _of_client(
    client: Client,
    published: list[Client],
    start: float,
    duration: float,
    scale: float,
    seed: int,
    lengths: tuple[Draw, Draw] | None,
) -> Iterator[tuple[float, int, int, int]]:
    rng = stream(seed, f"lengths-{client.number}")
    known = client.lengths or _borrowed(published, stream(seed, f"borrowed-{client.number}"))
    number, current = client.number, 0
    for at in _arrivals(client, start, start + duration, scale, stream(seed, f"arrivals-{client.number}")):
        if lengths is None:
            while current + 1 < len(known) and known[current + 1].start <= at:
                current += 1
            yield at, number, known[current].prompt(rng), known[current].output(rng)
        else:
            yield at, number, lengths[0](rng), lengths[1](rng)


def _borrowed(published: list[Client], rng: Random) -> tuple[Lengths, ...]:
    ranked = rng.sample(published, len(published))
    by_start: dict[float, Lengths] = {}
    for client in reversed(ranked):
        by_start |= {lengths.start: lengths for lengths in client.lengths if lengths.values >= _WORTH_BORROWING}
    every = [lengths for client in ranked for lengths in client.lengths[:1]]
    return tuple(lengths for _, lengths in sorted(by_start.items())) or tuple(every[:1])


def _arrivals(client: Client, start: float, end: float, scale: float, rng: Random) -> Iterator[float]:
    left: float | None = None
    for window in client.windows:
        now, until, rate = max(window.start, start), min(window.start + client.width, end), window.rate * scale
        if window.gap is None or now >= until:
            continue
        if left is None:
            left = _rest_of_one(window.gap, rng)
        while now + left / rate < until:
            now += left / rate
            yield now
            left = window.gap(rng)
        left -= (until - now) * rate


def _rest_of_one(gap: Gap, rng: Random) -> float:
    """What is left of the gap that is under way at a random moment: long ones are likelier to be."""
    gaps = [gap(rng) for _ in range(_UNDER_WAY)]
    moment, passed = rng.random() * math.fsum(gaps), 0.0
    for each in gaps:
        passed += each
        if passed > moment:
            break
    return max(0.0, passed - moment)
