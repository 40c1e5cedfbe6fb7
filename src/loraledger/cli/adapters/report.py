"""How an inspection of adapters is shown to people: a table, what was found, what all costs.

Sizes are binary, as everywhere, and in the table of costs decimal beside it: file managers and model hubs show MB,
engines' logs GiB, and the two differ by 5 to 7 %. One thing that holds for many adapters is said once, with their names.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.sizing.footprint import kv_tokens
from loraledger.adapters.survey import SLOTTED, Fit, Row, Slots, Totals, Unreadable, kv_bytes_of, slots_of
from loraledger.adapters.verdict.alone import Finding
from loraledger.adapters.verdict.judge import Outcome
from loraledger.cli.adapters.document import share_of
from loraledger.cli.output import print_table
from loraledger.units import format_bytes

VERDICTS: Final[Mapping[Outcome, str]] = {
    "loads": "loads",
    "partly_applied": "partly",
    "changes_nothing": "no effect",
    "refused": "refused",
}
"""How outcomes are called in the table, short enough for 80 columns."""

_COLUMNS: Final = ("adapter", "rank", "modules", "params", "type", "disk", "host", "slot", "verdict")
_COSTS: Final = ("cost", "binary", "decimal", "bytes", "kv tokens", "of what")
_GAP: Final = 2
_NARROWEST: Final = 8
"""Characters of a broken cell on one line."""
_FAMILIES: Final = {"attn": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}
_EFFECTS: Final = {"refuse": "refused", "drop": "not applied", "warn": "note"}
_BINARY: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL: Final = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SAID_OF_THE_BASE: Final = ("base_unknown", "shapes_unknown")
_NAMES_SHOWN: Final = 3
_SUFFIXES_SHOWN: Final = 4

Line = list[object]


def print_report(
    rows: Sequence[Row | Unreadable],
    totals: Totals,
    slots: Slots | None,
    base: BaseModel | None,
    engine: EngineSettings,
) -> None:
    """The whole inspection, for people."""
    _say(_engine_line(engine))
    _say(_base_line(base, engine))
    print()
    lines = [_cells(row, slots, engine) for row in rows]
    _table(_COLUMNS, lines, ["rank", "params", "disk", "host", "slot"], long=0, spare=["params", "type"])
    _say(_outcomes(totals))
    print()
    found = [*_findings(rows), *_turns(totals, slots, engine)]
    for line in [*found, ""] if found else []:
        _say(line)
    lines = list(_costs(totals, slots, base, engine))
    _table(_COSTS, lines, _COSTS[1:-1], long=-1, spare=[])
    if engine.tensor_parallel > 1:
        print(f"host: the copies of all {engine.tensor_parallel} rank processes; slots and KV tokens: of each of them")
    fit = _fit_line(totals.fit, engine)
    if fit:
        print()
        _say(fit)


def complaint(item: Unreadable) -> str:
    """One line for stderr."""
    return _printable(f"{item.path}: {item.reason}")


def _say(line: str) -> None:
    line = _printable(line)
    if sys.stdout.isatty():
        line = textwrap.fill(line, _width(), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    print(line)


def _printable(text: str) -> str:
    """``text`` with what a terminal would obey, or what is not Unicode, escaped: folder names come from tenants."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _engine_line(engine: EngineSettings) -> str:
    ranks, targets = engine.tensor_parallel, engine.lora_target_modules
    parts = [f"{ranks} rank process" + ("" if ranks == 1 else "es")]
    if engine.engine in SLOTTED:
        parts = [
            f"max_loras {engine.max_loras}" + (" (one for the base)" if engine.usable_slots < engine.max_loras else ""),
            f"max_lora_rank {engine.max_lora_rank}",
            f"max_cpu_loras {engine.host_entries}",
            *parts,
            "fully sharded" if engine.fully_sharded_loras else "",
            f"lora_dtype {engine.lora_dtype}",
            "" if targets is None else f"lora_target_modules {','.join(targets)}",
        ]
    return f"engine  {engine.engine}: {', '.join(filter(None, parts))}"


def _base_line(base: BaseModel | None, engine: EngineSettings) -> str:
    if base is None:
        return "base    not given: shapes are not checked and device figures not known; --base DIR names its folder"
    if not base.shaped:
        return f"base    {base.name}: {len(base.modules)} module names, without shapes: device figures are not known"
    kv = kv_bytes_of(base, engine)
    return (
        f"base    {base.name}: {base.architecture}, {base.layers} layers, {base.dtype}, "
        f"weights {format_bytes(base.weight_bytes)}, KV {format_bytes(kv)} a token and rank process"
    ) + "".join(f"; {note}" for note in base.notes)


def _cells(row: Row | Unreadable, slots: Slots | None, engine: EngineSettings) -> Line:
    if isinstance(row, Unreadable):
        return [_printable(row.name), *[None] * 7, "unreadable"]
    return [
        _printable(row.name),
        row.rank,
        f"{row.modules} {_shorten(row.suffixes)}".strip(),
        _count(row.parameters),
        "+".join(row.dtypes),
        format_bytes(row.disk),
        None if row.host is None else format_bytes(row.host.exact * engine.tensor_parallel),
        _share(row, slots),
        VERDICTS[row.verdict.outcome],
    ]


def _table(
    columns: Sequence[str], lines: Sequence[Line], right: Sequence[str], long: int, spare: Sequence[str]
) -> None:
    """A table whose cells stay whole on a narrow terminal: the ``spare`` columns go first, then column ``long`` is broken."""
    if sys.stdout.isatty() and _over(columns, lines) > 0:
        kept = [at for at, column in enumerate(columns) if column not in spare]
        columns, lines = [columns[at] for at in kept], [[line[at] for at in kept] for line in lines]
        room = max(len(str(line[long])) for line in lines) - max(0, _over(columns, lines))
        for line in lines:
            line[long] = "\n".join(textwrap.wrap(str(line[long]), max(_NARROWEST, room)))
    print_table(columns, lines, right=right)


def _over(columns: Sequence[str], lines: Sequence[Line]) -> int:
    """Characters that the table is wider than the terminal."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(columns, *lines, strict=True)]
    return sum(widths) + _GAP * (len(widths) - 1) - _width()


def _width() -> int:
    return shutil.get_terminal_size().columns


def _shorten(suffixes: Sequence[str]) -> str:
    """``attn+mlp`` for the seven layers of a Llama block, ``q+v``, ``qkv+o+gate_up+down`` ..."""
    names = [_printable(suffix.removesuffix("_proj")) for suffix in suffixes]
    shown: list[str] = []
    for family, members in _FAMILIES.items():
        there = [member for member in members if member in names]
        shown += [family] if there == list(members) else there
        names = [name for name in names if name not in members]
    names = shown + names
    more = len(names) - _SUFFIXES_SHOWN
    return "+".join(names) if more <= 0 else f"{'+'.join(names[:_SUFFIXES_SHOWN])}+{more} more"


def _count(number: int) -> str:
    """``41.9M``."""
    return _scaled(number, {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}).replace(" ", "")


def _scaled(number: int, units: Mapping[str, int]) -> str:
    """In the largest unit that leaves 1 or more, to one decimal, so that a column of them lines up: ``80.0 MiB``."""
    unit = max(
        (unit for unit, size in units.items() if number >= size), key=units.__getitem__, default=next(iter(units))
    )
    size = units[unit]
    return f"{number} {unit}" if size == 1 else f"{number / size:.1f} {unit}"


def _share(row: Row, slots: Slots | None) -> str | None:
    """How much of one slot it fills; what is refused fills none."""
    share = share_of(row, slots)
    if share is None or row.verdict.outcome == "refused":
        return None
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def _findings(rows: Sequence[Row | Unreadable]) -> Iterator[str]:
    """Each finding once, with the names that it holds for: refusals first, notes last."""
    names: dict[Finding, list[str]] = {}
    read = [row for row in rows if isinstance(row, Row)]
    for row in read:
        for note in row.notes:
            names.setdefault(Finding("folder", "warn", "loraledger", note), []).append(row.name)
        for finding in row.verdict.findings:
            if finding.rule not in _SAID_OF_THE_BASE:
                names.setdefault(finding, []).append(row.name)
    for effect, word in _EFFECTS.items():
        for finding, whom in names.items():
            if finding.effect == effect:
                who = _listed(whom) if len(whom) < len(read) or len(whom) == 1 else f"all {len(whom)}"
                ours = " by loraledger" if effect == "refuse" and finding.by == "loraledger" else ""
                remedy = f"; {finding.remedy}" if finding.remedy else ""
                yield f"{word}{ours}: {who}: {finding.message}{remedy} [{finding.rule}]"


def _turns(totals: Totals, slots: Slots | None, engine: EngineSettings) -> Iterator[str]:
    """One slot for several adapters: vLLM's default, and a surprise to many."""
    taken = totals.outcomes.total() - totals.outcomes["refused"]
    if engine.engine in SLOTTED and engine.usable_slots == 1 < taken:
        more = engine.max_loras + 1
        price = "" if slots is None else f"{format_bytes(slots.one.total)} or {slots.kv_tokens_one:,} "
        yield (
            f"note: max_loras {engine.max_loras}: a step runs one adapter, so {taken} take turns; --max-loras {more} "
            f"--max-cpu-loras {min(taken, 2 * more)} costs {price}KV tokens more on each rank process [one_slot]"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _outcomes(totals: Totals) -> str:
    words = {"loads": "load", "partly_applied": "are applied in part", "changes_nothing": "would change nothing"}
    counts = [f"{totals.outcomes[o]} {words.get(o, o)}" for o in VERDICTS if totals.outcomes[o]]
    if totals.unreadable:
        counts.append(f"{totals.unreadable} unreadable")
    return f"{_adapters(totals.outcomes.total() + totals.unreadable)}: {', '.join(counts)}"


def _adapters(number: int) -> str:
    return f"{number} adapter" + ("" if number == 1 else "s")


def _costs(totals: Totals, slots: Slots | None, base: BaseModel | None, engine: EngineSettings) -> Iterator[Line]:
    """Disk and host of the adapters, then what the engine's slots take; in words that leave the table 80 columns wide."""
    ranks, number = engine.tensor_parallel, totals.outcomes.total()
    yield _cost("disk", totals.disk, None, f"weights of {_adapters(number)}")
    if totals.host is not None and totals.host_fullest is not None:
        yield _cost("host", totals.host.exact * ranks, None, "all, at their own rank")
        yield _cost("  pinned", totals.host.pinned * ranks, None, "at most, if pinned")
        if engine.host_entries < number:
            yield _cost("  cached", totals.host_fullest * ranks, None, f"at most, {engine.host_entries} at once")
    if base is None or not base.shaped:
        yield _cost("slots", None, None, "needs --base DIR")
    elif slots is not None:
        yield from _slot_costs(totals.fit, slots, base, engine)
    elif totals.device is not None:
        tokens = kv_tokens(totals.device, base, engine)
        yield _cost("device", totals.device, tokens, f"all: {engine.engine} has no slots")


def _slot_costs(fit: Fit, slots: Slots, base: BaseModel, engine: EngineSettings) -> Iterator[Line]:
    yield _cost("slot", slots.one.total, slots.kv_tokens_one, f"one of rank {slots.max_lora_rank}")
    if slots.one.embeddings:
        yield _cost("  layers", slots.one.projections, None, "projections")
        yield _cost("  tables", slots.one.embeddings, None, "embed_tokens, lm_head")
    yield _cost("slots", slots.total, slots.kv_tokens, f"{slots.count}: KV tokens given up")
    rank = fit.without_too_big
    other = None if rank is None or rank == slots.max_lora_rank else slots_of(base, engine, rank)
    if other is not None:
        fits = "the rest" if fit.too_big else "fits all"
        yield _cost("  or", other.total, other.kv_tokens, f"{other.count} of rank {rank}: {fits}")


def _cost(name: str, count: int | None, tokens: int | None, what: str) -> Line:
    if count is None:
        return [name, None, None, None, None, what]
    kv = None if tokens is None else f"{tokens:,}"
    return [name, _scaled(count, _BINARY), _scaled(count, _DECIMAL), f"{count:,}", kv, what]


def _fit_line(fit: Fit, engine: EngineSettings) -> str:
    aside = f" ({fit.aside} refused for other reasons left aside)" if fit.aside else ""
    if fit.too_big:
        rest = f"; {fit.without_too_big} fits the others" if fit.without_too_big is not None else ""
        return f"no max_lora_rank fits {_listed(fit.too_big)}{rest}{aside}"
    if fit.smallest is None:
        return ""
    return f"smallest max_lora_rank that fits all: {fit.smallest}{aside}; it is {engine.max_lora_rank}"
