from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest

from loraledger.cli.main import app
from loraledger.replay.scenarios.axes import combinations, parse_axes
from loraledger.signals.diagnosis import Diagnosis, diagnose
from loraledger.signals.diagnosis.experiment import TRACE
from loraledger.signals.diagnosis.verdict import Value
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Group, Hits, Moves, Pressure, Signals, WorkingSet
from signals.diagnosis.build import EMPTY, FACTS, VERSION, Fleet

WELL = Fleet()
EVEN = WELL.asked
SCAN = {**EVEN, **{f"n{number}": 2 for number in range(200)}}
HOT = {**EVEN, "a0": 550}

# What came from outside, what followed from it inside, and the answer.
INCIDENTS: dict[str, tuple[Fleet, str, str]] = {
    "arrival surge": (
        Fleet(requests=2200, asked=dict.fromkeys(EVEN, 110), ttft=2, attainment=0.5, hit_rate=0.88, kv_usage=0.8, kv_full=0.1,
              over=0.4, warm=1.5, active=25_000, loads=90, itl=0.02),
        "demand", "arrivals",
    ),
    "arrival surge that fills KV": (
        Fleet(requests=2200, asked=dict.fromkeys(EVEN, 110), ttft=9, attainment=0.2, kv_usage=0.95, kv_full=0.7,
              preemptions=60, active=80_000, itl=0.03, warm=8),
        "demand", "arrivals",
    ),
    "cold scan": (
        Fleet(requests=1400, asked=SCAN, ttft=0.3, attainment=0.93, hit_rate=0.6, loads=500, warm=0.06, part="preparation"),
        "adapters", "cold adapters",
    ),
    "slow disk": (
        Fleet(ttft=0.3, load_time=1.0, attainment=0.93, part="preparation"),
        "adapters", "slow loads",
    ),
    "slot starvation": (
        Fleet(ttft=0.9, attainment=0.8, over=0.6, in_flight=14, working=14, hit_rate=0.7, loads=150),
        "adapters", "slots",
    ),
    "longer answers that hold the slots": (
        Fleet(answer=500, ttft=0.9, attainment=0.8, over=0.6, in_flight=14, working=14, active=15_000),
        "adapters", "slots",
    ),
    "many adapters in place of few": (
        Fleet(ttft=0.9, attainment=0.8, over=0.6, in_flight=14, working=14, hit_rate=0.6, loads=400,
              asked={f"a{n}": 17 for n in range(20, 80)}),
        "adapters", "cold adapters",
    ),
    "restart storm": (
        Fleet(ttft=0.5, attainment=0.9, hit_rate=0.7, loads=200, restarts=3, down=12),
        "adapters", "restarts",
    ),
    "hot adapter on one replica": (
        Fleet(requests=1500, asked=HOT, shares={"r1": 0.76, "r2": 0.24}, ttft=1.2, ttft_on={"r1": 1.8, "r2": 0.1},
              attainment=0.7, attainment_on={"r1": 0.5, "r2": 0.99}, top=("a0", 0.7), kv_usage=0.9, kv_full=0.4),
        "routing", "hot adapter",
    ),
    "routing skew": (
        Fleet(shares={"r1": 0.85, "r2": 0.15}, ttft=1.2, ttft_on={"r1": 1.4, "r2": 0.08}, attainment=0.7,
              attainment_on={"r1": 0.65, "r2": 1.0}),
        "routing", "skew",
    ),
    "longer prompts": (
        Fleet(prompt=2500, ttft=1.0, attainment=0.8, itl=0.03, kv_usage=0.6, active=15_000, warm=0.8),
        "demand", "longer prompts",
    ),
    "longer prompts, KV full too": (
        Fleet(prompt=2500, ttft=4, attainment=0.4, itl=0.05, kv_usage=0.95, kv_full=0.6, active=60_000, warm=3.5),
        "demand", "longer prompts",
    ),
    "longer answers": (
        Fleet(answer=500, ttft=1.0, attainment=0.8, itl=0.02, active=15_000, warm=0.8),
        "demand", "longer answers",
    ),
    "KV exhaustion": (
        Fleet(answer=900, ttft=4, attainment=0.4, kv_usage=0.96, kv_full=0.8, preemptions=80, active=62_000, itl=0.012,
              over=0.4, warm=3.5),
        "kv", "kv",
    ),
    "larger contexts": (
        Fleet(prompt=2000, ttft=4, attainment=0.4, kv_usage=0.96, kv_full=0.8, preemptions=30, active=62_000, itl=0.011,
              warm=3.5),
        "kv", "kv",
    ),
    "floor too tight": (
        Fleet(ttft=2, attainment=0.5, kv_tokens=9_000, kv_usage=0.95, kv_full=0.7, preemptions=40, active=16_000, warm=1.8),
        "floor", "floor",
    ),
    "floor too tight, capacity unknown": (
        Fleet(ttft=2, attainment=0.5, kv_tokens=None, kv_usage=0.95, kv_full=0.7, active=7_000, warm=1.8),
        "floor", "floor",
    ),
}  # fmt: skip


def judged(now: Fleet, before: Fleet | None = WELL, facts: Facts = FACTS) -> Diagnosis:
    return diagnose(now.signals(), None if before is None else before.signals(), facts)


@pytest.mark.parametrize("name", INCIDENTS)
def test_each_mechanism_is_told_from_what_it_brings_about(name: str) -> None:
    fleet, pool, cause = INCIDENTS[name]
    facts = Facts() if "unknown" in name else FACTS
    before = Fleet(kv_tokens=None) if "unknown" in name else WELL
    found = judged(fleet, before, facts)
    assert (found.pool, found.cause) == (pool, cause)
    assert len(found.claims) >= 2
    assert found.remedies
    assert found.not_helping
    assert found.confidence in (("medium", "high") if "unknown" not in name else ("medium", "low"))


def test_a_clear_case_is_answered_with_high_confidence() -> None:
    found = judged(INCIDENTS["slow disk"][0])
    assert found.confidence == "high"
    assert [finding.verdict for finding in found.findings] == ["not seen", "seen", "seen", "not seen", "not seen"]


@pytest.mark.parametrize(
    "fleet",
    [
        WELL,
        Fleet(requests=1400, asked=dict.fromkeys(EVEN, 70)),
        Fleet(ttft=0.11, hit_rate=0.8, loads=200),
        Fleet(restarts=1),
        Fleet(kv_tokens=20_000),
        Fleet(shares={"r1": 0.8, "r2": 0.2}),
        Fleet(prompt=2500),
        Fleet(kv_usage=0.92, kv_full=0.9),
    ],
)  # fmt: skip
def test_whatever_moved_nothing_limits_while_no_more_is_waited(fleet: Fleet) -> None:
    found = judged(fleet)
    assert (found.pool, found.cause) == ("nothing", "none")
    assert found.confidence == "high"
    assert found.claims


def test_a_fleet_that_always_waits_so_much_is_not_accused_for_it() -> None:
    slow = Fleet(ttft=0.8, attainment=0.8)
    assert (judged(slow, slow).pool, judged(slow, slow).confidence) == ("nothing", "high")
    assert judged(slow, None).pool == "demand"


def test_a_wait_that_no_step_explains_accuses_nobody() -> None:
    found = judged(Fleet(ttft=0.5, attainment=0.9))
    assert (found.pool, found.confidence) == ("nothing", "low")
    assert found.sentence.startswith("No pool is shown to limit")
    assert any("no step shows why" in doubt for doubt in found.doubts)


ALONE: dict[str, tuple[Fleet, str, str]] = {
    name: INCIDENTS[name]
    for name in (
        "restart storm",
        "hot adapter on one replica",
        "routing skew",
        "KV exhaustion",
        "floor too tight",
        "slot starvation",
    )
}


@pytest.mark.parametrize("name", ALONE)
def test_without_a_baseline_absolute_signs_count_and_confidence_is_medium_at_most(name: str) -> None:
    fleet, pool, cause = ALONE[name]
    found = judged(msgspec.structs.replace(fleet, attainment=0.5), None)
    assert (found.pool, found.cause) == (pool, cause)
    assert found.confidence == "medium"
    assert "there is no baseline to compare with" in found.doubts
    assert found.findings[0].verdict == "unknown"


def test_without_a_baseline_a_fleet_that_is_well_is_left_alone() -> None:
    found = judged(WELL, None)
    assert (found.pool, found.confidence) == ("nothing", "medium")


def test_slots_of_the_settings_alone_name_the_floor_without_a_baseline() -> None:
    fleet = INCIDENTS["floor too tight"][0]
    assert judged(fleet, None, Facts()).pool == "kv"
    assert judged(fleet, None, FACTS).pool == "floor"


def test_a_version_that_changed_leaves_low_confidence() -> None:
    fleet = INCIDENTS["slow disk"][0]
    again = "the engine's version changed: measure again"
    found = judged(msgspec.structs.replace(fleet, measure_again=again))
    assert (found.pool, found.confidence, found.measure_again) == ("adapters", "low", again)
    assert again in found.doubts
    assert judged(msgspec.structs.replace(fleet, version=None)).confidence == "low"
    other = msgspec.structs.replace(VERSION, config_digest="other")
    assert judged(fleet, msgspec.structs.replace(WELL, version=other)).confidence == "low"


def test_signs_of_another_pool_lower_the_confidence_and_are_named() -> None:
    both = Fleet(ttft=0.5, load_time=1.0, attainment=0.9, prompt=1500, part="preparation")
    found = judged(both)
    assert (found.cause, found.confidence) == ("slow loads", "medium")
    assert "there are signs of something else too: longer prompts" in found.doubts


def test_a_baseline_of_a_few_requests_is_none() -> None:
    found = judged(INCIDENTS["slow disk"][0], Fleet(requests=10, asked={"a0": 10}))
    assert found.findings[0].verdict == "unknown"
    assert "the baseline has fewer than 20 requests" in found.doubts


def test_few_requests_leave_low_confidence() -> None:
    few = Fleet(
        requests=30, asked={"a0": 30}, ttft=2, attainment=0.4, answer=900, kv_full=0.8, kv_usage=0.95, preemptions=3
    )
    assert judged(few).confidence == "low"


def test_an_empty_window_says_so() -> None:
    found = diagnose(EMPTY, WELL.signals(), FACTS)
    assert (found.pool, found.confidence, found.requests) == ("nothing", "low", 0)
    assert "no request arrived" in found.sentence
    assert {finding.verdict for finding in found.findings} == {"unknown"}
    assert diagnose(WELL.signals(), EMPTY, FACTS).confidence == "medium"


def bare(requests: int) -> Signals:
    """A window of which nothing is known but that requests came."""
    nothing: dict[str, Any] = dict.fromkeys(
        ("share", "prompt_tokens", "generated_tokens", "cached_tokens", "active_tokens", "engine_hits", "ttft", "itl", "split",
         "attainment", "cold_ttft_p99", "oldest_wait")
    )  # fmt: skip
    group = Group(
        requests=requests, per_minute=requests / 10, by_status={}, rejections={}, hits=Hits(undecided=requests),
        ttft_by_class={}, itl_by_class={}, split_by_class={}, distinct_adapters=0, moves=Moves(), pressure=Pressure(),
        working_set=WorkingSet(0, None, None, None), **nothing,
    )  # fmt: skip
    return msgspec.structs.replace(EMPTY, total=group, replicas={"r1": group, "r2": group}, adapters={"a": group})


@pytest.mark.parametrize("requests", [1, 1000])
@pytest.mark.parametrize("base", [None, WELL.signals(), bare(1000)])
def test_where_nothing_is_known_nothing_is_claimed(requests: int, base: Signals | None) -> None:
    found = diagnose(bare(requests), base, Facts())
    assert (found.pool, found.confidence) == ("nothing", "low")
    assert found.claims == found.remedies == ()
    assert found.findings[1].verdict == found.findings[2].verdict == found.findings[4].verdict == "unknown"
    assert "no wait is known" in found.sentence


def test_one_request_is_answered() -> None:
    found = judged(Fleet(requests=1, asked={"a0": 1}, loads=0))
    assert (found.pool, found.confidence) == ("nothing", "low")


def test_a_missing_probe_is_said_and_one_that_tells_is_believed() -> None:
    believed = judged(WELL)
    assert any("no probe" in doubt for doubt in believed.doubts)
    assert len(believed.not_observable) == 3
    told = Fleet(engine_hits=True)
    probed = judged(told, told)
    assert not any("no probe" in doubt for doubt in probed.doubts)
    assert len(probed.not_observable) == 2


def hit_rate(decided: Hits, found: Hits | None, baseline: Fleet) -> Value:
    """Of a window in which the kernel decided so and engines found that."""
    now = Fleet(engine_hits=True).signals()
    assert now.total is not None
    total = msgspec.structs.replace(now.total, hits=decided, engine_hits=found)
    rows = diagnose(msgspec.structs.replace(now, total=total), baseline.signals(), FACTS).findings[1].evidence
    return next(row.value for row in rows if row.name == "GPU hit rate")


def test_what_was_pushed_out_while_the_request_waited_is_a_miss() -> None:
    assert hit_rate(Hits(gpu=900, disk=100), Hits(gpu=500, disk=500), Fleet(engine_hits=True)) == 0.5


def test_what_the_request_itself_had_loaded_is_a_miss() -> None:
    assert hit_rate(Hits(gpu=100, disk=900), Hits(gpu=1000), Fleet(engine_hits=True)) == 0.1


def test_what_engines_found_is_not_held_against_what_was_believed() -> None:
    assert hit_rate(Hits(gpu=900, disk=100), Hits(gpu=500, disk=500), WELL) == 0.9
    assert hit_rate(Hits(gpu=900, disk=100), None, Fleet(engine_hits=True)) == 0.9


EVERY = [
    *[(fleet, WELL) for fleet, _, _ in INCIDENTS.values()],
    *[(fleet, None) for fleet, _, _ in INCIDENTS.values()],
    (WELL, WELL), (WELL, None),
]  # fmt: skip


@pytest.mark.parametrize(("fleet", "before"), EVERY)
def test_every_claim_rests_on_a_row_and_the_sentence_can_be_printed(fleet: Fleet, before: Fleet | None) -> None:
    found = judged(fleet, before)
    rows = {row.name: row for finding in found.findings for row in finding.evidence}
    assert len(rows) == sum(len(finding.evidence) for finding in found.findings)  # a name means one thing
    for claim in (*found.claims, *found.details, *found.remedies, *found.not_helping):
        assert claim.evidence
        assert all(rows[name].value is not None for name in claim.evidence)
    assert found.not_helping
    assert found.sentence.isascii()
    assert found.sentence.isprintable()
    assert len(found.sentence) <= 420
    assert all(claim.text in found.sentence for claim in (*found.claims, found.not_helping[0]))
    assert found.sentence.endswith(found.experiment.command)
    assert "kernel choice, tensor-parallel communication" in found.sentence


@pytest.mark.parametrize(("fleet", "before"), EVERY)
@pytest.mark.parametrize("facts", [FACTS, Facts()])
def test_the_experiment_is_a_command_that_the_command_line_takes(
    fleet: Fleet, before: Fleet | None, facts: Facts
) -> None:
    slots = fleet.slots if facts is FACTS else None
    fleet = msgspec.structs.replace(fleet, slots=slots)
    now, base = fleet.signals(), None if before is None else before.signals()
    found = diagnose(now, base, facts, record="a record", settings="its settings.yaml")
    accepted(found.experiment.command, found.experiment.before)


def accepted(command: str, before: str) -> None:
    """``loraledger`` takes both lines, and every key and value of the second."""
    import typer.main

    words = shlex.split(command)
    assert words[:3] == ["loraledger", "replay", TRACE]
    replay = typer.main.get_command(app).commands["replay"]  # type: ignore[attr-defined]
    options = replay.make_context("replay", words[2:]).params
    assert str(options["fleet"]) == "its settings.yaml"
    assert combinations(parse_axes(options["policy"] or [], options["set_"] or []), "bounded-affinity")
    words = shlex.split(before)
    assert words[:3] == ["loraledger", "trace", "import"]
    trace = typer.main.get_command(app).commands["trace"].commands["import"]  # type: ignore[attr-defined]
    options = trace.make_context("import", words[3:]).params
    assert (str(options["file"]), str(options["out"])) == ("a record", TRACE)


def test_the_experiment_varies_what_the_answer_is_about() -> None:
    options = {
        name: judged(fleet).experiment.command.partition("yaml ")[2] for name, (fleet, _, _) in INCIDENTS.items()
    }
    assert options["arrival surge"] == "--set replicas=2,3"
    assert options["slow disk"] == "--set host_entries=16,32"
    assert options["slot starvation"] == "--set slots=8,14"
    assert options["KV exhaustion"] == "--set slots=8,5"
    assert options["routing skew"].startswith("--policy bounded-affinity --policy least-loaded")
    assert options["cold scan"].startswith("--set limits.loads_per_minute=120")


def test_names_that_cannot_be_printed_are_made_so() -> None:
    strange = "ad\n\x1b[31m\N{SNOWMAN}" + "x" * 100
    fleet = msgspec.structs.replace(
        INCIDENTS["hot adapter on one replica"][0], top=(strange, 0.7), asked={**EVEN, strange: 550}
    )
    found = judged(fleet)
    assert found.cause == "hot adapter"
    assert found.sentence.isascii()
    assert found.sentence.isprintable()
    assert len(found.sentence) < 450


def test_the_part_that_grew_is_named_with_its_share() -> None:
    now = Fleet(ttft=0.5, attainment=0.9, part="gateway_queue", prompt=1500).signals()
    rows = {row.name: row.value for row in diagnose(now, Fleet(part="engine").signals(), FACTS).findings[2].evidence}
    assert (rows["part that grew most"], rows["its share of the growth"]) == ("gateway queue", 1.0)
    assert rows["TTFT in gateway queue"] == pytest.approx(0.49)
    assert rows["TTFT in prefill"] == 0.0


def test_parts_that_nobody_told_are_unknown_and_not_zero() -> None:
    rows = {row.name: row.value for row in judged(WELL).findings[2].evidence}
    assert rows["TTFT in engine, undivided"] == pytest.approx(0.09)
    assert rows["TTFT in prefill"] is rows["TTFT in engine queue"] is rows["TTFT in unattributed"] is None


def test_prompt_tokens_of_requests_that_have_not_ended_are_reckoned_in() -> None:
    fleet = Fleet(rejected=500)
    rows = {row.name: row.value for row in judged(fleet).findings[0].evidence}
    assert rows["prompt tokens a request"] == 1000
    assert rows["prompt tokens a minute"] == 100_000
