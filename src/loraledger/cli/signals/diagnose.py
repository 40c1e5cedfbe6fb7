"""``loraledger diagnose``: which pool limits, why, what would not help, and what to replay next.

Theory of operation. The answer stands first, in one sentence: who reads at night reads that. Then the five steps, each with the
figures that it rests on, so that the sentence can be checked; then what would and would not help, what keeps the answer from being
more certain, and what no record shows. The last line is a command, alone and unfolded, so that it can be pasted.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraledger.cli.options import ConfigOption, JsonOption, RecordOption
from loraledger.cli.output import print_json, print_table, printable
from loraledger.cli.signals import shown
from loraledger.cli.signals.document import document
from loraledger.cli.signals.options import (
    Asked,
    BaselineOption,
    FromOption,
    HostOption,
    LastOption,
    PoolVersionsOption,
    SloOption,
    SlotsOption,
    ToOption,
    facts,
    ground,
    opened,
)
from loraledger.cli.signals.signals import measured, notes, print_header
from loraledger.errors import ObjectiveError

if TYPE_CHECKING:
    from loraledger.signals.diagnosis import Diagnosis, Evidence, Finding

SETTINGS: Final = "loraledger.yaml"
"""What the replay command names where no settings are there yet."""


def diagnose(
    last: LastOption = None,
    since: FromOption = None,
    until: ToOption = None,
    baseline: BaselineOption = "before",
    slo: SloOption = None,
    pool_versions: PoolVersionsOption = False,
    slots: SlotsOption = None,
    host_entries: HostOption = None,
    record: RecordOption = None,
    config: ConfigOption = None,
    require: Annotated[bool, typer.Option("--require", help="Exit code 5 when a pool limits.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Which of the pools limits: floor, adapters, kv, routing, demand or nothing; in five steps, with the figures behind each.

    A window (the last ten minutes) is held against a baseline (the ten before). Exit code 0 whatever is found, 5 with --require.
    """
    from loraledger.signals.diagnosis import diagnose as judged

    place = ground(record, config)
    with opened(place.directory, Asked(last, since, until, baseline)) as found:
        known = facts(place, found.reader, slots, host_entries)
        now, before = measured(found, known, slo, pool_versions, itl_by=())
    settings = SETTINGS if place.file is None else place.file
    answer = judged(now, before, known, record=place.record, settings=settings)
    if as_json:
        print_json("diagnosis", document(answer))
    else:
        print_header(now, before)
        _print(answer, notes(now, before))
    if require and answer.pool != "nothing":
        raise ObjectiveError(answer.sentence)


def _print(answer: Diagnosis, missing: list[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    print()
    sys.stdout.flush()
    Console(highlight=False, markup=False, emoji=False, width=shown.WIDTH + 1, soft_wrap=True).print(
        Text(shown.fold(answer.sentence, hanging=""), style="bold")
    )
    for finding in answer.findings:
        _print_step(finding)
    shown.bullets("what else the figures show", (claim.text for claim in answer.details))
    shown.bullets("what would help, and its price", (claim.text for claim in answer.remedies))
    shown.bullets("what would not help, and why", (claim.text for claim in answer.not_helping))
    shown.bullets("why this is not more certain", answer.doubts)
    shown.bullets("what no record shows", answer.not_observable)
    shown.bullets("what is missing", missing)
    experiment = answer.experiment
    print(f"\n{shown.fold(f'next: {experiment.question}')}")
    for command in (experiment.before, experiment.command):
        if command:
            print(f"\n{printable(command)}")
    sys.stdout.flush()


def _print_step(finding: Finding) -> None:
    print("\n" + shown.fold(f"{finding.number}. {finding.question} {finding.verdict.upper()}", hanging="   "))
    print(shown.fold(finding.sentence, indent="   ", hanging=""))
    known = [e for e in finding.evidence if e.value is not None or e.baseline is not None]
    if known:
        rows = [[f"   {printable(e.name)}", _value(e, e.value), _value(e, e.baseline)] for e in known]
        print_table(["   figure", "now", "before"], rows, right=["now", "before"])
    if unknown := ", ".join(e.name for e in finding.evidence if e not in known):
        print(shown.fold(f"not known: {unknown}", indent="   "))


def _value(evidence: Evidence, value: float | str | None) -> str | None:
    """A figure in its unit, which is left out where its name has it."""
    if value is None or isinstance(value, str):
        return None if value is None else printable(value)
    if evidence.unit == "share":
        return shown.share(value)
    if evidence.unit == "s":
        return f"{shown.seconds(value)} s"
    return f"{shown.count(value)} {'' if evidence.unit in evidence.name else evidence.unit}".rstrip()
