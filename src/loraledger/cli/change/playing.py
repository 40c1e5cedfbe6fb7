"""What a replay of a change needs: a trace, a profile of what runs, and the two runs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loraledger.cli.change.options import spelled
from loraledger.cli.options import usage
from loraledger.cli.output import printable
from loraledger.errors import LedgerError, ObjectiveError

if TYPE_CHECKING:
    from loraledger.cli.replay.setup import Asked, Prepared
    from loraledger.config import Loaded
    from loraledger.operate.change import Change
    from loraledger.replay.fleet.outcome import Outcome
    from loraledger.replay.results.pairing import Pairing
    from loraledger.replay.results.report import Report
    from loraledger.twin.calibrated import Calibrated


class Newest(NamedTuple):
    """What the newest requests of the record say of the fleet; ``None``: they do not."""

    engine_version: str | None = None
    base: str | None = None


class Played(NamedTuple):
    """Both runs, before and after: what they came to, and what is to be doubted."""

    outcomes: tuple[Outcome, Outcome]
    reports: tuple[Report, Report]
    pairing: Pairing
    warnings: tuple[str, ...]


def newest(loaded: Loaded, trace: Path, engine_version: str | None) -> Newest:
    """From the record of the settings, else from the record that is played; ``engine_version`` wins over both."""
    found = Newest()
    for folder in (loaded.settings.record.dir, trace):
        if folder.is_dir() and found == Newest():
            found = _read_newest(folder)
    return found if engine_version is None else found._replace(engine_version=engine_version)


def check_fresh(loaded: Loaded, profile: Calibrated, seen: Newest) -> None:
    """Raises ``ObjectiveError`` for a profile of something else than what runs; warns where that cannot be told."""
    from loraledger.operate.trial import staleness

    base = loaded.settings.base
    models = set() if seen.base is None else {seen.base}
    if seen.base in base.names:
        models.update(base.names, () if base.path is None else (base.path.name,))
    if (stale := staleness(profile, seen.engine_version, models)) is not None:
        raise ObjectiveError(
            f"{stale}: nothing was played; measure one with `loraledger calibrate`, and name it with --profile"
        )
    if seen == Newest():
        warn(f"the record has no request yet: nothing says that profile {profile.name} is of what runs")
    elif profile.engine_version is None:
        warn(f"profile {profile.name} does not say of which engine version it is")


@contextmanager
def as_trace(source: Path) -> Iterator[Path]:
    """``source``, or what a record had arrive, as a trace. Requests that lack token counts get those of their adapter."""
    if not source.is_dir():
        yield source
        return
    from loraledger.conductor.reading import open_record
    from loraledger.record.lines import BadRows
    from loraledger.replay.traces.recorded import Recorded, check_folder, recorded_adapters
    from loraledger.replay.traces.trace import MAX_TOKENS, Header, write_trace

    check_folder(source)
    with tempfile.TemporaryDirectory(prefix="loraledger-change-") as folder, open_record(source) as reader:
        file, bad = Path(folder) / "trace.jsonl", BadRows(source, skip=False)
        recorded = Recorded(reader, bad, "estimate")
        name, adapters = printable(source.absolute().name), recorded_adapters(reader)
        header = Header(name=name, source="record", licence="own traffic", adapters=adapters)
        write_trace(file, header, iter(recorded), bad, MAX_TOKENS)
        for column, count in sorted(recorded.filled.items()):
            if count:
                warn(f"{column} estimated for {count:,} requests of the record")
        yield file


def play_both(
    change: Change, held: Sequence[Change], loaded: Loaded, file: Path, asked: Asked, out: Path | None, jobs: int | None
) -> Played:
    """The fleet before and after ``change``, with what ``held`` has changed already, on the trace in ``file``.

    The runs stay in ``out``; without one nothing of them stays but what they came to.
    """
    from loraledger.cli.replay.setup import observed, prepare
    from loraledger.operate.trial import sides

    doubts = list(_doubts(change, loaded))
    for doubt in doubts:
        warn(doubt)
    with tempfile.TemporaryDirectory(prefix="loraledger-change-") as scratch:
        with usage():
            both = sides(change, held, Path(scratch))
        prepared = prepare(loaded, file, both, observed(loaded, None, None, None), asked, warn)
        return _played(prepared, out or Path(scratch) / "runs", jobs, doubts)


def _played(prepared: Prepared, out: Path, jobs: int | None, doubts: Sequence[str]) -> Played:
    from loraledger.cli.replay.setup import play
    from loraledger.replay.results.folder import read_outcome
    from loraledger.replay.results.pairing import pair
    from loraledger.replay.results.report import summarize

    before, after = play(prepared, out, jobs, None)
    return Played(
        (read_outcome(before), read_outcome(after)),
        (summarize(before), summarize(after)),
        pair(after, before),
        (*doubts, *prepared.warnings),
    )


def warn(text: str) -> None:
    """On stderr."""
    print(f"warning: {printable(text)}", file=sys.stderr)


def _doubts(change: Change, loaded: Loaded) -> Iterator[str]:
    from loraledger.operate.trial import in_force

    configured = in_force(loaded.settings, change.variable)
    if configured is None:
        yield f"{change.variable} is not the same everywhere in the settings: {spelled(change.before)} is played for all"
    elif configured != change.before:
        yield f"the settings say {spelled(configured)} of {change.variable}: {spelled(change.before)} is played, as proposed"


def _read_newest(folder: Path) -> Newest:
    from loraledger.conductor.reading import open_record

    try:
        with open_record(folder) as reader:
            (row,) = reader.query(
                "FROM requests SELECT arg_max(engine_version, arrived_ns) AS version, arg_max(base, arrived_ns) AS base"
            )
    except LedgerError as error:
        warn(f"{folder}: {error.message}: the profile is not held against it")
        return Newest()
    return Newest(*(value if isinstance(value, str) else None for value in (row["version"], row["base"])))
