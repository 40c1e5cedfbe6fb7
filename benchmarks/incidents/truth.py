"""What truly happened in a period, by the twins themselves, and whether that is the incident which was meant.

Theory of operation. The generator has to know that a baseline was calm and that an incident had an effect, and may not ask the
diagnosis. So it looks at what the twins did: their own counters of loads, activations and preemptions, their own state at each
scrape (who runs, who waits, KV blocks, adapters in flight), and when requests came and got their first tokens.

*Calm*: all requests ended well or were under way, nobody waited long, none was preempted, the queue did not grow, few missed
the slots. *Effective*: first tokens came later than in the baseline (or requests were refused), and the mechanism that the kind
names is there. A draw that fails either is drawn again: the figures of a diagnosis are about incidents that took place.
"""

from __future__ import annotations

from typing import Final

import msgspec

from benchmarks.incidents.kinds import Kind
from loraledger import events as ev
from loraledger.record.tables import Row
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.units import NS_PER_S

FULL: Final = 0.95
"""Share of the KV blocks from which on a replica's KV is at its cap."""
WORSE: Final = 1.5
"""By this factor the mean time to the first token has to rise."""
LATE_S: Final = 1.5
"""In a calm period nine requests in ten have their first token before."""


class Look(msgspec.Struct, frozen=True):
    """A twin's own state at a moment."""

    at: int
    replica: str
    running: int
    waiting: int
    kv: float
    active: int
    slots: int


class Counts(msgspec.Struct, frozen=True):
    """A fleet's counters at a moment, summed over replicas."""

    activations: int
    loads: int
    preemptions: int
    moving_ps: int
    waiting: int
    restarts: int


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """One period. Times in s; ``late_s`` counts who still waits as waiting until the record's end."""

    requests: int
    lost: int
    """Refused, broken off or failed before the period's end."""
    ttft_mean: float
    ttft_p90: float
    prompt: float
    output: float
    growth: int
    """Of those who wait for a first token, from the period's beginning to its end."""
    loads: int
    activations: int
    preemptions: int
    moving: float
    """Share of the engines' time that loads and activations took."""
    prepared: float
    """Share of all waiting for first tokens that passed until a load call of the adapter was over."""
    kv_full: float
    """Share of the looks that found KV at its cap."""
    batch_full: float
    """Share of the looks that found every seat of the batch taken."""
    starved: float
    """Share of the looks that found requests waiting, more adapters in flight than slots, and KV and seats free."""
    crowd: float
    """Share of the requests that the busiest replica got, times the replicas."""
    crowd_waits: float
    """Share of all that waited in engines that waited on one replica, the mean of the period."""
    engine_waiting: float
    """Mean number that waited in the engines."""
    top_share: float
    """Share of the requests that one adapter had."""
    restarts: int


class Watch:
    """Notes what the twins of ``fleet`` are about while it runs."""

    def __init__(self, fleet: VirtualFleet) -> None:
        self.looks: list[Look] = []
        self.restarts = 0
        self._fleet = fleet
        kernel = fleet.conductor.fleet
        self._step = kernel.step_with_changes
        kernel.step_with_changes = self._noted  # type: ignore[method-assign]

    def _noted(self, event: ev.Event) -> tuple[list[ev.Command], list[ev.ResidencyChange], int | None]:
        if type(event) is ev.ReplicaSampled:
            slots = self._fleet.replicas[event.replica].profile.slots
            running, waiting, kv = event.running or 0, event.waiting or 0, event.kv_usage or 0.0
            active = len(event.active or ())
            self.looks.append(Look(event.at, event.replica, running, waiting, kv, active, slots))
        elif type(event) is ev.ReplicaDown:
            self.restarts += 1
        return self._step(event)

    def counts(self) -> Counts:
        """The counters now."""
        replicas = [replica.counts() for replica in self._fleet.replicas.values()]
        return Counts(
            sum(each.activations for each in replicas),
            sum(each.loads for each in replicas),
            sum(each.preemptions for each in replicas),
            sum(each.load_ps + each.activation_ps for each in replicas),
            self._fleet.backlog.waiting,
            self.restarts,
        )


def truth_of(
    rows: list[Row], looks: list[Look], before: Counts, after: Counts, since: int, until: int, seats: int
) -> Truth:
    """The period [``since``, ``until``), ns, of replicas with so many ``seats`` each."""
    asked = [row for row in rows if since <= _int(row["arrived_ns"]) < until]
    looks = [look for look in looks if since <= look.at < until]
    waits = sorted(_waited(row, until) for row in asked)
    waiting: dict[str, int] = {}
    for look in looks:
        waiting[look.replica] = waiting.get(look.replica, 0) + look.waiting
    total = sum(waiting.values())
    count, seen = max(1, len(asked)), max(1, len(looks))
    return Truth(
        requests=len(asked),
        lost=sum(row.get("status") not in ("ok", None) and _int(row["finished_ns"]) < until for row in asked),
        ttft_mean=sum(waits) / count,
        ttft_p90=waits[len(waits) * 9 // 10] if waits else 0.0,
        prompt=sum(_int(row["predicted_prompt_tokens"]) for row in asked) / count,
        output=_mean([_int(row["generated_tokens"]) for row in asked if row.get("generated_tokens") is not None]),
        growth=after.waiting - before.waiting,
        loads=after.loads - before.loads,
        activations=after.activations - before.activations,
        preemptions=after.preemptions - before.preemptions,
        moving=(after.moving_ps - before.moving_ps) / 1000 / (until - since) / max(1, len(waiting)),
        prepared=sum(map(_prepared, asked)) / sum(waits) if sum(waits) else 0.0,
        kv_full=sum(look.kv >= FULL for look in looks) / seen,
        batch_full=sum(look.running >= seats for look in looks) / seen,
        starved=sum(
            look.waiting > 0 and look.active > look.slots and look.kv < FULL and look.running < seats for look in looks
        )
        / seen,
        crowd=_largest([row.get("replica") for row in asked]) * len(waiting),
        crowd_waits=max(waiting.values()) / total if total else 0.0,
        engine_waiting=total * len(waiting) / seen,
        top_share=_largest([row["adapter"] for row in asked if row["adapter"] is not None]),
        restarts=after.restarts - before.restarts,
    )


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _waited(row: Row, until: int) -> float:
    first = row.get("first_token_ns")
    return ((until if first is None else _int(first)) - _int(row["arrived_ns"])) / NS_PER_S


def _prepared(row: Row) -> float:
    over, first = row.get("load_end_ns"), row.get("first_token_ns")
    return 0.0 if over is None or first is None else max(0, _int(over) - _int(row["arrived_ns"])) / NS_PER_S


def _largest(values: list[object]) -> float:
    """Share of the most frequent of ``values``."""
    return max(values.count(value) for value in set(values)) / len(values) if values else 0.0


def not_calm(truth: Truth, may_miss: float) -> str | None:
    """Why this period was not calm; ``None`` if it was. ``may_miss``: the share of requests that may miss the slots."""
    misses = truth.activations / max(1, truth.requests)
    faults = {
        f"{truth.lost} requests were lost": truth.lost > 0,
        f"nine in ten had a first token after {truth.ttft_p90:.2f} s": truth.ttft_p90 > LATE_S,
        f"{truth.preemptions} preemptions": truth.preemptions > 0,
        f"{truth.growth} more waited in the end": truth.growth > max(20.0, 0.01 * truth.requests),
        f"{misses:.0%} missed the slots": misses > may_miss,
        f"loads took {truth.moving:.0%} of the time": truth.moving > 0.1,
        "KV was at its cap": truth.kv_full > 0,
    }
    return next((fault for fault, found in faults.items() if found), None)


def not_effective(kind: Kind, calm: Truth, truth: Truth, may_miss: float) -> str | None:
    """Why this incident, after a ``calm`` baseline, is not what its kind says; ``None`` if it is."""
    worse = truth.ttft_mean / calm.ttft_mean
    lost = truth.lost / max(1, truth.requests)
    if kind == "nothing wrong":
        same = not_calm(truth, may_miss) is None and worse < WORSE
        return None if same else f"first tokens came {worse:.2f} times as late"
    if worse < WORSE and lost < 0.05:
        return f"first tokens came {worse:.2f} times as late"
    misses, pressed = truth.activations / max(1, truth.requests), truth.preemptions >= 20 or truth.kv_full >= 0.2
    calm_misses = calm.activations / max(1, calm.requests)
    few = truth.moving < max(0.05, 2 * calm.moving) and not truth.preemptions and truth.kv_full == 0
    crowded = truth.crowd > max(1.35, 1.1 * calm.crowd) and truth.crowd_waits > 0.8
    mechanism: dict[Kind, bool] = {
        "arrival surge": few and truth.requests > 1.3 * calm.requests and truth.batch_full > 0.3,
        "longer prompts": few and truth.prompt > 2 * calm.prompt and truth.requests < 1.15 * calm.requests,
        "cold scan": truth.loads > max(50, 5 * calm.loads) and truth.moving > max(0.05, 3 * calm.moving),
        "slow disk loads": truth.moving > max(0.1, 3 * calm.moving) and misses < 2 * max(calm_misses, 0.02),
        "hot adapter on one replica": crowded and truth.top_share > 0.35 and not pressed,
        "routing skew": crowded and truth.top_share < 0.35 and not pressed,
        "KV exhaustion": pressed
        and truth.starved < truth.kv_full
        and truth.batch_full < 0.05
        and truth.output > 2 * calm.output,
        "floor too tight": pressed and truth.starved < truth.kv_full and truth.batch_full < 0.05,
        "slot starvation": truth.starved > 0.2 and truth.kv_full == 0 and not truth.preemptions,
        "restart storm": truth.restarts >= 3 and truth.loads > 3 * max(5, calm.loads) and truth.prepared > 0.25,
    }
    return None if mechanism[kind] else "waiting is worse, but not for the reason that its kind names"
