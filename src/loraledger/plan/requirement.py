"""The need that a record shows, as a document for whoever offers capacity.

Theory of operation. A market that is told "2 x 80 GB" sells 2 x 80 GB. What a fleet of adapters needs is room *after* the floor of
its base: so many slots, so many KV tokens, so much host memory, and links fast enough for the adapters that move. Each figure is
worked out from the busiest hour of a period, times ``growth`` (more of the same) and ``headroom`` (for what a week did not show),
and says in one line how. A figure whose inputs are not known is ``None``, and says what would supply them. ::

    slots        distinct adapters in flight at one moment, summed over replicas, x growth x headroom
    host entries distinct adapters of the peak hour x growth x headroom
    host bytes   host entries x mean bytes of these adapters
    KV tokens    p99 over time of the tokens in flight x growth x headroom; without them KV in use by samples
    usable       slots x bytes of a slot + KV tokens x bytes of a token, on all devices together
    link         bytes of the largest adapter over the median time between tokens: an activation then costs a stream one token
    disk         loads of the peak hour x mean bytes, over the seconds of it that the record covers, x growth x headroom

Fewer slots serve, with more activations: the replay of ``compare`` says what that costs. Two replicas each need the adapters that
both use, so ``slots`` is a sum over the replicas that there were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from loraledger.events import Source
from loraledger.plan.peak import Peak
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Group, Pressure, Window
from loraledger.units import format_duration

NEARLY_A_DAY_S: Final = 23 * 3600
"""Traffic that is shorter may lack a peak; a day need not be recorded to its last second."""
HEADROOM: Final = 1.25
"""A fifth stays free at the peak."""
_MS: Final = 10**6
MOST: Final = 1000.0
"""Of growth and headroom."""

NeedUnit = Literal["bytes", "slots", "entries", "tokens", "bytes/s"]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What a base and an engine make of a slot and a token, over all devices of a replica. ``None``: not known.

    ``floor_bytes``: weights and what else the engine takes beside slots and KV.
    """

    slot_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    floor_bytes: int | None = None
    floor_source: str = "neither --floor nor --base was given"
    source: str = "--base DIR of the base model, or base.path of the settings, gives bytes of slots and of KV tokens"
    """Where the bytes are from; where they are not known, what would supply them."""


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. ``age_ns``: since the end of the hour that it was seen in; ``None`` for what does not age."""

    name: str
    value: int | None
    unit: NeedUnit
    source: Source
    age_ns: int | None
    words: str
    """How it was worked out; of an unknown one, what would supply it."""


class Requirement(msgspec.Struct, frozen=True, kw_only=True):
    """The need of one fleet. All figures are of the fleet together, but ``floor`` is of one replica."""

    period: Window
    peak: Window
    seen: Window
    """The part of the peak that the record covers: what is divided by time is divided by it."""
    growth: float
    headroom: float
    requests: int
    """Of the peak hour."""
    replicas: int
    """That served it."""
    facts: str
    """Where places and adapters' sizes come from."""
    needs: tuple[Need, ...]
    notes: tuple[str, ...]

    def need(self, name: str) -> Need:
        """The figure of that name. Raises ``KeyError``."""
        for need in self.needs:
            if need.name == name:
                return need
        raise KeyError(name)


def requirement(
    peak: Peak,
    facts: Facts,
    growth: float = 1.0,
    *,
    headroom: float = HEADROOM,
    sizes: Sizes | None = None,
    now_ns: int,
) -> Requirement:
    """What ``peak`` asks for after ``growth``. Raises ``ValueError`` for factors that are none."""
    for name, factor in (("growth", growth), ("headroom", headroom)):
        if not (math.isfinite(factor) and 0 < factor <= MOST):
            raise ValueError(f"{name} is {factor}: must be more than 0 and at most {MOST:g}")
    work = _Work(peak, facts, growth, headroom, sizes or Sizes(), now_ns)
    total = peak.signals.total
    return Requirement(
        period=peak.period,
        peak=peak.signals.window,
        seen=peak.seen,
        growth=growth,
        headroom=headroom,
        requests=0 if total is None else total.requests,
        replicas=len(peak.signals.replicas),
        facts=facts.source,
        needs=work.needs(),
        notes=tuple(work.notes()),
    )


class _Work:
    """The figures, one after another: later ones are made of earlier ones."""

    def __init__(self, peak: Peak, facts: Facts, growth: float, headroom: float, sizes: Sizes, now_ns: int) -> None:
        self.peak, self.facts, self.sizes = peak, facts, sizes
        self.total = peak.signals.total
        self.factor = growth * headroom
        self.by = f"x {growth:g} growth x {headroom:g} headroom"
        self.span = "the hour" if peak.seen.seconds >= 3600 else f"the {_length(peak.seen)} seen"
        self.age = max(0, now_ns - peak.signals.window.until_ns)

    def needs(self) -> tuple[Need, ...]:
        slots, entries, kv = self.slots(), self.entries(), self.kv()
        return (
            self.usable(slots, kv),
            self.floor(),
            slots,
            kv,
            entries,
            self.host(entries),
            self.link(),
            self.disk(),
        )

    def slots(self) -> Need:
        sets = [group.working_set for group in self.peak.signals.replicas.values()]
        most = [each.in_flight_max for each in sets if each is not None and each.in_flight_max is not None]
        if not most:
            return self._unknown("slots", "slots", "no request with an adapter was sent to a replica in this hour")
        words = f"{sum(most):,} distinct adapters in flight at once, over {_replicas(len(most))}, {self.by}"
        return self._need("slots", self._up(sum(most)), "slots", "observed", words)

    def entries(self) -> Need:
        if self.total is None or not self.total.distinct_adapters:
            return self._unknown("host entries", "entries", "no request with an adapter arrived in this hour")
        count = self.total.distinct_adapters
        return self._need(
            "host entries",
            self._up(count),
            "entries",
            "observed",
            f"{count:,} distinct adapters in {self.span}, {self.by}",
        )

    def host(self, entries: Need) -> Need:
        mean = self._mean_bytes()
        if entries.value is None or mean is None:
            why = entries.words if entries.value is None else self._no_sizes()
            return self._unknown("host bytes", "bytes", why)
        words = f"{entries.value:,} entries x {mean:,} bytes, the mean of the adapters that were used"
        return self._need("host bytes", entries.value * mean, "bytes", "observed", words)

    def kv(self) -> Need:
        active, pressure = self.peak.active, None if self.total is None else self.total.pressure
        if active is not None:
            words = (
                f"{active.high:,} tokens in flight or less in 99 % of {self.span} (at most {active.most:,}), {self.by}; prefixes "
                "that are shared and tokens still to come are counted, so less will do"
            )
            return self._need("KV tokens", self._up(active.high), "tokens", "observed", words)
        used = _used(pressure)
        if used is None or pressure is None:
            return self._unknown("KV tokens", "tokens", "neither requests told their tokens nor samples the KV in use")
        words = f"most KV in use by samples ({pressure.kv_usage_max:.0%} of {pressure.kv_tokens:,} tokens), {self.by}"
        return self._need("KV tokens", self._up(used), "tokens", "observed", words)

    def usable(self, slots: Need, kv: Need) -> Need:
        name, sizes = "usable memory", self.sizes
        if sizes.slot_bytes is None or sizes.kv_bytes_per_token is None:
            return self._unknown(name, "bytes", f"not known: {sizes.source}")
        if slots.value is None or kv.value is None:
            return self._unknown(name, "bytes", slots.words if slots.value is None else kv.words)
        words = (
            f"{slots.value:,} slots x {sizes.slot_bytes:,} bytes + {kv.value:,} KV tokens x {sizes.kv_bytes_per_token:,} bytes, "
            f"after the floor of each replica; {sizes.source}"
        )
        size = slots.value * sizes.slot_bytes + kv.value * sizes.kv_bytes_per_token
        return self._need(name, size, "bytes", "configured", words)

    def floor(self) -> Need:
        sizes = self.sizes
        if sizes.floor_bytes is None:
            return self._unknown("floor of a replica", "bytes", f"not known: {sizes.floor_source}")
        return Need(
            name="floor of a replica",
            value=sizes.floor_bytes,
            unit="bytes",
            source="configured",
            age_ns=None,
            words=f"{sizes.floor_source}; comes on top of the usable memory, once for each replica",
        )

    def link(self) -> Need:
        used = [group.bytes for group in self.peak.signals.adapters.values() if group.bytes is not None]
        between = _between_tokens(self.total)
        if not used or between is None:
            why = self._no_sizes() if not used else "no request told the time between its tokens"
            return self._unknown("host link", "bytes/s", why)
        words = (
            f"the largest adapter used ({max(used):,} bytes) in one time between tokens ({between * 1000:.1f} ms): "
            "an activation then holds streams up for about one token; one way, to one device"
        )
        return self._need("host link", math.ceil(max(used) / between), "bytes/s", "observed", words)

    def disk(self) -> Need:
        moves, mean = None if self.total is None else self.total.moves, self._mean_bytes()
        if moves is None or mean is None:
            return self._unknown(
                "disk rate", "bytes/s", self._no_sizes() if moves is not None else "no request arrived"
            )
        ms = -(-(self.peak.seen.until_ns - self.peak.seen.since_ns) // _MS)
        words = f"{moves.loads:,} loads x {mean:,} bytes / {ms / 1000:,.10g} s, {self.by}; a mean: loads come in bursts"
        rate = math.ceil(moves.loads * mean * 1000 / ms * self.factor)
        return self._need("disk rate", rate, "bytes/s", "observed", words)

    def notes(self) -> Iterable[str]:
        signals = self.peak.signals
        if signals.measure_again is not None:
            yield signals.measure_again
        yield from signals.quality.notes
        if self.peak.covered.seconds < NEARLY_A_DAY_S:
            yield f"the traffic is {_length(self.peak.covered)} long: a day or a week may hold a higher peak"

    def _mean_bytes(self) -> int | None:
        total = self.total
        if total is None or total.bytes is None or not total.distinct_adapters:
            return None
        return -(-total.bytes // total.distinct_adapters)

    def _no_sizes(self) -> str:
        return "bytes of the adapters that were used are not all known: settings that name their files tell them"

    def _up(self, count: int) -> int:
        # Cents of a float product must not become a whole slot: 4 x 1.5 x 1.25 is 7.5, and 8 x 1.25 is 10, not 11.
        return math.ceil(round(count * self.factor, 6))

    def _need(self, name: str, value: int, unit: NeedUnit, source: Source, words: str) -> Need:
        return Need(name=name, value=value, unit=unit, source=source, age_ns=self.age, words=words)

    def _unknown(self, name: str, unit: NeedUnit, words: str) -> Need:
        return Need(name=name, value=None, unit=unit, source="believed", age_ns=None, words=words)


def _length(window: Window) -> str:
    return format_duration(window.until_ns - window.since_ns)


def _replicas(count: int) -> str:
    return f"{count:,} replica{'s' if count > 1 else ''}"


def _between_tokens(total: Group | None) -> float | None:
    if total is None:
        return None
    found = total.itl.p50 if total.itl is not None else total.itl_mean
    return found if found else None


def _used(pressure: Pressure | None) -> int | None:
    """Tokens of KV in use at the worst moment; ``None``: nobody said."""
    if pressure is None or pressure.kv_usage_max is None or pressure.kv_tokens is None:
        return None
    return math.ceil(pressure.kv_usage_max * pressure.kv_tokens)
