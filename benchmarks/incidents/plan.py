"""What is played: phases of traffic on a site, and what is done to the fleet while it runs.

Theory of operation. A *mix* is Poisson arrivals with one set of shares and means; prompts are log-normal, outputs exponential,
both cut at ``LONGEST`` means. A plan has the mix of the baseline and those of the incident; all streams of chance come from its
seed. The warm-up asks for each standing adapter once and then runs the baseline's mix, so that cold starts lie before the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import merge
from random import Random
from typing import Final

import msgspec

from benchmarks.incidents.site import LONGEST, Site
from loraledger.kernel.settings import SECOND
from loraledger.replay.traces.trace import Request

WARM_S: Final = 60.0
"""Of the warm-up, after each adapter was asked for once."""
ONCE_S: Final = 0.4
"""From one of these to the next."""
SIGMA: Final = 0.5
"""Of the logarithm of a prompt's length."""


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals a second in all, shares of the adapters (by number; with ``base_share`` of none), means of tokens.

    ``once``: each adapter is asked for once, in the order of ``shares``, instead.
    """

    rate: float
    shares: dict[int, float]
    base_share: float
    prompt: float
    output: float
    once: bool = False


class Restart(msgspec.Struct, frozen=True):
    """A replica's process ends ``at_s`` after the baseline's end and is back ``down_s`` later. ``drained``: it was out of routing
    for ``drained`` s before."""

    replica: str
    at_s: float
    down_s: float
    drained: float = 0.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``strength`` says in the kind's own unit how hard it hits. ``gap_s``: from the baseline's end to the incident's window.

    ``after``: the site as it is after the restarts, else the same. ``slow``: how many times longer reads take in the incident.
    ``weights``: shares of the replicas, if requests are sent by weight alone in the incident. ``may_miss``: share of the requests
    that may miss the slots in a calm period.
    """

    site: Site
    baseline: Mix
    incident: tuple[Mix, ...]
    strength: dict[str, float] = {}
    gap_s: float = 0.0
    after: Site | None = None
    restarts: tuple[Restart, ...] = ()
    slow: float = 1.0
    weights: tuple[float, ...] = ()
    may_miss: float = 0.05

    @property
    def warm_s(self) -> float:
        """Length of the warm-up."""
        return WARM_S + ONCE_S * self.site.standing


def popularity(rng: Random, adapters: list[int], zipf: float) -> dict[int, float]:
    """Shares by Zipf's law, in a random order of ``adapters``."""
    order = rng.sample(adapters, len(adapters))
    return {number: (rank + 1) ** -zipf for rank, number in enumerate(order)}


def ordinary(site: Site, rng: Random) -> Mix:
    """The traffic that ``site`` is made for."""
    shares = popularity(rng, list(range(site.standing)), site.zipf)
    return Mix(
        rate=site.rate * site.replicas,
        shares=shares,
        base_share=site.base_share,
        prompt=site.prompt,
        output=site.output,
    )


def trace(plan: Plan, period_s: float, seed: str) -> Iterator[Request]:
    """All requests, in order of time, from the warm-up's beginning to the incident's end."""
    site, warm = plan.site, plan.warm_s
    first = [_request(site, Random(seed), number * ONCE_S, number, 16, 2) for number in range(site.standing)]
    calm = warm + period_s
    phases = [
        iter(first),
        _arrivals(site, plan.baseline, site.standing * ONCE_S, calm, Random(f"{seed}/baseline")),
        *(
            _arrivals(site, mix, calm, calm + plan.gap_s + period_s, Random(f"{seed}/incident/{number}"))
            for number, mix in enumerate(plan.incident)
        ),
    ]
    return merge(*phases, key=lambda request: request.at)


def _arrivals(site: Site, mix: Mix, since: float, until: float, rng: Random) -> Iterator[Request]:
    adapters, shares = list(mix.shares), list(mix.shares.values())
    at, asked = since, 0
    while (at := at + rng.expovariate(mix.rate)) < until:
        adapter: int | None
        if mix.once:
            if asked == len(adapters):
                return
            adapter = adapters[asked]
            asked += 1
        elif mix.base_share and rng.random() < mix.base_share:
            adapter = None
        else:
            adapter = rng.choices(adapters, shares)[0]
        prompt = rng.lognormvariate(math.log(mix.prompt) - SIGMA * SIGMA / 2, SIGMA)
        output = rng.expovariate(1 / mix.output)
        yield _request(
            site, rng, at, adapter, round(min(prompt, LONGEST * mix.prompt)), round(min(output, LONGEST * mix.output))
        )


def _request(site: Site, rng: Random, at: float, adapter: int | None, prompt: int, output: int) -> Request:
    tenant = rng.randrange(site.tenants) if adapter is None else adapter % site.tenants
    name = None if adapter is None else f"a{adapter}"
    return Request(round(at * SECOND), f"t{tenant}", name, max(1, prompt), max(1, output))
