from __future__ import annotations

from pathlib import Path

import pytest

from loraledger.record.tables import Row
from loraledger.signals.figures import DIMENSIONS, Dimension, Split
from loraledger.signals.measure import measure

from .records import (
    FACTS,
    MINUTE,
    MS,
    NOON,
    SECOND,
    WINDOW,
    about,
    base_request,
    measured,
    move,
    record,
    request,
    sample,
    total,
)

# --- hits -------------------------------------------------------------------------------------------------------------


def test_of_50000_adapter_bearing_requests_46500_resident_are_93_percent_whatever_else_came(tmp_path: Path) -> None:
    every = MINUTE // 60_000
    classes = (
        ["gpu"] * 46_500 + ["host"] * 2_000 + ["disk"] * 1_000 + ["remote"] * 500 + ["base"] * 5_000 + ["unknown"] * 300
    )
    rows: list[Row] = [
        {
            "id": f"r{number}",
            "arrived_ns": NOON + number * every,
            "hit_class": of,
            "adapter": None if of == "base" else "a",
        }
        for number, of in enumerate([*classes, None, None])
    ]
    hits = total(measured(tmp_path, rows)).hits
    assert hits.gpu_rate == 0.93
    assert (hits.adapter_bearing, hits.misses) == (50_000, 3_500)
    assert (hits.base, hits.unknown, hits.undecided) == (5_000, 300, 2)
    assert hits.host_rate == 2_000 / 3_500


def test_hits_are_shown_by_replica_tenant_adapter_and_class(tmp_path: Path) -> None:
    rows = [request(), request(replica="r2", tenant="b", adapter="b", hit_class="disk"), base_request(replica="r2")]
    signals = measured(tmp_path, rows)
    assert signals.replicas["r1"].hits.gpu_rate == 1
    assert (signals.replicas["r2"].hits.disk, signals.replicas["r2"].hits.base) == (1, 1)
    assert signals.tenants["b"].hits.gpu_rate == 0
    assert set(signals.adapters) == {"acme/support", "b"}
    assert {name: group.requests for name, group in signals.classes.items()} == {"gpu": 1, "disk": 1, "base": 1}


def test_what_engines_found_stands_beside_what_was_believed(tmp_path: Path) -> None:
    group = total(measured(tmp_path, [request(engine_access="disk"), request(engine_access="gpu"), request()]))
    assert group.engine_hits is not None
    assert (group.engine_hits.gpu, group.engine_hits.disk, group.engine_hits.undecided) == (1, 1, 1)
    assert group.hits.gpu == 3


def test_what_the_client_got_wrong_counts_in_requests_and_status_alone(tmp_path: Path) -> None:
    signals = measured(
        tmp_path, [request(), request(status="client_error", adapter="b", itl_sketch='{"5":1}', preemptions=9)]
    )
    group = total(signals)
    assert (group.requests, group.by_status) == (2, {"ok": 1, "client_error": 1})
    assert (group.hits.gpu, group.prompt_tokens, group.distinct_adapters, group.itl) == (1, 100, 1, None)
    wrong = signals.adapters["b"]
    assert (wrong.requests, wrong.ttft, wrong.attainment, wrong.prompt_tokens, wrong.top_adapter) == (
        1,
        None,
        None,
        None,
        None,
    )
    assert (wrong.engine_hits, wrong.replicas, wrong.distinct_adapters, wrong.oldest_wait) == (None, 0, 0, None)


# --- windows ----------------------------------------------------------------------------------------------------------


def test_a_request_belongs_to_the_window_in_which_it_arrived_a_move_and_a_sample_to_that_of_their_moment(
    tmp_path: Path,
) -> None:
    times = (NOON - 1, NOON, NOON + MINUTE - 1, NOON + MINUTE)
    signals = measured(
        tmp_path,
        [request(arrived_ns=at) for at in times],
        [sample(at_ns=at) for at in times],
        [move("disk", "host", at_ns=at) for at in times],
    )
    group = signals.replicas["r1"]
    assert group.requests == total(signals).requests == 2
    assert group.pressure is not None
    assert group.pressure.samples == 2
    assert group.moves is not None
    assert group.moves.loads == 2
    assert group.per_minute == 2


# --- waiting ----------------------------------------------------------------------------------------------------------


def split_of(tmp_path: Path, **columns: object) -> Split:
    split = total(measured(tmp_path, [request(**columns)])).split
    assert split is not None
    return split


PROBED = {"engine_queue_ns": 30 * MS, "engine_stall_ns": 40 * MS, "engine_prefill_ns": 50 * MS}


def test_a_probe_tells_where_the_time_to_the_first_token_went(tmp_path: Path) -> None:
    split = split_of(tmp_path, queued_ns=20 * MS, dispatched_ns=NOON + 21 * MS, **PROBED)
    assert split == Split(1, 0.2, 0.02, 0.04, 0.03, 0.05, about(0.06), 0.0, 1)
    assert split.preparation_share == pytest.approx(0.2)


def test_without_a_probe_what_the_engine_did_with_it_is_one_part(tmp_path: Path) -> None:
    split = split_of(tmp_path, queued_ns=20 * MS, hit_class="host")
    assert split == Split(1, about(0.2), 0.02, 0.0, 0.0, 0.0, 0.0, 0.18, 0)


@pytest.mark.parametrize(
    ("hit_class", "told"), [("gpu", 1), ("base", 1), ("host", 0), ("disk", 0), ("unknown", 0), (None, 0)]
)
def test_who_needed_no_preparation_has_it_told(tmp_path: Path, hit_class: str | None, told: int) -> None:
    assert split_of(tmp_path, hit_class=hit_class).told == told


def test_a_twin_tells_load_and_activation_without_queue_and_prefill(tmp_path: Path) -> None:
    split = split_of(tmp_path, hit_class="disk", engine_load_ns=60 * MS, engine_activation_ns=10 * MS)
    assert (split.preparation, split.engine, split.told) == (0.07, 0.13, 1)


def test_the_stall_holds_load_and_activation_and_is_not_counted_beside_them(tmp_path: Path) -> None:
    split = split_of(tmp_path, engine_load_ns=30 * MS, engine_activation_ns=10 * MS, **PROBED)
    assert split.preparation == 0.04


@pytest.mark.parametrize(
    ("start", "end", "queued", "wait"),
    [
        (0, 60, None, 0.06),
        (-50, 60, None, 0.06),
        (10, 60, None, 0.05),
        (-50, -10, None, 0.0),
        (10, 60, 20, 0.04),
        (None, 60, None, 0.0),
        (10, None, None, 0.0),
    ],
)
def test_a_load_is_waited_for_from_the_arrival_on_and_not_while_queued(
    tmp_path: Path, start: int | None, end: int | None, queued: int | None, wait: float
) -> None:
    split = split_of(
        tmp_path,
        hit_class="disk",
        dispatched_ns=NOON + 60 * MS,
        queued_ns=None if queued is None else queued * MS,
        load_start_ns=None if start is None else NOON + start * MS,
        load_end_ns=None if end is None else NOON + end * MS,
    )
    assert split.preparation == wait


def test_parts_that_are_longer_than_the_whole_are_cut_at_the_first_token(tmp_path: Path) -> None:
    long = dict.fromkeys(PROBED, 150 * MS)
    split = split_of(tmp_path, queued_ns=20 * MS, **long)
    assert split == Split(1, about(0.2), 0.02, 0.03, 0.15, 0.0, 0.0, 0.0, 1)


def test_attainment_is_of_those_who_could_have_got_a_first_token(tmp_path: Path) -> None:
    none = {"first_token_ns": None, "last_token_ns": None}
    rows = [
        request(adapter="met"),
        request(adapter="late", first_token_ns=NOON + 201 * MS),
        request(adapter="refused", status="rejected", **none),
        request(adapter="failed", status="upstream_failed", **none),
        request(adapter="waits", status=None, finished_ns=None, **none),
        request(adapter="just came", status=None, finished_ns=None, arrived_ns=NOON + MINUTE - 150 * MS, **none),
        request(adapter="gave up", status="client_gone", **none),
        request(adapter="whole", stream=False, **none),
        request(adapter="crashed", status="gateway_crashed", finished_ns=None, **none),
    ]
    signals = measured(tmp_path, rows, slo_s=0.2)
    judged = {name: group.attainment for name, group in signals.adapters.items() if group.attainment is not None}
    assert judged == {"met": 1, "late": 0, "refused": 0, "failed": 0, "waits": 0}
    assert total(signals).attainment == 1 / 5
    waits = {name: group.oldest_wait for name, group in signals.adapters.items() if group.oldest_wait is not None}
    assert waits == {
        "met": 0.2, "late": 0.201, "refused": 0.401, "failed": 0.401, "waits": 60.0, "just came": 0.15, "gave up": 0.401,
    }  # fmt: skip


def test_the_worst_adapter_has_five_requests_or_more(tmp_path: Path) -> None:
    late = {"first_token_ns": NOON + 2 * SECOND, "last_token_ns": NOON + 2 * SECOND, "finished_ns": NOON + 2 * SECOND}
    rows = [request(adapter="few", **late)] * 4 + [request(adapter="many", **late)] * 5 + [request() for _ in range(9)]
    rows = [{**row, "id": f"req-{number}"} for number, row in enumerate(rows)]
    assert measured(tmp_path, rows).worst_adapter == "many"


def test_cold_requests_have_a_p99_of_their_own(tmp_path: Path) -> None:
    cold = {
        "hit_class": "disk",
        "first_token_ns": NOON + 2 * SECOND,
        "finished_ns": NOON + 3 * SECOND,
        "last_token_ns": None,
    }
    group = total(measured(tmp_path, [request() for _ in range(200)] + [request(**cold)]))
    assert group.cold_ttft_p99 == 2
    assert group.ttft is not None
    assert group.ttft.p99 == pytest.approx(0.2)


def test_times_between_tokens_are_left_out_of_groups_that_nobody_asked_them_of(tmp_path: Path) -> None:
    rows = [request(itl_sketch='{"776":10}', tenant=tenant) for tenant in ("a", "b")]
    by: tuple[Dimension, ...] = ("replica",)
    with record(tmp_path, rows) as reader:
        every, some, none = (measure(reader, WINDOW, FACTS, itl_by=kinds) for kinds in (DIMENSIONS, by, ()))
    assert (total(none).itl, total(none).itl_by_class) == (total(every).itl, total(every).itl_by_class)
    assert (total(some).itl, total(some).itl_by_class) == (total(every).itl, total(every).itl_by_class)
    assert total(some).itl is not None
    assert {name: group.itl for name, group in some.replicas.items()} == {
        name: group.itl for name, group in every.replicas.items()
    }
    assert {name: group.itl for name, group in some.classes.items()} == {
        name: group.itl for name, group in every.classes.items()
    }
    assert [group.itl for group in (*some.tenants.values(), *some.adapters.values())] == [None] * (
        2 + len(some.adapters)
    )
    assert None not in [group.itl for group in (*every.tenants.values(), *every.adapters.values())]


def test_rejections_are_told_by_reason(tmp_path: Path) -> None:
    refused = {"status": "rejected", "replica": None, "first_token_ns": None, "hit_class": None}
    rows = [request(reason=reason, **refused) for reason in ("queue_full", "queue_full", "rate", None)]
    signals = measured(tmp_path, [*rows, request(tenant="b", reason="not one", status="upstream_failed")])
    assert total(signals).rejections == {"queue_full": 2, "rate": 1, "unknown": 1}
    assert signals.tenants["acme"].rejections == total(signals).rejections
    assert signals.tenants["b"].rejections == {}
    assert signals.classes["undecided"].rejections == total(signals).rejections


def test_active_tokens_name_the_adapter_with_most_of_them(tmp_path: Path) -> None:
    long = {"finished_ns": NOON + 3 * SECOND + MS, "adapter": "b"}
    group = total(measured(tmp_path, [request(prompt_tokens=589, **long), *(request() for _ in range(3))]))
    assert group.active_tokens == pytest.approx((600 * 3 + 3 * 111 * 0.4) / 60)
    assert group.top_adapter == "b"
    assert group.top_adapter_share == pytest.approx(1800 / (1800 + 133.2))


# --- versions ---------------------------------------------------------------------------------------------------------

OLD = {"engine_version": "0.10.0", "replica": "r2"}


def versioned() -> list[Row]:
    nowhere = request(replica=None, engine_version=None, status="rejected", first_token_ns=None)
    return [request(), request(), request(arrived_ns=NOON + 1, **OLD), nowhere]


def test_versions_are_not_pooled_and_all_are_listed(tmp_path: Path) -> None:
    signals = measured(tmp_path, versioned(), [sample(), sample(replica="r2"), sample(replica="idle")])
    assert [(version.engine_version, version.requests) for version in signals.versions] == [
        ("0.11.0", 2),
        ("0.10.0", 1),
    ]
    assert signals.version == signals.versions[0]
    assert total(signals).requests == 3
    assert total(signals).by_status == {"ok": 2, "rejected": 1}
    assert list(signals.replicas) == ["idle", "r1"]
    assert signals.measure_again is not None
    assert "2 of engine 0.11.0" in signals.measure_again
    assert "1 of engine 0.10.0" in signals.measure_again
    assert any("name no version" in note for note in signals.quality.notes)


def test_versions_are_pooled_when_asked(tmp_path: Path) -> None:
    with record(tmp_path, versioned()) as reader:
        signals = measure(reader, WINDOW, FACTS, pool_versions=True)
    assert (signals.version, total(signals).requests, set(signals.replicas)) == (None, 4, {"r1", "r2"})
    assert signals.measure_again is not None
    assert "all are pooled" in signals.measure_again


def test_the_version_of_another_window_is_measured_if_it_is_there(tmp_path: Path) -> None:
    with record(tmp_path, versioned()) as reader:
        old = measure(reader, WINDOW, FACTS).versions[1]
        like_old = measure(reader, WINDOW, FACTS, like=old)
    assert like_old.version == old
    assert total(like_old).requests == 2
    with record(tmp_path / "new", [request()]) as reader:
        gone = measure(reader, WINDOW, FACTS, like=old)
        same = measure(reader, WINDOW, FACTS, like=gone.version)
    assert gone.version is not None
    assert gone.version.engine_version == "0.11.0"
    assert gone.measure_again == (
        "Measure again: no request here is of engine 0.10.0: figures of the two windows are of different systems."
    )
    assert same.measure_again is None


@pytest.mark.parametrize("column", ["engine_version", "base", "config_digest", "gateway_version"])
def test_each_part_of_a_version_tells_rows_apart(tmp_path: Path, column: str) -> None:
    signals = measured(tmp_path, [request(), request(), request(**{column: None})])
    assert len(signals.versions) == 2
    assert total(signals).requests == 2


def test_rows_that_were_sent_nowhere_are_measured_when_there_are_no_others(tmp_path: Path) -> None:
    signals = measured(tmp_path, [request(replica=None, engine_version=None)])
    assert total(signals).requests == 1
    assert signals.measure_again is None


# --- what is missing --------------------------------------------------------------------------------------------------


def test_notes_say_what_is_missing_and_what_would_supply_it(tmp_path: Path) -> None:
    rows = [
        request(hit_class="disk", **PROBED),
        request(hit_class="unknown", adapter="c", replica="r9"),
        request(status=None, finished_ns=None, first_token_ns=None, tenant=None),
        request(hit_class=None, prompt_tokens=None, generated_tokens=None),
    ]
    assert measured(tmp_path, rows).quality.notes == (
        "Not ended when the record was read: 1 request, of unknown tokens.",
        "Ended well without token counts: 1 request. They are unknown, not 0: have the engine report usage.",
        "Without a tenant, and in no tenant's figures: 1 request.",
        "Nobody knew where the adapter was: 1 request, in no hit rate.",
        "No decision was taken: 1 request, without a hit class.",
        "Engine queue, preparation and prefill are unknown of 2 of 3 first tokens: run vLLM with loraledger-probe "
        "(docs/probe.md).",
        "Percentiles of times between tokens are unknown: only their mean is.",
        "Bytes are unknown of 1 of 2 adapters (c); loraledger.yaml.",
        "Slots are unknown of 1 of 2 replicas (r9); loraledger.yaml.",
        "There are no samples of 2 of 2 replicas (r1, r9): their KV use, batch and restarts are unknown. A gateway takes "
        "samples while it serves.",
        "Requests missed and no move of an adapter was recorded: loads and evictions are unknown.",
    )


def test_a_record_that_tells_everything_has_no_notes(tmp_path: Path) -> None:
    rows = [request(itl_sketch='{"776":10}', **PROBED)]
    assert measured(tmp_path, rows, [sample()], [move("disk", "gpu")]).quality.notes == ()
