"""What a probe says is taken in only when an engine could say it: one that lies must not poison sums, records or memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from loraledger.conductor.rows import LARGEST, ReplicaView, add_steps
from loraledger.engines.probe_api import LONGEST, MAX_ANSWER, MOST, ProbeApi, refuse_implausible
from loraledger.engines.protocol import ReplicaTarget
from loraledger.errors import TargetError
from loraledger.events import StepsObserved


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ({"events": [{"kind": "step", "steps": 2**62}]}, "steps is"),
        ({"dur_ns": -1}, "dur_ns is -1"),
        ({"floor": [{"device_bytes": float(2**60)}]}, "device_bytes is"),
        ({"taken": {"wall_ns": 2**63}}, "wall_ns is"),
        ({"host": [0] * (MOST + 1)}, "host has 10,001 entries"),
        ({"name": "x" * (LONGEST + 1)}, "name has 4,097 characters"),
        ({"blocked": {"x" * (LONGEST + 1): 1}}, "a name is too long"),
    ],
)
def test_what_no_engine_says_is_refused_by_name(answer: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        refuse_implausible(answer)


def test_what_engines_say_passes() -> None:
    refuse_implausible(
        {
            "taken": {"wall_ns": 1_800_000_000 * 10**9, "mono_ns": 10**15},
            "floor": [{"unattributed_bytes": -5, "weights_bytes": None, "tested": True}],
            "host": [{"name": "a@0123456789ab", "bytes": 2**40}],
        }
    )


@pytest.fixture
async def endless() -> AsyncIterator[str]:
    """A server whose answer never ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
                await writer.drain()
        except ConnectionError:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()


async def test_an_answer_is_read_to_a_limit(endless: str) -> None:
    api = ProbeApi(ReplicaTarget("r1", endless, probe_key="k", probe_timeout=60 * 10**9))
    with pytest.raises(TargetError, match=f"over {MAX_ANSWER:,} bytes"):
        await api.residency()
    await api.close()


def test_sums_of_steps_stay_within_what_the_record_holds() -> None:
    view = ReplicaView()
    for _ in range(3):
        add_steps(view, StepsObserved(1, "r1", LARGEST, LARGEST, LARGEST, LARGEST, LARGEST, {}, 1))
    assert view.steps is not None
    assert (view.steps.steps, view.steps.recomputed) == (LARGEST, LARGEST)
