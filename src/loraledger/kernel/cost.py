"""What it would cost to send one request to one replica, in nanoseconds, term by term.

cost = queue + slot_wait + prepare + prefill + externality

- **queue**: prefill tokens sent and not yet answered over the measured prefill rate; plus decode work in hand over the
  replica's parallel decode speed, weighted by how full the batch is (an idle seat means that decode work delays nobody; a
  full batch means that it delays by all of it); plus loads under way, since each stalls the engine step; plus ``BROKEN`` where an
  attempt broke lately. That is no ban: where all replicas break it is the same for all. Without it an engine that fails at
  once is never busy and draws the traffic (measured: one of two answered 500 to all, and 41 % of the requests were lost).
- **slot_wait**: other adapters hold all slots with requests in flight, so the engine would skip this request until one of them
  drains (vLLM V1 scheduler, cap of distinct adapters in a step).
- **prepare**: nothing in a slot; an activation from the host; a load from disk; or what is left of a load under way.
- **prefill**: this prompt over the measured prefill rate.
- **externality**: what the load does to others: its stall times the streams that are running there, and the expected reload of
  the adapter that it pushes out (Little's law: how likely that one is wanted again within its own residence there).

The terms use outstanding work that this gateway sent, plus what a sample showed beyond it (``foreign``), never a bare queue depth.
"""

from __future__ import annotations

from itertools import islice

from loraledger.events import Candidate, HitClass
from loraledger.kernel.residency import Registration
from loraledger.kernel.settings import MS, SECOND
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState, RequestState

RATE_TAU = 60.0
"""Seconds over which an adapter's arrival rate is averaged."""
BROKEN = 500 * MS
"""What a request waits at least whose attempt breaks: until a look at the engine (``failures.DOUBT``)."""


def load_time(replica: ReplicaState, size: int) -> int:
    """Expected duration of a load from disk of ``size`` bytes: overhead and bandwidth priors, scaled by what was measured."""
    spec = replica.spec
    prior = spec.load_overhead + size * SECOND // spec.load_bytes_per_s
    return int(prior * replica.load_ratio.current)


def load_floor(state: FleetState, replica: ReplicaState, adapter: AdapterState) -> int:
    """Less than what any replica like this one takes to load the adapter: its prior times the least ratio ever measured."""
    spec = replica.spec
    prior = spec.load_overhead + adapter.spec.bytes * SECOND // spec.load_bytes_per_s
    return int(prior * state.least_load_ratio)


def tier_of(replica: ReplicaState, registration: Registration | None) -> HitClass:
    """The tier of an adapter on a replica as believed: ``disk`` where it is not registered, ``unknown`` where never seen used."""
    if registration is None or registration.state in ("absent", "wanted", "loading", "parked", "evicting"):
        return "disk"
    if registration.state == "unknown" or not registration.known:
        return "unknown"
    return replica.tiers.tier(registration.engine_name)


def _half(times: float) -> float:
    return float(0.5**times)


def arrival_rate(adapter: AdapterState, now: int) -> float:
    """Requests a second of this adapter, exponentially averaged over ``RATE_TAU``."""
    return adapter.rate * _half((now - adapter.rate_at) / (RATE_TAU * SECOND))


def note_arrival(adapter: AdapterState, now: int) -> None:
    """Count one arrival into the adapter's rate (0.693 = ln 2: the average of a Poisson stream is then its rate)."""
    adapter.rate = arrival_rate(adapter, now) + 0.6931 / RATE_TAU
    adapter.rate_at = now


def queue_time(replica: ReplicaState, itl: float, prefill_rate: float) -> int:
    """Expected wait before this request's prefill begins in the engine, ns."""
    spec = replica.spec
    seats = len(replica.in_flight) + replica.foreign
    fullness = min(1.0, seats / spec.max_seqs)
    decode = replica.decode_out * itl / spec.max_seqs * fullness * fullness
    prefill = replica.prefill_out * SECOND / prefill_rate
    if seats >= spec.max_seqs:
        # A seat comes free each mean service time over the seats; those already waiting are served first.
        mean_out = replica.decode_out / max(1, len(replica.in_flight))
        decode = max(decode, (seats - spec.max_seqs + 1) * mean_out * itl / spec.max_seqs)
    return int(prefill + decode) + replica.stall_out + (BROKEN if replica.doubted else 0)


def load_left(replica: ReplicaState, now: int) -> int:
    """What is left of the load under way, ns. Those wanted behind it do not delay a prefill: between two loads the engine steps.

    A load that is overdue is expected to take as long again as half of what it took so far, so that a replica whose load
    hangs does not look ready at any moment and draw the traffic.
    """
    if replica.loading is None:
        return 0
    registration = replica.registrations[replica.loading]
    return max(registration.started + registration.expected - now, (now - registration.started) // 2)


def wanted_ahead(replica: ReplicaState, name: str | None) -> int:
    """Expected duration of the loads wanted before ``name`` (all of them if it is not wanted yet), ns."""
    total = 0
    for wanted in replica.wanted:
        if wanted == name:
            break
        total += replica.registrations[wanted].expected
    return total


def slot_wait(replica: ReplicaState, adapter: str, itl: float) -> int:
    """Expected time until one of the adapters in flight frees a slot; 0 if this one has or can have one."""
    in_flight = replica.adapters
    excess = len(in_flight) + 1 - replica.spec.slots
    if adapter in in_flight or excess <= 0:
        return 0
    fewest = min(in_flight.values())
    mean_out = replica.decode_out / max(1, len(replica.in_flight))
    return int(excess * mean_out * itl * fewest / (fewest + 1))


def reload_of_victim(state: FleetState, replica: ReplicaState, name: str, streams: int, now: int) -> float:
    """Expected cost to others of the slot that ``name`` takes: chance that its holder is wanted again, times bringing it back.

    Slots that loads under way will fill are taken already: without that, a cold fleet piles its first placements on one replica.
    """
    pending = len(replica.wanted) + (replica.loading is not None)
    free = replica.spec.slots - len(replica.tiers.active) - pending
    if free > 0 or name in replica.tiers.active:
        return 0.0
    victim_name = next(islice(replica.tiers.active, min(-free, max(0, len(replica.tiers.active) - 1)), None), None)
    victim = None if victim_name is None else state.adapters.get(victim_name.rpartition("@")[0])
    if victim is None:  # one that is only now being loaded: it is wanted for sure
        return (
            float(load_time(replica, state.adapters[next(iter(replica.wanted))].spec.bytes)) if replica.wanted else 0.0
        )
    # Its residence here, were it left alone: one turn of the LRU list, at most a minute.
    chance = 1.0 - _half(arrival_rate(victim, now) / max(1, len(victim.placed)) * 60.0)
    return chance * (replica.spec.activation + load_time(replica, victim.spec.bytes)) * (1 + streams)


def candidate(
    state: FleetState, replica: ReplicaState, request: RequestState, adapter: AdapterState | None, weight: float
) -> Candidate:
    """The full cost of ``request`` on ``replica`` now. ``weight`` scales the externality."""
    now = state.now
    itl, prefill_rate = replica.itl.current, replica.prefill_rate.current
    queue = queue_time(replica, itl, prefill_rate)
    prefill = int(request.prompt * SECOND / prefill_rate)
    left = load_left(replica, now)
    if adapter is None:
        queue += left
        return Candidate(replica.spec.name, "base", queue + prefill, queue, 0, 0, prefill, 0)
    name = adapter.spec.name
    registration = replica.registrations.get(name)
    tier = tier_of(replica, registration)
    wait = slot_wait(replica, name, itl)
    if tier == "gpu" and not needs_verifying(adapter, registration):
        queue += left
        return Candidate(replica.spec.name, tier, queue + wait + prefill, queue, wait, 0, prefill, 0)
    prepare, stall = preparation(replica, registration, adapter, tier, left, now)
    external = 0
    if stall:
        others = len(replica.in_flight) + replica.foreign + load_waiters(replica)
        engine_name = registration.engine_name if registration is not None else name
        external = int(weight * (stall * others + reload_of_victim(state, replica, engine_name, others, now)))
    cost = queue + wait + prepare + prefill + external
    return Candidate(replica.spec.name, tier, cost, queue, wait, prepare, prefill, external)


def load_waiters(replica: ReplicaState) -> int:
    """Requests that wait in the gateway for loads of this replica: a further load delays them too."""
    if replica.loading is None:
        return 0
    waiting = len(replica.registrations[replica.loading].waiters)
    return waiting + sum(len(replica.registrations[name].waiters) for name in replica.wanted)


def needs_verifying(adapter: AdapterState, registration: Registration | None) -> bool:
    """Whether this replica must first prove by an explicit load that a suspected adapter can be read."""
    return adapter.suspect_since > 0 and (registration is None or registration.verified <= adapter.suspect_since)


def preparation(
    replica: ReplicaState,
    registration: Registration | None,
    adapter: AdapterState,
    tier: HitClass,
    left: int,
    now: int,
) -> tuple[int, int]:
    """(what this request waits for, what it newly stalls), ns. ``left``: of the load under way there.

    A load that is wanted or under way already stalls nobody anew.
    """
    state = registration.state if registration is not None else "absent"
    if registration is not None and state in ("loading", "wanted"):
        if state == "loading":
            return left, 0
        return left + wanted_ahead(replica, adapter.spec.name) + registration.expected, 0
    activation = replica.spec.activation
    if tier == "host" and not needs_verifying(adapter, registration):
        return left + activation, activation
    load = load_time(replica, adapter.spec.bytes) + activation
    if state == "registered" and not needs_verifying(adapter, registration):
        if tier == "unknown":  # listed, never seen used: it may be anywhere
            load = (load + activation) // 2
        return left + load, load  # the step reads it, no call is queued
    return left + wanted_ahead(replica, None) + load, load
