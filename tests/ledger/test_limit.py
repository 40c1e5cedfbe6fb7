from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.ledger.accounts import ledger_of
from loraledger.ledger.facts import Latencies, ReplicaFacts
from loraledger.ledger.figures import Figure, configured, unknown
from loraledger.ledger.limit import Limit, Thresholds, limiting

from .replicas import GIB, NOW, replica, seen

LONG_PROMPT: dict[str, Any] = {"waiting_requests": seen(1, "requests"), "waiting_tokens": seen(30_000, "tokens")}
COLD_CHURN: dict[str, Any] = {
    "loads": seen(30, "per minute"),
    "activations": seen(90, "per minute"),
    "working_set": seen(12, "adapters"),
    "slots_used": seen(4, "slots"),
}


def limit(thresholds: Thresholds | None = None, **changes: Any) -> Limit:
    return limiting(ledger_of(replica(**changes)), thresholds)


def statements(found: Limit) -> str:
    return "; ".join(evidence.statement for evidence in found.evidence)


def test_a_replica_at_ease_is_limited_by_nothing() -> None:
    found = limit()
    assert (found.pool, found.also, found.evidence, found.unknown, found.levers) == ("none", (), (), (), ())


def test_a_long_prompt_that_lacks_kv_while_slots_are_free_reads_kv() -> None:
    found = limit(**LONG_PROMPT)
    assert (found.pool, found.also) == ("kv", ())
    assert "needs 30,000 KV tokens and 25,600 are free, while 2 of 4 slots are free" in statements(found)


def test_free_kv_with_cold_churn_reads_adapters() -> None:
    found = limit(**COLD_CHURN)
    assert (found.pool, found.also) == ("adapters", ())
    assert "30.0 loads a minute of 12 adapters in 8 host entries" in statements(found)
    assert "90.0 activations a minute of 12 adapters in 4 slots" in statements(found)
    assert "while 50% of the KV blocks are free" in statements(found)


def test_kv_is_named_before_adapters_and_both_are_said() -> None:
    found = limit(**LONG_PROMPT, **COLD_CHURN)
    assert (found.pool, found.also) == ("kv", ("adapters",))
    assert {evidence.pool for evidence in found.evidence} == {"kv", "adapters"}


def test_the_floor_is_named_before_everything() -> None:
    found = limit(**LONG_PROMPT, **COLD_CHURN, weights=seen(22 * GIB, "bytes"))
    assert (found.pool, found.also) == ("floor", ("kv", "adapters"))


@pytest.mark.parametrize(("weights", "pool"), [(21 * GIB, "none"), (21 * GIB + 1, "floor")])
def test_headroom_below_the_setting_is_a_matter_of_the_floor(weights: int, pool: str) -> None:
    assert limit(weights=seen(weights, "bytes")).pool == pool


def test_what_is_more_than_the_device_cannot_start() -> None:
    found = limit(weights=seen(30 * GIB, "bytes"))
    assert found.pool == "floor"
    assert "5 GiB more than the device" in statements(found)


@pytest.mark.parametrize(
    ("changes", "pool"),
    [
        ({"waiting_tokens": seen(25_600, "tokens"), "waiting_requests": seen(1, "requests")}, "none"),
        ({"waiting_tokens": seen(25_601, "tokens"), "waiting_requests": seen(1, "requests")}, "kv"),
        ({"preemptions": seen(0.2, "per minute")}, "kv"),
        ({"blocks_free": seen(321, "blocks")}, "none"),
        ({"blocks_free": seen(320, "blocks")}, "kv"),
        ({"blocks_total": seen(0, "blocks"), "blocks_free": seen(0, "blocks")}, "kv"),
        ({"blocked_requests": seen(1, "requests"), "waiting_requests": seen(1, "requests")}, "adapters"),
        ({**COLD_CHURN, "loads": seen(5.9, "per minute"), "activations": seen(59, "per minute")}, "none"),
        ({**COLD_CHURN, "loads": seen(6, "per minute"), "activations": seen(0, "per minute")}, "adapters"),
        ({**COLD_CHURN, "loads": seen(0, "per minute"), "activations": seen(60, "per minute")}, "adapters"),
        ({**COLD_CHURN, "working_set": seen(5, "adapters")}, "adapters"),
        ({**COLD_CHURN, "working_set": seen(4, "adapters")}, "none"),
        ({**COLD_CHURN, "working_set": unknown("adapters")}, "adapters"),
    ],
)
def test_each_sign_at_its_edge(changes: dict[str, Any], pool: str) -> None:
    assert limit(**changes).pool == pool


def test_thresholds_are_settings() -> None:
    assert limit(Thresholds(kv_usage=0.5)).pool == "kv"
    assert limit(Thresholds(loads=31, activations=91), **COLD_CHURN).pool == "none"


def test_recomputed_tokens_are_said_with_preemptions_where_they_are_known() -> None:
    some: dict[str, Any] = {"preemptions": seen(2, "per minute"), "recomputed_tokens": seen(9_000, "per minute")}
    assert "2.0 preemptions a minute, 9,000 tokens a minute computed again" in statements(limit(**some))
    some["recomputed_tokens"] = unknown("per minute")
    assert statements(limit(**some)) == "2.0 preemptions a minute"


def test_churn_says_how_long_it_holds_the_engine() -> None:
    tenth = Latencies(((100_000_000, NOW),))
    found = limit(**COLD_CHURN, latencies={"disk": tenth, "host": tenth})
    assert (
        "30.0 loads a minute of 12 adapters in 8 host entries, which hold the engine for 5% of the time"
        in statements(found)
    )
    assert "which hold the engine for 15% of the time" in statements(found)


NEEDED = [
    ("device_bytes", "floor: device bytes"),
    ("weights", "floor: weights"),
    ("kv_bytes", "floor: KV bytes"),
    ("slot_bytes", "floor: adapters' device bytes"),
    ("safety", "floor: safety setting"),
    ("blocks_free", "kv: free KV blocks"),
    ("preemptions", "kv: preemptions a minute"),
]


@pytest.mark.parametrize(("name", "said"), NEEDED)
def test_what_is_not_known_is_named_and_never_passes_for_none(name: str, said: str) -> None:
    missing: dict[str, Any] = {name: unknown(getattr(replica(), name).unit)}
    found = limit(**missing)
    assert found.pool == "unknown"
    assert said in found.unknown


def test_an_unknown_overhead_is_named() -> None:
    assert limit(overhead={}).unknown == ("floor: engine overhead",)


def test_requests_that_wait_for_an_unknown_reason_leave_kv_and_adapters_open() -> None:
    waiting: dict[str, Any] = {"waiting_requests": seen(2, "requests"), "blocked_requests": unknown("requests")}
    found = limit(**waiting, slots_used=seen(4, "slots"), working_set=seen(9, "adapters"))
    assert found.pool == "unknown"
    assert found.unknown == ("kv: tokens that the next request needs", "adapters: requests that wait for a slot")


@pytest.mark.parametrize("changes", [{"slots_used": seen(3, "slots")}, {"working_set": seen(4, "adapters")}])
def test_nobody_waits_for_a_slot_while_one_is_free_or_all_adapters_in_use_fit(changes: dict[str, Any]) -> None:
    some: dict[str, Any] = {"slots_used": seen(4, "slots"), "working_set": seen(9, "adapters"), **changes}
    some |= {"waiting_requests": seen(1, "requests"), "waiting_tokens": seen(1, "tokens")}
    assert limit(blocked_requests=unknown("requests"), **some).pool == "none"


def test_requests_that_all_wait_for_a_slot_do_not_wait_for_kv() -> None:
    found = limit(waiting_requests=seen(2, "requests"), blocked_requests=seen(2, "requests"))
    assert (found.pool, found.also, found.unknown) == ("adapters", (), ())


def test_a_sign_counts_however_much_else_is_unknown() -> None:
    empty = ReplicaFacts("r1", NOW, preemptions=seen(1, "per minute"))
    found = limiting(ledger_of(empty))
    assert found.pool == "kv"
    assert any(text.startswith("floor: ") for text in found.unknown)
    assert not any(text.startswith("kv: ") for text in found.unknown)


def test_a_replica_of_which_nothing_is_known_is_unknown() -> None:
    found = limiting(ledger_of(ReplicaFacts("r1", NOW)))
    assert (found.pool, found.evidence) == ("unknown", ())
    assert {text.partition(":")[0] for text in found.unknown} == {"floor", "kv", "adapters"}


FIGURES = [field.name for field in fields(ReplicaFacts) if isinstance(getattr(replica(), field.name), Figure)]


PREEMPTED: dict[str, Any] = {"preemptions": seen(2, "per minute")}
BLOCKED: dict[str, Any] = {
    "slots_used": seen(4, "slots"),
    "working_set": seen(9, "adapters"),
    "waiting_requests": seen(1, "requests"),
    "blocked_requests": seen(1, "requests"),
}
STATES = [
    {},
    LONG_PROMPT,
    COLD_CHURN,
    PREEMPTED,
    BLOCKED,
    {"blocks_free": seen(1, "blocks")},
    {"weights": seen(2**36, "bytes")},
]


@settings(deadline=None)
@given(st.sets(st.sampled_from(FIGURES)), st.sampled_from(STATES))
def test_forgetting_figures_never_invents_a_limit_nor_turns_one_into_none(
    names: set[str], changes: dict[str, Any]
) -> None:
    facts = replica(**changes)
    full = limiting(ledger_of(facts))
    forgotten: dict[str, Any] = {name: unknown(getattr(facts, name).unit) for name in names}
    less = limiting(ledger_of(replace(facts, **forgotten)))
    shown = {full.pool, *full.also}
    assert {less.pool, *less.also} - {"unknown", "none"} <= shown
    assert full.pool == "none" or less.pool != "none"


@settings(deadline=None)
@given(st.integers(0, 3200), st.integers(0, 60_000))
def test_more_free_kv_never_makes_kv_the_limit(free: int, needed: int) -> None:
    def reads_kv(blocks: int) -> bool:
        some: dict[str, Any] = {"waiting_requests": seen(1, "requests"), "waiting_tokens": seen(needed, "tokens")}
        return limit(blocks_free=seen(blocks, "blocks"), **some).pool == "kv"

    assert reads_kv(free) or not reads_kv(min(3200, free + 1))


def test_evidence_carries_the_figures_with_their_source() -> None:
    (evidence,) = limit(preemptions=seen(2, "per minute")).evidence
    assert evidence.figures[0] == seen(2, "per minute")


def test_a_unified_pool_is_judged_by_the_same_signs() -> None:
    assert limit(layout="unified", **LONG_PROMPT).pool == "kv"
    assert limit(layout="unified", safety=configured(20 * GIB, "bytes")).pool == "floor"
