"""What is proposed, on what, and that its command can be pasted."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest

from loraledger.operate.change import Change, Guardrail, Population, check
from loraledger.operate.review.proposals import Ground, Proposal, proposals
from loraledger.operate.review.standing import Standing
from loraledger.signals.diagnosis import Diagnosis, diagnose
from loraledger.signals.figures import Group
from loraledger.signals.measure import measure
from loraledger.units import parse_duration
from operate.changes import change

from .made import FACTS, HOUR, WINDOW, advice, burst, ranking, rule, weeks

STANDING = Standing(
    policy="bounded-affinity",
    params={"growth_share": 0.5},
    concurrency=64,
    slots=4,
    host_entries=8,
    replicas=2,
    tenants=2,
    probed=True,
)


@pytest.fixture(scope="module")
def of_week(tmp_path_factory: pytest.TempPathFactory) -> tuple[Group, Diagnosis]:
    with weeks(tmp_path_factory.mktemp("week")) as reader:
        now = measure(reader, WINDOW, FACTS)
    assert now.total is not None
    return now.total, diagnose(now, None, FACTS)


def ground(of_week: tuple[Group, Diagnosis], pool: Any = None, cause: Any = "none", **fields: Any) -> Ground:
    total, found = of_week
    plain: dict[str, Any] = {
        "standing": STANDING,
        "advice": advice(),
        "worst": None if pool is None else msgspec.structs.replace(found, pool=pool, cause=cause),
        "total": total,
        "minutes": WINDOW.minutes,
        "preemptions_per_1000": 10.0,
    }
    return Ground(**(plain | fields))


def proposed(ground: Ground, *open_: Change) -> list[tuple[str, Any, Any]]:
    return [(one.variable, one.before, one.after) for one in proposals(ground, list(open_))]


def parsed(proposal: Proposal) -> tuple[str, dict[str, list[str]]]:
    """The variable, and the options by name."""
    verb, variable, options = (words := shlex.split(proposal.command))[:3], words[3], words[4:]
    assert verb == ["loraledger", "change", "propose"]
    found: dict[str, list[str]] = {}
    for name, value in zip(options[::2], options[1::2], strict=True):
        assert name.startswith("--")
        found.setdefault(name, []).append(value)
    return variable, found


def test_a_week_without_a_finding_proposes_nothing(of_week: tuple[Group, Diagnosis]) -> None:
    assert proposed(ground(of_week)) == []
    assert proposed(ground(of_week, "nothing")) == []


def test_the_rule_of_three_weeks_asks_for_slots(of_week: tuple[Group, Diagnosis]) -> None:
    fires = advice(slots=rule("fires", True, True, True))
    (found,) = proposals(ground(of_week, advice=fires), [])
    assert parsed(found) == (
        "slots",
        {
            "--from": ["4"],
            "--to": ["8"],
            "--target": ["hit_rate:0.02"],
            "--guard": ["preemptions:10", "ttft_p99:0.3"],
            "--share": ["10%"],
            "--within": [f"{7 * 24}h"] if "7d" not in found.command else ["7d"],
            "--why": ["hit_rate is so; preparation is so; preemptions is so"],
        },
    )


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [((True, None, True), [("slots", 4, 8)]), ((True, False, True), [])],
)
def test_an_hour_asks_for_slots_only_where_three_weeks_do_not_speak_against_it(
    of_week: tuple[Group, Diagnosis], conditions: tuple[bool | None, ...], expected: list[Any]
) -> None:
    found = ground(of_week, "adapters", "slots", advice=advice(slots=rule("holds back", *conditions)))
    assert proposed(found) == expected


def test_pins_are_proposed_where_they_would_have_saved_loads(of_week: tuple[Group, Diagnosis]) -> None:
    (found,) = proposals(ground(of_week, advice=advice(ranking=ranking(lru=50, pinned=40))), [])
    variable, options = parsed(found)
    assert variable == "pins"
    assert options["--from"] == ["[]"]
    assert options["--to"] == ['[["r1", "a0"], ["r2", "a0"]]']
    assert options["--target"] == ["hit_rate:0.05"], "half of what the busiest hour would have gained"
    assert proposed(ground(of_week, advice=advice(ranking=ranking(lru=50, pinned=49)))) == []


def test_pins_that_are_in_force_are_not_proposed(of_week: tuple[Group, Diagnosis]) -> None:
    standing = msgspec.structs.replace(STANDING, ranking=(("r1", "a0"), ("r2", "a0")))
    assert proposed(ground(of_week, advice=advice(ranking=ranking()), standing=standing)) == []


@pytest.mark.parametrize(
    ("pool", "cause", "expected"),
    [
        ("routing", "hot adapter", [("policy.growth_share", 0.5, 0.25)]),
        ("adapters", "slow loads", [("host_entries", 8, 16)]),
        ("kv", "kv", [("slots", 4, 3), ("replicas", 2, 3)]),
        ("demand", "arrivals", [("replicas", 2, 3)]),
        ("adapters", "cold adapters", []),
    ],
)
def test_the_worst_hour_names_what_to_change(
    of_week: tuple[Group, Diagnosis], pool: Any, cause: Any, expected: list[Any]
) -> None:
    total, found = of_week
    assert total.working_set is not None
    places = msgspec.structs.replace(total.working_set, in_flight_max=3)
    changed = msgspec.structs.replace(total, working_set=places)
    assert proposed(ground((changed, found), pool, cause)) == expected


def test_nothing_is_guessed_of_a_fleet_that_nobody_described(of_week: tuple[Group, Diagnosis]) -> None:
    for pool, cause in (("routing", "skew"), ("adapters", "slow loads"), ("kv", "kv"), ("adapters", "slots")):
        everything = advice(slots=rule("fires", True, True, True), bursts=(burst(3, 10),))
        assert proposed(ground(of_week, pool, cause, advice=everything, standing=Standing())) == []


def test_nothing_is_measured_by_preemptions_where_no_probe_tells_them(of_week: tuple[Group, Diagnosis]) -> None:
    total, found = of_week
    assert total.working_set is not None
    changed = msgspec.structs.replace(total, working_set=msgspec.structs.replace(total.working_set, in_flight_max=3))
    everything = advice(slots=rule("fires", True, True, True), ranking=ranking(), bursts=(burst(8, 10),))
    blind = msgspec.structs.replace(STANDING, probed=False)
    for pool, cause, held in (("kv", "kv", advice()), ("demand", "arrivals", everything)):
        made = proposals(ground((changed, found), pool, cause, advice=held, standing=blind), [])
        assert made
        assert all(one.guardrails for one in made)
        assert "preemptions" not in {one.target.metric for one in made}
        assert "preemptions" not in {rail.metric for one in made for rail in one.guardrails}
        assert "pins" not in {one.variable for one in made}


@pytest.mark.parametrize(
    ("field", "expected"),
    [("tenants", ["slots", "pins", "replicas"]), ("replicas", ["replicas", "tenant.concurrency"])],
)
def test_what_has_no_part_is_not_proposed(of_week: tuple[Group, Diagnosis], field: str, expected: list[str]) -> None:
    one = msgspec.structs.replace(STANDING, **{field: 1})
    found = ground(of_week, "demand", "arrivals", advice=everything(of_week).advice, standing=one)
    assert [name for name, _, _ in proposed(found)] == expected
    alone = msgspec.structs.replace(STANDING, tenants=1, policy="round-robin", params={})
    assert proposed(ground(of_week, standing=alone)) == []


@pytest.mark.parametrize(("limit", "held", "expected"), [(8, 10, True), (8, 60, False), (8, 0, False), (64, 10, False)])
def test_a_limit_holds_bursts_and_not_the_tenant(
    of_week: tuple[Group, Diagnosis], limit: int, held: int, expected: bool
) -> None:
    found = proposed(ground(of_week, "adapters", "cold adapters", advice=advice(bursts=(burst(limit, held),))))
    assert found == ([("tenant.concurrency", 64, 8)] if expected else [])


def test_no_limit_is_proposed_where_nobody_waits(of_week: tuple[Group, Diagnosis]) -> None:
    assert proposed(ground(of_week, "nothing", advice=advice(bursts=(burst(8, 10),)))) == []


def test_the_default_policy_is_proposed_beside_another_one_that_misses(of_week: tuple[Group, Diagnosis]) -> None:
    standing = msgspec.structs.replace(STANDING, policy="round-robin", params={})
    found = proposed(ground(of_week, "routing", "skew", standing=standing))
    assert found == [("policy", "round-robin", "bounded-affinity")]


def everything(of_week: tuple[Group, Diagnosis]) -> Ground:
    found = advice(slots=rule("fires", True, True, True), ranking=ranking(), bursts=(burst(8, 10),))
    return ground(of_week, "demand", "arrivals", advice=found)


def test_there_are_three_at_most_and_the_best_founded_come_first(of_week: tuple[Group, Diagnosis]) -> None:
    assert [name for name, _, _ in proposed(everything(of_week))] == ["slots", "pins", "replicas"]


def test_a_variable_that_is_being_changed_is_left_alone(of_week: tuple[Group, Diagnosis]) -> None:
    opened, ended = change(variable="slots"), change(id="c2", variable="pins", state="accepted")
    found = proposed(everything(of_week), opened, ended)
    assert [name for name, _, _ in found] == ["pins", "replicas", "tenant.concurrency"]


def test_every_proposal_is_a_change_that_may_be(of_week: tuple[Group, Diagnosis]) -> None:
    for proposal in proposals(everything(of_week), []):
        variable, options = parsed(proposal)
        window = parse_duration(options["--within"][0])
        check(
            change(
                variable=variable,
                before=proposal.before,
                after=proposal.after,
                why=options["--why"][0],
                target=proposal.target,
                guardrails=tuple(
                    Guardrail(metric, float(limit))  # type: ignore[arg-type]
                    for metric, limit in (one.split(":") for one in options["--guard"])
                ),
                window_ns=window,
                population=Population("tenant", float(options["--share"][0].rstrip("%")) / 100, "x"),
            )
        )
        assert window % HOUR == 0


def test_a_rollout_lasts_until_its_share_saw_a_thousand_requests(of_week: tuple[Group, Diagnosis]) -> None:
    total, found = of_week
    for requests, hours in ((7 * 24 * 5000, 2), (10**9, 1), (10, 7 * 24)):
        busy = (msgspec.structs.replace(total, requests=requests), found)
        (one,) = proposals(ground(busy, "demand", "arrivals"), [])
        assert one.window_ns == hours * HOUR
