"""Mechanisms that look alike, told apart."""

from __future__ import annotations

import msgspec

from loraledger.signals.diagnosis import diagnose
from signals.diagnosis.build import FACTS, Fleet
from signals.diagnosis.test_diagnose import EVEN, HOT, INCIDENTS, WELL, judged


def test_a_surge_on_top_of_a_smaller_kv_is_the_floors_only_while_it_does_not_outgrow_it() -> None:
    tight = INCIDENTS["floor too tight"][0]
    more = msgspec.structs.replace(tight, requests=1500, asked=dict.fromkeys(EVEN, 75))
    assert judged(more).pool == "floor"
    much = msgspec.structs.replace(tight, requests=6000, asked=dict.fromkeys(EVEN, 300))
    assert judged(much).pool == "demand"


def test_one_replica_that_is_slow_is_no_routing_matter() -> None:
    slow = Fleet(ttft=0.5, attainment=0.9, ttft_on={"r1": 0.1, "r2": 0.9}, shares={"r1": 0.7, "r2": 0.3}, load_time=0.8)
    assert judged(slow).cause == "slow loads"


def test_a_skew_that_leaves_nobody_room_is_capacity() -> None:
    full = Fleet(shares={"r1": 0.7, "r2": 0.3}, ttft=2, ttft_on={"r1": 3, "r2": 1.2}, attainment=0.3, requests=2000,
                 asked=dict.fromkeys(EVEN, 100))  # fmt: skip
    assert judged(full).pool == "demand"


def test_a_replica_with_room_is_enough_for_routing_to_be_to_blame() -> None:
    shares, others = {"r1": 0.6, "r2": 0.3, "r3": 0.1}, {"r1": 3.0, "r2": 1.2, "r3": 0.1}
    skewed = Fleet(shares=shares, ttft=2, ttft_on=others, attainment=0.3)
    before = Fleet(shares=dict.fromkeys(shares, 1 / 3))
    found = judged(skewed, before)
    assert (found.pool, found.cause) == ("routing", "skew")
    assert "more slots or replicas: r3 has room (it waits 0.1 s)" in found.sentence
    assert judged(msgspec.structs.replace(skewed, ttft_on={**others, "r3": 0.9}), before).pool != "routing"


def test_a_surge_of_one_adapter_is_no_skew_of_many() -> None:
    hot, _, _ = INCIDENTS["hot adapter on one replica"]
    assert judged(msgspec.structs.replace(hot, top=("a0", 0.3))).cause == "skew"
    assert judged(msgspec.structs.replace(hot, top=("a1", 0.7))).cause == "skew"


def test_requests_in_flight_that_hold_no_kv_wait_for_something_else() -> None:
    for usage, pool in ((0.2, "adapters"), (0.7, "kv")):
        found = judged(
            Fleet(ttft=3, attainment=0.4, active=70_000, kv_usage=usage, over=0.9, in_flight=14, working=14, warm=2)
        )
        assert found.pool == pool


def test_a_busy_engine_makes_no_slow_disk() -> None:
    busy = Fleet(prompt=2500, ttft=1.0, attainment=0.8, itl=0.08, load_time=0.25, part="preparation", warm=0.8)
    found = judged(busy)
    assert found.cause == "longer prompts"
    assert judged(msgspec.structs.replace(busy, load_time=0.9)).cause == "slow loads"


def test_slow_loads_are_named_even_where_hits_wait_too_or_the_baseline_loaded_nothing() -> None:
    assert judged(Fleet(ttft=1, attainment=0.7, load_time=0.4, warm=0.5, loads=20)).cause == "slow loads"
    found = judged(Fleet(ttft=0.4, attainment=0.9, load_time=2.0, loads=5), Fleet(loads=0))
    assert (found.cause, found.confidence) == ("slow loads", "medium")
    assert judged(Fleet(ttft=0.4, attainment=0.9, load_time=0.9, loads=5), Fleet(loads=0)).cause == "none"


def test_an_adapter_that_waits_long_in_both_windows_is_no_accusation() -> None:
    long = Fleet(over=0.5, in_flight=9, waits={"a3": 9.0})
    assert judged(long, long).pool == "nothing"
    assert judged(long, None).cause == "slots"


def test_load_times_of_a_few_loads_are_no_median() -> None:
    slow = Fleet(ttft=0.3, attainment=0.93, load_time=0.9, part="preparation", loads=4)
    assert judged(slow, Fleet(loads=4)).findings[1].verdict == "seen"
    assert judged(slow, Fleet(loads=2)).findings[1].verdict == "not seen"


def test_one_adapter_that_got_hot_everywhere_is_demand() -> None:
    spread_out = Fleet(requests=1500, asked=HOT, ttft=1, attainment=0.7, top=("a0", 0.4), warm=0.9)
    found = judged(spread_out)
    assert (found.pool, found.cause) == ("demand", "arrivals")
    assert any("adapter that grew most a0" in claim.text for claim in found.claims)


def test_larger_adapters_are_no_slower_disk() -> None:
    before = WELL.signals()
    fleet = Fleet(ttft=0.3, load_time=0.5, attainment=0.93, part="preparation")
    assert judged(fleet).cause == "slow loads"
    now = fleet.signals()
    assert now.total is not None
    assert now.total.moves is not None
    assert before.total is not None
    assert before.total.moves is not None
    small = before.total.moves.took_by_size["16 MiB to 64 MiB"]
    sizes = {"16 MiB to 64 MiB": small, ">=256 MiB": now.total.moves.took["load"]}
    moves = msgspec.structs.replace(now.total.moves, took_by_size=sizes)
    larger = msgspec.structs.replace(now, total=msgspec.structs.replace(now.total, moves=moves))
    assert diagnose(larger, before, FACTS).cause != "slow loads"


def test_a_few_more_requests_that_are_each_far_longer_fill_kv_themselves() -> None:
    fleet = Fleet(
        requests=1400, asked=dict.fromkeys(EVEN, 70), answer=900, ttft=4, attainment=0.4, kv_full=0.8, kv_usage=0.95
    )
    assert judged(fleet).pool == "kv"
    assert judged(msgspec.structs.replace(fleet, answer=250)).pool == "demand"


def test_a_replica_that_gets_most_and_waits_least_is_no_routing_matter() -> None:
    waits = {"r1": 0.1, "r2": 1.4, "r3": 0.1}
    fleet = Fleet(shares={"r1": 0.7, "r2": 0.2, "r3": 0.1}, ttft=0.5, attainment=0.9, ttft_on=waits)
    before = Fleet(shares=dict.fromkeys(waits, 1 / 3))
    assert judged(fleet, before).pool == "nothing"
    assert judged(msgspec.structs.replace(fleet, ttft_on={**waits, "r1": 1.4, "r2": 0.1}), before).pool == "routing"
