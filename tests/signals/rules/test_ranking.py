from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from loraledger.kernel.estimates import PRIOR_WEIGHT
from loraledger.record.tables import Row
from loraledger.signals.facts import Facts, ReplicaFacts
from loraledger.signals.rules import Advice, Targets, advise
from loraledger.signals.rules.advice import Pin, Ranking
from loraledger.signals.rules.value import avoided, per_mib, shrunk
from loraledger.signals.rules.weeks import HOUR_NS, WEEK_NS
from signals.records import MINUTE, NOON, base_request, move, record, request

MS = 1_000_000
MIB = 2**20
UNTIL = NOON + 30 * MINUTE
AT = UNTIL - 3 * HOUR_NS
SLOTS = {"r1": ReplicaFacts(slots=3), "r2": ReplicaFacts(slots=2)}


def missed(adapter: str, waited_ms: int | None, replica: str = "r1", at: int = AT, **columns: object) -> Row:
    """A miss whose first token came so much later, of which a probe told; ``None``: no probe."""
    waited = 0 if waited_ms is None else waited_ms * MS
    times = {
        "first_token_ns": at + 200 * MS + waited,
        "last_token_ns": at + 250 * MS + waited,
        "finished_ns": at + 260 * MS + waited,
    }
    stall = None if waited_ms is None else waited
    return request(
        adapter=adapter, replica=replica, arrived_ns=at, hit_class="disk", engine_stall_ns=stall, **times, **columns
    )


def hit(adapter: str, replica: str = "r1", at: int = AT) -> Row:
    return request(adapter=adapter, replica=replica, arrived_ns=at)


def advice(
    tmp_path: Path, rows: Sequence[Row], facts: Facts, targets: Targets | None = None, **more: Sequence[Row]
) -> Advice:
    with record(tmp_path, rows, **more) as reader:
        return advise(reader, UNTIL, facts, targets or Targets())


def ranking(
    tmp_path: Path, rows: Sequence[Row], facts: Facts, targets: Targets | None = None, **more: Sequence[Row]
) -> Ranking:
    found = advice(tmp_path, rows, facts, targets, **more).ranking
    assert found is not None
    return found


# --- the formulas -----------------------------------------------------------------------------------------------------


def test_value_is_rate_times_penalty_and_per_mib_over_the_size() -> None:
    assert avoided(12.0, 0.5) == 6.0
    assert avoided(12.0, None) is None
    assert per_mib(6.0, 4 * MIB) == 1.5
    assert per_mib(6.0, None) is None
    assert per_mib(6.0, 0) is None
    assert per_mib(None, MIB) is None


def test_a_mean_is_drawn_toward_its_prior_by_the_kernels_weight() -> None:
    assert shrunk(None, 0.0, 0) is None
    assert shrunk(2.0, 0.0, 0) == 2.0
    assert shrunk(None, 6.0, 2) == 3.0
    assert shrunk(1.0, 6.0, 2) == pytest.approx((1.0 * PRIOR_WEIGHT + 3.0 * 2) / (PRIOR_WEIGHT + 2))


# --- from a record ----------------------------------------------------------------------------------------------------


def test_the_worth_of_each_adapter_equals_one_worked_out_by_hand(tmp_path: Path) -> None:
    rows = [
        missed("big", 400),
        missed("big", 200, "r2"),
        hit("big"),
        missed("small", 100),
        *[hit("small")] * 2,
        hit("never"),
    ]
    facts = Facts(replicas=SLOTS, adapter_bytes={"big": 100 * MIB, "small": 10 * MIB, "never": 12 * MIB})
    found = ranking(tmp_path, rows, facts)
    fleet = (400 + 200 + 100) / 3
    large = (fleet * 3 + 600) / (3 + 2)
    little = (fleet * 3 + 100) / (3 + 1)
    penalties = {"big": (large * 3 + 600) / 5, "small": (little * 3 + 100) / 4, "never": little}
    by_key = {(worth.replica, worth.adapter): worth for worth in found.worths}
    assert set(by_key) == {("r1", "big"), ("r1", "small"), ("r1", "never"), ("r2", "big")}
    for (replica, adapter), requests, misses in (
        (("r1", "big"), 2, 1),
        (("r2", "big"), 1, 1),
        (("r1", "small"), 3, 1),
        (("r1", "never"), 1, 0),
    ):
        worth = by_key[replica, adapter]
        assert (worth.requests, worth.misses) == (requests, misses)
        assert worth.penalty == pytest.approx(penalties[adapter] / 1000)
        assert worth.per_hour == pytest.approx(requests / (7 * 24))
        assert worth.per_slot == pytest.approx(requests / (7 * 24) * penalties[adapter] / 1000)
        assert worth.per_slot is not None
        assert worth.per_mib == pytest.approx(worth.per_slot * MIB / facts.adapter_bytes[adapter])
    assert by_key["r1", "big"].penalty_from == "its own misses"
    assert by_key["r1", "never"].penalty_from == "its size class"


def test_pins_are_the_best_by_slot_of_each_replica_one_slot_left_free(tmp_path: Path) -> None:
    counts = {"a": 5, "b": 9, "c": 7, "d": 2}
    rows = [missed(name, 100, replica) for replica in SLOTS for name, count in counts.items() for _ in range(count)]
    found = ranking(tmp_path, rows, Facts(replicas=SLOTS))
    assert found.pins == (Pin("r1", "b"), Pin("r1", "c"), Pin("r2", "b"))
    assert [(worth.rank, worth.adapter, worth.pin) for worth in found.worths if worth.replica == "r1"] == [
        (1, "b", True),
        (2, "c", True),
        (3, "a", False),
        (4, "d", False),
    ]


@pytest.mark.parametrize(("budget", "pins"), [(0, 0), (1, 2), (2, 4), (9, 5)])
def test_a_budget_is_pins_for_each_replica_and_never_more_than_its_slots(
    tmp_path: Path, budget: int, pins: int
) -> None:
    rows = [missed(name, 100, replica) for replica in SLOTS for name in "abcdef"]
    assert len(ranking(tmp_path, rows, Facts(replicas=SLOTS), Targets(budget=budget)).pins) == pins


def test_a_large_penalty_outranks_a_large_rate(tmp_path: Path) -> None:
    rows = [missed("slow", 900) for _ in range(20)] + [missed("often", 10) for _ in range(30)]
    assert ranking(tmp_path, rows, Facts(replicas=SLOTS)).pins[0] == Pin("r1", "slow")


def test_only_the_last_week_counts(tmp_path: Path) -> None:
    rows = [missed("old", 100, at=AT - WEEK_NS), missed("new", 100)]
    assert {worth.adapter for worth in ranking(tmp_path, rows, Facts(replicas=SLOTS)).worths} == {"new"}


def test_without_told_misses_loads_stand_for_the_penalty(tmp_path: Path) -> None:
    rows = [missed("a", None), missed("b", None)]
    loads = [move("disk", "host", adapter="a", at_ns=AT, took_ns=300 * MS), move("gpu", "host", adapter="b", at_ns=AT)]
    found = {worth.adapter: worth for worth in ranking(tmp_path, rows, Facts(replicas=SLOTS), residency=loads).worths}
    assert [found[name].penalty for name in "ab"] == pytest.approx([0.3, 0.3])
    assert (found["a"].penalty_from, found["b"].penalty_from) == ("its own loads", "its size class")


def test_with_no_penalty_at_all_the_ranking_is_by_requests_and_says_so(tmp_path: Path) -> None:
    rows = [missed("a", None), missed("b", None), missed("b", None)]
    found = advice(tmp_path, rows, Facts(replicas=SLOTS))
    assert found.ranking is not None
    assert [worth.adapter for worth in found.ranking.worths] == ["b", "a"]
    assert {worth.per_slot for worth in found.ranking.worths} == {None}
    assert found.ranking.total is not None
    assert found.ranking.total.lru_s is None
    assert any("nobody told what a miss waits for" in note for note in found.notes)


def test_base_requests_and_those_sent_nowhere_are_not_ranked(tmp_path: Path) -> None:
    rows = [base_request(arrived_ns=AT), request(arrived_ns=AT, replica=None, hit_class=None)]
    found = advice(tmp_path, rows, Facts(replicas=SLOTS))
    assert found.ranking is None
    assert any("nothing to rank" in note for note in found.notes)


def test_unknown_slots_give_no_gain_and_no_default_pins(tmp_path: Path) -> None:
    found = advice(tmp_path, [missed("a", 100)], Facts(source="a test"))
    assert found.ranking is not None
    assert (found.ranking.pins, found.ranking.gains, found.ranking.total) == ((), (), None)
    assert any("slots of r1 are not known (a test)" in note for note in found.notes)


def test_what_pins_would_have_saved_and_who_is_not_worth_its_slot(tmp_path: Path) -> None:
    # one hot adapter between strangers: LRU of two slots loses it each time, a pin keeps it
    names = [name for n in range(40) for name in ("hot", f"cold{n % 4}", f"cold{n % 4 + 4}")]
    rows = [missed(name, 100, at=AT + n * 500 * MS) for n, name in enumerate(names)]
    found = ranking(tmp_path, rows, Facts(replicas={"r1": ReplicaFacts(slots=2)}))
    assert found.pins == (Pin("r1", "hot"),)
    assert found.total is not None
    assert (found.total.uses, found.total.lru, found.total.pinned) == (120, 120, 81)
    assert found.total.least <= 81
    assert found.total.lru_s == pytest.approx(12.0)
    assert found.total.pinned_s == pytest.approx(8.1)
    assert "120 times, with these pins 81 times" in found.words
    assert [(one.adapter, one.moved_in) for one in found.evictions] == [(f"cold{n}", 10) for n in range(5)]


def test_pins_that_save_nothing_are_not_praised(tmp_path: Path) -> None:
    rows = [hit("a", at=AT + n * 500 * MS) for n in range(9)]
    assert "save nothing" in ranking(tmp_path, rows, Facts(replicas=SLOTS)).words


def test_a_replica_shows_its_pins_and_a_few_that_follow(tmp_path: Path) -> None:
    rows = [missed(f"a{n:02}", 100) for n in range(20)]
    found = ranking(tmp_path, rows, Facts(replicas=SLOTS))
    assert (len(found.worths), found.left_out) == (7, 13)
