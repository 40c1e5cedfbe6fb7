"""``loraledger review``: a week beside the week before, as one page, as Markdown or as a document.

Theory of operation. Without a file to write to, the Markdown goes to stdout. Each review is noted beside the record, so that
``--if-changed`` can tell what came since: then a review is made when a model, an adapter, an engine, settings or a gateway is new
in the record, and else nothing is written. A record that cannot be written to is reviewed all the same; the note is missing then.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraledger.cli.options import ConfigOption, DurationType, JsonOption, RecordOption
from loraledger.cli.output import print_json
from loraledger.cli.signals.document import document
from loraledger.cli.signals.options import (
    Asked,
    FromOption,
    HostOption,
    PoolVersionsOption,
    SloOption,
    SlotsOption,
    ToOption,
    facts,
    ground,
    moment,
    opened,
    say,
)
from loraledger.errors import InputFileError
from loraledger.units import NS_PER_S

if TYPE_CHECKING:
    from loraledger.cli.signals.options import Ground
    from loraledger.operate.review import Fresh, Review
    from loraledger.operate.review.triggers import Last
    from loraledger.signals.figures import Window

_WEEK_NS: Final = 7 * 86_400 * NS_PER_S

_Last = Annotated[
    int | None,
    typer.Option("--last", metavar="TIME", parser=DurationType, help="So long back from now. Default: 7d."),
]
_Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write the page here: one HTML file.")]
_Markdown = Annotated[
    Path | None, typer.Option("--markdown", help="Write Markdown here. Default without --out: stdout.")
]
_IfChanged = Annotated[
    bool,
    typer.Option(
        "--if-changed",
        help="Only when a model, adapter, engine, settings or gateway came since the last review; else write nothing.",
    ),
]


def review(
    last: _Last = None,
    since: FromOption = None,
    until: ToOption = None,
    out: _Out = None,
    markdown: _Markdown = None,
    if_changed: _IfChanged = False,
    slo: SloOption = None,
    pool_versions: PoolVersionsOption = False,
    slots: SlotsOption = None,
    host_entries: HostOption = None,
    record: RecordOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a week says: sizes, hits, loads, latency, pins, rules, the worst hour, what changed, and what to try next.

    Everything stands beside the week before. Exit code 0 also when --if-changed finds nothing new.
    """
    from loraledger.operate.review import page, text

    place = ground(record, config)
    length = _WEEK_NS if last is None and since is None else last
    with opened(place.directory, Asked(length, since, until)) as found:
        window = found.window
    if if_changed and not _changed(place.directory, window):
        if as_json:
            print_json("review", None)
        return
    made = _made(place, window, slo, pool_versions, slots, host_entries)
    for path, written in ((out, page), (markdown, text)):
        if path is not None:
            _write(path, written(made))
    if as_json:
        print_json("review", document(made))
    elif out is None and markdown is None:
        sys.stdout.write(text(made))
    _remember(place.directory, window)
    sys.stdout.flush()


def _made(
    place: Ground, window: Window, slo: int | None, pool_versions: bool, slots: int | None, host_entries: int | None
) -> Review:
    from loraledger.conductor.reading import open_record
    from loraledger.operate.journal import changes_of, lasting, read_entries
    from loraledger.operate.review import Names, standing
    from loraledger.operate.review import review as gathered
    from loraledger.operate.review.gather import reach

    hours = reach(window)
    entries = read_entries(place.directory / "changes")
    with open_record(place.directory, since_ns=hours.since_ns, until_ns=hours.until_ns) as reader:
        known = facts(place, reader, slots, host_entries)
        return gathered(
            reader,
            window,
            known,
            standing(place.settings, known, lasting(entries)),
            list(changes_of(entries).values()),
            Names(place.record, place.file),
            slo_s=(slo or NS_PER_S) / NS_PER_S,
            pool_versions=pool_versions,
        )


def _changed(directory: Path, window: Window) -> bool:
    """Whether there is something to review, which stderr is told; the first review always has."""
    from loraledger.operate.review.triggers import last_review

    last = last_review(directory)
    if last is None:
        say("no review of this record before this one")
        return True
    found = _fresh(directory, last, window.until_ns)
    for one in found:
        say(f"new since the last review: {one.kind} {one.name}, at {moment(one.first_ns)} UTC")
    if not found:
        say(f"nothing new since the last review, which ended {moment(last.until_ns)} UTC: no review was made")
    return bool(found)


def _fresh(directory: Path, last: Last, until_ns: int) -> tuple[Fresh, ...]:
    """The whole record is opened: whether an adapter is new only all of it tells."""
    from loraledger.conductor.reading import open_record
    from loraledger.operate.review.triggers import fresh
    from loraledger.signals.figures import Window

    with open_record(directory, until_ns=until_ns) as reader:
        return fresh(reader, Window(last.since_ns, last.until_ns), until_ns)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputFileError(f"{path} cannot be written: {error.strerror or error}") from error
    say(f"wrote {path}")


def _remember(directory: Path, window: Window) -> None:
    from loraledger.operate.review.triggers import remember

    try:
        remember(directory, window, time.time_ns())
    except OSError as error:
        say(f"the review is not noted beside the record ({error.strerror}): --if-changed will not know of it")
