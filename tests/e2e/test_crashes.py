"""A gateway that is killed: what it had accepted is on record, and what it had learnt is known to the next one."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from support.gateway import GatewayProcess

from .conftest import Pair
from .fleet import (
    PROMPTS,
    TENANTS,
    TOKENS,
    Call,
    Emulator,
    ask,
    by_client,
    check_texts,
    client_of,
    command,
    errors,
    in_flight,
    loads_since,
    make,
    settings_for,
)


async def load_until_killed(gateway: GatewayProcess, models: list[str], after: int, prefix: str) -> list[Call]:
    """Eight clients keep calling until the gateway dies under them, just as the answer to call ``after`` begins.

    Returns the calls whose answer had begun: those were accepted for sure.
    """
    rng = random.Random(prefix)
    accepted: list[Call] = []

    def note(call: Call) -> None:
        accepted.append(call)
        if len(accepted) == after:
            gateway.kill9()

    async def worker(number: int) -> None:
        async with client_of(gateway, TENANTS[number % 3]) as client:
            while len(accepted) < after:
                key = f"{prefix}-{number}-{time.monotonic_ns()}"
                call = Call(key, TENANTS[number % 3], rng.choice(models), rng.choice(PROMPTS), "stream", tokens=120)
                await make(client, call, note)

    await asyncio.wait_for(asyncio.gather(*(worker(number) for number in range(8))), timeout=120)
    return accepted


def learnt(gateway: GatewayProcess) -> dict[str, set[str]]:
    """By replica, the adapters whose load had ended when the journal ended."""
    found: dict[str, set[str]] = {}
    for row in gateway.rows("residency"):
        if row["to_state"] == "registered":
            found.setdefault(str(row["replica"]), set()).add(str(row["adapter"]))
    return found


def test_a_killed_gateway_has_a_row_for_all_that_it_accepted_and_knows_again_what_it_had_learnt(
    tmp_path: Path, slow_pair: Pair, adapters: dict[str, Path]
) -> None:
    gateway = GatewayProcess(tmp_path, settings_for(slow_pair, adapters))
    with gateway.start(replicas_up=2):
        accepted = asyncio.run(load_until_killed(gateway, [*adapters, "base"], 30, "w"))
        before = by_client(gateway.rows())
        assert set(before) >= {call.key for call in accepted}
        open_then = {key for key, row in before.items() if row["status"] == "gateway_crashed"}
        assert open_then
        assert {row["status"] for row in before.values()} == {"ok", "gateway_crashed"}
        assert all(before[key]["finished_ns"] is None for key in open_then)
        known = learnt(gateway)
        assert sum(map(len, known.values())) > 4

        since = time.time_ns()
        gateway.start(replicas_up=2)
        assert set(in_flight(gateway).values()) == {0}
        views = {view["name"]: view for view in gateway.api("/api/replicas")["replicas"]}
        for name, held in known.items():
            registered = {a["adapter"] for a in views[name]["adapters"] if a["state"]["value"] == "registered"}
            assert held <= registered
            assert views[name]["estimates"]["itl_s"]["source"] == "observed"
            assert views[name]["estimates"]["load_ratio"]["n"] > 0
        again = [ask(gateway, adapter) for adapter in sorted(set.union(*known.values()))]
        gateway.stop()
        redundant = [(r, a) for r, a in loads_since(gateway, since) if a in known.get(r, ())]
        after = by_client(gateway.rows())
        assert "identical" in gateway.verify()
    assert errors(again) == []
    check_texts(again, adapters)
    assert redundant == []
    assert set(after) == {*before, *(call.key for call in again)}
    assert {key: after[key]["status"] for key in before} == {key: row["status"] for key, row in before.items()}
    assert {key: after[key]["id"] for key in before} == {key: row["id"] for key, row in before.items()}


def test_several_crashes_in_a_row_lose_no_request(tmp_path: Path, slow_pair: Pair, adapters: dict[str, Path]) -> None:
    gateway = GatewayProcess(tmp_path, settings_for(slow_pair, adapters))
    accepted: list[Call] = []
    with gateway:
        for turn, after in enumerate((1, 10, 5)):
            gateway.start(replicas_up=1)
            accepted += asyncio.run(load_until_killed(gateway, [*adapters, "base"], after, f"turn{turn}"))
        for delay in (0.4, 0.8):  # and two that die while they start
            die_while_starting(gateway, delay)
        rows = by_client(gateway.rows())
        assert set(rows) >= {call.key for call in accepted}
        gateway.start(replicas_up=2)
        last = ask(gateway, "a0")
        gateway.stop()
        after_all = by_client(gateway.rows())
        assert "identical" in gateway.verify()
    assert errors([last]) == []
    assert set(after_all) == {*rows, last.key}
    assert len({row["id"] for row in after_all.values()}) == len(after_all)
    statuses = [row["status"] for row in after_all.values()]
    assert set(statuses) == {"ok", "gateway_crashed"}
    assert statuses.count("gateway_crashed") >= 3


def die_while_starting(gateway: GatewayProcess, delay: float) -> None:
    words = [sys.executable, "-m", "loraledger.cli.main", "serve", "--config", str(gateway.config)]
    with (gateway.folder / "gateway.log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    time.sleep(delay)
    process.kill()
    process.wait()


def test_a_load_that_was_under_way_at_the_crash_holds_nothing_up(tmp_path: Path, adapters: dict[str, Path]) -> None:
    with Emulator(tmp_path, speed=1.0, more=["--load-delay", "2.5"]) as emulator:
        gateway = GatewayProcess(tmp_path, settings_for([emulator], adapters))
        with gateway.start(replicas_up=1):
            waiting = threading.Thread(target=ask, args=(gateway, "a0"))
            waiting.start()
            gateway.wait(lambda: gateway.api("/api/replicas/r1")["loading"] == "a0", "the load to begin")
            gateway.kill9()
            waiting.join()
            gateway.start(replicas_up=1)
            made = [ask(gateway, "a0"), ask(gateway, "a1")]
            assert set(in_flight(gateway).values()) == {0}
            gateway.stop()
            rows = gateway.rows()
            assert "identical" in gateway.verify()
    assert errors(made) == []
    check_texts(made, adapters)
    assert [row["status"] for row in rows] == ["gateway_crashed", "ok", "ok"]


def test_what_a_crash_left_is_the_same_before_and_after_it_became_parquet(
    tmp_path: Path, slow_pair: Pair, adapters: dict[str, Path]
) -> None:
    gateway = GatewayProcess(tmp_path, settings_for(slow_pair, adapters))
    with gateway.start(replicas_up=2):
        asyncio.run(load_until_killed(gateway, list(adapters), 12, "w"))
        gateway.start(replicas_up=2)
        gateway.stop()
        listing = ("get", "requests", "--json", "--limit", "1000", "--record", str(gateway.record))
        from_journal = command(*listing).stdout
        segments = set(gateway.record.glob("journal-*.log"))
        gateway.start(replicas_up=2)  # compacts all that the processes before it have left
        gateway.wait(lambda: not segments & set(gateway.record.glob("journal-*.log")), "the segments to be compacted")
        while_serving = command(*listing).stdout
        gateway.stop()
        from_parquet = command(*listing).stdout
    assert list(gateway.record.rglob("*.parquet"))
    assert '"gateway_crashed"' in from_journal
    assert from_journal.count('"client_id"') >= 12
    assert while_serving == from_journal
    assert from_parquet == from_journal


@pytest.mark.parametrize("change", ["an adapter more", "other slots", "a replica less"])
def test_a_restart_with_other_settings_keeps_what_still_holds(
    tmp_path: Path, pair: Pair, adapters: dict[str, Path], change: str
) -> None:
    old = {name: adapters[name] for name in ("a0", "a1", "a2")}
    with GatewayProcess(tmp_path, settings_for(pair, old)).start(replicas_up=2) as gateway:
        for name in (*old, "base"):
            for _ in range(3):
                assert ask(gateway, name, "stream").error is None
        gateway.stop()
        known = learnt(gateway)
    since = time.time_ns()
    new = adapters if change == "an adapter more" else old
    changed = settings_for(pair if change != "a replica less" else pair[:1], new)
    if change == "other slots":
        changed["replicas"][1].update(slots=3, host_entries=6)
    with GatewayProcess(tmp_path, changed).start(replicas_up=len(changed["replicas"])) as gateway:
        views = {view["name"]: view for view in gateway.api("/api/replicas")["replicas"]}
        for name, view in views.items():
            unknown = {a["adapter"]: a["tier"]["value"] is None for a in view["adapters"]}
            forgotten = change == "other slots" and name == "r2"
            assert unknown == dict.fromkeys(known.get(name, ()), forgotten), "names are found again, tiers if they hold"
        assert {view["estimates"]["itl_s"]["source"] for view in views.values()} == {"observed"}
        made = [ask(gateway, name) for name in new]
        gateway.stop()
        redundant = [(r, a) for r, a in loads_since(gateway, since) if a in known.get(r, ())]
        rows = gateway.rows()
    assert errors(made) == []
    check_texts(made, adapters)
    assert redundant == []
    assert len(rows) == 12 + len(made)
    assert len({row["config_digest"] for row in rows}) == 2
    assert all(row["generated_tokens"] == TOKENS for row in rows)
