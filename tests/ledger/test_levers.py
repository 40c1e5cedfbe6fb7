from __future__ import annotations

from typing import Any

import pytest

from loraledger.ledger.accounts import ledger_of
from loraledger.ledger.figures import configured, unknown
from loraledger.ledger.levers import Lever, levers_for, shortfall
from loraledger.ledger.limit import limiting

from .replicas import GIB, MIB, replica, seen
from .test_limit import COLD_CHURN, LONG_PROMPT


def levers(pool: Any, **changes: Any) -> dict[str, Lever]:
    return {lever.name: lever for lever in levers_for(pool, ledger_of(replica(**changes)))}


def freed(lever: Lever) -> float | None:
    assert lever.frees.unit == "bytes"
    return lever.frees.value


def test_a_floor_that_is_too_high_is_lowered_by_bits_ranks_slots_or_rank() -> None:
    found = levers("floor", weights=seen(23 * GIB, "bytes"), needed_max_rank=16)
    assert list(found) == ["quantization", "sharding", "fewer slots", "lower rank"]
    assert freed(found["quantization"]) == freed(found["sharding"]) == 23 * GIB // 2
    assert freed(found["lower rank"]) == 3 * GIB


@pytest.mark.parametrize(("weights", "slots"), [(21, 0), (22, 1), (23, 2), (24, 3), (30, 3)])
def test_as_few_slots_go_as_give_the_shortfall_back_and_one_stays(weights: int, slots: int) -> None:
    found = levers("floor", weights=seen(weights * GIB, "bytes"))
    assert (freed(found["fewer slots"]) if slots else None) == (slots * GIB or None)
    assert ("fewer slots" in found) == (slots > 0)


def test_the_shortfall_is_what_headroom_lacks() -> None:
    assert shortfall(ledger_of(replica())).value == 0
    assert shortfall(ledger_of(replica(weights=seen(22 * GIB, "bytes")))).value == GIB
    assert shortfall(ledger_of(replica(weights=unknown("bytes")))).value is None


def test_a_lever_whose_bytes_are_not_known_says_so() -> None:
    found = levers("floor", weights=unknown("bytes"))
    assert freed(found["quantization"]) is None
    assert "unknown amount" in found["quantization"].statement
    assert "fewer slots" not in found


def test_slots_beyond_the_working_set_are_kv_tokens() -> None:
    found = levers("kv", **LONG_PROMPT)
    assert freed(found["fewer slots"]) == 2 * GIB
    assert "2 GiB or 2,048 KV tokens" in found["fewer slots"].statement
    assert freed(levers("kv", working_set=seen(3, "adapters"))["fewer slots"]) == GIB
    assert "fewer slots" not in levers("kv", working_set=seen(4, "adapters"))
    assert "fewer slots" not in levers("kv", working_set=unknown("adapters"))


def test_a_lower_rank_is_offered_only_where_it_is_known_to_do() -> None:
    assert "lower rank" not in levers("kv")
    assert "lower rank" not in levers("kv", needed_max_rank=64)
    assert freed(levers("kv", needed_max_rank=8)["lower rank"]) == 4 * GIB - GIB // 2


def test_more_slots_cost_kv_tokens() -> None:
    found = levers("adapters", **COLD_CHURN)
    assert freed(found["more slots"]) == -8 * GIB
    assert "8 more hold the working set: 8 GiB or 8,192 KV tokens less for KV" in found["more slots"].statement
    assert freed(found["more host entries"]) == 0
    assert "of 12" in found["more host entries"].statement


def test_more_slots_are_not_offered_where_the_working_set_fits() -> None:
    found = levers("adapters", working_set=seen(4, "adapters"))
    assert "more slots" not in found
    assert "more host entries" not in found
    assert "more host entries" not in levers("adapters", working_set=seen(8, "adapters"))
    assert "more host entries" in levers("adapters", working_set=seen(9, "adapters"))


def test_a_slot_has_its_price_where_the_working_set_is_not_known() -> None:
    found = levers("adapters", working_set=unknown("adapters"))
    assert freed(found["more slots"]) == -GIB
    assert "each: 1 GiB" in found["more slots"].statement


def test_a_unified_pool_has_no_slots_to_change() -> None:
    for pool in ("floor", "kv", "adapters"):
        assert not {"fewer slots", "more slots", "lower rank"} & set(levers(pool, layout="unified", needed_max_rank=8))


def test_the_limit_names_the_levers_of_its_first_pool_in_a_line() -> None:
    found = limiting(ledger_of(replica(safety=configured(11 * GIB, "bytes"), **COLD_CHURN)))
    assert found.lever == "quantization, sharding, fewer slots"
    assert limiting(ledger_of(replica())).lever == ""


def test_sizes_are_rounded_to_whole_bytes() -> None:
    found = levers("kv", slot_bytes=configured(MIB + 1, "bytes"), needed_max_rank=16)
    assert isinstance(freed(found["lower rank"]), int)
