"""Plays a trace against one scenario and leaves the run as a folder: record files and what it came to.

Theory of operation. The fleet runs on its virtual clock from ``start_ns``, the same for all runs unless told otherwise, so that
equal traces and scenarios give equal bytes; rows go to ``record`` as they come (``rowsink``), and ``run.json`` is written last and
in one step: a folder that has one holds a whole run. Nothing is kept of a request that has ended but sums, so memory does not
grow with the trace (DuckDB's share grows up to its limit; docs/accuracy.md has the figures).

The wall clock is read for the progress that a person watches, ``wall_s`` and ``kernel_share``, and for nothing else.

A folder is only ever written into if it is new, empty, or was made here: ``record`` carries a mark. A run into a folder that holds
one replaces it.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from loraledger import events as ev
from loraledger.errors import InputFileError
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.settings import encode_settings
from loraledger.record.parquet import record_digest
from loraledger.replay.fleet.outcome import RECORD_FOLDER, RUN_FILE, Outcome
from loraledger.replay.fleet.rowsink import RowSink
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.traces.trace import Request
from loraledger.twin.profile import TwinProfile
from loraledger.units import NS_PER_S

EPOCH: Final = 1_767_225_600 * NS_PER_S
"""When runs begin: 2026-01-01 00:00 UTC."""
MARK: Final = ".replay"
PROGRESS_NS: Final = NS_PER_S // 5
"""Wall time from one word on the progress to the next."""


class Progress(msgspec.Struct, frozen=True):
    """How far a run is. Requests count when they ended; ``rate`` is theirs a second of wall time, lately.

    ``left_s``: wall time that is left, ``None`` while it is not known. ``writing``: all is played, and the last record files
    are being written.
    """

    simulated_ns: int
    arrived: int
    requests: int
    total: int | None
    rate: float
    left_s: float | None
    writing: bool = False


def run(
    scenario: Scenario,
    requests: Iterable[Request],
    directory: Path,
    *,
    trace_digest: str,
    count: int | None = None,
    dropped: Mapping[str, int] | None = None,
    block_tokens: int | None = None,
    start_ns: int = EPOCH,
    clients: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    profile_kernel: bool = False,
) -> Outcome:
    """Play ``requests`` (in order of time) to their end; ``directory/record`` and ``directory/run.json``, and what it came to.

    ``count``: how many requests there are, for the time left. ``dropped``: looked at when the requests are over.
    ``block_tokens``: what one number of ``Request.blocks`` stands for (the trace's header). ``clients``: a closed loop of so many
    (``virtual``). ``profile_kernel``: time the kernel for ``Outcome.kernel_share``, which makes the run slower.

    Raises ``InputFileError`` for a folder that is no run's, for a request of an adapter or a tenant that the scenario does not
    have, and whatever reading the requests raises.
    """
    began = time.perf_counter_ns()
    record = _make_room(directory)
    digest = _digest(scenario, start_ns, clients)
    watch = _Watch(progress, count)
    try:
        with RowSink(record) as sink:
            fleet = VirtualFleet(
                scenario.settings,
                scenario.profiles,
                scenario.observation,
                start_ns,
                sink=sink.take,
                block_tokens=block_tokens,
                config_digest=digest[:12],
                beat=watch.beat,
            )
            watch.fleet = fleet
            kernel = _KernelTimer(fleet.conductor.fleet) if profile_kernel else None
            demand = _Demand(scenario, requests)
            played = time.perf_counter_ns()
            fleet.run(demand, clients=clients)
            played = time.perf_counter_ns() - played
            watch.say(writing=True)
            sink.take(fleet.conductor.fold.open_rows())
        recorded = record_digest(record)
    except OSError as error:
        raise InputFileError(f"{directory}: the run cannot be written: {error.strerror or error}") from error
    outcome = msgspec.structs.replace(
        _came_to(scenario, fleet, demand, trace_digest, digest, clients),
        dropped=dict(sorted((dropped or {}).items())),
        warnings=(*scenario.warnings, *_prefix_warning(scenario, demand.blocks, block_tokens)),
        record_digest=recorded,
        wall_s=(time.perf_counter_ns() - began) / NS_PER_S,
        kernel_share=None if kernel is None else kernel.spent / played,
    )
    _leave(directory, outcome)
    return outcome


def _came_to(
    scenario: Scenario, fleet: VirtualFleet, demand: _Demand, trace: str, digest: str, clients: int | None
) -> Outcome:
    """What equal runs have in common."""
    start = fleet.start
    return Outcome(
        label=scenario.label,
        trace=trace,
        policy=scenario.settings.policy,
        scenario=f"sha256:{digest}",
        observation=scenario.observation,
        requests=demand.count,
        open=len(fleet.conductor.fleet.state.requests),
        ended=dict(sorted(fleet.ended.items())),
        start_ns=start,
        simulated_ns=fleet.now - start,
        last_arrival_ns=max(0, fleet.backlog.last - start),
        clients=clients,
        saturation=fleet.backlog.verdict(clients),
        replicas=tuple(replica.counts() for replica in fleet.replicas.values()),
        load_costs_ps=_costs(scenario, demand.used, lambda profile, spec: profile.load_ps(spec.bytes)),
        activation_costs_ps=_costs(scenario, demand.used, lambda profile, spec: profile.activate_ps(spec.rank)),
    )


class _Demand:
    """The requests on their way into the fleet: counted, and held against what the scenario knows."""

    def __init__(self, scenario: Scenario, requests: Iterable[Request]) -> None:
        self.count = 0
        self.blocks = False
        self.used: dict[str, None] = {}
        self._requests = requests
        self._adapters = {None, *(spec.name for spec in scenario.settings.adapters)}
        self._tenants = {spec.name for spec in scenario.settings.tenants}

    def __iter__(self) -> Iterator[Request]:
        adapters, tenants, used = self._adapters, self._tenants, self.used
        for request in self._requests:
            self.count += 1
            adapter = request.adapter
            if adapter not in adapters:
                raise InputFileError(
                    f"request {self.count}: adapter {adapter!r} is not in the fleet that it is replayed against"
                )
            if request.tenant not in tenants:
                raise InputFileError(
                    f"request {self.count}: tenant {request.tenant!r} is not in the fleet that it is replayed against"
                )
            if adapter is not None:
                used[adapter] = None
            if request.blocks:
                self.blocks = True
            yield request


class _Watch:
    """Tells how far a run is, at most every ``PROGRESS_NS`` of wall time."""

    def __init__(self, tell: Callable[[Progress], None] | None, total: int | None) -> None:
        self.fleet: VirtualFleet | None = None
        self._tell = tell
        self._total = total
        self._told = time.perf_counter_ns()
        self._ended = 0
        self._rate = 0.0

    def beat(self) -> None:
        """Some milliseconds have gone by."""
        if self._tell is not None and time.perf_counter_ns() - self._told >= PROGRESS_NS:
            self.say()

    def say(self, *, writing: bool = False) -> None:
        """Tell now. The rate is an average that forgets half of itself in about 4 words."""
        if self._tell is None or self.fleet is None:
            return
        now = time.perf_counter_ns()
        arrived, ended = self.fleet.backlog.arrived, self.fleet.ended.total()
        fresh = (ended - self._ended) * NS_PER_S / max(1, now - self._told)
        self._rate = fresh if not self._ended else 0.85 * self._rate + 0.15 * fresh
        self._told, self._ended = now, ended
        left = None if self._total is None or not self._rate else max(0, self._total - ended) / self._rate
        start = self.fleet.now - self.fleet.start
        self._tell(Progress(start, arrived, ended, self._total, self._rate, left, writing))


class _KernelTimer:
    """Puts a clock around a kernel's step: ``spent`` ns. A read of the clock takes 50 ns, one of two falls into the sum."""

    def __init__(self, fleet: Fleet) -> None:
        self.spent = 0
        self._step = fleet.step_with_changes
        fleet.step_with_changes = self._timed  # type: ignore[method-assign]

    def _timed(self, event: ev.Event) -> tuple[list[ev.Command], list[ev.ResidencyChange], int | None]:
        began = time.perf_counter_ns()
        answer = self._step(event)
        self.spent += time.perf_counter_ns() - began
        return answer


def _digest(scenario: Scenario, start_ns: int, clients: int | None) -> str:
    """64 hexadecimal digits of everything but the trace that the record depends on."""
    parts = (
        encode_settings(scenario.settings),
        msgspec.json.encode([scenario.profiles[spec.name] for spec in scenario.settings.replicas]),
        msgspec.json.encode((scenario.observation, start_ns, clients)),
    )
    return hashlib.sha256(b"\n".join(parts)).hexdigest()


def _costs(
    scenario: Scenario, used: Mapping[str, None], cost: Callable[[TwinProfile, ev.AdapterSpec], int]
) -> dict[str, int]:
    """By adapter that was asked for: the least that it costs on any of the replicas' profiles, ps (a bound rests on it)."""
    profiles: list[TwinProfile] = []
    for profile in scenario.profiles.values():
        if profile not in profiles:
            profiles.append(profile)
    specs = {spec.name: spec for spec in scenario.settings.adapters}
    return {name: min(cost(profile, specs[name]) for profile in profiles) for name in sorted(used)}


def _prefix_warning(scenario: Scenario, blocks: bool, block_tokens: int | None) -> tuple[str, ...]:
    caching = {p.prefix_block_tokens or p.block_size for p in scenario.profiles.values() if p.prefix_caching}
    if not blocks or caching <= {block_tokens}:
        return ()
    wanted = ", ".join(str(tokens) for tokens in sorted(caching))
    return (f"prefixes are not reused: the trace's blocks have {block_tokens} tokens, the profile's {wanted}",)


def _make_room(directory: Path) -> Path:
    """The record folder of a run in ``directory``, empty. Whatever run was there is gone."""
    record = directory / RECORD_FOLDER
    try:
        if record.exists() and any(record.iterdir()) and not (record / MARK).exists():
            raise InputFileError(f"{record} is not a replay's, and is left alone: name another folder")
        (directory / RUN_FILE).unlink(missing_ok=True)
        if record.exists():
            shutil.rmtree(record)
        record.mkdir(parents=True)
        (record / MARK).touch()
    except OSError as error:
        raise InputFileError(f"{directory}: cannot be written: {error.strerror or error}") from error
    return record


def _leave(directory: Path, outcome: Outcome) -> None:
    staged = directory / f".{RUN_FILE}.new"
    try:
        staged.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=1) + b"\n")
        staged.replace(directory / RUN_FILE)
    except OSError as error:
        raise InputFileError(f"{directory}: the run cannot be written: {error.strerror or error}") from error
