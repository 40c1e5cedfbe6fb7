"""The life of a request, as the edge reports it: arrived, sent, first token, finished or cancelled, or out of time.

What an answer measured is learnt here: time between tokens and prefill rate of its replica, output length of its adapter.
"""

from __future__ import annotations

from typing import Final

from loraledger import events as ev
from loraledger.kernel import failures, pumping, queues, routing
from loraledger.kernel.cost import note_arrival
from loraledger.kernel.dispatch import first_token, release
from loraledger.kernel.policy import Policy
from loraledger.kernel.settings import SECOND
from loraledger.kernel.state import FleetState, RequestState
from loraledger.kernel.turn import Turn

HOPELESS: Final = 8
"""A prompt is refused when its estimate is over so many times what the largest KV cache holds. Estimates come from bytes, some four
a token, and nobody writes a prompt of over 32 bytes a token (long runs of blanks come near). What lies between is sent, and
answered by the engine, which counts."""


def arrived(turn: Turn, policy: Policy, event: ev.RequestArrived) -> None:
    """A request passed the edge: route it, or queue it while its tenant has all it may have in flight."""
    state = turn.state
    tenant = state.tenants[event.tenant]
    adapter = state.adapters.get(event.adapter) if event.adapter is not None else None
    expected = (adapter.output if adapter is not None else state.output).value(turn.now)
    expect = max(1, int(expected if event.max_tokens is None else min(event.max_tokens, expected)))
    deadline = turn.now + tenant.spec.queue_deadline
    request = RequestState(event.request, event.tenant, event.adapter, event.prompt_tokens, expect, turn.now, deadline)
    request.whole = not event.stream
    state.requests[event.request] = request
    failures.earn(turn)
    if adapter is not None:
        note_arrival(adapter, turn.now)
    most = _most_kv(state)
    if most is not None and request.prompt > HOPELESS * most:
        message = f"the prompt, about {request.prompt} tokens, is more than any replica can hold ({most})"
        queues.refuse(turn, request, 413, "prompt_too_large", message)
        return
    if not queues.room(tenant):
        queues.offer(turn, request, "tenant_concurrency")
        return
    routing.activate(turn, request)
    routing.settle(turn, policy, request)


def dispatched(turn: Turn, policy: Policy, event: ev.RequestDispatched) -> None:
    """Its bytes are on their way: what is measured of this attempt counts from here."""
    request = turn.state.requests.get(event.request)
    if request is not None and request.attempt == event.attempt:
        request.dispatched = turn.now


def first_token_seen(turn: Turn, policy: Policy, event: ev.RequestFirstToken) -> None:
    """Its prefill is done, and may have measured the replica's prefill rate."""
    request = turn.state.requests.get(event.request)
    if request is None or request.phase != "sent" or request.replica is None:
        return
    replica = turn.state.replicas[request.replica]
    # Only a long prompt that had the engine's prefill to itself and needed no adapter moved measures the prefill rate.
    if (
        request.lone
        and request.prompt >= 128
        and request.decision is not None
        and request.decision.hit_class in ("gpu", "base")
    ):
        seconds = (turn.now - request.dispatched - replica.itl.value(turn.now)) / 1e9
        if seconds > 0:
            replica.prefill_rate.observe(request.prompt / seconds, turn.now)
    first_token(turn, request)
    if len(turn.state.tenants) > 1 and request.tenant in turn.state.waiting_tenants:
        pumping.pump(turn, policy)  # the tenant's next prompt may go (see fairness)


def finished(turn: Turn, policy: Policy, event: ev.RequestFinished) -> None:
    """The answer ended: learn from it, and give its place to who waits."""
    request = turn.state.requests.get(event.request)
    if request is None:
        return
    _learn(turn, request, event.measured)
    failures.judge(turn, request, event.status)
    _end(turn, policy, request)


def cancelled(turn: Turn, policy: Policy, event: ev.RequestCancelled) -> None:
    """The client left, wherever its request was."""
    request = turn.state.requests.get(event.request)
    if request is not None:
        _end(turn, policy, request)


def expire(turn: Turn) -> None:
    """Refuse the requests whose deadline has passed."""
    for request in queues.expire(turn):
        if request.phase == "queued":
            queues.take(turn, request)
            code = "queue_deadline"
        else:
            routing.deactivate(turn, request)
            turn.state.held.pop(request.id, None)
            code = "load_deadline" if request.phase == "loading" else "replica_check_deadline"
        queues.refuse(turn, request, 503, code, "the request waited for its deadline in the gateway", SECOND)


def _most_kv(state: FleetState) -> int | None:
    """Tokens that the largest KV cache of the fleet holds; ``None`` unless all are known."""
    most = 0
    for replica in state.replicas.values():
        if replica.kv_tokens is None:
            return None
        most = max(most, replica.kv_tokens)
    return most


def _end(turn: Turn, policy: Policy, request: RequestState) -> None:
    state = turn.state
    if request.id in state.tenants[request.tenant].queue:
        queues.take(turn, request)
    else:
        release(turn, request)
        routing.deactivate(turn, request)
        state.held.pop(request.id, None)
    del state.requests[request.id]
    pumping.pump(turn, policy)


def _learn(turn: Turn, request: RequestState, measured: ev.Measured) -> None:
    state, now = turn.state, turn.now
    if request.replica is not None and measured.itl_mean:
        state.replicas[request.replica].itl.observe(float(measured.itl_mean), now)
    generated = measured.generated_tokens if measured.generated_tokens is not None else measured.tokens_seen
    if generated:
        state.output.observe(float(generated), now)
        adapter = state.adapters.get(request.adapter) if request.adapter is not None else None
        if adapter is not None:
            adapter.output.observe(float(generated), now)
