import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.types import ASGIApp

from loraledger.events import DrainAsked, Event, Evict, Load, LoadAsked, Move, TiersObserved, UnloadAsked
from loraledger.gateway.control import control_app

from .fleets import SECOND, DrivenGateway, adapter, settings
from .support import until

ODD = "org/team:v2@main+x"
SQL, MAIL = adapter("sql"), adapter(ODD, version="b")
KEY = "sk-control"


def client(gateway: DrivenGateway, **options: Any) -> httpx2.AsyncClient:
    return speaking_to(control_app(gateway), **options)


def speaking_to(app: ASGIApp, **options: Any) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost", **options)


def running(*adapters: Any, key: str | None = None, **options: Any) -> DrivenGateway:
    gateway = DrivenGateway(settings(*(adapters or (SQL, MAIL)), **options), key)
    gateway.up("r1", "r2")
    gateway.events.clear()
    return gateway


def error(answer: httpx2.Response, status: int, code: str) -> str:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-loraledger-reason"] == code
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == code
    return str(body["message"])


async def test_health_and_version_answer_while_nothing_is_up() -> None:
    async with client(DrivenGateway(settings())) as ask:
        assert (await ask.get("/health")).status_code == 200
        assert (await ask.get("/version")).json() == {"version": "1.2.3"}
        assert (await ask.get("/ready")).status_code == 503


async def test_ready_follows_replicas_and_draining() -> None:
    gateway = running()
    async with client(gateway) as ask:
        assert (await ask.get("/ready")).status_code == 200
        gateway.draining = True
        answer = await ask.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["reason"] == "the gateway is draining"
        assert (await ask.get("/health")).status_code == 200


async def test_readiness_of_an_adapter_is_a_replica_that_has_it() -> None:
    gateway = running()
    async with client(gateway) as ask:
        answer = await ask.get("/ready", params={"adapter": ODD})
        assert (answer.status_code, answer.json()["loadable"]) == (503, True)
        gateway.feed(LoadAsked(gateway.at, ODD, "r2"))
        gateway.refused("unsupported LoRA weight: lm_head", permanent=True)
        assert "unsupported LoRA weight: lm_head" in (await ask.get("/ready", params={"adapter": ODD})).json()["reason"]
        gateway.feed(LoadAsked(gateway.at, ODD, "r1"))
        gateway.loaded()
        assert (await ask.get("/ready", params={"adapter": ODD})).status_code == 200
        assert "did you mean 'sql'" in error(await ask.get("/ready?adapter=sqi"), 404, "adapter_not_found")


async def test_lists_and_single_entries_show_the_same() -> None:
    gateway = running()
    gateway.feed(LoadAsked(gateway.at, "sql", "r1"))
    gateway.loaded()
    async with client(gateway) as ask:
        replicas = (await ask.get("/api/replicas")).json()["replicas"]
        assert [view["name"] for view in replicas] == ["r1", "r2"]
        assert (await ask.get("/api/replicas/r1")).json() == replicas[0]
        assert replicas[0]["adapters"][0]["adapter"] == "sql"
        adapters = (await ask.get("/api/adapters")).json()["adapters"]
        assert [view["name"] for view in adapters] == ["sql", ODD]
        assert (await ask.get("/api/adapters/sql")).json() == adapters[0]
        assert [view["name"] for view in (await ask.get("/api/tenants")).json()["tenants"]] == ["acme", "ten-2"]


@pytest.mark.parametrize("path", [ODD, ODD.replace("/", "%2F"), "org%2fteam%3Av2%40main%2Bx"])
async def test_names_with_slashes_colons_and_signs_are_found_however_they_are_written(path: str) -> None:
    gateway = running()
    async with client(gateway) as ask:
        assert (await ask.get(f"/api/adapters/{path}")).json()["name"] == ODD
        answer = await ask.post(f"/api/adapters/{path}/load", json={"replica": "r2"})
        assert (answer.status_code, answer.json()["adapter"]) == (202, ODD)
    assert gateway.events == [LoadAsked(gateway.at, ODD, "r2")]


async def test_an_adapter_whose_name_ends_like_a_command_is_told_apart() -> None:
    gateway = running(adapter("org/load"), adapter("org"))
    async with client(gateway) as ask:
        assert (await ask.get("/api/adapters/org/load")).json()["name"] == "org/load"
        assert (await ask.post("/api/adapters/org/load/load")).json()["adapter"] == "org/load"
        assert (await ask.post("/api/adapters/org/load")).json()["adapter"] == "org"


async def test_a_load_is_asked_of_every_replica_that_is_up_and_is_seen_to_happen() -> None:
    gateway = running(replicas=("r1", "r2", "r3"))
    async with client(gateway) as ask:
        answer = await ask.post("/api/adapters/sql/load")
        assert answer.status_code == 202
        assert answer.json() == {"asked": "load", "adapter": "sql", "replicas": ["r1", "r2"], "skipped": {}}
        assert [load.replica for load in gateway.take(Load)] == ["r1", "r2"]
        await ask.post("/api/adapters/sql/load", json={"replica": None})
        assert gateway.events == [LoadAsked(gateway.at, "sql", where) for where in ("r1", "r2", "r1", "r2")]


async def test_a_load_that_no_replica_can_do_is_refused_with_the_reason() -> None:
    gateway = running(adapter("big", rank=128))
    async with client(gateway) as ask:
        message = error(await ask.post("/api/adapters/big/load", json={"replica": "r1"}), 400, "adapter_not_loadable")
        assert "r1: rank 128 is over this replica's max_rank of 64" in message
        gateway.down("r1")
        gateway.down("r2")
        gateway.events.clear()
        error(await ask.post("/api/adapters/big/load"), 503, "no_replica")
    assert gateway.events == []


async def test_an_unload_is_asked_where_the_adapter_is_registered() -> None:
    gateway = running()
    gateway.feed(LoadAsked(gateway.at, "sql", "r2"))
    gateway.loaded()
    gateway.events.clear()
    async with client(gateway) as ask:
        answer = await ask.post("/api/adapters/sql/unload")
        assert answer.status_code == 202
        assert (answer.json()["replicas"], answer.json()["skipped"]) == (["r2"], {"r1": "not registered there"})
        assert [evict.replica for evict in gateway.take(Evict)] == ["r2"]
        assert "being unloaded" in error(
            await ask.post("/api/adapters/sql/load", json={"replica": "r2"}), 400, "adapter_not_loadable"
        )
    assert gateway.events == [UnloadAsked(gateway.at, "sql", "r2")]


async def test_a_replica_is_drained_and_taken_back() -> None:
    gateway = running()
    async with client(gateway) as ask:
        answer = await ask.post("/api/replicas/r1/drain")
        assert (answer.status_code, answer.json()) == (202, {"asked": "drain", "replica": "r1"})
        assert (await ask.get("/api/replicas/r1")).json()["draining"]
        assert (await ask.post("/api/replicas/r1/undrain", json={})).status_code == 202
        assert not (await ask.get("/api/replicas/r1")).json()["draining"]
    assert gateway.events == [DrainAsked(gateway.at, "r1", True), DrainAsked(gateway.at, "r1", False)]


async def test_unknown_names_and_paths_are_told_with_a_near_miss() -> None:
    gateway = running(adapter("summarise-contracts"))
    async with client(gateway) as ask:
        message = error(await ask.get("/api/adapters/sumarise-contracts"), 404, "adapter_not_found")
        assert message == "no adapter 'sumarise-contracts' here; did you mean 'summarise-contracts'?"
        message = error(await ask.post("/api/replicas/r9/drain"), 404, "replica_not_found")
        assert message == "no replica 'r9' here; known: r1, r2"
        error(
            await ask.post("/api/adapters/summarise-contracts/load", json={"replica": "r9"}), 404, "replica_not_found"
        )
        message = error(await ask.get("/api/adapters/zzz"), 404, "adapter_not_found")
        assert message == "no adapter 'zzz' here; known: summarise-contracts"
        error(await ask.get("/api/adapters/"), 404, "adapter_not_found")
        error(await ask.get("/api/nothing"), 404, "unknown_path")
        error(await ask.get("/api/summary/"), 404, "unknown_path")
        error(await ask.get("/v1/models"), 404, "unknown_path")
    assert gateway.events == []


async def test_reading_never_changes_anything() -> None:
    gateway = running()
    paths = ["/health", "/ready", "/version", "/metrics", "/api/summary", "/api/replicas", "/api/replicas/r1",
             "/api/adapters", "/api/adapters/sql", "/api/tenants", "/api/requests", "/api/decisions"]  # fmt: skip
    async with client(gateway) as ask:
        for path in paths:
            assert (await ask.get(path)).status_code == 200, path
            assert (await ask.head(path)).status_code == 200, path
            error(await ask.put(path), 405, "method_not_allowed")
        for path in ("/api/replicas/r1/drain", "/api/replicas/r1/undrain"):
            error(await ask.get(path), 404, "replica_not_found")
        for path in ("/api/adapters/sql/load", "/api/adapters/sql/unload"):
            error(await ask.get(path), 404, "adapter_not_found")
    assert gateway.events == []
    assert gateway.commands == []


async def test_a_wrong_method_names_the_right_one() -> None:
    async with client(running()) as ask:
        answer = await ask.delete("/api/summary")
        error(answer, 405, "method_not_allowed")
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


async def test_with_a_key_only_the_probes_are_open() -> None:
    gateway = running(key=KEY)
    async with client(gateway) as ask:
        for path in ("/health", "/ready", "/version"):
            assert (await ask.get(path)).status_code == 200
        closed = [
            "/metrics",
            "/api/summary",
            "/api/replicas/r1",
            "/api/nothing",
            "/",
            "//health",
            "/health/",
            "/Health",
        ]
        for path in closed:
            answer = await ask.get(path)
            error(answer, 401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        error(await ask.post("/api/replicas/r1/drain"), 401, "invalid_api_key")
    assert gateway.events == []


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer ", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY, "Bearer \xe9"]
)
async def test_a_wrong_key_is_refused(sent: str) -> None:
    async with client(running(key=KEY), headers={"authorization": sent.encode("latin-1")}) as ask:
        error(await ask.get("/api/summary"), 401, "invalid_api_key")


async def test_the_right_key_opens_everything() -> None:
    gateway = running(key=KEY)
    async with client(gateway, headers={"authorization": f"Bearer {KEY}"}) as ask:
        assert (await ask.get("/api/summary")).status_code == 200
        assert (await ask.get("/metrics")).status_code == 200
        assert (await ask.post("/api/replicas/r1/drain")).status_code == 202
        gateway.key = "sk-another"
        error(await ask.get("/api/summary"), 401, "invalid_api_key")


async def test_the_open_probe_gives_strangers_no_hint_at_names() -> None:
    gateway = running(key=KEY)
    async with client(gateway) as ask:
        assert error(await ask.get("/ready?adapter=sqi"), 404, "adapter_not_found") == "no adapter 'sqi' here"
        known = await ask.get("/ready?adapter=sqi", headers={"authorization": f"Bearer {KEY}"})
        assert "did you mean 'sql'" in error(known, 404, "adapter_not_found")


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 202), ("none", 202)]
)
async def test_a_page_of_another_site_changes_nothing(site: str, status: int) -> None:
    gateway = running()
    async with client(gateway, headers={"sec-fetch-site": site}) as ask:
        assert (await ask.post("/api/replicas/r1/drain")).status_code == status
        assert (await ask.get("/api/summary")).status_code == 200
    assert len(gateway.events) == (status == 202)


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"null", b'{"replica": 3}', b'{"replicas": ["r1"]}', b"\xff\xfe", b'{"replica": "\xff"}']
)
async def test_a_body_of_another_shape_is_refused(body: bytes) -> None:
    gateway = running()
    async with client(gateway) as ask:
        error(await ask.post("/api/adapters/sql/load", content=body), 400, "invalid_request")
    assert gateway.events == []


async def test_a_body_is_read_to_a_limit() -> None:
    gateway = running()
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(10_000):
            read += 4096
            yield b" " * 4096

    async with client(gateway) as ask:
        padded = b'{"replica": "r1"}'.ljust(64 * 1024)
        assert (await ask.post("/api/adapters/sql/load", content=padded)).status_code == 202
        error(await ask.post("/api/adapters/sql/load", content=padded + b" "), 413, "body_too_large")
        error(await ask.post("/api/replicas/r1/drain", content=padded + b" "), 413, "body_too_large")
        error(await ask.post("/api/adapters/sql/load", content=endless()), 413, "body_too_large")
    assert len(gateway.events) == 1


async def test_recent_rows_come_newest_first_and_filtered() -> None:
    gateway = running()
    for where in ("r1", "r2"):
        gateway.feed(LoadAsked(gateway.at, "sql", where))
    gateway.loaded()
    for number in range(6):
        gateway.answer(gateway.ask("sql" if number % 2 else None, tenant="ten-2" if number < 2 else "acme"))
    async with client(gateway) as ask:
        rows = (await ask.get("/api/requests")).json()["requests"]
        times = [row["arrived_ns"] for row in rows]
        assert times == sorted(times, reverse=True)
        assert len(rows) == len(gateway.recent["requests"]) == 6
        assert {row["tenant"] for row in (await ask.get("/api/requests?tenant=ten-2")).json()["requests"]} == {"ten-2"}
        assert {row["adapter"] for row in (await ask.get("/api/requests?adapter=sql")).json()["requests"]} == {"sql"}
        assert {row["adapter"] for row in (await ask.get("/api/requests?adapter=")).json()["requests"]} == {None}
        assert (await ask.get("/api/requests?limit=2")).json()["requests"] == rows[:2]
        (decision,) = (await ask.get(f"/api/decisions?request={rows[0]['id']}")).json()["decisions"]
        assert (decision["request_id"], decision["replica"]) == (rows[0]["id"], rows[0]["replica"])
        assert json.loads(decision["candidates"])[0]["replica"] == decision["replica"]


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "", "1e3", "9" * 5000, "٣"])
async def test_a_limit_out_of_range_is_refused(limit: str) -> None:
    async with client(running()) as ask:
        answer = await ask.get("/api/requests", params={"limit": limit})
        assert "from 1 to 1000" in error(answer, 400, "invalid_request")


async def test_a_filter_that_does_not_exist_is_refused() -> None:
    async with client(running()) as ask:
        message = error(await ask.get("/api/requests?tenent=acme"), 400, "invalid_request")
        assert message == "no such parameter: 'tenent'; known: limit, tenant, adapter"


async def test_the_summary_counts() -> None:
    gateway = running(replicas=("r1", "r2", "r3"))
    gateway.ask("sql")
    async with client(gateway) as ask:
        summary = (await ask.get("/api/summary")).json()
    assert summary == {
        "version": "1.2.3",
        "config_digest": "c0ffee",
        "draining": False,
        "replicas": 3,
        "replicas_up": ["r1", "r2"],
        "adapters": 2,
        "tenants": 2,
        "open_requests": 1,
        "queued_requests": 0,
        "self_check": {
            "r1": {"kernel_in_flight": 0, "connections": 0},
            "r2": {"kernel_in_flight": 0, "connections": 0},
            "r3": {"kernel_in_flight": 0, "connections": 0},
        },
        "counters": {"loads": 1},
    }


async def test_a_long_list_lets_others_run_meanwhile() -> None:
    gateway = running(*(adapter(f"a{number}") for number in range(400)))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async with client(gateway) as ask:
        assert len((await ask.get("/api/adapters")).json()["adapters"]) == 400
    task.cancel()
    assert turns >= 400 // 16


async def test_a_fault_of_ours_is_a_500_in_the_usual_shape() -> None:
    class Broken(DrivenGateway):
        def feed(self, event: Event) -> None:
            raise ValueError("secret detail")

    async with client(Broken(settings())) as ask:
        answer = await ask.post("/api/replicas/r1/drain")
        assert "secret detail" not in error(answer, 500, "internal_error")


@asynccontextmanager
async def listening(gateway: DrivenGateway) -> AsyncIterator[str]:
    config = uvicorn.Config(control_app(gateway), port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    try:
        await until(lambda: server.started or task.done())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def test_it_serves_over_a_real_socket() -> None:
    gateway = running(key=KEY)
    async with (
        listening(gateway) as url,
        httpx2.AsyncClient(base_url=url, headers={"authorization": f"Bearer {KEY}"}) as ask,
    ):
        assert (await ask.get("/api/adapters/org%2Fteam:v2@main+x")).json()["name"] == ODD
        answer = await ask.post(f"/api/adapters/{ODD}/load", json={"replica": "r1"})
        assert answer.status_code == 202
        gateway.loaded()
        gateway.answer(gateway.ask(ODD), generated_tokens=7, prompt_tokens=5)
        gateway.at += SECOND
        scraped = await ask.get("/metrics")
        assert scraped.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert f'loraledger_generated_tokens_total{{tenant="acme",adapter="{ODD}"}} 7\n' in scraped.text
        assert (await ask.head("/ready", params={"adapter": ODD})).status_code == 200
        oversized = await ask.post("/api/replicas/r1/drain", content=b" " * 70_000)
        error(oversized, 413, "body_too_large")
        assert (await ask.get("/health")).json() == {"status": "ok"}


async def test_a_move_is_asked_where_a_probe_answers_and_the_adapter_is_registered() -> None:
    gateway = running()
    gateway.feed(LoadAsked(gateway.at, "sql", "r2"))
    gateway.loaded()
    async with client(gateway) as ask:
        message = error(await ask.post("/api/adapters/sql/activate"), 400, "adapter_not_movable")
        assert message == "'sql' cannot be moved: r1: no probe answers there; r2: no probe answers there"
        for name in ("r1", "r2"):
            gateway.feed(TiersObserved(gateway.at, name, gateway.at, (), ()))
        answer = await ask.post("/api/adapters/sql/pin")
        assert (answer.status_code, answer.json()["replicas"]) == (202, ["r2"])
        assert answer.json()["skipped"] == {"r1": "not registered there"}
    (move,) = gateway.take(Move)
    assert (move.replica, move.adapter, move.verb) == ("r2", "sql", "pin")
