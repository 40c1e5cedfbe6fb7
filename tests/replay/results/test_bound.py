from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loraledger import events as ev
from loraledger.errors import InputFileError
from loraledger.kernel.policies import policy_names
from loraledger.record.tables import Row
from loraledger.replay.fleet.outcome import Outcome
from loraledger.replay.results.bound import LoadWork, load_work
from loraledger.replay.results.folder import open_runs
from loraledger.replay.traces.trace import Request
from loraledger.signals.timeline import LEVELS, Timeline
from loraledger.twin.events import Activated, Loaded, Preempted, TwinEvent
from loraledger.twin.profile import TwinProfile
from loraledger.twin.replica import ReplicaTwin
from replay.fleets import MIB, settings_for, virtual
from replay.runs import PS_PER_S, counts, outcome, request_row, write_run

MS = 1_000_000
IMPOSSIBLE = 10**9


class Use(NamedTuple):
    """A request: its adapter, its replica, and when its first and last token came."""

    adapter: str
    replica: str
    first: int
    last: int


def timeline(uses: Sequence[Use]) -> Timeline:
    made = Timeline()
    for use in uses:
        made.add(use.adapter, use.first, use.last)
    return made


def as_routed(uses: Sequence[Use], places: int, costs: dict[str, int]) -> int:
    names = dict.fromkeys(use.replica for use in uses)
    return sum(timeline([use for use in uses if use.replica == name]).least(costs, places) for name in names)


def points(names: Sequence[str]) -> list[Use]:
    """Uses of one token each, a millisecond apart, on one replica."""
    return [Use(name, "r1", n * MS, n * MS) for n, name in enumerate(names, 1)]


def least(uses: Sequence[Use], places: int, **costs: int) -> int:
    return timeline(uses).least({use.adapter: costs.get(use.adapter, 1) for use in uses}, places)


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "places", "loads"),
    [
        ("a", 1, 1),
        ("aaaa", 1, 1),
        ("abab", 1, 4),
        ("abab", 2, 2),
        ("abcabc", 2, 4),  # b, or c, or a is kept, and one more: two of three gaps, as Belady would
        ("aabbaabb", 1, 4),
        ("abcdabcd", 3, 5),
    ],
)
def test_the_least_loads_of_a_cache_worked_out_by_hand(names: str, places: int, loads: int) -> None:
    assert least(points(names), places) == loads


def test_the_shortest_gap_counts() -> None:
    assert least([Use("a", "r1", 10, 10), Use("b", "r1", 11, 11), Use("a", "r1", 12, 12)], 1) == 3


def test_the_dearer_of_two_adapters_is_kept() -> None:
    uses = points("dcxcd")  # while x runs, only one of two places is left for c and d
    assert least(uses, 2) == 3 + 1
    assert least(uses, 2, d=9) == 9 + 1 + 1 + 1
    assert least(uses, 2, c=9) == 9 + 1 + 1 + 1
    assert least(uses, 3, d=9) == 9 + 1 + 1


def test_a_request_in_use_holds_its_place_until_its_last_token() -> None:
    long = Use("b", "r1", 2 * MS, 9 * MS)
    around = [Use("a", "r1", MS, MS), long, Use("a", "r1", 10 * MS, 10 * MS)]
    assert least(around, 1) == 3
    assert least(around, 2) == 2
    assert least([around[0], long._replace(adapter="a"), around[2]._replace(first=5 * MS)], 1) == 1


def test_uses_of_an_adapter_that_overlap_share_one_copy_whatever_the_replica() -> None:
    uses = [Use("a", "r1", 1 * MS, 5 * MS), Use("a", "r2", 3 * MS, 9 * MS), Use("a", "r1", 8 * MS, 8 * MS)]
    assert least(uses, 1) == 1


def test_as_routed_a_second_replica_needs_a_copy_of_its_own() -> None:
    uses = [Use("a", "r1", 1 * MS, 5 * MS), Use("a", "r2", 3 * MS, 9 * MS), Use("b", "r1", 6 * MS, 6 * MS)]
    uses += [Use("a", "r1", 8 * MS, 8 * MS)]
    costs = {"a": 1, "b": 1}
    assert (timeline(uses).least(costs, 2), as_routed(uses, 1, costs)) == (2, 4)
    assert as_routed(uses, 2, costs) == 3


def test_any_number_of_places_leaves_one_load_for_each_adapter() -> None:
    costs = {"a": 1, "b": 2, "c": 3}
    assert timeline(points("abcabc")).least(costs, None) == 6 == timeline(points("abcabc")).least(costs, 3)


def test_more_costs_than_levels_err_to_the_safe_side_and_not_by_much() -> None:
    rng = random.Random(4)
    names = [f"a{n}" for n in range(LEVELS * 5)]
    costs = {name: 100 + n for n, name in enumerate(names)}
    uses = points([rng.choice(names) for _ in range(400)])
    found = timeline(uses).least(costs, 8)
    held = timeline(uses).least(dict.fromkeys(names, 1), 8)
    assert held * 100 <= found + 2_000  # all at the cheapest cost, less what rounding may add
    assert sum(costs.values()) <= found <= timeline(uses).each(costs)
    assert found <= min(lru(uses, 8, costs), belady(uses, 8, costs))


# --- against every schedule of small cases -----------------------------------------------------------------------------


def cheapest(
    uses: Sequence[Use], replicas: tuple[str, ...], slots: int, costs: dict[str, int], *, routed: bool = False
) -> int:
    """By trying everything: any routing of ``uses`` at their moments (unless ``routed``), any eviction of what is idle."""
    moments = sorted(
        itertools.chain.from_iterable(((use.first, 0, n), (use.last, 1, n)) for n, use in enumerate(uses))
    )  # what begins and ends with one step is in that step together

    @cache
    def go(place: int, held: tuple[frozenset[str], ...], running: tuple[tuple[int, int], ...]) -> int:
        if place == len(moments):
            return 0
        _, ends, number = moments[place]
        if ends:
            return go(place + 1, held, tuple(r for r in running if r[0] != number))
        best, name = IMPOSSIBLE, uses[number].adapter
        for where in range(len(replicas)):
            if routed and replicas[where] != uses[number].replica:
                continue
            used = {uses[n].adapter for n, there in running if there == where}
            for out, paid in ways(held[where], name, used):
                now = (*held[:where], out, *held[where + 1 :])
                best = min(best, paid + go(place + 1, now, (*running, (number, where))))
        return best

    def ways(there: frozenset[str], name: str, used: set[str]) -> Iterator[tuple[frozenset[str], int]]:
        if name in there:
            yield there, 0
        elif len(there) < slots:
            yield there | {name}, costs[name]
        else:
            for victim in sorted(there - used):
                yield there - {victim} | {name}, costs[name]

    return go(0, (frozenset(),) * len(replicas), ())


@st.composite
def small_schedules(draw: st.DrawFn) -> tuple[list[Use], dict[str, int], tuple[str, ...], int]:
    replicas, slots = draw(st.sampled_from([("r1",), ("r1", "r2")])), draw(st.integers(1, 3))
    names = "abcd"[: draw(st.integers(1, 4))]
    costs = {name: draw(st.integers(1, 4)) for name in names}
    uses, now = [], 0
    for _ in range(draw(st.integers(1, 7))):
        now += draw(st.integers(1, 3)) * MS
        last = now + draw(st.sampled_from([0, 0, 0, MS // 2, 2 * MS]))
        uses.append(Use(draw(st.sampled_from(names)), draw(st.sampled_from(replicas)), now, last))
    return uses, costs, replicas, slots


@given(small_schedules())
@settings(max_examples=300)
def test_no_schedule_of_a_small_case_beats_the_bound(
    case: tuple[list[Use], dict[str, int], tuple[str, ...], int],
) -> None:
    uses, costs, replicas, slots = case
    found, routed = timeline(uses).least(costs, len(replicas) * slots), as_routed(uses, slots, costs)
    assert found <= cheapest(uses, replicas, slots, costs)
    best = cheapest(uses, replicas, slots, costs, routed=True)
    assert routed <= best
    assert found <= routed or best == IMPOSSIBLE


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=24), st.integers(1, 4))
@settings(max_examples=200)
def test_with_equal_costs_one_cache_and_short_uses_the_bound_is_what_belady_pays(names: list[str], places: int) -> None:
    uses = points(names)
    costs = dict.fromkeys(names, 1)
    assert least(uses, places) == belady(uses, places, costs)
    assert least(uses, places) <= lru(uses, places, costs)


def test_the_bound_is_what_belady_pays_also_over_a_thousand_gaps() -> None:
    rng = random.Random(11)
    names = [f"a{n}" for n in range(40)]
    uses = points([rng.choice(names) for _ in range(2_500)])
    assert least(uses, 25) == belady(uses, 25, dict.fromkeys(names, 1)) > 100


def lru(uses: Sequence[Use], places: int, costs: dict[str, int]) -> int:
    held: dict[str, None] = {}
    paid = 0
    for use in uses:
        if use.adapter in held:
            del held[use.adapter]
        else:
            paid += costs[use.adapter]
            if len(held) == places:
                del held[next(iter(held))]
        held[use.adapter] = None
    return paid


def belady(uses: Sequence[Use], places: int, costs: dict[str, int]) -> int:
    held: set[str] = set()
    paid = 0
    for n, use in enumerate(uses):
        if use.adapter not in held:
            paid += costs[use.adapter]
            if len(held) == places:
                coming = [later.adapter for later in uses[n + 1 :]]
                held.remove(max(sorted(held), key=lambda a: coming.index(a) if a in coming else len(coming)))
            held.add(use.adapter)
    return paid


# --- against the twins -------------------------------------------------------------------------------------------------


@contextmanager
def told() -> Iterator[list[TwinEvent]]:
    """What the twins themselves say, whoever advances them."""
    events: list[TwinEvent] = []
    advance = ReplicaTwin.advance

    def tapped(twin: ReplicaTwin, to: int) -> list[TwinEvent]:
        happened = advance(twin, to)
        events.extend(happened)
        return happened

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaTwin, "advance", tapped)
        yield events


def beaten_by(seed: int, policy: str, slots: int) -> list[str]:
    """Play a random small trace on a random small fleet: the tiers in which less was spent than the least, or the like."""
    rng = random.Random(seed)
    profile = TwinProfile(
        slots=slots,
        host_entries=slots + rng.randint(0, 4),
        max_seqs=rng.choice([2, 8, 256]),
        token_budget=rng.choice([256, 2048]),
        kv_blocks=rng.choice([24_576, 24_576, rng.randint(8, 40)]),
        activation_per_rank_ps=rng.choice([0, 10_000_000]),
    )
    replicas, number = rng.randint(1, 3), rng.randint(1, 8)
    specs = tuple(
        ev.AdapterSpec(f"a{n}", f"{n:064x}", rng.choice([8, 16, 64]), rng.choice([10, 20, 40]) * MIB)
        for n in range(number)
    )
    fleet = virtual(settings_for(replicas, specs, policy, profile), profile)
    gap, longest, now, trace = rng.choice([100_000, 10 * MS, 100 * MS, 1000 * MS]), rng.choice([1, 5, 60]), 0, []
    for _ in range(rng.randint(1, 30)):
        now += rng.choice([0, rng.randint(0, gap)])
        name = None if rng.random() < 0.05 else f"a{min(rng.randrange(number), rng.randrange(number))}"
        trace.append(Request(now, "acme", name, rng.randint(1, 60), rng.randint(1, longest)))
    with told() as events:
        fleet.run(trace)
    sure = not any(isinstance(event, Preempted) for event in events)
    uses = sorted((used(row, sure) for row in fleet.rows["requests"] if wanted(row)), key=lambda use: use.first)
    activation, load = (
        {s.name: profile.activate_ps(s.rank) for s in specs},
        {s.name: profile.load_ps(s.bytes) for s in specs},
    )
    spent = {
        "activations": sum(event.took for event in events if isinstance(event, Activated)),
        "loads": sum(event.took for event in events if isinstance(event, Loaded)),
    }
    wrong = []
    for tier, costs, places in (("activations", activation, slots), ("loads", load, profile.host_entries)):
        anyhow, routed = timeline(uses).least(costs, replicas * places), as_routed(uses, places, costs)
        if not anyhow <= routed <= spent[tier]:
            wrong.append(f"{tier}: {anyhow} {routed} {spent[tier]}")
    return wrong


def wanted(row: Row) -> bool:
    return row["adapter"] is not None and row["first_token_ns"] is not None


def used(row: Row, sure: bool) -> Use:
    first, last = int(str(row["first_token_ns"])), int(str(row["last_token_ns"]))
    return Use(str(row["adapter"]), str(row["replica"]), first, last if sure else first)


@given(st.integers(0, 2**32), st.sampled_from(policy_names()), st.integers(1, 4))
@example(72757217426062276, "strict-affinity", 1)
@settings(max_examples=300)
def test_no_policy_spends_less_than_the_least(seed: int, policy: str, slots: int) -> None:
    assert beaten_by(seed, policy, slots) == []


# --- from a run folder -------------------------------------------------------------------------------------------------


def work_of(directory: Path, rows: list[Row], came_to: Outcome) -> LoadWork | None:
    with open_runs(run=write_run(directory, rows, came_to)) as tables:
        return load_work(tables, came_to)


def test_load_seconds_of_a_run_are_saved_against_the_most_that_could_have_been(tmp_path: Path) -> None:
    rows = [
        request_row(n, n, n + 0.1, adapter=name, replica="r1" if n % 2 else "r2") for n, name in enumerate("aabba", 1)
    ]
    rows += [request_row(6, 6, 6.1), request_row(7, 7, None, adapter="a", status="rejected")]
    replicas = [counts(load_ps=3 * PS_PER_S, activation_ps=2 * PS_PER_S), counts("r2", load_ps=PS_PER_S)]
    costs = {
        "load_costs_ps": {"a": PS_PER_S, "b": PS_PER_S},
        "activation_costs_ps": {"a": PS_PER_S, "b": PS_PER_S // 2},
    }
    work = work_of(tmp_path, rows, outcome(7, replicas, **costs))
    assert work is not None
    slot, host = work.tiers
    assert (work.uses, slot.each, slot.spent, slot.least, slot.least_as_routed) == (5, 4.0, 2.0, 1.5, 4.0)
    assert (host.each, host.spent, host.least, host.least_as_routed) == (5.0, 4.0, 2.0, 4.0)
    assert (work.saved, work.least, work.bound, work.share) == (3.0, 3.5, 5.5, 3.0 / 5.5)


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_a_replica_with_no_fixed_number_of_slots_is_bounded_by_first_uses_only(tmp_path: Path, slots: int) -> None:
    rows = [request_row(n, n, n + 0.1, adapter=name) for n, name in enumerate("abab")]
    came_to = outcome(
        4, [counts(slots=slots)], load_costs_ps={"a": 0, "b": 0}, activation_costs_ps={"a": PS_PER_S, "b": PS_PER_S}
    )
    work = work_of(tmp_path, rows, came_to)
    assert work is not None
    assert work.tiers[0].least == (4.0 if slots == 1 else 2.0)


def test_what_a_load_takes_is_not_guessed(tmp_path: Path) -> None:
    came_to = outcome(1, load_costs_ps={"a": 1}, activation_costs_ps={"b": 1})
    assert work_of(tmp_path, [request_row(1, 0, 1, adapter="a")], came_to) is None


@pytest.mark.parametrize(("told_by_probe", "calm", "loads"), [(None, 0, 1.0), (None, 1, 2.0), (0, 1, 1.0), (2, 1, 2.0)])
def test_a_request_that_may_have_been_preempted_pins_nothing(
    tmp_path: Path, told_by_probe: int | None, calm: int, loads: float
) -> None:
    # The second use begins while the first runs: shared if that was never interrupted, else only if it could be kept.
    rows = [
        request_row(1, 0, 1, adapter="a", last=9, preemptions=told_by_probe),
        request_row(2, 0, 3, adapter="b"),
        request_row(3, 0, 5, adapter="a", preemptions=told_by_probe),
    ]
    came_to = outcome(
        3,
        [counts(preemptions=calm)],
        load_costs_ps={"a": 0, "b": 0},
        activation_costs_ps={"a": PS_PER_S, "b": 0},
    )
    work = work_of(tmp_path, rows, came_to)
    assert work is not None
    assert work.tiers[0].least == loads


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [("last_token_ns", 2**62, "has tokens at"), ("first_token_ns", -5, "has tokens at"), ("replica", "r9", "'r9'")],
)
def test_a_record_that_no_run_could_have_written_is_refused(
    tmp_path: Path, column: str, value: object, said: str
) -> None:
    came_to = outcome(1, load_costs_ps={"a": 1}, activation_costs_ps={"a": 1})
    with pytest.raises(InputFileError, match=said):
        work_of(tmp_path, [{**request_row(1, 0, 1, adapter="a"), column: value}], came_to)


def test_a_run_without_adapters_has_nothing_to_save(tmp_path: Path) -> None:
    work = work_of(tmp_path, [request_row(1, 0, 1)], outcome(1))
    assert work is not None
    assert (work.uses, work.saved, work.bound, work.share) == (0, 0.0, 0.0, None)
