from __future__ import annotations

import random
import statistics
import subprocess
from pathlib import Path

import msgspec
import pytest

from loraledger import events as ev
from loraledger.errors import InputFileError
from loraledger.kernel.policies import policy_names
from loraledger.record.duck import connect, quote, run
from loraledger.record.parquet import record_digest
from loraledger.record.tables import Row
from loraledger.replay.fleet import run as played
from loraledger.replay.fleet.outcome import RECORD_FOLDER, RUN_FILE
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.results.pairing import pair
from loraledger.replay.results.report import Access, summarize
from replay.fleets import MIB, PROFILE, settings_for, zipf_trace
from replay.runs import counts, outcome, request_row, write_run


def waits(*seconds: float, **columns: object) -> list[Row]:
    """Requests that arrive a second apart and wait so long for their first token."""
    return [request_row(n, n, n + wait, **columns) for n, wait in enumerate(seconds)]


# --- what was counted -------------------------------------------------------------------------------------------------


def test_requests_are_counted_by_how_they_ended_and_open_ones_have_a_name(tmp_path: Path) -> None:
    rows = [
        *waits(0.1, 0.2),
        request_row(3, 3, None, status="rejected"),
        request_row(4, 4, None, status=None, finished_ns=None),
    ]
    report = summarize(write_run(tmp_path, rows, outcome(4, dropped={"unknown adapter": 2}, warnings=("a guess",))))
    assert report.requests == 4
    assert report.by_status == {"ok": 2, "open": 1, "rejected": 1}
    assert (report.dropped, report.warnings, report.label) == ({"unknown adapter": 2}, ("a guess",), "one")


def test_moves_and_preemptions_are_what_the_engines_themselves_counted(tmp_path: Path) -> None:
    replicas = [
        counts(loads=3, activations=5, evictions_slot=4, evictions_host=1, preemptions=2),
        counts("r2", loads=10, activations=20, evictions_slot=30, evictions_host=40, preemptions=50),
    ]
    report = summarize(write_run(tmp_path, waits(0.1), outcome(1, replicas)))
    moved = (report.loads, report.activations, report.evictions_slot, report.evictions_host, report.preemptions)
    assert moved == (13, 25, 34, 41, 52)


# --- hits -------------------------------------------------------------------------------------------------------------


def test_hit_rates_are_of_requests_with_an_adapter_whose_tier_is_known(tmp_path: Path) -> None:
    classes = ["gpu"] * 3 + ["host"] * 2 + ["disk"] * 3 + ["base"] * 5 + ["unknown"] * 7 + [None]
    rows = [request_row(n, n, n + 1, hit_class=tier) for n, tier in enumerate(classes)]
    report = summarize(write_run(tmp_path, rows))
    assert report.hits == Access(3, 2, 3, 0, 5, 7, 1, 3 / 8, 2 / 5)
    assert report.engine_hits is None


def test_what_the_engine_found_is_a_rate_of_its_own(tmp_path: Path) -> None:
    found = ["gpu", "gpu", "disk", None]
    rows = [request_row(n, n, n + 1, hit_class="gpu", engine_access=tier) for n, tier in enumerate(found)]
    report = summarize(write_run(tmp_path, rows))
    assert report.hits.gpu_rate == 1.0
    assert report.engine_hits == Access(gpu=2, disk=1, undecided=1, gpu_rate=2 / 3, host_rate=0.0)


@pytest.mark.parametrize(("tier", "rates"), [("base", (None, None)), ("unknown", (None, None)), ("gpu", (1.0, None))])
def test_a_rate_of_nothing_is_unknown(tmp_path: Path, tier: str, rates: tuple[float | None, float | None]) -> None:
    hits = summarize(write_run(tmp_path, waits(1.0, hit_class=tier))).hits
    assert (hits.gpu_rate, hits.host_rate) == rates


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_percentiles_of_the_time_to_first_token_are_exact(tmp_path: Path) -> None:
    rng = random.Random(3)
    tiers = [rng.choice(["gpu", "disk"]) for _ in range(301)]
    times = [rng.randrange(1, 4_000_000) / 1e6 for _ in tiers]
    pairs = enumerate(zip(tiers, times, strict=True))
    report = summarize(
        write_run(tmp_path, [request_row(n, 10.0, 10.0 + wait, hit_class=tier) for n, (tier, wait) in pairs])
    )
    parts = {tier: [t for t, of in zip(times, tiers, strict=True) if of == tier] for tier in ("disk", "gpu")}
    assert report.ttft is not None
    assert list(report.ttft_by_class) == ["disk", "gpu"]
    for spread, sample in ((report.ttft, times), *((report.ttft_by_class[tier], parts[tier]) for tier in parts)):
        cut = statistics.quantiles(sample, n=100, method="inclusive")
        assert spread.n == len(sample)
        assert spread.mean == pytest.approx(statistics.fmean(sample), abs=1e-9)
        assert [spread.p50, spread.p90, spread.p99] == pytest.approx([cut[49], cut[89], cut[98]], abs=1e-8)


def test_a_request_without_a_first_token_has_no_time_to_it(tmp_path: Path) -> None:
    report = summarize(write_run(tmp_path, [request_row(1, 1, None, status="rejected")]))
    assert (report.ttft, report.ttft_by_class, report.itl, report.tokens_per_s) == (None, {}, None, None)


def test_long_prompts_are_those_above_the_traces_own_ninetieth_percentile(tmp_path: Path) -> None:
    rows = [request_row(n, n, n + n, prompt_tokens=n) for n in range(1, 21)]
    rows[19] = {**rows[19], "prompt_tokens": None, "predicted_prompt_tokens": 20}
    report = summarize(write_run(tmp_path, rows))
    assert report.long_above == 18
    assert report.ttft_long is not None
    assert (report.ttft_long.n, report.ttft_long.mean) == (2, 19.5)


def test_prompts_that_are_all_alike_have_no_long_ones(tmp_path: Path) -> None:
    report = summarize(write_run(tmp_path, waits(1, 2, 3)))
    assert (report.long_above, report.ttft_long) == (100, None)


def test_the_mean_time_between_tokens_weighs_each_token_and_its_percentile_each_request(tmp_path: Path) -> None:
    # 10 times of 0.1 s and 2 of 0.4 s; one token has none.
    rows = [
        request_row(1, 0, 1, last=2, generated_tokens=11, hit_class="gpu"),
        request_row(2, 0, 1, last=1.8, generated_tokens=3, hit_class="disk"),
        request_row(3, 0, 1, hit_class="disk"),
    ]
    report = summarize(write_run(tmp_path, rows))
    assert report.itl is not None
    assert report.itl.n == 2
    assert report.itl.mean == pytest.approx(1.8 / 12)
    assert report.itl.p90 == pytest.approx(0.1 + 0.9 * 0.3)
    assert report.itl_by_class["disk"].n == 1
    assert report.itl_by_class["disk"].mean == pytest.approx(0.4)


# --- who waited -------------------------------------------------------------------------------------------------------


def test_the_worst_served_adapter_and_tenant_are_named(tmp_path: Path) -> None:
    rows = [request_row(n, n, n + (0.5 if n else 3.0), adapter="a", tenant="acme") for n in range(5)]
    rows += [request_row(n, n, n + (0.5 if n > 11 else 2.0), adapter="b", tenant="bolt") for n in range(10, 15)]
    rows += [request_row(n, n, n + 9.0, adapter="few", tenant="acme") for n in range(20, 24)]
    attainment = summarize(write_run(tmp_path, rows)).attainment
    assert (attainment.slo_s, attainment.overall) == (1.0, 7 / 14)
    assert (attainment.adapters, attainment.tenants) == (2, 2)
    assert attainment.worst_adapter is not None
    assert attainment.worst_tenant is not None
    worst = attainment.worst_adapter
    assert (worst.name, worst.requests, worst.attainment, worst.ttft_p99) == ("b", 5, 3 / 5, 2.0)
    assert (attainment.worst_tenant.name, attainment.worst_tenant.attainment) == ("acme", 4 / 9)


def test_the_objective_is_met_up_to_its_very_value_and_can_be_another(tmp_path: Path) -> None:
    write_run(tmp_path, waits(0.5, 1.0, 1.5, 6.0))
    assert [summarize(tmp_path, slo_s=slo).attainment.overall for slo in (1.0, 0.4, 2)] == [0.5, 0.0, 0.75]


@pytest.mark.parametrize(
    ("status", "overall"),
    [("rejected", 0.5), ("engine_error", 0.5), (None, 0.5), ("client_error", 1.0), ("client_gone", 1.0)],
)
def test_who_never_got_a_token_missed_the_objective_unless_it_was_the_clients_doing(
    tmp_path: Path, status: str | None, overall: float
) -> None:
    rows = [*waits(0.1), request_row(2, 2, None, status=status)]
    assert summarize(write_run(tmp_path, rows)).attainment.overall == overall


def test_the_cold_half_of_the_adapters_is_told_apart(tmp_path: Path) -> None:
    hot = [request_row(n, n, n + 0.1, adapter=f"hot{n % 2}", hit_class="gpu") for n in range(20)]
    cold = [request_row(n, n, n + 2.0, adapter="cold", hit_class="disk") for n in (30, 31)]
    cold += [request_row(n, n, n + 4.0, adapter="cool", hit_class=t) for n, t in ((40, "gpu"), (41, "unknown"))]
    residency: list[Row] = [
        {"at_ns": 1, "adapter": name, "tier_before": before, "tier_after": after}
        for name, before, after in (
            ("cold", "disk", "gpu"),
            ("cold", None, "host"),
            ("cold", "gpu", "host"),
            ("cool", "gpu", "disk"),
            ("cool", "host", "gpu"),
            ("hot0", "disk", "gpu"),
            ("hot1", "gpu", "host"),
        )
    ]
    tail = summarize(write_run(tmp_path, hot + cold, residency=residency)).cold
    assert tail is not None
    assert tail.ttft is not None
    assert (tail.adapters, tail.requests, tail.ttft.p50, tail.gpu_rate) == (2, 4, 3.0, 1 / 3)
    assert (tail.loads, tail.evictions) == (2, 2)


def test_one_adapter_alone_has_no_cold_half(tmp_path: Path) -> None:
    assert summarize(write_run(tmp_path, waits(1.0, adapter="a"))).cold is None


def test_throughput_is_generated_tokens_from_the_first_arrival_to_the_last_end(tmp_path: Path) -> None:
    rows = [request_row(1, 1, 2, last=3, generated_tokens=30), request_row(2, 1.5, 4, last=5, generated_tokens=10)]
    assert summarize(write_run(tmp_path, rows)).tokens_per_s == 10.0


def test_the_busiest_replica_and_its_share(tmp_path: Path) -> None:
    rows = [request_row(n, n, n + 1, replica="r2" if n else "r1") for n in range(4)]
    rows.append(request_row(9, 9, None, replica="r1", dispatched_ns=None, status="rejected"))
    report = summarize(write_run(tmp_path, rows, outcome(5, [counts(), counts("r2")])))
    assert (report.busiest_replica, report.busiest_share) == ("r2", 0.75)


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", policy_names())
def test_a_replayed_run_never_saves_more_than_the_bound(tmp_path: Path, policy: str) -> None:
    specs = [ev.AdapterSpec(f"a{n}", f"{n:064x}", 16, (10 + n) * MIB) for n in range(24)]
    settings = settings_for(3, specs, policy)
    scenario = Scenario(label=policy, settings=settings, profiles={r.name: PROFILE for r in settings.replicas})
    trace = zipf_trace(150, 24, 40, seed=7, base_share=0.1)
    played.run(scenario, trace, tmp_path, trace_digest="sha256:0")
    report = summarize(tmp_path)
    assert (report.requests, report.by_status) == (150, {"ok": 150})
    work = report.work
    assert work is not None
    assert work.uses == sum(request.adapter is not None for request in trace)
    assert 0 < work.saved <= work.bound_as_routed <= work.bound < work.each
    assert report.loads >= 20
    assert report.hits.base == 150 - work.uses


def test_load_seconds_are_unknown_when_costs_are(tmp_path: Path) -> None:
    report = summarize(write_run(tmp_path, waits(0.2, adapter="a")))
    assert report.work is None
    assert msgspec.json.decode(msgspec.json.encode(report))["work"] is None


# --- what is no run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"loraledger_run": 2}', b"[" * 100_000])
def test_a_broken_run_file_is_refused(tmp_path: Path, content: bytes) -> None:
    write_run(tmp_path, waits(1.0))
    (tmp_path / RUN_FILE).write_bytes(content)
    with pytest.raises(InputFileError, match=r"run\.json: not the outcome of a run"):
        summarize(tmp_path)


def test_a_folder_without_a_run_file_is_refused_even_if_it_holds_a_record(tmp_path: Path) -> None:
    write_run(tmp_path, waits(1.0))
    (tmp_path / RUN_FILE).unlink()
    with pytest.raises(InputFileError, match="not the folder of a run"):
        summarize(tmp_path)
    (tmp_path / RUN_FILE).mkdir()
    with pytest.raises(InputFileError, match="cannot be read"):
        summarize(tmp_path)


def test_a_run_whose_record_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_bytes(msgspec.json.encode(outcome(1)))
    with pytest.raises(InputFileError, match="record holds no requests"):
        summarize(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "types"])
def test_a_damaged_record_is_refused(tmp_path: Path, damage: str) -> None:
    write_run(tmp_path, waits(1.0, 2.0, adapter="a"))
    (path,) = (tmp_path / RECORD_FOLDER).glob("requests/*/*/*.parquet")
    whole = path.read_bytes()
    if damage == "types":
        path.unlink()
        with connect(tmp_path / "scratch", threads=1, memory_limit="64MB") as connection:
            columns = "[1] AS first_token_ns, 'x' AS arrived_ns, 'a' AS adapter, true AS replica"
            run(connection, f"COPY (SELECT {columns} FROM range(2)) TO {quote(path)} (FORMAT parquet)")
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "noise": whole[:-200] + b"\0" * 200, "empty": b""}[damage])
    with pytest.raises(InputFileError, match="cannot be read") as caught:
        summarize(tmp_path)
    assert "\n" not in caught.value.message


def test_a_record_with_other_requests_than_the_run_had_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, waits(1.0, 2.0), outcome(3))
    with pytest.raises(InputFileError, match="its record has 2 requests, the run had 3"):
        summarize(tmp_path)


def test_a_record_that_was_changed_is_refused(tmp_path: Path) -> None:
    residency: list[Row] = [{"at_ns": 1, "adapter": "a", "tier_before": "disk", "tier_after": "gpu"}]
    write_run(tmp_path, waits(1.0, 2.0), outcome(2), residency)
    write_run(tmp_path, waits(1.0, 2.0), outcome(2, record_digest=record_digest(tmp_path / RECORD_FOLDER)), residency)
    assert summarize(tmp_path).requests == 2
    (moves,) = (tmp_path / RECORD_FOLDER).glob("residency/*/*/*.parquet")
    write_run(tmp_path / "other", waits(1.0, 2.5))
    (path,) = (tmp_path / RECORD_FOLDER).glob("requests/*/*/*.parquet")
    whole = path.read_bytes()
    for change, restore in (
        (lambda: path.write_bytes(next((tmp_path / "other").rglob("*.parquet")).read_bytes()), lambda: path.write_bytes(whole)),
        (lambda: path.rename(path.with_name("renamed.parquet")), lambda: path.with_name("renamed.parquet").rename(path)),
        (moves.unlink, lambda: None),
    ):  # fmt: skip
        change()
        with pytest.raises(InputFileError, match="its record is not the one that the run wrote"):
            summarize(tmp_path)
        with pytest.raises(InputFileError, match="its record is not the one that the run wrote"):
            pair(write_run(tmp_path / "ours", waits(1.0, 2.0)), tmp_path)
        restore()


def test_the_digest_of_a_record_is_what_coreutils_make_of_it(tmp_path: Path) -> None:
    write_run(tmp_path, waits(1.0, 2.0, 3600.0))
    (tmp_path / RECORD_FOLDER / "notes.txt").write_text("no part of the record")
    command = "find * -name '*.parquet' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path / RECORD_FOLDER, capture_output=True, check=True)
    assert record_digest(tmp_path / RECORD_FOLDER) == f"sha256:{done.stdout.decode().split()[0]}"


def test_a_class_that_this_version_does_not_know_is_unknown(tmp_path: Path) -> None:
    write_run(tmp_path, waits(1.0, hit_class="gpu"), outcome(2))
    (path,) = (tmp_path / RECORD_FOLDER).glob("requests/*/*/*.parquet")
    with connect(tmp_path / "scratch", threads=1, memory_limit="64MB") as connection:
        beside = path.with_name("beside.parquet")
        run(
            connection,
            f"COPY (FROM read_parquet({quote(path)}) SELECT * REPLACE ('moon' AS hit_class)) "
            f"TO {quote(beside)} (FORMAT parquet)",
        )
    assert summarize(tmp_path).hits == Access(gpu=1, unknown=1, gpu_rate=1.0)
