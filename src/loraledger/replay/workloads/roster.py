"""Which adapter holds which rank of popularity, as time goes by.

Theory of operation. A popularity gives shares to ranks; a roster seats adapters on the ranks. It starts in order and changes
only at whole multiples of a period, so that the working set of a minute stays small while the one of a day does not:

* *drift*: every period all ranks move down by ``step`` places and the last ones come to the front: another adapter is the hot
  one.
* *churn*: every period so many ranks, drawn at random, are given to the adapters that have waited longest outside; who sat
  there goes to the back of that queue. With as many adapters as seats nobody waits, and churn is refused.

Both may be on; drift comes first.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Final, NamedTuple

from loraledger.units import parse_duration

MAX_AMOUNT: Final = 1_000_000
MAX_PERIODS: Final = 100_000
"""Periods of churn that are made up for after a silence: of more, nobody could tell."""


class Every(NamedTuple):
    """How much, each ``period`` ns."""

    period: int
    amount: int


def parse_every(text: str) -> Every:
    """``10m:5``: five every ten minutes; ``10m``: one. Raises ``ValueError``."""
    period, colon, amount = text.partition(":")
    if colon and not (amount.isdecimal() and 1 <= int(amount[:10]) <= MAX_AMOUNT):
        raise ValueError(f"{text!r}: write a duration and how many, like 10m:5")
    found = Every(parse_duration(period), int(amount) if colon else 1)
    if found.period < 1:
        raise ValueError(f"{text!r}: a period is longer than nothing")
    return found


class Roster:
    """Seats ``seats`` of ``adapters`` adapters (by index) on ranks. Times may only rise. Raises ``ValueError`` for churn
    without others."""

    def __init__(self, adapters: int, seats: int, drift: Every | None, churn: Every | None, rng: Random) -> None:
        if not 1 <= seats <= adapters:
            raise ValueError(f"{seats} active of {adapters} adapters: 1 up to all of them")
        if churn is not None and seats == adapters:
            raise ValueError(f"churn needs adapters that wait: fewer active ones than {adapters}")
        self._seats = list(range(seats))
        self._outside = deque(range(seats, adapters))
        self._drift, self._churn, self._rng = drift, churn, rng
        self._drifted = self._churned = 0
        self._next = min((every.period for every in (drift, churn) if every is not None), default=None)

    def adapter(self, at: int, rank: int) -> int:
        """The adapter that holds ``rank`` at ``at`` ns."""
        if self._next is not None and at >= self._next:
            self._move(at)
        return self._seats[rank]

    def _move(self, at: int) -> None:
        ends = []
        if self._drift is not None:
            passed = at // self._drift.period
            turn = (passed - self._drifted) * self._drift.amount % len(self._seats)
            self._seats = self._seats[-turn:] + self._seats[:-turn] if turn else self._seats
            self._drifted = passed
            ends.append((passed + 1) * self._drift.period)
        if self._churn is not None:
            passed = at // self._churn.period
            for _ in range(min(passed - self._churned, MAX_PERIODS)):
                self._swap(self._churn.amount)
            self._churned = passed
            ends.append((passed + 1) * self._churn.period)
        self._next = min(ends)

    def _swap(self, amount: int) -> None:
        for rank in self._rng.sample(range(len(self._seats)), min(amount, len(self._seats))):
            self._outside.append(self._seats[rank])
            self._seats[rank] = self._outside.popleft()
