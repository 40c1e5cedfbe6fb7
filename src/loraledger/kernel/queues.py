"""The gateway queue: one bounded FIFO a tenant, with deadlines, served in turn between tenants.

A request waits here when its tenant has all it may have in flight, or when no replica may take it. ``offer`` puts it in (or
refuses, when the tenant's or the gateway's queue is full), ``take`` removes it, ``expire`` refuses those whose deadline passed.
Tenants are served round robin, and within one tenant the first few requests are tried, so that one blocked adapter does not
block the tenant's others.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from loraledger.events import Decision, Queue, Reject, Status
from loraledger.kernel.settings import SECOND
from loraledger.kernel.state import RequestState, TenantState
from loraledger.kernel.turn import Turn

LOOK_AHEAD = 8
"""Requests of one tenant that are tried in one round."""


def offer(turn: Turn, request: RequestState, reason: str) -> bool:
    """Queue ``request``; ``False`` if a queue was full and the request was refused instead."""
    state = turn.state
    tenant = state.tenants[request.tenant]
    if len(tenant.queue) >= tenant.spec.queue:
        refuse(
            turn,
            request,
            429,
            "tenant_queue_full",
            f"tenant {request.tenant} already has {tenant.spec.queue} requests queued",
            SECOND,
        )
        return False
    if state.queued >= turn.settings.limits.queue_total:
        refuse(turn, request, 503, "gateway_queue_full", "the gateway queue is full", SECOND)
        return False
    request.phase = "queued"
    tenant.queue[request.id] = None
    state.queued += 1
    state.waiting_tenants[request.tenant] = None
    hold(turn, request, reason)
    return True


def hold(turn: Turn, request: RequestState, reason: str, decision: Decision | None = None) -> None:
    """Tell the edge that ``request`` waits, and arm its deadline."""
    heappush(turn.state.timers, (request.deadline, request.id))
    turn.commands.append(Queue(request.id, reason, request.deadline, decision))


def take(turn: Turn, request: RequestState) -> None:
    """Remove ``request`` from its queue."""
    state = turn.state
    tenant = state.tenants[request.tenant]
    del tenant.queue[request.id]
    state.queued -= 1
    if not tenant.queue:
        del state.waiting_tenants[request.tenant]


def room(tenant: TenantState) -> bool:
    """Whether the tenant may have one more request in flight."""
    return tenant.active < tenant.spec.concurrency


def next_round(turn: Turn) -> Iterator[list[RequestState]]:
    """For each tenant with queued requests and room, in turn: the requests to try, oldest first."""
    state = turn.state
    for name in list(state.waiting_tenants):
        tenant = state.tenants[name]
        if room(tenant):
            yield [state.requests[key] for key, _ in zip(tenant.queue, range(LOOK_AHEAD), strict=False)]


def served(turn: Turn, tenant: str) -> None:
    """This tenant had its turn: the others come first now."""
    waiting = turn.state.waiting_tenants
    if tenant in waiting:
        del waiting[tenant]
        waiting[tenant] = None


def expire(turn: Turn) -> list[RequestState]:
    """Pop the timers that are due; returns the waiting requests among them, whose deadline has passed."""
    state = turn.state
    due: dict[str, RequestState] = {}  # a request that was held twice has two timers
    while state.timers and state.timers[0][0] <= turn.now:
        at, key = heappop(state.timers)
        if not key:
            del state.wakes[at]
        request = state.requests.get(key)
        if request is not None and request.phase in ("queued", "loading", "held") and request.deadline <= turn.now:
            due[key] = request
    return list(due.values())


def refuse(
    turn: Turn,
    request: RequestState,
    http_status: int,
    code: str,
    message: str,
    retry_after: int | None = None,
    status: Status = "rejected",
) -> None:
    """Refuse ``request`` and forget it. It must hold no seat and stand in no queue any more."""
    turn.state.requests.pop(request.id, None)
    turn.count(f"rejected:{code}")
    turn.commands.append(Reject(request.id, status, http_status, code, message, retry_after, request.decision))
