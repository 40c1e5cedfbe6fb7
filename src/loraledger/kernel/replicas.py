"""Replicas coming, going, restarting and being sampled; what they list against what is believed of them."""

from __future__ import annotations

from loraledger.events import Evict, ReplicaDown, ReplicaSampled, ReplicaUp, parse_engine_name
from loraledger.kernel import failures, loads, pins
from loraledger.kernel.observed import Activity
from loraledger.kernel.policy import Policy
from loraledger.kernel.pumping import pump
from loraledger.kernel.rendezvous import weight
from loraledger.kernel.residency import Registration
from loraledger.kernel.routing import settle_waiters
from loraledger.kernel.state import AdapterState, ReplicaState
from loraledger.kernel.turn import Turn


def up(turn: Turn, policy: Policy, event: ReplicaUp) -> None:
    """The engine answers: notice a restart, take its listing, and send what waited for it."""
    replica = turn.state.replicas[event.replica]
    before, now_start = replica.process_start, event.process_start
    restarted = before is not None and before != now_start
    waiters: list[str] = []
    if restarted:
        turn.count("engine_restarts")
        if replica.up:  # it went and came between two looks
            failures.exited(turn, replica)
        waiters = loads.lose(turn, replica, "restarted")
    elif now_start is not None:
        failures.absolve(turn, replica)
    if restarted or now_start is None:
        _empty(replica)
        replica.broken, replica.broken_at = 0, turn.now  # what failed before this process says nothing of it
    replica.up, replica.doubted, replica.shunned, replica.reason = True, 0, False, None
    replica.reckon()
    replica.process_start = now_start
    replica.engine_version = event.engine_version or replica.engine_version
    replica.exit_suspects.clear()
    replica.accused.clear()
    # What its process forgot was lost before this listing, even if that was noticed only now.
    waiters += reconcile(turn, replica, event.registered, turn.now + 1, first=before is None or restarted)
    settle_waiters(turn, policy, waiters)
    failures.settle_held(turn, policy, replica)
    loads.start_next(turn, replica)
    hold_desired(turn)
    pump(turn, policy)


def down(turn: Turn, policy: Policy, event: ReplicaDown) -> None:
    """The engine does not answer. Its requests end by themselves, as their connections break."""
    replica = turn.state.replicas[event.replica]
    if replica.up:
        failures.exited(turn, replica)
    replica.up, replica.doubted, replica.shunned, replica.reason = False, 0, False, event.reason
    replica.running = replica.waiting = replica.kv_usage = replica.observed = None
    replica.foreign = replica.foreign_kv = 0
    replica.reckon()
    settle_waiters(turn, policy, loads.lose(turn, replica, event.reason))
    failures.settle_held(turn, policy, replica)
    hold_desired(turn)
    pump(turn, policy)


def scrape_started(turn: Turn, replica: ReplicaState) -> None:
    """Remember what this gateway has in flight now: the sample that follows includes exactly that."""
    for figure in (replica.itl, replica.prefill_rate, replica.load_ratio):
        figure.refresh(turn.now)
    replica.standing = None
    replica.mark = turn.now
    replica.own_at_mark = len(replica.in_flight)
    replica.kv_at_mark = replica.kv_own


def sampled(turn: Turn, policy: Policy, event: ReplicaSampled) -> None:
    """Take in one scrape. What it shows beyond our own work at its start is foreign: another gateway's, or an operator's."""
    replica = turn.state.replicas[event.replica]
    if not replica.up:
        return
    replica.running, replica.waiting, replica.kv_usage = event.running, event.waiting, event.kv_usage
    replica.sampled = event.scrape_start
    if event.kv_tokens is not None:
        replica.kv_tokens, replica.block_tokens = event.kv_tokens, event.block_tokens
    _count_preemptions(replica.activity, event)
    if event.scrape_start == replica.mark:
        if event.running is not None and event.waiting is not None:
            replica.foreign = max(0, event.running + event.waiting - replica.own_at_mark)
        if event.kv_usage is not None and replica.kv_tokens is not None:
            used = int(event.kv_usage * replica.kv_tokens)
            # Blocks held by requests that ended are free again; only what exceeds our own is somebody else's.
            replica.foreign_kv = max(0, used - replica.kv_at_mark) if replica.foreign else 0
    replica.reckon()
    if event.registered is not None:
        settle_waiters(turn, policy, reconcile(turn, replica, event.registered, event.scrape_start, first=False))
        hold_desired(turn)
    if replica.doubted:
        cleared = event.scrape_start - failures.DOUBT
        if replica.doubted <= cleared:
            replica.exit_suspects.clear()
            if not failures.distrusted(turn, replica):
                replica.doubted, replica.shunned = 0, False
                replica.reckon()
        # Each by its own failure: where attempts go on failing, the doubt never ends.
        failures.settle_held(turn, policy, replica, cleared)
    pump(turn, policy)


def _count_preemptions(activity: Activity, event: ReplicaSampled) -> None:
    before, now = activity.preemptions, event.preemptions
    if now is not None and before is not None and now >= before:
        activity.preemption_rate.add(now - before, event.at)
    activity.preemptions = now


def reconcile(turn: Turn, replica: ReplicaState, listed: tuple[str, ...], as_of: int, first: bool) -> list[str]:
    """Compare the names that an engine lists with what is believed; each contradiction is drift, and the listing wins.

    Returns the requests that waited for loads which are not needed any more.
    """
    waiters: list[str] = []
    newest: dict[str, tuple[int, str]] = {}
    names = dict.fromkeys(listed)
    for engine_name in listed:
        parsed = parse_engine_name(engine_name)
        if parsed is None:
            continue
        name, digest, generation = parsed
        adapter = turn.state.adapters.get(name)
        if (
            adapter is not None
            and adapter.spec.digest.startswith(digest)
            and generation >= newest.get(name, (0, ""))[0]
        ):
            newest[name] = (generation, engine_name)
    _forget_stale(turn, replica, names, {engine_name for _, engine_name in newest.values()})
    for name, (generation, engine_name) in newest.items():
        registration = replica.registrations.get(name)
        if registration is None:
            registration = replica.registrations[name] = Registration(waiters={})
        if registration.state == "registered" and registration.engine_name in names:
            continue
        if _seen(turn, replica, name, registration, generation, engine_name, first):
            waiters.extend(registration.waiters)
            registration.waiters = {}
    for name, registration in replica.registrations.items():
        if name not in newest and registration.since < as_of:
            if registration.state == "registered":
                turn.drift(replica, "registration_lost")
            loads.step(turn, replica, name, registration, "gone", "not listed")
            if registration.state == "absent" and name in turn.state.adapters:
                turn.state.adapters[name].placed.pop(replica.spec.name, None)
    return waiters


def _forget_stale(turn: Turn, replica: ReplicaState, listed: dict[str, None], served: set[str]) -> None:
    """Have the replica forget versions that are no longer served: they went while it was down, or this gateway was."""
    replica.stale = {name: None for name in replica.stale if name in listed and name not in served}
    for engine_name in replica.stale:
        adapter = engine_name.rpartition("@")[0]
        number = turn.command_id(replica.spec.name, adapter)
        turn.commands.append(Evict(number, replica.spec.name, adapter, engine_name))


def hold_desired(turn: Turn) -> None:
    """Load the adapters that should be held at all times where they are missing."""
    state = turn.state
    for name in state.desired:
        adapter = state.adapters[name]
        if adapter.parked_until > turn.now:
            if adapter.parked_until != loads.FOREVER:
                turn.wake(adapter.parked_until)
            continue
        live = [r for r in state.replicas.values() if r.up and not r.draining]
        holding = [r for r in live if _holds(r, name)]
        missing = [r for r in live if r not in holding and adapter.spec.rank <= r.spec.max_rank]
        wanted = len(live) if adapter.spec.replicas < 0 else adapter.spec.replicas
        missing.sort(key=lambda r: weight(adapter.seed, r.seed), reverse=True)
        for replica in missing[: max(0, wanted - len(holding))]:
            _want_desired(turn, replica, name)


def _want_desired(turn: Turn, replica: ReplicaState, name: str) -> None:
    registration = replica.registrations.get(name)
    if loads.may_load(registration, turn.now):
        loads.want(turn, replica, name, None, "desired")
    elif registration is not None and registration.state == "parked" and registration.retry_at != loads.FOREVER:
        turn.wake(registration.retry_at)


def _holds(replica: ReplicaState, name: str) -> bool:
    registration = replica.registrations.get(name)
    return registration is not None and registration.state in ("registered", "wanted", "loading")


def _seen(
    turn: Turn,
    replica: ReplicaState,
    name: str,
    registration: Registration,
    generation: int,
    engine_name: str,
    first: bool,
) -> bool:
    """Take a listed name over; ``False`` if a command under way, or a newer name that is wanted, will decide."""
    if registration.state in ("loading", "evicting"):
        return False
    if registration.state == "wanted" and generation < registration.generation:
        return False
    if not first and registration.state != "unknown":
        turn.drift(replica, "registration_found")
    if registration.engine_name != engine_name:
        registration.known = replica.observed is not None or engine_name in replica.tiers.host
    registration.generation, registration.engine_name = max(generation, registration.generation), engine_name
    replica.wanted.pop(name, None)
    loads.step(turn, replica, name, registration, "seen", "listed")
    adapter: AdapterState = turn.state.adapters[name]
    adapter.placed.setdefault(replica.spec.name, turn.now)
    return True


def _empty(replica: ReplicaState) -> None:
    """A new process holds nothing, knows no names, and may have other settings: what it refused before may load now."""
    replica.tiers.clear()
    replica.blocked.clear()
    replica.observed = replica.floor = None
    if replica.pins:
        pins.forget(replica)
    for registration in replica.registrations.values():
        registration.known = False
        registration.generation = 0
        registration.verified = 0
        registration.failures, registration.retry_at, registration.permanent = 0, 0, False
