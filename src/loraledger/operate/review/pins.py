"""Pins of the settings, held against what the week was worth: which of them do not pay.

Theory of operation. A slot that is kept for an adapter pays where the adapter is among the best of its replica, by the waiting that
this avoids (``signals.rules.ranking``); one slot of a replica is left to all others. A pin outside of these holds a slot that
another adapter would use better. An adapter that is only kept registered costs no slot: it does not pay when nobody asked for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from loraledger.operate.review.standing import Standing
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Signals
from loraledger.signals.rules.advice import Ranking, Worth


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """A pin of the settings. ``pays``: ``None`` where it cannot be told. ``per_slot``: waiting avoided by it, in s an hour."""

    kind: Literal["slot", "registered"]
    adapter: str
    replica: str | None
    """``None``: on every replica that the settings name for it."""
    pays: bool | None
    requests: int | None
    per_slot: float | None
    words: str


def judge_pins(standing: Standing, ranking: Ranking | None, now: Signals, facts: Facts) -> tuple[Pinned, ...]:
    """Each pin, in the order of the settings: those of slots first."""
    return (*_slots(standing, ranking, facts), *_registered(standing, now))


def _slots(standing: Standing, ranking: Ranking | None, facts: Facts) -> Iterator[Pinned]:
    worths = {} if ranking is None else {(worth.replica, worth.adapter): worth for worth in ranking.worths}
    for replica, adapter in standing.ranking:
        worth = worths.get((replica, adapter))
        others = [one for (where, _), one in worths.items() if where == replica]
        pays, words = _verdict(worth, others, ranking, facts.replica(replica).slots)
        yield Pinned(
            kind="slot",
            adapter=adapter,
            replica=replica,
            pays=pays,
            requests=None if worth is None else worth.requests,
            per_slot=None if worth is None else worth.per_slot,
            words=words,
        )


def _verdict(
    worth: Worth | None, others: list[Worth], ranking: Ranking | None, slots: int | None
) -> tuple[bool | None, str]:
    if ranking is None or slots is None:
        missing = "no request with an adapter went to a replica" if ranking is None else "its slots are not known"
        return None, f"{missing}: nothing is ranked there"
    if worth is None:
        return (
            False,
            f"not among the {len(others)} adapters that are worth most there" if others else "no request went there",
        )
    if worth.pin:
        return True, f"rank {worth.rank} there"
    better = max((one.rank for one in others if one.pin), default=0)
    return False, f"rank {worth.rank} there: a slot is worth keeping down to rank {better}"


def _registered(standing: Standing, now: Signals) -> Iterator[Pinned]:
    for adapter in standing.registered:
        group = now.adapters.get(adapter)
        requests = 0 if group is None else group.requests
        words = (
            f"asked for {requests:,} times" if requests else "nobody asked for it: it is kept registered for nothing"
        )
        yield Pinned(
            kind="registered",
            adapter=adapter,
            replica=None,
            pays=requests > 0,
            requests=requests,
            per_slot=None,
            words=words,
        )
