"""Which pins of the settings pay."""

from __future__ import annotations

from pathlib import Path

from loraledger.operate.review.pins import Pinned, judge_pins
from loraledger.operate.review.standing import Standing
from loraledger.signals.facts import Facts
from loraledger.signals.measure import measure
from loraledger.signals.rules.advice import Ranking

from .made import FACTS, WINDOW, ranking, weeks


def judged(tmp_path: Path, ranked: Ranking | None = None, facts: Facts = FACTS) -> dict[str, Pinned]:
    standing = Standing(ranking=(("r1", "a0"), ("r1", "a1"), ("r2", "gone")), registered=("a0", "never"))
    with weeks(tmp_path) as reader:
        now = measure(reader, WINDOW, facts)
    return {f"{one.kind} {one.adapter}": one for one in judge_pins(standing, ranked, now, facts)}


def test_a_pin_pays_where_its_adapter_is_among_the_best_of_its_replica(tmp_path: Path) -> None:
    found = judged(tmp_path, ranking())
    assert {name: one.pays for name, one in found.items()} == {
        "slot a0": True,
        "slot a1": False,
        "slot gone": False,
        "registered a0": True,
        "registered never": False,
    }
    assert found["slot a1"].words == "rank 2 there: a slot is worth keeping down to rank 1"
    assert (found["slot a1"].requests, found["slot a1"].per_slot) == (50, 0.5)
    assert found["slot gone"].words == "not among the 2 adapters that are worth most there"
    assert found["registered never"].requests == 0


def test_what_was_not_ranked_is_not_judged(tmp_path: Path) -> None:
    assert judged(tmp_path)["slot a0"].pays is None
    unknown = judged(tmp_path, ranking(), Facts())
    assert unknown["slot a0"].pays is None
    assert unknown["slot a0"].words == "its slots are not known: nothing is ranked there"
    assert unknown["registered a0"].pays is True
