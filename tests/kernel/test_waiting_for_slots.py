"""What is believed of an engine whose slots are all held by running requests: others wait, and only what is idle leaves."""

from __future__ import annotations

import pytest

from loraledger import events as ev
from loraledger.kernel.settings import MS, SECOND

from .bench import Bench, adapter, fleet_of, replica


def bench_of(held: str, slots: int = 2, entries: int = 5) -> Bench:
    """One replica that has loaded ``held`` in that order."""
    bench = Bench(fleet_of([replica("r1", slots, entries)], [adapter(name) for name in "abcdef"]))
    for name in held:
        bench.tick(10 * MS)
        bench.hold(name, "r1")
    return bench


def lists(bench: Bench) -> tuple[str, str]:
    tiers = bench.replica("r1").tiers
    return "".join(name[0] for name in tiers.host), "".join(name[0] for name in tiers.active)


def blocked(bench: Bench) -> str:
    return "".join(bench.replica("r1").blocked)


def hit_class(bench: Bench, name: str) -> ev.HitClass:
    """Of one more request, which stays open."""
    bench.arrive(name)
    return bench.only(ev.Dispatch).decision.hit_class


def test_a_request_without_a_slot_waits_and_takes_none_from_who_runs() -> None:
    bench = bench_of("abc")
    assert [hit_class(bench, name) for name in "bca"] == ["gpu", "gpu", "host"]
    assert (lists(bench), blocked(bench)) == (("abc", "bc"), "a")
    assert [hit_class(bench, name) for name in "bca"] == ["gpu", "gpu", "host"], "who runs is overtaken by nobody"


def test_who_waited_longest_gets_the_slot_of_the_adapter_whose_last_request_ends() -> None:
    bench = bench_of("abcde")
    first, second = bench.arrive("d"), bench.arrive("d")
    running = bench.arrive("e")
    bench.arrive("b")
    bench.arrive("a")
    assert (lists(bench)[1], blocked(bench)) == ("de", "ba")
    bench.finish(first)
    assert blocked(bench) == "ba", "another request still runs"
    bench.finish(second)
    assert (lists(bench), blocked(bench)) == (("acdeb", "eb"), "a")
    assert [(c.adapter, c.tier_before, c.tier_after) for c in bench.changes] == [
        ("b", "host", "gpu"),
        ("d", "gpu", "host"),
    ]
    bench.finish(running)
    assert (lists(bench)[1], blocked(bench)) == ("ba", "")


def test_a_first_token_shows_that_a_request_waits_no_more() -> None:
    bench = bench_of("abc")
    for name in "bc":
        bench.arrive(name)
    request = bench.arrive("a")
    bench.first_token(request)
    assert blocked(bench) == ""
    assert "a" in lists(bench)[1]


@pytest.mark.parametrize("end", ["cancel", "finish", "fail"])
def test_a_request_that_ends_while_it_waits_moves_nothing(end: str) -> None:
    bench = bench_of("abc")
    for name in "bc":
        bench.arrive(name)
    request = bench.arrive("a")
    match end:
        case "cancel":
            bench.cancel(request)
        case "finish":
            bench.finish(request, "client_error")
        case _:
            bench.fail_attempt(request)
    assert (lists(bench), blocked(bench)) == (("abc", "bc"), "")


def test_what_has_run_until_now_is_younger_than_what_ran_after_it_began() -> None:
    bench = bench_of("abc", slots=3)
    long = bench.arrive("a")
    bench.finish(bench.arrive("b"))
    bench.finish(bench.arrive("c"))
    bench.tick(SECOND)
    bench.finish(long)
    bench.finish(bench.arrive("b"))
    assert lists(bench) == ("cab", "cab")
    bench.hold("d", "r1")
    assert lists(bench)[1] == "abd"


def test_a_running_adapter_keeps_its_slot_and_its_host_entry_whoever_else_passes_through() -> None:
    bench = bench_of("abc", slots=2, entries=3)
    bench.arrive("b")
    for name in "cacac":
        bench.finish(bench.arrive(name))
    bench.hold("d", "r1")
    bench.hold("e", "r1")
    assert lists(bench) == ("dbe", "be")


def test_a_load_call_while_all_slots_are_held_ends_on_the_host() -> None:
    bench = bench_of("abc")
    for name in "bc":
        bench.arrive(name)
    bench.hold("d", "r1")
    assert lists(bench) == ("adbc", "bc")
    assert ("d", "disk", "host") in [(c.adapter, c.tier_before, c.tier_after) for c in bench.changes]
    assert hit_class(bench, "d") == "host"


@pytest.mark.parametrize("new", ["engine", "gateway"])
def test_a_new_process_holds_nobody_up(new: str) -> None:
    bench = bench_of("abc")
    for name in "bca":
        bench.arrive(name)
    if new == "engine":
        bench.up("r1", start=2)
    else:
        bench.feed(ev.GatewayStarted(bench.now, "1", "c"))
    assert (blocked(bench), lists(bench)) == ("", ("", "") if new == "engine" else ("abc", "bc"))
