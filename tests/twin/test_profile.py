from typing import Any

import pytest

from loraledger.twin.profile import PS_PER_MS, PS_PER_US, TwinProfile, UnifiedRules


def test_decode_step_is_the_published_fit() -> None:
    assert TwinProfile().step_ps(64, 64 * 1024, 0, 0) == 6_320_000_000 + 64 * 11_100_000 + 64 * 1024 * 40_700


@pytest.mark.parametrize(
    ("tokens", "expected_ps"),
    [
        (16, 7_400 * PS_PER_US),
        (300, 7_400 * PS_PER_US),
        (1000, 21_750 * PS_PER_US),
        (4096, 1 * PS_PER_MS + 4096 * 20_750_000),
    ],
)
def test_pure_prefill_step_is_the_published_fit(tokens: int, expected_ps: int) -> None:
    assert TwinProfile().step_ps(0, 0, tokens, 0) == expected_ps


def test_each_distinct_adapter_costs_once() -> None:
    profile = TwinProfile(adapter_step_ps=7)
    assert profile.step_ps(4, 100, 0, 3) - profile.step_ps(4, 100, 0, 0) == 21


def test_load_is_overhead_and_bytes_over_bandwidth() -> None:
    profile = TwinProfile(load_overhead_ps=5, load_bytes_per_s=2_000_000_000_000)
    assert profile.load_ps(1001) == 5 + 500


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_tokens_fill_whole_blocks(tokens: int, blocks: int) -> None:
    assert TwinProfile().blocks(tokens) == blocks


@pytest.mark.parametrize("field", ["slots", "max_rank", "max_seqs", "kv_blocks", "block_size", "load_bytes_per_s"])
def test_a_size_of_zero_is_refused_by_name(field: str) -> None:
    zero: dict[str, Any] = {field: 0}
    with pytest.raises(ValueError, match=f"^{field} is 0"):
        TwinProfile(**zero)


def test_host_cache_smaller_than_slots_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^host_entries is 3: must be at least slots \(4\)"):
        TwinProfile(slots=4, host_entries=3)


def test_token_budget_below_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^token_budget is 8: must be at least max_seqs \(9\)"):
        TwinProfile(max_seqs=9, token_budget=8)


def test_negative_cost_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^activation_ps is -1: must not be negative"):
        TwinProfile(activation_ps=-1)


TABLE = ((1, 100, 10), (3, 201, 20), (8, 400, 21))


@pytest.mark.parametrize(
    ("decoding", "intercept", "slope"), [(1, 100, 10), (2, 150, 15), (3, 201, 20), (4, 240, 20), (8, 400, 21)]
)
def test_decode_table_is_read_between_its_rows(decoding: int, intercept: int, slope: int) -> None:
    profile = TwinProfile(max_seqs=8, decode_table=TABLE)
    assert profile.step_ps(decoding, 1000, 0, 0) == intercept + slope * 1000


def test_step_without_decodes_costs_the_base_even_with_a_table() -> None:
    assert TwinProfile(max_seqs=8, decode_table=TABLE, step_base_ps=7).step_ps(0, 0, 0, 0) == 7


def test_prefill_table_replaces_the_line_and_mixed_table_beside_decodes() -> None:
    profile = TwinProfile(token_budget=300, prefill_table=((10, 100), (300, 390)), mixed_table=((1, 5), (300, 304)))
    base = profile.step_ps(0, 0, 0, 0)
    assert [profile.step_ps(0, 0, tokens, 0) - base for tokens in (1, 10, 55, 300)] == [100, 100, 145, 390]
    assert profile.step_ps(2, 9, 20, 0) - profile.step_ps(2, 9, 0, 0) == 24


@pytest.mark.parametrize(("rank_cost", "weight"), [("max", 64), ("sum", 88)])
def test_ranks_weigh_by_the_largest_or_by_their_sum(rank_cost: Any, weight: int) -> None:
    profile = TwinProfile(adapter_step_ps=0, rank_step_ps=3, lora_ps=5, rank_cost=rank_cost)
    assert profile.step_ps(1, 0, 0, 3, (8, 64, 16)) - profile.step_ps(1, 0, 0, 0) == 5 + 3 * weight


BAD: list[tuple[dict[str, Any], str]] = [
    ({"layout": "paged"}, "^layout is 'paged'"),
    ({"rank_cost": "mean"}, "^rank_cost is 'mean'"),
    ({"step_per_kv_token_ps": -1}, "^step_per_kv_token_ps is -1"),
    ({"slot_bytes": -1}, "^slot_bytes is -1"),
    ({"prefix_block_tokens": 24}, r"^prefix_block_tokens is 24: must be a multiple of block_size \(16\)"),
    ({"decode_table": ((1, 10, -1), (256, 10, 1))}, "^decode_table: slope of 1 sequences is -1: must not be negative"),
    ({"decode_table": ((1, 0, 1), (256, 10, 1))}, "^decode_table: intercept of 1 sequences is 0"),
    ({"decode_table": ((1, 10, 1), (255, 10, 1))}, r"^decode_table: sequences must rise from 1 to max_seqs \(256\)"),
    (
        {"decode_table": ((1, 10, 2), (2, 9, 1), (256, 9, 1))},
        "^decode_table: a step of 2 sequences is shorter than one of 1,",
    ),
    ({"max_seqs": 100_001, "token_budget": 100_001}, "^max_seqs is 100001: must be at most 100000"),
    ({"block_size": 100_001}, "^block_size is 100001: must be at most 100000"),
    ({"decode_table": ((1, 10, 1), (1, 10, 1), (256, 10, 1))}, "^decode_table: sequences must rise"),
    ({"prefill_table": ((1, 10), (100, 9), (2048, 10))}, "^prefill_table: negative slope between 1 and 100 tokens"),
    ({"prefill_table": ((1, -1), (2048, 10))}, "^prefill_table: time of 1 tokens is -1"),
    ({"mixed_table": ((1, 10), (2047, 10))}, "^mixed_table: tokens must rise from 1 or more to 2048"),
    ({"layout": "unified", "prefix_caching": True}, "^prefix_caching is on: layout unified has none"),
    ({"layout": "unified", "unified": UnifiedRules(attempt_steps=0)}, "^unified.attempt_steps is 0"),
    ({"layout": "unified", "unified": UnifiedRules(kv_bytes_per_token=-1)}, "^unified.kv_bytes_per_token is -1"),
    ({"layout": "unified", "unified": UnifiedRules(order="best")}, "^unified.order is 'best'"),  # type: ignore[arg-type]
]


def test_an_intercept_may_fall_where_the_slope_makes_up_for_it() -> None:
    assert TwinProfile(max_seqs=2, decode_table=((1, 10, 3), (2, 9, 2))).decode_table[1] == (2, 9, 2)


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_profile_that_cannot_be_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TwinProfile(**changes)


def test_unified_profile_needs_no_slots_that_fit_and_a_sixth_of_the_pool_prefills() -> None:
    profile = TwinProfile(layout="unified", slots=9, host_entries=1, max_seqs=1000, token_budget=1)
    assert profile.prefill_limit == 24_576 * 16 // 6
    assert TwinProfile(layout="unified", kv_blocks=100).prefill_limit == 3072
