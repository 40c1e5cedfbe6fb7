"""A proxy as a running process: how it is started on its core, and what the kernel accounts to it and all below it.

CPU is utime and stime of every process of the tree, threads included, and of its children that have ended. Memory is the sum of
the proportional set sizes, so that pages which workers share count once.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.peers.catalog import Peer
from benchmarks.peers.install import InstallError
from benchmarks.peers.load import LoadError, Target
from benchmarks.processes import ROOT, TICKS, free_port, launch, memory_mib

READY_S: Final = 120.0
CLEAN: Final = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", "PYTHONPATH": ""}
"""Client libraries of the peers heed HTTP_PROXY, and this is not what it is for; nor are modules of this tree for theirs."""
Figures = dict[str, float]


@dataclass
class Proxy:
    """One peer, started, with a dictionary of figures for each round. ``missing``: why it has none."""

    peer: Peer
    version: str = ""
    command: str = ""
    pid: int = 0
    port: int = 0
    rounds: list[Figures] = field(default_factory=list)
    stream_kib: float | None = None
    missing: str | None = None

    @property
    def target(self) -> Target:
        """Where its requests go."""
        return Target(self.port, self.peer.models, self.peer.key)

    def drop(self, why: object) -> None:
        """It cannot be measured: its row says why, in one line."""
        self.missing = " ".join(str(why).split())[:300]
        self.rounds, self.stream_kib = [], None


def two_cores() -> tuple[set[int], set[int]]:
    """One for the proxy, one for all others. Raises SystemExit where there is one only."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the proxy, one for what calls it and what it calls")
    return {cores[0]}, {cores[1]}


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """What is started inside runs on ``cores``, and so does this process meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def launched(
    stack: ExitStack,
    folder: Path,
    peer: Peer,
    upstreams: Sequence[int],
    core: set[int],
    answers: Callable[[Target], bool],
) -> Proxy:
    """``peer``, installed if need be and started on ``core``; with a reason in it when that failed."""
    proxy = Proxy(peer)
    try:
        program = peer.install()
        home = folder / peer.name.replace(" ", "-")
        home.mkdir()
        proxy.version, proxy.port = peer.version(), free_port()
        words = peer.command(program, proxy.port, upstreams, home)
        proxy.command = shlex.join(words).replace(str(home), "DIR").replace(f"{ROOT}/", "")
        with pinned(core):
            process = launch(stack, home / "log", words, cwd=home, environment={**CLEAN, **peer.environment})
        proxy.pid = process.pid
        _wait(proxy, process, home / "log", answers)
    except (InstallError, LoadError, OSError) as error:
        proxy.drop(error)
    return proxy


def _wait(proxy: Proxy, process: subprocess.Popen[bytes], log: Path, answers: Callable[[Target], bool]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        if answers(proxy.target):
            return
        time.sleep(0.3)
    ended = f"ended with {process.returncode}" if process.returncode is not None else f"no answer in {READY_S:.0f} s"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise LoadError(f"{ended}: {' / '.join(lines[-2:])}")


def tree(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(word) for word in task.read_text(encoding="ascii").split()]
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread has ended
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds of the tree, with what its ended children used. Raises LoadError when the process has ended."""
    total = 0
    for member in tree(pid):
        try:
            words = (
                Path(f"/proc/{member}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            )
        except (FileNotFoundError, ProcessLookupError):
            if member == pid:
                raise LoadError("its process has ended") from None
            continue  # its parent has counted it
        total += sum(int(word) for word in words[11:15])
    return total / TICKS


def pss_mib(pid: int) -> float:
    """Proportional set size of the tree, MiB."""
    total = 0.0
    for member in tree(pid):
        try:
            total += memory_mib(member)["Pss"]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return total
