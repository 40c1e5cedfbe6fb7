"""A clock that was set back between two processes: the next one goes on as if no time had passed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from loraledger import events as ev
from loraledger.kernel.carry import carry_over
from loraledger.kernel.fleet import Fleet
from loraledger.kernel.loads import FOREVER
from loraledger.kernel.policies import policy_names
from loraledger.kernel.settings import MS, SECOND

from .bench import T0, Bench, adapter, digest, fleet_of
from .world import REPLICAS, World, world_settings

HOUR = 3_600 * SECOND
YEAR = 365 * 24 * HOUR
BACK = (HOUR, 25 * HOUR, YEAR)
ADAPTERS = ("a1", "b1", "c1")
NAMES = {name: ev.engine_name(name, digest("aa11")) for name in ADAPTERS}
MOMENTS = {
    *("now", "output"),
    *(f"adapters.{field}" for field in ("output", "placed", "rate_at", "suspect_since", "parked_until")),
    *(f"replicas.{figure}" for figure in ("itl", "prefill_rate", "load_ratio")),
    *(f"replicas.{field}" for field in ("broken_at", "exited_at", "mark", "placements_since", "sampled", "floor")),
    *(f"replicas.registrations.{field}" for field in ("since", "started", "retry_at", "verified")),
    *(f"replicas.activity.{durations}" for durations in ("calls", "loads", "activations")),
    *(f"replicas.activity.{what}_rate" for what in ("load", "activation", "eviction", "preemption")),
}
"""Where a kernel remembers a moment from one process to the next."""


def end_two_engines(bench: Bench) -> None:
    """The use of ``b1`` does, so that it is parked."""
    bench.hold("b1", "r1")
    request = bench.arrive("b1")
    assert bench.only(ev.Dispatch).replica == "r1"
    bench.tick(MS)
    bench.down("r1")
    bench.fail_attempt(request)
    bench.done("r2")
    bench.tick(MS)
    bench.down("r2")
    bench.fail_attempt(request)
    assert bench.adapter("b1").strikes == 2


def break_a_stream(bench: Bench) -> None:
    """``r2`` does."""
    bench.feed(ev.DrainAsked(bench.now, "r1", True))
    request = bench.arrive()
    bench.feed(ev.DrainAsked(bench.now, "r1", False))
    bench.tick(100 * MS)
    bench.first_token(request)
    bench.finish(request, "upstream_reset")
    assert bench.replica("r2").broken == 1


def lived() -> Bench:
    """A kernel that remembers a moment of each kind. Nothing is open."""
    bench = Bench(fleet_of(2, [adapter(name) for name in ADAPTERS]), up=False)
    for name in ("r1", "r2"):
        bench.up(name, start=3)
    end_two_engines(bench)
    for name in ("r1", "r2"):
        bench.up(name, start=7)
    bench.tick(SECOND)
    bench.hold("a1", "r1")
    for preemptions in (1, 5):
        bench.feed(ev.ScrapeStarted(bench.now, "r1"))
        bench.feed(ev.ReplicaSampled(bench.now, "r1", bench.now, 0, 0, 0.0, None, preemptions=preemptions))
        bench.tick(SECOND)
    request = bench.arrive("a1", prompt=200)
    bench.tick(200 * MS)
    bench.first_token(request)
    bench.tick(SECOND)
    bench.finish(request, generated=40, itl=20 * MS)
    break_a_stream(bench)
    bench.feed(ev.LoadObserved(bench.now, "r1", NAMES["a1"], 50 * MS))
    bench.feed(ev.ActivationObserved(bench.now, "r1", NAMES["a1"], 8 * MS))
    bench.feed(ev.EvictionObserved(bench.now, "r1", NAMES["c1"], "host"))
    bench.feed(ev.FloorObserved(bench.now, "r1", weights=1))
    bench.feed(ev.LoadAsked(bench.now, "c1", "r2"))
    bench.failed("r2", "disk hiccup")
    return bench


def start_again(bench: Bench, back: int) -> None:
    bench.tick(-back)
    bench.feed(ev.GatewayStarted(bench.now, "2", "c"))
    assert bench.fleet.state.now == bench.now


def started_again(back: int, carried: bool = False) -> tuple[Bench, Bench]:
    """The same life twice, then the next process: without and with a clock that was set back."""
    steady, moved = lived(), lived()
    for bench in (steady, moved):
        if carried:  # as a gateway does, whose settings may have changed
            state = Fleet.restore(bench.settings, bench.fleet.snapshot()).state
            bench.fleet = Fleet(bench.settings, carry_over(state, bench.settings))
    start_again(steady, 0)
    start_again(moved, back)
    return steady, moved


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, str(key)))
    else:
        yield path, value


def remembered(bench: Bench) -> dict[tuple[str, ...], Any]:
    """Every number and word of a kernel's snapshot, by its place."""
    return dict(leaves(msgspec.msgpack.decode(bench.fleet.snapshot())))


def kind(path: tuple[str, ...]) -> str:
    """A place without the names and numbers in it."""
    return ".".join(part for part in path if part.isidentifier() and part.isascii() and not part[-1].isdigit())


def said(bench: Bench, later: int = 0) -> tuple[list[ev.Command], list[ev.ResidencyChange], int | None]:
    """What the last step gave, its times ``later``."""
    commands: list[ev.Command] = [
        msgspec.structs.replace(command, until=command.until + later) if isinstance(command, ev.Queue) else command
        for command in bench.commands
    ]
    return commands, bench.changes, None if bench.wake_at is None else bench.wake_at + later


def goes_on(bench: Bench) -> Iterator[None]:
    """Twelve minutes of the next process; stops after each step."""
    for name, listed in (("r1", [NAMES["a1"]]), ("r2", [])):
        bench.tick(MS)
        bench.up(name, listed, start=7)
        yield
    for number in range(24):
        bench.tick(400 * MS)
        bench.scrape(("r1", "r2")[number % 2])
        yield
        bench.arrive((*ADAPTERS, None)[number % 4])
        yield
        for name in ("r1", "r2"):
            if bench.replica(name).loading is not None:
                bench.done(name)
                yield
        sent = [request.id for request in bench.fleet.state.requests.values() if request.phase == "sent"]
        for request in sent[:2]:
            bench.first_token(request)
            bench.finish(request, generated=30, itl=25 * MS)
            yield
    bench.tick(700 * SECOND)
    bench.arrive("b1")
    bench.only(ev.Load)
    yield


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("back", BACK)
def test_every_moment_that_is_remembered_is_moved_and_nothing_else(back: int, carried: bool) -> None:
    steady, moved = started_again(back, carried)
    before, after = remembered(steady), remembered(moved)
    assert before.keys() == after.keys()
    moments = {path for path, value in before.items() if isinstance(value, int) and abs(value - T0) < HOUR}
    assert {path: before[path] - after[path] for path in before if before[path] != after[path]} == dict.fromkeys(
        moments, back
    )
    if not carried:
        assert {kind(path) for path in moments} == MOMENTS


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("back", BACK)
def test_the_next_process_decides_as_one_whose_clock_was_left_alone(back: int, carried: bool) -> None:
    steady, moved = started_again(back, carried)
    seen: set[type[ev.Command]] = set()
    for _ in zip(goes_on(steady), goes_on(moved), strict=True):
        assert said(moved, later=back) == said(steady)
        seen |= {type(command) for command in steady.commands}
    assert seen >= {ev.Dispatch, ev.Load, ev.Queue, ev.Reject}
    for name in ("r1", "r2"):
        old, new = steady.replica(name), moved.replica(name)
        for kept, shifted in ((old.itl, new.itl), (old.load_ratio, new.load_ratio)):
            assert kept.value(steady.now + HOUR) == shifted.value(moved.now + HOUR)


@pytest.mark.parametrize("back", BACK)
def test_a_load_that_failed_is_tried_again_after_what_was_left_of_its_pause(back: int) -> None:
    bench = Bench(fleet_of(1, [adapter("a1")]))
    bench.arrive("a1")
    bench.failed("r1", "disk hiccup")
    start_again(bench, back)
    bench.up("r1")
    bench.arrive("a1")
    assert bench.only(ev.Reject).retry_after == SECOND
    bench.tick(SECOND)
    bench.arrive("a1")
    bench.only(ev.Load)


def test_what_is_parked_stays_so_for_what_was_left_or_for_ever() -> None:
    bench = lived()
    left = bench.adapter("b1").parked_until - bench.now
    bench.adapter("c1").parked_until = FOREVER
    start_again(bench, HOUR)
    bench.up("r1", start=7)
    bench.arrive("b1")
    assert bench.only(ev.Reject).retry_after == left
    bench.arrive("c1")
    assert bench.only(ev.Reject).retry_after is None
    assert bench.adapter("c1").parked_until == FOREVER
    bench.tick(left)
    bench.arrive("b1")
    assert bench.only(ev.Load).adapter == "b1"


def test_a_clock_that_begins_anew_makes_nothing_forgotten() -> None:
    bench = lived()
    start_again(bench, bench.now - 1)
    assert bench.adapter("b1").suspect_since == bench.adapter("a1").rate_at == 1
    bench.up("r1", [NAMES["a1"]], start=7)
    bench.arrive("a1")
    assert bench.only(ev.Dispatch).decision.hit_class == "gpu"
    bench.arrive("b1")
    bench.only(ev.Reject)


def test_within_a_process_time_does_not_go_back() -> None:
    for bench in started_again(HOUR):
        before = remembered(bench)
        bench.feed(ev.Wake(bench.now - HOUR))
        assert remembered(bench) == before


def test_a_clock_that_was_set_forward_moves_nothing() -> None:
    bench = lived()
    failed, learnt = bench.registration("c1", "r2").retry_at, bench.replica("r1").itl.at
    start_again(bench, -HOUR)
    assert (bench.registration("c1", "r2").retry_at, bench.replica("r1").itl.at) == (failed, learnt)


@pytest.mark.parametrize("policy", policy_names())
def test_histories_balance_when_the_clock_is_set_back_again_and_again(policy: str) -> None:
    world = World(world_settings(policy), random.Random(policy).randrange)
    for name in REPLICAS:
        world._up(name)
    for back in (1, HOUR, 25 * HOUR, YEAR):
        for _ in range(40):
            world.act()
        world.now -= back
        steps = len(world.steps)
        while len(world.steps) == steps:
            world._gateway_restarts()
    for _ in range(40):
        world.act()
    world.settle()
