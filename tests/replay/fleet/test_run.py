from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from loraledger import events as ev
from loraledger.cli.main import app
from loraledger.conductor.reading import open_record
from loraledger.errors import InputFileError
from loraledger.kernel.settings import MS, SECOND, TenantSpec
from loraledger.record.parquet import record_digest
from loraledger.record.tables import TABLES
from loraledger.replay.fleet import rowsink
from loraledger.replay.fleet.observation import Observation
from loraledger.replay.fleet.outcome import Outcome
from loraledger.replay.fleet.run import EPOCH, Progress, run
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.traces.trace import Request
from loraledger.twin.profile import TwinProfile
from replay.fleets import MIB, PROFILE, adapters, settings_for, zipf_trace


def scenario(
    replicas: int = 2,
    profile: TwinProfile = PROFILE,
    specs: int = 12,
    observation: Observation | None = None,
    **settings: Any,
) -> Scenario:
    fleet = msgspec.structs.replace(settings_for(replicas, adapters(specs), profile=profile), **settings)
    profiles = {spec.name: profile for spec in fleet.replicas}
    return Scenario(label="as it is", settings=fleet, profiles=profiles, observation=observation or Observation())


def play(directory: Path, requests: Any = None, what: Scenario | None = None, **options: Any) -> Outcome:
    trace = zipf_trace(300, 12, 30, base_share=0.1) if requests is None else requests
    return run(what or scenario(), trace, directory, trace_digest="sha256:abc", **options)


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file of a run; of ``run.json`` what two equal runs have in common."""
    found = {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
    outcome = json.loads(found["run.json"])
    del outcome["wall_s"], outcome["kernel_share"]
    found["run.json"] = json.dumps(outcome).encode()
    return found


# --- the record -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", [False, True])
def test_the_record_holds_the_rows_that_the_fold_gave(tmp_path: Path, probe: bool) -> None:
    what = scenario(observation=Observation(probe=probe))
    assert play(tmp_path, what=what).record_digest == record_digest(tmp_path / "record")
    fleet = VirtualFleet(what.settings, what.profiles, what.observation, EPOCH)
    fleet.run(zipf_trace(300, 12, 30, base_share=0.1))
    with open_record(tmp_path / "record") as reader:
        for name, table in TABLES.items():
            columns = [column.name for column in table.columns if column.name != "config_digest"]
            there = [[row[c] for c in columns] for row in reader.query(f"FROM {name}")]
            here = [[row.get(c) for c in columns] for row in fleet.rows[name]]
            assert sorted(map(repr, there)) == sorted(map(repr, here))
            assert here
        (digest,) = {row["config_digest"] for row in reader.requests(limit=1000)}
    outcome = json.loads((tmp_path / "run.json").read_bytes())
    assert outcome["scenario"].startswith(f"sha256:{digest}")


def test_readers_of_a_live_record_read_a_runs(tmp_path: Path) -> None:
    play(tmp_path)
    record = str(tmp_path / "record")
    listed = json.loads(CliRunner().invoke(app, ["get", "requests", "--record", record, "--json", "-n", "500"]).stdout)
    assert len(listed["items"]) == 300
    told = CliRunner().invoke(app, ["explain", "q17", "--record", record])
    assert told.exit_code == 0
    assert "request q17: tenant acme" in told.stdout
    assert "decision 17 (bounded-affinity)" in told.stdout


def test_rows_go_out_in_pieces_and_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowsink, "BATCH_ROWS", 16)
    monkeypatch.setattr(rowsink, "CHUNK", 64)
    trace = zipf_trace(300, 12, 30)
    hours = [msgspec.structs.replace(r, at=r.at + n // 100 * 3600 * SECOND) for n, r in enumerate(trace)]
    play(tmp_path, hours, scenario(observation=Observation(scrape_interval=60 * SECOND)))
    files = sorted(path.relative_to(tmp_path / "record") for path in tmp_path.rglob("requests/**/*.parquet"))
    assert {path.parts[2] for path in files} == {"hour=00", "hour=01", "hour=02"}
    assert len({path.stem for path in files}) >= 4
    with open_record(tmp_path / "record") as reader:
        assert len({row["id"] for row in reader.requests(limit=1000)}) == 300
    for hour in range(3):
        begin = EPOCH + hour * 3600 * SECOND
        with open_record(tmp_path / "record", since_ns=begin, until_ns=begin + 3600 * SECOND) as reader:
            found = {row["id"] for row in reader.requests(limit=1000)}
        assert found == {f"q{n + 1}" for n in range(hour * 100, hour * 100 + 100)}
    assert not (tmp_path / "record" / ".scratch").exists()


# --- the same again ---------------------------------------------------------------------------------------------------


def a_run(directory: str) -> None:
    requests = [msgspec.structs.replace(r, blocks=(7,)) for r in zipf_trace(300, 12, 30, base_share=0.1)]
    play(Path(directory), requests, scenario(observation=Observation(probe=True)), count=300)


def test_two_runs_in_two_processes_leave_the_same_bytes(tmp_path: Path) -> None:
    program = "import sys; from replay.fleet.test_run import a_run; a_run(sys.argv[1])"
    for hash_seed in ("1", "77"):
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / hash_seed)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
        )
    assert files_of(tmp_path / "1") == files_of(tmp_path / "77")
    assert len(files_of(tmp_path / "1")) >= 6


def test_a_run_into_the_folder_of_another_replaces_it(tmp_path: Path) -> None:
    play(tmp_path / "a", zipf_trace(50, 12, 30))
    play(tmp_path / "a")
    play(tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_other_settings_profiles_and_views_have_other_digests(tmp_path: Path) -> None:
    variants = [
        scenario(),
        scenario(policy="round-robin"),
        scenario(profile=TwinProfile(slots=4, host_entries=9)),
        scenario(observation=Observation(scrape_delay=6 * MS)),
    ]
    digests = [play(tmp_path, [], what).scenario for what in variants]
    digests += [play(tmp_path, [], start_ns=5).scenario, play(tmp_path, [], clients=2).scenario]
    assert len(set(digests)) == len(digests)
    assert play(tmp_path, [], scenario()).scenario == digests[0]


def test_a_folder_that_is_no_replays_is_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "record" / "requests" / "date=2026-01-01"
    kept.mkdir(parents=True)
    with pytest.raises(InputFileError, match="is not a replay's"):
        play(tmp_path)
    assert kept.exists()
    (tmp_path / "file").touch()
    with pytest.raises(InputFileError, match="cannot be written"):
        play(tmp_path / "file" / "run")


def test_a_run_that_fails_leaves_no_outcome(tmp_path: Path) -> None:
    def broken() -> Iterator[Request]:
        yield from zipf_trace(50, 12, 30)
        raise InputFileError("row 51: a hole")

    play(tmp_path)
    with pytest.raises(InputFileError, match="a hole"):
        play(tmp_path, broken())
    assert not (tmp_path / "run.json").exists()
    assert not (tmp_path / "record" / ".scratch").exists()
    assert play(tmp_path).requests == 300


# --- what it came to --------------------------------------------------------------------------------------------------


def test_the_outcome_counts_what_the_twins_did(tmp_path: Path) -> None:
    outcome = play(tmp_path, what=scenario(observation=Observation(probe=True)), dropped={"a hole": 3})
    assert (outcome.requests, outcome.open, outcome.ended, outcome.dropped) == (300, 0, {"ok": 300}, {"a hole": 3})
    assert sum(replica.requests for replica in outcome.replicas) == 300
    with open_record(tmp_path / "record") as reader:
        for replica in outcome.replicas:
            moved = reader.rows("residency", {"replica": replica.replica, "source": "observed"})
            loads = [row for row in moved if row["cause"] == "load" and row["tier_after"] == "host"]
            activations = [row for row in moved if row["cause"] == "activation"]
            assert (len(loads), len(activations)) == (replica.loads, replica.activations)
            assert sum(int(str(row["took_ns"])) for row in loads) == pytest.approx(
                replica.load_ps / 1000, abs=len(loads)
            )
    assert outcome.load_costs_ps == dict.fromkeys(sorted(outcome.load_costs_ps), PROFILE.load_ps(20 * MIB))
    assert outcome.activation_costs_ps["a0"] == PROFILE.activate_ps(16)
    last = zipf_trace(300, 12, 30, base_share=0.1)[-1].at
    assert (outcome.start_ns, outcome.last_arrival_ns) == (EPOCH, last)
    assert outcome.simulated_ns > last
    assert outcome.policy == "bounded-affinity"
    assert msgspec.json.decode((tmp_path / "run.json").read_bytes(), type=Outcome) == outcome


def test_replicas_with_other_profiles_cost_the_least_of_them(tmp_path: Path) -> None:
    what = scenario()
    slow = msgspec.structs.replace(PROFILE, load_overhead_ps=10**12)
    mixed = msgspec.structs.replace(what, profiles={"r1": PROFILE, "r2": slow})
    assert play(tmp_path, what=mixed).load_costs_ps["a0"] == PROFILE.load_ps(20 * MIB)


def test_a_pool_without_slots_says_that_it_has_no_number_of_them(tmp_path: Path) -> None:
    pool = TwinProfile(layout="unified", kv_blocks=40_000, block_size=1)
    what = msgspec.structs.replace(scenario(), profiles={"r1": pool, "r2": PROFILE})
    first, second = play(tmp_path, what=what).replicas
    assert (first.slots, first.host_entries) == (0, 0)
    assert (second.slots, second.host_entries) == (PROFILE.slots, PROFILE.host_entries)


def test_what_cannot_be_served_ends_as_a_row_with_its_reason(tmp_path: Path) -> None:
    profile = TwinProfile(slots=2, host_entries=2, kv_blocks=20, slot_bytes=30 * MIB, max_rank=16)
    specs = (
        ev.AdapterSpec("fits", "1" * 64, 16, 20 * MIB),
        ev.AdapterSpec("large", "2" * 64, 16, 40 * MIB),
        ev.AdapterSpec("wide", "3" * 64, 32, 20 * MIB),
    )
    trace = [Request(n * SECOND, "acme", name, 100, 5) for n, name in enumerate(("fits", "large", "wide", None))]
    trace.append(Request(5 * SECOND, "acme", None, 400, 1))
    outcome = play(tmp_path, trace, scenario(1, profile, adapters=specs))
    assert outcome.ended == {"client_error: too_long": 1, "ok": 2, "rejected: adapter_load_failed": 2}
    with open_record(tmp_path / "record") as reader:
        rows = {row["id"]: (row["status"], row["reason"]) for row in reader.requests()}
    assert rows["q5"] == ("client_error", "too_long")
    assert rows["q2"] == ("rejected", "adapter_load_failed")
    assert rows["q3"][0] == "rejected"
    assert rows["q1"] == rows["q4"] == ("ok", None)


def test_an_adapter_or_tenant_that_the_fleet_does_not_have_is_refused_with_its_row(tmp_path: Path) -> None:
    for request, words in (
        (Request(0, "acme", "zz", 1, 1), "request 2: adapter 'zz'"),
        (Request(0, "nobody", None, 1, 1), "request 2: tenant 'nobody'"),
    ):
        with pytest.raises(InputFileError, match=words):
            play(tmp_path, [Request(0, "acme", "a0", 1, 1), request])


def test_overload_is_said(tmp_path: Path) -> None:
    profile = TwinProfile(slots=1, host_entries=1, max_seqs=1)
    tenants = (TenantSpec("acme", 10**6, 10**6, 10**6 * SECOND),)
    outcome = play(tmp_path, zipf_trace(1000, 12, 100), scenario(1, profile, tenants=tenants))
    assert outcome.saturation.saturated
    assert outcome.saturation.backlog > 500
    calm = play(tmp_path, zipf_trace(1000, 12, 1), scenario(1, profile))
    assert not calm.saturation.saturated
    assert calm.saturation.offered_per_s == pytest.approx(1, rel=0.1)


def test_equal_prefixes_are_computed_once_where_the_blocks_are_of_one_size(tmp_path: Path) -> None:
    profile = TwinProfile(slots=2, host_entries=2, prefix_caching=True, prefix_block_tokens=512)
    trace = [Request(n * SECOND, "acme", None, 1100, 1, (1, 2, 3 + n)) for n in range(3)]

    def first_tokens(**options: Any) -> list[int]:
        outcome = play(tmp_path, trace, scenario(1, profile), **options)
        said.append(outcome.warnings)
        with open_record(tmp_path / "record") as reader:
            return [int(str(r["first_token_ns"])) - int(str(r["arrived_ns"])) for r in reader.requests()][::-1]

    said: list[tuple[str, ...]] = []
    cold, warm, again = first_tokens(block_tokens=512)
    assert warm == again == -(-profile.step_ps(0, 0, 1100 - 1024, 0) // 1000)
    assert cold == -(-profile.step_ps(0, 0, 1100, 0) // 1000)
    assert len(set(first_tokens(block_tokens=256))) == 1
    assert said == [(), ("prefixes are not reused: the trace's blocks have 256 tokens, the profile's 512",)]


def test_a_closed_loop_keeps_so_many_requests_open(tmp_path: Path) -> None:
    trace = [Request(0, "acme", None, 100, 20) for _ in range(40)]
    outcome = play(tmp_path, trace, scenario(1), clients=4)
    assert outcome.clients == 4
    assert not outcome.saturation.saturated
    with open_record(tmp_path / "record") as reader:
        rows = reader.query("SELECT arrived_ns AS a, finished_ns AS f FROM requests ORDER BY a, f")
    moments = sorted([(int(str(r["a"])), 1) for r in rows] + [(int(str(r["f"])), -1) for r in rows])
    open_now = most = 0
    for _, change in moments:
        open_now += change
        most = max(most, open_now)
    assert most == 4
    assert sum(int(str(r["a"])) == EPOCH for r in rows) == 4
    assert {int(str(r["a"])) for r in rows[4:]} <= {int(str(r["f"])) for r in rows}


def test_requests_that_are_open_when_a_run_is_cut_are_rows_without_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = VirtualFleet.run
    monkeypatch.setattr(VirtualFleet, "run", lambda fleet, trace, clients: whole(fleet, trace, EPOCH + 2 * SECOND))
    outcome = play(tmp_path)
    with open_record(tmp_path / "record") as reader:
        rows = reader.requests({"status": None}, limit=1000)
    assert len(rows) == outcome.open > 0
    assert sum(outcome.ended.values()) + outcome.open == outcome.replicas[0].requests + outcome.replicas[1].requests


# --- while it runs ----------------------------------------------------------------------------------------------------


def test_progress_is_told_now_and_then_and_last_when_only_writing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraledger.replay.fleet.run.PROGRESS_NS", 0)
    told: list[Progress] = []
    play(tmp_path, count=300, progress=told.append)
    assert len(told) >= 3
    assert all(a.simulated_ns <= b.simulated_ns and a.requests <= b.requests for a, b in pairwise(told))
    assert [word.writing for word in told] == [False] * (len(told) - 1) + [True]
    assert (told[-1].requests, told[-1].arrived, told[-1].total, told[-1].left_s) == (300, 300, 300, 0)
    assert told[1].rate > 0
    assert told[1].left_s == pytest.approx((300 - told[1].requests) / told[1].rate)
    unknown: list[Progress] = []
    play(tmp_path, progress=unknown.append)
    assert {(word.total, word.left_s) for word in unknown} == {(None, None)}


def test_the_kernels_share_is_measured_on_request_and_changes_nothing(tmp_path: Path) -> None:
    timed = play(tmp_path / "a", profile_kernel=True)
    plain = play(tmp_path / "b")
    assert timed.kernel_share is not None
    assert 0.05 < timed.kernel_share < 0.95
    assert plain.kernel_share is None
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_memory_does_not_grow_with_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowsink, "BATCH_ROWS", 64)

    def peak(requests: int) -> int:
        trace = (Request(n * 20 * MS, "acme", f"a{n % 12}", 50, 4) for n in range(requests))
        tracemalloc.start()
        play(tmp_path, trace)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    # The row of one request alone is 2 KB; what stays are points of the backlog, which are bounded.
    assert peak(700) - peak(200) < 500 * 400
