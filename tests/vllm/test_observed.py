"""A gateway that knows of the probe inside a real vLLM: residency is observed, commanded, and each row tells how it went inside.

One engine serves the module: 2 slots, 4 host entries, 12 adapters. Each test has a gateway of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loraledger.record.tables import Row
from support.gateway import GatewayProcess

from .beliefs import (
    CLASSES,
    FEW,
    Confusion,
    confusion,
    found_by_engine,
    printed,
    recall,
    send,
    settings_for,
    truths,
    zipf,
)
from .engine import Engine, Model
from .probe_client import KEY, Json, ProbeClient, probed_engine

VARIABLE = "PROBE_KEY_OF_THE_TEST"
MS = 1_000_000


@pytest.fixture(scope="module")
def engine(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with probed_engine(model, tmp_path_factory.mktemp("observed")) as engine:
        yield engine


@pytest.fixture
def probe(engine: Engine, model: Model) -> Iterator[ProbeClient]:
    """The engine without a registered or resident adapter."""
    client = ProbeClient(engine, model)
    client.clear()
    yield client
    client.close()


@pytest.fixture
def gateway(probe: ProbeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayProcess]:
    """A gateway that has the key of the probe, and has heard of it."""
    monkeypatch.setenv(VARIABLE, KEY)
    settings = settings_for(probe.engine.url, probe.model.adapters, probe={"env": VARIABLE})
    with GatewayProcess(tmp_path, settings).start(replicas_up=1) as gateway:
        gateway.wait(lambda: observed(gateway), "the probe to be heard of")
        yield gateway


def replica(gateway: GatewayProcess) -> Json:
    found: Json = gateway.api("/api/replicas/r1")
    return found


def observed(gateway: GatewayProcess) -> bool:
    return bool(replica(gateway)["slots_used"]["source"] == "observed")


def tiers(gateway: GatewayProcess) -> dict[str, str]:
    return {entry["adapter"]: entry["tier"]["value"] for entry in replica(gateway)["adapters"]}


def command(gateway: GatewayProcess, name: str, verb: str) -> None:
    done = httpx2.post(f"{gateway.control}/api/adapters/{name}/{verb}", timeout=10.0)
    assert (done.status_code, done.json()["skipped"]) == (202, {}), done.text


def registered(gateway: GatewayProcess, names: list[str]) -> None:
    """Have all of them loaded, one after another."""
    for name in names:
        command(gateway, name, "load")

    def all_there() -> bool:
        states = {entry["adapter"]: entry["state"]["value"] for entry in replica(gateway)["adapters"]}
        return all(states.get(name) == "registered" for name in names)

    gateway.wait(all_there, "all loads to end")


def row_of_one(gateway: GatewayProcess, name: str) -> Row:
    """Send one request; its row, once that is written."""
    began = time.time_ns()  # rows of earlier requests may still come: they wait for what the engine says of them
    assert send(gateway, [name]) == {200: 1}

    def mine() -> list[Row]:
        return [row for row in rows(gateway) if column(row, "arrived_ns") >= began]

    gateway.wait(lambda: len(mine()) == 1, "the row to be written")
    return mine()[0]


def rows(gateway: GatewayProcess) -> list[Row]:
    found: list[Row] = gateway.api("/api/requests?limit=500")["requests"]
    return found


def column(row: Row, name: str) -> int:
    value: Any = row[name]
    assert isinstance(value, int), (name, row)
    return value


def quantiles(figures: list[float]) -> str:
    cuts = statistics.quantiles(figures, n=100)
    return " ".join(f"p{q} {cuts[q - 1]:.1f}" for q in (1, 10, 50, 90, 99)) + f" max {max(figures):.1f}"


def test_each_row_of_a_zipf_stream_tells_how_it_went_and_its_parts_are_the_time_to_first_token(
    gateway: GatewayProcess, probe: ProbeClient
) -> None:
    assert send(gateway, zipf(list(probe.model.adapters), 120), at_once=3) == {200: 120}
    view = replica(gateway)
    assert (view["slots_used"]["value"], view["slots_used"]["source"]) == (2, "observed")
    assert {entry["tier"]["source"] for entry in view["adapters"]} == {"observed"}
    gateway.wait(lambda: len(rows(gateway)) == 120, "the probe to tell of the last requests")
    gateway.stop()
    written = gateway.rows()
    assert len(written) == 120
    assert {row["engine_access"] for row in written} == set(CLASSES)
    assert {row["hit_source"] for row in written} == {"observed"}
    rest = []
    for row in written:
        assert column(row, "engine_decode_ns") >= 0
        assert (column(row, "engine_load_ns") > 0) == (row["engine_access"] == "disk")
        assert (column(row, "engine_activation_ns") > 0) == (row["engine_access"] != "gpu")
        if row["first_token_ns"] is None:
            continue  # a short answer of this model may be half a character, which is no text
        inside = sum(column(row, f"engine_{part}_ns") for part in ("queue", "stall", "prefill"))
        whole = column(row, "first_token_ns") - column(row, "dispatched_ns")
        assert abs(inside + column(row, "unattributed_ns") - whole) < MS
        if (
            column(row, "first_token_ns") - column(row, "first_byte_ns") < MS
        ):  # else the engine's first token was no text
            rest.append(column(row, "unattributed_ns") / MS)
    print(f"\nunattributed, ms: {quantiles(rest)}")
    sent_on = [row for row in written if row["load_start_ns"] is None]
    print(printed(Confusion((str(row["engine_access"]), str(row["hit_class"])) for row in sent_on)))
    assert len(rest) > 60
    assert min(rest) > 0  # no part is counted twice; how much is left is the machine's affair
    assert min(rest) > -5, "the engine cannot have taken longer than the answer"
    sampled = [row for row in gateway.rows("samples") if row["steps"] is not None]
    assert sum(column(row, "step_tokens") for row in sampled) > 0
    moves = [row for row in gateway.rows("residency") if row["source"] == "observed"]
    assert {row["cause"] for row in moves} >= {"load", "activation", "evicted: lru"}
    assert all(row["took_ns"] for row in moves if row["cause"] in ("load", "activation"))
    assert "identical" in gateway.verify()


def test_a_stop_waits_for_what_the_probe_tells_of_the_last_answers(gateway: GatewayProcess, probe: ProbeClient) -> None:
    assert send(gateway, list(probe.model.adapters)[:3]) == {200: 3}
    gateway.stop()
    assert [row["engine_queue_ns"] is not None for row in gateway.rows()] == [True] * 3


def test_moves_that_an_operator_commands_are_made_and_seen(gateway: GatewayProcess, probe: ProbeClient) -> None:
    names = list(probe.model.adapters)
    registered(gateway, names)
    gateway.wait(lambda: tiers(gateway)["a00"] == "disk", "the loads to be seen")
    command(gateway, "a00", "activate")
    gateway.wait(lambda: tiers(gateway)["a00"] == "gpu", "a00 to be in a slot")
    row = row_of_one(gateway, "a00")
    assert (row["hit_class"], row["hit_source"], row["engine_access"]) == ("gpu", "observed", "gpu")
    assert column(row, "engine_stall_ns") == 0
    command(gateway, "a00", "evict")
    gateway.wait(lambda: tiers(gateway)["a00"] == "disk", "a00 to be gone")
    row = row_of_one(gateway, "a00")
    assert (row["hit_class"], row["engine_access"]) == ("disk", "disk")
    command(gateway, "a03", "pin")
    gateway.wait(
        lambda: [name.partition("@")[0] for name in replica(gateway)["pinned"]] == ["a03"], "the pin to be seen"
    )
    for name in names:
        assert send(gateway, [name]) == {200: 1}
        assert tiers(gateway)["a03"] == "gpu"
    assert row_of_one(gateway, "a03")["engine_access"] == "gpu"
    command(gateway, "a03", "unpin")
    gateway.wait(lambda: replica(gateway)["pinned"] == [], "the pin to be gone")
    assert send(gateway, names[5:9]) == {200: 4}
    gateway.wait(lambda: tiers(gateway)["a03"] != "gpu", "what is no longer pinned to leave")
    gateway.stop()
    assert "identical" in gateway.verify()


def test_a_restart_of_either_side_leads_to_a_new_snapshot(gateway: GatewayProcess, probe: ProbeClient) -> None:
    assert row_of_one(gateway, "a01")["engine_access"] == "gpu", "a load call had put it there"
    gateway.kill9()
    gateway.start(replicas_up=1)
    gateway.wait(lambda: observed(gateway), "the new gateway to hear of the probe")
    assert tiers(gateway)["a01"] == "gpu", "without any request"
    probe.engine.kill9()
    gateway.wait(lambda: not gateway.summary()["replicas_up"], "the death to be seen")
    assert not observed(gateway)
    probe.engine.launch()
    probe.engine.wait_healthy()
    gateway.wait(lambda: observed(gateway), "the new engine's probe to be heard of")
    assert replica(gateway)["slots_used"]["value"] == 0
    row = row_of_one(gateway, "a02")
    assert (row["hit_class"], row["hit_source"], row["engine_access"]) == ("disk", "observed", "gpu")
    gateway.stop()
    assert "identical" in gateway.verify()


def test_belief_without_the_probe_is_right_for_nine_of_ten_requests_of_each_class(
    probe: ProbeClient, tmp_path: Path
) -> None:
    names = list(probe.model.adapters)
    with GatewayProcess(tmp_path, settings_for(probe.engine.url, probe.model.adapters)).start(replicas_up=1) as gateway:
        assert send(gateway, zipf(names, 300), at_once=2) == {200: 300}
        gateway.stop()
        table = confusion(gateway.rows(), found_by_engine(probe.fetch()))
    print(f"\n{printed(table)}")
    assert sum(table.values()) > 200
    for truth in CLASSES:
        assert truths(table, truth) < FEW or recall(table, truth) >= 0.9, f"\n{printed(table)}"
