from __future__ import annotations

import random
from typing import Any

import pytest

from loraledger import events as ev
from loraledger.kernel.cost import tier_of
from loraledger.kernel.settings import MS, SECOND

from .bench import Bench, adapter, digest, fleet_of, replica
from .world import REPLICAS, World, world_settings

NAMES = "abcdef"


def name_of(name: str) -> str:
    return ev.engine_name(name, digest("aa11"), 1)


def bench_of(held: str = "", slots: int = 2, entries: int = 4) -> Bench:
    """One replica that has loaded ``held`` in that order, long ago."""
    bench = Bench(fleet_of([replica("r1", slots, entries)], [adapter(name) for name in NAMES]))
    for name in held:
        bench.tick(10 * MS)
        bench.hold(name, "r1")
    bench.tick(10 * SECOND)
    return bench


def tell(bench: Bench, host: str, active: str, age: int = 100 * MS, **more: Any) -> None:
    """The probe tells of lists that were true ``age`` ago; one letter an adapter, least recently used first."""
    names = tuple(name_of(name) for name in host), tuple(name_of(name) for name in active)
    bench.feed(ev.TiersObserved(bench.now, "r1", bench.now - age, *names, **more))


def lists(bench: Bench) -> tuple[str, str]:
    tiers = bench.replica("r1").tiers
    return "".join(name[0] for name in tiers.host), "".join(name[0] for name in tiers.active)


def tier(bench: Bench, name: str) -> ev.HitClass:
    return tier_of(bench.replica("r1"), bench.registration(name, "r1"))


def drift(bench: Bench) -> int:
    return bench.counter("drift:residency")


def served(bench: Bench, name: str) -> ev.Dispatch:
    """One request from beginning to end."""
    request = bench.arrive(name)
    sent = bench.only(ev.Dispatch)
    bench.first_token(request)
    bench.finish(request)
    return sent


# --- lists replace belief ---------------------------------------------------------------------------------------------


def test_the_engines_lists_replace_what_was_believed_in_their_order() -> None:
    bench = bench_of("abc")
    assert lists(bench) == ("abc", "bc")
    tell(bench, "cba", "ba")
    assert lists(bench) == ("cba", "ba")
    assert [tier(bench, name) for name in "abc"] == ["gpu", "gpu", "host"]
    tell(bench, "b", "")
    assert [tier(bench, name) for name in "abc"] == ["disk", "host", "disk"]


def test_decisions_say_whether_their_class_was_observed() -> None:
    bench = bench_of("ab")
    assert served(bench, "a").decision.hit_source == "believed"
    tell(bench, "ab", "ab")
    sent = served(bench, "a").decision
    assert (sent.hit_class, sent.hit_source) == ("gpu", "observed")
    bench.feed(ev.ProbeLost(bench.now, "r1", "no_probe: gone"))
    sent = served(bench, "a").decision
    assert (sent.hit_class, sent.hit_source) == ("gpu", "believed")


def test_a_registered_name_that_nobody_saw_used_is_no_longer_unknown() -> None:
    bench = Bench(fleet_of(1, [adapter("a")]), up=False)
    bench.up("r1", [name_of("a")])
    assert tier(bench, "a") == "unknown"
    tell(bench, "a", "")
    assert tier(bench, "a") == "host"
    bench.feed(ev.ProbeLost(bench.now, "r1", "x"))
    assert tier(bench, "a") == "host", "what was seen is remembered"


def test_a_name_that_is_found_registered_while_a_probe_answers_is_where_the_lists_say() -> None:
    bench = Bench(fleet_of(1, [adapter("a"), adapter("b")]))
    tell(bench, "a", "a")
    bench.tick(SECOND)
    bench.scrape("r1", [name_of("a"), name_of("b")])
    assert [tier(bench, name) for name in "ab"] == ["gpu", "disk"]


def test_lists_of_a_replica_that_is_down_are_of_no_process_that_is_known() -> None:
    bench = bench_of("a")
    bench.down("r1")
    tell(bench, "ab", "ab")
    assert bench.replica("r1").observed is None
    assert lists(bench) == ("a", "a")


def test_lists_longer_than_configured_are_kept_whole_and_turn_over_at_the_size_that_the_engine_says() -> None:
    bench = bench_of("abc")
    bench.feed(ev.FloorObserved(bench.now, "r1", slots=3, host_entries=5))
    tell(bench, "abcde", "de")
    assert lists(bench) == ("abcde", "de")
    served(bench, "a")
    assert lists(bench) == ("bcdea", "dea")
    bench.tick(SECOND)
    tell(bench, "abcdef", "abcd")  # more than it said: no reason to fail
    assert lists(bench) == ("abcdef", "abcd")


def test_an_active_name_that_is_not_on_the_host_is_not_believed() -> None:
    bench = bench_of("a")
    tell(bench, "a", "ab")
    assert lists(bench) == ("a", "a")


# --- what was sent since ----------------------------------------------------------------------------------------------


def test_what_was_sent_after_the_lists_were_true_is_replayed_on_top() -> None:
    bench = bench_of("abcd")
    tell(bench, "abcd", "cd")
    served(bench, "a")
    bench.tick(50 * MS)
    served(bench, "b")
    bench.tick(20 * MS)
    tell(bench, "abcd", "cd", age=100 * MS)
    assert lists(bench) == ("cdab", "ab")
    tell(bench, "bcda", "da", age=60 * MS)
    assert lists(bench) == ("cdab", "ab")
    tell(bench, "abcd", "cd", age=0)
    assert lists(bench) == ("abcd", "cd"), "the engine has seen all of it and says otherwise"


def test_a_burst_for_one_adapter_is_one_load_even_if_the_lists_lag_behind() -> None:
    bench = bench_of("abcde")
    tell(bench, "bcde", "de")
    classes = []
    for _ in range(4):
        bench.arrive("a")
        classes.append(bench.only(ev.Dispatch).decision.hit_class)
        bench.tick(10 * MS)
        tell(bench, "bcde", "de", age=80 * MS)
    assert classes == ["disk", "gpu", "gpu", "gpu"]


def test_a_request_that_waits_for_a_slot_is_not_replayed_into_one() -> None:
    bench = bench_of("abcd")
    tell(bench, "abcd", "cd")
    for name in "cda":
        bench.arrive(name)
    assert list(bench.replica("r1").blocked) == ["a"]
    tell(bench, "abcd", "cd")
    assert lists(bench) == ("abcd", "cd")
    bench.tick(SECOND)
    tell(bench, "bcda", "da")
    assert list(bench.replica("r1").blocked) == [], "it has one"


# --- drift ------------------------------------------------------------------------------------------------------------


def test_agreement_is_no_drift() -> None:
    bench = bench_of("abc")
    for _ in range(3):
        tell(bench, "abc", "bc")
    served(bench, "a")
    bench.tick(3 * SECOND)
    tell(bench, "bca", "ca")
    assert drift(bench) == 0


def test_the_first_lists_contradict_nobody() -> None:
    bench = bench_of("abc")
    tell(bench, "f", "f")
    assert drift(bench) == 0


@pytest.mark.parametrize(("host", "active"), [("bc", "bc"), ("abc", "c"), ("abc", "ab"), ("abcd", "bc"), ("", "")])
def test_a_contradiction_is_counted_once(host: str, active: str) -> None:
    bench = bench_of("abc")
    tell(bench, "abc", "bc")
    tell(bench, host, active)
    assert drift(bench) == 1
    tell(bench, host, active)
    assert drift(bench) == 1, "the lists are believed now"


def test_moves_that_come_with_the_lists_are_not_counted_again() -> None:
    bench = bench_of("abcd")
    tell(bench, "abcd", "cd")
    bench.feed(ev.ActivationObserved(bench.now, "r1", name_of("a"), 2 * MS))
    bench.feed(ev.EvictionObserved(bench.now, "r1", name_of("c"), "gpu"))
    tell(bench, "bcda", "da")
    assert drift(bench) == 1


def test_what_is_merely_under_way_is_no_drift() -> None:
    bench = bench_of("abcde")
    tell(bench, "bcde", "de")
    served(bench, "a")
    assert lists(bench) == ("cdea", "ea")
    tell(bench, "bcde", "de", age=100 * MS)  # true before it was sent
    bench.tick(100 * MS)
    tell(bench, "bcde", "de", age=90 * MS)  # sent by then, but not read yet
    bench.tick(100 * MS)
    tell(bench, "cdea", "ea", age=90 * MS)
    assert drift(bench) == 0


def test_an_adapter_that_waits_for_a_slot_for_long_is_no_drift() -> None:
    bench = bench_of("abc")
    tell(bench, "abc", "bc")
    for name in "bca":
        bench.arrive(name)
    bench.tick(30 * SECOND)
    tell(bench, "abc", "bc")
    assert drift(bench) == 0


def test_an_adapter_in_flight_may_be_read_late() -> None:
    bench = bench_of("abc")
    tell(bench, "abc", "bc")
    bench.arrive("a")
    bench.tick(30 * SECOND)  # no KV for it
    tell(bench, "abc", "bc")
    assert drift(bench) == 0


def test_a_loss_of_what_nobody_asked_for_is_drift_even_while_others_are_under_way() -> None:
    bench = bench_of("abcd")
    tell(bench, "abcd", "cd")
    bench.arrive("a")
    tell(bench, "abd", "d")
    assert drift(bench) == 1


def test_moves_do_not_turn_back_a_belief_that_is_ahead_of_them() -> None:
    bench = bench_of("abcd")
    tell(bench, "abcd", "cd")
    for name in "ab":
        served(bench, name)
    bench.feed(ev.ActivationObserved(bench.now, "r1", name_of("d"), MS))
    bench.feed(ev.EvictionObserved(bench.now, "r1", name_of("a"), "gpu"))
    assert lists(bench) == ("cdab", "ab")
    assert drift(bench) == 0


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_with_a_probe_only_the_engine_tells_what_moved() -> None:
    bench = bench_of("abc")
    tell(bench, "abc", "bc")
    served(bench, "a")
    assert [change.source for change in bench.changes if change.tier_before != change.tier_after] == []
    bench.feed(ev.LoadObserved(bench.now, "r1", name_of("a"), 7 * MS, 100))
    bench.feed(ev.ActivationObserved(bench.now, "r1", name_of("a"), 2 * MS))
    (change,) = bench.changes
    assert (change.adapter, change.tier_before, change.tier_after) == ("a", "host", "gpu")
    assert (change.source, change.cause, change.took) == ("observed", "activation", 2 * MS)
    bench.feed(ev.ProbeLost(bench.now, "r1", "x"))
    bench.arrive("b")
    assert {change.source for change in bench.changes} == {"believed"}


def test_pins_bytes_and_steps_are_remembered_while_the_probe_answers() -> None:
    bench = bench_of("ab")
    bench.feed(ev.StepsObserved(bench.now, "r1", 1, 2, 3, 4, 5, {}, 0))
    assert bench.replica("r1").observed is None, "no lists, no probe"
    tell(bench, "ab", "ab", pinned=(name_of("b"),), host_bytes=(10, None))
    bench.feed(ev.StepsObserved(bench.now, "r1", 1, 2, 3, 4, 500, {name_of("a"): 2}, 2, 77))
    observed = bench.replica("r1").observed
    assert observed is not None
    assert (observed.pinned, observed.host_bytes) == ((name_of("b"),), {name_of("a"): 10, name_of("b"): None})
    assert (observed.blocked, observed.adapters, observed.kv_free) == ({name_of("a"): 2}, 2, 77)
    assert observed.preempted.value(bench.now) == pytest.approx(4 * 0.6931)
    assert observed.recomputed.value(bench.now + 60 * SECOND) == pytest.approx(250 * 0.6931)


@pytest.mark.parametrize("end", ["down", "restart", "gateway", "lost"])
def test_what_ends_a_probes_word(end: str) -> None:
    bench = bench_of("ab")
    bench.feed(ev.FloorObserved(bench.now, "r1", kv_bytes=5))
    tell(bench, "ab", "ab")
    assert bench.replica("r1").observed is not None
    match end:
        case "down":
            bench.down("r1")
        case "restart":
            bench.up("r1", start=2)
        case "gateway":
            bench.feed(ev.GatewayStarted(bench.now, "1", "c"))
        case _:
            bench.feed(ev.ProbeLost(bench.now, "r1", "timeout: x"))
    assert bench.replica("r1").observed is None
    if end == "restart":
        assert lists(bench) == ("", "")
        assert bench.replica("r1").floor is None, "another process, perhaps with other settings"
        tell(bench, "", "")
        assert bench.replica("r1").observed is not None


@pytest.mark.parametrize("verb", ["activate", "evict", "pin", "unpin"])
def test_a_move_is_commanded_where_the_adapter_is_registered(verb: ev.MoveVerb) -> None:
    bench = bench_of("a")
    tell(bench, "a", "a")
    bench.feed(ev.MoveAsked(bench.now, "b", "r1", verb))
    assert bench.commands == []
    bench.feed(ev.MoveAsked(bench.now, "a", "r1", verb))
    move = bench.only(ev.Move)
    assert (move.replica, move.adapter, move.engine_name, move.verb) == ("r1", "a", name_of("a"), verb)
    for outcome in (ev.CommandDone(bench.now, move.id, MS), ev.CommandFailed(bench.now, move.id, "in_use", False)):
        bench.feed(outcome)  # what came of it is seen in the lists
    assert bench.registration("a", "r1").state == "registered"
    assert bench.fleet.state.commands == {}


# --- any order of events ----------------------------------------------------------------------------------------------


class ProbedWorld(World):
    """A world whose engines also report, truly or not."""

    def report(self) -> None:
        """One word of some probe."""
        name = REPLICAS[self._pick(3)]
        known = [*self.engines[name].ever, "a@000000000000", "x"]
        host = tuple(dict.fromkeys(known[self._pick(len(known))] for _ in range(self._pick(6))))
        active = host[self._pick(3) :][: self._pick(4)]
        some = known[self._pick(len(known))]
        said: list[ev.Event] = [
            ev.TiersObserved(self.now, name, self.now - self._pick(400) * MS, host, active, host[:1], (5,) * len(host)),
            ev.TiersObserved(self.now, name, self.now + 5 * MS, host, active),
            ev.FloorObserved(self.now, name, kv_bytes=1, slots=self._pick(4), host_entries=self._pick(6)),
            ev.StepsObserved(self.now, name, 1, 1, 1, self._pick(2), 0, {some: 1}, 1, None),
            ev.LoadObserved(self.now, name, some, None),
            ev.ActivationObserved(self.now, name, some, MS),
            ev.EvictionObserved(self.now, name, some, ("gpu", "host")[self._pick(2)]),
            ev.EngineFinished(self.now, name, some),
            ev.ProbeLost(self.now, name, "timeout: x"),
        ]
        self.feed(said[self._pick(len(said))], True)


@pytest.mark.parametrize("seed", range(12))
def test_no_word_of_a_probe_breaks_the_kernel_or_its_determinism(seed: int) -> None:
    rng = random.Random(seed)
    world = ProbedWorld(world_settings(), rng.randrange)
    for _ in range(350):
        world.act()
        if rng.random() < 0.4:
            world.report()
    for name in REPLICAS:
        assert set(world.fleet.state.replicas[name].blocked) <= set(world.fleet.state.replicas[name].adapters)
    world.settle()
    assert not any(replica.blocked for replica in world.fleet.state.replicas.values())


# --- what an operator has moved, and versions that are no longer served ---------------------------------------------------


def test_what_changes_after_an_operators_move_is_no_drift_and_later_it_is() -> None:
    bench = bench_of("ab")
    tell(bench, "ab", "ab")
    bench.feed(ev.MoveAsked(bench.now, "a", "r1", "evict"))
    assert bench.only(ev.Move).verb == "evict"
    bench.tick(SECOND)
    tell(bench, "b", "b")
    assert drift(bench) == 0
    bench.tick(20 * SECOND)
    tell(bench, "", "")
    assert drift(bench) == 1


def test_a_version_that_is_served_again_is_not_unloaded_as_stale() -> None:
    bench = bench_of("a")
    bench.down("r1")
    bench.declare(adapter("a", "bb22"))
    bench.declare(adapter("a", "aa11"))
    old, other = ev.engine_name("a", digest("aa11")), ev.engine_name("a", digest("bb22"))
    bench.replica("r1").stale = {old: None, other: None}
    bench.all(ev.Evict)
    bench.up("r1", [old, other])
    assert [evict.engine_name for evict in bench.all(ev.Evict)] == [other]
