from __future__ import annotations

import random

from loraledger.operate.blocks import Block
from loraledger.operate.change import Guardrail, Target
from loraledger.operate.watch import judge
from loraledger.units import NS_PER_S

from .changes import block, change, rolling

HOUR = 3600 * NS_PER_S


def blocks(n: int, hits: float, preemptions: float, seed: int = 1) -> list[Block]:
    """``n`` blocks in which hits are up by ``hits`` and preemptions for 1,000 requests by ``preemptions``."""
    chance = random.Random(seed)
    found = []
    for number in range(n):
        load = chance.gauss(0, 0.05)
        control: dict[str, float | None] = {"hit_rate": 0.7 + load, "preemptions": 20 + chance.gauss(0, 4)}
        treated: dict[str, float | None] = {
            "hit_rate": 0.7 + load + hits + chance.gauss(0, 0.02),
            "preemptions": 20 + preemptions + chance.gauss(0, 4),
        }
        found.append(block(number, treated, control))
    return found


def test_better_and_harmless_is_accepted_before_the_time_is_over() -> None:
    verdict = judge(rolling(), blocks(40, 0.1, 0), HOUR // 2)
    assert verdict.action == "accept"
    assert verdict.reason.startswith("target hit_rate is better by 0.09")
    assert {reading.called for reading in verdict.readings} == {"above", "below"}


def test_better_but_over_a_guardrail_is_taken_back_at_once() -> None:
    verdict = judge(rolling(), blocks(40, 0.1, 30), HOUR // 2)
    assert verdict.action == "roll_back"
    assert "guardrail preemptions is worse by" in verdict.reason
    assert "target hit_rate is better by more than 0.02" in verdict.reason


def apart(blocks: list[Block], hits: float, preemptions: float) -> list[Block]:
    """The same with a treated part that was another one from the start."""
    return [
        block(
            n,
            {
                "hit_rate": (one.treated["hit_rate"] or 0) + hits,
                "preemptions": (one.treated["preemptions"] or 0) + preemptions,
            },
            dict(one.control),  # type: ignore[arg-type]
        )
        for n, one in enumerate(blocks)
    ]


def test_a_part_that_was_better_before_is_not_made_better_by_the_change() -> None:
    before, since = apart(blocks(40, 0, 0, seed=2), 0.1, 0), apart(blocks(40, 0, 0), 0.1, 0)
    assert judge(rolling(), since, HOUR // 2).action == "accept"
    verdict = judge(rolling(), since, HOUR // 2, before)
    assert verdict.action == "keep"
    assert "before)" in verdict.reason
    assert judge(rolling(), since, HOUR, before).action == "roll_back"


def test_a_part_that_had_more_preemptions_before_breaks_no_guardrail() -> None:
    before, since = apart(blocks(40, 0, 0, seed=2), 0, 30), apart(blocks(40, 0.1, 0), 0, 30)
    assert judge(rolling(), since, HOUR // 2).action == "roll_back"
    verdict = judge(rolling(), since, HOUR // 2, before)
    assert verdict.action == "accept"
    assert verdict.readings[1].before is not None
    assert abs(verdict.readings[1].before[0] - verdict.readings[1].before[1] - 30) < 3


def test_without_a_block_from_before_nothing_is_known() -> None:
    since = blocks(40, 0.1, 30)
    verdict = judge(rolling(), since, HOUR // 2, [])
    assert {reading.called for reading in verdict.readings} == {"unknown"}
    assert verdict.action == "keep"
    assert judge(rolling(), since, HOUR, []).action == "roll_back"


def test_a_guardrail_is_looked_at_even_before_the_target_is_known() -> None:
    blind = [
        block(n, {"preemptions": one.treated["preemptions"]}, {"preemptions": one.control["preemptions"]})
        for n, one in enumerate(blocks(40, 0.1, 30))
    ]
    verdict = judge(rolling(), blind, HOUR // 2)
    assert verdict.action == "roll_back"
    assert "target hit_rate could not be measured" in verdict.reason


def test_no_effect_is_waited_for_and_taken_back_at_the_stated_time() -> None:
    neutral = blocks(40, 0.0, 0)
    assert judge(rolling(), neutral, HOUR // 2).action == "keep"
    verdict = judge(rolling(), neutral, HOUR)
    assert verdict.action == "roll_back"
    assert verdict.reason.startswith("by the stated time target hit_rate is not")


def test_better_by_less_than_asked_for_is_not_enough() -> None:
    assert judge(rolling(target=Target("hit_rate", 0.5)), blocks(40, 0.1, 0), HOUR).action == "roll_back"


def test_a_guardrail_that_nobody_measured_is_not_passed() -> None:
    blind = [block(n, {"hit_rate": 0.8 + 0.01 * (n % 3)}, {"hit_rate": 0.7 + 0.01 * (n % 2)}) for n in range(40)]
    assert judge(rolling(), blind, HOUR // 2).action == "keep"
    verdict = judge(rolling(), blind, HOUR)
    assert verdict.action == "roll_back"
    assert "guardrail preemptions could not be measured by the stated time" in verdict.reason


def test_an_undecided_guardrail_delays_acceptance_to_the_stated_time() -> None:
    tight = rolling(guardrails=(Guardrail("preemptions", 0.0),))
    found = blocks(40, 0.1, 0)
    assert judge(tight, found, HOUR // 2).action == "keep"
    assert judge(tight, found, HOUR).action == "accept"


def test_harm_that_is_not_sure_is_seen_at_the_stated_time() -> None:
    slight = rolling(guardrails=(Guardrail("preemptions", 0.0),))
    found, before = blocks(30, 0.1, 4), blocks(30, 0, 0, seed=2)
    assert judge(slight, found, HOUR // 2, before).action == "keep"
    verdict = judge(slight, found, HOUR, before)
    assert verdict.action == "roll_back"
    assert verdict.reason.startswith("guardrail preemptions is worse by 3.")
    assert judge(rolling(guardrails=(Guardrail("preemptions", 3.0),)), found, HOUR, before).action == "accept"


def test_a_guardrail_that_never_moved_is_within_its_bound() -> None:
    found = [
        block(
            n,
            {"hit_rate": one.treated["hit_rate"], "preemptions": 0},
            {"hit_rate": one.control["hit_rate"], "preemptions": 0},
        )
        for n, one in enumerate(blocks(40, 0.1, 0))
    ]
    assert judge(rolling(), found, HOUR // 2).action == "accept"


def test_for_a_time_less_is_better() -> None:
    target = rolling(target=Target("ttft_p90"), guardrails=())
    faster = [block(n, {"ttft_p90": 1 + 0.1 * (n % 3)}, {"ttft_p90": 2 + 0.1 * (n % 4)}) for n in range(40)]
    slower = [block(n, {"ttft_p90": 2 + 0.1 * (n % 3)}, {"ttft_p90": 1 + 0.1 * (n % 4)}) for n in range(40)]
    assert judge(target, faster, HOUR // 2).action == "accept"
    assert judge(target, slower, HOUR).action == "roll_back"


def test_without_a_block_nothing_is_decided_until_the_time_is_over() -> None:
    assert judge(rolling(), [], HOUR // 2).action == "keep"
    assert judge(rolling(), [], HOUR).action == "roll_back"


def test_false_alarms_are_shared_by_the_guardrails() -> None:
    rails = tuple(Guardrail(metric) for metric in ("preemptions", "ttft_p50", "ttft_p90", "itl_mean"))
    back = 0
    for seed in range(300):
        chance = random.Random(seed)
        names = ("preemptions", "ttft_p50", "ttft_p90", "itl_mean")
        found = [
            block(n, {m: chance.gauss(1, 0.3) for m in names}, {m: chance.gauss(1, 0.3) for m in names})
            for n in range(60)
        ]
        back += any(
            judge(rolling(guardrails=rails), found[:n], HOUR // 2).action == "roll_back" for n in range(5, 61, 5)
        )
    assert back <= 15  # 5 % of 300


def test_a_change_that_is_not_rolling_out_has_all_the_time() -> None:
    assert judge(change(), [], HOUR).action == "keep"
