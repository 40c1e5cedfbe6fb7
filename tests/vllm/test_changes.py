"""Changes of the policy on two real engines, tried on half of the tenants by a gateway that decides alone, and that is killed.

Theory of operation. The settings say least-loaded, which takes every adapter to both engines: four adapters pass through the two
slots of each, and about half of the requests find theirs. Strict affinity gives each engine two adapters for its two slots. Users
ask, wait for the answer, pause as long as it took, and ask again, so that arrivals adapt to the machine; a block of the trial is as
long as both parts of the tenants need for some requests, measured before it begins. Nothing else here is a time.

- good: short answers. Every request needs one KV block, and there are fewer users than blocks, so nothing is ever preempted.
- greedy: also ``LONG`` users who fill four KV blocks each, most of them of the tenants who get the change, and all with one
  adapter. Spread over both engines they fit. At the one home of the adapter they do not, and engines preempt.
- killed: as good, with a target that nothing meets.

What happened is told by the engines: their metrics of preemptions, and their probes on where each request found its adapter.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loraledger.conductor.reading import last_state
from loraledger.kernel.rendezvous import seed_of, weight
from loraledger.kernel.rollout_state import Rollout
from loraledger.operate.journal import read_entries
from loraledger.operate.population import treated
from loraledger.record.tables import Row
from operate.changes import evidence
from support.gateway import GatewayProcess, replica, tenant

from .beliefs import found_by_engine
from .engine import Engine, Model
from .probe_client import KEY, ProbeClient
from .staging import VARIABLE, Watch, staged_engine

SECOND = 10**9
TENANTS = ("acme", "birch", "cedar", "delta")
MEMBERS = treated(TENANTS, 0.5, "c1")
REST = tuple(name for name in TENANTS if name not in MEMBERS)
WHO = {"who": "eve", "why": "each engine keeps its own adapters"}
OLD, NEW = "least-loaded", "strict-affinity"
BEFORE, AFTER = dict.fromkeys(TENANTS, OLD), dict.fromkeys(TENANTS, NEW)
TRIED = BEFORE | dict.fromkeys(MEMBERS, NEW)

SEATS, KV_BLOCKS, BLOCK_TOKENS = 16, 28, 32
"""Of each engine; one of the blocks is the engine's own."""
FEW_BLOCKS = (
    *("--num-gpu-blocks-override", str(KV_BLOCKS), "--block-size", str(BLOCK_TOKENS)),
    *("--max-model-len", str(BLOCK_TOKENS * KV_BLOCKS // 2)),
)
SHORT, LONG = (24, 4), (3 * BLOCK_TOKENS - 4, 12)
"""Tokens of prompt and answer: within one KV block, and just into a fourth."""
ENOUGH, BLOCKS = 12, 12
"""Requests of either part in a block, and blocks that are played before a change is tried."""
MOST = 0.8
"""Share of requests that strict affinity sends home, at least: all but those that find no room for their tokens there."""
PATIENCE_S = 400.0
"""Longest wait for what a change comes to."""


def home(adapter: str) -> str:
    """Where strict affinity sends it."""
    return max(("r1", "r2"), key=lambda name: weight(seed_of(adapter), seed_of(name)))


# --- stage ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class User:
    """Asks for one of ``models`` by chance. ``size``: tokens of prompt and answer; ``pause``: times the duration of an answer."""

    tenant: str
    models: list[str]
    size: tuple[int, int]
    pause: float


@dataclass
class Stage:
    """A gateway in front of the engines, users at it, and what the engines say."""

    gateway: GatewayProcess
    probes: dict[str, ProbeClient]
    adapters: list[str]
    """Four: two of each replica's."""
    ends: list[tuple[int, str]] = field(default_factory=list)
    """When each answer was there, and whose."""
    mortal: bool = False
    """Whether the gateway is killed: what users lose by that is no error."""

    def users(self) -> list[User]:
        """Of all adapters; most are of the tenants who get the change."""
        return [*each(MEMBERS, 3, self.adapters, SHORT), *each(REST, 1, self.adapters, SHORT)]

    @asynccontextmanager
    async def traffic(self, users: list[User]) -> AsyncIterator[None]:
        """Have them ask until the end of ``with``, and wait until all have ended."""
        over, numbers = asyncio.Event(), itertools.count()

        async def act(user: User, chance: random.Random) -> None:
            head = {"Authorization": f"Bearer key-{user.tenant}"}
            async with httpx2.AsyncClient(
                base_url=self.gateway.url, headers=head, timeout=300.0, trust_env=False
            ) as http:
                while not over.is_set():
                    began, (prompt, tokens) = time.monotonic(), user.size
                    words = f"{next(numbers)} {user.tenant} ".ljust(prompt, "x")
                    body = {"model": chance.choice(user.models), "prompt": words, "max_tokens": tokens}
                    try:
                        reply = await http.post("/v1/completions", json={**body, "ignore_eos": True, "temperature": 0})
                        assert reply.status_code == 200 or self.mortal, reply.text
                        self.ends.append((time.time_ns(), user.tenant))
                    except httpx2.TransportError:
                        assert self.mortal
                    pause = user.pause * chance.uniform(0.5, 1.5) * (time.monotonic() - began)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(over.wait(), pause)

        async with asyncio.TaskGroup() as group:
            for number, user in enumerate(users):
                group.create_task(act(user, random.Random(number)))
            try:
                yield
            finally:
                over.set()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        await asyncio.to_thread(self.gateway.wait, condition, what, PATIENCE_S)

    async def more(self, count: int) -> None:
        """Wait until both parts had so many more answers."""
        had = len(self.ends)

        def fewest() -> int:
            counts = Counter(name in MEMBERS for _, name in self.ends[had:])
            return min(counts[True], counts[False])

        await self.until(lambda: fewest() >= count, f"{count} more answers")

    async def usual(self, enough: int) -> int:
        """Let the time before a change pass; the length of its blocks, ns, in which both parts have ``enough`` answers."""
        await self.more(ENOUGH)
        began = time.monotonic_ns()
        await self.more(2 * enough)
        block = max(SECOND, (time.monotonic_ns() - began) // 2)
        await asyncio.sleep(BLOCKS * block / SECOND)
        return block

    # --- the change ---

    def post(self, path: str, body: dict[str, Any]) -> Any:
        reply = httpx2.post(f"{self.gateway.control}{path}", json={**WHO, **body}, timeout=30.0)
        return reply.raise_for_status().json()

    def roll_out(self, block_ns: int, target: dict[str, Any], guardrails: list[dict[str, Any]]) -> None:
        """Propose c1, attach what a replay found, and begin."""
        body = {"variable": "policy", "after": NEW, "target": target, "guardrails": guardrails, "share": 0.5}
        said = self.post("/api/changes", {**body, "window_ns": 3600 * SECOND, "block_ns": block_ns})["change"]
        assert (said["id"], said["before"]) == ("c1", OLD)
        self.post("/api/changes/c1/replay", {"evidence": evidence()})
        assert self.post("/api/changes/c1/rollout", {})["members"] == list(MEMBERS)

    def change(self) -> Any:
        return self.gateway.api("/api/changes/c1")

    def state(self) -> str:
        return str(self.change()["change"]["state"])

    def blocks(self) -> int:
        """Blocks that were judged."""
        verdict = self.change()["verdict"]
        return 0 if verdict is None else int(verdict["blocks"])

    def policies(self) -> dict[str, str]:
        """Under which policy a request of each tenant is decided now."""
        found = {}
        for name in TENANTS:
            key = f"policy-{name}-{time.monotonic_ns()}"
            head = {"Authorization": f"Bearer key-{name}", "X-Request-Id": key}
            body = {"model": self.adapters[0], "prompt": "Hello", "max_tokens": 1}
            reply = httpx2.post(f"{self.gateway.url}/v1/completions", json=body, headers=head, timeout=300.0)
            reply.raise_for_status()
            mine = list[Row]()

            def came(name: str = name, key: str = key, mine: list[Row] = mine) -> bool:
                rows = self.gateway.api(f"/api/requests?tenant={name}&limit=50")["requests"]
                mine[:] = [row for row in rows if row["client_id"] == key and row["policy"] is not None]
                return bool(mine)

            self.gateway.wait(came, "the row")
            found[name] = str(mine[0]["policy"])
        return found

    def seen(self) -> dict[str, tuple[str, str]]:
        """By request: the engine that answered it, and the tier in which that found the adapter; in the engines' words."""
        found = dict[str, tuple[str, str]]()
        for name, probe in self.probes.items():
            probe.fetch()
            found |= {request: (name, tier) for request, tier in found_by_engine(probe.events).items()}
        return found

    def told(self, tenants: Iterable[str], since_ns: int, until_ns: int) -> list[tuple[str, str]]:
        """The same of the requests of these that arrived then: whether it was the adapter's home, and the tier."""
        seen, found = self.seen(), list[tuple[str, str]]()
        for row in self.gateway.rows():
            if str(row["tenant"]) in tenants and since_ns <= _arrived(row) < until_ns and str(row["id"]) in seen:
                engine, tier = seen[str(row["id"])]
                found.append(("home" if engine == home(str(row["adapter"])) else "away", tier))
        assert len(found) >= ENOUGH
        return found

    def hits(self, tenants: Iterable[str], since_ns: int, until_ns: int) -> float:
        """Of those requests, the share that found its adapter in a slot."""
        tiers = [tier for _, tier in self.told(tenants, since_ns, until_ns)]
        return tiers.count("gpu") / len(tiers)

    def at_home(self, tenants: Iterable[str], since_ns: int, until_ns: int) -> float:
        """Of those requests, the share that the engine at its adapter's home answered."""
        places = [where for where, _ in self.told(tenants, since_ns, until_ns)]
        return places.count("home") / len(places)

    def tried_on(self) -> set[object]:
        """Whose requests were decided under the change."""
        rows = [row for row in self.gateway.rows() if row["change_id"] == "c1"]
        assert {row["policy"] for row in rows} == {NEW}
        return {row["tenant"] for row in rows}

    def limits(self) -> list[dict[str, object]]:
        """What the gateway holds of each tenant, without what counts its traffic."""
        counts = ("rate", "active", "queued")
        entries = self.gateway.api("/api/tenants")["tenants"]
        return [{name: value for name, value in entry.items() if name not in counts} for entry in entries]

    def rollouts(self) -> dict[str, Rollout]:
        """What the kernel holds, once the gateway has stopped."""
        last = last_state(self.gateway.record)
        assert last is not None
        return last[0].state.rollouts


def each(tenants: Iterable[str], count: int, models: list[str], size: tuple[int, int], pause: float = 1) -> list[User]:
    """So many users of each tenant."""
    return [User(name, models, size, pause) for name in tenants for _ in range(count)]


def _arrived(row: Row) -> int:
    arrived = row["arrived_ns"]
    assert isinstance(arrived, int)
    return arrived


@pytest.fixture(scope="module")
def engines(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Two of them, with few KV blocks and the probe."""
    folder = tmp_path_factory.mktemp("changes")
    found = {name: staged_engine(model, folder / name, *FEW_BLOCKS, seats=SEATS) for name in ("r1", "r2")}
    with ExitStack() as stack:
        for engine in found.values():
            stack.callback(engine.stop)
            engine.launch()
        for engine in found.values():
            engine.wait_healthy()
        yield found


@pytest.fixture
def stage(engines: dict[str, Engine], model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A new gateway, engines without adapters, and nothing changed."""
    monkeypatch.setenv(VARIABLE, KEY)
    by_home = sorted(model.adapters, key=home)
    adapters = [*by_home[:2], *by_home[-2:]]
    seating = {"max_seqs": SEATS, "max_in_flight": 4096, "probe": {"env": VARIABLE}}
    settings = {
        "base": {"names": ["base"]},
        "replicas": [replica(name, engine.url, **seating) for name, engine in engines.items()],
        "adapters": {"list": [{"name": name, "path": str(model.adapters[name])} for name in adapters]},
        "tenants": [tenant(name, adapters) for name in TENANTS],
        "policy": {"name": OLD},
        "limits": {"scrape_interval": "500ms"},
    }
    gateway = GatewayProcess(tmp_path, settings)
    probes = {name: ProbeClient(engine, model) for name, engine in engines.items()}
    with ExitStack() as stack:
        for probe in probes.values():
            stack.callback(probe.close)
            probe.clear()
        stack.enter_context(gateway.start(replicas_up=2))
        heard = [f"/api/replicas/{name}" for name in engines]
        gateway.wait(
            lambda: all(gateway.api(path)["slots_used"]["source"] == "observed" for path in heard), "the probes"
        )
        yield Stage(gateway, probes, adapters)


# --- tests ------------------------------------------------------------------------------------------------------------


async def test_a_change_that_is_good_is_accepted_and_holds_for_all(stage: Stage) -> None:
    watches = [Watch(probe.engine) for probe in stage.probes.values()]
    guardrails = [{"metric": "preemptions", "worse_by": 10.0}, {"metric": "refused", "worse_by": 0.1}]
    async with stage.traffic(stage.users()):
        block = await stage.usual(ENOUGH)
        stage.roll_out(block, {"metric": "hit_rate", "least": 0.02}, guardrails)
        await stage.until(lambda: stage.state() != "rolling_out", "the verdict")
        await stage.more(4 * ENOUGH)
    view, said = stage.change(), stage.policies()
    change = view["change"]
    began, ended = change["began_ns"], change["ended_ns"]
    before, tried = (stage.hits(MEMBERS, *span) for span in ((began - BLOCKS * block, began), (began, ended)))
    after = stage.hits(TENANTS, ended + SECOND, time.time_ns())
    print(f"\n{block / SECOND:.1f} s: {change['reason']}\nhits: {before:.2f}, {tried:.2f}, {after:.2f}")
    assert (change["state"], view["held"], view["entries"][-1]["who"]) == ("accepted", True, "gateway")
    assert said == AFTER
    assert before + 0.1 < tried
    assert stage.at_home(MEMBERS, began, ended) > MOST
    assert after > 0.9, "all adapters have slots now"
    assert sum(watch.truth().preemptions for watch in watches) == 0
    assert stage.tried_on() == set(MEMBERS)
    stage.gateway.stop()
    assert stage.rollouts()["c1"].members is None
    assert "identical" in stage.gateway.verify()


async def test_more_hits_at_the_price_of_preemptions_is_taken_back_and_all_is_as_before(stage: Stage) -> None:
    at_first, (hot, warm, *others) = stage.limits(), stage.adapters
    long = [*each(MEMBERS, 4, [hot], LONG, pause=0.0), *each(REST, 1, [hot], LONG, pause=0.0)]
    short = [*each(MEMBERS, 2, [warm], SHORT), *each(REST, 2, [warm, *others], SHORT)]
    async with stage.traffic([*long, *short]):
        usual = [Watch(probe.engine) for probe in stage.probes.values()]
        block = await stage.usual(2 * ENOUGH)
        calm = [watch.truth() for watch in usual]
        during = [Watch(probe.engine) for probe in stage.probes.values()]
        stage.roll_out(block, {"metric": "hit_rate"}, [{"metric": "preemptions", "worse_by": 20.0}])
        await stage.until(lambda: stage.state() != "rolling_out", "the verdict")
        tried = [watch.truth() for watch in during]
        await stage.more(ENOUGH)
    view = stage.change()
    change, (target, guardrail) = view["change"], view["verdict"]["readings"]
    began, ended = change["began_ns"], change["ended_ns"]
    hits = [stage.hits(MEMBERS, *span) for span in ((began - BLOCKS * block, began), (began, ended))]
    print(f"\n{block / SECOND:.1f} s: {change['reason']}\n{calm}\n{tried}\nhits: {hits}")
    assert (change["state"], view["entries"][-1]["who"]) == ("rolled_back", "gateway")
    assert change["reason"].startswith("guardrail preemptions is worse by")
    assert ended < began + change["window_ns"]
    assert target["bounds"]["mean"] > 0
    assert guardrail["called"] == "above"
    assert hits[0] + 0.02 < hits[1], "it does improve the hit rate"
    assert [truth.preemptions for truth in calm] == [0, 0]
    assert tried[0].preemptions > 0.05 * tried[0].finished, "the home of the hot adapter preempts"
    assert tried[1].preemptions == 0
    assert stage.tried_on() == set(MEMBERS)
    assert (stage.policies(), stage.limits()) == (BEFORE, at_first)
    assert stage.at_home(MEMBERS, began, ended) > MOST
    assert ("away", "gpu") in stage.told(MEMBERS, ended, time.time_ns()), "both engines have the hot adapter again"
    assert [entry["state"] for entry in stage.gateway.api("/api/changes")["changes"]] == ["rolled_back"]
    stage.gateway.stop()
    assert stage.rollouts() == {}
    assert "identical" in stage.gateway.verify()


async def test_a_gateway_killed_in_the_middle_goes_on_with_the_trial_and_can_take_it_back(stage: Stage) -> None:
    stage.mortal, gateway = True, stage.gateway
    journal = gateway.record / "changes"
    async with stage.traffic(stage.users()):
        stage.roll_out(SECOND, {"metric": "hit_rate", "least": 0.95}, [])
        await stage.until(lambda: stage.blocks() >= 3, "some blocks")
        before, entries = stage.change(), read_entries(journal)
        gateway.kill9()
        await asyncio.to_thread(gateway.start, 2)
        again = time.time_ns()
        assert read_entries(journal) == entries
        await stage.until(lambda: stage.blocks() > 0, "a verdict")
        assert stage.blocks() >= before["verdict"]["blocks"], "those before the death count"
        blocks = stage.blocks()
        await stage.until(lambda: stage.blocks() > blocks, "another")
        await stage.more(ENOUGH)
        after, said = stage.change(), await asyncio.to_thread(stage.policies)
        back = stage.post("/api/changes/c1/rollback", {})["change"]
        await stage.more(ENOUGH)
    assert [entry.kind for entry in entries] == ["propose", "replay", "roll_out"]
    assert (after["change"], after["members"]) == (before["change"], list(MEMBERS))
    assert said == TRIED
    assert stage.at_home(MEMBERS, again, back["ended_ns"]) > MOST
    assert back["state"] == stage.state() == "rolled_back"
    assert stage.policies() == BEFORE
    assert "away" in {where for where, _ in stage.told(MEMBERS, back["ended_ns"], time.time_ns())}
    assert stage.tried_on() == set(MEMBERS)
    gateway.stop()
    assert stage.rollouts() == {}
    assert "identical" in gateway.verify()
