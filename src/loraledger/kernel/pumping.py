"""Those who wait in the gateway's queues are tried again, whenever a place may have come free.

This happens at almost every step of a fleet that has more to do than it can, and most of those who are tried cannot be placed: what
would be found out of each in vain is asked before.
"""

from __future__ import annotations

from loraledger.kernel import fairness, queues
from loraledger.kernel.policy import Policy
from loraledger.kernel.routing import activate, route, usable_everywhere
from loraledger.kernel.state import NO_SEAT, FleetState, RequestState
from loraledger.kernel.turn import Turn


def pump(turn: Turn, policy: Policy) -> None:
    """A place may have come free: try the queues, one request a tenant in turn, until a round places nobody or all is full."""
    state = turn.state
    progress = bool(state.queued)
    while progress:
        progress = False
        for requests in queues.next_round(turn):
            room = _most_room(state)
            if room is None:
                return
            if not fairness.anywhere(state, requests[0].tenant):
                fairness.ask_again(turn, requests[0].tenant)
                continue
            arm = turn.arms.get(requests[0].tenant) if turn.arms else None
            counted = (policy if arm is None else arm.policy).counts_tries
            for request in requests:
                if (counted or not _outgrows(state, request, room)) and route(turn, policy, request):
                    if request.id in state.tenants[request.tenant].queue:
                        activate(turn, request)
                    progress = True
                    break


def _most_room(state: FleetState) -> int | None:
    """The room of the replica that has most; ``None`` if replicas are up and none has a seat.

    To try all who wait although none had one took 48 ms (50 replicas, 200 tenants).
    """
    most = max([replica.room for replica in state.replicas.values()], default=NO_SEAT)
    return None if most == NO_SEAT and any(replica.up for replica in state.replicas.values()) else most


def _outgrows(state: FleetState, request: RequestState, room: int) -> bool:
    """Whether no replica has KV for it and every one may use its adapter: ``route`` would find that it waits.

    To let it find out took 5.9 of 9.6 s of a replay (20,000 requests, 4 replicas, 10 tenants, too much for them).
    """
    if request.prompt + request.expect <= room:
        return False
    if request.adapter is None:
        return True
    adapter = state.adapters.get(request.adapter)
    return adapter is not None and adapter.parked_until <= state.now and usable_everywhere(state, adapter)
