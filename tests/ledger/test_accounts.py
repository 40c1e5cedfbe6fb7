from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.ledger.accounts import Ledger, ledger_of
from loraledger.ledger.figures import believed, configured, observed, unknown

from .replicas import GIB, MIB, adapter, replica, seen

SIZES = st.integers(0, 200 * GIB)


def parts_of(ledger: Ledger) -> float | None:
    """Floor + adapters + KV + headroom."""
    values = [ledger.floor.total.value, ledger.adapters.pool.value, ledger.kv.bytes.value, ledger.headroom.value]
    return None if None in values else sum(value for value in values if value is not None)


@settings(deadline=None)
@given(
    device=SIZES, weights=SIZES, overhead=SIZES, slot=SIZES, slots=st.integers(0, 60), kv=SIZES, used=st.none() | SIZES
)
def test_the_parts_sum_to_the_device(**sizes: Any) -> None:
    ledger = ledger_of(
        replica(
            device_bytes=configured(sizes["device"], "bytes"),
            device_used=unknown("bytes") if sizes["used"] is None else seen(sizes["used"], "bytes"),
            weights=seen(sizes["weights"], "bytes"),
            overhead={"peak": seen(sizes["overhead"], "bytes")},
            slot_bytes=configured(sizes["slot"], "bytes"),
            slots=configured(sizes["slots"], "slots"),
            kv_bytes=seen(sizes["kv"], "bytes"),
        )
    )
    assert parts_of(ledger) == sizes["device"]
    assert ledger.promised_twice == (ledger.headroom.value is not None and ledger.headroom.value < 0)


@settings(deadline=None)
@given(
    pool=st.integers(0, 10**6),
    cell=st.integers(1, 10**5),
    fills=st.lists(st.integers(0, 10**9), max_size=5),
)
def test_the_parts_of_a_unified_pool_sum_to_the_device(pool: int, cell: int, fills: list[int]) -> None:
    ledger = ledger_of(
        replica(
            layout="unified",
            kv_bytes=seen(pool * cell, "bytes"),
            kv_tokens=seen(pool, "tokens"),
            adapters=tuple(adapter(f"a{number}", "gpu", fill) for number, fill in enumerate(fills)),
        )
    )
    if pool or not fills:
        assert parts_of(ledger) == 80 * GIB
    else:
        assert ledger.headroom.value is None


def test_headroom_is_the_rest() -> None:
    ledger = ledger_of(replica())
    assert ledger.floor.total.value == 16 * GIB
    assert ledger.adapters.pool.value == 4 * GIB
    assert ledger.headroom.value == 10 * GIB
    assert ledger.headroom.source == "configured"
    assert not ledger.promised_twice


def test_more_parts_than_device_is_shown_below_zero_and_said() -> None:
    ledger = ledger_of(replica(slots=configured(20, "slots")))
    assert ledger.headroom.value == -6 * GIB
    assert ledger.promised_twice


@pytest.mark.parametrize(
    "missing",
    [
        {"device_bytes": unknown("bytes")},
        {"weights": unknown("bytes")},
        {"overhead": {}},
        {"overhead": {"peak": seen(1, "bytes"), "graphs": unknown("bytes")}},
        {"slot_bytes": unknown("bytes")},
        {"slots": unknown("slots")},
        {"kv_bytes": unknown("bytes")},
    ],
)
def test_headroom_is_unknown_while_a_part_is(missing: dict[str, Any]) -> None:
    ledger = ledger_of(replica(**missing))
    assert ledger.headroom.value is None
    assert not ledger.promised_twice


def test_what_nothing_explains_is_told_once_the_use_of_the_device_was_seen() -> None:
    ledger = ledger_of(replica(device_used=seen(73 * GIB, "bytes")))
    assert ledger.floor.unattributed.value == 3 * GIB
    assert ledger.floor.total.value == 19 * GIB
    assert ledger.headroom.value == 7 * GIB


def test_what_nothing_explains_is_unknown_and_in_headroom_until_then() -> None:
    ledger = ledger_of(replica())
    assert ledger.floor.unattributed.value is None
    assert ledger.headroom.value == 10 * GIB


def test_a_peak_that_is_not_in_use_now_is_not_headroom() -> None:
    ledger = ledger_of(replica(device_used=seen(69 * GIB, "bytes")))
    assert ledger.floor.unattributed.value == 0
    assert ledger.headroom.value == 10 * GIB


def test_a_slot_pool_that_was_seen_counts_before_the_one_that_was_worked_out() -> None:
    assert ledger_of(replica(slot_pool=seen(5 * GIB, "bytes"))).headroom.value == 9 * GIB


def test_a_belief_in_any_part_makes_headroom_a_belief_of_its_age() -> None:
    found = ledger_of(replica(kv_bytes=believed(50 * GIB, "bytes", 7 * 10**9))).headroom
    assert (found.source, found.age) == ("believed", 7 * 10**9)


def test_kv_blocks_become_tokens_and_shares() -> None:
    kv = ledger_of(replica(blocks_free=seen(800, "blocks"))).kv
    assert (kv.blocks_used.value, kv.usage.value) == (2400, 0.75)
    assert (kv.tokens.value, kv.free_tokens.value) == (51_200, 12_800)


def test_free_tokens_follow_the_share_where_the_block_size_is_not_known() -> None:
    facts = replica(
        block_tokens=unknown("tokens/block"), kv_tokens=seen(51_200, "tokens"), blocks_free=seen(800, "blocks")
    )
    kv = ledger_of(facts).kv
    assert (kv.tokens.value, kv.free_tokens.value) == (51_200, 12_800)
    assert ledger_of(replace(facts, blocks_total=seen(0, "blocks"))).kv.free_tokens.value is None


def test_unknown_blocks_are_not_free_ones() -> None:
    kv = ledger_of(replica(blocks_free=unknown("blocks"))).kv
    assert kv.blocks_used.value is kv.free_tokens.value is kv.usage.value is None
    assert kv.tokens.value == 51_200


def test_the_rates_of_kv_are_passed_on() -> None:
    reasons = {"kv_full": observed(2, "per minute", 1)}
    kv = ledger_of(replica(rejections=reasons, preemptions=seen(1, "per minute"))).kv
    assert kv.rejections == reasons
    assert kv.preemptions.value == 1


def test_unified_adapters_take_kv_away_and_slots_do_not() -> None:
    def kv_with(count: int, layout: str) -> float | None:
        some = tuple(adapter(f"a{number}", "gpu", 40 * MIB) for number in range(count))
        return ledger_of(replica(layout=layout, adapters=some, slots_used=seen(count, "slots"))).kv.tokens.value

    assert kv_with(0, "slots") == kv_with(3, "slots") == 51_200
    assert kv_with(0, "unified") == 51_200
    assert kv_with(3, "unified") == 51_200 - 3 * 40


def test_unified_kv_is_unknown_while_the_place_of_an_adapter_is() -> None:
    ledger = ledger_of(replica(layout="unified", adapters=(adapter("a", None),)))
    assert (
        ledger.kv.tokens.value is ledger.kv.bytes.value is ledger.adapters.pool.value is ledger.headroom.value is None
    )


def test_a_ledger_is_plain_data_whose_figures_say_where_they_come_from() -> None:
    found = json.loads(json.dumps(asdict(ledger_of(replica()))))
    assert found["headroom"] == {"value": 10 * GIB, "unit": "bytes", "source": "configured", "age": 10**9}
    assert found["floor"]["overhead"]["graphs"]["source"] == "observed"
    assert found["floor"]["unattributed"]["value"] is None
