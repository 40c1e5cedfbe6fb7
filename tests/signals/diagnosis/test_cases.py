"""Two cases from the field, as a window of them looks: what the diagnosis must say."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraledger.signals.diagnosis import Diagnosis, diagnose
from loraledger.signals.facts import Facts, ReplicaFacts
from loraledger.signals.figures import Group, Hits, Moves, Pressure, Signals, Split, Spread, Window, WorkingSet
from loraledger.tiers import EngineTiers
from signals.diagnosis.build import EMPTY, VERSION

CASES = Path(__file__).parents[2] / "cases"
MIB = 2**20


def given(case: str, name: str) -> Any:
    text = (CASES / case / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


def said(found: Diagnosis) -> str:
    """Everything that it claims."""
    return "\n".join(claim.text for claim in (*found.claims, *found.details, *found.remedies, *found.not_helping))


def group(asked: Counter[str], hits: Hits, seconds: float, **changes: Any) -> Group:
    requests = sum(asked.values())
    fields: dict[str, Any] = {
        "requests": requests, "share": 1.0, "per_minute": 60 * requests / seconds, "by_status": {"ok": requests},
        "rejections": {}, "prompt_tokens": 100 * requests, "generated_tokens": 8 * requests, "cached_tokens": None,
        "active_tokens": 500.0, "hits": hits, "engine_hits": None, "ttft": None, "ttft_by_class": {}, "itl": None,
        "itl_by_class": {}, "split": None, "split_by_class": {}, "attainment": None, "cold_ttft_p99": None,
        "oldest_wait": None, "distinct_adapters": len(asked), "replicas": 1,
    }  # fmt: skip
    return Group(**{**fields, **changes})


def window(total: Group, adapters: dict[str, Group], seconds: float) -> Signals:
    return msgspec.structs.replace(
        EMPTY,
        window=Window(0, round(seconds * 10**9)),
        version=VERSION,
        versions=(VERSION,),
        total=total,
        replicas={"r1": total},
        adapters=adapters,
    )


# --- thrash-8-slots: sixteen adapters in turn on eight slots

EXPECT = given("thrash-8-slots", "expect.json")
SLOTS: int = EXPECT["slots"]
THERE = EXPECT["observed_elsewhere"]


def loads_of(names: list[str], slots: int, host_entries: int) -> int:
    tiers = EngineTiers(slots, host_entries)
    return sum(tiers.use(name).loaded for name in names)


def thrash(adapters: int) -> Signals:
    """The trace on one replica of eight slots, four requests a second, with the waits that were seen elsewhere."""
    names = [row["adapter"] for row in given("thrash-8-slots", f"trace_{adapters}_adapters.jsonl")]
    asked, seconds = Counter(names), len(names) / 4
    tiers = EngineTiers(SLOTS, SLOTS)
    missed = Counter(name for name in names if tiers.use(name).activated)
    misses = sum(missed.values())
    median = THERE[f"ttft_p50_ms_{adapters}"] / 1000
    loads = loads_of(names, SLOTS, SLOTS)
    took = Spread(loads, 0.38, 0.38, 0.38, 0.38)
    total = group(
        asked,
        Hits(gpu=len(names) - misses, disk=misses),
        seconds,
        ttft=Spread(len(names), median, median, median * 1.5, median * 2),
        attainment=1.0 if median < 1 else 0.05,
        moves=Moves(loads, misses, misses, 0, {"load": took}, {"unknown": took}),
        working_set=WorkingSet(len(asked), None, SLOTS, SLOTS, min(len(asked), 12), 0.0 if adapters == SLOTS else 0.6),
        pressure=Pressure(samples=5, kv_usage_mean=0.2, kv_usage_max=0.3, kv_full=0.0, kv_tokens=60_000),
    )
    each = {
        name: group(Counter({name: count}), Hits(gpu=count - missed[name], disk=missed[name]), seconds)
        for name, count in asked.items()
    }
    return window(total, each, seconds)


def thrash_facts(adapter_bytes: int | None) -> Facts:
    sizes = {f"ad{number}": adapter_bytes for number in range(16)} if adapter_bytes else {}
    return Facts(replicas={"r1": ReplicaFacts(slots=SLOTS, host_entries=SLOTS)}, adapter_bytes=sizes)


@pytest.mark.parametrize("baseline", [thrash(8), None])
def test_sixteen_adapters_in_turn_on_eight_slots(baseline: Signals | None) -> None:
    found = diagnose(thrash(16), baseline, thrash_facts(40 * MIB))
    assert (found.pool, found.cause) == ("adapters", "slots")
    text = said(found)
    assert "working set 16 adapters > 8 slots: hit rate 0 %, under LRU and FIFO alike with cyclic use" in text
    missed, first = EXPECT["loads_16_adapters"], EXPECT["loads_16_on_two_replicas_split_8_8"]
    assert f"{missed} requests missed, of which {first} at most were first uses" in text
    not_helping = [claim.text for claim in found.not_helping]
    assert any(text.startswith("more host memory: ") for text in not_helping)
    assert any(text.startswith("another eviction rule: with cyclic use LRU and FIFO alike") for text in not_helping)
    slots, split = (claim.text for claim in found.remedies)
    assert slots.startswith("16 slots or more, which hold the working set; KV cost: 320 MiB at least")
    assert "`loraledger budget`" in slots
    assert split.startswith(
        f"split the adapters over 2 replicas, so that each holds its own: {first} loads in all; KV cost: none"
    )
    assert "working set 16 adapters" in found.sentence
    assert found.experiment.command.endswith("--set slots=8,16")


def test_the_numbers_said_are_those_that_the_tiers_give() -> None:
    rows = {row.name: row for step in diagnose(thrash(16), thrash(8), Facts()).findings for row in step.evidence}
    assert (rows["misses"].value, rows["misses"].baseline) == (EXPECT["loads_16_adapters"], EXPECT["loads_8_adapters"])
    assert rows["loads a minute"].value == EXPECT["loads_16_adapters"] / 24 * 60
    names = [row["adapter"] for row in given("thrash-8-slots", "trace_16_adapters.jsonl")]
    halves = [[name for name in names if (int(name[2:]) < 8) is low] for low in (True, False)]
    assert sum(loads_of(half, SLOTS, SLOTS) for half in halves) == EXPECT["loads_16_on_two_replicas_split_8_8"]


def test_what_a_slot_costs_is_not_guessed() -> None:
    found = diagnose(thrash(16), thrash(8), thrash_facts(None))
    assert found.remedies[0].text.endswith("KV cost: not known here, `loraledger budget` works it out")


def test_eight_adapters_on_eight_slots_are_well() -> None:
    found = diagnose(thrash(8), None, thrash_facts(None))
    assert found.pool == "nothing"
    assert not found.details


# --- hol-max-loras: a fourth adapter on three slots

QUEUE = given("hol-max-loras", "queue.json")
HOL = given("hol-max-loras", "expect.json")
WAITS = {"A": 0.03, "B": 0.03, "C": 0.04, "D": 6.4}


def hol(blocked: int | None, usage: float | None) -> Signals:
    asked = Counter(name for name in QUEUE["queue"] if name != "base")
    requests, base = len(QUEUE["queue"]), QUEUE["queue"].count("base")
    total = group(
        asked,
        Hits(gpu=requests - base - asked["D"], disk=asked["D"], base=base),
        60,
        requests=requests,
        ttft=Spread(requests, 1.6, 0.03, 6.4, 6.4),
        attainment=(requests - asked["D"]) / requests,
        working_set=WorkingSet(4, None, QUEUE["max_loras"], 8, 4, 0.9),
        pressure=Pressure(samples=60, kv_usage_mean=usage, kv_full=0.0, kv_tokens=4000, blocked_max=blocked),
        split=Split(requests, 19.2, 0, 0, 19.0, 0.2, 0, 0, requests),
    )
    each = {
        name: group(Counter({name: count}), Hits(gpu=count), 60, oldest_wait=WAITS[name])
        for name, count in asked.items()
    }
    return window(total, each, 60)


@pytest.mark.parametrize("blocked", [3, None])
def test_a_fourth_adapter_on_three_slots_waits_though_gpu_and_kv_are_free(blocked: int | None) -> None:
    found = diagnose(hol(blocked, 0.12), None, Facts(replicas={"r1": ReplicaFacts(slots=3)}))
    assert (found.pool, found.cause, found.confidence) == ("adapters", "slots", "low")
    left = HOL["skip_ahead"]["left"].count("D")
    text = said(found)
    assert (
        f"{left} requests for D wait for a slot though GPU and KV are free: the others wait 0.03 s, KV usage is 12 %"
        in text
    )
    assert "oldest wait of A 0.03 s; oldest wait of B 0.03 s; oldest wait of C 0.04 s; oldest wait of D 6.4 s" in text
    assert "starvation: D gets no slot" in text
    assert "adapter kept waiting longest D, its oldest wait 6.4 s" in found.sentence
    another, elsewhere, draining = (claim.text for claim in found.remedies)
    assert another.startswith("another slot, 4 in all")
    assert elsewhere.startswith("D elsewhere")
    assert draining.startswith("draining")
    assert found.experiment.command.endswith("--set slots=3,4")


def test_kv_is_not_called_free_where_it_is_full() -> None:
    now = hol(3, 0.97)
    assert now.total is not None
    full = msgspec.structs.replace(now.total.pressure or Pressure(), kv_full=0.9)
    total = msgspec.structs.replace(now.total, pressure=full)
    text = said(diagnose(msgspec.structs.replace(now, total=total, replicas={"r1": total}), None, Facts()))
    assert "3 requests for D wait for a slot: the others wait 0.03 s" in text
    assert "KV are free" not in text


def test_kv_is_not_called_free_where_nobody_told() -> None:
    found = diagnose(hol(3, None), None, Facts())
    assert "starvation: D gets no slot" in said(found)
    assert "KV are free" not in said(found)


def test_an_adapter_that_waits_long_while_slots_are_free_is_not_starved() -> None:
    now = hol(0, 0.12)
    assert now.total is not None
    total = msgspec.structs.replace(now.total, working_set=WorkingSet(4, None, 8, 8, 4, 0.0), attainment=0.95)
    found = diagnose(msgspec.structs.replace(now, total=total, replicas={"r1": total}), None, Facts())
    assert "starvation" not in said(found)
