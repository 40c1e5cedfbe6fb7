import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from loraledger.events import AttemptFailed, LoadAsked, Measured, RequestFinished
from loraledger.gateway.exposition import Family, Histogram, exposition
from loraledger.gateway.metrics import SECONDS, GatewayMetrics
from loraledger.record.tables import Row

from .fleets import MS, NOW, SECOND, DrivenGateway, adapter, settings

CASE = Path(__file__).parents[1] / "cases" / "base-name-metrics"
EMPTY = DrivenGateway(settings(replicas=())).state
SQL = adapter("org/sql")


class Scrape:
    """What a scraper reads: the value of a series by its name and labels."""

    def __init__(self, text: bytes) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text.decode())}
        self.series: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in self.families.values():
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.series, key
                self.series[key] = sample.value

    def get(self, name: str, **labels: str) -> float | None:
        prefixed = name if name.startswith("http_") else f"loraledger_{name}"
        return self.series.get((prefixed, frozenset(labels.items())))

    def all(self, name: str) -> dict[tuple[str, ...], float]:
        """Values of every series of ``name``, by their label values in alphabetical order of the labels."""
        found = [
            (dict(labels), value) for (series, labels), value in self.series.items() if series == f"loraledger_{name}"
        ]
        return {tuple(value for _, value in sorted(labels.items())): number for labels, number in found}


def row(**columns: Any) -> Row:
    defaults: Row = {
        "tenant": "acme", "adapter": "sql", "base": "acme/base-8b-instruct", "replica": "r1", "status": "ok",
        "http_status": 200, "arrived_ns": NOW, "finished_ns": NOW + 2 * SECOND, "hit_class": "gpu",
        "prompt_tokens": 100, "generated_tokens": 50, "predicted_prompt_tokens": 80,
    }  # fmt: skip
    return {**defaults, **columns}


def scrape(metrics: GatewayMetrics, **refused: int) -> Scrape:
    return Scrape(metrics.text(EMPTY, None, refused))


def observed(*rows: Row, **limits: Any) -> Scrape:
    metrics = GatewayMetrics(**limits)
    metrics.observe([("requests", each) for each in rows])
    return scrape(metrics)


def engine_total(name: str) -> float:
    (family,) = [f for f in text_string_to_metric_families((CASE / "metrics.txt").read_text()) if f.name == name]
    return sum(sample.value for sample in family.samples)


def test_case_base_name_metrics_totals_of_tenants_come_from_our_own_rows() -> None:
    expect = json.loads((CASE / "expect.json").read_text())
    events = [json.loads(line) for line in (CASE / "gateway_events.jsonl").read_text().splitlines()]
    found = observed(
        *(
            row(
                tenant=event["tenant"],
                adapter=event["adapter"],
                prompt_tokens=event["prompt_tokens"],
                generated_tokens=event["completion_tokens"],
            )
            for event in events
        )
    )
    requests = found.all("requests_total")
    generated, prompt = found.all("generated_tokens_total"), found.all("prompt_tokens_total")
    by_tenant = {name: {key[-1]: value for key, value in series.items()} for name, series in
                 (("requests", requests), ("tokens", generated))}  # fmt: skip
    assert by_tenant["requests"] == expect["per_tenant_requests"]
    assert by_tenant["tokens"] == expect["per_tenant_completion_tokens"]
    assert sum(requests.values()) == engine_total("vllm:request_success_total")
    assert sum(generated.values()) == engine_total("vllm:generation_tokens_total")
    assert sum(prompt.values()) == engine_total("vllm:prompt_tokens_total")


def test_requests_are_counted_by_tenant_adapter_replica_and_status() -> None:
    found = observed(row(), row(), row(status="client_error", http_status=400), row(adapter=None, replica=None))
    assert found.get("requests_total", tenant="acme", adapter="sql", replica="r1", status="ok") == 2
    assert found.get("requests_total", tenant="acme", adapter="sql", replica="r1", status="client_error") == 1
    assert found.get("requests_total", tenant="acme", adapter="", replica="", status="ok") == 1


def test_answers_are_counted_by_class_with_those_that_the_edge_gave() -> None:
    metrics = GatewayMetrics()
    rows = [row(), row(http_status=503), row(http_status=429), row(status="client_gone", http_status=None)]
    metrics.observe([("requests", each) for each in rows])
    found = scrape(metrics, invalid_api_key=3, model_not_found=1, shutting_down=2)
    assert found.get("http_requests_total", status="2xx") == 1
    assert found.get("http_requests_total", status="4xx") == 1 + 4
    assert found.get("http_requests_total", status="5xx") == 1 + 2
    assert len(found.families["http_requests"].samples) == 3
    assert found.get("edge_refusals_total", reason="invalid_api_key") == 3
    assert scrape(metrics).get("http_requests_total", status="4xx") == 1


def test_times_are_seconds_from_arrival_by_hit_class() -> None:
    found = observed(
        row(first_token_ns=NOW + 300 * MS, itl_mean_ns=20 * MS),
        row(first_token_ns=NOW + 10 * SECOND, hit_class=None),
        row(first_token_ns=None, hit_class="host"),
    )
    assert found.get("time_to_first_token_seconds_sum", hit_class="gpu") == pytest.approx(0.3)
    assert found.get("time_to_first_token_seconds_bucket", hit_class="gpu", le="0.25") == 0
    assert found.get("time_to_first_token_seconds_bucket", hit_class="gpu", le="0.5") == 1
    assert found.get("time_to_first_token_seconds_bucket", hit_class="unknown", le="10") == 1
    assert found.get("time_to_first_token_seconds_count", hit_class="host") is None
    assert found.get("inter_token_latency_seconds_sum") == pytest.approx(0.02)
    assert found.get("inter_token_latency_seconds_count") == 1
    assert found.get("request_duration_seconds_sum", status="ok") == pytest.approx(6.0)


def test_the_bounds_for_first_tokens_are_those_of_vllm() -> None:
    found = observed(row(first_token_ns=NOW + SECOND))
    bounds = [sample.labels["le"] for sample in found.families["loraledger_time_to_first_token_seconds"].samples
              if sample.name.endswith("_bucket")]  # fmt: skip
    assert [float(bound) for bound in bounds] == [
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
        2560, math.inf,
    ]  # fmt: skip


def test_waiting_in_the_queue_and_for_a_load_count_only_where_there_was_any() -> None:
    found = observed(
        row(),
        row(queued_ns=50 * MS),
        row(load_start_ns=NOW + 10 * MS, load_end_ns=NOW + 110 * MS),
        row(load_start_ns=NOW - SECOND, load_end_ns=NOW + 200 * MS),
        row(load_start_ns=NOW, load_end_ns=None),
    )
    assert found.get("gateway_queue_seconds_count") == 1
    assert found.get("gateway_queue_seconds_sum") == pytest.approx(0.05)
    assert found.get("load_wait_seconds_count") == 2
    assert found.get("load_wait_seconds_sum") == pytest.approx(0.1 + 0.2)


def test_unknown_usage_is_counted_and_never_taken_for_zero() -> None:
    unknown = {"prompt_tokens": None, "generated_tokens": None}
    found = observed(
        row(**unknown),
        row(generated_tokens=None),
        row(status="client_gone", http_status=None, first_token_ns=NOW + MS, **unknown),
        row(status="client_gone", http_status=None, **unknown),
        row(status="rejected", http_status=429, **unknown),
        row(),
    )
    assert found.get("requests_without_usage_total") == 3
    assert found.get("prompt_tokens_total", tenant="acme", adapter="sql") == 200
    assert found.get("generated_tokens_total", tenant="acme", adapter="sql") == 50
    nothing = observed(row(**unknown))
    assert nothing.all("prompt_tokens_total") == nothing.all("generated_tokens_total") == {}


def test_the_error_of_the_prompt_estimate_is_a_share_of_the_count() -> None:
    found = observed(
        row(predicted_prompt_tokens=80, prompt_tokens=100),
        row(predicted_prompt_tokens=120, prompt_tokens=100),
        row(predicted_prompt_tokens=5, prompt_tokens=0),
    )
    assert found.get("prompt_estimate_error_ratio_count") == 2
    assert found.get("prompt_estimate_error_ratio_sum") == pytest.approx(0.4)


def test_adapters_beyond_the_limit_share_one_label() -> None:
    rows = [row(adapter=f"a{number % 5}") for number in range(50)]
    found = observed(*rows, row(adapter=None), adapter_labels=2)
    assert found.all("generated_tokens_total") == {
        ("a0", "acme"): 500, ("a1", "acme"): 500, ("other", "acme"): 1500, ("", "acme"): 50
    }  # fmt: skip


def test_an_adapter_that_left_gives_up_its_series_and_its_label() -> None:
    metrics = GatewayMetrics(adapter_labels=1)
    metrics.observe([("requests", row(adapter="old")), ("requests", row(adapter="new"))])
    assert set(scrape(metrics).all("prompt_tokens_total")) == {("old", "acme"), ("other", "acme")}
    metrics.forget("old")
    metrics.forget("never seen")
    metrics.observe([("requests", row(adapter="new"))])
    found = scrape(metrics)
    assert set(found.all("prompt_tokens_total")) == {("new", "acme"), ("other", "acme")}
    assert {key[0] for key in found.all("requests_total")} == {"new", "other"}


def test_rows_of_a_running_gateway_become_its_metrics() -> None:
    gateway = DrivenGateway(settings(SQL, replicas=("r1",)))
    gateway.up("r1")
    request = gateway.ask("org/sql")
    gateway.loaded(took=200 * MS)
    gateway.answer(
        request,
        first_token=gateway.at + 100 * MS,
        itl_mean=20 * MS,
        prompt_tokens=180,
        generated_tokens=40,
    )
    gateway.ask("org/sql")
    found = Scrape(gateway.metrics_text())
    assert found.get("requests_total", tenant="acme", adapter="org/sql", replica="r1", status="ok") == 1
    assert found.get("time_to_first_token_seconds_sum", hit_class="disk") == pytest.approx(0.3)
    assert found.get("load_wait_seconds_sum") == pytest.approx(0.2)
    assert found.get("decisions_total", policy="bounded-affinity", replica="r1") == 2
    assert found.get("loads_total") == 1
    assert found.get("open_requests") == 1
    assert found.get("replica_in_flight", replica="r1") == 1
    assert found.get("queued_requests", tenant="acme") == 0
    assert found.get("slots", replica="r1") == 2
    assert found.get("slots_used", replica="r1", source="believed") == 1


def test_what_the_kernel_counts_is_read_at_the_scrape() -> None:
    gateway = DrivenGateway(settings(SQL, replicas=("r1",)))
    gateway.up("r1")
    gateway.feed(LoadAsked(gateway.at, "org/sql", "r1"))
    gateway.refused("no such file", permanent=True)
    gateway.ask("org/sql")
    request = gateway.ask(None)
    gateway.feed(AttemptFailed(gateway.at, request, 1, "upstream_failed", None, "connect refused"))
    gateway.sample("r1", registered=("base", f"org/sql@{'a' * 12}"))
    gateway.down("r1")
    found = Scrape(gateway.metrics_text())
    assert found.get("load_failures_total") == 1
    assert found.get("engine_exits_total") == 1
    assert found.get("retries_total") == 1
    assert found.get("adapters_parked_total") == 0
    assert found.get("rejections_total", reason="adapter_load_failed") == 1
    assert found.get("attempts_failed_total", status="upstream_failed") == 1
    assert found.get("drift_total", kind="registration_found") == 1


def test_gauges_of_a_replica_that_nobody_saw_are_absent() -> None:
    gateway = DrivenGateway(settings())
    found = Scrape(gateway.metrics_text())
    assert found.get("replica_up", replica="r1") == 0
    assert [
        found.all(name) for name in ("replica_running", "replica_waiting", "replica_kv_usage_ratio", "slots_used")
    ] == [{}] * 4
    gateway.up("r1")
    gateway.sample("r1", 3, None, kv_usage=0.5)
    found = Scrape(gateway.metrics_text())
    assert found.all("replica_up") == {("r1",): 1, ("r2",): 0}
    assert found.all("replica_running") == {("r1",): 3}
    assert found.all("replica_waiting") == {}
    assert found.all("replica_kv_usage_ratio") == {("r1",): 0.5}
    assert found.all("replica_sample_timestamp_seconds") == {("r1",): 1_700_000_000}
    assert found.all("slots_used") == {("r1", "believed"): 0}


def test_the_journals_troubles_are_counters_when_there_is_a_journal() -> None:
    journal = SimpleNamespace(dropped=7, sync_failures=2)
    found = Scrape(GatewayMetrics().text(EMPTY, journal, {}))
    assert found.get("journal_dropped_frames_total") == 7
    assert found.get("journal_sync_failures_total") == 2
    assert scrape(GatewayMetrics()).get("journal_dropped_frames_total") is None


def test_names_follow_the_conventions() -> None:
    gateway = DrivenGateway(settings(SQL, replicas=("r1",)))
    gateway.up("r1")
    gateway.sample("r1", 1, 1, kv_usage=0.1)
    rows = [row(first_token_ns=NOW, itl_mean_ns=MS, queued_ns=1, load_start_ns=NOW, load_end_ns=NOW + 1), row()]
    gateway.metrics.observe([("requests", each) for each in rows])
    text = gateway.metrics.text(
        gateway.state, SimpleNamespace(dropped=0, sync_failures=0), {"unknown_path": 1}
    ).decode()
    families = list(text_string_to_metric_families(text))
    assert len(families) > 25
    for family in families:
        assert family.documentation.endswith(".")
        assert family.name.startswith("loraledger_") or family.name == "http_requests"
        assert (f"{family.name}_total" in text) == (family.type == "counter")
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_ratio"))


def test_requests_that_a_client_left_are_finished_rows_too() -> None:
    gateway = DrivenGateway(settings(replicas=("r1",)))
    gateway.up("r1")
    request = gateway.ask(None)
    gateway.feed(RequestFinished(gateway.at, request, "upstream_reset", 200, "reset", Measured(first_token=gateway.at)))
    found = Scrape(gateway.metrics_text())
    assert found.get("requests_total", tenant="acme", adapter="", replica="r1", status="upstream_reset") == 1
    assert found.get("requests_without_usage_total") == 1


label_values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=20)


@given(st.dictionaries(st.tuples(label_values, label_values), st.floats(allow_nan=False) | st.integers(0, 2**50)))
def test_any_labels_and_values_can_be_read_back(series: dict[tuple[str, str], float]) -> None:
    family = Family("gauge", "some_gauge", 'Says "so"\\ and\nmore.', ("first", "second"))
    for labels, value in series.items():
        family.set(labels, value)
    for _ in range(2):
        read = list(text_string_to_metric_families(exposition([family]).decode()))
        found = {(s.labels["first"], s.labels["second"]): s.value for f in read for s in f.samples}
        assert found == series
        assert [f.documentation for f in read] == (['Says "so"\\ and\nmore.'] if series else [])


@given(st.lists(st.floats(0, 5000), min_size=1, max_size=50))
def test_a_histogram_counts_each_value_in_every_bucket_that_holds_it(values: list[float]) -> None:
    histogram = Histogram("some_seconds", "Doc.", SECONDS, ("kind",))
    for value in values:
        histogram.observe(("x",), value)
    (family,) = text_string_to_metric_families(exposition([histogram]).decode())
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            assert sample.value == sum(value <= float(sample.labels["le"]) for value in values)
        else:
            assert sample.labels == {"kind": "x"}
            assert sample.value == pytest.approx(sum(values) if sample.name.endswith("_sum") else len(values))
