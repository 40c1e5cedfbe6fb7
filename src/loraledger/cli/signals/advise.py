"""``loraledger advise``: whether to change the number of slots, what to keep in them, whom to bound, what to look at.

Theory of operation. Advice is about weeks: the last three, up to the newest row. The verdict on slots stands first, with the weeks
and the condition that failed; then what a slot kept for an adapter is worth, and what pins would save on traffic that was; then
bursts and oddities. ``--pins`` writes the pins to a file that a replay takes: nothing is to be kept before it was replayed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from loraledger.cli.options import ConfigOption, JsonOption, RecordOption, usage
from loraledger.cli.output import SCHEMA_VERSION, print_json, print_table, printable
from loraledger.cli.signals import shown
from loraledger.cli.signals.document import document
from loraledger.cli.signals.options import (
    HostOption,
    PoolVersionsOption,
    SlotsOption,
    facts,
    ground,
    moment,
    opened_until,
)
from loraledger.errors import InputFileError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loraledger.signals.rules.advice import Advice, Burst, Gain, Oddity, Ranking, SlotRule, Targets, Week, Worth

_MIB: Final = 2**20
_FROM: Final = {"its own misses": "own", "its size class": "size", "the fleet": "fleet", "its own loads": "loads"}


def advise(
    until: Annotated[
        str | None,
        typer.Option("--to", metavar="TIME", help="Where the weeks end, in ISO 8601. Default: the newest row."),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target", metavar="NAME=VALUE", help="A limit of the rules, such as hit_rate=0.95; may be repeated."
        ),
    ] = None,
    pins: Annotated[Path | None, typer.Option("--pins", help="Write the pins to this file, for a replay.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Rows of each table; --json has all.")] = 10,
    pool_versions: PoolVersionsOption = False,
    slots: SlotsOption = None,
    host_entries: HostOption = None,
    record: RecordOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """What three weeks advise: slots or not, what to pin, which tenants to bound, which hits are slow and which misses harmless.

    Nothing is changed: replay what it says first (docs/signals.md).
    """
    from loraledger.signals.rules import advise as judged
    from loraledger.signals.rules.weeks import WEEK_NS

    with usage():
        targets = _targets(target or [])
    place = ground(record, config)
    with opened_until(place.directory, until, 3 * WEEK_NS) as (reader, until_ns):
        known = facts(place, reader, slots, host_entries)
        found = judged(reader, until_ns, known, targets, pool_versions=pool_versions)
    if pins is not None:
        _write_pins(pins, found.ranking)
    if as_json:
        print_json("advice", document(found))
        return
    _print(found, limit)
    sys.stdout.flush()


def _targets(entries: Sequence[str]) -> Targets:
    """Raises ``ValueError``."""
    from loraledger.signals.rules.advice import Targets

    given: dict[str, float | int] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or name not in Targets.__struct_fields__:
            raise ValueError(f"--target {entry!r}: write NAME=VALUE with one of {', '.join(Targets.__struct_fields__)}")
        try:
            given[name] = int(value) if name == "budget" else float(value)
        except ValueError as error:
            raise ValueError(f"--target {entry!r}: {value!r} is not a number") from error
    return Targets(**given)  # type: ignore[arg-type]


def _write_pins(path: Path, ranking: Ranking | None) -> None:
    if ranking is None or not ranking.pins:
        reason = "no request with an adapter went to a replica in the last week" if ranking is None else ranking.words
        raise InputFileError(f"--pins {path}: not written, since there is nothing to pin: {reason}")
    pins = [{"replica": pin.replica, "adapter": pin.adapter} for pin in ranking.pins]
    whole = msgspec.json.encode({"schema_version": SCHEMA_VERSION, "kind": "pins", "pins": pins})
    try:
        path.write_bytes(msgspec.json.format(whole, indent=1) + b"\n")
    except OSError as error:
        raise InputFileError(f"--pins {path}: cannot be written: {error.strerror or error}") from error


def _print(found: Advice, limit: int) -> None:
    of = "all versions together" if found.version is None else shown.version(found.version)
    print(shown.fold(f"three weeks to {moment(found.until_ns)} UTC: {of if found.versions else 'no request'}"))
    _print_slots(found.slots)
    if found.ranking is not None:
        _print_ranking(found.ranking, limit)
    _print_bursts(found.bursts, limit)
    for title, oddities in (
        ("hits that were slow", found.slow_hits),
        ("misses that did no harm", found.harmless_misses),
    ):
        _print_oddities(title, oddities, limit)
    shown.bullets("what is missing", (*found.slots.missing, *found.notes))


def _print_slots(rule: SlotRule) -> None:
    print(f"\n{shown.fold(f'slots: the rule {rule.verdict}. {_sentence(rule.means)}')}")
    columns = ("week to", "requests", "peak hour", "hits", "of", "prepare", "told", "preempt")
    print(
        "\n"
        + shown.fold(
            "weeks: hits of the peak hour, preparation's share of waiting (as far as told), preemptions for 1,000"
        )
    )
    print_table(columns, [_week(week) for week in rule.weeks], right=("requests", *columns[3:]))
    said = {True: "speaks for it", False: "speaks against it", None: "is not known"}
    shown.bullets(
        "more slots only when all three speak for it",
        (f"{condition.name} {said[condition.holds]}: {condition.words}" for condition in rule.conditions),
    )


def _week(week: Week) -> list[object]:
    return [
        moment(week.window.until_ns)[:10],
        shown.count(week.requests),
        None if week.peak_hour_ns is None else moment(week.peak_hour_ns)[:16],
        shown.share(week.hit_rate),
        shown.count(week.peak_known),
        shown.share(_part(week.preparation_ns, week.ttft_ns)),
        shown.share(_part(week.told, week.answered)),
        shown.count(week.preemptions_per_1000),
    ]


def _print_ranking(ranking: Ranking, limit: int) -> None:
    print(f"\n{shown.fold(f'what to keep in slots: {_sentence(ranking.words)}')}\n")
    columns = ("replica", "adapter", "hour", "misses", "miss s", "from", "MiB", "s/h", "per MiB", "pin")
    right = [name for name in columns if name not in ("replica", "adapter", "from", "pin")]
    best = sorted(ranking.worths, key=lambda worth: (worth.rank, worth.replica))[:limit]
    print(
        shown.fold(
            "requests an hour; s that a miss waits, and whose misses tell; s an hour that a slot kept for it saves"
        )
    )
    print_table(columns, [_worth(worth) for worth in best], right=right)
    if (more := len(ranking.worths) - len(best) + ranking.left_out) > 0:
        print(f"and {more:,} more: --limit shows more")
    if ranking.gains:
        print("\nthe sample played through the slots: misses, and what they wait for (s)")
        heads = ("replica", "slots", "pins", "uses", "LRU", "pinned", "least", "LRU s", "pinned s", "least s")
        gains = [
            *ranking.gains[:limit],
            *([ranking.total] if ranking.total is not None and len(ranking.gains) > 1 else []),
        ]
        print_table(heads, [_gain(gain) for gain in gains], right=heads[1:])
    shown.bullets(
        "let these go first",
        (f"{e.adapter} on {e.replica}: {e.words}" for e in ranking.evictions[:limit]),
    )


def _worth(worth: Worth) -> list[object]:
    return [
        printable(worth.replica),
        printable(worth.adapter)[:40],
        shown.count(worth.per_hour),
        shown.count(worth.misses),
        shown.seconds(worth.penalty),
        None if worth.penalty_from is None else _FROM.get(worth.penalty_from, "loads"),
        None if worth.bytes is None else f"{worth.bytes / _MIB:,.0f}",
        shown.count(worth.per_slot),
        shown.count(worth.per_mib),
        "pin" if worth.pin else "",
    ]


def _gain(gain: Gain) -> list[object]:
    counts = (gain.slots, gain.pins, gain.uses, gain.lru, gain.pinned, gain.least)
    return [
        printable(gain.replica),
        *map(shown.count, counts),
        *map(shown.count, (gain.lru_s, gain.pinned_s, gain.least_s)),
    ]


def _print_bursts(bursts: Sequence[Burst], limit: int) -> None:
    if not bursts:
        return
    print("\ntenants that come in bursts, and a limit to their requests in flight")
    columns = ("tenant", "requests", "peak / mean", "cv", "in flight", "most", "limit", "held", "held s")
    rows = [
        [
            printable(b.tenant)[:40],
            shown.count(b.requests),
            shown.count(b.peak_to_mean),
            shown.count(b.cv),
            shown.count(b.mean_in_flight),
            b.max_in_flight,
            b.limit,
            shown.count(b.held),
            shown.count(b.held_s),
        ]
        for b in bursts[:limit]
    ]
    print_table(columns, rows, right=columns[1:])
    shown.bullets("in words", (burst.words for burst in bursts[:limit]))


def _print_oddities(title: str, oddities: Sequence[Oddity], limit: int) -> None:
    if not oddities:
        return
    print(f"\n{title}: time to first token (s) of these beside that of hits, and likely causes")
    columns = ("adapter", "n", "of", "p50", "hits p50")
    rows = [
        [
            printable(o.adapter)[:40],
            shown.count(o.n),
            shown.count(o.of),
            shown.seconds(o.ttft_p50),
            shown.seconds(o.other_p50),
        ]
        for o in oddities[:limit]
    ]
    print_table(columns, rows, right=columns[1:])
    for oddity in oddities[:limit]:
        print(shown.fold(f"{oddity.adapter}: {'; '.join(oddity.causes) or 'the record shows no cause'}", indent="- "))


def _sentence(text: str) -> str:
    """``text``, ended."""
    return text if text.endswith((".", ":")) or not text else f"{text}."


def _part(part: float, whole: float) -> float | None:
    return part / whole if whole else None
