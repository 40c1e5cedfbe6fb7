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

from collections.abc import Iterable
from itertools import islice

from loraledger.events import Candidate, HitClass
from loraledger.kernel.residency import Registration
from loraledger.kernel.settings import MS, SECOND
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState, RequestState, Standing

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


def arrival_rate(adapter: AdapterState, now: int) -> float:
    """Requests a second of this adapter, exponentially averaged over ``RATE_TAU``."""
    age = now - adapter.rate_at
    return adapter.rate if age <= 0 else adapter.rate * float(0.5 ** (age / (RATE_TAU * SECOND)))


def note_arrival(adapter: AdapterState, now: int) -> None:
    """Count one arrival into the adapter's rate (0.693 = ln 2: the average of a Poisson stream is then its rate)."""
    adapter.rate = arrival_rate(adapter, now) + 0.6931 / RATE_TAU
    adapter.rate_at = now


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


def stand(state: FleetState, replica: ReplicaState) -> Standing:
    """Work out what every request finds at ``replica`` now, and keep it there."""
    spec, active, itl, out = replica.spec, replica.tiers.active, replica.itl.current, replica.decode_out
    own, max_seqs = len(replica.in_flight), spec.max_seqs
    mean_out, seats = out / max(1, own), own + replica.foreign
    decode = out * itl / max_seqs
    if seats < max_seqs:
        decode = decode * (seats / max_seqs) * (seats / max_seqs)
    else:
        # A seat comes free each mean service time over the seats; those already waiting are served first.
        decode = max(decode, (seats - max_seqs + 1) * mean_out * itl / max_seqs)
    queue = int(replica.prefill_out * SECOND / replica.prefill_rate.current + decode) + replica.stall_out
    slot_wait, excess = 0, len(replica.adapters) + 1 - spec.slots
    if excess > 0:
        fewest = min(replica.adapters.values())
        slot_wait = int(excess * mean_out * itl * fewest / (fewest + 1))
    # Slots that loads under way will fill are taken already: without that, a cold fleet piles its first placements on one replica.
    taken = len(active) + len(replica.wanted) + (replica.loading is not None) - spec.slots
    victim, again = None, 0
    if taken >= 0:
        order = replica.tiers.leaving() if replica.tiers.pinned else active
        name = next(islice(order, min(taken, max(0, len(active) - 1)), None), "")
        victim = state.adapters.get(name.rpartition("@")[0])
        if victim is not None:
            again = spec.activation + load_time(replica, victim.spec.bytes)
        elif replica.wanted:  # one that is only now being loaded: it is wanted for sure
            again = load_time(replica, state.adapters[next(iter(replica.wanted))].spec.bytes)
    if replica.doubted:
        queue += BROKEN
    streams = seats if replica.loading is None else seats + load_waiters(replica)
    replica.standing = standing = (queue, slot_wait, streams, victim, again)
    return standing


def candidate(
    state: FleetState, replica: ReplicaState, request: RequestState, adapter: AdapterState | None, weight: float
) -> Candidate:
    """The full cost of ``request`` on ``replica`` now. ``weight`` scales the externality."""
    return candidates(state, (replica,), request, adapter, weight)[0]


def candidates(
    state: FleetState,
    replicas: Iterable[ReplicaState],
    request: RequestState,
    adapter: AdapterState | None,
    weight: float,
) -> list[Candidate]:
    """The full cost of ``request`` on each of ``replicas`` now, in their order.

    Written out, because a request that misses the slots is scored on all replicas of a small fleet: with a call for each term and
    nothing kept in ``standing`` it took three times as long, and half of all the kernel's time.
    """
    now, work, scored = state.now, request.prompt * SECOND, []
    name, size = ("", 0) if adapter is None else (adapter.spec.name, adapter.spec.bytes * SECOND)
    for replica in replicas:
        spec = replica.spec
        queue, wait, streams, victim, again = replica.standing or stand(state, replica)
        prefill = int(work / replica.prefill_rate.current)
        left = 0 if replica.loading is None else load_left(replica, now)
        if adapter is None:
            queue += left
            scored.append(Candidate(spec.name, "base", queue + prefill, queue, 0, 0, prefill, 0))
            continue
        registration = replica.registrations.get(name)
        if wait and name in replica.adapters:
            wait = 0
        if registration is None:
            tier: HitClass = "disk"
            prior = spec.load_overhead + size // spec.load_bytes_per_s
            stall = int(prior * replica.load_ratio.current) + spec.activation
            prepare = left + stall
            if replica.wanted:
                prepare += wanted_ahead(replica, None)
        else:
            tier = tier_of(replica, registration)
            if tier == "gpu" and not needs_verifying(adapter, registration):
                queue += left
                scored.append(Candidate(spec.name, tier, queue + wait + prefill, queue, wait, 0, prefill, 0))
                continue
            prepare, stall = preparation(replica, registration, adapter, tier, left)
            if again and registration.engine_name in replica.tiers.active:
                again = 0
        external = 0
        if stall:
            harm: float = stall * streams
            if victim is None:
                harm += again
            elif again:
                # Its residence here, were it left alone: one turn of the LRU list, at most a minute.
                rate = victim.rate * 0.5 ** ((now - victim.rate_at) / (RATE_TAU * SECOND))
                harm += (1.0 - 0.5 ** (rate / (len(victim.placed) or 1) * 60.0)) * again * (1 + streams)
            external = int(weight * harm)
        cost = queue + wait + prepare + prefill + external
        scored.append(Candidate(spec.name, tier, cost, queue, wait, prepare, prefill, external))
    return scored


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
) -> tuple[int, int]:
    """(what this request waits for, what it newly stalls), ns. ``left``: of the load under way there.

    A load that is wanted or under way already stalls nobody anew.
    """
    activation = replica.spec.activation
    if registration is None:
        load = load_time(replica, adapter.spec.bytes) + activation
        return left + load + (wanted_ahead(replica, None) if replica.wanted else 0), load
    state = registration.state
    if state == "loading":
        return left, 0
    if state == "wanted":
        return left + wanted_ahead(replica, adapter.spec.name) + registration.expected, 0
    if tier == "host" and not needs_verifying(adapter, registration):
        return left + activation, activation
    load = load_time(replica, adapter.spec.bytes) + activation
    if state == "registered" and not needs_verifying(adapter, registration):
        if tier == "unknown":  # listed, never seen used: it may be anywhere
            load = (load + activation) // 2
        return left + load, load  # the step reads it, no call is queued
    return left + wanted_ahead(replica, None) + load, load
