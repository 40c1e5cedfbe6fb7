"""Replicas that are killed, poisoned, pinned to and drained, with traffic on them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path

from support.gateway import GatewayProcess, tenant

from .conftest import Pair
from .fleet import (
    LONG,
    Call,
    ask,
    by_client,
    check_texts,
    errors,
    eventually,
    in_flight,
    mixed,
    play,
    post,
    settings_for,
    write_adapters,
)


def test_a_killed_replica_loses_only_what_had_begun_to_stream_and_serves_again_on_the_same_port(
    tmp_path: Path, pair: Pair, adapters: dict[str, Path]
) -> None:
    victim = pair[1]

    def kill_at(number: int) -> None:
        if number == 60:
            victim.kill9()

    with GatewayProcess(tmp_path, settings_for(pair, adapters)).start(replicas_up=2) as gateway:
        during = asyncio.run(play(gateway, mixed(list(adapters), 160, seed=1), 16, kill_at))
        assert [call for call in during if call.error is not None and not call.text] == []
        gateway.wait(lambda: gateway.summary()["replicas_up"] == ["r1"], "the killed replica to be seen down")
        victim.start()
        gateway.wait(lambda: len(gateway.summary()["replicas_up"]) == 2, "the restarted replica to be seen")
        after = asyncio.run(play(gateway, mixed([*adapters, "base"], 80, seed=2, prefix="after")))
        assert set(in_flight(gateway).values()) == {0}
        gateway.stop()
        rows = by_client(gateway.rows())
        verified = gateway.verify()
    check_texts([*during, *after], adapters)
    assert errors(after) == []
    assert len(rows) == 240
    broken = {call.key for call in during if call.error is not None}
    assert {key for key, row in rows.items() if row["status"] != "ok"} == broken
    assert {rows[call.key]["replica"] for call in after} == {"r1", "r2"}
    assert "identical" in verified


def test_streams_on_a_killed_replica_end_with_an_error_and_a_row(
    tmp_path: Path, slow_pair: Pair, adapters: dict[str, Path]
) -> None:
    begun: list[Call] = []

    def kill_when_all_stream(call: Call) -> None:
        begun.append(call)
        if len(begun) == 6:
            slow_pair[0].kill9()

    calls = [Call(f"s{n}", "acme", "base", f"prompt {n}", "stream", tokens=450) for n in range(6)]
    with GatewayProcess(tmp_path, settings_for(slow_pair, adapters)).start(replicas_up=2) as gateway:
        made = asyncio.run(play(gateway, calls, began=kill_when_all_stream))
        gateway.stop()
        rows = by_client(gateway.rows())
    check_texts(made, adapters)
    lost = {call.key for call in made if call.error is not None}
    assert 0 < len(lost) < 6
    assert {key for key, row in rows.items() if row["replica"] == "r1"} >= lost
    assert {row["status"] for key, row in rows.items() if key in lost} == {"upstream_reset"}
    assert {row["status"] for key, row in rows.items() if key not in lost} == {"ok"}


def test_an_adapter_whose_copy_vanishes_kills_one_replica_at_most_and_is_parked(tmp_path: Path, pair: Pair) -> None:
    adapters = write_adapters(tmp_path / "adapters", ["doomed", *(f"a{n}" for n in range(6))])
    others = [name for name in adapters if name != "doomed"]
    with GatewayProcess(tmp_path, settings_for(pair, adapters)).start(replicas_up=2) as gateway:
        for spared in ("r1", "r2"):  # each registers it, then forgets its bytes: six others pass through four places
            post(gateway, f"/api/replicas/{spared}/drain")
            for name in adapters:
                assert ask(gateway, name).error is None
            post(gateway, f"/api/replicas/{spared}/undrain")
        gateway.lose_copy(adapters["doomed"])
        calls = mixed(others, 12, seed=3)
        calls[6:6] = [Call(f"poison{n}", "acme", "doomed", "Hello", kind) for n, kind in enumerate(("plain", "stream"))]
        made = asyncio.run(play(gateway, calls, at_once=14))
        gateway.wait(lambda: gateway.api("/api/adapters/doomed")["parked"] is not None, "the adapter to be parked")
        time.sleep(0.5)  # were a second replica poisoned, it would be gone by now
        assert sorted(emulator.alive() for emulator in pair) == [False, True]
        refused = ask(gateway, "doomed")
        again = [ask(gateway, name) for name in others]
        assert set(in_flight(gateway).values()) == {0}
        gateway.stop()
        rows = by_client(gateway.rows())
        assert "identical" in gateway.verify()
    poisoned = [call for call in made if call.model == "doomed"]
    bystanders = [call for call in made if call.model != "doomed"]
    assert all(call.error is not None for call in poisoned)
    assert refused.error is not None
    assert "parked" in refused.error
    assert [call for call in bystanders if call.error is not None and not call.text] == []
    assert errors(again) == []
    assert len(rows) == 2 * len(adapters) + len(calls) + 1 + len(again)


def test_a_pinned_adapter_is_on_both_replicas_before_any_request_and_again_after_a_restart(
    tmp_path: Path, pair: Pair, adapters: dict[str, Path]
) -> None:
    entries = [{"name": name, "path": str(path), "pin": name == "a0"} for name, path in adapters.items()]
    settings = settings_for(pair, adapters, adapters={"list": entries})
    with GatewayProcess(tmp_path, settings).start(replicas_up=2) as gateway:

        def held_on_both() -> bool:
            ready: str = gateway.api("/api/adapters/a0")["ready"]
            return ready == "2/2" and all(len(emulator.registered()) == 1 for emulator in pair)

        gateway.wait(held_on_both, "the pinned adapter to be held on both replicas")
        pair[1].kill9()
        gateway.wait(lambda: gateway.api("/api/adapters/a0")["ready"] == "1/2", "the loss to be noticed")
        pair[1].start()
        gateway.wait(lambda: len(gateway.summary()["replicas_up"]) == 2, "the restarted replica to be seen")
        gateway.wait(held_on_both, "the pinned adapter to be back without traffic")
        assert gateway.rows() == []
        assert ask(gateway, "a0").error is None
        gateway.stop()
        (row,) = gateway.rows()
        assert row["hit_class"] == "gpu"


def test_draining_a_replica_moves_traffic_and_lets_its_streams_end(
    tmp_path: Path, slow_pair: Pair, adapters: dict[str, Path]
) -> None:
    streams = [Call(f"s{n}", "acme", "base", f"prompt {n}", "stream", tokens=100) for n in range(6)]
    begun: list[Call] = []

    def drain_when_all_stream(call: Call) -> None:
        begun.append(call)
        if len(begun) == len(streams):
            post(gateway, "/api/replicas/r1/drain")

    with GatewayProcess(tmp_path, settings_for(slow_pair, adapters)).start(replicas_up=2) as gateway:
        made = asyncio.run(play(gateway, streams, began=drain_when_all_stream))
        moved = asyncio.run(play(gateway, mixed(["a0", "a1", "base"], 12, seed=4, prefix="moved")))
        assert gateway.api("/api/replicas/r1")["draining"]
        post(gateway, "/api/replicas/r1/undrain")
        back = asyncio.run(play(gateway, mixed(["base"], 12, seed=5, prefix="back")))
        gateway.stop()
        rows = by_client(gateway.rows())
    assert errors([*made, *moved, *back]) == []
    assert {rows[call.key]["replica"] for call in streams} == {"r1", "r2"}
    assert Counter(rows[call.key]["replica"] for call in moved) == {"r2": 12}
    assert {rows[call.key]["replica"] for call in back} == {"r1", "r2"}


def test_without_any_replica_requests_wait_to_their_deadline_and_are_served_when_one_is_back(
    tmp_path: Path, pair: Pair, adapters: dict[str, Path]
) -> None:
    tenants = [
        tenant(name, ["*"], limits={"queue_deadline": wait}) for name, wait in (("acme", "300ms"), ("birch", "30s"))
    ]
    with GatewayProcess(tmp_path, settings_for(pair, adapters, tenants=tenants)).start(replicas_up=2) as gateway:
        for emulator in pair:
            emulator.kill9()
        gateway.wait(lambda: gateway.summary()["replicas_up"] == [], "both to be seen down")
        calls = [Call(f"hasty{n}", "acme", model, "Hello", "plain") for n, model in enumerate(("a0", "base"))]
        calls += [Call(f"patient{n}", "birch", model, "Hello", "stream") for n, model in enumerate(("a0", "base"))]

        def start_when_only_the_patient_wait() -> None:
            def given_up() -> int:
                rows = gateway.api("/api/requests")["requests"]
                return sum(row["status"] == "rejected" for row in rows)

            eventually(lambda: given_up() == gateway.summary()["queued_requests"] == 2, "the hasty to be refused")
            time.sleep(0.6)
            pair[0].start()

        started = threading.Thread(target=start_when_only_the_patient_wait)
        started.start()
        made = asyncio.run(play(gateway, calls))
        started.join()
        assert set(in_flight(gateway).values()) == {0}
        gateway.stop()
        rows = by_client(gateway.rows())
    hasty, patient = made[:2], made[2:]
    assert all("503" in str(call.error) for call in hasty), hasty
    assert errors(patient) == []
    check_texts(patient, adapters)
    assert [(rows[call.key]["status"], rows[call.key]["http_status"]) for call in hasty] == [("rejected", 503)] * 2
    assert all(int(str(rows[call.key]["queued_ns"])) > 0.5e9 for call in patient)


def test_an_unread_stream_that_is_cancelled_leaves_the_replica_idle(
    tmp_path: Path, slow_pair: Pair, adapters: dict[str, Path]
) -> None:
    calls = [Call(f"x{n}", "acme", "a0", "Hello", "cancelled", tokens=LONG) for n in range(8)]
    with GatewayProcess(tmp_path, settings_for(slow_pair, adapters)).start(replicas_up=2) as gateway:
        asyncio.run(play(gateway, calls))
        eventually(lambda: sum(emulator.metrics()["running"] for emulator in slow_pair) == 0, "the engines")
        eventually(lambda: set(in_flight(gateway).values()) == {0}, "the gateway's counts")
        assert Counter(row["status"] for row in gateway.rows()) == {"client_gone": 8}


def test_a_request_on_a_replica_that_hangs_is_answered_by_another(
    tmp_path: Path, slow_pair: Pair, adapters: dict[str, Path]
) -> None:
    limits = {"scrape_interval": "200ms", "upstream_lost_after": "500ms"}
    with GatewayProcess(tmp_path, settings_for(slow_pair, adapters, limits=limits)).start(replicas_up=2) as gateway:
        post(gateway, "/api/replicas/r2/drain")
        call = Call("hung", "acme", "base", "a question", "plain", tokens=450)
        sent = threading.Thread(target=lambda: asyncio.run(play(gateway, [call])))
        sent.start()
        eventually(lambda: in_flight(gateway)["replica r1"] == 1, "the request to be there")
        slow_pair[0].hang()
        post(gateway, "/api/replicas/r2/undrain")
        sent.join(timeout=60)
        assert set(in_flight(gateway).values()) == {0}
        gateway.stop()
        (row,) = gateway.rows()
    check_texts([call], adapters)
    assert call.error is None
    assert (row["status"], row["replica"], row["retries"]) == ("ok", "r2", 1)
