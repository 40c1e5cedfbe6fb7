"""How much of one replica one tenant may hold, so that another tenant waits there for an engine step and not for a queue.

Theory of operation. Engines serve first come, first served: behind what was sent, whoever comes later waits, whatever its tenant.
So where a gateway has more than one tenant, a further request of a tenant is sent to a replica only while the tenant holds there

- fewer **seats**, and less **KV**, than ``SHARE`` times what is free: alone 8/9 of them, two tenants 8/17 each. What is left is
  found by who comes next, so that nobody waits in the engine's own queue (dynamic thresholds: Choudhury and Hahne, "Dynamic queue
  length thresholds for shared-memory packet switches", 1998);
- fewer than ``WINDOW`` tokens of **prompts** whose first token has not come: with one more prompt about what an engine takes in one
  step. More would only wait there, before everybody else's. Of a whole answer no first token is told: such prompts are reckoned to
  go through one after the other, at a part of the prefill rate that was measured there, or else the best measured elsewhere.
  Where no stream was ever seen nobody's first token is delayed, and they are not reckoned.

So the first request of a tenant at a replica is never held back, and a large one waits no longer than a small one. Who is held back
waits in the gateway, where tenants are served in turn, or goes where its adapter is in a slot; after ``PATIENCE`` to any replica.

Where the adapters in flight take all slots nothing is held back: an engine works around those that wait for a slot, and does that
best with all requests at hand (with them held back, the mean time to first token of fleets with too few slots rose by 30 to 70 %).
Nor are tenants that may not wait (``queue`` 0) held back. With one tenant nothing is held back and nothing is looked at.
"""

from __future__ import annotations

from typing import Final

from loraledger.kernel.cost import tier_of
from loraledger.kernel.policy import Choice, Policy
from loraledger.kernel.settings import MS, SECOND
from loraledger.kernel.state import NO_SEAT, AdapterState, FleetState, Holding, ReplicaState, RequestState, Turn

SHARE: Final = 8
WINDOW: Final = 1_024
"""Tokens: half of vLLM's smallest default for a step (``max_num_batched_tokens``), the other half being the last prompt's."""
MIXED: Final = 0.2
"""Of the prefill rate that prompts alone on an engine measure: steps that decode as well take longer, and nothing tells when one of
these prompts is through. A flood of 2,000-token prompts had 22, 22, 11 and 5 answers a second at 1, 0.5, 0.2 and 0.1 of it, and a
quiet tenant's p99 TTFT rose 24, 5, 3 and 2 times (``benchmarks/fairness.py``, ``long``)."""
PATIENCE: Final = 500 * MS
"""About two loads. With half of it fleets with too few slots loaded more and were slower."""


def rate(state: FleetState, replica: ReplicaState) -> float | None:
    """Prompt tokens a second at which whole answers' prompts are reckoned to go through ``replica``; ``None``: not reckoned.

    Beside a flood of whole answers no prompt is alone and measures a rate, so what was measured fades into the prior: that is
    what they are reckoned with at least.
    """
    if not any(other.itl.n for other in state.replicas.values()):
        return None
    own, prior = replica.prefill_rate, replica.prefill_rate.prior
    if own.n:
        return max(prior, MIXED * own.current)
    return max(
        prior, *(MIXED * other.prefill_rate.current for other in state.replicas.values() if other.prefill_rate.n), 0.0
    )


def take(state: FleetState, replica: ReplicaState, request: RequestState) -> None:
    """``request`` was sent there, and its adapter's use noted."""
    held = replica.holdings.get(request.tenant)
    if held is None:
        held = replica.holdings[request.tenant] = Holding()
    held.seats += 1
    held.kv += request.prompt + request.expect
    if request.adapter in replica.blocked:
        return  # others are served before it
    if request.whole:
        if len(state.tenants) > 1 and (tokens_per_s := rate(state, replica)) is not None:
            held.drained = max(held.drained, state.now) + request.stall + int(request.prompt / tokens_per_s * SECOND)
    else:
        request.ahead = True
        held.prompt += request.prompt


def begun(replica: ReplicaState, request: RequestState) -> None:
    """Its prefill delays nobody any more."""
    if request.ahead:
        request.ahead = False
        replica.holdings[request.tenant].prompt -= request.prompt


def give(replica: ReplicaState, request: RequestState) -> None:
    """``request`` is there no more."""
    begun(replica, request)
    held = replica.holdings[request.tenant]
    held.seats -= 1
    held.kv -= request.prompt + request.expect
    if not held.seats:
        del replica.holdings[request.tenant]


def within(state: FleetState, replica: ReplicaState, tenant: str) -> bool:
    """Whether ``tenant`` holds less than its share of ``replica``."""
    held = replica.holdings.get(tenant)
    if held is None or len(replica.adapters) >= replica.spec.slots:
        return True
    if len(state.tenants) == 1 or not state.tenants[tenant].spec.queue:
        return True
    spec = replica.spec
    free = min(spec.max_seqs, spec.max_in_flight) - len(replica.in_flight) - replica.foreign
    if held.seats >= SHARE * free or held.kv >= SHARE * replica.room:
        return False
    return held.prompt + _undrained(state, replica, held) < WINDOW


def _undrained(state: FleetState, replica: ReplicaState, held: Holding) -> float:
    """Tokens of whole answers' prompts that are reckoned to be still there."""
    left = held.drained - state.now
    return left * (rate(state, replica) or 0.0) / SECOND if left > 0 else 0.0


def ask_again(turn: Turn, tenant: str) -> None:
    """``tenant`` has to wait: be stepped when the first of its whole answers' prompts are reckoned to leave room for another."""
    due = None
    for replica in turn.state.replicas.values():
        held = replica.holdings.get(tenant)
        if held is not None and held.prompt < WINDOW:
            tokens_per_s = rate(turn.state, replica)
            at = (
                held.drained
                if tokens_per_s is None
                else held.drained - int((WINDOW - held.prompt) / tokens_per_s * SECOND)
            )
            if at >= turn.now and (due is None or at < due):
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
        return
    for request in state.requests.values():
        if request.replica is not None:
            replica = state.replicas[request.replica]
            take(state, replica, request)
            if request.phase != "sent":
                begun(replica, request)
