"""Changes on a fleet of processes: accepted or taken back by the gateway alone, and through every death of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx2
import pytest

from loraledger.kernel.rendezvous import seed_of, weight
from loraledger.operate.journal import read_entries
from loraledger.operate.population import treated
from operate.changes import evidence
from support.gateway import GatewayProcess, replica, tenant

from .conftest import Pair
from .fleet import Emulator, post, settings_for, write_adapters
from .probed import PROBE_KEY

SECOND = 10**9
TENANTS = ("acme", "birch", "cedar", "delta")
WHO = {"who": "eve", "why": "to see"}
MEMBERS = treated(TENANTS, 0.75, "c1")
TESTS = Path(__file__).parents[1]
LIMIT_S = 240.0


class Probed(Emulator):
    """An emulated replica as a process, with a probe in it; small enough to run out of KV blocks."""

    def __init__(self, folder: Path, *, speed: float, kv_blocks: int) -> None:
        super().__init__(folder, speed=speed)
        self._more = ["--speed", str(speed), "--kv-blocks", str(kv_blocks), "--max-model-len", str(16 * kv_blocks)]

    def start(self) -> Self:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "e2e.probed", "--port", str(self.port), *self._more]
            environment = {**os.environ, "PYTHONPATH": str(TESTS)}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return self


def homes(names: list[str]) -> dict[str, list[str]]:
    """By replica, the adapters that strict affinity sends there."""
    found: dict[str, list[str]] = {"r1": [], "r2": []}
    for name in names:
        found[max(found, key=lambda where: weight(seed_of(name), seed_of(where)))].append(name)
    return found


def fleet(pair: Pair, paths: dict[str, Path], **more: Any) -> dict[str, Any]:
    tenants = [tenant(name, ["*"]) for name in TENANTS]
    return settings_for(pair, paths, tenants=tenants, policy={"name": "round-robin"}, **more)


def proposal(**fields: Any) -> dict[str, Any]:
    plain = {
        "variable": "policy",
        "before": "round-robin",
        "after": "strict-affinity",
        "target": {"metric": "hit_rate", "least": 0.02},
        "guardrails": [{"metric": "refused", "worse_by": 0.1}],
        "window_ns": 1800 * SECOND,
        "block_ns": 2 * SECOND,
        "share": 0.75,
    }
    return {**WHO, **plain, **fields}


def roll_out(gateway: GatewayProcess, **fields: Any) -> str:
    """Propose it, attach a replay, and begin; its id."""
    name: str = post(gateway, "/api/changes", proposal(**fields))["change"]["id"]
    post(gateway, f"/api/changes/{name}/replay", {**WHO, "evidence": evidence()})
    with contextlib.suppress(httpx2.TransportError):  # some die of it
        assert post(gateway, f"/api/changes/{name}/rollout", WHO)["members"] == list(MEMBERS)
    return name


def state(gateway: GatewayProcess, name: str = "c1") -> str:
    return str(gateway.api(f"/api/changes/{name}")["change"]["state"])


def policies(gateway: GatewayProcess, model: str) -> dict[str, str]:
    """Under which policy a request of each tenant is decided now."""
    keys = {name: f"{name}-{time.monotonic_ns()}" for name in TENANTS}
    for name, key in keys.items():
        body = {"model": model, "prompt": "Hello", "max_tokens": 1}
        head = {"Authorization": f"Bearer key-{name}", "X-Request-Id": key}
        httpx2.post(f"{gateway.url}/v1/completions", json=body, headers=head, timeout=60.0).raise_for_status()

    def rows() -> dict[str, str]:  # with a probe they come a moment later
        recent = gateway.api("/api/requests?limit=100")["requests"]
        return {row["tenant"]: row["policy"] for row in recent if row["client_id"] in keys.values()}

    gateway.wait(lambda: len(rows()) == len(TENANTS), "the rows")
    return rows()


BEFORE = dict.fromkeys(TENANTS, "round-robin")
TRIED = BEFORE | dict.fromkeys(MEMBERS, "strict-affinity")
AFTER = dict.fromkeys(TENANTS, "strict-affinity")


@asynccontextmanager
async def traffic(
    gateway: GatewayProcess, kinds: list[tuple[list[str], int, int]], pause_s: float
) -> AsyncIterator[None]:
    """Clients of every tenant that ask, one request after the other, whatever becomes of them.

    ``kinds``: models to draw from, tokens of the answers, and clients a tenant. At the end each has its last answer: a call that
    is cancelled while it connects leaves a socket behind.
    """
    over = asyncio.Event()

    async def client(name: str, models: list[str], tokens: int, seed: int) -> None:
        chance = random.Random(f"{name} {seed}")
        head = {"Authorization": f"Bearer key-{name}"}
        async with httpx2.AsyncClient(base_url=gateway.url, headers=head, timeout=60.0, trust_env=False) as ask:
            while not over.is_set():
                body = {"model": chance.choice(models), "prompt": "Hello, world", "max_tokens": tokens}
                with contextlib.suppress(httpx2.TransportError):
                    await ask.post("/v1/completions", json=body)
                await asyncio.sleep(pause_s * chance.uniform(0.5, 1.5))

    async with asyncio.TaskGroup() as group:
        for name in TENANTS:
            for models, tokens, count in kinds:
                for seed in range(count):
                    group.create_task(client(name, models, tokens, seed))
        yield
        over.set()


async def until(gateway: GatewayProcess, condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(gateway.wait, condition, what, LIMIT_S)


async def usual(blocks: int) -> None:
    """Let the time pass by which both parts are known before the change: the noisier a figure, the longer."""
    await asyncio.sleep(2 * blocks)


async def test_a_good_change_is_accepted_through_a_death_in_its_middle_and_one_at_its_end(
    tmp_path: Path, pair: Pair, adapters: dict[str, Path]
) -> None:
    home = homes(list(adapters))
    models = home["r1"][:2] + home["r2"][:2]
    gateway = GatewayProcess(tmp_path, fleet(pair, adapters))
    with gateway.start(replicas_up=2):
        async with traffic(gateway, [(models, 4, 2)], 0.1):
            await usual(12)
            name = roll_out(gateway)

            def blocks() -> int:
                verdict = gateway.api(f"/api/changes/{name}")["verdict"]
                return 0 if verdict is None else int(verdict["blocks"])

            await until(gateway, lambda: blocks() >= 3 or state(gateway) != "rolling_out", "some blocks")
            before = gateway.api(f"/api/changes/{name}")
            gateway.kill9()
            gateway.program = [str(TESTS / "e2e/doomed.py"), "accept written"]
            await asyncio.to_thread(gateway.start, 2)
            dead = gateway.process
            assert dead is not None
            for _ in range(round(LIMIT_S / 0.1)):
                if dead.poll() is not None:
                    break
                await asyncio.sleep(0.1)
            entries = read_entries(gateway.record / "changes")
            assert entries[-1].kind == "accept", gateway.log()[-3000:]
            gateway.program = ["-m", "loraledger.cli.main"]
            await asyncio.to_thread(gateway.start, 2)
        view = gateway.api(f"/api/changes/{name}")
        assert policies(gateway, models[0]) == AFTER
        gateway.stop()
        assert "identical" in gateway.verify()
    assert (view["change"]["state"], view["held"]) == ("accepted", True)
    assert view["change"]["began_ns"] == before["change"]["began_ns"]
    assert view["verdict"]["blocks"] > before["verdict"]["blocks"] >= 3
    reading = view["verdict"]["readings"][0]
    assert (reading["metric"], reading["called"]) == ("hit_rate", "above")
    assert reading["bounds"]["blocks"] > 3
    tried = {row["tenant"] for row in gateway.rows() if row["change_id"] == name}
    assert tried == set(MEMBERS)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Pair]:
    """Two probed replicas that hold two long answers each, and no more."""
    with ExitStack() as stack:
        found = [stack.enter_context(Probed(tmp_path, speed=4.0, kv_blocks=48)) for _ in range(2)]
        yield found[0], found[1]


async def test_more_hits_but_more_preemptions_is_taken_back_without_help_and_all_is_as_before(
    tmp_path: Path, small: Pair
) -> None:
    paths = write_adapters(tmp_path / "adapters", [f"a{number}" for number in range(8)])
    home = homes(list(paths))
    models, hot = home["r1"][:2] + home["r2"][:2], home["r1"][:1]
    (tmp_path / "key").write_text(PROBE_KEY, encoding="utf-8")
    probe = {"file": str(tmp_path / "key")}
    replicas = [replica(f"r{n}", one.url, engine="emulator", probe=probe) for n, one in enumerate(small, 1)]
    gateway = GatewayProcess(tmp_path, fleet(small, paths, replicas=replicas))
    with gateway.start(replicas_up=2):
        before = policies(gateway, models[0])
        async with traffic(gateway, [(models, 4, 4), (hot, 320, 2)], 0.1):
            await usual(35)
            guardrails = [{"metric": "preemptions", "worse_by": 10.0}]
            name = roll_out(gateway, guardrails=guardrails)
            await until(gateway, lambda: state(gateway) != "rolling_out", "the verdict")
        view = gateway.api(f"/api/changes/{name}")
        after = policies(gateway, models[0])
        gateway.stop()
        assert "identical" in gateway.verify()
    change = view["change"]
    assert change["state"] == "rolled_back"
    assert change["reason"].startswith("guardrail preemptions is worse by"), change["reason"]
    assert view["entries"][-1]["who"] == "gateway"
    assert change["ended_ns"] < change["began_ns"] + change["window_ns"]
    hits, preemptions = view["verdict"]["readings"]
    assert hits["treated"] > hits["control"]
    assert preemptions["treated"] > preemptions["control"] + 10
    assert after == before == BEFORE
    rows = gateway.rows()
    assert {row["policy"] for row in rows if row["change_id"] == name} == {"strict-affinity"}
    assert {row["tenant"] for row in rows if row["change_id"] == name} == set(MEMBERS)
    assert {row["policy"] for row in rows if row["change_id"] is None and row["policy"]} == {"round-robin"}


@pytest.mark.parametrize(
    ("moment", "then", "decided"),
    [
        ("roll_out half", "replayed", BEFORE),
        ("roll_out written", "rolling_out", TRIED),
        ("roll_out told", "rolling_out", TRIED),
        ("roll_back half", "rolling_out", TRIED),
        ("roll_back written", "rolled_back", BEFORE),
    ],
)
def test_a_death_at_any_moment_leaves_the_journal_and_the_way_back(
    tmp_path: Path, pair: Pair, adapters: dict[str, Path], moment: str, then: str, decided: dict[str, str]
) -> None:
    gateway = GatewayProcess(tmp_path, fleet(pair, adapters))
    gateway.program = [str(TESTS / "e2e/doomed.py"), moment]
    with gateway.start(replicas_up=2):
        name = roll_out(gateway)
        if moment.startswith("roll_back"):
            with pytest.raises(httpx2.TransportError):
                post(gateway, f"/api/changes/{name}/rollback", WHO)
        assert gateway.process is not None
        assert gateway.process.wait(timeout=60) == -9
        gateway.program = ["-m", "loraledger.cli.main"]
        gateway.start(replicas_up=2)
        assert state(gateway) == then
        assert policies(gateway, "a0") == decided
        if then == "replayed":
            post(gateway, f"/api/changes/{name}/rollout", WHO)
            assert policies(gateway, "a0") == TRIED
        if then != "rolled_back":
            assert post(gateway, f"/api/changes/{name}/rollback", WHO)["change"]["state"] == "rolled_back"
        assert policies(gateway, "a0") == BEFORE
        gateway.stop()
        assert "identical" in gateway.verify()
