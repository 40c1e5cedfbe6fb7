"""The probe over two ranks, and over the death of an engine: each rank's events rebuild its own state, each boot is its own."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .engine import Model
from .probe_client import ProbeClient, probed_engine, rebuilt, shown

REQUESTS, SNAPSHOTS = 60, 10


@pytest.fixture
def probe(model: Model, tmp_path: Path) -> Iterator[ProbeClient]:
    """An engine of two ranks; its test may end it."""
    with probed_engine(model, tmp_path, ("--tensor-parallel-size", "2")) as engine:
        client = ProbeClient(engine, model)
        yield client
        client.close()


def test_two_ranks_rebuild_alike_and_a_killed_engine_comes_back_as_another_boot(
    probe: ProbeClient, tmp_path: Path
) -> None:
    check_ranks(probe)
    check_pin_on_each_rank(probe)
    before = probe.get("/loraledger/events?limit=1").json()
    (left,) = (tmp_path / "spool").iterdir()
    assert left.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in left.iterdir()} == {0o600}
    probe.engine.kill9()
    assert left.exists(), "nobody was left to remove it"
    probe.engine.launch()
    probe.engine.wait_healthy()
    reply = probe.get(f"/loraledger/events?after=5&boot={before['boot']}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "boot_changed")
    now = probe.residency()
    assert now["boot"] == reply.json()["boot"] != before["boot"]
    assert now["host"] == []
    assert [folder.name for folder in (tmp_path / "spool").iterdir()] == [f"boot-{now['boot']}"]
    probe.engine.stop()
    assert list((tmp_path / "spool").iterdir()) == []


def check_ranks(probe: ProbeClient) -> None:
    names = list(probe.model.adapters)
    for name in names:
        probe.load(name).raise_for_status()
    rng = random.Random(5)
    stream = rng.choices(names, weights=[1 / (i + 1) for i in range(len(names))], k=REQUESTS)
    snapshots = []
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(probe.ask, name, rng.randint(1, 4), f"t{i}") for i, name in enumerate(stream)]
        for i in range(SNAPSHOTS):
            jobs[(i + 1) * REQUESTS // SNAPSHOTS - 1].result()
            snapshots.append(probe.residency())
    assert {job.result().status_code for job in jobs} == {200}
    probe.fetch()
    for snapshot in snapshots:
        assert [worker["rank"] for worker in snapshot["workers"]] == [0, 1]
        for rank in (0, 1):
            assert rebuilt(probe.events, snapshot, rank) == shown(snapshot, rank)
    text = probe.engine.log.read_text(errors="replace")
    logged = Counter(re.findall(r"Adding lora\. Model id|Activating LoRA\. int id|Removing adapter int id", text))
    counts = Counter(event["kind"] for event in probe.events)
    assert counts["load_end"] == logged["Adding lora. Model id"] > 2 * len(names)
    assert counts["activation_start"] == logged["Activating LoRA. int id"]
    assert counts["slot_evict"] + counts["host_evict"] == logged["Removing adapter int id"]
    assert not counts["hook_fault"]
    for allocated in (event for event in probe.events if event["kind"] == "slots_allocated"):
        assert allocated["bytes_per_slot"] == 3_279_872, (
            "of 4,459,520 with one rank: embeddings and each A are not divided"
        )


def check_pin_on_each_rank(probe: ProbeClient) -> None:
    probe.done("a04", "pin")
    for name in ("a00", "a01", "a02", "a03", "a05"):
        probe.ask(name).raise_for_status()
    (pinned,) = [slot["id"] for slot in probe.residency()["slots"] if slot["pinned"]]
    assert all(pinned in worker["slots"] for worker in probe.residency()["workers"])
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(probe.ask, name, 40) for name in ("a02", "a03")]
        assert [job.result().status_code for job in both] == [200, 200]
    lost = [event["rank"] for event in probe.fetch() if event["kind"] == "pin_lost"]
    assert sorted(lost) == [0, 1]
    assert probe.answers("a01")
