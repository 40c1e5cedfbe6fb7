"""How much of one replica one tenant may hold, so that another tenant waits there for an engine step and not for a queue.

Theory of operation. Engines serve first come, first served: behind what was sent, whoever comes later waits, whatever its tenant.
So where a gateway has more than one tenant, a further request of a tenant is sent to a replica only while the tenant holds there

- fewer **seats**, and less **KV**, than ``SHARE`` times what is free: alone 8/9 of them, two tenants 8/17 each. What is left is
  found by who comes next, so that nobody waits in the engine's own queue (dynamic thresholds: Choudhury and Hahne, "Dynamic queue
  length thresholds for shared-memory packet switches", 1998);
- fewer than ``WINDOW`` tokens of **prompts** whose first token has not come: with one more prompt about what an engine takes in one
  step. More would only wait there, before everybody else's.

And where another tenant streams, or did in the last ``LATELY``, so that there is somebody whose first token can be late:

- a tenant with half of the seats leaves ``SPARE`` of them, for few are found where an engine has few;
- prompts of **whole answers** count as well. No first token of theirs is told, so they are reckoned to go through one after the
  other, at the replica's prior prefill rate (what is measured is of prompts alone on an engine, and far too fast beside decodes).

So the first request of a tenant at a replica is never held back, and a large one waits no longer than a small one. Who is held back
waits in the gateway, where tenants are served in turn, or goes where its adapter is in a slot; after ``PATIENCE`` to any replica.

Where the adapters in flight take all slots nothing is held back: an engine works around those that wait for a slot, and does that
best with all requests at hand (with them held back, the mean time to first token of fleets with too few slots rose by 30 to 70 %).
Nor are tenants that may not wait (``queue`` 0) held back. With one tenant nobody is.
"""

from __future__ import annotations

from typing import Final

from loraledger.kernel.cost import tier_of
from loraledger.kernel.holding import Holding
from loraledger.kernel.policy import Choice, Policy
from loraledger.kernel.settings import MS, SECOND
from loraledger.kernel.state import NO_SEAT, AdapterState, FleetState, ReplicaState, RequestState
from loraledger.kernel.turn import Turn

SHARE: Final = 8
WINDOW: Final = 1_024
"""Tokens: half of vLLM's smallest default for a step (``max_num_batched_tokens``), the other half being the last prompt's."""
SPARE: Final = 4
"""Where an engine has 16 seats, a ninth of them is two, and of four streams a second each of which takes half a second the third
waited until one of the flood's requests ended: p99 TTFT 12 times that without the flood, 1.04 times with four seats left free."""
LATELY: Final = 10 * SECOND
"""Longer than the pauses of somebody who chats; as long as a tenant that has left costs others their last seats."""
PATIENCE: Final = 500 * MS
"""About two loads. With half of it fleets with too few slots loaded more and were slower."""


def beside(replica: ReplicaState, tenant: str, now: int) -> bool:
    """Whether another tenant than ``tenant`` has a stream there, or had one lately."""
    held = replica.holdings.get(tenant)
    if replica.streams > (0 if held is None else held.streams):
        return True
    return any(name != tenant and now - at < LATELY for name, at in replica.streamers.items())


def take(replica: ReplicaState, request: RequestState, now: int) -> None:
    """``request`` was sent there, and its adapter's use noted."""
    held = replica.holdings.get(request.tenant)
    if held is None:
        held = replica.holdings[request.tenant] = Holding()
    held.seats += 1
    held.kv += request.prompt + request.expect
    if not request.whole:
        held.streams += 1
        replica.streams += 1
        _streamed(replica, request.tenant, now)
    if request.adapter in replica.blocked:
        return  # others are served before it
    if not request.whole:
        request.ahead = True
        held.prompt += request.prompt
    elif beside(replica, request.tenant, now):
        took = request.stall + request.prompt * SECOND // replica.spec.prefill_tokens_per_s
        request.reckoned = took
        held.whole += took
        held.drained = max(held.drained, now) + took


def _streamed(replica: ReplicaState, tenant: str, now: int) -> None:
    """A stream of ``tenant`` was sent there, or ended."""
    replica.streamers.pop(tenant, None)
    replica.streamers[tenant] = now
    if len(replica.streamers) > 2:
        del replica.streamers[next(iter(replica.streamers))]


def begun(replica: ReplicaState, request: RequestState) -> None:
    """Its prefill delays nobody any more."""
    if request.ahead:
        request.ahead = False
        replica.holdings[request.tenant].prompt -= request.prompt


def give(replica: ReplicaState, request: RequestState, now: int) -> None:
    """``request`` is there no more."""
    begun(replica, request)
    held = replica.holdings[request.tenant]
    held.seats -= 1
    held.kv -= request.prompt + request.expect
    if not request.whole:
        held.streams -= 1
        replica.streams -= 1
        _streamed(replica, request.tenant, now)
    if request.reckoned:  # it is through, however long that was reckoned to take
        held.whole -= request.reckoned
        request.reckoned = 0
        held.drained = min(held.drained, now + held.whole)
    if not held.seats:
        del replica.holdings[request.tenant]


def within(state: FleetState, replica: ReplicaState, tenant: str) -> bool:
    """Whether ``tenant`` holds less than its share of ``replica``."""
    held = replica.holdings.get(tenant)
    if held is None or len(replica.adapters) >= replica.spec.slots:
        return True
    if len(state.tenants) == 1 or not state.tenants[tenant].spec.queue:
        return True
    spec, now = replica.spec, state.now
    seats = min(spec.max_seqs, spec.max_in_flight)
    free = seats - len(replica.in_flight) - replica.foreign
    if held.seats >= SHARE * free or held.kv >= SHARE * replica.room:
        return False
    if held.prompt >= WINDOW:
        return False
    if 2 * held.seats < seats or free > min(SPARE, seats // 4):
        left = held.drained - now
        if left <= 0 or held.prompt + left * spec.prefill_tokens_per_s / SECOND < WINDOW:
            return True
    return not beside(replica, tenant, now)


def ask_again(turn: Turn, tenant: str) -> None:
    """``tenant`` has to wait: be stepped when it may go without that anything else happens.

    That is when the first of its whole answers' prompts are reckoned to leave room for another, or when the streams of others are
    so long ago that they do not count.
    """
    due = None
    for replica in turn.state.replicas.values():
        held = replica.holdings.get(tenant)
        if held is not None and held.prompt < WINDOW:
            at = held.drained - (WINDOW - held.prompt) * SECOND // replica.spec.prefill_tokens_per_s
            if at >= turn.now and (due is None or at < due):
                due = at
            for name, seen in replica.streamers.items():
                if name != tenant:
                    at = (seen + LATELY) // SECOND * SECOND + SECOND  # whole seconds: streams go on and on
                    if turn.now < seen + LATELY and (due is None or at < due):
                        due = at
    if due is not None:
        turn.wake(due + 1)


def anywhere(state: FleetState, tenant: str) -> bool:
    """Whether ``tenant`` holds less than its share somewhere, or nowhere is anything up. Spares trying its requests one by one."""
    up = False
    for replica in state.replicas.values():
        if replica.room != NO_SEAT and within(state, replica, tenant):
            return True
        up = up or replica.up
    return not up


def choose(
    state: FleetState, policy: Policy, request: RequestState, adapter: AdapterState | None, found: list[ReplicaState]
) -> Choice | None:
    """The policy's choice among ``found``, or the next best; ``None`` if the request should wait for its tenant's share."""
    if len(state.tenants) == 1:
        return policy.choose(state, request, adapter, found)
    fair = [replica for replica in found if within(state, replica, request.tenant)]
    if not fair:
        return None
    choice = policy.choose(state, request, adapter, found)
    if len(fair) == len(found) or any(replica.spec.name == choice.candidates[0].replica for replica in fair):
        return choice
    if adapter is not None and state.now - request.arrived < PATIENCE:
        fair = [r for r in fair if tier_of(r, r.registrations.get(adapter.spec.name)) == "gpu"]
    return policy.choose(state, request, adapter, fair) if fair else None


def recount(state: FleetState) -> None:
    """Fill in what a snapshot of an older version does not have."""
    if any(replica.holdings for replica in state.replicas.values()):
        _recount_streams(state)
        return
    for request in state.requests.values():
        if request.replica is not None:
            replica = state.replicas[request.replica]
            take(replica, request, state.now)
            if request.phase != "sent":
                begun(replica, request)


def _recount_streams(state: FleetState) -> None:
    """Snapshots that know holdings may be older than the counts of streams."""
    for replica in state.replicas.values():
        replica.streams = 0
        for held in replica.holdings.values():
            held.streams = 0
    for request in state.requests.values():
        if request.replica is not None and not request.whole:
            replica = state.replicas[request.replica]
            replica.streams += 1
            replica.holdings[request.tenant].streams += 1
