"""Runs on one pool under the offline bound. A pool has no fixed number of places, so all that the bound asks for is what each
adapter's first use costs, and of the routing as it was, its first use on each replica."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger import events as ev
from loraledger.kernel.policies import policy_names
from loraledger.kernel.settings import MS
from loraledger.replay.fleet.outcome import Outcome
from loraledger.replay.fleet.run import run
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.results.bound import LoadWork, load_work
from loraledger.replay.results.folder import open_runs
from loraledger.replay.traces.trace import Request
from loraledger.twin.profile import PS_PER_MS, PS_PER_S, TwinProfile, UnifiedRules
from replay.fleets import MIB, settings_for


def played(profile: TwinProfile, replicas: int, trace: list[Request], policy: str) -> tuple[Outcome, LoadWork]:
    specs = tuple(ev.AdapterSpec(f"a{n}", f"{n:064x}", 8 << n % 3, (10 << n % 3) * MIB) for n in range(6))
    fleet = settings_for(replicas, specs, policy, profile)
    what = Scenario(label="pool", settings=fleet, profiles={spec.name: profile for spec in fleet.replicas})
    with TemporaryDirectory() as folder:
        outcome = run(what, trace, Path(folder), trace_digest="sha256:abc")
        with open_runs(run=Path(folder)) as tables:
            work = load_work(tables, outcome)
    assert work is not None
    return outcome, work


@st.composite
def pools(draw: st.DrawFn) -> TwinProfile:
    rules = UnifiedRules(
        order=draw(st.sampled_from(("fifo", "lifo", "early_abort"))),
        prefetch=draw(st.booleans()),
        attempt_steps=draw(st.integers(1, 10)),
        first_token_slo_ps=draw(st.sampled_from((600 * PS_PER_MS, 60 * PS_PER_S))),
    )
    changes: dict[str, Any] = {
        "kv_blocks": draw(st.sampled_from((30, 60, 24_576))),
        "max_seqs": draw(st.sampled_from((2, 8, 256))),
        "activation_per_rank_ps": draw(st.sampled_from((0, 10_000_000))),
    }
    return TwinProfile(layout="unified", unified=rules, **changes)


def requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    gap, longest, now, trace = rng.choice([100_000, 10 * MS, 100 * MS, 1000 * MS]), rng.choice([1, 5, 60]), 0, []
    for _ in range(rng.randint(1, 40)):
        now += rng.choice([0, rng.randint(0, gap)])
        name = None if rng.random() < 0.05 else f"a{min(rng.randrange(6), rng.randrange(6))}"
        trace.append(Request(now, "acme", name, rng.randint(1, 60), rng.randint(1, longest)))
    return trace


@given(pools(), st.integers(1, 3), st.integers(0, 2**32), st.sampled_from(policy_names()))
@settings(max_examples=40, deadline=None)
def test_no_policy_spends_less_than_the_least(profile: TwinProfile, replicas: int, seed: int, policy: str) -> None:
    outcome, work = played(profile, replicas, requests(seed), policy)
    assert [counts.slots for counts in outcome.replicas] == [0] * replicas
    for tier in work.tiers:
        assert 0 <= tier.least <= tier.least_as_routed <= tier.spent + 1e-9
        assert tier.least <= tier.each


def test_the_least_is_each_adapters_first_use_though_the_pool_brings_it_in_for_every_one() -> None:
    profile = TwinProfile(layout="unified")
    trace = [Request(n * 500 * MS, "acme", f"a{n % 2}", 20, 2) for n in range(8)]
    outcome, work = played(profile, 1, trace, "bounded-affinity")
    once = 2 * profile.activation_ps / PS_PER_S
    gpu, host = work.tiers
    assert (gpu.least, gpu.least_as_routed, gpu.each) == pytest.approx((once, once, 4 * once))
    assert gpu.spent == pytest.approx(4 * once)
    assert outcome.replicas[0].loads == 2
    assert host.least == pytest.approx(host.spent)
