"""From a request to a replica: who may take it, what the policy says, and what must happen there first.

``route`` ends in one of: a dispatch; a load that the request waits for; a refusal; or ``False``, the request must wait for the
fleet. ``settle`` is the one place where a request that needs a new home (its load failed, its attempt failed, a place came free)
is routed again.
"""

from __future__ import annotations

from loraledger.events import Decision
from loraledger.kernel import fairness, loads, queues
from loraledger.kernel.arms import own_books
from loraledger.kernel.cost import needs_verifying
from loraledger.kernel.dispatch import send
from loraledger.kernel.policy import Policy
from loraledger.kernel.state import AdapterState, FleetState, ReplicaState, RequestState
from loraledger.kernel.turn import Turn


def feasible_for(
    state: FleetState, policy: Policy, request: RequestState, adapter: AdapterState | None
) -> list[ReplicaState]:
    """Replicas that may take this request now: of the policy's pool, or of the whole fleet if none of those may."""
    need, pool = request.prompt + request.expect, policy.pool(state, adapter)
    if adapter is None or usable_everywhere(state, adapter):
        found = [replica for replica in pool if replica.room >= need]
    else:
        found = [replica for replica in pool if fits(replica, request, adapter, state.now)]
    return found or [replica for replica in state.replicas.values() if fits(replica, request, adapter, state.now)]


def usable_everywhere(state: FleetState, adapter: AdapterState) -> bool:
    """Whether each replica's registrations need not be looked at."""
    return not adapter.barred and adapter.spec.rank <= state.rank_everywhere


def fits(replica: ReplicaState, request: RequestState, adapter: AdapterState | None, now: int) -> bool:
    """Whether ``replica`` may take this request: it is in routing, has a seat and KV for it, and may use the adapter."""
    if replica.room < request.prompt + request.expect:
        return False
    if adapter is None:
        return True
    return adapter.spec.rank <= replica.spec.max_rank and loads.may_load(
        replica.registrations.get(adapter.spec.name), now
    )


def route(turn: Turn, policy: Policy, request: RequestState) -> bool:
    """Place ``request``; ``False`` if no replica may take it now and it should wait."""
    arm = turn.arms.get(request.tenant) if turn.arms else None
    if arm is None:
        return _route(turn, policy, request)
    with own_books(turn.state, arm):
        return _route(turn, arm.policy, request)


def _route(turn: Turn, policy: Policy, request: RequestState) -> bool:
    state = turn.state
    adapter = None
    if request.adapter is not None:
        adapter = state.adapters.get(request.adapter)
        if adapter is None:
            _refuse(turn, request, 404, "model_not_found", f"the model {request.adapter!r} was withdrawn")
            return True
        if adapter.parked_until > turn.now:
            _refuse_parked(turn, request, adapter)
            return True
    found = feasible_for(state, policy, request, adapter)
    if request.failed_on is not None and len(found) > 1:
        found = [replica for replica in found if replica.spec.name != request.failed_on]
    if not found:
        return _refuse_if_hopeless(turn, request, adapter)
    choice = fairness.choose(state, policy, request, adapter, found)
    if choice is None:
        fairness.ask_again(turn, request.tenant)
        return False
    best = choice.candidates[0]
    decision = Decision(
        state.next_decision,
        policy.name,
        best.replica,
        choice.reason,
        best.tier,
        "believed" if state.replicas[best.replica].observed is None else "observed",
        choice.considered,
        choice.candidates,
    )
    state.next_decision += 1
    state.round_robin += 1
    _place(turn, request, state.replicas[best.replica], adapter, decision)
    return True


def _place(
    turn: Turn, request: RequestState, replica: ReplicaState, adapter: AdapterState | None, decision: Decision
) -> None:
    request.decision = decision
    if adapter is None:
        send(turn, request, replica, None, decision)
        return
    name = adapter.spec.name
    registration = replica.registrations.get(name)
    if registration is not None and registration.state == "registered" and not needs_verifying(adapter, registration):
        send(turn, request, replica, adapter, decision)
        return
    adapter.placed[replica.spec.name] = turn.now
    request.phase = "loading"
    queues.hold(turn, request, "loading", decision)
    loads.want(turn, replica, name, request.id, decision.reason)


def dispatch_waiters(turn: Turn, policy: Policy, replica: ReplicaState, name: str, waiters: list[str]) -> None:
    """A load succeeded: send all who waited for it, in order. A waiter that no longer fits there is routed anew."""
    adapter = turn.state.adapters.get(name)
    for key in waiters:
        request = turn.state.requests.get(key)
        if request is None or request.phase != "loading":
            continue
        parked = adapter is None or adapter.parked_until > turn.now
        may = fits(replica, request, adapter, turn.now) and fairness.within(turn.state, replica, request.tenant)
        if parked or request.decision is None or not may:
            settle(turn, policy, request)
        else:
            send(turn, request, replica, adapter, request.decision)


def settle_waiters(turn: Turn, policy: Policy, waiters: list[str]) -> None:
    """Their load will not come, or is not needed any more: route anew those who still wait for it."""
    for key in waiters:
        request = turn.state.requests.get(key)
        if request is not None and request.phase == "loading":
            settle(turn, policy, request)


def resettle_waiters(turn: Turn, policy: Policy, waiters: list[str], reason: str) -> None:
    """A load failed: those who waited try one other replica, and are refused with the load's reason after that."""
    for key in waiters:
        request = turn.state.requests.get(key)
        if request is None or request.phase != "loading":
            continue
        request.moves += 1
        if request.moves > 1:
            _refuse(turn, request, 503, "adapter_load_failed", f"the adapter could not be loaded: {reason}")
        else:
            settle(turn, policy, request)


def settle(turn: Turn, policy: Policy, request: RequestState) -> None:
    """Route a request that already counts as active; queue it if the fleet cannot take it."""
    if not route(turn, policy, request):
        deactivate(turn, request)
        queues.offer(turn, request, waiting_reason(turn.state))


def activate(turn: Turn, request: RequestState) -> None:
    """Count ``request`` against its tenant's concurrency; it leaves the queue if it stood there."""
    tenant = turn.state.tenants[request.tenant]
    tenant.active += 1
    if request.id in tenant.queue:
        queues.take(turn, request)
        queues.served(turn, request.tenant)


def deactivate(turn: Turn, request: RequestState) -> None:
    """The request no longer counts against its tenant."""
    turn.state.tenants[request.tenant].active -= 1


def waiting_reason(state: FleetState) -> str:
    """Why the fleet takes nobody: no replica is up, or all that are up are full."""
    up = any(replica.up and not replica.draining for replica in state.replicas.values())
    return "no_capacity" if up else "no_replica"


def _refuse(
    turn: Turn, request: RequestState, http_status: int, code: str, message: str, retry_after: int | None = None
) -> None:
    if request.id in turn.state.tenants[request.tenant].queue:
        queues.take(turn, request)
    else:
        deactivate(turn, request)
    queues.refuse(turn, request, http_status, code, message, retry_after)


def _refuse_parked(turn: Turn, request: RequestState, adapter: AdapterState) -> None:
    pause = None if adapter.parked_until == loads.FOREVER else adapter.parked_until - turn.now
    message = f"the adapter {adapter.spec.name!r} is parked: {adapter.parked_reason}"
    _refuse(turn, request, 503, "adapter_parked", message, pause)


def _refuse_if_hopeless(turn: Turn, request: RequestState, adapter: AdapterState | None) -> bool:
    """Waiting helps if a seat or a replica may come back; not if each replica that is up cannot or will not load the adapter."""
    if adapter is None:
        return False
    state, now, retry_at = turn.state, turn.now, loads.FOREVER
    reasons: dict[str, None] = {}
    usable = [r for r in state.replicas.values() if r.up and not r.draining and not r.shunned]
    for replica in usable:
        registration = replica.registrations.get(adapter.spec.name)
        if adapter.spec.rank > replica.spec.max_rank:
            reasons[f"rank {adapter.spec.rank} > {replica.spec.max_rank}"] = None
        elif registration is not None and registration.state == "parked" and registration.retry_at > now:
            reasons[str(registration.reason)] = None
            retry_at = min(retry_at, registration.retry_at)
        else:
            return False
    if not usable:
        return False
    pause = None if retry_at == loads.FOREVER else retry_at - now
    _refuse(turn, request, 503, "adapter_load_failed", "no replica can load the adapter: " + "; ".join(reasons), pause)
    return True
