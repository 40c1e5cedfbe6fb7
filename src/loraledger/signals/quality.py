"""What a record does not tell, and what would supply it: sentences for a person.

Theory of operation. Each sentence says how much is missing and names the remedy. They are in the order of the questions that
a reader of figures asks: were there requests, do all count, are durations right, what of the engine, what of places and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from loraledger.record.tables import Row
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Group, Quality
from loraledger.signals.scope import whole
from loraledger.signals.versions import Choice
from loraledger.signals.waits import Waits

_NAMED = 3


class Seen(msgspec.Struct, frozen=True):
    """What the sentences are about. ``sums``: of all requests (``totals``); ``waits``: of them."""

    sums: Row | None
    waits: Waits | None
    total: Group | None
    replicas: Mapping[str, Group]
    adapters: Mapping[str, Group]


def quality(choice: Choice, facts: Facts, seen: Seen) -> Quality:
    """Counts, and all sentences that apply."""
    sums = seen.sums or {}
    notes = tuple(_notes(choice, facts, seen))
    return Quality(choice.duplicates, whole(sums.get("back")), whole(sums.get("untold")), notes)


def _notes(choice: Choice, facts: Facts, seen: Seen) -> Iterator[str]:
    if seen.total is None or seen.sums is None:
        yield "No request arrived in the window: look at a longer one, or at another record."
    else:
        yield from _about_rows(choice, seen.sums, seen.total)
        yield from _about_durations(seen.sums, seen.waits, seen.total)
        yield from _about_adapters(facts, seen)
    yield from _about_replicas(choice, facts, seen)


def _about_rows(choice: Choice, sums: Row, total: Group) -> Iterator[str]:
    if choice.duplicates:
        yield f"Rows with the id of another: {choice.duplicates}. The one that ended last counts."
    if opened := total.by_status.get("open", 0):
        yield f"Not ended when the record was read: {_requests(opened)}, of unknown tokens."
    if untold := whole(sums["untold"]):
        yield f"Ended well without token counts: {_requests(untold)}. They are unknown, not 0: have the engine report usage."
    if untenanted := whole(sums["untenanted"]):
        yield f"Without a tenant, and in no tenant's figures: {_requests(untenanted)}."
    if total.hits.unknown:
        yield f"Nobody knew where the adapter was: {_requests(total.hits.unknown)}, in no hit rate."
    if total.hits.undecided:
        yield f"No decision was taken: {_requests(total.hits.undecided)}, without a hit class."


def _about_durations(sums: Row, waits: Waits | None, total: Group) -> Iterator[str]:
    if back := whole(sums["back"]):
        yield f"A clock went back: {_requests(back)}, of unknown durations. Have time slewed, not set."
    if waits is None:
        yield "No request has a time to its first token: only streamed answers do."
    elif waits.probed < waits.split.n:
        yield (
            f"Engine queue, preparation and prefill are unknown of {waits.split.n - waits.probed} of {waits.split.n} first "
            "tokens: run vLLM with loraledger-probe (docs/probe.md)."
        )
    if total.itl is None:
        mean = "" if total.itl_mean is None else " only their mean is"
        yield f"Percentiles of times between tokens are unknown:{mean or ' no request kept a sketch of them'}."


def _about_adapters(facts: Facts, seen: Seen) -> Iterator[str]:
    unsized = [name for name in seen.adapters if name not in facts.adapter_bytes]
    if unsized:
        yield f"Bytes are unknown of {len(unsized)} of {len(seen.adapters)} adapters ({_some(unsized)}); {facts.source}."


def _about_replicas(choice: Choice, facts: Facts, seen: Seen) -> Iterator[str]:
    if seen.total is not None and not seen.replicas:
        yield "No request names a replica: there are no figures by replica, nor a working set against places."
    if len(choice.versions) > 1 and choice.version is not None:
        yield "Samples and moves name no version: a replica that changed its version in the window is in with all of them."
    unplaced = [name for name in seen.replicas if facts.replica(name).slots is None]
    if unplaced:
        yield f"Slots are unknown of {len(unplaced)} of {len(seen.replicas)} replicas ({_some(unplaced)}); {facts.source}."
    silent = [name for name, group in seen.replicas.items() if group.pressure is None or not group.pressure.samples]
    if silent:
        yield (
            f"There are no samples of {len(silent)} of {len(seen.replicas)} replicas ({_some(silent)}): "
            "their KV use, batch and restarts are unknown. A gateway takes samples while it serves."
        )
    moved = seen.total.moves if seen.total is not None else None
    if (
        moved is not None
        and seen.total is not None
        and seen.total.hits.misses
        and not (moved.loads or moved.activations)
    ):
        yield "Requests missed and no move of an adapter was recorded: loads and evictions are unknown."


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMED])
    return f"{shown}, ..." if len(names) > _NAMED else shown


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
