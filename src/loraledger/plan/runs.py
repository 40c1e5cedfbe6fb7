"""Plays trials, several at a time, and keeps what they came to, so that a comparison that was stopped goes on.

Theory of operation. A trial's name is a digest of all that its figures depend on: trace, fleet, twins, observation, objectives,
and the version of this program. Its figures are a small file of that name; the run's record (some MB for 100,000 requests) is
gone once they were read from it. A name that is there is not played again. A folder holds the trials of one trace, and is held by
one comparison at a time, as a sweep's is.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from loraledger import __version__
from loraledger.errors import InputFileError
from loraledger.kernel.settings import encode_settings
from loraledger.plan.canary import Canary
from loraledger.plan.trials import Objective, Trial, measured
from loraledger.replay.fleet.outcome import Outcome
from loraledger.replay.fleet.run import Progress
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.scenarios.folders import held, sweep_folder
from loraledger.replay.scenarios.sweep import Job, Watcher, sweep
from loraledger.replay.traces.trace import MAX_TOKENS

Watching: TypeAlias = Callable[[Sequence[str], int], AbstractContextManager[Watcher]]
"""From labels and requests of each to who is told how they get on."""


class Wanted(NamedTuple):
    """A trial to play."""

    scenario: Scenario
    units: int
    slots: int


@dataclass(kw_only=True)
class Runs:
    """The trials of one comparison. ``played``: how many had to be."""

    folder: Path
    canary: Canary
    objective: Objective
    at_once: int
    watching: Watching
    played: int = 0
    _known: dict[str, Trial] = field(default_factory=dict)

    def trials(self, wanted: Sequence[Wanted]) -> list[Trial]:
        """What each came to, in order. Raises ``InputFileError``."""
        names = [self._name(one.scenario) for one in wanted]
        missing: dict[str, Wanted] = {}
        for name, one in zip(names, wanted, strict=True):
            if name not in self._known and (kept := self._kept(name)) is not None:
                self._known[name] = kept
            if name not in self._known:
                missing.setdefault(name, one)
        if missing:
            self._play(missing)
        return [
            msgspec.structs.replace(self._known[name], units=one.units) for name, one in zip(names, wanted, strict=True)
        ]

    def _play(self, missing: dict[str, Wanted]) -> None:
        jobs = [self._job(name, one.scenario) for name, one in missing.items()]
        with self.watching([job.scenario.label for job in jobs], self.canary.requests) as watcher:
            sweep(jobs, self.at_once, _Keeping(watcher, self, jobs, list(missing.items())))

    def ended(self, job: Job, name: str, one: Wanted) -> None:
        """Keep what a run came to, and no more of it."""
        replicas = one.scenario.settings.replicas
        trial = measured(
            job.directory,
            self.objective,
            units=one.units,
            slots=one.slots,
            replicas=len(replicas),
            kv_tokens=replicas[0].kv_tokens or 0,
        )
        self._keep(name, trial)
        self._known[name] = trial
        self.played += 1
        shutil.rmtree(job.directory, ignore_errors=True)

    def _job(self, name: str, scenario: Scenario) -> Job:
        return Job(
            scenario=scenario,
            trace=self.canary.path,
            directory=self.folder / name,
            identity=self.canary.identity,
            requests=self.canary.requests,
            max_tokens=MAX_TOKENS,
        )

    def _name(self, scenario: Scenario) -> str:
        parts = (
            encode_settings(scenario.settings),
            msgspec.json.encode([scenario.profiles[spec.name] for spec in scenario.settings.replicas]),
            msgspec.json.encode((scenario.observation, self.canary.identity, self.objective, __version__)),
        )
        return hashlib.sha256(b"\n".join(parts)).hexdigest()[:24]

    def _kept(self, name: str) -> Trial | None:
        path = self.folder / f"{name}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Trial)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise InputFileError(
                f"{path}: no figures of a trial: {error}; remove it, and it is played again"
            ) from error

    def _keep(self, name: str, trial: Trial) -> None:
        path = self.folder / f"{name}.json"
        staged = path.with_name(f".{path.name}.new")
        try:
            staged.write_bytes(msgspec.json.format(msgspec.json.encode(trial), indent=1) + b"\n")
            staged.replace(path)
        except OSError as error:
            raise InputFileError(f"{path}: cannot be written: {error.strerror or error}") from error


@dataclass
class _Keeping:
    """Tells ``watcher`` how runs get on, and keeps the figures of each as soon as it has ended: the next one may be stopped."""

    watcher: Watcher
    runs: Runs
    jobs: Sequence[Job]
    wanted: Sequence[tuple[str, Wanted]]

    def moved(self, index: int, progress: Progress) -> None:
        """The n-th run is so far."""
        self.watcher.moved(index, progress)

    def ended(self, index: int, outcome: Outcome) -> None:
        """The n-th run is complete."""
        self.runs.ended(self.jobs[index], *self.wanted[index])
        self.watcher.ended(index, outcome)


@contextmanager
def runs(out: Path | None, canary: Canary, objective: Objective, at_once: int, watching: Watching) -> Iterator[Runs]:
    """Trials in ``out``, else in a folder named by the trace, held while the block runs. Raises ``InputFileError``."""
    digest = canary.identity.partition(" ")[0]
    folder = sweep_folder(out or Path(f"compare-{digest.removeprefix('sha256:')[:8]}"), digest)
    with held(folder):
        yield Runs(folder=folder, canary=canary, objective=objective, at_once=at_once, watching=watching)
