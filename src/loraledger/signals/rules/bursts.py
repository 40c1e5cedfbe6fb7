"""Tenants whose bursts call for a concurrency limit, and what limit.

Theory of operation. Tenants are bursty as a rule: of 162 clients of ServeGen's m-large trace half have a busiest stretch of 119
times their mean or more, and a coefficient of variation (CV) of 1.45 or more between arrivals, where Poisson has 1. A burst of one
tenant is a queue for all, which a limit on its requests in flight turns into a queue of its own.

Called for is a limit where the busiest minute has ``peak_to_mean`` times the arrivals of the mean minute or more, *and* arrivals
vary more than ``cv``: either the times between them, or the root of variance over mean of the counts by minute, which is the same
for a renewal process (Cox and Lewis, 1966) and also sees a single burst with silence around it.

*The limit.* By Little's law a tenant has rate x time in the engine requests in flight. At a steady rate and with room for all
(M/G/infinity) their number is Poisson about that mean, whatever the times' distribution. The limit is what 99 of 100 moments need
at ``burst_headroom`` times the tenant's own mean rate: steady traffic does not feel it, a burst waits in its own queue. What it
would have held is worked out on the sample itself: requests take their places in order, and each keeps its recorded time in
the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Final, NamedTuple

from loraledger.signals.rules.advice import Burst, Targets
from loraledger.signals.rules.sample import MINUTE_NS, Sample, Seen
from loraledger.units import NS_PER_S

LEAST: Final = 30
"""Requests of a tenant below which nothing is said of it."""
LEAST_MINUTES: Final = 5
"""Length of a sample below which nothing is said of anybody."""
SHARE: Final = 0.99
"""Of moments that the limit leaves alone."""


class Stay(NamedTuple):
    """A request in its engine: when it arrived and how long it took there, in ns."""

    arrived: int
    took: int


def find_bursts(sample: Sample, targets: Targets) -> tuple[Burst, ...]:
    """The tenants that a limit is called for, those first of whom it would have held most."""
    minutes = math.ceil(sample.window.minutes)
    if minutes < LEAST_MINUTES:
        return ()
    tenants: dict[str, list[Seen]] = {}
    for one in sample.seen:
        if one.tenant is not None:
            tenants.setdefault(one.tenant, []).append(one)
    found = [
        burst
        for tenant, seen in tenants.items()
        if len(seen) >= LEAST and (burst := _burst(tenant, seen, sample, minutes, targets)) is not None
    ]
    return tuple(sorted(found, key=lambda burst: (-burst.held, burst.tenant)))


def _burst(tenant: str, seen: Sequence[Seen], sample: Sample, minutes: int, targets: Targets) -> Burst | None:
    counts = [0] * minutes
    for one in seen:
        counts[(one.arrived_ns - sample.window.since_ns) // MINUTE_NS] += 1
    mean = len(seen) / minutes
    peak_to_mean, dispersion = max(counts) / mean, pstdev(counts) ** 2 / mean
    cv = variation([one.arrived_ns for one in seen])
    varies = max(math.sqrt(dispersion), cv or 0.0)
    stays = sorted(_stays(seen))
    if peak_to_mean < targets.peak_to_mean or varies < targets.cv or not stays:
        return None
    in_flight = sum(stay.took for stay in stays) / (minutes * MINUTE_NS)
    limit, most = concurrency(in_flight * targets.burst_headroom), max_in_flight(stays)
    if most <= limit:
        return None
    held, waited = held_by(stays, limit)
    words = (
        f"{limit} in flight: by Little's law it has {in_flight:.2g} at the mean, and at {targets.burst_headroom:g} x that rate"
        f" {SHARE:.0%} of moments need no more; it had up to {most}".replace("%", " %", 1)
    )
    return Burst(
        tenant=tenant,
        requests=len(seen),
        peak_to_mean=peak_to_mean,
        cv=cv,
        dispersion=dispersion,
        mean_in_flight=in_flight,
        max_in_flight=most,
        limit=limit,
        held=held,
        held_s=waited / held / NS_PER_S if held else 0.0,
        words=words,
    )


def variation(arrived: Sequence[int]) -> float | None:
    """Standard deviation over mean of the gaps between ``arrived``, which rise; ``None`` with fewer than 2 gaps or no time."""
    gaps = [after - before for before, after in pairwise(arrived)]
    if len(gaps) < 2 or not sum(gaps):
        return None
    return pstdev(gaps) / fmean(gaps)


def concurrency(mean: float) -> int:
    """The least number, 1 or more, that a Poisson variable of this mean does not exceed in ``SHARE`` of moments.

    Above 100 by its normal approximation.
    """
    if mean > 100:
        return math.ceil(mean + 2.326 * math.sqrt(mean))  # 2.326: the normal quantile of SHARE
    number, term = 0, math.exp(-mean)
    reached = term
    while reached < SHARE:
        number += 1
        term *= mean / number
        reached += term
    return max(1, number)


def max_in_flight(stays: Sequence[Stay]) -> int:
    """Most at one moment, had each begun when it arrived. ``stays`` in order of arrival."""
    ends: list[int] = []
    most = 0
    for stay in stays:
        while ends and ends[0] <= stay.arrived:
            heappop(ends)
        heappush(ends, stay.arrived + stay.took)
        most = max(most, len(ends))
    return most


def held_by(stays: Sequence[Stay], limit: int) -> tuple[int, int]:
    """How many would have had to wait with ``limit`` places, and for how long together, in ns. ``stays`` in order of arrival."""
    free = [0] * limit
    held = waited = 0
    for stay in stays:
        begins = max(stay.arrived, free[0])
        heapreplace(free, begins + stay.took)
        held += begins > stay.arrived
        waited += begins - stay.arrived
    return held, waited


def _stays(seen: Sequence[Seen]) -> Iterator[Stay]:
    for one in seen:
        if one.dispatched_ns is not None and one.ended_ns is not None and one.ended_ns >= one.dispatched_ns:
            yield Stay(one.arrived_ns, one.ended_ns - one.dispatched_ns)
