"""``loraledger replay``, from the command line to its tables; what it refuses, and what it leaves on the disk."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from rich.progress import Progress as Display
from rich.progress import TextColumn

from loraledger.cli.replay.progress import Drawn
from loraledger.cli.replay.show import Compared
from loraledger.kernel.policies import policy_names
from loraledger.record.duck import connect, quote, run
from loraledger.record.parquet import write_parquet
from loraledger.record.reader import RecordReader
from loraledger.replay.fleet.run import Progress
from loraledger.replay.results.folder import read_outcome
from loraledger.replay.results.guardrails import Verdict
from loraledger.replay.results.pairing import Pairing
from loraledger.replay.results.report import Report
from loraledger.replay.scenarios.folders import held
from loraledger.replay.scenarios.profiles import DEFAULT, read_profile
from loraledger.twin.profile import TwinProfile
from replay.runs import outcome, request_row

from .conftest import Cli, Done, on_a_terminal, write

ONE = {"name": "acme", "key_hashes": ["0" * 64], "adapters": ["*"], "limits": {"concurrency": 500}}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """120 requests of one tenant for 12 adapters and the base."""
    folder = tmp_path_factory.mktemp("trace")
    words = "zipf:1.0 --adapters 12 --requests 120 --rate 10 --ranks 8,16 --bytes-per-rank 1MiB --base-share 0.1"
    command = [sys.executable, "-m", "loraledger.cli.main", "trace", "generate", *words.split(), "--out", "t.jsonl"]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    return (folder / "t.jsonl").read_bytes()


@pytest.fixture
def ready(cli: Cli, tmp_path: Path, trace: bytes) -> Cli:
    """The command line where a fleet of two replicas and a trace are."""
    write(tmp_path / "loraledger.yaml", fleet())
    (tmp_path / "t.jsonl").write_bytes(trace)
    return cli


def fleet(**replica: Any) -> dict[str, Any]:
    plain = {"slots": 3, "host_entries": 6, "kv_tokens": 65_536} | replica
    tenants = [{**ONE, "name": "t0"}]
    replicas = [{"name": f"r{n}", "url": f"http://127.0.0.1:{n}", **plain} for n in (1, 2)]
    return {"base": {"names": ["base"]}, "replicas": replicas, "tenants": tenants}


def edit(path: Path, change: Any) -> None:
    """Change the rows (header first) of a trace as decoded JSON; what stands in for its digest goes."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows[0]["digest"] = rows[0]["requests"] = None
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def lines(done: Done, starting: str) -> list[list[str]]:
    """The rows of the table below the line that begins with ``starting``, heading first."""
    _, _, rest = done.out.partition(starting)
    return [line.split() for line in rest.partition("\n\n")[0].splitlines()[1:]]


def test_a_sweep_gives_a_row_for_each_combination_and_a_folder_that_reads_like_a_record(
    ready: Cli, tmp_path: Path
) -> None:
    policies = ("--policy", "round-robin", "--policy", "bounded-affinity")
    done = ready("replay", "t.jsonl", *policies, "--set", "slots=2,4", "--jobs", "1", "--out", "o")
    assert done.code == 0, done.err
    for title in ("what clients waited", "what adapters and KV cost"):
        heading, *rows = lines(done, title)
        assert heading[:2] == ["POLICY", "SLOTS"]
        assert [row[:2] for row in rows] == [
            [policy, slots] for policy in ("round-robin", "bounded-affinity") for slots in ("2", "4")
        ]
    said = " ".join(done.out.split())
    assert re.search(r"policy=round-robin slots=2: SATURATED, \d+\.\d% within 1 s; arrivals outran service: ", said)
    assert re.search(r"policy=bounded-affinity slots=4: \d+\.\d% within 1 s; too short to tell: 120 requests; ", said)
    run = tmp_path / "o" / "policy=round-robin_slots=4"
    with RecordReader(run / "record") as reader:
        assert reader.query("FROM requests SELECT count(*) AS n") == [{"n": 120}]
    listed = ready("get", "requests", "--record", run / "record", "--json")
    assert listed.code == 0
    outcome = read_outcome(run)
    assert (outcome.policy, outcome.requests, {c.slots for c in outcome.replicas}) == ("round-robin", 120, {4})


def test_the_document_holds_what_the_tables_show(ready: Cli) -> None:
    done = ready("replay", "t.jsonl", "--set", "slots=2,4", "-j1", "--json")
    found = done.items("replay")
    first, second = found["runs"]
    assert [run["changes"] for run in found["runs"]] == [{"slots": "2"}, {"slots": "4"}]
    assert first["report"]["requests"] == 120
    assert first["report"]["activations"] > second["report"]["activations"]
    assert {verdict["guardrail"] for verdict in first["guardrails"]} == {"preemptions_per_1000", "long_ttft_ratio"}
    assert first["against"] is None
    assert [f"warning: {text}" for text in found["warnings"]] == done.err.splitlines()


@pytest.mark.parametrize(
    "name", [*chain(*(one.__struct_fields__ for one in (Report, Verdict, Pairing))), *policy_names()]
)
def test_every_field_of_the_document_and_every_policy_is_on_the_page(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
    own = {"ours", "theirs"}  # the labels of a pairing
    assert name in own or re.search(rf"[`.]{re.escape(name)}`", page)


def test_equal_commands_give_equal_records(ready: Cli, tmp_path: Path) -> None:
    for out in ("a", "b"):
        assert ready("replay", "t.jsonl", "--out", out, "-j1").code == 0
    a, b = (
        {str(p.relative_to(tmp_path / out)): p.read_bytes() for p in (tmp_path / out).rglob("*.parquet")}
        for out in ("a", "b")
    )
    assert a == b != {}


def test_slots_take_kv_from_the_twins_and_the_record_shows_it(ready: Cli, tmp_path: Path) -> None:
    slot, block = 369_426_432, 2_097_152
    assert ready("replay", "t.jsonl", "--set", "slots=3,4,6", "--out", "o", "-j1").code == 0
    for slots in (3, 4, 6):
        counts = read_outcome(tmp_path / "o" / f"slots={slots}").replicas[0]
        assert counts.kv_blocks == 4_096 + (3 - slots) * slot // block
    assert ready("replay", "t.jsonl", "--set", "slots=6", "--keep-kv", "--out", "o", "-j1").code == 0
    assert read_outcome(tmp_path / "o" / "slots=6").replicas[0].kv_blocks == 4_096


def test_two_runs_are_paired_request_by_request(ready: Cli) -> None:
    assert ready("replay", "t.jsonl", "--set", "slots=2", "--out", "o", "-j1").code == 0
    done = ready("replay", "t.jsonl", "--set", "slots=6", "--out", "o", "-j1", "--against", "o/slots=2")
    heading, row = lines(done, "against slots=2, request by request")
    assert (heading[:2], row[:2]) == (["SLOTS", "PAIRS"], ["6", "120"])
    assert float(row[2]) < 0
    assert "disk -> gpu: " in done.out or "host -> gpu: " in done.out


def test_a_run_is_never_replaced_by_the_one_that_is_compared_with_it(ready: Cli) -> None:
    assert ready("replay", "t.jsonl", "--out", "o", "-j1").code == 0
    done = ready("replay", "t.jsonl", "--out", "o", "-j1", "--against", "o/as_configured")
    assert (done.code, "give --out another folder" in done.err) == (3, True)


def test_runs_of_other_arrivals_are_not_paired(ready: Cli) -> None:
    assert ready("replay", "t.jsonl", "--set", "speed=2", "--out", "o", "-j1").code == 0
    done = ready("replay", "t.jsonl", "--out", "p", "-j1", "--against", "o/speed=2")
    assert done.code == 3
    assert done.err.splitlines()[-1] == (
        "loraledger: as configured cannot be paired with --against o/speed=2: the same trace was played with speed=1 and with "
        "speed=2/1; replay what o/speed=2 tried on t.jsonl with the same --set speed= and --skip-unfit as here into another "
        "--out, and name that run"
    )


def test_a_run_of_another_trace_is_not_paired_and_the_remedy_is_said(ready: Cli, tmp_path: Path) -> None:
    assert ready("replay", "t.jsonl", "--out", "o", "-j1").code == 0
    edit(tmp_path / "t.jsonl", lambda rows: rows.pop())
    done = ready("replay", "t.jsonl", "--out", "p", "-j1", "--against", "o/as_configured")
    said = done.err.splitlines()[-1]
    assert (done.code, ": they are of different traces (sha256:" in said) == (3, True)
    assert "; replay what o/as_configured tried on t.jsonl with the same" in said


def test_a_sweep_to_compare_with_is_refused_with_the_runs_that_it_has(ready: Cli, tmp_path: Path) -> None:
    assert ready("replay", "t.jsonl", "--set", "slots=2,3", "--out", "o", "-j1").code == 0
    done = ready("replay", "t.jsonl", "--out", "p", "-j1", "--against", "o")
    assert (done.code, done.err.splitlines()[-1]) == (
        3,
        "loraledger: --against o: the folder of a sweep, not of one run: name one of o/slots=2, o/slots=3",
    )
    assert list(tmp_path.glob("p/*/run.json")) == []


@pytest.mark.parametrize(
    "words",
    [
        ("--set", "slots=0"),
        ("--set", "max_rank=7"),
        ("--set", "two\nlines=1"),
        ("--policy", "nope"),
        ("--set", "policy.tie_ms=1", "--policy", "round-robin"),
    ],
)
def test_a_bad_value_of_what_to_try_is_refused_in_one_line_that_names_the_option(
    ready: Cli, words: tuple[str, ...]
) -> None:
    done = ready("replay", "t.jsonl", *words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"loraledger: {words[0]} {words[1].partition(chr(10))[0].partition('=')[0]}")
    assert re.search(r"wanted|known: |takes 1, |give --policy one of ", done.err)


def test_faster_arrivals_end_sooner(ready: Cli, tmp_path: Path) -> None:
    assert ready("replay", "t.jsonl", "--set", "speed=1,4", "--out", "o", "-j1").code == 0
    one, four = (read_outcome(tmp_path / "o" / f"speed={n}").last_arrival_ns for n in (1, 4))
    assert one // 4 == four


def test_a_saturated_fleet_is_said_to_be(ready: Cli) -> None:
    done = ready("replay", "t.jsonl", "--set", "speed=1000", "--require", "-j1")
    assert done.code == 5
    heading, (speed, *row) = lines(done, "what clients waited")
    figures = dict(zip(heading[1:], row, strict=False))
    assert (speed, figures["LONG"], figures["KEPT"]) == ("1000", "-", "NO")
    assert "speed=1000: SATURATED, " in done.out
    assert done.err.splitlines()[-1] == "loraledger: of 1 runs 1 saturated"


def test_a_trace_that_is_too_short_to_tell_is_not_called_ok(ready: Cli) -> None:
    done = ready("replay", "t.jsonl", "-j1", "--json")
    (run,) = done.items("replay")["runs"]
    assert run["report"]["saturation"]["saturated"] is None
    shown = ready("replay", "t.jsonl", "-j1")
    heading, row = lines(shown, "what clients waited")
    assert row[heading.index("KEPT") + 1] == "-"  # "as configured" is two words


def test_two_sweeps_never_write_into_one_folder_at_a_time(ready: Cli, tmp_path: Path) -> None:
    assert ready("replay", "t.jsonl", "--out", "o", "-j1").code == 0
    before = (tmp_path / "o" / "as_configured" / "run.json").read_bytes()
    with held(tmp_path / "o"):
        second = ready("replay", "t.jsonl", "--out", "o", "-j1")
    assert second.code == 3
    assert "another replay writes into o: wait for its end, or give --out another folder" in second.err
    assert (tmp_path / "o" / "as_configured" / "run.json").read_bytes() == before
    assert ready("replay", "t.jsonl", "--out", "o", "-j1").code == 0


def test_a_damaged_run_to_compare_with_is_found_before_anything_is_played(ready: Cli, tmp_path: Path) -> None:
    assert ready("replay", "t.jsonl", "--out", "theirs", "-j1").code == 0
    (path,) = (tmp_path / "theirs").glob("*/record/requests/*/*/*.parquet")
    path.write_bytes(path.read_bytes()[:200])
    done = ready("replay", "t.jsonl", "--out", "ours", "--against", "theirs/as_configured", "-j1")
    assert done.code == 3
    assert "cannot be read" in done.err.splitlines()[-1]
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["replay.json"]


def test_many_runs_are_told_in_short(ready: Cli) -> None:
    done = ready(
        "replay", "t.jsonl", "--set", "slots=1,2,3", "--set", "speed=1,2,1000", "--max-long-ttft", "1ms", "-j1"
    )
    assert done.code == 0
    assert len(lines(done, "what clients waited")) == 10
    assert "ADAPTER IN" not in done.out
    assert "slots=3 speed=1000: SATURATED, " in done.out
    assert "slots=3 speed=1:" not in done.out
    assert re.search(r"\n\d of 9 runs are not saturated; a guardrail fails in 9 ", done.out)


def test_a_guardrail_that_fails_is_named_and_can_be_required(ready: Cli) -> None:
    words = ("replay", "t.jsonl", "--max-long-ttft", "1ms", "-j1")
    done = ready(*words)
    assert done.code == 0
    assert "FAIL long" in done.out
    assert "as configured: guardrail: " in done.out
    assert ready(*words, "--require").code == 5


def test_the_probe_is_on_where_every_replica_has_one(ready: Cli, tmp_path: Path) -> None:
    assert ready("replay", "t.jsonl", "--out", "o", "-j1").code == 0
    assert not read_outcome(tmp_path / "o" / "as_configured").observation.probe
    words = ("--probe", "--scrape-interval", "3s", "--scrape-delay", "9ms")
    assert ready("replay", "t.jsonl", "--out", "o", "-j1", *words).code == 0
    seen = read_outcome(tmp_path / "o" / "as_configured").observation
    assert (seen.probe, seen.scrape_interval, seen.scrape_delay) == (True, 3 * 10**9, 9 * 10**6)
    write(tmp_path / "loraledger.yaml", fleet(probe={"env": "KEY"}))
    assert ready("replay", "t.jsonl", "--out", "o", "-j1").code == 0
    assert read_outcome(tmp_path / "o" / "as_configured").observation.probe


def test_a_profile_of_another_engine_version_is_a_warning(ready: Cli, tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(read_profile(DEFAULT), name="lab")))
    done = ready("replay", "t.jsonl", "--profile", "lab.json", "--engine-version", "0.99", "-j1")
    assert done.err == "warning: profile lab is of vllm 0.24, the fleet runs 0.99: calibrate again\n"
    silent = ready("replay", "t.jsonl", "--profile", "lab.json", "--engine-version", "0.24", "-j1")
    assert (silent.code, silent.err) == (0, "")


def test_the_engine_version_is_that_of_the_latest_recorded_request(ready: Cli, tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(read_profile(DEFAULT), name="lab")))
    rows = [request_row(n, n, n + 1, engine_version=version) for n, version in enumerate(("0.24", "0.31", None))]
    write_parquet({"requests": rows}, tmp_path / "record", "live")
    done = ready("replay", "t.jsonl", "--profile", "lab.json", "-j1")
    assert done.err == "warning: profile lab is of vllm 0.24, the fleet runs 0.31: calibrate again\n"


def test_a_closed_loop_keeps_so_many_requests_open(ready: Cli, tmp_path: Path) -> None:
    assert ready("replay", "t.jsonl", "--clients", "3", "--out", "o", "-j1").code == 0
    assert read_outcome(tmp_path / "o" / "as_configured").clients == 3
    with RecordReader(tmp_path / "o" / "as_configured" / "record") as reader:
        busy = "FROM requests a, requests b SELECT count(*) AS n WHERE a.arrived_ns BETWEEN b.arrived_ns AND b.finished_ns - 1"
        most = reader.query(f"FROM ({busy} GROUP BY a.id) SELECT max(n) AS most")
    assert most == [{"most": 3}]


def test_profiles_can_be_compared(ready: Cli, tmp_path: Path) -> None:
    slow = msgspec.structs.replace(read_profile(DEFAULT), name="slow", profile=TwinProfile(step_base_ps=20 * 10**9))
    (tmp_path / "slow.json").write_bytes(msgspec.json.encode(slow))
    done = ready("replay", "t.jsonl", "--set", f"profile={DEFAULT},slow.json", "-j1")
    _, fast, late = lines(done, "what clients waited")
    assert [fast[0], late[0]] == [DEFAULT, "slow.json"]
    assert float(late[2]) > float(fast[2])
    assert done.err == ""


def test_no_sentence_is_wider_than_a_terminal_of_a_hundred_columns(ready: Cli) -> None:
    words = ("--set", "slots=2,4", "--set", "speed=1,1000", "--max-long-ttft", "1ms", "-j1")
    done = ready("replay", "t.jsonl", *words)
    *tables, sentences = done.out.split("\n\n")
    assert len(sentences.splitlines()) > 8
    titles = [table.splitlines()[0] for table in tables]
    assert max(map(len, [*titles, *sentences.splitlines()])) <= 100


def test_a_base_model_that_cannot_be_read_is_said_with_what_stands_in_for_it(ready: Cli, tmp_path: Path) -> None:
    settings = fleet() | {"base": {"names": ["base"], "path": str(tmp_path / "gone")}}
    write(tmp_path / "loraledger.yaml", settings)
    done = ready("replay", "t.jsonl", "--set", "slots=3,4", "-j1")
    assert done.code == 0
    (said,) = [line for line in done.err.splitlines() if "base.path" in line]
    assert said.startswith(f"warning: base.path {tmp_path / 'gone'}: ")
    assert said.endswith(f"; bytes of slots and KV blocks are those of profile {DEFAULT} (Llama-3.1-8B (bf16))")


def test_requests_that_their_tenant_may_not_make_are_counted_and_played(ready: Cli, tmp_path: Path) -> None:
    settings = fleet()
    settings["tenants"][0] |= {"adapters": ["*0", "a1*"], "base": False}
    write(tmp_path / "loraledger.yaml", settings)
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()[1:]]
    refused = sum(row["adapter"] not in {"a0", "a1", "a10", "a11"} for row in rows)
    done = ready("replay", "t.jsonl", "-j1", "--json")
    assert 0 < refused < 120
    assert f"warning: {refused} of 120 requests are for what the settings do not let their tenant call" in done.err
    (run,) = done.items("replay")["runs"]
    assert run["report"]["requests"] == 120


def test_a_record_that_was_changed_is_not_compared_with(ready: Cli, tmp_path: Path) -> None:
    assert ready("replay", "t.jsonl", "--out", "theirs", "-j1").code == 0
    (path,) = (tmp_path / "theirs").glob("*/record/requests/*/*/*.parquet")
    faster = tmp_path / "faster.parquet"
    with connect(tmp_path / "scratch", threads=1, memory_limit="64MB") as connection:
        rows = f"FROM read_parquet({quote(path)}) SELECT * REPLACE (arrived_ns + 1 AS first_token_ns)"
        run(connection, f"COPY ({rows}) TO {quote(faster)} (FORMAT parquet)")
    faster.replace(path)
    done = ready("replay", "t.jsonl", "--out", "ours", "--against", "theirs/as_configured", "-j1")
    assert done.code == 3
    assert done.err.splitlines()[-1] == (
        "loraledger: theirs/as_configured: its record is not the one that the run wrote; replay it again"
    )
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["replay.json"]


@pytest.mark.parametrize(("jobs", "number", "code"), [("1", "TERM", 143), ("2", "TERM", 143), ("2", "INT", 130)])
def test_a_signal_leaves_nothing_half_done_and_says_so(
    ready: Cli, tmp_path: Path, jobs: str, number: str, code: int
) -> None:
    words = "zipf:1.0 --adapters 12 --requests 20000 --rate 10 --ranks 8 --bytes-per-rank 1MiB --out long.jsonl"
    assert ready("trace", "generate", *words.split()).code == 0
    command = [sys.executable, "-m", "loraledger.cli.main", "replay", "long.jsonl", "--set", "slots=2,3", "-j", jobs]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored here would be ignored there
    process = subprocess.Popen(
        [*command, "--out", "o"], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("o/.*.partial/record"))) < int(jobs):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.Signals[f"SIG{number}"])
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert err.splitlines()[-1] == "replay: stopped; runs that were complete are kept"
    assert [path.name for path in (tmp_path / "o").iterdir()] == ["replay.json"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_during_a_query_ends_as_any_other(
    ready: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    """The query is a long one of DuckDB's own, since a summary of few rows is over before a signal comes."""

    def endless(*_: object) -> object:
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        with connect(tmp_path / "scratch", threads=1, memory_limit="64MB") as connection:
            run(connection, "SELECT sum(sin(a.range)) FROM range(10000000000) a")
        raise AssertionError

    monkeypatch.setattr(Compared, "read", endless)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = ready("replay", "t.jsonl", "-j1")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.code, done.out) == (code, "")
    assert "interrupted" not in done.err
    assert done.err.splitlines()[-1] == "replay: stopped; runs that were complete are kept"


def test_an_interrupt_before_anything_is_played_says_that_nothing_was_written(
    ready: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("loraledger.cli.replay.setup.prepare", interrupted)
    done = ready("replay", "t.jsonl", "--out", "o")
    assert (done.code, done.out, done.err.split("\n")) == (130, "", ["replay: stopped; nothing was written", ""])
    assert not (tmp_path / "o").exists()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--set", "slots=0"], 2, "--set slots=0: a whole number from 1 to 1,000,000,000 is wanted"),
        (["--set", "slot=4"], 2, "did you mean 'slots'"),
        (["--policy", "round_robin"], 2, "did you mean 'round-robin'"),
        (
            ["--set", "slots=7"],
            3,
            "slots=7: replica r1: host_entries is 6: must be at least slots (7), as in vLLM; that is from the settings: "
            "give --set host_entries=N as well",
        ),
        (
            ["--set", "slots=400", "--set", "host_entries=400"],
            3,
            "400 slots of rank 64 leave no KV: 26 leave one block",
        ),
        (
            ["--set", "max_rank=16,8"],
            3,
            "t.jsonl: row 2: adapter 'a1': its rank 16 is above max_rank 8 of every replica in the run max_rank=8",
        ),
        (["--set", "kv_blocks=4000,20"], 3, "all KV of a replica takes 321 in the run kv_blocks=20"),
        (
            ["--set", "kv_blocks=1", "--skip-unfit"],
            3,
            "t.jsonl: --skip-unfit would leave no request: 120 larger than all",
        ),
        (["--profile", "no-such"], 3, "it is no shipped profile either; known: "),
        (["--against", "nowhere"], 3, "nowhere: not the folder of a run"),
        (["--out", "."], 3, "is not empty and no folder of a replay"),
        (["--jobs", "0"], 2, "--jobs"),
        (["--out", "t.jsonl"], 3, "t.jsonl: cannot be written: File exists"),
        (["--scrape-interval", "1us"], 2, "scrape_interval is 1000 ns: must be at least 1 ms"),
        (["--max-long-ratio", "inf"], 2, "long_ttft_ratio is inf"),
        (["--slo", "5"], 2, "has no unit"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_played(
    ready: Cli, tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    done = ready("replay", "t.jsonl", *words)
    text = re.sub(r"[\s│]+", " ", done.err)
    assert (done.code, said in text) == (code, True), done.err
    assert done.out == ""
    if code == 3:
        assert len([line for line in done.err.splitlines() if not line.startswith("warning: ")]) == 1
    assert list(tmp_path.rglob("run.json")) == []


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\x1f\x8b\x08 cut", b'{"loraledger_trace": 1}', b"\xff\xfe"])
def test_what_is_no_trace_is_refused_by_name(ready: Cli, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x.jsonl").write_bytes(content)
    done = ready("replay", "x.jsonl")
    assert (done.code, done.err.startswith("loraledger: x.jsonl: "), done.err.count("\n")) == (3, True, 1)


def test_unfit_requests_are_left_out_of_every_run_where_this_is_asked(ready: Cli, tmp_path: Path) -> None:
    done = ready("replay", "t.jsonl", "--set", "max_rank=16,8", "--skip-unfit", "--out", "o", "-j1")
    assert done.code == 0
    first, second = (read_outcome(tmp_path / "o" / f"max_rank={rank}") for rank in (16, 8))
    (left_out,) = first.dropped.items()
    assert left_out[0] == "adapter larger than a slot"
    assert first.dropped == second.dropped
    assert first.requests == second.requests == 120 - left_out[1]
    assert first.trace == second.trace
    assert "without=" in first.trace
    assert f"left out of every run: {left_out[1]} adapter larger than a slot\n" in done.out
    said = "its rank 16 is above max_rank 8 of every replica in the run max_rank=8)"
    before, _, why = done.err.splitlines()[-1].partition(" larger than a slot ('a1': ")
    assert (before, why) == (
        f"warning: --skip-unfit leaves out of every run, beside {first.requests} requests that are played: {left_out[1]} adapter",
        said,
    )


def test_bad_rows_are_refused_with_their_row_or_counted(ready: Cli, tmp_path: Path) -> None:
    with (tmp_path / "t.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"at": -5}\n')
    done = ready("replay", "t.jsonl", "-j1")
    assert (done.code, "t.jsonl: row 122: not a request" in done.err) == (3, True)
    assert ready("replay", "t.jsonl", "-j1", "--skip-bad", "--out", "o").code == 0
    assert read_outcome(tmp_path / "o" / "as_configured").dropped == {"not a request": 1}


def test_adapters_of_unknown_size_are_refused_or_given(ready: Cli, tmp_path: Path) -> None:
    def forget(rows: list[dict[str, Any]]) -> None:
        for adapter in rows[0]["adapters"]:
            del adapter["bytes"]

    edit(tmp_path / "t.jsonl", forget)
    done = ready("replay", "t.jsonl", "-j1")
    assert (done.code, "row 1: bytes of adapter" in done.err, "give --adapter-bytes" in done.err) == (3, True, True)
    given = ready("replay", "t.jsonl", "-j1", "--adapter-bytes", "20MiB")
    assert given.code == 0
    assert "are those of the options" in given.err


def test_runs_of_another_trace_are_not_mixed_in(ready: Cli, tmp_path: Path) -> None:
    assert ready("replay", "t.jsonl", "--out", "o", "-j1").code == 0
    edit(tmp_path / "t.jsonl", lambda rows: rows.pop())
    done = ready("replay", "t.jsonl", "--out", "o", "-j1")
    assert (done.code, "holds runs of another trace" in done.err) == (3, True)


def test_names_that_a_terminal_would_obey_are_shown_escaped(ready: Cli, tmp_path: Path) -> None:
    def rename(rows: list[dict[str, Any]]) -> None:
        rows[0]["adapters"][0]["name"] = "\x1b[31mred"
        for row in rows[1:]:
            row["tenant"] = "\x1b[31mx"
            row["adapter"] = "\x1b[31mred"

    edit(tmp_path / "t.jsonl", rename)
    done = ready("replay", "t.jsonl", "-j1")
    assert done.code == 0
    assert "\x1b" not in done.out + done.err
    assert r"\x1b[31mred" in done.out


def test_a_terminal_sees_how_the_runs_get_on(ready: Cli, tmp_path: Path) -> None:
    out, shown = on_a_terminal(tmp_path, 120, "replay", "t.jsonl", "--set", "slots=2,3", "-j1")
    assert b"2 of 2 runs" in shown
    assert out.startswith(b"what clients waited")


def test_the_lines_of_runs_show_simulated_time_rate_and_time_left() -> None:
    columns = (TextColumn("{task.description}"), TextColumn("{task.percentage:.0f} % {task.fields[said]}"))
    display = Display(*columns, console=Console(file=io.StringIO(), width=120))
    drawn = Drawn(display, ["slots=2", "slots=3\x1b"], 200)

    def lines_shown() -> list[str]:
        console = Console(file=io.StringIO(), width=120)
        console.print(display.get_renderable())
        assert isinstance(console.file, io.StringIO)
        return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]

    drawn.moved(0, Progress(90 * 10**9, 120, 100, 200, 12_345.6, 61.0))
    drawn.moved(1, Progress(10**9, 12, 10, None, 5.0, None))
    assert lines_shown() == [
        "all runs 28 % 0 of 2 runs",
        "slots=2 50 % 1.5 m simulated, 12,346 requests/s, 1.02 m left",
        r"slots=3\x1b 5 % 1 s simulated, 5 requests/s",
    ]
    drawn.moved(1, Progress(10**9, 200, 200, None, 5.0, 0.0, writing=True))
    drawn.ended(0, outcome(200))
    assert lines_shown() == ["all runs 100 % 1 of 2 runs", r"slots=3\x1b 100 % writing its record"]
