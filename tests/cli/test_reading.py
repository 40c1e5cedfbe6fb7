"""``get``, ``explain`` and ``verify``: the record and a running gateway, as tables and as documents."""

from __future__ import annotations

import fcntl
import json
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from e2e.fleet import TENANTS, eventually, post
from loraledger import events
from loraledger.record.frames import HEADER, KIND_CRC, Kind, read_segment, segments
from loraledger.record.tables import TABLES

from .conftest import Cli, Fleet, write

REQUESTS = 24


def record(fleet: Fleet) -> tuple[str, Path]:
    return "--record", fleet.gateway.record


def test_requests_are_listed_newest_first_one_line_each(cli: Cli, fleet: Fleet) -> None:
    done = cli("get", "requests", "-n", "100", *record(fleet))
    assert done.code == 0
    heading, *lines = done.table()
    assert heading == [
        "ID",
        "ARRIVED",
        "TENANT",
        "ADAPTER",
        "REPLICA",
        "HIT",
        "QUEUED",
        "LOAD",
        "TTFT",
        "TOTAL",
        "TOKENS",
        "STATUS",
    ]
    assert len(lines) == REQUESTS
    assert all(len(line) == len(heading) for line in lines)
    assert [line[1] for line in lines] == sorted((line[1] for line in lines), reverse=True)
    assert {line[-1] for line in lines} == {"ok"}
    assert {line[2] for line in lines} == set(TENANTS)
    assert "(base)" in {line[3] for line in lines}


def test_requests_as_a_document_have_every_column(cli: Cli, fleet: Fleet) -> None:
    items = cli("get", "requests", "--json", "-n", "100", *record(fleet)).items("requests")
    assert len(items) == REQUESTS
    assert set(items[0]) == TABLES["requests"].names
    assert [item["id"] for item in items] == [
        line[0] for line in cli("get", "requests", *record(fleet)).table()[1:]
    ] + [item["id"] for item in items[20:]]


def test_requests_can_be_filtered_and_limited(cli: Cli, fleet: Fleet) -> None:
    everything = cli("get", "requests", "--json", "-n", "100", *record(fleet)).items("requests")

    def ids(*words: str) -> list[str]:
        return [item["id"] for item in cli("get", "requests", "--json", *words, *record(fleet)).items("requests")]

    assert ids("--tenant", "birch") == [item["id"] for item in everything if item["tenant"] == "birch"]
    assert ids("--adapter", "a1") == [item["id"] for item in everything if item["adapter"] == "a1"]
    assert (
        ids("--status", "ok", "--tenant", "acme", "-n", "2")
        == [item["id"] for item in everything if item["tenant"] == "acme"][:2]
    )
    assert ids("--status", "rejected") == []


def test_an_empty_listing_is_a_heading_alone(cli: Cli, tmp_path: Path) -> None:
    done = cli("get", "requests", "--record", tmp_path)
    assert (done.code, len(done.table())) == (0, 1)


def test_decisions_are_listed_with_their_reasons(cli: Cli, fleet: Fleet) -> None:
    items = cli("get", "decisions", "--json", "-n", "100", *record(fleet)).items("decisions")
    assert len(items) == REQUESTS
    done = cli("get", "decisions", "--request", items[0]["request_id"], *record(fleet))
    assert done.code == 0
    assert len(done.table()) == 2
    assert items[0]["reason"] in done.out


@pytest.mark.parametrize("verb", [("get", "requests"), ("get", "decisions"), ("explain", "x"), ("verify",)])
def test_a_record_that_is_no_directory_is_told(cli: Cli, tmp_path: Path, verb: tuple[str, ...]) -> None:
    for place in (tmp_path / "nowhere", write(tmp_path / "file", {})):
        done = cli(*verb, "--record", place)
        assert done.code == 3
        assert f"there is no record in {place}" in done.err


def test_explain_takes_either_id_and_shows_each_term(cli: Cli, fleet: Fleet) -> None:
    (item,) = cli("get", "requests", "--json", "-n", "1", *record(fleet)).items("requests")
    ours, theirs = cli("explain", item["id"], *record(fleet)), cli("explain", item["client_id"], *record(fleet))
    assert ours == theirs
    assert ours.code == 0
    assert (
        f"request {item['id']}: tenant {item['tenant']}, model {item['adapter']}, on {item['replica']}: ok" in ours.out
    )
    assert re.search(r"to first byte \d+\.\d{3} s", ours.out)
    assert f"decision {item['decision_id']} (bounded-affinity): {item['replica']}, " in ours.out
    heading = next(line for line in ours.table() if line and line[0] == "REPLICA")
    assert heading == ["REPLICA", "TIER", "QUEUE", "SLOT_WAIT", "PREPARE", "PREFILL", "EXTERNALITY", "COST"]
    explained = cli("explain", item["id"], "--json", *record(fleet)).items("explanation")
    assert explained["request"] == item
    assert explained["decisions"][0]["candidates"][0]["replica"] == item["replica"]


def test_explain_of_an_unknown_request_is_told(cli: Cli, fleet: Fleet) -> None:
    done = cli("explain", "no-such-id", *record(fleet))
    assert done.code == 3
    assert "no request 'no-such-id': see `loraledger get requests`" in done.err


def test_a_request_that_has_not_ended_is_open_while_a_gateway_writes_and_crashed_after(
    cli: Cli, fleet: Fleet, tmp_path: Path
) -> None:
    (last,) = cli("get", "requests", "--json", "-n", "1", *record(fleet)).items("requests")

    def without_its_end(kind: int, payload: bytes) -> bytes | None:
        event = events.decode_event(payload) if kind == Kind.EVENT else None
        return None if isinstance(event, events.RequestFinished) and event.request == last["id"] else payload

    copy_segment(fleet, tmp_path, without_its_end)
    with (tmp_path / "journal.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shown = cli("explain", last["id"], "--record", tmp_path)
        listed = cli("get", "requests", "-n", "1", "--record", tmp_path)
    assert shown.out.splitlines()[0].endswith(": open")
    assert listed.table()[1][-1] == "open"
    assert cli("explain", last["id"], "--record", tmp_path).out.splitlines()[0].endswith(": gateway_crashed")


def test_verify_says_identical(cli: Cli, fleet: Fleet) -> None:
    done = cli("verify", *record(fleet))
    assert done.code == 0
    assert re.fullmatch(r"\d+ steps with \d+ commands in 1 segments not compacted yet: identical.*\n", done.out)
    found = cli("verify", "--json", *record(fleet)).items("verification")
    assert found["steps"] > 100
    assert found["difference"] is None


def test_verify_of_a_changed_journal_is_exit_code_5_and_shows_the_difference(
    cli: Cli, fleet: Fleet, tmp_path: Path
) -> None:
    def without_dispatches(kind: int, payload: bytes) -> bytes | None:
        if kind != Kind.COMMANDS:
            return payload
        kept: list[events.Command] = [c for c in events.decode_commands(payload) if not isinstance(c, events.Dispatch)]
        return events.encode(kept)

    original = copy_segment(fleet, tmp_path, without_dispatches)
    found = cli("verify", "--record", tmp_path)
    assert found.code == 5
    assert "DIFFERENT" in found.out
    assert original.name in found.err
    assert re.search(r"replayed:   \[.*Dispatch\(", found.err), "a load of the next adapter may stand before it"


def copy_segment(fleet: Fleet, folder: Path, change: Callable[[int, bytes], bytes | None]) -> Path:
    """Copy the fleet's journal into ``folder`` with changed payloads, leaving out those that become None; the original."""
    original = segments(fleet.gateway.record)[-1]
    with (folder / original.name).open("wb") as file:
        for kind, payload, _ in read_segment(original):
            changed = change(kind, payload)
            if changed is not None:
                crc = zlib.crc32(changed, KIND_CRC[kind])
                file.write(HEADER.pack(len(changed) + 1, crc, kind) + changed)
    return original


def test_verify_passes_over_a_segment_whose_process_died_while_it_made_it(
    cli: Cli, fleet: Fleet, tmp_path: Path
) -> None:
    copy_segment(fleet, tmp_path, lambda _, payload: payload)
    (tmp_path / "journal-00009999.log").write_bytes(bytes(4096))
    done = cli("verify", "--record", tmp_path)
    assert done.code == 0
    assert "in 1 segments not compacted yet: identical" in done.out
    assert "1 segments without a head" in done.out


def test_replicas_of_the_running_gateway(cli: Cli, fleet: Fleet) -> None:
    done = cli("get", "replicas", "--config", fleet.gateway.config)
    assert done.code == 0
    assert [line[:2] for line in done.table()[1:]] == [["r1", "up"], ["r2", "up"]]
    items = cli("get", "replicas", "--json", "--config", fleet.gateway.config).items("replicas")
    assert [item["name"] for item in items] == ["r1", "r2"]
    assert items[0]["slots_used"].keys() == {"value", "source", "age_s"}


def test_adapters_and_tenants_of_the_running_gateway(cli: Cli, fleet: Fleet) -> None:
    adapters = cli("get", "adapters", "--config", fleet.gateway.config)
    assert adapters.code == 0
    assert [line[0] for line in adapters.table()[1:]] == list(fleet.adapters)
    tenants = cli("get", "tenants", "--config", fleet.gateway.config)
    assert tenants.code == 0
    assert [line[0] for line in tenants.table()[1:]] == list(TENANTS)
    assert {
        item["name"] for item in cli("get", "tenants", "--json", "--config", fleet.gateway.config).items("tenants")
    } == set(TENANTS)


def test_unknown_figures_of_a_replica_that_is_down_show_as_a_dash(cli: Cli, fleet: Fleet) -> None:
    fleet.emulators[1].kill9()
    eventually(lambda: fleet.gateway.summary()["replicas_up"] == ["r1"], "the loss to be seen")
    done = cli("get", "replicas", "--config", fleet.gateway.config)
    fleet.emulators[1].start()
    eventually(lambda: len(fleet.gateway.summary()["replicas_up"]) == 2, "the replica to be back")
    assert done.code == 0
    assert "None" not in done.out
    down = next(line for line in done.table() if line[0] == "r2")
    assert down[:7] == ["r2", "down", "0", "-", "-", "-", "-/2"]


@pytest.mark.parametrize("what", ["replicas", "adapters", "tenants"])
def test_a_gateway_that_does_not_answer_is_exit_code_4(cli: Cli, written: Path, what: str) -> None:
    done = cli("get", what)
    assert done.code == 4
    assert "no gateway answers at http://127.0.0.1:8081/api" in done.err
    assert "loraledger serve" in done.err


@pytest.fixture
def stranger() -> Iterator[tuple[int, dict[str, Any]]]:
    """A server that is no gateway, and what it answers."""
    answer: dict[str, Any] = {"status": 200, "body": b"<html>"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer["status"])
            self.send_header("Content-Length", str(len(answer["body"])))
            self.end_headers()
            self.wfile.write(answer["body"])

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1], answer
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "complaint"),
    [
        (200, b"<html>", "is not a gateway's control plane"),
        (200, b"[1]", "is not a gateway's control plane"),
        (200, b"{}", "is not a gateway's control plane"),
        (401, b"who are you", "answered 401: who are you"),
    ],
)
def test_something_else_on_the_control_port_is_told(
    cli: Cli,
    tmp_path: Path,
    settings: dict[str, Any],
    stranger: tuple[int, dict[str, Any]],
    status: int,
    body: bytes,
    complaint: str,
) -> None:
    port, answer = stranger
    answer.update(status=status, body=body)
    write(tmp_path / "loraledger.yaml", {**settings, "control": {"port": port}})
    done = cli("get", "replicas")
    assert done.code == 4
    assert complaint in done.err


def test_a_proxy_in_the_environment_is_not_asked_for_the_own_gateway(
    cli: Cli, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert cli("get", "replicas", "--config", fleet.gateway.config).code == 0


def test_what_the_control_plane_was_told_shows_in_the_next_listing(cli: Cli, fleet: Fleet) -> None:
    post(fleet.gateway, "/api/replicas/r2/drain")
    items = cli("get", "replicas", "--json", "--config", fleet.gateway.config).items("replicas")
    post(fleet.gateway, "/api/replicas/r2/undrain")
    assert [item["draining"] for item in items] == [False, True]
    assert json.loads(json.dumps(items)) == items
