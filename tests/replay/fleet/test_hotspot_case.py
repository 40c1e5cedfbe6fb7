from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loraledger import events as ev
from loraledger.kernel.cost import candidate
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.policies import make_policy
from loraledger.kernel.policy import Choice
from loraledger.kernel.settings import MS, SECOND, FleetSettings, ReplicaSpec, TenantSpec
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState, RequestState
from loraledger.replay.fleet.run import run
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.results.report import summarize
from loraledger.replay.traces.trace import Request
from loraledger.tiers import EngineTiers
from loraledger.twin.profile import PS_PER_MS, TwinProfile

CASE = Path(__file__).parents[2] / "cases" / "hotspot-thrash-tail"
EXPECT = json.loads((CASE / "expect.json").read_text())
TRACE = [json.loads(line)["adapter"] for line in (CASE / "trace.jsonl").read_text().splitlines()]
REPLICAS, SLOTS = EXPECT["pool"]["replicas"], EXPECT["pool"]["slots"]
ADAPTERS = 40
TAIL = 20
"""The coldest: names are ranks, so t20 to t39."""
LOAD = 100 * MS
ROUND_ROBIN, HOME_ONLY = (
    EXPECT["reference"]["round_robin"],
    EXPECT["reference"]["home_only (adapter k on replica k mod 4)"],
)
BOUND = 1.25 / REPLICAS


class Outcome(NamedTuple):
    """What the case asks for; ``tail_cold``: of the requests of the 20 coldest adapters, those that hit no slot."""

    loads: int
    evictions: int
    max_share: float
    tail_cold: list[int]
    cold_share: float
    """Of all requests."""


def settings_of(policy: str, params: dict[str, float] | None = None) -> FleetSettings:
    replicas = tuple(
        ReplicaSpec(
            f"r{n}",
            SLOTS,
            SLOTS,
            max_seqs=4,
            max_in_flight=10_000,
            load_bytes_per_s=10**12,
            load_overhead=LOAD,
            activation=0,
            prefill_tokens_per_s=40_000,
            itl=8 * MS,
        )
        for n in range(REPLICAS)
    )
    adapters = tuple(ev.AdapterSpec(f"t{n:02d}", f"{n:064x}", 16, 1_000) for n in range(ADAPTERS))
    return FleetSettings(replicas, adapters, (TenantSpec("acme", 10_000),), policy=policy, params=params or {})


def one_at_a_time(routed: Iterable[str]) -> Outcome:
    """The trace, request by request, on the replicas that it was routed to, as an engine's own lists move."""
    tiers = {f"r{n}": EngineTiers(SLOTS, SLOTS) for n in range(REPLICAS)}
    share, cold, evictions = Counter[str](), Counter[str](), 0
    for adapter, where in zip(TRACE, routed, strict=True):
        moved = tiers[where].use(adapter)
        share[where] += 1
        cold[adapter] += moved.loaded
        evictions += moved.evicted_host is not None
    return _outcome(cold, cold.total(), evictions, share)


def _outcome(cold: Counter[str], loads: int, evictions: int, share: Counter[str]) -> Outcome:
    tail = [name for name in TRACE if int(name[1:]) >= TAIL]
    return Outcome(
        loads,
        evictions,
        max(share.values()) / len(TRACE),
        [sum(count for name, count in cold.items() if int(name[1:]) >= TAIL), len(tail)],
        cold.total() / len(TRACE),
    )


def twins_of(settings: FleetSettings) -> dict[str, TwinProfile]:
    profile = TwinProfile(
        slots=SLOTS,
        host_entries=SLOTS,
        max_seqs=4,
        load_overhead_ps=LOAD // MS * PS_PER_MS,
        load_bytes_per_s=10**15,
        activation_ps=0,
    )
    return {spec.name: profile for spec in settings.replicas}


def every(gap: int) -> list[Request]:
    return [Request(n * gap, "acme", name, 64, 64) for n, name in enumerate(TRACE)]


def replayed(settings: FleetSettings, gap: int, policy: Any = None) -> Outcome:
    """The trace, a request every ``gap`` ns, through the kernel in front of four twins."""
    fleet = VirtualFleet(settings, twins_of(settings))
    if policy is not None:
        fleet.conductor.fleet.policy = policy
    fleet.run(every(gap))
    cold = Counter[str]()
    for row in fleet.rows["residency"]:
        cold[str(row["adapter"])] += row["tier_before"] == "disk" and row["tier_after"] == "gpu"
    counts = [where.counts() for where in fleet.replicas.values()]
    loads = sum(count.loads for count in counts)
    assert abs(loads - cold.total()) <= 0.01 * loads  # the kernel believes what the twins did
    evictions = sum(count.evictions_host for count in counts)
    requests = fleet.rows["requests"]
    assert {row["status"] for row in requests} == {"ok"}
    return _outcome(cold, loads, evictions, Counter(str(row["replica"]) for row in requests))


class HomeOnly:
    """Adapter k on replica k mod 4."""

    name, stability, reads, defaults = "home-only", "alpha", frozenset[str](), dict[str, float]()

    def pool(self, state: FleetState, adapter: AdapterState | None) -> Iterable[ReplicaState]:
        return state.replicas.values()

    def choose(
        self, state: FleetState, request: RequestState, adapter: AdapterState | None, feasible: list[ReplicaState]
    ) -> Choice:
        assert adapter is not None
        replica = feasible[int(adapter.spec.name[1:]) % len(feasible)]
        return Choice((candidate(state, replica, request, adapter, 0.0),), "home", len(feasible))


def figures(outcome: Outcome) -> dict[str, Any]:
    return {"loads": outcome.loads, "max_share": outcome.max_share, "tail_cold": outcome.tail_cold}


def test_the_two_references_are_what_the_lists_of_an_engine_give() -> None:
    assert figures(one_at_a_time(f"r{n % REPLICAS}" for n in range(len(TRACE)))) == ROUND_ROBIN
    assert figures(one_at_a_time(f"r{int(name[1:]) % REPLICAS}" for name in TRACE)) == HOME_ONLY


def test_the_two_references_are_what_kernel_and_twins_give_one_request_at_a_time() -> None:
    spread = replayed(settings_of("round-robin"), gap=2 * SECOND)
    assert figures(spread) == ROUND_ROBIN
    assert spread.evictions == spread.loads - REPLICAS * SLOTS
    assert figures(replayed(settings_of("round-robin"), 2 * SECOND, HomeOnly())) == HOME_ONLY


def unfinished(policy: str, params: dict[str, float]) -> list[str]:
    """Where the trace goes when no request ends: what is in hand is all that was sent."""
    settings = settings_of(policy, params)
    fleet = Fleet(settings)
    for spec in settings.replicas:
        fleet.step(ev.ReplicaUp(0, spec.name, 1, ()))
    routed = []
    for number, name in enumerate(TRACE):
        commands, _ = fleet.step(
            ev.RequestArrived(SECOND + number, f"q{number}", "acme", name, 64, 64, True, "/v1/completions")
        )
        for command in commands:
            if isinstance(command, ev.Load):
                fleet.step(ev.CommandDone(SECOND + number, command.id, LOAD))
        decision = fleet.state.requests[f"q{number}"].decision
        assert decision is not None
        routed.append(decision.replica)
    return routed


@pytest.mark.parametrize("factor", [1.25, 1.0])
def test_a_bounded_hash_lands_between_and_keeps_its_bound_exactly(factor: float) -> None:
    assert make_policy(settings_of("bounded-hash")).defaults["factor"] == 1.25
    outcome = one_at_a_time(unfinished("bounded-hash", {"factor": factor}))
    assert HOME_ONLY["loads"] < outcome.loads <= ROUND_ROBIN["loads"]
    assert outcome.max_share <= factor / REPLICAS + 1 / len(TRACE)
    assert outcome.evictions == outcome.loads - REPLICAS * SLOTS
    cold, of = outcome.tail_cold
    assert of == ROUND_ROBIN["tail_cold"][1]
    assert cold < ROUND_ROBIN["tail_cold"][0]
    assert cold / of > outcome.cold_share + 0.3  # told apart from the average, which hides it


def test_bounded_affinity_lands_between_while_the_fleet_is_busy() -> None:
    # Ten requests a second of 0.5 s each on sixteen seats: the hottest replica of home-only would be over its capacity.
    outcome = replayed(settings_of("bounded-affinity"), gap=100 * MS)
    assert HOME_ONLY["loads"] < outcome.loads <= ROUND_ROBIN["loads"]
    assert outcome.loads < 1.2 * HOME_ONLY["loads"]
    assert outcome.max_share <= BOUND + 1 / len(TRACE)
    assert outcome.evictions == outcome.loads - REPLICAS * SLOTS
    cold, of = outcome.tail_cold
    assert of == HOME_ONLY["tail_cold"][1]
    assert cold <= HOME_ONLY["tail_cold"][0]
    assert cold / of > outcome.cold_share + 0.4


def test_the_report_of_a_replay_tells_the_coldest_half_apart_from_the_average(tmp_path: Path) -> None:
    settings = settings_of("bounded-affinity")
    scenario = Scenario(label="case", settings=settings, profiles=twins_of(settings))
    run(scenario, every(100 * MS), tmp_path / "run", trace_digest="sha256:0")
    report = summarize(tmp_path / "run")
    assert HOME_ONLY["loads"] < report.loads <= ROUND_ROBIN["loads"]
    assert report.busiest_share is not None
    assert report.busiest_share <= BOUND + 1 / len(TRACE)
    asked, cold = Counter(TRACE), report.cold
    assert cold is not None
    assert (cold.adapters, cold.requests) == (TAIL, sum(sorted(asked.values())[:TAIL]))
    assert cold.gpu_rate is not None
    assert report.hits.gpu_rate is not None
    assert cold.loads == round((1 - cold.gpu_rate) * cold.requests)
    assert cold.loads - TAIL < cold.evictions <= cold.loads
    assert 1 - cold.gpu_rate > 1 - report.hits.gpu_rate + 0.4


def test_without_load_bounded_affinity_has_no_reason_to_spread() -> None:
    outcome = replayed(settings_of("bounded-affinity"), gap=2 * SECOND)
    assert outcome.loads <= HOME_ONLY["loads"] + 5
    assert outcome.max_share > BOUND
