"""Plays scenarios against one trace, several at a time, each into a folder of its own.

Theory of operation. Runs share nothing, so each is a job for a pool of processes (never threads: one run keeps one core busy in
Python). Processes are spawned, not forked, and read the trace from its file themselves; what they have to say while they run is
a few numbers each, in a place of their own on a *board*, a temporary file. Results come back in the order of the scenarios. With
one job at a time the runs are played in this process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from struct import Struct
from tempfile import NamedTemporaryFile
from threading import Thread
from typing import Final, Protocol

import msgspec

from loraledger.errors import InputFileError
from loraledger.replay.fleet.outcome import Outcome
from loraledger.replay.fleet.run import Progress, run
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.scenarios.folders import remove_partial, whole
from loraledger.replay.scenarios.unfit import Unfit, fitting
from loraledger.replay.traces.trace import Request, Trace

_LOOK_S: Final = 0.2
_UNKNOWN: Final = -1
_PLACE: Final = Struct("<qqqqddq")
"""What one run says on the board: a ``Progress``, and whether it began (1) or writes its files (2)."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``trace`` is a file that was read to its end before, ``identity`` what its digest and changes are called."""

    scenario: Scenario
    trace: Path
    directory: Path
    identity: str
    requests: int
    skip_bad: bool = False
    max_tokens: int
    unfit: Unfit = Unfit()
    clients: int | None = None
    """A closed loop of so many, as ``run`` knows it; ``None``: the trace's own arrivals."""


class Watcher(Protocol):
    """Is told how runs get on."""

    def moved(self, index: int, progress: Progress) -> None:
        """The n-th run is so far."""

    def ended(self, index: int, outcome: Outcome) -> None:
        """The n-th run is complete."""


def sweep(jobs: Sequence[Job], at_once: int, watcher: Watcher) -> list[Outcome]:
    """Play all ``jobs``, up to ``at_once`` at a time; what each came to, in their order.

    Raises the first error of a run, and ``InputFileError`` when a process was ended from outside (of memory, mostly). Whatever
    is raised, no process and no incomplete folder is left.
    """
    try:
        if at_once <= 1 or len(jobs) <= 1:
            return [_alone(index, job, watcher) for index, job in enumerate(jobs)]
        return _pooled(jobs, min(at_once, len(jobs)), watcher)
    finally:
        for job in jobs:
            remove_partial(job.directory)


def identity(digest: str, speed: tuple[int, int], unfit: Unfit) -> str:
    """What a trace is called once it is played faster, or without some of its requests: equal names, equal requests."""
    name = digest
    if speed != (1, 1):
        name += f" speed={speed[0]}/{speed[1]}"
    if unfit.most_tokens is not None:
        name += f" tokens<={unfit.most_tokens}"
    if unfit.adapters:
        name += f" without={','.join(sorted(unfit.adapters))}"
    return name


def _alone(index: int, job: Job, watcher: Watcher) -> Outcome:
    outcome = play(job, lambda progress: watcher.moved(index, progress))
    watcher.ended(index, outcome)
    return outcome


def play(job: Job, progress: Callable[[Progress], None]) -> Outcome:
    """One run, in this process. Raises ``InputFileError``, also when another thing than a run has the folder's name."""
    trace = Trace(job.trace, skip_bad=job.skip_bad, max_tokens=job.max_tokens)
    unfit: dict[str, int] = {}
    requests = fitting(trace, job.unfit, unfit) if job.unfit != Unfit() else trace
    with whole(job.directory) as folder:
        return run(
            job.scenario,
            _faster(requests, *job.scenario.speed),
            folder,
            trace_digest=job.identity,
            count=job.requests,
            dropped=ChainMap(unfit, trace.dropped),
            block_tokens=trace.header.block_tokens,
            clients=job.clients,
            progress=progress,
        )


def _faster(requests: Iterable[Request], numerator: int, denominator: int) -> Iterable[Request]:
    if numerator == denominator:
        return requests
    return (msgspec.structs.replace(r, at=r.at * denominator // numerator) for r in requests)


# --- a pool -----------------------------------------------------------------------------------------------------------


def _pooled(jobs: Sequence[Job], processes: int, watcher: Watcher) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    with (
        NamedTemporaryFile(prefix="loraledger-replay-") as board,
        _ended_in_any_case(ProcessPoolExecutor(processes, context, _begin)) as pool,
    ):
        board.truncate(_PLACE.size * len(jobs))
        futures = [pool.submit(_work, index, job, board.name) for index, job in enumerate(jobs)]
        waiting: set[Future[Outcome]] = set(futures)
        while waiting:
            done, waiting = wait(waiting, _LOOK_S, FIRST_COMPLETED)
            board.seek(0)
            places = list(_PLACE.iter_unpack(board.read()))
            for index, future in enumerate(futures):
                if future in done:
                    watcher.ended(index, _result(jobs[index], future))
                elif future in waiting and (progress := _progress(*places[index])) is not None:
                    watcher.moved(index, progress)
        return [future.result() for future in futures]


@contextmanager
def _ended_in_any_case(pool: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """``pool``; when the block is left by an error or an interrupt its processes are ended, not waited for."""
    before = set(multiprocessing.active_children())
    try:
        yield pool
    except BaseException:  # an interrupt too: no process may outlive the sweep
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
            process.join()
        raise
    pool.shutdown()


def _result(job: Job, future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise InputFileError(
            f"{job.scenario.label}: its process was ended from outside, most often because memory ran out: fewer --jobs take less"
        ) from error


def _begin() -> None:
    """What each process of the pool does first. An interrupt is the parent's business: it ends its processes. If it is killed
    itself, they end too: nobody else would."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _work(index: int, job: Job, board: str) -> Outcome:
    """A run in a process of the pool, which says on ``board`` how it gets on."""
    with Path(board).open("r+b", buffering=0) as file:

        def write(progress: Progress) -> None:
            total = _UNKNOWN if progress.total is None else progress.total
            left = _UNKNOWN if progress.left_s is None else progress.left_s
            known = (progress.simulated_ns, progress.arrived, progress.requests, total, progress.rate, left)
            file.seek(index * _PLACE.size)
            file.write(_PLACE.pack(*known, 1 + progress.writing))

        return play(job, write)


def _progress(
    simulated: int, arrived: int, requests: int, total: int, rate: float, left: float, state: int
) -> Progress | None:
    """What a run wrote last; ``None`` before it did."""
    if not state:
        return None
    known = None if total == _UNKNOWN else total
    return Progress(simulated, arrived, requests, known, rate, None if left == _UNKNOWN else left, writing=state > 1)
