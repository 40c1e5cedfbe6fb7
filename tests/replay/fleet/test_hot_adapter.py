from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loraledger import events as ev
from loraledger.kernel.settings import MS, SECOND, FleetSettings, ReplicaSpec, TenantSpec
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.traces.trace import Request
from loraledger.twin.profile import PS_PER_MS, TwinProfile

CASE = Path(__file__).parents[2] / "cases" / "hot-adapter-pinned"
STEP = 100 * MS
OUTPUT = 10
"""Ten steps of 0.1 s are the second of work that each request of the case is."""


def replay(policy: str) -> tuple[VirtualFleet, dict[str, Any], int]:
    """The case under one policy; also when its trace begins: before that, hot is loaded and used on r1."""
    pool = json.loads((CASE / "pool.json").read_text())
    trace = [json.loads(line) for line in (CASE / "trace.jsonl").read_text().splitlines()]
    slots, places, load = pool["slots"], pool["parallel_per_replica"], round(pool["load_s"] * SECOND)
    profile = TwinProfile(
        slots=slots,
        host_entries=2 * slots,
        max_seqs=places,
        step_base_ps=STEP * 1000,
        step_per_seq_ps=0,
        step_per_kv_token_ps=0,
        prefill_per_token_ps=0,
        prefill_floor_ps=0,
        prefill_offset_ps=0,
        adapter_step_ps=0,
        load_overhead_ps=round(pool["load_s"] * 1000) * PS_PER_MS,
        activation_ps=0,
    )
    replicas = tuple(
        ReplicaSpec(
            name,
            slots,
            2 * slots,
            max_seqs=places,
            load_overhead=load,
            activation=0,
            prefill_tokens_per_s=100_000,
            itl=STEP,
        )
        for name in pool["start"]
    )
    adapters = (ev.AdapterSpec("hot", "a" * 64, 8, 1_000), ev.AdapterSpec("cold", "b" * 64, 8, 1_000))
    settings = FleetSettings(replicas, adapters, (TenantSpec("acme", 1_000),), policy=policy)
    fleet = VirtualFleet(settings, dict.fromkeys(pool["start"], profile))
    for name, held in pool["start"].items():
        for adapter in held:
            fleet.conductor.feed(ev.LoadAsked(fleet.now, adapter, name))
    fleet.run([Request(SECOND, "acme", "hot", 16, OUTPUT)])
    begin = fleet.now
    fleet.run([Request(round(r["t"] * SECOND), "acme", r["adapter"], 16, OUTPUT) for r in trace])
    return fleet, json.loads((CASE / "expect.json").read_text()), begin


def waits(fleet: VirtualFleet, begin: int) -> list[float]:
    rows = [row for row in fleet.rows["requests"] if int(str(row["arrived_ns"])) >= begin]
    return [(int(str(row["first_token_ns"])) - int(str(row["arrived_ns"]))) / SECOND for row in rows]


def test_a_hot_adapter_spreads_over_the_fleet_with_one_load_each() -> None:
    fleet, expect, begin = replay("bounded-affinity")
    hot = [row for row in fleet.rows["residency"] if row["adapter"] == "hot" and row["to_state"] == "loading"]
    assert Counter(row["replica"] for row in hot) == {"r1": 1, "r2": 1, "r3": 1}
    registered = [
        r for r in fleet.conductor.fleet.state.replicas.values() if r.registrations["hot"].state == "registered"
    ]
    assert len(registered) == expect["hot_replicas_needed"]
    served = Counter(row["replica"] for row in fleet.rows["requests"] if row["adapter"] == "hot")
    assert min(served.values()) > 50
    assert {row["status"] for row in fleet.rows["requests"]} == {"ok"}
    assert len(waits(fleet, begin)) == 300


def test_the_decisions_say_when_and_why_the_set_of_the_hot_adapter_grew() -> None:
    fleet, _, begin = replay("bounded-affinity")
    decisions = [row for row in fleet.rows["decisions"] if row["adapter"] == "hot"]
    grew = [row for row in decisions if str(row["reason"]).startswith("set grows")]
    first_seen: dict[object, dict[str, object]] = {}
    for row in decisions:
        first_seen.setdefault(row["replica"], row)
    assert list(first_seen) == [decisions[0]["replica"], *dict.fromkeys(row["replica"] for row in grew)]
    assert decisions[0]["replica"] == "r1"
    assert {first_seen[name]["reason"] for name in ("r2", "r3")} <= {row["reason"] for row in grew}
    for name in ("r2", "r3"):
        row = first_seen[name]
        assert begin <= int(str(row["at_ns"])) < begin + 10 * SECOND
        chosen, *others = json.loads(str(row["candidates"]))
        left = next(c for c in others if c["replica"] in str(row["reason"]).split(" would cost ")[0])
        assert chosen["replica"] == name
        assert chosen["cost_s"] < left["cost_s"]
        assert f"{left['cost_s']:.3f} s" in str(row["reason"])


def test_holding_on_to_one_replica_is_what_makes_its_queue_grow_without_end() -> None:
    sticky, expect, begin = replay("strict-affinity")
    assert expect["sticky_only"].startswith("r1 queue grows without end")
    last = waits(sticky, begin)[-1]
    assert last > 15
    bounded, _, begin = replay("bounded-affinity")
    assert max(waits(bounded, begin)) < last / 4
    assert sum(waits(bounded, begin)) < sum(waits(sticky, begin)) / 10


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded"])
def test_the_baselines_reach_every_replica_too(policy: str) -> None:
    fleet, _, _ = replay(policy)
    served = Counter(row["replica"] for row in fleet.rows["requests"] if row["adapter"] == "hot")
    assert len(served) == 3
