"""What a broken attempt means: retry it elsewhere, suspect its adapter, or give up.

An attempt that broke before a byte reached the client may be tried once more, within a retry budget (a share of arrivals that
can be saved up), and never on the replica where it broke while there is another.

**Poison.** A registered adapter that the engine cannot read kills the engine in the step that needs it, and a naive retry would
kill the next replica. So an attempt that was *delivered* and broke is held until a check has shown what became of the engine:

- it lives: the attempt is retried;
- it exited: each adapter that had a request there without a first token, or a load under way, is *suspect* from that moment.
  A suspect adapter is used on a replica only after an explicit load under a new name has succeeded there, because an explicit
  load of unreadable files is refused by the engine instead of killing it. If that load fails, or if a second exit coincides with
  the adapter within the parking time, it is parked fleet-wide.

So one bad adapter costs one replica (two, if it can be loaded and kills in use), and a killed replica costs its innocent
adapters one load each. A replica that was down and comes back as the same process did not exit, it was only not heard: what its
outage made suspect is as it was before. Else a network that flaps would park every adapter in use.

**Distrust.** An engine may break all that it is sent and look well. It is idle, so it draws the traffic: with one such of three
replicas, 980 of 1,000 streams were cut, or 691 of 1,000 requests refused for want of retries (50 a second). So a replica is
*broken* when a request that failed there was answered elsewhere (one that fails everywhere accuses nobody: else one tenant's bad
requests would take the fleet from all others; an adapter's name that it forgot is drift), or when it broke off a stream. It then
stays out of routing, as long as another one is in it, twice as long each time in a row, and is tried again. A whole answer
ends that.
"""

from __future__ import annotations

from loraledger.events import AttemptFailed, Check, Status
from loraledger.kernel import loads, queues
from loraledger.kernel.dispatch import release
from loraledger.kernel.policy import Policy
from loraledger.kernel.pumping import pump
from loraledger.kernel.routing import deactivate, settle
from loraledger.kernel.state import AdapterState, ReplicaState, RequestState
from loraledger.kernel.turn import Turn

NOT_REGISTERED = "not_registered"
"""Reason of an attempt that the engine refused because it does not know the name: it did no work."""
CONNECT = "connect"
"""How the reason of an attempt begins whose bytes never reached the engine."""
ATTEMPTS = 2
DOUBT = 500_000_000
"""A look at the engine clears it only if it began this long (ns) after the failure. Measured on vLLM 0.32: a dying engine's API
server goes on answering for 25 ms after its requests failed, and is gone 0.35 s later."""
DISTRUST = 32_000_000_000
"""Longest time (ns) that a replica is kept out of routing although it looks well."""
_BROKE = frozenset({"upstream_failed", "upstream_reset", "engine_error"})


def attempt_failed(turn: Turn, policy: Policy, event: AttemptFailed) -> None:
    """One attempt broke before a byte reached the client."""
    request = turn.state.requests.get(event.request)
    if request is None or request.attempt != event.attempt:
        return
    replica = release(turn, request)
    if replica is None:
        return
    request.deadline = turn.now + turn.state.tenants[request.tenant].spec.queue_deadline  # of its second wait
    request.failed_on = replica.spec.name
    request.failed_at = turn.now
    request.failure = (event.status, event.http_status, event.reason)
    turn.count(f"attempts_failed:{event.status}")
    if event.reason == NOT_REGISTERED:
        _forgotten(turn, replica, request)
        retry(turn, policy, request)
    elif event.status == "upstream_timeout":
        give_up(turn, request)  # a second try would only add to what makes the engine slow
    elif not replica.up:
        if request.adapter is not None and not event.reason.startswith(CONNECT):
            _accuse(turn, replica, request.adapter)
        retry(turn, policy, request)
    else:
        _doubt(turn, replica, answered=event.http_status is not None)
        if event.reason.startswith(CONNECT):
            retry(turn, policy, request)
        else:
            if request.adapter is not None:
                replica.exit_suspects[request.adapter] = None
            turn.state.held[request.id] = None
            queues.hold(turn, request, "replica_check", request.decision)
    pump(turn, policy)


def retry(turn: Turn, policy: Policy, request: RequestState) -> None:
    """Try ``request`` once more if it may be and the budget allows; refuse it otherwise."""
    state = turn.state
    if request.attempt >= ATTEMPTS:
        give_up(turn, request)
    elif state.retries < 1.0:
        deactivate(turn, request)
        queues.refuse(
            turn,
            request,
            503,
            "retry_budget_spent",
            "the replica failed and the retry budget is spent",
            None,
            "upstream_failed",
        )
    else:
        state.retries -= 1.0
        turn.count("retries")
        settle(turn, policy, request)


def give_up(turn: Turn, request: RequestState) -> None:
    """Answer with what the last attempt met."""
    status, http_status, reason = request.failure or ("upstream_failed", None, "unknown")
    deactivate(turn, request)
    answer = 504 if status == "upstream_timeout" else 502
    message = f"the replica failed: {reason}" + (f" (HTTP {http_status})" if http_status else "")
    code = "upstream_timeout" if status == "upstream_timeout" else "upstream_failed"
    queues.refuse(turn, request, answer, code, message, None, status)  # type: ignore[arg-type]


def judge(turn: Turn, request: RequestState, status: Status) -> None:
    """What the end of an answer, of which the client saw some, says of its replica, and of the one that failed before."""
    replicas = turn.state.replicas
    if request.replica is None:
        return
    if status == "ok":
        replicas[request.replica].broken = 0
        failed_on, failure = request.failed_on, request.failure
        forgotten = request.adapter is not None and failure is not None and failure[2] == NOT_REGISTERED
        if failed_on is not None and failed_on != request.replica and not forgotten:
            _distrust(turn, replicas[failed_on], request.failed_at)
    elif status in _BROKE:
        _distrust(turn, replicas[request.replica], request.dispatched)


def distrusted(turn: Turn, replica: ReplicaState) -> bool:
    """Whether a look that found ``replica`` well is not enough, and another one is there to serve."""
    until = replica.broken_at + min(DOUBT << replica.broken, DISTRUST)
    return replica.broken > 0 and turn.now < until and _spared(turn, replica)


def earn(turn: Turn) -> None:
    """Each arrival earns a share of a retry."""
    limits = turn.settings.limits
    turn.state.retries = min(turn.state.retries + limits.retry_ratio, float(limits.retry_burst))


def exited(turn: Turn, replica: ReplicaState) -> None:
    """The engine of ``replica`` is gone: suspect every adapter whose use coincided."""
    replica.exited_at = turn.now
    replica.accused.clear()
    turn.count("engine_exits")
    names = dict(replica.exit_suspects)
    for key in replica.in_flight:
        request = turn.state.requests[key]
        if request.phase == "sent" and request.adapter is not None:
            names[request.adapter] = None
    if replica.loading is not None:
        names[replica.loading] = None
    replica.exit_suspects.clear()
    for name in names:
        _accuse(turn, replica, name)


def absolve(turn: Turn, replica: ReplicaState) -> None:
    """``replica`` is back as the same process, so its engine did not exit: nobody took it down."""
    for name, (since, strikes) in replica.accused.items():
        adapter = turn.state.adapters.get(name)
        if adapter is None or not adapter.strikes:
            continue
        if adapter.suspect_since == replica.exited_at:
            adapter.suspect_since, adapter.strikes = since, strikes
        else:  # another exit coincided since
            adapter.strikes -= 1
        if adapter.strikes < 2 and adapter.parked_until != loads.FOREVER:
            adapter.parked_until, adapter.parked_reason = 0, None


def suspect(turn: Turn, name: str, at: int) -> None:
    """An engine exit at ``at`` coincided with the use of this adapter; the second exit in the parking time parks it."""
    adapter = turn.state.adapters.get(name)
    if adapter is None or adapter.suspect_since == at:
        return
    repeated = adapter.suspect_since > 0 and at - adapter.suspect_since < turn.settings.limits.park
    adapter.strikes = adapter.strikes + 1 if repeated else 1
    adapter.suspect_since = max(at, adapter.suspect_since)
    turn.count("adapters_suspected")
    if adapter.strikes > 1:
        loads.park(turn, adapter, f"its use coincided with {adapter.strikes} engine exits", permanent=False)


def settle_held(turn: Turn, policy: Policy, replica: ReplicaState, until: int | None = None) -> None:
    """The fate of ``replica`` is known: requests that were held for it go on, those that failed after ``until`` excepted."""
    waiting = [turn.state.requests[key] for key in turn.state.held]
    for request in [r for r in waiting if r.failed_on == replica.spec.name]:
        if until is None or request.failed_at <= until:
            del turn.state.held[request.id]
            retry(turn, policy, request)


def unpark(adapter: AdapterState) -> None:
    """An operator vouches for the adapter: nothing is held against it, but it must still be verified."""
    adapter.parked_until, adapter.parked_reason, adapter.strikes = 0, None, 0


def _accuse(turn: Turn, replica: ReplicaState, name: str) -> None:
    """The exit of ``replica`` coincided with the use of this adapter; it is taken back if there was none (``absolve``)."""
    adapter = turn.state.adapters.get(name)
    if adapter is not None:
        replica.accused.setdefault(name, (adapter.suspect_since, adapter.strikes))
        suspect(turn, name, replica.exited_at)


def _doubt(turn: Turn, replica: ReplicaState, answered: bool) -> None:
    """Have the engine looked at. One that answered, if with an error, is still routed to: else one tenant's bad requests would
    take the fleet from all others."""
    if not replica.doubted:
        turn.commands.append(Check(replica.spec.name))
    if replica.broken and not replica.shunned and replica.broken_at < turn.now:  # it was tried again
        replica.broken, replica.broken_at = min(replica.broken + 1, 16), turn.now
    replica.doubted = turn.now
    replica.shunned = replica.shunned or not answered or (replica.broken > 0 and _spared(turn, replica))
    replica.reckon()


def _distrust(turn: Turn, replica: ReplicaState, since: int) -> None:
    """``replica`` broke a request. Those that were under way (``since``) when it was last found to break some count as one."""
    if replica.up and since > replica.broken_at:
        replica.broken, replica.broken_at = min(replica.broken + 1, 16), turn.now
        _doubt(turn, replica, answered=True)


def _spared(turn: Turn, replica: ReplicaState) -> bool:
    """Whether others are in routing."""
    others = (other for other in turn.state.replicas.values() if other is not replica)
    return any(other.up and not other.draining and not other.shunned for other in others)


def _forgotten(turn: Turn, replica: ReplicaState, request: RequestState) -> None:
    registration = replica.registrations.get(request.adapter or "")
    # It may have asked for a name that was replaced while it was on its way.
    if registration is not None and request.adapter is not None and registration.since <= request.dispatched:
        turn.drift(replica, "registration_lost")
        loads.step(turn, replica, request.adapter, registration, "gone", NOT_REGISTERED)
