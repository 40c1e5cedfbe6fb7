"""What many clients together may hold: bytes, connections, time, open files. One client's own bounds are in ``test_clients``."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import pytest

from loraledger.errors import UnavailableError
from loraledger.events import RequestArrived
from loraledger.gateway import listener
from loraledger.gateway.held import HeldBodies, Hold
from loraledger.gateway.settings import PlaneSettings
from loraledger.units import NS_PER_S

from .support import CHAT, KEY, PLAIN, STREAMED, RawClient, Rig, bad_gateway, chunk, get, post, running, still, until
from .test_gone import never, one_token

MS = 1_000_000


def head(length: int | None, key: str = KEY) -> bytes:
    """Of a request whose body is still to come; in chunks without a length."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {key}\r\n{framing}\r\n\r\n".encode()


async def sending(rig: Rig, data: bytes) -> RawClient:
    client = await rig.client()
    await client.send(data)
    return client


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Later:
    """A clock that can be put forward."""

    def __init__(self) -> None:
        self.ahead = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self.ahead


# --- bytes ---


def test_a_tenant_may_hold_as_much_as_is_left() -> None:
    held = HeldBodies(100)
    for _ in range(5):
        held.take("flood", 10)
    with pytest.raises(UnavailableError) as caught:
        held.take("flood", 1)
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "too_many_bytes", 1.0)
    held.take("quiet", 25)
    with pytest.raises(UnavailableError):
        held.take("quiet", 1)
    assert held.total == 75
    held.give("flood", 50)
    held.take("quiet", 25)
    assert held.total == 50


def test_a_hold_is_given_back_once() -> None:
    held = HeldBodies(100)
    hold = Hold(held)
    hold.take("acme", 0)
    hold.take("acme", 20)
    hold.take("acme", 5)
    hold.release()
    hold.release()
    assert held.total == 0
    held.take("acme", 100)


async def test_bodies_of_all_clients_together_are_bounded_and_another_tenant_finds_room() -> None:
    async with running(settings=PlaneSettings(body_bytes_total=100_000)) as rig:
        flood = [await sending(rig, head(20_000)) for _ in range(3)]
        await until(lambda: rig.plane.held_bytes == 60_000)
        refused = await sending(rig, head(20_000))
        answer = await refused.answer()
        assert (answer.status, answer.json()["error"]["code"]) == (503, "too_many_bytes")
        assert answer.headers["retry-after"] == "1"
        assert await refused.at_end()
        other = await sending(rig, head(20_000, "sk-other"))
        await until(lambda: rig.plane.held_bytes == 80_000)
        assert rig.conductor.events == []
        for client in (*flood, other):
            client.reset()
        await until(lambda: rig.plane.held_bytes == 0)
        assert (await rig.ask(post(PLAIN))).status == 200


async def test_a_body_in_chunks_counts_as_it_comes() -> None:
    async with running(settings=PlaneSettings(body_bytes_total=50_000)) as rig:
        first = await sending(rig, head(None))
        await first.send(chunk(b" " * 20_000))
        await until(lambda: rig.plane.held_bytes > 20_000)
        second = await sending(rig, head(None) + chunk(b" " * 20_000))
        answer = await second.answer()
        assert (answer.status, answer.json()["error"]["code"]) == (503, "too_many_bytes")
        assert 20_000 < rig.plane.held_bytes < 21_000
        first.close()
        await until(lambda: rig.plane.held_bytes == 0)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [(post(PLAIN), 200), (post(STREAMED), 200), (post({"model": "nobody's"}), 404), (post(b"{"), 400)],
)
async def test_bytes_are_given_back_however_a_request_ends(request_bytes: bytes, status: int) -> None:
    async with running() as rig:
        client = await rig.client()
        for _ in range(2):
            await client.send(request_bytes)
            assert (await client.answer()).status == status
            await until(lambda: rig.plane.held_bytes == 0)


async def test_bytes_are_held_while_a_request_waits_and_given_back_when_it_is_refused_or_its_client_leaves() -> None:
    async with running(never) as rig:
        rig.conductor.on_arrival = lambda event: []
        clients = [await sending(rig, post(PLAIN)) for _ in range(2)]
        await until(lambda: rig.plane.open_exchanges == 2)
        size = len(post(PLAIN).partition(b"\r\n\r\n")[2])
        assert rig.plane.held_bytes == 2 * size
        rig.plane.perform(bad_gateway(rig.conductor.of(RequestArrived)[0].request))
        assert (await clients[0].answer()).status == 502
        assert rig.plane.held_bytes == size
        clients[1].close()
        await until(lambda: rig.plane.held_bytes == 0)


async def test_bytes_are_given_back_when_an_answer_begins_and_not_only_at_its_end() -> None:
    async with running(one_token) as rig:
        client = await sending(rig, post(STREAMED))
        await client.reader.readuntil(b"Hi")
        assert (rig.plane.open_exchanges, rig.plane.held_bytes) == (1, 0)
        client.close()


# --- time ---


async def test_a_request_that_drips_in_is_given_up_after_the_whole_time_and_not_after_a_silence() -> None:
    async def drip(rig: Rig, begin: bytes, drop: bytes) -> None:
        client = await sending(rig, begin)
        answered = asyncio.ensure_future(client.answer())
        async with asyncio.timeout(20):
            while not answered.done():
                client.writer.write(drop)
                await asyncio.sleep(0.05)
        answer = await answered
        assert (answer.status, answer.json()["error"]["code"]) == (408, "request_timeout")
        client.close()

    async with running(settings=PlaneSettings(header_timeout=500 * MS, body_timeout=500 * MS)) as rig:
        await asyncio.gather(
            drip(rig, b"GET /v1/models HTTP/1.1\r\n", b"X-Header: x\r\n"),
            drip(rig, head(10_000), b" "),
            drip(rig, head(None), chunk(b" ")),
        )
        await until(lambda: rig.plane.connections == 0)
        assert rig.plane.held_bytes == 0


# --- connections ---


async def test_an_idle_connection_makes_room_for_one_that_comes() -> None:
    clock = Later()
    async with running(settings=PlaneSettings(connections=2), clock=clock) as rig:
        busy = await sending(rig, get()[:-2])
        idle = await sending(rig, get())
        assert (await idle.answer()).status == 200
        clock.ahead = 2 * NS_PER_S
        assert (await rig.ask(get())).status == 200
        assert await idle.at_end()
        await busy.send(b"\r\n")
        assert (await busy.answer()).status == 200


async def test_connections_that_are_busy_or_were_a_moment_ago_are_not_closed_for_one_that_comes() -> None:
    async with running(settings=PlaneSettings(connections=2), clock=still) as rig:
        busy = await sending(rig, get()[:-2])
        idle = await sending(rig, get())
        assert (await idle.answer()).status == 200
        refused = await (await rig.client()).answer()
        assert (refused.status, refused.json()["error"]["code"]) == (503, "too_many_connections")
        assert refused.headers["retry-after"] == "1"
        for client, request in ((busy, b"\r\n"), (idle, get())):
            await client.send(request)
            assert (await client.answer()).status == 200


async def test_far_more_connections_than_allowed_are_closed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "TOLD", 2)
    async with running(settings=PlaneSettings(connections=1)) as rig:
        kept = await rig.client()
        await until(lambda: rig.plane.connections == 1)
        told = [await rig.client() for _ in range(2)]
        assert [(await client.answer()).status for client in told] == [503, 503]
        for _ in range(5):
            assert await (await rig.client()).at_end()
        assert rig.plane.connections == 3
        await kept.send(get())
        assert (await kept.answer()).status == 200


# --- open files ---


async def test_no_file_stays_open_after_a_storm() -> None:
    async with running(one_token) as rig:
        gc.collect()  # else files that other tests dropped close meanwhile
        before = open_files()
        stages = (
            b"",
            get()[:-7],
            head(9_000),
            head(9_000) + b"{",
            head(None) + chunk(b"{"),
            post(STREAMED),
            post(PLAIN),
        )
        for _ in range(3):
            clients = [await sending(rig, stage) for stage in stages for _ in range(8)]
            await until(lambda: rig.plane.connections == len(stages) * 8)
            await asyncio.sleep(0.05)
            for number, client in enumerate(clients):
                (client.reset if number % 2 else client.close)()
            await until(lambda: rig.plane.connections == 0)
            await rig.settle()
        rig.plane.drop_idle("r1")
        await until(lambda: rig.replica.closed == rig.replica.connections)
        await until(lambda: open_files() <= before)
        assert rig.plane.held_bytes == 0
