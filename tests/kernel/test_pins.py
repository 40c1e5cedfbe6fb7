"""The residency ranking as a pin set: what is commanded, in which order, and what undoes it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import pytest

from loraledger import events as ev
from loraledger.kernel.carry import carry_over
from loraledger.kernel.cost import stand
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.loads import FOREVER
from loraledger.kernel.pin import Pin
from loraledger.kernel.settings import MS, SECOND, FleetSettings, Limits

from .bench import Bench, adapter, digest, fleet_of, replica
from .world import REPLICAS, Engine, World, world_settings

NAMES = "abcdef"


def name_of(name: str, version: str = "aa11", generation: int = 1) -> str:
    return ev.engine_name(name, digest(version), generation)


def settings_of(ranking: str = "abcd", slots: int = 4, limits: Limits | None = None) -> FleetSettings:
    """One replica; one letter an adapter, the best first."""
    specs = [adapter(name) for name in NAMES]
    return fleet_of([replica("r1", slots, 8)], specs, limits=limits, pins=[("r1", name) for name in ranking])


class PinBench(Bench):
    """A bench with one replica whose probe and engine do as they are told."""

    def __init__(self, settings: FleetSettings) -> None:
        super().__init__(settings)
        self.held: list[str] = []
        self.log: list[str] = []

    def tell(self, *, after: int = 100 * MS) -> list[str]:
        """The probe tells of its lists; what the kernel then sends, as ``load a``, ``pin a``, ``unpin a``."""
        self.tick(after)
        held = tuple(self.held)
        return self.sent(self.feed(ev.TiersObserved(self.now, "r1", self.now, held, held, tuple(sorted(self.held)))))

    def sent(self, commands: Iterable[ev.Command]) -> list[str]:
        said = {"Load": "load", "Evict": "forget"}
        return [
            f"{c.verb if isinstance(c, ev.Move) else said[type(c).__name__]} {c.adapter}"
            for c in commands
            if isinstance(c, ev.Move | ev.Load | ev.Evict)
        ]

    def carry_out(self, commands: list[ev.Command]) -> None:
        """Have all done, and what follows at once; what was sent goes into ``log``."""
        todo = [c for c in commands if isinstance(c, ev.Move | ev.Load | ev.Evict)]
        self.log += self.sent(todo)
        for command in todo:
            self.tick(10 * MS)
            if isinstance(command, ev.Move):
                self.held = [name for name in self.held if name != command.engine_name]
                self.held += [command.engine_name] * (command.verb == "pin")
            self.carry_out(self.feed(ev.CommandDone(self.now, command.id, 10 * MS)))

    def settle(self) -> list[str]:
        """Tell the lists and have all done that follows; what that was."""
        self.log = []
        while self.tell():
            self.carry_out(self.commands)
            assert len(self.log) < 40, "a storm of commands"
        return self.log

    def pin(self, name: str) -> Pin:
        return self.replica("r1").pins[name]


def pinned(bench: PinBench) -> str:
    return "".join(name[0] for name in bench.held)


# --- they are made ----------------------------------------------------------------------------------------------------


def test_the_best_are_loaded_and_pinned_in_their_order_and_one_slot_is_left() -> None:
    bench = PinBench(settings_of("cabd", slots=4))
    assert bench.settle() == ["load c", "pin c", "load a", "pin a", "load b", "pin b"]
    assert bench.settle() == []
    assert bench.replica("r1").placements == 3
    assert bench.counter("pins") == 3
    assert all("r1" in bench.adapter(name).placed for name in "cab")


def test_one_load_or_pin_is_under_way_at_a_time() -> None:
    bench = PinBench(settings_of())
    assert bench.tell() == ["load a"]
    assert bench.tell() == []
    assert bench.sent(bench.done("r1")) == ["pin a"]
    assert bench.tell() == []


def test_what_is_registered_already_is_only_pinned() -> None:
    bench = PinBench(settings_of("ab"))
    bench.hold("a", "r1")
    assert bench.tell() == ["pin a"]


@pytest.mark.parametrize(("slots", "expected"), [(1, ""), (2, "a"), (3, "ab")])
def test_at_least_one_slot_always_serves_the_others(slots: int, expected: str) -> None:
    bench = PinBench(settings_of("abcdef", slots=slots))
    bench.settle()
    assert pinned(bench) == expected


def test_an_engine_that_says_it_has_fewer_slots_keeps_fewer() -> None:
    bench = PinBench(settings_of("abc", slots=4))
    bench.feed(ev.FloorObserved(bench.now, "r1", slots=2))
    bench.settle()
    assert pinned(bench) == "a"


def test_nothing_is_loaded_for_a_pin_beyond_the_budget_of_placements() -> None:
    bench = PinBench(settings_of("abc", limits=Limits(loads_per_minute=2)))
    assert bench.settle() == ["load a", "pin a", "load b", "pin b"]
    bench.tick(59 * SECOND)
    assert bench.settle() == []
    bench.tick(SECOND)
    assert bench.settle() == ["load c", "pin c"]


def test_loads_that_requests_wait_for_come_first() -> None:
    bench = PinBench(settings_of("ab"))
    bench.arrive("e")
    assert bench.tell() == []
    assert "pin e" not in bench.sent(bench.done("r1"))
    assert bench.replica("r1").loading == "a"


def test_without_a_ranking_nothing_is_sent() -> None:
    bench = PinBench(settings_of(""))
    assert bench.settle() == []
    assert bench.replica("r1").pins == {}


def test_other_replicas_rankings_do_not_count() -> None:
    settings = fleet_of(2, [adapter("a"), adapter("b")], pins=[("r2", "a"), ("r1", "b")])
    assert {name: list(r.pins) for name, r in Fleet(settings).state.replicas.items()} == {"r1": ["b"], "r2": ["a"]}


# --- and not made -----------------------------------------------------------------------------------------------------


def test_without_a_probe_nothing_is_commanded() -> None:
    bench = PinBench(settings_of())
    bench.scrape("r1", [])
    assert bench.replica("r1").loading is None
    bench.settle()
    bench.feed(ev.ProbeLost(bench.now, "r1", "timeout"))
    bench.feed(ev.AdapterRetired(bench.now, "d"))
    assert bench.commands == []


def test_a_pin_waits_while_requests_of_others_need_every_slot() -> None:
    bench = PinBench(settings_of("a", slots=2))
    for name in "abc":
        bench.hold(name, "r1")
    requests = [bench.arrive(name) for name in "bc"]
    assert bench.tell() == []
    assert bench.pin("a").reason == "every slot is needed"
    assert bench.pin("a").failures == 0
    bench.finish(requests[0])
    assert bench.tell() == ["pin a"]


def test_its_own_requests_do_not_keep_an_adapter_from_being_pinned() -> None:
    bench = PinBench(settings_of("a", slots=2))
    for name in "ab":
        bench.hold(name, "r1")
        bench.arrive(name)
    assert bench.tell() == ["pin a"]


def test_adapters_that_an_operator_pinned_are_left_alone_and_take_a_place() -> None:
    bench = PinBench(settings_of("abc", slots=4))
    for name in "af":
        bench.held.append(bench.hold(name, "r1"))
    assert bench.settle() == ["load b", "pin b"], "a is pinned already, and f takes a place"
    assert bench.settle() == []
    bench.held.remove(name_of("f"))
    assert bench.settle() == ["load c", "pin c"]


@pytest.mark.parametrize(
    ("reason", "permanent"),
    [("no_probe: none there", True), ("no_hook: x", False), ("not_modelled", True), ("anything", True)],
)
def test_what_is_refused_for_good_is_asked_of_no_process_twice_and_the_next_takes_the_place(
    reason: str, permanent: bool
) -> None:
    bench = PinBench(settings_of("ab", slots=2))
    bench.hold("a", "r1")
    bench.tell()
    bench.feed(ev.CommandFailed(bench.now, bench.only(ev.Move).id, reason, permanent))
    assert (bench.pin("a").retry_at, bench.pin("a").reason) == (FOREVER, reason)
    assert bench.settle() == ["load b", "pin b"]
    bench.tick(24 * 3600 * SECOND)
    assert bench.settle() == []
    bench.held = []
    bench.up("r1", start=2)
    assert bench.settle() == ["load a", "pin a"]


def test_what_fails_in_passing_is_tried_again_after_a_pause_that_doubles() -> None:
    bench = PinBench(settings_of("a", limits=Limits(load_backoff_max=5 * SECOND)))
    bench.hold("a", "r1")
    pauses = []
    for _ in range(4):
        asked = bench.now
        while not bench.tell():
            pass
        pauses.append((bench.now - asked) // SECOND)
        bench.feed(ev.CommandFailed(bench.now, bench.only(ev.Move).id, "slots_busy: 3 of 2", False))
    assert pauses == [0, 1, 2, 4]
    while not bench.tell():
        pass
    assert (bench.now - asked) // SECOND - pauses[-1] == 5
    assert bench.counter("pins_failed") == 4


def test_one_that_waits_does_not_hold_up_the_next() -> None:
    bench = PinBench(settings_of("ab"))
    bench.tell()
    assert bench.sent(bench.failed("r1")) == ["load b"]


def test_one_of_too_high_a_rank_leaves_its_place_to_the_next() -> None:
    specs = [adapter("a", rank=64), adapter("b")]
    settings = fleet_of([replica("r1", 2, 4, max_rank=32)], specs, pins=[("r1", "a"), ("r1", "b"), ("r1", "zzz")])
    assert PinBench(settings).settle() == ["load b", "pin b"]


def test_a_draining_replica_is_given_no_new_pins() -> None:
    bench = PinBench(settings_of("ab"))
    bench.feed(ev.DrainAsked(bench.now, "r1", True))
    assert bench.settle() == []
    bench.feed(ev.DrainAsked(bench.now, "r1", False))
    assert bench.settle() == ["load a", "pin a", "load b", "pin b"]


# --- and lost ---------------------------------------------------------------------------------------------------------


def test_after_a_restart_all_are_made_again() -> None:
    bench = PinBench(settings_of("ab"))
    bench.settle()
    bench.held = []
    bench.up("r1", start=2)
    assert bench.settle() == ["load a", "pin a", "load b", "pin b"]


def test_the_same_process_after_an_outage_has_kept_its_pins() -> None:
    bench = PinBench(settings_of("ab"))
    bench.settle()
    bench.down("r1")
    bench.up("r1", bench.held)
    assert bench.settle() == []


def test_a_pin_that_gave_way_is_made_again_after_a_pause_and_not_in_a_storm() -> None:
    bench = PinBench(settings_of("ab"))
    bench.settle()
    made: list[int] = []
    for _ in range(600):
        bench.held = [name_of("b")]
        if bench.tell():
            made.append(bench.now)
            bench.carry_out(bench.commands)
    gaps = [round((later - earlier) / SECOND) for earlier, later in pairwise(made)]
    assert gaps == [2, 4, 8, 16]
    assert bench.counter("pins_lost") == 6
    assert bench.pin("b").failures == 0


def test_a_lost_pin_of_an_adapter_that_its_requests_brought_back_waits_for_the_first_pause_alone() -> None:
    bench = PinBench(settings_of("a"))
    bench.settle()
    made: list[int] = []
    for _ in range(90):
        bench.tick(100 * MS)
        lists = (name_of("a"),)
        bench.feed(ev.TiersObserved(bench.now, "r1", bench.now, lists, lists, ()))
        if bench.commands:
            made.append(bench.now)
            bench.carry_out(bench.commands)
    assert {round((later - earlier) / MS, -2) for earlier, later in pairwise(made)} == {1_100}


def test_what_held_for_long_and_is_then_lost_begins_with_the_first_pause() -> None:
    bench = PinBench(settings_of("a", limits=Limits(load_backoff_max=8 * SECOND)))
    bench.settle()
    for _ in range(3):
        bench.tick(20 * SECOND)
        bench.held = []
        bench.tell()
        bench.tick(SECOND)
        bench.settle()
    assert bench.pin("a").failures == 1


def test_lists_that_were_true_before_the_pin_do_not_say_that_it_was_lost() -> None:
    bench = PinBench(settings_of("a"))
    bench.settle()
    bench.tick(MS)
    bench.feed(ev.TiersObserved(bench.now, "r1", bench.now - SECOND, (), (), ()))
    assert bench.pin("a").engine_name == name_of("a")


def test_lists_that_still_show_what_was_given_up_cost_no_other_its_pin() -> None:
    bench = PinBench(settings_of("abcd", slots=4))
    bench.settle()
    bench.feed(ev.AdapterRetired(bench.now, "a"))
    before = tuple(bench.held)
    bench.carry_out(bench.commands)
    bench.settle()
    assert pinned(bench) == "bcd"
    bench.tick(MS)
    bench.feed(ev.TiersObserved(bench.now, "r1", bench.now - SECOND, before, before, before))
    assert bench.commands == []


def test_lists_that_show_a_pin_before_its_command_is_answered_are_no_drift() -> None:
    bench = PinBench(settings_of("a", slots=2))
    for name in "abc":
        bench.hold(name, "r1")
    bench.tick(10 * SECOND)
    listed(bench, "bc", "")
    assert bench.only(ev.Move).verb == "pin"
    bench.tick(2 * SECOND)
    listed(bench, "ca", "a")
    assert bench.counter("drift:residency") == 0


def test_a_new_gateway_process_takes_a_pin_that_it_did_not_hear_of_for_its_own() -> None:
    bench = PinBench(settings_of("ab", slots=2))
    bench.hold("a", "r1")
    assert bench.tell() == ["pin a"]
    bench.feed(ev.GatewayStarted(bench.now, "2", "c"))
    bench.held = [name_of("a")]
    bench.up("r1", bench.held)
    assert bench.settle() == []
    bench.feed(ev.AdapterRetired(bench.now, "a"))
    assert bench.sent(bench.commands) == ["unpin a", "forget a"]


def test_a_new_gateway_process_asks_again_for_a_pin_that_was_never_made() -> None:
    bench = PinBench(settings_of("a"))
    bench.hold("a", "r1")
    assert bench.tell() == ["pin a"]
    bench.feed(ev.GatewayStarted(bench.now, "2", "c"))
    bench.up("r1", [name_of("a")])
    assert bench.settle() == []
    bench.tick(SECOND)
    assert bench.settle() == ["pin a"]


def test_a_clock_that_was_set_back_lengthens_no_pause() -> None:
    bench = PinBench(settings_of("ab"))
    bench.settle()
    bench.held = [name_of("b")]
    bench.tell()
    before = [(bench.now - pin.since, pin.retry_at - bench.now, bench.now - pin.lost) for pin in map(bench.pin, "ab")]
    never = bench.pin("b").lost
    bench.tick(-3600 * SECOND)
    bench.feed(ev.GatewayStarted(bench.now, "2", "c"))
    after = [(bench.now - pin.since, pin.retry_at - bench.now, bench.now - pin.lost) for pin in map(bench.pin, "ab")]
    assert after[0] == before[0]
    assert after[1][0] == before[1][0]
    assert bench.pin("b").lost == never == 0


# --- and given up -----------------------------------------------------------------------------------------------------


def test_an_adapter_that_is_retired_is_unpinned_before_its_name_is_forgotten() -> None:
    bench = PinBench(settings_of("abc", slots=3))
    bench.settle()
    bench.feed(ev.AdapterRetired(bench.now, "a"))
    assert bench.sent(bench.commands) == ["unpin a", "forget a"]
    bench.carry_out(bench.commands)
    bench.settle()
    assert pinned(bench) == "bc"


def test_new_files_are_pinned_in_the_place_of_the_old() -> None:
    bench = PinBench(settings_of("ab"))
    bench.settle()
    bench.declare(adapter("a", "bb22"))
    assert bench.sent(bench.commands) == ["unpin a", "forget a"]
    bench.carry_out(bench.commands)
    bench.settle()
    assert sorted(bench.held) == [name_of("a", "bb22"), name_of("b")]


def test_one_that_comes_back_takes_its_place_again() -> None:
    bench = PinBench(settings_of("ab", slots=2))
    bench.settle()
    bench.feed(ev.AdapterRetired(bench.now, "a"))
    bench.carry_out(bench.commands)
    bench.settle()
    assert pinned(bench) == "b"
    bench.declare(adapter("a"))
    assert bench.settle() == ["unpin b", "load a", "pin a"]


def test_a_parked_adapter_is_unpinned_and_the_next_pinned_meanwhile() -> None:
    bench = PinBench(settings_of("ab", slots=2))
    bench.settle()
    bench.adapter("a").parked_until = bench.now + 60 * SECOND
    assert bench.settle() == ["unpin a", "load b", "pin b"]
    bench.tick(60 * SECOND)
    assert bench.settle() == ["unpin b", "pin a"]


def test_an_operator_who_unloads_one_has_it_unpinned_first() -> None:
    bench = PinBench(settings_of("a"))
    bench.settle()
    bench.feed(ev.UnloadAsked(bench.now, "a", "r1"))
    assert bench.sent(bench.commands) == ["unpin a", "forget a"]


def test_a_name_that_the_engine_forgot_is_loaded_and_pinned_anew() -> None:
    bench = PinBench(settings_of("a"))
    bench.settle()
    bench.tick(SECOND)
    bench.scrape("r1", [])
    assert bench.tell() == ["unpin a"]
    bench.held = []
    bench.feed(ev.CommandFailed(bench.now, bench.only(ev.Move).id, "unknown_adapter: a", False))
    assert bench.settle() == ["load a", "pin a"]


def test_an_unpin_that_fails_in_passing_is_tried_again() -> None:
    bench = PinBench(settings_of("ab", slots=2))
    bench.settle()
    bench.adapter("a").parked_until = FOREVER
    bench.tell()
    bench.feed(ev.CommandFailed(bench.now, bench.only(ev.Move).id, "timeout: x", False))
    assert bench.tell() == []
    bench.tick(SECOND)
    assert bench.tell() == ["unpin a"]


@pytest.mark.parametrize("ranking", ["bc", ""])
def test_what_new_settings_no_longer_rank_is_unpinned_and_forgotten(ranking: str) -> None:
    bench = PinBench(settings_of("ab", slots=3))
    bench.settle()
    settings = settings_of(ranking, slots=3)
    bench.settings, bench.fleet = settings, Fleet(settings, carry_over(bench.fleet.state, settings))
    bench.feed(ev.GatewayStarted(bench.now, "2", "c"))
    bench.up("r1", bench.held)
    bench.settle()
    assert pinned(bench) == ranking
    assert "".join(bench.replica("r1").pins) == ranking


# --- what is believed -------------------------------------------------------------------------------------------------


def test_what_is_pinned_is_not_believed_to_leave_while_another_can() -> None:
    bench = PinBench(settings_of("ab", slots=3))
    bench.settle()
    bench.feed(ev.ProbeLost(bench.now, "r1", "timeout"))
    for name in "cdef":
        bench.finish(bench.arrive(name)) if name in bench.replica("r1").registrations else bench.hold(name, "r1")
    tiers = bench.replica("r1").tiers
    assert [tiers.tier(name_of(name)) for name in "abcdef"] == ["gpu", "gpu", "host", "host", "host", "gpu"]


def test_a_pin_is_believed_to_give_way_to_requests_that_need_every_slot() -> None:
    bench = PinBench(settings_of("a", slots=2))
    for name in "bc":
        bench.hold(name, "r1")
    bench.settle()
    bench.feed(ev.ProbeLost(bench.now, "r1", "timeout"))
    bench.arrive("b")
    bench.arrive("c")
    assert list(bench.replica("r1").tiers.pinned) == []
    assert bench.replica("r1").tiers.tier(name_of("a")) == "host"


def test_a_load_call_is_believed_to_end_on_the_host_where_pins_and_requests_hold_all_slots() -> None:
    bench = PinBench(settings_of("a", slots=2))
    bench.hold("b", "r1")
    bench.settle()
    bench.feed(ev.ProbeLost(bench.now, "r1", "timeout"))
    bench.arrive("b")
    bench.hold("c", "r1")
    tiers = bench.replica("r1").tiers
    assert [tiers.tier(name_of(name)) for name in "abc"] == ["gpu", "gpu", "host"]


def listed(bench: PinBench, names: str, pinned: str, age: int = 0) -> None:
    """Lists that were true ``age`` ago: these in slots, the first one oldest."""
    held, kept = (tuple(map(name_of, which)) for which in (names, pinned))
    bench.feed(ev.TiersObserved(bench.now, "r1", bench.now - age, held, held, kept))


def test_whose_slot_goes_next_is_not_a_pinned_one() -> None:
    bench = PinBench(settings_of("a", slots=2))
    bench.settle()
    bench.hold("b", "r1")
    bench.tick(100 * MS)
    listed(bench, "ab", "a")
    bench.finish(bench.arrive("b"))
    assert next(iter(bench.replica("r1").tiers.active)) == name_of("a")
    victim = stand(bench.fleet.state, bench.replica("r1"))[3]
    assert victim is not None
    assert victim.spec.name == "b"


def test_what_was_sent_since_the_lists_were_true_pushes_out_what_is_not_pinned() -> None:
    bench = PinBench(settings_of("a", slots=2))
    bench.settle()
    for name in "bc":
        bench.hold(name, "r1")
    bench.tick(SECOND)
    bench.finish(bench.arrive("c"))
    bench.tick(100 * MS)
    held = tuple(map(name_of, "abc"))
    bench.feed(ev.TiersObserved(bench.now, "r1", bench.now - 200 * MS, held, held[:2], held[:1]))
    assert [bench.replica("r1").tiers.tier(name) for name in held] == ["gpu", "host", "gpu"]


# --- any order of events ----------------------------------------------------------------------------------------------


class PinnedWorld(World):
    """A world whose probes do what they are told, as far as the probe would, and tell of it."""

    def __init__(self, settings: FleetSettings, pick: random.Random) -> None:
        super().__init__(settings, pick.randrange)
        self.pins: dict[str, list[str]] = {name: [] for name in REPLICAS}
        self.moves: dict[str, list[tuple[ev.Move, int]]] = {name: [] for name in REPLICAS}
        self.refused: Counter[str] = Counter()

    def _obey(self, command: ev.Command) -> None:
        if isinstance(command, ev.Move):
            self.moves[command.replica].append((command, self.engines[command.replica].process))
        else:
            super()._obey(command)

    def _start_process(self, engine: Engine) -> None:
        super()._start_process(engine)
        name = next(name for name, known in self.engines.items() if known is engine)
        self.pins[name] = []

    def probe(self) -> None:
        """A command of a probe ends, its lists are told, or it is silent."""
        name = REPLICAS[self._pick(3)]
        engine, what = self.engines[name], self._pick(8)
        if what < 4 and self.moves[name]:
            self._end_move(name, engine)
        elif what == 7:
            self.feed(ev.ProbeLost(self.now, name, "timeout"), True)
        elif engine.alive:
            slots = self.fleet.state.replicas[name].spec.slots
            if self._pick(4) == 0 and self.pins[name]:
                self.pins[name].pop()
            idle = [known for known in engine.ever if known not in self.pins[name]]
            active = (*idle[len(idle) - (slots - len(self.pins[name])) :], *self.pins[name])[-slots:]
            age = self._pick(3) * 40 * MS
            self.feed(ev.TiersObserved(self.now, name, self.now - age, active, active, tuple(self.pins[name])), True)

    def _end_move(self, name: str, engine: Engine) -> None:
        command, process = self.moves[name].pop(0)
        pins = self.pins[name]
        reason = None
        if not engine.alive or process != engine.process:
            reason = "engine_unavailable"
        elif command.engine_name not in engine.names:
            reason = "unknown_adapter"
        elif command.verb == "unpin":
            self.pins[name] = [pin for pin in pins if pin != command.engine_name]
        elif len({*pins, command.engine_name}) > self.fleet.state.replicas[name].spec.slots - 1:
            reason = "too_many_pins"
        elif self._pick(4) == 0:
            reason = ("slots_busy", "load_failed", "no_hook")[self._pick(3)]
        else:
            self.pins[name] = [*(pin for pin in pins if pin != command.engine_name), command.engine_name]
        if reason is None:
            self.feed(ev.CommandDone(self.now, command.id, MS), True)
        else:
            self.refused[reason] += 1
            self.feed(ev.CommandFailed(self.now, command.id, reason, False), True)


def ranked_world() -> FleetSettings:
    settings = world_settings()
    pins = [(name, ranked) for name in REPLICAS for ranked in ("c", "a", "e", "b")]
    return FleetSettings(
        settings.replicas,
        settings.adapters,
        settings.tenants,
        limits=settings.limits,
        residency="ranked",
        pins=tuple(pins),
    )


def test_whatever_happens_pins_are_few_and_answered_alike_by_a_restored_kernel() -> None:
    counters: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for seed in range(16):
        rng = random.Random(seed)
        world = PinnedWorld(ranked_world(), rng)
        for name in REPLICAS:
            world._up(name)
        for _ in range(400):
            world.act()
            world.probe()
        world.settle()
        counters.update(world.fleet.state.counters)
        refused.update(world.refused)
    assert counters["pins"] > 30
    assert counters["pins_lost"] > 10
    assert refused.keys() >= {"slots_busy", "load_failed", "no_hook", "unknown_adapter", "engine_unavailable"}
