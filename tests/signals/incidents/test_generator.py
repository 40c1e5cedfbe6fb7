from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.incidents import play as playing
from benchmarks.incidents.draws import UnfitError, draw
from benchmarks.incidents.kinds import KINDS, POOLS, Incident, Kind
from benchmarks.incidents.plan import Plan, trace
from benchmarks.incidents.play import play, play_plan
from benchmarks.incidents.site import Disk
from benchmarks.incidents.truth import Truth, not_calm, not_effective

from loraledger.conductor.reading import open_record
from loraledger.kernel.settings import SECOND
from loraledger.record.parquet import record_digest
from loraledger.record.reader import RecordReader
from loraledger.signals.figures import Window

CALM = Truth(
    requests=1000,
    lost=0,
    ttft_mean=0.05,
    ttft_p90=0.1,
    prompt=200.0,
    output=100.0,
    growth=0,
    loads=2,
    activations=10,
    preemptions=0,
    moving=0.001,
    prepared=0.0,
    kv_full=0.0,
    batch_full=0.0,
    starved=0.0,
    crowd=1.1,
    crowd_waits=0.5,
    engine_waiting=0.1,
    top_share=0.2,
    restarts=0,
)


def drawn(kind: Kind, seed: int) -> Plan:
    """The first plan that fits."""
    for redraw in range(50):
        try:
            return draw(kind, seed, redraw, 120.0)
        except UnfitError:
            continue
    raise AssertionError(kind)


def one(reader: RecordReader, sql: str, window: Window) -> dict[str, Any]:
    return reader.query(sql, {"since": window.since_ns, "until": window.until_ns})[0]


# --- what is drawn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_depends_on_kind_seed_and_redraw_alone(kind: Kind) -> None:
    assert drawn(kind, 3) == drawn(kind, 3)
    assert len({msgspec.json.encode(drawn(kind, seed).site) for seed in range(6)}) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_traffic_lies_in_order_of_time_and_asks_for_each_standing_adapter_before_the_baseline(kind: Kind) -> None:
    plan = drawn(kind, 5)
    requests = list(trace(plan, 30.0, "some"))
    times = [request.at for request in requests]
    assert times == sorted(times)
    assert times[-1] < (plan.warm_s + 60.0 + plan.gap_s) * SECOND
    warm = {request.adapter for request in requests if request.at < plan.warm_s * SECOND}
    assert {f"a{number}" for number in range(plan.site.standing)} <= warm
    assert {request.tenant for request in requests} <= {tenant.name for tenant in plan.site.settings().tenants}


def test_kinds_that_keep_the_traffic_as_it_was_do() -> None:
    for kind in ("slow disk loads", "restart storm", "floor too tight"):
        plan = drawn(kind, 2)
        assert plan.incident == (plan.baseline,)
    assert drawn("KV exhaustion", 2).incident[0].rate == drawn("KV exhaustion", 2).baseline.rate
    assert drawn("longer prompts", 2).incident[0].rate == drawn("longer prompts", 2).baseline.rate


def test_a_slow_disk_makes_reads_longer_from_then_on() -> None:
    disk = Disk()
    profile = drawn("slow disk loads", 1).site.profile(disk)
    before = profile.load_ps(10**8)
    disk.slow = 4.0
    assert profile.load_ps(10**8) == pytest.approx(4 * before)


# --- what counts as one -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"lost": 1},
        {"ttft_p90": 1.6},
        {"preemptions": 1},
        {"growth": 50},
        {"activations": 60},
        {"moving": 0.2},
        {"kv_full": 0.1},
    ],
)
def test_a_baseline_that_is_not_calm_is_refused(change: dict[str, float]) -> None:
    assert not_calm(CALM, 0.05) is None
    assert not_calm(msgspec.structs.replace(CALM, **change), 0.05) is not None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nothing wrong"])
def test_an_incident_without_effect_is_refused_and_so_is_one_of_another_mechanism(kind: Kind) -> None:
    assert not_effective(kind, CALM, CALM, 0.05) is not None
    late = msgspec.structs.replace(CALM, ttft_mean=1.0, ttft_p90=3.0)
    assert not_effective(kind, CALM, late, 0.05) is not None


def test_nothing_wrong_is_refused_when_something_is() -> None:
    assert not_effective("nothing wrong", CALM, CALM, 0.05) is None
    assert not_effective("nothing wrong", CALM, msgspec.structs.replace(CALM, ttft_mean=0.2), 0.05) is not None


def test_draws_that_will_not_do_are_counted_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Plan:
        raise UnfitError("never")

    monkeypatch.setattr(playing, "draw", refuse)
    with pytest.raises(RuntimeError, match=f"none of {playing.REDRAWS + 1} draws will do: never"):
        play("cold scan", 1, tmp_path / "record")
    assert not (tmp_path / "record").exists()


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_record_byte_for_byte(tmp_path: Path) -> None:
    first, second = (play("nothing wrong", 4, tmp_path / name, 0.5) for name in ("one", "two"))
    assert record_digest(first.directory) == record_digest(second.directory)
    assert first == msgspec.structs.replace(second, directory=first.directory)


def test_every_kind_is_recorded_with_requests_in_both_windows_and_its_true_pool(
    incidents: dict[Kind, Incident],
) -> None:
    for kind, incident in incidents.items():
        assert incident.pool == POOLS[kind]
        assert incident.baseline.seconds == incident.window.seconds == 120.0
        assert incident.baseline.until_ns <= incident.window.since_ns
        with open_record(incident.directory) as reader:
            for window, part in ((incident.baseline, "baseline"), (incident.window, "incident")):
                seen = one(
                    reader,
                    "SELECT count(*) AS n FROM requests WHERE arrived_ns >= $since AND arrived_ns < $until",
                    window,
                )
                truth: Any = incident.parameters[part]
                assert seen["n"] == truth["requests"] > 100
        assert isinstance(incident.parameters["redraws"], int)


def test_facts_are_those_of_the_settings(incidents: dict[Kind, Incident]) -> None:
    for incident in incidents.values():
        site: Any = incident.parameters["site"]
        assert len(incident.facts.replicas) == site["replicas"]
        assert len(incident.facts.adapter_bytes) == site["standing"] + site["scanned"]
        for replica in incident.facts.replicas.values():
            assert (replica.slots, replica.host_entries) == (site["slots"], site["host_entries"])
            assert replica.kv_tokens == site["kv_blocks"] * 16


def test_a_storm_restarts_processes_and_a_tight_floor_takes_kv(incidents: dict[Kind, Incident]) -> None:
    figures = "count(DISTINCT process_start_ns) AS n, min(kv_tokens) AS kv"
    starts = f"SELECT {figures} FROM samples WHERE at_ns >= $since AND at_ns < $until"
    storm, floor = incidents["restart storm"], incidents["floor too tight"]
    with open_record(storm.directory) as reader:
        assert one(reader, starts, storm.baseline)["n"] == 1
        assert one(reader, starts, storm.window)["n"] > 3
    with open_record(floor.directory) as reader:
        assert one(reader, starts, floor.window)["kv"] < 0.6 * one(reader, starts, floor.baseline)["kv"]


def test_an_incident_is_what_it_is_only_by_what_is_done_to_it() -> None:
    plan = msgspec.structs.replace(drawn("slow disk loads", 1001), slow=1.0)
    played = play_plan(plan, 60.0, "some")
    assert not_effective("slow disk loads", played.calm, played.truth, plan.may_miss) is not None
