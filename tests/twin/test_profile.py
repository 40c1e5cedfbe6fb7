import pytest

from loraledger.twin.profile import PS_PER_MS, PS_PER_US, TwinProfile


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
    with pytest.raises(ValueError, match=f"^{field} is 0"):
        TwinProfile(**{field: 0})


def test_host_cache_smaller_than_slots_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^host_entries is 3: must be at least slots \(4\)"):
        TwinProfile(slots=4, host_entries=3)


def test_token_budget_below_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^token_budget is 8: must be at least max_seqs \(9\)"):
        TwinProfile(max_seqs=9, token_budget=8)


def test_negative_cost_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^activation_ps is -1: must not be negative"):
        TwinProfile(activation_ps=-1)
