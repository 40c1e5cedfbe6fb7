"""Incidents on real vLLM, recorded by the real gateway, and what the diagnosis says of the record.

Theory of operation. Two engines serve all parts but one: a calm one twice, an arrival surge, a cold scan, and a hot adapter whose
home cannot carry it while the other replica idles (the policy is strict affinity throughout). A third engine has a KV cache of
``KV_BLOCKS``; what exhausts it is that outputs get longer, which the gateway's estimate follows too late. Each part is judged
against an untroubled one of the same record. Before the diagnosis is asked, each test makes sure by the engines' own words that
the incident took place, and that nothing else did.

- calm: a user for each of four adapters, two of each replica, who pause as long as their answers took; surge: ``CROWD`` without.
- busy: as many users as the engines have seats; hot: nearly all of these want one adapter, so that half of them wait for a seat;
  scan: each of their requests is for the next of 64 cold adapters. A read from disk takes this small model some milliseconds; the
  scan hurts because of cold adapters only two, as many as there are slots, fit a batch of eight.
- small KV: ``KV_USERS`` with outputs of a quarter of a block, then of two blocks and a half.

The limit for the time to the first token is ``SLOW`` times its 90th percentile in the part that is compared with.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from loraledger.conductor.reading import open_record
from loraledger.kernel.rendezvous import seed_of, weight
from loraledger.signals.diagnosis import diagnose
from loraledger.signals.diagnosis.verdict import Diagnosis
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Group, Signals
from loraledger.signals.measure import measure

from .engine import Model
from .probe_client import KEY
from .staging import ENOUGH, HOST_ENTRIES, SEATS, SLOTS, VARIABLE, Part, Stage, Truth, User, staged_engine, variants

TOKENS, LONG = 32, 320
CROWD = 6 * SEATS
SLOW = 3.0
KV_BLOCKS, KV_SEATS, KV_USERS = 24, 16, 12


@dataclass(frozen=True)
class Played:
    """The parts of one record."""

    parts: dict[str, Part]
    record: Path
    facts: Facts

    def signals(self, name: str, slo_s: float) -> Signals:
        with open_record(self.record) as reader:
            return measure(reader, self.parts[name].window, self.facts, slo_s=slo_s)

    def judged(self, name: str, baseline: str = "calm") -> Diagnosis:
        """What the diagnosis says of one part, by another."""
        usual = total(self.signals(baseline, 1.0)).ttft
        assert usual is not None
        slo_s = SLOW * usual.p90
        now, before = self.signals(name, slo_s), self.signals(baseline, slo_s)
        answer = diagnose(now, before, self.facts, record=str(self.record))
        print(f"\n{name}: {self.parts[name].truth}\n{shown(before)}\n{shown(now)}")
        print(f"{answer.pool} by {answer.cause}, {answer.confidence}: {answer.sentence}")
        return answer


def total(signals: Signals) -> Group:
    assert signals.total is not None
    return signals.total


def shown(signals: Signals) -> str:
    """The figures that tell the parts apart, for whoever has to find out why one was judged wrongly."""
    lines = []
    for name, group in {"all": total(signals), **signals.replicas}.items():
        lines.append(f"  {name}: {group.requests} requests, {group.active_tokens} active tokens, {group.hits}")
        lines.append(f"    attainment {group.attainment}, ttft {group.ttft}\n    {group.split}")
        lines.append(f"    {group.working_set}\n    {group.pressure}")
    return "\n".join(lines)


def home(adapter: str) -> str:
    """Where strict affinity sends it, of two replicas."""
    return max(("r1", "r2"), key=lambda name: weight(seed_of(adapter), seed_of(name)))


@pytest.fixture(scope="module")
def probes() -> Iterator[None]:
    """The key by which gateways read what the engines' probes tell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, KEY)
        yield


@pytest.fixture(scope="module")
def pair(model: Model, probes: None, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """What was played on two engines."""
    folder = tmp_path_factory.mktemp("incidents")
    names = sorted(model.adapters, key=home)
    usual = [*names[:2], *names[-2:]]  # two of each replica's
    cold = variants({name: path for name, path in model.adapters.items() if name not in usual}, folder / "cold", 8)
    engines = [staged_engine(model, folder / f"engine{number}") for number in (1, 2)]
    with ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.stop)
            engine.launch()
        for engine in engines:
            engine.wait_healthy()
        with Stage(folder / "gateway", engines, {**model.adapters, **cold}) as stage:
            parts = asyncio.run(play_pair(stage, usual, list(cold)))
    return Played(parts, stage.gateway.record, stage.facts)


async def play_pair(stage: Stage, usual: list[str], cold: list[str]) -> dict[str, Part]:
    hot, *_, other = usual
    await stage.warm(usual)
    parts = {
        "calm": await stage.play(users(usual, 4, pause=1.0), TOKENS),
        "again": await stage.play(users(usual, 4, pause=1.0), TOKENS),
        "surge": await stage.play(users(usual, CROWD), TOKENS),
        "busy": await stage.play(users(usual, 2 * SEATS), TOKENS),
        "hot": await stage.play([*users([hot], 2 * SEATS - 1), *users([other], 1, pause=9.0)], TOKENS),
    }
    walk = itertools.cycle(cold)
    return parts | {"scan": await stage.play([User(walk)] * 2 * SEATS, TOKENS)}


def users(names: list[str], count: int, pause: float = 0.0) -> list[User]:
    """So many, each faithful to one adapter; as many of each."""
    return [User(itertools.repeat(names[number % len(names)]), pause) for number in range(count)]


@pytest.fixture(scope="module")
def small(model: Model, probes: None, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """What was played on one engine with a small KV cache."""
    folder = tmp_path_factory.mktemp("small")
    usual = list(model.adapters)[:2]
    blocks = ("--num-gpu-blocks-override", str(KV_BLOCKS))
    with (
        staged_engine(model, folder / "engine", *blocks, seats=KV_SEATS) as engine,
        Stage(folder / "gateway", [engine], model.adapters, seats=KV_SEATS) as stage,
    ):
        parts = asyncio.run(play_small(stage, usual))
    return Played(parts, stage.gateway.record, stage.facts)


async def play_small(stage: Stage, usual: list[str]) -> dict[str, Part]:
    await stage.warm(usual)
    return {
        "calm": await stage.play(users(usual, KV_USERS), TOKENS),
        "long": await stage.play(users(usual, KV_USERS), LONG),
    }


def summed(part: Part) -> Truth:
    """Both engines together; the greater of the greatest."""
    truths = part.truth.values()
    return Truth(
        sum(truth.finished for truth in truths),
        sum(truth.preemptions for truth in truths),
        sum(truth.loads for truth in truths),
        max(truth.waiting for truth in truths),
        max(truth.kv_usage for truth in truths),
    )


def all_served(part: Part) -> Truth:
    truth = summed(part)
    assert truth.finished == len(part.sent) >= ENOUGH
    return truth


def rate(part: Part) -> float:
    """Requests a second."""
    return len(part.sent) / part.window.seconds


@pytest.mark.parametrize("name", ["calm", "again", "busy"])
def test_untroubled_parts_were_untroubled(pair: Played, name: str) -> None:
    truth = all_served(pair.parts[name])
    assert (truth.loads, truth.preemptions) == (0, 0)
    assert truth.waiting < SEATS / 2


def test_calm_after_calm_is_nothing(pair: Played) -> None:
    assert pair.judged("again").pool == "nothing"


def test_an_arrival_surge_within_the_slots_is_demand(pair: Played) -> None:
    part = pair.parts["surge"]
    truth = all_served(part)
    assert (truth.loads, truth.preemptions) == (0, 0)
    assert min(each.waiting for each in part.truth.values()) > SEATS, "both had a queue"
    assert rate(part) > 2 * rate(pair.parts["calm"])
    assert pair.judged("surge").pool == "demand"


def test_a_scan_of_cold_adapters_is_adapters(pair: Played) -> None:
    part = pair.parts["scan"]
    truth = all_served(part)
    assert len(set(part.sent)) > 2 * (SLOTS + HOST_ENTRIES)
    assert truth.loads >= 0.9 * len(part.sent), "nearly each request had its adapter read from disk"
    assert truth.preemptions == 0
    assert truth.waiting > SEATS / 2, "they wait for slots"
    assert pair.judged("scan", "busy").pool == "adapters"


def test_a_hot_adapter_on_one_replica_while_the_other_idles_is_routing(pair: Played) -> None:
    part = pair.parts["hot"]
    truth = all_served(part)
    assert (truth.loads, truth.preemptions) == (0, 0)
    assert part.truth["r1"].waiting > SEATS / 2
    assert part.truth["r2"].waiting == 0
    assert part.truth["r1"].finished > 5 * part.truth["r2"].finished
    assert rate(part) < 1.5 * rate(pair.parts["busy"]), "it is not that more is asked for"
    assert pair.judged("hot", "busy").pool == "routing"


def test_an_exhausted_kv_cache_is_kv(small: Played) -> None:
    calm, truth = all_served(small.parts["calm"]), all_served(small.parts["long"])
    assert (calm.preemptions, calm.loads) == (0, 0)
    assert calm.kv_usage < 0.6
    assert truth.preemptions > 5
    assert truth.kv_usage > 0.9
    assert truth.loads == 0
    assert rate(small.parts["long"]) < rate(small.parts["calm"]), "it is not that more is asked for"
    assert small.judged("long").pool == "kv"
