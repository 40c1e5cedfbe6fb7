"""How requests are spread over adapters: shares by formula, and the numbers that say how skewed a spread is.

Theory of operation. Papers name spreads by parameters that mean different things: S-LoRA's "alpha" and Punica's "zipf:1.5" are
not Zipf exponents. Here a spread is named by its own formula, for ranks k = 0, 1, ... (0 is the most popular of n):

* ``uniform``: 1/n each.
* ``zipf:S``: proportional to (k + 1)^-S.
* ``exponential:C``: proportional to exp(-C k). Vectors of 512 made from Azure Functions traffic fall like it (C = 0.019), with a
  steeper head: top-1 4.2 % and an entropy number of 108, where the formula has 1.9 % and 143.
* ``power:ALPHA``: what S-LoRA's generator draws from, ((k + 1)/n)^ALPHA - (k/n)^ALPHA. ALPHA = 1 is uniform; skew grows as it
  falls.
* ``identical``: everything to one adapter.

Punica fixes counts instead of shares (``punica_counts``). Whatever the name, a spread is judged by what it came to: top-1 and
top-10 share and two effective numbers of adapters, exp of the Shannon entropy and the inverse Simpson index 1 / sum of squared
shares (Hill numbers of order 1 and 2): n for a uniform spread over n, 1 when one adapter has all.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable
from itertools import accumulate
from random import Random
from typing import Final, NamedTuple

MAX_PARAMETER: Final = 100.0


class Concentration(NamedTuple):
    """Shares from 0 to 1; effective numbers of adapters, of order 1 (entropy) and 2 (inverse Simpson)."""

    top1: float
    top10: float
    entropy_number: float
    simpson_number: float


def concentration(counts: Iterable[float]) -> Concentration | None:
    """How skewed these counts or shares are; ``None`` when they sum to nothing."""
    ordered = sorted((count for count in counts if count > 0), reverse=True)
    total = math.fsum(ordered)
    if not ordered or total <= 0:
        return None
    shares = [count / total for count in ordered]
    entropy = -math.fsum(share * math.log(share) for share in shares)
    return Concentration(
        shares[0], math.fsum(shares[:10]), math.exp(entropy), 1.0 / math.fsum(share * share for share in shares)
    )


def _zipf(n: int, exponent: float) -> list[float]:
    return [(k + 1) ** -exponent for k in range(n)]


def _exponential(n: int, rate: float) -> list[float]:
    return [math.exp(-rate * k) for k in range(n)]


def _power(n: int, alpha: float) -> list[float]:
    return [((k + 1) / n) ** alpha - (k / n) ** alpha for k in range(n)]


_WITH_PARAMETER: Final[dict[str, Callable[[int, float], list[float]]]] = {
    "zipf": _zipf,
    "exponential": _exponential,
    "power": _power,
}
SPELLINGS: Final = "uniform, identical, zipf:S, exponential:C, power:ALPHA"


def shares(spec: str, n: int) -> list[float]:
    """Weights of ranks 0 to n - 1 for a spread such as ``zipf:1.1``; not normalised. Raises ``ValueError``."""
    if n < 1:
        raise ValueError(f"{n} adapters: a popularity needs 1 or more")
    name, colon, text = spec.partition(":")
    if not colon and name == "uniform":
        return [1.0] * n
    if not colon and name == "identical":
        return [1.0] + [0.0] * (n - 1)
    if name not in _WITH_PARAMETER or not colon:
        raise ValueError(f"{spec!r} is not a popularity: one of {SPELLINGS}")
    return _WITH_PARAMETER[name](n, _parameter(spec, text))


def _parameter(spec: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_PARAMETER:
        raise ValueError(f"{spec!r}: its parameter is a number above 0 and up to {MAX_PARAMETER:g}")
    return value


def sampler(weights: list[float], rng: Random) -> Callable[[], int]:
    """Draws a rank in proportion to ``weights``, one number of ``rng`` each."""
    summed = list(accumulate(weights))
    total, last, draw = summed[-1], len(summed) - 1, rng.random
    return lambda: min(bisect(summed, draw() * total), last)


PUNICA: Final = ("distinct", "uniform", "skewed", "identical")


def punica_counts(kind: str, requests: int) -> list[int]:
    """Requests of each adapter, most popular first, as Punica's benchmark sets them for a run of ``requests``.

    distinct: one each. uniform: ceil(sqrt(requests)) adapters, as even as can be. skewed (``zipf:1.5`` there): floor(1.5^k) for
    k = 0, 1, ... while the sum stays below ``requests``, and what is left to one more. identical: all to one.
    """
    if kind not in PUNICA or requests < 1:
        raise ValueError(f"{kind!r} for {requests} requests: one of {', '.join(PUNICA)}, for 1 or more")
    if kind == "distinct":
        return [1] * requests
    if kind == "identical":
        return [requests]
    if kind == "uniform":
        n = math.isqrt(requests - 1) + 1
        return [requests // n + (index < requests % n) for index in range(n)]
    counts, size, left = [], 1.0, requests
    while math.floor(size) < left:
        counts.append(math.floor(size))
        left -= counts[-1]
        size *= 1.5
    return sorted([*counts, left], reverse=True)
