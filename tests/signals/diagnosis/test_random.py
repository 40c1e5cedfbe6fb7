"""Whatever a window's figures are, there is an answer, and all of it rests on rows."""

from __future__ import annotations

import math
import shlex
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.replay.scenarios.axes import combinations, parse_axes
from loraledger.signals.diagnosis import Diagnosis, diagnose
from loraledger.signals.facts import Facts, ReplicaFacts
from loraledger.signals.figures import (
    Group,
    Hits,
    Moves,
    Pressure,
    Quality,
    Signals,
    Split,
    Spread,
    Version,
    Window,
    WorkingSet,
)

NAMES = st.sampled_from(["r1", "r2", "r3"])
ADAPTERS = st.sampled_from(["a", "b", "c", "d\n\x00", "\N{SNOWMAN}" * 60, ""])
COUNT = st.integers(0, 5000)
HUGE = st.one_of(COUNT, st.integers(0, 2**62))
SHARE = st.floats(0, 1)
SECONDS = st.one_of(st.integers(0, 10**11), st.integers(0, 10**18)).map(lambda ns: ns / 10**9)


def maybe(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(st.none(), strategy)


SPREAD = st.builds(Spread, COUNT, SECONDS, SECONDS, SECONDS, SECONDS)
HITS = st.builds(Hits, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT)
SPLIT = st.builds(Split, COUNT, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, COUNT)
SIZES = st.sampled_from(["<16 MiB", "unknown"])
MOVES = st.builds(
    Moves, COUNT, COUNT, COUNT, COUNT,
    st.dictionaries(st.sampled_from(["load", "activation"]), SPREAD), st.dictionaries(SIZES, SPREAD),
)  # fmt: skip
WORKING = st.builds(WorkingSet, COUNT, maybe(HUGE), maybe(HUGE), maybe(HUGE), maybe(HUGE), maybe(SHARE))
PRESSURE = st.builds(
    Pressure, samples=COUNT, down=COUNT, restarts=COUNT, kv_usage_mean=maybe(SHARE), kv_full=maybe(SHARE), kv_tokens=maybe(HUGE),
    waiting_mean=maybe(SECONDS), preemptions=maybe(COUNT), recomputed_tokens=maybe(HUGE), blocked_max=maybe(COUNT),
    busy=maybe(SHARE),
)  # fmt: skip
STATUSES = st.dictionaries(st.sampled_from(["ok", "rejected", "open", "client_error"]), COUNT)
CLASSES = st.dictionaries(st.sampled_from(["gpu", "disk", "base"]), SPREAD)
GROUP = st.builds(
    Group, requests=COUNT, share=maybe(SHARE), per_minute=SECONDS, by_status=STATUSES, rejections=st.just({}),
    prompt_tokens=maybe(HUGE), generated_tokens=maybe(HUGE), cached_tokens=maybe(HUGE), active_tokens=maybe(SECONDS), hits=HITS,
    engine_hits=maybe(HITS), ttft=maybe(SPREAD), ttft_by_class=CLASSES, itl=maybe(SPREAD), itl_by_class=st.just({}),
    itl_mean=maybe(SECONDS), split=maybe(SPLIT), split_by_class=st.just({}), attainment=maybe(SHARE), cold_ttft_p99=maybe(SECONDS),
    oldest_wait=maybe(SECONDS), distinct_adapters=COUNT, replicas=COUNT, top_adapter=maybe(ADAPTERS),
    top_adapter_share=maybe(SHARE),
    moves=maybe(MOVES), working_set=maybe(WORKING), pressure=maybe(PRESSURE),
)  # fmt: skip
VERSION = Version("0.32.0", "llama", "digest", "1.0", 1000, 0, 1)
SIGNALS = st.builds(
    Signals, window=st.builds(Window, st.just(0), st.sampled_from([0, 1, 600 * 10**9])), slo_s=st.sampled_from([0.0, 1.0]),
    version=st.sampled_from([None, VERSION]), versions=st.just(()), measure_again=st.sampled_from([None, "measure again"]),
    quality=st.just(Quality()), total=maybe(GROUP), replicas=st.dictionaries(NAMES, GROUP, max_size=3), tenants=st.just({}),
    adapters=st.dictionaries(ADAPTERS, GROUP, max_size=6), classes=st.just({}),
)  # fmt: skip
PLACES = st.builds(ReplicaFacts, slots=maybe(HUGE), host_entries=maybe(HUGE), kv_tokens=maybe(HUGE))
FACTS = st.builds(
    Facts,
    replicas=st.dictionaries(NAMES, PLACES, max_size=3),
    adapter_bytes=st.dictionaries(ADAPTERS, HUGE, max_size=3),
)


@settings(deadline=None, max_examples=60)
@given(SIGNALS, maybe(SIGNALS), FACTS)
def test_there_is_an_answer_and_all_of_it_rests_on_rows(now: Signals, base: Signals | None, facts: Facts) -> None:
    found = diagnose(now, base, facts)
    assert [finding.number for finding in found.findings] == [1, 2, 3, 4, 5]
    rows = {row.name: row for finding in found.findings for row in finding.evidence}
    numbers = [
        (row.name, each) for row in rows.values() for each in (row.value, row.baseline) if isinstance(each, int | float)
    ]
    assert not [(name, number) for name, number in numbers if not math.isfinite(number)]
    for claim in (*found.claims, *found.details, *found.remedies, *found.not_helping):
        assert claim.evidence
        assert all(rows[name].value is not None for name in claim.evidence)
        assert claim.text.isascii()
        assert claim.text.isprintable()
    if found.pool != "nothing":
        assert found.claims
        assert found.remedies
        assert found.not_helping
    assert found.sentence.isascii()
    assert found.sentence.isprintable()
    assert not (found.confidence == "high" and found.doubts[1:])
    assert msgspec.json.decode(msgspec.json.encode(found), type=Diagnosis) == found
    played(found)


def played(found: Diagnosis) -> None:
    words = shlex.split(found.experiment.command)
    policies = [after for word, after in pairwise(words) if word == "--policy"]
    axes = [after for word, after in pairwise(words) if word == "--set"]
    assert len(combinations(parse_axes(policies, axes), "bounded-affinity")) >= 2


@given(SIGNALS, maybe(SIGNALS), FACTS)
@settings(deadline=None, max_examples=10)
def test_the_answer_is_the_same_again(now: Signals, base: Signals | None, facts: Facts) -> None:
    assert diagnose(now, base, facts) == diagnose(now, base, facts)
