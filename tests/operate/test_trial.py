"""What is played of a change, and what two runs of it say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraledger.config import Settings, settings_from
from loraledger.config.pins import read_ranking
from loraledger.operate.change import BETTER, Guardrail, Target, Value
from loraledger.operate.trial import check_value, figures_of, in_force, judge, ranking_file, sides, staleness
from loraledger.replay.fleet.outcome import Saturation
from loraledger.replay.results.report import Access, Attainment, Report, Spread, TokenTimes
from loraledger.replay.scenarios.profiles import DEFAULT, read_profile
from loraledger.twin.calibrated import Calibrated

from .changes import change

CALM = Saturation(saturated=False, offered_per_s=1.0, served_per_s=1.0, backlog=0, reason="kept up")


def report(**fields: Any) -> Report:
    """1,000 requests of which 600 of 800 with an adapter found it in a slot; ``fields`` over it."""
    plain: dict[str, Any] = {
        "label": "run",
        "policy": "least-loaded",
        "trace": "sha256:1",
        "scenario": "sha256:2",
        "requests": 1000,
        "by_status": {"ok": 960, "rejected": 30, "client_error": 10},
        "dropped": {},
        "saturation": CALM,
        "warnings": (),
        "hits": Access(gpu=600, host=150, disk=50, base=200, gpu_rate=0.75, host_rate=0.75),
        "engine_hits": None,
        "loads": 50,
        "activations": 200,
        "evictions_slot": 190,
        "evictions_host": 40,
        "preemptions": 5,
        "work": None,
        "ttft": Spread(960, 0.2, 0.1, 0.4, 0.9),
        "ttft_by_class": {},
        "ttft_long": None,
        "long_above": None,
        "itl": TokenTimes(900, 0.01, 0.02),
        "itl_by_class": {},
        "attainment": Attainment(1.0, 0.95, 0, None, 0, None),
        "cold": None,
        "tokens_per_s": None,
        "busiest_replica": None,
        "busiest_share": None,
    }
    return Report(**(plain | fields))


def hits(rate: float, **fields: Any) -> Report:
    return report(hits=Access(gpu=1, gpu_rate=rate), **fields)


def settings(**sections: Any) -> Settings:
    plain: dict[str, Any] = {
        "base": {"names": ["llama"]},
        "replicas": [{"name": f"r{n}", "url": f"http://127.0.0.1:{n}", "slots": 4, "host_entries": 8} for n in (1, 2)],
        "tenants": [{"name": f"t{n}", "key_hashes": [str(n) * 64], "adapters": ["*"]} for n in (1, 2)],
        "policy": {"name": "least-loaded"},
    }
    return settings_from({**plain, **sections}, Path("/"))


# --- figures ----------------------------------------------------------------------------------------------------------


def test_a_run_has_the_figures_of_a_block() -> None:
    found = figures_of(report())
    assert set(found) == set(BETTER)
    assert found["hit_rate"] == 0.75
    assert (found["ttft_mean"], found["ttft_p50"], found["ttft_p90"], found["ttft_p99"]) == (0.2, 0.1, 0.4, 0.9)
    assert (found["itl_mean"], found["attainment"], found["preemptions"]) == (0.01, 0.95, 5.0)
    assert found["refused"] == pytest.approx(30 / 990)  # what the client got wrong is nobody's


def test_what_a_run_does_not_tell_is_unknown_and_never_0() -> None:
    found = figures_of(report(requests=0, by_status={}, hits=Access(), ttft=None, itl=None, attainment=_nobody()))
    assert set(found.values()) == {None}


def _nobody() -> Attainment:
    return Attainment(1.0, None, 0, None, 0, None)


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_better_and_within_every_guardrail_is_ok() -> None:
    trial = judge(change(), hits(0.5), hits(0.6))
    assert trial.ok
    assert trial.reasons == ()
    target, rail = trial.checks
    assert (target.role, target.verdict, target.before, target.after) == ("target", "pass", 0.5, 0.6)
    assert target.moved == pytest.approx(0.1)
    assert (rail.role, rail.metric, rail.verdict, rail.moved) == ("guardrail", "preemptions", "pass", 0.0)


@pytest.mark.parametrize("after", [0.52, 0.4])
def test_better_by_no_more_than_was_asked_for_is_not(after: float) -> None:
    trial = judge(change(target=Target("hit_rate", 0.03)), hits(0.5), hits(after))
    assert not trial.ok
    assert trial.reasons == (f"target hit_rate is not better by more than 0.03: 0.5 before, {after:g} after",)


def test_for_a_time_less_is_better() -> None:
    faster, slower = report(ttft=Spread(9, 0.1, 0.1, 0.3, 0.5)), report(ttft=Spread(9, 0.3, 0.2, 0.6, 1.5))
    wanted = change(target=Target("ttft_p90", 0.05))
    assert judge(wanted, report(), faster).ok
    assert not judge(wanted, report(), slower).ok


def test_a_guardrail_that_fails_speaks_against_it_however_good_the_target_is() -> None:
    trial = judge(change(), hits(0.5), hits(0.9, preemptions=16))
    assert [check.verdict for check in trial.checks] == ["pass", "fail"]
    assert trial.reasons == ("guardrail preemptions is worse by more than 10: 5 before, 16 after",)
    assert judge(change(), hits(0.5), hits(0.9, preemptions=15)).ok


def test_a_share_that_may_not_fall_is_a_guardrail_too() -> None:
    asked = change(target=Target("ttft_mean"), guardrails=(Guardrail("hit_rate", 0.01),))
    sooner = {"ttft": Spread(9, 0.1, 0.1, 0.1, 0.1)}
    assert judge(asked, hits(0.5), hits(0.495, **sooner)).ok
    assert not judge(asked, hits(0.5), hits(0.48, **sooner)).ok


def test_what_could_not_be_measured_is_not_passed() -> None:
    trial = judge(change(), hits(0.5), report(hits=Access()))
    assert trial.checks[0].verdict == "unknown"
    assert trial.reasons == ("target hit_rate could not be measured",)


def test_a_saturated_fleet_passes_nothing() -> None:
    drowned = msgspec.structs.replace(CALM, saturated=True)
    trial = judge(change(), hits(0.5), hits(0.9, saturation=drowned))
    assert not trial.ok
    assert "arrivals outran service" in trial.reasons[0]


# --- what is played ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "before", "after", "key"),
    [
        ("slots", 4, 8, "slots"),
        ("host_entries", 8, 16, "host_entries"),
        ("replicas", 2, 3, "replicas"),
        ("policy", "least-loaded", "bounded-affinity", "policy"),
        ("policy.growth_share", 0.5, 0.25, "policy.growth_share"),
        ("tenant.concurrency", 64, 8, "tenants.concurrency"),
    ],
)
def test_both_sides_differ_in_the_variable_alone(
    tmp_path: Path, variable: str, before: Value, after: Value, key: str
) -> None:
    old, new = sides(change(variable=variable, before=before, after=after), (), tmp_path)
    assert (dict(old.values), dict(new.values)) == ({key: before}, {key: after})
    assert (old.label, new.label) == (f"{variable}={before}", f"{variable}={after}")


def test_pins_are_played_as_a_ranking_and_none_as_lru(tmp_path: Path) -> None:
    pins: Value = [["r1", "sql"], ["r2", "tone"]]
    old, new = sides(change(variable="pins", before=[], after=pins), (), tmp_path)
    assert dict(old.values) == {"residency": "lru"}
    assert new.text("residency") == "ranked"
    assert read_ranking(Path(str(new.text("pins")))) == (("r1", "sql"), ("r2", "tone"))


def test_what_the_gateway_holds_already_is_part_of_both(tmp_path: Path) -> None:
    held = change(id="c0", variable="policy", after="bounded-affinity")
    old, new = sides(change(variable="slots", before=4, after=8), (held,), tmp_path)
    assert dict(old.values) == {"policy": "bounded-affinity", "slots": 4}
    assert dict(new.values) == {"policy": "bounded-affinity", "slots": 8}


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("colour", 1, "'colour' cannot be changed here: use policy, pins"),
        ("slots", 0, "0: a whole number from 1 to"),
        ("slots", 4.5, "4.5: a whole number is wanted"),
        ("slots", True, "true: a whole number is wanted"),
        ("slots", None, "null: a whole number is wanted"),
        ("policy", "bounded", "bounded: no such policy"),
        ("policy", 3, "3: a name is wanted"),
        ("policy.colour", 1, "policy.colour: no such key"),
        ("policy.growth_share", "much", '"much": a number is wanted'),
        ("pins", "r1", '"r1": a list of'),
        ("pins", [["r1"]], "a list of"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_would_be_taken(
    variable: str, value: Value, complaint: str
) -> None:
    with pytest.raises(ValueError, match="^.*" + complaint.replace("[", r"\[")):
        check_value(variable, value)


def test_the_file_of_a_ranking_is_one_that_the_settings_read(tmp_path: Path) -> None:
    file = tmp_path / "pins.json"
    file.write_text(ranking_file([["r1", "sql"]]), encoding="utf-8")
    assert read_ranking(file) == (("r1", "sql"),)
    assert json.loads(file.read_text(encoding="utf-8"))["kind"] == "pins"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("policy", "least-loaded"),
        ("pins", []),
        ("replicas", 2),
        ("slots", 4),
        ("host_entries", 8),
        ("tenant.concurrency", 64),
        ("policy.growth_share", None),
    ],
)
def test_what_is_in_force_is_what_the_settings_say(variable: str, value: Value) -> None:
    assert in_force(settings(), variable) == value


def test_a_parameter_is_the_settings_own_or_the_policys_default() -> None:
    policy = {"name": "bounded-affinity"}
    default = in_force(settings(policy=policy), "policy.growth_share")
    assert isinstance(default, float)
    given = settings(policy={**policy, "params": {"growth_share": default / 2}})
    assert in_force(given, "policy.growth_share") == default / 2


def test_what_is_not_the_same_everywhere_is_not_one_value() -> None:
    limits = [{"name": f"t{n}", "adapters": ["*"], "limits": {"concurrency": n}} for n in (1, 2)]
    assert in_force(settings(tenants=limits), "tenant.concurrency") is None


# --- profiles ---------------------------------------------------------------------------------------------------------


def profile(**fields: Any) -> Calibrated:
    plain = {"name": "ours", "engine": "vllm", "engine_version": "0.32.0", "model": "llama"}
    return msgspec.structs.replace(read_profile(DEFAULT), **(plain | fields))


def test_a_profile_of_what_runs_is_fresh() -> None:
    assert staleness(profile(), "0.32.0", {"llama", "chat"}) is None
    assert staleness(profile(model="meta-llama/Llama-3.1-8B (bf16)"), "0.32.0", {"llama-3.1-8b"}) is None


def test_one_of_another_engine_version_or_model_is_stale() -> None:
    assert (
        staleness(profile(), "0.33.0", {"llama"}) == "profile ours is of vllm 0.32.0, the newest requests ran on 0.33.0"
    )
    found = staleness(profile(), "0.32.0", {"qwen", "chat"})
    assert found == "profile ours is of model 'llama', the newest requests are of 'chat' or 'qwen'"


def test_what_nobody_knows_is_not_held_against_a_profile() -> None:
    assert staleness(profile(), None, ()) is None
    assert staleness(profile(engine_version=None), "0.33.0", {"llama"}) is None
