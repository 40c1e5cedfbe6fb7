"""A residency ranking replayed: what pins save, that they hold, and that a replay of them is exact."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from loraledger import events as ev
from loraledger.conductor.conductor import Conductor
from loraledger.conductor.fold import FoldState, RowFold
from loraledger.conductor.reading import verify
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.settings import MS, SECOND, FleetSettings
from loraledger.record.journal import Journal
from loraledger.replay.fleet.observation import Observation
from loraledger.replay.fleet.restart import restart
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.traces.trace import Request
from loraledger.twin.events import Evicted, MoveDone, PinLost, TwinEvent
from loraledger.twin.profile import TwinProfile
from replay.fleets import adapters, settings_for

from .test_virtual import Tap

PROFILE = TwinProfile(slots=4, host_entries=6)
HOT = ("a0", "a1")
COLD = 40


def scanned(requests: int = 300, per_second: float = 2.0) -> list[Request]:
    """Half of the requests are for two adapters; the others walk through forty more, one after the other, for ever."""
    rng, trace, now, cold = random.Random(3), [], 0.0, 0
    for _ in range(requests):
        now += rng.expovariate(per_second)
        if rng.random() < 0.5:
            name = rng.choice(HOT)
        else:
            name, cold = f"a{len(HOT) + cold % COLD}", cold + 1
        trace.append(Request(round(now * SECOND), "acme", name, rng.randint(20, 200), rng.randint(1, 8)))
    return trace


def ranked(residency: str = "ranked", pins: tuple[str, ...] = HOT) -> FleetSettings:
    settings = settings_for(1, adapters(len(HOT) + COLD), "strict-affinity", PROFILE)
    return msgspec.structs.replace(settings, residency=residency, pins=tuple(("r1", name) for name in pins))


class Watched:
    """A virtual fleet and all that its one twin said."""

    def __init__(self, settings: FleetSettings, observation: Observation | None = None) -> None:
        self.fleet = VirtualFleet(settings, {"r1": PROFILE}, observation or Observation(probe=True))
        self.tap = Tap(self.fleet)
        self.said: list[TwinEvent] = []
        twin = self.fleet.replicas["r1"].twin
        advance = twin.advance

        def watched(to: int) -> list[TwinEvent]:
            happened = advance(to)
            self.said.extend(happened)
            return happened

        twin.advance = watched  # type: ignore[method-assign]

    def moves(self) -> list[tuple[str, str]]:
        return [(c.verb, c.adapter) for commands, _ in self.tap.answers for c in commands if isinstance(c, ev.Move)]

    def pins(self) -> list[str]:
        """Adapters that the twin has pinned, in its order."""
        layout = self.fleet.replicas["r1"].twin._layout
        return [key.rpartition("@")[0] for key in layout._store._tiers.pinned]  # type: ignore[attr-defined]


def loads_of(watched: Watched, names: tuple[str, ...]) -> int:
    return sum(
        isinstance(event, ev.LoadObserved) and event.engine_name.rpartition("@")[0] in names
        for event in watched.tap.events
    )


def test_a_scan_does_not_push_out_what_is_pinned() -> None:
    runs = {residency: Watched(ranked(residency)) for residency in ("lru", "ranked")}
    for watched in runs.values():
        watched.fleet.run(scanned())
    lru, pinned = (loads_of(runs[residency], HOT) for residency in ("lru", "ranked"))
    assert pinned == len(HOT)
    assert lru > 5 * pinned
    counts = {residency: watched.fleet.replicas["r1"].counts() for residency, watched in runs.items()}
    assert counts["ranked"].loads < counts["lru"].loads
    assert counts["ranked"].activations < counts["lru"].activations
    hits = {r: sum(row["engine_access"] == "gpu" for row in w.fleet.rows["requests"]) for r, w in runs.items()}
    assert hits["ranked"] > 1.15 * hits["lru"]


def test_a_pinned_adapter_leaves_only_when_a_batch_needs_every_slot() -> None:
    quiet = Watched(ranked())
    quiet.fleet.run(scanned())
    made = [event for event in quiet.said if isinstance(event, MoveDone)]
    assert [(event.verb, event.name.rpartition("@")[0]) for event in made] == [("pin", name) for name in HOT]
    out = [event.name.rpartition("@")[0] for event in quiet.said if isinstance(event, Evicted) and event.tier == "gpu"]
    assert len(out) > 100
    assert not set(out) & set(HOT)
    assert quiet.pins() == list(HOT)

    busy = Watched(ranked())
    busy.fleet.run(scanned(per_second=12.0))
    lost = [event for event in busy.said if isinstance(event, PinLost)]
    assert lost
    assert busy.fleet.conductor.fleet.state.counters["pins_lost"] > 0
    assert len(busy.moves()) < 40, "a storm of pins"


def test_lists_that_are_told_name_what_is_pinned() -> None:
    watched = Watched(ranked())
    watched.fleet.run(scanned(60))
    told = [event.pinned for event in watched.tap.events if isinstance(event, ev.TiersObserved)]
    assert told[0] == ()
    assert [name.rpartition("@")[0] for name in told[-1]] == list(HOT) == watched.pins()
    drift = watched.fleet.conductor.fleet.state.counters.get("drift:residency", 0)
    assert drift == 0


def test_a_restarted_engine_gets_its_pins_again() -> None:
    watched = Watched(ranked())
    watched.fleet.at(10 * SECOND, lambda: restart(watched.fleet, "r1", 2 * SECOND))
    watched.fleet.run(scanned())
    assert watched.moves() == [("pin", name) for name in HOT * 2]
    assert watched.pins() == list(HOT)


def test_without_a_probe_lru_stays() -> None:
    plain, blind = (Watched(ranked(residency), Observation()) for residency in ("lru", "ranked"))
    for watched in (plain, blind):
        watched.fleet.run(scanned(120))
    assert blind.moves() == []
    assert blind.tap.digest() == plain.tap.digest()


def test_an_operators_moves_are_carried_out_and_what_cannot_be_is_refused() -> None:
    watched = Watched(ranked("lru"))
    watched.fleet.run([Request(0, "acme", name, 10, 2) for name in ("a0", "a1")])
    feed, said = watched.fleet.conductor.feed, watched.tap.events

    def ask(name: str, verb: ev.MoveVerb) -> None:
        feed(ev.MoveAsked(watched.fleet.now, name, "r1", verb))
        watched.fleet.run([Request(SECOND, "acme", None, 1, 1)])

    verbs: tuple[ev.MoveVerb, ...] = ("pin", "evict", "unpin", "evict", "activate")
    for verb in verbs:
        ask("a0", verb)
    failed = [event.reason for event in said if isinstance(event, ev.CommandFailed)]
    assert failed == ["pinned"]
    causes = [(event.tier, event.cause) for event in said if isinstance(event, ev.EvictionObserved)]
    assert causes == [("host", "remove")]
    tiers = [event for event in said if isinstance(event, ev.TiersObserved)]
    assert any(len(event.pinned) == 1 for event in tiers)
    assert (len(tiers[-1].active), tiers[-1].pinned) == (2, ())
    assert loads_of(watched, ("a0",)) == 2


def test_a_load_that_a_pin_needs_takes_its_time_from_the_engine() -> None:
    watched = Watched(ranked("lru"), Observation(probe=True, load_call=7 * MS))
    watched.fleet.run([Request(0, "acme", "a0", 10, 2)])
    watched.fleet.conductor.feed(ev.MoveAsked(watched.fleet.now, "a0", "r1", "evict"))
    watched.fleet.run([Request(SECOND, "acme", None, 1, 1)])
    watched.fleet.conductor.feed(ev.MoveAsked(watched.fleet.now, "a0", "r1", "pin"))
    watched.fleet.run([Request(SECOND, "acme", None, 1, 1)])
    done = [event for event in watched.tap.events if isinstance(event, ev.CommandDone)][-1]
    busy = PROFILE.load_ps(adapters(1)[0].bytes) + PROFILE.activate_ps(16)
    assert done.took == 7 * MS + -(-busy // 1000)


def test_two_runs_with_pins_are_the_same() -> None:
    digests = set()
    for _ in range(2):
        watched = Watched(ranked())
        watched.fleet.run(scanned(150, per_second=40.0))
        digests.add(watched.tap.digest())
    assert len(digests) == 1


class _Mute:
    def perform(self, command: ev.Command) -> None:
        """What follows is in the events already."""


def test_a_journal_of_a_run_with_pins_gives_the_same_commands_again(tmp_path: Path) -> None:
    watched = Watched(ranked())
    watched.fleet.run(scanned(150, per_second=40.0))
    settings = ranked()
    conductor = Conductor(
        Fleet(settings),
        RowFold(FoldState(settings.base, "cfg", "1")),
        _Mute(),
        lambda: watched.fleet.now,
        lambda rows: None,
        lambda at: None,
    )
    conductor.journal = Journal.open(tmp_path, 1 << 20, conductor.head)
    for spec in settings.replicas:
        conductor.feed(ev.ReplicaUp(0, spec.name, 1, ()))
    for event in watched.tap.events:
        conductor.feed(event)
    conductor.journal.close()
    found = verify(tmp_path)
    assert found.difference is None
    assert found.steps > 1000


def test_where_there_are_no_slots_nothing_can_be_pinned() -> None:
    profile = TwinProfile(layout="unified")
    fleet = VirtualFleet(settings_for(1, adapters(2)), {"r1": profile}, Observation(probe=True))
    tap = Tap(fleet)
    fleet.run([Request(0, "acme", "a0", 10, 2)])
    fleet.conductor.feed(ev.MoveAsked(fleet.now, "a0", "r1", "pin"))
    fleet.run([Request(SECOND, "acme", None, 1, 1)])
    (failed,) = [event for event in tap.events if isinstance(event, ev.CommandFailed)]
    assert (failed.reason, failed.permanent) == ("not_modelled", True)
