from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256

import msgspec
import pytest

from loraledger import events as ev
from loraledger.kernel.settings import MS, SECOND, TenantSpec
from loraledger.record.tables import TABLES, check
from loraledger.replay.fleet.observation import Observation
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.traces.trace import Request
from loraledger.twin.profile import TwinProfile
from replay.fleets import PROFILE, adapters, loads, settings_for, virtual, zipf_trace


class Tap:
    """Everything that the kernel of a virtual fleet was told and answered."""

    def __init__(self, fleet: VirtualFleet) -> None:
        self.events: list[ev.Event] = []
        self.answers: list[tuple[list[ev.Command], list[ev.ResidencyChange]]] = []
        kernel = fleet.conductor.fleet
        step = kernel.step_with_changes

        def tapped(event: ev.Event) -> tuple[list[ev.Command], list[ev.ResidencyChange], int | None]:
            commands, changes, wake_at = step(event)
            self.events.append(event)
            self.answers.append((commands, changes))
            return commands, changes, wake_at

        kernel.step_with_changes = tapped  # type: ignore[method-assign]

    def digest(self) -> str:
        told = b"".join(ev.encode(event) for event in self.events)
        return sha256(told + b"".join(ev.encode(c) + ev.encode(r) for c, r in self.answers)).hexdigest()


def digest_of_a_run() -> str:
    fleet = virtual(settings_for(3, adapters(12)))
    tap = Tap(fleet)
    fleet.run(zipf_trace(300, 12, 30, base_share=0.1))
    return tap.digest()


def test_two_runs_are_the_same_byte_for_byte_also_in_another_process() -> None:
    program = "from replay.fleet.test_virtual import digest_of_a_run; print(digest_of_a_run())"
    there = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "77")
    ]
    assert [digest_of_a_run(), digest_of_a_run()] == there


def test_every_request_of_a_trace_ends_in_one_row_that_the_tables_accept() -> None:
    trace = zipf_trace(400, 20, 40, base_share=0.2)
    fleet = virtual(settings_for(2, adapters(20)))
    fleet.run(trace)
    rows = fleet.rows["requests"]
    assert len({row["id"] for row in rows}) == len(rows) == len(trace)
    assert {row["status"] for row in rows} == {"ok"}
    assert sum(int(str(row["generated_tokens"])) for row in rows) == sum(r.output_tokens for r in trace)
    for name, table in TABLES.items():
        assert fleet.rows[name]
        for row in fleet.rows[name]:
            check(table, row)
    state = fleet.conductor.fleet.state
    assert state.requests == {}
    assert all(not r.in_flight and not r.prefill_out and not r.stall_out for r in state.replicas.values())


# --- time -------------------------------------------------------------------------------------------------------------


def test_events_come_in_order_of_time() -> None:
    fleet = virtual(settings_for(2, adapters(8)))
    tap = Tap(fleet)
    fleet.run(zipf_trace(200, 8, 50))
    times = [event.at for event in tap.events]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (SECOND, [ev.RequestFirstToken, ev.RequestFinished, ev.ScrapeStarted, ev.RequestArrived, ev.RequestDispatched]),
        (SECOND * 7 // 10, [ev.Wake, ev.ScrapeStarted, ev.RequestArrived]),
    ],
)
def test_at_one_instant_engines_come_first_then_timers_then_scrapes_then_arrivals(
    step: int, expected: list[type]
) -> None:
    profile = TwinProfile(
        slots=2,
        host_entries=2,
        step_base_ps=step * 1000,
        step_per_seq_ps=0,
        step_per_kv_token_ps=0,
        prefill_per_token_ps=0,
        prefill_floor_ps=0,
        adapter_step_ps=0,
    )
    settings = settings_for(1, (), profile=profile)
    fleet = virtual(msgspec.structs.replace(settings, tenants=(TenantSpec("acme", 1, 9, SECOND),)), profile)
    tap = Tap(fleet)
    # At one second the second request's deadline comes, a scrape begins and the third arrives; or the first one's step ends.
    lengths = (1 if step == SECOND else 2, 1, 1)
    fleet.run([Request(at, "acme", None, 1, n) for at, n in zip((0, 0, SECOND), lengths, strict=True)])
    assert [type(event) for event in tap.events if event.at == SECOND] == expected


def test_arrivals_at_one_instant_keep_the_order_of_the_trace() -> None:
    fleet = virtual(settings_for(2, adapters(4)))
    tap = Tap(fleet)
    names = ("a3", "a0", None, "a2", "a1")
    fleet.run([Request(5, "acme", name, 10, 1) for name in names])
    assert [event.adapter for event in tap.events if isinstance(event, ev.RequestArrived)] == list(names)


def test_the_kernel_sees_a_scrape_as_it_was_when_it_began() -> None:
    fleet = VirtualFleet(
        settings_for(1, ()), {"r1": PROFILE}, Observation(scrape_interval=100 * MS, scrape_delay=30 * MS)
    )
    tap = Tap(fleet)
    fleet.run([Request(n * 10 * MS, "acme", None, 10, 30) for n in range(60)])
    begun = [event.at for event in tap.events if isinstance(event, ev.ScrapeStarted)]
    samples = [event for event in tap.events if isinstance(event, ev.ReplicaSampled)]
    assert begun[:5] == [100 * MS, 200 * MS, 300 * MS, 400 * MS, 500 * MS]
    assert [sample.scrape_start for sample in samples] == begun[: len(samples)]
    assert all(sample.at == sample.scrape_start + 30 * MS for sample in samples)
    for sample in samples:
        open_then = sum(event.at < sample.scrape_start for event in tap.events if isinstance(event, ev.RequestArrived))
        ended = sum(event.at <= sample.scrape_start for event in tap.events if isinstance(event, ev.RequestFinished))
        assert sample.running is not None
        assert sample.waiting is not None
        assert sample.running + sample.waiting <= open_then - ended
    assert fleet.conductor.fleet.state.replicas["r1"].foreign == 0


def test_the_kernel_is_woken_no_more_often_than_it_asked() -> None:
    settings = settings_for(1, adapters(1))
    one_seat = msgspec.structs.replace(settings.replicas[0], max_in_flight=1)
    tenant = TenantSpec("acme", 400, 400, 3 * SECOND)
    fleet = virtual(msgspec.structs.replace(settings, replicas=(one_seat,), tenants=(tenant,)))
    tap = Tap(fleet)
    fleet.run([Request(n * MS, "acme", "a0", 10, 10) for n in range(400)])
    wakes = [event.at for event in tap.events if isinstance(event, ev.Wake)]
    refused = [row["finished_ns"] for row in fleet.rows["requests"] if row["status"] == "rejected"]
    assert len(refused) > 300
    assert fleet.ended == {"ok": 400 - len(refused), "rejected: queue_deadline": len(refused)}
    assert (fleet.backlog.arrived, fleet.backlog.waiting, fleet.backlog.open) == (400, 0, 0)
    assert (fleet.backlog.served, fleet.backlog.refused) == (400 - len(refused), len(refused))
    assert len(wakes) == len(set(wakes))
    assert set(wakes) <= {n * MS + 3 * SECOND for n in range(400)}


def test_a_run_up_to_a_time_can_go_on_as_if_it_had_not_stopped() -> None:
    trace = zipf_trace(60, 6, 20)
    whole, parts = (virtual(settings_for(2, adapters(6))) for _ in range(2))
    whole.run(trace)
    parts.run(trace, until=trace[-1].at)
    assert len(parts.conductor.fleet.state.requests) > 0
    parts.run([])
    assert parts.rows == whole.rows


def test_the_clock_starts_where_it_is_told_to() -> None:
    start = 1_700_000_000 * SECOND
    early, late = virtual(settings_for(1, adapters(2))), virtual(settings_for(1, adapters(2)), start=start)
    trace = zipf_trace(20, 2, 10)
    early.run(trace)
    late.run(trace)
    shifted = [int(str(row["first_token_ns"])) - start for row in late.rows["requests"]]
    assert shifted == [row["first_token_ns"] for row in early.rows["requests"]]


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "size"), [(1, 1), (100, 1_234_567), (1_999, 45 * (1 << 20))])
def test_a_lone_requests_first_token_comes_after_its_load_and_its_prefill(prompt: int, size: int) -> None:
    fleet = virtual(settings_for(1, adapters(1, size)))
    fleet.run([Request(7, "acme", "a0", prompt, 3)])
    (row,) = fleet.rows["requests"]
    load = -(-(PROFILE.load_ps(size) + PROFILE.activation_ps) // 1000)
    prefill = PROFILE.step_ps(0, 0, prompt, 1)
    first = -(-((7 + load) * 1000 + prefill) // 1000)
    assert row["first_token_ns"] == first
    assert (row["load_start_ns"], row["load_end_ns"], row["dispatched_ns"]) == (7, 7 + load, 7 + load)
    assert (row["arrived_ns"], row["queued_ns"], row["hit_class"]) == (7, None, "disk")


def test_a_lone_request_to_the_base_model_costs_its_prefill_only() -> None:
    fleet = virtual(settings_for(1, ()))
    fleet.run([Request(0, "acme", None, 333, 1)])
    (row,) = fleet.rows["requests"]
    assert row["first_token_ns"] == -(-PROFILE.step_ps(0, 0, 333, 0) // 1000) == row["finished_ns"]
    assert row["itl_mean_ns"] is None


def test_a_second_request_to_a_resident_adapter_loads_nothing() -> None:
    fleet = virtual(settings_for(1, adapters(1)))
    fleet.run([Request(0, "acme", "a0", 50, 2), Request(10 * SECOND, "acme", "a0", 50, 2)])
    first, second = fleet.rows["requests"]
    assert (first["hit_class"], second["hit_class"]) == ("disk", "gpu")
    assert int(str(second["first_token_ns"])) - 10 * SECOND == -(-PROFILE.step_ps(0, 0, 50, 1) // 1000)
    assert fleet.conductor.fleet.state.counters["loads"] == 1


def test_an_adapter_above_the_engines_rank_is_refused_for_good() -> None:
    specs = (ev.AdapterSpec("wide", "f" * 64, 64, 1000),)
    profile = TwinProfile(slots=2, host_entries=2, max_rank=8)
    settings = settings_for(1, specs, profile=TwinProfile(slots=2, host_entries=2))
    fleet = VirtualFleet(settings, {"r1": profile})
    fleet.run([Request(n * SECOND, "acme", "wide", 10, 1) for n in range(5)])
    rows = fleet.rows["requests"]
    assert [row["reason"] for row in rows] == ["adapter_load_failed"] * 5
    assert fleet.conductor.fleet.state.counters["loads"] == 1


def test_a_prompt_that_no_replica_can_hold_is_a_client_error() -> None:
    profile = TwinProfile(slots=1, host_entries=1, kv_blocks=10)
    fleet = virtual(settings_for(1, (), profile=profile), profile)
    fleet.run([Request(0, "acme", None, 1_000, 1), Request(SECOND, "acme", None, 100, 1)])
    assert [(row["status"], row["http_status"]) for row in fleet.rows["requests"]] == [
        ("client_error", 400),
        ("ok", 200),
    ]


# --- what it shows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["strict-affinity", "round-robin"])
def test_more_slots_never_give_more_loads(policy: str) -> None:
    trace = zipf_trace(250, 16, 20, seed=3)
    figures = []
    for slots in (2, 4, 8, 16):
        profile = TwinProfile(slots=slots, host_entries=slots)
        fleet = virtual(settings_for(2, adapters(16), policy, profile), profile)
        fleet.run(trace)
        figures.append(loads(fleet))
    assert figures == sorted(figures, reverse=True)
    assert figures[0] > 2 * figures[-1]


def test_strict_affinity_loads_less_than_round_robin_on_skewed_traffic() -> None:
    trace = zipf_trace(400, 40, 40, seed=5)
    figures = {}
    for policy in ("round-robin", "strict-affinity"):
        fleet = virtual(settings_for(4, adapters(40), policy))
        fleet.run(trace)
        figures[policy] = loads(fleet)
    assert figures["strict-affinity"] * 2 < figures["round-robin"]
