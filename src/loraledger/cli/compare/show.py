"""What a comparison came to: tables for people, one document for programs.

Theory of operation. In the order of the questions: what is compared, what memory the floors leave (the headline beside it), what
each offer does at its best under each policy and what that costs, what hardware and policy do alone, what nothing else beats, and
what is recommended. No clock is read and no table holds a time of this machine: equal input is equal output, wherever it is
played.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from loraledger.cli.output import print_json, print_table, printable
from loraledger.plan.compare import COST
from loraledger.plan.recommend import money, order_holds, reasons, uncertainty
from loraledger.units import NS_PER_S, format_bytes, format_duration

if TYPE_CHECKING:
    from loraledger.plan.canary import Canary, Twins
    from loraledger.plan.candidates import Candidate, Setup
    from loraledger.plan.compare import Asked, Cell, Comparison, Doubt
    from loraledger.plan.grid import Grid
    from loraledger.plan.offers import Offers

WIDTH: Final = 100
"""Columns that a sentence takes at most."""
MANY: Final = 15
"""Rows of the Pareto table at most; ``--json`` has all."""
MEMORY: Final = (
    "offer",
    "gpu",
    "headline",
    "floor",
    "usable",
    "share",
    "replicas",
    "an hour",
    "headline/1",
    "usable/1",
)
COSTS: Final = ("offer", "policy", "units", "replicas", "slots", "kv tokens", "an hour", "1M tokens", "goal", "tried")
WAITS: Final = ("offer", "policy", "met", "p50", "p99", "itl", "in slot", "else host", "loads", "preempt")
PARETO: Final = ("an hour", "met", "p99", "offer", "policy", "units", "slots", "goal")
_WORDS: Final = ("offer", "gpu", "policy", "tried", "goal")


@dataclass(frozen=True)
class Shown:
    """Everything that is told of a comparison."""

    offers: Offers
    canary: Canary
    setup: Setup
    twins: Twins
    asked: Asked
    candidates: Sequence[Candidate]
    found: Comparison

    @property
    def currency(self) -> str:
        """The one that all prices are in."""
        return self.offers.currencies[0]

    def of(self, name: str) -> Candidate:
        """The candidate of the offer of that name."""
        return next(one for one in self.candidates if one.offer.name == name)


def show(shown: Shown, as_json: bool) -> None:
    """Print it on stdout."""
    if as_json:
        print_json("compare", _document(shown))
        return
    for line in _head(shown):
        print(_folded(line))
    print("\nmemory of one unit: what the floors of its replicas leave of the headline")
    _table(MEMORY, [_memory(one) for one in shown.candidates])
    for one in shown.candidates:
        if not one.fits:
            print(_folded(f"{printable(one.offer.name)}: {one.words}"))
    print(_folded(_money_for(shown)))
    print(
        f"\nthe best of each, the first one first: units of the offer, costs in {shown.currency}, units x slots that were tried"
    )
    _table(COSTS, [_cost(cell) for cell in shown.found.cells])
    print("\nwhat clients waited there (p50 and p99 of the first token in s, itl in ms), and what adapters and KV cost")
    _table(WAITS, [_wait(cell) for cell in shown.found.cells])
    for grid in shown.found.grids:
        size = "" if grid.figure == COST else ", each offer at the size of its best"
        print(f"\npolicy x hardware: {grid.figure}{size}")
        _grid(grid)
    print("\nwhat nothing else beats, of all that was tried: cheaper, more met, or a shorter p99")
    rows = [_pareto(cell) for cell in shown.found.pareto]
    _table(PARETO, rows[:MANY])
    if len(rows) > MANY:
        print(f"and {len(rows) - MANY} more (--json has all)")
    by_name = {one.offer.name: one for one in shown.candidates}
    _bullets("recommended", reasons(shown.found, by_name, shown.asked))
    _bullets("how sure", uncertainty(shown.found, by_name, shown.asked, shown.twins.measured_on.name))
    sys.stdout.flush()


def _head(shown: Shown) -> Iterator[str]:
    canary, objective, setup = shown.canary, shown.asked.objective, shown.setup
    pace = "" if canary.speed == (1, 1) else f", played {canary.speed[0] / canary.speed[1]:g} times as fast"
    drawn = "" if canary.seed is None else f", seed {canary.seed}"
    yield (
        f"canary   {printable(canary.name)}: {canary.requests:,} requests for {len(canary.adapters):,} adapters{pace}{drawn}; "
        f"{canary.identity.partition(' ')[0]}"
    )
    yield (
        f"engine   {setup.base.name}, slots of rank {setup.engine.max_lora_rank}, host cache of "
        f"{shown.twins.host_entries} entries, KV for {setup.least_kv_tokens:,} tokens at least"
    )
    times = shown.twins.calibrated
    yield f"times    {times.name}, measured on {shown.twins.measured_on.name}; other GPUs by the ratios of their data sheets"
    tokens = "" if objective.itl_ns is None else f" and {format_duration(objective.itl_ns)} between tokens"
    yield (
        f"wanted   {objective.share:.1%} of requests with a first token within {format_duration(objective.ttft_ns)}{tokens}; "
        f"at most {objective.preemptions_per_1000:g} preemptions for 1,000 requests"
    )
    yield (
        f"tried    slots {', '.join(map(str, shown.asked.ladder))}; up to {shown.asked.replicas_max} replicas; "
        f"{shown.found.trials:,} trials; offers {shown.offers.digest[:12]}"
    )


def _money_for(shown: Shown) -> str:
    """Headline and usable memory for the money: not always the same offer."""
    priced = [one for one in shown.candidates if one.fits and one.offer.price_per_hour]
    if not priced:
        return "no offer that fits has a price"
    most = max(priced, key=lambda one: one.headline_bytes / one.offer.price_per_hour)
    best = max(priced, key=lambda one: one.usable_bytes / one.offer.price_per_hour)
    return f"most headline for 1 {shown.currency} an hour: {printable(most.offer.name)}; most usable: {printable(best.offer.name)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    print_table(columns, rows, right=[name for name in columns if name not in _WORDS])


def _memory(one: Candidate) -> list[object]:
    offer, floor, price = one.offer, one.floor_bytes, one.offer.price_per_hour
    count = f"{offer.count} x " if offer.count > 1 else ""
    return [
        printable(offer.name),
        f"{count}{offer.gpu.name}",
        format_bytes(one.headline_bytes),
        None if floor is None else format_bytes(floor),
        format_bytes(one.usable_bytes) if one.fits else "does not fit",
        f"{one.usable_bytes / one.headline_bytes:.0%}" if one.fits else None,
        one.replicas if one.fits else None,
        f"{price:,.2f}",
        format_bytes(int(one.headline_bytes / price)) if price else None,
        format_bytes(int(one.usable_bytes / price)) if one.fits and price else None,
    ]


def _cost(cell: Cell) -> list[object]:
    trial = cell.trial
    return [
        printable(cell.offer),
        cell.policy,
        trial.units,
        trial.replicas,
        trial.slots,
        f"{trial.kv_tokens:,}",
        money(cell.cost_micro, "").strip(),
        None if cell.per_million is None else f"{cell.per_million:,.3f}",
        _goal(cell),
        " ".join(f"{units}x{','.join(map(str, slots))}" for units, slots in _tried(cell)),
    ]


def _wait(cell: Cell) -> list[object]:
    trial = cell.trial
    return [
        printable(cell.offer),
        cell.policy,
        _share(trial.met),
        None if trial.ttft_p50 is None else f"{trial.ttft_p50:.3f}",
        None if trial.ttft_p99 is None else f"{trial.ttft_p99:.3f}",
        None if trial.itl is None else f"{trial.itl * 1000:.1f}",
        _share(trial.gpu_rate),
        _share(trial.host_rate),
        f"{trial.loads:,}",
        None if trial.preemptions_per_1000 is None else f"{trial.preemptions_per_1000:.1f}",
    ]


def _goal(cell: Cell) -> str:
    """Whether the objectives are kept, and the first thing that stands in the way."""
    trial = cell.trial
    if trial.meets:
        return "kept"
    return "SATURATED" if trial.saturated else "GUARDRAIL" if trial.failed else "missed"


def _tried(cell: Cell) -> list[tuple[int, list[int]]]:
    """The slots that were tried with each number of units."""
    by_units: dict[int, list[int]] = {}
    for one in cell.tried:
        by_units.setdefault(one.units, []).append(one.slots)
    return [(units, sorted(slots)) for units, slots in sorted(by_units.items())]


def _grid(grid: Grid) -> None:
    columns = ["policy", *map(printable, grid.offers), "mean", "effect"]
    rows: list[list[object]] = []
    effects = grid.policy_effects or [None] * len(grid.policies)
    for policy, values, effect in zip(grid.policies, grid.values, effects, strict=True):
        mean = None if effect is None or grid.mean is None else _figure(grid.mean + effect)
        rows.append([policy, *map(_figure, values), mean, _effect(effect)])
    rows.append(["effect", *map(_effect, grid.offer_effects or [None] * len(grid.offers)), _figure(grid.mean), ""])
    print_table(columns, rows, right=columns[1:])
    for line in _said(grid):
        print(_folded(line))


def _said(grid: Grid) -> Iterator[str]:
    if grid.mean is None:
        yield "no offer has a figure under every policy"
        return
    if grid.shares is None:
        yield "nothing varies"
    elif len(grid.policies) > 1:
        policy, hardware, both = grid.shares
        yield f"of what varies: hardware alone {hardware:.1%}, policy alone {policy:.1%}, the two together {both:.1%}"
    if grid.left_out:
        why = "missed" if grid.figure == COST else "saturated"
        yield f"left out of the effects, {why} under some policy: {', '.join(map(printable, grid.left_out))}"


def _figure(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def _effect(value: float | None) -> str | None:
    return None if value is None else f"{value:+.4f}" if round(value, 4) else "0"


def _pareto(cell: Cell) -> list[object]:
    trial = cell.trial
    return [
        money(cell.cost_micro, "").strip(),
        _share(trial.met),
        None if trial.ttft_p99 is None else f"{trial.ttft_p99:.3f}",
        printable(cell.offer),
        cell.policy,
        trial.units,
        trial.slots,
        _goal(cell),
    ]


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _folded(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _bullets(title: str, lines: Iterator[str]) -> None:
    print(f"\n{title}")
    for line in lines:
        print(_folded(f"- {printable(line)}"))


def _document(shown: Shown) -> dict[str, object]:
    found, canary, objective = shown.found, shown.canary, shown.asked.objective
    by_name = {one.offer.name: one for one in shown.candidates}
    order = order_holds(found, shown.asked)
    return {
        "canary": {
            "name": canary.name,
            "digest": canary.identity.partition(" ")[0],
            "seed": canary.seed,
            "speed": canary.speed[0] / canary.speed[1],
            "requests": canary.requests,
            "adapters": len(canary.adapters),
        },
        "objective": {
            "ttft_s": objective.ttft_ns / NS_PER_S,
            "itl_s": None if objective.itl_ns is None else objective.itl_ns / NS_PER_S,
            "share": objective.share,
            "preemptions_per_1000": objective.preemptions_per_1000,
        },
        "engine": {
            "base": shown.setup.base.name,
            "max_lora_rank": shown.setup.engine.max_lora_rank,
            "host_entries": shown.twins.host_entries,
            "overhead_bytes": shown.setup.overhead,
        },
        "profile": {"name": shown.twins.calibrated.name, "gpu": shown.twins.measured_on.name},
        "policies": list(shown.asked.policies),
        "ladder": list(shown.asked.ladder),
        "replicas_max": shown.asked.replicas_max,
        "trials": found.trials,
        "offers": {
            "digest": shown.offers.digest,
            "currency": shown.currency,
            "unknown": [{"name": one.name, "gpu": one.gpu} for one in shown.offers.unknown],
            "notes": list(shown.offers.notes),
        },
        "candidates": [_candidate(one) for one in shown.candidates],
        "cells": [_cell_document(cell) for cell in found.cells],
        "grids": msgspec.to_builtins(found.grids),
        "pareto": [_cell_document(cell) for cell in found.pareto],
        "recommended": None if found.recommended is None else _cell_document(found.recommended),
        "reasons": list(reasons(found, by_name, shown.asked)),
        "uncertainty": list(uncertainty(found, by_name, shown.asked, shown.twins.measured_on.name)),
        "at_worst": {
            "first": None if found.first is None else _doubt(found.first),
            "second": None if found.second is None else _doubt(found.second),
            "order_holds": None if order is None else {"both_at_worst": order[0], "first_at_worst": order[1]},
        },
    }


def _candidate(one: Candidate) -> dict[str, object]:
    return {
        "offer": one.offer.name,
        "provider": one.offer.provider,
        "gpu": one.offer.gpu.name,
        "count": one.offer.count,
        "price_per_hour": one.offer.price_per_hour,
        "as_of": one.offer.as_of,
        "headline_bytes": one.headline_bytes,
        "floor_bytes": one.floor_bytes,
        "usable_bytes": one.usable_bytes,
        "at_most": one.at_most,
        "replicas": one.replicas,
        "tensor_parallel": one.tensor_parallel,
        "fits": one.fits,
        "words": one.words,
    }


def _cell_document(cell: Cell) -> dict[str, object]:
    return {
        "offer": cell.offer,
        "policy": cell.policy,
        "cost_per_hour": cell.cost_micro / 1e6,
        "cost_per_million_tokens": cell.per_million,
        "usable_bytes": cell.usable_bytes,
        "tried": [list(one) for one in cell.tried],
        **msgspec.to_builtins(cell.trial),
    }


def _doubt(doubt: Doubt) -> dict[str, object]:
    return {
        "estimated": doubt.estimated,
        "terms": msgspec.to_builtins(doubt.terms),
        "cell": _cell_document(doubt.cell),
    }
