"""What one tenant can see, call and leave behind, on slow replicas so that answers are still under way when it is looked at."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
import pytest

from loraledger.config import hash_key
from support.gateway import GatewayProcess, tenant

from .fleet import LONG, Emulator, eventually, in_flight, settings_for, write_adapters


@dataclass
class Serving:
    """A fleet that stays up: acme has a0 and a1, birch has b0 and no base."""

    pair: tuple[Emulator, Emulator]
    gateway: GatewayProcess

    def running(self) -> float:
        return sum(emulator.metrics()["running"] for emulator in self.pair)

    def generated(self) -> float:
        return sum(emulator.metrics()["generated"] for emulator in self.pair)

    def row(self, client_id: str) -> dict[str, Any] | None:
        rows = self.gateway.api("/api/requests?limit=1000")["requests"]
        return next((row for row in rows if row["client_id"] == client_id), None)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("tenants")
    adapters = write_adapters(folder / "adapters", ["a0", "a1", "b0"])
    tenants = [
        tenant("acme", ["a*"]),
        {"name": "birch", "key_hashes": [hash_key("key-birch")], "adapters": ["b0"], "base": False},
    ]
    with ExitStack() as stack:
        pair = tuple(stack.enter_context(Emulator(folder, speed=1.0)) for _ in range(2))
        settings = settings_for(pair, adapters, tenants=tenants)
        gateway = stack.enter_context(GatewayProcess(folder, settings)).start(replicas_up=2)
        yield Serving((pair[0], pair[1]), gateway)


def client(serving: Serving, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.gateway.url}/v1", api_key=f"key-{name}", max_retries=0, timeout=30.0)


def test_the_model_list_shows_a_tenant_its_own_and_no_others(serving: Serving) -> None:
    with client(serving, "acme") as acme, client(serving, "birch") as birch:
        assert [entry.id for entry in acme.models.list()] == ["base", "a0", "a1"]
        assert [entry.id for entry in birch.models.list()] == ["b0"]


@pytest.mark.parametrize("stream", [False, True])
def test_another_tenants_adapter_is_refused_in_the_words_for_one_that_does_not_exist(
    serving: Serving, stream: bool
) -> None:
    before = serving.generated()
    with client(serving, "birch") as birch:
        bodies = []
        for model in ("a0", "zz"):
            with pytest.raises(openai.NotFoundError) as caught:
                birch.completions.create(model=model, prompt="Hello", max_tokens=4, stream=stream)
            assert caught.value.code == "model_not_found"
            bodies.append(str(caught.value.body).replace(model, "MODEL"))
    assert bodies[0] == bodies[1]
    assert serving.generated() == before


@pytest.mark.parametrize("model", ["nowhere", "a0@0123456789ab", "", "BASE", "base "])
def test_an_unknown_model_is_never_answered_by_the_base(serving: Serving, model: str) -> None:
    before = serving.generated()
    with client(serving, "acme") as acme, pytest.raises((openai.NotFoundError, openai.BadRequestError)):
        acme.completions.create(model=model, prompt="Hello", max_tokens=4)
    assert serving.generated() == before


def test_the_base_is_refused_to_a_tenant_without_it(serving: Serving) -> None:
    with client(serving, "birch") as birch, pytest.raises(openai.NotFoundError):
        birch.completions.create(model="base", prompt="Hello", max_tokens=4)


def test_a_wrong_key_is_a_401_and_counted(serving: Serving) -> None:
    with client(serving, "nobody") as nobody, pytest.raises(openai.AuthenticationError):
        nobody.completions.create(model="base", prompt="Hello", max_tokens=4)
    page = httpx2.get(f"{serving.gateway.control}/metrics", timeout=20.0).text
    assert 'loraledger_edge_refusals_total{reason="invalid_api_key"}' in page


@pytest.mark.parametrize(("kind", "model"), [("stream", "a0"), ("plain", "a1"), ("stream", "base")])
def test_a_client_that_hangs_up_frees_the_engine_at_once(serving: Serving, kind: str, model: str) -> None:
    key = f"gone-{kind}-{model}"

    async def call_and_leave() -> None:
        body = {"model": model, "prompt": "Hello", "max_tokens": LONG, "stream": kind == "stream"}
        headers = {"Authorization": "Bearer key-acme", "X-Request-Id": key}
        async with httpx2.AsyncClient(timeout=30.0) as http:
            call = asyncio.create_task(http.post(f"{serving.gateway.url}/v1/completions", json=body, headers=headers))
            while await asyncio.to_thread(serving.running) == 0:
                assert not call.done()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    asyncio.run(call_and_leave())
    eventually(lambda: serving.running() == 0, "the engine to be told")  # it would go on for 47 s
    eventually(lambda: serving.row(key) is not None, "the row")
    row = serving.row(key)
    assert row is not None
    assert row["status"] == "client_gone"
    assert set(in_flight(serving.gateway).values()) == {0}


def test_a_client_that_hangs_up_while_its_adapter_is_loaded_leaves_no_trace_on_the_engine(serving: Serving) -> None:
    before = serving.generated()

    body = json.dumps({"model": "b0", "prompt": "Hello", "max_tokens": LONG}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer key-birch\r\nX-Request-Id: early\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", serving.gateway.port), timeout=10) as birch:
        birch.sendall(head.encode() + body)  # whole, and then gone: no client library decides how far the call came
    eventually(lambda: serving.row("early") is not None, "the row")
    row = serving.row("early")
    assert row is not None
    assert row["status"] == "client_gone"
    eventually(lambda: serving.running() == 0, "the engine to be told")
    assert serving.generated() - before < LONG / 10
    assert set(in_flight(serving.gateway).values()) == {0}
