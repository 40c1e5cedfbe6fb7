"""``loraledger change``: at a gateway that serves, at one that a test plays, and at the journal where none answers."""

from __future__ import annotations

import getpass
import json
import os
import pty
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from loraledger.cli.change import watching
from loraledger.cli.change.options import who_asks
from loraledger.cli.change.playing import Newest, newest
from loraledger.config import load
from loraledger.operate.change import Change, Guardrail, Target
from loraledger.operate.journal import ChangeJournal
from loraledger.operate.watch import judge
from loraledger.record.parquet import write_parquet
from loraledger.replay.scenarios.profiles import DEFAULT, read_profile
from loraledger.twin.calibrated import encode
from loraledger.units import NS_PER_S
from operate.changes import block, change
from operate.test_watch import blocks
from support.gateway import GatewayProcess, tenant

from .conftest import Cli, Done, write

TENANTS = ("t0", "t1", "t2", "t3")
WORDS = (
    "policy",
    "--from",
    "least-loaded",
    "--to",
    "bounded-affinity",
    "--target",
    "hit_rate:0.02",
    "--why",
    "more hits",
)
NOON = 1_796_083_200 * NS_PER_S


def fleet(**more: Any) -> dict[str, Any]:
    """Two replicas that nobody runs, four tenants."""
    replicas = [
        {"name": f"r{n}", "url": f"http://127.0.0.1:{n}", "slots": 3, "host_entries": 6, "kv_tokens": 65_536}
        for n in (1, 2)
    ]
    tenants = [tenant(name, ["*"], limits={"concurrency": 500}) for name in TENANTS]
    return {
        "base": {"names": ["llama"]},
        "replicas": replicas,
        "tenants": tenants,
        "policy": {"name": "least-loaded"},
    } | more


def profile(path: Path, **fields: Any) -> Path:
    """A profile of version 0.32.0 of an engine with ``llama``."""
    plain = {"name": "measured", "engine_version": "0.32.0", "model": "llama"}
    path.write_bytes(encode(msgspec.structs.replace(read_profile(DEFAULT), **(plain | fields))))
    return path


# --- a gateway that serves --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 requests of four tenants for 12 adapters."""
    folder = tmp_path_factory.mktemp("trace")
    words = "zipf:0.6 --adapters 12 --requests 300 --rate 10 --ranks 8 --bytes-per-rank 1MiB --tenants 4"
    command = [sys.executable, "-m", "loraledger.cli.main", "trace", "generate", *words.split(), "--out", "t.jsonl"]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    return folder / "t.jsonl"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    """Its settings are those of the working directory; its engines are not there, which no proposal needs."""
    with GatewayProcess(tmp_path, fleet()) as process:
        process.start(replicas_up=0)
        process.wait(lambda: process.summary() != {}, "an answer")
        yield process


def test_a_change_from_its_proposal_to_its_end(cli: Cli, gateway: GatewayProcess, trace: Path, tmp_path: Path) -> None:
    made = cli("change", "propose", *WORDS, "--share", "50%", "--within", "2h", "--who", "ada")
    assert made.code == 0, made.err
    assert made.out.startswith("c1: policy least-loaded -> bounded-affinity, proposed\n")
    assert "taken back when refused higher by more than 0.01 or ttft_p99 higher by more than 0.1 s" in made.out
    assert "tried on 50 % of the tenants by hash, in blocks of 30s" in made.out
    early = cli("change", "rollout", "c1", "--who", "ada")
    assert (early.code, "c1 was not replayed" in early.err) == (5, True)

    played = cli(
        "change",
        "replay",
        "c1",
        "--trace",
        trace,
        "--profile",
        profile(tmp_path / "p.json"),
        "--out",
        "runs",
        "--who",
        "ada",
    )
    assert played.code == 0, played.err
    rows = {line[0]: line for line in played.table() if line}
    assert rows["hit_rate"][-1] == rows["ttft_p99"][-1] == rows["refused"][-1] == "pass"
    assert "warning: the record has no request yet" in played.err
    assert sorted(path.name for path in (tmp_path / "runs").glob("*=*")) == [
        "policy=bounded-affinity",
        "policy=least-loaded",
    ]

    going = cli("change", "rollout", "c1", "--who", "ada")
    assert going.code == 0, going.err
    (members,) = re.findall(r"^has it now: (.*)$", going.out, re.MULTILINE)
    assert len(members.split(", ")) == 2
    shown = cli("change", "show", "c1", "--json").items("change")
    assert [entry["kind"] for entry in shown["entries"]] == ["propose", "replay", "roll_out"]
    evidence = shown["entries"][1]["evidence"]
    assert evidence["stale"] is False
    assert evidence["ok"] is True
    assert evidence["requests"] == 300
    assert evidence["runs"]["before"] != evidence["runs"]["after"]
    assert evidence["figures"]["before"]["hit_rate"] < evidence["figures"]["after"]["hit_rate"]
    assert evidence["profile"]["name"] == "measured"

    back = cli("change", "rollback", "c1", "--why", "enough seen", "--who", "ada")
    assert (back.code, back.out) == (0, "c1: policy least-loaded -> bounded-affinity, rolled_back: enough seen\n")
    listed = cli("change", "list")
    assert listed.table()[1][:5] == ["c1", "rolled_back", "policy", "least-loaded", "bounded-affinity"]
    assert "read from the gateway" in listed.err
    assert cli("change", "list", "--open", "--json").items("changes") == []
    again = cli("change", "rollback", "c1", "--why", "again", "--who", "ada")
    assert (again.code, "c1 is rolled_back" in again.err) == (5, True)


def test_a_replay_that_speaks_against_it_is_attached_and_needs_a_reason(
    cli: Cli, gateway: GatewayProcess, trace: Path, tmp_path: Path
) -> None:
    words = ("policy", "--from", "least-loaded", "--to", "round-robin", "--target", "hit_rate:0.5", "--why", "x")
    assert cli("change", "propose", *words, "--guard", "refused", "--who", "ada").code == 0
    played = cli("change", "replay", "c1", "--trace", trace, "--profile", profile(tmp_path / "p.json"), "--who", "ada")
    assert played.code == 5
    assert "the replay speaks against c1: target hit_rate is not better by more than 0.5" in played.err
    assert "It is attached" in played.err
    refused = cli("change", "rollout", "c1", "--who", "ada")
    assert refused.code == 5
    assert "give --although and a reason" in refused.err
    assert cli("change", "rollout", "c1", "--although", " ", "--who", "ada").code == 5
    going = cli("change", "rollout", "c1", "--although", "the trace is old", "--share", "25%", "--who", "ada")
    assert going.code == 0, going.err
    entries = cli("change", "show", "c1", "--json").items("change")["entries"]
    assert entries[-1]["why"].startswith("although the trace is old (the replay: target hit_rate is not better")
    assert entries[-1]["change"]["population"]["share"] == 0.25


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"engine_version": "0.31.0"}, "is of vllm 0.31.0, the newest requests ran on 0.32.0"),
        ({"model": "qwen"}, "is of model 'qwen', the newest requests are of 'llama'"),
    ],
)
def test_a_stale_profile_is_refused_and_nothing_is_attached(
    cli: Cli, gateway: GatewayProcess, trace: Path, tmp_path: Path, fields: dict[str, Any], complaint: str
) -> None:
    served(gateway.record)
    assert cli("change", "propose", *WORDS, "--who", "ada").code == 0
    stale = cli(
        "change", "replay", "c1", "--trace", trace, "--profile", profile(tmp_path / "p.json", **fields), "--who", "ada"
    )
    assert stale.code == 5
    assert complaint in stale.err
    assert "nothing was played; measure one with `loraledger calibrate`" in stale.err
    assert cli("change", "list", "--json").items("changes")[0]["state"] == "proposed"


def served(record: Path, version: str = "0.32.0", base: str = "llama", ended: int = NOON) -> None:
    row = {
        "id": f"q{ended}", "tenant": "t0", "adapter": "a0", "base": base, "engine_version": version, "replica": "r1",
        "arrived_ns": ended - NS_PER_S, "first_token_ns": ended, "finished_ns": ended, "status": "ok", "hit_class": "gpu",
        "prompt_tokens": 100, "generated_tokens": 20,
    }  # fmt: skip
    write_parquet({"requests": [row]}, record, f"test-{ended}")


def test_a_record_is_a_trace_too(cli: Cli, gateway: GatewayProcess, tmp_path: Path) -> None:
    for second in range(20):
        served(tmp_path / "then", ended=NOON + second * NS_PER_S)
    assert cli("change", "propose", *WORDS, "--who", "ada").code == 0
    where = ("--trace", tmp_path / "then", "--profile", profile(tmp_path / "p.json"))
    played = cli("change", "replay", "c1", *where, "--adapter-rank", "8", "--adapter-bytes", "1MiB", "--who", "ada")
    assert "on 20 requests" in played.out, played.err
    assert "no request yet" not in played.err
    assert played.code == 0


def test_flags_are_given_where_engines_have_to_start_again(
    cli: Cli, gateway: GatewayProcess, trace: Path, tmp_path: Path
) -> None:
    words = ("slots", "--from", "3", "--to", "5", "--target", "hit_rate", "--why", "more fit", "--who", "ada")
    assert cli("change", "propose", *words, "--guard", "refused:0.01").code == 0
    asked = ("--trace", trace, "--profile", profile(tmp_path / "p.json"))
    played = cli("change", "replay", "c1", *asked, "--who", "ada")
    assert played.code == 0, played.err
    waits = cli("change", "rollout", "c1", "--share", "50%", "--who", "ada")
    assert waits.code == 0, waits.err
    assert "nothing was applied: engines read this when they start" in waits.out
    assert len(re.findall(r"^  r[12]: --max-loras 5 --max-cpu-loras 6$", waits.out, re.MULTILINE)) == 1
    back = cli("change", "rollback", "c1", "--why", "no time", "--who", "ada")
    assert "--max-loras 3" in back.out


def test_another_open_change_is_in_its_way(cli: Cli, gateway: GatewayProcess) -> None:
    assert cli("change", "propose", *WORDS, "--who", "ada").code == 0
    second = cli("change", "propose", *WORDS, "--who", "ada")
    assert (second.code, "by c1 (proposed): end that one first" in second.err) == (5, True)
    gone = cli("change", "withdraw", "c1", "--why", "not now", "--who", "ada")
    assert (gone.code, "withdrawn: not now" in gone.out) == (0, True)
    assert cli("change", "propose", *WORDS, "--who", "ada").code == 0


def test_what_is_not_in_force_is_no_beginning(cli: Cli, gateway: GatewayProcess) -> None:
    words = ("policy", "--from", "round-robin", "--to", "bounded-affinity", "--target", "hit_rate", "--why", "x")
    done = cli("change", "propose", *words, "--who", "ada")
    assert done.code in (2, 5)
    assert 'policy is "least-loaded" now' in done.err


def test_a_change_that_is_not_there(cli: Cli, gateway: GatewayProcess) -> None:
    for words in (["show"], ["diff"], ["rollout"], ["watch"]):
        done = cli("change", *words, "c9", *(["--who", "ada"] if words == ["rollout"] else []))
        assert done.code == 2
        assert "c9" in done.err


# --- what an option cannot be -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("colour", "--from", "1", "--to", "2"), "VARIABLE: 'colour' cannot be changed here"),
        (("slots", "--from", "4", "--to", "many"), '--to: "many": a whole number is wanted'),
        (("slots", "--from", "0", "--to", "4"), "--from: 0: a whole number from 1"),
        (("policy", "--from", "least-loaded", "--to", "bounded-afinity"), "--to: bounded-afinity: no such policy"),
        (("pins", "--from", "[]", "--to", "r1"), "--to: 'r1' is no ranking: give @FILE"),
        (("pins", "--from", "[]", "--to", "@nowhere.json"), "--to: nowhere.json cannot be read"),
        ((*WORDS[:5], "--target", "speed:1"), "--target: 'speed' is no metric; known: attainment, hit_rate"),
        ((*WORDS[:5], "--target", "hit_rat:1"), "--target: 'hit_rat' is no metric"),
        ((*WORDS[:5], "--target", "hit_rate:-1"), "--target: 'hit_rate:-1': after the colon"),
        ((*WORDS[:5], "--guard", "refused:x"), "--guard: 'refused:x'"),
        ((*WORDS[:5], "--guard", "refused", "--guard", "refused:1"), "--guard: refused is given twice"),
        ((*WORDS[:5], "--share", "all"), "--share: 'all'"),
        ((*WORDS[:5], "--share", "100%"), "--share: '100%'"),
        ((*WORDS[:5], "--within", "60"), "--within: '60' has no unit"),
        ((*WORDS[:5], "--block", "0s"), "--block: '0s': a time above 0"),
        ((*WORDS[:5], "--who", " "), "--who: nobody is named"),
    ],
)
def test_the_option_that_is_wrong_is_named(cli: Cli, written: Path, words: tuple[str, ...], complaint: str) -> None:
    more = [] if "--target" in words else ["--target", "hit_rate"]
    done = cli("change", "propose", *words, *more, "--why", "x", *([] if "--who" in words else ["--who", "ada"]))
    assert done.code == 2
    assert f"loraledger: {complaint}" in done.err


def test_what_the_gateway_refuses_is_told_of_the_option_that_it_came_from(cli: Cli, tmp_path: Path) -> None:
    said = {"error": {"message": "after is too much", "param": "after", "code": "invalid_request"}}
    with playing(tmp_path, {"/api/changes": [(400, said)]}):
        done = cli("change", "propose", *WORDS, "--who", "ada")
    assert (done.code, done.err) == (2, "loraledger: --to: after is too much\n")


def test_nobody_is_asked_where_no_gateway_answers(cli: Cli, written: Path) -> None:
    done = cli("change", "propose", *WORDS, "--who", "ada")
    assert (done.code, "no gateway answers at" in done.err) == (4, True)


# --- guardrails that nobody gave --------------------------------------------------------------------------------------


def proposed(cli: Cli, tmp_path: Path, *words: str, **sections: Any) -> tuple[Done, dict[str, Any]]:
    """How a proposal ended, and what the gateway was asked."""
    answer = {"change": msgspec.to_builtins(change())}
    with playing(tmp_path, {"/api/changes": [(201, answer)]}, **sections) as asked:
        done = cli("change", "propose", *WORDS, *words, "--who", "ada")
    assert done.code == 0, done.err
    return done, asked[0]


def test_three_are_set_and_said_where_engines_have_probes(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K", "secret")
    probed = [{**replica, "probe": {"env": "K"}} for replica in fleet()["replicas"]]
    done, asked = proposed(cli, tmp_path, replicas=probed)
    assert asked["guardrails"] == [
        {"metric": "preemptions", "worse_by": 10.0},
        {"metric": "refused", "worse_by": 0.01},
        {"metric": "ttft_p99", "worse_by": 0.1},
    ]
    assert "guardrail preemptions: worse by 10 for 1,000 requests at most (default: " in done.out


def test_preemptions_are_left_out_where_nobody_would_tell(cli: Cli, tmp_path: Path) -> None:
    done, asked = proposed(cli, tmp_path)
    assert [rail["metric"] for rail in asked["guardrails"]] == ["refused", "ttft_p99"]
    assert "no guardrail on preemptions: it takes a probe in every engine" in done.out


def test_the_target_is_none_of_them_and_those_that_are_given_are_all(cli: Cli, tmp_path: Path) -> None:
    _, asked = proposed(cli, tmp_path, "--target", "refused:0.1")
    assert (asked["target"], [rail["metric"] for rail in asked["guardrails"]]) == (
        {"metric": "refused", "least": 0.1},
        ["ttft_p99"],
    )
    done, asked = proposed(cli, tmp_path, "--guard", "itl_mean:0.002")
    assert asked["guardrails"] == [{"metric": "itl_mean", "worse_by": 0.002}]
    assert "default" not in done.out


def test_slow_first_tokens_are_guarded_by_what_they_take_now(cli: Cli, tmp_path: Path) -> None:
    now = time.time_ns()
    rows = [
        {
            "id": f"q{n}",
            "arrived_ns": now - n * NS_PER_S,
            "first_token_ns": now - n * NS_PER_S + 3 * NS_PER_S,
            "status": "ok",
        }
        for n in range(200)
    ]
    write_parquet({"requests": rows}, tmp_path / "record", "then")
    done, asked = proposed(cli, tmp_path)
    assert asked["guardrails"][1] == {"metric": "ttft_p99", "worse_by": 0.3}
    assert "a tenth of 3.000 s, the p99 of the record's last hour" in done.out.replace("\n  ", " ")


def test_pins_come_from_a_file(cli: Cli, tmp_path: Path) -> None:
    pins = {"schema_version": 1, "kind": "pins", "pins": [{"replica": "r1", "adapter": "sql"}]}
    write(tmp_path / "pins.json", pins)
    answer = {"change": msgspec.to_builtins(change(variable="pins", before=[], after=[["r1", "sql"]]))}
    words = ("pins", "--from", "[]", "--to", "@pins.json", "--target", "hit_rate", "--why", "x", "--who", "ada")
    with playing(tmp_path, {"/api/changes": [(201, answer)]}) as asked:
        done = cli("change", "propose", *words)
    assert (asked[0]["before"], asked[0]["after"]) == ([], [["r1", "sql"]])
    assert "pins no pins -> 1 pins" in done.out


# --- what runs now ----------------------------------------------------------------------------------------------------


def test_the_newest_requests_say_what_runs(tmp_path: Path) -> None:
    served(tmp_path / "record", "0.31.0", "old", NOON)
    served(tmp_path / "record", "0.32.0", "llama", NOON + NS_PER_S)
    served(tmp_path / "then", "0.30.0", "older")
    loaded = load(write(tmp_path / "loraledger.yaml", fleet()), env={})
    assert newest(loaded, tmp_path / "then", None) == Newest("0.32.0", "llama")
    assert newest(loaded, tmp_path / "then", "0.33.0") == Newest("0.33.0", "llama")
    other = load(write(tmp_path / "other.yaml", fleet(record={"dir": "nowhere"})), env={})
    assert newest(other, tmp_path / "then", None) == Newest("0.30.0", "older")
    assert newest(other, tmp_path / "t.jsonl", None) == Newest()


# --- following --------------------------------------------------------------------------------------------------------


def view(found: Change, **more: Any) -> dict[str, Any]:
    """What a gateway says of one change."""
    return {"change": msgspec.to_builtins(found), "entries": [], "verdict": None, "members": ["t1"], **more}


def stood(state: str, hits: float, **more: Any) -> dict[str, Any]:
    began = time.time_ns() - 60 * NS_PER_S
    found = msgspec.structs.replace(change(**more), state=state, began_ns=began, reason=f"now {state}")
    verdict = judge(found, blocks(20, hits, 0), began)
    return view(found, verdict=msgspec.to_builtins(verdict))


@contextmanager
def playing(folder: Path, answers: dict[str, list[tuple[int, Any]]], **sections: Any) -> Iterator[list[Any]]:
    """A control plane that gives these answers, the last one over and over; what it was told by POST. Status 0: no answer."""
    told: list[Any] = []

    class Plane(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            left = answers.get(self.path, [(404, {"error": {"message": f"no such change: {self.path}"}})])
            status, said = left.pop(0) if len(left) > 1 else left[0]
            if not status:
                self.close_connection = True
                return
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.do_GET()

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Plane) as server:
        write(folder / "loraledger.yaml", fleet(control={"port": server.server_port}, **sections))
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield told
        finally:
            server.shutdown()


def test_a_line_for_each_change_of_state_in_a_pipe(cli: Cli, tmp_path: Path) -> None:
    said = [stood("rolling_out", 0.1)] * 3 + [stood("accepted", 0.1)]
    with playing(tmp_path, {"/api/changes/c1": [(200, one) for one in said]}):
        done = cli("change", "watch", "c1", "--every", "10ms")
    assert done.code == 0, done.err
    first, second, *_ = done.out.splitlines()
    assert re.match(r"c1 rolling_out: 59(\.\d)? m left; target hit_rate is better by 0\.09", first)
    assert second == "c1 accepted: now accepted"
    rows = {line[1]: line for line in done.table() if len(line) > 5}
    assert rows["hit_rate"][-2:] == ["better", "20"]
    assert rows["preemptions"][0] == "guardrail"


@pytest.mark.parametrize("state", ["rolled_back", "withdrawn"])
def test_one_that_is_taken_back_is_exit_code_5(cli: Cli, tmp_path: Path, state: str) -> None:
    with playing(tmp_path, {"/api/changes/c1": [(200, stood("rolling_out", 0.1)), (200, stood(state, 0.1))]}):
        done = cli("change", "watch", "c1", "--every", "10ms")
    assert (done.code, f"c1 is {state}: now {state}" in done.err) == (5, True)


def test_one_that_does_not_roll_out_is_not_waited_for(cli: Cli, tmp_path: Path) -> None:
    with playing(tmp_path, {"/api/changes/c1": [(200, view(change()))]}):
        done = cli("change", "watch", "c1")
    assert (done.code, "c1 is proposed: nothing rolls out" in done.err) == (5, True)


def test_a_gateway_that_dies_meanwhile_is_waited_for(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = (200, stood("rolling_out", 0.1))
    answers = [alive, (0, None), (0, None), alive, (0, None), (200, stood("accepted", 0.1))]
    with playing(tmp_path, {"/api/changes/c1": answers}):
        done = cli("change", "watch", "c1", "--every", "10ms")
    assert done.code == 0
    assert done.err.count("no gateway answers") == 2
    assert done.err.count("answers again") == 2
    monkeypatch.setattr(watching, "PATIENCE_S", 0.05)
    with playing(tmp_path, {"/api/changes/c1": [(200, stood("rolling_out", 0.1)), (0, None)]}):
        assert cli("change", "watch", "c1", "--every", "10ms").code == 4


def test_ctrl_c_ends_the_following_and_says_what_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loraledger.cli.main", "change", "watch", "c1", "--every", "50ms"]
    with playing(tmp_path, {"/api/changes/c1": [(200, stood("rolling_out", 0.1))]}) as told:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored here would be ignored there
        try:
            process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        finally:
            signal.signal(signal.SIGINT, before)
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            try:
                _, err = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    assert process.returncode == 130
    assert "no longer followed; the rollout of c1 goes on" in err
    assert told == []


def test_on_a_terminal_one_line_is_drawn_again(tmp_path: Path) -> None:
    said = [stood("rolling_out", 0.1)] * 3 + [stood("accepted", 0.1)]
    command = [sys.executable, "-m", "loraledger.cli.main", "change", "watch", "c1", "--every", "20ms"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "60"}
    master, slave = pty.openpty()
    with playing(tmp_path, {"/api/changes/c1": [(200, one) for one in said]}):
        process = subprocess.Popen(command, cwd=tmp_path, stdout=slave, stderr=subprocess.PIPE, env=environment)
        os.close(slave)
        shown = b""
        with suppress(OSError):
            while piece := os.read(master, 65536):
                shown += piece
        process.communicate(timeout=60)
    os.close(master)
    assert process.returncode == 0
    lines = shown.decode().split("\r\n")[0].split("\r\x1b[K")
    assert len(lines) == 5
    assert all(len(line) < 60 for line in lines)
    assert "20 blocks, hit_rate" in lines[1]


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """The settings, and a record with two changes: one accepted, one proposed."""
    write(tmp_path / "loraledger.yaml", fleet(control={"port": 1}))
    first = msgspec.structs.replace(change(), proposed_ns=NOON)
    second = change(id="c2", variable="slots", before=3, after=6, guardrails=(Guardrail("refused", 0.01),))
    with ChangeJournal(tmp_path / "record" / "changes") as book:
        book.append(NOON, "propose", "ada", "more hits", first)
        played = first.step("replay", NOON + 1, "as hoped")
        checks = [
            {"metric": "hit_rate", "role": "target", "limit": 0.02, "verdict": "pass"},
            {"metric": "preemptions", "role": "guardrail", "limit": 10.0, "verdict": "pass"},
        ]
        figures = {"before": {"hit_rate": 0.5, "preemptions": 3.0}, "after": {"hit_rate": 0.75, "preemptions": 4.0}}
        evidence: dict[str, object] = {
            "requests": 900, "trace": "sha256:1", "profile": {"name": "measured"}, "figures": figures,
            "guardrails": checks, "ok": True, "reasons": [],
        }  # fmt: skip
        book.append(NOON + 1, "replay", "ada", "as hoped", played, evidence)
        going = played.step("roll_out", NOON + 2, "go")
        book.append(NOON + 2, "roll_out", "ada", "go", going, {"members": ["t1"]})
        before = [block(n, {"hit_rate": 0.5 + 0.01 * (n % 3)}, {"hit_rate": 0.6}) for n in range(12)]
        verdict = judge(going, blocks(40, 0.1, 0), NOON + 3, before)
        ended = going.step("accept", NOON + 3, "better")
        book.append(NOON + 3, "accept", "gateway", "better", ended, {"verdict": msgspec.to_builtins(verdict)})
        book.append(NOON + 4, "propose", "bob", "more fit", second)
    return tmp_path


def test_without_a_gateway_the_journal_is_read_and_that_is_said(cli: Cli, journal: Path) -> None:
    done = cli("change", "list")
    assert done.code == 0
    assert [line[:2] for line in done.table()[1:]] == [["c1", "accepted"], ["c2", "proposed"]]
    assert "no gateway answers" in done.err
    assert f"read from {journal / 'record/changes/changes.jsonl'}" in done.err
    plain = cli("change", "list", "--record", journal / "record", "--open", "--json")
    assert [found["id"] for found in plain.items("changes")] == ["c2"]
    assert "no gateway answers" not in plain.err


def test_show_has_what_who_why_evidence_and_journal(cli: Cli, journal: Path) -> None:
    done = cli("change", "show", "c1", "--record", journal / "record")
    assert done.code == 0
    for words in (
        "c1: policy least-loaded -> bounded-affinity, accepted",
        "proposed by an operator at 2026-12-01 00:00:00 UTC: hits",
        "target: hit_rate higher by more than 0.02, within 1h",
        "accepted: better",
        "replay of 900 requests, profile measured, sha256:1",
        "rollout, 40 blocks",
    ):
        assert words in done.out, words
    rows = [line for line in done.table() if line[:1] == ["hit_rate"]]
    assert rows == [["hit_rate", "50.0%", "75.0%", "+25.0", "pt", ">", "+2.0", "pt", "pass"]]
    kinds = [line[3:5] for line in done.table() if line[1:2] == ["2026-12-01"]]
    assert kinds == [
        ["propose", "proposed"],
        ["replay", "replayed"],
        ["roll_out", "rolling_out"],
        ["accept", "accepted"],
    ]
    unknown = cli("change", "show", "c9", "--record", journal / "record")
    assert (unknown.code, "there is no change 'c9'" in unknown.err) == (2, True)


@pytest.mark.parametrize("attached", [{}, {"stale": False, "ok": True}, {"figures": {"before": {}, "after": {}}}])
def test_a_replay_of_which_the_journal_lacks_the_figures_is_told_as_such(
    cli: Cli, journal: Path, attached: dict[str, object]
) -> None:
    with ChangeJournal(journal / "record" / "changes") as book:
        book.append(
            NOON + 5, "replay", "bob", "played", book.changes["c2"].step("replay", NOON + 5, "played"), attached
        )
    done = cli("change", "show", "c2", "--record", journal / "record")
    assert done.code == 0, done.err
    assert "replay: the journal does not have what it measured" in done.out
    assert [line[3] for line in done.table() if line[1:2] == ["2026-12-01"]] == ["propose", "replay"]


def test_bounds_are_of_the_figure_itself_whichever_way_is_better(cli: Cli, tmp_path: Path) -> None:
    asked = change(target=Target("ttft_p90"), guardrails=(Guardrail("hit_rate", 0.01),))
    found = msgspec.structs.replace(asked, state="rolled_back", began_ns=0)
    parts = [
        block(n, {"hit_rate": 0.8 - 0.01 * (n % 3), "ttft_p90": 2 + 0.1 * (n % 3)}, {"hit_rate": 0.9, "ttft_p90": 1})
        for n in range(40)
    ]
    with playing(
        tmp_path, {"/api/changes/c1": [(200, view(found, verdict=msgspec.to_builtins(judge(found, parts, 1))))]}
    ):
        done = cli("change", "show", "c1")
    hits, slow = (
        next(line for line in done.out.splitlines() if re.match(rf"(?:target|guardrail) +{name} ", line))
        for name in ("hit_rate", "ttft_p90")
    )
    assert [float(value) for value in re.findall(r"([+-][\d.]+) pt", hits)][:1] == [-11.0]
    low, high = [float(value) for value in re.findall(r"([+-][\d.]+) pt", hits)][1:3]
    assert low < -11.0 < high < 0
    moved, low, high = [float(value) for value in re.findall(r"([+-][\d.]+) s", slow)][:3]
    assert 0.9 < low < moved < high < 1.3
    assert "WORSE" in hits
    assert "not better" in slow


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({}, ["-  name: least-loaded", "+  name: bounded-affinity"]),
        (
            {"variable": "policy.growth_share", "before": 0.5, "after": 0.25},
            ["-    growth_share: 0.5", "+    growth_share: 0.25"],
        ),
        ({"variable": "slots", "before": 3, "after": 6}, ["-  slots: 3", "+  slots: 6", "-  slots: 3", "+  slots: 6"]),
        (
            {"variable": "tenant.concurrency", "before": 500, "after": 8},
            ["-    concurrency: 500", "+    concurrency: 8"] * 4,
        ),
        ({"variable": "replicas", "before": 2, "after": 3}, ["+- name: a new replica (3)"]),
        (
            {"variable": "pins", "before": [], "after": [["r1", "sql"]]},
            ["-  residency: lru", "+  residency: ranked", "+  pins: pins.json"],
        ),
    ],
)
def test_diff_is_what_the_settings_would_say(
    cli: Cli, tmp_path: Path, fields: dict[str, Any], lines: list[str]
) -> None:
    found = msgspec.structs.replace(change(**fields), state="accepted")
    with playing(tmp_path, {"/api/changes/c1": [(200, view(found))]}):
        done = cli("change", "diff", "c1")
    assert done.code == 0, done.err
    changed = [line for line in done.out.splitlines() if re.match(r"[+-](?!--|\+\+)", line)]
    assert changed[: len(lines)] == lines
    if fields.get("variable") == "pins":
        assert '+   "adapter": "sql"' in changed
    elif fields.get("variable") != "replicas":
        assert re.search(r"loraledger: \S+ is from (loraledger.yaml:\d+|default)", done.err)


def test_diff_names_nobody_where_the_settings_cannot_be_read(cli: Cli, journal: Path) -> None:
    (journal / "loraledger.yaml").unlink()
    done = cli("change", "diff", "c1", "--record", journal / "record")
    assert (done.code, "names of replicas and tenants are left out" in done.err) == (0, True)
    assert "+  name: bounded-affinity" in done.out


def test_who_asks_is_the_user_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert who_asks(None) == pwd.getpwuid(os.getuid()).pw_name
    assert who_asks(" ada ") == "ada"

    def nobody() -> str:
        raise KeyError("uid 4711")

    monkeypatch.setattr(getpass, "getuser", nobody)
    with pytest.raises(ValueError, match="--who: nobody is named"):
        who_asks(None)


def test_what_was_taken_back_and_is_not_written_yet_is_said_first() -> None:
    note = "taken back by ada (enough): the journal could not be written yet, that is tried again"
    answer = {**view(msgspec.structs.replace(change(), state="rolling_out", began_ns=NOON)), "note": note}
    for drawn in (True, False):
        assert watching._line(answer, drawn) == f"c1 rolling_out: {note}"
