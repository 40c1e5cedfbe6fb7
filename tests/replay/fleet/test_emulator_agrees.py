from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from e2e.fleet import write_adapters
from loraledger.conductor.reading import last_state, open_record
from loraledger.engines.emulator import EmulatorServer, EmulatorSettings
from loraledger.record.lines import BadRows
from loraledger.record.tables import Row
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.traces.recorded import Recorded
from loraledger.replay.traces.trace import Request
from loraledger.replay.workloads.draws import parse_arrivals, parse_lengths
from loraledger.replay.workloads.generate import Mix, workload
from loraledger.twin.profile import PS_PER_MS, PS_PER_US, TwinProfile
from loraledger.units import NS_PER_S
from support.gateway import GatewayProcess, replica, tenant

PROFILE = TwinProfile(
    slots=4,
    host_entries=7,
    step_base_ps=80 * PS_PER_MS,
    step_per_seq_ps=1000 * PS_PER_US,
    prefill_floor_ps=20 * PS_PER_MS,
    adapter_step_ps=1 * PS_PER_MS,
    load_overhead_ps=150 * PS_PER_MS,
    activation_ps=40 * PS_PER_MS,
)
"""Slow steps and dear loads: what Python adds to each request is small beside them."""
PRIORS = {"load_overhead": "150ms", "activation": "40ms", "prefill_tokens_per_s": 5_000, "itl": "85ms"}
NAMES = [f"a{n}" for n in range(10)]
RATE, SECONDS = 12.0, 25
ATTEMPTS = 4


def demand() -> list[Request]:
    mix = Mix(adapters=len(NAMES), popularity="zipf:1.1")
    gap, prompt, output = parse_arrivals("poisson"), parse_lengths("20-200"), parse_lengths("2-12")
    return list(workload(mix, gap, prompt, output, rate=RATE, duration=SECONDS * NS_PER_S, seed=4))


async def ask(port: int, request: Request) -> None:
    # The emulator counts four bytes of text a token.
    body = {
        "model": request.adapter,
        "prompt": "word" * request.prompt_tokens,
        "max_tokens": request.output_tokens,
        "stream": True,
    }
    text = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer key-acme\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + text)
    answer = await reader.read()
    writer.close()
    assert b" 200 " in answer[:20], answer[:200]
    assert b"[DONE]" in answer


async def play(port: int, requests: Sequence[Request]) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as calls:
        for request in requests:
            await asyncio.sleep(max(0.0, began + request.at / NS_PER_S - loop.time()))
            calls.create_task(ask(port, request))


async def live(folder: Path, policy: str) -> tuple[Path, list[Row]]:
    """The demand through a gateway in front of two emulators: its record's folder, and its requests."""
    paths = write_adapters(folder / "adapters", NAMES)
    engine = EmulatorSettings(profile=PROFILE)
    async with EmulatorServer(engine) as one, EmulatorServer(engine) as other:
        settings = {
            "base": {"names": ["base"]},
            "replicas": [
                replica(name, server.url, engine="emulator", slots=4, host_entries=7, priors=PRIORS)
                for name, server in (("r1", one), ("r2", other))
            ],
            "adapters": {"list": [{"name": name, "path": str(path)} for name, path in paths.items()]},
            "tenants": [tenant("acme", ["*"], limits={"concurrency": 256})],
            "policy": {"name": policy},
        }
        gateway = GatewayProcess(folder, settings)
        try:
            await asyncio.to_thread(gateway.start, 2)
            await play(gateway.port, demand())
        finally:
            await asyncio.to_thread(gateway.stop)
    return gateway.record, gateway.rows()


def replayed(record: Path, profile: TwinProfile) -> list[Row]:
    """What the record says had arrived, through the same kernel with the same settings on the virtual clock."""
    last = last_state(record)
    assert last is not None
    settings = last[0].settings
    with open_record(record) as reader:
        requests = [request for _, request in Recorded(reader, BadRows("record"))]
    fleet = VirtualFleet(settings, {spec.name: profile for spec in settings.replicas})
    fleet.run(requests)
    return fleet.rows["requests"]


def hit_rate(rows: Sequence[Row]) -> float:
    return fmean(row["hit_class"] == "gpu" for row in rows)


def mean_ttft(rows: Sequence[Row]) -> float:
    return fmean(moment(row, "first_token_ns") - moment(row, "arrived_ns") for row in rows)


def moment(row: Row, name: str) -> int:
    value = row[name]
    assert isinstance(value, int)
    return value


async def test_emulators_behind_the_real_gateway_and_the_replay_of_what_arrived_there_agree(tmp_path: Path) -> None:
    # A busy machine may hold up the wall clock's side for some 100 ms, which reroutes what follows: then once more, thrice at most.
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        record, rows = await live(folder, "bounded-affinity")
        ours = replayed(record, PROFILE)
        assert len(ours) == len(rows) > 250
        hits, ttft = hit_rate(ours) - hit_rate(rows), mean_ttft(ours) / mean_ttft(rows) - 1
        if abs(hits) <= 0.01 and abs(ttft) <= 0.1:
            break
    else:
        raise AssertionError(f"hit rate off by {100 * hits:+.1f} points, mean TTFT by {100 * ttft:+.1f} %")
    fewer = replayed(record, msgspec.structs.replace(PROFILE, slots=PROFILE.slots - 2))
    assert abs(mean_ttft(fewer) / mean_ttft(rows) - 1) > 0.1, "the trace tells nothing: other engines agree as well"
