"""Times between arrivals and numbers of tokens: what a generated request is made of besides its adapter.

Theory of operation. Everything is drawn from Python's own Mersenne Twister. Each part of a workload has a stream of its own,
seeded by the workload's seed and the part's name, so that another length distribution leaves arrivals and adapters as they
were. A gap has mean 1 and is divided by the rate. Times are rounded to whole microseconds: engines are not timed more finely,
and it keeps the last bit of a logarithm, which may differ from one C library to another, out of the digest.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from loraledger.errors import InputFileError

Draw = Callable[[Random], int]
Gap = Callable[[Random], float]

US: Final = 1_000
MAX_SHAPE: Final = 1e6
MIN_SHAPE: Final = 0.01
MAX_LENGTH: Final = 10_000_000
ARRIVALS: Final = "poisson, constant, at-once, gamma:CV, weibull:SHAPE"
LENGTHS: Final = "N, A-B, pmf:FILE"


def stream(seed: int, part: str) -> Random:
    """The random numbers of one part of a workload."""
    return Random(f"loraledger/{seed}/{part}")  # noqa: S311 - a workload, not a secret


def to_ns(seconds: float) -> int:
    """Whole microseconds, in ns."""
    return round(seconds * 1e6) * US


def gamma_gap(shape: float) -> Gap:
    """Mean 1, coefficient of variation 1/sqrt(shape)."""
    _check_shape(shape)
    return lambda rng: rng.gammavariate(shape, 1.0 / shape)


def weibull_gap(shape: float) -> Gap:
    """Mean 1: the scale is 1 / Gamma(1 + 1/shape)."""
    _check_shape(shape)
    scale = math.exp(-math.lgamma(1.0 + 1.0 / shape))
    return lambda rng: rng.weibullvariate(scale, shape)


def _check_shape(shape: float) -> None:
    if not MIN_SHAPE <= shape <= MAX_SHAPE:
        raise ValueError(f"a shape of {shape:g}: it lies between {MIN_SHAPE:g} and {MAX_SHAPE:g}")


def parse_arrivals(spec: str) -> Gap:
    """The gap between two arrivals, of mean 1 (``at-once``: 0). Raises ``ValueError``."""
    if spec == "poisson":
        return lambda rng: rng.expovariate(1.0)
    if spec == "constant":
        return lambda _: 1.0
    if spec == "at-once":
        return lambda _: 0.0
    name, _, text = spec.partition(":")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if name not in ("gamma", "weibull") or not value > 0:
        raise ValueError(f"{spec!r} is not an arrival process: one of {ARRIVALS}")
    return gamma_gap(1.0 / (value * value)) if name == "gamma" else weibull_gap(value)


def parse_lengths(spec: str) -> Draw:
    """A number of tokens: fixed (``128``), uniform with both ends (``8-511``), or weighted by a file (``pmf:FILE``).

    Raises ``ValueError`` for another spelling, ``InputFileError`` for a bad file.
    """
    if spec.startswith("pmf:"):
        return weighted(read_pmf(Path(spec.removeprefix("pmf:"))))
    first, dash, last = spec.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else True)):
        raise ValueError(f"{spec!r} is not a number of tokens: one of {LENGTHS}")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high <= MAX_LENGTH:
        raise ValueError(f"{spec!r}: tokens lie between 1 and {MAX_LENGTH:,}, the smaller number first")
    return lambda rng: rng.randint(low, high)


def weighted(weights: dict[int, float]) -> Draw:
    """Draws a number of tokens in proportion to its weight, one random number each."""
    values, summed = list(weights), list(accumulate(weights.values()))
    total, last = summed[-1], len(summed) - 1
    return lambda rng: values[min(bisect(summed, rng.random() * total), last)]


def read_pmf(path: Path) -> dict[int, float]:
    """A JSON object of tokens to weight, such as ``{"128": 0.7, "512": 0.3}``. Raises ``InputFileError``."""
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(1 << 24), type=dict[int, float])
    except OSError as error:
        raise InputFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputFileError(f"{path}: not a JSON object of tokens to weight (up to 16 MiB): {error}") from error
    check_pmf(path, found)
    return found


def check_pmf(where: Path, weights: dict[int, float]) -> None:
    """Raises ``InputFileError`` for tokens outside 1 to ``MAX_LENGTH``, a weight that is no finite number of 0 or more, a zero
    sum."""
    for tokens, weight in weights.items():
        if not 1 <= tokens <= MAX_LENGTH or not 0 <= weight < math.inf:
            raise InputFileError(
                f"{where}: {tokens} tokens with weight {weight}: tokens lie between 1 and {MAX_LENGTH:,}, weights are 0 or more"
            )
    if not 0 < math.fsum(weights.values()) < math.inf:
        raise InputFileError(f"{where}: its weights have to sum to a finite number above 0")
