"""What is recommended, why, and how sure that is, in sentences with the figures that they rest on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loraledger.plan.candidates import Candidate
from loraledger.plan.compare import Asked, Cell, Comparison, Doubt
from loraledger.plan.pareto import MICRO, ranking
from loraledger.units import format_bytes


def money(cost_micro: float, currency: str, digits: int = 2) -> str:
    """``2.60 USD``."""
    return f"{cost_micro / MICRO:,.{digits}f} {currency}"


def reasons(found: Comparison, candidates: Mapping[str, Candidate], asked: Asked) -> Iterator[str]:
    """Why the first cell, or why none. ``candidates`` by the name of their offer."""
    best = found.cells[0]
    offer = candidates[best.offer].offer
    if not best.trial.meets:
        yield f"none: nothing keeps the objectives with {asked.replicas_max} replicas or less"
        yield f"closest is {_taken(best)}: {_met(best)}{_why_not(best)}"
        return
    yield f"{_taken(best)}, {best.trial.slots} slots a replica, {best.policy}: {money(best.cost_micro, offer.currency)} an hour"
    wanted = asked.objective.share
    yield f"{_met(best)} ({wanted:.1%} are wanted), the slowest hundredth waits {best.trial.ttft_p99 or 0.0:.3f} s or more"
    yield _against(best, found.runner_up, offer.currency)
    one = candidates[best.offer]
    yield (
        f"of {format_bytes(one.headline_bytes)} of the offer {format_bytes(one.usable_bytes)} are left after "
        f"{one.replicas} floor{'s' if one.replicas > 1 else ''}, {one.usable_bytes / one.headline_bytes:.0%}"
    )
    tried = sorted({one.slots for one in best.tried if one.units == best.trial.units})
    if len(tried) > 1:
        yield f"slots: {best.trial.slots} were best of {', '.join(map(str, tried))}"
    yield from _policies(found, best, offer.currency)


def uncertainty(
    found: Comparison, candidates: Mapping[str, Candidate], asked: Asked, measured_on: str
) -> Iterator[str]:
    """What may make another one right."""
    best = found.cells[0]
    one = candidates[best.offer]
    if found.first is not None:
        yield from _at_worst(found.first, found.second, found, candidates, asked, measured_on)
    if one.at_most:
        yield "what the engine takes beside weights, slots and KV is not known (--overhead): usable memory and KV are upper bounds"
    if best.trial.saturated is None:
        yield f"the canary is too short to tell whether service keeps up ({best.trial.requests:,} requests)"
    dates = sorted({candidates[cell.offer].offer.as_of for cell in found.cells})
    yield f"prices are those of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"


def order_holds(found: Comparison, asked: Asked) -> tuple[bool, bool] | None:
    """Whether the first stays before the second: both at their worst; only the first. ``None``: there is no second."""
    if found.first is None or found.second is None or found.runner_up is None:
        return None
    first, second = found.first.cell, found.second.cell
    both = _leads(first, second, asked)
    return both, _leads(first, found.runner_up, asked)


def _leads(one: Cell, other: Cell, asked: Asked) -> bool:
    return ranking([one.point, other.point], asked.policies)[0] == one.point


def _at_worst(
    first: Doubt,
    second: Doubt | None,
    found: Comparison,
    candidates: Mapping[str, Candidate],
    asked: Asked,
    measured_on: str,
) -> Iterator[str]:
    for doubt in (first, second):
        if doubt is None:
            continue
        offer = candidates[doubt.cell.offer].offer
        if not doubt.estimated:
            yield f"{offer.name}: its step times are of the GPU that was measured ({measured_on})"
            continue
        ends = ", ".join(
            f"{term.term} x {term.low:.2f} to {term.high:.2f}" for term in doubt.terms if term.low != term.high
        )
        cell = doubt.cell
        kept = "keeps the objectives" if cell.trial.meets else f"misses the objectives ({_met(cell)})"
        yield (
            f"{offer.name}: its step times are those of {measured_on} carried over ({ends}); with all of it at its worst "
            f"{_taken(cell)} {kept}, {money(cell.cost_micro, offer.currency)} an hour"
        )
    order = order_holds(found, asked)
    if order is not None and (first.estimated or (second is not None and second.estimated)):
        yield _order(*order)


def _order(both: bool, alone: bool) -> str:
    if both and alone:
        return "the order holds: with both at their worst, and with the first alone at its worst"
    when = {
        (True, False): "if only the first is at its worst",
        (False, True): "with both at their worst",
        (False, False): "with both at their worst and with the first alone",
    }[both, alone]
    return f"the order CHANGES {when}: calibrate there before money depends on it"


def _against(best: Cell, other: Cell | None, currency: str) -> str:
    if other is None:
        return "no other offer fits"
    if not other.trial.meets:
        return f"no other offer keeps the objectives; closest is {_taken(other)}: {_met(other)}{_why_not(other)}"
    more = other.cost_micro - best.cost_micro
    if not more:
        return (
            f"{_taken(other)} costs the same and leaves {format_bytes(other.usable_bytes)} after the floors, "
            f"this one {format_bytes(best.usable_bytes)}"
        )
    share = f", {more / best.cost_micro:.0%} more" if best.cost_micro else ""
    return f"the next offer is {_taken(other)}: {money(other.cost_micro, currency)} an hour{share}"


def _policies(found: Comparison, best: Cell, currency: str) -> Iterator[str]:
    """How the other policies fare on the same offer."""
    for cell in found.cells:
        if cell.offer != best.offer or cell.policy == best.policy:
            continue
        if not cell.trial.meets:
            yield f"under {cell.policy} it misses the objectives: {_met(cell)}{_why_not(cell)}"
        elif cell.cost_micro != best.cost_micro:
            yield f"under {cell.policy} it takes {_taken(cell)}: {money(cell.cost_micro, currency)} an hour"
        elif (cell.trial.met, cell.trial.ttft_p99) == (best.trial.met, best.trial.ttft_p99):
            yield f"under {cell.policy} it fares just the same"
        else:
            yield f"under {cell.policy} it costs the same, and the slowest hundredth waits {cell.trial.ttft_p99 or 0.0:.3f} s"


def _taken(cell: Cell) -> str:
    return f"{cell.trial.units} x {cell.offer}"


def _met(cell: Cell) -> str:
    return "no request is judged" if cell.trial.met is None else f"{cell.trial.met:.1%} of requests are met"


def _why_not(cell: Cell) -> str:
    trial = cell.trial
    why: Sequence[str] = (*(["arrivals outran service"] if trial.saturated else []), *trial.failed)
    return f" ({'; '.join(why)})" if why else ""
