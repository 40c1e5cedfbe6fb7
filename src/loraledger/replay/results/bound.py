"""The least load work that any cache could have done in a run, and so the most that could have been saved.

Theory of operation. ``signals.timeline`` bounds the loads of one pool of places from below, by the run's own moments.

*As routed.* The same on each replica alone, for the requests that went there, bounds every cache under the routing as it was. So
``spent`` falls into three parts: ``least``, what the routing added to it at least, and what another choice of what to keep could
at most have avoided.

*Tiers.* What is in a slot is in the host cache, so the same holds for reads from disk with the places of the host cache. Each
tier is bounded for itself; a sum of bounds is a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from loraledger.errors import InputFileError
from loraledger.replay.fleet.outcome import Outcome
from loraledger.replay.results.folder import RunTables
from loraledger.signals.timeline import Timeline
from loraledger.twin.profile import PS_PER_S

_LAST_MOMENT: Final = 2**62
"""2116, in ns since the epoch: moments are kept in 64 bits."""

_USES: Final = """
SELECT adapter, replica, first_token_ns, coalesce(last_token_ns, first_token_ns), preemptions
FROM run.requests WHERE adapter IS NOT NULL AND replica IS NOT NULL AND first_token_ns IS NOT NULL ORDER BY first_token_ns
"""


class TierWork(msgspec.Struct, frozen=True):
    """Load work into one tier, in s of engine time. ``gpu``: activations; ``host``: reads from disk.

    ``each``: had every request brought its own adapter. ``spent``: what the run did. ``least``: what nobody could have avoided.
    ``least_as_routed``: the same with each request on the replica where it went.
    """

    tier: Literal["gpu", "host"]
    each: float
    spent: float
    least: float
    least_as_routed: float


class LoadWork(msgspec.Struct, frozen=True):
    """Over both tiers, in s: spent >= least_as_routed >= least, and so saved <= bound_as_routed <= bound."""

    uses: int
    """Requests with an adapter that got a first token."""
    each: float
    spent: float
    least: float
    saved: float
    """each - spent."""
    bound: float
    """The most that could have been saved: each - least."""
    bound_as_routed: float
    share: float | None
    """saved / bound; ``None`` when there was nothing to save."""
    tiers: tuple[TierWork, ...]


def load_work(tables: RunTables, outcome: Outcome) -> LoadWork | None:
    """Of the run that is open as ``run``; ``None`` when the outcome does not say what a load of each adapter used takes.

    Its costs have to be the least that they are on any replica; 0 slots or host entries stand for no fixed number. Raises
    InputFileError when rows and outcome cannot be of one run.
    """
    whole, there = Timeline(), {replica.replica: Timeline() for replica in outcome.replicas}
    _read(tables, outcome, whole, there)
    loads, activations = outcome.load_costs_ps, outcome.activation_costs_ps
    if whole.uses.keys() - loads.keys() or whole.uses.keys() - activations.keys():
        return None
    places = [(r.slots, r.host_entries, r.activation_ps, r.load_ps) for r in outcome.replicas]
    slots, entries, spent_gpu, spent_host = ([row[n] for row in places] for n in range(4))
    parts = [*there.values()]
    tiers = (
        _tier("gpu", whole, parts, activations, slots, sum(spent_gpu)),
        _tier("host", whole, parts, loads, entries, sum(spent_host)),
    )
    each, spent = sum(tier.each for tier in tiers), sum(tier.spent for tier in tiers)
    least = sum(tier.least for tier in tiers)
    bound = each - least
    as_routed = each - sum(tier.least_as_routed for tier in tiers)
    saved = each - spent
    share = saved / bound if bound > 0 else None
    return LoadWork(sum(whole.uses.values()), each, spent, least, saved, bound, as_routed, share, tiers)


def _read(tables: RunTables, outcome: Outcome, whole: Timeline, there: dict[str, Timeline]) -> None:
    """Every use of the record, into the fleet's timeline and its replica's."""
    calm = {replica.replica for replica in outcome.replicas if not replica.preemptions}
    for adapter, replica, first, last, preemptions in tables.stream(_USES):
        sure = replica in calm or preemptions == 0
        last = max(first, last) if sure else first
        if not 0 < first <= last < _LAST_MOMENT:
            raise InputFileError(f"the run's record has tokens at {first} and {last} ns; replay it again")
        if replica not in there:
            raise InputFileError(f"the run's record names replica {replica!r}, which the run did not have")
        whole.add(adapter, first, last)
        there[replica].add(adapter, first, last)


def _tier(
    tier: Literal["gpu", "host"],
    whole: Timeline,
    parts: list[Timeline],
    costs: Mapping[str, int],
    places: list[int],
    spent_ps: int,
) -> TierWork:
    """``places`` by replica; 0: no fixed number, adapters share its memory with KV."""
    least = whole.least(costs, sum(places) if all(places) else None)
    routed = sum(part.least(costs, own or None) for part, own in zip(parts, places, strict=True))
    each = whole.each(costs)
    return TierWork(tier, each / PS_PER_S, spent_ps / PS_PER_S, least / PS_PER_S, max(least, routed) / PS_PER_S)
