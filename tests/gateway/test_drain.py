from __future__ import annotations

import asyncio

import pytest

from loraledger.errors import TargetError
from loraledger.events import Queue, RequestFinished

from .support import PLAIN, STREAMED, Received, answer_plainly, get, post, running, until
from .test_gone import never, one_token

MS = 1_000_000


@pytest.mark.parametrize("body", [PLAIN, STREAMED])
async def test_open_answers_end_idle_connections_close_and_nobody_new_comes_in(body: object) -> None:
    told = asyncio.Event()

    async def when_told(request: Received, writer: asyncio.StreamWriter) -> None:
        await told.wait()
        await answer_plainly(request, writer)

    async with running(when_told) as rig:
        idle, busy = await rig.client(), await rig.client()
        await idle.send(get())
        assert (await idle.answer()).status == 200
        await busy.send(post(body))
        await until(lambda: len(rig.replica.requests) == 1)
        draining = asyncio.ensure_future(rig.plane.drain(60_000 * MS))
        assert await idle.at_end()
        with pytest.raises(ConnectionRefusedError):
            await rig.client()
        told.set()
        answer = await busy.answer()
        assert (answer.status, answer.clean, answer.headers["connection"]) == (200, True, "close")
        assert await busy.at_end()
        busy.close()
        await asyncio.wait_for(draining, 20)
        assert rig.conductor.end().status == "ok"
        await until(lambda: rig.replica.closed == rig.replica.connections)


async def test_a_request_that_is_being_read_may_still_be_answered() -> None:
    async with running() as rig:
        client = await rig.client()
        request = post(PLAIN)
        await client.send(request[:-5])
        await until(lambda: rig.plane.held_bytes > 0)
        draining = asyncio.ensure_future(rig.plane.drain(60_000 * MS))
        await asyncio.sleep(0.02)
        await client.send(request[-5:])
        assert (await client.answer()).status == 200
        client.close()
        await asyncio.wait_for(draining, 20)


async def test_what_is_open_at_the_limit_is_told_or_cut() -> None:
    async with running(one_token) as rig:
        streaming, waiting, reading = await rig.client(), await rig.client(), await rig.client()
        await streaming.send(post(STREAMED))
        await streaming.reader.readuntil(b"\r\n\r\n")
        rig.conductor.on_arrival = lambda event: [Queue(event.request, "busy", event.at + 10**12)]
        await reading.send(post(PLAIN)[:-5])
        await until(lambda: rig.plane.held_bytes > 0)
        await waiting.send(post(PLAIN))
        await until(lambda: rig.plane.open_exchanges == 2)
        draining = asyncio.ensure_future(rig.plane.drain(50 * MS))
        for client in (waiting, reading):
            answer = await client.answer()
            assert (answer.status, answer.json()["error"]["code"]) == (503, "shutting_down")
        with pytest.raises(asyncio.IncompleteReadError):
            await streaming.reader.readuntil(b"0\r\n\r\n")
        await asyncio.wait_for(draining, 20)
        ends = rig.conductor.of(RequestFinished)
        assert [(end.status, end.reason) for end in ends] == [("gateway_crashed", "drain_timeout")] * 2
        assert sorted(str(end.http_status) for end in ends) == ["200", "None"]
        await until(lambda: rig.replica.closed == 1)


async def test_a_client_that_does_not_read_cannot_hold_up_the_end() -> None:
    async with running(never) as rig:
        client = await rig.client()
        await client.send(post(PLAIN))
        await until(lambda: rig.plane.open_exchanges == 1)
        await asyncio.wait_for(rig.plane.drain(0), 20)
        assert rig.plane.connections == 0


async def test_an_address_in_use_is_named() -> None:
    async with running() as rig, running() as other:
        with pytest.raises(TargetError, match=f"cannot listen on 127.0.0.1:{rig.plane.port}"):
            await other.plane.start("127.0.0.1", rig.plane.port)
