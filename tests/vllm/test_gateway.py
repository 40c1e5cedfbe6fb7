"""The product in front of two real vLLM servers: the right adapter's answer, nothing lost, one row a request, faults survived.

Reference answers come from the engines: each adapter is asked directly, greedily, with the two best logprobs of each step.
Steps are compared up to the first whose gap is at most 0.05, because there another batch may round the other way.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import openai
import pytest

from support.gateway import GatewayProcess, replica, tenant

from .engine import Engine, Model

PROMPTS = ("Hello, world", "The capital of France is", "def main():", "Adapters, slots and hosts.")
TOKENS = 8
GAP = 0.05
TENANTS = ("acme", "birch", "cedar")

References = dict[tuple[str, str], "Reference"]


class Reference(NamedTuple):
    """One direct answer: all of its text, and the part before the first uncertain step."""

    text: str
    certain: str


def settings_for(engines: tuple[Engine, ...], adapters: dict[str, Path], **more: Any) -> dict[str, Any]:
    names = list(adapters)
    return {
        "base": {"names": ["base"]},
        "replicas": [replica(f"r{i}", engine.url) for i, engine in enumerate(engines, 1)],
        "adapters": {"list": [{"name": name, "path": str(path)} for name, path in adapters.items()]},
        "tenants": [tenant(name, names) for name in TENANTS],
        "limits": {"scrape_interval": "500ms"},
        **more,
    }


@pytest.fixture(scope="module")
def references(model: Model, engines: tuple[Engine, Engine]) -> References:
    """For each adapter and prompt the answer of an engine that was asked directly."""
    engine = engines[0]
    if not engine.alive():  # another module ended it
        engine.restart()
    found: References = {}
    with httpx2.Client(base_url=engine.url, timeout=60.0, trust_env=False) as client:
        for name, path in model.adapters.items():
            client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}).raise_for_status()
            for prompt in PROMPTS:
                found[name, prompt] = ask_directly(client, name, prompt)
            client.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
        for prompt in PROMPTS:
            found["base", prompt] = ask_directly(client, "base", prompt)
    return found


def ask_directly(client: httpx2.Client, name: str, prompt: str) -> Reference:
    body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 2}
    choice = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
    certain = ""
    for token, two in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        best = sorted(two.values(), reverse=True)
        if len(best) < 2 or best[0] - best[1] <= GAP:
            break
        certain += token
    return Reference(choice["text"], certain)


def client_of(gateway: GatewayProcess, name: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=f"key-{name}", max_retries=0, timeout=120.0)


class Outcome:
    """What one client call met: its text, or the error and whether content had come before it."""

    def __init__(self, model: str, prompt: str) -> None:
        self.model, self.prompt = model, prompt
        self.text = ""
        self.error: str | None = None
        self.cancelled = False


async def call(client: openai.AsyncOpenAI, model: str, prompt: str, kind: str) -> Outcome:
    out = Outcome(model, prompt)
    try:
        if kind == "plain":
            done = await client.completions.create(model=model, prompt=prompt, max_tokens=TOKENS, temperature=0)
            assert done.model == model
            assert done.usage is not None
            out.text = done.choices[0].text
            return out
        stream = await client.completions.create(
            model=model, prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True
        )
        async for chunk in stream:
            assert chunk.model == model
            assert chunk.choices, "the usage chunk is hidden from a client that did not ask"
            out.text += chunk.choices[0].text
            if kind == "cancelled":
                await stream.close()
                out.cancelled = True
                return out
    except (openai.APIError, httpx2.TransportError) as error:
        out.error = f"{type(error).__name__}: {error}"
    except Exception as error:
        # The client's own transport errors have no common base with ours.
        out.error = f"{type(error).__module__}.{type(error).__name__}: {error}"
    return out


async def run_load(
    gateway: GatewayProcess, models: list[str], count: int, at_once: int = 8, halfway: Any = None
) -> list[Outcome]:
    """``count`` calls of three tenants, models by Zipf; ``halfway`` is awaited when a third of them was sent."""
    rng = random.Random(600)
    weights = [1 / (rank + 1) for rank in range(len(models))]
    clients = {name: client_of(gateway, name) for name in TENANTS}
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> Outcome:
        async with gate:
            if halfway is not None and number == count // 3:
                await halfway()
            model = rng.choices(models, weights)[0]
            kind = rng.choices(["plain", "stream", "cancelled"], [5, 5, 1])[0]
            return await call(clients[rng.choice(TENANTS)], model, rng.choice(PROMPTS), kind)

    outcomes = await asyncio.gather(*(one(number) for number in range(count)))
    for client in clients.values():
        await client.close()
    return list(outcomes)


def check_texts(outcomes: list[Outcome], references: References) -> int:
    """Each text begins as the adapter's own does. Returns how many were compared over at least one certain step.

    Base texts are left out: on CPU a base request that shares a step with adapters is answered with one's weights.
    """
    compared = 0
    for out in outcomes:
        if out.model == "base" or out.error is not None:
            continue
        expected = references[out.model, out.prompt].certain
        length = min(len(expected), len(out.text))
        assert out.text[:length] == expected[:length], (out.model, out.prompt, out.text, expected)
        compared += length > 0
    return compared


def test_twelve_adapters_and_the_base_differ_pairwise_on_every_prompt(references: References) -> None:
    names = list(dict.fromkeys(name for name, _ in references))
    assert len(names) == 13
    for prompt in PROMPTS:
        texts = {name: references[name, prompt].text for name in names}
        for i, one in enumerate(names):
            for other in names[i + 1 :]:
                assert texts[one] != texts[other], (prompt, one, other)


def test_six_hundred_requests_get_their_own_adapters_answers(
    tmp_path: Path, model: Model, pair: tuple[Engine, Engine], references: References
) -> None:
    with GatewayProcess(tmp_path, settings_for(pair, model.adapters)).start(replicas_up=2) as gateway:
        outcomes = asyncio.run(run_load(gateway, [*model.adapters, "base"], 600))
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="key-acme", max_retries=0) as sync:
            listed = {entry.id for entry in sync.models.list()}
            answer = sync.completions.create(model="base", prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0)
        gateway.stop()
        rows = gateway.rows()
        verified = gateway.verify()
    assert [out.error for out in outcomes if out.error is not None] == []
    assert listed == {*model.adapters, "base"}
    expected = references["base", PROMPTS[0]].certain
    assert answer.choices[0].text[: len(expected)] == expected
    assert check_texts(outcomes, references) > 350
    assert len(rows) == 601
    assert len({row["id"] for row in rows}) == 601
    cancelled = sum(out.cancelled for out in outcomes)
    counted = Counter(str(row["status"]) for row in rows)
    assert set(counted) <= {"ok", "client_gone"}
    # The whole answer may have been sent before a client that hangs up is noticed.
    assert counted["client_gone"] <= cancelled
    assert {row["replica"] for row in rows} == {"r1", "r2"}
    assert all(row["prompt_tokens"] for row in rows if row["status"] == "ok")
    assert all(row["generated_tokens"] for row in rows if row["status"] == "ok")
    assert all(row["digest"] for row in rows if row["adapter"] is not None)
    assert "identical" in verified


def test_a_replica_that_is_killed_loses_nothing_that_had_not_begun_to_stream(
    tmp_path: Path, model: Model, pair: tuple[Engine, Engine], references: References
) -> None:
    victim = pair[1]
    with GatewayProcess(tmp_path, settings_for(pair, model.adapters)).start(replicas_up=2) as gateway:

        async def kill_under_load() -> None:
            async with httpx2.AsyncClient(timeout=20.0) as client, asyncio.timeout(60):
                while True:
                    view = (await client.get(f"{gateway.control}/api/replicas/r2")).json()
                    if view["in_flight"]["value"] >= 3:
                        break
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(victim.kill9)

        outcomes = asyncio.run(run_load(gateway, list(model.adapters), 250, at_once=16, halfway=kill_under_load))
        lost = [out for out in outcomes if out.error is not None and not out.text]
        assert lost == [], [(out.model, out.error) for out in lost]
        victim.restart()
        gateway.wait(lambda: len(gateway.summary()["replicas_up"]) == 2, "the killed replica to be seen again", 30)
        since = time.time_ns()
        again = asyncio.run(run_load(gateway, list(model.adapters), 100))
        gateway.stop()
        rows = gateway.rows()
        verified = gateway.verify()
    assert [out.error for out in again if out.error is not None] == []
    check_texts([*outcomes, *again], references)
    assert len(rows) == 350
    cut = [out for out in outcomes if out.error is not None]
    statuses = Counter(str(row["status"]) for row in rows)
    assert sum(n for status, n in statuses.items() if status not in ("ok", "client_gone")) == len(cut)
    assert any(row["retries"] for row in rows), "the kill met no request before its first byte: send more at once"
    after = [row for row in rows if isinstance(row["arrived_ns"], int) and row["arrived_ns"] > since]
    assert {row["replica"] for row in after} == {"r1", "r2"}, "the restarted replica serves adapters again"
    assert "identical" in verified


def test_an_adapter_whose_copy_vanishes_kills_one_replica_at_most_and_is_parked(
    tmp_path: Path, model: Model, pair: tuple[Engine, Engine], references: References
) -> None:
    doomed = model.adapters["a00"]
    adapters = {"doomed": doomed, **{name: model.adapters[name] for name in list(model.adapters)[1:7]}}
    others = [name for name in adapters if name != "doomed"]
    settings = settings_for(pair, adapters, limits={"scrape_interval": "500ms", "retry_ratio": 0.1, "retry_burst": 8})
    with GatewayProcess(tmp_path, settings).start(replicas_up=2) as gateway:
        asyncio.run(_use_everywhere(gateway, "doomed"))
        for name in ("r1", "r2"):  # each engine forgets its bytes: six others pass through a host cache of four
            asyncio.run(_fill(gateway, name, others))
        gateway.lose_copy(doomed)
        outcomes = asyncio.run(_poison_among_bystanders(gateway, others))
        poisoned = [out for out in outcomes if out.model == "doomed"]
        assert all(out.error is not None for out in poisoned)
        gateway.wait(lambda: not all(engine.alive() for engine in pair), "an engine to exit")
        time.sleep(1.0)  # the API server of a dead engine exits 0.35 s after its last answer: nor does the other one
        dead = [engine for engine in pair if not engine.alive()]
        assert len(dead) == 1, f"{len(dead)} replicas died of one bad adapter"
        view = gateway.api("/api/adapters/doomed")
        assert view["parked"] is not None, view
        refused = asyncio.run(_one(gateway, "doomed"))
        assert refused.error is not None
        assert "parked" in refused.error
        bystanders = [out for out in outcomes if out.model != "doomed"]
        assert [out.error for out in bystanders if out.error is not None and not out.text] == []
        retries = gateway.summary()["counters"]["retries"]
        gateway.stop()
        rows = gateway.rows()
    assert 0 < retries <= 8 + 0.1 * len(rows), "retries stay within the budget"


async def _one(gateway: GatewayProcess, model: str) -> Outcome:
    async with client_of(gateway, "acme") as client:
        return await call(client, model, PROMPTS[0], "plain")


async def _use_everywhere(gateway: GatewayProcess, model: str) -> None:
    """Register ``model`` on both replicas and use it there."""
    for name in ("r1", "r2"):
        other = "r2" if name == "r1" else "r1"
        await _drain(gateway, other, True)
        assert (await _one(gateway, model)).error is None
        await _drain(gateway, other, False)


async def _fill(gateway: GatewayProcess, name: str, models: list[str]) -> None:
    other = "r2" if name == "r1" else "r1"
    await _drain(gateway, other, True)
    for model in models:
        assert (await _one(gateway, model)).error is None
    await _drain(gateway, other, False)


async def _drain(gateway: GatewayProcess, name: str, on: bool) -> None:
    async with httpx2.AsyncClient() as client:
        verb = "drain" if on else "undrain"
        (await client.post(f"{gateway.control}/api/replicas/{name}/{verb}")).raise_for_status()


async def _poison_among_bystanders(gateway: GatewayProcess, others: list[str]) -> list[Outcome]:
    clients = {name: client_of(gateway, name) for name in TENANTS}
    jobs = [
        call(clients[TENANTS[i % 3]], others[i % len(others)], PROMPTS[i % 4], "stream" if i % 2 else "plain")
        for i in range(10)
    ]
    jobs[4:4] = [call(clients["acme"], "doomed", PROMPTS[0], kind) for kind in ("plain", "stream", "plain")]
    outcomes = await asyncio.gather(*jobs)
    for client in clients.values():
        await client.close()
    return list(outcomes)


def test_a_gateway_that_is_killed_finds_its_adapters_and_estimates_again(
    tmp_path: Path, model: Model, pair: tuple[Engine, Engine], references: References
) -> None:
    gateway = GatewayProcess(tmp_path, settings_for(pair, model.adapters))
    with gateway.start(replicas_up=2):
        accepted = asyncio.run(_load_until_killed(gateway))
        rows = gateway.rows()
        assert len(rows) >= len(accepted)
        assert {row["client_id"] for row in rows} >= accepted, "each request that was accepted has a row"
        assert "gateway_crashed" in {row["status"] for row in rows}
        learnt = _registered(gateway)
        assert learnt
        since = time.time_ns()
        gateway.start(replicas_up=2)
        replicas = gateway.api("/api/replicas")["replicas"]
        held = {
            r["name"]: {a["adapter"] for a in r["adapters"] if a["state"]["value"] == "registered"} for r in replicas
        }
        estimates = {r["name"]: r["estimates"] for r in replicas}
        for name, adapters in learnt.items():
            assert adapters <= held[name]
        assert any(figure["n"] > 0 for figure in estimates["r1"].values()), "what was measured before is known again"
        asked = sorted({adapter for adapters in learnt.values() for adapter in adapters})
        outcomes = [asyncio.run(_one(gateway, adapter)) for adapter in asked]
        assert [out.error for out in outcomes if out.error is not None] == []
        check_texts(outcomes, references)
        gateway.stop()
        loads = [
            row
            for row in gateway.rows("residency")
            if isinstance(row["at_ns"], int) and row["at_ns"] > since and row["to_state"] == "loading"
        ]
        redundant = [row for row in loads if row["adapter"] in learnt.get(str(row["replica"]), set())]
        assert redundant == []
        rows = gateway.rows()
        assert {row["client_id"] for row in rows} >= accepted
        assert len({row["id"] for row in rows}) == len(rows)
        assert "identical" in gateway.verify()


def _registered(gateway: GatewayProcess) -> dict[str, set[str]]:
    """By replica, the adapters whose load had ended when the journal ended."""
    found: dict[str, set[str]] = {}
    for row in gateway.rows("residency"):
        if row["to_state"] == "registered":
            found.setdefault(str(row["replica"]), set()).add(str(row["adapter"]))
    return found


async def _load_until_killed(gateway: GatewayProcess) -> set[str]:
    """Send requests until the gateway dies under them; returns the client ids of those that it had accepted for sure."""
    rng = random.Random(9)
    accepted: set[str] = set()
    names = [f"a{i:02d}" for i in range(8)]

    async def worker(number: int) -> None:
        async with client_of(gateway, TENANTS[number % 3]) as client:
            for turn in range(100):
                key = f"w{number}-{turn}"
                try:
                    stream = await client.completions.create(
                        model=rng.choice(names),
                        prompt=rng.choice(PROMPTS),
                        max_tokens=64,
                        stream=True,
                        extra_headers={"X-Request-Id": key},
                        extra_body={"ignore_eos": True},
                    )
                    accepted.add(key)  # its headers came, so it was accepted
                    async for _ in stream:
                        pass
                except Exception:
                    return  # the gateway is gone, in one of many ways

    async def killer() -> None:
        while len(accepted) < 40:
            await asyncio.sleep(0.05)
        gateway.kill9()

    await asyncio.wait_for(asyncio.gather(killer(), *(worker(n) for n in range(6))), timeout=120)
    return accepted
