import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.engines.scrape import PageReader, parse_metrics

CASES = Path(__file__).parents[1] / "cases"


def page(case: str, file: str = "metrics.txt") -> str:
    return (CASES / case / file).read_text()


def expected(case: str) -> Any:
    return json.loads((CASES / case / "expect.json").read_text())


def test_only_the_newest_adapter_series_is_current() -> None:
    want = expected("lora-info-multi-series")
    sample = parse_metrics(page("lora-info-multi-series"))
    assert sample.active_adapters == tuple(want["current"]["running"])
    assert sample.max_lora == want["current"]["max_lora"]
    assert sample.lora_info == "present"


def test_newest_of_four_hundred_stale_series_is_found_wherever_it_stands() -> None:
    want = expected("lora-info-multi-series")["metrics_400_series"]
    lines = page("lora-info-multi-series", "metrics_400_series.txt").splitlines()
    for shown in (lines, lines[::-1], sorted(lines)):
        sample = parse_metrics("\n".join(shown) + "\n")
        assert sample.active_adapters == tuple(sorted(want["running"]))
        assert sample.max_lora == want["max_lora"]


def test_page_without_the_adapter_family_keeps_the_rest() -> None:
    sample = parse_metrics(page("lora-info-missing", "metrics_no_family.txt"))
    assert (sample.lora_info, sample.active_adapters, sample.max_lora) == ("absent", None, None)
    assert (sample.running, sample.waiting, sample.kv_usage) == (5, 1, 0.4125)
    assert sample.bad_lines == 0


def test_adapter_family_without_samples_is_no_information_yet() -> None:
    sample = parse_metrics(page("lora-info-missing", "metrics_type_only.txt"))
    assert (sample.lora_info, sample.active_adapters, sample.max_lora) == ("empty", None, None)
    assert (sample.running, sample.waiting, sample.kv_usage, sample.bad_lines) == (None, None, None, 0)


def test_running_and_waiting_names_are_united_not_added() -> None:
    want = expected("running-equals-waiting")
    sample = parse_metrics(page("running-equals-waiting"))
    assert sample.active_adapters is not None
    assert list(sample.active_adapters) == want["in_flight_adapters"]
    assert len(sample.active_adapters) == want["count"]
    assert sample.max_lora is not None
    assert sample.max_lora - len(sample.active_adapters) == want["room_for_distinct_in_batch"]


def test_engine_totals_agree_with_what_the_boundary_recorded() -> None:
    sample = parse_metrics(page("base-name-metrics"))
    want = expected("base-name-metrics")
    assert sample.finished == {"stop": sum(want["per_tenant_requests"].values())}
    assert sample.generation_tokens_total == sum(want["per_tenant_completion_tokens"].values())
    assert sample.prompt_tokens_total == 9000


def test_page_of_vllm_v0() -> None:
    want = expected("metrics_shapes")["m01"]
    sample = parse_metrics(page("metrics_shapes", "m01_vllm_v0.txt"))
    assert (sample.running, sample.waiting, sample.kv_usage) == (want["running"], want["waiting"], want["kv_used"])
    assert (sample.max_lora, sample.active_adapters) == (0, ())
    assert sample.prefix_hits_total is want["prefix_hit_rate"] is None
    assert sample.kv_tokens == 9000 * 16
    assert sample.finished == {"stop": 3100, "abort": 14, "length": 6}
    assert (sample.prompt_tokens_total, sample.preemptions_total) == (2_100_340, 0)
    assert sample.process_start_ns is None


def test_page_of_vllm_v1() -> None:
    want = expected("metrics_shapes")["m02"]
    sample = parse_metrics(page("metrics_shapes", "m02_vllm_v1_engine_label.txt"))
    assert (sample.running, sample.waiting, sample.kv_usage) == (want["running"], want["waiting"], want["kv_used"])
    assert sample.prefix_hits_total is not None
    assert sample.prefix_queries_total is not None
    assert sample.prefix_hits_total / sample.prefix_queries_total == want["prefix_hit_rate"]
    assert (sample.max_lora, sample.active_adapters) == (want["max_lora"], tuple(want["active_adapters"]))
    assert (sample.finished["error"], sample.finished["abort"]) == (want["errors"], want["aborts"])
    assert sample.process_start_ns == 1_792_700_010_000_000_000
    assert (sample.kv_tokens, sample.engines, sample.bad_lines) == (25310 * 16, 1, 0)


def test_label_names_of_2024() -> None:
    want = expected("metrics_shapes")["m03"]
    sample = parse_metrics(page("metrics_shapes", "m03_vllm_2024_prototype_labels.txt"))
    assert (sample.max_lora, sample.active_adapters) == (want["max_lora"], tuple(want["active_adapters"]))


def test_pages_of_sglang() -> None:
    want = expected("metrics_shapes")
    early = parse_metrics(page("metrics_shapes", "m04_sglang_early.txt"))
    assert (early.running, early.waiting, early.kv_usage) == (12, 4, want["m04"]["kv_used"])
    assert (early.lora_info, early.max_lora) == ("absent", None)
    later = parse_metrics(page("metrics_shapes", "m05_sglang_05_lora_pool.txt"))
    assert (later.running, later.waiting, later.kv_usage) == (24, 3, want["m05"]["kv_used"])
    assert later.max_lora == want["m05"]["lora_slots_total"]
    assert later.active_adapters is None
    assert later.prompt_tokens_total == want["m05"]["prompt_tokens"]


def test_several_engines_are_counted_and_added_up() -> None:
    text = (
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 4.0\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2\n'
        'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.9\n'
        'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1.0\n'
        'vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="100"} 1.0\n'
    )
    sample = parse_metrics(text)
    assert (sample.engines, sample.running, sample.kv_usage, sample.kv_tokens) == (2, 7, 0.9, 3200)


def test_the_engines_own_token_capacity_wins_over_blocks_times_size() -> None:
    labels = 'block_size="16",engine="0",num_gpu_blocks="100"'
    assert parse_metrics(f'vllm:cache_config_info{{{labels},kv_cache_size_tokens="900"}} 1.0\n').kv_tokens == 900
    assert parse_metrics(f'vllm:cache_config_info{{{labels},kv_cache_size_tokens="None"}} 1.0\n').kv_tokens == 1600
    assert parse_metrics('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n').kv_tokens is None


@pytest.mark.parametrize(
    "bad",
    [
        'vllm:num_requests_waiting{engine="0"',
        'vllm:num_requests_waiting{engine="0"} ',
        'vllm:num_requests_waiting{engine="0"} many',
        'vllm:num_requests_waiting{engine="0"} 1 2 3',
        "vllm:num_requests_waiting",
        "vllm:num_requests_running{engine=0} 9",
        'vllm:lora_requests_info{max_lora="1",running_lora_adapters="x} 1.7e+09',
        "vllm:cache_config_info{oops} 1.0",
        "process_start_time_seconds soon",
    ],
)
def test_bad_line_costs_only_itself_and_is_counted(bad: str) -> None:
    sample = parse_metrics(
        f'vllm:num_requests_running{{engine="0"}} 2\n{bad}\nvllm:kv_cache_usage_perc{{engine="0"}} 0.5\n'
    )
    assert (sample.running, sample.kv_usage, sample.bad_lines) == (2, 0.5, 1)
    assert (sample.waiting, sample.process_start_ns, sample.kv_tokens) == (None, None, None)
    assert sample.active_adapters is None


def test_figures_that_mean_not_measured_are_unknown_and_not_bad() -> None:
    sample = parse_metrics(
        "vllm:kv_cache_usage_perc NaN\nvllm:num_requests_waiting -1\nvllm:num_requests_running +Inf\n"
    )
    assert (sample.kv_usage, sample.waiting, sample.running, sample.bad_lines) == (None, None, None, 0)


def test_names_that_look_like_syntax_survive() -> None:
    line = r'vllm:lora_requests_info{max_lora="2",running_lora_adapters="a} 9,b\"c\\d e=\"f",waiting_lora_adapters=""} 7 1000'
    sample = parse_metrics(line + "\n")
    assert sample.active_adapters == ("a} 9", 'b"c\\d e="f')
    assert (sample.max_lora, sample.bad_lines) == (2, 0)


def test_similarly_named_families_are_not_taken() -> None:
    text = (
        'vllm:num_requests_waiting_by_reason{reason="deferred"} 5\nvllm:prompt_tokens_by_source_total{source="x"} 5\n'
        "vllm:prompt_tokens_created 1.7e+09\nvllm:num_requests_waiting 2\nvllm:prompt_tokens_total 3\n"
    )
    sample = parse_metrics(text)
    assert (sample.waiting, sample.prompt_tokens_total) == (2, 3)


def test_windows_line_ends_and_a_missing_last_one() -> None:
    sample = parse_metrics("vllm:num_requests_running 2\r\nvllm:num_requests_waiting 3")
    assert (sample.running, sample.waiting, sample.bad_lines) == (2, 3, 0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4200), max_size=12))
def test_any_cut_of_the_page_reads_the_same(cuts: list[int]) -> None:
    text = page("metrics_shapes", "m02_vllm_v1_engine_label.txt")
    data = text.replace("tenant-b", "ténant-b").encode()
    reader = PageReader()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        reader.feed(data[begin:end])
    assert reader.finish() == parse_metrics(data.decode())


@settings(deadline=None)
@given(st.text())
def test_no_text_whatever_raises(text: str) -> None:
    prefixed = f"vllm:lora_requests_info{{{text}\nvllm:num_requests_running{{{text}}} {text}\n{text}"
    assert parse_metrics(prefixed).bad_lines >= 0


def test_memory_does_not_grow_with_stale_series() -> None:
    reader = PageReader()
    for number in range(20_000):
        reader.feed(
            f'vllm:lora_requests_info{{max_lora="8",running_lora_adapters="t{number}",waiting_lora_adapters=""}} '
            f"{1.7e9 + number}\n".encode()
        )
    held = [value for value in vars(reader).values() if isinstance(value, dict | set | list | bytes)]
    assert sum(len(value) for value in held) == 0
    assert reader.finish().active_adapters == ("t19999",)
