from __future__ import annotations

from pathlib import Path

from loraledger.signals.facts import Facts, ReplicaFacts
from loraledger.signals.figures import Pressure, WorkingSet

from .records import MINUTE, MS, NOON, SECOND, about, measured, move, request, sample, total


def test_moves_are_told_apart_by_their_tiers(tmp_path: Path) -> None:
    rows = [
        move("disk", "host", took_ns=100 * MS),
        move("remote", "host", took_ns=300 * MS),
        move("disk", "gpu"),
        move("host", "gpu", took_ns=10 * MS),
        move("gpu", "gpu"),
        move("gpu", "host", replica="r2"),
        move("gpu", "disk", replica="r2"),
        move("host", "disk", replica="r2"),
        move(None, "gpu"),
        move("remote", "disk"),
    ]
    signals = measured(tmp_path, [request(), request(replica="r2")], (), rows)  # type: ignore[arg-type]
    moves = total(signals).moves
    assert moves is not None
    assert (moves.loads, moves.activations, moves.slot_evictions, moves.host_evictions) == (3, 2, 2, 2)
    assert {name: (spread.n, spread.mean) for name, spread in moves.took.items()} == {
        "load": (2, 0.2),
        "activation": (1, 0.01),
    }
    ones = (signals.replicas["r1"].moves, signals.replicas["r2"].moves)
    assert [(each.loads, each.host_evictions) for each in ones if each is not None] == [(3, 0), (0, 2)]


def test_load_times_are_told_by_size_and_the_probe_goes_before_the_call(tmp_path: Path) -> None:
    call = {"from_state": "loading", "to_state": "registered", "took_ns": 500 * MS}
    rows = [
        move("gpu", "gpu", **call),
        move("disk", "host", took_ns=100 * MS),
        move("disk", "host", took_ns=10 * MS, adapter="b"),
        move("disk", "host", took_ns=20 * MS, bytes=300 * 2**20),
        move("disk", "host", took_ns=30 * MS, adapter="c"),
        move("gpu", "gpu", replica="r2", **call),
    ]
    signals = measured(tmp_path, [request(), request(replica="r2")], [], rows)
    probed, called = signals.replicas["r1"].moves, signals.replicas["r2"].moves
    assert probed is not None
    assert probed.took["load"].n == 4
    assert {name: spread.p50 for name, spread in probed.took_by_size.items()} == {
        "64 MiB to 256 MiB": 0.1,
        "<16 MiB": 0.01,
        ">=256 MiB": 0.02,
        "unknown": 0.03,
    }
    assert called is not None
    assert (called.loads, called.took["load"].p50) == (0, 0.5)
    assert {name: spread.p50 for name, spread in called.took_by_size.items()} == {"64 MiB to 256 MiB": 0.5}


STEPS = {"steps": 10, "step_tokens": 500, "step_ns": 3 * SECOND, "preempted": 2, "recomputed_tokens": 40, "blocked": 1}


def test_pressure_is_of_samples_and_of_the_fleet_together(tmp_path: Path) -> None:
    samples = [
        sample(kv_usage=0.5, distinct_adapters=2, **STEPS),
        sample(kv_usage=0.9, distinct_adapters=4, running=6, waiting=2, at_ns=NOON + SECOND, **STEPS | {"blocked": 3}),
        sample(
            at_ns=NOON + 2, up=False, running=None, waiting=None, kv_usage=None, kv_tokens=None, process_start_ns=None
        ),
        sample(at_ns=NOON + 3, kv_usage=None, kv_tokens=90_000, process_start_ns=NOON + 2),
        sample(replica="r2", kv_usage=1.0, running=1),
    ]
    signals = measured(tmp_path, [request(), request(replica="r2")], samples)
    assert signals.replicas["r1"].pressure == Pressure(
        samples=4, down=1, restarts=1, kv_usage_mean=0.7, kv_usage_max=0.9, kv_full=0.5, kv_tokens=90_000,
        running_mean=14 / 3, waiting_mean=2 / 3, preemptions=4, recomputed_tokens=80, tokens_per_step=50.0,
        adapters_per_step=3.0, blocked_max=3, busy=0.1,
    )  # fmt: skip
    assert total(signals).pressure == Pressure(
        samples=5, down=1, restarts=1, kv_usage_mean=0.85, kv_usage_max=1.0, kv_full=0.75, kv_tokens=190_000,
        running_mean=14 / 3 + 1, waiting_mean=2 / 3, preemptions=4, recomputed_tokens=80, tokens_per_step=50.0,
        adapters_per_step=3.0, blocked_max=3, busy=0.1,
    )  # fmt: skip


def test_requests_tell_of_preemptions_where_no_step_does(tmp_path: Path) -> None:
    rows = [request(preemptions=2), request(preemptions=1), request(replica="r2"), request(replica="r3", preemptions=9)]
    signals = measured(tmp_path, rows, [sample(), sample(replica="r3", **STEPS)])
    told = {name: group.pressure.preemptions for name, group in signals.replicas.items() if group.pressure is not None}
    assert told == {"r1": 3, "r3": 2}
    assert total(signals).pressure is not None
    assert total(signals).pressure.preemptions == 5  # type: ignore[union-attr]


def test_the_working_set_stands_against_the_places_of_each_replica(tmp_path: Path) -> None:
    rows = [
        request(),
        request(adapter="b", arrived_ns=NOON + 100 * MS),
        request(adapter="b", replica="r2"),
        request(adapter="b", replica="r2", arrived_ns=NOON + 400 * MS),
    ]
    facts = Facts(replicas={"r1": ReplicaFacts(slots=1, host_entries=8), "r2": ReplicaFacts(slots=2, host_entries=4)})
    signals = measured(tmp_path, rows, facts=facts)
    # In flight from 1 ms to 401 ms, and from 101 ms to 501 ms: together for 300 ms.
    assert signals.replicas["r1"].working_set == WorkingSet(2, None, 1, 8, 2, about(0.3 / 60))
    assert signals.replicas["r2"].working_set == WorkingSet(1, None, 2, 4, 1, 0.0)
    assert total(signals).working_set == WorkingSet(2, None, 3, 12, 2, about(0.3 / 60))
    assert signals.replicas["r1"].distinct_adapters == 2
    assert total(signals).replicas == 2
    sized = measured(tmp_path, rows)
    assert total(sized).bytes == 90 * 2**20
    assert sized.adapters["b"].bytes == 10 * 2**20


def test_open_requests_are_in_flight_until_the_window_ends(tmp_path: Path) -> None:
    opened = {"status": None, "finished_ns": None, "first_token_ns": None, "last_token_ns": None}
    rows = [request(adapter=name, dispatched_ns=NOON + MINUTE // 2, **opened) for name in ("a", "b", "c")]
    working_set = (
        measured(tmp_path, [*rows, request(adapter="d", dispatched_ns=None, **opened)]).replicas["r1"].working_set
    )
    assert working_set is not None
    assert (working_set.in_flight_max, working_set.over_slots) == (3, 0.5)


def test_places_that_are_not_known_are_not_made_up(tmp_path: Path) -> None:
    signals = measured(tmp_path, [request(), request(replica="r9", adapter="c")])
    assert signals.replicas["r9"].working_set == WorkingSet(1, None, None, None, 1, None)
    assert total(signals).working_set == WorkingSet(2, None, None, None, 1, 0.0)
