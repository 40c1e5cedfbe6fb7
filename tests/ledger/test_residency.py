from __future__ import annotations

import statistics
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.ledger.accounts import ledger_of
from loraledger.ledger.facts import Latencies
from loraledger.ledger.figures import Figure, believed, unknown
from loraledger.ledger.residency import AdapterAccount, latency

from .replicas import GIB, MIB, NOW, adapter, replica, seen


def account(**changes: Any) -> AdapterAccount:
    return ledger_of(replica(**changes)).adapters


def test_padded_and_filled_bytes_are_kept_apart() -> None:
    found = account()
    assert (found.used.value, found.free.value) == (2, 2)
    assert found.taken.value == 2 * GIB
    assert found.filled.value == 80 * MIB
    assert found.fragmentation.value == 2 * GIB - 80 * MIB
    assert found.padding.value == 25.6
    assert found.pool.value == 4 * GIB


def test_a_ghost_takes_a_slot() -> None:
    some = (adapter("a", "gpu"), adapter("a", "gpu", ghost=True, registered=False), adapter("b", "host", ghost=True))
    found = account(adapters=some, slots_used=unknown("slots"))
    assert (found.used.value, found.free.value, found.ghosts.value) == (2, 2, 2)
    assert found.filled.value == 80 * MIB


def test_a_slot_in_use_by_nobody_known_leaves_fragmentation_unknown() -> None:
    found = account(slots_used=seen(3, "slots"))
    assert found.taken.value == 3 * GIB
    assert found.filled.value is found.fragmentation.value is found.padding.value is None


def test_slots_in_use_are_unknown_while_the_place_of_an_adapter_is() -> None:
    some = (adapter("a", "gpu"), adapter("b", None))
    found = account(adapters=some, slots_used=unknown("slots"))
    assert found.used.value is found.free.value is found.host_entries.value is None
    assert account(adapters=(), slots_used=unknown("slots")).used.value is None


def test_what_an_adapter_fills_is_no_surer_than_its_place() -> None:
    some = (adapter("a", "gpu", tier_source="believed", tier_age=9 * 10**9), adapter("b", "gpu"))
    found = account(adapters=some)
    assert (found.filled.source, found.filled.age) == ("believed", 9 * 10**9)
    assert found.taken.source == "configured"


def test_slots_counted_from_beliefs_are_a_belief() -> None:
    some = (adapter("a", "gpu", tier_source="believed"), adapter("b", "disk"))
    found = account(adapters=some, slots_used=unknown("slots"))
    assert (found.used.value, found.used.source) == (1, "believed")


def test_an_empty_replica_has_no_padding_to_speak_of() -> None:
    found = account(adapters=(), slots_used=seen(0, "slots"))
    assert (found.taken.value, found.filled.value, found.fragmentation.value) == (0, 0, 0)
    assert found.padding.value is None


def test_the_host_holds_what_is_in_slots_too() -> None:
    found = account()
    assert (found.host_entries.value, found.host_limit.value) == (3, 8)
    assert found.host_bytes.value == 120 * MIB


def test_host_bytes_are_unknown_where_entries_are_not_all_named() -> None:
    assert account(host_entries=seen(4, "adapters")).host_bytes.value is None
    assert account(host_entries=seen(4, "adapters"), host_bytes=seen(7, "bytes")).host_bytes.value == 7


def test_pins_that_nobody_looked_for_are_unknown_and_not_none() -> None:
    some = (adapter("a", "gpu", pinned=True), adapter("b", "gpu"))
    assert account(adapters=some).pinned.value is None
    assert account(adapters=some, slots_pinned=seen(2, "slots")).pinned.value == 2


def test_adapters_are_listed_nearest_first_then_by_rate_then_by_name() -> None:
    some = (
        adapter("lost", None),
        adapter("disk", "disk"),
        adapter("quiet", "gpu", rate=believed(0.1, "per second", 1)),
        adapter("host", "host"),
        adapter("busy", "gpu", rate=believed(3, "per second", 1)),
        adapter("also", "gpu"),
    )
    names = [found.name for found in account(adapters=some).adapters]
    assert names == ["busy", "quiet", "also", "host", "disk", "lost"]


def test_latency_says_how_many_how_old_and_from_where() -> None:
    samples = tuple((duration, NOW - 10**9 * duration) for duration in range(1, 11))
    found = account(latencies={"disk": Latencies(samples, "observed"), "host": Latencies()}).latencies
    assert set(found) == {"disk"}
    assert found["disk"].n == 10
    assert found["disk"].p50 == Figure(5, "ns", "observed", 10**9)
    assert found["disk"].p90 == Figure(9, "ns", "observed", 10**9)


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50))
def test_quantiles_are_measured_durations_of_the_right_rank(durations: list[int]) -> None:
    found = latency(Latencies(tuple((duration, 0) for duration in durations)), 0)
    assert found.p50.value == statistics.median_low(durations)
    ninety = found.p90.value
    assert ninety in durations
    assert sum(duration <= ninety for duration in durations) * 10 >= 9 * len(durations)
    assert sum(duration < ninety for duration in durations) * 10 < 9 * len(durations)


def test_a_unified_pool_has_cells_in_use_and_no_slots() -> None:
    found = account(layout="unified", adapters=(adapter("a", "gpu", 40 * MIB + 1),), slots_used=unknown("slots"))
    assert found.used.value is None
    assert found.taken.value == 41 * MIB
    assert found.fragmentation.value == MIB - 1
