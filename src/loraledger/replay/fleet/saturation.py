"""Whether arrivals outran service: then figures of waiting say how long the trace is, not how good the fleet is.

Theory of operation. Who *waits* has arrived and has neither a first token nor an end; requests that decode do not wait, so a
fleet whose batches fill up is not behind. While service keeps up, the number of those who wait comes back to its floor again and
again, however high it rises in between. While it does not, n arrivals leave about n (1 - 1/load) waiting, and chance adds a random
walk of about sqrt(n) times the coefficient of variation of the gaps (taken over groups of arrivals, so that long bursts count; at
least 1). That is one *step*. The arrivals are cut into ten parts of equally many, whose lowest mean is the floor. The verdict is
*saturated* when

* in the last part ``MEAN`` steps more than the floor waited on average, and at least ``LEAST`` steps more at all times: a queue
  that is on its way down, and one that rises by chance, have a valley there; or
* limits hide the queue: in the last five parts ``REFUSED`` or more of the arrivals were refused for want of room (``NO_ROOM``), and
  no part alone holds more than ``BURST`` of these; or
* everything arrived at one instant.

With fewer than ``ENOUGH`` arrivals a load close to 1 looks like chance: it takes twice the steps to be called saturated, and if it
is not, the trace is too short to tell, and the verdict is unknown (``None``).

One server of fixed service time and Poisson arrivals (M/D/1), 1,000 requests, 300 seeds each: called saturated at a load of 1.1 in
299, at 1.2 in 300, at 0.9 in none, at 0.95 in 18 (where the arrivals of a run may well be more than the server can do). With ten in
the queue at most and the rest refused: at 1.1 in 283, at 0.9 in 3. With gaps of three times that variation, 5,000 requests, 60
seeds: at 1.3 in 60, at 0.9 in none.

Memory is bounded: every so many arrivals one point is kept, and every other one is dropped when there are ``POINTS``.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

from loraledger.replay.fleet.outcome import Saturation
from loraledger.units import NS_PER_S

FEW: Final = 50
"""Fewer arrivals than this are never judged."""
ENOUGH: Final = 1_000
MEAN: Final = 0.7
LEAST: Final = 0.35
REFUSED: Final = 0.05
BURST: Final = 0.6
POINTS: Final = 1024
PARTS: Final = 10
NO_ROOM: Final = frozenset({"tenant_queue_full", "gateway_queue_full", "queue_deadline", "load_deadline", "aborted"})
"""Reasons of an end that say that there was no room."""


Point = tuple[int, int, int]
"""Of one arrival: when, ns; how many waited just before it; how many had been refused for want of room."""


class Backlog:
    """Told of each arrival; whoever runs the fleet keeps ``waiting``, ``refused``, ``served`` and ``open`` true meanwhile.

    ``refused``: ended for a reason of ``NO_ROOM``. ``served``: ended well. All count from the start but ``waiting`` and ``open``.
    """

    __slots__ = (
        "_at",
        "_every",
        "_first",
        "_open",
        "_points",
        "_served",
        "arrived",
        "open",
        "refused",
        "served",
        "waiting",
    )

    def __init__(self) -> None:
        self.arrived = self.waiting = self.refused = self.served = self.open = 0
        self._first = self._at = self._open = self._served = 0
        self._every = 1
        self._points: list[Point] = []

    def arrival(self, at: int) -> None:
        """A request arrives at ``at``, ns. The counts are those just before it."""
        if not self.arrived % self._every:
            if not self.arrived:
                self._first = at
            self._points.append((at, self.waiting, self.refused))
            if len(self._points) >= POINTS:
                del self._points[1::2]
                self._every *= 2
        self.arrived += 1
        self.waiting += 1
        self.open += 1
        self._at, self._open, self._served = at, self.open, self.served

    @property
    def last(self) -> int:
        """When the last request arrived, ns; 0 before the first one."""
        return self._at

    def verdict(self, clients: int | None = None) -> Saturation:
        """Once the trace is over. In a closed loop of ``clients`` arrivals follow service and cannot outrun it."""
        span = self._at - self._first
        if clients is None:
            saturated, reason = self._judge(span)
        else:
            saturated, reason = False, f"a closed loop: the next request arrives when one of {clients} ends"
        return Saturation(
            saturated=saturated,
            offered_per_s=(self.arrived - 1) * NS_PER_S / span if span else None,
            served_per_s=self._served * NS_PER_S / span if span else None,
            backlog=self._open,
            reason=reason,
        )

    def _judge(self, span: int) -> tuple[bool | None, str]:
        count = self.arrived
        if count < FEW:
            return None, f"too short to tell: {count} requests, {self.refused} of them refused for want of room"
        if not span:
            return True, f"all {count:,} requests arrived at one instant, so each waits for those before it"
        parts = self._parts()
        means = [sum(point[1] for point in part) / len(part) for part in parts]
        floor, last, least = min(means), means[-1], min(point[1] for point in parts[-1])
        rates = (
            f"{(count - 1) * NS_PER_S / span:.3g} arrived and {self._served * NS_PER_S / span:.3g} ended well a second"
        )
        waits = f"{last:,.0f} waited on average in the last tenth, never under {least:,}, and {floor:,.0f} in the quietest one"
        step = math.sqrt(count) * max(1.0, self._variation()) * (1 if count >= ENOUGH else 2)
        if last > floor + MEAN * step and least > floor + LEAST * step:
            return True, f"arrivals outran service: {rates}; {waits}"
        share = self._refused(parts)
        if share >= REFUSED:
            return (
                True,
                f"arrivals outran service: {rates}; {share:.0%} of the later half were refused for want of room",
            )
        if count < ENOUGH:
            return None, f"too short to tell: {count} requests; {rates}; {waits}"
        return False, f"service kept up: {rates}; {waits}"

    def _refused(self, parts: list[list[Point]]) -> float:
        """Share of the arrivals of the last five parts that was refused for want of room; 0 if that was a burst."""
        marks = [part[0][2] for part in parts[PARTS // 2 :]] + [self.refused]
        refused = [after - before for before, after in pairwise(marks)]
        if max(refused) > BURST * sum(refused):
            return 0.0
        return sum(refused) / (self.arrived * len(refused) / PARTS)

    def _parts(self) -> list[list[Point]]:
        """The points in ten parts of equally many arrivals."""
        points = self._points
        cuts = [len(points) * part // PARTS for part in range(PARTS + 1)]
        return [points[low:high] for low, high in pairwise(cuts)]

    def _variation(self) -> float:
        """Coefficient of variation of the gaps, as groups of ``_every`` show it."""
        points = self._points
        gaps = [after[0] - before[0] for before, after in pairwise(points)]
        mean = sum(gaps) / len(gaps)
        if not mean:
            return 1.0
        return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) * self._every) / mean
