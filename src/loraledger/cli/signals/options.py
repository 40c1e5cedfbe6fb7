"""What the verbs that judge a record share: which moments are meant, which record, and what is known of replicas and adapters.

Theory of operation. ``--last`` counts back from now. A record that was copied, imported or replayed ended long ago, and an empty
window would be no answer: where the window holds nothing at all, neither a request nor a sample, it counts back from the newest row
instead, and stderr says so. A live record that had no request has samples, so there the answer stays "no request".

A record says nothing of slots and of adapters' bytes: these are of the settings, or of options. Without either the figures that
need them are unknown, and that is said too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from loraledger.cli.options import DurationType, load_settings, usage
from loraledger.cli.output import printable
from loraledger.errors import ConfigError
from loraledger.units import NS_PER_S, spell_duration

if TYPE_CHECKING:
    from loraledger.config import Settings
    from loraledger.record.reader import RecordReader
    from loraledger.signals.facts import Facts
    from loraledger.signals.figures import Window

_DAY_NS: Final = 86_400 * NS_PER_S
_END_NS: Final = 2**63
_MOST_PLACES: Final = 1_000_000

LastOption = Annotated[
    int | None,
    typer.Option("--last", metavar="TIME", parser=DurationType, help="So long back from now. Default: 10m."),
]
FromOption = Annotated[
    str | None, typer.Option("--from", metavar="TIME", help="ISO 8601 (UTC without a zone), now, or -10m before now.")
]
ToOption = Annotated[str | None, typer.Option("--to", metavar="TIME", help="The same. Default: now.")]
BaselineOption = Annotated[
    str,
    typer.Option("--baseline", metavar="WHEN", help="before: as long, just before; FROM/TO; or none."),
]
PoolVersionsOption = Annotated[
    bool, typer.Option("--pool-versions", help="Measure rows of different engine and settings versions as one.")
]
SloOption = Annotated[
    int | None,
    typer.Option("--slo", metavar="TIME", parser=DurationType, help="First tokens are in time within it. Default: 1s."),
]
SlotsOption = Annotated[
    int | None,
    typer.Option("--slots", min=1, max=_MOST_PLACES, help="Slots of each replica, where no settings say so."),
]
HostOption = Annotated[
    int | None,
    typer.Option(
        "--host-entries", min=1, max=_MOST_PLACES, help="Host entries of each replica, where no settings say so."
    ),
]


@dataclass(frozen=True)
class Asked:
    """Which moments are meant, as typed."""

    last: int | None = None
    since: str | None = None
    until: str | None = None
    baseline: str = "before"

    @property
    def from_now(self) -> bool:
        """Nobody named a moment."""
        return self.since is None and self.until is None

    def window(self, now_ns: int) -> Window:
        """Raises ``ValueError``."""
        from loraledger.signals.windows import resolve

        since, until = (None if text is None else moment_of(text, now_ns) for text in (self.since, self.until))
        return _possible(resolve(now_ns, self.last, since, until))

    def compared(self, window: Window, now_ns: int) -> Window | None:
        """The baseline of ``window``. Raises ``ValueError``."""
        from loraledger.signals.windows import before, resolve

        if self.baseline == "none":
            return None
        if self.baseline == "before":
            return _possible(before(window))
        since, slash, until = self.baseline.partition("/")
        if not slash:
            raise ValueError(f"--baseline {self.baseline!r} is not before, none or FROM/TO")
        return resolve(now_ns, None, moment_of(since, now_ns), moment_of(until, now_ns))


class Opened(NamedTuple):
    """A record, open for the hours of these windows."""

    reader: RecordReader
    window: Window
    baseline: Window | None


@contextmanager
def opened(directory: Path, asked: Asked) -> Iterator[Opened]:
    """The record in ``directory`` at the moments asked for; a wrong moment is a usage error. Raises ``InputFileError``."""
    now_ns = time.time_ns()
    with usage():
        window = asked.window(now_ns)
        baseline = asked.compared(window, now_ns)
    reader = _open(directory, window, baseline)
    try:
        newest = _newest(reader)
        if asked.from_now and (newest is None or newest < window.since_ns):
            newest = max((at for at in (newest, _newest_partition(directory)) if at is not None), default=None)
            if newest is not None:
                reader.close()
                last = spell_duration(window.until_ns - window.since_ns)
                say(f"the newest row is of {moment(newest)} UTC: --last {last} counts back from there, not from now")
                window = _ending(asked, newest + 1)
                with usage():
                    baseline = asked.compared(window, now_ns)
                reader = _open(directory, window, baseline)
        yield Opened(reader, window, baseline)
    finally:
        reader.close()


@contextmanager
def opened_until(directory: Path, until: str | None, length_ns: int) -> Iterator[tuple[RecordReader, int]]:
    """The record for so long before ``until``, else before its newest row (not after now); and that moment, in ns.

    Raises ``InputFileError``; a wrong moment is a usage error.
    """
    from loraledger.conductor.reading import open_record

    now_ns = time.time_ns()
    with usage():
        end = now_ns if until is None else moment_of(until, now_ns)
    reader = open_record(directory, since_ns=end - length_ns - _DAY_NS, until_ns=end)
    try:
        if until is None:
            found = (at for at in (_newest(reader), _newest_partition(directory)) if at is not None)
            end = min(max(found, default=now_ns) + 1, now_ns)
            if now_ns - end > _DAY_NS:
                reader.close()
                say(f"the newest row is of {moment(end)} UTC: the weeks count back from there, not from now")
                reader = open_record(directory, since_ns=end - length_ns, until_ns=end)
        yield reader, end
    finally:
        reader.close()


def moment_of(text: str, now_ns: int) -> int:
    """The moment that ``text`` spells, in ns since the epoch. Raises ``ValueError``, also for one that no record can hold."""
    from loraledger.signals.windows import parse_moment

    at = parse_moment(text, now_ns)
    if not 0 <= at < _END_NS:
        raise ValueError(f"{text!r} is not between the years 1970 and 2262: no record has such a time")
    return at


def say(text: str) -> None:
    """A line on stderr."""
    print(f"loraledger: {printable(text)}", file=sys.stderr)


def moment(ns: int, *, day: bool = True) -> str:
    """``2026-09-21 12:00:00`` in UTC."""
    return datetime.fromtimestamp(ns // NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M:%S" if day else "%H:%M:%S")


class Ground(NamedTuple):
    """The record's folder, and the settings that go with it: ``None`` where there are none and the folder was named."""

    directory: Path
    settings: Settings | None
    file: str | None = None
    """Where these were read; ``None``: in the environment alone."""

    @property
    def source(self) -> str:
        """What they are called."""
        return self.file or "the environment"

    @property
    def record(self) -> str:
        """The folder, as short as it can be typed."""
        return _name(self.directory)


def ground(record: Path | None, config: Path | None) -> Ground:
    """Raises ``ConfigError`` when the settings are bad, or needed and not there."""
    if record is not None and config is None and _no_settings():
        return Ground(record, None)
    loaded = load_settings(config)
    file = None if loaded.source is None else _name(loaded.source)
    return Ground(record or loaded.settings.record.dir, loaded.settings, file)


def facts(place: Ground, reader: RecordReader, slots: int | None, host_entries: int | None) -> Facts:
    """What the settings and the options say. ``reader`` tells which replicas there are."""
    from loraledger.signals.facts import Facts, ReplicaFacts

    settings = place.settings
    configured = {} if settings is None else {replica.name: replica for replica in settings.replicas}
    found: dict[str, ReplicaFacts] = {}
    for name in dict.fromkeys((*configured, *_replicas(reader))):
        replica = configured.get(name)
        if replica is not None:
            found[name] = ReplicaFacts(
                slots=replica.slots, host_entries=replica.host_entries, kv_tokens=replica.kv_tokens
            )
        elif slots is not None or host_entries is not None:
            found[name] = ReplicaFacts(slots=slots, host_entries=host_entries)
    sources = [place.source] * bool(configured) + ["the options"] * (slots is not None or host_entries is not None)
    if not sources:
        return Facts(source="no settings were found: --config names them, --slots and --host-entries stand in for them")
    sizes = {} if settings is None else adapter_sizes(settings)
    return Facts(replicas=found, adapter_bytes=sizes, source=f"looked up in {' and '.join(sources)}")


def adapter_sizes(settings: Settings) -> dict[str, int]:
    """Bytes of the weights of each configured adapter whose files can be read here, by name."""
    from loraledger.adapters import FolderReader
    from loraledger.errors import InputFileError

    reader, folder = FolderReader(), settings.adapters.folder
    sizes: dict[str, int] = {}
    places: dict[str, tuple[Path, Path | None]] = {}
    if folder is not None:
        places = {path.name: (path, folder) for path in _folders(folder)}
    places |= {spec.name: (spec.path, None) for spec in settings.adapters.list}
    for name, (path, root) in places.items():
        try:
            sizes[name] = reader.read(name, path, root=root).bytes_disk
        except InputFileError:
            continue  # its bytes stay unknown; `loraledger check` says why
    return sizes


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir()]
    except OSError as error:
        raise ConfigError(f"adapters.folder: {folder} cannot be listed: {error.strerror}") from error


def _ending(asked: Asked, until_ns: int) -> Window:
    """The window asked for, had it been asked for at ``until_ns``."""
    return replace(asked, since=None, until=None).window(until_ns)


def _possible(window: Window) -> Window:
    """``window``, unless it begins before times are counted. Raises ``ValueError``."""
    if window.since_ns < 0:
        raise ValueError("a window before 1970 holds nothing: give a later one, or a shorter one")
    return window


def _replicas(reader: RecordReader) -> list[str]:
    rows = reader.query(
        "SELECT DISTINCT replica FROM requests WHERE replica IS NOT NULL "
        "UNION SELECT DISTINCT replica FROM samples WHERE replica IS NOT NULL ORDER BY replica"
    )
    return [str(row["replica"]) for row in rows]


def _no_settings() -> bool:
    from loraledger.config.loader import DEFAULT_NAME

    return not Path(DEFAULT_NAME).exists() and not any(name.startswith("LORALEDGER_") for name in os.environ)


def _name(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _open(directory: Path, window: Window, baseline: Window | None) -> RecordReader:
    from loraledger.conductor.reading import open_record

    both = [window] if baseline is None else [window, baseline]
    since, until = min(each.since_ns for each in both), max(each.until_ns for each in both)
    return open_record(directory, since_ns=since, until_ns=until)


def _newest(reader: RecordReader) -> int | None:
    """The time of the newest row that is open, of any table."""
    from loraledger.record.tables import TABLES

    found = [reader.query(f"FROM {table.name} SELECT max({table.time}) AS newest") for table in TABLES.values()]
    return max((row["newest"] for (row,) in found if isinstance(row["newest"], int)), default=None)


def _newest_partition(directory: Path) -> int | None:
    """The time of the newest row in Parquet: only the newest hour is opened."""
    from loraledger.record.parquet import HOUR_NS, partitions
    from loraledger.record.reader import RecordReader
    from loraledger.record.tables import TABLES

    found = (paths[-1].parent for table in TABLES if (paths := partitions(directory, table)))
    hour = max((f"{path.parent.name} {path.name}" for path in found), default=None)
    if hour is None:
        return None
    begin = int(datetime.strptime(f"{hour} +0000", "date=%Y-%m-%d hour=%H %z").timestamp()) * NS_PER_S
    with RecordReader(directory, since_ns=begin, until_ns=begin + HOUR_NS) as reader:
        return _newest(reader)
