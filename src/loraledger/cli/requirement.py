"""``loraledger requirement``: the capacity that a record asks for, as a document to send to a market.

Theory of operation. The busiest hour of a period (a week unless another is named) is measured, grown and given headroom. Bytes of
slots and of KV tokens follow from the base model: ``--base``, else ``base.path`` of the settings. Without one the counts stand
alone, and what is missing is said. ``--json`` and ``--yaml`` are the document; the table is for whoever signs it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraledger.cli.options import ConfigOption, DurationType, JsonOption, RecordOption, as_option, usage
from loraledger.cli.output import SCHEMA_VERSION, print_json, print_table
from loraledger.cli.signals import shown
from loraledger.cli.signals.document import document
from loraledger.cli.signals.options import (
    Asked,
    FromOption,
    Ground,
    HostOption,
    PoolVersionsOption,
    SlotsOption,
    ToOption,
    facts,
    ground,
    moment,
    opened,
)
from loraledger.errors import InputFileError
from loraledger.units import NS_PER_S, format_bytes, format_duration, format_rate, parse_bytes

if TYPE_CHECKING:
    from loraledger.plan.requirement import Need, Requirement, Sizes

_WEEK_NS: Final = 7 * 86_400 * NS_PER_S
_Size = as_option(parse_bytes)

_Last = Annotated[
    int | None,
    typer.Option("--last", metavar="TIME", parser=DurationType, help="The period, back from now. Default: 7d."),
]
_Floor = Annotated[
    int | None,
    typer.Option(
        "--floor", metavar="SIZE", parser=_Size, help="What a replica takes beside slots and KV. Default: its weights."
    ),
]
_Base = Annotated[
    Path | None,
    typer.Option("--base", help="Folder of the base model: bytes of slots, of KV tokens and of weights."),
]


def requirement(
    last: _Last = None,
    since: FromOption = None,
    until: ToOption = None,
    growth: Annotated[float, typer.Option("--growth", help="So many times the peak that was seen.")] = 1.0,
    headroom: Annotated[float, typer.Option("--headroom", help="So much more, to stay free at the peak.")] = 1.25,
    floor: _Floor = None,
    base: _Base = None,
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Largest rank that a slot takes; with --base.")] = 16,
    pool_versions: PoolVersionsOption = False,
    slots: SlotsOption = None,
    host_entries: HostOption = None,
    record: RecordOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print one YAML document.")] = False,
) -> None:
    """What the busiest hour asks for: memory after the floor, slots, KV tokens, host memory, links. Unknown shows as -.

    Exit code 3: the record, the settings or the base cannot be read.
    """
    from loraledger.plan.peak import read_peak
    from loraledger.plan.requirement import requirement as worked_out

    with usage():
        if as_json and as_yaml:
            raise ValueError("--json and --yaml are two forms of one document: give one")
    place = ground(record, config)
    sizes = _sizes(base, place, floor, max_lora_rank)
    length = _WEEK_NS if last is None and since is None else last
    with opened(place.directory, Asked(length, since, until, "none")) as found:
        known = facts(place, found.reader, slots, host_entries)
        peak = read_peak(found.reader, found.window, known, pool_versions=pool_versions)
    with usage():
        result = worked_out(peak, known, growth, headroom=headroom, sizes=sizes, now_ns=time.time_ns())
    if as_json:
        print_json("requirement", document(result))
    elif as_yaml:
        _print_yaml(result)
    else:
        _print(result)


def _sizes(base: Path | None, place: Ground, floor: int | None, max_lora_rank: int) -> Sizes:
    """What the base and its engine make of a slot and a token, on one device."""
    from loraledger.plan.requirement import Sizes

    given = None if floor is None else "as given by --floor"
    folder = base if base is not None or place.settings is None else place.settings.base.path
    if folder is None:
        return Sizes(floor_bytes=floor, floor_source=given or Sizes().floor_source)
    from loraledger.adapters.sizing.base import read_base
    from loraledger.adapters.sizing.engine import EngineSettings
    from loraledger.adapters.survey import kv_bytes_of, slots_of
    from loraledger.cli.engine_flags import check_flags
    from loraledger.ledger.budget import rank_weights

    engine = EngineSettings(max_lora_rank=max_lora_rank)
    check_flags(engine)
    read = read_base(folder)
    found = slots_of(read, engine)
    if found is None:
        raise InputFileError(f"{read.name}: slots need the base's own folder")
    return Sizes(
        slot_bytes=found.one.total,
        kv_bytes_per_token=kv_bytes_of(read, engine),
        floor_bytes=rank_weights(read, engine) if floor is None else floor,
        floor_source=given
        or f"weights of {read.name} alone, on one device: the engine's overhead and its share kept free add to it",
        source=f"slots of rank {max_lora_rank} and KV of {read.name} on one device",
    )


def _print(found: Requirement) -> None:
    print(
        shown.fold(
            f"need of {moment(found.period.since_ns)} to {moment(found.period.until_ns)} UTC, by its busiest hour, "
            f"{moment(found.peak.since_ns)}: {found.requests:,} requests on {found.replicas} replicas"
        )
    )
    print(f"growth {found.growth:g}, headroom {found.headroom:g}\n")
    print_table(("need", "", "exact", "source", "age"), [_row(need) for need in found.needs], right=("", "exact"))
    shown.bullets("how", (f"{need.name}: {need.words}" for need in found.needs))
    shown.bullets("what to know", (f"places and sizes of adapters: {found.facts}", *found.notes))
    sys.stdout.flush()


def _row(need: Need) -> list[object]:
    if need.value is None:
        return [need.name, None, None, None, None]
    rounded = {"bytes": format_bytes, "bytes/s": format_rate}.get(need.unit)
    return [
        need.name,
        f"{need.value:,}" if rounded is None else rounded(need.value),
        f"{need.value:,} {need.unit}",
        need.source,
        None if need.age_ns is None else format_duration(need.age_ns),
    ]


def _print_yaml(found: Requirement) -> None:
    import yaml

    whole = {"schema_version": SCHEMA_VERSION, "kind": "requirement", "items": document(found)}
    sys.stdout.write(yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, width=100))
