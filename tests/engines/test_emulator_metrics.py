from prometheus_client.parser import text_string_to_metric_families

from loraledger.engines.emulator_metrics import Counters, exposition
from loraledger.engines.scrape import parse_metrics
from loraledger.twin.events import TwinSample
from loraledger.twin.profile import TwinProfile

SAMPLE = TwinSample(running=3, waiting=2, kv_used_blocks=25, kv_blocks=100, active=("a",), preemptions=7)


def page(model: str = "base", **combinations: float) -> str:
    counters = Counters(prompt_tokens=10, generation_tokens=20, finished=5, combinations=combinations)
    return exposition(model, 1_700_000_000.25, TwinProfile(slots=4, kv_blocks=100), SAMPLE, counters)


def test_names_with_quotes_and_backslashes_survive() -> None:
    name = 'a "quoted" \\ name\nof two lines'
    families = {family.name: family for family in text_string_to_metric_families(page(name))}
    assert families["vllm:num_requests_running"].samples[0].labels["model_name"] == name


def test_adapter_family_is_absent_before_any_request() -> None:
    assert "lora_requests_info" not in page()


def test_own_scraper_reads_what_is_meant() -> None:
    sample = parse_metrics(page(a=1.0, b=2.0))
    assert (sample.running, sample.waiting, sample.kv_usage) == (3, 2, 0.25)
    assert (sample.max_lora, sample.active_adapters) == (4, ("b",))
