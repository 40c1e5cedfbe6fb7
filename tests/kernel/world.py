"""Engines and clients as a kernel may meet them, driven by a stream of choices: every event that comes out is possible.

``World.act`` makes one thing happen; what it is follows from ``pick(n)``, a number below ``n``. The world keeps its own
books (which requests are open, which names an engine knows, which commands are under way) and holds the commands against them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from loraledger import events as ev
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.policies import policy_names
from loraledger.kernel.rollout import problem
from loraledger.kernel.settings import MS, SECOND, FleetSettings, Limits, TenantSpec

from .bench import T0, adapter, fleet_of, replica
from .invariants import active, check, keep_all

Pick = Callable[[int], int]
ADAPTERS = ("a", "b", "c", "d", "e")
REPLICAS = ("r1", "r2", "r3")
TENANTS = ("acme", "duff")


def world_settings(policy: str = "bounded-affinity") -> FleetSettings:
    """Small everywhere, so that every limit is met."""
    return fleet_of(
        (
            replica("r1", 2, 3, max_in_flight=6),
            replica("r2", 2, 2, max_in_flight=4, kv_tokens=2_000),
            replica("r3", 1, 4, max_in_flight=5, max_rank=16),
        ),
        [
            adapter("a", replicas=-1),
            adapter("b", replicas=1),
            adapter("c"),
            adapter("d", rank=32),
            adapter("e", rank=64),
        ],
        [TenantSpec("acme", 6, 5, 4 * SECOND), TenantSpec("duff", 3, 4, 2 * SECOND)],
        policy,
        Limits(
            queue_total=5,
            retry_ratio=0.1,
            retry_burst=1,
            load_backoff=SECOND,
            load_backoff_max=4 * SECOND,
            park=6 * SECOND,
        ),
    )


@dataclass
class Sent:
    """A request on an engine."""

    attempt: int
    replica: str
    model: str
    process: int
    answered: bool = False


@dataclass
class Engine:
    """One replica: its process, the names that it knows and those whose bytes it may still hold."""

    process: int = 1
    alive: bool = True
    believed_up: bool = False
    names: dict[str, None] = field(default_factory=dict)
    ever: dict[str, None] = field(default_factory=dict)
    unheard: dict[str, None] = field(default_factory=dict)
    """Names from loads that were sent to an earlier process: the kernel need not know of them."""
    pending: list[tuple[ev.Load | ev.Evict, int]] = field(default_factory=list)
    scrape: int | None = None


class World:
    """Everything outside of the kernel. ``log`` holds every answer of the kernel as bytes, ``steps`` what was said."""

    def __init__(self, settings: FleetSettings, pick: Pick) -> None:
        self.settings = settings
        self.fleet = Fleet(settings)
        self.now = T0
        self.wake_at: int | None = None
        self.log: list[bytes] = []
        self.steps: list[tuple[ev.Event, list[ev.Command], list[ev.ResidencyChange]]] = []
        self.engines = {name: Engine() for name in REPLICAS}
        self.open: dict[str, Sent | None] = {}
        self.tenants: dict[str, str] = {}
        self.policies: Counter[tuple[str, str]] = Counter()
        """Decisions by policy and tenant."""
        self.ended: dict[str, str] = {}
        self.retired: dict[str, None] = {}
        self.versions = dict.fromkeys(ADAPTERS, 1)
        self._pick = pick
        self._arrivals = 0
        self._actions = self._action_table()

    def feed(self, event: ev.Event, shadow: bool = False) -> None:
        """Step the kernel and follow its commands. ``shadow``: a kernel restored from the snapshot must answer alike."""
        restored = Fleet.restore(self.settings, self.fleet.snapshot()) if shadow else None
        keep_all(self.fleet.state)
        before, decided = active(self.fleet), self.fleet.state.next_decision
        commands, changes, self.wake_at = self.fleet.step_with_changes(event)
        check(self.fleet, self.wake_at, before)
        if restored is not None:
            assert restored.step_with_changes(event) == (commands, changes, self.wake_at)
            assert restored.snapshot() == self.fleet.snapshot()
        self.log.append(ev.encode(commands) + ev.encode(changes))
        self.steps.append((event, commands, changes))
        for command in commands:
            self._decided(command, decided)
            self._obey(command)
        assert self.open.keys() == self.fleet.state.requests.keys()

    def act(self) -> None:
        """One thing happens."""
        self.now += (0, 0, 0, 1, 5 * MS, 20 * MS, 20 * MS, 100 * MS, 600 * MS, 2 * SECOND)[self._pick(10)]
        self._actions[self._pick(len(self._actions))]()

    def settle(self) -> None:
        """From now on all goes well: every request must come to its end."""
        for name, engine in self.engines.items():
            if self.fleet.state.replicas[name].draining:
                self.feed(ev.DrainAsked(self.now, name, False))
            if not engine.alive:
                self._start_process(engine)
            self._up(name)
        for _ in range(400):
            for name, engine in self.engines.items():
                while engine.pending:
                    self._answer(name, ok=True)
            for request, sent in list(self.open.items()):
                if sent is not None:
                    self._end(request, "ok")
            for name in REPLICAS:
                self.feed(ev.ScrapeStarted(self.now, name))
                self.feed(ev.ReplicaSampled(self.now, name, self.now, 0, 0, 0.0, None))
            if not self.open and not any(engine.pending for engine in self.engines.values()):
                break
            self.now += 300 * MS
            self.feed(ev.Wake(self.now))
        assert not self.open, "requests wait for ever"
        assert all(not r.in_flight and not r.kv_own for r in self.fleet.state.replicas.values())
        assert all(not tenant.active for tenant in self.fleet.state.tenants.values())

        for change in list(self.fleet.state.rollouts):
            self.feed(ev.RolloutEnded(self.now, change), True)
        assert (self.fleet.state.rollouts, self.fleet.state.books, self.fleet.arms) == ({}, {}, {})

    # --- the kernel's commands ----------------------------------------------------------------------------------------

    def _decided(self, command: ev.Command, since: int) -> None:
        """What was decided in this step was decided by the policy of the request's tenant."""
        decision = command.decision if isinstance(command, ev.Dispatch | ev.Queue) else None
        if decision is None or decision.id < since:
            return
        tenant, policy = self.tenants[command.request], self.settings.policy  # type: ignore[union-attr]
        for rollout in self.fleet.state.rollouts.values():
            if rollout.variable == "policy" and (rollout.members is None or tenant in rollout.members):
                policy = msgspec.json.decode(rollout.value)
        assert decision.policy == policy
        self.policies[policy, tenant] += 1

    def _obey(self, command: ev.Command) -> None:
        match command:
            case ev.Dispatch():
                self._dispatched(command)
            case ev.Queue():
                assert self.open[command.request] is None
                assert command.until > self.now
            case ev.Reject() if self.ended.get(command.request) in ("cancelled", "lost"):
                pass  # its deadline had passed when its client left, or the gateway
            case ev.Reject():
                assert self.open.pop(command.request) is None, "a request was refused while it was in flight"
                self.ended[command.request] = "refused"
            case ev.Load():
                engine = self.engines[command.replica]
                unheard = command.engine_name in engine.unheard or command.adapter in self.retired
                known = command.engine_name in engine.names and not unheard
                assert not known, "a load under a name that the engine has already would prove nothing"
                engine.pending.append((command, engine.process))
            case ev.Evict():
                engine = self.engines[command.replica]
                engine.pending.append((command, engine.process))
            case ev.Check():
                pass

    def _dispatched(self, command: ev.Dispatch) -> None:
        assert self.open[command.request] is None, "a request was sent twice"
        assert self.fleet.state.replicas[command.replica].up
        self.open[command.request] = Sent(
            command.attempt, command.replica, command.model, self.engines[command.replica].process
        )

    # --- what may happen ----------------------------------------------------------------------------------------------

    def _action_table(self) -> list[Callable[[], None]]:
        often = (
            [self._arrive] * 9 + [self._progress] * 8 + [self._command_ends] * 5 + [self._scrape] * 3 + [self._wake] * 2
        )
        seldom = [
            self._cancel,
            self._attempt_breaks,
            self._kill,
            self._revive,
            self._blip,
            self._see_down,
            self._restart,
        ]
        catalog = [self._declare, self._retire, self._ask_load, self._ask_unload, self._drain, self._observe]
        return [*often, *seldom, *catalog, *[self._rolls_out] * 2, self._rollout_ends, self._gateway_restarts]

    def _choose(self, options: list[str]) -> str | None:
        return options[self._pick(len(options))] if options else None

    def _arrive(self) -> None:
        self._arrivals += 1
        request = f"q{self._arrivals}"
        name = (*ADAPTERS, None)[self._pick(len(ADAPTERS) + 1)]
        self.open[request] = None
        max_tokens = (None, 10, 600)[self._pick(3)]
        tenant = self.tenants[request] = TENANTS[self._pick(2)]
        self.feed(
            ev.RequestArrived(self.now, request, tenant, name, 1 + 40 * self._pick(40), max_tokens, True, "/v1"), True
        )

    def _sent(self, answered: bool | None = None) -> list[str]:
        return [
            request
            for request, sent in self.open.items()
            if sent is not None and (answered is None or sent.answered is answered)
        ]

    def _lives(self, sent: Sent) -> bool:
        engine = self.engines[sent.replica]
        return engine.alive and engine.process == sent.process

    def _progress(self) -> None:
        request = self._choose(self._sent())
        if request is None:
            return
        sent = self.open[request]
        assert sent is not None
        if not self._lives(sent):
            self._break(request, sent)
        elif not sent.answered and sent.model != "base" and sent.model not in self.engines[sent.replica].names:
            self._fail(request, sent, "client_error", "not_registered")
        elif not sent.answered:
            sent.answered = True
            self.feed(ev.RequestDispatched(self.now, request, sent.attempt))
            self.feed(ev.RequestFirstToken(self.now, request))
        else:
            self._end(request, "ok")

    def _break(self, request: str, sent: Sent) -> None:
        if sent.answered:
            self._end(request, "upstream_reset")
        else:
            self._fail(request, sent, "upstream_failed", ("reset", "connect_refused")[self._pick(2)])

    def _attempt_breaks(self) -> None:
        request = self._choose(self._sent(answered=False))
        if request is not None:
            sent = self.open[request]
            assert sent is not None
            status: ev.Status = ("upstream_failed", "engine_error", "upstream_timeout")[self._pick(3)]
            self._fail(request, sent, status, ("reset", "http_500", "connect_timeout")[self._pick(3)])

    def _fail(self, request: str, sent: Sent, status: ev.Status, reason: str) -> None:
        self.open[request] = None
        self.feed(ev.AttemptFailed(self.now, request, sent.attempt, status, None, reason), True)

    def _end(self, request: str, status: ev.Status) -> None:
        del self.open[request]
        assert request not in self.ended
        self.ended[request] = status
        measured = ev.Measured(generated_tokens=5 + self._pick(60), itl_mean=(5 + self._pick(50)) * MS)
        self.feed(ev.RequestFinished(self.now, request, status, 200, None, measured), True)

    def _cancel(self) -> None:
        request = self._choose(list(self.open))
        if request is not None:
            del self.open[request]
            self.ended[request] = "cancelled"
            self.feed(ev.RequestCancelled(self.now, request, ev.Measured()), True)

    def _command_ends(self) -> None:
        name = self._choose([name for name, engine in self.engines.items() if engine.pending])
        if name is not None:
            self._answer(name, ok=self._pick(4) > 0)

    def _answer(self, name: str, ok: bool) -> None:
        engine = self.engines[name]
        command, process = engine.pending.pop(0)
        if ok and engine.alive:
            if isinstance(command, ev.Load):
                engine.names[command.engine_name] = engine.ever[command.engine_name] = None
                if process != engine.process:
                    engine.unheard[command.engine_name] = None
            else:
                engine.names.pop(command.engine_name, None)
            self.feed(ev.CommandDone(self.now, command.id, (1 + self._pick(50)) * 10 * MS), True)
        else:
            self.feed(ev.CommandFailed(self.now, command.id, "broken", engine.alive and self._pick(4) == 0), True)

    def _kill(self) -> None:
        engine = self.engines[REPLICAS[self._pick(3)]]
        engine.alive = False
        engine.scrape = None

    def _start_process(self, engine: Engine) -> None:
        engine.alive = True
        engine.process += 1
        engine.names, engine.ever, engine.unheard = {}, {}, {}

    def _revive(self) -> None:
        name = self._choose([name for name, engine in self.engines.items() if not engine.alive])
        if name is not None:
            self._start_process(self.engines[name])
            self._up(name)

    def _restart(self) -> None:
        """The engine went and came between two looks."""
        name = REPLICAS[self._pick(3)]
        self._start_process(self.engines[name])
        self._up(name)

    def _up(self, name: str) -> None:
        engine = self.engines[name]
        self.feed(ev.ReplicaUp(self.now, name, engine.process, tuple(engine.names), "1"), True)

    def _see_down(self) -> None:
        name = self._choose([name for name, engine in self.engines.items() if not engine.alive])
        if name is not None:
            self.feed(ev.ReplicaDown(self.now, name, "connect_failed"), True)

    def _blip(self) -> None:
        """The engine could not be reached for a moment, or is reached for the first time."""
        name = REPLICAS[self._pick(3)]
        if self.fleet.state.replicas[name].up:
            self.feed(ev.ReplicaDown(self.now, name, "timeout"), True)
        if self.engines[name].alive and self._pick(3):
            self._up(name)

    def _scrape(self) -> None:
        name = REPLICAS[self._pick(3)]
        engine = self.engines[name]
        if not engine.alive:
            return
        if engine.scrape is None:
            engine.scrape = self.now
            self.feed(ev.ScrapeStarted(self.now, name))
            return
        listed = tuple(engine.names) if self._pick(3) == 0 else None
        figures = (self._pick(4), self._pick(3), self._pick(10) / 10)
        self.feed(ev.ReplicaSampled(self.now, name, engine.scrape, *figures, None, None, listed), True)
        engine.scrape = None

    def _wake(self) -> None:
        if self.wake_at is not None:
            self.now = max(self.now, self.wake_at)
            self.feed(ev.Wake(self.now), True)

    def _declare(self) -> None:
        name = ADAPTERS[self._pick(5)]
        if self._pick(3):
            self.versions[name] += 1
        spec = adapter(
            name,
            f"{self.versions[name]:04x}",
            rank=(8, 16, 32, 64)[self._pick(4)],
            replicas=(0, 0, 1, -1)[self._pick(4)],
        )
        self.feed(ev.AdapterDeclared(self.now, spec), True)

    def _retire(self) -> None:
        name = ADAPTERS[self._pick(5)]
        self.retired[name] = None
        self.feed(ev.AdapterRetired(self.now, name), True)

    def _ask_load(self) -> None:
        name = self._choose(list(self.fleet.state.adapters))
        if name is not None:
            self.feed(ev.LoadAsked(self.now, name, REPLICAS[self._pick(3)]), True)

    def _ask_unload(self) -> None:
        self.feed(ev.UnloadAsked(self.now, ADAPTERS[self._pick(5)], REPLICAS[self._pick(3)]), True)

    def _drain(self) -> None:
        self.feed(ev.DrainAsked(self.now, REPLICAS[self._pick(3)], self._pick(2) == 0), True)

    def _observe(self) -> None:
        name = REPLICAS[self._pick(3)]
        known = self._choose(list(self.engines[name].ever))
        if known is None:
            return
        events: list[ev.Event] = [
            ev.LoadObserved(self.now, name, known, 50 * MS),
            ev.ActivationObserved(self.now, name, known, 8 * MS),
            ev.EvictionObserved(self.now, name, known, "gpu"),
            ev.EvictionObserved(self.now, name, known, "host"),
        ]
        self.feed(events[self._pick(4)], True)

    def _rolls_out(self) -> None:
        """One change for each variable, good or bad, anew or for others; a bad one is an error and leaves all as it was."""
        number, unit, state = self._pick(5), self._pick(6), self.fleet.state
        values: tuple[object, ...] = (
            policy_names()[self._pick(len(policy_names()))],
            (0.5, 3, 10_000, "much")[self._pick(4)],
            (0.5, 3, 10_000, "much")[self._pick(4)],
            (0, 1, 1, 2, 8)[self._pick(5)],
            [[name, adapter] for name in REPLICAS for adapter in state.adapters if self._pick(3) == 0],
        )
        variable = ("policy", "policy.tick_s", "policy.externality", "tenant.concurrency", "pins")[number]
        names = REPLICAS if variable == "pins" else TENANTS
        members = None if unit == 0 else tuple(name for name in (*names, "gone") if self._pick(2))
        value, known = values[number], [name for name in members or () if name in names]
        event = ev.RolloutSet(
            self.now,
            f"c{number}",
            variable,
            msgspec.json.encode(value).decode(),
            "replica" if variable == "pins" else "tenant",
            members,
        )
        there = state.rollouts.get(f"c{number}")
        same = there is not None and (there.value, there.members) == (event.value, members and tuple(known))
        wrong = problem(self.settings, state, variable, value, None if members is None else known)
        if wrong is None or same:
            self.feed(event, True)
            return
        other = Fleet.restore(self.settings, self.fleet.snapshot())
        with pytest.raises(ValueError, match=variable.partition(".")[0]):
            other.step(event)
        assert other.state.rollouts == state.rollouts

    def _rollout_ends(self) -> None:
        self.feed(ev.RolloutEnded(self.now, f"c{self._pick(5)}"), True)

    def _gateway_restarts(self) -> None:
        if self._pick(4):
            return
        self.ended.update(dict.fromkeys(self.open, "lost"))
        self.open.clear()
        for engine in self.engines.values():
            # What was asked of an engine is carried out, but nobody hears of it.
            for command, _ in engine.pending:
                if engine.alive and isinstance(command, ev.Load):
                    engine.names[command.engine_name] = engine.ever[command.engine_name] = None
            engine.pending.clear()
            engine.scrape = None
        self.feed(ev.GatewayStarted(self.now, "1", "c"), True)
