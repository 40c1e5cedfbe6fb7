"""Draws one incident of each kind: the ranges that are stated here, and sums that say how hard it has to hit.

Theory of operation. Kind and seed name a stream of chance, from which first a site is drawn and then what happens to it. Where an
incident is sized by a sum (how much KV the streams of longer outputs would hold, against what there is), the strength is drawn and
the size follows; a site on which no size has that effect is drawn again (``UnfitError``). Nothing here knows of any diagnosis.

Strengths: *surge* load over what the fleet can do 1.1 to 1.7; *prompts* the same 1.05 to 1.4; *hot adapter* and *skew* load of
the busiest replica over what one can do 1.15 to 1.6; *KV* and *floor* wanted over there 1.25 to 2; *starvation* adapters at a
replica over its slots 1.3 to 4; *scan* adapters asked for once a second at each replica 0.3 to 0.9; *disk* times slower 3 to 15;
*storm* one restart of each replica in 35 to 80 s. *Nothing wrong* is the site of any other kind, its traffic drawn anew with a rate
10 % off at most.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from msgspec.structs import replace

from benchmarks.incidents.kinds import KINDS, Kind
from benchmarks.incidents.plan import Mix, Plan, Restart, ordinary, popularity
from benchmarks.incidents.site import Site, draw_site, loguniform
from loraledger.kernel.rendezvous import seed_of, weight

KV_SPARE: Final = 8
"""KV that prompts of another size have at least, in full batches."""


class UnfitError(ValueError):
    """This site cannot have an incident of this kind: draw another one."""


def draw(kind: Kind, seed: int, redraw: int, period_s: float) -> Plan:
    """The plan of ``kind`` and ``seed``, after so many redraws. Raises ``UnfitError``."""
    return _DRAWS[kind](Random(f"incident/{kind}/{seed}/{redraw}"), period_s)


def _surge(rng: Random, period_s: float) -> Plan:
    site = draw_site(rng)
    mix, load = ordinary(site, rng), rng.uniform(1.1, 1.7)
    use = site.rate * site.cost_s(site.prompt, site.output)
    return Plan(site=site, baseline=mix, incident=(replace(mix, rate=mix.rate * load / use),), strength={"load": load})


def _prompts(rng: Random, period_s: float) -> Plan:
    site = draw_site(rng, use=(0.4, 0.65))
    load = rng.uniform(1.05, 1.4)
    longer = next(
        (
            times / 10
            for times in range(20, 140)
            if site.rate * site.cost_s(site.prompt * times / 10, site.output) >= load
        ),
        None,
    )
    if longer is None:
        raise UnfitError("no prompts are long enough")
    blocks = round(site.max_seqs * (site.prompt * longer + site.output) * KV_SPARE / 16)
    site = replace(site, kv_blocks=max(site.kv_blocks, blocks))
    mix = ordinary(site, rng)
    incident = replace(mix, prompt=site.prompt * longer)
    return Plan(site=site, baseline=mix, incident=(incident,), strength={"load": load, "prompts": longer})


def _scan(rng: Random, period_s: float) -> Plan:
    site = draw_site(rng, use=(0.3, 0.5), fill=(0.4, 0.65))
    rate = rng.uniform(0.3, 0.9) * site.replicas
    site = replace(
        site,
        scanned=round(rate * period_s) + 1,
        ranks=tuple(rng.choices((16, 32, 64), k=5)),
        disk_bytes_per_s=round(loguniform(rng, 120e6, 400e6)),
        host_entries=site.slots * rng.choice((1, 2)),
    )
    mix = ordinary(site, rng)
    scanned = dict.fromkeys(range(site.standing, site.standing + site.scanned), 1.0)
    scan = Mix(rate=rate, shares=scanned, base_share=0.0, prompt=site.prompt, output=rng.uniform(4, 24), once=True)
    return Plan(site=site, baseline=mix, incident=(mix, scan), strength={"scanned a second": rate})


def _disk(rng: Random, period_s: float) -> Plan:
    site = draw_site(rng, use=(0.3, 0.5))
    hosts = site.slots * rng.choice((1, 2))
    site = replace(
        site,
        host_entries=hosts,
        standing=round(site.replicas * hosts * rng.uniform(1.0, 1.4)),
        zipf=rng.uniform(1.1, 1.7),
        ranks=tuple(rng.choices((8, 16, 32), k=5)),
    )
    mix, slow = ordinary(site, rng), loguniform(rng, 3, 15)
    return Plan(site=site, baseline=mix, incident=(mix,), strength={"times slower": slow}, slow=slow, may_miss=0.35)


def _hot(rng: Random, period_s: float) -> Plan:
    site = replace(_one_tenant(rng, fill=(0.25, 0.45)), policy="strict-affinity", zipf=rng.uniform(0.2, 0.6))
    mix, (there, load) = ordinary(site, rng), _crowd(site, rng)
    hot = rng.randrange(site.standing)
    others = {number: share for number, share in mix.shares.items() if number != hot}
    rest = sum(others.values())
    beside = sum(share for number, share in others.items() if _home(site, number) == _home(site, hot)) / rest
    share = (there - beside) / (1 - beside)
    if not 0.4 < share < 0.95:
        raise UnfitError("no share of one adapter does it")
    shares = {**others, hot: rest * share / (1 - share)}
    incident = replace(mix, shares=shares, base_share=0.0)
    return Plan(site=site, baseline=mix, incident=(incident,), strength={"load": load, "share": share})


def _skew(rng: Random, period_s: float) -> Plan:
    """Either adapters become popular that have one home, or requests go by weight."""
    site = _one_tenant(rng, fill=(0.35, 0.6))
    there, load = _crowd(site, rng)
    strength = {"load": load, "share": there}
    if rng.random() < 0.5:
        site = replace(site, zipf=rng.uniform(0.3, 0.9))
        weights = [(1 - there) / (site.replicas - 1)] * site.replicas
        weights[rng.randrange(site.replicas)] = there
        mix = ordinary(site, rng)
        return Plan(site=site, baseline=mix, incident=(mix,), strength=strength, weights=tuple(weights))
    site = replace(site, policy="strict-affinity", zipf=rng.uniform(0.0, 0.4), base_share=0.0)
    mix, name = ordinary(site, rng), site.names[rng.randrange(site.replicas)]
    crowd = {number: share for number, share in mix.shares.items() if _home(site, number) == name}
    others = {number: share for number, share in mix.shares.items() if number not in crowd}
    if len(crowd) < 4 or not others:
        raise UnfitError("too few adapters have one home")
    times = sum(others.values()) * there / (1 - there) / sum(crowd.values())
    shares = {**others, **{number: share * times for number, share in crowd.items()}}
    return Plan(site=site, baseline=mix, incident=(replace(mix, shares=shares),), strength=strength)


def _one_tenant(rng: Random, fill: tuple[float, float]) -> Site:
    """A site that can be crowded: where there are several tenants, what each may hold of a replica sends the rest elsewhere."""
    return replace(draw_site(rng, use=(0.45, 0.65), fill=fill), tenants=1)


def _crowd(site: Site, rng: Random) -> tuple[float, float]:
    """The share of all traffic that loads one replica as is drawn, and that load. Raises ``UnfitError``."""
    whole = site.replicas * site.rate * site.cost_s(site.prompt, site.output)
    most = min(1.6, 0.92 * whole)
    if most < 1.15:
        raise UnfitError("all traffic would not fill one replica")
    load = rng.uniform(1.15, most)
    return load / whole, load


def _home(site: Site, number: int) -> str:
    """Where strict affinity sends an adapter."""
    return max(site.names, key=lambda name: weight(seed_of(f"a{number}"), seed_of(name)))


def _exhausted(rng: Random, period_s: float) -> Plan:
    site = draw_site(rng, fill=(0.4, 0.7))
    times, wanted = rng.uniform(3, 7), rng.uniform(1.25, 2.0)
    site = replace(site, max_seqs=128, output=round(loguniform(rng, 60, 140)))
    site = replace(site, rate=_rate_of(site, rng.uniform(4, 9)))
    streams, longer = site.streams(site.rate, site.prompt, site.output * times), site.output * times
    if streams > 0.75 * site.max_seqs or site.rate * site.cost_s(site.prompt, longer) > 0.8:
        raise UnfitError("so many streams are a matter of computing")
    site = _with_kv(site, streams * (site.prompt + longer) / wanted, longer)
    mix = ordinary(site, rng)
    incident = replace(mix, output=longer)
    return Plan(site=site, baseline=mix, incident=(incident,), strength={"KV wanted": wanted, "outputs": times})


def _floor(rng: Random, period_s: float) -> Plan:
    site = replace(draw_site(rng, fill=(0.35, 0.6)), max_seqs=64, output=round(loguniform(rng, 100, 260)))
    site = replace(site, rate=_rate_of(site, rng.uniform(10, 22)))
    wanted, spare = rng.uniform(1.25, 2.0), rng.uniform(2.0, 3.5)
    held = site.streams(site.rate, site.prompt, site.output) * (site.prompt + site.output)
    small = _with_kv(site, held / wanted, site.output)
    site = replace(site, kv_blocks=round(held * spare / 16))
    if rng.random() < 0.5:  # more slots took it, else rank or headroom did
        small = replace(small, slots=site.slots * 2, host_entries=max(site.host_entries, site.slots * 2))
    mix, down = ordinary(site, rng), rng.uniform(4, 8)
    restarts = tuple(Restart(name, 12.0 * number + 6.0, down, 5.0) for number, name in enumerate(site.names))
    return Plan(
        site=site,
        baseline=mix,
        incident=(mix,),
        strength={"KV wanted": wanted, "KV left": small.kv_blocks / site.kv_blocks},
        gap_s=12.0 * site.replicas + 20.0,
        after=small,
        restarts=restarts,
    )


def _rate_of(site: Site, streams: float) -> float:
    """Arrivals a second at which about so many streams run on a replica. Raises ``UnfitError``."""
    low, high = 0.01, 200.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if site.streams(middle, site.prompt, site.output) < streams else (low, middle)
    if low * site.cost_s(site.prompt, site.output) > 0.7:
        raise UnfitError("so many streams are a matter of computing")
    return low


def _with_kv(site: Site, tokens: float, output: float) -> Site:
    """``site`` with KV for so many tokens; the longest request has to fit in half of it. Raises ``UnfitError``."""
    if 4 * (site.prompt + output) > tokens / 1.2:
        raise UnfitError("the longest requests would not fit")
    return replace(site, kv_blocks=round(tokens / 16))


def _starved(rng: Random, period_s: float) -> Plan:
    slots, over = rng.choice((4, 6, 8)), rng.uniform(1.3, 4.0)
    site = replace(draw_site(rng, use=(0.4, 0.6)), slots=slots, max_seqs=rng.choice((32, 48)))
    site = replace(site, rate=rng.uniform(0.4, 0.6) / site.cost_s(site.prompt, site.output))
    streams = site.streams(site.rate, site.prompt, site.output)
    if streams < slots * 1.1:
        raise UnfitError("too few streams to fill the slots")
    few, each = max(2, round(site.replicas * slots * rng.uniform(0.3, 0.6))), max(slots + 2, round(slots * over))
    standing = max(few + 2, site.replicas * each)
    site = replace(site, standing=standing, host_entries=2 * standing, kv_blocks=site.kv_blocks * 2)
    everyone = list(range(standing))
    mix = replace(ordinary(site, rng), shares=popularity(rng, rng.sample(everyone, few), site.zipf))
    incident = replace(mix, shares=popularity(rng, everyone, rng.uniform(0.0, 0.3)))
    return Plan(site=site, baseline=mix, incident=(incident,), strength={"adapters over slots": each / slots})


def _storm(rng: Random, period_s: float) -> Plan:
    site = draw_site(rng, use=(0.3, 0.42), fill=(0.4, 0.7))
    abrupt = rng.random() < 0.5
    site = replace(
        site,
        replicas=rng.randint(3, 4),
        ranks=tuple(rng.choices((32, 64), k=5)),
        disk_bytes_per_s=round(loguniform(rng, 100e6, 300e6)),
        park_s=1 if abrupt else 600,  # who parks what two exits coincided with refuses most requests of a crash loop
    )
    mix, every, restarts = ordinary(site, rng), rng.uniform(35, 80), []
    for number, name in enumerate(site.names):
        at = every * (number + rng.random()) / site.replicas
        while at < period_s - 10:
            restarts.append(Restart(name, at, rng.uniform(5, 12), 0.0 if abrupt else 4.0))
            at += every * rng.uniform(0.8, 1.2)
    strength = {"seconds between": every, "abrupt": float(abrupt)}
    return Plan(site=site, baseline=mix, incident=(mix,), strength=strength, restarts=tuple(restarts))


def _nothing(rng: Random, period_s: float) -> Plan:
    like = rng.choice([kind for kind in KINDS if kind != "nothing wrong"])
    plan, rate = _DRAWS[like](rng, period_s), rng.uniform(0.9, 1.1)
    calm = replace(plan.baseline, rate=plan.baseline.rate * rate)
    return Plan(
        site=plan.site,
        baseline=plan.baseline,
        incident=(calm,),
        strength={f"site of {like}": 1.0, "rate": rate},
        may_miss=plan.may_miss,
    )


_DRAWS: Final[dict[Kind, Callable[[Random, float], Plan]]] = {
    "arrival surge": _surge,
    "cold scan": _scan,
    "hot adapter on one replica": _hot,
    "KV exhaustion": _exhausted,
    "slow disk loads": _disk,
    "routing skew": _skew,
    "slot starvation": _starved,
    "longer prompts": _prompts,
    "restart storm": _storm,
    "floor too tight": _floor,
    "nothing wrong": _nothing,
}
