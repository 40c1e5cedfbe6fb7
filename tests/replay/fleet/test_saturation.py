from __future__ import annotations

import random
from collections import deque

import pytest

from loraledger.kernel.settings import SECOND
from loraledger.replay.fleet.outcome import Saturation
from loraledger.replay.fleet.saturation import POINTS, Backlog
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.traces.trace import Request
from loraledger.twin.profile import PS_PER_MS, TwinProfile
from replay.fleets import settings_for


def one_server(
    load: float, requests: int, seed: int, *, room: int = 10**9, variation: float = 1.0, idle_after: int = 10**9
) -> Saturation:
    """One server of fixed service time 1 s: an M/D/1 queue, or one with a limited queue, or with burstier arrivals."""
    rng, backlog, begins = random.Random(seed), Backlog(), deque[float]()
    now = free = 0.0
    shape = variation**-2
    for number in range(requests):
        now += rng.gammavariate(shape, 1 / (shape * load)) * (4 if number >= idle_after else 1)
        while begins and begins[0] <= now:
            begins.popleft()
            backlog.waiting -= 1
            backlog.open -= 1
            backlog.served += 1
        backlog.arrival(round(now * SECOND))
        if len(begins) >= room:
            backlog.refused += 1
            backlog.waiting -= 1
            backlog.open -= 1
            continue
        begins.append(max(now, free))
        free = begins[-1] + 1.0
    return backlog.verdict()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("load", "requests", "expected"),
    [
        (0.5, 1000, False),
        (0.9, 1000, False),
        (1.1, 1000, True),
        (1.2, 1000, True),
        (2.0, 1000, True),
        (1.1, 3000, True),
    ],
)
def test_a_queue_is_called_saturated_when_more_arrives_than_it_can_serve(
    load: float, requests: int, expected: bool, seed: int
) -> None:
    verdict = one_server(load, requests, seed)
    assert verdict.saturated is expected, verdict.reason
    assert verdict.reason.startswith("arrivals outran service: " if expected else "service kept up: ")


def test_the_figures_are_those_of_the_run() -> None:
    verdict = one_server(2.0, 2000, 1)
    assert verdict.offered_per_s == pytest.approx(2.0, rel=0.1)
    assert verdict.served_per_s == pytest.approx(1.0, rel=0.01)
    assert verdict.backlog == pytest.approx(1000, rel=0.1)
    assert f"{verdict.offered_per_s:.3g} arrived and {verdict.served_per_s:.3g} ended well a second" in verdict.reason


@pytest.mark.parametrize("seed", range(5))
def test_limits_do_not_hide_that_arrivals_outrun_service(seed: int) -> None:
    full = one_server(1.2, 3000, seed, room=10)
    assert full.saturated
    assert "were refused for want of room" in full.reason
    assert not one_server(0.8, 3000, seed, room=10).saturated


def test_a_burst_that_was_refused_does_not_make_a_run_saturated() -> None:
    backlog = Backlog()
    for number in range(2000):
        backlog.arrival(number * SECOND)
        backlog.waiting -= 1
        backlog.open -= 1
        if 1500 <= number < 1600:
            backlog.refused += 1
        else:
            backlog.served += 1
    assert not backlog.verdict().saturated


@pytest.mark.parametrize("seed", range(5))
def test_bursty_arrivals_are_not_taken_for_overload(seed: int) -> None:
    assert not one_server(0.8, 4000, seed, variation=3.0).saturated
    assert one_server(1.3, 4000, seed, variation=3.0).saturated


def test_a_queue_that_drains_before_the_end_is_not_saturated() -> None:
    assert one_server(1.5, 2000, 3).saturated
    assert not one_server(1.5, 2000, 3, idle_after=1000).saturated


def test_a_short_trace_says_that_it_is_too_short_to_tell() -> None:
    for requests in (0, 1, 10, 49, 300):
        verdict = one_server(0.9, requests, 1)
        assert verdict.saturated is None
        assert verdict.reason.startswith(f"too short to tell: {requests} requests")
    assert one_server(2.0, 300, 1).saturated


def test_what_arrives_at_one_instant_waits_for_itself() -> None:
    backlog = Backlog()
    for _ in range(100):
        backlog.arrival(7)
    verdict = backlog.verdict()
    assert verdict.saturated
    assert (verdict.offered_per_s, verdict.served_per_s, verdict.backlog) == (None, None, 100)


def test_a_closed_loop_cannot_be_outrun() -> None:
    backlog = Backlog()
    for number in range(2000):
        backlog.arrival(number)
    assert backlog.verdict().saturated
    assert not backlog.verdict(4).saturated


def test_memory_is_bounded() -> None:
    backlog = Backlog()
    for number in range(100_000):
        backlog.arrival(number)
    assert len(backlog._points) <= POINTS


def shaped(requests: int, *last: int, burst: int = 1) -> Saturation:
    """Nobody waits, but in the last tenth as many as ``last`` says, in turn. Arrivals come ``burst`` at a time, 1 s each."""
    backlog = Backlog()
    for number in range(requests):
        backlog.waiting = last[number % len(last)] if number >= 0.9 * requests else 0
        backlog.arrival(number // burst * burst * SECOND)
    return backlog.verdict()


def test_the_last_tenth_has_to_lie_above_what_chance_leaves() -> None:
    # One step of 1,000 Poisson arrivals is 31.6: 0.7 of it on average, and 0.35 of it at all times.
    assert shaped(1000, 30).saturated
    assert not shaped(1000, 15).saturated, "the mean is too low"
    assert not shaped(1000, 50, 5).saturated, "there is a valley"
    assert shaped(1000, 50, 15).saturated
    assert not shaped(1000, 30, burst=10).saturated, "bursts of ten make chance three times as large"
    assert shaped(1000, 80, burst=10).saturated


def test_few_arrivals_take_twice_the_evidence() -> None:
    assert shaped(500, 25).reason.startswith("too short to tell: 500 requests; ")
    assert shaped(500, 35).saturated


@pytest.mark.parametrize(("load", "expected"), [(0.9, False), (1.1, True)])
def test_a_fleet_that_falls_behind_is_found_out(load: float, expected: bool) -> None:
    step = 10 * PS_PER_MS
    profile = TwinProfile(
        slots=1, host_entries=1, max_seqs=1, step_base_ps=step, step_per_seq_ps=0, step_per_kv_token_ps=0,
        prefill_per_token_ps=0, prefill_floor_ps=0, prefill_offset_ps=0,
    )  # fmt: skip
    rng, now, trace = random.Random(5), 0.0, []
    for _ in range(1000):
        now += rng.expovariate(load * 100)
        trace.append(Request(round(now * SECOND), "acme", None, 1, 1))
    fleet = VirtualFleet(settings_for(1, (), profile=profile), {"r1": profile})
    fleet.run(trace)
    verdict = fleet.backlog.verdict()
    assert verdict.saturated is expected, verdict.reason
    assert fleet.ended == {"ok": 1000}
