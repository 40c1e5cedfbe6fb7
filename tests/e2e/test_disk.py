"""A record directory whose disk is full: requests go on, what is lost is counted, and journalling resumes with space."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from support.gateway import GatewayProcess

from .conftest import Pair
from .fleet import check_texts, errors, in_flight, mixed, parse_metrics, play, settings_for

DISK_BYTES = 8 * 2**20


class Tmpfs:
    """A file system of 8 MiB, filled by one file."""

    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    def fill(self, gateway: GatewayProcess) -> None:
        with self._filler.open("wb", buffering=0) as file:
            chunk = bytes(65536)
            while chunk:
                try:
                    file.write(chunk)
                except OSError:
                    chunk = chunk[: len(chunk) // 2]

    def free(self, gateway: GatewayProcess) -> None:
        self._filler.unlink()


class FileSizeLimit:
    """Without the right to mount: the process may make no file as large as a segment."""

    def fill(self, gateway: GatewayProcess) -> None:
        self._set(gateway, 512 * 1024)

    def free(self, gateway: GatewayProcess) -> None:
        self._set(gateway, resource.RLIM_INFINITY)

    def _set(self, gateway: GatewayProcess, soft: int) -> None:
        assert gateway.process is not None
        resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Tmpfs | FileSizeLimit]:
    """Something that can fill up under the record directory of a gateway in ``tmp_path``."""
    record = tmp_path / "record"
    record.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(record)]
    with ExitStack() as stack:
        if os.geteuid() == 0 and subprocess.run(words, capture_output=True).returncode == 0:
            stack.callback(subprocess.run, ["umount", "--lazy", str(record)], check=True)
            yield Tmpfs(record)
        else:
            yield FileSizeLimit()


def test_a_full_disk_costs_rows_that_are_counted_and_no_request(
    tmp_path: Path, pair: Pair, adapters: dict[str, Path], disk: Tmpfs | FileSizeLimit
) -> None:
    record = {"dir": str(tmp_path / "record"), "segment_bytes": "1MiB", "compact": "2s", "fsync_interval": "100ms"}
    models = [*adapters, "base"]
    with GatewayProcess(tmp_path, settings_for(pair, adapters, record=record)).start(replicas_up=2) as gateway:

        def dropped() -> float:
            page = parse_metrics(httpx2.get(f"{gateway.control}/metrics", timeout=20.0).text)
            return page["loraledger_journal_dropped_frames_total"][0][1]

        before = asyncio.run(play(gateway, mixed(models, 30, seed=1, prefix="before")))
        assert dropped() == 0
        disk.fill(gateway)
        if isinstance(disk, Tmpfs):
            time.sleep(2.2)  # the interval after which a segment is closed to be compacted
            before += asyncio.run(play(gateway, mixed(models, 10, seed=2, prefix="room")))
            assert dropped() == 0, "the segment in hand had room"
        sent = asyncio.run(burst_until(gateway, lambda: dropped() > 0))
        gateway.wait(lambda: "the journal is off" in gateway.log(), "the log to say so")
        during = asyncio.run(play(gateway, mixed(models, 30, seed=3, prefix="during")))
        lost = dropped()
        disk.free(gateway)
        gateway.wait(lambda: "the journal is on again" in gateway.log(), "the journal to take frames again")
        after = asyncio.run(play(gateway, mixed(models, 30, seed=4, prefix="after")))
        assert set(in_flight(gateway).values()) == {0}
        assert gateway.stop() == 0
        rows = gateway.rows()
        verified = gateway.verify()
    assert errors([*before, *during, *after]) == []
    check_texts([*before, *during, *after], adapters)
    assert lost > len(during)
    assert {row["client_id"] for row in rows} >= {call.key for call in [*before, *after]}
    assert len(rows) < len(before) + sent + len(during) + len(after), "what was not written cannot be read"
    assert {row["status"] for row in rows} == {"ok"}
    assert "identical" in verified
    assert "Traceback" not in gateway.log()


def test_a_compaction_that_the_disk_refuses_says_so_and_leaves_the_segments(
    tmp_path: Path, pair: Pair, adapters: dict[str, Path]
) -> None:
    with GatewayProcess(tmp_path, settings_for(pair, adapters)).start(replicas_up=2) as gateway:
        asyncio.run(play(gateway, mixed(list(adapters), 5, seed=1)))
        gateway.stop()
        rows = gateway.rows()
    (gateway.record / "journal-00009999.log").touch()  # only segments before the newest are compacted
    words = [sys.executable, "-m", "loraledger.conductor.compact", str(gateway.record)]
    limited = subprocess.run(words, preexec_fn=no_files, stderr=subprocess.PIPE, text=True)
    assert limited.returncode == 1
    assert "so the segments stay" in limited.stderr
    assert "Traceback" not in limited.stderr
    assert gateway.rows() == rows
    assert subprocess.run(words).returncode == 0
    assert len(list(gateway.record.glob("journal-*.log"))) == 1
    assert gateway.rows() == rows
    assert len(rows) == 5


def no_files() -> None:
    """This process may write no file from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


async def burst_until(gateway: GatewayProcess, condition: Callable[[], bool]) -> int:
    """Many small requests, until ``condition`` or 3,000 of them; returns how many. Each must succeed."""
    body = {"model": "base", "prompt": "Hello", "max_tokens": 1}
    sent = 0
    async with httpx2.AsyncClient(headers={"Authorization": "Bearer key-acme"}, timeout=30.0) as http:
        while not condition() and sent < 3000:
            calls = [http.post(f"{gateway.url}/v1/completions", json=body) for _ in range(30)]
            assert {reply.status_code for reply in await asyncio.gather(*calls)} == {200}
            sent += len(calls)
    return sent
