"""The measuring client: it counts what it was given, and takes nothing for an answer that is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
from benchmarks.peers.load import LoadError, Target, by_clock, check, closed_loop, held_open
from benchmarks.peers.upstream import TEXT, Upstream

WRONG_TEXT = b'{"model":"base","choices":[{"text":"another"}]}'
WRONG_MODEL = b'{"model":"a1","choices":[{"text":"%b"}]}' % TEXT.encode()
RIGHT = WRONG_MODEL.replace(b"a1", b"base")


@asynccontextmanager
async def serving(protocol: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await asyncio.sleep(0.05)  # the other ends are heard of


class Fixed(asyncio.Protocol):
    """Answers everything with the same body, and closes the connection after it if told so."""

    def __init__(self, body: bytes, status: bytes = b"200 OK", *, closes: bool = False) -> None:
        self._answer = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body
        self._closes = closes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._answer)
        if self._closes:
            self._transport.close()


def engine() -> Callable[[], Upstream]:
    loaded: dict[bytes, None] = {}
    return lambda: Upstream(loaded)


async def test_the_engines_own_answers_pass_the_check_for_every_model() -> None:
    async with serving(engine()) as port:
        await check(Target(port))


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (WRONG_TEXT, b"200 OK", "the text is another"),
        (WRONG_MODEL, b"200 OK", "the answer is of 'a1'"),
        (b'{"error":"no such model"}', b"404 Not Found", "404 Not Found"),
        (b"[]", b"200 OK", "no answer of the API"),
        (RIGHT, b"200 OK", "does not end with"),
    ],
)
async def test_an_answer_that_is_not_the_engines_is_told(body: bytes, status: bytes, told: str) -> None:
    async with serving(lambda: Fixed(body, status)) as port:
        with pytest.raises(LoadError, match=told):
            await check(Target(port, ("base",)))


async def test_a_closed_loop_counts_whole_answers_and_reads() -> None:
    async with serving(engine()) as port:
        unary = await closed_loop(Target(port), 0.4, 4)
        streams = await closed_loop(Target(port), 1.0, 4, events=5, every_ms=10)
    assert unary.requests > 4
    assert unary.reads >= unary.requests
    assert streams.requests >= 4
    assert streams.reads > streams.requests  # events come one by one


async def test_a_refusal_ends_a_closed_loop() -> None:
    async with serving(lambda: Fixed(b"{}", b"429 Too Many Requests")) as port:
        with pytest.raises(LoadError, match="429"):
            await closed_loop(Target(port), 5.0, 4)


async def test_a_stream_without_its_last_event_ends_a_closed_loop() -> None:
    async with serving(lambda: Fixed(b"2\r\n{}\r\n0\r\n\r\n")) as port:
        with pytest.raises(LoadError, match="without its last event"):
            await closed_loop(Target(port), 5.0, 2, events=5)


async def test_the_clock_sends_to_each_target_in_turn_also_over_connections_that_are_closed_when_idle() -> None:
    async with serving(engine()) as port, serving(lambda: Fixed(RIGHT, closes=True)) as other:
        took = await by_clock((Target(port), Target(other)), 0.4, 50.0)
    assert [len(times) for times in took] == [20, 20]
    assert all(times == sorted(times) and times[0] > 0 for times in took)


async def test_a_refusal_ends_the_clock() -> None:
    async with serving(lambda: Fixed(b"{}", b"503 Service Unavailable")) as port:
        with pytest.raises(LoadError, match="503"):
            await by_clock((Target(port),), 2.0, 50.0)


async def test_memory_is_read_while_all_streams_are_open() -> None:
    open_now: set[Upstream] = set()
    most = 0

    class Counted(Upstream):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            open_now.add(self)

        def connection_lost(self, exc: Exception | None) -> None:
            open_now.discard(self)

    def measure() -> float:
        nonlocal most
        most = len(open_now)
        return 1.5

    loaded: dict[bytes, None] = {}
    async with serving(lambda: Counted(loaded)) as port:
        assert await held_open(Target(port), 10, measure) == 1.5
    assert most == 10
    async with asyncio.timeout(20):
        while open_now:
            await asyncio.sleep(0.01)
