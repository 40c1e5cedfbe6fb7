"""The twin's caches against what theory says of them.

Theory of operation. *LRU.* Under independent requests an LRU of C entries finds adapter i with probability 1 - exp(-p_i t), where
t is such that these add up to C (Che and others: Hierarchical Web Caching Systems, 2002); no cache that keeps the same adapters
for ever beats the C most popular ones. Computed hit ratios are compared with published ones (two decimals, hence .01), and the
twin's slots with the computation.

*The offline bound.* Each policy plays traces of different kinds on two replicas; what it spent on loads must not be below what the
record of its own run proves that nobody could have avoided (``replay.results.bound``).

*Sizing.* InfiniLoRA (arXiv 2604.07173) sizes an adapter cache by the share of requests that are admitted at once. Ours in closed
form: requests of adapter i come at rate l_i and stay for S on average. If all were admitted at once, adapter i would be in use
with probability a_i = 1 - exp(-l_i S), independently of the others and whatever the distribution of S (M/G/infinity). A request
of i finds its adapter in use, or fewer than C others (arrivals see time averages), ::

    admitted = sum p_i (a_i + (1 - a_i) P(others in use < C))

where the number of others is a sum of independent yes and no's, whose distribution is exact by convolution. The least C with 95 %
is compared with the least C at which the twin, where the others wait for a slot, gives a first token in two steps to 95 %. Neither
needs data.
"""

from __future__ import annotations

import math
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.registered import registered
from benchmarks.reproduce.table import FLOOR, Line
from loraledger.events import AdapterSpec
from loraledger.kernel.policies import policy_names
from loraledger.kernel.settings import MS, FleetSettings, ReplicaSpec, TenantSpec
from loraledger.replay.fleet.run import run
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.results.report import summarize
from loraledger.replay.traces.trace import Request
from loraledger.replay.workloads.draws import parse_arrivals, parse_lengths, stream
from loraledger.replay.workloads.generate import Mix, workload
from loraledger.replay.workloads.popularity import sampler, shares
from loraledger.replay.workloads.roster import Every
from loraledger.twin.events import Activated, TokenOut, TwinRequest
from loraledger.twin.profile import PS_PER_MS, PS_PER_S, TwinProfile
from loraledger.twin.replica import ReplicaTwin
from loraledger.units import NS_PER_S

THEORY: Final = "cache theory"
SIZING: Final = "cache sizing"
SIZES: Final = (8, 16, 32, 64, 128)
PUBLISHED: Final[dict[tuple[str, int], tuple[tuple[float, ...], tuple[float, ...]]]] = {
    # spread, adapters: hit ratios of LRU, and of the best static choice, for SIZES
    ("zipf:1.0", 512): ((0.21, 0.33, 0.45, 0.58, 0.71), (0.40, 0.50, 0.60, 0.70, 0.80)),
    ("zipf:1.2", 512): ((0.39, 0.52, 0.64, 0.74, 0.84), (0.56, 0.66, 0.75, 0.82, 0.89)),
    ("zipf:1.5", 512): ((0.65, 0.76, 0.85, 0.90, 0.95), (0.76, 0.84, 0.90, 0.94, 0.97)),
    ("power:1", 200): ((0.04, 0.08, 0.16, 0.32, 0.64), (0.04, 0.08, 0.16, 0.32, 0.64)),
}
SIMULATED: Final = (*PUBLISHED, ("exponential:0.019", 512))
"""The last one stands for vectors made from Azure Functions traffic, which nobody publishes under a licence."""
_SIMULATED_SIZES: Final = (16, 64)
_ASKED: Final = 40_000
_TOLERANCE: Final = 0.01
_ROUNDED: Final = 0.005

_STEP_PS: Final = 20 * PS_PER_MS
_OUTPUTS: Final = (50, 350)
_AT_ONCE: Final = 0.95
_SIZING_TOLERANCE: Final = 0.05


def lines(data: Path, say: Callable[[str], None]) -> list[Line]:
    """Both targets. Needs nothing of ``data``."""
    return [*_closed_forms(), *_simulated(say), *_policies(say), *_sizing(say)]


# --- LRU --------------------------------------------------------------------------------------------------------------


def che(popularity: Sequence[float], size: int) -> float:
    """Hit ratio of an LRU of ``size`` entries; ``popularity`` sums to 1."""
    low, high = 0.0, 1e9
    for _ in range(100):
        middle = (low + high) / 2
        held = math.fsum(1 - math.exp(-share * middle) for share in popularity)
        low, high = (middle, high) if held < size else (low, middle)
    return math.fsum(share * (1 - math.exp(-share * low)) for share in popularity)


def _normal(spread: str, adapters: int) -> list[float]:
    weights = shares(spread, adapters)
    total = math.fsum(weights)
    return sorted((weight / total for weight in weights), reverse=True)


def _closed_forms() -> list[Line]:
    found = []
    for (spread, adapters), (lru, static) in PUBLISHED.items():
        popularity = _normal(spread, adapters)
        for what, published, ours in (
            ("LRU by Che", lru, [che(popularity, size) for size in SIZES]),
            ("best static", static, [math.fsum(popularity[:size]) for size in SIZES]),
        ):
            worst = max(zip(published, ours, strict=True), key=lambda pair: abs(pair[1] - pair[0]))
            error = worst[1] - worst[0]
            found.append(
                Line(
                    THEORY,
                    f"{what}, {spread} over {adapters}, worst of {len(SIZES)} sizes",
                    "hit ratio",
                    worst[0],
                    worst[1],
                    f"{error:+.3f}",
                    ".01",
                    abs(error) <= _TOLERANCE + _ROUNDED,
                    group=what,
                )
            )
    return found


def _simulated(say: Callable[[str], None]) -> list[Line]:
    found = []
    for spread, adapters in SIMULATED:
        say(f"{THEORY}: LRU under {spread}")
        popularity = _normal(spread, adapters)
        for size in _SIMULATED_SIZES:
            expected, ours = che(popularity, size), hit_ratio(popularity, size)
            error = ours - expected
            found.append(
                Line(
                    THEORY,
                    f"slots under {spread} over {adapters}, {size} slots, against Che",
                    "hit ratio",
                    expected,
                    ours,
                    f"{error:+.3f}",
                    ".01",
                    abs(error) <= _TOLERANCE,
                    group="slots against Che",
                )
            )
    return found


def hit_ratio(popularity: Sequence[float], slots: int, asked: int = _ASKED) -> float:
    """Share of ``asked`` requests, one after the other, that find their adapter in one of the twin's ``slots``."""
    twin = ReplicaTwin(TwinProfile(slots=slots, host_entries=len(popularity), load_overhead_ps=0, activation_ps=1))
    now = registered(twin, _equal(len(popularity)))
    draw, warm, activated = sampler(list(popularity), stream(1, "che")), 20 * slots, 0
    for number in range(warm + asked):
        twin.submit(now, TwinRequest(f"r{number}", f"a{draw()}", 1, 1))
        while (upcoming := twin.next_at()) is not None:
            now = upcoming
            for event in twin.advance(now):
                activated += number >= warm and type(event) is Activated
    return 1 - activated / asked


def _equal(adapters: int) -> Iterator[tuple[str, int, int]]:
    return ((f"a{number}", 0, 1) for number in range(adapters))


# --- the offline bound ------------------------------------------------------------------------------------------------

_ADAPTERS: Final = 60
_REQUESTS: Final = 1_500
_BYTES: Final = 20 << 20
_ABOVE: Final = "published is the least that any policy could have spent in that run: to be far above it is no miss"
_BELOW: Final = "less than the least possible: the bound or the twin is wrong"


def _traces() -> dict[str, list[Request]]:
    poisson, prompt, output = parse_arrivals("poisson"), parse_lengths("20-400"), parse_lengths("1-60")
    mixes = {
        "zipf:1.1": Mix(adapters=_ADAPTERS, popularity="zipf:1.1"),
        "drifting zipf:1.1": Mix(adapters=_ADAPTERS, popularity="zipf:1.1", drift=Every(5 * NS_PER_S, 5)),
        "uniform": Mix(adapters=_ADAPTERS, popularity="uniform", base_share=0.1),
    }
    made = {
        name: list(workload(mix, poisson, prompt, output, rate=25.0, requests=_REQUESTS, seed=3))
        for name, mix in mixes.items()
    }
    made["cyclic scan"] = [Request(n * 40 * MS, "t0", f"a{n % _ADAPTERS}", 100, 20) for n in range(_REQUESTS)]
    return made


def _policies(say: Callable[[str], None]) -> list[Line]:
    """For each policy the trace on which it comes nearest to the bound."""
    profile = TwinProfile(slots=6, host_entries=20)
    specs = tuple(AdapterSpec(f"a{n}", f"{n:064x}", 16, _BYTES) for n in range(_ADAPTERS))
    replicas = tuple(ReplicaSpec(name, profile.slots, profile.host_entries) for name in ("r1", "r2"))
    traces, found = _traces(), []
    for policy in policy_names():
        say(f"{THEORY}: {policy} against the offline bound")
        settings = FleetSettings(replicas, specs, (TenantSpec("t0", 10_000, 10_000),), policy=policy)
        scenario = Scenario(label=policy, settings=settings, profiles={spec.name: profile for spec in replicas})
        worst = (math.inf, "", 0.0, 0.0)
        for name, requests in traces.items():
            spent, least = _work(scenario, requests)
            worst = min(worst, (spent / least, name, least, spent))
        ratio, name, least, spent = worst
        found.append(
            Line(
                THEORY,
                f"{policy}: load work against the least possible, nearest of {len(traces)} traces ({name})",
                "s",
                least,
                spent,
                f"{100 * (ratio - 1):+.1f} %",
                FLOOR,
                ratio >= 1,
                _ABOVE if ratio >= 1 else _BELOW,
                group="load work of a policy",
            )
        )
    return found


def _work(scenario: Scenario, requests: Sequence[Request]) -> tuple[float, float]:
    """(spent, least possible) in s of loads."""
    with tempfile.TemporaryDirectory(prefix="loraledger-") as folder:
        run(scenario, requests, Path(folder), trace_digest="")
        work = summarize(Path(folder)).work
    if work is None or work.least <= 0:
        raise AssertionError(f"{scenario.label}: the run tells nothing of its loads")
    return work.spent, work.least


# --- sizing -----------------------------------------------------------------------------------------------------------


def admitted(popularity: Sequence[float], concurrent: float) -> list[float]:
    """Share of requests admitted at once with 0, 1, ... slots, up to one for each adapter.

    ``concurrent``: requests in service on average, arrival rate times mean stay.
    """
    idle = [math.exp(-share * concurrent) for share in popularity]
    in_use = _how_many(idle)
    found = [0.0] * (len(idle) + 1)
    for share, none in zip(popularity, idle, strict=True):
        below = 0.0
        for slots, chance in enumerate([0.0, *_others(in_use, none)]):
            below += chance
            found[slots] += share * (1 - none + none * min(below, 1.0))
    return found


def _how_many(idle: Sequence[float]) -> list[float]:
    """P(k adapters in use) for k = 0, 1, ...; ``idle``: of each the probability that it is not."""
    chances = [1.0]
    for none in idle:
        grown = [chance * none for chance in chances] + [0.0]
        for count, chance in enumerate(chances):
            grown[count + 1] += chance * (1 - none)
        chances = grown
    return chances


def _others(in_use: Sequence[float], none: float) -> list[float]:
    """``in_use`` without one adapter: the convolution undone, from the end at which the division is stable."""
    found = [0.0] * (len(in_use) - 1)
    if none >= 0.5:
        for count in range(len(found)):
            found[count] = (in_use[count] - (1 - none) * (found[count - 1] if count else 0.0)) / none
    else:
        for count in range(len(found), 0, -1):
            found[count - 1] = (in_use[count] - none * (found[count] if count < len(found) else 0.0)) / (1 - none)
    return found


def simulated(popularity: Sequence[float], concurrent: float, slots: int, arrivals: int = 30_000) -> float:
    """The same share on the twin: a first token within two steps, the one under way and one's own."""
    twin = ReplicaTwin(_sizing_profile(slots, len(popularity)))
    coming = registered(twin, _equal(len(popularity)))
    low, high = _OUTPUTS
    rate = concurrent / (_STEP_PS * (low + high) / 2)
    draw, rng = sampler(list(popularity), stream(1, "adapters")), stream(1, "sizing")
    warm = int(2 * high * _STEP_PS * rate)
    at_once = 0
    at: dict[str, int] = {}
    for number in range(warm + arrivals):
        coming += round(rng.expovariate(rate))
        while (upcoming := twin.next_at()) is not None and upcoming < coming:
            for event in twin.advance(upcoming):
                if type(event) is TokenOut and event.first:
                    at_once += event.at - at.pop(event.id, -PS_PER_S) <= 2 * _STEP_PS
        name = f"r{number}"
        if number >= warm:
            at[name] = coming
        twin.submit(coming, TwinRequest(name, f"a{draw()}", 1, rng.randint(low, high)))
    return at_once / arrivals


def _sizing_profile(slots: int, adapters: int) -> TwinProfile:
    """Steps of one length whatever is in them, room for everybody, loads that take no time."""
    return TwinProfile(
        slots=slots,
        host_entries=adapters,
        max_seqs=8192,
        token_budget=8192,
        kv_blocks=1_000_000,
        step_base_ps=_STEP_PS,
        step_per_seq_ps=0,
        step_per_kv_token_ps=0,
        prefill_per_token_ps=0,
        prefill_floor_ps=0,
        prefill_offset_ps=0,
        adapter_step_ps=0,
        load_overhead_ps=0,
        load_bytes_per_s=PS_PER_S,
        activation_ps=0,
    )


def _sizing(say: Callable[[str], None]) -> list[Line]:
    popularity, found = _normal("zipf:1.2", 512), []
    for concurrent in (50, 200, 800):
        say(f"{SIZING}: {concurrent} requests in service")
        by_slots = admitted(popularity, concurrent)
        closed = bisect_left(by_slots, _AT_ONCE)
        ours = _least(popularity, concurrent, closed)
        error = closed / ours - 1
        found.append(
            Line(
                SIZING,
                f"slots for {100 * _AT_ONCE:.0f} % admitted at once, zipf:1.2 over 512, {concurrent} in service: closed form",
                "slots",
                ours,
                closed,
                f"{100 * error:+.1f} %",
                "5 %",
                abs(error) <= _SIZING_TOLERANCE,
                "" if abs(error) <= _SIZING_TOLERANCE else "requests that wait for a slot keep theirs longer in use",
            )
        )
    return found


def _least(popularity: Sequence[float], concurrent: float, guess: int) -> int:
    """The least number of slots at which the twin admits enough at once, within a factor of two of ``guess``."""
    low, high = guess // 2, 2 * guess
    while high - low > 1:
        middle = (low + high) // 2
        if simulated(popularity, concurrent, middle) < _AT_ONCE:
            low = middle
        else:
            high = middle
    return high
