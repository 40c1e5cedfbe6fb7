"""From what was asked for to what is played: the ground that scenarios stand on, the jobs of a sweep, and their folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loraledger.adapters import Catalog
from loraledger.cli.output import watched
from loraledger.cli.replay.progress import watching
from loraledger.config import Loaded
from loraledger.errors import InputFileError, LedgerError
from loraledger.gateway.assemble import fleet_settings
from loraledger.record.reader import RecordReader
from loraledger.replay.fleet.observation import Observation
from loraledger.replay.fleet.outcome import RUN_FILE
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.results.folder import check_record, open_runs, read_outcome
from loraledger.replay.results.pairing import unlike
from loraledger.replay.scenarios.axes import Changes
from loraledger.replay.scenarios.building import Ground, scenario
from loraledger.replay.scenarios.folders import held, run_folders, runs_in, sweep_folder
from loraledger.replay.scenarios.parties import Survey, adapters_of, may_call, survey, tenants_of
from loraledger.replay.scenarios.profiles import DEFAULT, read_profile
from loraledger.replay.scenarios.sweep import Job, identity, sweep
from loraledger.replay.scenarios.unfit import Unfit, unfit_of
from loraledger.replay.traces.trace import MAX_TOKENS, Trace

_NAMED = 8
"""Runs of a sweep that an error names at most."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options that shape what is played; ``None``: as configured, or as the trace has it."""

    profile: str | None = None
    keep_kv: bool = False
    engine_version: str | None = None
    adapter_rank: int | None = None
    adapter_bytes: int | None = None
    skip_bad: bool = False
    skip_unfit: bool = False
    max_tokens: int | None = None
    clients: int | None = None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that can be refused has been."""

    asked: Asked
    trace: Trace
    seen: Survey
    scenarios: tuple[Scenario, ...]
    unfit: Unfit
    warnings: tuple[str, ...]
    """Of all scenarios together, each once."""


def observed(loaded: Loaded, probe: bool | None, interval: int | None, delay: int | None) -> Observation:
    """What the gateway of these settings would see: the probe only where every replica has one. Raises ``ValueError``."""
    settings, usual = loaded.settings, Observation()
    probed = all(replica.probe is not None for replica in settings.replicas)
    return Observation(
        scrape_interval=settings.limits.scrape_interval if interval is None else interval,
        scrape_delay=usual.scrape_delay if delay is None else delay,
        probe=probed if probe is None else probe,
    )


def prepare(
    loaded: Loaded,
    file: Path,
    changes: Sequence[Changes],
    observation: Observation,
    asked: Asked,
    warn: Callable[[str], None],
) -> Prepared:
    """Read the trace once, build every scenario and hold the trace against it. Raises ``InputFileError`` and ``ConfigError``.

    Warnings go to ``warn`` as soon as they are known: where a limit comes from explains why something does not fit.
    """
    trace = Trace(file, skip_bad=asked.skip_bad, max_tokens=asked.max_tokens or MAX_TOKENS)
    seen = survey(trace, watched(trace, "reading", trace.header.requests), may_call(loaded.settings))
    ground, warnings = _ground(loaded, trace, seen, observation, asked)
    scenarios = tuple(scenario(ground, one) for one in changes)
    said = list(dict.fromkeys([*warnings, *(text for one in scenarios for text in one.warnings)]))
    for text in said:
        warn(text)
    unfit, left_out = unfit_of(trace, frozenset(seen.adapters), seen.most_tokens, scenarios, skip=asked.skip_unfit)
    for text in left_out:
        warn(text)
    return Prepared(asked=asked, trace=trace, seen=seen, scenarios=scenarios, unfit=unfit, warnings=(*said, *left_out))


def play(prepared: Prepared, out: Path | None, at_once: int | None, against: Path | None) -> list[Path]:
    """Play every scenario; the folders of the runs, in order.

    Raises ``InputFileError`` also when ``against`` is no run of what is to be played, before anything is.
    """
    folder = sweep_folder(out, prepared.seen.digest)
    jobs = _jobs(prepared, folder, against)
    if against is not None:
        _check_pairable(against, jobs)
    labels = [job.scenario.label for job in jobs]
    with held(folder), watching(labels, prepared.seen.requests) as watcher:
        sweep(jobs, at_once or len(os.sched_getaffinity(0)), watcher)
    return [job.directory for job in jobs]


def _check_pairable(against: Path, jobs: Sequence[Job]) -> None:
    """Raises ``InputFileError`` when ``against`` is damaged, or a run of something else than ``jobs`` will be."""
    if found := runs_in(against):
        named = ", ".join(map(str, found[:_NAMED])) + ", ..." * (len(found) > _NAMED)
        raise InputFileError(f"--against {against}: the folder of a sweep, not of one run: name one of {named}")
    if not (against / RUN_FILE).is_file():
        raise InputFileError(
            f"--against {against}: not the folder of a run: it has no {RUN_FILE}; name the folder of one complete run, "
            "such as replay-1a2b3c4d/slots=8"
        )
    outcome = read_outcome(against)
    for job in jobs:
        if reason := unlike(job.identity, outcome.trace):
            raise InputFileError(
                f"{job.scenario.label} cannot be paired with --against {against}: {reason}; replay what {against} tried "
                f"on {job.trace} with the same --set speed= and --skip-unfit as here into another --out, and name that run"
            )
    with open_runs(run=against) as tables:
        check_record(tables, against, outcome)


def _jobs(prepared: Prepared, folder: Path, against: Path | None) -> list[Job]:
    digest, asked = prepared.seen.digest, prepared.asked
    labels = [one.label for one in prepared.scenarios]
    folders = run_folders(folder, labels, against)
    return [
        Job(
            scenario=one,
            trace=prepared.trace.path,
            directory=directory,
            identity=identity(digest, one.speed, prepared.unfit),
            requests=prepared.seen.requests,
            skip_bad=asked.skip_bad,
            max_tokens=asked.max_tokens or MAX_TOKENS,
            unfit=prepared.unfit,
            clients=asked.clients,
        )
        for one, directory in zip(prepared.scenarios, folders, strict=True)
    ]


def _ground(
    loaded: Loaded, trace: Trace, seen: Survey, observation: Observation, asked: Asked
) -> tuple[Ground, list[str]]:
    settings, tree = loaded.settings, loaded.tree
    fleet = fleet_settings(settings, Catalog((), (), ()))
    tenants, about_tenants = tenants_of(seen, fleet.tenants)
    adapters, about_adapters = adapters_of(trace, seen, settings, rank=asked.adapter_rank, size=asked.adapter_bytes)
    ground = Ground(
        settings=settings,
        fleet=msgspec.structs.replace(fleet, tenants=tenants, adapters=adapters),
        written=lambda index, name: tree.origin_of(("replicas", index, name)).kind != "default",
        profile=read_profile(asked.profile or DEFAULT),
        chosen=asked.profile is not None,
        read=read_profile,
        observation=observation,
        keep_kv=asked.keep_kv,
        engine_version=asked.engine_version or _recorded_version(settings.record.dir),
    )
    return ground, [*about_adapters, *about_tenants]


def _recorded_version(record: Path) -> str | None:
    """The engine version of the latest request in the compacted record of these settings, if it has one."""
    if not record.is_dir():
        return None
    try:
        with RecordReader(record) as reader:
            found = reader.query("FROM requests SELECT arg_max(engine_version, arrived_ns) AS version")
    except LedgerError:
        return None  # a record that cannot be read is no reason not to replay: the version is then not compared
    version = found[0]["version"]
    return version if isinstance(version, str) else None
