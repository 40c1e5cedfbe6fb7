"""Clients that leave, and clients that do not keep up: everything is given back exactly once."""

from __future__ import annotations

import asyncio

import pytest

from loraledger.events import Queue, RequestCancelled, RequestFinished
from loraledger.gateway.settings import PlaneSettings, ReplicaAddress

from .support import (
    DONE,
    ENGINE_NAME,
    PLAIN,
    STREAM_HEAD,
    STREAMED,
    RawClient,
    Received,
    Rig,
    chunk,
    dispatch,
    event,
    get,
    post,
    running,
    silent_port,
    until,
)

MS = 1_000_000


async def never(request: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def one_token(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunk(event(ENGINE_NAME, {"content": "Hi"})))
    await asyncio.sleep(30)


async def half_an_answer(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{"id":')
    await asyncio.sleep(30)


async def gone(rig: Rig, client: RawClient, *, reset: bool) -> None:
    if reset:
        client.reset()
    else:
        client.close()
    await until(lambda: rig.plane.open_exchanges == 0)
    if rig.replica.requests:
        await until(lambda: rig.replica.closed > 0)  # long before the replica ends by itself
    await rig.settle()
    assert isinstance(rig.conductor.end(), RequestCancelled)


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("script", [never, one_token, half_an_answer])
async def test_a_client_that_leaves_while_the_replica_works_stops_it_at_once(script: object, reset: bool) -> None:
    async with running(script) as rig:  # type: ignore[arg-type]
        client = await rig.client()
        await client.send(post(STREAMED if script is one_token else PLAIN))
        await until(lambda: len(rig.replica.requests) == 1)
        if script is one_token:
            await client.reader.readuntil(b"Hi")
        assert rig.plane.upstream_open == {"r1": 1}
        await gone(rig, client, reset=reset)
        measured = rig.conductor.end().measured
        assert measured.tokens_seen == (1 if script is one_token else 0)


@pytest.mark.parametrize("reset", [True, False])
async def test_a_client_that_leaves_the_gateways_queue(reset: bool) -> None:
    async with running() as rig:
        rig.conductor.on_arrival = lambda event: [Queue(event.request, "busy", event.at + 10**9)]
        client = await rig.client()
        await client.send(post(PLAIN))
        await until(lambda: rig.plane.open_exchanges == 1)
        await gone(rig, client, reset=reset)
        late = rig.conductor.events[0].request  # type: ignore[union-attr]
        rig.conductor.perform(dispatch(late))
        assert rig.replica.requests == []


async def test_a_client_that_leaves_while_a_connection_is_opened() -> None:
    with silent_port() as port:
        async with running(more={"r2": ReplicaAddress("r2", "127.0.0.1", port)}) as rig:
            rig.conductor.on_arrival = lambda event: [dispatch(event.request, replica="r2")]
            client = await rig.client()
            await client.send(post(PLAIN))
            await until(lambda: rig.plane.upstream_open["r2"] == 1)
            await gone(rig, client, reset=True)


async def test_a_client_that_leaves_between_two_attempts() -> None:
    async with running() as rig:
        rig.conductor.on_arrival = lambda event: [dispatch(event.request, replica="nowhere")]
        rig.conductor.on_failure = lambda event: [Queue(event.request, "replica_check", event.at + 10**9)]
        client = await rig.client()
        await client.send(post(PLAIN))
        await until(lambda: "AttemptFailed" in rig.conductor.names)
        await gone(rig, client, reset=True)


async def test_a_client_that_leaves_before_its_request_is_whole_was_never_there() -> None:
    async with running() as rig:
        for sent in (b"", post(PLAIN)[:30], post(PLAIN)[:-3]):
            client = await rig.client()
            await client.send(sent)
            await asyncio.sleep(0.02)
            client.reset()
        await until(lambda: rig.plane.connections == 0)
        assert rig.conductor.events == []


async def test_a_client_that_leaves_with_requests_sent_ahead() -> None:
    async with running(never) as rig:
        client = await rig.client()
        await client.send(post(PLAIN) + post(PLAIN) + get())
        await until(lambda: len(rig.replica.requests) == 1)
        await gone(rig, client, reset=True)
        assert len(rig.replica.requests) == 1


async def test_a_client_that_leaves_after_its_answer_takes_nothing_with_it() -> None:
    async with running() as rig:
        client = await rig.client()
        await client.send(post(PLAIN))
        assert (await client.answer()).status == 200
        client.reset()
        await until(lambda: rig.plane.connections == 0)
        assert isinstance(rig.conductor.end(), RequestFinished)
        assert rig.replica.closed == 0  # the connection to the replica is kept


FRAME = chunk(event(ENGINE_NAME, {"content": "x" * 10_000}))


async def test_a_slow_client_slows_the_replica_and_memory_stays_bounded() -> None:
    written = 0

    async def flood(request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(STREAM_HEAD)
        for _ in range(2500):  # 25 MB
            writer.write(FRAME)
            await writer.drain()
            written += len(FRAME)
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    async with running(flood) as rig:
        client = await rig.client()
        await client.send(post(STREAMED))
        await until(lambda: written > 1_000_000)
        settled = 0
        while settled != written:
            settled = written
            await asyncio.sleep(0.1)
        held = next(iter(rig.plane._state.clients))._transport.get_write_buffer_size()
        assert held < 1_000_000
        assert written < 20_000_000  # the rest waits in the replica, which was not read meanwhile
        answer = await client.answer()
        assert answer.clean
        assert answer.body.count(b"\n\n") == 2501
        assert rig.conductor.end().measured.tokens_seen == 2500


async def test_a_client_that_takes_nothing_for_too_long_is_gone() -> None:
    async def flood(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while True:
            writer.write(FRAME)
            await writer.drain()

    async with running(flood, PlaneSettings(stream_idle_timeout=300 * MS)) as rig:
        client = await rig.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post(STREAMED))
        await until(lambda: rig.conductor.names[-1:] == ["RequestCancelled"], timeout=30)
        await until(lambda: rig.replica.closed == 1)


async def test_an_answer_to_a_slow_client_that_will_be_closed_is_flushed_whole() -> None:
    async with running() as rig:
        rig.conductor.on_arrival = lambda event: [dispatch(event.request, model="e" * 8_000_000)]
        client = await rig.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post({**PLAIN, "stream": False}, Connection="close"))
        await until(lambda: rig.conductor.names[-1:] == ["RequestFinished"])
        await asyncio.sleep(0.3)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert (await client.answer()).clean


async def test_a_burst_is_one_write() -> None:
    async def burst(request: Received, writer: asyncio.StreamWriter) -> None:
        token = event(ENGINE_NAME, {"content": "x"})
        writer.write(STREAM_HEAD + b"".join(chunk(token) for _ in range(50)) + chunk(DONE) + b"0\r\n\r\n")

    async with running(burst) as rig:
        answer = await rig.ask(post(STREAMED))
        assert answer.body.count(b"\n\n") == 51
        assert len(answer.reads) == 1


async def test_after_a_storm_of_leavers_nothing_is_left_open() -> None:
    async with running(one_token) as rig:
        clients = [await rig.client() for _ in range(120)]
        for number, client in enumerate(clients):
            await client.send(post(STREAMED))
            for _ in range(number % 12):  # leave at each step of opening a connection to the replica
                await asyncio.sleep(0)
            if number % 3:
                client.reset()
        await asyncio.sleep(0.1)
        for client in clients:
            client.reset()
        await until(lambda: rig.plane.connections == 0)
        await rig.settle()
        arrived = rig.conductor.names.count("RequestArrived")
        assert rig.conductor.names.count("RequestCancelled") == arrived > 0
        await until(lambda: rig.replica.closed == rig.replica.connections)
