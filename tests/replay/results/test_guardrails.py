from __future__ import annotations

import msgspec
import pytest

from loraledger.replay.fleet.outcome import Saturation
from loraledger.replay.results.guardrails import Guardrails, judge
from loraledger.replay.results.report import Access, Attainment, Report, Spread


def report(*, requests: int = 1000, preemptions: int = 0, long_p90: float | None = 1.0) -> Report:
    return Report(
        label="",
        policy="",
        trace="",
        scenario="",
        requests=requests,
        by_status={},
        dropped={},
        saturation=Saturation(saturated=False, offered_per_s=0, served_per_s=0, backlog=0, reason=""),
        warnings=(),
        hits=Access(),
        engine_hits=None,
        loads=0,
        activations=0,
        evictions_slot=0,
        evictions_host=0,
        preemptions=preemptions,
        work=None,
        ttft=None,
        ttft_by_class={},
        ttft_long=None if long_p90 is None else Spread(10, 0.5, 0.4, long_p90, 2.0),
        long_above=None,
        itl=None,
        itl_by_class={},
        attainment=Attainment(1.0, None, 0, None, 0, None),
        cold=None,
        tokens_per_s=None,
        busiest_replica=None,
        busiest_share=None,
    )


ONE = Guardrails(preemptions_per_1000=None, long_ttft_ratio=None)


def verdicts(run: Report, baseline: Report, guardrails: Guardrails) -> list[tuple[str, str]]:
    return [(verdict.guardrail, verdict.verdict) for verdict in judge(run, baseline, guardrails)]


@pytest.mark.parametrize(
    ("preemptions", "before", "verdict", "limit"),
    [(10, 0, "pass", 10), (11, 0, "fail", 10), (30, 30, "pass", 30), (31, 30, "fail", 30), (0, 30, "pass", 30)],
)
def test_preemptions_stay_below_the_budget_or_below_what_there_was(
    preemptions: int, before: int, verdict: str, limit: float
) -> None:
    found = judge(report(preemptions=preemptions), report(preemptions=before), Guardrails(long_ttft_ratio=None))
    assert [(one.verdict, one.value, one.limit) for one in found] == [(verdict, preemptions, limit)]


def test_preemptions_are_for_a_thousand_requests() -> None:
    (found,) = judge(report(requests=200, preemptions=3), report(), Guardrails(long_ttft_ratio=None))
    assert (found.verdict, found.value) == ("fail", 15.0)
    assert found.words == "15.0 KV preemptions for 1,000 requests, 10.0 are allowed"


@pytest.mark.parametrize(("after", "verdict"), [(1.65, "pass"), (1.66, "fail"), (0.1, "pass")])
def test_long_prompts_may_wait_a_tenth_longer_than_in_the_baseline(after: float, verdict: str) -> None:
    guardrails = Guardrails(preemptions_per_1000=None)
    (found,) = judge(report(long_p90=after), report(long_p90=1.5), guardrails)
    assert (found.guardrail, found.verdict) == ("long_ttft_ratio", verdict)
    assert found.limit == pytest.approx(1.65)
    assert "1.1 x the baseline" in found.words


def test_a_fixed_limit_needs_no_baseline() -> None:
    guardrails = Guardrails(preemptions_per_1000=None, long_ttft_ratio=None, long_ttft_s=0.9)
    (found,) = judge(report(), report(long_p90=None), guardrails)
    assert (found.verdict, found.words) == ("fail", "long prompts' first token after 1 s (p90), 0.9 s are allowed")


@pytest.mark.parametrize(
    ("run", "baseline", "missing"),
    [
        (report(long_p90=None), report(), "in this run"),
        (report(), report(long_p90=None), "in the baseline"),
    ],
)
def test_what_was_not_measured_neither_passes_nor_fails(run: Report, baseline: Report, missing: str) -> None:
    (found,) = judge(run, baseline, Guardrails(preemptions_per_1000=None))
    assert found.verdict == "unknown"
    assert found.words.endswith(missing)
    assert verdicts(report(requests=0), report(), Guardrails())[0] == ("preemptions_per_1000", "unknown")


def test_only_budgets_that_are_set_are_judged_in_their_order() -> None:
    assert judge(report(), report(), ONE) == ()
    every = Guardrails(preemptions_per_1000=1, long_ttft_ratio=1, long_ttft_s=1)
    assert [name for name, _ in verdicts(report(), report(), every)] == [
        "preemptions_per_1000",
        "long_ttft_ratio",
        "long_ttft_s",
    ]


def test_a_baseline_passes_its_own_guardrails() -> None:
    busy = report(preemptions=500, long_p90=30.0)
    assert {verdict for _, verdict in verdicts(busy, busy, Guardrails())} == {"pass"}


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["preemptions_per_1000", "long_ttft_ratio", "long_ttft_s"])
def test_a_budget_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Guardrails(**{name: value})


def test_a_saturated_run_passes_no_guardrail_and_may_fail_one() -> None:
    over = Saturation(saturated=True, offered_per_s=2, served_per_s=1, backlog=9, reason="")
    run = msgspec.structs.replace(report(preemptions=11), saturation=over)
    assert verdicts(run, report(), Guardrails()) == [("preemptions_per_1000", "fail"), ("long_ttft_ratio", "unknown")]
    words = judge(run, report(), Guardrails())[1].words
    assert words.endswith("1.1 x the baseline, but the run is saturated")
