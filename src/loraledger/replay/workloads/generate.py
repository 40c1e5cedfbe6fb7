"""Generated workloads: pure functions of their parameters and a seed that give requests one by one.

Theory of operation. ``workload`` composes an arrival process, a popularity over a roster, and two length distributions.
``slora`` rebuilds the generator of S-LoRA's benchmark number by number; ``punica`` follows Punica's in its counts and
distributions (its own numbers come from numpy's PCG64 and SciPy and are not rebuilt). Both are named after what they reproduce,
with their parameters as published; ``workload`` with ``power:ALPHA`` is S-LoRA's spread with everything else free.

Adapters are called a0, a1, ... in order of popularity at the start, tenants t0, t1, ...; an adapter belongs to tenant index mod
tenants. ``describe`` in the module of that name says what a workload came to.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from loraledger.replay.traces.trace import MAX_ADAPTERS, Adapter, Request
from loraledger.replay.workloads.draws import Draw, Gap, stream, to_ns
from loraledger.replay.workloads.legacy_random import LegacyRandom
from loraledger.replay.workloads.popularity import punica_counts, sampler, shares
from loraledger.replay.workloads.roster import Every, Roster

Rows = Iterator[tuple[int, Request]]
"""(row number, request) pairs, as ``write_trace`` takes them."""

MAX_REQUESTS: Final = 100_000_000
SLORA_SEED: Final = 42
SLORA_RANGE: Final = (8, 512)
"""S-LoRA's lengths, both ways: the first number may be drawn, the second not."""


def named_adapters(count: int, ranks: Sequence[int] = (), bytes_per_rank: int | None = None) -> tuple[Adapter, ...]:
    """Adapters a0, a1, ...; their ranks cycle through ``ranks``, as S-LoRA's do. Raises ``ValueError`` for too many."""
    if not 0 <= count <= MAX_ADAPTERS:
        raise ValueError(f"{count} adapters: a trace has 0 to {MAX_ADAPTERS:,}")
    if any(rank < 1 for rank in ranks):
        raise ValueError("a rank is 1 or more")
    found = []
    for index in range(count):
        rank = ranks[index % len(ranks)] if ranks else None
        size = rank * bytes_per_rank if rank is not None and bytes_per_rank is not None else None
        found.append(Adapter(f"a{index}", rank, size))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Who asks for what: ``popularity`` over ``active`` of ``adapters`` adapters (default: all), ``base_share`` to the base
    model."""

    adapters: int
    popularity: str
    tenants: int = 1
    base_share: float = 0.0
    active: int | None = None
    drift: Every | None = None
    churn: Every | None = None


class Assigner:
    """Draws tenant and adapter of one request after the other. Raises ``ValueError`` for a mix that cannot be."""

    def __init__(self, mix: Mix, seed: int) -> None:
        if mix.tenants < 1 or not 0 <= mix.base_share <= 1:
            raise ValueError(f"{mix.tenants} tenants, base share {mix.base_share}: 1 or more, and 0 to 1")
        seats = mix.adapters if mix.active is None else mix.active
        self._tenants = [f"t{index}" for index in range(min(mix.tenants, MAX_ADAPTERS))]
        self._names = [f"a{index}" for index in range(mix.adapters)]
        self._base = stream(seed, "base")
        self._base_share = mix.base_share
        self._rank = sampler(shares(mix.popularity, seats), stream(seed, "adapters"))
        self._roster = Roster(mix.adapters, seats, mix.drift, mix.churn, stream(seed, "churn"))

    def draw(self, at: int) -> tuple[str, str | None]:
        """Tenant and adapter (``None``: base model) of a request at ``at`` ns."""
        if self._base_share and self._base.random() < self._base_share:
            return self._tenants[self._base.randrange(len(self._tenants))], None
        index = self._roster.adapter(at, self._rank())
        return self._tenants[index % len(self._tenants)], self._names[index]


def laid_over(rows: Rows, mix: Mix, seed: int) -> Rows:
    """``rows`` with tenant and adapter drawn from ``mix``, for traces that have none. Raises ``ValueError`` at the first row."""
    assign = Assigner(mix, seed).draw
    for number, row in rows:
        tenant, adapter = assign(row.at)
        yield number, Request(row.at, tenant, adapter, row.prompt_tokens, row.output_tokens, row.blocks)


def workload(
    mix: Mix,
    gap: Gap,
    prompt: Draw,
    output: Draw,
    *,
    rate: float,
    requests: int | None = None,
    duration: int | None = None,
    seed: int,
) -> Iterator[Request]:
    """Requests at ``rate`` a second, as many as ``requests`` or up to ``duration`` ns. Raises ``ValueError`` at the first one.

    ``MAX_REQUESTS`` end it in any case.
    """
    if not 0 < rate <= 1e9:
        raise ValueError(f"a rate of {rate:g} a second: above 0, up to 1e9")
    assign = Assigner(mix, seed).draw
    arrivals, prompts, outputs = stream(seed, "arrivals"), stream(seed, "prompts"), stream(seed, "outputs")
    limit, now = min(requests or MAX_REQUESTS, MAX_REQUESTS), 0.0
    for _ in range(limit):
        now += gap(arrivals) / rate
        at = to_ns(now)
        if duration is not None and at >= duration:
            return
        tenant, adapter = assign(at)
        yield Request(at, tenant, adapter, prompt(prompts), output(outputs))


def slora(
    *,
    adapters: int,
    alpha: float = 1.0,
    rate: float,
    cv: float = 1.0,
    duration_s: float,
    lengths: tuple[int, int] = SLORA_RANGE,
    seed: int = SLORA_SEED,
) -> Iterator[Request]:
    """The request sequence of S-LoRA's benchmark (its ``generate_requests``), to the microsecond.

    int(rate * duration) requests; adapter floor(power(alpha) * n); prompt and output uniform in [low, high); gaps Gamma(1/cv^2,
    cv^2/rate) in s, the first one before the first request. All adapters are drawn first, then all prompts, all outputs, all
    gaps. Raises ``ValueError`` at the first request for parameters that its authors' code could not take either.
    """
    count, (low, high) = int(rate * duration_s), lengths
    if not (adapters >= 1 and alpha > 0 and rate > 0 and cv > 0 and 1 <= low < high <= 2**31 and count <= MAX_REQUESTS):
        raise ValueError("S-LoRA's generator wants adapters, alpha, rate, cv above 0 and lengths low < high")
    numbers = LegacyRandom(seed)
    chosen = array("l", (min(int(numbers.power(alpha) * adapters), adapters - 1) for _ in range(count)))
    prompts = array("l", (numbers.integer(low, high) for _ in range(count)))
    outputs = array("l", (numbers.integer(low, high) for _ in range(count)))
    shape, scale, now = 1.0 / (cv * cv), cv * cv / rate, 0.0
    for index, prompt, output in zip(chosen, prompts, outputs, strict=True):
        now += numbers.gamma(shape) * scale
        yield Request(to_ns(now), "t0", f"a{index}", prompt, output)


PUNICA_TOKENS: Final = 2048
"""Prompt and output together stay below this in Punica's benchmark."""


def punica(kind: str, *, requests: int, gap: Gap, rate: float, seed: int) -> Iterator[Request]:
    """A run of Punica's text generation benchmark: its counts by adapter, shuffled, and its lengths.

    Prompt: 18 exp(0.8 z) - 1 for a standard normal z, cut to 2,046; total uniform in [0, 2048), but at least two tokens more
    than the prompt. Its loop is closed (the next request starts when one ends): ``at-once`` arrivals leave that to the
    replica's batch limit.
    """
    order = [index for index, count in enumerate(punica_counts(kind, requests)) for _ in range(count)]
    stream(seed, "adapters").shuffle(order)
    lengths, arrivals, now = stream(seed, "lengths"), stream(seed, "arrivals"), 0.0
    for index in order:
        now += gap(arrivals) / rate
        prompt = max(1, min(int(18.0 * lengths.lognormvariate(0.0, 0.8) - 1.0), PUNICA_TOKENS - 2))
        total = max(prompt + 2, lengths.randrange(PUNICA_TOKENS))
        yield Request(to_ns(now), "t0", f"a{index}", prompt, total - prompt)
