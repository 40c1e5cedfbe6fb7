"""Proxies as processes: all of a tree is accounted and ended, and who cannot be measured says why."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks.peers.catalog import Peer
from benchmarks.peers.install import InstallError
from benchmarks.peers.load import LoadError
from benchmarks.peers.running import cpu_s, launched, pss_mib, tree
from benchmarks.processes import launch, running


def test_a_tree_is_read_whole_and_ends_whole(tmp_path: Path) -> None:
    with ExitStack() as stack:
        process = launch(stack, tmp_path / "log", ["sh", "-c", "sleep 60 & sleep 60 & wait"])
        deadline = time.monotonic() + 10.0
        while len(tree(process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        members = tree(process.pid)
        assert len(members) == 3
        assert cpu_s(process.pid) >= 0.0
        assert pss_mib(process.pid) > 0.0
    deadline = time.monotonic() + 10.0
    while any(running(member) for member in members) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(running(member) for member in members)


def test_the_cpu_of_children_that_have_ended_is_counted(tmp_path: Path) -> None:
    burn, over = "i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done", tmp_path / "over"
    with ExitStack() as stack:
        process = launch(stack, tmp_path / "log", ["sh", "-c", f"sh -c '{burn}'; touch {over}; sleep 60"])
        deadline = time.monotonic() + 30.0
        while not over.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert cpu_s(process.pid) >= 0.03


def test_a_process_that_has_ended_cannot_be_accounted(tmp_path: Path) -> None:
    with ExitStack() as stack:
        process = launch(stack, tmp_path / "log", ["true"])
        process.wait()
        with pytest.raises(LoadError, match="ended"):
            cpu_s(process.pid)


def _refuse() -> Path:
    raise InstallError("pip: no matching distribution")


def test_who_cannot_be_installed_or_started_keeps_the_reason(tmp_path: Path) -> None:
    absent = Peer("absent", "nothing", _refuse, lambda *_: [], release="1")
    dying = Peer(
        "dying", "nothing", lambda: tmp_path, lambda *_: ["sh", "-c", "echo no such flag; exit 3"], release="2"
    )
    core = {min(os.sched_getaffinity(0))}
    before = os.sched_getaffinity(0)
    with ExitStack() as stack:
        found = [launched(stack, tmp_path, peer, (), core, lambda _: False) for peer in (absent, dying)]
    assert [proxy.missing for proxy in found] == ["pip: no matching distribution", "ended with 3: no such flag"]
    assert os.sched_getaffinity(0) == before
