"""Records that are empty, torn, or tell nonsense: the answer says what is missing, and holds no number that is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraledger.errors import InputFileError
from loraledger.record.reader import RecordReader
from loraledger.record.tables import TABLES
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Signals, Window
from loraledger.signals.measure import measure

from .records import NOON, SECOND, WINDOW, base_request, move, record, request, sample, total

SKETCH = '{"776":10}'


def not_finite(value: Any, at: str = "signals") -> list[str]:
    """Where NaN or an infinity is."""
    if isinstance(value, dict):
        return [found for key, each in value.items() for found in not_finite(each, f"{at}.{key}")]
    if isinstance(value, list | tuple):
        return [found for number, each in enumerate(value) for found in not_finite(each, f"{at}.{number}")]
    return [at] if isinstance(value, float) and not math.isfinite(value) else []


def checked(signals: Signals) -> Signals:
    assert not_finite(msgspec.to_builtins(signals)) == []
    assert msgspec.json.decode(msgspec.json.encode(signals), type=Signals) == signals
    return signals


def measured(reader: RecordReader, *, pool: bool = False) -> Signals:
    with reader:
        return checked(measure(reader, WINDOW, Facts(), pool_versions=pool))


def test_what_is_not_finite_is_found() -> None:
    assert not_finite({"a": [1, math.nan], "b": (math.inf, None)}) == ["signals.a.1", "signals.b.0"]


def test_no_rows_at_all(tmp_path: Path) -> None:
    signals = measured(record(tmp_path))
    assert (signals.total, signals.version, signals.versions, signals.measure_again) == (None, None, (), None)
    assert (signals.replicas, signals.tenants, signals.adapters, signals.classes) == ({}, {}, {}, {})
    assert "No request arrived in the window" in signals.quality.notes[0]


def test_a_window_without_requests_still_shows_its_replicas(tmp_path: Path) -> None:
    signals = measured(record(tmp_path, [request(arrived_ns=NOON - 1)], [sample()], [move("gpu", "host")]))
    assert signals.total is None
    group = signals.replicas["r1"]
    assert (group.requests, group.share, group.per_minute) == (0, None, 0)
    assert group.pressure is not None
    assert group.pressure.kv_usage_mean == 0.5
    assert group.moves is not None
    assert group.moves.slot_evictions == 1


def test_a_window_that_holds_no_moment_is_refused(tmp_path: Path) -> None:
    with record(tmp_path) as reader, pytest.raises(ValueError, match="has to end after it begins"):
        measure(reader, Window(NOON, NOON), Facts())


def test_one_request(tmp_path: Path) -> None:
    group = total(measured(record(tmp_path, [request(itl_sketch=SKETCH)])))
    assert group.ttft is not None
    assert (group.ttft.n, group.ttft.mean, group.ttft.p50, group.ttft.p99) == (1, 0.2, 0.2, 0.2)
    assert (group.share, group.attainment, group.hits.gpu_rate, group.hits.host_rate) == (1.0, 1.0, 1.0, None)


def test_one_class_only(tmp_path: Path) -> None:
    signals = measured(record(tmp_path, [base_request(), base_request()]))
    group = total(signals)
    assert (group.hits.base, group.hits.adapter_bearing, group.hits.gpu_rate, group.hits.host_rate) == (
        2,
        0,
        None,
        None,
    )
    assert list(signals.classes) == ["base"]
    assert (signals.adapters, signals.worst_adapter, group.distinct_adapters, group.top_adapter) == ({}, None, 0, None)
    assert group.working_set is not None
    assert (group.working_set.adapters, group.working_set.bytes, group.working_set.in_flight_max) == (0, 0, 0)


@pytest.mark.parametrize(
    "column",
    ["finished_ns", "first_token_ns", "dispatched_ns", "last_token_ns"],
)
def test_a_clock_that_went_back_takes_the_durations_and_leaves_the_counts(tmp_path: Path, column: str) -> None:
    bad = request(hit_class="disk", adapter="a", **{column: NOON - SECOND})
    signals = measured(record(tmp_path, [bad, request()]))
    assert signals.quality.backwards == 1
    assert any("A clock went back: 1 request" in note for note in signals.quality.notes)
    assert (total(signals).requests, total(signals).hits.disk, total(signals).prompt_tokens) == (2, 1, 200)
    group = signals.adapters["a"]
    assert (group.ttft, group.split, group.itl_mean, group.active_tokens) == (None, None, None, None)
    assert (group.attainment, group.oldest_wait) == (None, None)


@pytest.mark.parametrize(
    "column",
    [
        "queued_ns",
        "engine_queue_ns",
        "engine_prefill_ns",
        "engine_stall_ns",
        "engine_load_ns",
        "engine_activation_ns",
        "itl_mean_ns",
        "load_end_ns",
    ],
)
def test_a_negative_duration_is_unknown(tmp_path: Path, column: str) -> None:
    signals = measured(record(tmp_path, [request(**{"load_start_ns": 0, column: -1})]))
    assert (signals.quality.backwards, total(signals).ttft, total(signals).split) == (1, None, None)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63)])
def test_parts_that_no_sum_can_hold_are_unknown_and_stop_nothing(tmp_path: Path, value: int) -> None:
    parts = (
        "queued_ns",
        "engine_queue_ns",
        "engine_prefill_ns",
        "engine_stall_ns",
        "engine_load_ns",
        "engine_activation_ns",
    )
    bad = [request(**{part: value}) for part in parts] + [request(**dict.fromkeys(parts, value))]
    far = request(dispatched_ns=2**63 - 1, load_start_ns=0, load_end_ns=2**63 - 1, finished_ns=None, engine_queue_ns=5)
    signals = measured(record(tmp_path, [*bad, far, request()]))
    assert signals.quality.backwards == len(bad)
    ttft = total(signals).ttft
    assert ttft is not None
    assert (total(signals).requests, ttft.n) == (len(bad) + 2, 2)


def test_a_log_that_says_when_a_request_ended_and_not_how_accuses_nobody_of_waiting(tmp_path: Path) -> None:
    ended = request(status=None, first_token_ns=None, last_token_ns=None)
    group = total(measured(record(tmp_path, [ended, ended | {"id": "other"}])))
    assert (group.attainment, group.oldest_wait, group.ttft) == (None, None, None)
    waits = total(measured(record(tmp_path, [ended | {"finished_ns": None}])))
    assert (waits.attainment, waits.oldest_wait) == (0.0, 60.0)


def test_of_rows_with_one_id_the_one_that_ended_last_counts(tmp_path: Path) -> None:
    rows = [
        request(id="twice", status="gateway_crashed", finished_ns=None, first_token_ns=None, engine_version="older"),
        request(id="twice", status="ok", prompt_tokens=7),
        request(id="twice", status="upstream_failed", finished_ns=NOON + 1, dispatched_ns=None, first_token_ns=None),
        request(id=None),
        request(id=None),
    ]
    signals = measured(record(tmp_path, rows))
    assert signals.quality.duplicates == 2
    assert any("Rows with the id of another: 2." in note for note in signals.quality.notes)
    assert (total(signals).requests, total(signals).by_status) == (3, {"ok": 3})
    assert total(signals).prompt_tokens == 207
    assert [version.engine_version for version in signals.versions] == ["0.11.0"]


def test_any_column_may_be_null(tmp_path: Path) -> None:
    """Each column has a tenant of its own in whose rows it is null."""
    columns = [column.name for column in TABLES["requests"].columns if column.name != "arrived_ns"]
    known = {
        "queued_ns": 5,
        "load_start_ns": NOON,
        "load_end_ns": NOON + 9,
        "engine_queue_ns": 9,
        "engine_prefill_ns": 9,
        "engine_access": "gpu",
        "itl_sketch": SKETCH,
        "preemptions": 1,
    }
    rows = [
        row(**{**known, "tenant": column, column: None})
        for column in columns
        for row in (request, request, base_request, base_request)
    ]
    signals = measured(record(tmp_path, rows), pool=True)
    assert total(signals).requests == len(rows)
    assert set(signals.tenants) == set(columns) - {"tenant"}
    for column, group in signals.tenants.items():
        assert group.requests == 4, column
        assert (group.ttft is None) == (column == "first_token_ns"), column
        assert (group.itl is None) == (column == "itl_sketch"), column
        assert (group.hits.gpu_rate is None) == (column == "hit_class"), column
        assert (group.prompt_tokens is None) == (column == "prompt_tokens"), column
        assert (group.active_tokens is None) == (column in ("dispatched_ns", "finished_ns")), column
        assert (group.engine_hits is None) == (column == "engine_access"), column
        assert (group.itl_mean is None) == (column in ("itl_mean_ns", "generated_tokens")), column
        assert group.by_status == ({"open": 4} if column == "status" else {"ok": 4}), column
        if group.split is not None:
            assert (group.split.unattributed > 0) == (column not in ("engine_queue_ns", "engine_prefill_ns")), column


def test_any_column_of_samples_may_be_null(tmp_path: Path) -> None:
    """Each column has a replica of its own whose sample lacks it."""
    names = [column.name for column in TABLES["samples"].columns if column.name not in ("at_ns", "replica")]
    steps = ("steps", "step_tokens", "step_ns", "preempted", "recomputed_tokens", "blocked", "distinct_adapters")
    rows = [sample(**{**dict.fromkeys(steps, 3), "replica": name, name: None}) for name in names]
    signals = measured(record(tmp_path, [request()], [*rows, sample(replica=None), {"at_ns": NOON}]))
    assert set(signals.replicas) == {*names, "r1"}
    for name in names:
        pressure = signals.replicas[name].pressure
        assert pressure is not None
        assert (pressure.kv_usage_mean is None) == (name == "kv_usage"), name
        assert (pressure.tokens_per_step is None) == (name in ("steps", "step_tokens")), name
        assert (pressure.preemptions is None) == (name == "preempted"), name
        assert (pressure.busy is None) == (name == "step_ns"), name


def test_any_column_of_moves_may_be_null(tmp_path: Path) -> None:
    names = [column.name for column in TABLES["residency"].columns if column.name not in ("at_ns", "replica")]
    rows = [move("disk", "host", **{"took_ns": 5, "bytes": 5, "replica": name, name: None}) for name in names]
    signals = measured(record(tmp_path, [request()], (), [*rows, move("disk", "host", replica=None), {"at_ns": NOON}]))
    assert set(signals.replicas) == {*names, "r1"}
    for name in names:
        moves = signals.replicas[name].moves
        assert moves is not None
        assert moves.loads == (0 if name in ("tier_before", "tier_after") else 1), name
        assert ("load" in moves.took) == (moves.loads == 1 and name != "took_ns"), name
    everything = total(signals).moves
    assert everything is not None
    assert everything.loads == len(names) - 1


def test_a_row_of_which_only_the_time_is_known_counts(tmp_path: Path) -> None:
    signals = measured(record(tmp_path, [{"arrived_ns": NOON}]))
    assert (total(signals).requests, total(signals).hits.undecided, total(signals).by_status) == (1, 1, {"open": 1})
    assert list(signals.classes) == ["undecided"]
    assert any("names a replica" in note for note in signals.quality.notes)
    assert total(signals).pressure is None


def test_what_is_no_sketch_is_passed_over(tmp_path: Path) -> None:
    """Each has a tenant of its own."""
    bad = [
        "",
        "x",
        "[]",
        "7",
        "null",
        "{}",
        '{"x":1}',
        '{"5":-1}',
        '{"5":null}',
        '{"5":"a"}',
        '{"-7":1}',
        '{"5":0}',
        '{"5":1',
    ]
    rows = [request(tenant=text, itl_sketch=text) for text in bad]
    signals = measured(record(tmp_path, [*rows, request(tenant="beside", itl_sketch=SKETCH)]))
    assert set(signals.tenants) == {*bad, "beside"}
    assert [text for text in bad if signals.tenants[text].itl is not None] == []
    itl = total(signals).itl
    assert itl is not None
    assert itl.n == 10


def test_a_usage_that_is_no_share_is_unknown(tmp_path: Path) -> None:
    rows = [sample(kv_usage=7.5), sample(kv_usage=-1.0), sample(kv_usage=1e308)]
    pressure = measured(record(tmp_path, [request()], rows)).replicas["r1"].pressure
    assert pressure is not None
    assert (pressure.samples, pressure.kv_usage_mean, pressure.kv_usage_max, pressure.kv_full) == (3, None, None, None)


def test_a_half_written_file_is_said_to_be_damaged(tmp_path: Path) -> None:
    record(tmp_path, [request()]).close()
    (path,) = (tmp_path / "requests").rglob("*.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputFileError, match="cannot be read"):
        RecordReader(tmp_path)
