"""What a trace holds, at a glance: how much, how bursty, how skewed, and how many adapters a minute needs.

Theory of operation. One pass in bounded memory. Token counts are tallied by value, so their percentiles are exact (nearest
rank). Arrivals are counted in bins of a second; when there are too many bins, neighbours are merged and the bin is twice as
wide, so a year takes no more room than an hour. The *working set* of a minute is the number of distinct adapters that requests
named in it; minutes are counted from the trace's start, and silent ones, and what is left of the last one, count. The *busiest
minute* is any 60 whole seconds on end, because a burst may lie across two minutes that are counted from the start.

Shares are of requests that name an adapter, so a base model with half of the traffic does not hide a hot adapter.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from loraledger.replay.traces.trace import Request
from loraledger.replay.workloads.popularity import Concentration, concentration
from loraledger.units import NS_PER_S

MINUTE: Final = 60 * NS_PER_S
BINS: Final = 60
"""Columns of the picture of arrivals: bins are merged down to at most this many."""
MAX_TENANTS: Final = 100_000
"""Tenants are counted up to here."""
_EXACT: Final = 1 << 16
_BITS: Final = 13


class Spread(NamedTuple):
    """Of whole numbers: nearest-rank percentiles, mean, largest."""

    p50: int
    p90: int
    p99: int
    mean: float
    max: int


class Description(msgspec.Struct, frozen=True):
    """Times in ns; rates in requests/s; shares from 0 to 1. ``bins`` are requests in each ``bin_ns``.

    ``rate`` is ``None`` where all came at one instant, ``gap_cv`` where there are no gaps to speak of.
    """

    requests: int
    duration_ns: int
    rate: float | None
    peak_minute_rate: float
    longest_gap_ns: int
    gap_cv: float | None
    prompt: Spread
    output: Spread
    tenants: int
    adapters_named: int
    adapters_used: int
    base_share: float
    top: tuple[tuple[str, float], ...]
    concentration: Concentration | None
    working_set: Spread
    prefix_share: float
    bin_ns: int
    bins: tuple[int, ...]


class Tally:
    """How often each number of tokens occurred: at most 100,000 bins, whatever a trace holds."""

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self._sum = self._max = 0

    def add(self, tokens: int) -> None:
        """One more of so many tokens."""
        self._sum += tokens
        if tokens > self._max:
            self._max = tokens
        if tokens >= _EXACT:
            shift = tokens.bit_length() - _BITS
            tokens = tokens >> shift << shift
        self._counts[tokens] += 1

    def spread(self) -> Spread:
        """Percentiles of the bins' lower ends; mean and maximum are exact."""
        return spread(self._counts)._replace(mean=self._sum / self._counts.total(), max=self._max)


class Arrivals:
    """Requests in bins that grow with the trace, at most ``2 * bins`` of them."""

    def __init__(self, bins: int = BINS) -> None:
        self.width = NS_PER_S
        self.counts = [0] * (2 * bins)

    def add(self, at: int) -> None:
        """One arrival at ``at`` ns, from 0."""
        while (place := at // self.width) >= len(self.counts):
            half = [a + b for a, b in zip(self.counts[::2], self.counts[1::2], strict=True)]
            self.counts = half + [0] * len(half)
            self.width *= 2
        self.counts[place] += 1

    def merged(self, last: int) -> tuple[int, tuple[int, ...]]:
        """(width in ns, requests in each bin up to the one of ``last``), at most half as many bins as are kept."""
        used = self.counts[: last // self.width + 1]
        if len(used) <= len(self.counts) // 2:
            return self.width, tuple(used)
        used += [0] * (len(used) % 2)
        return 2 * self.width, tuple(a + b for a, b in zip(used[::2], used[1::2], strict=True))


class WorkingSet:
    """Distinct adapters of each minute. Only how often each size occurred is kept."""

    def __init__(self) -> None:
        self.sizes: Counter[int] = Counter()
        self._minute, self._now = 0, set[str]()

    def add(self, request: Request) -> None:
        """Requests come in order of time."""
        minute = request.at // MINUTE
        if minute != self._minute:
            self.close()
            self.sizes[0] += minute - self._minute - 1
            self._minute, self._now = minute, set()
        if request.adapter is not None:
            self._now.add(request.adapter)

    def close(self) -> None:
        """End the minute that is open."""
        self.sizes[len(self._now)] += 1


class Busiest:
    """The most requests in 60 whole seconds on end."""

    def __init__(self) -> None:
        self._most = self._inside = self._second = self._now = 0
        self._before = deque[tuple[int, int]]()

    def add(self, at: int) -> None:
        """Arrivals come in order of time."""
        second = at // NS_PER_S
        if second != self._second:
            self.most()
            self._before.append((self._second, self._now))
            self._inside += self._now
            while self._before and self._before[0][0] <= second - 60:
                self._inside -= self._before.popleft()[1]
            self._second, self._now = second, 0
        self._now += 1

    def most(self) -> int:
        """Up to what was added last."""
        self._most = max(self._most, self._inside + self._now)
        return self._most


def describe(requests: Iterable[Request], adapters_named: int) -> Description:
    """Read ``requests`` to their end. There has to be one at least, else ``ValueError``."""
    prompts, outputs, adapters, tenants = Tally(), Tally(), Counter[str | None](), set[str]()
    arrivals, working, busiest, gaps = Arrivals(), WorkingSet(), Busiest(), _Gaps()
    prefixed = 0
    for request in requests:
        prompts.add(request.prompt_tokens)
        outputs.add(request.output_tokens)
        adapters[request.adapter] += 1
        if len(tenants) < MAX_TENANTS:
            tenants.add(request.tenant)
        arrivals.add(request.at)
        working.add(request)
        busiest.add(request.at)
        gaps.add(request.at)
        prefixed += bool(request.blocks)
    count = adapters.total()
    if not count:
        raise ValueError("no request to describe")
    working.close()
    base = adapters.pop(None, 0)
    width, bins = arrivals.merged(gaps.last)
    named = sorted(
        ((name, n) for name, n in adapters.items() if name is not None), key=lambda item: (-item[1], item[0])
    )
    return Description(
        requests=count,
        duration_ns=gaps.last - gaps.first,
        rate=_rate(count - 1, gaps.last - gaps.first),
        peak_minute_rate=busiest.most() / 60,
        longest_gap_ns=gaps.longest,
        gap_cv=gaps.cv(),
        prompt=prompts.spread(),
        output=outputs.spread(),
        tenants=len(tenants),
        adapters_named=adapters_named,
        adapters_used=len(adapters),
        base_share=base / count,
        top=tuple((name, n / (count - base)) for name, n in named[:10]),
        concentration=concentration(adapters.values()),
        working_set=spread(working.sizes),
        prefix_share=prefixed / count,
        bin_ns=width,
        bins=bins,
    )


def spread(counts: Counter[int]) -> Spread:
    """Of values with how often each occurred."""
    total = counts.total()
    ordered = sorted((value, n) for value, n in counts.items() if n)
    return Spread(
        p50=_percentile(ordered, -(-total * 50 // 100)),
        p90=_percentile(ordered, -(-total * 90 // 100)),
        p99=_percentile(ordered, -(-total * 99 // 100)),
        mean=sum(value * n for value, n in ordered) / total,
        max=ordered[-1][0],
    )


def _percentile(ordered: list[tuple[int, int]], rank: int) -> int:
    summed = accumulate(n for _, n in ordered)
    return next(value for (value, _), seen in zip(ordered, summed, strict=True) if seen >= rank)


def _rate(gaps: int, duration_ns: int) -> float | None:
    """Gaps a second; ``None`` for requests that all came at once."""
    return gaps * NS_PER_S / duration_ns if duration_ns else None


class _Gaps:
    """Times between arrivals: Welford's running mean and variance, in s."""

    def __init__(self) -> None:
        self.first = self.last = self.longest = self._count = 0
        self._mean = self._squares = 0.0
        self._begun = False

    def add(self, at: int) -> None:
        if not self._begun:
            self.first, self.last, self._begun = at, at, True
            return
        gap = at - self.last
        self.last, self.longest = at, max(self.longest, gap)
        self._count += 1
        away = gap / NS_PER_S - self._mean
        self._mean += away / self._count
        self._squares += away * (gap / NS_PER_S - self._mean)

    def cv(self) -> float | None:
        """Standard deviation over mean; ``None`` for fewer than two gaps, or gaps of nothing."""
        if self._count < 2 or self._mean <= 0:
            return None
        return math.sqrt(self._squares / (self._count - 1)) / self._mean
